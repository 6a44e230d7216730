"""Two trainer ranks as Ray actors compute what one does, and the death of one is an error, not an endless wait."""

import itertools
import os
import signal
import threading
import time
from dataclasses import asdict

import pytest
import ray
import torch

from tests.refused import refused
from tltlab.errors import ConfigError, RunError
from tltlab.runtime.ray import actors as ray_actors
from tltlab.runtime.recipe.recipe import load_recipe
from tltlab.runtime.trainer.group import TrainerDied, TrainerGroup
from tltlab.runtime.trainer.trainer import Trainer

from .test_trainer import near, samples, tied_model

__all__ = ["tied_model"]

SETTINGS = "train.tokens_per_microbatch=64 train.kl_coef=0.1 train.minibatches=3 faults.collective_timeout_s=1234"


def of_ranks(group, ask):
    """What `ask` finds in each rank's process."""
    return ray.get([actor.__ray_call__.remote(ask) for actor in group.handles])


def pids(group):
    return of_ranks(group, lambda actor: os.getpid())


def one_rank(recipe):
    return Trainer(recipe.model, recipe.train, temperature=1.0, max_response_tokens=48, seed=recipe.seed)


def weights_of(group):
    return group.ask("weights")


def flat(weights):
    return torch.cat([tensor.float().flatten() for tensor in weights.values()]).numpy()


@pytest.fixture(scope="module")
def recipe(recipe_file, tied_model):
    """Of a model whose embedding is its LM head: ranks must gather it once, all of them."""
    return load_recipe(recipe_file, [*SETTINGS.split(), "train.ranks=2", f"model={tied_model}"])


@pytest.fixture(scope="module")
def group(one_ray, recipe):
    group = TrainerGroup(recipe, lambda rank: {"num_cpus": 0, "env_vars": {"TLTLAB_RANK": str(rank)}})
    group.start()
    yield group
    group.close()


def test_two_ranks_train_what_one_does(group, recipe, tmp_path):
    alone = one_rank(recipe)
    # Of two samples in three mini-batches a rank has none to work on.
    for rl_step, drawn in enumerate((samples(), samples()[:2])):
        measured = asdict(group.old_logprobs(drawn)) | asdict(group.ask("update", rl_step))
        expected = asdict(alone.old_logprobs(drawn)) | asdict(alone.update(rl_step))
        assert measured == pytest.approx(expected, abs=1e-4, rel=1e-4)
        assert near(flat(weights_of(group)), flat(alone.weights()), 1e-5)
    pairs = [(s.prompt_token_ids, s.token_ids) for s in samples()]
    scores = group.ask("score", pairs), alone.score(pairs)
    assert all(near(found, wanted, 1e-4) for found, wanted in zip(*scores, strict=True))

    group.ask("save_checkpoint", str(tmp_path / "two"))
    group.old_logprobs(samples())
    group.ask("update", 2)
    went_on = flat(weights_of(group))
    group.ask("load_checkpoint", str(tmp_path / "two"))
    resumed = one_rank(recipe)
    resumed.load_checkpoint(str(tmp_path / "two"))
    assert (flat(weights_of(group)) == flat(resumed.weights())).all()
    group.old_logprobs(samples())
    group.ask("update", 2)
    assert (flat(weights_of(group)) == went_on).all()

    resumed.save_checkpoint(str(tmp_path / "one"))
    group.ask("load_checkpoint", str(tmp_path / "one"))
    assert (flat(weights_of(group)) == flat(resumed.weights())).all()


def test_a_drafter_and_a_folder_get_whole_tensors(group, tmp_path):
    weights = weights_of(group)
    frozen = ray.get(group.frozen())
    assert torch.equal(frozen.embedding, weights["model.embed_tokens.weight"])
    assert torch.equal(frozen.lm_head, frozen.embedding)
    assert frozen.lm_head is frozen.embedding
    group.ask("save", str(tmp_path / "saved"))
    assert (tmp_path / "saved" / "model.safetensors").exists()


def test_a_rank_waits_for_the_others_as_configured(group):
    def patience_s(actor):
        world = torch.distributed.group.WORLD
        return float(world._get_backend(torch.device("cpu")).options._timeout.total_seconds())

    assert of_ranks(group, patience_s) == [1234.0, 1234.0]


def test_a_dead_rank_ends_the_others(group, tmp_path):
    group.ask("save_checkpoint", str(tmp_path))
    before = flat(weights_of(group))
    processes = pids(group)
    group.old_logprobs(samples() * 20)
    threading.Timer(0.3, os.kill, (processes[0], signal.SIGKILL)).start()
    start = time.monotonic()
    with refused(TrainerDied):
        for rl_step in itertools.count():
            group.ask("update", rl_step)
    assert time.monotonic() - start < 120
    with refused(TrainerDied, naming=("trainer",)):
        group.ask("update", 0)

    group.restart()
    group.ask("load_checkpoint", str(tmp_path))
    assert (flat(weights_of(group)) == before).all()
    assert not set(processes) & set(pids(group))


def test_a_ranks_error_arrives_as_itself(group, tmp_path):
    with refused(RunError):
        group.ask("load_checkpoint", str(tmp_path / "nothing"))
    assert not group.handles


def test_a_call_names_what_failed_in_an_actor(one_ray):
    @ray.remote
    def fails(error):
        raise error

    with refused(RunError, naming=("ZeroDivisionError",)):
        ray_actors.get(fails.remote(ZeroDivisionError("by nothing")))
    with refused(ConfigError, naming=("not",)):
        ray_actors.get(fails.remote(ConfigError("not so")))
