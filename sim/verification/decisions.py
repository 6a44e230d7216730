"""Decisions made again: a recorded rollout played through the simulator's worker with its own times and acceptance.

The policy that ran is built anew from its seed and asked by the simulator: requests are scheduled by the simulator and
end where their tokens end. Measured values, the seconds of each iteration and the tokens kept of each draft, come from
the trace. A policy for which the simulation equals the engine makes the recorded decisions again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import count
from pathlib import Path

import numpy as np
import pandas as pd

from tltlab.acceptance.base import ConstantAcceptance
from tltlab.arrays import Flags, Floats, Ints
from tltlab.console import table_text, verdict_text
from tltlab.costs.linear import LinearCosts
from tltlab.errors import ConfigError
from tltlab.importers.sources import read
from tltlab.policies.driver import PolicyDriver, Rewarded
from tltlab.policies.selector import Selector
from tltlab.records import Json, frozen
from tltlab.sim.engine import record
from tltlab.sim.engine.batch import TOLERANCE_TOKENS, Batch, Gains, MacroStep, SpeculativeIterations
from tltlab.sim.engine.record import SimulatedRollout
from tltlab.sim.engine.regime import Regime, Regimes
from tltlab.sim.engine.requests import Requests
from tltlab.sim.engine.worker import RolloutSimulator
from tltlab.sim.placement import place
from tltlab.sim.study.jobs import side_by_side
from tltlab.sim.workload import requests_by_step
from tltlab.state import Choice, DrafterState, StepOutcome
from tltlab.strategy import NO_SPECULATION, Strategy
from tltlab.traces.trace import Trace

from .run_files import ActivePolicy, policies_in_force

_PLACE = ["rl_step", "worker", "iteration"]
_STRATEGY = ["drafter", "draft_depth", "top_k", "tokens_to_verify"]
STATE = ("batch", "num_waiting", "context_tokens")
"""Columns of `iterations` with the state in which a policy chose."""


@frozen
class Decisions:
    """Recorded decisions and those of the simulator.

    Columns of `rows`: `rl_step`, `policy`, `decisions`, `same` (share of them made again), and for each field of the
    state in which they were made the share that is equal: `batch`, `num_waiting`, `context_tokens`, `strategy` (the one
    verified meanwhile). A planner's decisions, what it returned each time, are made in the recorded states themselves.
    """

    rows: pd.DataFrame

    def share(self, column: str) -> float | None:
        """Share over all decisions; None without any."""
        weights = self.rows["decisions"]
        return float((self.rows[column] * weights).sum() / weights.sum()) if weights.any() else None

    @property
    def _states(self) -> list[str]:
        return [name for name in (*STATE, "strategy") if name in self.rows]

    def json(self) -> Json:
        """The keys of `tltlab verify --decisions --json`."""
        num, states = int(self.rows["decisions"].sum()), {name: self.share(name) for name in self._states}
        verdict = "The run made no decision."
        if num:
            equal = ", ".join(f"{name} {share:.1%}" for name, share in states.items())
            verdict = f"{self.share('same'):.2%} of {num:,} decisions made again."
            verdict += f"\nStates they were made in: {equal}." if equal else ""
        steps = self.rows.to_dict("records")
        return {"verdict": verdict, "num_decisions": num, "same": self.share("same"), "states": states, "steps": steps}

    def text(self, lists: Mapping[str, Sequence[str]] = {}) -> str:
        """The same for people."""
        shares = "; ".join(f"{name}: {{{name}:.1%}}" for name in ("same", *self._states))
        columns = f"step: {{rl_step}}; policy: {{policy}}; decisions: {{decisions}}; {shares}"
        return f"{verdict_text(self.json()['verdict'], lists)}\n\n{table_text(self.rows, columns)}"


def replay_decisions(
    run: str | Path | Trace,
    *,
    rl_steps: Sequence[int] | None = None,
    allow_code: Collection[str] = (),
    forces: Mapping[int, ActivePolicy] | None = None,
    jobs: int | None = 1,
) -> Decisions:
    """Make every recorded decision of a run again, and compare. O(iterations).

    `forces` has the policy of each RL step where the run's files do not. `jobs` processes (None: one per core) share
    the policies, each of which was set at an RL step and learned from there on. Raises ConfigError for a trace without
    iterations or decisions, a policy that the run does not record, one that is a class of a module which `allow_code`
    does not name, and one that never chooses what was recorded.
    """
    trace = read(run)
    if trace.iterations is None or trace.decisions is None or trace.steps is None:
        raise ConfigError(f"{trace.path or 'the trace'}: iterations, decisions and steps of a run are needed")
    if trace.spans is not None and "move" in set(trace.spans["kind"]):
        raise ConfigError(f"{trace.path or 'the trace'}: a planner moved its requests, which is not played again")
    forces = policies_in_force(trace, allow_code) if forces is None else forces
    chosen = trace.rl_steps if rl_steps is None else list(rl_steps)
    spans = (
        [step for step in trace.rl_steps if forces[step].since == since]
        for since in sorted({force.since for force in forces.values()})
    )
    tasks = [partial(_replayed, trace, span, forces[span[0]], chosen) for span in spans]
    rows = [row for of_span in side_by_side(tasks, jobs=jobs) for row in of_span]
    if not rows:
        raise ConfigError(f"{run}: no RL step was asked for")
    return Decisions(rows=pd.DataFrame(rows))


def _replayed(trace: Trace, span: Sequence[int], force: ActivePolicy, chosen: Collection[int]) -> list[Json]:
    """Rows of `Decisions` for those RL steps of a span that were chosen.

    All of them are played under one policy that continues learning, each with its own times and acceptance.
    """
    iterations = trace.iterations
    assert iterations is not None
    assert trace.decisions is not None
    workers = int(iterations["worker"].max()) + 1
    costs = LinearCosts(
        base_s=0.0, per_request_s=0.0, per_token_s=0.0, per_context_s=0.0, sd_base_s=0.0, sd_idle_s=0.0,
        draft_level_s=0.0, draft_level_per_request_s=0.0, prefill_per_token_s=0.0,
        max_num_seqs=most_requests(iterations),
    )  # fmt: skip
    # Asynchronously an iteration is scheduled before the tokens of the one before are known: one choice later.
    delay = int(scheduled_late(iterations))
    selectors: list[Selector] = [force.policy.build(np.random.default_rng(words)) for words in force.entropy(workers)]
    registry = trace.drafters.joined(force.policy.drafters)
    for selector in selectors:
        selector.drafts_with(registry)
    recorded = trace.decisions[trace.decisions["rl_step"].isin(list(span))]
    foreign = {Strategy(*row) for row in recorded[_STRATEGY].drop_duplicates().itertuples(index=False, name=None)}
    if foreign := foreign - {NO_SPECULATION, *selectors[0].strategies}:
        raise ConfigError(
            f"{trace.path or 'the trace'}: RL step {span[0]} chose {min(map(str, foreign))}, which policy {force.name} "
            "never does: the run ran another one"
        )
    simulator = RolloutSimulator(costs=costs, selectors=selectors, record_rewards=True, ahead=True, delay=delay)
    rewarded = recorded.loc[recorded["reward"].notna(), _PLACE]
    for worker, selector in enumerate(selectors):
        mine = rewarded.loc[rewarded["worker"] == worker, ["rl_step", "iteration"]]
        delivered = frozenset(mine.itertuples(index=False, name=None))
        simulator.drivers[worker] = RecordedDriver(selector, delivered, worker=worker, delay=delay)
    strategies = tuple(dict.fromkeys((NO_SPECULATION, *selectors[0].strategies)))
    states = drafters_by_step(trace)
    drafters = sorted({s.drafter for s in strategies if s.speculates})
    compared = []
    for step in requests_by_step(trace, list(span), tool_s=0.0):
        rows = iterations[iterations["rl_step"] == step.rl_step]
        state = states.get(step.rl_step, DrafterState())
        simulator.drafters = {name: state if registry[name].has_network else DrafterState() for name in drafters}
        regimes = Regimes(strategies, costs, ConstantAcceptance(tokens=1.0), registry)
        simulator.prepare(regimes, recorded_batches(rows))
        rollout = simulator.rollout(step, place(step, workers, "recorded"))
        if step.rl_step in chosen:
            compared.append({"rl_step": step.rl_step, "policy": force.name, **_compared(trace, rollout)})
    return compared


class RecordedDriver(PolicyDriver):
    """Driver that withholds the outcomes which the engine withheld.

    An engine delivers no outcome of drafts that were made while a drafter lagged behind its text. The trace has a
    reward for every outcome that was `delivered`, by RL step and iteration, where the policy has rewards.
    """

    def __init__(self, selector: Selector, delivered: frozenset[tuple[int, int]], *, worker: int = 0, delay: int = 0):
        super().__init__(selector, worker=worker, delay=delay)
        self._delivered = delivered
        self._iteration = self._rl_step = -1

    def begin(self, rl_step: int) -> None:
        super().begin(rl_step)
        self._rl_step, self._iteration = rl_step, -1

    def _made(self, choice: Choice) -> Choice:
        self._iteration += 1
        return super()._made(choice)

    def tell(self, choice: Choice, outcome: StepOutcome, rewarded: Rewarded | None = None) -> None:
        assert self.selector is not None
        here = (self._rl_step, self._iteration) in self._delivered
        if here or not self._delivered or self.selector.reward(choice, outcome) is None:
            super().tell(choice, outcome, rewarded)


def drafters_by_step(trace: Trace) -> dict[int, DrafterState]:
    """The learned drafter in service in each RL step whose row in `steps` has its age and updates."""
    if trace.steps is None:
        return {}
    rows = trace.steps.dropna(subset=["drafter_age", "drafter_updates"])
    columns = (rows[name].astype(np.int64) for name in ("rl_step", "drafter_age", "drafter_updates"))
    return {step: DrafterState(age=age, updates=done) for step, age, done in zip(*columns, strict=True)}


def most_requests(iterations: pd.DataFrame) -> int | None:
    """Requests that an engine runs at most; None where none ever waited while as many ran as ever do.

    Requests that begin with a batch that its token budget limits wait too, and not while the batch is largest.
    """
    largest = iterations.loc[iterations["batch"] == iterations["batch"].max()]
    return int(largest["batch"].iloc[0]) if (largest["num_waiting"].fillna(0) > 0).any() else None


def scheduled_late(iterations: pd.DataFrame) -> bool:
    """True for iterations of engines that schedule asynchronously, which cannot tell how long drafting took."""
    return bool(iterations["draft_duration"].isna().all())


def recorded_batches(rows: pd.DataFrame) -> Callable[[Requests], RecordedBatch]:
    """Return a function that makes the batches of one rollout's workers, in order."""
    workers, batch = count(), LateBatch if scheduled_late(rows) else RecordedBatch

    def made(requests: Requests) -> RecordedBatch:
        mine = rows[rows["worker"] == next(workers)].sort_values("iteration")
        return batch(requests, Recorded(requests, mine), own_seconds(mine))

    return made


class Recorded(Gains):
    """Gains of each request as recorded, iteration by iteration; a token each beyond the last one.

    The trace has the tokens drafted for all requests of an iteration together. A request has no draft in the iteration
    of its first token, and none beyond its cap; the others have equal parts of what was drafted.
    """

    def __init__(self, requests: Requests, rows: pd.DataFrame):
        self._accepted = rows["accepted_per_request"].tolist() if "accepted_per_request" in rows else [None] * len(rows)
        self._drafted = rows["num_drafted"].tolist()
        self.iteration = 0

    def ahead(self, batch: Batch, regime: Regime, limit: float, room_tokens: float) -> SpeculativeIterations:
        assert isinstance(batch, RecordedBatch)
        at = self.iteration
        gains, drafted = np.ones(len(batch), np.int64), np.zeros(len(batch))
        if at < len(self._accepted):
            if (accepted := self._accepted[at]) is not None:
                kept = np.asarray(accepted, np.int64)[: len(batch)]
                gains[: len(kept)] += kept
            drafted = self._shares(batch, regime, float(self._drafted[at]))
        return SpeculativeIterations(regime, gains[:, None], 1, drafted)

    def _shares(self, batch: RecordedBatch, regime: Regime, total: float) -> Floats:
        residents = batch.residents
        room = np.clip(batch.requests.caps[residents] - batch.made[residents] - 1, 0, regime.strategy.reach)
        room[batch.undrafted] = 0.0
        whole = float(room.sum())
        shares: Floats = room if whole == total or not whole else room * (total / whole)
        return shares


class RecordedBatch(Batch):
    """Residents that gain what was recorded in the recorded `seconds`, iteration by iteration."""

    def __init__(self, requests: Requests, source: Recorded, seconds: Floats):
        super().__init__(requests, source)
        self.advances_plain = False
        self._recorded, self._seconds = source, seconds
        self._before: Ints = np.zeros(0, np.int64)

    @property
    def undrafted(self) -> Flags:
        """Residents for which nothing was drafted: they were not in the iteration before."""
        return ~np.isin(self.residents, self._before)

    def advance(self, regime: Regime, limit: float, room_tokens: float) -> MacroStep:
        at, residents = self._recorded.iteration, self.residents
        macro = self._iterate(regime, room_tokens)
        macro.seconds = macro.first_s = float(self._seconds[at]) if at < len(self._seconds) else 0.0
        self._recorded.iteration, self._before = at + 1, residents
        return macro

    def _iterate(self, regime: Regime, room_tokens: float) -> MacroStep:
        return super().advance(regime, 1, room_tokens)


class LateBatch(RecordedBatch):
    """Residents as a scheduler knows them that schedules asynchronously, with the iteration before in flight.

    Requests that end there run once more, and nothing is drafted for them. A request is held where its next token, in
    flight, is the last that it may have.
    """

    lags = True

    def __init__(self, requests: Requests, source: Recorded, seconds: Floats) -> None:
        super().__init__(requests, source, seconds)
        # By request the tokens in flight, of which the scheduler knows that there is one.
        self._flying = np.zeros(len(requests))
        self._counted_later: list[tuple[Ints, SpeculativeIterations]] = []

    @property
    def context_tokens(self) -> float:
        return super().context_tokens - float(np.maximum(self._flying[self.residents] - 1, 0).sum())

    def generated(self, request: int) -> float:
        return super().generated(request) - float(self._flying[request])

    @property
    def undrafted(self) -> Flags:
        return super().undrafted | (self.remaining <= TOLERANCE_TOKENS)

    def land(self) -> None:
        self._flying[:], self.num_held = 0.0, 0
        self._uncounted += self._counted_later
        self._counted_later = []

    def _iterate(self, regime: Regime, room_tokens: float) -> MacroStep:
        self.land()
        known, num_uncounted = self.residents[self.remaining > TOLERANCE_TOKENS], len(self._uncounted)
        before = self.made[known] + 1
        batch, macro = self.residents, super()._iterate(regime, room_tokens)
        self._uncounted, self._counted_later = self._uncounted[:num_uncounted], self._uncounted[num_uncounted:]
        self._flying[batch] = 1.0 if macro.gains is None else macro.gains[:, 0]
        due = before >= self.requests.caps[known]
        self.residents, self.num_held = known[~due], int(due.sum())
        return macro


def own_seconds(rows: pd.DataFrame) -> Floats:
    """Seconds of each iteration with the time of the drafts that it verifies instead of those that it makes."""
    drafting = rows["draft_duration"].fillna(0.0).to_numpy(np.float64)
    seconds: Floats = rows["duration"].to_numpy(np.float64) - drafting
    seconds[1:] += drafting[:-1]
    return seconds


def _compared(trace: Trace, rollout: SimulatedRollout) -> Json:
    """Shares of the recorded decisions of a rollout, and of the states they were made in, that came out the same."""
    step = rollout.requests.rl_step
    assert trace.iterations is not None
    assert trace.decisions is not None
    made = record.tables([rollout], "", iterations=True)
    decided = trace.decisions[trace.decisions["rl_step"] == step]
    recorded = _with_states(trace.iterations[trace.iterations["rl_step"] == step], decided)
    simulated = _with_states(made["iterations"], made["decisions"])
    both = recorded.merge(simulated, on=_PLACE, how="left", suffixes=("", "_simulated"))

    def share(*columns: str) -> float:
        same = np.ones(len(both), dtype=bool)
        for name in columns:
            same &= (both[name] == both[f"{name}_simulated"]).to_numpy(dtype=bool)
        return float(same.mean()) if len(both) else float("nan")

    return {
        "decisions": len(both),
        "same": share(*_STRATEGY),
        **{name: share(f"{name}_state") for name in STATE},
        "strategy": share(*(f"{name}_state" for name in _STRATEGY)),
    }


def _with_states(iterations: pd.DataFrame, decisions: pd.DataFrame) -> pd.DataFrame:
    """Decisions, each with the state of the iteration before the one that it was in force in, where it was made."""
    states = iterations[[*_PLACE, *STATE, *_STRATEGY]].copy()
    states["iteration"] += 1
    states = states.rename(columns={name: f"{name}_state" for name in (*STATE, *_STRATEGY)})
    return decisions[[*_PLACE, *_STRATEGY]].merge(states, on=_PLACE, how="left")
