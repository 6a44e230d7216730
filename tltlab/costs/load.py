"""Cost models by name or file: the presets that ship with the package, and JSON files of any kind."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter

from tltlab.config import dotted, faults_in
from tltlab.errors import ConfigError
from tltlab.files import read_json

from .base import CostModel, LinearCosts
from .roofline import RooflineCosts
from .table import TableCosts

_File = Annotated[LinearCosts | RooflineCosts | TableCosts, Field(discriminator="kind")]
_FILE: TypeAdapter[LinearCosts | RooflineCosts | TableCosts] = TypeAdapter(_File)


def presets() -> list[str]:
    """Names of the cost models that ship with the package."""
    return sorted(f.name.removesuffix(".json") for f in (files("tltlab.costs") / "presets").iterdir())


def load_costs(source: CostModel | dict[str, Any] | str | Path) -> CostModel:
    """Return a cost model from itself, a dict, the name of a preset or a JSON file.

    >>> load_costs("cpu-small").base_s
    0.00324
    """
    if isinstance(source, CostModel):
        return source
    where = "costs"
    value: Any = source
    if isinstance(source, str | Path):
        where = str(source)
        value = _read(source)
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: a cost model is an object with 'kind' and terms, not {type(value).__name__}")
    # The first part of a place is the kind.
    with faults_in(where, lambda place: dotted(place[1:])):
        try:
            return _FILE.validate_python({"kind": "linear"} | value)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error


def _read(source: str | Path) -> Any:
    if isinstance(source, str) and source in presets():
        return json.loads((files("tltlab.costs") / "presets" / f"{source}.json").read_text())
    if not Path(source).exists():
        raise ConfigError(f"no cost model at {source}: give a JSON file or one of the presets {', '.join(presets())}")
    return read_json(Path(source))
