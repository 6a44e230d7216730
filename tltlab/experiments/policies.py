"""policies: every policy on many traces and regimes, against the best fixed strategy in hindsight.

Simulated, and measured on the models that are named: all modes of `tltlab bench runtime`, in turn in every round. What
is compared with is built from public descriptions; SOURCES says which.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from tltlab.charts import bars
from tltlab.errors import ConfigError
from tltlab.policies.bandits import Ucb1
from tltlab.policies.beg_mab import BegMab, paper_buckets
from tltlab.policies.engines import AcceptedThresholds, ContextTable
from tltlab.policies.goodput import Goodput
from tltlab.policies.policy import Policy
from tltlab.policies.simple import BatchTable
from tltlab.policies.specs import AdaptiveSpec, CustomSpec, NoneSpec
from tltlab.sim.comparison.jobs import side_by_side
from tltlab.stats import paired_interval
from tltlab.strategy import NO_SPECULATION, Strategy

from .harness import Case, Experiment, Row, chosen
from .models import Count, Several, bench_on, own_model
from .regimes import PolicyRegime, best_fixed, regimes
from .result import with_interval

ADAPTIVE, ORACLE = "adaptive", "oracle"
SEVERAL = "beg-mab, several arms"
SOURCES: Mapping[str, str] = {
    ADAPTIVE: "this package",
    "goodput": "TurboSpec, arXiv 2406.14066; costs from the file",
    "table by batch": "vLLM #32374, with TLT's thresholds",
    "table by context": "vLLM #54801, the example of its text",
    "verify budget": "vLLM #52228, by position: drafts whole, verifies what pays",
    "accepted thresholds": "SGLang #21599, its defaults",
    "cost profile": "SGLang #28045, costs measured at the start",
    "ucb1": "Auer, Cesa-Bianchi and Fischer 2002, relative rewards",
    "beg-mab published": "TLT, arXiv 2511.16665, Algorithm 1",
    SEVERAL: "the same with several depths a bucket",
    "beg-mab, arms and means": "several arms, and means for medians",
    "beg-mab, arms and relative": "several arms, and rewards over plain decoding",
    "beg-mab, arms and bands": "several arms, in buckets whose batches differ by 2 at most",
    "beg-mab, all repairs": "all four",
    "none": "no speculation",
    ORACLE: "knows costs and acceptance, not luck",
}
BANDS = (1, 2, 4, 8, 16, 32, 64)
"""Batches from which buckets begin that pool no rewards of batches further apart than twice."""

GOAL_WORST, GOAL_MEAN, GOAL_ORACLE = 1.02, 0.98, 1.03


@dataclass(frozen=True, slots=True, kw_only=True)
class PoliciesSettings:
    """`rl_steps` of each regime under `seeds` seeds; `only` names regimes, all where it is empty; `jobs` processes.

    Recorded traces are looked for in the folder `traces`. The second line of fields is the measured part's, as in
    `tltlab bench runtime`, on each of `models`: folders of `tltlab make-model`, or sizes, trained first. With
    `simulated=false` it is alone. `clock=processor` judges by the engine's processor seconds, which other work on the
    machine stretches less than the wall's; only where the engine runs on the CPU.
    """

    rl_steps: Count = 4
    seeds: Count = 2
    only: tuple[str, ...] = ()
    traces: Path = Path("traces")
    jobs: Count = 1
    simulated: bool = True
    models: tuple[str, ...] = ()
    prompts: Count = 16
    group_size: Count = 8
    epochs: Count = 1
    rounds: Several = 8
    cap: Count = 512
    clock: Literal["wall", "processor"] = "wall"


def policies_for(regime: PolicyRegime) -> dict[str, Policy]:
    """Every policy by name, over the regime's drafters, or its first one where a policy knows no more."""
    name = regime.drafters[0]
    stated_costs, start = regime.file_costs, regime.phases[0].costs
    few = [Strategy.chain(name, depth) for depth in (8, 4, 2, 1)]
    chains = [s for s in regime.strategies if s.speculates]
    rows = list(zip((1, 5, 17, 33), (*few[:3], NO_SPECULATION), strict=True))
    arms = [(1, [*few[:3], NO_SPECULATION]), (5, [*few[1:], NO_SPECULATION]), (17, [*few[2:], NO_SPECULATION])]
    bands = [(batch, [*few, NO_SPECULATION]) for batch in BANDS]
    contexts = [(1, Strategy.chain(name, 5)), (32768, Strategy.chain(name, 3)), (131072, NO_SPECULATION)]
    trimmed = [Strategy(name, 7, 1, verified) for verified in range(2, 9)]
    published = paper_buckets([*few[:3], NO_SPECULATION], (1, 5, 17, 33))
    built: dict[str, Any] = {
        ADAPTIVE: AdaptiveSpec(drafters=regime.drafters),
        "goodput": lambda rng: Goodput(chains, stated_costs, rng=rng),
        "table by batch": lambda rng: BatchTable(rows),
        "table by context": lambda rng: ContextTable(contexts),
        "verify budget": lambda rng: Goodput(trimmed, start, epsilon=0.0, rng=rng),
        "accepted thresholds": lambda rng: AcceptedThresholds(name),
        "cost profile": lambda rng: Goodput(chains, start, epsilon=0.0, rng=rng),
        "ucb1": lambda rng: Ucb1([NO_SPECULATION, *few], exploration=0.1, reward="relative"),
        "beg-mab published": lambda rng: BegMab(published, rng=rng),
        SEVERAL: lambda rng: BegMab(arms, rng=rng),
        "beg-mab, arms and means": lambda rng: BegMab(arms, statistic="mean", rng=rng),
        "beg-mab, arms and relative": lambda rng: BegMab(arms, reward="relative", rng=rng),
        "beg-mab, arms and bands": lambda rng: BegMab(bands, rng=rng),
        "beg-mab, all repairs": lambda rng: BegMab(bands, statistic="mean", reward="relative", rng=rng),
        "none": NoneSpec(),
    }
    return {name: Policy(selector=CustomSpec.holding(spec) if callable(spec) else spec) for name, spec in built.items()}


class Policies(Experiment[PoliciesSettings]):
    """Cases are regimes, which `jobs` processes share, and models."""

    Settings = PoliciesSettings
    FAST: ClassVar = {"rl_steps": 2, "seeds": 1, "prompts": 4, "group_size": 4, "rounds": 2, "cap": 128}

    def cases(self) -> Iterator[Case]:
        settings = self.settings
        if not settings.simulated and not settings.models:
            raise ConfigError("nothing to do: with simulated=false, name models to measure on")
        self.prediction = not settings.models
        if settings.simulated:
            every = [Case(each.name, each.about, each) for each in regimes(settings.traces, settings.rl_steps)]
            picked = chosen("regime", every, settings.only)
            seeds = [self.seed + i for i in range(settings.seeds)]
            self.judgements = side_by_side([partial(judged, case.given, seeds) for case in picked], jobs=settings.jobs)
            yield from picked
        for model in settings.models:
            yield Case(model, "all modes of tltlab bench runtime in turn")

    def measure(self, case: Case) -> list[Row]:
        if case.given is not None:
            rows: list[Row] = next(self.judgements)
            return rows
        trained = Path(case.name) if "/" in case.name or Path(case.name).is_dir() else None
        model = own_model(trained, self.folder, size=case.name, progress=self.progress)
        bench = bench_on(model, self.settings, seed=self.seed, progress=self.progress)
        return measured_rows(model.name, bench, self.settings.clock)

    def verdict(self, rows: pd.DataFrame) -> str:
        predicted, measured = rows[rows["kind"] == "predicted"], rows[rows["kind"] == "measured"]
        clauses = [
            f"measured here, adaptive takes {with_interval(row['ratio'], row['ratio_low'], row['ratio_high'], '.3f')} "
            f"times as long as the best fixed depth in hindsight, {row['best_fixed']}, on {row['regime']}."
            for row in measured[measured["policy"] == ADAPTIVE].to_dict("records")
        ]
        return " ".join([*clauses, *([verdict(predicted)] if len(predicted) else [])])

    def picture(self, rows: pd.DataFrame) -> Figure:
        """Mean ratio by policy with its least and largest over the regimes; of what was measured, with its interval."""
        ends = ["ratio", "ratio_low", "ratio_high"]
        measured = rows[rows["kind"] == "measured"]
        means = rows[rows["kind"] == "predicted"].groupby("policy")["ratio"].agg(["mean", "min", "max"])
        shown = pd.concat(
            [measured[ends].set_axis(measured["policy"] + ", " + measured["regime"]), means.set_axis(ends, axis=1)]
        ).astype(float)
        return bars(
            shown.index.tolist(), *shown.to_numpy().T, reference=1.0, xlabel="time over the best fixed strategy",
            title="Policies over regimes (simulated: mean, least, largest) and on models (measured)",
        )  # fmt: skip

    def notes(self, rows: pd.DataFrame) -> Iterable[str]:
        oracle = rows[(rows["policy"] == ORACLE) & (rows["ratio"] > GOAL_MEAN)]
        return (
            "ratio is time over that of the best fixed strategy, chosen in hindsight on the same RL steps and random "
            "numbers, or on the same rounds; intervals are of 95 % over RL steps and seeds, or over rounds",
            "measured: time is per second that plain decoding of the same lengths would take; fixed are 1, 2, 4 and 8 "
            "tokens of the suffix drafter or none; policies go on learning from round to round",
            f"simulated: even the oracle is above {GOAL_MEAN:g} in {', '.join(oracle['regime']) or 'no regime'}; the "
            "cost profile and the verify budget are given the true costs of the start; the constants of adaptive were "
            "chosen while looking at these regimes, the others run as published or shipped",
        )


def measured_rows(name: str, result: Mapping[str, Any], clock: str = "wall") -> list[Row]:
    """What `tltlab bench runtime` found on a model, as rows of the table; seconds are those of the `clock`."""
    same = ("seconds", "best_fixed", "ratio", "tokens_per_s")
    return [
        {"kind": "measured", "regime": f"{name}, epoch {row['epoch']}", "policy": row["mode"], "ratio_low": row["low"],
         "ratio_high": row["high"], "source": f"measured here, {clock} clock"} | {key: row[key] for key in same}
        for row in result["over_best_fixed"] if row["clock"] == clock
    ]  # fmt: skip


def judged(regime: PolicyRegime, seeds: Sequence[int]) -> list[Row]:
    """A row per policy: seconds of an RL step, and ratios to the best fixed strategy, with its interval, and oracle."""
    best, fixed_by_seed = best_fixed(regime, seeds)
    fixed = np.concatenate([fixed_by_seed[seed] for seed in seeds])
    policies: dict[str, Policy | None] = {**policies_for(regime), ORACLE: None}
    found = {name: np.concatenate([regime.seconds(each, seed) for seed in seeds]) for name, each in policies.items()}
    rows = []
    for name, seconds in found.items():
        ratio = paired_interval(seconds, fixed, rng=np.random.default_rng(0))
        rows.append(
            {
                "kind": "predicted", "regime": regime.name, "policy": name, "seconds": float(seconds.mean()),
                "best_fixed": str(best),
                "ratio": ratio.estimate, "ratio_low": ratio.low, "ratio_high": ratio.high,
                "over_oracle": float(seconds.sum() / found[ORACLE].sum()), "source": SOURCES[name],
            }
        )  # fmt: skip
    return rows


def by_part(regime: PolicyRegime, names: Sequence[str], seed: int) -> pd.DataFrame:
    """Where policies lose: a row per policy and part of the rollouts, with its seconds and those above the oracle's.

    `lost` is the latter as a share of all the oracle's seconds, so the parts of a policy add up to its regret.
    """
    policies, least = policies_for(regime), regime.seconds_by_part(None, seed)
    total = sum(least.values())
    return pd.DataFrame(
        [
            {"policy": name, "part": part, "seconds": took, "lost": (took - least[part]) / total}
            for name in names
            for part, took in regime.seconds_by_part(policies[name], seed).items()
        ]
    )


def verdict(rows: pd.DataFrame) -> str:
    """Whether `adaptive` clears the bar, where it does worst, and which policies are better on average."""
    ours = rows[rows["policy"] == ADAPTIVE]
    worst = ours.sort_values("ratio").iloc[-1]
    means = rows[rows["policy"] != ORACLE].groupby("policy")["ratio"].mean().sort_values()
    mean, over = float(means[ADAPTIVE]), float(ours["over_oracle"].max())
    clears = worst["ratio"] <= GOAL_WORST and mean < GOAL_MEAN and over <= GOAL_ORACLE
    better = [f"{name} {value:.3f}" for name, value in means.items() if value < mean]
    return (
        f"simulated, adaptive takes {mean:.3f} times as long as the best fixed strategy in hindsight over {len(ours)} "
        f"regimes, {worst['ratio']:.3f} at worst ({worst['regime']}), and up to {over:.3f} times the oracle: it "
        f"{'clears' if clears else 'does not clear'} the bar of {GOAL_MEAN:g}, {GOAL_WORST:g} and {GOAL_ORACLE:g}; "
        + (f"better on average: {', '.join(better)}." if better else "no other is better on average.")
    )
