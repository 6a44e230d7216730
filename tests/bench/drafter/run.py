"""The benchmark of the adaptive drafter: its parts in order, in one folder, and what they found for people."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from bench.harness import Progress, Text, shown
from tltlab.errors import ConfigError
from tltlab.experiments.models import folder_or_temporary, made_model
from tltlab.files import write_json
from tltlab.runtime.drafter.offline.data import load_target
from tltlab.runtime.engine.environment import hardware, versions
from tltlab.runtime.models.runs import prompts_of, sample_texts, warmed_up
from tltlab.traces.trace import read

from . import members, runs, trainer
from .sizes import BenchSizes

RESULT = "drafter.json"
PACKED_RESPONSES = 192


class _Bench:
    """What the parts share: a model and a warmed-up head, made when first asked for."""

    def __init__(
        self, out: Path, sizes: BenchSizes, model: Path | None, trace: Path | None, seed: int, progress: Progress
    ) -> None:
        self.out, self.sizes, self.trace, self.seed, self.progress = out, sizes, trace, seed, progress
        self._model = model

    @cached_property
    def model(self) -> Path:
        return self._model or made_model(self.out / "model", self.progress, size=self.sizes.model)

    @cached_property
    def head(self) -> Path:
        return warmed_up(self.model, self.out / "head", self.sizes, self.progress)

    def lengths(self) -> list[int]:
        """Prompt and response tokens of the trace's responses, else of some that the model now gives."""
        if self.trace is not None:
            recorded = read(self.trace)
            responses = recorded.workload.merge(recorded.outcomes, on=["rl_step", "prompt_id", "sample", "turn"])
            return [int(n) for n in responses["prompt_tokens"] + responses["response_tokens"]]
        prompts = prompts_of(self.model, "train", PACKED_RESPONSES)
        target, _ = load_target(self.model)
        texts = sample_texts(target, prompts, max_tokens=self.sizes.max_response_tokens, seed=self.seed)
        return [text.num_tokens for text in texts]


Part = tuple[Callable[[_Bench], dict[str, Any]], Text]
"""A part's work, and its result for people."""


def _of_runs(name: str, work: Callable[..., dict[str, Any]], text: Text) -> Part:
    """A part that does GRPO runs, of the model and the head, in a folder of its name."""
    return lambda b: work(b.model, b.head, b.out / name, b.sizes, seed=b.seed, progress=b.progress), text


PARTS: dict[str, Part] = {
    "packing": (lambda b: trainer.bench_packing(b.lengths(), rounds=b.sizes.rounds, seed=b.seed), trainer.PACKING),
    "checkpoint": (
        lambda b: trainer.bench_checkpoint(
            b.sizes.checkpoint_megabytes, b.sizes.rounds, folder=b.out, seed=b.seed, progress=b.progress
        ),
        trainer.CHECKPOINT,
    ),
    "members": (lambda b: members.bench_members(b.sizes.rounds, progress=b.progress), members.TEXT),
    "recipes": (lambda b: trainer.bench_recipes(b.model, b.sizes, seed=b.seed, progress=b.progress), trainer.RECIPES),
    "adaptive": _of_runs("adaptive", runs.bench_adaptive, runs.ADAPTIVE),
    "coordination": _of_runs("coordination", runs.bench_coordination, runs.COORDINATION),
}


def bench_learned(
    parts: Collection[str],
    sizes: BenchSizes,
    *,
    model: Path | None = None,
    trace: Path | None = None,
    out: Path | None = None,
    seed: int = 0,
    progress: Progress,
) -> dict[str, Any]:
    """Do the named parts, in the order of `PARTS`; what each found, under its name.

    `model` is a folder of `tltlab make-model`, None for one that is trained first; `trace` gives the lengths of
    `packing`. Runs, models and heads stay in `out`, and after each part all that was found is in its drafter.json;
    None for a folder that is removed at the end. Models and heads that are there already are used again. ConfigError
    where `out` holds runs of one of these parts; TltlabError where a part fails.
    """
    # Two threads on a busy machine stall for seconds.
    torch.set_num_threads(1)
    with folder_or_temporary(out, "tltlab-bench-") as folder:
        bench = _Bench(folder, sizes, model, trace, seed, progress)
        bench.out.mkdir(parents=True, exist_ok=True)
        if earlier := [name for name in parts if (bench.out / name).exists()]:
            raise ConfigError(
                f"{bench.out / earlier[0]} holds runs of an earlier benchmark; name another folder with --out"
            )
        result: dict[str, Any] = {"hardware": hardware(), "versions": versions(), "seconds": {}}
        for name, (work, _) in PARTS.items():
            if name not in parts:
                continue
            progress(f"{name} begins")
            began = time.perf_counter()
            result[name] = work(bench)
            result["seconds"][name] = time.perf_counter() - began
            write_json(bench.out / RESULT, result)
            progress(f"{name} took {result['seconds'][name]:.0f} s")
    return result


def text(result: Mapping[str, Any]) -> str:
    """The parts' results for people, one under the other."""
    return "\n\n".join(
        f"{name} ({result['seconds'][name]:.0f} s)\n{shown(result[name], part_text)}"
        for name, (_, part_text) in PARTS.items()
        if name in result
    )
