"""baseline: no speculation, fixed depths and adaptive ones on the same prompts here; and TLT's claims, simulated.

The measured part is `tltlab bench runtime`: one engine, the same prompts, all modes in turn in every round, speed-ups
with intervals over rounds. The predicted part simulates whole RL steps of TLT, TLT-Base and Open-R1 over VeRL in the
set-ups of TLT's scripts, on H100 and on A100.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import pandas as pd
from matplotlib.figure import Figure
from pydantic import Field

from tltlab.charts import bars
from tltlab.costs.profiles import nearest_engine, profile_costs
from tltlab.costs.stages import RooflineStages
from tltlab.errors import ConfigError
from tltlab.files import read_json
from tltlab.lengths.generate import generate
from tltlab.lengths.model import of_regime
from tltlab.planning.claims import CLAIMS
from tltlab.sim.comparison.systems import compare_systems

from .harness import Case, Experiment, Row
from .models import Count, Several, bench_on, own_model
from .result import with_interval

SYSTEMS = "verl,open-r1,tlt-base,tlt"
CLAIM = CLAIMS["tlt"]
"""TLT's end-to-end speed-ups over VeRL, the range over its models and clusters: nothing finer is known."""
Part = Literal["measured", "predicted"]
CAP, LOAD, GROUP_SIZE = 32_768, 256, 8
MEDIAN_TOKENS = 0.18 * CAP
"""With a response in fifty at the limit, as reasoning models have it."""
_BEST_STATIC = "times the best static, "


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
    """`parts` says what is run. The first line of fields is the measured part's, as in `tltlab bench runtime`.

    `model` is a folder of `tltlab make-model`, else one of `size` is trained; `measured` is a file that `tltlab bench
    runtime --out` wrote, taken instead of measuring. `machines` and what follows are the predicted part's:
    `rl_steps` of each set-up on a `share` of its workers, with the load of each as it is.
    """

    parts: tuple[Part, ...] = ("measured", "predicted")
    model: Path | None = None
    size: str = "deep"
    prompts: Count = 24
    group_size: Count = 8
    epochs: Count = 2
    rounds: Count = 10
    cap: Count = 768
    measured: Path | None = None
    machines: tuple[str, ...] = ("H100", "A100")
    rl_steps: Several = 4
    share: Annotated[float, Field(gt=0, le=1)] = 1.0


class Baseline(Experiment[BaselineSettings]):
    """A model that is trained stays in `folder`/models."""

    Settings = BaselineSettings
    FAST: ClassVar = {
        "size": "tiny", "prompts": 4, "group_size": 4, "epochs": 1, "rounds": 2, "cap": 256,
        "rl_steps": 2, "share": 0.25,
    }  # fmt: skip

    def cases(self) -> Iterator[Case]:
        parts = self.settings.parts
        if not parts:
            raise ConfigError("parts is empty: give measured, predicted or both")
        self.prediction = "measured" not in parts
        self.clauses: list[str] = []
        self.said: list[str] = []
        self.assumptions: dict[str, None] = {}
        if "measured" in parts:
            yield Case("here", "all modes of tltlab bench runtime in turn")
        if "predicted" in parts:
            for setup, machine in product(PUBLISHED, self.settings.machines):
                yield Case(f"{setup.name}, {machine}", f"{setup.about}, simulated", (setup, machine))

    def measure(self, case: Case) -> list[Row]:
        settings = self.settings
        if case.given is not None:
            setup, machine = case.given
            found = compared(setup, machine, settings, self.seed).to_dict("records")
            self.assumptions |= dict.fromkeys(f"{row['title']}: {each}" for row in found for each in row["assumptions"])
            return [predicted_row(row, case.name) for row in found]
        if settings.measured is None:
            model = own_model(settings.model, self.folder, size=settings.size, progress=self.progress)
            return self._measured(bench_on(model, settings, seed=self.seed, progress=self.progress))
        try:
            return self._measured(read_json(settings.measured))
        except (KeyError, TypeError, ValueError, AttributeError, StopIteration) as error:
            raise ConfigError(f"{settings.measured} is not what `tltlab bench runtime --out` writes") from error

    def _measured(self, bench: Mapping[str, Any]) -> list[Row]:
        """A row per epoch and mode of what `tltlab bench runtime` found, plain decoding's speed being 1."""
        judged = [row for row in bench["speedups"] if (row["part"], row["measure"]) == ("rollout", bench["judged_by"])]
        ratios = {(row["mode"], row["epoch"]): row for row in judged}
        last = ("beg-mab", max(mode["epoch"] for mode in bench["modes"]))
        static = next(
            row
            for row in bench["goals"]
            if (row["mode"], row["epoch"]) == last and row["goal"].startswith(_BEST_STATIC)
        )
        times, of_best = (with_interval(row["ratio"], row["low"], row["high"]) for row in (ratios[last], static))
        rounds = bench["modes"][0]["rollouts"]
        self.clauses.append(
            f"measured here, adaptive drafts (BEG-MAB) roll out {times} times as fast as no speculation and {of_best} "
            f"times as fast as the best fixed depth ({static['goal'].removeprefix(_BEST_STATIC)}), which nobody knows "
            f"beforehand, in {rounds} rounds"
        )
        self.said.append(
            f"measured: {bench['prompts']} prompts x {bench['group_size']} up to {bench['max_response_tokens']} tokens "
            f"of {bench['model']}; from epoch 2 on drafters know earlier responses; intervals are of 95 % over rounds, "
            "too narrow below ten"
        )
        columns = {"tokens_per_s": "tokens_per_s", "rollout_s": "seconds", "accept_length": "mean_accept_length"}
        plain = {"ratio": 1.0, "low": None, "high": None}
        rows: list[Row] = []
        for mode in bench["modes"]:
            ratio = ratios.get((mode["mode"], mode["epoch"]), plain)
            row = {
                "kind": "measured",
                "setting": f"here, epoch {mode['epoch']}",
                "system": mode["mode"],
                "of": "rollout",
            }
            row |= {"speedup": ratio["ratio"], "low": ratio["low"], "high": ratio["high"]}
            rows.append(row | {column: mode[name] for column, name in columns.items()})
        return rows

    def verdict(self, rows: pd.DataFrame) -> str:
        clauses = self.clauses
        if self.assumptions:
            by_system = rows[rows["kind"] == "predicted"].groupby("system")["speedup"]
            least, most = by_system.min(), by_system.max()
            spans = [f"{least[s]:.2f} to {most[s]:.2f} under {s}" for s in ("TLT", "TLT-Base", "Open-R1")]
            clauses = [
                *clauses,
                f"predicted by simulation, RL steps are {', '.join(spans)} times as fast as VeRL's (the paper says "
                f"{CLAIM.least} to {CLAIM.most} under TLT)",
            ]
        return "; ".join(clauses) + "."

    def picture(self, rows: pd.DataFrame) -> Figure:
        return bars(
            (rows["system"] + ", " + rows["setting"]).tolist(), rows["speedup"].to_numpy(), rows["low"].to_numpy(),
            rows["high"].to_numpy(), xlabel="times as fast (95 % intervals)", reference=1.0,
            title="Measured: rollout, off = 1; simulated: RL step, VeRL = 1",
        )  # fmt: skip

    def notes(self, rows: pd.DataFrame) -> Iterable[str]:
        yield from self.said
        if self.assumptions:
            yield (
                f"predicted: RL steps up to {CAP} tokens, lengths of reasoning models and as many A100 as H100 are "
                "assumptions; log-probs, training and weight sync follow from FLOPs, grading takes nothing"
            )
            yield (
                "predicted: low to high is of 95 % over RL steps; least to most is over what was assumed: acceptance, "
                "its loss untrained or old, 30 % of speculation's costs; nothing was fitted to the paper"
            )
            yield from self.assumptions


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
    found = {"kind": "predicted", "setting": setting, "system": row["title"], "of": "RL step"}
    found |= {name: 1 / row[ratio] if row[ratio] else None for name, ratio in inverse.items()}
    if row["system"] == "verl":
        found |= {"low": None, "high": None}
    found["paper"] = f"{CLAIM.least}-{CLAIM.most}" if row["system"] == "tlt" else None
    return found | {name: row[column] for name, column in same.items()} | {"accept_length": row["mean_accept_length"]}
