"""Ranks that share their sequences compute what one rank does, alone and beside others that have their own."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from tests.refused import refused
from tltlab.errors import ConfigError
from tltlab.runtime.recipe.sections import TrainConfig
from tltlab.runtime.trainer.attention import ALONE, SequenceGroup
from tltlab.runtime.trainer.ranks import sequence_groups
from tltlab.runtime.trainer.trainer import PackedTokens, Trainer, check_trainable

from .test_trainer import near, samples, tied_model, updated

__all__ = ["tied_model"]

SETTINGS = {"tokens_per_microbatch": 64, "kl_coef": 0.1, "minibatches": 3}
STEPS = {"passes": 2, "lr_schedule": "cosine", "weight_decay": 0.1, "decay_all": False}
PAIRS = [(s.prompt_token_ids, s.token_ids) for s in samples()]


def made(model, *ranks, **config):
    """One rank, alone without its number, how many there are, and where they meet."""
    placed = dict(zip(("rank", "world", "rendezvous"), ranks or (0, 1, None), strict=True))
    settings = {"temperature": 0.8, "max_response_tokens": 64, "seed": 0, "timeout_s": 300.0}
    return Trainer(str(model), TrainConfig(**SETTINGS | config), **settings, **placed)


def learned(trainer):
    """What a trainer measures and is after updates of all samples, and of one: most ranks then have none."""
    found = []
    for rl_step, drawn in enumerate((samples(), [samples()[5]])):
        rank_of = [n % trainer.data_ranks for n in range(len(drawn))]
        found.append(asdict(trainer.old_logprobs(drawn, rank_of)) | asdict(trainer.update(rl_step)))
        weights = trainer.weights()  # of all ranks; the first alone gets them
        found.append(torch.cat([tensor.flatten() for tensor in weights.values()]).numpy() if weights else None)
    return [*found, *trainer.score(PAIRS)]


def kept_bytes(trainer):
    """Bytes of what autograd keeps for the backward pass of a long sequence, each storage once."""
    kept = {}
    held = []

    def keep(tensor):
        held.append(tensor)  # or its storage's address would come again
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        trainer.policy(trainer._packed([([5], [6] * 4095)])).sum().backward()
    return sum(kept.values())


def of_rank(rank, world, model, folder, config):
    """In its own process: `learned`; True if it continues bit by bit from a checkpoint; what autograd keeps."""
    trainer = made(model, rank, world, f"file://{folder}/meeting", **config)
    try:
        found = learned(trainer)
        trainer.save_checkpoint(str(folder / "saved"))
        ends = []
        for _ in range(2):
            trainer.load_checkpoint(str(folder / "saved"))
            updated(trainer, rl_step=2)
            ends.append(trainer.weights())
        same = all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
        return [*found, same, kept_bytes(trainer)]
    finally:
        trainer.close()


@pytest.fixture(scope="module")
def processes():
    """Four, forked from one that has imported what they need."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    with ProcessPoolExecutor(4, mp_context=context) as pool:
        yield pool


@pytest.mark.engine
@pytest.mark.parametrize(
    ("world", "config"),
    [
        (2, {"algorithm": "reinforce++"}),
        (4, {"activation_checkpointing": True, **STEPS}),
        (2, {"lora": {"rank": 4}, "lr": 0.02}),
    ],
)
def test_ranks_that_share_sequences_learn_what_one_does(tied_model, tmp_path, processes, world, config):
    shared = {"sequence_parallel": 2} | config
    answers = [processes.submit(of_rank, rank, world, tied_model, tmp_path, shared) for rank in range(world)]
    alone = made(tied_model, **config)
    expected = learned(alone)
    alone_bytes = kept_bytes(alone)
    for rank, answer in enumerate(answers):
        *found, same, num_bytes = answer.result(400)
        assert same
        for one, other in zip(found, expected, strict=True):
            if isinstance(other, dict):
                assert one == pytest.approx(other, abs=1e-4, rel=1e-4)
            elif one is not None or rank == 0:
                assert near(one, other, 1e-4)
        # Weights and the whole log-probs are no activations.
        assert num_bytes < 0.6 * alone_bytes


@pytest.mark.parametrize("lengths", [[], [1], [2, 5], [3, 3, 1], [11]])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_have_equal_parts_of_all_tokens(lengths, size):
    pairs = [([10 * n], list(range(10 * n + 1, 10 * n + length))) for n, length in enumerate(lengths)]
    parts = [PackedTokens.of(pairs, torch.device("cpu"), SequenceGroup(rank=r, size=size)) for r in range(size)]
    whole = PackedTokens.of(pairs, torch.device("cpu"), ALONE)
    assert len({part.token_ids.shape for part in parts}) == 1
    joined = torch.cat([part.token_ids[0] for part in parts])
    assert 0 < len(joined) <= max(sum(lengths), 1) + size - 1
    assert joined[: sum(lengths)].tolist() == whole.token_ids[0, : sum(lengths)].tolist()
    for part in parts:
        assert part.boundaries[-1] == len(joined)
        assert part.boundaries[: len(lengths) + 1].tolist() == [0, *np.cumsum(lengths)]
    starts = [r * parts[0].token_ids.shape[1] for r in range(size)]
    rows = torch.cat([part.rows + start for part, start in zip(parts, starts, strict=True)])
    assert rows.tolist() == whole.rows.tolist()
    assert torch.cat([part.next_tokens for part in parts]).tolist() == whole.next_tokens.tolist()
    assert torch.cat([torch.arange(whole.num_rows)[part.own] for part in parts]).tolist() == list(range(len(rows)))


def test_what_cannot_be_shared_is_refused(tied_model):
    config = AutoConfig.from_pretrained(tied_model)
    check_trainable(config, "it", 2)
    with refused(ConfigError, naming=("sequence_parallel", "4", "2")):
        check_trainable(config, "it", 4)
    config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    check_trainable(config, "it", 1)
    with refused(ConfigError, naming=("dynamic", "train.sequence_parallel")):
        check_trainable(config, "it", 2)
    with refused(ConfigError, naming=("3",)):
        sequence_groups(0, 3, 2, 1.0)
