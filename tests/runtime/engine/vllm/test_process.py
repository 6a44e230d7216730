"""What an engine leaves behind in the process that creates it: nothing that a user's program could notice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.engine

PROGRAM = """
import json, os, sys
import torch, torch._dynamo, torch._inductor.config
from tltlab.runtime.engine.engine import Engine, GenerationRequest

def settings():
    return {
        "environment": dict(os.environ),
        "sys.path": list(sys.path),
        "dynamo": torch._dynamo.config.get_config_copy(),
        "inductor": {name: repr(value) for name, value in torch._inductor.config.get_config_copy().items()},
    }

def changed(since):
    now = settings()
    return [name for name in now if now[name] != since[name]]

before, found = settings(), {}
for own_process in (True, False):
    engine = Engine(sys.argv[1], max_draft_depth=2, own_process=own_process,
                    vllm_args={"max_num_seqs": 4, "max_model_len": 64, "kv_cache_memory_bytes": 1 << 25})
    where = "in its own process" if own_process else "here"
    found[f"created {where}"] = changed(before)
    engine.warm_up(1.0)
    request = GenerationRequest(key=(0, "p", 0, 0), prompt_token_ids=[1, 5, 6, 5, 6], max_response_tokens=8)
    assert engine.generate([request], rl_step=0, temperature=1.0).responses[0].token_ids
    found[f"used {where}"] = changed(before)
    engine.close()
try:
    Engine("no/such/model")
except Exception as error:
    found["failed"] = changed(before)
print(json.dumps(found))
"""


def test_an_engine_leaves_environment_path_and_compilation_as_they_were(random_model: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(random_model)], capture_output=True, text=True, timeout=300, env=os.environ
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    moments = ["created in its own process", "used in its own process", "created here", "used here", "failed"]
    assert found == {moment: [] for moment in moments}
