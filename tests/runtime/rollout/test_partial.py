"""Partial and asynchronous rollouts: nothing is lost or drawn twice, and every token remembers who drew it.

Of those during training: what may begin, how old what is trained on is, and which lengths it has.
"""

import threading
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tests.refused import refused
from tltlab.errors import ConfigError
from tltlab.planning.dispatch import may_start
from tltlab.runtime.rollout.collected import SynchronousRollouts
from tltlab.runtime.rollout.partial import first_version
from tltlab.runtime.rollout.worker import DeferredCalls, QueuedRequests, enough

from .scripted_engines import END, ScriptedEngines, prompts, recipe, resumed, ways

PROMPTS, GROUP, STEP_GROUPS, CAP, WORKERS, CONCURRENCY = 200, 4, 6, 60, 2, 10


def length(prompt_id, sample):
    """A long tail: most responses are short, some reach the cap."""
    rng = np.random.default_rng([int(prompt_id[1:]), sample])
    return min(1 + int(rng.pareto(1.0) * 5), 2 * CAP)


def reward(trajectory):
    """The sum of two terms, and the terms."""
    num = float(len(trajectory.token_ids))
    return num, (num + 1, -1.0)


def made(**partial):
    sizes = {"num_workers": WORKERS, "prompts_per_step": STEP_GROUPS, "group_size": GROUP, "max_response_tokens": CAP}
    rollouts = ways(
        sizes | {"partial": partial if "issue" in partial else {"concurrency": CONCURRENCY, **partial}}, PROMPTS
    )
    return ScriptedEngines(WORKERS, length, CONCURRENCY // WORKERS), rollouts


def run(engines, rollouts, steps):
    return [rollouts.collect(engines.tools(rl_step, reward)) for rl_step in steps]


@pytest.fixture(scope="module")
def twelve_steps():
    engines, rollouts = made()
    return engines, run(engines, rollouts, range(12))


def test_trained_responses_are_whole_with_token_versions(twelve_steps):
    spans = Counter[int]()
    for got in twelve_steps[1]:
        assert len(got.trajectories) >= STEP_GROUPS * GROUP
        assert {len(group) for group in got.groups} == {GROUP}
        for t in got.trajectories:
            true = length(t.prompt.prompt_id, t.sample)
            assert len(t.token_ids) == min(true, CAP)
            assert t.truncated == (true > CAP)
            ends = [] if t.truncated else [END]
            assert list(t.token_ids) == [100 + i for i in range(len(t.token_ids) - len(ends))] + ends
            assert list(t.logprobs) == pytest.approx([-(v + i / 100) for i, v in enumerate(t.token_versions)], rel=1e-6)
            assert list(t.token_versions) == sorted(t.token_versions)
            assert t.reward == len(t.token_ids)
            spans[len(set(t.token_versions))] += 1
    assert max(spans) > 2, f"no response spans RL steps: {spans}"


def test_no_token_is_lost_between_rl_steps(twelve_steps):
    """The rows of a response put together, over the RL steps that it took, are the response."""
    parts = defaultdict(list)
    trained = set()
    for got in twelve_steps[1]:
        for requests, rollout in zip(got.requests, got.parts, strict=True):
            for request, response in zip(requests, rollout.responses, strict=True):
                assert request.key == response.key
                assert response.token_ids
                slot = request.key[1], request.key[2]
                drawn = [token for part in parts[slot] for token in part]
                assert request.prompt_token_ids[3:] == drawn
                assert len(drawn) + request.max_response_tokens == CAP
                assert (response.finish_reason == "abort") == (response.key not in got.rewards)
                assert response.key in got.epochs
                parts[slot].append(response.token_ids)
        for t in got.trajectories:
            slot = t.prompt.prompt_id, t.sample
            assert slot not in trained
            assert [x for part in parts[slot] for x in part] == list(t.token_ids)
            trained.add(slot)


MORE = {"issue": 1.5, "samples": 1.5}
ANEW = MORE | {"leftover": "restart"}


@pytest.mark.parametrize("more", [MORE, ANEW])
def test_more_is_begun_than_is_trained(more, tmp_path):
    engines, rollouts = made(**more)
    spans, behind, tokens, trained_tokens = Counter[int](), set(), 0, 0
    for rl_step in range(12):
        (got,) = run(engines, rollouts, [rl_step])
        waited = behind if len(behind) >= STEP_GROUPS else set()
        asked = {r.key[1] for share in engines.asked[-1] for r in share}
        samples = Counter(r.key[1] for share in engines.asked[-1] for r in share)
        trained = {t.prompt.prompt_id for t in got.trajectories}
        assert {len(group) for group in got.groups} == {GROUP}
        assert len(trained) >= STEP_GROUPS
        if more is ANEW and waited:
            assert asked == trained <= behind
            assert set(samples.values()) == {GROUP}
        else:
            assert len(asked) == 9
            assert asked.isdisjoint(behind) or more is MORE
        for t in got.trajectories:
            assert len(t.token_ids) == min(length(t.prompt.prompt_id, t.sample), CAP)
            spans[len(set(t.token_versions))] += 1
        tokens += sum(len(r.token_ids) for part in got.parts for r in part.responses)
        trained_tokens += sum(len(t.token_ids) for t in got.trajectories)
        behind = {rollouts.prompts[n].prompt_id for n in rollouts.under_way}
        assert behind >= asked - trained
    wasted = got.figures["trained/wasted_tokens"]
    if more is ANEW:
        assert set(spans) == {1}, "on-policy"
        assert tokens == trained_tokens + wasted
    else:
        assert max(spans) > 1
        state = rollouts.state_dict(tmp_path)["pending"]
        assert len(state) == len(behind)
        assert 0 < wasted <= tokens - trained_tokens


def test_engines_are_full_until_last_group_is_whole(twelve_steps):
    assert {n for running in twelve_steps[0].running for n in running} == {CONCURRENCY // WORKERS}


def test_cut_responses_continue_first_in_order(tmp_path):
    engines, rollouts = made()
    before = []
    for got in run(engines, rollouts, range(8)):
        shares = engines.asked[-1]
        assert len(shares) == WORKERS
        for share in shares:
            started = [len(r.prompt_token_ids) > 3 for r in share]
            assert started == sorted(started, reverse=True)
            for goes_on in (True, False):
                names = [r.key[1] for r in share if (len(r.prompt_token_ids) > 3) is goes_on and r.key[1] in before]
                assert [before.index(name) for name in names] == sorted(before.index(name) for name in names)
        done = {t.prompt.prompt_id for t in got.trajectories}
        asked = [group["prompt_id"] for group in rollouts.state_dict(tmp_path)["pending"]]
        assert not done & set(asked)
        assert [rollouts.prompts[number].prompt_id for number in rollouts.under_way] == asked
        assert asked[: len(before) - len(done & set(before))] == [name for name in before if name not in done]
        before = asked


def test_groups_that_are_too_old_are_dropped():
    engines, rollouts = made(max_age=1)
    steps = run(engines, rollouts, range(12))
    ages = [rl_step - t.token_versions[0] for rl_step, got in enumerate(steps) for t in got.trajectories]
    assert max(ages) == 1
    assert any("older than 1 RL step" in note for got in steps for note in got.notes)
    assert rollouts.order.state_dict()["again"], "dropped prompts come again in their epoch"


@pytest.mark.parametrize(("steps", "how"), [(0, {"max_age": 3}), (5, {"max_age": 3}), (3, MORE), (3, ANEW), (4, ANEW)])
def test_a_resumed_run_continues_as_the_unbroken_one(tmp_path, steps, how):
    engines, unbroken = made(**how)
    expected = run(engines, unbroken, range(steps + 4))
    engines, first = made(**how)
    run(engines, first, range(steps))
    engines, second = made(**how)
    resumed(first, second, tmp_path)
    for got, wanted in zip(run(engines, second, range(steps, steps + 4)), expected[steps:], strict=True):
        for name in ("trajectories", "notes", "requests", "rewards", "epochs", "figures"):
            assert getattr(got, name) == getattr(wanted, name)


@pytest.mark.parametrize(
    ("name", "value", "facts"),
    [
        ("prompts", prompts(3), ()),
        ("recipe", recipe({"max_response_tokens": 1, "partial": {"concurrency": 8}}), ("max_response_tokens", "1")),
    ],
)
def test_continued_responses_need_prompt_and_room(tmp_path, name, value, facts):
    engines, rollouts = made()
    run(engines, rollouts, range(2))
    state = rollouts.state_dict(tmp_path)
    setattr(rollouts, name, value)
    with refused(ConfigError, naming=facts):
        rollouts.load_state_dict(state, tmp_path)


def test_the_state_of_another_release_is_refused(tmp_path):
    engines, rollouts = made()
    run(engines, rollouts, range(2))
    state = rollouts.state_dict(tmp_path) | {"lengths": {"trained": [], "dropped": []}}
    with refused(ConfigError, naming=(tmp_path, "release")):
        rollouts.load_state_dict(state, tmp_path)


@pytest.mark.parametrize(("num", "partial"), [(4, ANEW), (3, {"concurrency": 64})])
def test_few_prompts_are_no_reason_to_stop(num, partial):
    """Some begin anew before they are a step."""
    rollout = {"prompts_per_step": num - 1, "group_size": 2, "max_response_tokens": CAP, "partial": partial}
    engines, rollouts, asked = ScriptedEngines(2, length, 32), ways(rollout, num), set()
    for rl_step in range(8):
        (got,) = run(engines, rollouts, [rl_step])
        asked.add(len({r.key[1] for share in engines.asked[-1] for r in share}))
        assert len(got.groups) >= num - 1
    assert asked == {3, 4} or partial is not ANEW


PER_STEP, SAMPLES, STEPS = 4, 3, 16


class SwappingEngines(ScriptedEngines):
    """Engines to which the weights of later versions come while they generate, `every` iterations apart."""

    every = 9
    begins_at = ends_at = 0

    def _run(self, worker, share, quota):
        # Every worker sees the same weights come at the same iterations.
        self.version, self.swaps = self.begins_at, []
        self.queue = QueuedRequests(share, lambda: self.version)
        rollout = super()._run(worker, share, quota)
        ended = [r.key for r in rollout.responses if r.finish_reason != "abort"]
        assert enough(share, quota)(ended), "an engine waits for weights that may never come"
        # Whoever is done earlier has the same weights when the next begins.
        self.ends_at = max(self.ends_at, self.version)
        return self.queue.whole(rollout, [*self.swaps, (self.version, {})])

    def arrivals(self, share, iteration):
        return self.queue.take()

    def after_iteration(self, share, iterations, running):
        if iterations % self.every == 0 and self.version < share[0].key[0]:
            self.swaps.append((self.version, running))
            self.version += 1


def asynchronous(staleness, stale="hold"):
    sizes = {"num_workers": WORKERS, "prompts_per_step": PER_STEP, "group_size": SAMPLES, "max_response_tokens": CAP}
    return SwappingEngines(WORKERS, length), ways(sizes | {"staleness": staleness, "stale": stale}, 200)


def collect(engines, rollouts, steps, staleness):
    """Each as early as its trainer may be behind: with the engines' weights `staleness` versions old."""
    found = []
    for rl_step in steps:
        engines.begins_at = max(rl_step - staleness, engines.ends_at)
        found.append(rollouts.collect(engines.tools(rl_step, reward, policy_version=engines.begins_at)))
    return found


@pytest.mark.parametrize("staleness", [1, 2, 4])
def test_nothing_is_lost_or_trained_on_beyond_bound(staleness):
    engines, rollouts = asynchronous(staleness)
    found = collect(engines, rollouts, range(STEPS), staleness)
    trained = Counter[tuple[str, int, int]]()
    spans = 0
    for rl_step, got in enumerate(found):
        assert len(got.trajectories) == PER_STEP * SAMPLES
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


def test_figures_state_how_drops_starve_long_responses():
    bias = {}
    for stale in ("hold", "drop"):
        engines, rollouts = asynchronous(1, stale)
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


def test_a_run_continues_with_its_groups_and_lengths(tmp_path):
    engines, rollouts = asynchronous(2)
    collect(engines, rollouts, range(6), 2)
    again = resumed(rollouts, asynchronous(2)[1], tmp_path)
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


def test_calls_of_threads_run_between_iterations():
    between = DeferredCalls()
    by = []

    def call():
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
