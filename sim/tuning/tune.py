"""`tune`: find a policy for a trace on some of its RL steps, judge it on others, and decide whether it was worth it.

Fixed strategies, elastic activation and exact tables are compared in fluid mode, where nothing is drawn, and so are
settings of a bandit, on half of the RL steps. Their worth depends on noise in a bandit's rewards too, so the
best few race in sampled mode with the measured noise of iteration times. The best of each kind then meets the RL steps
that were held out.
"""

from __future__ import annotations

import hashlib
import html
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import numpy as np
import pandas as pd

from tltlab.acceptance.base import UNKNOWN
from tltlab.arrays import Floats
from tltlab.console import whole_numbers
from tltlab.drafters.specs import DrafterSpec
from tltlab.errors import ConfigError
from tltlab.importers.sources import TraceSource, read
from tltlab.options import Option, option
from tltlab.own import split
from tltlab.policies.policy import Policy, PolicySource, load_policy
from tltlab.policies.specs import FixedSpec
from tltlab.records import Fields, Json, frozen
from tltlab.sim.config import SimulationConfig, decision_interval
from tltlab.sim.options import Jobs
from tltlab.sim.placement import EXPECTED
from tltlab.sim.scenario import DEPTHS, Scenario, policy_name
from tltlab.sim.study.band import Band, Effect, Source, at_range_ends, effect, of_steps, with_overhead
from tltlab.sim.study.reduce import next_line
from tltlab.sim.study.sample import ALL_OF, FIRST, small, spread
from tltlab.sim.study.study import Cell, Journal, Study
from tltlab.stats import finite, paired_interval
from tltlab.strategy import Strategy
from tltlab.traces.split import regrouped
from tltlab.traces.trace import Trace

from .cases import ORACLE, TuningCases, mean_s, ratio
from .search import MOST_ROWS, Prices, Space, Trial, bandits, elastic, fixed, parameters, search, tables, values_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ORDER = ("none", "fixed", "elastic", "table", "bandit", "own")
"""From simple to complicated: of policies that are equally good the first is taken."""
TUNED = ORDER[2:]


@frozen
class Finalists:
    """Policies by name, what kind each is, and the fixed strategy (or none) that was best on the tuning steps."""

    policies: Mapping[str, Policy]
    kind_of: Mapping[str, str]
    best_fixed: str


@frozen
class JudgedPolicy:
    """A finalist on the held-out steps.

    `acceptance` has in words what is granted to each of its `drafters`, of all traces where they differ. `ratio` of the
    objective to the best fixed strategy's with its 95 % interval, None where one RL step gives none; `regret` of the
    makespan to the clairvoyant bound, as in `compare`, None under a per-request budget.
    """

    name: str
    kind: str
    drafters: list[str]
    acceptance: dict[str, str]
    makespan_s: float
    ratio: float
    ratio_low: float | None
    ratio_high: float | None
    regret: float | None


@dataclass(frozen=True, kw_only=True)
class Judged:
    """The finalists on held-out RL steps as `candidates`, the fastest first, and the `name` of the one to take.

    The `champion` is the best of what is tuned, by its score on the tuning steps. `bands` are the 90 % ranges of its
    speed-up over the `best_fixed` strategy and over plain decoding, "none"; {} of one RL step, or without a champion.
    `bound_s` is the least of the clairvoyant bounds to which the candidates' regrets are, `fixed_bound_s` that of
    responses which stay on their workers. `is_clear` if the champion's interval lies on one side of 1, or is small
    compared with the error of the costs.
    """

    name: str
    worth_it: bool
    verdict: str
    best_fixed: str
    champion: str
    bands: Mapping[str, Band]
    candidates: tuple[JudgedPolicy, ...]
    oracle_s: float
    bound_s: float
    fixed_bound_s: float
    is_clear: bool


def judge(
    cases: TuningCases,
    finalists: Finalists,
    scores: Mapping[str, float],
    strategies: Sequence[Strategy],
    *,
    seeds: Sequence[int],
    seed: int,
) -> Judged:
    """Compare the finalists in sampled mode; `scores` are theirs on the tuning steps, which name the champion.

    The champion is faster where its interval over the best fixed strategy lies below 1, and the range of that speed-up
    above 1, with what costs and acceptance may be wrong by. Tuning is worth it
    where the range of its speed-up over plain decoding lies above 1 too. The policy to take is the simplest that a
    bootstrap of the RL steps does not distinguish from the best one: of all where the champion is faster, else of those
    not tuned. With few RL steps a bootstrap distinguishes too readily, which here only favours the faster policy.
    """
    makespans = cases.makespans(finalists.policies, mode="sampled", seeds=seeds, oracle=strategies)
    oracle_s = mean_s(makespans.pop(ORACLE))
    least_s = np.full(2, math.inf)
    fixed = finalists.best_fixed
    rows, ratios = [], {}
    for name, seconds in makespans.items():
        interval = ratios[name] = ratio(seconds, makespans[fixed], seed=seed)
        makespan_s, bounds_s = mean_s(seconds), cases.bounds_s(finalists.policies[name])
        if bounds_s is not None:
            least_s = np.minimum(least_s, bounds_s.mean(axis=1))
        rows.append(
            JudgedPolicy(
                name=name,
                kind=finalists.kind_of[name],
                **cases.granted(finalists.policies[name]),
                makespan_s=makespan_s,
                ratio=interval.estimate,
                ratio_low=finite(interval.low),
                ratio_high=finite(interval.high),
                regret=None if bounds_s is None or not bounds_s.any() else makespan_s / float(bounds_s[0].mean()) - 1.0,
            )
        )
    by_name = {row.name: row for row in rows}
    eligible = [name for name in makespans if finalists.kind_of[name] in ORDER]
    tuned = [name for name in eligible if finalists.kind_of[name] in TUNED]
    champion = min(tuned, key=lambda n: scores[n]) if tuned else fixed
    over, bands = ratios[champion], {}
    is_clear = champion == fixed
    if not is_clear and not math.isnan(over.high):
        used = finalists.policies[champion].strategies
        errors = [scenario.evidence(used)["speedup_error"] for scenario in cases.scenarios]
        is_clear = over.high < 1.0 or over.low > 1.0 or small([over], None if None in errors else max(errors))
        beside = {name: finalists.policies[name] for name in dict.fromkeys((champion, fixed, "none"))}
        bands = _bands(cases, beside, makespans, seeds=seeds, seed=seed)
    is_faster = bool(bands) and over.high < 1.0 and not bands[fixed].loses
    worth_it = is_faster and not bands["none"].loses
    if not is_faster:
        eligible = [name for name in eligible if finalists.kind_of[name] not in TUNED]
    best = champion if is_faster else min(eligible, key=lambda n: scores[n])
    level = [n for n in eligible if _reaches(makespans[n], makespans[best], seed) or n == best]
    name = min(level, key=lambda n: (ORDER.index(finalists.kind_of[n]), scores[n]))
    return Judged(
        name=name,
        worth_it=worth_it,
        verdict=_verdict(by_name[champion], bands, fixed, name, worth_it),
        best_fixed=fixed,
        champion=champion,
        bands=bands,
        candidates=tuple(sorted(rows, key=lambda row: row.makespan_s)),
        oracle_s=oracle_s,
        bound_s=float(least_s[0]),
        fixed_bound_s=float(least_s[1]),
        is_clear=is_clear,
    )


def _reaches(seconds: Sequence[Floats], best: Sequence[Floats], seed: int) -> bool:
    """Return True if a policy may be as good as the best one; a single pair has no interval, so it must be as good."""
    interval = ratio(seconds, best, seed=seed, paired=paired_interval)
    return (interval.estimate if math.isnan(interval.low) else interval.low) <= 1.0


def _bands(
    cases: TuningCases,
    policies: Mapping[str, Policy],
    makespans: Mapping[str, Sequence[Floats]],
    *,
    seeds: Sequence[int],
    seed: int,
) -> dict[str, Band]:
    """Ranges of the speed-up of the first of these policies over each of the others."""
    champion, *others = policies
    strategies = [s for policy in policies.values() for s in policy.strategies]
    errors = cases.errors(strategies)
    ends = []
    for scenario, error in zip(cases.scenarios, errors, strict=True):
        ends.append(at_range_ends(scenario, error))
        ends[-1]["costs"] += with_overhead(scenario, strategies, error.speed_up)

    def seconds(scenarios: Iterable[Scenario]) -> dict[str, list[Floats]]:
        """Simulate every trace under one seed."""
        return replace(cases, scenarios=tuple(scenarios)).makespans(policies, mode="sampled", seeds=seeds[:1])

    def speed_up(found: Mapping[str, Sequence[Floats]], other: str) -> float:
        return float(np.concatenate(found[other]).sum() / np.concatenate(found[champion]).sum())

    same_seed, at = seconds(cases.scenarios), dict[Source, list[dict[str, list[Floats]]]]()
    for source in ends[0]:
        for moved in zip_longest(*(found[source] for found in ends)):
            # A trace whose range has fewer ends stays as it is.
            here = (end or scenario for end, scenario in zip(moved, cases.scenarios, strict=True))
            at.setdefault(source, []).append(seconds(here))
    bands = {}
    for other in others:
        effects: dict[Source, Effect] = {
            source: effect(speed_up(same_seed, other), [speed_up(found, other) for found in both])
            for source, both in at.items()
        }
        if "acceptance" not in at:
            # Replayed acceptance is the same for both policies: only plain decoding does not depend on it.
            drafts = any(s.speculates for s in policies[other].strategies)
            effects["acceptance"] = (0.0, 0.0) if drafts else errors[0].of_tokens()
        rows = (np.concatenate(makespans[name]) for name in (other, champion))
        effects["lengths"] = of_steps(*rows, seed=seed)
        bands[other] = Band(estimate=speed_up(makespans, other), effects=effects)
    return bands


def _verdict(row: JudgedPolicy, bands: Mapping[str, Band], fixed: str, choice: str, worth_it: bool) -> str:
    """Return a line with the speed-ups of what was tuned, and one on whether it was worth it and what is taken."""
    if row.name == fixed:
        return f"Nothing faster than {fixed} could be tuned.\nTake {choice}."
    if not bands:
        return (
            f"{row.name} would roll out {1 / row.ratio:.2f}x as fast as {fixed}, the best fixed strategy.\nTuning is "
            f"not shown to be worth it, as one RL step to judge on gives no interval: take {choice}."
        )
    over_fixed = "" if fixed == "none" else f", and {bands[fixed]} over the best fixed strategy, {fixed}"
    number = f"{row.name} would speed up the rollout {bands['none']} over plain decoding{over_fixed}."
    if worth_it:
        simpler = "" if choice == row.name else f"; {choice} is simpler and within noise of it"
        return f"{number}\nTuning is worth it: the whole range is a gain{simpler}."
    loses = next((name for name in (fixed, "none") if bands[name].loses), None)
    measure = ", and measure it first" if loses == "none" else ""
    why = "its gain may be chance" if loses is None else f"over {loses} a slowdown is within its range"
    return f"{number}\nTuning is not worth it, as {why}: take {choice}{measure}."


_SELECTION, _JUDGEMENT = 1, 2
"""Stages after the search."""
_RACERS = 5
"""Searched settings that race in sampled mode, in addition to those tried first."""
_TUNED_ON = 4
"""RL steps of a sample to tune on."""


LEAST_PLANNED = 0.99
"""Share of a policy's seconds that a planner must not exceed on the tuning steps to be named."""
_STAGE = 10_000
"""How far apart the seeds of two stages lie."""
_REPEATS = 3
"""Seeds where RL steps are no sample."""


def _depths(text: str) -> Sequence[int]:
    return whole_numbers("--depths", text)


def _searched(search: Sequence[str]) -> dict[str, str]:
    """Return the values of `--search` by setting; ConfigError for a setting without values, or that comes twice."""
    values: dict[str, str] = {}
    for text in search:
        key, equals, value = text.partition("=")
        if not equals or not key.isidentifier() or key in values:
            raise ConfigError(f"--search {text}: give KEY=LOW..HIGH or KEY=A|B|C, each key once")
        values[key] = value
    return values


@dataclass(frozen=True, kw_only=True)
class TuneConfig(SimulationConfig):
    """A user's settings of a tuning, beside those of its simulations; modes are the tuning's own.

    Every other RL step of each trace is held out. A trace of more than 24 RL steps is
    tuned on 4 and judged on 8 others, or on more until the champion's interval lies on one side of 1 or is small
    compared with the costs' error. `rl_steps` replaces this sample. A policy decides once in `decision_block`
    iterations, by default 1, of many or long responses cap / 256. Candidates: no speculation, chains of `depths` by
    each of `drafters` (default: those that the acceptance knows) always or below a threshold, exact tables of up to
    four rows, and BEG-MAB. `trials` trials of Optuna search BEG-MAB's settings; 0 leaves it out. Sampled
    times are means of `repeats` seeds, by default 3, of a sample of RL steps 1, as more RL steps narrow its
    intervals as well. `policies` are further candidates, as `load_policy` takes them. With `search`, values or
    `low..high` by setting, their settings are what the trials search, in place of the bandit's, and the best of
    them is the result, whether it is worth it or not.

    The result does not depend on `jobs`, the processes (None: one per core).
    """

    depths: Sequence[int] = option(
        "Draft depths to try, with commas between. [default: 1,2,3,4,6,8]", DEPTHS, parse=_depths, cli=str
    )
    drafters: Sequence[str] | None = option(
        "Drafters to try, with commas between. [default: those of the acceptance]", parse=split, cli=str
    )
    policies: Sequence[PolicySource] | str = option(
        "Further candidates, with commas between: shipped names, files, module:Class.", (), cli=str
    )
    search: Annotated[
        Mapping[str, Sequence[Any] | str] | Sequence[str],
        Option("Tune this setting of --policies; or KEY=A|B|C. Repeatable.", cli=list[str], metavar="KEY=LOW..HIGH"),
    ] = field(default_factory=dict)
    trials: int = option("Settings to try, of the bandit or --search; 0: none.", 40, min=0)
    rl_steps: Sequence[int] | str | None = option(
        "a:b, RL steps to use. [default: all of 24 or fewer, else a sample spread over the run]"
    )
    repeats: int | None = option(
        "Seeds that a sampled score is the mean of. [default: 3; of a sample of RL steps 1]", min=1
    )
    decision_block: int | None = option(
        "Iterations per decision. [default: 1; of long or many responses: cap / 256]", min=1
    )  # type: ignore[assignment]
    jobs: Jobs = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.search, Mapping):
            object.__setattr__(self, "search", _searched(self.search))
        if self.drafters is not None and not self.drafters:
            raise ConfigError("no drafter given: name one, such as ngram, or leave the choice to the acceptance model")
        if any(depth < 0 for depth in self.depths):
            raise ConfigError(f"depths count drafted tokens, 0 or more, got {', '.join(map(str, self.depths))}")
        if not any(self.depths):
            raise ConfigError("no depth above 0 given: name depths to try, such as 1,2,4,8")
        if self.search and not (self.policies and self.trials):
            raise ConfigError("--search tries settings of policies: name them with --policies, and 1 or more --trials")

    def named(self) -> dict[str, Policy]:
        """The further candidates by name."""
        sources = split(self.policies) if isinstance(self.policies, str) else self.policies
        return {policy_name(source): load_policy(source) for source in sources}

    def seeds(self, stage: int = 0) -> list[int]:
        """Seeds of a stage of the tuning: other ones in each, so that a policy hardly wins two stages by chance."""
        return [self.seed + k + _STAGE * stage for k in range(self.repeats or _REPEATS)]


@dataclass(frozen=True, kw_only=True, repr=False)
class TuneResult(Judged):
    """The chosen policy with its provenance and the baselines it was compared with; all times are simulated.

    `searched` maps every policy tried in fluid mode to its score on the tuning steps. `trials` are the settings tried
    for policy `tuned`, the best first: the bandit, or the best searched policy. `placement_gain` is the chosen policy's
    time over that under a placement by expected lengths, and `planner_gain` that under the `planner` that was fastest
    on the tuning steps.
    """

    policy: Policy
    searched: dict[str, float]
    trials: tuple[Trial, ...]
    tuned: str
    buckets: tuple[Json, ...]
    tuned_on: tuple[tuple[int, ...], ...]
    judged_on: tuple[tuple[int, ...], ...]
    placement_gain: float
    planner: str
    planner_gain: float
    notes: tuple[str, ...]
    wall_s: float

    def __repr__(self) -> str:
        return f"<TuneResult {self.name}: {self.verdict}>"

    def _repr_html_(self) -> str:
        rows = self.to_frame().to_html(index=False, float_format=lambda value: f"{value:.3g}")
        return f"<p><b>{html.escape(self.verdict)}</b></p>{rows}"

    def to_frame(self) -> pd.DataFrame:
        """The candidates on the held-out RL steps, the fastest first."""
        return pd.DataFrame([asdict(row) for row in self.candidates])

    def plot(self) -> Figure:
        """The candidates' speed-ups over the best fixed strategy, with intervals of draws only."""
        from tltlab.charts import bars

        rows = self.candidates
        low = [row.ratio_high and 1 / row.ratio_high for row in rows]
        high = [row.ratio_low and 1 / row.ratio_low for row in rows]
        return bars([row.name for row in rows], [1 / row.ratio for row in rows], low, high, reference=1.0,
                    xlabel=f"speed-up over {self.best_fixed} (intervals: draws only)",
                    title="Held-out RL steps (simulated)")  # fmt: skip

    def lines(self, path: str | Path | None = None) -> str:
        """The verdict with what to do next, for a policy that was written to `path`."""
        gains = {f"--placement {EXPECTED}": self.placement_gain, f"--planner {self.planner}": self.planner_gain}
        drafts = any(strategy.speculates for strategy in self.policy.strategies)
        command = f"TLTLAB_POLICY={path} python train.py" if drafts and path else ""
        return f"{self.verdict}\n{next_line(gains, command)}".rstrip()

    def json(self, path: str | None = None) -> Json:
        """The keys of `tltlab tune --json`."""
        names = ("name", "worth_it", "oracle_s", "bound_s", "fixed_bound_s", "buckets", "tuned_on",
                 "judged_on", "placement_gain", "planner", "planner_gain", "notes", "wall_s")  # fmt: skip
        return {name: getattr(self, name) for name in names} | {
            "policy": path,
            "verdict": self.lines(path),
            "band": {name: band.ends_json() | band.json() for name, band in self.bands.items()},
            "candidates": [asdict(row) for row in self.candidates],
            "trials": len(self.trials),
            "settings": self.trials[0].settings if self.trials else None,
            "provenance": self.policy.provenance,
        }


def tune(
    traces: TraceSource | Sequence[TraceSource],
    config: TuneConfig = TuneConfig(),
    *,
    provenance: Fields | None = None,
    on_stage: Callable[[str], None] = lambda stage: None,
    journal: Path | None = None,
    **settings: Any,
) -> TuneResult:
    """Search the fastest policy on some RL steps of the traces (or their paths), and judge it on the others.

    Of one RL step half of the prompts are held out.

    `settings` are fields of `TuneConfig` that replace those of `config`. `provenance` is written into the policy over
    what is found here; `on_stage` receives each stage and each of the trials in words. `journal` is a file of the
    trials: an interrupted tuning that is called again with it continues with the same result. Raises ConfigError
    for a trace of one prompt, a missing acceptance, and where no policy is possible.
    """
    config = config.changed(settings, tune)
    began = time.perf_counter()
    many = isinstance(traces, list | tuple) and all(
        isinstance(source, str | Path | Trace | pd.DataFrame) for source in traces
    )
    sources = [read(trace) for trace in (cast(Sequence[TraceSource], traces) if many else [cast(TraceSource, traces)])]
    if not sources:
        raise ConfigError("no trace to tune on: give at least one")
    is_lone = any(len(trace.rl_steps) == 1 for trace in sources)
    sources = [_halves(trace) for trace in sources]
    splits = [_split(trace, config) for trace in sources]
    if any(sampled for *_, sampled in splits) and config.repeats is None:
        config = replace(config, repeats=1)
    if config.decision_block is None:
        config = replace(config, decision_block=max(decision_interval(trace) for trace in sources))
    tuned_on = [tune_steps for tune_steps, *_ in splits]

    def judged_in(num: int) -> list[list[int]]:
        """RL steps to judge on, so many where these are a sample."""
        return [spread(rest, num) if sampled else rest for _, rest, sampled in splits]

    judged_on = judged_in(FIRST)
    own = config.named()
    brought: dict[str, DrafterSpec] = {}
    for policy in own.values():
        brought |= policy.drafters

    def cases_of(parts: Sequence[Sequence[int]]) -> TuningCases:
        scenarios = []
        for trace, part in zip(sources, parts, strict=True):
            scenario = Scenario.of(trace, config, rl_steps=part)
            # With the drafters that further candidates bring along.
            scenarios.append(replace(scenario, registry=scenario.registry.joined(brought)))
        recorded = config.acceptance in (None, "trace")
        return TuningCases(scenarios=tuple(scenarios), traces=sources, recorded=recorded, jobs=config.jobs)

    tuning, judging = cases_of(tuned_on), cases_of(judged_on)
    known = [*tuning.scenarios, *judging.scenarios]
    strategies, notes = _strategies(known, config)
    spaces: dict[str, Space] = {}
    if isinstance(config.search, Mapping) and config.search:
        values = {key: values_of(key, v) if isinstance(v, str) else tuple(v) for key, v in config.search.items()}
        spaces = {name: parameters(policy, values) for name, policy in own.items()}
    for scenario in tuning.scenarios:
        scenario.check_acceptance([Policy(selector=FixedSpec(strategy=strategy)) for strategy in strategies])
    if is_lone:
        notes.append(
            "one RL step: tuned on half of its prompts and judged on the other half, each twice for batches as large; "
            "how RL steps differ from each other is not known (record several, or trace import --split)"
        )
    if all(scenario.costs.noise is None for scenario in tuning.scenarios):
        notes.append("the costs have no noise: a bandit is tuned as if iteration times were exact (calibrate anew)")

    if config.decision_block != 1:
        notes.append(f"policies that learn decide once in {config.decision_block} iterations (--decision-block)")

    # In fluid mode: everything that does not learn.
    prices = Prices.of(tuning.scenarios, strategies)
    # The tables that `what_if` finds.
    apart = [
        Prices.of(tuning.scenarios, [s for s in strategies if s.drafter == drafter])
        for drafter in dict.fromkeys(s.drafter for s in strategies)
    ]
    kinds = {
        "fixed": fixed(strategies),
        "elastic": elastic(strategies, prices.max_batch),
        "table": tables([prices, *apart]),
    }
    policies = {name: policy for named in kinds.values() for name, policy in named.items()}
    seeds = config.seeds()
    on_stage(f"{len(policies)} fixed, elastic and table policies in fluid mode")
    fluid = tuning.makespans(policies, mode="fluid", seeds=[config.seed])
    searched = {name: mean_s(seconds) for name, seconds in fluid.items()}
    best = {min(named, key=lambda n: searched[n]): kind for kind, named in kinds.items() if named}
    best["none"] = "none"

    # Settings of the policies that are named, which may need whole tokens, or of the bandit.
    if config.trials and strategies and not config.search:
        spaces = {"beg-mab": bandits(prices)}
    found: dict[str, list[Trial]] = {}
    raced: dict[str, float] = {}
    if spaces:
        part, mode = tuning.half(), "sampled" if config.search else "fluid"

        def score(new: Mapping[str, Policy]) -> dict[str, float]:
            return {n: mean_s(seconds) for n, seconds in part.makespans(new, mode=mode, seeds=seeds[:1]).items()}

        fluid_scores = sorted((name, f"{value:.9g}") for name, value in searched.items())
        question = hashlib.sha256(repr([fluid_scores, seeds, MOST_ROWS, config.search]).encode()).hexdigest()
        scored = Journal(path=journal, question=question)
        for name, space in spaces.items():
            on_stage(f"{config.trials} settings of {name} in {mode} mode")
            found[name] = search(
                space, score, trials=config.trials, seed=config.seed, on_stage=on_stage, journal=scored
            )
        runners = {str(trial.policy): trial.policy for tried in found.values() for trial in _racers(tried)}
        on_stage(f"{len(runners)} of these settings race in sampled mode")
        raced = tuning.scores(runners, seeds=seeds)
        for tried in found.values():
            tried.sort(key=lambda trial: (raced.get(str(trial.policy), math.inf), trial.score))
    found = {name: trials for name, trials in found.items() if trials}
    tuned = min(found, key=lambda name: raced[str(found[name][0].policy)], default="")
    trials = found.get(tuned, [])
    further = {name: ("own", policy) for name, policy in own.items() if not config.search}
    for name, tried in found.items():
        further[f"tuned {name}"] = ("own" if config.search else "bandit", tried[0].policy)

    # Plain decoding, the best of each kind, what was named or searched, and what ships where its strategies are known.
    candidates = {name: (best[name], policies[name]) for name in ("none", *best)} | further
    shipped = load_policy("beg-mab")
    if {s for s in shipped.strategies if s.speculates} <= set(strategies):
        candidates["shipped beg-mab"] = "shipped", shipped
    if (adaptive := _adaptive(known, strategies, config)) is not None:
        candidates["adaptive"] = "shipped", adaptive
    finalists = Finalists(
        policies={name: policy for name, (_, policy) in candidates.items()},
        kind_of={name: kind for name, (kind, _) in candidates.items()},
        best_fixed=next((name for name, kind in best.items() if kind == "fixed"), "none"),
    )
    strategies = list(dict.fromkeys([*strategies, *(s for _, p in further.values() for s in p.strategies)]))
    strategies = [strategy for strategy in strategies if strategy.speculates]
    on_stage(f"{len(finalists.policies)} finalists on RL steps held out")
    scores, num = tuning.scores(finalists.policies, seeds=config.seeds(_SELECTION)), FIRST
    while True:
        judged = judge(judging, finalists, scores, strategies, seeds=config.seeds(_JUDGEMENT), seed=config.seed)
        num *= 3
        more = judged_in(num)
        if more == judged_on or judged.is_clear:
            break
        judged_on, judging = more, cases_of(more)
    if config.search and judged.name != f"tuned {tuned}":
        written = f"{judged.verdict} The result is tuned {tuned}, as --search asks."
        judged = replace(judged, name=f"tuned {tuned}", verdict=written)
    chosen = finalists.policies[judged.name]
    on_tuned, on_judged = (_seconds(cases, chosen) for cases in (tuning, judging))
    planner = min(on_tuned.keys() - {"", EXPECTED}, key=lambda name: on_tuned[name], default="")
    if on_tuned[planner] > LEAST_PLANNED * on_tuned[""]:
        planner = ""
    used = {name: brought[name] for name in {s.drafter for s in chosen.strategies} & brought.keys()}
    row = next(row for row in judged.candidates if row.name == judged.name)
    origin = {
        "name": judged.name,
        "trace": [str(trace.manifest.name or f"trace {at}") for at, trace in enumerate(sources)],
        "costs": [scenario.costs_name for scenario in tuning.scenarios],
        "acceptance": [scenario.acceptance_name for scenario in tuning.scenarios],
        "seed": config.seed,
        "objective": "mean makespan of the RL steps, simulated",
        "tuned_on": tuned_on,
        "judged_on": judged_on,
        "num_rl_steps": [len(trace.rl_steps) for trace in sources],
        "makespan_s": row.makespan_s,
        "interval": [row.ratio_low, row.ratio_high],
        "compared_with": judged.best_fixed,
        "band": {name: [band.low, band.high] for name, band in judged.bands.items()},
        "regret": row.regret,
        "oracle_s": judged.oracle_s,
        "candidates": len(searched) + len(trials),
        "verdict": judged.verdict,
        "worth_it": judged.worth_it,
        "decision_block": config.decision_block,
        "repeats": len(config.seeds()),
        "trials": len(trials),
        "simulated": True,
    }
    return TuneResult(
        **vars(judged),
        policy=chosen.model_copy(
            update={"drafters": used | chosen.drafters, "provenance": origin | dict(provenance or {})}
        ),
        searched=searched,
        trials=tuple(trials),
        tuned=tuned,
        buckets=tuple(
            {"table": name, "score": searched[name], "rows": policy.selector.model_dump(mode="json")["rows"]}
            for name, policy in kinds["table"].items()
        ),
        tuned_on=tuple(map(tuple, tuned_on)),
        judged_on=tuple(map(tuple, judged_on)),
        placement_gain=on_judged[""] / on_judged[EXPECTED],
        planner=planner or "stay",
        planner_gain=on_judged[""] / on_judged[planner],
        notes=tuple(notes),
        wall_s=time.perf_counter() - began,
    )


def _racers(trials: Sequence[Trial]) -> list[Trial]:
    """The best of different trials, and the one that was tried first."""
    # Where settings make the same policy, the first of these stands for all.
    different = {str(trial.policy): trial for trial in sorted(trials, key=lambda trial: -trial.number)}
    best = sorted(different.values(), key=lambda trial: trial.score)[:_RACERS]
    return best + [trial for trial in different.values() if trial.number == 0 and trial not in best]


def _seconds(cases: TuningCases, policy: Policy) -> dict[str, float]:
    """Return a policy's seconds as it is (""), placed by expected lengths, and under planners; expected tokens each."""
    here = [replace(scenario, mode="fluid") for scenario in cases.scenarios]
    others = [{"": each, EXPECTED: each.placed(EXPECTED), **each.planned(policy)} for each in here]
    names = [name for name in others[0] if all(name in each for each in others)]
    cells = [Cell(name=name, policy=policy, scenario=each[name]) for name in names for each in others]
    table = Study(cells=cells, details=False, jobs=cases.jobs).table()
    found = table["makespan_s"].groupby(table["cell"] // len(others)).sum()
    return dict(zip(names, found.tolist(), strict=True))


def _adaptive(scenarios: Sequence[Scenario], strategies: Sequence[Strategy], config: TuneConfig) -> Policy | None:
    """`adaptive` over the same drafters, to any depth up to the deepest; None where not all of that is known.

    The oracle has the depths that are tuned over only, so `adaptive` may be ahead of it.
    """
    drafters, deepest = tuple({s.drafter: None for s in strategies}), max(s.draft_depth for s in strategies)
    policy = load_policy({"kind": "adaptive", "drafters": drafters, "max_depth": deepest})
    every, _ = _strategies(scenarios, replace(config, depths=range(1, deepest + 1), drafters=drafters))
    covered = {s for s in policy.strategies if s.speculates} <= set(every)
    return policy if covered else None


def _strategies(scenarios: Sequence[Scenario], config: TuneConfig) -> tuple[list[Strategy], list[str]]:
    """Chains that costs and acceptance of all traces cover, and notes on the others."""
    if any(scenario.acceptance is None for scenario in scenarios):
        raise ConfigError(UNKNOWN.format("ngram"))
    drafters = config.drafters
    if drafters is None:
        named = [scenario.searched_drafters() for scenario in scenarios]
        drafters = [name for name in named[0] if all(name in names for names in named)]
    for scenario in scenarios:
        scenario.registry.check(Strategy.chain(drafter, 1) for drafter in drafters)
    depths = [depth for depth in config.depths if depth]
    found = [scenario.covered_chains(drafters, depths) for scenario in scenarios]
    covered = [strategy for strategy in found[0][0] if all(strategy in chains for chains, _ in found)]
    notes = list(dict.fromkeys(note for _, why in found for note in why))
    if not covered:
        raise ConfigError(f"none of the strategies can be simulated: {'; '.join(notes)}")
    return covered, notes


def _halves(trace: Trace) -> Trace:
    """Return one RL step as two, of every other prompt and of the rest, twice each, so that batches stay as large."""
    if len(trace.rl_steps) != 1:
        return trace
    is_odd = (trace.outcomes.groupby("prompt_id").ngroup() % 2 > 0).to_numpy()
    return regrouped(trace, [(rl_step, is_odd == rl_step) for rl_step in (0, 0, 1, 1)])


def _split(trace: Trace, config: TuneConfig) -> tuple[list[int], list[int], bool]:
    """RL steps to tune on, others to judge on, and whether to judge on a sample of these."""
    name = trace.manifest.name or "the trace"
    asked = config.steps_of(trace)
    steps = list(trace.rl_steps) if asked is None else [step for step in trace.rl_steps if step in asked]
    if len(steps) < 2:
        raise ConfigError(
            f"{name} has {len(steps)} RL step: tuning needs at least two, one to tune on and one to judge on"
        )
    if asked is not None or len(steps) <= ALL_OF:
        return steps[::2], steps[1::2], False
    tune_on = spread(steps, _TUNED_ON)
    return tune_on, sorted(set(steps) - set(tune_on)), True
