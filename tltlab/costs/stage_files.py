"""Stage costs by name or file: the presets that ship with the package, and JSON files of costs or of a roofline."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from tltlab.errors import ConfigError
from tltlab.files import read_json
from tltlab.hardware import gpu as find_gpu
from tltlab.hardware import model as find_model

from .stages import GpuCount, Positive, Record, RewardCosts, Seconds, StageCosts, Trained, checked

Share = Annotated[float, Field(gt=0, le=1)]


class RooflineStages(Record):
    """Stage costs as a file of kind "roofline": names of `hardware`, and the arguments of `from_roofline`."""

    kind: Literal["roofline"]
    gpu: str
    model: str
    num_gpus: GpuCount
    mfu_inference: Share = 0.4
    mfu_train: Share = 0.35
    inference_passes: Annotated[int, Field(gt=0)] = 1
    recompute: bool = True
    sync_bytes_per_s: Positive | None = None
    reward: RewardCosts = RewardCosts()
    trains: Trained = "all"
    sleep_s: Seconds = 0.0
    wake_s: Seconds = 0.0
    provenance: str | None = None

    def build(self) -> StageCosts:
        named = {name: getattr(self, name) for name in type(self).model_fields if name not in ("kind", "gpu", "model")}
        return StageCosts.from_roofline(find_gpu(self.gpu), find_model(self.model), **named)


_FILE: TypeAdapter[StageCosts | RooflineStages] = TypeAdapter(
    Annotated[StageCosts | RooflineStages, Field(discriminator="kind")]
)


def stage_presets() -> list[str]:
    """Names of the stage costs that ship with the package."""
    return sorted(f.name.removesuffix(".json") for f in (files("tltlab.costs") / "stage_presets").iterdir())


def load_stages(source: StageCosts | dict[str, Any] | str | Path) -> StageCosts:
    """Return stage costs from themselves, a dict, the name of a preset or a JSON file; ConfigError for a bad one.

    >>> load_stages({"kind": "roofline", "gpu": "H100", "model": "Qwen2.5-7B", "num_gpus": 8}).num_gpus
    8
    """
    if isinstance(source, StageCosts):
        return source
    where, value = "stages", source
    if isinstance(source, str | Path):
        where, value = str(source), _read(source)
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: stage costs are an object with the stages' terms, not {type(value).__name__}")
    found = checked(_FILE, {"kind": "linear"} | value, where)
    try:
        return found.build() if isinstance(found, RooflineStages) else found
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def _read(source: str | Path) -> Any:
    if isinstance(source, str) and source in stage_presets():
        return json.loads((files("tltlab.costs") / "stage_presets" / f"{source}.json").read_text())
    if not Path(source).exists():
        raise ConfigError(
            f"no stage costs at {source}: give a JSON file or one of the presets {', '.join(stage_presets())}"
        )
    return read_json(Path(source))
