"""Which groups can train, what rounding does to advantages, and advantages of the user's own."""

from dataclasses import replace

import pytest
import torch

from tests.refused import refused
from tltlab.errors import ConfigError
from tltlab.runtime.recipe.sections import TrainConfig
from tltlab.runtime.trainer.advantages import advantages
from tltlab.runtime.trainer.samples import OwnAdvantage, Sample, TrainingValues, useful_groups

from ..small_models import small_recipe

CAP = 8
MODULE = """
import torch

def by_term(rewards, groups, lengths, truncated, terms):
    print("not a result")
    return terms["short"] - lengths * ~truncated + groups

def whole(rewards, groups, lengths, truncated, terms): return groups
def one(rewards, groups, lengths, truncated, terms): return rewards.mean()
def of_a_list(rewards, groups, lengths, truncated, terms): return rewards.tolist()
def infinite(rewards, groups, lengths, truncated, terms): return 1 / (rewards - rewards)
def of_rewards(rewards): return rewards
"""


def sample(reward, group=0, **more):
    told = {"prompt_token_ids": [1], "token_ids": [2, 3], "logprobs": [-1.0, -1.0]}
    return Sample(**told | {"reward": reward, "group": group} | more)


def of(rewards, scale="group", **settings):
    return advantages(torch.tensor(rewards), torch.zeros(len(rewards), dtype=torch.int64), scale=scale, **settings)


def test_rewards_that_differ_by_rounding_make_no_step():
    assert 0 < of([1.0, 1.0 + 1.2e-7]).abs().max() < 1e-3


@pytest.mark.parametrize(
    ("settings", "rewards", "expected"),
    [
        ({"scale": "none", "baseline": "none"}, [1.0, 1.0, 3.0], [1.0, 1.0, 3.0]),
        ({"scale": "batch", "baseline": "none"}, [0.1, 0.1, 0.1], [0.0, 0.0, 0.0]),
        ({"scale": "none", "baseline": "leave_one_out"}, [0.1, 0.1, 0.1], [0.0, 0.0, 0.0]),
        ({"scale": "batch", "baseline": "leave_one_out"}, [1.0, 0.0], [0.5**0.5, -(0.5**0.5)]),
    ],
)
def test_a_baseline_is_subtracted(settings, rewards, expected):
    assert of(rewards, **settings).tolist() == pytest.approx(expected, rel=1e-3)


CUT = {"truncated": True}


@pytest.mark.parametrize(
    ("group", "config", "useful"),
    [
        ([sample(1.0), sample(0.0)], {}, True),
        ([sample(1.0), sample(1.0)], {"kl_coef": 0.1}, False),
        # Rewards are compared as they are used, in float32.
        ([sample(1.0), sample(1.0 + 1e-9)], {}, False),
        ([sample(1.0, **CUT), sample(0.0, **CUT)], {"overlong": "filter"}, False),
        # The one that counts has the group's mean.
        ([sample(1.0, **CUT), sample(0.0, **CUT), sample(0.5)], {"overlong": "filter"}, False),
        ([sample(1.0, **CUT), sample(0.0)], {"overlong": "filter"}, True),
        ([sample(1.0, **CUT), sample(0.0)], {"overlong": "zero"}, False),
        ([sample(1.0, from_tool=[1, 1]), sample(0.0, from_tool=[1, 1])], {}, False),
        ([sample(1.0), sample(1.0)], {"baseline": "none", "advantage_scale": "none"}, True),
    ],
)
def test_a_group_can_train_where_a_response_moves_weights(group, config, useful):
    other = [sample(1.0, 1), sample(0.0, 1)]
    assert useful_groups([*group, *other], TrainConfig(**config), CAP) == ({0, 1} if useful else {1})


@pytest.fixture
def own(tmp_path):
    (tmp_path / "own_advantages.py").write_text(MODULE)
    reward = [{"path": "a:b", "name": "right"}, {"path": "a:short"}]

    def made(name, **more):
        given = {"train": {"advantage": f"own_advantages:{name}"}, "reward": reward, "code": [str(tmp_path)]}
        return OwnAdvantage(small_recipe(**given | more))

    return made


def test_own_advantages_are_the_functions(own, capsys):
    drawn = [sample(1.0, 2, terms=(1.0, 5.0)), sample(1.0, 3, terms=(1.0, 0.0), truncated=True)]
    found = own("by_term")(drawn)
    assert found == [replace(drawn[0], advantage=5.0), replace(drawn[1], advantage=3.0)]
    assert TrainingValues.of(found, TrainConfig(), CAP).advantages.tolist() == [5.0, 3.0]
    assert own("by_term")([]) == []
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("name", "more", "facts"),
    [
        ("whole", {}, ("int64", "[16]")),
        ("one", {}, ("float32 []", "[16]")),
        ("of_a_list", {"rollout": {"group_size": 2}}, ("list", "[4]")),
        ("infinite", {}, ("NaN",)),
        ("of_rewards", {}, ("of_rewards(rewards, groups, lengths, truncated, terms)",)),
        ("nothing", {}, ("own_advantages", "'nothing'")),
        # Terms are wanted where the reward is one value.
        ("by_term", {"reward": "a:b"}, ("KeyError", "'short'", "own_advantages.py", "line 6")),
    ],
)
def test_an_own_advantage_that_breaks_the_contract_is_refused(own, name, more, facts):
    with refused(ConfigError, naming=("train.advantage", *facts)):
        own(name, **more)
