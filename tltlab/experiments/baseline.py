"""baseline: TLT's claims, simulated: RL steps of TLT, TLT-Base and Open-R1 over VeRL in the set-ups of TLT's scripts.

The set-ups are simulated on H100 and on A100. `tltlab bench runtime` measures drafts on an engine here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Annotated, Any, ClassVar

import pandas as pd
from matplotlib.figure import Figure
from pydantic import Field

from tltlab.charts import bars
from tltlab.costs.profiles import nearest_engine, profile_costs
from tltlab.costs.stages import RooflineStages
from tltlab.lengths.generate import generate
from tltlab.lengths.model import of_regime
from tltlab.planning.claims import CLAIMS
from tltlab.sim.study.systems import compare_systems

from .harness import Case, Experiment, Row
from .models import Several

SYSTEMS = "verl,open-r1,tlt-base,tlt"
CLAIM = CLAIMS["tlt"]
"""TLT's end-to-end speed-ups over VeRL, the range over its models and clusters: nothing finer is known."""
CAP, LOAD, GROUP_SIZE = 32_768, 256, 8
MEDIAN_TOKENS = 0.18 * CAP
"""With a response in fifty at the limit, as reasoning models have it."""


@dataclass(frozen=True)
class Published:
    """A set-up of TLT's scripts: `workers` of `tp` GPUs with `LOAD` responses each in an RL step."""

    name: str
    about: str
    model: str
    workers: int
    tp: int


PUBLISHED = (
    Published("7B as published", "64 prompts x 8 on 8 GPUs", "Qwen2.5-7B", workers=2, tp=4),
    Published("32B as published", "256 prompts x 8 on 64 GPUs", "Qwen2.5-32B", workers=8, tp=8),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineSettings:
    """`rl_steps` of each set-up on each of `machines`, on a `share` of its workers with the load of each as it is."""

    machines: tuple[str, ...] = ("H100", "A100")
    rl_steps: Several = 4
    share: Annotated[float, Field(gt=0, le=1)] = 1.0


class Baseline(Experiment[BaselineSettings]):
    """Cases are set-ups on machines."""

    Settings = BaselineSettings
    FAST: ClassVar = {"rl_steps": 2, "share": 0.25}
    prediction = True

    def cases(self) -> Iterator[Case]:
        self.assumptions: dict[str, None] = {}
        for setup, machine in product(PUBLISHED, self.settings.machines):
            yield Case(f"{setup.name}, {machine}", f"{setup.about}, simulated", (setup, machine))

    def measure(self, case: Case) -> list[Row]:
        setup, machine = case.given
        found = compared(setup, machine, self.settings, self.seed).to_dict("records")
        self.assumptions |= dict.fromkeys(f"{row['title']}: {each}" for row in found for each in row["assumptions"])
        return [predicted_row(row, case.name) for row in found]

    def verdict(self, rows: pd.DataFrame) -> str:
        by_system = rows.groupby("system")["speedup"]
        least, most = by_system.min(), by_system.max()
        spans = [f"{least[s]:.2f} to {most[s]:.2f} under {s}" for s in ("TLT", "TLT-Base", "Open-R1")]
        return (
            f"predicted by simulation, RL steps are {', '.join(spans)} times as fast as VeRL's (the paper says "
            f"{CLAIM.least} to {CLAIM.most} under TLT)."
        )

    def picture(self, rows: pd.DataFrame) -> Figure:
        return bars(
            (rows["system"] + ", " + rows["setting"]).tolist(), rows["speedup"].to_numpy(), rows["low"].to_numpy(),
            rows["high"].to_numpy(), xlabel="speed-up (95 % intervals of draws only)", reference=1.0,
            title="RL step, VeRL = 1 (simulated)",
        )  # fmt: skip

    def notes(self, rows: pd.DataFrame) -> Iterable[str]:
        return (
            f"RL steps up to {CAP} tokens, lengths of reasoning models and as many A100 as H100 are assumptions; "
            "log-probs, training and weight sync follow from FLOPs, grading takes nothing",
            "low to high is of 95 % over RL steps; least to most is over what was assumed: acceptance, its loss "
            "untrained or old, 30 % of speculation's costs; nothing was fitted to the paper",
            *self.assumptions,
        )


def compared(setup: Published, machine: str, settings: BaselineSettings, seed: int) -> pd.DataFrame:
    """The rows of `compare_systems` on a set-up's responses: whole RL steps on so many GPUs of the `machine`."""
    workers = max(2, round(settings.share * setup.workers))
    trace = generate(
        of_regime("reasoning").with_changes(median=MEDIAN_TOKENS, max_response_tokens=CAP),
        num_rl_steps=settings.rl_steps, prompts_per_step=workers * LOAD // GROUP_SIZE, group_size=GROUP_SIZE, seed=seed,
        num_workers=workers, name=setup.name,
    )  # fmt: skip
    costs = profile_costs(nearest_engine(machine, setup.model, "bf16"), machine, setup.model, setup.tp, weights="bf16")
    stages = RooflineStages(kind="roofline", gpu=machine, model=setup.model, num_gpus=workers * setup.tp).build()
    return compare_systems(
        trace, SYSTEMS, costs=costs, workers=workers, seed=seed, stages=stages, gpus_per_worker=setup.tp,
        decision_block=CAP // 256, ranges=True,
    )  # fmt: skip


def predicted_row(row: Mapping[Any, Any], setting: str) -> Row:
    """Speed-ups are the ratios of times turned round, so the ends of an interval change places; one may have no end."""
    inverse = {
        "speedup": "step_ratio", "low": "step_ratio_high", "high": "step_ratio_low", "least": "ratio_most",
        "most": "ratio_least", "rollout_speedup": "ratio",
    }  # fmt: skip
    same = {"rollout_s": "makespan_s", "step_s": "step_s", "rollout_share": "rollout_share"}
    found = {"setting": setting, "system": row["title"], "of": "RL step"}
    found |= {name: 1 / row[ratio] if row[ratio] else None for name, ratio in inverse.items()}
    if row["system"] == "verl":
        found |= {"low": None, "high": None}
    found["paper"] = f"{CLAIM.least}-{CLAIM.most}" if row["system"] == "tlt" else None
    return found | {name: row[column] for name, column in same.items()} | {"accept_length": row["mean_accept_length"]}
