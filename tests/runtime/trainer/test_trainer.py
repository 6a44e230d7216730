"""The trainer on models whose log-probs and gradients can be worked out one response at a time."""

import json
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import GPT2Config, GPT2LMHeadModel, MistralConfig, Qwen2Config, Qwen2ForCausalLM

from tests.refused import refused
from tltlab.errors import ConfigError, RunError
from tltlab.runtime.recipe.sections import TrainConfig
from tltlab.runtime.trainer import trainer as of_tokens
from tltlab.runtime.trainer.ranks import make_deterministic, ordinary_segments
from tltlab.runtime.trainer.samples import Sample, check
from tltlab.runtime.trainer.trainer import Trainer
from tltlab.runtime.trainer.whole import local_part

from ..small_models import loaded, small_shape

TEMPERATURE = 0.8
CAP = 64


def samples(num=8):
    rng = np.random.default_rng(0)
    drawn = []
    for n in range(num):
        tokens, prompt = (rng.integers(4, 24, length).tolist() for length in (3 + 5 * n, 2 + n % 3))
        told = {"reward": float(n % 2), "group": n // 4, "truncated": n == 5}
        drawn.append(Sample(prompt_token_ids=prompt, token_ids=tokens, logprobs=[-3.0] * len(tokens), **told))
    return drawn


def trainer(model, **config):
    return Trainer(str(model), TrainConfig(**config), temperature=TEMPERATURE, max_response_tokens=CAP, seed=0)


def updated(made, drawn=None, rl_step=0):
    made.old_logprobs(samples() if drawn is None else drawn)
    return made.update(rl_step)


def trained(made, rl_steps=1):
    """All weights after some RL steps on the same samples."""
    for rl_step in range(rl_steps):
        updated(made, rl_step=rl_step)
    return flat(made)


def flat(made):
    return torch.cat([tensor.float().flatten() for tensor in made.weights().values()]).numpy()


def near(found, expected, atol):
    """Whether all weights are; `pytest.approx` takes a second for so many."""
    return np.allclose(found, expected, rtol=0, atol=atol)


class Plain:
    """A model and its optimizer as transformers and torch have them, for one update worked out by hand."""

    def __init__(self, model):
        self.model = loaded(model)
        self._adam = torch.optim.AdamW(self.model.parameters(), lr=5e-4, betas=(0.9, 0.99), weight_decay=0.1)

    def learn(self, sample, num_tokens):
        """Add the gradient of the tokens that a policy drew, of all `num_tokens`; returns their log-probs.

        Two of four have reward 1: the mean is 1/2 and the standard deviation sqrt(4 * 1/4 / 3) + 1e-4.
        """
        drawn = sample.drawn()
        logp = exact_logprobs(self.model, sample)[drawn]
        advantage = (sample.reward - 0.5) / ((1 / 3) ** 0.5 + 1e-4)
        correction = (logp.detach() - torch.tensor(sample.logprobs)[drawn]).exp().clamp(max=2.0)
        (-(correction * (logp - logp.detach()).exp() * advantage).sum() / num_tokens).backward()
        return logp.detach()

    def stepped(self):
        """The gradient's norm, and all weights after a step."""
        norm = torch.cat([p.grad.flatten() for p in self.model.parameters() if p.grad is not None]).norm()
        self._adam.step()
        return float(norm), torch.cat([tensor.detach().flatten() for tensor in self.model.parameters()]).numpy()


def saved(model, folder, like):
    """Write a model with another one's tokenizer."""
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text((like / name).read_text())
    return folder


@pytest.fixture(scope="module")
def tied_model(random_model, tmp_path_factory):
    """A Qwen2 with fewer KV heads than heads, biases, and an embedding that is its LM head."""
    folder = tmp_path_factory.mktemp("tied-model")
    torch.manual_seed(5)
    shape = small_shape(num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True)
    model = Qwen2ForCausalLM(Qwen2Config(**shape))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return saved(model, folder, random_model)


@pytest.fixture(params=["random_model", "tied_model"])
def model(request):
    return request.getfixturevalue(request.param)


def exact_rows(model, sample):
    """[N, V] log-probs of one response alone through the model as transformers runs it."""
    logits = model(torch.tensor([sample.prompt_token_ids + sample.token_ids])).logits
    return torch.log_softmax(logits[0, len(sample.prompt_token_ids) - 1 : -1] / TEMPERATURE, -1)


def exact_logprobs(model, sample):
    return exact_rows(model, sample).gather(1, torch.tensor(sample.token_ids)[:, None])[:, 0]


@pytest.mark.parametrize("budget", [1, 64, 4096])
def test_packing_changes_no_logprob(model, budget):
    made = trainer(model, tokens_per_microbatch=budget)
    pairs = [(s.prompt_token_ids, s.token_ids) for s in samples()]
    exact = loaded(model)
    with torch.no_grad():
        expected = [exact_logprobs(exact, s) for s in samples()]
    assert all(near(found, wanted.numpy(), 1e-5) for found, wanted in zip(made.score(pairs), expected, strict=True))


def test_an_update_is_that_of_the_formula(model):
    made = trainer(model, minibatches=1, max_grad_norm=1e9, weight_decay=0.1)
    found, plain = trained(made), Plain(model)
    for sample in samples():
        plain.learn(sample, sum(len(s.token_ids) for s in samples()))
    assert near(found, plain.stepped()[1], 2e-5)


def test_tool_output_is_read_not_learned(random_model):
    """Its tokens have a share neither in the loss nor in its weights, nor in what is logged."""
    from_tool = [[0] * 3, [0, 1, 1, 1, 0, 0, 0, 1], [1] * 13, [0] * 18]
    drawn = [
        replace(s, from_tool=mask, logprobs=[-3.0 * (not said) for said in mask])
        for s, mask in zip(samples(4), from_tool, strict=True)
    ]
    made = trainer(random_model, minibatches=1, max_grad_norm=1e9, weight_decay=0.1)
    mismatch, update = made.old_logprobs(drawn), made.update(0)
    plain = Plain(random_model)
    differences = torch.cat([(plain.learn(sample, 3 + 4 + 18) + 3.0).abs() for sample in drawn])
    norm, expected = plain.stepped()
    assert update.grad_norm == pytest.approx(norm, rel=1e-4)
    assert mismatch.mismatch_abs == pytest.approx(float(differences.mean()), rel=1e-4)
    assert update.trained_responses == 3
    assert near(flat(made), expected, 2e-5)


def test_memory_settings_change_no_update(model):
    whole = trained(trainer(model, tokens_per_microbatch=4096))
    assert near(trained(trainer(model, tokens_per_microbatch=40, activation_checkpointing=True)), whole, 2e-5)


def test_checkpointed_activations_are_computed_a_second_time(random_model):
    calls = {}
    for wanted in (False, True):
        made = trainer(random_model, activation_checkpointing=wanted, minibatches=1)
        made.old_logprobs(samples())
        seen = []
        made.policy.model.model.layers[0].self_attn.register_forward_hook(lambda *_, seen=seen: seen.append(None))
        made.update(0)
        calls[wanted] = len(seen)
    assert calls == {False: 2, True: 3}  # the drift is measured once more


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dropout_is_never_applied(random_model, tmp_path, dtype):
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.5)
    config = GPT2Config(vocab_size=24, n_embd=32, n_layer=2, n_head=2, n_positions=128, **dropout)
    folder = saved(GPT2LMHeadModel(config), tmp_path, random_model)
    with closing(trainer(folder, dtype=dtype, activation_checkpointing=True, minibatches=1)) as made:
        assert updated(made).clip_fraction == 0


def test_bfloat16_keeps_float32_weights_and_follows_float32(model):
    exact = trainer(model, activation_checkpointing=True)
    before, after = flat(exact), trained(exact, 2)
    with closing(trainer(model, dtype="bfloat16", activation_checkpointing=True)) as made:
        found = trained(made, 2)
        assert {parameter.dtype for parameter in made.policy.parameters()} == {torch.float32}
        assert {tensor.dtype for tensor in made.weights().values()} == {torch.bfloat16}
    direction = np.corrcoef(found - before, after - before)[0, 1]
    assert direction > 0.5


ALIKE = Sample(prompt_token_ids=[5], token_ids=[6, 7], logprobs=[-1.0] * 2, reward=1.0, group=0)
EMPTY = [replace(s, token_ids=[], logprobs=[]) for s in samples()]


@pytest.mark.parametrize(
    ("config", "drawn", "num_trained"),
    [
        ({}, [ALIKE] * 4, 0),  # a group without a difference teaches nothing
        ({"kl_coef": 1.0}, [ALIKE] * 4, 4),  # but is held by a penalty
        ({"kl_coef": 1.0}, EMPTY, 0),
        ({"overlong": "filter"}, samples(), 7),
    ],
    ids=["alike", "penalty", "empty", "filtered"],
)
def test_only_what_carries_a_gradient_is_trained(random_model, config, drawn, num_trained):
    made = trainer(random_model, **config)
    trained(made)
    before = flat(made)
    metrics = updated(made, drawn, 1)
    assert metrics.trained_responses == num_trained
    assert (before != flat(made)).any() == bool(num_trained)
    assert num_trained or metrics.drift_kl == 0


def test_groups_without_a_difference_count(random_model):
    alone, among = (trainer(random_model, minibatches=1) for _ in range(2))
    dead = [replace(s, reward=1.0, group=7) for s in samples()]
    norm = updated(alone).grad_norm
    assert updated(among, [*samples(), *dead]).grad_norm == pytest.approx(norm / 2, rel=1e-4)


def test_what_is_logged_is_a_mean_over_tokens(random_model):
    measured = []
    for aggregation, others in (
        ("token", []),
        ("constant", []),
        ("token", [replace(s, reward=1.0) for s in samples()]),
    ):
        made = trainer(random_model, aggregation=aggregation, minibatches=1, lr=1e-9)
        drawn = [*samples(), *(replace(s, group=7) for s in others)]
        exact = made.score([(s.prompt_token_ids, s.token_ids) for s in drawn])
        drawn = [replace(s, logprobs=logp.tolist()) for s, logp in zip(drawn, exact, strict=True)]
        measured.append(updated(made, drawn).correction_mean)
    assert measured == pytest.approx([1.0, 1.0, 1.0], abs=1e-4)


@pytest.mark.parametrize(
    ("change", "facts"),
    [
        ({"logprobs": [-1.0, float("nan"), -1.0]}, ("1", "log-prob")),
        ({"reward": -3.4e38}, ()),
    ],
)
def test_samples_that_are_not_finite_are_named(change, facts):
    drawn = [replace(sample, reward=3.4e38) for sample in samples()]
    drawn[1] = replace(drawn[0], name="sample 1 of prompt p", **change)
    with refused(RunError, naming=facts):
        check(drawn, TrainConfig(advantage_scale="none"), CAP, rl_step=7)


@pytest.mark.parametrize(
    ("drawn", "facts"),
    [
        (samples(), None),
        ([], None),
        ([replace(sample, reward=0.5) for sample in samples()], ("8 rewards", "0.5", "nothing moves")),
        ([replace(sample, reward=float(sample.group)) for sample in samples()], ("prompt", "train.kl_coef")),
    ],
)
def test_rewards_without_a_difference_are_reported(drawn, facts):
    said = check(drawn, TrainConfig(kl_coef=0.1 if facts and "train.kl_coef" in facts else 0.0), CAP, rl_step=7)
    assert said is None if facts is None else all(fact in (said or "") for fact in facts)


def test_nan_weights_are_refused_by_name(random_model, tmp_path):
    model = loaded(random_model)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 5] = float("nan")
    bad = saved(model, tmp_path, random_model)
    with refused(ConfigError, naming=("1", "up_proj", "NaN")):
        trainer(bad)


def test_what_is_not_finite_stops_an_update(random_model, tmp_path):
    made = trainer(random_model, lr=1e39)
    drawn = [replace(sample, name=f"sample {n}") for n, sample in enumerate(samples())]
    with refused(RunError, naming=("3", "1e+39")):
        updated(made, drawn, rl_step=3)
    with refused(RunError, naming=("4", "log-probs", "0", "8")):
        made.old_logprobs(drawn, rl_step=4)
    made.save_checkpoint(str(tmp_path / "bad"))
    fresh = trainer(random_model)
    with refused(RunError):
        fresh.load_checkpoint(str(tmp_path / "bad"))
    before = flat(fresh := trainer(random_model, minibatches=1))
    drawn[1] = replace(drawn[1], logprobs=[float("nan")] * len(drawn[1].token_ids))
    fresh.old_logprobs(drawn)
    with refused(RunError):
        fresh.update(5)
    assert (flat(fresh) == before).all()


def test_there_are_as_many_steps_as_minibatches(random_model):
    made = trainer(random_model, minibatches=5, kl_coef=0.1)
    trained(made)
    assert made.steps == 5, "as many steps as mini-batches, also where samples do not divide"


def test_a_correction_weighs_tokens_by_who_drew_them(random_model):
    measured = {
        correction: updated(trainer(random_model, correction=correction, correction_cap=1.5))
        for correction in ("none", "truncated", "behaviour")
    }
    assert measured["none"].correction_mean == pytest.approx(1.0)
    assert measured["behaviour"].correction_mean == pytest.approx(1.0)
    assert 0.1 < measured["truncated"].correction_mean < 1.5
    # Only there is the clip about the distance to the engine, and these tokens are far from it.
    assert measured["behaviour"].clip_fraction > 0.2 > measured["truncated"].clip_fraction


def test_a_resumed_trainer_continues_bit_by_bit(model, tmp_path):
    made, resumed = (trainer(model, warmup_steps=5) for _ in range(2))
    fresh = flat(made)
    made.save_checkpoint(str(tmp_path / "first"))
    once = trained(made)
    made.save_checkpoint(str(tmp_path / "then"))
    resumed.load_checkpoint(str(tmp_path / "then"))
    assert (once == flat(resumed)).all()
    for side in (made, resumed):
        updated(side, rl_step=1)
    assert (flat(made) == flat(resumed)).all()
    # Before the first step there is nothing to remember.
    resumed.load_checkpoint(str(tmp_path / "first"))
    assert (flat(resumed) == fresh).all()
    assert (trained(resumed) == once).all()


def test_a_plain_trainer_reads_bfloat16_checkpoints(model, tmp_path):
    with closing(trainer(model, dtype="bfloat16")) as made:
        trained(made, 2)
        made.save_checkpoint(str(tmp_path))
        masters = [p.full_tensor().detach() for p in made.policy.parameters()]
        moments = [made.optimizer.state[p]["exp_avg_sq"].full_tensor() for p in made.policy.parameters()]
        made.score([([5], [6])])  # after which its parameters are still gathered
        made.load_checkpoint(str(tmp_path))
        for parameter, master in zip(made.policy.parameters(), masters, strict=True):
            assert torch.equal(parameter.full_tensor(), master)
    plain = trainer(model)
    plain.load_checkpoint(str(tmp_path))
    for parameter, master, moment in zip(plain.policy.parameters(), masters, moments, strict=True):
        assert torch.equal(parameter, master)
        assert torch.equal(plain.optimizer.state[parameter]["exp_avg_sq"], moment)


def test_half_of_a_checkpoint_is_refused(random_model, tmp_path):
    made = trainer(random_model)
    trained(made)
    made.save_checkpoint(str(tmp_path))
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert {file.suffix for file in files} == {".safetensors", ".sha256", ".json"}
    assert json.loads((tmp_path / "state.json").read_text()) == {"steps": 2}
    biggest = max(files, key=lambda file: file.stat().st_size)
    biggest.write_bytes(biggest.read_bytes()[:-100])
    with refused(RunError):
        trainer(random_model).load_checkpoint(str(tmp_path))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_offloading_and_back_changes_nothing(random_model, dtype):
    with closing(trainer(random_model, dtype=dtype, kl_coef=0.1)) as made:
        wanted = [trained(made) for _ in range(3)]
    with closing(trainer(random_model, dtype=dtype, kl_coef=0.1)) as made:
        assert (trained(made) == wanted[0]).all()
        places = []
        for weights in wanted[1:]:
            made.offload()
            # On a CPU that is all: here as it would go on from a GPU, and back to another place than before.
            made._move(made._host.copies)
            places.append([local_part(weight).data_ptr() for weight in made.policy.parameters()])
            made._move(lambda tensors: [local_part(tensor).clone() for tensor in tensors])
            assert not set(places[0]) & {local_part(weight).data_ptr() for weight in made.policy.parameters()}
            assert (trained(made) == weights).all()
        assert places[0] == places[1], "memory of the host is pinned once"


def test_gathered_weights_do_not_outlast_a_pass(random_model):
    """FSDP2 keeps those of the root, embedding and LM head, until the next backward pass."""
    with closing(trainer(random_model, dtype="bfloat16")) as made:
        made.score([([5, 6], [7, 8])])
        assert any(weight.dtype == torch.bfloat16 for weight in made.policy.parameters())
        made.release()
        assert all(isinstance(weight, DTensor) for weight in made.policy.parameters())


def test_engines_open_ordinary_segments(monkeypatch):
    settings = []
    monkeypatch.setattr(torch.cuda.memory, "_set_allocator_settings", settings.append)
    with ordinary_segments():
        assert settings == []
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True,max_split_size_mb:512")
    with ordinary_segments():
        assert settings == ["expandable_segments:False,max_split_size_mb:512"]
    assert settings[1:] == ["expandable_segments:True,max_split_size_mb:512"]


def test_only_a_recipe_that_asks_is_deterministic(random_model):
    try:
        trainer(random_model)
        assert not torch.are_deterministic_algorithms_enabled()
        plain = trained(trainer(random_model))
        made = trainer(random_model, deterministic=True)
        # FlashAttention's backward pass takes a warning for leave to continue as it likes.
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
        # Every operation of an update has a deterministic version, or this would raise.
        assert near(trained(made), plain, 1e-6)
    finally:
        make_deterministic(False)


def test_a_saved_policy_is_a_hugging_face_model(model, tmp_path):
    made = trainer(model)
    found = trained(made)
    made.save(str(tmp_path / "saved"))
    again = loaded(tmp_path / "saved")
    assert (torch.cat([t.flatten() for t in again.parameters()]).detach().numpy() == found).all()
    assert (tmp_path / "saved" / "tokenizer.json").exists()


def test_a_folder_that_cannot_be_trained_is_refused(tmp_path):
    with refused(ConfigError):
        trainer(tmp_path)
    MistralConfig(sliding_window=32).save_pretrained(tmp_path)
    with refused(ConfigError, naming=("sliding",)):
        trainer(tmp_path)


@pytest.mark.parametrize("entropy", [False, True])
def test_logits_in_chunks_have_the_same_gradients(monkeypatch, entropy):
    monkeypatch.setattr(of_tokens, "LOGITS_AT_A_TIME", 21)
    torch.manual_seed(0)
    hidden = torch.randn(8, 5, requires_grad=True)
    head = torch.randn(7, 5, requires_grad=True)
    tokens, weights = torch.randint(7, (8,)), torch.randn(8, 2)
    found = of_tokens.token_logprobs(hidden, head, tokens, 0.7, entropy=entropy)
    rows = torch.log_softmax(hidden @ head.T / 0.7, -1)
    exact = rows.gather(1, tokens[:, None])[:, 0]
    if entropy:
        exact = torch.stack([exact, -(rows.exp() * rows).sum(1)], 1)
    weights = weights if entropy else weights[:, 0]
    assert torch.allclose(found, exact, atol=1e-6)
    gradients = torch.autograd.grad((found * weights).sum(), (hidden, head))
    expected = torch.autograd.grad((exact * weights).sum(), (hidden, head))
    for one, other in zip(gradients, expected, strict=True):
        assert torch.allclose(one, other, atol=1e-5)
