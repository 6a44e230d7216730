"""The trainer on a CUDA device: FlashAttention over packed sequences, bfloat16, memory given back. Torch only."""

from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from tltlab.runtime.drafter.heads.loss import drafter_loss
from tltlab.runtime.drafter.heads.target import FrozenTarget
from tltlab.runtime.drafter.sequences import pack
from tltlab.runtime.recipe.drafter import LossConfig
from tltlab.runtime.recipe.sections import TrainConfig
from tltlab.runtime.trainer.ranks import make_deterministic
from tltlab.runtime.trainer.samples import Sample
from tltlab.runtime.trainer.trainer import Trainer

from ..runtime.drafter.small_heads import made_head, made_sequence, made_target

pytestmark = pytest.mark.gpu

VOCABULARY = 512
DEVICE = "cuda"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A Qwen2 of random weights with grouped-query attention and heads of the usual width."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(1)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "max_position_embeddings": 1024}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    Qwen2ForCausalLM(Qwen2Config(vocab_size=VOCABULARY, **sizes, **heads)).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{n}": n for n in range(VOCABULARY)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(folder)
    return folder


def samples():
    rng = np.random.default_rng(0)
    drawn = []
    for n in range(16):
        tokens, prompt = (rng.integers(0, VOCABULARY, size).tolist() for size in (5 + 30 * n, 4 + n))
        rest = {"logprobs": [-6.0] * len(tokens), "reward": float(n % 2), "group": n // 4}
        drawn.append(Sample(prompt_token_ids=prompt, token_ids=tokens, **rest))
    return drawn


PAIRS = [(s.prompt_token_ids, s.token_ids) for s in samples()]


@contextmanager
def trainer(model, **config):
    config = {"tokens_per_microbatch": 1024, "lr": 1e-4} | config
    made = Trainer(str(model), TrainConfig(**config), temperature=1.0, max_response_tokens=512, seed=0)
    try:
        yield made
    finally:
        made.close()


def train(made, rl_step):
    made.old_logprobs(samples())
    return made.update(rl_step)


def flat(made):
    return torch.cat([tensor.float().flatten() for tensor in made.weights().values()])


@pytest.fixture(scope="module")
def on_cpu(model):
    """The log-probs that float32 on the CPU gives."""
    with trainer(model, backend="gloo", dtype="float32") as made:
        return made.score(PAIRS)


def off_by(found, expected):
    """The largest mean difference of a response's log-probs."""
    return max(np.abs(one - other).mean() for one, other in zip(found, expected, strict=True))


def test_importance_weights_would_be_noise_in_bfloat16(model, on_cpu):
    with trainer(model) as made:
        assert made.dtype == torch.bfloat16
        assert next(made.policy.parameters()).is_cuda
        assert off_by(made.score(PAIRS), on_cpu) < 0.02


def test_every_update_would_be_wrong_on_the_device(model, on_cpu):
    with trainer(model, dtype="float32") as made:
        for found, expected in zip(made.score(PAIRS), on_cpu, strict=True):
            assert found == pytest.approx(expected, abs=2e-3)


def test_packed_responses_would_read_each_other(model):
    with trainer(model) as packed, trainer(model, tokens_per_microbatch=1, dtype="float32") as alone:
        assert off_by(packed.score(PAIRS), alone.score(PAIRS)) < 0.01


def test_updates_would_go_astray_in_bfloat16(model):
    found = []
    for dtype in ("float32", "bfloat16"):
        with trainer(model, dtype=dtype, minibatches=1) as made:
            found.append(train(made, 0))
    exact, rounded = found
    assert rounded.loss == pytest.approx(exact.loss, abs=0.02)
    assert rounded.grad_norm == pytest.approx(exact.grad_norm, rel=0.05)


def shared(rank, model, rendezvous):
    """Log-probs and an update's gradient norm by one of two ranks that share sequences, each on its GPU."""
    torch.cuda.set_device(rank)
    config = TrainConfig(tokens_per_microbatch=1024, lr=1e-4, minibatches=1, ranks=2, sequence_parallel=2)
    place = {"rank": rank, "world": 2, "rendezvous": f"file://{rendezvous}", "timeout_s": 120.0}
    made = Trainer(str(model), config, temperature=1.0, max_response_tokens=512, seed=0, **place)
    try:
        return made.score(PAIRS), train(made, 0).grad_norm
    finally:
        made.close()


def test_ranks_would_not_share_sequences_as_one(model, on_cpu, tmp_path):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    with trainer(model, minibatches=1) as made:
        expected_norm = train(made, 0).grad_norm
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        answers = [pool.submit(shared, rank, model, tmp_path / "rendezvous") for rank in range(2)]
        for scores, norm in (answer.result(300) for answer in answers):
            assert norm == pytest.approx(expected_norm, rel=0.05)
            assert off_by(scores, on_cpu) < 0.02


@pytest.mark.parametrize("kind", ["eagle", "hass", "eagle3"])
def test_drafters_would_unlearn_in_bfloat16(kind):
    config = LossConfig(kind=kind)
    found = []
    for device in ("cpu", DEVICE):
        # Weights this small keep chains of several steps from being chaotic.
        head, target = made_head(config.method, seed=1, std=0.1).to(device), made_target()
        frozen = FrozenTarget(embedding=target.embedding.to(device), lm_head=target.lm_head.to(device))
        batch = pack([made_sequence(rows, seed=rows) for rows in (40, 25)], device)
        # As drafters are trained on a device.
        with torch.autocast(device, torch.bfloat16, enabled=bool(found)):
            loss = drafter_loss(head, frozen, batch, config).loss
        loss.backward()
        gradient = torch.cat([p.grad.float().flatten().cpu() for p in head.parameters() if p.grad is not None])
        found.append((loss.item(), gradient))
    (exact, wanted), (rounded, gradient) = found
    assert rounded == pytest.approx(exact, rel=0.02)
    assert torch.cosine_similarity(gradient, wanted, dim=0) > 0.98


def test_checkpointed_activations_would_give_wrong_gradients(model):
    with trainer(model, activation_checkpointing=True) as made:
        before = np.array([logp.mean() for logp in made.score(PAIRS)])
        for rl_step in range(3):
            train(made, rl_step)
        gained = np.array([logp.mean() for logp in made.score(PAIRS)]) - before
    assert gained[1::2].mean() > gained[::2].mean()


def test_an_offloaded_trainer_would_keep_the_device(model):
    with trainer(model) as made:
        train(made, 0)
        held, weights = torch.cuda.memory_allocated(), flat(made)
        made.offload()
        assert torch.cuda.memory_allocated() < 0.2 * held
        made.onload()
        assert torch.equal(flat(made), weights)
        train(made, 1)
        assert not torch.equal(flat(made), weights)


def test_a_resumed_run_would_be_another(model, tmp_path, monkeypatch):
    # FlashAttention's backward adds in no fixed order unless it is told to.
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    ends = []
    for resumed in (False, True):
        with trainer(model, deterministic=True) as made:
            if resumed:
                made.load_checkpoint(str(tmp_path))
            else:
                train(made, 0)
                made.save_checkpoint(str(tmp_path))
            train(made, 1)
            ends.append(flat(made))
    make_deterministic(False)
    assert torch.equal(*ends)
