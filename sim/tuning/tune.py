"""`tune`: find a policy for a trace on some of its RL steps, judge it on others, and say whether it was worth it.

Fixed strategies, elastic activation and exact tables are compared in fluid mode, free of luck. What a bandit's settings
are worth depends on what blurs its rewards, so those are searched in sampled mode with the measured noise of iteration
times. The best of each kind then meets the RL steps that were held out.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tltlab.acceptance.load import Acceptance
from tltlab.costs.base import CostModel
from tltlab.errors import ConfigError
from tltlab.policies.policy import Policy, load_policy
from tltlab.sim.engine.regime import Regimes
from tltlab.sim.scenario import Scenario
from tltlab.strategy import Strategy
from tltlab.traces.trace import Trace

from .cases import Case, Cases
from .judge import Finalists, Judged, Row, judge
from .search import Bandits, GraphMemory, Prices, Trial, elastic, fixed, search, tables

DEPTHS = (1, 2, 4, 8)
_SELECTION, _JUDGEMENT = 10_000, 20_000
"""Seeds of later stages lie this far from those of the search: what won by luck has to win again."""


@dataclass(frozen=True, kw_only=True)
class TuneResult:
    """The chosen policy with its provenance, and what it was measured against; all times are simulated.

    `candidates` are the finalists on the held-out RL steps, the fastest first. `searched` maps every policy that was
    tried without luck to its score on the tuning steps, `trials` are the bandit's, the best first.
    """

    policy: Policy
    name: str
    worth_it: bool
    verdict: str
    candidates: tuple[Row, ...]
    searched: dict[str, float]
    trials: tuple[Trial, ...]
    buckets: tuple[dict[str, Any], ...]
    tuned_on: tuple[tuple[int, ...], ...]
    judged_on: tuple[tuple[int, ...], ...]
    oracle_s: float
    bound_s: float
    notes: tuple[str, ...]
    wall_s: float

    def json(self, path: str | None = None) -> dict[str, Any]:
        """The keys of `tltlab tune --json`."""
        return {
            "policy": path,
            "name": self.name,
            "worth_it": self.worth_it,
            "verdict": self.verdict,
            "candidates": [row.json() for row in self.candidates],
            "oracle_s": self.oracle_s,
            "bound_s": self.bound_s,
            "buckets": list(self.buckets),
            "tuned_on": [list(steps) for steps in self.tuned_on],
            "judged_on": [list(steps) for steps in self.judged_on],
            "trials": len(self.trials),
            "settings": self.trials[0].settings if self.trials else None,
            "provenance": self.policy.provenance,
            "notes": list(self.notes),
            "wall_s": self.wall_s,
        }


def tune(
    traces: Trace | Sequence[Trace],
    *,
    costs: CostModel | dict[str, Any] | str | Path | None = None,
    acceptance: Acceptance | dict[str, Any] | str | Path | None = None,
    workers: int | None = None,
    placement: str | None = None,
    depths: Sequence[int] = DEPTHS,
    drafters: Sequence[str] | None = None,
    judge_steps: Sequence[int] | None = None,
    max_buckets: int = 4,
    trials: int = 40,
    repeats: int = 3,
    decision_block: int = 1,
    robust: bool = False,
    cost_error: float | None = None,
    graphs: GraphMemory | None = None,
    seed: int = 0,
    jobs: int = 1,
    provenance: Mapping[str, Any] | None = None,
) -> TuneResult:
    """Tune on every other RL step of each trace, the first included, and judge on the rest, or on `judge_steps`.

    Costs, acceptance and workers are found as `simulate` does; placement is the recorded one where the trace knows
    its workers, else contiguous. Candidates: no speculation, chains of `depths` by each of `drafters` (default: those
    that the acceptance knows) throughout or below a threshold, exact tables of up to `max_buckets` rows, and BEG-MAB,
    whose settings `trials` trials of Optuna search, each the mean of `repeats` seeds; 0 leaves the bandit out.

    `robust` minimises the largest ratio to plain decoding over the traces and, with `cost_error` e, over costs and
    accepted tokens that are off by a share of e either way. `graphs` limits policies to those whose CUDA graphs fit.
    `provenance` is written into the policy over what is found here. The result does not depend on `jobs`.

    Raises ConfigError for a trace with fewer than two RL steps, a missing acceptance, and where no policy is possible.
    """
    began = time.perf_counter()
    every = [traces] if isinstance(traces, Trace) else list(traces)
    _check(every, depths, drafters, trials, repeats, max_buckets, robust, cost_error)
    parts = [_split(trace, judge_steps) for trace in every]

    def of(trace: Trace, at: int, steps: Sequence[int]) -> Case:
        scenario = Scenario.of(
            trace,
            costs=costs,
            acceptance=acceptance,
            workers=workers,
            placement=placement or _placement(trace, workers),
            rl_steps=steps,
            seed=seed,
            decision_block=decision_block,
        )
        return Case(name=str(trace.manifest.name or f"trace {at}"), trace=at, scenario=scenario)

    known = [of(trace, i, part[0]) for i, (trace, part) in enumerate(zip(every, parts, strict=True))]
    held = [of(trace, i, part[1]) for i, (trace, part) in enumerate(zip(every, parts, strict=True))]
    strategies, notes = _strategies(known + held, depths, drafters)
    tuning, judging = (
        Cases(cases=(*c, *(off for one in c for off in (one.off_by(cost_error) if cost_error else []))), robust=robust)
        for c in (known, held)
    )
    if all(case.scenario.costs.noise is None for case in known):
        notes.append("the costs have no noise: a bandit is tuned as if iteration times were exact (calibrate anew)")

    # Without luck: everything that does not learn.
    prices = Prices.of(tuning.cases if robust else tuning.nominal, strategies)
    apart = [Prices.of([case], strategies) for case in tuning.cases] if robust else []
    kinds = {
        "fixed": fixed(strategies),
        "elastic": elastic(strategies, prices.max_batch),
        "table": tables([prices, *apart], max_buckets, graphs),
    }
    if graphs is not None:
        kinds = {kind: {n: p for n, p in found.items() if graphs.holds(p)} for kind, found in kinds.items()}
        if not any(kinds.values()):
            raise ConfigError(
                f"no candidate's CUDA graphs fit into {graphs.cap_bytes:.4g} bytes, not even plain decoding's"
            )
    policies = {name: policy for found in kinds.values() for name, policy in found.items()}
    fluid = tuning.makespans({"none": load_policy("none")} | policies, mode="fluid", seeds=[seed], jobs=jobs)
    searched = {name: tuning.score(fluid[name], fluid["none"]) for name in policies}
    best = {kind: min(found, key=lambda n: searched[n]) for kind, found in kinds.items() if found}

    # With luck and noise: the bandit.
    seeds = [seed + k for k in range(repeats)]
    tried: list[Trial] = []
    if trials and strategies:
        rows = [prices.table(k, graphs) for k in range(1, max_buckets + 1)]
        bandits = Bandits(prices=prices, tables=tuple({str(t): t for t in rows}.values()))
        plain = tuning.makespans({"none": load_policy("none")}, mode="sampled", seeds=seeds)["none"]

        def score(new: Mapping[str, Policy]) -> dict[str, float]:
            made = tuning.makespans(new, mode="sampled", seeds=seeds, jobs=jobs)
            return {name: tuning.score(made[name], plain) for name in new}

        fits = graphs.holds if graphs else lambda policy: True
        tried = search(bandits, score, trials=trials, seed=seed, fits=fits)

    finalists = _finalists(policies, best, tried, strategies, graphs)
    selected = tuning.makespans(finalists.policies, mode="sampled", seeds=[s + _SELECTION for s in seeds], jobs=jobs)
    scores = {n: tuning.score(row, selected["none"]) for n, row in selected.items()}
    judged = judge(judging, finalists, scores, strategies, seeds=[s + _JUDGEMENT for s in seeds], seed=seed, jobs=jobs)
    return TuneResult(
        policy=finalists.policies[judged.name].model_copy(
            update={
                "provenance": _provenance(
                    judged, tuning, parts, searched, len(tried), seed, repeats, decision_block, cost_error
                )
                | dict(provenance or {})
            }
        ),
        name=judged.name,
        worth_it=judged.worth_it,
        verdict=judged.verdict,
        candidates=judged.rows,
        searched=searched,
        trials=tuple(tried),
        buckets=tuple(
            {"table": name, "score": searched[name], "rows": policy.selector.model_dump(mode="json")["rows"]}
            for name, policy in kinds["table"].items()
        ),
        tuned_on=tuple(tuple(part[0]) for part in parts),
        judged_on=tuple(tuple(part[1]) for part in parts),
        oracle_s=judged.oracle_s,
        bound_s=judged.bound_s,
        notes=tuple(notes),
        wall_s=time.perf_counter() - began,
    )


def _finalists(
    policies: Mapping[str, Policy],
    best: Mapping[str, str],
    tried: Sequence[Trial],
    strategies: Sequence[Strategy],
    graphs: GraphMemory | None,
) -> Finalists:
    """Plain decoding, the best of each kind, and the shipped bandit where its strategies are known here."""
    kind_of = {"none": "none"} | {name: kind for kind, name in best.items() if name != "none"}
    chosen = {"none": load_policy("none")} | {name: policies[name] for name in best.values()}
    if tried:
        chosen["tuned beg-mab"], kind_of["tuned beg-mab"] = tried[0].policy, "bandit"
    shipped = load_policy("beg-mab")
    if {s for s in shipped.strategies if s.speculates} <= set(strategies) and (graphs is None or graphs.holds(shipped)):
        chosen["shipped beg-mab"], kind_of["shipped beg-mab"] = shipped, "shipped"
    return Finalists(policies=chosen, kind_of=kind_of, best_fixed=best.get("fixed", "none"))


def _strategies(
    cases: Sequence[Case], depths: Sequence[int], drafters: Sequence[str] | None
) -> tuple[list[Strategy], list[str]]:
    """Chains that costs and acceptance of all cases cover, and notes on the others."""
    models = [case.scenario.acceptance for case in cases]
    if any(model is None for model in models):
        raise ConfigError(
            "nothing is known about acceptance: the trace has neither acceptance.parquet nor acceptance.json; give "
            "--acceptance geometric:ALPHA or a fitted file"
        )
    if drafters is None:
        named = [set(model.drafters) for model in models if model is not None and model.drafters]
        drafters = sorted(set.intersection(*named)) if named else ["ngram"]
    found, notes = [], []
    for strategy in (Strategy.chain(drafter, depth) for drafter in drafters for depth in depths if depth):
        try:
            for case in cases:
                regimes = Regimes([strategy], case.scenario.costs, case.expected([]).acceptance)
                regimes.up_to(max(map(len, case.scenario.steps), default=1))
            found.append(strategy)
        except ConfigError as error:
            notes.append(f"{strategy} is left out: {error}")
    if not found:
        raise ConfigError(f"none of the strategies can be simulated: {'; '.join(notes)}")
    return found, notes


def _provenance(
    judged: Judged,
    tuning: Cases,
    parts: Sequence[tuple[list[int], list[int]]],
    searched: Mapping[str, float],
    num_trials: int,
    seed: int,
    repeats: int,
    decision_block: int,
    cost_error: float | None,
) -> dict[str, Any]:
    row = next(row for row in judged.rows if row.name == judged.name)
    nominal = tuning.nominal
    return {
        "name": judged.name,
        "trace": [case.name for case in nominal],
        "costs": [case.scenario.costs_name for case in nominal],
        "acceptance": [case.scenario.acceptance_name for case in nominal],
        "seed": seed,
        "objective": tuning.objective,
        "cases": [case.name for case in tuning.cases],
        "cost_error": cost_error,
        "tuned_on": [part[0] for part in parts],
        "judged_on": [part[1] for part in parts],
        "makespan_s": row.makespan_s,
        "interval": [row.ratio_low, row.ratio_high],
        "compared_with": judged.best_fixed,
        "regret": row.regret,
        "regret_to_bound": row.regret_to_bound,
        "oracle_s": judged.oracle_s,
        "candidates": len(searched) + num_trials,
        "verdict": judged.verdict,
        "worth_it": judged.worth_it,
        "decision_block": decision_block,
        "repeats": repeats,
        "trials": num_trials,
        "simulated": True,
    }


def _split(trace: Trace, judge_steps: Sequence[int] | None) -> tuple[list[int], list[int]]:
    """RL steps to tune on and to judge on."""
    steps = list(trace.rl_steps)
    if len(steps) < 2:
        raise ConfigError(
            f"{trace.manifest.name or 'the trace'} has {len(steps)} RL step: tuning needs at least two, one to tune on "
            "and one to judge on"
        )
    held = steps[1::2] if judge_steps is None else [s for s in steps if s in set(judge_steps)]
    rest = [s for s in steps if s not in held]
    if not held or not rest:
        raise ConfigError(
            f"{trace.manifest.name or 'the trace'} has the RL steps {steps[0]}..{steps[-1]}: judging on {len(held)} of "
            f"them leaves {len(rest)} to tune on, and both need one"
        )
    return rest, held


def _placement(trace: Trace, workers: int | None) -> str:
    same = workers in (None, trace.manifest.num_workers)
    known = "worker" in trace.outcomes and bool(trace.outcomes["worker"].notna().all())
    return "recorded" if same and known else "contiguous"


def _check(
    traces: Sequence[Trace],
    depths: Sequence[int],
    drafters: Sequence[str] | None,
    trials: int,
    repeats: int,
    max_buckets: int,
    robust: bool,
    cost_error: float | None,
) -> None:
    if not traces:
        raise ConfigError("no trace to tune on: give at least one")
    if drafters is not None and not drafters:
        raise ConfigError("no drafter given: name one, such as ngram, or leave the choice to the acceptance model")
    if any(depth < 0 for depth in depths):
        raise ConfigError(f"depths count drafted tokens, 0 or more, got {', '.join(map(str, depths))}")
    if not any(depths):
        raise ConfigError("no depth above 0 given: name depths to try, such as 1,2,4,8")
    for name, value, least in (("trials", trials, 0), ("repeats", repeats, 1), ("max_buckets", max_buckets, 1)):
        if value < least:
            raise ConfigError(f"{name} must be at least {least}, got {value}")
    if cost_error is not None and not 0.0 <= cost_error < 1.0:
        raise ConfigError(f"the cost error is a share between 0 and 1, such as 0.2, got {cost_error:g}")
    if cost_error is not None and not robust:
        raise ConfigError("a cost error is what a robust policy withstands: give --robust with it")
    if robust and len(traces) == 1 and not cost_error:
        raise ConfigError("--robust needs more than one case: several traces, or --cost-error 0.2")
