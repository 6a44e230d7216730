"""Rollouts beside training: what may begin, how old what is trained on is, and which lengths it has."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tltlab.planning.dispatch import may_start
from tltlab.runtime.engine.generation import GenerationRequest, Rollout
from tltlab.runtime.rollout.collected import Collected
from tltlab.runtime.rollout.in_flight import DeferredCalls, QueuedRequests
from tltlab.runtime.rollout.partial import AsynchronousRollouts, first_version
from tltlab.runtime.rollout.synchronous import SynchronousRollouts
from tltlab.runtime.rollout.worker import enough

from .scripted_engines import ScriptedEngines, ways
from .test_partial import CAP, length, reward

PER_STEP, GROUP, WORKERS, STEPS = 4, 3, 2, 16


class SwappingEngines(ScriptedEngines):
    """Engines to which the weights of later versions come while they generate, `every` iterations apart."""

    every = 9
    begins_at = ends_at = 0

    def _run(self, worker: int, share: list[GenerationRequest], quota: int | None) -> Rollout:
        # Every worker sees the same weights come at the same iterations.
        self.version, self.swaps = self.begins_at, []
        self.queue = QueuedRequests(share, lambda: self.version)
        rollout = super()._run(worker, share, quota)
        assert quota is not None
        ended = [r.key for r in rollout.responses if r.finish_reason != "abort"]
        assert enough(share, quota)(ended), "an engine waits for weights that may never come"
        # Whoever is done earlier has the same weights when the next begins.
        self.ends_at = max(self.ends_at, self.version)
        return self.queue.whole(rollout, [*self.swaps, (self.version, {})])

    def arrivals(self, share: list[GenerationRequest], iteration: int) -> list[GenerationRequest]:
        return self.queue.take()

    def after_iteration(self, share: list[GenerationRequest], iterations: int, running: dict[Any, int]) -> None:
        if iterations % self.every == 0 and self.version < share[0].key[0]:
            self.swaps.append((self.version, running))
            self.version += 1


def made(staleness: int, stale: str = "hold") -> tuple[SwappingEngines, AsynchronousRollouts]:
    sizes = {"num_workers": WORKERS, "prompts_per_step": PER_STEP, "group_size": GROUP, "max_response_tokens": CAP}
    return SwappingEngines(WORKERS, length), ways(sizes | {"staleness": staleness, "stale": stale}, 200)


def collect(engines: SwappingEngines, rollouts: AsynchronousRollouts, steps: range, staleness: int) -> list[Collected]:
    """Each as early as its trainer may be behind: with the engines' weights `staleness` versions old."""
    found = []
    for rl_step in steps:
        engines.begins_at = max(rl_step - staleness, engines.ends_at)
        tools = replace(engines.tools(rl_step, reward), policy_version=engines.begins_at)
        found.append(rollouts.collect(tools))
    return found


@pytest.mark.parametrize("staleness", [1, 2, 4])
def test_nothing_is_trained_on_that_is_older_than_the_bound_and_nothing_is_lost(staleness: int):
    engines, rollouts = made(staleness)
    found = collect(engines, rollouts, range(STEPS), staleness)
    trained = Counter[tuple[str, int, int]]()
    spans = 0
    for rl_step, got in enumerate(found):
        assert len(got.trajectories) == PER_STEP * GROUP
        for t in got.trajectories:
            assert len(t.token_versions) == len(t.token_ids) == min(length(t.prompt.prompt_id, t.sample), CAP)
            assert list(t.token_versions) == sorted(t.token_versions)
            assert 0 <= rl_step - t.token_versions[-1] <= rl_step - t.token_versions[0] <= staleness
            spans += len(set(t.token_versions)) > 1
            trained[t.prompt.prompt_id, t.epoch, t.sample] += 1
        assert got.figures["staleness/max"] <= staleness
        assert got.figures["trained/dropped_groups"] == 0
    assert set(trained.values()) == {1}
    assert spans > 0, "no weights came while a response ran"


def test_what_is_dropped_starves_long_responses_and_the_figures_say_how_much():
    bias = {}
    for stale in ("hold", "drop"):
        engines, rollouts = made(1, stale)
        engines.every = 3
        last = collect(engines, rollouts, range(12), 0)[-1].figures
        bias[stale] = last["trained/length_bias"]
        assert (last["trained/dropped_groups"] > 0) is (stale == "drop")
        assert last["staleness/max"] <= 1
    assert bias["drop"] < 0.9 < bias["hold"] == 1.0


def test_the_rule_is_areals():
    for per_step, staleness, rl_step in ((2, 1, 5), (3, 2, 7), (4, 4, 9)):
        first = [first_version(n, rl_step, per_step, staleness) for n in range((staleness + 1) * per_step)]
        for version in range(rl_step - staleness, rl_step + 1):
            limits = {"batch": per_step, "staleness": staleness, "most_running": 10**6}
            may = may_start(running=0, accepted=rl_step * per_step, version=version, **limits)
            assert may == sum(each <= version for each in first)


def test_a_run_goes_on_with_its_groups_and_what_it_knows_of_lengths(tmp_path: Path):
    engines, rollouts = made(2)
    collect(engines, rollouts, range(6), 2)
    _, again = made(2)
    again.load_state_dict(rollouts.state_dict(tmp_path), tmp_path)
    again.order.load_state_dict(rollouts.order.state_dict())
    assert again.under_way == rollouts.under_way
    ended_at, last = engines.ends_at, []
    for each in (rollouts, again):
        engines.ends_at = ended_at
        last.append(collect(engines, each, range(6, 9), 2)[-1])
    one, other = last
    assert one.figures == other.figures
    assert [list(t.token_ids) for t in one.trajectories] == [list(t.token_ids) for t in other.trajectories]


def test_a_bound_of_zero_is_synchronous():
    assert isinstance(ways({"staleness": 0}, 50), SynchronousRollouts)


def test_calls_of_another_thread_are_made_between_two_iterations():
    between = DeferredCalls()
    by: list[int] = []

    def call() -> int:
        return between.call(lambda: by.append(threading.get_ident()) or len(by))

    assert call() == 1
    with ThreadPoolExecutor(2) as aside:
        with between.busy():
            calls = [aside.submit(call), aside.submit(call)]
            # What the first began is not finished before the second has come.
            between.serve(lambda: len(by) < 3)
            failing = aside.submit(between.call, lambda: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            failing.result()
        assert sorted(each.result() for each in calls) == [2, 3]
    assert set(by) == {threading.get_ident()}
