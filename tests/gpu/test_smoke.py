"""One GPU, everything: a small model made here, vLLM on CUDA, weight sync, a drafter swapped in, two RL steps."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tltlab.traces.trace import read

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.engine,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and torch sees none"),
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None or importlib.util.find_spec("ray") is None,
        reason="needs vLLM and Ray: pip install 'tltlab[runtime]'",
    ),
]

WITHIN_S = 600


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        pytest.skip("needs a CUDA build of vLLM, this one is for " + current_platform.device_name)
    folder = tmp_path_factory.mktemp("models") / "small"
    tltlab("make-model", "--size", "small", "--out", str(folder))
    return folder


def tltlab(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "tltlab", *arguments], check=True, timeout=WITHIN_S)


def test_the_smoke_recipe_trains_two_steps_and_swaps_the_drafter(model: Path, tmp_path: Path):
    begun, run = time.monotonic(), tmp_path / "run"
    overrides = [
        f"model={model}", f"data.train={model / 'train.jsonl'}", f"data.heldout={model / 'heldout.jsonl'}"
    ]  # fmt: skip
    tltlab("train", "gpu_smoke", *overrides, "--out", str(run))
    assert time.monotonic() - begun < WITHIN_S
    summary = json.loads((run / "summary.json").read_text())
    assert summary["grpo_steps"] == 2
    assert summary["drafter"]["swaps"] >= 1
    iterations = read(run / "trace").table("iterations")
    assert iterations is not None
    assert iterations["num_accepted"].sum() > 0, "nothing was ever drafted and kept"
    assert iterations["next_draft_depth"].nunique() > 1, "drafts of one depth only"


def test_an_engine_sleeps_and_wakes_with_the_weights_it_is_given(model: Path):
    from transformers import AutoModelForCausalLM

    from tltlab.runtime.engine.engine import Engine, GenerationRequest

    vllm_args = {"max_model_len": 256, "max_num_seqs": 8, "gpu_memory_utilization": 0.3, "enable_sleep_mode": True}
    engine = Engine(str(model), max_draft_depth=4, vllm_args=vllm_args)
    try:
        request = GenerationRequest(key=(0, "p", 0, 0), prompt_token_ids=[1, 4, 5], max_response_tokens=32)

        def text() -> list[int]:
            return engine.generate([request], rl_step=0, temperature=0.0).responses[0].token_ids

        plain = text()
        awake = torch.cuda.mem_get_info()[0]
        engine.sleep()
        assert torch.cuda.mem_get_info()[0] > awake + (1 << 30)
        engine.wake_up()
        assert text() == plain
        weights = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).state_dict()
        engine.update_weights([(k, -v if k.endswith("norm.weight") else v) for k, v in weights.items()], 1)
        assert text() != plain
        engine.update_weights(weights.items(), 2)
        assert text() == plain
        # As colocated trainers do: nothing is kept on the host, and new weights come before there is a cache again.
        engine.sleep(2)
        engine.wake_up(["weights"])
        engine.update_weights(weights.items(), 3)
        engine.wake_up(["kv_cache"])
        assert text() == plain
    finally:
        engine.close()
