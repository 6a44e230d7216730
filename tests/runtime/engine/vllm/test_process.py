"""What an engine leaves behind in the process that creates it: nothing that a user's program could notice."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest

import tltlab
from tltlab.runtime import vllm_options
from tltlab.runtime.engine.vllm.options import serve_arguments

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
        [sys.executable, "-c", PROGRAM, str(random_model), root], capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout) == {"created": [], "used": [], "failed": []}


RECORDS = """
import json, shutil, sys
from vllm import LLM, SamplingParams
from vllm.sampling_params import RepetitionDetectionParams
from vllm.v1.request import RequestStatus
from tltlab.runtime import vllm_options

model, trace, ends = sys.argv[1:]
llm = LLM(model, enforce_eager=True, dtype="float32", max_model_len=128, kv_cache_memory_bytes=1 << 25,
          **vllm_options("none" if ends == "vanishes" else "beg-mab", record=trace))

def generate(**settings):
    prompts = [{"prompt_token_ids": [1, 4 + n, 5]} for n in range(3)]
    settings = SamplingParams(ignore_eos=True, max_tokens=20, **settings)
    return [output.outputs[0].finish_reason for output in llm.generate(prompts, settings, use_tqdm=False)]

found = [generate()]
if ends == "vanishes":
    shutil.rmtree(trace + ".recording")
    found += [generate(), generate()]
else:
    repeats = RepetitionDetectionParams(max_pattern_size=1, min_pattern_size=1, min_count=3)
    found.append(generate(allowed_token_ids=[9], repetition_detection=repeats))
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


def run(model: Path, trace: Path, ends: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    done = subprocess.run(
        [sys.executable, "-c", RECORDS, str(model), str(trace), ends],
        capture_output=True, text=True, timeout=500, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def test_what_a_program_recorded_is_a_trace_when_it_has_ended_however_its_requests_did(
    random_model: Path, tmp_path: Path
):
    done = run(random_model, tmp_path / "trace", "exits")
    assert json.loads(done.stdout.splitlines()[-1]) == [["length"] * 3, ["repetition"] * 3]
    outcomes = tltlab.read(tmp_path / "trace").outcomes
    assert outcomes["finish_reason"].tolist() == ["length"] * 3 + ["stop"] * 3 + ["abort", "length"]
    assert outcomes["response_tokens"].tolist()[:6] == [20] * 3 + [3] * 3


def test_an_engine_whose_recording_vanishes_says_so_once_and_goes_on(random_model: Path, tmp_path: Path):
    done = run(random_model, tmp_path / "trace", "vanishes")
    assert json.loads(done.stdout.splitlines()[-1]) == [["length"] * 3] * 3
    assert done.stderr.count("the engine goes on") + done.stdout.count("the engine goes on") == 1
    assert not (tmp_path / "trace").exists()


def test_a_server_that_is_told_to_end_finishes_its_trace(random_model: Path, tmp_path: Path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = serve_arguments(vllm_options("none", record=tmp_path / "trace"))
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(random_model), *options]
    limits = ["--max-model-len", "128", "--kv-cache-memory-bytes", str(1 << 25), "--dtype", "float32"]
    with open(tmp_path / "log", "w") as log:
        server = subprocess.Popen(
            [*command, *limits, "--enforce-eager", "--port", str(port)], stdout=log, stderr=subprocess.STDOUT
        )
    try:
        body = {"model": str(random_model), "prompt": [1, 4, 5], "max_tokens": 7, "ignore_eos": True}
        asked = Request(
            f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        deadline = time.monotonic() + 400
        while True:
            try:
                with urlopen(asked, timeout=60) as answer:
                    answer.read()
                break
            except URLError:
                said = (tmp_path / "log").read_text()[-3000:]
                assert server.poll() is None, said
                assert time.monotonic() < deadline, said
                time.sleep(1)
        server.terminate()
        server.wait(180)
    finally:
        server.kill()
    assert tltlab.read(tmp_path / "trace").outcomes["response_tokens"].tolist() == [7]
