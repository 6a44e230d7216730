"""Engines as a user's own program starts them: what they leave in its process, and what they record until it ends.

One program starts three engines in turn, and one server has its core in a process of its own: starting is what costs.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from contextlib import closing, suppress
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

import tltlab
from tltlab.runtime import vllm_options
from tltlab.runtime.engine.vllm.options import serve_arguments

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

def recording(policy, name):
    return LLM(model, enforce_eager=True, dtype="float32", max_model_len=128, kv_cache_memory_bytes=1 << 25,
               **vllm_options(policy, record=f"{traces}/{name}"))

def generate(llm, **settings):
    prompts = [{"prompt_token_ids": [1, 4 + n, 5]} for n in range(3)]
    settings = SamplingParams(ignore_eos=True, max_tokens=20, **settings)
    return [output.outputs[0].finish_reason for output in llm.generate(prompts, settings, use_tqdm=False)]

llm = recording("none", "vanishes")
found["vanishes"] = [generate(llm)]
shutil.rmtree(f"{traces}/vanishes.recording")
found["vanishes"] += [generate(llm), generate(llm)]
llm.llm_engine.engine_core.shutdown()

llm = recording("beg-mab", "exits")
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


def test_an_engine_whose_recording_vanishes_says_so_once_and_goes_on(program: tuple[dict[str, Any], str], traces: Path):
    found, said = program
    assert found["vanishes"] == [["length"] * 3] * 3
    assert said.count("the engine goes on") == 1
    assert not (traces / "vanishes").exists()


class OverUnix(HTTPConnection):
    """To a server at a path, which nobody else can take as they can a port."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=400)
        self.path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self.path))


@pytest.fixture(scope="module")
def served(random_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trace of a server that was told to end, after responses without keys and one with a key."""
    folder = tmp_path_factory.mktemp("served")
    options = serve_arguments(vllm_options("beg-mab", record=folder / "trace"))
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(random_model), *options]
    limits = ["--max-model-len", "128", "--kv-cache-memory-bytes", str(1 << 25), "--dtype", "float32"]
    with open(folder / "log", "w") as log:
        server = subprocess.Popen(
            [*command, *limits, "--enforce-eager", "--uds", str(folder / "socket")],
            stdout=log,
            stderr=subprocess.STDOUT,
        )

    def ask(**body: Any) -> None:
        settings = {"model": str(random_model), "temperature": 0.9, "ignore_eos": True}
        with closing(OverUnix(folder / "socket")) as connection:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/v1/completions", json.dumps(settings | body), headers)
            answer = connection.getresponse()
            assert answer.status == 200, answer.read()

    def listens() -> bool:
        said = (folder / "log").read_text()[-3000:]
        assert server.poll() is None, said
        assert time.monotonic() < deadline, said
        with closing(OverUnix(folder / "socket")) as connection, suppress(OSError):
            connection.connect()
            return True
        return False

    deadline = time.monotonic() + 400
    try:
        while not listens():
            time.sleep(0.2)
        ask(prompt=PROMPTS, n=2, max_tokens=100)
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
