"""Rollouts beside training: what may begin, how old what is trained on is, and which lengths it has."""

from __future__ import annotations

import threading
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from tltlab.planning.dispatch import may_start
from tltlab.runtime.engine.generation import GenerationRequest, Response, Rollout
from tltlab.runtime.rollout.collected import Collected
from tltlab.runtime.rollout.in_flight import DeferredCalls, QueuedRequests
from tltlab.runtime.rollout.partial import AsynchronousRollouts, first_version
from tltlab.runtime.rollout.ways import SynchronousRollouts, rollouts_of
from tltlab.runtime.rollout.worker import enough

from .scripted_engines import ScriptedEngines, data_order, prompts, recipe
from .test_partial import CAP, length, reward

PER_STEP, GROUP, WORKERS, STEPS = 4, 3, 2, 16


class SwappingEngines(ScriptedEngines):
    """Engines to which the weights of later versions come while they generate, `every` iterations apart."""

    every = 9
    begins_at = ends_at = 0

    def _run(self, worker: int, share: list[GenerationRequest], quota: int | None) -> Rollout:
        rl_step = share[0].key[0] if share else 0
        held = QueuedRequests(share, lambda: self.version)
        swaps: list[tuple[int, dict[Any, int]]] = []
        # Every worker sees the same weights come at the same iterations.
        self.version = self.begins_at
        made: dict[Any, list[int]] = {}
        ended: dict[Any, float] = {}
        waiting, running = deque(held.take()), deque[GenerationRequest]()
        assert quota is not None
        stop, clock = enough(share, quota), 0
        while not stop(list(ended)):
            waiting.extend(held.take())
            while waiting and len(running) < self.concurrency:
                running.append(waiting.popleft())
            assert running, "an engine waits for weights that may never come"
            clock += 1
            for request in list(running):
                place = len(request.prompt_token_ids) + len(made.setdefault(request.key, [])) - 3
                made[request.key].append(100 + place)
                cap = len(made[request.key]) == request.max_response_tokens
                if place + 1 == self.length(request.key[1], request.key[2]) or cap:
                    ended[request.key] = float(clock)
                    running.remove(request)
            if clock % self.every == 0 and self.version < rl_step:
                swaps.append((self.version, {key: len(tokens) for key, tokens in made.items() if key not in ended}))
                self.version += 1
        # Whoever is done earlier has the same weights when the next begins.
        self.ends_at = max(self.ends_at, self.version)
        swaps.append((self.version, {}))
        responses = [
            Response(
                key=key, token_ids=tokens, logprobs=[-1.0] * len(tokens),
                finish_reason="stop" if key in ended else "abort", t_first_token=0.5, t_finish=ended.get(key, clock),
            )
            for key, tokens in made.items()
        ]  # fmt: skip
        rolled = Rollout(
            responses=responses, iterations=[], decisions=[], duration_s=float(clock), recorder_s=0.0, policy_s=0.0
        )
        return held.whole(rolled, swaps)


def made(staleness: int, stale: str = "hold") -> tuple[SwappingEngines, AsynchronousRollouts]:
    rollout = {
        "num_workers": WORKERS, "prompts_per_step": PER_STEP, "group_size": GROUP, "max_response_tokens": CAP,
        "staleness": staleness, "stale": stale,
    }  # fmt: skip
    rollouts = rollouts_of(recipe(rollout), prompts(200), data_order(200))
    assert isinstance(rollouts, AsynchronousRollouts)
    engines = SwappingEngines(WORKERS, length)
    return engines, rollouts


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
        last = collect(engines, rollouts, range(40), 0)[-1].figures
        bias[stale] = last["trained/length_bias"]
        assert (last["trained/dropped_groups"] > 0) is (stale == "drop")
        assert last["staleness/max"] <= 1
    assert bias["drop"] < 0.9 < bias["hold"] == 1.0


def test_the_rule_is_areals():
    for per_step, staleness, rl_step in ((2, 1, 5), (3, 2, 7), (4, 4, 9)):
        first = [first_version(n, rl_step, per_step, staleness) for n in range((staleness + 1) * per_step)]
        for version in range(rl_step - staleness, rl_step + 1):
            may = may_start(
                running=0, accepted=rl_step * per_step, version=version, batch=per_step, staleness=staleness,
                most_running=10**6,
            )  # fmt: skip
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


def test_a_bound_of_zero_is_synchronous_and_what_does_not_go_with_others_is_a_sentence():
    assert isinstance(rollouts_of(recipe({"staleness": 0}), prompts(50), data_order(50)), SynchronousRollouts)
    for changes, message in (
        ({"one_step_off": True}, "which is a staleness of 1"),
        ({"partial": {"concurrency": 9}}, "does not go with rollout.partial"),
        ({"environment": "calculator"}, "whose turns it cannot cut"),
        ({"vllm": {"async_scheduling": True}}, "does not go with rollout.vllm.async_scheduling"),
        ({"num_workers": 9, "prompts_per_step": 8}, "a group for every worker"),
        ({"staleness": -1}, "greater than or equal to 0"),
    ):
        with pytest.raises(ValidationError, match=message):
            recipe({"staleness": 2, **changes})
    with pytest.raises(ValidationError, match=r"needs train\.correction"):
        recipe({"staleness": 2}, {"correction": "none"})


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
