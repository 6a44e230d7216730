"""One story of a rollout under a planner, in the simulator and in a pool of engines: the same is seen, and is done.

The engines of the pool are played below, in the time of an event loop whose clock jumps from event to event.
"""

import asyncio
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.sim.workloads import FEW, FREE, ONE_SECOND
from tests.traces_of_lengths import of_lengths
from tltlab.planning.beliefs import LengthBelief
from tltlab.planning.rollout import HELD, EngineCosts, Gather, Hold, Move, RolloutPlanner, Shape
from tltlab.planning.rollout_driver import PlanDriver
from tltlab.runtime.engine.generation import GenerationRequest, GenerationResponse, Rollout
from tltlab.runtime.rollout.planned import PlannedRollout
from tltlab.runtime.rollout.worker import WorkerLost
from tltlab.sim import simulate
from tltlab.strategy import NO_SPECULATION

BY_BATCH = FREE.model_copy(update={"per_request_s": 1.0})
QUARTER = ONE_SECOND.model_copy(update={"base_s": 0.25})
GATHER_S, PROMPT, CAP = 0.5, 128, 1000


def key(n):
    return (0, f"p{n}", 0, 0)


class Scripted(RolloutPlanner):
    """Does what a story says, and writes down what it sees."""

    def __init__(self, rule, prompt=PROMPT, caps=(CAP,)):
        self.rule, self.prompt, self.caps, self.facts = rule, prompt, set(caps), []

    def plan(self, state):
        if (state.prompt_tokens == 20.0).all():
            return []  # the example of the contract's check
        at = {k[1]: int(w) for k, w in zip(state.keys, state.worker, strict=True)}
        # Where an iteration is under way a simulator knows how far it is.
        has = {k[1]: int(tokens) for k, tokens in zip(state.keys, state.generated_tokens, strict=True)}
        seen = ", ".join(f"{name} {has[name]} on {at[name]}" for name in sorted(at))
        ended = ", ".join(sorted(f"{k[1]} {tokens}" for k, tokens in state.ended.items()))
        assert set(state.prompt_tokens) == {self.prompt}
        assert set(state.max_response_tokens) <= self.caps
        assert state.remaining(np.array([0.5])).shape == (len(state), 1)
        self.facts.append(f"{state.now_s:g} s, {state.active}: {seen}; ended: {ended or 'none'}")
        return self.rule(state)

    def failed(self, action, why):
        self.facts.append(f"failed: {type(action).__name__}, {why}")

    def __deepcopy__(self, memo):
        return self


@dataclass(frozen=True)
class Story:
    """Lengths in tokens, in order over the workers; what the planner does; the facts."""

    lengths: Sequence[int]
    rule: Callable
    workers: int
    facts: Sequence[str]
    costs: object = ONE_SECOND


def gather_at(left):
    def rule(state):
        wide = [shape for shape in state.engines if shape.gpus > state.active.gpus]
        return [Gather(shape=shape, queues=()) for shape in wide] if len(state) <= left else []

    return rule


def once(left, *actions):
    """These actions when so many are left."""
    return lambda state: list(actions) if len(state) == left else []


def hold_then_move(state):
    """Holds the third request until another has ended."""
    if len(state) == 3:
        return [Hold(key=key(2))]
    return [Move(key=key(2), worker=1)] if HELD in state.worker else []


def there_and_back(state):
    return [Move(key=key(3), worker=len(state))] if len(state) in (2, 3) else []


def gather_then_move(state):
    return [*gather_at(2)(state), *once(2, Move(key=key(3), worker=0))(state)]


def one_after_another(state):
    """The first, then the second on worker 1, then the third on the engine of all GPUs."""
    if len(state) == 3:
        return [Hold(key=key(n)) for n in (1, 2)]
    return [Move(key=key(1), worker=1)] if len(state) == 2 else gather_at(1)(state)


STORIES = {
    "one after another": Story(
        [8, 12, 20],
        one_after_another,
        2,
        [
            "0 s, 2x1: p0 0 on 0, p1 0 on 0, p2 0 on 1; ended: none",
            "8 s, 2x1: p1 0 on -1, p2 0 on -1; ended: p0 8",
            "20 s, 2x1: p2 0 on -1; ended: p0 8, p1 12",
            "gathered at 20 s in 0.5 s",
            "ends: 8 s on 0, 20 s on 1, 25.5 s on 0",
        ],
    ),
    "a move": Story(
        [10, 30],
        once(1, Move(key=key(1), worker=0)),
        2,
        [
            "0 s, 2x1: p0 0 on 0, p1 0 on 1; ended: none",
            "10 s, 2x1: p1 10 on 1; ended: p0 10",
            "ends: 10 s on 0, 30 s on 0",
        ],
    ),
    "there and back": Story(
        [4, 9, 20, 40],
        there_and_back,
        4,
        [
            "0 s, 4x1: p0 0 on 0, p1 0 on 1, p2 0 on 2, p3 0 on 3; ended: none",
            "4 s, 4x1: p1 4 on 1, p2 4 on 2, p3 4 on 3; ended: p0 4",
            "9 s, 4x1: p2 9 on 2, p3 9 on 3; ended: p0 4, p1 9",
            "20 s, 4x1: p3 20 on 2; ended: p0 4, p1 9, p2 20",
            "ends: 4 s on 0, 9 s on 1, 20 s on 2, 40 s on 2",
        ],
    ),
    "a move within an iteration": Story(
        [50, 60, 5],
        once(2, Move(key=key(0), worker=1)),
        2,
        [
            "0 s, 2x1: p0 0 on 0, p1 0 on 0, p2 0 on 1; ended: none",
            "5 s, 2x1: p0 2 on 0, p1 2 on 0; ended: p2 5",
            "53 s, 2x1: p1 50 on 0; ended: p0 50, p2 5",
            "ends: 53 s on 1, 63 s on 0, 5 s on 1",
        ],
        BY_BATCH,
    ),
    "an end before a move": Story(
        [3, 50, 5],
        once(2, Move(key=key(0), worker=1)),
        2,
        [
            "0 s, 2x1: p0 0 on 0, p1 0 on 0, p2 0 on 1; ended: none",
            "5 s, 2x1: p0 2 on 0, p1 2 on 0; ended: p2 5",
            "6 s, 2x1: p1 3 on 0; ended: p0 3, p2 5",
            "ends: 6 s on 0, 53 s on 0, 5 s on 1",
        ],
        BY_BATCH,
    ),
    "a gather": Story(
        [10, 20, 30, 100],
        gather_at(2),
        4,
        [
            "0 s, 4x1: p0 0 on 0, p1 0 on 1, p2 0 on 2, p3 0 on 3; ended: none",
            "10 s, 4x1: p1 10 on 1, p2 10 on 2, p3 10 on 3; ended: p0 10",
            "20 s, 4x1: p2 20 on 2, p3 20 on 3; ended: p0 10, p1 20",
            "23 s, 1x4: p3 30 on 0; ended: p0 10, p1 20, p2 30",
            "gathered at 20 s in 0.5 s",
            "ends: 10 s on 0, 20 s on 1, 23 s on 0, 40.5 s on 0",
        ],
    ),
    "an end before a gather": Story(
        [50, 3, 5],
        gather_at(2),
        2,
        [
            "0 s, 2x1: p0 0 on 0, p1 0 on 0, p2 0 on 1; ended: none",
            "5 s, 2x1: p0 2 on 0, p1 2 on 0; ended: p2 5",
            "gathered at 6 s in 0.5 s",
            "ends: 18.25 s on 0, 6 s on 0, 5 s on 1",
        ],
        BY_BATCH,
    ),
    "a move that fails": Story(
        [10, 20, 40, 41],
        gather_then_move,
        4,
        [
            "0 s, 4x1: p0 0 on 0, p1 0 on 1, p2 0 on 2, p3 0 on 3; ended: none",
            "10 s, 4x1: p1 10 on 1, p2 10 on 2, p3 10 on 3; ended: p0 10",
            "20 s, 4x1: p2 20 on 2, p3 20 on 3; ended: p0 10, p1 20",
            "failed: Move, all requests were gathered first",
            "25.5 s, 1x4: p3 40 on 0; ended: p0 10, p1 20, p2 40",
            "gathered at 20 s in 0.5 s",
            "ends: 10 s on 0, 20 s on 1, 25.5 s on 0, 25.75 s on 0",
        ],
    ),
    "held, and begun later": Story(
        [10, 20, 5],
        hold_then_move,
        2,
        [
            "0 s, 2x1: p0 0 on 0, p1 0 on 0, p2 0 on 1; ended: none",
            "10 s, 2x1: p1 10 on 0, p2 0 on -1; ended: p0 10",
            "15 s, 2x1: p1 15 on 0; ended: p0 10, p2 5",
            "ends: 10 s on 0, 20 s on 0, 15 s on 1",
        ],
    ),
    "held to the end": Story(
        [10, 7],
        once(2, Hold(key=key(1))),
        2,
        [
            "0 s, 2x1: p0 0 on 0, p1 0 on 1; ended: none",
            "10 s, 2x1: p1 0 on -1; ended: p0 10",
            "ends: 10 s on 0, 17 s on 0",
        ],
    ),
    "an unknown request": Story(
        [10, 20, 40],
        once(2, Move(key=key(9), worker=0)),
        3,
        [
            "0 s, 3x1: p0 0 on 0, p1 0 on 1, p2 0 on 2; ended: none",
            "10 s, 3x1: p1 10 on 1, p2 10 on 2; ended: p0 10",
            "ends: 10 s on 0, 20 s on 1, 40 s on 2",
        ],
    ),
    "one that has ended": Story(
        [10, 20, 40],
        once(2, Move(key=key(0), worker=1)),
        3,
        [
            "0 s, 3x1: p0 0 on 0, p1 0 on 1, p2 0 on 2; ended: none",
            "10 s, 3x1: p1 10 on 1, p2 10 on 2; ended: p0 10",
            "ends: 10 s on 0, 20 s on 1, 40 s on 2",
        ],
    ),
    "a planner that raises": Story(
        [10, 20],
        lambda state: 1 // (len(state) - 1) and [],
        2,
        [
            "0 s, 2x1: p0 0 on 0, p1 0 on 1; ended: none",
            "10 s, 2x1: p1 10 on 1; ended: p0 10",
            "ends: 10 s on 0, 20 s on 1",
        ],
    ),
}


def shapes(story):
    return Shape(engines=story.workers, gpus=1), Shape(engines=1, gpus=story.workers)


def simulated(story):
    """The facts of the simulator."""
    planner = Scripted(story.rule)
    trace = of_lengths(story.lengths, workers=story.workers, prompt_tokens=PROMPT, max_response_tokens=CAP)
    result = simulate(
        trace, "none", costs=story.costs, planner=planner, shapes={shapes(story)[1]: QUARTER}, gather_s=GATHER_S,
        placement="contiguous",
    )  # fmt: skip
    rollout = result.rollouts[0]
    moves = [(row.t_start, row.duration) for row in result.trace.spans.itertuples() if row.kind == "move"]
    ends = zip(rollout.finish_s, rollout.worker_of, strict=True)
    return [*planner.facts, *outcome(moves[:: story.workers], ends)]


def outcome(moves, ends):
    """Facts of gathers, and of the end and the worker of each response."""
    yield from (f"gathered at {start_s:g} s in {seconds:g} s" for start_s, seconds, *_ in moves)
    yield "ends: " + ", ".join(f"{end_s:g} s on {at}" for end_s, at in ends)


class JumpingLoop(asyncio.SelectorEventLoop):
    """Its clock jumps to the next event once nothing more happens now."""

    now_s = 0.0

    def __init__(self):
        super().__init__()
        select = self._selector.select

        def jump(timeout):
            found = select(0)
            if not found and timeout is not None:
                self.now_s += timeout
            return found

        self._selector.select = jump

    def time(self):
        return self.now_s


class Engine:
    """Gives each of its requests a token in an iteration; between two of them it hears what is asked of it."""

    def __init__(self, pool, shape):
        self.pool, self.costs = pool, pool.costs[shape].costs.iteration(NO_SPECULATION)
        self.running, self.whole, self.changes = {}, [], []
        self.called, self.iterated = asyncio.Event(), asyncio.Event()
        self.closed = self.fails = False

    async def generate_planned(self, requests, rl_step, seed, history):
        self.begun_s, self.iterated_s = self.pool.now_s(), 0.0
        self.join(requests)
        while True:
            await self.hear()
            if self.closed:
                ran = [{"iteration": 0, "t_start": 0.0, "duration": self.iterated_s}]
                return self.pool.part([*self.whole, *map(self.cut, list(self.running))], ran)
            if not self.running:
                await self.called.wait()
                self.called.clear()
                continue
            await asyncio.sleep(self.costs.without_context_s(len(self.running)))
            for k, (request, tokens) in list(self.running.items()):
                tokens.append(len(request.prompt_token_ids) - PROMPT + len(tokens))
                if tokens[-1] + 1 == self.pool.lengths[k]:
                    self.whole.append(self.cut(k, "stop"))
            self.iterated_s = self.pool.now_s() - self.begun_s
            self.iterated.set()

    async def hear(self):
        """Let the pool react to what has happened by now."""
        for _ in range(50):
            await asyncio.sleep(0)
            if self.fails and self.changes:
                for _, task in self.changes:
                    task.set_exception(WorkerLost("killed"))
                raise WorkerLost("killed")
            for do, task in self.changes:
                task.set_result(do())
            self.changes.clear()

    def join(self, requests):
        for request in requests:
            assert [*request.prompt_token_ids[PROMPT:]] == [*range(len(request.prompt_token_ids) - PROMPT)]
            self.running[request.key] = request, array("i")

    def cut(self, k, reason="abort"):
        now_s, (_, tokens) = self.pool.now_s() - self.begun_s, self.running.pop(k)
        logprobs = array("f", [-float(token) for token in tokens])
        first_s = now_s if not tokens else max(0.0, now_s - len(tokens))
        return GenerationResponse(
            key=k, token_ids=tokens, logprobs=logprobs, finish_reason=reason, t_first_token=first_s, t_finish=now_s
        )

    async def change(self, leaving=(), joining=(), history=(), close=False):
        # What drafters know of a prompt comes with its request.
        assert [*history] == [request.key[1] for request in joining]

        def changed():
            self.join(joining)
            self.closed = close
            return [self.cut(k) for k in leaving if k in self.running]

        self.changes.append((changed, task := asyncio.get_running_loop().create_future()))
        self.called.set()
        return await task

    async def news(self):
        await self.iterated.wait()
        self.iterated.clear()
        ended = {response.key: len(response.token_ids) for response in self.whole}
        return ended, {k: len(tokens) for k, (_, tokens) in self.running.items()}


class Pool:
    """Engines of both shapes, played."""

    def __init__(self, story, planner, fails=None):
        self.base, wide = shapes(story)
        self.shapes = {self.base: range(story.workers), wide: range(story.workers, story.workers + 1)}
        costs = {self.base: story.costs, wide: QUARTER}
        self.costs = {s: EngineCosts(s, costs[s]) for s in self.shapes}
        self.lengths = {key(n): tokens for n, tokens in enumerate(story.lengths)}
        self.belief, self.history = (
            LengthBelief(),
            SimpleNamespace(everything=False, of=lambda requests: [r.key[1] for r in requests]),
        )
        self.notes, self.failures, self.fails = [], [], fails
        self.driver = PlanDriver(planner, self.notes.append)
        self.engines = {}
        self.now_s = asyncio.get_running_loop().time

    def lanes(self, n):
        return range(n, n + 1) if n < self.base.engines else range(self.base.engines)

    def part(self, responses, iterations):
        return Rollout(
            responses=responses, iterations=iterations, decisions=[], duration_s=0.0, recorder_s=0.0, policy_s=0.0
        )  # fmt: skip

    async def bring_up(self, n):
        self.engines[n] = Engine(self, next(shape for shape, numbers in self.shapes.items() if n in numbers))
        self.engines[n].fails, self.fails = n == self.fails, None if n == self.fails else self.fails

    async def asked(self, n, method, *args):
        return await getattr(self.engines[n], method)(*args)

    def failed(self, n, lost, lost_work):
        self.failures.append(n)

    async def hand_over(self, numbers):
        await asyncio.sleep(GATHER_S)


async def rolled_out(story, fails=None):
    """The facts of a pool's rollout, and the pool."""
    planner = Scripted(story.rule)
    pool = Pool(story, planner, fails)
    requests = [GenerationRequest(key=k, prompt_token_ids=[0] * PROMPT, max_response_tokens=CAP) for k in pool.lengths]
    each = -(-len(requests) // story.workers)
    shares = [requests[n * each : (n + 1) * each] for n in range(story.workers)]
    parts = await PlannedRollout(pool, shares, 0, [[n] for n in range(story.workers + 1)]).run()
    found = {r.key: (r.t_finish, n, r) for n, part in enumerate(parts) for r in part.responses}
    for k, (_, _, response) in found.items():
        assert [*response.token_ids] == [*range(pool.lengths[k])]
        assert [*response.logprobs] == [-float(token) for token in response.token_ids]
        assert response.t_submit == 0.0 <= response.t_first_token <= response.t_finish
    ends = [found[k][:2] for k in pool.lengths]
    return [*planner.facts, *outcome([move[:2] for move in parts[0].moves], ends)], pool


def played(story, **failing):
    """The same, in a loop of its own."""
    loop = JumpingLoop()
    try:
        return loop.run_until_complete(rolled_out(story, **failing))
    finally:
        loop.close()


@pytest.mark.parametrize("story", STORIES.values(), ids=STORIES)
def test_a_planner_sees_and_does_the_same_everywhere(story):
    assert simulated(story) == story.facts
    assert played(story)[0] == story.facts


@pytest.mark.parametrize(
    ("story", "fails", "ends"),
    [
        ("there and back", 3, "4 s on 0, 9 s on 1, 20 s on 2, 49 s on 3"),
        ("there and back", 2, "4 s on 0, 9 s on 1, 29 s on 2, 40 s on 2"),
        ("a gather", 3, "10 s on 0, 20 s on 1, 23 s on 0, 45.5 s on 0"),
        ("a gather", 4, "10 s on 0, 20 s on 1, 43 s on 0, 60.5 s on 0"),
    ],
)
def test_an_engine_that_fails_in_between_loses_nothing(story, fails, ends):
    """It fails when it is asked for a change, at the source or at the destination; its requests begin there again."""
    facts, pool = played(STORIES[story], fails=fails)
    assert pool.failures == [fails]
    assert facts[-1] == f"ends: {ends}"
    moved = STORIES[story].facts[-2].startswith("gathered")
    assert [fact for fact in facts if fact.startswith("failed")] == ([] if moved else ["failed: Move, killed"])


@FEW
@given(st.integers(0, 2**32 - 1))
def test_whatever_is_done_and_fails_every_response_is_whole(seed):
    rng = np.random.default_rng(seed)

    def rule(state):
        actions = [
            Move(key=k, worker=int(rng.integers(state.active.engines))) for k in state.keys if rng.random() < 0.2
        ]
        held = [k for k, tokens in zip(state.keys, state.generated_tokens, strict=True) if not tokens]
        actions += [Hold(key=k) for k in held if rng.random() < 0.1]
        other = [shape for shape in state.engines if shape != state.active]
        return actions + [Gather(shape=shape, queues=()) for shape in other if rng.random() < 0.1]

    story = Story((1 + rng.geometric(1 / 20, 12)).tolist(), rule, 4, [])
    # That they are whole is asserted there.
    facts, pool = played(story, fails=int(rng.integers(6)))
    assert len(facts[-1].split(", ")) == 12
    assert pool.driver.wants(1)
