"""Rewards in their own processes: what hangs, raises or crashes costs its response the reward, and nothing else."""

import os
import signal
import subprocess
import sys
import time
from array import array
from concurrent.futures import Future

import psutil
import pytest
from pebble.pool.base_pool import PoolStatus
from pebble.pool.process import PoolManager
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from tests.refused import refused
from tltlab.errors import RunError
from tltlab.files import write_json
from tltlab.runtime.recipe.recipe import Recipe, load_recipe, located, resumed_recipe
from tltlab.runtime.recipe.user_code import keep_code
from tltlab.runtime.rollout.reward_pool import RewardPool
from tltlab.runtime.rollout.rewards import Scored

# The response says what the reward function does.
MODULE = """
import ctypes, os, signal, sys, time

def hang():
    while True:
        time.sleep(0.01)

def fails(error):
    raise error

def reward(prompt, response, answer):
    print("a reward says something")
    if response == "raise":
        raise ValueError(f"the key is SECRET and the response {response}")
    if response.startswith("sleep"):
        time.sleep(float(response.split()[1]))
    return DOES.get(response, lambda: len(response))()

DOES = {
    "hang": hang,
    "hang in C": lambda: ctypes.PyDLL(None).sleep(600),
    "leave": lambda: sys.exit(3),
    "exit": lambda: os._exit(7),
    "panic": lambda: fails(type("PanicException", (BaseException,), {})()),
    "interrupt": lambda: fails(KeyboardInterrupt()),
    "descriptors": lambda: os.closerange(3, 256) or 11,
    "fork": lambda: 1.0 if os.fork() else -5.0,
    "memory": lambda: float(len(bytearray(1 << 40))),
    "crash": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "nan": lambda: float("nan"),
    "none": lambda: None,
    "where": os.getpid,
    "heavy": lambda: sum(name in sys.modules for name in ("torch", "ray", "vllm", "transformers")),
}

def half(prompt, response, answer):
    return 0.5
"""

SCRIPT = """
from types import SimpleNamespace
from tltlab.runtime.rollout.reward_pool import RewardPool

# What a pool reads of a recipe, which takes long to import in every process.
settings = SimpleNamespace(processes=PROCESSES, timeout_s=600, on_failure=0.0, memory_bytes=None)
faults = SimpleNamespace(start_s=lambda: 600)
terms = [SimpleNamespace(path="pool_rewards:reward", weight=1.0, label="reward")]
recipe = SimpleNamespace(reward_terms=terms, code=(), reward_pool=settings, faults=faults)

def run():
    with RewardPool(recipe) as pool:
        pool.rewards([("", "", "")])
        print("ready", flush=True)
        pool.rewards([("", "hang in C", "")] * 4)

"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder on the path with the module of rewards."""
    folder = tmp_path_factory.mktemp("rewards")
    (folder / "pool_rewards.py").write_text(MODULE)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield folder


BESIDE = """
from beside_helper import length

def reward(prompt, response, answer):
    import beside_later
    return length(response) + beside_later.MORE
"""


@pytest.mark.parametrize("processes", [0, 1])
def test_a_reward_module_is_found_on_resume(processes, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before, there = list(sys.path), tmp_path / "there"
    there.mkdir()
    for name, text in {"reward": BESIDE, "helper": "length = len\n", "later": "MORE = 0.5\n"}.items():
        (there / f"beside_{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, f"beside_{name}", raising=False)
    (there / "random.py").write_text("raise RuntimeError('what is installed comes first')\n")
    (there / "t.jsonl").touch()
    (there / "r.toml").write_text(
        f'model = "m"\nreward = "beside_reward:reward"\ndata = {{train = "there/t.jsonl"}}\n'
        f"reward_pool = {{processes = {processes}}}\n"
    )
    recipe = load_recipe("there/r.toml")
    with RewardPool(recipe) as pool:
        assert of(pool, "abc") == [3.5]
    run = tmp_path / "run"
    keep_code(recipe.code, ["beside_reward"], run)
    write_json(run / "run.json", {"recipe": located(recipe).model_dump(mode="json")})
    assert sorted(p.name for p in (run / "code").iterdir()) == [f"beside_{n}.py" for n in ("helper", "later", "reward")]

    # The recipe's folder has gone, or says something else by now.
    (there / "beside_later.py").write_text("MORE = 100\n")
    (there / "beside_helper.py").unlink()
    run = run.rename(tmp_path / "moved")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    for name in ("reward", "helper", "later"):
        monkeypatch.delitem(sys.modules, f"beside_{name}", raising=False)
    again = resumed_recipe(run, (), ["beside_reward"])
    assert again.data.train == str(there / "t.jsonl")
    with RewardPool(again) as pool:
        assert of(pool, "abc") == [3.5]
    keep_code(again.code, ["beside_reward"], run)
    assert (run / "code" / "beside_later.py").read_text() == "MORE = 0.5\n"
    assert sys.path == before


def recipe_of(processes, reward="pool_rewards:reward", **settings):
    settings = {"processes": processes, "timeout_s": 120.0, "on_failure": -1.0} | settings
    return Recipe.model_validate({"model": "m", "reward": reward, "data": {"train": "x"}, "reward_pool": settings})


@pytest.fixture(scope="module")
def two_processes(folder):
    with RewardPool(recipe_of(2)) as pool:
        yield pool


@pytest.fixture
def pool(two_processes):
    """A pool of two processes that has not failed yet."""
    two_processes.take_failures()
    return two_processes


def of(pool, *responses):
    return [scored.reward for scored in pool.rewards([("a prompt", response, "an answer") for response in responses])]


def test_rewards_come_in_the_order_of_the_responses(pool):
    assert of(pool, "sleep 0.1", *("x" * n for n in range(100))) == [9.0, *map(float, range(100))]
    assert of(pool) == []
    assert pool.take_failures() == []


def both(pool):
    """The two processes that compute rewards, once both do."""
    found = set()
    deadline = time.monotonic() + 300
    while len(found) < 2 and time.monotonic() < deadline:
        found |= {int(place) for place in of(pool, *["where", "sleep 0.06"] * 8)} - {len("sleep 0.06")}
    return found


def test_reward_processes_import_only_what_they_need(pool):
    assert len(both(pool) - {os.getpid()}) == 2
    assert of(pool, "heavy") == [0.0]


@pytest.mark.parametrize(
    ("responses", "rewards", "failures"),
    [
        # Failed rewards are -1, the others the length of the response; each failure by its count and facts.
        ("a,hang,bb,sleep 0.1,ccc,hang in C,dddd", [1, -1, 2, 9, 3, -1, 4], ["2 of 7 / 2 s"]),
        ("raise,a,leave,nan,none,raise", [-1, 1, -1, -1, -1, -1],
         ["2 of 6 / ValueError / pool_rewards.py / line 14", "1 of 6 / SystemExit", "1 of 6 / nan",
          "1 of 6 / NoneType"]),
        ("exit,a,crash,bb", [-1, 1, -1, 2], ["1 of 4 / code 7", "1 of 4 / signal 11"]),
        ("panic,a,interrupt,fork,bb,fork,ccc", [-1, 1, -1, 1, 2, 1, 3],
         ["1 of 7 / KeyboardInterrupt", "1 of 7 / PanicException"]),
    ],
    ids=["late", "raised", "ended", "no exception"],
)  # fmt: skip
def test_a_reward_that_fails_costs_its_response_alone(pool, monkeypatch, responses, rewards, failures):
    if "hang" in responses:
        monkeypatch.setattr(pool, "_config", pool._config.model_copy(update={"timeout_s": 2.0}))
    assert of(pool, *responses.split(",")) == rewards
    said = pool.take_failures()
    assert len(said) == len(failures)
    for facts in failures:
        assert any(all(fact in sentence for fact in facts.split(" / ")) for sentence in said), (facts, said)
    assert "SECRET" not in " ".join(said)
    assert pool.take_failures() == []


def test_a_reward_closing_descriptors_costs_one_response(pool, monkeypatch):
    monkeypatch.setattr(pool, "_config", pool._config.model_copy(update={"timeout_s": 2.0}))
    first, *others = of(pool, "descriptors", "a", "bb", "ccc")
    assert (first in (-1, len("descriptors")), others) == (True, [1, 2, 3])
    pool.take_failures()
    assert of(pool, "dddd", "a") == [4, 1]


def test_reward_process_has_memory_that_it_is_given(folder):
    with RewardPool(recipe_of(1, memory_bytes=1 << 32)) as pool:
        assert of(pool, "memory", "a") == [-1, 1]
        assert "MemoryError" in pool.take_failures()[0]


def test_processes_that_die_between_rewards_are_replaced(pool):
    for number in both(pool):
        os.kill(number, signal.SIGKILL)
    assert of(pool, "a", "bb") == [1, 2]


def test_tasks_of_a_broken_pool_are_reissued(pool, monkeypatch):
    both(pool)
    broken = pool._pool

    def breaks(*arguments, **options):
        broken._context.status = PoolStatus.ERROR
        return Future()

    monkeypatch.setattr(broken, "schedule", breaks)
    assert of(pool, "a", "bb") == [1, 2]


def test_without_processes_rewards_are_computed_here(folder, capsys):
    with RewardPool(recipe_of(0)) as pool:
        assert of(pool, "a", "where", "raise", "nan", "leave") == [1, os.getpid(), -1, -1, -1]
        assert len(pool.take_failures()) == 3
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("processes", [0, 1])
def test_a_failed_term_leaves_the_others(folder, processes):
    """Their sum is by weight, 2 x the length or -1, and 0.5; one that ends its process is found by itself."""
    terms = [{"path": "pool_rewards:reward", "weight": 2.0, "name": "length"}, {"path": "pool_rewards:half"}]
    responses = ["a", "raise", *["hang", "exit"][: 2 * processes]]
    with RewardPool(recipe_of(processes, terms, timeout_s=2.0)) as pool:
        found = pool.rewards([("", response, "") for response in responses])
        failures = pool.take_failures()
    assert found == [Scored(2.5, (1.0, 0.5)), *[Scored(-1.5, (-1.0, 0.5))] * (len(responses) - 1)]
    assert len(failures) == len(responses) - 1
    assert all(f"1 of {len(responses)} values of length" in failure for failure in failures)


def test_a_sum_beyond_float32_is_a_failure(folder):
    terms = [{"path": "pool_rewards:half", "weight": 1e39}, {"path": "pool_rewards:reward"}]
    with RewardPool(recipe_of(0, terms)) as pool:
        assert of(pool, "a") == [-1]
        assert "float32" in pool.take_failures()[0]


def test_reward_that_imports_here_alone_ends_run(folder):
    (folder / "gone_rewards.py").write_text("def reward(prompt, response, answer): return 1.0")
    pool = RewardPool(recipe_of(1, "gone_rewards:reward"))
    (folder / "gone_rewards.py").unlink()
    with pool, refused(RunError, naming=("gone_rewards",)):
        of(pool, "a")


def test_an_interrupted_start_leaves_no_process(folder, monkeypatch):
    """They were not ended, and the end of this process waited for them."""
    started = []

    def interrupted(manager):
        start(manager)
        started.extend(manager.worker_manager.workers)
        raise KeyboardInterrupt

    start = PoolManager.start
    monkeypatch.setattr(PoolManager, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        RewardPool(recipe_of(1)).__enter__()
    assert len(started) == 1
    assert not psutil.pid_exists(started[0])


def test_no_process_outlives_a_driver_that_is_killed(folder):
    script = folder / "killed.py"
    script.write_text(SCRIPT.replace("PROCESSES", "2") + 'if __name__ == "__main__":\n    run()')
    command = [sys.executable, str(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as driver:
        try:
            assert driver.stdout is not None
            assert driver.stdout.readline() == "ready\n"
            children = psutil.Process(driver.pid).children(recursive=True)
            assert len(children) >= 2
        finally:
            driver.kill()
    assert psutil.wait_procs(children, timeout=120)[1] == []


def test_script_without_main_guard_is_reported_so(folder):
    script = folder / "unguarded.py"
    script.write_text(SCRIPT.replace("PROCESSES", "1") + "run()")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, "RunError" in done.stderr) == (1, True)


@pytest.mark.parametrize("processes", [0, 1])
@pytest.mark.parametrize("tidy", [False, True])
def test_token_ids_are_decoded_as_the_tokenizer_does(folder, processes, tidy):
    """Only a tokenizer that tidies up afterwards is asked itself: it takes transformers, which processes do without."""
    backend = Tokenizer(WordLevel({"<pad>": 0, "heavy": 1, "what": 2, "?": 3}, unk_token="<pad>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", clean_up_tokenization_spaces=tidy)
    with RewardPool(recipe_of(processes), tokenizer) as pool:
        responses = [array("i", [2, 3, 0]), array("i"), array("i", [1]), [2, 2]]
        texts = [tokenizer.decode(list(ids), skip_special_tokens=True) for ids in responses]
        assert texts[0] == ("what?" if tidy else "what ?")
        rewards = of(pool, *responses)
        assert rewards[:2] + rewards[3:] == [len(text) for i, text in enumerate(texts) if i != 2]
        assert (rewards[2] == 0) == bool(processes)
        assert not pool.take_failures()
