"""open-questions: what TLT brings at its own number of responses to a worker, and where its paper leaves it open.

Simulated: TLT against the same system without speculation, on H100s. The paper names three workloads without an
experiment (arXiv 2511.16665, discussion): asynchronous RL, responses that are all long, and several turns with tools.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import pandas as pd
from matplotlib.figure import Figure
from pydantic import Field

from tltlab.charts import bars
from tltlab.costs.profiles import nearest_engine, profile_costs
from tltlab.costs.stages import RooflineStages
from tltlab.experiments import Progress
from tltlab.experiments.result import ExperimentResult, select_cases
from tltlab.lengths.generate import ToolUse, generate
from tltlab.lengths.model import of_regime
from tltlab.planning.claims import CLAIMS, difference
from tltlab.planning.composition import System, asynchronous
from tltlab.planning.systems import SYSTEMS
from tltlab.sim.systems import compare_systems

Kind = Literal["published", "reference", "open"]
CAP = 32_768
MEDIAN_SHARE = 0.18
GROUP_SIZE = 8
TOOL_S = 10.0
"""Of a tool at the longest limit of responses; less in proportion where responses are shorter."""
PAPER_ROLLOUT_SHARE = 0.85
ALWAYS = "without_threshold"


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A workload: `workers` of `tp` GPUs with `load` responses each in an RL step.

    `sigma` None: lengths of reasoning models, a response in fifty at the limit; else log-normal about half of it.
    """

    name: str
    kind: Kind
    about: str
    model: str = "Qwen2.5-32B"
    workers: int = 4
    tp: int = 4
    load: int = 64
    sigma: float | None = None
    turns: float = 1.0
    staleness: int = 0


CASES = (
    Workload(name="7B as published", kind="published", about="64 prompts x 8 on 8 GPUs", model="Qwen2.5-7B", workers=2,
         load=256),
    Workload(name="32B as published", kind="published", about="256 prompts x 8 on 64 GPUs", workers=8, tp=8, load=256),
    Workload(name="synchronous", kind="reference", about="a heavy tail, one turn, all GPUs in turn"),
    Workload(name="asynchronous", kind="open", about="half of the GPUs train, at most 4 updates stale", staleness=4),
    Workload(name="uniformly long", kind="open", about="all responses about half of the limit", sigma=0.1),
    Workload(name="multi-turn", kind="open", about="4 turns on average, tools of about 10 s", turns=4.0),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenQuestionsSettings:
    """`rl_steps` of each workload; `only` names some, all where it is empty.

    `share` of the workers of the published set-ups, the load of each as it is.
    """

    rl_steps: Annotated[int, Field(ge=2)] = 4
    only: tuple[str, ...] = ()
    share: Annotated[float, Field(gt=0, le=1)] = 1.0
    cap: Annotated[int, Field(ge=256, le=131_072)] = CAP


FAST: Mapping[str, Any] = {"rl_steps": 3, "share": 0.25, "cap": 8192}


def run(settings: OpenQuestionsSettings, *, folder: Path, seed: int, progress: Progress) -> ExperimentResult:
    """The experiment; ConfigError for a workload that there is not."""
    cases = select_cases("workload", CASES, settings.only, progress)
    rows = pd.DataFrame([measured(case, settings, seed) for case in cases])
    notes = (
        "speed-ups of an RL step are over the same system without speculation; intervals are of 95 % over RL steps, "
        "least to most is over what was assumed: acceptance, its loss untrained or old, 30 % of speculation's costs",
        "the drafter is accepted as TLT's of Qwen2.5-32B, trained on idle workers; log-probs, training and weight sync "
        "follow from FLOPs, grading takes nothing",
    )
    return ExperimentResult(verdict=verdict(rows), rows=rows, figure=_picture(rows), prediction=True, notes=notes)


def compared(
    case: Workload, systems: str | Sequence[System], settings: OpenQuestionsSettings, seed: int, machine: str = "H100"
) -> pd.DataFrame:
    """The rows of `compare_systems` on the workload's responses, whole RL steps on so many GPUs of the `machine`."""
    workers = case.workers if case.kind != "published" else max(2, round(settings.share * case.workers))
    lengths = of_regime("reasoning").with_changes(
        median=(MEDIAN_SHARE if case.sigma is None else 0.5) * settings.cap, sigma=case.sigma,
        max_response_tokens=settings.cap,
    )  # fmt: skip
    trace = generate(
        lengths, num_rl_steps=settings.rl_steps, prompts_per_step=workers * case.load // GROUP_SIZE,
        group_size=GROUP_SIZE, seed=seed, num_workers=workers, name=case.name,
        tools=ToolUse(turns=case.turns, tool_s=TOOL_S * settings.cap / CAP) if case.turns > 1 else None,
    )  # fmt: skip
    costs = profile_costs(nearest_engine(machine, case.model, "bf16"), machine, case.model, case.tp, weights="bf16")
    stages = RooflineStages(kind="roofline", gpu=machine, model=case.model, num_gpus=workers * case.tp).build()
    return compare_systems(
        trace, systems, costs=costs, workers=workers, seed=seed, stages=stages, gpus_per_worker=case.tp,
        decision_block=max(1, settings.cap // 256), ranges=True,
    )  # fmt: skip


def measured(case: Workload, settings: OpenQuestionsSettings, seed: int) -> dict[str, Any]:
    """A row: the speed-up of an RL step and of its rollout with their intervals, and what they mean in `answer`."""
    tried = [SYSTEMS["verl"], SYSTEMS["tlt"]]
    if case.kind != "published":
        tried.append(replace(SYSTEMS["tlt"], name=ALWAYS, activation=None))
    table = compared(case, [_under(system, case) for system in tried], settings, seed).set_index("system")
    tlt, plain = (table.loc[name].to_dict() for name in ("tlt", "verl"))
    row = {
        "workload": case.name, "kind": case.kind, "about": case.about, "model": case.model,
        "workers": table.attrs["num_workers"],
        "responses_per_worker": case.load, "step": 1 / tlt["step_ratio"], "step_low": _over(tlt["step_ratio_high"]),
        "step_high": _over(tlt["step_ratio_low"]), "rollout": 1 / tlt["ratio"], "least": 1 / tlt["ratio_most"],
        "most": 1 / tlt["ratio_least"], "rollout_share": plain["rollout_share"],
        ALWAYS: _over(table["step_ratio"].to_dict()[ALWAYS]) if ALWAYS in table.index else None,
        "accept_length": tlt["mean_accept_length"], "bubble": plain["bubble_fraction"],
    }  # fmt: skip
    return row | {"answer": _answer(row, settings.cap)}


def _over(ratio: float) -> float:
    """Times as fast; infinite where the interval of a few RL steps reaches no time at all."""
    return 1 / ratio if ratio > 0 else math.inf


def _under(system: System, case: Workload) -> System:
    """The system where engines go on from RL step to RL step, half of the GPUs training; itself else."""
    if not case.staleness:
        return system
    return replace(
        system, admission=asynchronous(case.staleness), topology="separate", generating_share=0.5, max_staleness=1,
        on_policy=False,
    )  # fmt: skip


def _answer(row: Mapping[str, Any], cap: int) -> str:
    """In a sentence: whether it pays, or where it lies beside the claim and what of the difference is known."""
    low, high = min(row["step_low"], row["least"]), max(row["step_high"], row["most"])
    span = f"{row['step']:.2f}x, {low:.2f} {'or more' if math.isinf(high) else f'to {high:.2f}'}"
    if row["kind"] != "published":
        outcome = "pays" if low > 1 else "does not pay" if high <= 1 else "is not told from no gain"
        return f"{outcome}: {span}; drafting for any number of requests {row[ALWAYS]:.2f}x"
    outcome = difference(
        CLAIMS["tlt"], row["step"], low, high, responses_per_worker=row["responses_per_worker"], cap=cap, of_same=True
    )
    # The paper's rollouts are a larger share of its RL steps than those that FLOPs give.
    equal_share = 1 / (1 - PAPER_ROLLOUT_SHARE + PAPER_ROLLOUT_SHARE / row["rollout"])
    return (
        f"{span}: {outcome}; a rollout is {row['rollout_share']:.0%} of an RL step here and {PAPER_ROLLOUT_SHARE:.0%} "
        f"there, where the same rollout ({row['rollout']:.2f}x) would give {equal_share:.2f}x"
    )


def verdict(rows: pd.DataFrame) -> str:
    """The answers one after the other."""
    return "simulated, TLT " + "; ".join(f"{row.workload} {row.answer}" for row in rows.itertuples())


def _picture(rows: pd.DataFrame) -> Figure:
    """Speed-ups by workload; an interval without an upper end is drawn to the estimate."""
    high = rows["step_high"].where(rows["step_high"] < math.inf, rows["step"])
    return bars(
        rows["workload"].tolist(), rows["step"].to_numpy(), rows["step_low"].to_numpy(), high.to_numpy(),
        xlabel="RL steps of TLT, times as fast as without speculation", reference=1.0,
        title="TLT at its own load, and where its paper leaves it open (simulated)",
    )  # fmt: skip
