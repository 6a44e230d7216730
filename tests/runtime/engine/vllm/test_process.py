"""Engines as a user's own program starts them: what they leave in its process, and what they record until it ends.

One program starts three engines in turn, one server has its core in a process of its own, and two engines are Ray
actors: starting is what costs. The server, the actors and TRL's trainer know nothing of tltlab; the environment does.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest

import tltlab
from tltlab.bench.train.texts import Setting, script_text
from tltlab.cli.app import main
from tltlab.runtime import vllm_options

pytestmark = pytest.mark.engine
PROMPTS = [[1, 4 + n, 5, 6, 4 + n, 5] for n in range(3)]

PROGRAM = """
import json, os, shutil, sys
root, model, traces = sys.argv[1:]
sys.path.insert(0, root)
from tests.runtime.engine.asking import changed, requests, settings
from tltlab.runtime import vllm_options
from tltlab.runtime.engine.engine import Engine

before, found = settings(), {}
engine = Engine(model, max_draft_depth=2,
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

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
from vllm import LLM, SamplingParams
from vllm.sampling_params import RepetitionDetectionParams
from vllm.v1.request import RequestStatus

small = {"enforce_eager": True, "dtype": "float32", "max_model_len": 128, "kv_cache_memory_bytes": 1 << 25}

def generate(llm, **settings):
    prompts = [{"prompt_token_ids": [1, 4 + n, 5]} for n in range(3)]
    settings = SamplingParams(ignore_eos=True, max_tokens=20, **settings)
    return [output.outputs[0].finish_reason for output in llm.generate(prompts, settings, use_tqdm=False)]

llm = LLM(model, **small, **vllm_options("none", record=f"{traces}/vanishes"))
found["vanishes"] = [generate(llm)]
shutil.rmtree(f"{traces}/vanishes.recording")
found["vanishes"] += [generate(llm), generate(llm)]
llm.llm_engine.engine_core.shutdown()

os.environ.update(TLTLAB_POLICY="beg-mab", TLTLAB_RECORD=f"{traces}/exits")
llm = LLM(model, **small)
repeats = RepetitionDetectionParams(max_pattern_size=1, min_pattern_size=1, min_count=3)
found["exits"] = [generate(llm), generate(llm, allowed_token_ids=[9], repetition_detection=repeats)]
scheduler = llm.llm_engine.engine_core.engine_core.scheduler
stock, failed = scheduler.update_from_output, []

def update_from_output(*args):
    # As vLLM does with a request whose keys and values cannot be loaded.
    if not failed:
        failed.append(scheduler.running[0].request_id)
        scheduler.finish_requests(failed[0], RequestStatus.FINISHED_ERROR)
    return stock(*args)

scheduler.update_from_output = update_from_output
llm.llm_engine.add_request("fails", {"prompt_token_ids": [1, 9, 5]}, SamplingParams(max_tokens=4, ignore_eos=True))
llm.llm_engine.add_request("ends", {"prompt_token_ids": [1, 8, 5]}, SamplingParams(max_tokens=4, ignore_eos=True))
while scheduler.has_unfinished_requests():
    llm.llm_engine.step()
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("traces")


@pytest.fixture(scope="module")
def program(random_model: Path, traces: Path) -> tuple[dict[str, Any], str]:
    """What `PROGRAM` found, and all that it said."""
    command = [sys.executable, "-c", PROGRAM, str(Path(__file__).parents[4]), str(random_model), str(traces)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=550, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1]), done.stdout + done.stderr


def test_an_engine_leaves_environment_path_and_compilation_as_they_were(program: tuple[dict[str, Any], str]):
    """What one whose core is in another process leaves, `test_own_process` looks at."""
    found = {name: program[0][name] for name in ("created", "used", "failed")}
    assert found == {"created": [], "used": [], "failed": []}


def test_what_a_program_recorded_is_a_trace_when_it_has_ended_however_its_requests_did(
    program: tuple[dict[str, Any], str], traces: Path
):
    assert program[0]["exits"] == [["length"] * 3, ["repetition"] * 3]
    outcomes = tltlab.read(traces / "exits").outcomes
    assert outcomes["finish_reason"].tolist() == ["length"] * 3 + ["stop"] * 3 + ["abort", "length"]
    assert outcomes["response_tokens"].tolist()[:6] == [20] * 3 + [3] * 3
    assert f"follows the policy beg-mab and records to {traces / 'exits'}" in program[1]


def test_an_engine_whose_recording_vanishes_says_so_once_and_goes_on(program: tuple[dict[str, Any], str], traces: Path):
    found, said = program
    assert found["vanishes"] == [["length"] * 3] * 3
    assert said.count("the engine goes on") == 1
    assert not (traces / "vanishes").exists()


@pytest.fixture(scope="module")
def served(random_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trace of a server that was told to end, after responses without keys and one with a key."""
    folder = tmp_path_factory.mktemp("served")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    asked = vllm_options("beg-mab", record=folder / "trace", for_="trl")
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(random_model)]
    limits = ["--max-model-len", "128", "--kv-cache-memory-bytes", str(1 << 25), "--dtype", "float32"]
    with open(folder / "log", "w") as log:
        server = subprocess.Popen(
            [*command, *limits, "--enforce-eager", "--port", str(port)],
            env=os.environ | asked, stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def ask(**body: Any) -> None:
        data = json.dumps({"model": str(random_model), "temperature": 0.9, "ignore_eos": True, **body}).encode()
        headers = {"Content-Type": "application/json"}
        with urlopen(Request(f"http://127.0.0.1:{port}/v1/completions", data, headers), timeout=200) as answer:
            answer.read()

    def answers(first: Callable[[], None]) -> None:
        deadline = time.monotonic() + 400
        while True:
            try:
                return first()
            except URLError:
                said = (folder / "log").read_text()[-3000:]
                assert server.poll() is None, said
                assert time.monotonic() < deadline, said
                time.sleep(0.5)

    try:
        answers(lambda: ask(prompt=PROMPTS, n=2, max_tokens=100))
        ask(prompt=PROMPTS[0], max_tokens=10, vllm_xargs={"tltlab": [7, "p0", 0, 0]})
        server.terminate()
        server.wait(180)
    finally:
        server.kill()
    return folder / "trace"


def test_a_server_that_is_told_to_end_leaves_a_valid_trace_of_what_it_did(served: Path):
    trace = tltlab.read(served)
    # A busy machine may hand in requests so slowly that the engine falls idle in between: then that is a rollout more.
    nameless, named = trace.outcomes.query("rl_step < 7"), trace.outcomes.query("rl_step == 7")
    assert trace.rl_steps[0] == 0
    assert list(nameless["response_tokens"]) == [100] * 6
    assert list(nameless.groupby("prompt_id").size()) == [2, 2, 2]
    assert [list(named["response_tokens"]), list(named["prompt_id"])] == [[10], ["p0"]]
    assert list(trace.tokens["prompt_token_ids"].iloc[-1]) == PROMPTS[0]
    assert trace.manifest.engine is not None
    assert trace.manifest.engine.startswith("vllm ")


def test_the_policy_speculated_in_the_other_process(served: Path):
    rows = tltlab.read(served).iterations
    assert rows["num_drafted"].sum() > 0
    assert rows.query("rl_step < 7")["num_generated"].sum() >= 6 * 100


ACTORS = """
import os, sys
import ray

model, folder = sys.argv[1:]

class Actor:
    def __init__(self):
        from vllm import LLM
        self.llm = LLM(model, enforce_eager=True, dtype="float32", max_model_len=64, kv_cache_memory_bytes=1 << 25)

    def generate(self, number):
        from vllm import SamplingParams
        prompts = [{"prompt_token_ids": [1, 4 + number, 5]}] * 2
        self.llm.generate(prompts, SamplingParams(ignore_eos=True, max_tokens=10 + number), use_tqdm=False)
        self.llm.llm_engine.engine_core.shutdown()

asked = {"TLTLAB_RECORD": folder + "/x", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1"}
ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100 << 20, runtime_env={"env_vars": asked})
actors = [ray.remote(num_cpus=1)(Actor).remote() for _ in range(2)]
ray.get([actor.generate.remote(number) for number, actor in enumerate(actors)])
"""


def test_engines_in_rays_actors_get_the_variables_and_record_side_by_side(random_model: Path, tmp_path: Path):
    command = [sys.executable, "-c", ACTORS, str(random_model), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    traces = [tltlab.read(tmp_path / name).outcomes for name in ("x", "x-1")]
    assert sorted(sorted(outcomes["response_tokens"]) for outcomes in traces) == [[10, 10], [11, 11]]
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.skipif("TLTLAB_TRL" not in os.environ, reason="TLTLAB_TRL names no folder with TRL (pip install --target)")
def test_trls_trainer_runs_under_a_policy_and_leaves_a_trace_without_a_line_changed(
    random_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Colocated, from its package; on a CPU vLLM must keep its weights where TRL can write them."""
    setting = Setting(
        model=random_model, reward="even:evenness", steps=2, prompts_per_step=4, group_size=4,
        max_response_tokens=48, cores=1,
    )  # fmt: skip
    (tmp_path / "even.py").write_text(
        "def evenness(prompt, response, answer): return len(response.split()) % 2 - 1.0\n"
    )
    (tmp_path / "script.py").write_text(script_text(setting, tmp_path / "trained", vllm=True))
    environment = {
        "PYTHONPATH": os.pathsep.join([os.environ["TLTLAB_TRL"], str(tmp_path)]),
        "HF_DATASETS_CACHE": str(tmp_path / "datasets"),
        # Compiling the model takes longer than both RL steps, and by default the KV cache takes a third of the memory.
        "TORCHDYNAMO_DISABLE": "1", "VLLM_USE_AOT_COMPILE": "0", "VLLM_CPU_KVCACHE_SPACE": "1",
        "TLTLAB_POLICY": "beg-mab", "TLTLAB_RECORD": str(tmp_path / "x"),
    }  # fmt: skip
    runner = [sys.executable, "-m", "tltlab.bench.train.trl", "script.py", "times.json", "--torch-linear"]
    done = subprocess.run(
        runner, cwd=tmp_path, env=os.environ | environment, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "follows the policy beg-mab" in done.stderr
    trace = tltlab.read(tmp_path / "x")
    assert trace.rl_steps == [0, 1]
    assert trace.outcomes.groupby("rl_step").size().tolist() == [16, 16]
    assert trace.outcomes.groupby(["rl_step", "prompt_id"]).size().mod(4).eq(0).all()
    assert trace.iterations["num_drafted"].sum() > 0
    with pytest.raises(SystemExit) as ended:
        main(["simulate", str(tmp_path / "x")])
    assert ended.value.code == 0
    assert "makespan" in capsys.readouterr().out
