"""The table of systems from the literature, one row each (`systems.toml`): compositions of the core's parts."""

import tomllib
from collections.abc import Sequence
from importlib.resources import files

from pydantic import TypeAdapter

from tltlab.config import validated
from tltlab.drafters.specs import SYSTEM_DRAFTERS
from tltlab.errors import ConfigError, did_you_mean
from tltlab.own import split
from tltlab.records import Json

from . import composition
from .composition import System

_SYSTEM = TypeAdapter(System)


def _system(row: Json) -> System:
    """Return a row of `systems.toml` with the parts that it names; ConfigError for a faulty one."""
    parts = {name: getattr(composition, row[name]) for name in ("selector", "budget") if name in row}
    specs = tuple((drafter, SYSTEM_DRAFTERS[name]) for drafter, name in row.get("specs", {}).items())
    return validated(_SYSTEM, dict(row, **parts, specs=specs), f"systems.toml: {row['name']}")


_ROWS = tomllib.loads(files("tltlab.planning").joinpath("systems.toml").read_text("utf-8"))["system"]
SYSTEMS = {row["name"]: _system(row) for row in _ROWS}
"""The rows, by name.

SpecActor (arXiv 2511.16193) has none: its drafters run ahead on GPUs of their own while others verify, and here an
iteration drafts, then verifies, on one engine.
"""


def find_systems(names: str | Sequence[str | System] = "all") -> tuple[System, ...]:
    """The systems of "all", of names with commas between, or of a sequence; ConfigError for an unknown or double name.

    >>> [system.title for system in find_systems("verl,tlt")]
    ['VeRL', 'TLT']
    """
    if isinstance(names, str):
        names = list(SYSTEMS) if names.strip() == "all" else split(names)
    systems = tuple(name if isinstance(name, System) else find_system(name) for name in names)
    chosen = [system.name for system in systems]
    if not chosen:
        raise ConfigError(f"no system given; there are {', '.join(SYSTEMS)}, or all")
    if len(set(chosen)) < len(chosen):
        raise ConfigError(f"a system is given twice: {', '.join(chosen)}")
    return systems


def find_system(name: str) -> System:
    """Return the row of that name; ConfigError for an unknown one."""
    if name not in SYSTEMS:
        raise ConfigError(f"no system named {name!r}{did_you_mean(name, SYSTEMS)}; there are {', '.join(SYSTEMS)}")
    return SYSTEMS[name]
