"""One engine over two processes: the policy stays next to the scheduler, weights and capture are where the model is."""

from contextlib import closing
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from tltlab.drafters.specs import DEFAULT_DRAFTERS, LearnedSpec
from tltlab.runtime.engine import weights
from tltlab.runtime.engine.engine import Engine

from ...small_models import loaded
from ..asking import BLOCK, fixed, groups_of_four, kept_and_refused, texts
from .test_capture import Files, check, few_words

pytestmark = pytest.mark.engine
# Two groups share prefixes of two blocks, of which vLLM takes one with an EAGLE head; responses end one after another.
REQUESTS = few_words(
    [replace(asked, max_response_tokens=24 - n % 5) for n, asked in enumerate(groups_of_four(8, 24, 72))]
)


def greedy(model, request):
    """What a Hugging Face model says, a whole forward pass for every token."""
    ids = list(request.prompt_token_ids)
    with torch.no_grad():
        for _ in range(request.max_response_tokens):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(request.prompt_token_ids) :]


def test_two_ranks_are_as_one(tiny_models, tmp_path, monkeypatch):
    # Several buckets per update, as for a large model.
    monkeypatch.setattr(weights, "BUCKET_BYTES", 64 << 10)
    model = loaded(tiny_models.target)
    whole = [greedy(model, request) for request in REQUESTS]
    drafters = {**DEFAULT_DRAFTERS, "learned": LearnedSpec(method="eagle3", model=str(tiny_models.eagle3))}
    args = {"max_model_len": 128, "max_num_seqs": 6, "block_size": BLOCK, "kv_cache_memory_bytes": 32 << 20}
    args |= {"tensor_parallel_size": 2, "enable_sleep_mode": True}
    files = Files(tmp_path)
    with closing(Engine(str(tiny_models.target), drafters=drafters, max_draft_depth=4, vllm_args=args)) as engine:
        engine.capture(files)
        for number, (name, depth) in enumerate({"none": 0, "suffix": 4, "learned": 2}.items()):
            engine.set_policy(fixed(name, depth) if depth else None)
            rollout = engine.generate(REQUESTS, rl_step=number, temperature=0.0)
            assert texts(rollout) == whole
            found = files.read()
            check(found, rollout, REQUESTS, model, aux_layers=[1, 2, 3])
            assert any(s.first_position for s in found) or number == 0, "the test needs a cached prefix"
            kept, refused = kept_and_refused(rollout)
            assert kept > 20 or name != "suffix"
            assert kept + refused > 100 or not depth
            assert engine.captured.sequences == 8 * (number + 1)
        engine.evaluate(REQUESTS[:2], temperature=0.0)
        assert files.read() == []
        engine.update_draft_weights(load_file(tiny_models.eagle3 / "model.safetensors").items())
        rollout = engine.generate(REQUESTS, rl_step=3, temperature=0.0, until=lambda ended: len(ended) > 2)
        ended = {r.key for r in rollout.responses if r.finish_reason == "length"}
        assert {s.key for s in files.read()} == ended < {r.key for r in rollout.responses}
        engine.capture(None)
        assert engine.captured.sequences == 24 + len(ended)
        engine.set_policy(None)
        engine.update_weights(((n, -w if n == "lm_head.weight" else w) for n, w in model.state_dict().items()), 1)
        assert texts(engine.generate(REQUESTS, rl_step=4, temperature=0.0)) != whole
        engine.update_weights(model.state_dict().items(), 2)
        engine.sleep()
        engine.wake_up()
        assert texts(engine.generate(REQUESTS, rl_step=5, temperature=0.0)) == whole
        assert files.read() == []
