"""Rollout workers that die and come back. One pool of two real engines serves most of the file.

A worker that starts again takes seconds, so each death serves all that is to be seen of it.
"""

import asyncio
import itertools
import json
import os
import random
import shutil
import signal
import threading
from contextlib import closing
from types import SimpleNamespace

import pytest
import ray
from ray.exceptions import OutOfMemoryError, RayActorError, RayTaskError
from safetensors.torch import load_file

from tests.refused import refused
from tltlab.drafters.specs import DEFAULT_DRAFTERS, SuffixSpec
from tltlab.errors import ConfigError, RunError
from tltlab.policies.policy import Policy, load_policy
from tltlab.policies.specs import ExploreSpec
from tltlab.runtime.engine.generation import EngineDied
from tltlab.runtime.engine.graphs import plan_graphs
from tltlab.runtime.engine.weights import BucketSlots, Engines, load_buckets
from tltlab.runtime.ray.actors import Waiting, death_cause
from tltlab.runtime.recipe.engines import EngineBuild
from tltlab.runtime.recipe.recipe import load_recipe
from tltlab.runtime.rollout.pool import RunHistory, WorkerPool
from tltlab.runtime.rollout.worker import capture_bytes, engine_args
from tltlab.runtime.run.state import RunEvents
from tltlab.runtime.trainer.group import TrainerDied
from tltlab.strategy import NO_SPECULATION

from ..engine.asking import fixed, request

pytestmark = pytest.mark.engine
PROMPTS, GROUP, CAP = 6, 4, 100
RESTARTED = []
NGRAM, SUFFIX = fixed("ngram"), fixed("suffix")


def pool_of(recipe, out, on_restart=lambda number: None):
    events = RunEvents(out / "events.jsonl")
    # As on a GPU; here vLLM leaves the graphs out.
    graphs = plan_graphs(load_policy("beg-mab-suffix"), 64, runner="V1", any_lengths=True)
    build = EngineBuild(drafters=dict(DEFAULT_DRAFTERS), max_draft_depth=graphs.deepest, graphs=graphs)
    anywhere = {"num_cpus": 0, "num_gpus": 0, "scheduling_strategy": "DEFAULT", "env_vars": {}}
    return WorkerPool(recipe, build, lambda number: None, lambda number: anywhere, events=events, on_restart=on_restart)


@pytest.fixture(scope="module")
def recipe(recipe_file):
    return load_recipe(recipe_file, ["faults.max_restarts=100"])


@pytest.fixture(scope="module")
def pool(one_ray, recipe, tmp_path_factory):
    pool = pool_of(recipe, tmp_path_factory.mktemp("pool"), RESTARTED.append)
    with closing(pool):
        pool.start()
        yield pool


def requests(rl_step, num_prompts=PROMPTS):
    slots = itertools.product(range(num_prompts), range(GROUP))
    rest = {"rl_step": rl_step, "ignore_eos": False}
    return [request(f"p{n}", sample, [1, 4 + n, 9, 4 + n, 9], CAP, **rest) for n, sample in slots]


def told(parts):
    return [(r.key, r.token_ids, r.finish_reason) for part in parts for r in part.responses]


def undisturbed(pool, policy, rl_step):
    """A rollout, and the state that it began in: drafters learn in it, so it is to be loaded before another try."""
    pool.set_policy(policy, rl_step)
    before = pool.state_dicts()
    pool.load_state_dicts(before)
    return pool.generate(pool.share(requests(rl_step)), rl_step), before


def test_engines_report_the_tokens_of_graphs(pool):
    pool.set_policy(SUFFIX, 0)
    rows = [row for part in pool.generate(pool.share(requests(0)), 0) for row in part.iterations.to_pylist()]
    decoding = [row for row in rows if not row["prefill_tokens"]]
    assert all(row["graph_tokens"] == row["batch"] + row["num_drafted"] for row in decoding)


def kill(pool, number):
    os.kill(pool.pids[number], signal.SIGKILL)


def events(pool):
    path = pool.events.path
    return [json.loads(line)["event"] for line in path.read_text().splitlines()] if path.exists() else []


def test_a_quota_of_prompts_ends_a_rollout(pool):
    pool.set_policy(NGRAM, 0)
    shares = pool.share(requests(0))
    assert [r.key for share in shares for r in share] == [r.key for r in requests(0)], "in order"
    assert [len(share) for share in shares] == [12, 12]
    part, other = pool.generate(shares, 0, quotas=[1, PROMPTS])
    whole = [sum(r.finish_reason != "abort" for r in part.responses[i : i + GROUP]) for i in range(0, 12, GROUP)]
    assert max(whole) == GROUP
    assert any(r.finish_reason == "abort" for r in part.responses)
    assert all(r.finish_reason != "abort" for r in other.responses)


def sending(weights, kill_after=-1):
    """Weights from its own actor, in buckets of 16 KiB, as `TrainerGroup.send_weights` brings those of ranks."""
    actor, held = SendingActor.remote(), ray.put(weights)

    def send(workers, version, way):
        try:
            ray.get(actor.send.remote(held, Engines(workers, version), kill_after))
        except RayActorError as error:
            raise TrainerDied(str(error)) from error

    return send


@ray.remote(num_cpus=0)
class SendingActor:
    def send(self, weights, engines, kill_after):
        def until_it_dies():
            for number, item in enumerate(weights.items()):
                if number == kill_after:
                    os.kill(os.getpid(), signal.SIGKILL)
                yield item

        slots = BucketSlots.fit(weights.values(), 16 << 10)
        # As where workers are on another machine, for every second version.
        slots.path = "/none" if engines.version % 2 else slots.path
        engines.start_weight_update(slots)
        load_buckets(until_it_dies(), slots, engines)


def test_a_killed_worker_is_restarted_with_weights(pool, random_model):
    good = load_file(random_model / "model.safetensors")
    new = {name: -value if name == "lm_head.weight" else value for name, value in good.items()}
    old, before = undisturbed(pool, NGRAM, 1)
    pool.update_weights(sending(new), 1)
    pool.load_state_dicts(before)
    expected = pool.generate(pool.share(requests(1)), 1)
    seconds = max(part.duration_s for part in expected)
    pool.load_state_dicts(before)
    rng, pids = random.Random(None if os.environ.get("TLTLAB_FUZZ") else 7), list(pool.pids)
    number = rng.randrange(2)
    killer = threading.Timer(rng.random() * seconds, kill, (pool, number))
    killer.start()
    disturbed = pool.generate(pool.share(requests(1)), 1)
    killer.join()
    # Who was killed after its last token is back after the next call.
    pool.evaluate(requests(0, 1))
    assert told(old) != told(expected) == told(disturbed)
    assert pool.pids[number] != pids[number]
    assert pool.pids[1 - number] == pids[1 - number]
    parts = pool.generate(pool.share(requests(2)), 2)
    assert [key for key, _, _ in told(parts)] == [request.key for request in requests(2)]


def test_interrupted_weight_updates_are_repeated(pool, random_model):
    good = load_file(random_model / "model.safetensors")
    whole = sending(good)
    pool.update_weights(whole, 2)
    expected, before = undisturbed(pool, NGRAM, 3)
    pids, known = list(pool.pids), len(events(pool))
    with pytest.raises(TrainerDied):
        pool.update_weights(sending({name: -value for name, value in good.items()}, kill_after=len(good) // 2), 3)
    assert pool.pids == pids
    pool.update_weights(whole, 4)
    assert not set(pool.pids) & set(pids)
    assert len(events(pool)[known:]) == len(pids)
    assert all("cut off" in event for event in events(pool)[known:])
    pool.load_state_dicts(before)
    assert told(pool.generate(pool.share(requests(3)), 3)) == told(expected)


def test_new_worker_remembers_and_its_start_takes_time(pool, monkeypatch):
    first, _ = undisturbed(pool, SUFFIX, 4)
    pool.remember(pool.share(requests(4)), first)
    expected, before = undisturbed(pool, SUFFIX, 5)
    pool.load_state_dicts(before)
    pool.events.rl_step = 5
    kill(pool, 1)
    known = len(RESTARTED)
    # Starting a worker takes a thousand seconds by the pool's clock, and nothing else takes any.
    clock = SimpleNamespace(perf_counter=lambda: 1000.0 * (len(RESTARTED) - known))
    monkeypatch.setattr("tltlab.runtime.rollout.pool.time", clock)
    disturbed = fine, late = pool.generate(pool.share(requests(5)), 5)
    drafted = [
        [sum(row["num_drafted"] for row in part.iterations.to_pylist()) for part in p] for p in (expected, disturbed)
    ]
    assert min(drafted[0]) > 0
    assert drafted[0] == drafted[1]
    assert told(disturbed) == told(expected)
    assert fine.duration_s < 1000 <= late.iterations["t_start"][0].as_py()
    assert all(late.iterations["t_start"][0].as_py() < r.t_finish <= late.duration_s for r in late.responses)
    assert all(fact in events(pool)[-1] for fact in ("worker 1", "RL step 5", "12 requests"))
    assert RESTARTED[-1] == 1


def test_a_worker_receives_only_needed_history(pool, tmp_path):
    pool.history.load_state_dict(None, tmp_path)
    pool.set_policy(SUFFIX, 20)
    for rl_step in (20, 21):
        shares = pool.share(requests(rl_step))
        pool.remember(shares, pool.generate(shares, rl_step))

    def told_of(rl_step):
        shares = pool.share(requests(rl_step))[::-1]  # other workers than before
        return [[key for visit in ray.get(pool.history.of(share)) for key, _, _ in visit] for share in shares]

    slots = list(itertools.product((20, 21), range(GROUP)))
    keys = {n: [(rl_step, f"p{n}", sample, 0) for rl_step, sample in slots] for n in range(PROMPTS)}
    assert told_of(22) == [[*keys[3], *keys[4], *keys[5]], [*keys[0], *keys[1], *keys[2]]]
    visit = ray.get(pool.history.of(requests(22, 1)))[0]
    assert visit[0][1] is visit[-1][1], "a group's prompt is there once"
    before, rows = told_of(22), pool.history.state_dict(tmp_path / "saved")
    num_bytes = pool.history.num_bytes
    pool.history.load_state_dict(json.loads(json.dumps(rows)), tmp_path / "saved")
    assert (told_of(22), pool.history.num_bytes) == (before, num_bytes)

    shares = pool.share(requests(22))
    parts = pool.generate(shares, 22)
    # The run does not come to p0 again; p5 comes last, and there is room for half of what is known of the six.
    pool.history.max_bytes = num_bytes / 2
    pool.remember(shares, parts, lambda ids: [None if i == "p0" else int(i[1:]) for i in ids])
    assert pool.history.num_bytes <= num_bytes / 2
    left = [bool(pool.history.of([request])) for request in requests(23) if request.key[2] == 0]
    assert left[:2] == [False, True]
    assert left == sorted(left[:1]) + sorted(left[1:], reverse=True)

    everything = RunHistory(DEFAULT_DRAFTERS | {"suffix": SuffixSpec(scopes=("global",))})
    everything.load_state_dict(rows, tmp_path / "saved")
    for policy, num_visits in ((SUFFIX, 2 * PROMPTS), (NGRAM, 0)):
        everything.serve(policy)
        assert len(everything.of(requests(22, 1))) == num_visits


def test_only_what_was_not_started_again_is_repeated(pool):
    shares = pool.share(requests(7))
    pool.set_policy(NGRAM, 7)
    pool.load_state_dicts(pool.state_dicts())
    rehearsed = told(pool.rehearse(shares, 7))
    assert told(pool.repeat(shares, 7)) == rehearsed
    kill(pool, 0)
    assert told(pool.rehearse(shares, 7)) == rehearsed
    assert pool.repeat(shares, 7) == [], "its time would be of other work"
    assert told(pool.rehearse(shares, 7)) == rehearsed == told(pool.repeat(shares, 7))

    pool.set_policy(SUFFIX, 7)
    pool.generate(shares, 7, repeatable=True)
    kill(pool, 1)
    assert pool.repeat(shares, 7) == []
    again = pool.generate(shares, 7, repeatable=True)
    assert told(again) == told(pool.repeat(shares, 7))


def test_a_worker_failed_asleep_restarts_at_wake(pool):
    expected, before = undisturbed(pool, NGRAM, 8)
    pool.sleep()
    kill(pool, 0)
    known = pool.state_dicts()
    assert known[0]
    assert known[0] != known[1]
    pool.load_state_dicts(before)
    pool.wake_up()
    assert told(pool.generate(pool.share(requests(8)), 8)) == told(expected)


def test_a_mistake_of_the_user_restarts_nobody(pool):
    pids = list(pool.pids)
    with refused(ConfigError, naming=("8",)):
        pool.set_policy(fixed("ngram", 9), 9)
    assert pool.pids == pids
    pool.set_policy(Policy(selector=ExploreSpec(strategies=(NO_SPECULATION,))), 9)


def test_worker_that_dies_too_often_ends_run(pool, recipe_file):
    patient, pool.recipe = pool.recipe, load_recipe(recipe_file, ["faults.max_restarts=0"])
    try:
        kill(pool, 0)
        with refused(RunError, naming=("0", "faults.max_restarts")):
            pool.evaluate(requests(0, 1))
    finally:
        pool.recipe = patient


def test_an_engine_that_never_starts_is_tried_once(one_ray, recipe_file, random_model, tmp_path):
    """vLLM's attention on the CPU has no heads of 20 numbers, which it says in its first batch."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shutil.copytree(random_model, tmp_path / "model")
    LlamaForCausalLM(LlamaConfig.from_pretrained(random_model, head_dim=20)).save_pretrained(tmp_path / "model")
    recipe = load_recipe(recipe_file, [f"model={tmp_path / 'model'}", "faults.max_restarts=100"])
    said = []
    with closing(pool_of(recipe, tmp_path)) as pool:
        pool.events.watch = said.append
        with refused(RunError, naming=("RuntimeError", "head_dim=20")):
            pool.start()
    assert said == events(pool)
    assert sorted(line.split()[2] for line in said) == ["0", "1"]
    assert pool._num_failures() == [1, 1]


@ray.remote
class Aborting:
    """A worker whose process ends while its engine is built, as one does that a kernel aborts."""

    def __init__(self, *args): ...

    def pid(self):
        return os.getpid()

    def start(self):
        os.write(2, b"building\nterminate called: no kernel for this machine\n")
        os._exit(7)


def test_a_process_last_words_are_reported(one_ray, recipe_file, tmp_path, monkeypatch):
    monkeypatch.setattr("tltlab.runtime.rollout.pool.RolloutWorker", Aborting)
    says = ("terminate called: no kernel for this machine",)
    with closing(pool_of(load_recipe(recipe_file), tmp_path)) as pool, refused(RunError, naming=says):
        pool.start()
    assert pool._num_failures() == [1, 1]


def test_start_that_takes_too_long_ends_run(one_ray, recipe_file, tmp_path):
    recipe = load_recipe(recipe_file, ["rollout.num_workers=1", "faults.start_timeout_s=0.2"])
    with closing(pool_of(recipe, tmp_path)) as pool, refused(RunError, naming=("worker 0", "0.2 s")):
        pool.start()


def test_what_workers_return_is_not_spelled_out():
    """`asyncio.run` gives back SIGINT with its task in a message that nobody reads: a rollout in it took seconds."""
    spelled = []

    class Answer:
        def __repr__(self):
            spelled.append("tokens")
            return "tokens"

    async def answers():
        return [Answer(), Answer()]

    async def in_a_loop():
        return len(Waiting().run(answers()))

    assert len(Waiting().run(answers())) == asyncio.run(in_a_loop()) == 2
    assert not spelled


def test_a_worker_fails_with_process_or_engine():
    handle = SimpleNamespace(_actor_id=SimpleNamespace(hex=lambda: "aa"))
    assert death_cause(RayActorError("aa", "The actor died\n  pid: 7\nEnd of file"), handle) == "End of file"
    assert death_cause(RayTaskError("generate", "", EngineDied("it lost 3 of 4 responses")), handle)
    assert death_cause(OutOfMemoryError("too much memory"), handle)
    for error in (RayActorError("bb"), RayTaskError("generate", "", ConfigError("no such drafter"))):
        assert not death_cause(error, handle)


def test_engines_receive_concurrency_and_vllm_settings(recipe_file):
    settings = ['rollout.partial={"concurrency": 9}', "cluster.placement=colocated", "rollout.repeat_every=0"]
    recipe = load_recipe(recipe_file, settings)
    args = engine_args(recipe, cuda=True)
    assert (args["max_num_seqs"], args["max_model_len"], args["enable_sleep_mode"]) == (5, 128, True)
    assert "enable_sleep_mode" not in engine_args(recipe, cuda=False)


def test_engines_of_machine_share_room_for_hidden_states(recipe_file, monkeypatch):
    monkeypatch.setattr("tltlab.runtime.engine.engine.available_memory", lambda: 64 << 30)
    free = load_recipe(recipe_file, ["rollout.num_workers=8", "drafter={}"])
    nodes = {"rollout": free.rollout.model_copy(update={"tensor_parallel_size": 2})}
    nodes["cluster"] = free.cluster.model_copy(update={"gpus_per_node": 8})
    gpus = free.model_copy(update=nodes)
    assert [capture_bytes(recipe) for recipe in (free, gpus)] == [2 << 30, 4 << 30]
