"""A run's drafter with trainers in their own processes, which die, hang and cannot write; then runs with engines."""

import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import ray
import torch

import tltlab
from tests.refused import refused
from tltlab.coordination.schedule import Attempt, ScheduleConfig, TrainingSchedule
from tltlab.errors import ConfigError
from tltlab.files import json_lines, read_json, write_file
from tltlab.policies.policy import Policy
from tltlab.policies.specs import FixedSpec
from tltlab.runtime.drafter import run as trainer_processes
from tltlab.runtime.drafter.feed import SequenceSender
from tltlab.runtime.drafter.heads.kinds import new_head
from tltlab.runtime.drafter.heads.layouts import load_head
from tltlab.runtime.drafter.run import (
    DrafterRun,
    NoDrafting,
    drafter_of,
    machine_addresses,
)
from tltlab.runtime.drafter.training import UNKNOWN, Acceptance
from tltlab.runtime.drafter.worker import TrainerReport, read_data
from tltlab.runtime.engine.drafter_pool import DrafterReport
from tltlab.runtime.recipe.recipe import Recipe, load_recipe
from tltlab.runtime.run.grpo import GrpoRun, train
from tltlab.runtime.run.state import RunEvents
from tltlab.state import DrafterState
from tltlab.strategy import NO_SPECULATION, Strategy
from tltlab.traces.recorder import repair

from ...nemesis.engines import title
from ..small_models import until
from . import drafting_text as text
from .drafting_text import same

YIELD_S, HANGING_S = 100.0, 10.0
"""How long trainers may take to yield, and where one of them never will."""


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


class Method:
    """A method of something in this process, called as Ray's actors are."""

    def __init__(self, function):
        self._function = function

    def remote(self, *args):
        return ray.put(self._function(*(ray.get(a) if isinstance(a, ray.ObjectRef) else a for a in args)))


@dataclass
class StandIn:
    """A rollout worker without an engine: it generates nothing, and keeps the draft weights that it is given."""

    feed: SequenceSender
    given: list[tuple[dict[str, torch.Tensor], list[float]]] = field(default_factory=list)

    def __getattr__(self, name):
        return Method(getattr(self, f"_{name}"))

    def _place(self):
        return ray.get_runtime_context().get_node_id(), {}

    def _ask_engine(self, method, *args):
        return getattr(self, f"_{method}")(*args)

    def _guard_drafter(self, config): ...

    def _update_draft_weights(self, weights, predicted, updates):
        self.given.append((weights, predicted))

    def _drafter_report(self):
        return DrafterReport(
            drafter="learned", age=0, updates=len(self.given), trusted=True, serves=True, predicted=(), measured=(),
            positions={}, verdicts=(),
        )  # fmt: skip


def asked(workers):
    return lambda method, *args: ray.get([getattr(worker, method).remote(*args) for worker in workers])


def num_updates(trainer):
    return trainer.training.updates


def frozen():
    return ray.put(text.frozen())


def asked_of(run, ask, *workers):
    """What `ask` finds in the processes of the trainers that run, or of those of `workers`, as they are now."""
    processes = run.training._processes
    return ray.get([processes[n].actor.__ray_call__.remote(ask) for n in workers or sorted(processes)])


class Story:
    """A drafter's run of three workers, rollout after rollout; worker 0 always generates to the end."""

    def __init__(self, folder):
        text.head(folder / "model")
        self.folder, self.rl_step = folder, -1
        drafter = {
            "schedule": {"kind": "always"},
            "optim": {"lr": 3e-3},
            "coordinator": {"yield_timeout_s": YIELD_S},
            "tokens_per_update": 128,
            "checkpoint_every": 5,
            "nice": 0,
        }
        base = {"model": str(folder / "model"), "reward": "none:none", "data": {"train": "none"}}
        rollout = {"num_workers": 3, "max_draft_depth": 4}
        recipe = Recipe.model_validate(base | {"rollout": rollout, "drafter": drafter})
        self.events = RunEvents(folder / "events.jsonl")
        self.run = DrafterRun(recipe.drafter, recipe, folder / "drafter", self.events)
        self.origin = self.run.state_dict(folder / "drafter")
        self.run.prepare()
        self.workers = [StandIn(SequenceSender(str(self.run.feed(n)))) for n in range(3)]
        self.run.start(self.workers, frozen, asked(self.workers))
        self.said = []

    @property
    def pids(self):
        return {worker: process.pid for worker, process in self.run.training._running().items()}

    def rollout(self, *idle):
        """Begin a rollout in which the workers `idle` run out of requests; returns once they were taught."""
        self.rl_step += 1
        self.events.rl_step = self.rl_step
        until(lambda: len(self.pids) == 3)
        self.run.rollout_starts(self.rl_step)
        for n in idle:
            self.teach(n)
            self.run.worker_idle(n)

    def teach(self, worker):
        for n in range(24):
            sequence = text.sequence(100 * self.rl_step + n, rl_step=self.rl_step)
            text.hand_over(self.workers[worker].feed, sequence)

    def trainers(self, ask, *workers):
        """What `ask` finds in each trainer's process, or in those of `workers`."""
        until(lambda: len(self.pids) == 3)
        return asked_of(self.run, ask, *workers)

    def updates(self, worker):
        return asked_of(self.run, num_updates, worker)[0] if worker in self.pids else -1

    def trains(self, *idle, more=0):
        """Begin a rollout in which the workers `idle` train until each is more than `more` updates ahead of the drafter
        in service; how many that one has."""
        start = self.run.served.updates
        self.rollout(*idle)
        until(lambda: min(map(self.updates, idle)) > start + more)
        return start

    def restarted(self, worker, old):
        """Until another process than `old` trains beside a worker."""
        until(lambda: self.pids.get(worker, old) != old)

    def logged(self):
        return json_lines(self.folder / "events.jsonl")

    def ends(self):
        """End the rollout, for which no trainer is waited for in vain."""
        assert self.end() < YIELD_S

    def end(self):
        """End the rollout and bring the drafter to the engines; returns how long the end took."""
        begin = time.monotonic()
        self.run.rollout_ends(self.rl_step)
        waited = time.monotonic() - begin
        self.run.annotate()
        self.run.publish(self.rl_step + 1)
        self.run.target_moved()
        self.rows = self.run.rows(self.rl_step)
        self.said = self.events.take()
        return waited

    def heard(self, *facts):
        """Whether one event of the last rollout, or since, names all of these."""
        return any(all(fact in said for fact in facts) for said in self.said + self.events.take())

    def kill(self, worker, how=signal.SIGKILL):
        """Kill or stop the trainer of a worker; its process."""
        pid = self.pids[worker]
        os.kill(pid, how)
        return pid

    def close(self):
        self.run.close()


@pytest.fixture(scope="module")
def told(one_ray, tmp_path_factory):
    story = Story(tmp_path_factory.mktemp("story"))
    try:
        # Each test, the first one too, finds a drafter that was trained.
        story.trains(1, 2, more=10)
        story.end()
        yield story
    finally:
        story.close()


@pytest.fixture
def story(told):
    """The same story in all tests: a run that has seen the worst continues as if nothing had been."""
    told.run.training._deaths = dict.fromkeys(range(3), 0)
    return told


def test_what_was_trained_goes_into_service_between_rollouts(story):
    given = len(story.workers[0].given)
    story.trains(1, 2, more=10)
    assert len(story.workers[0].given) == given, "weights change in mid-rollout"
    story.ends()
    assert story.said == []
    weights, predicted = story.workers[0].given[-1]
    assert 0.1 < predicted[0] <= 1.0
    assert all(len(worker.given) == given + 1 for worker in story.workers)
    for own in story.run.training.answers("weights").values():
        assert same(own, weights), "trainers go on from another one"
    rows = story.rows["spot_training"]
    assert {row["worker"] for row in rows} == {1, 2}
    assert [row["accept"] for row in rows if row["accept"]] == [predicted] * 2
    # Whoever runs out of requests first may train alone until the other one joins.
    assert {row["worker"] for row in rows if row["members"] == 2} == {1, 2}
    assert {row["drafter_age"] for row in story.rows["acceptance"]} >= {story.rl_step}
    story.run.save()
    assert same(load_head(story.folder / "drafter" / "final").state_dict(), weights)


def test_a_drafter_continues_from_a_checkpoint(story, tmp_path):
    run, saved = story.run, tmp_path / "checkpoint"
    state = json.loads(json.dumps(run.state_dict(saved)))
    weights, predicted = story.workers[0].given[-1]
    resumed = DrafterRun(run.config, run.recipe, tmp_path / "drafter", RunEvents(tmp_path / "events.jsonl"))
    later = tmp_path / "drafter" / "worker-0"
    later.mkdir(parents=True)
    (later / "state.safetensors").write_text("of a future that was left")
    had = story.trainers(held)
    assert any(had)
    resumed.load_state_dict(state, saved)
    resumed.prepare()
    resumed.rejoin(0)  # before there is anything to join
    workers = [StandIn(SequenceSender(str(resumed.feed(n)))) for n in range(3)]
    try:
        resumed.start(workers, frozen, asked(workers))
        assert not (later / "state.safetensors").exists()
        assert resumed.state_dict(saved) == state
        assert set(asked_of(resumed, num_updates)) == {run.served.updates}
        for own in resumed.training.answers("state").values():
            assert same(own, ray.get(run.served.training))
        assert asked_of(resumed, held) == had
        # A worker that is started again is another object in the same place.
        workers[1] = StandIn(workers[1].feed)
        resumed.rejoin(1)
        for worker in workers:
            ((given, chances),) = worker.given
            assert chances == predicted
            assert same(given, weights)
        resumed.schedule.decide(story.rl_step + 1, DrafterState(age=1, updates=resumed.served.updates))
        with refused(ConfigError):
            resumed.load_state_dict({}, saved)
        with refused(ConfigError, naming=("[drafter]",)):
            NoDrafting().load_state_dict(state, saved)
        (saved / "drafter.safetensors").write_bytes(b"cut")
        with refused(ConfigError):
            resumed.load_state_dict(state, saved)
    finally:
        resumed.close()


def test_a_gate_passes_only_a_better_drafter(story, monkeypatch):
    run = story.run
    monkeypatch.setattr(run, "schedule", TrainingSchedule(ScheduleConfig(kind="gated"), pretrained=True))
    for forgets, passes in ((forget_served, True), (forget_trained, False)):
        before = story.trains(1)
        run.rollout_ends(story.rl_step)
        story.trainers(forgets)
        story.end()
        assert (run.served.updates > before) is passes
        attempt = run.schedule.attempts[-1]
        assert (attempt.rl_step, attempt.better) == (story.rl_step, passes)
        # It is not sure that training pays now: the next rollout is to train in any case.
        run.schedule.attempts.clear()
    assert any("does not serve" in json.dumps(event) for event in story.logged()[-4:])
    run.training.publish(run.served)
    assert set(story.trainers(num_updates)) == {run.served.updates}


def test_without_a_held_out_prompt_the_next_rl_steps_decide(tmp_path):
    schedule = TrainingSchedule(ScheduleConfig(kind="gated"))
    assert not schedule.serves(Attempt(rl_step=0)), "what nobody knows does not replace an untrained drafter"
    schedule.pretrained = True
    better, worse = (Acceptance(chances=[chance], rows=[10]) for chance in (0.6, 0.5))

    def passes(rl_step, updates, candidate, served):
        rows = [{"updates": updates, "yield_s": 0.5}]
        events = RunEvents(tmp_path / "events.jsonl")
        run = SimpleNamespace(schedule=schedule, events=events, _rows={"spot_training": rows})
        report = TrainerReport(rows=[], failures=[], updates=9, candidate=candidate, served=served)
        # The other worker has no held-out prompt.
        found = DrafterRun._passes_gate(run, rl_step, [report, replace(report, candidate=UNKNOWN, served=UNKNOWN)])
        return found, [(attempt.rl_step, attempt.candidate) for attempt in schedule.attempts]

    assert passes(1, 9, UNKNOWN, UNKNOWN) == passes(2, 0, UNKNOWN, UNKNOWN) == (False, [(1, None)])
    assert passes(3, 0, better, worse) == (True, [(1, 1.6)])
    assert passes(4, 0, better, worse) == (False, [(1, 1.6)]), "it was judged, and not trained since"
    assert (tmp_path / "events.jsonl").read_text().count("those of the next RL step decide") == 2


def forget_served(trainer):
    zero(next(reversed(trainer._published.values()))[1])


def forget_trained(trainer):
    zero(trainer.training.head)


def zero(head):
    with torch.no_grad():
        for value in head.parameters():
            value.zero_()


def held(trainer):
    return [sequence.key for sequence in (*trainer.buffer.sequences(), *trainer._heldout)]


def test_a_dying_trainer_costs_a_checkpoint_its_data(story, tmp_path):
    had, saved, pid = story.trainers(held), tmp_path / "checkpoint", story.pids[2]
    assert had[2]
    story.trainers(partial(dies_writing, folder=saved), 2)
    story.run.state_dict(saved)
    found = {path.name for path in saved.iterdir()}
    assert found >= {"data-1.pt", "drafter.safetensors", "drafter_training.safetensors"}
    assert not [name for name in found if "data-2" in name]
    sequences, _ = read_data(saved / "data-1.pt")
    assert [sequence.key for sequence in sequences] == had[1]
    story.restarted(2, pid)


def dies_writing(trainer, folder):
    """With half a file on the disk."""

    def die(timeout_s):
        folder.mkdir(exist_ok=True)
        write_file(folder / ".data-2.pt.tltlab-x" / "data-2.pt", "half")
        os._exit(1)

    trainer._feed.settle = die


def test_a_run_that_goes_back_restores_its_drafter(story, tmp_path, monkeypatch):
    run, worker = story.run, story.workers[0]
    saved, then = tmp_path / "checkpoint", story.rl_step + 1
    state, weights = json.loads(json.dumps(run.state_dict(saved))), worker.given[-1][0]
    story.trains(1)
    story.end()
    assert run.served.updates > state["updates"]
    # Trainers that begin from a checkpoint are in the test above.
    with monkeypatch.context() as nobody:
        nobody.setattr(run, "_start_training", lambda: None)
        run.rewind(then, state, saved)
        assert same(worker.given[-1][0], weights)
        assert run.state_dict(saved) == state
        given = len(worker.given)
        run.rewind(then, state, saved)
        assert len(worker.given) == given, "engines are given what they have, and forget how it did"
    run.rewind(0, story.origin, None)
    story.rl_step = -1
    began_with, predicted = worker.given[-1]
    assert predicted == []
    assert same(began_with, load_head(story.folder / "drafter" / "initial").serving_weights())
    assert story.trainers(num_updates) == [0, 0, 0]
    assert story.trainers(held) == [[], [], []]
    story.trains(1)
    story.ends()
    assert run.served.updates > 0
    assert [row["drafter_age"] for row in story.rows["steps"]] == [0]
    assert {row["drafter_age"] for row in story.rows["acceptance"]} == {0}
    assert {row["rl_step"] for row in story.rows["spot_training"]} == {0}
    assert [row.rl_step for row in run.schedule.record] == [0]


def test_a_killed_trainer_continues_from_its_checkpoint(story):
    story.trains(2, more=20)
    before = story.updates(2)
    story.restarted(2, story.kill(2))
    assert (story.folder / "drafter" / "worker-2" / "state.safetensors").exists()
    again = story.updates(2)
    assert again >= before - 10, "at most two checkpoints' worth is lost, the last may have been under way"
    # What it had to learn from has died with it.
    story.teach(2)
    until(lambda: story.updates(2) > again)
    story.ends()
    assert story.heard("failed", "worker 2")
    assert story.run.served.updates > again
    assert [(e["rl_step"], e["worker"]) for e in story.logged() if "failed" in e["event"]][-1] == (story.rl_step, 2)


@pytest.fixture
def impatient(story):
    """The coordinator and the trainers wait for `HANGING_S` only."""
    training = story.run.training
    patient = training.config

    def set_config(**changes):
        coordinator = patient.coordinator.model_copy(update=changes)
        training.config = config = patient.model_copy(update={"coordinator": coordinator})
        training._state = replace(training._state, config=coordinator)
        story.trainers(lambda trainer: setattr(trainer, "config", config))

    yield set_config
    set_config()


@pytest.mark.parametrize(("how", "said"), [(signal.SIGKILL, "worker 2"), (signal.SIGSTOP, "3 s")])
def test_a_lost_member_stops_nobody(story, impatient, how, said):
    """It is killed in mid-exchange, or answers no call."""
    impatient(gone_after_s=3.0)
    story.trains(1, 2, more=5)
    story.restarted(2, story.kill(2, how))
    at = story.updates(1)
    until(lambda: story.updates(1) > at + 10)
    story.ends()
    assert story.heard(said)
    ended = [(row["worker"], row["ended"]) for row in story.rows["spot_training"]]
    assert ended.count((2, "killed")) == 1
    assert not [worker for worker, how in ended if how == "failed"]
    assert story.run.served.updates > at


def test_a_hanging_trainer_is_killed_at_the_bound(story, impatient):
    impatient(yield_timeout_s=HANGING_S)
    start, hanging = story.trains(1, 2, more=5), story.kill(2, signal.SIGSTOP)
    waited = story.end()
    assert HANGING_S - 0.5 < waited < HANGING_S + 100
    assert not alive(hanging)
    story.restarted(2, hanging)
    assert story.run.served.updates > start, "what the others have is used"
    stopped, lost = sorted(story.rows["spot_training"], key=lambda row: row["worker"])
    assert [(row["worker"], row["ended"]) for row in (stopped, lost)] == [(1, "stopped"), (2, "killed")]
    # A member that is at an update waits half as long for the other.
    assert stopped["detail"] is None or "hangs" in stopped["detail"]
    assert lost["t_start"] + lost["duration"] > HANGING_S
    assert (lost["term"], lost["updates"]) == (stopped["term"], 0)
    assert lost.keys() == stopped.keys()
    assert story.heard("10 s")


def test_a_hanging_idle_trainer_holds_nobody_up(story, monkeypatch):
    monkeypatch.setattr(trainer_processes, "ANSWER_S", 4.0)
    story.rollout()
    hanging = story.kill(0, signal.SIGSTOP)
    begin = time.monotonic()
    story.end()
    assert time.monotonic() - begin < 200
    story.restarted(0, hanging)
    until(lambda: not alive(hanging))
    assert story.heard("did not answer")


def test_a_disk_without_room_costs_checkpoints_only(story):
    def has_room(trainer, size):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

    story.trainers(partial(has_room, size=1024), 2)
    start = story.trains(2, more=12)
    story.ends()
    story.trainers(partial(has_room, size=resource.RLIM_INFINITY), 2)
    assert story.heard("checkpoint", "worker 2")
    assert story.run.served.updates > start + 12


def test_a_run_without_its_coordinator_trains_no_more(story, monkeypatch):
    story.trains(1)
    served = story.run.served.updates

    def fail(*args):
        raise ZeroDivisionError("a defect")

    with monkeypatch.context() as patch:
        patch.setattr(trainer_processes, "advance", fail)
        story.run.worker_idle(2)
        story.ends()
    assert story.heard("a defect")
    assert story.pids == {}
    story.rl_step += 1
    story.run.rollout_starts(story.rl_step)
    story.run.worker_idle(1)
    story.ends()
    assert story.run.served.updates == served
    story.run._start_training()


@pytest.mark.parametrize("nodes", ["hh", "ha", "aa", "hab"])
def test_members_on_other_machines_find_the_meeting_point(nodes):
    addresses = machine_addresses(list(nodes), "h", {"h": "10.0.0.1", "a": "10.0.0.2", "b": "10.0.0.3"})
    assert set(addresses) == {"h", *nodes}
    assert (addresses["h"] == "127.0.0.1") == (set(nodes) == {"h"})


def test_closing_leaves_nothing(story):
    place, pids = story.run._sockets, list(story.pids.values())
    assert place.exists()
    story.trains(1)
    story.run.save()
    story.close()
    until(lambda: not any(map(alive, pids)))
    assert not place.exists()
    assert not list(story.folder.glob("**/.*.tltlab-*"))
    assert (story.folder / "drafter" / "final").exists()


@pytest.fixture(scope="module")
def learning(recipe_file, tmp_path_factory):
    """A recipe whose policy always drafts with the learned drafter."""
    folder = tmp_path_factory.mktemp("learning")
    Policy(selector=FixedSpec(strategy=Strategy.chain("learned", 3))).write(folder / "policy.json")
    path = folder / "recipe.toml"
    path.write_text(
        recipe_file.read_text().replace("[rollout]", f'[rollout]\npolicy = "{folder / "policy.json"}"')
        + """
[drafter]
tokens_per_update = 256
schedule = {kind = "always"}
optim = {lr = 3e-3}
canary = {min_drafts = 30}
nice = 0
"""
    )
    return path


def fed(run):
    """Responses of this RL step that trainers have, once all that was sent has come."""

    def settled(trainer):
        assert trainer._feed.settle(300)
        return len(trainer._keys)

    return sum(asked_of(run.drafting, settled))


def draft_vectors(worker):
    """The vectors of the model that an engine drafts with: its matrices are packed for the CPU, and empty here."""
    runner = worker.engine.llm.llm_engine.model_executor.driver_worker.worker.model_runner
    return {name: p.detach().clone() for name, p in runner.drafter.model.named_parameters() if p.dim() == 1 and len(p)}


@pytest.mark.engine
def test_with_engines_only_a_collapsed_drafter_stops_serving(learning, recipe_file, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(recipe_file.parent))
    run = GrpoRun(load_recipe(learning, ["rollout.max_response_tokens=100"]), tmp_path / "run")
    drafting = run.drafting
    origin = drafting.state_dict(tmp_path)
    with run:
        run.evaluate(4)
        assert fed(run) == 0
        run.step()
        assert read_json(tmp_path / "run" / "repeats.json")["repeats"]
        # What is sent before a trainer is connected is dropped.
        until(lambda: fed(run) == 16 or not run.step())
        until(lambda: drafting.served.updates or not run.step())
        assert_engines_draft_with(drafting.training.answers("weights")[0], run)
        asked_of(drafting, boast)
        swaps = drafting.served.swaps
        until(lambda: drafting.served.swaps > swaps or not run.step())
        until(lambda: any("has collapsed" in n for r in run.reports for n in r.notes) or not run.step())
        run.save()
        monkeypatch.setattr(drafting, "_start_training", lambda: None)
        drafting.rewind(0, origin, None)
        assert_engines_draft_with(load_head(drafting.head).serving_weights(), run)
        reports = drafting._ask_engines("ask_engine", "drafter_report")
        assert [(report.updates, report.serves) for report in reports] == [(0, False)] * 2
    trace = tltlab.read(tmp_path / "run" / "trace")
    assert trace.steps["drafter_version"].iloc[-1] >= 2
    assert trace.table("spot_training") is not None
    events = json_lines(tmp_path / "run" / "events.jsonl")
    collapsed = next(event for event in events if event.get("verdict", {}).get("kind") == "collapsed")
    assert collapsed["verdict"]["predicted"] == [pytest.approx(0.9)] * 3


def assert_engines_draft_with(weights, run):
    for worker in run.pool.handles:
        vectors = ray.get(worker.__ray_call__.remote(draft_vectors))
        own = {name.removeprefix("model."): value for name, value in vectors.items()}
        assert own.keys() & weights.keys()
        assert all(torch.equal(own[name], weights[name]) for name in own.keys() & weights.keys())


def boast(trainer):
    """A prediction that no engine bears out, as when it drafts with a wrong embedding."""
    trainer.training.predict = lambda sequences: Acceptance(chances=[0.9] * 3, rows=[1] * 3)


@pytest.mark.parametrize(
    ("overrides", "facts"),
    [
        ("drafter.checkpoint=FOLDER/wide", ("hidden_size", "32")),
        ('drafter.loss={"kind":"eagle3"} drafter.checkpoint=FOLDER/eagle', ("eagle3",)),
        ("drafter.fallback=oracle", ("oracle", "model-free")),
        ('rollout.drafters.other={"kind":"learned","method":"eagle","model":"x"}', ()),
        ("drafter.endpoint=tcp://10.0.0.7:5555", ("drafter.endpoint",)),
    ],
)
def test_an_impossible_drafter_is_refused(learning, recipe_file, random_model, tmp_path, monkeypatch, overrides, facts):
    monkeypatch.syspath_prepend(str(recipe_file.parent))
    text.head(tmp_path / "model").save(tmp_path / "wide")
    new_head(random_model, "eagle", 0).save(tmp_path / "eagle")
    with refused(ConfigError, naming=facts):
        train(load_recipe(learning, overrides.replace("FOLDER", str(tmp_path)).split()), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_policy_without_the_drafter_is_reported(recipe_file, tmp_path):
    events = RunEvents(tmp_path / "events.jsonl")
    for name, serves in (("none", False), ("learned", True), ("mixed", True), ("suffix", False)):
        policy = Policy(selector=FixedSpec(strategy=NO_SPECULATION if name == "none" else Strategy.chain(name, 2)))
        recipe = load_recipe(recipe_file, ["drafter.name=learned", 'rollout.drafters.mixed={"kind": "hybrid"}'])
        run = drafter_of(recipe, policy, tmp_path, events)
        run.prepare()
        assert bool(events.take()) is not serves
        run.close()


@pytest.mark.engine
def test_an_interrupted_run_leaves_nothing_behind(learning, recipe_file):
    with tempfile.TemporaryDirectory(prefix="t") as temporary:
        places, out = Path(temporary) / "t", Path(temporary) / "run"
        places.mkdir()
        env = os.environ | {"PYTHONPATH": str(recipe_file.parent), "TMPDIR": str(places)}
        command = [sys.executable, "-m", "tltlab", "train", str(learning), "train.steps=1000", "eval.num_prompts=0"]
        process = subprocess.Popen(
            [*command, "rollout.repeat_every=0", "rollout.num_workers=1", "--out", str(out)],
            env=env,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            assert any(line.startswith("step 0:") for line in process.stderr), "the run stopped by itself"
            own = psutil.Process(process.pid).children(recursive=True)
            assert any("SpotTrainer" in title(child) for child in own)
            process.terminate()
            assert process.wait(300) == 130
        finally:
            process.kill()
            process.wait()
        until(lambda: not [child for child in own if alive(child.pid)])
        assert not list(places.glob("tltlab*"))
        assert not list(out.glob("**/.*.tltlab-*"))
        assert len(repair(out / "trace").rl_steps) >= 1
        events = json_lines(out / "events.jsonl")
        assert events[-1]["event"].startswith("the run stopped: KeyboardInterrupt")
