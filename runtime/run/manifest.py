"""What the manifest of a recorded trace says of the run: model, machine, engine, sizes."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from tltlab.runtime.engine.environment import hardware, versions
from tltlab.runtime.recipe.recipe import Recipe
from tltlab.traces.schema import Manifest


def run_manifest(recipe: Recipe, name: str, notes: str | None) -> Manifest:
    """The manifest of a run by `recipe` that begins now, recorded as `name`."""
    rollout = recipe.rollout
    return Manifest(
        kind="recorded",
        name=name,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        model=Path(recipe.model).name,
        hardware=hardware(),
        engine=f"vllm {versions()['vllm']}",
        num_workers=rollout.num_workers,
        max_response_tokens=rollout.max_response_tokens,
        group_size=rollout.group_size,
        license="Apache-2.0",
        source="tltlab",
        seed=recipe.seed,
        notes=notes,
    )
