"""The MTP layer that a model brings along: made, drafted with, trained as other heads are, and kept with its model."""

import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from tests.refused import refused
from tltlab.drafters.specs import DEFAULT_DRAFTERS, LearnedSpec
from tltlab.errors import ConfigError
from tltlab.runtime.drafter.heads.head import MtpHead, layer_config, mtp_of_model, save_with_mtp
from tltlab.runtime.drafter.heads.kinds import new_head
from tltlab.runtime.drafter.heads.layouts import load_head
from tltlab.runtime.drafter.heads.target import MIMO, FrozenTarget, hidden_states_of
from tltlab.runtime.drafter.offline.chains import kept_along
from tltlab.runtime.drafter.offline.export import ExportSource, export_drafter
from tltlab.runtime.drafter.training import HeadTraining
from tltlab.runtime.engine.engine import Engine
from tltlab.runtime.recipe.drafter import ExportConfig, LossConfig, OptimConfig
from tltlab.runtime.recipe.sections import TrainConfig
from tltlab.runtime.trainer.trainer import Trainer

from ...engine.asking import fixed, kept_and_refused, request, texts
from ...small_models import small_shape
from .test_kinds import accepted, borne_out, drafting

DEPTH = 3


def fresh(config, seed):
    """An MTP layer of random weights."""
    torch.manual_seed(seed)
    head = MtpHead(layer_config(config))
    with torch.no_grad():
        for value in head.parameters():
            if value.dim() == 2:
                value.normal_(0.0, value.shape[1] ** -0.5)
    return head


@pytest.fixture(scope="module")
def mimo(random_model, tmp_path_factory):
    """A random model whose next token follows mostly from the last one, with a random MTP layer."""
    torch.manual_seed(3)
    model = Qwen2ForCausalLM(Qwen2Config(architectures=[MIMO], **small_shape()))
    with torch.no_grad():
        for name, value in model.named_parameters():
            value.mul_(0.1 if "o_proj" in name else 8.0 if name == "lm_head.weight" else 1.0)
    out = tmp_path_factory.mktemp("mimo")
    save_with_mtp(model, out, model.state_dict(), fresh(model.config, 0).serving_weights())
    for file in random_model.glob("tokenizer*"):
        shutil.copy(file, out)
    return out


def same(one, other):
    return all(torch.equal(value, other.state_dict()[name]) for name, value in one.state_dict().items())


def test_it_is_read_saved_and_read_again(mimo, random_model, tmp_path):
    head = new_head(mimo, "mtp", 0)
    again = load_head(head.save(tmp_path / "head"))
    assert isinstance(head, MtpHead)
    assert isinstance(again, MtpHead)
    assert same(head, again)
    other = fresh(head.config, 1)
    assert not same(head, other)
    other.load_state_dict(head.serving_weights())
    assert same(head, other)
    assert all(name.startswith("model.mtp_layers.0.") for name in head.serving_weights())
    source = ExportSource(head=tmp_path / "head", target=mimo, prompts=random_model / "heldout.jsonl")
    with refused(ConfigError):
        export_drafter(source, tmp_path / "exported", ExportConfig(), lambda message: None)
    assert not (tmp_path / "exported").exists()
    with refused(ConfigError, naming=("MiMo", "MTP")):
        new_head(random_model, "mtp", 0)
    with refused(ConfigError, naming=("EAGLE",)):
        new_head(mimo, "eagle", 0)
    with refused(ConfigError, naming=("MTP",)):
        Engine(str(random_model), drafters={"mtp": LearnedSpec(method="mtp")})


def test_the_targets_distributions_follow_from_its_states(mimo):
    model = AutoModelForCausalLM.from_pretrained(mimo)
    ids = torch.arange(4, 24)
    states = hidden_states_of(model, ids, ())[0]
    with torch.no_grad():
        expected = model(ids[None]).logits[0]
    for frozen in (FrozenTarget.from_folder(mimo), FrozenTarget.of(model)):
        torch.testing.assert_close(frozen.logits(states), expected, atol=1e-4, rtol=0)


def test_a_trained_model_still_has_it(mimo, tmp_path):
    trainer = Trainer(str(mimo), TrainConfig(), temperature=1.0, max_response_tokens=8, seed=0)
    assert trainer.frozen().norm is not None
    trainer.save(str(tmp_path / "trained"))
    assert same(mtp_of_model(tmp_path / "trained"), mtp_of_model(mimo))


@pytest.mark.engine
def test_vllm_drafts_with_it_what_is_foretold(mimo):
    model = AutoModelForCausalLM.from_pretrained(mimo)
    frozen = FrozenTarget.from_folder(mimo)
    head = mtp_of_model(mimo)
    prompts = [[1, 5 + n, 9 + n, 23 - n] for n in range(6)]
    found = []

    def kept(engine):
        """Draft tokens, which are those that are kept here."""
        total = 0
        for prompt in prompts:
            response, drafts = accepted(engine, prompt)
            sequence = found[-1]
            assert sequence.token_ids.tolist() == prompt + response
            states = hidden_states_of(model, sequence.token_ids[:-1], ())[0]
            torch.testing.assert_close(sequence.hidden, states, atol=1e-4, rtol=0)
            assert borne_out(drafts, kept_along(head, frozen, sequence, DEPTH).tolist())
            total += sum(drafts)
        return total

    with drafting(mimo, {**DEFAULT_DRAFTERS, "learned": LearnedSpec(method="mtp")}, DEPTH) as engine:
        engine.capture(found.append)
        untaught = kept(engine)
        training = HeadTraining(head, frozen, LossConfig(kind="mtp"), OptimConfig(lr=3e-3, warmup=1))
        for _ in range(80):
            training.update(found)
        engine.update_draft_weights(training.head.serving_weights().items(), training.predict(found).chances)
        assert kept(engine) > untaught + 20
        # The target's weights go and come again, and with them the embedding and LM head that the layer shares.
        engine.capture(None)
        asked = [request(f"p{n}", 0, prompt, 40) for n, prompt in enumerate(prompts)]
        before = engine.generate(asked, rl_step=1, temperature=0.0)
        engine.update_weights(((n, -w if n == "lm_head.weight" else w) for n, w in model.state_dict().items()), 1)
        engine.set_policy(None)
        assert texts(engine.generate(asked, rl_step=2, temperature=0.0)) != texts(before)
        engine.update_weights(model.state_dict().items(), 2)
        engine.set_policy(fixed("learned", DEPTH))
        after = engine.generate(asked, rl_step=3, temperature=0.0)
        assert texts(after) == texts(before)
        assert kept_and_refused(after) == kept_and_refused(before)
