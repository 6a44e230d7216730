"""TLT, TLT-Base and Open-R1 over VeRL at TLT's published settings: simulated whole RL steps, a prediction.

What the paper says (arXiv 2511.16665, set-up): 64 H100 and, apart, A100; GRPO, up to 32,768 response tokens, tensor
parallelism 2, 4 or 8 by size. Its released recipe: 32 prompts a node of 8 GPUs, 8 responses each, a reference model.
What it does not say, and what is taken here: 64 A100 too, the same prompts for 7B, TP 2 for 7B and 4 for 32B, stages
by a roofline, acceptance of its 32B drafter for 7B too. Lengths decide most and are not published, so there are two
kinds: those of open reasoning models (`tltlab.lengths.model`), and `LONG_TAIL`, which reaches the cap in every RL step,
as its figure 2 shows of a production run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import product
from typing import TYPE_CHECKING, Any

from tltlab.costs.base import CostModel
from tltlab.costs.load import load_costs
from tltlab.costs.roofline import RooflineCosts
from tltlab.costs.stage_files import load_stages
from tltlab.errors import ConfigError
from tltlab.hardware import gpu as find_gpu
from tltlab.hardware import kv_capacity_tokens
from tltlab.hardware import model as find_model
from tltlab.lengths.generate import generate, log_normal
from tltlab.lengths.model import REGIMES
from tltlab.traces.trace import Trace

if TYPE_CHECKING:
    from .baseline import Settings

SYSTEMS = "verl,open-r1,tlt-base,tlt"
PAPER_RANGE = (1.7, 2.1)
"""TLT's end-to-end speed-ups over VeRL, the range over its models and clusters: nothing finer is known."""
PAPER_ROLLOUT_SHARE = 0.85
LONG_TAIL = "long-tail"
"""Log-normal around the median of the regime "reasoning", sigma 1: one response in a hundred reaches 32,768 tokens."""
_TENSOR_PARALLEL = {"Qwen2.5-7B": 2, "Qwen2.5-32B": 4}
_INFINIBAND_BYTES_PER_S = 5e10


def predicted_rows(
    settings: Settings, *, seed: int, progress: Callable[[str], None]
) -> tuple[list[dict[str, Any]], list[str]]:
    """A row per machine, model and system, VeRL's speed being 1; and what is assumed, in sentences."""
    from tltlab.sim.systems import compare_systems

    rows: list[dict[str, Any]] = []
    notes: dict[str, None] = {}
    for lengths in settings.lengths:
        trace = lengths_trace(lengths, settings, seed)
        for name, machine in product(settings.models, settings.machines):
            costs = costs_of(machine, name)
            workers = settings.gpus // costs.tensor_parallel
            progress(
                f"simulating {settings.gpu_rl_steps} RL steps of {name} on {settings.gpus} {machine}, {lengths} lengths"
            )
            found = compare_systems(
                trace,
                SYSTEMS,
                costs=costs,
                acceptance=settings.acceptance,
                model_free_acceptance=settings.model_free_acceptance,
                stages=load_stages(_stages(machine, name, settings.gpus)),
                workers=workers,
                repeats=settings.repeats,
                seed=seed,
                decision_block=settings.decision_block,
                jobs=settings.jobs,
            )
            for row in found.to_dict("records"):
                rows.append(_row(row, f"{name}, {settings.gpus} {machine}, {lengths}"))
                notes |= dict.fromkeys(f"{row['title']}: {each}" for each in row["assumptions"])
            notes |= dict.fromkeys(f"{left} is left out: {why}" for left, why in found.attrs["left_out"].items())
    return rows, [*_common_notes(settings), *notes]


def costs_of(machine: str, name: str) -> CostModel:
    """Step times of a model on GPUs at the tensor parallelism that is taken for it. ConfigError where none ships."""
    if name not in _TENSOR_PARALLEL:
        raise ConfigError(f"no settings of TLT's for {name}; there are {', '.join(_TENSOR_PARALLEL)}")
    tp = _TENSOR_PARALLEL[name]
    shipped = load_costs(f"{machine.lower()}-{name.lower()}" + ("" if name == "Qwen2.5-7B" else "-tp4"))
    if not isinstance(shipped, RooflineCosts) or shipped.tensor_parallel == tp:
        return shipped
    room = kv_capacity_tokens(find_gpu(machine), find_model(name), tp)
    return load_costs(shipped.model_dump(mode="json") | {"tp": tp, "kv_capacity_tokens": room})


def lengths_trace(lengths: str, settings: Settings, seed: int) -> Trace:
    """Responses to simulate: of one of `length_model.REGIMES`, or `LONG_TAIL`. ConfigError for another name."""
    if lengths != LONG_TAIL and lengths not in REGIMES:
        raise ConfigError(f"no lengths named {lengths!r}; there are {', '.join(REGIMES)}, {LONG_TAIL}")
    if lengths == LONG_TAIL:
        return log_normal(
            median=REGIMES["reasoning"].quantile(0.5), sigma=1.0, cap=settings.gpu_cap, rl_steps=settings.gpu_rl_steps,
            prompts=settings.gpu_prompts, group_size=settings.gpu_group_size, seed=seed,
        )  # fmt: skip
    model = REGIMES[lengths].with_changes(max_response_tokens=settings.gpu_cap)
    return generate(
        model, num_rl_steps=settings.gpu_rl_steps, prompts_per_step=settings.gpu_prompts,
        group_size=settings.gpu_group_size, seed=seed,
    )  # fmt: skip


def _stages(machine: str, name: str, gpus: int) -> dict[str, Any]:
    """As the shipped stage costs for H100: a roofline with a reference model and weights over one InfiniBand link."""
    return {
        "kind": "roofline",
        "gpu": machine,
        "model": name,
        "num_gpus": gpus,
        "inference_passes": 2,
        "sync_bytes_per_s": _INFINIBAND_BYTES_PER_S,
    }


def _row(row: Mapping[Any, Any], where: str) -> dict[str, Any]:
    """Speed-ups are the ratios of times turned round, so the ends of an interval change places."""
    tlt = row["system"] == "tlt"
    base = row["system"] == "verl"
    return {
        "kind": "predicted",
        "setting": where,
        "system": row["title"],
        "of": "RL step",
        "speedup": 1 / row["step_ratio"],
        "low": None if base else 1 / row["step_ratio_high"],
        "high": None if base else 1 / row["step_ratio_low"],
        "paper": f"{PAPER_RANGE[0]}-{PAPER_RANGE[1]}" if tlt else None,
        "rollout_speedup": 1 / row["ratio"],
        "rollout_s": row["makespan_s"],
        "step_s": row["step_s"],
        "rollout_share": row["rollout_share"],
        "accept_length": row["mean_accept_length"],
    }


def _common_notes(settings: Settings) -> Iterator[str]:
    least, most = (PAPER_ROLLOUT_SHARE / (1 / speedup - (1 - PAPER_ROLLOUT_SHARE)) for speedup in PAPER_RANGE)
    yield (
        f"predicted: {settings.gpu_prompts} prompts x {settings.gpu_group_size} up to {settings.gpu_cap} tokens an RL "
        f"step, {settings.gpu_rl_steps} RL steps; lengths, as many A100 as H100, TP 2 for 7B and 4 for 32B, and the "
        "same prompts for both are assumptions: the paper does not say"
    )
    yield (
        "predicted: 95 % intervals are over RL steps"
        + (", too narrow below ten," if settings.gpu_rl_steps < 10 else "")
        + " and hold for the luck of the lengths, not for errors of the models"
    )
    yield (
        "predicted: log-probs (with a reference model), training and sync by a roofline with assumed shares of peak "
        f"FLOPs; for {PAPER_RANGE[0]} to {PAPER_RANGE[1]} times end to end with {PAPER_ROLLOUT_SHARE:.0%} of an RL "
        f"step in rollout, as the paper has it, rollouts must be {least:.1f} to {most:.1f} times as fast: compare "
        "rollout_share and rollout_speedup"
    )
    yield (
        f"predicted: acceptance {settings.acceptance}, measured by TLT for its 32B drafter on H100, also for 7B; "
        f"{settings.model_free_acceptance} for TLT-Base, another system's drafts: TLT publishes none of its own"
    )
    yield (
        f"paper: TLT's range over all its models and clusters, {PAPER_RANGE[0]}-{PAPER_RANGE[1]} times VeRL; figures "
        "by model and for the other systems are not at hand; nothing here was fitted to it"
    )
