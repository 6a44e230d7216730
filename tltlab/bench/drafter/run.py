"""The benchmark of the adaptive drafter: its parts in order, in one folder, and what they found for people."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from tltlab.errors import ConfigError
from tltlab.files import write_json
from tltlab.runtime.drafter.offline.data import load_target
from tltlab.runtime.engine.environment import hardware, versions
from tltlab.runtime.models.runs import Progress, prompts_of, warmed_up, written
from tltlab.traces.trace import read

from . import adaptive as bench_adaptive
from . import by_product as bench_by_product
from . import checkpoint as bench_checkpoint
from . import coordination as bench_coordination
from . import members as bench_members
from . import packing as bench_packing
from . import recipes as bench_recipes
from . import reward as bench_reward
from .runs import BenchSizes, made_model

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
        return self._model or made_model(self.out / "model", "subset-sum", self.sizes.model, self.progress)

    @cached_property
    def head(self) -> Path:
        return warmed_up(self.model, self.out / "head", self.sizes, self.progress)

    def packing(self) -> dict[str, Any]:
        return bench_packing.bench_packing(self._lengths(), rounds=self.sizes.rounds, seed=self.seed)

    def checkpoint(self) -> dict[str, Any]:
        megabytes, rounds = self.sizes.checkpoint_megabytes, self.sizes.rounds
        return bench_checkpoint.bench_checkpoint(
            megabytes, rounds, folder=self.out, seed=self.seed, progress=self.progress
        )

    def members(self) -> dict[str, Any]:
        return bench_members.bench_members(self.sizes.rounds, progress=self.progress)

    def recipes(self) -> dict[str, Any]:
        return bench_recipes.bench_recipes(self.model, self.sizes, seed=self.seed, progress=self.progress)

    def adaptive(self) -> dict[str, Any]:
        return bench_adaptive.bench_adaptive(*self._run("adaptive"), seed=self.seed, progress=self.progress)

    def coordination(self) -> dict[str, Any]:
        return bench_coordination.bench_coordination(*self._run("coordination"), seed=self.seed, progress=self.progress)

    def reward(self) -> dict[str, Any]:
        return bench_reward.bench_reward(*self._run("reward"), seed=self.seed, progress=self.progress)

    def by_product(self) -> dict[str, Any]:
        model = made_model(self.out / "model-both", "both", self.sizes.model, self.progress)
        head = warmed_up(model, self.out / "head-both", self.sizes, self.progress)
        return bench_by_product.bench_by_product(
            model, head, self.out / "by-product", self.sizes, seed=self.seed, progress=self.progress
        )

    def _run(self, name: str) -> tuple[Path, Path, Path, BenchSizes]:
        return self.model, self.head, self.out / name, self.sizes

    def _lengths(self) -> list[int]:
        """Prompt and response tokens of the trace's responses, else of some that the model now gives."""
        if self.trace is not None:
            recorded = read(self.trace)
            both = recorded.workload.merge(recorded.outcomes, on=["rl_step", "prompt_id", "sample", "turn"])
            return [int(n) for n in both["prompt_tokens"] + both["response_tokens"]]
        prompts = prompts_of(self.model, "train", PACKED_RESPONSES)
        target, _ = load_target(self.model)
        texts = written(target, prompts, max_tokens=self.sizes.max_response_tokens, seed=self.seed)
        return [text.num_tokens for text in texts]


PARTS: dict[str, tuple[Callable[[_Bench], dict[str, Any]], Callable[[dict[str, Any]], str]]] = {
    "packing": (_Bench.packing, bench_packing.text),
    "checkpoint": (_Bench.checkpoint, bench_checkpoint.text),
    "members": (_Bench.members, bench_members.text),
    "recipes": (_Bench.recipes, bench_recipes.text),
    "adaptive": (_Bench.adaptive, bench_adaptive.text),
    "coordination": (_Bench.coordination, bench_coordination.text),
    "reward": (_Bench.reward, bench_reward.text),
    "by-product": (_Bench.by_product, bench_by_product.text),
}
"""Each part's work, and its result for people."""


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
    place = tempfile.TemporaryDirectory(prefix="tltlab-bench-") if out is None else nullcontext(str(out))
    with place as folder:
        bench = _Bench(Path(folder), sizes, model, trace, seed, progress)
        bench.out.mkdir(parents=True, exist_ok=True)
        if there := [name for name in parts if (bench.out / name).exists()]:
            raise ConfigError(
                f"{bench.out / there[0]} holds runs of an earlier benchmark; name another folder with --out"
            )
        found: dict[str, Any] = {"hardware": hardware(), "versions": versions(), "seconds": {}}
        for name, (work, _) in PARTS.items():
            if name not in parts:
                continue
            progress(f"{name} begins")
            began = time.perf_counter()
            found[name] = work(bench)
            found["seconds"][name] = time.perf_counter() - began
            write_json(bench.out / RESULT, found)
            progress(f"{name} took {found['seconds'][name]:.0f} s")
    return found


def text(found: Mapping[str, Any]) -> str:
    """The parts' results for people, one under the other."""
    return "\n\n".join(
        f"{name} ({found['seconds'][name]:.0f} s)\n{said(found[name])}"
        for name, (_, said) in PARTS.items()
        if name in found
    )
