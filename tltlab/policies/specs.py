"""Settings of selectors as they stand in a policy file: checked when they are read, built when they are needed."""

from __future__ import annotations

import ast
import difflib
import importlib
import inspect
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.abc import InspectLoader
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union

import numpy as np
from pydantic import Field

from tltlab.config import FiniteModel
from tltlab.errors import ConfigError
from tltlab.files import found_in
from tltlab.testing import check_selector

from .adaptive import Adaptive
from .bandits import EpsilonGreedy, Hedge, Ucb1
from .beg_mab import BegMab
from .beg_mab import Bucket as Bucket
from .goodput import Goodput
from .selector import Selector, SelectorSpec
from .simple import AcceptLadder, BatchTable, Explore, Fixed, NoSpeculation
from .simple import TableRow as TableRow

_PACKAGE = str(Path(__file__).parents[1]) + os.sep
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib")})
ALLOW_CODE = "TLTLAB_ALLOW_CODE"
"""The variable of the environment with modules that files may name, with commas between."""
_allowed: ContextVar[frozenset[str]] = ContextVar("allowed", default=frozenset())


@contextmanager
def code_allowed(modules: Iterable[str]) -> Iterator[None]:
    """Within, policy files may name classes of these modules, besides those of `TLTLAB_ALLOW_CODE`."""
    token = _allowed.set(_allowed.get() | frozenset(modules))
    try:
        yield
    finally:
        _allowed.reset(token)


def allowed_modules() -> frozenset[str]:
    """Modules that `code_allowed` or the environment names."""
    return _allowed.get() | frozenset(filter(None, os.environ.get(ALLOW_CODE, "").split(",")))


SELECTORS: tuple[type[Selector], ...] = (
    NoSpeculation, Fixed, BatchTable, AcceptLadder, Explore, EpsilonGreedy, Ucb1, Hedge, BegMab, Goodput, Adaptive,
)  # fmt: skip
"""Selectors that policy files know by their kind."""

NoneSpec = NoSpeculation.Spec
FixedSpec = Fixed.Spec
TableSpec = BatchTable.Spec
ExploreSpec = Explore.Spec
BegMabSpec = BegMab.Spec
AdaptiveSpec = Adaptive.Spec


class CustomSpec(FiniteModel):
    """A selector class of the user's own: `path` is "package.module:Class", `args` go to its constructor by name.

    The class may take `rng`, a numpy Generator, and must then draw from nothing else. Modules are looked up as usual
    and last in the current folder, here and in a run's actors.
    """

    kind: Literal["custom"] = "custom"
    path: str = Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")
    args: dict[str, Any] = Field(default={})

    def build(self, rng: np.random.Generator) -> Selector:
        return build_class(self.load(), rng, self.args, self.path)

    @property
    def module(self) -> str:
        """The module that building the selector imports."""
        return self.path.partition(":")[0]

    def load(self) -> type[Selector]:
        """Import the class; ConfigError when there is none or it is no Selector.

        A module of Python itself is not imported for it, nor one whose source has no such name: some do things when
        they are.
        """
        module_name, _, name = self.path.partition(":")
        if module_name.partition(".")[0] in sys.stdlib_module_names:
            raise ConfigError(f"policy {self.path}: {module_name} is a module of Python itself, which has no selectors")
        try:
            with found_in([os.getcwd()]):
                if (file := _lacks(module_name, name)) is not None:
                    raise ConfigError(f"policy {self.path}: {module_name} ({file}) has no {name}")
                module = importlib.import_module(module_name)
        except ConfigError:
            raise
        except (Exception, SystemExit) as error:  # whatever a user's module does while it is imported
            raise ConfigError(
                f"policy {self.path}: cannot import {module_name}: {type(error).__name__}: {error}"
            ) from error
        cls = getattr(module, name, None)
        if cls is None:
            raise ConfigError(f"policy {self.path}: {module_name} ({module.__file__}) has no {name}")
        if not (isinstance(cls, type) and issubclass(cls, Selector)):
            raise ConfigError(f"policy {self.path}: {name} is not a subclass of tltlab.policies.selector.Selector")
        return cls

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
        """Run the contract suite on the class; ConfigError with the first broken promise."""
        check_contract(self.build, self.path)


def _lacks(module: str, name: str) -> str | None:
    """The file of a module that binds no such name at its top level; None where it may. Nothing is imported."""
    if module in sys.modules:
        return None
    path, parent = None, ""
    for part in module.split("."):
        parent = f"{parent}.{part}" if parent else part
        spec = PathFinder.find_spec(parent, path)
        if spec is None:
            return None
        path, loader, file = spec.submodule_search_locations, spec.loader, str(spec.origin)
    try:
        source = loader.get_source(module) if isinstance(loader, InspectLoader) else None
        tree = ast.parse(source or "*")
    except (ImportError, SyntaxError, ValueError, RecursionError):
        return None  # importing it says more
    words = {word for node in ast.walk(tree) for word in _bound(node)}
    return None if {name, "*", "__getattr__"} & words else file


def _bound(node: ast.AST) -> Iterator[str]:
    """Names that a piece of source may bind."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        yield node.name
    elif isinstance(node, ast.Name):
        yield node.id
    elif isinstance(node, ast.alias):
        yield node.asname or node.name


def build_class(cls: type[Selector], rng: np.random.Generator, args: Mapping[str, Any], name: str) -> Selector:
    """A selector of a user's own class, with `rng` where it takes one; ConfigError for arguments that do not fit."""
    signature = inspect.signature(cls)
    arguments = {**args, "rng": rng} if "rng" in signature.parameters else dict(args)
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise ConfigError(f"{name} cannot be built with args {dict(args)}: {error}") from error
    return cls(**arguments)


def check_contract(build: Callable[[np.random.Generator], Selector], name: str) -> None:
    """ConfigError with the first promise of `Selector` that what `build` makes breaks, or with what it raises."""
    try:
        # What drafters there are is known where the policy runs.
        check_selector(build, drafters=None)
    except AssertionError as error:
        raise ConfigError(f"policy {name} breaks the contract of Selector: {error}") from error
    except ConfigError:
        raise
    except Exception as error:  # whatever a user's class raises
        raise raised(error, name) from error


def raised(error: Exception, name: str) -> ConfigError:
    """What a user's class of that `name` raised, in a line: its own file and line, and what it may have meant."""
    frames = traceback.extract_tb(error.__traceback__)
    user_frames = [frame for frame in frames if not frame.filename.startswith((_PACKAGE, *_INSTALLED, "<frozen"))]
    last = (user_frames or frames)[-1]
    location = f"{Path(last.filename).name}, line {last.lineno}"
    guesses: list[str] = []
    if isinstance(error, AttributeError) and error.name and error.obj is not None:
        guesses = difflib.get_close_matches(error.name, [word for word in dir(error.obj) if word[0] != "_"], n=1)
    elif isinstance(error, NameError) and error.name:
        innermost = [frame for frame, _ in traceback.walk_tb(error.__traceback__)][-1]
        guesses = difflib.get_close_matches(error.name, [*innermost.f_locals, *innermost.f_globals], n=1)
    hint = f"; did you mean {guesses[0]!r}?" if guesses else ""
    return ConfigError(f"policy {name} raised {type(error).__name__}: {error}{hint} ({location})")


def from_user(error: Exception) -> bool:
    """Whether an exception came out of code that we called and that is neither ours nor of an installed package."""
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    ours = max((n for n, file in enumerate(files) if file.startswith(_PACKAGE)), default=-1)
    return any(not file.startswith((*_INSTALLED, "<frozen")) for file in files[ours + 1 :])


if TYPE_CHECKING:
    AnySelectorSpec = SelectorSpec | CustomSpec
else:
    AnySelectorSpec = Annotated[Union[(*(cls.Spec for cls in SELECTORS), CustomSpec)], Field(discriminator="kind")]
