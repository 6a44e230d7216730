"""One engine over two processes: the policy stays beside the scheduler, weights reach both halves of the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tltlab.drafters.specs import DEFAULT_DRAFTERS, LearnedSpec
from tltlab.errors import ConfigError
from tltlab.runtime.engine import weights
from tltlab.runtime.engine.engine import Engine, GenerationRequest

from ..asking import fixed, kept_and_refused, requests, texts

pytestmark = pytest.mark.engine
REQUESTS = requests(4, 24)


def greedy(model: Any, request: GenerationRequest) -> list[int]:
    """What a Hugging Face model says, a whole forward pass for every token."""
    ids = list(request.prompt_token_ids)
    with torch.no_grad():
        for _ in range(request.max_response_tokens):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(request.prompt_token_ids) :]


def test_two_ranks_generate_draft_and_take_weights_as_one(
    random_model: Path, bad: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
):
    # Several buckets per update, as for a large model.
    monkeypatch.setattr(weights, "BUCKET_BYTES", 64 << 10)
    model = AutoModelForCausalLM.from_pretrained(random_model, dtype="float32")
    whole = [greedy(model, request) for request in REQUESTS]
    engine = Engine(
        str(random_model),
        drafters={**DEFAULT_DRAFTERS, "learned": LearnedSpec(method="draft_model", model=str(random_model))},
        max_draft_depth=4,
        vllm_args={
            "tensor_parallel_size": 2,
            "enable_sleep_mode": True,
            "max_model_len": 256,
            "max_num_seqs": 32,
            "kv_cache_memory_bytes": 32 << 20,
        },
    )
    try:
        assert texts(engine.generate(REQUESTS, rl_step=0, temperature=0.0)) == whole
        for number, (name, depth) in enumerate({"suffix": 4, "learned": 2}.items(), 1):
            engine.set_policy(fixed(name, depth))
            drafted = engine.generate(REQUESTS, rl_step=number, temperature=0.0)
            assert texts(drafted) == whole
            assert kept_and_refused(drafted)[0] > 20
        engine.set_policy(None)
        engine.update_weights(bad.items(), 1)
        assert texts(engine.generate(REQUESTS, rl_step=3, temperature=0.0)) != whole
        engine.update_weights(model.state_dict().items(), 2)
        engine.sleep()
        engine.wake_up()
        assert texts(engine.generate(REQUESTS, rl_step=4, temperature=0.0)) == whole
        with pytest.raises(ConfigError, match="parallelism"):
            engine.capture(lambda sequence: None)
    finally:
        engine.close()
