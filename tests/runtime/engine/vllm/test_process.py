"""What an engine leaves behind in the process that creates it: nothing that a user's program could notice."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.engine

PROGRAM = """
import json, sys
sys.path.insert(0, sys.argv[2])
from tests.runtime.engine.asking import changed, requests, settings
from tltlab.runtime.engine.engine import Engine

before, found = settings(), {}
engine = Engine(sys.argv[1], max_draft_depth=2,
                vllm_args={"max_num_seqs": 4, "max_model_len": 64, "kv_cache_memory_bytes": 1 << 25})
found["created"] = changed(before)
engine.warm_up(1.0)
assert engine.generate(requests(1, 8), rl_step=0, temperature=1.0).responses[0].token_ids
found["used"] = changed(before)
engine.close()
try:
    Engine("no/such/model")
except Exception as error:
    found["failed"] = changed(before)
print(json.dumps(found))
"""


def test_an_engine_leaves_environment_path_and_compilation_as_they_were(random_model: Path) -> None:
    """What one whose core is in another process leaves, `test_own_process` looks at."""
    root = str(Path(__file__).parents[4])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(random_model), root], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout) == {"created": [], "used": [], "failed": []}
