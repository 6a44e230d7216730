"""Starting points of experiments: a model, given or trained once and kept; a warmed-up drafter; a place to run in."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from tltlab.errors import ConfigError

from . import Progress
from .harness import Experiment, S

if TYPE_CHECKING:
    from tltlab.runtime.models.make import Size

Count = Annotated[int, Field(ge=1)]
Several = Annotated[int, Field(ge=2)]


def own_model(model: Path | None, folder: Path, *, size: str, progress: Progress) -> Path:
    """Return the folder `model`, or `folder`/models/subset-sum-SIZE, trained first where it is not there yet.

    ConfigError where `model` is no folder that `tltlab make-model` wrote.
    """
    if model is None:
        return made_model(folder / "models" / f"subset-sum-{size}", progress, size=size)
    for file in ("config.json", "train.jsonl"):
        if not (model / file).is_file():
            raise ConfigError(f"{model}: {file} is missing; name a folder that `tltlab make-model` wrote")
    return model


def made_model(out: Path, progress: Progress, *, size: str | Size, task: str = "subset-sum") -> Path:
    """Return the folder `out` with a model of our own, trained first where it is not there."""
    if not (out / "config.json").is_file():
        from tltlab.runtime.models.make import make_model

        progress(f"training a model for {task} into {out}")
        make_model(out, size=size, task=task, seed=0, progress=progress)
    return out


@contextmanager
def folder_or_temporary(out: Path | None, prefix: str) -> Iterator[Path]:
    """The folder `out`, or where it is None one that is removed at the end."""
    with nullcontext(out) if out is not None else tempfile.TemporaryDirectory(prefix=prefix) as place:
        yield Path(place)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """`model` is a folder of `tltlab make-model`, else one of `size` is trained; `head` a drafter of `tltlab
    train-drafter` for it, else one is warmed up on `warm_up_texts` responses until its accept length, bonus included,
    is `warm_up_length`, in `warm_up_updates` at the latest.

    Each RL step rolls out `prompts` x `group_size` responses of up to `cap` tokens, drafts are `draft_depth` deep, an
    update of the drafter takes `tokens_per_update`. `gpus_per_worker` and `train_gpus` are 0 on a CPU.
    """

    model: Path | None = None
    head: Path | None = None
    size: str = "small"
    prompts: Count = 24
    group_size: Several = 8
    cap: Count = 768
    draft_depth: Count = 4
    tokens_per_update: Count = 1024
    warm_up_texts: Count = 256
    warm_up_length: Annotated[float, Field(gt=1)] = 2.1
    warm_up_updates: Count = 400
    gpus_per_worker: Annotated[float, Field(ge=0)] = 0.0
    train_gpus: Annotated[float, Field(ge=0)] = 0.0


FAST: dict[str, Any] = {
    "size": "tiny", "prompts": 6, "group_size": 4, "cap": 96, "tokens_per_update": 512, "warm_up_texts": 32,
    "warm_up_length": 1.5, "warm_up_updates": 20,
}  # fmt: skip


def sizes_of(settings: Any, **more: Any) -> Any:
    """Return the `Sizes` of runs with an experiment's settings; `more` are those that the settings do not have."""
    from tltlab.runtime.models.runs import Sizes

    renamed = {"model": settings.size, "prompts_per_step": settings.prompts, "max_response_tokens": settings.cap}
    names = {field.name for field in fields(Sizes)} & {field.name for field in fields(settings)}
    return Sizes(**({name: getattr(settings, name) for name in names} | renamed | more))


class RunsExperiment(Experiment[S]):
    """Experiment of GRPO runs on one Ray: a `model`, a `head` trained for it, and a folder `out`."""

    def prepare(self, sizes: Any, *, runs: Path | None = None, drafts: bool = True) -> None:
        """Make what is missing and start Ray. A trained model stays in `folder`/models.

        Head and runs stay in `runs`; without it they are gone afterwards. There is no head where nothing `drafts`.
        """
        import torch

        from tltlab.runtime.models.runs import warmed_up
        from tltlab.runtime.ray.start import ray_running

        settings: Any = self.settings
        # Two threads on a busy machine stall for seconds.
        torch.set_num_threads(1)
        if settings.head is not None and not (settings.head / "config.json").is_file():
            raise ConfigError(f"{settings.head} is no folder of `tltlab train-drafter`: it has no config.json")
        self.sizes = sizes
        self.model = own_model(settings.model, self.folder, size=settings.size, progress=self.progress)
        self.out = self.stack.enter_context(folder_or_temporary(runs, "tltlab-experiment-"))
        self.head: Path = settings.head or self.out / f"head-{self.model.name}"
        if drafts and settings.head is None:
            warmed_up(self.model, self.head, sizes, self.progress)
        self.stack.enter_context(ray_running())


def on_devices(recipe: Any, settings: RunSettings) -> Any:
    """Return the recipe with the settings' devices."""
    rollout = recipe.rollout.model_copy(update={"gpus_per_worker": settings.gpus_per_worker})
    train = recipe.train.model_copy(update={"gpus": settings.train_gpus})
    return recipe.model_copy(update={"rollout": rollout, "train": train})
