"""Parts of a user's own, named `module:Class` or `module:Class(key=value,...)`: loaded, built with arguments, checked.

A typed name may import any module; a name that stands in a file only those that `code_allowed` or the environment name.
"""

import copyreg
import importlib
import inspect
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import Field

from tltlab.records import Fields

from .config import FiniteModel, faults_in, json_or_text, shown
from .errors import ConfigError, did_you_mean
from .files import found_in
from .records import Json

_PACKAGE = str(Path(__file__).parent) + os.sep
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib")})
_PATH = r"[A-Za-z_][\w.]*:[A-Za-z_]\w*"
ALLOW_CODE = "TLTLAB_ALLOW_CODE"
"""The variable of the environment with modules that files may name, with commas between."""
_allowed: ContextVar[frozenset[str]] = ContextVar("allowed", default=frozenset())
_file: ContextVar[object] = ContextVar("file", default=None)


@contextmanager
def code_allowed(modules: Iterable[str]) -> Iterator[None]:
    """Within, files may name classes of these modules, besides those of `TLTLAB_ALLOW_CODE`."""
    token = _allowed.set(_allowed.get() | frozenset(modules))
    try:
        yield
    finally:
        _allowed.reset(token)


@contextmanager
def named_in(file: object) -> Iterator[None]:
    """Within, classes are named by `file`: ConfigError where one is loaded whose module is not allowed."""
    token = _file.set(file)
    try:
        yield
    finally:
        _file.reset(token)


def allowed_modules() -> frozenset[str]:
    """Modules that `code_allowed` or the environment names."""
    return _allowed.get() | frozenset(filter(None, os.environ.get(ALLOW_CODE, "").split(",")))


def split(text: str, between: str = ",") -> list[str]:
    """Parts of a list with commas, or another sign, between them except those in brackets; empty ones are left out.

    >>> split("none, goodput(window=100,epsilon=0.1)")
    ['none', 'goodput(window=100,epsilon=0.1)']
    """
    parts, depth = [""], 0
    for char in text:
        depth += (char in "([{") - (char in ")]}")
        parts = [*parts, ""] if char == between and not depth else [*parts[:-1], parts[-1] + char]
    return [part.strip() for part in parts if part.strip()]


def is_own(part: object) -> bool:
    """True for a class, and an object of one, that is not tltlab's."""
    return not (part if isinstance(part, type) else type(part)).__module__.startswith("tltlab.")


def parse_call(text: str) -> tuple[str, Json]:
    """Name and arguments of `name(key=value,...)`; a name alone has none. Values are JSON, or else text.

    ConfigError for an argument without a key, and one that comes twice.

    >>> parse_call("goodput(window=100,costs=cpu-small)")
    ('goodput', {'window': 100, 'costs': 'cpu-small'})
    """
    call = re.fullmatch(r"([\w.:-]+)\((.*)\)", text, re.DOTALL)
    if call is None:
        return text, {}
    args: Json = {}
    for part in split(call[2]):
        key, equals, value = (word.strip() for word in part.partition("="))
        if not equals or not key.isidentifier() or key in args:
            wrong = "comes twice" if key in args else "is no key=value"
            raise ConfigError(f"{text}: the argument {part!r} {wrong}, as in {call[1]}(key=value)")
        args[key] = json_or_text(value)
    return call[1], args


def paths_in(text: str) -> list[str]:
    """Each `module:name` in a text, such as in the arguments of a policy.

    >>> paths_in("goodput(costs=mine:Costs)"), paths_in("ngram:4"), paths_in("vllm:8xH100:Qwen3-32B")
    (['mine:Costs'], [], [])
    """
    return re.findall(rf"(?<![\w.:]){_PATH}(?![\w.:])", text)


class OwnPart(FiniteModel):
    """A class of the user's own: `path` is "package.module:Class", `args` go to its constructor by name.

    A subclass defines the requirement: a subclass of `base` that passes `contract`, a check of `tltlab.testing`;
    messages call it a `part`. Modules are looked up as usual, last in the current folder, here and in a run's actors.
    """

    base: ClassVar[type]
    part: ClassVar[str]
    contract: ClassVar[str]
    contract_args: ClassVar[Fields] = {}

    kind: Literal["custom"] = "custom"
    path: str = Field(pattern=rf"^{_PATH}$")
    args: Json = Field(default={})

    @classmethod
    def parse(cls, text: object) -> Self | None:
        """The part that a user typed as `module:Class` or `module:Class(key=value,...)`; None for another text."""
        if not isinstance(text, str) or not re.fullmatch(rf"{_PATH}(\(.*\))?", text, re.DOTALL):
            return None
        path, args = parse_call(text)
        return cls(path=path, args=args)

    @classmethod
    def of_class(cls, own: type) -> Self:
        """The part that a class is; ConfigError for one of another kind, or that other processes cannot import."""
        cls.check_kind(own)
        if own.__module__ == "__main__" or "." in own.__qualname__:
            place = "a script or notebook" if own.__module__ == "__main__" else "a function"
            raise ConfigError(
                f"{own.__name__} is defined in {place}, where other processes cannot find it: move it to a module "
                "(tltlab.sim takes policies as they are)"
            )
        return cls(path=f"{own.__module__}:{own.__qualname__}")

    @classmethod
    def resolve(cls, source: object) -> Any:
        """The checked object that a user means by `module:Class(...)`, a class or an instance; None for other sources.

        An instance comes back as it is. ConfigError for a class of another kind.
        """
        if (own := cls.parse(source)) is not None:
            own.check()
            return own.make()
        if isinstance(source, type):
            cls.check_kind(source)
            source = build_own(source, {}, f"{cls.part} {source.__name__}")
        elif not isinstance(source, cls.base):
            return None
        if is_own(source):
            cls.check_contract(source, type(source).__name__)
        return source

    @classmethod
    def check_kind(cls, own: type) -> None:
        """ConfigError for a class that is no subclass of `base`."""
        if not issubclass(own, cls.base):
            base = f"{cls.base.__module__}.{cls.base.__name__}"
            raise ConfigError(f"{own.__module__}:{own.__qualname__} is no {cls.part}: it is not a subclass of {base}")

    @property
    def module(self) -> str:
        """The module that building the part imports."""
        return self.path.partition(":")[0]

    @property
    def name(self) -> str:
        return f"{self.part} {self.path}"

    def load(self) -> type[Any]:
        """Import the class; ConfigError when there is none or it is no subclass of `base`."""
        if (file := _file.get()) is not None:
            self.refuse_unasked(file)
        with found_in([os.getcwd()]):
            cls = load_name(self.path, self.name)
        if not isinstance(cls, type):
            raise ConfigError(f"{self.name} is no class")
        self.check_kind(cls)
        # Other processes look the class up as this one did, and not among the modules that they know.
        copyreg.pickle(cls, partial(_reduced, type(self), self.path))
        return cls

    def make(self, rng: object = None) -> Any:
        """A fresh object of the class; it gets `rng` where its constructor takes one."""
        return build_own(self.load(), self.args, self.name, rng)

    def refuse_unasked(self, source: object) -> None:
        """ConfigError unless the user has allowed the module: what stands in a file must not choose what is imported.

        `source` is where it stands, for the message.
        """
        if self.module not in allowed_modules():
            raise ConfigError(
                f"{source} names {self.path}, a class that is not ours, which is not imported unasked: where you trust "
                f"it, {ALLOW_CODE}={self.module} in the environment (simulate, compare and verify take "
                f"--allow-code {self.module}, a recipe rollout.allow_code)"
            )

    def check(self) -> None:
        """Run the contract's check on the class; ConfigError with the first broken promise."""
        self.check_contract(self.make, self.path)

    @classmethod
    def check_contract(cls, source: Any, name: str) -> None:
        """ConfigError with the first promise of `base` that `source` breaks, or with what it raises.

        `source` is an object, or a function of a generator that makes one.
        """
        # By name: the checks import the parts that they are for.
        testing = importlib.import_module("tltlab.testing")
        try:
            getattr(testing, cls.contract)(source, **cls.contract_args)
        except AssertionError as error:
            raise ConfigError(f"{cls.part} {name} breaks the contract of {cls.base.__name__}: {error}") from error
        except ConfigError:
            raise
        except Exception as error:  # whatever a user's class raises
            raise raised(error, f"{cls.part} {name}") from error


def _reduced(kind: type[OwnPart], path: str, own: Any) -> tuple[Any, ...]:
    """Reduce an object of a user's own class for pickle."""
    reduced: Any = object.__reduce_ex__(own, 2)
    _, (_, *args), *state = reduced
    return (_restored, (kind, path, *args), *state)


def _restored(kind: type[OwnPart], path: str, *args: Any) -> Any:
    cls = kind(path=path).load()
    return cls.__new__(cls, *args)


def load_name(path: str, part: str) -> Any:
    """Import what `module:name` names; ConfigError, which begins with what `part` it is, where there is none.

    A module of Python itself is not imported for it: some do things when they are.
    """
    module_name, _, name = path.partition(":")
    if module_name.partition(".")[0] in sys.stdlib_module_names:
        raise ConfigError(f"{part}: {module_name} is a module of Python itself, which has no such part")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # whatever a user's module does while it is imported
        raise ConfigError(f"{part}: cannot import {module_name}: {type(error).__name__}: {error}") from error
    if not hasattr(module, name):
        raise ConfigError(f"{part}: {module_name} ({module.__file__}) has no {name!r}")
    return getattr(module, name)


def load_function(path: str, part: str, arguments: str) -> Callable[..., Any]:
    """Import the function `module:function` of `arguments`, such as "prompt, response".

    ConfigError, which begins with what `part` it is, for anything else.
    """
    module, colon, name = path.partition(":")
    if not (module and colon and name):
        raise ConfigError(f"{part} is not package.module:function")
    if module.endswith(".py"):
        raise ConfigError(f"{part} names a file: give its module, {Path(module).stem}:{name}")
    function = load_name(path, part)
    if not callable(function):
        raise ConfigError(f"{part} is not a function")
    try:
        inspect.signature(function).bind(*arguments.split(", "))
    except TypeError as error:
        raise ConfigError(f"{part} cannot be called as {name}({arguments}): {error}") from error
    except ValueError:
        pass  # a function written in C without a signature
    return function  # type: ignore[no-any-return]


def build_own(cls: type[Any], args: Fields, name: str, rng: object = None) -> Any:
    """An object of a user's own class, with `rng` where it takes one; ConfigError for arguments that do not fit."""
    parameters = inspect.signature(cls).parameters
    arguments = dict(args) | ({"rng": rng} if "rng" in parameters else {})
    try:
        inspect.signature(cls).bind(**arguments)
    except TypeError as error:
        near = "".join(did_you_mean(word, parameters) for word in args if word not in parameters)
        raise ConfigError(f"{name} cannot be built with args {shown(dict(args))}: {error}{near}") from error
    with faults_in(name):
        return cls(**arguments)


def raised(error: Exception, name: str) -> ConfigError:
    """Error in one line for a user's class `name` that raised: its own file and line, and a word that may be meant."""
    frames = traceback.extract_tb(error.__traceback__)
    user_frames = [frame for frame in frames if not frame.filename.startswith((_PACKAGE, *_INSTALLED, "<frozen"))]
    last = (user_frames or frames)[-1]
    location = f"{Path(last.filename).name}, line {last.lineno}"
    near = ""
    if isinstance(error, AttributeError) and error.name and error.obj is not None:
        near = did_you_mean(error.name, (word for word in dir(error.obj) if word[0] != "_"))
    elif isinstance(error, NameError) and error.name:
        innermost = [frame for frame, _ in traceback.walk_tb(error.__traceback__)][-1]
        near = did_you_mean(error.name, [*innermost.f_locals, *innermost.f_globals])
    return ConfigError(f"{name} raised {type(error).__name__}: {error}{near} ({location})")


def from_user(error: Exception) -> bool:
    """Return True if an exception came from code that tltlab called and that is neither tltlab's nor installed."""
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    ours = max((n for n, file in enumerate(files) if file.startswith(_PACKAGE)), default=-1)
    return any(not file.startswith((*_INSTALLED, "<frozen")) for file in files[ours + 1 :])
