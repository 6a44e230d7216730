"""Costs by name or file: the presets that ship with the package, and JSON files of any kind."""

from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, TypeAdapter

from tltlab.config import Place, dotted, validated
from tltlab.errors import ConfigError
from tltlab.files import read_json
from tltlab.own import OwnPart
from tltlab.records import Json

from .base import CostModel
from .linear import LinearCosts
from .profiles import named_costs, profiles
from .roofline import RooflineCosts
from .scaled import ScaledCosts
from .stages import RooflineStages, StageCosts
from .table import TableCosts

_COSTS: TypeAdapter[LinearCosts | RooflineCosts | TableCosts | ScaledCosts] = TypeAdapter(
    Annotated[LinearCosts | RooflineCosts | TableCosts | ScaledCosts, Field(discriminator="kind")]
)
_STAGES: TypeAdapter[Any] = TypeAdapter(
    Annotated[
        Annotated[StageCosts | RooflineStages, Field(discriminator="kind")],
        AfterValidator(lambda costs: costs.build() if isinstance(costs, RooflineStages) else costs),
    ]
)


def presets() -> list[str]:
    """Names of the cost models that ship with the package."""
    return list(_shipped("presets"))


class OwnCosts(OwnPart):
    """A cost model class of the user's own."""

    base = CostModel
    part = "cost model"
    contract = "check_costs"


def load_costs(source: CostModel | type[CostModel] | Json | str | Path) -> CostModel:
    """Return a cost model from itself, a dict, the name of a preset or a JSON file, or of an engine profile.

    `ENGINE:GPUS:MODEL[:WEIGHTS[:KV]]` is an engine's profile for a model (`tltlab.costs.profiles`), and
    `module:Class(key=value,...)` a user's own class, as is the class itself or an instance: it must pass
    `tltlab.testing.check_costs`.

    >>> load_costs("cpu-small").base_s
    0.00324
    """
    if isinstance(source, str) and (named := named_costs(source)) is not None:
        return named
    own: CostModel | None = OwnCosts.resolve(source)
    if own is not None:
        return own
    assert not isinstance(source, CostModel | type)
    origin, value = _read(source, "presets", "costs", "cost model")
    return validated(_COSTS, value, origin, _without_kind)


def load_stages(source: StageCosts | Json | str | Path) -> StageCosts:
    """Return stage costs from themselves, a dict, the name of a preset or a JSON file; ConfigError for a bad one.

    >>> load_stages({"kind": "roofline", "gpu": "H100", "model": "Qwen2.5-7B", "num_gpus": 8}).num_gpus
    8
    """
    if isinstance(source, StageCosts):
        return source
    origin, value = _read(source, "stage_presets", "stages", "stage costs")
    costs: StageCosts = validated(_STAGES, value, origin, _without_kind)
    return costs


def _without_kind(place: Place) -> str:
    return dotted(place[1:])


def _shipped(folder: str) -> dict[str, Path]:
    """Files of a folder of this package by name."""
    paths = (Path(__file__).parent / folder).iterdir()
    return {path.stem: path for path in sorted(paths, key=lambda path: path.stem)}


def _read(source: Json | str | Path, folder: str, name: str, kind: str) -> tuple[str, Json]:
    """Name of a source in error messages, and its value, linear where that does not say."""
    value: Any = source
    if isinstance(source, str | Path):
        name, shipped = str(source), _shipped(folder)
        path = shipped.get(name, Path(source))
        if not path.exists():
            engines = ", ".join(profiles().engines)
            others = f", ENGINE:GPUS:MODEL with one of {engines}, or module:Class" if folder == "presets" else ""
            names = ", ".join(shipped)
            raise ConfigError(f"no {kind} at {source}: give a JSON file or one of the presets {names}{others}")
        value = read_json(path)
    if not isinstance(value, dict):
        raise ConfigError(
            f"{name} holds no {kind}: expected an object with 'kind' and terms, not {type(value).__name__}"
        )
    return name, {"kind": "linear"} | value
