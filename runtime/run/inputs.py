"""Digests of what a run began with, its model, code, prompts and answers: a resumed run has to have the same."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tltlab.errors import ConfigError
from tltlab.files import open_input, read_object, sealed, sha256_of, write_json
from tltlab.records import Json
from tltlab.runtime.data.prompts import Prompt
from tltlab.runtime.recipe.engines import model_file
from tltlab.runtime.recipe.recipe import Recipe
from tltlab.runtime.recipe.user_code import CODE

from .data import RunData

INPUTS = "inputs.json"
"""File of a run with the digests of its inputs."""
_OF_MODELS = re.compile(
    "(model|pytorch_model|config|generation_config|token|special_token|added_token|vocab|merges|chat_template).*"
    r"|.*\.safetensors"
)
_WHOLE_BYTES, _BLOCKS, _BLOCK_BYTES = 64 << 20, 256, 1 << 16
"""Size up to which a file is digested as a whole; of a larger one, blocks as far apart as each other."""


def check_inputs(recipe: Recipe, data: RunData, run: Path, *, resume: bool, allow_other: bool) -> list[str]:
    """Compare the inputs of a resumed run with those that it began with, and note them in its folder.

    Return the differences with `allow_other`; else ConfigError names the first. A run of an earlier version has no
    digests: nothing is compared.
    """
    sources = {"data.train": recipe.data.train}
    sources |= {f"data.heldout {name}".strip(): source for name, source in recipe.data.heldout_sets.items()}
    prompts = dict(zip(sources, [data.train, *data.heldout.values()], strict=True))
    files = _files(recipe, run)
    digests: Json = {place: _digest(path) for place, path in files.items()}
    digests |= {place: list(map(_digest_of_row, rows)) for place, rows in prompts.items()}
    before = read_object(run / INPUTS) if resume else {}
    differences = []
    for place, digest in digests.items():
        if (known := before.get(place, digest)) != digest:
            named = f"{place}, {sources.get(place) or files[place]}"
            differences.append(named + (_first_other(known, digest, prompts[place]) if place in prompts else ""))
    if differences and not allow_other:
        raise ConfigError(
            f"{run} began with another content of {differences[0]}: restore it, or continue with --allow-other-data"
        )
    write_json(run / INPUTS, sealed(before | digests))
    return differences


def _files(recipe: Recipe, run: Path) -> dict[str, Path]:
    """Return the files of the model, and the run's copies of the user's modules with their sources, by place."""
    folder, copies = model_file(recipe.model, "config.json").parent, (run / CODE).resolve()
    files = {f"model/{path.name}": path for path in sorted(folder.glob("*")) if _OF_MODELS.fullmatch(path.name)}
    for copy in sorted(copies.rglob("*.py")):
        name = copy.relative_to(copies)
        sources = [Path(code) / name for code in recipe.code if Path(code) != copies]
        files[f"{CODE}/{name}"] = copy
        files |= {f"source of {CODE}/{name}": source for source in sources[::-1] if source.is_file()}
    return files


def _first_other(before: Any, now: Sequence[str], rows: Sequence[Prompt]) -> str:
    """Return where the digests of prompts differ first."""
    if len(before) != len(now):
        return f", which had {len(before)} prompts and has {len(now)}"
    at = next(at for at, digest in enumerate(now) if digest != before[at])
    return f", from prompt {at} on (prompt_id {rows[at].prompt_id!r}, its text, answer or tokens)"


def _digest_of_row(prompt: Prompt) -> str:
    said = json.dumps([prompt.prompt_id, prompt.text, prompt.answer]).encode()
    tokens = np.asarray(prompt.token_ids, np.int64).tobytes()
    return hashlib.blake2b(said + tokens, digest_size=4).hexdigest()


def _digest(path: Path) -> str:
    """Return the SHA-256 of a file, of a large one that of its size and blocks of it."""
    if (size := path.stat().st_size) <= _WHOLE_BYTES:
        return sha256_of(path)
    digest = hashlib.sha256(str(size).encode())
    with open_input(path) as file:
        for at in np.linspace(0, size - _BLOCK_BYTES, _BLOCKS, dtype=np.int64).tolist():
            file.seek(at)
            digest.update(file.read(_BLOCK_BYTES))
    return digest.hexdigest()
