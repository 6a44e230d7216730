"""Engines as a user's own program starts them: what they leave in its process, and what they record until it ends.

One program starts three engines in turn, one server has its core in its own process, and two engines are Ray
actors, of which one is killed: starting, and importing vLLM, is what costs. The server, the actors and TRL's trainer
know nothing of tltlab; the environment does.
"""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from importlib.util import find_spec
from types import SimpleNamespace
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest
import ray
from prometheus_client.parser import text_string_to_metric_families
from ray.exceptions import RayActorError

import tltlab
from bench.train.texts import GrpoJob, script_text
from tltlab.doctor.evidence import RunEvidence
from tltlab.runtime import vllm_options
from tltlab.runtime.ray.actors import actor_env, runtime_env
from tltlab.traces.storage import is_unfinished
from tltlab.traces.trace import read_one

from ..asking import run_program

pytestmark = pytest.mark.engine
PROMPTS = [[1, 4 + n, 5, 6, 4 + n, 5] for n in range(3)]
UNCOMPILED = {"TORCHDYNAMO_DISABLE": "1", "VLLM_USE_AOT_COMPILE": "0"}
"""Compiling parts of the sampler takes longer than all that a program does with it."""

EXITING = """
import os, sys
from pathlib import Path
from tltlab import Choice, Selector, Strategy

def exit_at(place):
    if Path(os.environ["EXITS"]).read_text() == place:
        sys.exit(3)

class Exiting(Selector):
    strategies = (Strategy.chain("ngram", 4),)

    def __init__(self):
        exit_at("__init__")

    def choose(self, state):
        exit_at("choose")
        return Choice(self.strategies[0])

    def observe(self, choice, outcome):
        exit_at("observe")
"""
"""A policy that ends the process at the place that a file names."""

EXITS = """
import json, os, sys
from pathlib import Path
from tltlab.runtime import vllm_options
from tltlab.runtime.engine.vllm import uncompiled
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
uncompiled(True).__enter__()
from vllm import LLM, SamplingParams
from exiting import Exiting

prompts = [{"prompt_token_ids": [1, *(4 + (n * k + k) % 20 for k in range(6))]} for n in range(8)]
file, found = Path(os.environ["EXITS"]), {}
for place in ("stock", "", "__init__", "choose", "observe"):
    file.write_text("")
    options = {} if place == "stock" else vllm_options(Exiting)
    file.write_text(place if place == "__init__" else "")
    llm = LLM(sys.argv[1], enforce_eager=True, dtype="float32", max_model_len=128, kv_cache_memory_bytes=1 << 25,
              **options)
    found[place] = []
    for _ in range(2):
        answers = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True), use_tqdm=False)
        found[place].append([list(answer.outputs[0].token_ids) for answer in answers])
        # In the middle of its work: between two rollouts.
        file.write_text(place)
    llm.llm_engine.engine_core.shutdown()
print(json.dumps(found))
"""


def test_a_policy_that_exits_leaves_stock_vllm(random_model, tmp_path, monkeypatch):
    """While it is built, while it chooses and while it learns: the answers are stock vLLM's, and one line is said."""
    (tmp_path / "exiting.py").write_text(EXITING)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]]))
    monkeypatch.setenv("EXITS", str(tmp_path / "place"))
    printed, said = run_program(EXITS, random_model)
    found = json.loads(printed.splitlines()[-1])
    assert all(answers == found["stock"] for answers in found.values())
    lines = [line for line in said.splitlines() if "exiting.py, line" in line]
    assert len(lines) == 3
    assert all("SystemExit: 3" in line and "the engine continues" in line for line in lines)


PROGRAM = """
import json, os, sys
model, traces = sys.argv[1:]
from tests.runtime.engine.asking import changed, requests, settings
from tltlab.runtime import vllm_options
from tltlab.runtime.engine.engine import Engine
from tltlab.runtime.engine.vllm import uncompiled
from tltlab.runtime.engine.vllm.scheduler import record_only

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

def scheduler_of(llm):
    return llm.llm_engine.engine_core.engine_core.scheduler

prompts = [{"prompt_token_ids": [1, 4 + n, 5]} for n in range(3)]
without_compiling = uncompiled(True)
without_compiling.__enter__()

os.environ["TLTLAB_RECORD"] = f"{traces}/pools"
llm = LLM(model, runner="pooling", **small)
vectors = [answer.outputs.embedding for answer in llm.embed(prompts, use_tqdm=False)]
options = vllm_options(None, record=f"{traces}/pools")
scheduler_of(llm).vllm_config.additional_config = options["additional_config"]
record_only(scheduler_of(llm))
again = [answer.outputs.embedding for answer in llm.embed(prompts, use_tqdm=False)]
found["pools"] = [len(set(map(tuple, vectors))), again == vectors, "schedule" in vars(scheduler_of(llm))]
llm.llm_engine.engine_core.shutdown()

def generate(llm, **settings):
    settings = SamplingParams(ignore_eos=True, max_tokens=20, **settings)
    return [output.outputs[0].finish_reason for output in llm.generate(prompts, settings, use_tqdm=False)]

os.environ.update(TLTLAB_POLICY="beg-mab", TLTLAB_RECORD=f"{traces}/exits")
llm = LLM(model, **small)
repeats = RepetitionDetectionParams(max_pattern_size=1, min_pattern_size=1, min_count=3)
found["exits"] = [generate(llm), generate(llm, allowed_token_ids=[9], repetition_detection=repeats)]
scheduler = scheduler_of(llm)
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
def traces(tmp_path_factory):
    return tmp_path_factory.mktemp("traces")


@pytest.fixture(scope="module")
def program(random_model, traces):
    """What `PROGRAM` found, and all that it said."""
    printed, said = run_program(PROGRAM, random_model, traces)
    return json.loads(printed.splitlines()[-1]), printed + said


def test_an_engine_restores_environment_and_compilation(program):
    found = {name: program[0][name] for name in ("created", "used", "failed")}
    assert found == {"created": [], "used": [], "failed": []}


def test_what_program_recorded_is_trace_once_it_ends(program, traces):
    assert program[0]["exits"] == [["length"] * 3, ["repetition"] * 3]
    outcomes = tltlab.read(traces / "exits").outcomes
    assert outcomes["finish_reason"].tolist() == ["length"] * 3 + ["stop"] * 3 + ["abort", "length"]
    assert outcomes["response_tokens"].tolist()[:6] == [20] * 3 + [3] * 3
    assert str(traces / "exits") in program[1]


def test_a_pooling_engine_is_not_recorded(program, traces):
    """By variables, and where its arguments ask for a recording."""
    found, said = program
    assert found["pools"] == [3, True, False]
    assert said.count("it pools") == 1
    assert not [item.name for item in traces.iterdir() if item.name.startswith("pools")]


async def streamed(url, model):
    """The texts of 64 streams at a time, greedy, of 25 to 39 tokens."""
    from openai import AsyncOpenAI

    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=200, max_retries=0)

    async def read(n):
        prompt, extra = [1, *(4 + (n * k + k) % 20 for k in range(8))], {"ignore_eos": True}
        chunks = await client.completions.create(
            model=str(model), prompt=prompt, temperature=0, max_tokens=25 + n % 15, stream=True, extra_body=extra
        )
        return "".join([choice.text async for chunk in chunks for choice in chunk.choices])

    try:
        return await asyncio.gather(*(read(n) for n in range(64)))
    finally:
        await client.close()


def scraped(url):
    """By the name of a metric, and its labels' values except model and engine: its number."""
    with urlopen(f"{url}/metrics", timeout=200) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    found = {}
    for sample in (sample for family in families for sample in family.samples):
        labels = sorted(sample.labels.keys() - {"model_name", "engine"})
        found[sample.name, *(sample.labels[label] for label in labels)] = sample.value
    return found


def port_of_its_own(least):
    """One that the system gives to nobody who takes any: such a one would be gone before the server has started."""
    for port in range(least, 32_768):
        with socket.socket() as free, suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port
    raise OSError("no port is free")


class Server:
    """A server that was started with `environ`; its KV cache has room for three requests: some are preempted."""

    def __init__(self, model, log, port, environ):
        self.model, self.log = model, log
        self.url = f"http://127.0.0.1:{port}"
        limits = f"--max-model-len 128 --block-size 32 --num-gpu-blocks-override 8 --kv-cache-memory-bytes {1 << 25}"
        backend = "--enforce-eager --distributed-executor-backend uni --dtype float32"
        command = f"-m vllm.entrypoints.openai.api_server --model {model} --port {port} {limits} {backend}".split()
        # A server's core is in another process all the same; where this is on, on a CPU the model is in a third one.
        environ = os.environ | UNCOMPILED | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} | environ
        with open(log, "w") as out:
            told = {"env": environ, "stdout": out, "stderr": subprocess.STDOUT}
            self.process = subprocess.Popen([sys.executable, *command], **told)

    def ask(self, **body):
        data = json.dumps({"model": str(self.model), "temperature": 0.9, "ignore_eos": True, **body}).encode()
        headers = {"Content-Type": "application/json"}
        with urlopen(Request(f"{self.url}/v1/completions", data, headers), timeout=200) as answer:
            answer.read()

    def wait(self, seconds):
        """Until it answers."""
        deadline = time.monotonic() + seconds
        while True:
            with suppress(URLError):
                self.ask(prompt=PROMPTS, n=2, max_tokens=100)
                return
            said = self.log.read_text()[-3000:]
            assert self.process.poll() is None, said
            assert time.monotonic() < deadline, said
            time.sleep(0.3)


@pytest.fixture(scope="module")
def served(random_model, tmp_path_factory):
    """A server with a policy, one without, and one whose policy exits; each was told to end after all that it did.

    The first one's trace, what 64 streams read of each, the metrics of each, and what the last one said.
    """
    folder = tmp_path_factory.mktemp("served")
    server_of = SimpleNamespace(trace=folder / "trace", texts=[], metrics={})
    port = port_of_its_own(20_000 + os.getpid() % 10_000)
    asked = vllm_options("beg-mab", record=server_of.trace, for_="trl")
    place = folder / "place"
    place.write_text("")
    (folder / "exiting.py").write_text(EXITING)
    exits = {
        "TLTLAB_POLICY": "exiting:Exiting", "TLTLAB_ALLOW_CODE": "exiting", "EXITS": str(place),
        "PYTHONPATH": os.pathsep.join([str(folder), os.environ["PYTHONPATH"]]),
    }  # fmt: skip
    # All start at once: that is what takes long.
    places = {"beg-mab": (port, asked), "none": (port_of_its_own(port + 1), {})}
    places["exits"] = port_of_its_own(places["none"][0] + 1), exits
    servers = {name: Server(random_model, folder / f"log-{name}", *place) for name, place in places.items()}
    try:
        for name, server in servers.items():
            server.wait(400)
            if name == "exits":
                place.write_text("choose")
            if name == "beg-mab":
                server.ask(prompt=PROMPTS[0], max_tokens=10, vllm_xargs={"tltlab": [7, "p0", 0, 0]})
            server_of.texts.append(asyncio.run(streamed(server.url, random_model)))
            server_of.metrics[name] = scraped(server.url)
            server.process.terminate()
            server.process.wait(180)
    finally:
        for server in servers.values():
            server.process.kill()
    server_of.said = servers["exits"].log.read_text()
    return server_of


def test_a_policy_that_exits_ends_no_server(served):
    assert served.texts[2] == served.texts[1]
    (line,) = [line for line in served.said.splitlines() if "exiting.py, line" in line]
    assert "SystemExit: 3" in line


def test_64_streams_have_text_of_server_without_policy(served):
    """Requests are preempted with drafts and without."""
    assert all(metrics["vllm:num_preemptions_total",] > 0 for metrics in served.metrics.values())
    assert len(set(served.texts[-1])) > 32
    assert served.texts[0] == served.texts[1]
    rows = tltlab.read(served.trace).iterations
    for name, column in (("draft", "num_drafted"), ("accepted", "num_accepted")):
        assert rows[column].sum() == served.metrics["beg-mab"][f"vllm:spec_decode_num_{name}_tokens_total",] > 0


def test_server_that_is_reported_to_end_leaves_trace(served):
    trace = tltlab.read(served.trace)
    # A busy machine may hand in requests so slowly that a session ends in between. What comes right after a request
    # with a key is of its RL step.
    nameless, named = trace.outcomes.query("rl_step < 7"), trace.outcomes.query("prompt_id == 'p0'")
    assert named["rl_step"].tolist() == [7]
    assert trace.rl_steps[0] == 0
    assert trace.iterations.query("rl_step < 7")["num_generated"].sum() >= 6 * 100
    assert list(nameless["response_tokens"]) == [100] * 6
    assert list(nameless.groupby("prompt_id").size()) == [2, 2, 2]
    assert named[["response_tokens", "prompt_id"]].to_numpy().tolist() == [[10, "p0"]]
    assert PROMPTS[0] in [list(prompt) for prompt in trace.tokens.query("rl_step == 7")["prompt_token_ids"]]
    assert trace.manifest.engine.startswith("vllm ")


class Actor:
    """Knows nothing of tltlab."""

    def __init__(self, model):
        import torch._dynamo
        from vllm import LLM, SamplingParams

        torch._dynamo.config.disable = True  # what it imported read no environment
        limits = {"max_model_len": 128, "kv_cache_memory_bytes": 1 << 25, "distributed_executor_backend": "uni"}
        self.llm = LLM(model, enforce_eager=True, dtype="float32", **limits)
        self.settings = SamplingParams(ignore_eos=True, max_tokens=24)
        self.prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]

    def generate(self):
        self.llm.generate(self.prompts, self.settings, use_tqdm=False)

    def ends(self):
        for _ in range(2):
            self.generate()
        self.llm.llm_engine.engine_core.shutdown()

    def is_killed(self):
        self.generate()
        self.llm.collective_rpc("reload_weights")
        self.llm.reset_prefix_cache()
        for _ in range(2):
            self.generate()
        self.llm.sleep(level=0)
        self.llm.wake_up()
        self.generate()
        path = self.llm.llm_engine.engine_core.engine_core.scheduler.watch.recording.path
        while len(read_one(path).outcomes) < 12:
            time.sleep(0.1)
        self.llm.llm_engine.add_request("under way", self.prompts[0], self.settings)
        self.llm.llm_engine.step()
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture(scope="module")
def actors(one_ray, random_model, tmp_path_factory):
    """What two engines in Ray's actors left that shared their variables: one that was killed, and one that ended.

    They are forks of a process that has imported vLLM.
    """
    folder = tmp_path_factory.mktemp("actors")
    single = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1"}
    variables = {"TLTLAB_POLICY": "beg-mab", "TLTLAB_RECORD": str(folder / "x"), **single, **UNCOMPILED}
    options = {"num_cpus": 0, "runtime_env": runtime_env(actor_env(variables))}
    killed, ends = (ray.remote(Actor).options(**options).remote(str(random_model)) for _ in range(2))
    under_way = killed.is_killed.remote()
    ray.get(ends.ends.remote())
    with pytest.raises(RayActorError):
        ray.get(under_way)
    return sorted(folder.iterdir(), key=lambda path: not is_unfinished(path))


def test_engines_in_rays_actors_record_side_by_side(actors):
    assert sorted(path.name for path in actors) == ["x", "x-1"]
    assert [is_unfinished(path) for path in actors] == [True, False]
    # One by one: `read` puts together what overlaps in time.
    assert read_one(actors[1]).outcomes["response_tokens"].tolist() == [24] * 6


def test_what_a_killed_program_made_durable_is_simulated(actors):
    trace = read_one(actors[0])
    assert trace.outcomes["response_tokens"].tolist() == [24] * 12
    # New weights begin an RL step, and nothing else does.
    assert trace.outcomes.groupby("rl_step").size().tolist() == [3, 9]
    assert trace.workload["policy_version"].tolist() == [0] * 3 + [1] * 9
    assert all(fact in trace.manifest.notes for fact in ("weight update", "unfinished"))
    assert "measured" in tltlab.sim.simulate(trace, policy="beg-mab").summary["acceptance"]


@pytest.mark.skipif(
    "TLTLAB_TRL" not in os.environ and find_spec("trl") is None,
    reason="TRL is not installed, and TLTLAB_TRL names no folder with it (pip install --target)",
)
def test_trls_trainer_runs_under_policy_and_is_recorded(random_model, tmp_path):
    """Colocated, from its package; on a CPU vLLM must keep its weights where TRL can write them."""
    sizes = {"steps": 2, "prompts_per_step": 4, "group_size": 4, "max_response_tokens": 48, "cores": 1}
    setting = GrpoJob(model=random_model, reward="even:evenness", **sizes)
    even = "def evenness(prompt, response, answer): return len(response.split()) % 2 - 1.0\n"
    (tmp_path / "even.py").write_text(even)
    (tmp_path / "script.py").write_text(script_text(setting, tmp_path / "trained", vllm=True))
    environment = {
        "PYTHONPATH": os.pathsep.join([os.environ.get("TLTLAB_TRL", ""), str(tmp_path), os.environ["PYTHONPATH"]]),
        "HF_DATASETS_CACHE": str(tmp_path / "datasets"),
        # By default the KV cache takes a third of the memory.
        **UNCOMPILED, "VLLM_CPU_KVCACHE_SPACE": "1",
        "TLTLAB_POLICY": "beg-mab", "TLTLAB_RECORD": str(tmp_path / "x"),
    }  # fmt: skip
    runner = [sys.executable, "-m", "bench.train.trl", "script.py", "times.json", "--torch-linear"]
    told = {"cwd": tmp_path, "env": os.environ | environment, "timeout": 500, "check": False}
    done = subprocess.run(runner, capture_output=True, text=True, **told)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "beg-mab" in done.stderr
    trace = tltlab.read(tmp_path / "x")
    assert trace.rl_steps == [0, 1]
    assert trace.outcomes.groupby("rl_step").size().tolist() == [16, 16]
    assert trace.outcomes.groupby(["rl_step", "prompt_id"]).size().mod(4).eq(0).all()
    assert trace.iterations["num_drafted"].sum() > 0
    assert tltlab.sim.simulate(trace, policy="none").summary
    told = RunEvidence.of(tmp_path / "x")
    assert set(told.steps["policy"]) == {"beg-mab"}
    assert (told.steps["rollout_s"] > 0).all()
