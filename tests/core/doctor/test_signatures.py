"""`tltlab doctor`'s checks as tables: a made-up run, the check that fires, and the facts that it finds."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from tests.refused import refused
from tests.traces_of_lengths import iterations, of_samples
from tltlab.coordination.canary import Verdict
from tltlab.doctor.evidence import NotChecked, RunEvidence
from tltlab.doctor.signatures import CHECKS, SIGNATURES, diagnose, examine
from tltlab.errors import TraceError
from tltlab.strategy import Strategy
from tltlab.traces.schema import Contents, Manifest

PLAIN_S, PER_REQUEST_S = 4e-3, 1e-4


@dataclass(kw_only=True, eq=False)
class Run:
    """A made-up recording of rollouts: every second RL step decodes plainly, the others follow `depth`.

    An iteration of b requests at depth d takes 4 ms + 0.1 ms * b + `verify_s` * b * d, some 3 % noise and `slowness`.
    """

    steps: int = 16
    workers: int = 2
    responses: int = 32
    depth: Callable[[int, int], int] = lambda batch, iteration: 4
    accept: Callable[[int], float] = lambda rl_step: 0.7
    verify_s: float = 5e-5
    drafter: str = "ngram"
    policy: str = "fixed"
    plain_steps: bool = True
    noise: float = 0.03
    slowness: Callable[[int], float] = lambda worker: 1.0
    prompt_tokens: int = 20
    stages: dict[str, float] = field(default_factory=lambda: {"train_s": 0.1})
    waiting: int = 0
    prefills: int = 1
    hardware: str = "2 CPU cores"
    seed: int = 0

    def trace(self, **tables):
        rng = np.random.default_rng(self.seed)
        rows = {n: [] for n in ("outcomes", "iterations", "steps")}
        for step in range(self.steps):
            speculates = not self.plain_steps or step % 2 == 1
            ends = [self._worker(rng, rows, step, worker, speculates) for worker in range(self.workers)]
            rows["steps"].append(
                {"rl_step": step, "t_start": 10.0 * step, "rollout_s": max(ends), "policy_version": step,
                 "policy": self.policy if speculates else "none", "drift_kl": 0.005, "drafter_version": step,
                 "drafter_age": 0, "drafter_updates": 10 * step, **self.stages}
            )  # fmt: skip
        outcomes, table, steps = (pd.DataFrame(own) for own in rows.values())
        trace = of_samples(cap=400, sample=0, prompt_tokens=self.prompt_tokens, t_submit=0.0, **outcomes)
        manifest = Manifest(kind="recorded", num_workers=self.workers, hardware=self.hardware, max_response_tokens=400)
        return trace.replace(manifest=manifest, **{"iterations": iterations(**table), "steps": steps} | tables)

    def _worker(self, rng, rows, step, worker, speculates):
        lengths = np.minimum(rng.geometric(1 / 25, self.responses) + 10, 400)
        left, context = lengths.copy(), np.full(self.responses, self.prompt_tokens)
        now, iteration = 0.0, 0
        while (alive := left > 0).any():
            batch = int(alive.sum())
            prefill = iteration < self.prefills
            depth = self.depth(batch, iteration) if speculates and not prefill else 0
            kept = np.minimum(rng.geometric(1 - self.accept(step), batch) - 1, depth) if depth else np.zeros(batch, int)
            tokens = np.minimum(kept + 1, left[alive])
            took = PLAIN_S + PER_REQUEST_S * batch + self.verify_s * batch * depth
            prefilled = batch * self.prompt_tokens if prefill else 0
            took = (took + 1e-5 * prefilled) * self.slowness(worker) * np.exp(rng.normal(0, self.noise))
            rows["iterations"].append(
                {"rl_step": step, "worker": worker, "iteration": iteration, "t_start": now, "duration": took,
                 "drafter": self.drafter if depth else "none", "draft_depth": depth, "next_draft_depth": depth,
                 "batch": batch, "num_waiting": self.waiting, "context_tokens": int(context[alive].sum()),
                 "prefill_tokens": prefilled, "num_generated": int(tokens.sum()), "draft_duration": 0.0,
                 "accepted_per_request": kept.tolist() if depth else None}
            )  # fmt: skip
            left[alive] -= tokens
            context[alive] += tokens
            now, iteration = now + took, iteration + 1
        for number, length in enumerate(lengths.tolist()):
            rows["outcomes"].append(
                {"rl_step": step, "prompt_id": f"w{worker}-{number}", "lengths": length, "worker": worker,
                 "t_finish": now}
            )  # fmt: skip
        return now


SOUND = Run()
SMALL = Run(steps=4, responses=8)
SMOKE = Path(__file__).parents[3] / "traces" / "h100-smoke"


@cache
def trace_of(run):
    """The trace of a run that several tests look at."""
    return run.trace()


def with_steps(run=SMALL, **columns):
    trace = trace_of(run)
    return trace.replace(steps=trace.table("steps").assign(**columns))


def in_graphs(kind, hardware="8 x H100"):
    """A run on GPUs whose iterations say what they ran in, by draft depth."""
    trace = trace_of(SOUND)
    table = trace.table("iterations")
    manifest = trace.manifest.model_copy(update={"hardware": hardware})
    return trace.replace(manifest=manifest, iterations=table.assign(graph=table["draft_depth"].map(kind)))


def waiting(*, waits=True, hardware="8 x H100"):
    """A run on GPUs whose engines wait for the host, or not; None: it does not say."""
    trace = trace_of(SOUND)
    table = trace.table("iterations").assign(draft_duration=0.0 if waits else None)
    if waits is None:
        table["next_draft_depth"] = None
    return trace.replace(manifest=trace.manifest.model_copy(update={"hardware": hardware}), iterations=table)


def trained(num, *, setup_s=0.2, train_s=3.0, updates=10):
    """Training periods of worker 0, one per RL step."""
    times = {"t_start": 0.0, "duration": setup_s + train_s, "setup_s": setup_s, "train_s": train_s}
    counts = {"members": 1, "updates": updates, "tokens": 10, "sequences": 1, "checkpoints": 0}
    others = {"wait_s": 0.0, "blocked_s": 0.0, "ended": "stopped"}
    rows = [{"rl_step": step, "worker": 0, "term": step, **times, **counts, **others} for step in range(num)]
    return trace_of(SMALL).replace(spot_training=pd.DataFrame(rows))


def noted(notes):
    trace = trace_of(SMALL)
    return trace.replace(manifest=trace.manifest.model_copy(update={"notes": notes}))


def happened(*texts, **event):
    return RunEvidence(events=tuple({"rl_step": 1, "event": text, **event} for text in texts))


def logged(*lines):
    return RunEvidence(logs={"run.log": "\n".join(("INFO all is well", *lines))})


def drafting(schedule, version, run=SMALL):
    recipe = {"drafter": {"schedule": {"kind": schedule}}}
    return RunEvidence(trace=with_steps(run, drafter_version=version), recipe=recipe)


def verdict(kind):
    return Verdict(kind=kind, why="this swap", predicted=(0.5,), measured=(0.1,), drafts=100)


SLOW = Run(verify_s=2e-3)
DEEP = Strategy.chain("ngram", 8)
OOM = "OutOfMemoryError: CUDA out of memory"
CAPTURE = "Capturing CUDA graphs (decode, FULL): 40%"

FIRES = [
    ("drafts-lose-time", SLOW, ("8 rollouts", "[RL steps 1, 3, 5, 7, 9, 11, 13, 15]")),
    ("acceptance-low", Run(accept=lambda s: 0.03, plain_steps=False), ("of ngram", "[RL steps 0-15]")),
    ("acceptance-low", Run(accept=lambda s: 0.03, drafter="learned", plain_steps=False), ("of learned",)),
    ("drafts-collapse", Run(accept=lambda s: 0.8 - 0.03 * s), ("problem", "kept far less", "15]")),
    ("drafts-collapse", Run(accept=lambda s: 0.7 if s < 9 else 0.0), ("kept no more", "to 1.00", "[RL steps 9, 11")),
    ("switches-often", Run(depth=lambda batch, i: 4 * (i % 2)), ("hint", "[RL steps 1, 3, 5, 7, 9, 11, 13, 15]")),
    ("rollout-not-bottleneck", Run(stages={"train_s": 9.0, "inference_s": 1.0}), ("train is",)),
    ("rollout-not-bottleneck", Run(stages={"reward_s": 9.0}), ("reward is",)),
    ("waiting-queue", Run(waiting=3), ("100%", "3 requests")),
    ("kv-preemption", Run(prefills=3), ("problem",)),
    ("slow-worker", Run(slowness=lambda worker: 1.3 if worker else 1.0), ("[worker 1]",)),
    ("long-starved", with_steps(length_bias=0.9, dropped_groups=3), ("90%", "3 groups")),
    ("drafter-never-published", drafting("always", version=0), ("4 RL steps", "0 updates")),
    ("waits-for-training", SMOKE, ("3.4 s", "47%", "[RL steps 0-1]")),
    ("no-graph", in_graphs(lambda depth: "full" if depth else "piecewise"), ("(100%) at plain decoding",)),
    ("no-graph", in_graphs(lambda depth: "piecewise"), ("hint",)),
    ("no-graph", in_graphs(lambda depth: "eager"), ("problem", "100% in none", "0% of decoding time")),
    ("waits-for-host", waiting(), ("hint", "% of their time", "H200")),
    ("interrupted", RunEvidence(unfinished=Path("a.recording")), ("problem", "a.recording")),
    ("interrupted", noted("on a spot machine; repaired: 3 of 4"), ("hint", '"repaired: 3 of 4"')),
    ("canary-collapsed", happened(f"worker 1: {verdict('collapsed').sentence}"), ("problem", "[RL steps 1]")),
    ("drafter-untrained", happened(f"worker 1: {verdict('untrained').sentence}"), ("hint",)),
    ("capture-out-of-memory", happened(f"an actor failed: {OOM} while capturing graphs"), ("[RL steps 1]",)),
    ("capture-out-of-memory", logged(CAPTURE, "  File x, line 1", OOM), (f'run.log says "{OOM}"',)),
    ("out-of-memory", logged(CAPTURE, f"{OOM} occurred when warming up sampler"), ("[None]",)),
    ("out-of-memory", happened(f"the engine lost 3 of 8 responses, the first with key []: {OOM}."), ()),
    ("no-room-for-kv-cache", logged("ValueError: No available memory for the cache blocks."), ()),
    ("engine-died", happened("the engine lost 3 of 8 responses, the first with key []: EngineDeadError"), ()),
    ("drafter-not-in-service", happened("policy none never drafts with 'learned': it is trained and not used"), ()),
    ("drafter-not-in-service", happened("the drafter of worker 1 does not go into service: 1.2 is no chance"), ()),
    ("run-stopped", logged("RuntimeError: operator torchvision::nms does not exist"), ()),
    ("run-stopped", logged("OSError: [Errno 28] No space left on device"), ()),
    ("run-stopped", happened("an actor died: The actor died. (1) it was killed by SIGKILL by OOM killer"), ()),
    ("run-stopped", happened(*["the run stopped: ValueError: x"] * 2), ('"the run stopped: ValueError: x" (and 1',)),
]

QUIET = [
    ("drafts-lose-time", SOUND),
    ("acceptance-low", Run(plain_steps=False)),
    ("drafts-collapse", Run(accept=lambda step: 0.5 + 0.02 * step)),
    ("switches-often", Run(depth=lambda batch, i: 4 if batch <= 8 else 0)),
    ("long-starved", with_steps(length_bias=1.0)),
    ("drafter-never-published", drafting("always", version=1)),
    ("waits-for-training", trained(8, setup_s=0.0, train_s=1e-3)),
    ("no-graph", in_graphs(lambda depth: "full")),
    ("waits-for-host", waiting(waits=False)),
    ("interrupted", trace_of(SMALL)),
    ("deaths", happened("no training: the schedule is never", "the run stopped: KeyboardInterrupt: ")),
    ("deaths", happened(verdict("fine").sentence)),
]

LACKING = [
    ("drafts-lose-time", Run(plain_steps=False), "with and without"),
    ("drafts-lose-time", RunEvidence(complaint="never finished"), "never finished"),
    ("drafts-lose-time", with_steps(rollout_s=None), "with and without"),
    ("rollout-not-bottleneck", with_steps(rollout_s=None, train_s=None), "stages"),
    ("switches-often", Run(policy="explore", depth=lambda batch, i: 4 * (i % 2), plain_steps=False), "explore"),
    ("waiting-queue", trace_of(SMALL).replace(iterations=None), "iterations"),
    ("slow-worker", Run(workers=1), "two workers"),
    ("drafter-never-published", drafting("never", version=0), "never"),
    ("waits-for-training", SMALL, "drafter"),
    ("no-graph", in_graphs(lambda depth: None), "graph"),
    ("no-graph", in_graphs(lambda depth: "eager", "2 CPU cores"), "GPU"),
    ("waits-for-host", waiting(waits=None), "draft_duration"),
    ("waits-for-host", waiting(hardware="2 CPU cores"), "CPU"),
    ("long-starved", SMALL, "length_bias"),
    ("deaths", SMALL, "events.jsonl"),
]
NEEDS_AN_INTERVAL = {
    "drafts-lose-time", "acceptance-low", "drafts-collapse", "slow-worker", "rollout-not-bottleneck",
}  # fmt: skip
CHECK_OF = {signature.code: "deaths" for signature in SIGNATURES} | {
    "kv-preemption": "waiting-queue",
}  # fmt: skip
"""Checks of findings that have another name."""


def look(name, run):
    """What the check `name` finds. NotChecked where it could not look."""
    [check] = [check for check in CHECKS if check.name == name]
    if not isinstance(run, RunEvidence):
        run = RunEvidence.of(trace_of(run) if isinstance(run, Run) else run)
    return list(check.test(run))


@pytest.mark.parametrize(("code", "run", "facts"), FIRES, ids=[case[0] for case in FIRES])
def test_a_check_finds_the_fault_and_its_facts(code, run, facts):
    name = CHECK_OF.get(code, code)
    [finding] = look(name, run)
    assert (finding.code or name) == code
    text = f"{finding.severity}: {finding.title}. {finding.evidence} {finding.advice} [{finding.where}]"
    assert [fact for fact in facts if fact not in text] == []
    assert all((finding.title, finding.evidence, finding.advice))
    json.dumps(asdict(finding), allow_nan=False)


@pytest.mark.parametrize(("name", "run"), QUIET, ids=[case[0] for case in QUIET])
def test_a_check_finds_nothing_in_a_sound_run(name, run):
    assert look(name, run) == []


@pytest.mark.parametrize(("name", "run", "lacks"), LACKING, ids=[case[0] for case in LACKING])
def test_a_check_names_the_evidence_that_it_lacks(name, run, lacks):
    with refused(NotChecked, naming=(lacks,)):
        look(name, run)


def test_every_run_check_has_a_case_that_fires():
    # See test_training_log.py and test_stages.py.
    from_logs = {
        "rollout-slower", "stage-grows", "several-turns", "learns"
    }  # fmt: skip
    fires = {code for code, _, _ in FIRES}
    assert CHECK_OF.keys() <= fires
    assert {CHECK_OF.get(code, code) for code in fires} == {check.name for check in CHECKS} - from_logs


@pytest.mark.parametrize("seed", range(4))
def test_a_sound_run_is_accused_of_nothing(seed):
    assert not diagnose(Run(seed=seed).trace()).findings


@pytest.mark.parametrize("seed", range(3))
def test_chance_alone_is_no_fault(seed):
    """Times that vary by 30 %, and acceptance that varies without a trend."""
    level = 0.6 + 0.1 * np.random.default_rng(seed).random(16)
    assert not diagnose(Run(seed=seed, noise=0.3, accept=lambda step: float(level[step])).trace()).findings


def test_a_failed_check_does_not_stop_the_others(monkeypatch):
    sound = diagnose(trace_of(SMALL))
    broken = [check._replace(test=lambda run: 1 / 0) if check.name == "slow-worker" else check for check in CHECKS]
    monkeypatch.setattr("tltlab.doctor.signatures.CHECKS", broken)
    found = diagnose(trace_of(SMALL))
    assert "ZeroDivisionError" in dict(found.not_checked)["slow-worker"]
    assert {"slow-worker", *(check.name for check in found.good)} >= {check.name for check in sound.good}


def test_a_run_that_died_is_still_checked(tmp_path):
    trace_of(SMALL).write(tmp_path / "trace")
    Contents(manifest=Manifest(kind="recorded"), parts={}, unfinished=True).write(tmp_path / "trace")
    event = {"rl_step": 1, "event": "the run stopped: RunError: an actor died: x"}
    (tmp_path / "events.jsonl").write_text(json.dumps(event) + '\n{"torn')
    (tmp_path / "run.log").write_text("EngineDeadError\n")
    (tmp_path / "run.json").write_text(json.dumps({"argv": [], "versions": {}, "recipe": {"seed": 3}}))
    evidence = RunEvidence.of(tmp_path)
    assert (evidence.setting("seed"), evidence.setting("train.lr")) == (3, None)
    told = examine(evidence)
    assert {finding.code for finding in told.findings} == {"interrupted", "run-stopped", "engine-died"}
    assert str(tmp_path / "trace") in dict(told.not_checked)["acceptance-low"]


def test_a_run_without_a_trace_is_a_run(tmp_path):
    with refused(TraceError):
        diagnose(tmp_path)
    (tmp_path / "events.jsonl").write_text(json.dumps({"event": "the run stopped: MemoryError: out of memory"}) + "\n")
    assert [finding.code for finding in diagnose(tmp_path).findings] == ["out-of-memory"]
    trace_of(SMALL).write(tmp_path / "trace")
    (tmp_path / "trace" / "outcomes.parquet").write_bytes(b"not parquet")
    with refused(TraceError):
        diagnose(tmp_path)


def test_every_check_passes_or_names_missing_evidence():
    assert not {row.name for row in diagnose(Run(steps=2).trace()).good} & NEEDS_AN_INTERVAL
    told = diagnose(trace_of(SMALL).replace(iterations=None, steps=None))
    assert told.findings == ()
    assert [row.name for row in told.good] == ["interrupted"]
    assert {row.name for row in told.good} | {name for name, _ in told.not_checked} == {row.name for row in CHECKS}


def test_undefined_figures_do_not_stop_other_checks():
    stages = ["rollout_s", "reward_s", "inference_s", "train_s", "sync_s"]
    steps = trace_of(SOUND).table("steps")
    steps.loc[0, stages] = 0.0
    told = diagnose(trace_of(SOUND).replace(steps=steps))
    assert "rollout-not-bottleneck" in dict(told.not_checked)
    assert "acceptance-low" in {row.name for row in told.good}


def test_a_failure_is_recovered_in_a_run_that_goes_to_its_end():
    over = {"recipe": {"train": {"steps": 2}}, "summary": {"grpo_steps": 2}}
    died = happened("the engine lost 3 of 8 responses, the first with key []: EngineDeadError")
    assert examine(died).headline().startswith("PROBLEM: An engine died")
    assert examine(replace(died, **over)).headline().startswith("recovered: An engine died")
    assert examine(replace(died, **over | {"summary": {"grpo_steps": 1}})).headline().startswith("PROBLEM")
    never = happened("policy none never drafts with 'learned': it is trained and not used")
    assert examine(replace(never, **over)).headline().startswith("PROBLEM")
