"""Whose code a run's folder names: a run that this user began goes on, of another one it is asked first.

A run's seal, `code.json`, is an HMAC-SHA256 of its recipe and of the copies of modules in RUN/code, under a key that
only this user can read (`~/.local/state/tltlab/key`, or in XDG_STATE_HOME).
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import secrets
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tltlab.errors import ConfigError, InputError
from tltlab.files import open_input, read_object, sha256_of, write_file, write_json

if TYPE_CHECKING:
    from .recipe import Recipe

SEAL = "code.json"
CODE = "code"
"""In a run's folder: copies of the user's own modules."""
_RUNS_CODE = ("trust_remote_code", "logits_processors", "tokenizer_mode", "hf_overrides", "model_loader_extra_config")
"""Arguments of vLLM's by which it imports what they name, beside those that end in _cls."""


def keep_code(recipe: Recipe, modules: Iterable[str], run: Path) -> None:
    """Copy the modules that came from the recipe's folders of code, and what they import there, to RUN/code.

    A run that goes on keeps what it has: it does so with the code that it began with. Found are imports that stand in
    the code, of modules and of packages with an __init__.py, not files that it reads.
    """
    from modulefinder import ModuleFinder

    copies = (Path(run) / CODE).resolve()
    goes_on = str(copies) in recipe.code
    for folder in (Path(folder).resolve() for folder in recipe.code):
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
            # Python finds what is installed first, whatever has its name there.
            elsewhere = loaded is not None and Path(loaded).resolve() != file
            if target is not None and not elsewhere and not (goes_on and target.exists()):
                write_file(target, file.read_bytes())


def seal_code(run: Path) -> None:
    """Note that this user began the run in this folder; nothing where no key can be kept."""
    try:
        write_json(run / SEAL, {"hmac": _hmac(_key(make=True), run)})
    except (OSError, InputError):
        return


def refuse_foreign_code(run: Path, recipe: Mapping[str, Any], allow_code: Sequence[str]) -> None:
    """ConfigError where the run's recipe names code that its seal does not say to be this user's, nor `allow_code`."""
    modules = [name for name in dict.fromkeys(_modules(recipe)) if name not in allow_code]
    if not modules or _is_own(run):
        return
    options = " ".join(f"--allow-code {name}" for name in modules)
    raise ConfigError(
        f"{run} is not a run that you began here, or it was changed since: going on with it runs code of "
        f"{', '.join(modules)}, from {run / CODE} first. Read that, and then say {options}"
    )


def _is_own(run: Path) -> bool:
    seal = read_object(run / SEAL).get("hmac")
    try:
        return isinstance(seal, str) and hmac.compare_digest(seal.encode(), _hmac(_key(), run).encode())
    except OSError:
        return False


def _modules(recipe: Mapping[str, Any]) -> Iterator[str]:
    """What the recipe would have imported that does not come with tltlab."""
    rewards = recipe.get("reward")
    rollout = recipe.get("rollout")
    rollout = rollout if isinstance(rollout, dict) else {}
    names = [term.get("path") if isinstance(term, dict) else term for term in _as_list(rewards)]
    names += [rollout.get("policy"), *_as_list(rollout.get("allow_code"))]
    for name in names:
        module, colon, _ = str(name or "").partition(":")
        # A policy that is shipped, or a file, names no module by itself.
        if module and (colon or name in _as_list(rollout.get("allow_code"))) and not f"{module}.".startswith("tltlab."):
            yield module
    vllm = rollout.get("vllm")
    for name, value in (vllm if isinstance(vllm, dict) else {}).items():
        if value and (name in _RUNS_CODE or str(name).endswith("_cls")):
            yield f"rollout.vllm.{name}"


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _hmac(key: bytes, run: Path) -> str:
    code = run / CODE
    paths = [path for path in sorted(code.rglob("*")) if path.is_file() and path.parent.name != "__pycache__"]
    files = {str(path.relative_to(code)): sha256_of(path) for path in paths}
    sealed = {"recipe": read_object(run / "run.json").get("recipe"), "files": files}
    return hmac.new(key, json.dumps(sealed, sort_keys=True).encode(), hashlib.sha256).hexdigest()


def _key(*, make: bool = False) -> bytes:
    """This user's key. Raises OSError where there is none, or none that only this user can read."""
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    path = Path(state) / "tltlab" / "key"
    if make and not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        new = path.with_name(f"key.{os.getpid()}.{secrets.token_hex(4)}")
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.write(descriptor, secrets.token_bytes(32))
            # Of two processes at once the first one's stays.
            os.link(new, path)
        except FileExistsError:
            pass
        finally:
            os.close(descriptor)
            new.unlink()
    with open_input(path) as file:
        status = os.fstat(file.fileno())
        if status.st_uid != os.getuid() or status.st_mode & 0o077:
            raise PermissionError(f"{path} can be read by others")
        key = file.read(32)
    if len(key) < 32:
        raise OSError(f"{path} is no whole key")
    return key
