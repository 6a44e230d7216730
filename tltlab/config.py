"""The models that settings and files are read into, and what is wrong with a value that they refuse, in one line."""

import inspect
import json
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, TypeVar, Union, Unpack, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator
from pydantic.fields import FieldInfo

from .errors import ConfigError, one_line
from .files import sealed, write_json
from .records import Json

MOST_CHARS = 60
_SELF_EXPLANATORY = ("missing", "extra_forbidden", "value_error", "union_tag_invalid", "union_tag_not_found")
"""Faults explained by their message or place: the value got is not shown again."""

Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, le=1)]
Place = tuple[int | str, ...]
_Value = TypeVar("_Value")
_Model = TypeVar("_Model", bound="FrozenModel")


class FrozenModel(BaseModel):
    """A value that is checked once, when it is made: immutable, and a name that it does not know is refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class FiniteModel(FrozenModel):
    """A `FrozenModel` whose numbers are neither infinite nor NaN, so that JSON can hold them."""

    model_config = ConfigDict(allow_inf_nan=False)


class StoredModel(FrozenModel):
    """A model that is its own JSON file."""

    def write(self, path: str | Path) -> Path:
        """Write the file in one move, sealed; its path."""
        write_json(Path(path), sealed(self.model_dump(mode="json")))
        return Path(path)


@dataclass(frozen=True)
class InFile:
    """Part of a parameter's annotation where a file has another form: its `type`, and what makes the argument of it."""

    type: Any
    argument: Callable[[Any], Any]


class Built(FiniteModel):
    """Settings of a class: the parameters of its constructor, which defines their types and defaults.

    A subclass names the class that it `builds`. A sequence is a tuple in the settings; an annotation with `InFile`
    gives the form in a file. `init=False` declares to type checkers that there are more fields. Values that the
    constructor refuses are refused when the settings are read.
    """

    _class: ClassVar[type]
    _arguments: ClassVar[dict[str, Callable[[Any], Any]]]
    _draws: ClassVar[bool]

    if TYPE_CHECKING:

        def __init__(self, **settings: Any): ...

    def __init_subclass__(cls, builds: type | None = None, init: bool = True, **config: Unpack[ConfigDict]) -> None:
        super().__init_subclass__(**config)
        if builds is None:
            return
        parameters = dict(inspect.signature(builds, eval_str=True).parameters)
        # The generator that a selector draws from is no setting.
        cls._draws = parameters.pop("rng", None) is not None
        cls._class, cls._arguments = builds, {}
        for name, parameter in parameters.items():
            form = _in_file(parameter.annotation)
            cls._arguments[name] = form.argument
            cls.__annotations__.setdefault(name, form.type)
            if name not in cls.__dict__ and parameter.default is not parameter.empty:
                setattr(cls, name, parameter.default)

    def arguments(self) -> Json:
        """Arguments of the constructor by name; ConfigError where a setting names nothing."""
        return {name: argument(getattr(self, name)) for name, argument in self._arguments.items()}

    def make(self, rng: object = None) -> Any:
        """A fresh object of the class; it draws from `rng` if it draws."""
        return self._class(**self.arguments(), **({"rng": rng} if self._draws else {}))

    def check(self) -> None:
        """ConfigError for settings that the constructor refuses."""
        self.make()

    @model_validator(mode="after")
    def _can_be_built(self) -> Self:
        try:
            self.check()
        except ConfigError as error:
            raise ValueError(str(error)) from error
        return self


def _in_file(annotation: Any) -> InFile:
    """Form of a parameter in a file."""
    if get_origin(annotation) is Annotated:
        for part in get_args(annotation):
            if isinstance(part, InFile):
                return part
    is_sequence = get_origin(annotation) is Sequence
    form = types.GenericAlias(tuple, (*get_args(annotation), ...)) if is_sequence else annotation
    return InFile(form, lambda value: value)


def json_or_text(text: str) -> Any:
    """The value that somebody typed: JSON where it is JSON (numbers, lists, true), else the text itself."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


@contextmanager
def faults_in(source: object, place: Callable[[Place], str] | None = None) -> Iterator[None]:
    """Within, what pydantic refuses is a ConfigError with all its faults that begins with `where`."""
    try:
        yield
    except ValidationError as error:
        raise ConfigError(f"{source}: {faults(error, place or dotted)}") from error


def validated(
    kind: TypeAdapter[_Value], value: object, source: object, place: Callable[[Place], str] | None = None
) -> _Value:
    """Return the value that `kind` makes of one in a file; what it or a class of ours refuses is a ConfigError."""
    with faults_in(source, place):
        try:
            return kind.validate_python(value)
        except ConfigError as error:
            raise ConfigError(f"{source}: {error}") from error


def entries(kind: type[_Model], rows: Iterable[Mapping[str, Any]], source: object) -> tuple[_Model, ...]:
    """Return the rows of a table as `kind`; ConfigError names the faulty row, by its name or its number from 1."""
    made = []
    for number, row in enumerate(rows, 1):
        with faults_in(f"{source}: entry {row.get('name', number)}"):
            made.append(kind.model_validate(row))
    return tuple(made)


def dotted(place: Place) -> str:
    """A place in nested data: its names and numbers with dots between them."""
    return ".".join(map(str, place))


def leaves(value: Any, path: str = "", *, in_lists: bool = False) -> Iterator[tuple[str, Any]]:
    """Each value in nested objects, or lists too, with its path, such as train.lr; an empty object is a value.

    >>> dict(leaves({"train": {"lr": 0.1}, "log": {}}))
    {'train.lr': 0.1, 'log': {}}
    """
    if isinstance(value, Mapping) and (value or not path):
        for key, inner in value.items():
            yield from leaves(inner, f"{path}.{key}" if path else str(key), in_lists=in_lists)
    elif in_lists and isinstance(value, list):
        for inner in value:
            yield from leaves(inner, path, in_lists=True)
    else:
        yield path, value


def faults(error: ValidationError, place: Callable[[Place], str] = dotted) -> str:
    """All faults, each with its place, which `place` writes; an empty one is left out. The value in the message is cut
    short.

    A fault in `base_s` reads "base_s: Input should be a valid number, unable to parse string as a number (got 'fast')".
    """
    return "; ".join(_fault(each, place(each["loc"])) for each in error.errors(include_url=False))


def shown(value: object) -> str:
    """A value's repr, cut to 60 characters.

    >>> shown("x" * 100)
    "'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx..."
    """
    text = repr(value)
    return text if len(text) <= MOST_CHARS else text[: MOST_CHARS - 3] + "..."


def whole_text(text: str) -> str:
    """Return the text with "?" for halves of surrogate pairs, which truncated or non-UTF-8 output contains.

    Tokenizers reject such halves.
    """
    return str.encode(text, errors="replace").decode()


def counted(number: int, noun: str) -> str:
    """A number with its noun, in the plural unless it is 1.

    >>> counted(1, "RL step"), counted(4, "RL step")
    ('1 RL step', '4 RL steps')
    """
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _fault(fault: Any, place: str) -> str:
    message = str(fault["msg"]).removeprefix("Value error, ")
    if fault["type"] == "union_tag_invalid":
        context = fault["ctx"]
        name = str(context["discriminator"]).strip("'")
        message = f"{name} is {shown(context['tag'])}, there are {context['expected_tags']}"
    elif fault["type"] == "union_tag_not_found":
        message = f"its {fault['ctx']['discriminator']} is missing"
    if fault["type"] not in _SELF_EXPLANATORY:
        message += f" (got {shown(fault['input'])})"
    return f"{place}: {message}" if place else message


WHOLE = "recipe"
"""Section of the settings outside of one."""


def settings_of(model: type[BaseModel], section: str = WHOLE) -> list[Json]:
    """A row for each setting, sections after settings outside of one; `about` is the section's docstring."""
    top, inner = [], []
    for name, field in model.model_fields.items():
        inside = name if section == WHOLE else f"{section}.{name}"
        part = section_of(field)
        if part is not None:
            inner += settings_of(part, inside)
            continue
        about = _about(model, name)
        top.append({"section": section, "name": name, "default": _default(field), "type": _type(field), "about": about})
    return top + inner


def section_of(field: FieldInfo) -> type[BaseModel] | None:
    """The model of a section: the field's type, or the only one beside None."""
    kinds = [kind for kind in (field.annotation, *get_args(field.annotation)) if kind is not type(None)]
    models = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
    plain = isinstance(field.annotation, type) or get_origin(field.annotation) in (Union, types.UnionType)
    return models[0] if plain and len(models) == 1 and len([k for k in kinds if isinstance(k, type)]) == 1 else None


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    return "none" if value is None else shown(value.model_dump(mode="json") if isinstance(value, BaseModel) else value)


def _type(field: FieldInfo) -> str:
    """The type as a person writes it, with the limits that the setting has."""
    limits = []
    for mark in field.metadata:
        for name, sign in (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<=")):
            if (limit := getattr(mark, name, None)) is not None:
                limits.append(f"{sign} {limit:g}")
    return " ".join([_type_text(field.annotation), ", ".join(limits)]).rstrip()


def _type_text(kind: Any) -> str:
    origin, inside = get_origin(kind), get_args(kind)
    if origin is Literal:
        return "|".join(map(str, inside))
    if origin in (Union, types.UnionType):
        return " or ".join(_type_text(member) for member in inside if member is not type(None))
    if origin is Annotated:
        return _type_text(inside[0])
    if origin in (tuple, list):
        return f"list of {_type_text(inside[0])}"
    if origin is dict:
        return "section"
    return str(getattr(kind, "__name__", kind)).replace("str", "text").replace("bool", "true|false")


def _about(model: type[BaseModel], name: str) -> str:
    """The sentence of the docstring that names the setting, without what a semicolon parts from it."""
    sentences = re.split(r"(?<=[.;])\s+(?![^()]*\))", one_line(model.__doc__ or ""))
    sentence = next((sentence for sentence in sentences if f"`{name}`" in sentence), "")
    begins = sentence.partition(" ")[0]
    return re.sub(r";$", ".", sentence[:1].upper() + sentence[1:] if begins.isalpha() else sentence)
