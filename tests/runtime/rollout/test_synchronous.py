"""Synchronous rollouts, and the rounds of dynamic sampling."""

from pathlib import Path

import pytest

from tltlab.runtime.data.order import DataOrder

from .scripted_engines import ScriptedEngines, resumed, ways


def by_sample(trajectory):
    return float(trajectory.sample)


def even(name):
    """Whether a prompt's number is even."""
    return int(name[1:]) % 2 == 0


def test_an_rl_step_is_whole_groups_in_order():
    engines = ScriptedEngines(2, lambda prompt, sample: 3 + sample)
    rollouts, order = ways({"prompts_per_step": 4, "group_size": 2}, 10), DataOrder(10, seed=0)
    for rl_step in range(4):
        got = rollouts.collect(engines.tools(rl_step, by_sample))
        picked = order.take(4)
        assert [t.prompt.prompt_id for t in got.trajectories] == [f"p{n}" for _, n in picked for _ in range(2)]
        assert [len(group) for group in got.groups] == [2] * 4
        assert [len(share) for share in got.requests] == [4, 4]
        keys = [(rl_step, t.prompt.prompt_id, t.sample, 0) for t in got.trajectories]
        assert [r.key for part in got.parts for r in part.responses] == keys
        assert all(list(t.token_versions) == [rl_step] * len(t.token_ids) for t in got.trajectories)
        assert [t.reward for t in got.trajectories] == [0.0, 1.0] * 4
        assert set(got.epochs) == set(got.rewards)
        assert not any(r.t_submit for part in got.parts for r in part.responses)
        assert not got.notes
    # In its one round, groups without a difference stay.
    assert len(rollouts.collect(engines.tools(4, lambda t: 1.0)).trajectories) == 8
    assert rollouts.state_dict(Path()) == {}


def test_dynamic_sampling_replaces_groups_without_a_difference():
    """Odd prompts teach nothing: a round asks for as many new prompts as are missing, until none is."""
    engines = ScriptedEngines(2, lambda prompt, sample: 3 + sample)
    rollouts = ways({"prompts_per_step": 4, "group_size": 2}, 40, {"sampling_rounds": 20})
    got = rollouts.collect(engines.tools(0, lambda t: by_sample(t) if even(t.prompt.prompt_id) else 1.0))
    trained = [t.prompt.prompt_id for t in got.trajectories[::2]]
    assert len(trained) == len(set(trained)) == 4
    assert all(map(even, trained))
    assert [len(group) for group in got.groups] == [2] * 4
    sizes = [sum(len(share) for share in shares) // 2 for shares in engines.asked]
    missing = 4
    for size, shares in zip(sizes, engines.asked, strict=True):
        assert size == missing
        missing -= sum(even(r.key[1]) for share in shares for r in share) // 2
    assert missing == 0
    assert len(sizes) > 1
    recorded = [r.key for part in got.parts for r in part.responses]
    assert len(recorded) == len(set(recorded)) == 2 * sum(sizes)
    assert set(recorded) == set(got.rewards) == set(got.epochs)
    assert f"4 of {sum(sizes)} groups of {len(sizes)} rounds" in got.notes[0]


@pytest.mark.parametrize(("overlong", "num_trained"), [("keep", 2), ("zero", 0)])
def test_reward_that_truncation_takes_away_makes_no_difference(overlong, num_trained):
    """Only sample 1 is right, and it ends at the cap: with "zero" its group would be trained with no advantage."""
    engines = ScriptedEngines(1, lambda prompt, sample: 1000 if sample else 3)
    rollouts = ways({"prompts_per_step": 1, "group_size": 2}, 4, {"sampling_rounds": 2, "overlong": overlong})
    got = rollouts.collect(engines.tools(0, by_sample))
    assert [t.truncated for t in got.trajectories] == [False, True][:num_trained]


@pytest.mark.parametrize(("term", "trained"), [("right", ["p0"]), ("short", ["p1"]), (None, ["p0", "p1"])])
def test_groups_are_judged_by_one_term_of_the_reward(term, trained):
    """Of four prompts one differs in each term, one in both, whose sums are equal, and one in none."""
    differs = {"p0": (1.0, 0.0), "p1": (0.0, 1.0), "p2": (1.0, -1.0), "p3": (0.0, 0.0)}

    def reward(t):
        terms = tuple(t.sample * each for each in differs[t.prompt.prompt_id])
        return sum(terms), terms

    engines = ScriptedEngines(1, lambda prompt, sample: 3)
    terms = [{"path": "a:right"}, {"path": "a:b", "name": "short"}]
    train = {"sampling_rounds": 4, "sampling_term": term}
    rollouts = ways({"prompts_per_step": 4, "group_size": 2}, 4, train, reward=terms)
    got = rollouts.collect(engines.tools(0, reward))
    assert sorted({t.prompt.prompt_id for t in got.trajectories}) == trained
    assert got.num_dropped == 4 - len(trained)


def test_rounds_are_one_rollout_in_the_trace():
    """Iterations are numbered on, and times are since the first round began."""
    engines = ScriptedEngines(2, lambda prompt, sample: 5)
    rollouts = ways({"prompts_per_step": 2, "group_size": 2}, 12, {"sampling_rounds": 3})
    got = rollouts.collect(engines.tools(0))
    late = {r.key for shares in engines.asked[1:] for share in shares for r in share}
    for requests, part in zip(got.requests, got.parts, strict=True):
        assert [r.key for r in requests] == [r.key for r in part.responses]
        for rows in (part.iterations.to_pylist(), part.decisions.to_pylist()):
            assert [row["iteration"] for row in rows] == list(range(15))
        for response in part.responses:
            begun = response.t_submit
            assert (response.t_first_token, response.t_finish) == (begun + 0.5, begun + 5.0)
            assert (begun > 0) == (response.key in late)
            assert got.rollout_s > begun
    assert got.trajectories == []
    assert "0 of 6 groups of 3 rounds" in got.notes[0]


def test_sampling_ends_where_there_are_no_more_prompts():
    engines = ScriptedEngines(1, lambda prompt, sample: 3)
    rollouts = ways({"prompts_per_step": 4, "group_size": 2}, 6, {"sampling_rounds": 9})
    got = rollouts.collect(engines.tools(0, lambda t: by_sample(t) if t.prompt.prompt_id == "p0" else 0.0))
    assert [t.prompt.prompt_id for t in got.trajectories] == ["p0", "p0"]
    asked = [r.key[1] for shares in engines.asked for share in shares for r in share]
    assert sorted(asked) == sorted([f"p{n}" for n in range(6)] * 2)


PARTIAL, REUSE = {"partial": {"concurrency": 4}}, {"reuse": {}}


@pytest.mark.parametrize(
    ("before", "after", "facts"),
    [
        (PARTIAL, {}, ("groups", "rollout.partial")),
        (PARTIAL, REUSE, ("groups", "rollout.partial")),
        (REUSE, {}, ("4 ", "rollout.reuse")),
        (REUSE, PARTIAL, ("4 ",)),
        ({}, PARTIAL, ()),
        (PARTIAL, PARTIAL, ()),
    ],
)
def test_another_way_states_what_it_leaves(tmp_path, before, after, facts):
    sizes = {"prompts_per_step": 2, "group_size": 2}
    engines = ScriptedEngines(2, lambda prompt, sample: 3 + 9 * sample, 2)
    first = ways(sizes | before, 40)
    first.collect(engines.tools(0, by_sample))
    second = resumed(first, ways(sizes | after, 40), tmp_path)
    notes = [second.collect(engines.tools(rl_step, by_sample)).notes for rl_step in (1, 2)]
    found = [[note for note in of_step if "the run continues without" in note] for of_step in notes]
    assert [len(of_step) for of_step in found] == [bool(facts), 0]
    assert all(fact in note for note in found[0] for fact in facts)
