"""One story of requests, played through an engine's control and through the simulator: the policy sees the same calls.

The engine is played by a scheduler of its own below, written in the words of vLLM's. The simulator has the lengths, the
tokens kept of each draft and the seconds of each iteration, and schedules by itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd
import pytest

from tltlab.acceptance.base import ConstantAcceptance
from tltlab.costs.linear import LinearCosts
from tltlab.drafters.specs import LearnedSpec
from tltlab.policies.selector import Selector
from tltlab.policies.simple import Fixed
from tltlab.runtime.engine.control import Control
from tltlab.runtime.engine.drafter_pool import DrafterPool
from tltlab.runtime.engine.tracker import Iteration
from tltlab.sim.engine.regime import Regimes
from tltlab.sim.engine.worker import RolloutSimulator
from tltlab.sim.verification.decisions import recorded_batches
from tltlab.sim.workload import requests_by_step
from tltlab.state import Choice, DrafterState
from tltlab.strategy import NO_SPECULATION, Strategy
from tltlab.traces.schema import KEY, Manifest
from tltlab.traces.trace import Trace

STRATEGIES = (NO_SPECULATION, Strategy.chain("learned", 2), Strategy.chain("learned", 4), Strategy("learned", 4, 1, 3))


class Recording(Selector):
    """Chooses in turn, each choice with a chance and its own bucket, and keeps every call with all its fields."""

    strategies = STRATEGIES

    def __init__(self, hold):
        self.hold = hold
        self.calls = []
        self.asked = 0

    def choose(self, state):
        drafters = {name: state.drafters[name] for name in state.drafters}
        requests = [
            (r.key, r.prompt_id, r.generated_tokens, r.max_response_tokens, rounded(r.recent_acceptance))
            for r in state.requests
        ]
        seen = (state.rl_step, state.worker, state.batch, state.waiting, state.remaining, state.context_tokens)
        self.calls.append(("choose", *seen, state.strategy, drafters, requests))
        strategy = STRATEGIES[self.asked // self.hold % len(STRATEGIES)]
        self.asked += 1
        return Choice(strategy, 1.0 / (1 + self.asked % 3), self.asked % 2)

    def observe(self, choice, outcome):
        self.calls.append((
            "observe", choice, pytest.approx(outcome.elapsed_s, abs=1e-9), outcome.batch, tuple(outcome.accepted),
            tuple(outcome.drafted), outcome.had_prefill,
        ))  # fmt: skip

    def reward(self, choice, outcome):
        return outcome.accept_length


def rounded(value):
    """Averages are sums in another order on the two sides."""
    return None if value is None else round(value, 9)


@dataclass(frozen=True, kw_only=True)
class Response:
    """A response as it ended: "stop" by EOS or a stop string, "abort" where a client left."""

    name: str
    prompt_tokens: int
    tokens: int
    reason: str = "stop"
    cap: int = 64


@dataclass(frozen=True, kw_only=True)
class Story:
    """Responses of each RL step, and the machine that they run on."""

    rl_steps: Sequence[Sequence[Response]]
    most_running: int = 16
    capacity_tokens: int | None = None

    def kept(self, name, position):
        """Most tokens kept of a draft at this position of a response."""
        return (7 * len(name) + 3 * position + sum(map(ord, name))) % 5

    def seconds(self, iteration, verified, drafted):
        """Seconds of verifying and of drafting so many tokens."""
        return 0.01 + 1e-4 * verified + 1e-3 * (iteration % 3), 2e-4 * drafted


class Clock:
    """A clock that the engine sets."""

    now_s = 0.0

    def __call__(self):
        return self.now_s


@dataclass
class Engine:
    """vLLM's scheduler in short: first come first served, the newest is preempted when memory runs out.

    Asynchronously an iteration is scheduled while the one before is in flight, and counts its drafts as kept.
    """

    story: Story
    control: Control
    clock: Clock
    outputs: dict[str, list[int]] = field(default_factory=dict)
    flying: list[tuple[Iteration, int]] = field(default_factory=list)
    preemptions: int = 0

    def play(self, rl_step):
        self.responses = responses = {r.name: r for r in self.story.rl_steps[rl_step]}
        waiting, self.running, self.drafts = list(responses), [], dict.fromkeys(responses, 0)
        running, computed, self.iteration = self.running, set(), 0
        self.control.begin(rl_step)
        for name, response in responses.items():
            self.outputs[name] = []
            key = (rl_step, name, 0, 0)
            self.control.add(name, key, range(response.prompt_tokens), self.outputs[name], response.cap)

        def context(name):
            flying = (len(work.places.get(name, ())) + 1 for work, _ in self.flying if name in work.request_ids)
            return responses[name].prompt_tokens + len(self.outputs[name]) + sum(flying)

        capacity = self.story.capacity_tokens or 10**9
        while waiting or running or self.flying:
            self.control.iteration_starts()
            preempted = False
            while len(running) > 1 and sum(map(context, running)) + len(running) > capacity:
                newest = running.pop()
                waiting.insert(0, newest)
                computed.discard(newest)
                self.drafts[newest] = 0
                preempted = True
                self.preemptions += 1
            while (
                waiting and not preempted and len(running) < self.story.most_running
                and sum(map(context, [*running, waiting[0]])) + len(running) + 1 <= capacity
            ):  # fmt: skip
                running.append(waiting.pop(0))
            flying = {name for work, _ in self.flying for name in work.request_ids}
            batch = [n for n in running if n not in flying or len(self.outputs[n]) + 1 < responses[n].cap]
            if batch:
                work = Iteration(
                    request_ids=batch,
                    drafts={name: [0] * self.drafts[name] for name in batch if self.drafts[name]},
                    waiting=len(waiting),
                    context_tokens=sum(map(context, batch)),
                    prefill_tokens=sum(context(name) for name in batch if name not in computed),
                )
                computed.update(batch)
                depth = self.control.scheduled(work)
                if self.control.overlapped:
                    self.drafts |= dict.fromkeys(batch, depth)
                self.flying.append((work, depth))
            if len(self.flying) > self.control.overlapped or not batch:
                self.land(*self.flying.pop(0))
        self.control.idle()
        iterations, _ = self.control.end()
        return iterations.to_pandas()

    def land(self, work, depth):
        """The output of an iteration, of whose drafts none goes beyond a cap."""
        batch, drafts = work.request_ids, self.drafts
        if self.control.overlapped:
            room = {name: self.responses[name].cap - len(self.outputs[name]) - 1 for name in work.drafts}
            work.drafts = {name: each[: room[name]] for name, each in work.drafts.items() if room[name] > 0}
        drafted = {name: len(each) for name, each in work.drafts.items() if name in self.running}
        counts = [1 + min(drafted.get(name, 0), self.story.kept(name, len(self.outputs[name]))) for name in batch]
        seconds = self.story.seconds(self.iteration, len(batch) + sum(drafted.values()), depth * len(batch))
        self.clock.now_s += sum(seconds)
        self.iteration += 1
        self.control.sampled(counts)
        for name, count in zip(batch, counts, strict=True):
            if name in self.running:
                left = self.responses[name].tokens - len(self.outputs[name])
                self.outputs[name] += [1] * min(count, left)
                if count >= left:
                    self.running.remove(name)
                    self.control.finish(name)
        if not self.running and self.control.overlapped and not self.control.live:
            self.control.idle()
        if not self.control.overlapped:
            # The workers drafted for everybody, before anyone knew who had ended.
            made = self.control.drafts(batch, [[0] * depth] * len(batch) if depth else [], seconds[1])
            lengths = map(len, made) if made else [0] * len(batch)
            drafts |= dict(zip(batch, lengths, strict=True))


def engine_iterations(story, policy, late=False):
    """The iterations of each RL step, with a policy beside the engine."""
    clock = Clock()
    pool = DrafterPool({"learned": LearnedSpec(method="eagle", model="a/head")}, 4)
    control = Control(pool, overlapped=late, clock=clock)
    control.set_selector(policy)
    engine, iterations = Engine(story, control, clock), []
    for rl_step in range(len(story.rl_steps)):
        if rl_step:
            pool.updated(updates=10 * rl_step)
        iterations.append(engine.play(rl_step))
    assert bool(engine.preemptions) == (story.capacity_tokens is not None)
    return iterations


def simulated_depths(story, policy, iterations, late=False):
    """Depths that each iteration verifies in the simulator's worker."""
    depths = []
    costs = LinearCosts(
        base_s=0.0, per_request_s=0.0, per_token_s=0.0, per_context_s=0.0, sd_base_s=0.0, sd_idle_s=0.0,
        draft_level_s=0.0, draft_level_per_request_s=0.0, prefill_per_token_s=0.0, max_num_seqs=story.most_running,
        kv_capacity_tokens=story.capacity_tokens,
    )  # fmt: skip
    simulator = RolloutSimulator(costs=costs, selectors=[policy], delay=int(late))
    for step, rows in zip(requests_by_step(trace_of(story)), iterations, strict=True):
        state = DrafterState(updates=10 * step.rl_step)
        simulator.drafters = {"learned": state}
        simulator.prepare(Regimes(STRATEGIES, costs, ConstantAcceptance(tokens=1.0)), recorded_batches(rows))
        log = simulator.rollout(step, [list(range(len(step)))]).logs[0].columns
        depths.append(np.repeat([regime.strategy.draft_depth for regime in log.regime], log.num_iterations).tolist())
    return depths


def trace_of(story):
    """The lengths of a story."""
    keys = [(step, r.name, 0, r) for step, responses in enumerate(story.rl_steps) for r in responses]
    key = pd.DataFrame([(step, name, sample, 0) for step, name, sample, _ in keys], columns=list(KEY))
    workload = key.assign(
        epoch=0, prompt_tokens=[r.prompt_tokens for *_, r in keys], max_response_tokens=[r.cap for *_, r in keys],
        policy_version=0,
    )  # fmt: skip
    outcomes = key.assign(response_tokens=[r.tokens for *_, r in keys], finish_reason=[r.reason for *_, r in keys])
    manifest = Manifest(kind="recorded", name="story", num_workers=1)
    return Trace.from_tables(manifest, {"workload": workload, "outcomes": outcomes})


SHORT = [Response(name=f"r{n}", prompt_tokens=5 + n, tokens=4 + 5 * (n % 4)) for n in range(6)]
STORIES = {
    "all at once": Story(rl_steps=[SHORT]),
    "some wait": Story(rl_steps=[SHORT], most_running=3),
    "memory runs out": Story(rl_steps=[SHORT], capacity_tokens=60),
    "a cap is reached, a client leaves": Story(
        rl_steps=[[*SHORT, Response(name="c", prompt_tokens=3, tokens=12, reason="length", cap=12),
                   Response(name="a", prompt_tokens=3, tokens=7, reason="abort")]]
    ),
    "the drafter is updated between RL steps": Story(rl_steps=[SHORT, SHORT[::-1], SHORT[:2]]),
    "all wait for one at its cap": Story(
        rl_steps=[[Response(name=n, prompt_tokens=3, tokens=9, reason="length", cap=9) for n in "abc"]], most_running=1
    ),
    "one request": Story(rl_steps=[[Response(name="r", prompt_tokens=1, tokens=9)]]),
}  # fmt: skip


@pytest.mark.parametrize("hold", [1, 3])
@pytest.mark.parametrize(
    ("name", "late"),
    [(name, late) for late in (False, True) for name in STORIES if not (late and STORIES[name].capacity_tokens)],
)
def test_a_policy_gets_the_same_calls_everywhere(name, late, hold):
    story, beside_engine, simulated = STORIES[name], Recording(hold), Recording(hold)
    simulated_depths(story, simulated, engine_iterations(story, beside_engine, late), late)
    for n, (engine, simulator) in enumerate(zip(beside_engine.calls, simulated.calls, strict=False)):
        assert engine == simulator, f"call {n}"
    assert len(beside_engine.calls) == len(simulated.calls)
    assert {call[0] for call in simulated.calls} == {"choose", "observe"}


@pytest.mark.parametrize("story", [name for name in STORIES if name != "memory runs out"])
def test_a_memoryless_policy_s_first_iterations_verify_no_draft(story):
    """Its choices hold at once in the simulator, but for the first."""
    fixed = Fixed(STRATEGIES[2])
    iterations = engine_iterations(STORIES[story], fixed)
    depths = [rows["draft_depth"].tolist() for rows in iterations]
    assert simulated_depths(STORIES[story], fixed, iterations) == depths
    assert all(first == 0 for first, *_ in depths)
