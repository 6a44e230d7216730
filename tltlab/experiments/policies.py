"""policies: every policy on many traces and regimes, against the best fixed strategy in hindsight.

Simulated, and measured on the models that are named: all modes of `tltlab bench runtime`, in turn in every round. What
is compared with is built from public descriptions; SOURCES says which.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pandas as pd
from joblib import Parallel, delayed
from matplotlib.figure import Figure
from pydantic import Field

from tltlab.charts import bars
from tltlab.errors import ConfigError
from tltlab.policies.bandits import Ucb1
from tltlab.policies.beg_mab import BegMab, paper_buckets
from tltlab.policies.engines import AcceptedThresholds, ContextTable
from tltlab.policies.goodput import Goodput
from tltlab.policies.policy import Policy
from tltlab.policies.selector import Selector
from tltlab.policies.simple import BatchTable
from tltlab.policies.specs import AdaptiveSpec, NoneSpec
from tltlab.sim.sweep import backend
from tltlab.stats import paired_interval
from tltlab.strategy import NO_SPECULATION, Strategy

from . import Progress
from .models import Count, bench_on, own_model
from .regimes import PolicyRegime, best_fixed, regimes
from .result import ExperimentResult, select_cases, with_interval

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
    rounds: Annotated[int, Field(ge=2)] = 8
    cap: Count = 512
    clock: Literal["wall", "processor"] = "wall"


FAST: Mapping[str, Any] = {"rl_steps": 2, "seeds": 1, "prompts": 4, "group_size": 4, "rounds": 2, "cap": 128}


@dataclass(frozen=True)
class BuiltPolicy:
    """A policy of the simulator from a function that builds its selector."""

    make: Callable[[np.random.Generator], Selector]

    @property
    def strategies(self) -> tuple[Strategy, ...]:
        return self.make(np.random.default_rng(0)).strategies

    def build(self, rng: np.random.Generator) -> Selector:
        return self.make(rng)


def policies_for(regime: PolicyRegime) -> dict[str, Policy | BuiltPolicy]:
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
    return {
        ADAPTIVE: Policy(selector=AdaptiveSpec(drafters=regime.drafters)),
        "goodput": BuiltPolicy(lambda rng: Goodput(chains, stated_costs, rng=rng)),
        "table by batch": BuiltPolicy(lambda rng: BatchTable(rows)),
        "table by context": BuiltPolicy(lambda rng: ContextTable(contexts)),
        "verify budget": BuiltPolicy(lambda rng: Goodput(trimmed, start, epsilon=0.0, rng=rng)),
        "accepted thresholds": BuiltPolicy(lambda rng: AcceptedThresholds(name)),
        "cost profile": BuiltPolicy(lambda rng: Goodput(chains, start, epsilon=0.0, rng=rng)),
        "ucb1": BuiltPolicy(lambda rng: Ucb1([NO_SPECULATION, *few], exploration=0.1, reward="relative")),
        "beg-mab published": BuiltPolicy(lambda rng: BegMab(published, rng=rng)),
        SEVERAL: BuiltPolicy(lambda rng: BegMab(arms, rng=rng)),
        "beg-mab, arms and means": BuiltPolicy(lambda rng: BegMab(arms, statistic="mean", rng=rng)),
        "beg-mab, arms and relative": BuiltPolicy(lambda rng: BegMab(arms, reward="relative", rng=rng)),
        "beg-mab, arms and bands": BuiltPolicy(lambda rng: BegMab(bands, rng=rng)),
        "beg-mab, all repairs": BuiltPolicy(lambda rng: BegMab(bands, statistic="mean", reward="relative", rng=rng)),
        "none": Policy(selector=NoneSpec()),
    }


def run(settings: PoliciesSettings, *, folder: Path, seed: int, progress: Progress) -> ExperimentResult:
    """The experiment; ConfigError for a regime that there is not, and for models that are none."""
    if not settings.simulated and not settings.models:
        raise ConfigError("nothing to do: with simulated=false, name models to measure on")
    seeds = [seed + i for i in range(settings.seeds)]
    every = regimes(settings.traces, settings.rl_steps) if settings.simulated else ()
    cases = select_cases("regime", every, settings.only if settings.simulated else (), progress)
    rows = []
    with backend(None, settings.jobs) as jobs:
        for judgement in Parallel(n_jobs=jobs, return_as="generator")(delayed(judged)(each, seeds) for each in cases):
            ours = next(row for row in judgement if row["policy"] == ADAPTIVE)
            progress(f"{ours['regime']}: {ADAPTIVE} takes {ours['ratio']:.3f} times as long as {ours['best_fixed']}")
            rows += judgement
    for model in settings.models:
        rows += _model_rows(settings, model, folder, seed, progress)
    frame = pd.DataFrame(rows)
    predicted, measured = (frame[frame["kind"] == kind] for kind in ("predicted", "measured"))
    return ExperimentResult(
        verdict=" ".join(say(of) for say, of in ((measured_verdict, measured), (verdict, predicted)) if len(of)),
        rows=frame,
        figure=_picture(predicted, measured),
        prediction=measured.empty,
        notes=_notes(predicted, measured),
    )


def _model_rows(
    settings: PoliciesSettings, model: str, folder: Path, seed: int, progress: Progress
) -> list[dict[str, Any]]:
    """A row per epoch and mode of `tltlab bench runtime` on a model."""
    trained = Path(model) if "/" in model or Path(model).is_dir() else None
    model_folder = own_model(trained, folder, size=model, progress=progress)
    result = bench_on(model_folder, settings, seed=seed, progress=progress)
    return measured_rows(model_folder.name, result, settings.clock)


def measured_rows(name: str, result: Mapping[str, Any], clock: str = "wall") -> list[dict[str, Any]]:
    """What `tltlab bench runtime` found on a model, as rows of the table; seconds are those of the `clock`."""
    return [
        {
            "kind": "measured", "regime": f"{name}, epoch {row['epoch']}", "policy": row["mode"],
            "seconds": row["seconds"], "best_fixed": row["best_fixed"], "ratio": row["ratio"], "ratio_low": row["low"],
            "ratio_high": row["high"], "source": f"measured here, {clock} clock", "tokens_per_s": row["tokens_per_s"],
        }
        for row in result["over_best_fixed"] if row["clock"] == clock
    ]  # fmt: skip


def judged(regime: PolicyRegime, seeds: Sequence[int]) -> list[dict[str, Any]]:
    """A row per policy: seconds of an RL step, and ratios to the best fixed strategy, with its interval, and oracle."""
    best, fixed_by_seed = best_fixed(regime, seeds)
    fixed = np.concatenate([fixed_by_seed[seed] for seed in seeds])
    oracle = np.concatenate([regime.seconds(None, seed) for seed in seeds])
    seconds_by_policy = {
        name: np.concatenate([regime.seconds(policy, seed) for seed in seeds])
        for name, policy in policies_for(regime).items()
    } | {ORACLE: oracle}
    rows = []
    for name, seconds in seconds_by_policy.items():
        ratio = paired_interval(seconds, fixed, rng=np.random.default_rng(0))
        rows.append(
            {
                "kind": "predicted", "regime": regime.name, "policy": name, "seconds": float(seconds.mean()),
                "best_fixed": str(best),
                "ratio": ratio.estimate, "ratio_low": ratio.low, "ratio_high": ratio.high,
                "over_oracle": float(seconds.sum() / oracle.sum()), "source": SOURCES[name],
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
    """Whether `adaptive` clears the bar, where it does worst, and who is better on average."""
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


def measured_verdict(rows: pd.DataFrame) -> str:
    """What `adaptive` took on each model of the best fixed depth's time, and how fast both and stock vLLM were."""
    clauses = []
    for regime, of in rows.groupby("regime", sort=False):
        tokens_per_s = of.set_index("policy")["tokens_per_s"]
        ours = next(row for row in of.to_dict("records") if row["policy"] == ADAPTIVE)
        speeds = (f"{tokens_per_s[name]:.0f} under {name}" for name in ("stock", ours["best_fixed"], ADAPTIVE))
        size = with_interval(ours["ratio"], ours["ratio_low"], ours["ratio_high"], ".3f")
        clauses.append(f"{size} on {regime} ({', '.join(dict.fromkeys(speeds))} tokens/s)")
    return f"measured here, adaptive takes {'; '.join(clauses)} times as long as the best fixed depth in hindsight."


def repairs(rows: pd.DataFrame) -> str:
    """What each repair of BEG-MAB changes in the mean ratio: several arms of the published one, others beside that."""
    means = rows.groupby("policy")["ratio"].mean()
    published = means["beg-mab published"]
    clauses = [f"several arms for one a bucket {means[SEVERAL] / published - 1:+.1%} of the published one's time"]
    for name, does in (("means", "means for medians"), ("relative", "relative rewards"), ("bands", "narrow buckets")):
        clauses.append(f"{does} {means[f'beg-mab, arms and {name}'] / means[SEVERAL] - 1:+.1%} beside that")
    clauses.append(f"all {means['beg-mab, all repairs'] / published - 1:+.1%}")
    return f"repairs of BEG-MAB: {', '.join(clauses)}"


def _notes(predicted: pd.DataFrame, measured: pd.DataFrame) -> tuple[str, ...]:
    notes: tuple[str, ...] = (
        "ratio is time over that of the best fixed strategy, chosen in hindsight on the same RL steps and luck, or on "
        "the same rounds; intervals are of 95 % over RL steps and seeds, or over rounds",
    )
    if len(measured):
        notes += (
            "measured: time is per second that plain decoding of the same lengths would take; fixed are 1, 2, 4 and 8 "
            "tokens of the suffix drafter or none; what learns goes on learning from round to round",
        )
    if predicted.empty:
        return notes
    oracle = predicted[predicted["policy"] == ORACLE]
    out_of_reach = oracle[oracle["ratio"] > GOAL_MEAN]["regime"].tolist()
    return (
        *notes,
        f"the oracle itself is above {GOAL_MEAN:g}, so policies are too: {', '.join(out_of_reach) or '-'}",
        "the cost profile and the verify budget are given the true costs of the start; vLLM's estimator tells tokens "
        "apart by the drafter's logits, which no simulation of alike requests can show",
        "the constants of adaptive were chosen while looking at these regimes, so they are no test that it never saw; "
        "the others run as published or shipped",
        repairs(predicted),
        "a policy that may draft has its drafter loaded, and plain decoding then costs a little more than under none",
    )


def _picture(predicted: pd.DataFrame, measured: pd.DataFrame) -> Figure:
    """Mean ratio by policy, with its least and largest over the regimes, and what was measured, with its interval."""
    means = predicted.groupby("policy")["ratio"].agg(["mean", "min", "max"]).sort_values("mean")
    ratios = measured[["ratio", "ratio_low", "ratio_high"]].set_axis(["mean", "min", "max"], axis=1)
    ratios.index = pd.Index([f"{row['policy']}, {row['regime']}" for row in measured.to_dict("records")], dtype=object)
    shown = pd.concat([part for part in (ratios, means) if len(part)])
    return bars(
        shown.index.tolist(), shown["mean"].to_numpy(), shown["min"].to_numpy(), shown["max"].to_numpy(),
        xlabel="time over the best fixed strategy: mean, least and largest; measured: with its interval",
        title="Policies over regimes (simulated) and on models (measured)", reference=1.0,
    )  # fmt: skip
