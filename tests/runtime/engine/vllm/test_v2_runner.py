"""vLLM's V2 model runner under a policy, on Triton's interpreter in its own process."""

import json
from itertools import pairwise

import pytest

from ..asking import run_program

PROGRAM = """
from tests.runtime.engine.vllm import triton_on_cpu
import json, sys
from pathlib import Path
from tests.runtime.engine.asking import groups_of_four, switching, texts
from tests.runtime.engine.vllm.test_capture import check, rollout_of
from tests.runtime.small_models import loaded
from tltlab.drafters.specs import LearnedSpec
from tltlab.policies.policy import Policy
from tltlab.policies.specs import ExploreSpec
from tltlab.runtime.engine.engine import Engine
from tltlab.runtime.engine.graphs import plan_graphs
from tltlab.strategy import Strategy

model = sys.argv[1]
requests = groups_of_four(3, 16)
drafters = {"learned": LearnedSpec(**json.loads(sys.argv[2]))}
depths = tuple(Strategy.chain("learned", depth) for depth in (3, 1))
graphs = plan_graphs(Policy(selector=ExploreSpec(strategies=depths), drafters=drafters), 4, plain=True)
args = {"max_num_seqs": 4, "max_model_len": 64, "max_num_batched_tokens": 128, "kv_cache_memory_bytes": 32 << 20}
engine = Engine(model, drafters=drafters, max_draft_depth=3, graphs=graphs, vllm_args=args)
try:
    runner = engine.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    plain = engine.generate(requests, rl_step=0, temperature=0.0)
    engine.set_policy(switching(Strategy.chain("learned", 3), Strategy.chain("learned", 1), hold_iterations=1))
    rollout, captured = rollout_of(engine, requests, temperature=0.0)
    takes_drafts = engine._pool.on_host
    graphs = engine.captured_graphs()
    schedule = engine.llm.llm_engine.vllm_config.speculative_config.num_speculative_tokens_per_batch_size
finally:
    engine.close()
check(captured, rollout, requests, loaded(Path(model)))
print(json.dumps({"runner": [c.__module__ for c in type(runner).__mro__], "same": texts(plain) == texts(rollout),
                  "takes_drafts": takes_drafts, "graphs": [graphs.runner, graphs.mode], "schedule": schedule,
                  "rows": rollout.iterations.to_pylist()}))
"""


@pytest.mark.engine
@pytest.mark.parametrize("method", ["draft_model", "ngram_gpu"])
def test_the_v2_runner_drafts_what_the_policy_chose(method, random_model):
    """It says the same, and is captured."""
    drafter = {"method": method, "model": str(random_model) if method == "draft_model" else ""}
    printed, _ = run_program(PROGRAM, random_model, json.dumps(drafter))
    found = json.loads(printed.splitlines()[-1])
    assert any(".gpu.model_runner" in module for module in found["runner"]), "this is not the V2 runner"
    assert found["same"]
    assert not found["takes_drafts"], "it keeps its drafts on the device, so model-free drafters must be refused"
    assert found["schedule"] == [[1, 1, 3], [2, 2, 1], [3, 4, 0]], "vLLM was not told of every depth"
    assert found["graphs"] == ["V2", "NONE"]
    rows = found["rows"]
    assert {row["graph"] for row in rows} == {"eager"}, "a CPU has no CUDA graphs"
    assert len({row["draft_depth"] for row in rows}) > 1
    for before, after in pairwise(rows):
        assert after["draft_depth"] == before["next_draft_depth"]
        assert after["num_drafted"] <= after["batch"] * before["next_draft_depth"]
    assert sum(row["num_accepted"] for row in rows) > 0
    # The target drafts for itself, so all is kept.
    assert method != "draft_model" or all(row["num_accepted"] == row["num_drafted"] for row in rows[:-1])
    assert any(row["draft_duration"] > 0 for row in rows if row["next_draft_depth"])
