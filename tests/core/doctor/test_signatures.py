"""`tltlab doctor`'s checks: each finds the fault that was put into a run, and says nothing of a sound one."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from tltlab.doctor.evidence import RunEvidence
from tltlab.doctor.finding import Finding, NotChecked
from tltlab.doctor.signatures import CHECKS, diagnose
from tltlab.errors import TraceError
from tltlab.policies.policy import Policy
from tltlab.policies.specs import BegMabSpec, Bucket
from tltlab.strategy import NO_SPECULATION, Strategy
from tltlab.traces.schema import Manifest
from tltlab.traces.trace import Trace

PLAIN_S, PER_REQUEST_S = 4e-3, 1e-4
columns_of = cache(asdict)


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
    kl: Callable[[int], float] = lambda rl_step: 0.005
    waiting: int = 0
    prefills: int = 1
    reward: Callable[[int, int], float] | None = None
    hardware: str = "2 CPU cores"
    seed: int = 0

    def trace(self, **tables: Any) -> Trace:
        rng = np.random.default_rng(self.seed)
        rows: dict[str, list[dict[str, Any]]] = {
            n: [] for n in ("workload", "outcomes", "iterations", "steps", "decisions")
        }
        for step in range(self.steps):
            speculates = not self.plain_steps or step % 2 == 1
            ends = [self._worker(rng, rows, step, worker, speculates) for worker in range(self.workers)]
            rows["steps"].append(
                {"rl_step": step, "t_start": 10.0 * step, "rollout_s": max(ends), "policy_version": step,
                 "policy": self.policy if speculates else "none", "drift_kl": self.kl(step), "drafter_version": step,
                 "drafter_age": 0, "drafter_updates": 10 * step, **self.stages}
            )  # fmt: skip
        frames = {name: pd.DataFrame(own) for name, own in rows.items() if own}
        manifest = Manifest(kind="recorded", num_workers=self.workers, hardware=self.hardware, max_response_tokens=400)
        return Trace.from_tables(manifest, {**frames, **tables})

    def _worker(self, rng: np.random.Generator, rows: Any, step: int, worker: int, speculates: bool) -> float:
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
            strategy = Strategy.chain(self.drafter, depth) if depth else NO_SPECULATION
            chosen = {"rl_step": step, "worker": worker, "iteration": iteration, **columns_of(strategy)}
            rows["iterations"].append(
                {**chosen, "t_start": now, "duration": took, "batch": batch, "num_waiting": self.waiting,
                 "context_tokens": int(context[alive].sum()), "prefill_tokens": prefilled, "num_drafted": batch * depth,
                 "num_accepted": int(kept.sum()), "num_generated": int(tokens.sum()), "draft_duration": 0.0,
                 "next_draft_depth": depth, "accepted_per_request": kept.tolist() if depth else None}
            )  # fmt: skip
            if self.reward is not None and speculates and not prefill:
                reward = self.reward(depth, batch) * float(np.exp(rng.normal(0, 0.1)))
                rows["decisions"].append({**chosen, "bucket": 0, "propensity": 0.5, "reward": reward})
            left[alive] -= tokens
            context[alive] += tokens
            now, iteration = now + took, iteration + 1
        for number, length in enumerate(lengths.tolist()):
            key = {"rl_step": step, "prompt_id": f"w{worker}-{number}", "sample": 0, "turn": 0}
            asked = {
                "epoch": 0,
                "prompt_tokens": self.prompt_tokens,
                "max_response_tokens": 400,
                "policy_version": step,
            }
            rows["workload"].append(key | asked)
            made = {"response_tokens": length, "finish_reason": "stop", "worker": worker}
            rows["outcomes"].append(key | made | {"t_submit": 0.0, "t_finish": now})
        return now


SOUND = Run()


@cache
def recording(run: Run) -> Trace:
    """The trace of a run that several tests look at."""
    return run.trace()


def look(name: str, run: Any) -> list[Finding]:
    """What the check `name` finds. NotChecked where it could not look."""
    evidence = run if isinstance(run, RunEvidence) else RunEvidence.of(run)
    return list(next(check for check in CHECKS if check.name == name).look(evidence))


def found_by(name: str, run: Any) -> list[str]:
    return [finding.code for finding in look(name, run)]


FAULTS: dict[str, tuple[Run, Run]] = {
    "slower-than-plain": (Run(verify_s=2e-3), SOUND),
    "acceptance-low": (Run(accept=lambda step: 0.03, plain_steps=False), Run(plain_steps=False)),
    "acceptance-falling": (Run(accept=lambda step: 0.8 - 0.03 * step), Run(accept=lambda step: 0.5 + 0.02 * step)),
    "target-too-fast": (
        Run(drafter="learned", plain_steps=False, kl=lambda s: 0.03 * (s % 2), accept=lambda s: 0.5 + 0.2 * (s % 2)),
        Run(drafter="learned", plain_steps=False, kl=lambda s: 0.03 * (s % 2)),
    ),
    "large-batches": (Run(verify_s=4e-4), Run(verify_s=4e-4, depth=lambda batch, i: 4 if batch <= 4 else 0)),
    "switches-often": (Run(depth=lambda batch, i: 4 * (i % 2)), Run(depth=lambda batch, i: 4 if batch <= 8 else 0)),
    "explores-too-much": (
        Run(policy="ucb1", depth=lambda b, i: 4 * (i % 4 == 0), reward=lambda d, b: 100.0 * b * (1 + d / 4)),
        Run(policy="ucb1", depth=lambda b, i: 4 * (i % 10 > 0), reward=lambda d, b: 100.0 * b * (1 + d / 4)),
    ),
    "rollout-not-bottleneck": (Run(stages={"train_s": 9.0, "inference_s": 1.0}), SOUND),
    "waiting-queue": (Run(waiting=3), SOUND),
    "slow-worker": (Run(slowness=lambda worker: 1.3 if worker else 1.0), SOUND),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_check_finds_its_fault_and_nothing_in_a_sound_run(name: str) -> None:
    """And says what to do, with figures from the run."""
    faulty, sound = FAULTS[name]
    (finding,) = look(name, recording(faulty))
    assert finding.code == name
    assert finding.title[0].isupper()
    assert finding.evidence.endswith(".")
    assert any(letter.isdigit() for letter in finding.evidence)
    assert finding.advice
    json.dumps(asdict(finding), allow_nan=False)
    assert found_by(name, recording(sound)) == []


def test_training_on_shorter_responses_than_were_generated_is_told() -> None:
    trace = _small()
    assert trace.steps is not None
    for bias, found in ((0.9, ["long-starved"]), (1.0, [])):
        stale = trace.steps.assign(staleness=0.5, off_policy_share=0.4, dropped_groups=3, length_bias=bias)
        assert found_by("long-starved", trace.replace(steps=stale)) == found


@pytest.mark.parametrize("seed", range(4))
def test_a_sound_run_is_accused_of_nothing(seed: int) -> None:
    assert not diagnose(Run(seed=seed).trace() if seed else recording(SOUND)).findings


@pytest.mark.parametrize("seed", range(3))
def test_chance_alone_is_no_fault(seed: int) -> None:
    """Times that vary by 30 %, and acceptance that varies without a trend."""
    rng = np.random.default_rng(seed)
    level = 0.6 + 0.1 * rng.random(16)
    run = Run(seed=seed, noise=0.3, accept=lambda step: float(level[step]))
    assert not diagnose(run.trace()).findings


def test_without_plain_iterations_nothing_is_said_of_the_time_unless_costs_that_fit_are_given(tmp_path: Path) -> None:
    trace = Run(plain_steps=False, verify_s=2e-3).trace()
    with pytest.raises(NotChecked, match="policy none"):
        found_by("slower-than-plain", trace)
    costs = {"kind": "linear", "base_s": PLAIN_S, "per_request_s": PER_REQUEST_S - 2e-3, "per_token_s": 2e-3}
    costs |= {"per_request_s": 0.0, "per_context_s": 0.0, "sd_base_s": 0.0, "sd_idle_s": 0.0, "draft_level_s": 0.0,
              "draft_level_per_request_s": 5e-4}  # fmt: skip
    right, wrong = tmp_path / "right.json", tmp_path / "wrong.json"
    # Here drafting is what costs: 0.1 ms per request, and 2 ms per drafted token.
    right.write_text(json.dumps(costs | {"per_token_s": PER_REQUEST_S, "draft_level_per_request_s": 1.9e-3}))
    wrong.write_text(json.dumps(costs | {"base_s": 0.4}))
    assert found_by("slower-than-plain", RunEvidence.of(trace, right)) == ["slower-than-plain"]
    with pytest.raises(NotChecked, match="not this run's"):
        found_by("slower-than-plain", RunEvidence.of(trace, wrong))


def test_where_speculation_gains_nowhere_no_batch_is_too_large_for_it() -> None:
    told = dict(diagnose(recording(FAULTS["slower-than-plain"][0])).not_checked)
    assert "no batch size" in told["large-batches"]


def test_exploring_on_purpose_is_no_fault() -> None:
    told = diagnose(Run(policy="explore", depth=lambda batch, i: 4 * (i % 2), plain_steps=False).trace())
    assert not told.findings
    assert "explore" in dict(told.not_checked)["switches-often"]


def test_requests_thrown_out_of_the_cache_are_prefilled_again() -> None:
    assert found_by("waiting-queue", Run(prefills=3).trace()) == ["kv-preemption"]


def test_a_bandit_with_one_arm_per_bucket_is_told_by_its_settings_and_by_its_decisions(tmp_path: Path) -> None:
    def run_under(*buckets: Bucket) -> Path:
        folder = tmp_path / str(len(buckets[0].strategies))
        Run(steps=4, responses=8, policy="beg-mab", reward=lambda d, b: 1.0).trace().write(folder / "trace")
        policy = Policy(selector=BegMabSpec(buckets=buckets)).model_dump(mode="json")
        entries = [{"rl_step": 0, "name": "beg-mab", "policy": policy}]
        (folder / "policies.json").write_text(json.dumps({"seed": 0, "policies": entries}))
        return folder

    deep, shallow = Strategy.chain("ngram", 8), Strategy.chain("ngram", 2)
    one = [Bucket(min_batch=1, strategies=(deep,)), Bucket(min_batch=5, strategies=(shallow,))]
    two = [Bucket(min_batch=1, strategies=(deep, shallow)), Bucket(min_batch=5, strategies=(shallow,))]
    assert found_by("one-arm-per-bucket", run_under(*one)) == ["one-arm-per-bucket"]
    assert found_by("one-arm-per-bucket", run_under(*two)) == []
    only_decisions = Run(steps=6, policy="beg-mab-mine", plain_steps=False, reward=lambda d, b: 1.0).trace()
    assert found_by("one-arm-per-bucket", only_decisions) == ["one-arm-per-bucket"]


def test_a_bandit_of_unknown_settings_is_judged_by_its_rewards() -> None:
    faulty, _ = FAULTS["explores-too-much"]
    unknown = replace(faulty, policy="mine.py:Bandit").trace()
    assert found_by("explores-too-much", unknown) == ["explores-too-much"]


def test_every_bandit_that_offends_is_told_not_the_last_one_alone(tmp_path: Path) -> None:
    faulty, _ = FAULTS["explores-too-much"]
    trace = replace(faulty, steps=32, plain_steps=False).trace()
    names = ["ucb1-first" if s % 2 else "ucb1-second" for s in range(32)]
    both = trace.replace(steps=trace.steps.assign(policy=names))
    titles = [f.title for f in look("explores-too-much", both)]
    assert titles == [f"Bandit ucb1-{name} explores more than it finds" for name in ("first", "second")]

    bucket = Bucket(min_batch=1, strategies=(Strategy.chain("ngram", 8),))
    policy = Policy(selector=BegMabSpec(buckets=(bucket,))).model_dump(mode="json")
    entries = [{"rl_step": s, "name": name, "policy": policy} for s, name in ((0, "beg-mab-a"), (2, "beg-mab-b"))]
    trace = Run(steps=4, responses=8, reward=lambda d, b: 1.0).trace()
    trace.replace(steps=trace.steps.assign(policy=["beg-mab-a"] * 2 + ["beg-mab-b"] * 2)).write(tmp_path / "trace")
    (tmp_path / "policies.json").write_text(json.dumps({"policies": entries}))
    assert [f.where for f in look("one-arm-per-bucket", tmp_path)] == ["RL steps 0-1", "RL steps 2-3"]


def spot(num: int, *, setup_s: float = 0.2, train_s: float = 3.0, updates: int = 10) -> Any:
    """Training periods of worker 0, one per RL step."""
    return pd.DataFrame(
        [
            {"rl_step": step, "worker": 0, "term": step, "t_start": 0.0, "duration": setup_s + train_s, "members": 1,
             "setup_s": setup_s, "train_s": train_s, "wait_s": 0.0, "blocked_s": 0.0, "updates": updates, "tokens": 10,
             "sequences": 1, "checkpoints": 0, "ended": "stopped"}
            for step in range(num)
        ]
    )  # fmt: skip


def test_idle_time_in_pieces_is_told() -> None:
    whole, pieces = (
        _small().replace(spot_training=periods) for periods in (spot(8), spot(8, setup_s=2.0, train_s=0.1, updates=0))
    )
    assert found_by("idle-fragmented", whole) == []
    assert found_by("idle-fragmented", pieces) == ["idle-fragmented"]
    nothing = spot(8, setup_s=0.0, train_s=0.0, updates=0)
    with pytest.raises(NotChecked, match="took no time"):
        found_by("idle-fragmented", _small().replace(spot_training=nothing))


def test_a_check_that_fails_is_a_finding_of_its_own_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(evidence: RunEvidence) -> list[Finding]:
        raise ZeroDivisionError("float division by zero")

    sound = diagnose(_small())
    broken = tuple(replace(check, find=fails) if check.name == "waiting-queue" else check for check in CHECKS)
    monkeypatch.setattr("tltlab.doctor.signatures.CHECKS", broken)
    told = diagnose(_small())
    (finding,) = told.findings
    assert (finding.code, finding.severity) == ("could-not-look", "hint")
    assert finding.title == "could not look: waiting-queue"
    assert finding.evidence == "ZeroDivisionError: float division by zero."
    assert {check.name for check in told.good} == {check.name for check in sound.good} - {"waiting-queue"}
    assert told.not_checked == sound.not_checked


@cache
def _small() -> Trace:
    return Run(steps=4, responses=8).trace()


def recorded(
    folder: Path, *, trace: Trace | None = None, events: list[dict[str, Any]] | None = None, recipe: Any = None
) -> Path:
    """A RUN folder with events and what run.json resolved, as one that died before its trace was there."""
    folder.mkdir(exist_ok=True)
    if trace is not None:
        trace.write(folder / "trace")
    if events is not None:
        (folder / "events.jsonl").write_text("".join(json.dumps({"rl_step": 1, **e}) + "\n" for e in events) + '{"torn')
    (folder / "run.json").write_text(json.dumps({"argv": [], "versions": {}, "recipe": recipe or {}}))
    return folder


DEATHS = [
    ("capture-out-of-memory", "an actor failed: OutOfMemoryError: CUDA out of memory while capturing graphs"),
    ("out-of-memory", "the engine lost 3 of 8 responses, the first with key []: OutOfMemoryError: CUDA out of memory."),
    ("no-room-for-kv-cache", "ValueError: No available memory for the cache blocks. Try increasing it."),
    ("engine-died", "the engine lost 3 of 8 responses, the first with key []: EngineDeadError"),
    ("drafter-not-in-service", "policy none never drafts with 'learned': it is trained and serves nobody"),
    ("drafter-not-in-service", "the drafter that worker 1 trained does not go into service: 1.2 is no chance"),
    ("run-stopped", "RuntimeError: operator torchvision::nms does not exist"),
    ("run-stopped", "OSError: [Errno 28] No space left on device"),
    ("run-stopped", "zmq.error.ZMQError: Address already in use"),
    ("run-stopped", "an actor died: The actor died. (1) it was killed by SIGKILL by OOM killer (2) ray stop"),
    ("run-stopped", "the run stopped: ValueError: no such column"),
]


@pytest.mark.parametrize(("code", "sentence"), DEATHS)
def test_what_a_run_died_of_is_told_from_its_events_and_logs(code: str, sentence: str, tmp_path: Path) -> None:
    run = recorded(tmp_path, events=[{"event": "training: the schedule says always"}, {"event": sentence}])
    (finding,) = look("deaths", run)
    assert finding.code == code
    assert finding.severity == "problem"
    assert sentence[:40] in finding.evidence
    assert finding.where == "RL steps 1"
    log = recorded(tmp_path / "log")
    (log / "run.log").write_text(f"INFO all is well\n{sentence}\n")
    assert found_by("deaths", log) == [code]


def test_a_run_in_which_nothing_died_has_no_death_and_an_interruption_by_hand_is_none(tmp_path: Path) -> None:
    events = [{"event": "no training: the schedule says never"}, {"event": "the run stopped: KeyboardInterrupt: "}]
    assert found_by("deaths", recorded(tmp_path, events=events)) == []


def test_memory_that_ran_out_some_lines_after_capture_began_ran_out_in_capture(tmp_path: Path) -> None:
    run = recorded(tmp_path)
    (run / "run.log").write_text("Capturing CUDA graphs (decode, FULL): 40%\n  File x, line 1\nCUDA out of memory.\n")
    assert found_by("deaths", run) == ["capture-out-of-memory"]
    late = (
        "Capturing CUDA graphs: 100%\nCUDA out of memory occurred when warming up sampler with 1024 dummy requests.\n"
    )
    (run / "run.log").write_text(late)
    assert found_by("deaths", run) == ["out-of-memory"]


def test_the_canarys_verdicts_become_findings(tmp_path: Path) -> None:
    def run(kind: str) -> Path:
        verdict = {"event": "worker 0: the learned drafter ...", "verdict": {"kind": kind}}
        return recorded(tmp_path / kind, events=[verdict])

    assert found_by("canary", run("fine")) == []
    assert found_by("canary", run("collapsed")) == ["canary-collapsed"]
    assert found_by("canary", run("untrained")) == ["drafter-untrained"]


def test_a_drafter_that_never_goes_into_service_is_told(tmp_path: Path) -> None:
    served = recorded(tmp_path, trace=_small(), recipe={"drafter": {"schedule": {"kind": "always"}}})
    assert found_by("drafter-never-published", served) == []
    _small().replace(steps=_small().steps.assign(drafter_version=0)).write(served / "trace")
    assert found_by("drafter-never-published", served) == ["drafter-never-published"]


def in_graphs(kind: Callable[[int], str | None], hardware: str = "8 x H100") -> Trace:
    """A run on GPUs whose iterations say what they ran in, by draft depth."""
    trace = recording(SOUND)
    manifest = trace.manifest.model_copy(update={"hardware": hardware})
    iterations = trace.table("iterations")
    return trace.replace(manifest=manifest, iterations=iterations.assign(graph=iterations["draft_depth"].map(kind)))


def test_decoding_without_full_graphs_is_told_on_a_gpu_with_the_depth_it_is_most_of() -> None:
    [finding] = look("no-graph", in_graphs(lambda depth: "full" if depth else "piecewise"))
    assert finding.severity == "hint"
    assert "(100%) at plain decoding" in finding.evidence
    [finding] = look("no-graph", in_graphs(lambda depth: "eager"))
    assert finding.severity == "problem"
    assert "100% in none" in finding.evidence


def test_full_graphs_are_no_finding_and_unrecorded_ones_are_not_judged() -> None:
    assert look("no-graph", in_graphs(lambda depth: "full")) == []
    for trace, why in (
        (in_graphs(lambda depth: None), "does not say what iterations ran in"),
        (in_graphs(lambda depth: "eager", "2 CPU cores"), "exist on GPUs only"),
    ):
        with pytest.raises(NotChecked, match=why):
            look("no-graph", trace)


def test_an_interrupted_recording_is_told_and_what_can_be_is_still_checked(tmp_path: Path) -> None:
    run = recorded(tmp_path, trace=_small(), events=[{"event": "the run stopped: RunError: an actor died: x"}])
    (run / "trace").rename(run / "trace.recording")
    told = diagnose(run)
    assert {f.code for f in told.findings} == {"interrupted", "run-stopped"}
    assert "never finished" in dict(told.not_checked)["slower-than-plain"]
    noted = _small().manifest.model_copy(update={"notes": "repaired: the recording was interrupted"})
    assert found_by("interrupted", _small().replace(manifest=noted)) == ["interrupted"]
    assert found_by("interrupted", _small()) == []


def test_a_trace_of_lengths_alone_says_what_could_not_be_checked() -> None:
    told = diagnose(_small().replace(iterations=None, steps=None))
    assert told.findings == ()
    missing = dict(told.not_checked)
    assert "iterations" in missing["slower-than-plain"]
    assert {check.name for check in told.good} | set(missing) == {check.name for check in CHECKS}


def test_two_rl_steps_are_too_few_to_call_anything_good_that_needs_an_interval() -> None:
    told = diagnose(Run(steps=2).trace())
    assert not {check.name for check in told.good} & {
        "slower-than-plain", "acceptance-low", "acceptance-falling", "target-too-fast", "large-batches",
        "explores-too-much", "slow-worker", "rollout-not-bottleneck",
    }  # fmt: skip


def test_a_folder_without_a_run_and_a_damaged_trace_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError):
        diagnose(tmp_path)
    run = recorded(tmp_path / "run", trace=_small())
    (run / "trace" / "outcomes.parquet").write_bytes(b"not parquet")
    with pytest.raises(TraceError):
        diagnose(run)


def test_a_run_that_died_before_its_first_rl_step_is_still_a_run(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text(json.dumps({"event": "the run stopped: MemoryError: out of memory"}) + "\n")
    assert [f.code for f in diagnose(tmp_path).findings] == ["out-of-memory"]
