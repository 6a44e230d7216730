"""Options of commands, keywords in Python, TOML files and JSON from one frozen dataclass, or model of pydantic.

A field with an `option` is on the command line; `check` in `__post_init__` refuses the same values from everywhere:

    @frozen
    class Drawing:
        prompts: int = option("Prompts per RL step.", 64, min=1)
        costs: CostModel | str | None = option("Cost file or preset.")

        def __post_init__(self) -> None:
            check(self)

`command` turns a parameter of that type into the options `--prompts` and `--costs`, and adds `--settings FILE.toml`,
whose keys are names of fields. `Without` leaves out fields of one command, or changes their options:

    @command
    def draw(trace: Path, drawing: Annotated[Drawing, Without("costs", prompts=Option(default=8))]) -> None: ...

Fields of a model of pydantic, and types that several settings share, are `Annotated` with an `Option` instead.
`to_json` gives the settings for `--json`.
"""

import inspect
import math
import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, MISSING, Field, dataclass, field, fields, is_dataclass, replace
from functools import cache, wraps
from inspect import Parameter
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel

from .config import faults_in, shown
from .errors import ConfigError, did_you_mean
from .files import read_text
from .records import Json

_WORDS = {
    bool: "true or false", int: "a whole number", float: "a number", str: "text", Path: "a path", list: "a list",
    tuple: "a list", Sequence: "a list", dict: "a table", Mapping: "a table",
}  # fmt: skip
_LISTS = frozenset({list, tuple, Sequence})
_PLAIN = frozenset(_WORDS) - {Path}
_MOST_BYTES = 1 << 20


@dataclass(frozen=True)
class Option:
    """A field's option: its help, and what differs from `--name-of-the-field` with a value of the field's type.

    `parse` makes a value of text, wherever the text comes from. `cli` is the type on the command line: text for a union
    of types. `min` is the least number, `max` the largest, `choices` are the words to choose from. `default` replaces
    the field's default in one command (see `Without`); `...` keeps that. `options_of` fills in `kinds`, the field's
    types.
    """

    help: str = ""
    _: KW_ONLY
    names: tuple[str, ...] = ()
    parse: Callable[[str], Any] | None = None
    cli: Any = None
    choices: tuple[str, ...] = ()
    min: float | None = None
    max: float | None = None
    metavar: str | None = None
    default: Any = ...
    kinds: frozenset[Any] = frozenset()

    def checked(self, name: str, value: Any) -> Any:
        """Return the value, parsed where it is text; ConfigError where the field `name` does not take it."""
        if self.parse is not None and isinstance(value, str):
            value = self.parse(value)
        if not self._takes(value):
            words = dict.fromkeys(_WORDS.get(kind, getattr(kind, "__name__", str(kind))) for kind in self.kinds)
            raise ConfigError(f"{name} is {shown(value)}: give {' or '.join(sorted(words))}")
        if self.choices and value not in self.choices:
            raise ConfigError(f"{name} is {shown(value)}; there are {', '.join(self.choices)}")
        if self.min is not None and not value >= self.min:
            raise ConfigError(f"{name} must be at least {self.min}, got {value}")
        if self.max is not None and not value <= self.max:
            raise ConfigError(f"{name} must be at most {self.max}, got {value}")
        return tuple(value) if isinstance(value, list) and tuple in self.kinds else value

    def _takes(self, value: Any) -> bool:
        kinds = self.kinds
        if Any in kinds:
            return True
        if isinstance(value, bool):
            return bool in kinds
        if isinstance(value, Integral):
            return not kinds.isdisjoint({int, float})
        if isinstance(value, Real):
            return float in kinds and math.isfinite(value)
        if isinstance(value, str):
            return not kinds.isdisjoint({str, Path})
        if isinstance(value, dict) and not kinds.isdisjoint({dict, Mapping}):
            return True
        if isinstance(value, Collection) and not kinds.isdisjoint(_LISTS):
            return self.cli != list[str] or all(isinstance(item, str) for item in value)
        return bool(kinds - _PLAIN) and not isinstance(value, dict | list)


def option(help: str, default: Any = None, **settings: Any) -> Any:
    """Return a field of a dataclass, or a parameter of a `command`, with this default and an `Option` of `settings`."""
    return field(default=default, metadata={"option": Option(help, **settings)})


ALLOW_CODE_OPTION: Any = option(
    "Allow importing what a file or a run names from this module; repeatable.", metavar="MODULE"
)
"""The parameter `allow_code: list[str] | None` of commands that import what files name."""


class Without:
    """Fields of the settings that a command does not take, and options of others, which replace only what they set."""

    def __init__(self, *names: str, **options: Option):
        self.names, self.options = names, options

    def apply(self, options: Mapping[str, Option]) -> dict[str, Option]:
        unknown = {*self.names, *self.options} - {*options}
        assert not unknown, f"no options named {', '.join(sorted(unknown))}"
        kept = {name: option for name, option in options.items() if name not in self.names}
        for name, change in self.options.items():
            changed = {key: value for key, value in vars(change).items() if value != getattr(Option, key)}
            kept[name] = replace(kept[name], **changed)
        return kept


@cache
def options_of(kind: Any) -> Mapping[str, Option]:
    """Return the options of a dataclass, or of a model of pydantic, by field, with the fields' types and defaults."""
    hints, found, marked = get_type_hints(kind, include_extras=True), {}, Json()
    if is_dataclass(kind):
        defaults = {each.name: ... if each.default is MISSING else each.default for each in fields(kind)}
        marked = {each.name: each.metadata.get("option") for each in fields(kind)}
    else:
        defaults = {name: ... if each.is_required() else each.default for name, each in kind.model_fields.items()}
    for name, default in defaults.items():
        hint, marks = hints[name], [marked.get(name)]
        if get_origin(hint) is Annotated:
            hint, *marks = get_args(hint)
        for mark in marks:
            if isinstance(mark, Option):
                found[name] = _completed(mark, hint, default)
    return found


def _completed(option: Option, hint: Any, default: Any) -> Option:
    types = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    named = [each for each in types if each is not NoneType]
    words = next((get_args(each) for each in named if get_origin(each) is Literal), option.choices)
    kinds = frozenset(str if get_origin(each) is Literal else get_origin(each) or each for each in named)
    cli: Any = str
    if len(named) == 1 and named[0] in (bool, int, float, str, Path):
        cli = named[0]
    elif kinds <= _LISTS and get_args(named[0])[0] is str:
        cli = list[str]
    return replace(option, choices=words, kinds=kinds, cli=option.cli or cli, default=default)


def check(settings: Any) -> None:
    """Parse and check the fields of a frozen dataclass that have options; for `__post_init__`. Raises ConfigError."""
    for name, option in options_of(settings.__class__).items():
        value = getattr(settings, name)
        if value is not None and (checked := option.checked(name, value)) is not value:
            object.__setattr__(settings, name, checked)


def to_json(settings: Any) -> Json:
    """Return the settings as JSON values by field; an object is its name, its kind, or its class."""
    return {each.name: _json(getattr(settings, each.name)) for each in fields(settings)}


def _json(value: Any) -> Any:
    if isinstance(value, bool | str | NoneType):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _json(item) for key, item in value.items()}
    if isinstance(value, list | tuple | range):
        return [_json(item) for item in value]
    named = getattr(value, "name", None) or getattr(value, "kind", None) or getattr(value, "__name__", None)
    return str(named or type(value).__name__)


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Return the function with the fields of its settings as parameters, for Typer and for callers in Python.

    Parameters whose default is an `option` are options too, which have no place in a settings file.
    """
    import typer

    taken: dict[str, tuple[type, dict[str, Option]]] = {}
    parameters: list[Parameter] = []
    own: Json = {}
    hints = get_type_hints(function, include_extras=True)
    for parameter in inspect.signature(function).parameters.values():
        hint = hints[parameter.name]
        kind = get_args(hint)[0] if get_origin(hint) is Annotated else hint
        if isinstance(parameter.default, Field):
            marked = _completed(parameter.default.metadata["option"], hint, parameter.default.default)
            parameters.append(_parameter(parameter.name, marked))
            own[parameter.name] = marked.default
        elif isinstance(kind, type) and (is_dataclass(kind) or issubclass(kind, BaseModel)):
            options: dict[str, Option] = dict(options_of(kind))
            for mark in getattr(hint, "__metadata__", ()):
                options = mark.apply(options)
            taken[parameter.name] = kind, options
            parameters += [_parameter(name, option) for name, option in options.items()]
        else:
            by_name = Parameter.KEYWORD_ONLY if taken or own else parameter.kind
            parameters.append(parameter.replace(annotation=hint, kind=by_name))
    about = "Options from a TOML file, by their names in Python; those of the command line win."
    file_option = Annotated[Path | None, typer.Option("--settings", metavar="FILE.toml", help=about)]
    if taken:
        parameters += [
            Parameter("settings_file", Parameter.KEYWORD_ONLY, default=None, annotation=file_option),
            Parameter("typer_context", Parameter.KEYWORD_ONLY, default=None, annotation=typer.Context),
        ]
    signature = inspect.Signature(parameters)

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> None:
        given = signature.bind(*args, **kwargs).arguments
        context, file = given.pop("typer_context", None), given.pop("settings_file", None)
        known = [name for _, options in taken.values() for name in options]
        read = {} if file is None else _read(file, known)
        for parameter, (kind, options) in taken.items():
            values = {name: option.default for name, option in options.items() if option.default is not ...}
            values |= {name: read[name] for name in options if name in read}
            for name in given.keys() & options.keys():
                value = given.pop(name)
                # Typer passes defaults too.
                if context is None or context.get_parameter_source(name).name == "COMMANDLINE":
                    values[name] = value
            with faults_in(file or function.__name__.replace("_", "-")):
                given[parameter] = kind(**values)
        function(**own | given)

    run.__signature__ = signature  # type: ignore[attr-defined]
    return run


def _parameter(name: str, option: Option) -> Parameter:
    import typer

    word = "--" + name.replace("_", "-")
    default = option.default if isinstance(option.default, bool | int | float | str | Path) else None
    # A flag has no --no-FLAG unless neither of them is the default.
    names = option.names or ((f"{word}/--no-{word[2:]}",) if option.cli is bool and default is None else (word,))
    info = typer.Option(*names, help=option.help, min=option.min, max=option.max, metavar=option.metavar)
    hint: Any = Annotated[option.cli if default is not None else option.cli | None, info]
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=hint)


def _read(path: Path, known: Iterable[str]) -> Json:
    """Return the values of a TOML file by field. Raises ConfigError, also for a key that is not `known`."""
    try:
        values = tomllib.loads(read_text(path, _MOST_BYTES))
    except OSError as error:
        raise ConfigError(f"cannot read settings {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"settings {path} are not TOML: {error}") from error
    names, read = sorted(known), {}
    for key, value in values.items():
        name = key.replace("-", "_")
        if name not in names:
            raise ConfigError(f"{path}: no setting {key!r}{did_you_mean(name, names)}; there are {', '.join(names)}")
        read[name] = value
    return read
