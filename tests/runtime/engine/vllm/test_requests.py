"""Requests of every kind that a program may send an engine with a policy, and a new user's way to one.

One program sends the same requests to stock vLLM, under fixed depths and under a bandit.
"""

import json
import os
import subprocess
import sys

import pytest

import tltlab
from tltlab.runtime.engine.vllm import VARIABLES

from ..asking import run_program

pytestmark = pytest.mark.engine

PROGRAM = """
import json, os, sys
model, *policies = sys.argv[1:]
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
from tltlab.runtime.engine.vllm import uncompiled
uncompiled(True).__enter__()
from vllm import LLM, SamplingParams
from vllm.config.reasoning import ReasoningConfig

prompts = [{"prompt_token_ids": [1, *(4 + (n * k + k) % 20 for k in range(6))]} for n in range(16)]
kinds = {
    "greedy": {}, "logprobs": {"logprobs": 2}, "bias": {"logit_bias": {9: 2.0}}, "repeats": {"repetition_penalty": 1.3},
    "forced": {"logit_bias": {9: 100.0}, "temperature": 1.0, "seed": 3}, "allowed": {"allowed_token_ids": [5, 6, 7, 8]},
    "min_p": {"min_p": 0.3, "temperature": 1.0, "seed": 4}, "min_tokens": {"min_tokens": 20},
}
found = {}
for policy in policies:
    os.environ["TLTLAB_POLICY"] = policy if policy != "stock" else ""
    words = ReasoningConfig(reasoning_start_str="w3", reasoning_end_str="w4")
    llm = LLM(model, enforce_eager=True, dtype="float32", max_model_len=128, kv_cache_memory_bytes=1 << 25,
              disable_log_stats=False, reasoning_config=words)

    def generate(*settings, where=prompts):
        usual = {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True}
        asked = [SamplingParams(**usual | each) for each in settings]
        return [list(o.outputs[0].token_ids) for o in llm.generate(where[:len(asked)], asked, use_tqdm=False)]

    def drafts():
        values = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
        return values.get("vllm:spec_decode_num_draft_tokens", 0)

    told = found[policy] = {}
    told["mixed"] = generate(*[*kinds.values()] * 2)
    told["again"] = generate(*[*kinds.values()] * 2)
    before = drafts()
    told["ids"] = generate({"logprob_token_ids": [5, 9]}, *[{}] * 7)
    told["thinks"] = generate({"thinking_token_budget": 3}, *[{}] * 7)
    told["plain"] = drafts() == before
    seeded = [{"temperature": 1.0, "seed": n} for n in range(8)]
    told["seeded"] = [generate(*seeded), generate(*seeded), generate(*seeded, *[{"temperature": 1.0}] * 8)[:8],
                      [generate(one, where=prompts[n:])[0] for n, one in enumerate(seeded)]]
    told["drafts"] = drafts()
    sampled = {"temperature": 1.0, "max_tokens": 30}
    told["forced"] = generate(*[sampled | {"logit_bias": {9: 100.0}}, {}] * 4)[::2]
    told["argmax"] = generate(*[sampled | {"min_p": 1.0}, {}] * 4)[::2]
    llm.llm_engine.engine_core.shutdown()
print(json.dumps(found))
"""
POLICIES = ("ngram:4", "beg-mab")


@pytest.fixture(scope="module")
def told(random_model):
    """By policy, and for stock vLLM, what `PROGRAM` found."""
    printed, _ = run_program(PROGRAM, random_model, "stock", *POLICIES)
    return json.loads(printed.splitlines()[-1])


@pytest.mark.parametrize("policy", POLICIES)
def test_each_request_has_the_tokens_of_stock_vllm(policy, told):
    """In one batch with others that have drafts, and with a seed where it has none."""
    for name in ("mixed", "again", "ids", "thinks"):
        assert told[policy][name] == told["stock"][name], name
    assert told[policy]["drafts"] > 0
    assert told[policy]["plain"]


@pytest.mark.parametrize("policy", POLICIES)
def test_bias_and_min_p_apply_to_all_tokens(policy, told):
    assert told[policy]["forced"] == [[9] * 30] * 4
    assert told[policy]["argmax"] == told["stock"]["argmax"]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_seed_repeats_its_tokens(policy, told):
    """After other requests, next to them and alone: stock vLLM's."""
    first, *others = told[policy]["seeded"]
    assert all(other == first for other in others)
    assert len(set(map(tuple, first))) == 8
    assert first == told["stock"]["seeded"][0]


OWN = """
import sys
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    llm = LLM(sys.argv[1], enforce_eager=True, dtype="float32", max_model_len=128, kv_cache_memory_bytes=1 << 25)
    prompts = [{"prompt_token_ids": [1, 4 + n, 5, 6, 4 + n, 5]} for n in range(4)]
    for step in range(4):
        answers = llm.generate(prompts, SamplingParams(n=4, max_tokens=60), use_tqdm=False)
        rewards = [len(one.token_ids) % 2 for answer in answers for one in answer.outputs]
        print(step, sum(rewards) / len(rewards))
"""


def test_a_program_is_recorded_calibrated_tuned_and_run(random_model, tmp_path):
    """The commands of the runtime's README, with a script that names nothing of tltlab."""
    (tmp_path / "own.py").write_text(OWN)
    quick = {"TORCHDYNAMO_DISABLE": "1", "VLLM_USE_AOT_COMPILE": "0"}
    environ = {name: value for name, value in os.environ.items() if name not in VARIABLES} | quick

    def run(*words, **variables):
        named = {f"TLTLAB_{name.upper()}": value for name, value in variables.items()}
        command = [sys.executable, *map(str, words)]
        done = subprocess.run(
            command, cwd=tmp_path, env=environ | named, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout + done.stderr

    run("own.py", random_model, record="x", policy="explore")
    run("-m", "tltlab", "calibrate", "x", "--out", "costs.json")
    run("-m", "tltlab", "tune", "x", "--costs", "costs.json", "--out", "policy.json", "--trials", 0)
    said = run("own.py", random_model, record="y", policy="policy.json")
    assert "follows the policy policy.json" in said
    for name in ("x", "y"):
        assert tltlab.read(tmp_path / name).outcomes.groupby("rl_step").size().tolist() == [16] * 4
    assert "off in the median" in run("-m", "tltlab", "verify", "y")


STORM = """
import asyncio, json, os, random, sys
model, os.environ["TLTLAB_RECORD"] = sys.argv[1:]
os.environ |= {"TLTLAB_POLICY": "explore", "TORCHDYNAMO_DISABLE": "1", "VLLM_USE_AOT_COMPILE": "0"}
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM

greedy = SamplingParams(temperature=0, ignore_eos=True, max_tokens=40)

async def main():
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(
        model=model, data_parallel_size=2, enforce_eager=True, dtype="float32", max_model_len=128, max_num_seqs=16,
        kv_cache_memory_bytes=1 << 25))
    rng = random.Random(3)

    async def answer(name, prompt, most=40):
        got = []
        async for output in llm.generate({"prompt_token_ids": [1, 4 + prompt, 5, 6, 4 + prompt, 5]}, greedy, name):
            got = list(output.outputs[0].token_ids)
            if len(got) >= most:
                return got

    async def disturbed(number):
        task = asyncio.create_task(answer(f"storm{number}", number % 16, rng.choice([1, 5, 20, 40])))
        await asyncio.sleep(rng.uniform(0.0, 0.6))
        if rng.random() < 0.5:
            task.cancel()
        try:
            return await task
        except asyncio.CancelledError:
            return []

    calm = await asyncio.gather(*(answer(f"calm{n}", n) for n in range(16)))
    storm = await asyncio.gather(*map(disturbed, range(160)))
    assert all(got == calm[n % 16][: len(got)] for n, got in enumerate(storm))
    assert calm == await asyncio.gather(*(answer(f"after{n}", n) for n in range(16)))
    llm.shutdown()
    print(json.dumps(calm))

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.mark.skipif("TLTLAB_NEMESIS" not in os.environ, reason="two engines start: at night, with TLTLAB_NEMESIS")
def test_data_parallel_engines_live_through_aborts(random_model, tmp_path):
    script = tmp_path / "storm.py"
    script.write_text(STORM)
    done = subprocess.run(
        [sys.executable, script, random_model, tmp_path / "x"], capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    calm = json.loads(done.stdout.splitlines()[-1])
    trace = tltlab.read(tmp_path / "x")
    assert set(trace.outcomes["worker"]) == {0, 1}
    rows = trace.tokens.merge(trace.outcomes, on=["rl_step", "prompt_id", "sample", "turn"])
    assert 32 <= (rows["finish_reason"] == "length").sum() < len(rows) <= 192
    for prompt, got in zip(rows["prompt_token_ids"], rows["token_ids"], strict=True):
        assert got.tolist() == calm[prompt[1] - 4][: len(got)]
