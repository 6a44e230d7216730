"""The environment of a run: versions, hardware, and the run.json from which it can be repeated."""

import os
import sys

import torch

from tltlab.console import made_by
from tltlab.records import Json
from tltlab.runtime.engine.vllm import installed_vllm
from tltlab.runtime.recipe.recipe import Recipe


def run_json(recipe: Recipe) -> Json:
    """Return the contents of `run.json`: the command, the versions and the resolved recipe."""
    return {"argv": sys.argv, "versions": versions(), "recipe": recipe.model_dump(mode="json")}


def versions() -> dict[str, str]:
    """Return the versions of the packages that results depend on."""
    packages: dict[str, str] = made_by()["versions"]
    return {"python": packages["python"], "vllm": installed_vllm()} | packages


def gpus() -> list[tuple[str, int]]:
    """Name and bytes of memory of each GPU that torch finds."""
    found = map(torch.cuda.get_device_properties, range(torch.cuda.device_count() if torch.cuda.is_available() else 0))
    return [(device.name, int(device.total_memory)) for device in found]


def hardware() -> str:
    """Describe the machine: GPUs where there are, else the number of CPU cores."""
    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
    return f"{len(os.sched_getaffinity(0))} CPU cores"
