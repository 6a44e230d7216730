"""vLLM's V2 model runner under a policy, on Triton's interpreter in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

PROGRAM = """
import sys
sys.path.insert(0, {tests!r})
import triton_on_cpu
import json
from tltlab.drafters.specs import LearnedSpec
from tltlab.policies.policy import ExploreSpec, Policy
from tltlab.runtime.engine.engine import Engine, GenerationRequest
from tltlab.strategy import NO_SPECULATION, Strategy

model = {model!r}
arms = (Strategy.chain("learned", 3), NO_SPECULATION, Strategy.chain("learned", 1))
policy = Policy(selector=ExploreSpec(strategies=arms, hold_iterations=1))
requests = [
    GenerationRequest(key=(0, "p", n, 0), prompt_token_ids=[1, 5, 6, 7 + n], max_response_tokens=16, ignore_eos=True)
    for n in range(3)
]
engine = Engine(
    model,
    drafters={{"learned": LearnedSpec(method="draft_model", model=model)}},
    max_draft_depth=3,
    vllm_args={{"max_num_seqs": 4, "max_model_len": 64, "max_num_batched_tokens": 128,
               "kv_cache_memory_bytes": 32 << 20}},
)
try:
    runner = engine.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    plain = engine.generate(requests, rl_step=0, temperature=0.0)
    engine.set_policy(policy)
    rollout = engine.generate(requests, rl_step=0, temperature=0.0)
    takes_drafts = engine._pool.beside
finally:
    engine.close()
texts = [[r.token_ids for r in part.responses] for part in (plain, rollout)]
print(json.dumps({{"runner": [c.__module__ for c in type(runner).__mro__], "same": texts[0] == texts[1],
                  "takes_drafts": takes_drafts,
                  "rows": rollout.iterations}}))
"""


@pytest.mark.engine
def test_the_v2_runner_drafts_what_the_policy_chose_and_says_the_same(random_model: Path):
    program = PROGRAM.format(tests=str(Path(__file__).parent), model=str(random_model))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert any(".gpu.model_runner" in module for module in found["runner"]), "this is not the V2 runner"
    assert found["same"]
    assert not found["takes_drafts"], "it keeps its drafts on the device, so model-free drafters must be refused"
    rows = found["rows"]
    assert len({row["draft_depth"] for row in rows}) > 1
    for before, after in pairwise(rows):
        assert after["draft_depth"] == before["next_draft_depth"]
        assert after["num_drafted"] <= after["batch"] * before["next_draft_depth"]
    # The target drafts for itself, so all is kept.
    assert all(row["num_accepted"] == row["num_drafted"] for row in rows[:-1])
    assert any(row["draft_duration"] > 1e-3 for row in rows if row["next_draft_depth"])
