"""User code that a recipe imports: copies in a run's folder, and imports that need permission."""

import contextlib
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tltlab.config import leaves
from tltlab.errors import ConfigError
from tltlab.files import write_file
from tltlab.own import OwnPart, allowed_modules, paths_in

from .sections import RolloutConfig, Sections

CODE = "code"
"""Folder of a run with copies of the user's own modules."""
_IMPORTS = re.compile(
    "trust_remote_code|logits_processors|tokenizer_mode|hf_overrides|model_class_overrides|model_loader_extra_config"
    r"|log_config_file|\w+_(?:cls|plugin|module_path)"
)
"""Arguments by which vLLM imports the modules they name."""
_IMPORT_PATH = re.compile(r"[A-Za-z_][\w.:]*[.:][A-Za-z_]\w*")
"""Path of a class or function; drafts such as ngram:4 do not match."""


def keep_code(code: Sequence[str], modules: Iterable[str], run: Path) -> None:
    """Copy modules in the folders `code`, and their imports from there, to RUN/code.

    A resumed run keeps the copies that it has where they come first in `code`. Imports are found in the source, of
    modules and of packages with an __init__.py; files that the code reads are not copied.
    """
    from modulefinder import ModuleFinder

    copies = (Path(run) / CODE).resolve()
    resumed = str(copies) in code[:1]
    for folder in (Path(folder).resolve() for folder in code):
        if folder == copies:
            continue
        finder = ModuleFinder(path=[str(folder)], excludes=["tltlab"])
        for name in modules:
            with contextlib.suppress(ImportError, SyntaxError, OSError):
                finder.import_hook(name)
        for name, module in finder.modules.items():
            file = Path(getattr(module, "__file__", None) or "")
            loaded = getattr(sys.modules.get(name), "__file__", None)
            target = copies / file.relative_to(folder) if file.is_relative_to(folder) else None
            # Python prefers an installed module of the same name.
            elsewhere = loaded is not None and Path(loaded).resolve() != file
            if target is not None and not elsewhere and not (resumed and target.exists()):
                write_file(target, file.read_bytes())


def refuse_code(run: Path, names: Iterable[str]) -> None:
    """Raise ConfigError where `names`, imported for the recipe of a run's folder, are not all allowed.

    Allowed are those of --allow-code (`tltlab.own.code_allowed`) and TLTLAB_ALLOW_CODE.
    """
    if missing := [name for name in dict.fromkeys(names) if name not in allowed_modules()]:
        options = " ".join(f"--allow-code {name}" for name in missing)
        raise ConfigError(
            f"the recipe of {run} imports {', '.join(missing)}, from {Path(run) / CODE} first, and a run's folder does "
            f"not choose what is imported: where you trust it, pass {options}"
        )


def code_of(recipe: Sections) -> Iterator[str]:
    """Modules that do not come with tltlab, and arguments of vLLM, by which training imports code."""
    rollout = recipe.rollout
    rewards = [term.path for term in recipe.reward_terms]
    own = paths_in(f"{rollout.policy} {rollout.placement} {rollout.planner}")
    for path in (*rewards, recipe.train.advantage or "", recipe.train.objective, *own):
        yield from _foreign(path)
    yield from rollout.allow_code
    yield from code_of_engines(rollout)


def code_of_engines(rollout: RolloutConfig) -> Iterator[str]:
    """The part of `code_of` that rollouts alone import."""
    for drafter in rollout.drafters.values():
        if isinstance(drafter, OwnPart):
            yield from _foreign(drafter.path)
    if rollout.environment is not None:
        yield from _foreign(rollout.environment.path)
    for argument, value in rollout.vllm.items():
        parts = [(argument, value), *leaves(value, argument, in_lists=True)]
        names = [name.rpartition(".")[2] for name, part in parts if part]
        if any(map(_IMPORTS.fullmatch, names)) or any(_IMPORT_PATH.fullmatch(str(part)) for _, part in parts if part):
            yield f"rollout.vllm.{argument}"


def _foreign(path: str) -> Iterator[str]:
    """The module of `package.module:name`, unless tltlab has it; a built-in has no colon."""
    module, colon, _ = path.partition(":")
    if colon and not f"{module}.".startswith("tltlab."):
        yield module
