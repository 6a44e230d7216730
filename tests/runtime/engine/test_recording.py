"""What an engine that records by itself takes for an RL step, on an engine that is only played and by its own clock."""

import itertools
import os
from threading import Event

import pytest

from tltlab.doctor.evidence import RunEvidence
from tltlab.drafters.specs import NETWORK, TEXT, LearnedSpec, NgramSpec, SuffixSpec
from tltlab.policies.policy import Policy, load_policy
from tltlab.policies.specs import ExploreSpec
from tltlab.runtime.engine.control import Control
from tltlab.runtime.engine.drafter_pool import DrafterPool
from tltlab.runtime.engine.recording import LiveRecording
from tltlab.strategy import NO_SPECULATION
from tltlab.traces.storage import is_unfinished
from tltlab.traces.trace import read

from .asking import raising, run_program, scheduled


class Engine:
    """An engine whose requests, tokens and idle times a test scripts."""

    def __init__(self, path, drafters=None, **settings):
        self.path, self.now = path, 0.0
        self.control = Control(DrafterPool(drafters, 0), clock=lambda: self.now)
        self.recording = LiveRecording(path, self.control, model="m", hardware="h", engine="vllm 0", **settings)
        self._number = itertools.count()

    def arrives(self, prompt=0, key=None):
        name = str(next(self._number))
        self.recording.arrives(None if key is None else key[0])
        rl_step = self.control.tracker.rl_step
        self.control.add(name, key or (rl_step, f"p{prompt}", int(name), 0), [prompt], [], 99)
        return name

    def iterates(self, seconds):
        """One iteration: each request gets a token."""
        lives = self.control.live
        self.control.iteration_starts()
        what = scheduled(*lives)
        self.control.scheduled(what)
        self.now += seconds
        for live in lives.values():
            live.output.append(7)
        self.control.sampled([1] * len(lives))

    def leaves(self, *names, reason="stop", got=None):
        for name in names:
            self.control.finish(name, reason, got)
        if not self.control.live:
            self.control.idle()

    def serves(self, num=1, seconds=1.0):
        """Some requests, together, of one token each."""
        names = [self.arrives() for _ in range(num)]
        self.iterates(seconds)
        self.leaves(*names)

    def trace(self):
        self.recording.close()
        return read(self.path)


@pytest.fixture
def engine(tmp_path, monkeypatch):
    # What writes does so when a test says so.
    monkeypatch.setattr(LiveRecording, "idle_s", 1e6)
    return Engine(tmp_path / "trace")


def of_steps(trace):
    """How many responses each RL step has."""
    return trace.outcomes.groupby("rl_step").size().tolist()


def test_only_a_long_gap_ends_a_session(engine):
    # A client hands in its batch one by one, and the engine is faster.
    for num, seconds, idle_s in ((3, 0.01, 0.9), (1, 100.0, 9.0), (1, 1.0, 12.0), (2, 5.0, 1.2), (1, 1.0, 0.0)):
        engine.serves(num, seconds)
        engine.now += idle_s
    trace = engine.trace()
    assert of_steps(trace) == [5, 2, 1]
    assert "1 s and 10%" in trace.manifest.notes
    assert trace.steps["t_start"].tolist() == pytest.approx([0.0, 122.91, 129.11])
    assert trace.outcomes["t_submit"].tolist()[-3:] == [0.0] * 3
    assert trace.iterations.groupby("rl_step").size().tolist() == [3, 1, 1]


@pytest.mark.parametrize(
    ("rule", "sizes", "said"),
    [(None, [3, 3, 3, 6], "weight update"), ("update", [9, 6], "update"), ("call", [3] * 5, "generate"),
     ("gap", [6, 9], "1 s")],
)  # fmt: skip
def test_an_rl_step_ends_by_the_chosen_rule(rule, sizes, said, tmp_path):
    """By default with calls until there is a weight update."""
    engine = Engine(tmp_path / "trace", rl_step_ends=rule)
    for idle_s, is_updated in ((0.0, False), (0.0, False), (100.0, False), (0.0, True), (0.0, False)):
        engine.now += idle_s
        if is_updated:
            engine.recording.new_weights()
        engine.recording.called()
        # The requests of one call may end one by one.
        engine.serves(2)
        engine.arrives()
        engine.recording.called()
        engine.leaves(*engine.control.live)
    trace = engine.trace()
    assert of_steps(trace) == sizes
    assert said in trace.manifest.notes


def test_trace_states_what_drafters_of_other_names_are(tmp_path):
    specs = {"ngram": NgramSpec(), "own": SuffixSpec(window=4), "mtp": LearnedSpec(method="mtp")}
    engine = Engine(tmp_path / "trace", {**specs, "test": NgramSpec().make()})
    engine.serves()
    assert engine.trace().manifest.drafters == {"own": TEXT, "mtp": NETWORK, "test": TEXT}


def test_a_trace_states_which_policy_chose(engine):
    engine.serves()
    for policy in (load_policy("none"), Policy(selector=ExploreSpec(strategies=(NO_SPECULATION,)))):
        engine.now += 100.0
        engine.control.set_policy(policy, [0])
        engine.serves()
    trace = engine.trace()
    _, plain, explore = trace.steps["policy"]
    assert (plain, explore[:8], len(explore)) == ("none", "explore ", 16)
    assert RunEvidence(trace=trace).explored == [2]


def test_after_updates_only_updates_end_rl_steps(engine):
    # What comes before the first request is no update.
    engine.recording.new_weights()
    engine.serves(2)
    for _ in range(2):
        # Trainers do all this for one update.
        for method in ("start_weight_update", "update_weights", "update_weights", "finish_weight_update", None):
            engine.recording.new_weights(method)
        engine.serves(2)
        engine.now += 100.0
        engine.serves()
    # A drafter's own weights are none of these.
    for method in ("start_draft_weight_update", "update_weights", "finish_weight_update"):
        engine.recording.new_weights(method)
    engine.serves()
    trace = engine.trace()
    assert of_steps(trace) == [2, 3, 4]
    assert trace.workload["policy_version"].tolist() == trace.workload["rl_step"].tolist()
    assert "weight update" in trace.manifest.notes


def test_weights_that_change_meanwhile_show_in_tokens(engine):
    early = engine.arrives()
    for _ in range(2):
        engine.iterates(1.0)
    engine.recording.new_weights("update_weights_from_ipc")
    late = engine.arrives()
    engine.iterates(1.0)
    engine.recording.new_weights("update_weights_from_ipc")
    engine.iterates(1.0)
    engine.leaves(early, late)
    trace = engine.trace()
    rows = trace.outcomes.merge(trace.workload)
    found = rows[["rl_step", "policy_version", "response_tokens", "t_submit", "t_first_token", "t_finish"]]
    assert found.to_numpy().tolist() == [[0, 0, 4, 0.0, 1.0, 4.0], [1, 1, 2, 0.0, 1.0, 2.0]]
    assert [versions.tolist() for versions in trace.tokens["token_versions"]] == [[0, 0, 1, 2], [1, 2]]
    # No iteration is lost where a rollout begins while the engine works.
    counts = trace.iterations.groupby("rl_step").agg({"iteration": list, "num_generated": "sum", "t_start": "min"})
    assert counts.to_numpy().tolist() == [[[0, 1], 2, 0.0], [[0, 1], 4, 0.0]]


def test_keys_assign_requests_to_rl_steps(engine):
    for rl_step in (3, 7, 3, 7):
        name = engine.arrives(key=(rl_step, "q", int(engine.now), 0))
        engine.iterates(10.0)
        engine.leaves(name)
    trace = engine.trace()
    assert of_steps(trace) == [2, 2]
    rows = trace.outcomes[["rl_step", "t_submit", "t_finish"]]
    assert rows.to_numpy().tolist() == [[3, 0.0, 10.0], [3, 20.0, 30.0], [7, 0.0, 10.0], [7, 20.0, 30.0]]
    assert trace.iterations["rl_step"].tolist() == [3, 7, 7, 7]


def test_close_keeps_iterations_that_wait_to_be_written(engine):
    engine.serves(2)
    engine.arrives()
    engine.iterates(3.0)
    engine.now += 100.0
    trace = engine.trace()
    assert trace.iterations["duration"].tolist() == [1.0, 3.0]
    assert trace.manifest.without_iterations == ()


def test_an_rl_step_run_in_another_is_named(engine):
    early = engine.arrives(key=(3, "q", 0, 0))
    late = engine.arrives(key=(7, "q", 0, 0))
    engine.iterates(1.0)
    later = engine.arrives(key=(5, "q", 0, 0))
    engine.iterates(1.0)
    engine.leaves(early, late, later)
    trace = engine.trace()
    assert trace.iterations["rl_step"].tolist() == [7, 7]
    assert sorted(trace.manifest.without_iterations) == [3, 5]


def test_an_interrupted_recording_states_which_iterations_it_lost(engine):
    name = engine.arrives()
    engine.arrives()
    engine.iterates(1.0)
    engine.leaves(name)
    engine.recording._write()
    trace = read(engine.path)
    assert trace.iterations is None
    assert trace.manifest.without_iterations == (0,)
    assert "no iterations of rl_step 0" in trace.manifest.notes
    assert engine.trace().manifest.without_iterations == ()


def test_giving_up_hands_over_what_has_happened(engine):
    engine.serves()
    engine.arrives()
    engine.iterates(2.0)
    engine.recording.guard.fail(LookupError("of ours"))
    engine.recording._thread.join(300)
    assert read(engine.path).iterations["duration"].tolist() == [1.0, 2.0]


def test_undelivered_tokens_are_not_counted(engine):
    name, other = engine.arrives(), engine.arrives()
    for _ in range(5):
        engine.iterates(1.0)
    engine.leaves(name, got=3, reason="abort")
    engine.iterates(1.0)
    engine.leaves(other)
    trace = engine.trace()
    columns = ["response_tokens", "discarded_tokens", "finish_reason"]
    assert trace.outcomes[columns].to_numpy().tolist() == [[3, 2, "abort"], [6, 0, "stop"]]
    assert trace.iterations["num_generated"].tolist() == [2, 2, 2, 1, 1, 1]
    assert list(map(len, trace.tokens["token_ids"])) == [3, 6]


def test_tokens_become_durable_with_their_outcome(engine):
    """Not before the last iteration of their request has its output: each flush is a trace by itself."""
    engine.serves()
    name = engine.arrives()
    engine.control.iteration_starts()
    engine.control.scheduled(scheduled(name))
    engine.leaves(name, reason="abort")
    found = []
    for land in (lambda: None, lambda: engine.control.sampled([1])):
        land()
        engine.recording._write()
        trace = read(engine.path)
        found.append((len(trace.outcomes), len(trace.tokens)))
    assert found == [(1, 1), (2, 2)]
    assert trace.outcomes["discarded_tokens"].tolist() == [0, 1]


def test_durable_rows_are_readable_while_recording(engine):
    engine.serves(2)
    engine.arrives()
    engine.recording._write()
    trace = read(engine.path)
    assert of_steps(trace) == [2]
    assert "unfinished" in trace.manifest.notes
    assert "1 requests (rl_step 0)" in trace.manifest.notes
    assert engine.trace().outcomes["finish_reason"].tolist() == ["stop", "stop", "abort"]


class Disk:
    """It takes what it is given while it `answers`."""

    def __init__(self):
        self.asked, self.answers, self._fsync = Event(), Event(), os.fsync
        self.answers.set()

    def fsync(self, descriptor):
        self.asked.set()
        self.answers.wait(500)
        self._fsync(descriptor)


@pytest.fixture
def disk(monkeypatch):
    disk = Disk()
    monkeypatch.setattr(os, "fsync", disk.fsync)
    yield disk
    disk.answers.set()


def test_closing_does_not_wait_for_hanging_disks(engine, disk, monkeypatch, caplog):
    monkeypatch.setattr(LiveRecording, "close_s", 0.05)
    engine.serves(2)
    engine.arrives()
    disk.answers.clear()
    engine.recording.close()
    assert engine.recording.ended
    engine.recording.close()
    assert caplog.text.count("0.05 s") == 1
    assert is_unfinished(engine.path)
    disk.answers.set()
    engine.recording._thread.join(300)
    trace = read(engine.path)
    assert trace.outcomes["finish_reason"].tolist() == ["stop", "stop", "abort"]
    assert "unfinished" in trace.manifest.notes


def test_a_slow_trace_is_not_waited_for(engine, monkeypatch, caplog):
    goes_on, close = Event(), engine.recording._recorder.close
    monkeypatch.setattr(engine.recording._recorder, "close", lambda: (goes_on.wait(500), close()))
    monkeypatch.setattr(LiveRecording, "finish_s", 0.05)
    engine.serves(2)
    engine.recording.close()
    assert "0.05 s" in caplog.text
    goes_on.set()
    engine.recording._thread.join(300)
    assert of_steps(read(engine.path)) == [2]


def test_a_close_that_is_interrupted_can_be_replayed(engine, monkeypatch):
    engine.serves()
    engine.arrives()
    engine.iterates(1.0)
    with monkeypatch.context() as patch:
        patch.setattr(engine.recording._durable, "wait", raising(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            engine.recording.close()
    outcomes = engine.trace().outcomes[["finish_reason", "response_tokens"]]
    assert outcomes.to_numpy().tolist() == [["stop", 1], ["abort", 1]]


def test_the_newest_rows_are_dropped_first(engine, disk, monkeypatch, caplog):
    engine.serves(2)
    disk.answers.clear()
    disk.asked.clear()
    monkeypatch.setattr(LiveRecording, "flush_bytes", 0)
    engine.serves()
    assert disk.asked.wait(300)
    monkeypatch.setattr(LiveRecording, "most_bytes", 20_000)
    while not engine.recording.ended:
        engine.serves()
    assert len(caplog.records) == 1
    engine.serves()
    assert not engine.recording._queue
    disk.answers.set()
    engine.recording._thread.join(300)
    # The last one's was on its way as a whole or in part.
    assert of_steps(read(engine.path)) in ([2], [3])
    assert not engine.recording._recorder._rows


class Unspeakable(Exception):
    def __str__(self):
        raise RuntimeError("of a bug in a bug")


def test_giving_up_raises_nothing(engine, monkeypatch, caplog):
    engine.serves(2)
    monkeypatch.setattr(engine.control.tracker, "drain", raising(LookupError("the tracker too")))
    engine.recording.guard.fail(Unspeakable())
    assert "Unspeakable" in caplog.text
    engine.recording.close()
    assert of_steps(read(engine.path)) == [2]


FORGETS = """
import os, sys
from pathlib import Path
from tests.runtime.engine.test_recording import Engine

engine = Engine(Path(sys.argv[1]))
engine.serves(2)
if os.fork() == 0:
    engine.recording.close()
    sys.exit()
os.wait()
engine.serves(3)
"""


def test_a_process_that_never_closes_leaves_a_trace(tmp_path):
    """And one that was forked off it nothing."""
    _, said = run_program(FORGETS, tmp_path / "trace")
    assert said == ""
    assert [item.name for item in tmp_path.iterdir()] == ["trace"]
    assert of_steps(read(tmp_path / "trace")) == [5]
