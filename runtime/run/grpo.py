"""A GRPO run on Ray and vLLM, read from top to bottom: roll out, reward, log-probs, train, sync, record, checkpoint."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from types import FrameType, TracebackType
from typing import Any, TypeVar

import numpy as np
import ray

from tltlab.console import sigterm_handler
from tltlab.drafters.specs import LearnedSpec
from tltlab.errors import ConfigError, RunError, TltlabError, refuse
from tltlab.files import lock, make_folder, new_folder, read_json, sealed, write_json
from tltlab.planning.beliefs import LengthBelief
from tltlab.policies.policy import Policy, PolicySource, load_policy
from tltlab.records import Fields, Json
from tltlab.runtime.data.prompts import Prompt
from tltlab.runtime.drafter.offline.data import load_tokenizer
from tltlab.runtime.drafter.run import Drafting, drafter_of
from tltlab.runtime.engine.environment import run_json
from tltlab.runtime.engine.generation import GenerationRequest, Rollout
from tltlab.runtime.ray.actors import actor_env
from tltlab.runtime.ray.liveness import StoppedProcesses
from tltlab.runtime.ray.start import ray_running
from tltlab.runtime.recipe.checks import policy_on_engines
from tltlab.runtime.recipe.engines import drafters_of, engine_build
from tltlab.runtime.recipe.gpus import weight_transport
from tltlab.runtime.recipe.recipe import Recipe, located
from tltlab.runtime.recipe.rules import exact_replay, notes_of
from tltlab.runtime.recipe.user_code import code_of, keep_code
from tltlab.runtime.rollout.collected import RolloutTools, Trajectory, ages, samples_of
from tltlab.runtime.rollout.pool import WorkerPool
from tltlab.runtime.rollout.reward_pool import RewardPool
from tltlab.runtime.rollout.rewards import Scored
from tltlab.runtime.trainer.group import TrainerDied, TrainerGroup
from tltlab.runtime.trainer.samples import OwnAdvantage, check, useful_groups
from tltlab.stats import finite
from tltlab.traces.recorder import Recorder
from tltlab.traces.trace import Trace, read

from .checkpoints import RunCheckpoints, step_of
from .data import RolledOut, RolloutsAhead, RunData
from .inputs import check_inputs
from .logging import RunLog
from .memory import ProcessMemory
from .placement import GpuPlacement
from .rows import Shares, StepReport, heldout_figures, repeat_row, run_manifest, step_metrics, step_rows
from .state import RunEvents, RunState, read_state, write_state

Done = TypeVar("Done")

BEST = "heldout.json"
"""Record in the folder of the best policy: the RL steps before it and its held-out reward."""

STOP_S = 60.0
"""Most seconds that the RL step under way may take after Ctrl-C; then the run ends at once."""


class RunActors:
    """Starts Ray where there is none, the rollout workers, the trainers and the drafter's trainers; a context manager.

    Colocated, engines sleep while trainers have the devices, and with `train.offload` trainers keep their tensors on
    the host while engines have them. `engines_turn` and `trainers_turn` hand the devices over; they do nothing where
    both have their own devices.
    """

    def __init__(self, recipe: Recipe, policy: Policy, drafting: Drafting, events: RunEvents):
        self.recipe = recipe
        self._policy, self._drafting, self._events = policy, drafting, events
        self._colocated = recipe.cluster.placement == "colocated"
        self._transport = weight_transport(recipe)
        self._engines_awake = True
        self._given_up = False
        # As in graphs.json.
        self.graphs: Json = {}

    def __enter__(self) -> RunActors:
        with ExitStack() as stack:
            self._start(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def _start(self, stack: ExitStack) -> None:
        recipe, drafting = self.recipe, self._drafting
        stack.enter_context(ray_running(recipe.cluster))
        place = stack.enter_context(GpuPlacement(recipe))
        stack.callback(drafting.close)
        drafting.prepare()
        build = engine_build(recipe, self._policy, drafters_of(recipe, self._policy, drafting.head))
        self._learned = any(isinstance(spec, LearnedSpec) for spec in build.drafters.values())
        self.pool = WorkerPool(
            recipe, build, drafting.feed, place.worker_options, events=self._events, on_restart=drafting.rejoin
        )
        env = actor_env({"OMP_NUM_THREADS": str(recipe.train.threads)}, recipe.cluster.host)
        self.trainers = TrainerGroup(recipe, place.trainer_options, env)
        stack.callback(self.trainers.close)
        stack.callback(self.pool.close)
        if recipe.cluster.num_nodes == 1:
            patience_s = recipe.faults.stopped_timeout_s
            stack.enter_context(StoppedProcesses(self._processes, self._events.note, patience_s))
        if self._colocated:
            # An engine measures free memory when it starts, so no other actor may take any then.
            self._start_engines()
            self.pool.sleep()
            self._engines_awake = False
            self._with_trainers()
        else:
            with ThreadPoolExecutor(1) as executor:
                trainers = executor.submit(self._with_trainers)
                try:
                    self._start_engines()
                except BaseException:
                    # A run without engines does not wait for trainers.
                    self._given_up = True
                    self.trainers.close()
                    raise
                trainers.result()
        self._with_trainers(self._start_drafting)

    def _processes(self) -> dict[str, int]:
        """Return the process ids of engines and trainer ranks that have started, by name."""
        kinds = {"rollout worker": self.pool.pids, "trainer rank": self.trainers.pids}
        return {f"{kind} {n}": pid for kind, pids in kinds.items() for n, pid in enumerate(list(pids))}

    def _start_engines(self) -> None:
        self.pool.start()
        build, captured = self.pool.build, self.pool.ask("ask_engine", "captured_graphs")
        self.graphs = build.as_json(captured)
        for sentence in build.sentences(captured[0]):
            self._events.note(sentence)

    def _start_drafting(self) -> None:
        # Sleeping engines neither answer nor load draft weights.
        self.engines_turn()
        self._drafting.start(self.pool.handles, self.trainers.frozen, self.pool.ask)

    def _with_trainers(self, then: Callable[[], None] = lambda: None) -> None:
        """Start the trainers where none are and do `then`; both again after a failure, `faults.max_restarts` times."""
        for restarts_left in reversed(range(self.recipe.faults.max_restarts + 1)):
            try:
                if not self.trainers.handles:
                    self.restart_trainers()
                then()
                return
            except TrainerDied as error:
                if not restarts_left or self._given_up:
                    raise
                self._events.note(f"{error}; trainers are restarted")

    def engines_turn(self) -> None:
        """Hand the devices to the engines."""
        if self._colocated and not self._engines_awake:
            self.trainers.release()
            self.pool.wake_up()
            self._engines_awake = True

    def trainers_turn(self, *, weights_follow: bool = False) -> None:
        """Hand the devices to the trainers. `weights_follow`: `push_weights` comes before the next call of engines.

        Then engines need not keep their own weights. A learned drafter's, and the base of a policy with adapters, lie
        next to them and would not be restored.
        """
        if self._colocated and self._engines_awake:
            self.pool.sleep(2 if weights_follow and not self._learned and self.recipe.train.lora is None else 1)
            # Before calls to trainers, which may fail: engines must not be put to sleep twice.
            self._engines_awake = False
            self.trainers.onload()

    def push_weights(self, version: int, before: Callable[[], None] = lambda: None) -> None:
        """Send the policy's weights to the engines as `version`, after `before`, which may call engines."""
        in_place = self._colocated and self._transport == "ipc" and self.pool.all_alive
        if in_place:
            # Engines and trainers hold the devices: two models fit without caches and optimizer steps.
            self.trainers_turn()
            self.trainers.release(keep=True)
            self.pool.wake_up(["weights"])
        else:
            self.engines_turn()
        before()
        transport = "host" if self._colocated and not in_place else self._transport
        self.pool.update_weights(self.trainers.send_weights, version, transport)
        if in_place:
            self.trainers.release()
            self.pool.wake_up(["kv_cache"])
            self._engines_awake = True

    def restart_trainers(self) -> None:
        """Restart all trainers, in the state of the run's start."""
        if self._colocated and self._engines_awake:
            self.pool.sleep()
            self._engines_awake = False
        self.trainers.restart()


def train(
    recipe: Recipe, out: Path, *, resume: bool = False, replay: Path | None = None, allow_other_data: bool = False
) -> Json:
    """Run a recipe from its first step, or with `resume` from its newest checkpoint, to its last into the folder `out`.

    Return the summary that it writes there. KeyboardInterrupt after Ctrl-C (`Stop`), with a checkpoint where the RL
    step under way ended soon.
    """
    out = Path(out)
    if not resume:
        if (out / "run.json").exists():
            raise ConfigError(f"{out} already holds a run; choose another --out, or continue it with --resume {out}")
        # A run can be resumed from any folder.
        recipe = located(recipe)
    run = GrpoRun(recipe, out, resume=resume, replay=replay, allow_other_data=allow_other_data)
    run.events.watch = lambda sentence: log.note(sentence)
    description, last_step = run_json(run.recipe), run.recipe.train.steps
    evaluates = bool(run.data.heldout) and recipe.eval.num_prompts > 0
    figures: dict[str, float] = {}
    evaluated = 0

    def evaluate(when: str) -> float:
        nonlocal evaluated
        evaluated = run.rl_step
        figures.update(run.evaluation())
        reward, *others = figures.values()
        names = [name.removeprefix("reward/heldout/") for name in figures][1:]
        more = "".join(f", {name} {value:.3f}" for name, value in zip(names, others, strict=True))
        log.print(f"held-out reward {when} {reward:.3f}{more}")
        # Loggers have no RL step before the first.
        log.measured(max(run.rl_step - 1, 0), figures)
        if recipe.checkpoint.best and run.rl_step:
            run.keep_best(reward)
        return reward

    with (
        # Before anything is written there: loggers hide values of a run in progress.
        run.locked(),
        RunLog(recipe.log, out, last_step, resume_from=run.begins_at, settings=description) as log,
        run,
    ):
        write_json(out / "run.json", sealed(description))
        write_json(out / "policy.json", sealed(run.policy.model_dump(mode="json")))
        if evaluates and not run.rl_step and run.state.reward_first is None:
            run.state.reward_first = evaluate("before training")
        if run.rl_step:
            log.print(f"continues with RL step {run.rl_step}")
        run.watch = lambda report: log.step(report, report.measures)
        begins_at = run.rl_step
        every = recipe.eval.every
        with Stop(run.stop_prefetching) as stop:
            while run.rl_step < last_step and not (stop.requested and run.is_between):
                # Before the next RL step, so that a run killed meanwhile evaluates again.
                if evaluates and every and run.rl_step % every == 0 and run.rl_step > evaluated:
                    evaluate(f"after RL step {run.rl_step - 1}")
                    continue
                stop.due(fmean(r.step_s for r in run.reports[-3:]) if run.reports else 0.0)
                run.step()
                if run.rl_step in (begins_at + 1, last_step):
                    run.memory()
        finished = run.rl_step >= last_step
        reward_last = evaluate("after training") if evaluates and finished else None
        newest = run.checkpoints.latest()
        if newest is None or step_of(newest) != run.rl_step:
            # For continuing an ended run with more steps.
            run.checkpoint()
        if finished:
            run.save()
    if not finished:
        raise KeyboardInterrupt
    summary: Json = {
        "grpo_steps": len(run.reports),
        "reward_first": run.state.reward_first,
        "reward_last": reward_last,
        "heldout": figures,
        "steps": [
            {"rl_step": r.rl_step, "policy": r.policy, "reward": finite(r.reward_mean), "rollout_s": r.rollout_s}
            for r in run.reports
        ],
        "drafter": run.drafting.summary(),
    }
    if recipe.checkpoint.best:
        summary["best"] = run.best
    write_json(out / "summary.json", sealed(summary))
    return summary


class GrpoRun:
    """A run folder, its actors, and one method per task: `step`, `evaluate`, `checkpoint`, `trace`, `save`.

    Use it as a context manager: leaving it closes engines and the Ray it started. The trace grows in `out/trace` by one
    durable flush per RL step, so a killed run keeps every finished step. With `resume` it continues from the newest
    complete checkpoint below `out`, or from the start where there is none; later steps are repeated, and recorded
    again. `replay` is a trace whose decisions the policy follows until they are used up; `actors` is the class of its
    actors. Resumed with other prompts, answers, model or code it is refused, without `allow_other_data`, and with it
    events say what differs. A failed rollout worker is restarted while the others continue; after a trainer's failure
    the run goes back to its newest checkpoint.
    """

    def __init__(
        self,
        recipe: Recipe,
        out: Path,
        *,
        resume: bool = False,
        replay: Path | None = None,
        allow_other_data: bool = False,
        actors: type[RunActors] = RunActors,
    ):
        if replay is not None:
            refuse(exact_replay(recipe))
        self.out = Path(out)
        self.tokenizer = load_tokenizer(recipe.model)
        self.reward_pool = RewardPool(recipe, self.tokenizer)
        self._own_advantage = None if recipe.train.advantage is None else OwnAdvantage(recipe)
        self.data = RunData(recipe, self.tokenizer)
        self.recipe = recipe = self.data.recipe
        self.policy = recipe.read_policy()
        refuse(policy_on_engines(recipe, self.policy))
        self.events = RunEvents(self.out / "events.jsonl")
        self.drafting = drafter_of(recipe, self.policy, self.out, self.events)
        self.checkpoints = RunCheckpoints(self.out / "checkpoints", recipe.checkpoint.keep)
        self._replay = read(replay) if replay is not None else None
        self._restarts = 0
        self._origin_drafter = self.drafting.state_dict(self.checkpoints.folder)
        self.state = RunState()
        self.watch: Callable[[StepReport], None] = lambda report: None
        """Receives the report of every RL step, also of repeated ones."""
        self._ahead = RolloutsAhead(recipe, self._roll_out)
        self._resume, self._allow_other_data = resume, allow_other_data
        self._actors = actors
        self._locked = False

    @property
    def rl_step(self) -> int:
        """The next RL step."""
        return self.state.rl_step

    @property
    def reports(self) -> list[StepReport]:
        """Reports of every RL step so far."""
        return self.state.reports

    @property
    def is_between(self) -> bool:
        """True where no rollout is made ahead."""
        return self._ahead.is_empty

    def stop_prefetching(self) -> None:
        """Make no rollout ahead from now on: the run is to end."""
        self._ahead.ending = True
        self.events.note("Ctrl-C: the run ends after this RL step, with a checkpoint; Ctrl-C again ends it at once")

    @property
    def begins_at(self) -> int:
        """The first RL step of a run that has not started yet."""
        folder = self.checkpoints.latest() if self._resume else None
        return step_of(folder) if folder is not None else 0

    def __enter__(self) -> GrpoRun:
        with ExitStack() as stack:
            stack.enter_context(self.locked())
            modules = [part.module for part in self.policy.own_parts]
            keep_code(self.recipe.code, [*code_of(self.recipe), *modules], self.out)
            asked = {"resume": self._resume, "allow_other": self._allow_other_data}
            for difference in check_inputs(self.recipe, self.data, self.out, **asked):
                self.events.note(f"continues with another content of {difference}")
            folder = self.checkpoints.latest(self.events.note) if self._resume else None
            if folder is not None:
                # The drafter that the run begins with, before any actor starts.
                state, parts = read_state(folder, self.recipe)
                self.events.rl_step = state.rl_step
                self.drafting.load_state_dict(parts["drafter"], folder / "drafter")
            for note in (*notes_of(self.recipe), *self.data.notes):
                self.events.note(note)
            stack.enter_context(self.reward_pool)
            stack.callback(self._ahead.close)  # after the actors, so that its calls to them fail then
            self.actors = stack.enter_context(self._actors(self.recipe, self.policy, self.drafting, self.events))
            self.pool, self.trainers = self.actors.pool, self.actors.trainers
            write_json(self.out / "graphs.json", sealed(self.actors.graphs))
            self._choose_by(self.policy)
            self._begin(folder)
            drafters = drafters_of(self.recipe, self.policy)
            manifest, path = run_manifest(self.recipe, self.out.name, drafters), self.out / "trace"
            self._recorder = Recorder.reopen(path, manifest, self.rl_step) if self._resume else Recorder(path, manifest)
            stack.push(self._recorder)
            self._write_notes()
            self._stack = stack.pop_all()
        self._started = time.perf_counter() - sum(r.step_s for r in self.reports)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is not None:
            self.events.record(f"the run stopped: {type(error).__name__}: {error}")
        try:
            self._stack.__exit__(kind, error, tb)
        except TltlabError as cause:
            self.events.record(f"the run stopped: {type(cause).__name__}: {cause}")
            raise

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the run's folder for this process; entering the run locks it by itself, if it is not locked."""
        if self._locked:
            yield
            return
        try:
            make_folder(self.out)
            folder_lock = lock(self.out, "this run")
        except OSError as error:
            raise ConfigError(f"cannot write to {self.out}: {error.strerror}") from error
        with folder_lock:
            self._locked = True
            try:
                yield
            finally:
                self._locked = False

    def set_policy(self, policy: PolicySource, name: str | None = None) -> None:
        """Set a fresh selector of `policy` in every engine, seeded by the run, the worker and the RL step.

        `policies.json` records the policies with their first RL step, and the planner with the costs that it knows, so
        that a run can be predicted.
        """
        self._ahead.refuse("set its policy before it begins")
        self._choose_by(load_policy(policy), name)
        self._write_notes()

    def _begin(self, folder: Path | None) -> None:
        """Restore the checkpoint in `folder` in the started actors; with None the run begins."""
        self.actors.engines_turn()
        self._origin, self._origin_workers = self.state.copy(), self.pool.state_dicts()
        if folder is not None:
            try:
                self._restore(folder)
            except TrainerDied as error:
                self._restart(error)
        elif self._replay is not None:
            self.pool.replay(self._replay)

    def _choose_as(self, policies: Sequence[Fields]) -> None:
        """Restore the policy that `policies` had from this RL step on; it may have been set after the checkpoint."""
        for entry in policies:
            if entry["rl_step"] == self.rl_step and entry not in self.state.policies:
                self.set_policy(Policy.model_validate(entry["policy"]), entry["name"])

    def _choose_by(self, policy: Policy, name: str | None = None) -> None:
        self.state.in_force(policy, name)
        self.pool.set_policy(policy, self.rl_step)

    def step(self) -> StepReport:
        """Run one RL step under the active policy; after a trainer's failure repeat steps since the checkpoint."""
        return self._through(self._step)

    def _through(self, do: Callable[[], Done]) -> Done:
        """Return the result of `do`; after a trainer's failure the run goes back, repeats its RL steps, and does it."""
        target, policies = self.rl_step, self.state.policies
        while True:
            try:
                while self.rl_step < target:
                    self._choose_as(policies)
                    self._step()
                self._choose_as(policies)
                return do()
            except TrainerDied as error:
                self._ahead.forget()
                first = self.state.reward_first
                self._restart(error)
                # Measured under the initial policy, so it stays valid.
                self.state.reward_first = first
                self._recorder.rewind(self.rl_step)
                self._write_notes()

    def _step(self) -> StepReport:
        rl_step = self.rl_step
        self.events.rl_step = rl_step
        t_step = time.perf_counter()
        collected = (rolled := self._ahead.take(rl_step)).collected
        for note in collected.notes:
            self.events.note(note)
        self._ahead.begin(rl_step + 1)
        samples = samples_of(collected.groups)
        if self._own_advantage is not None:
            samples = self._own_advantage(samples)
        config, cap = self.recipe.train, self.recipe.rollout.max_response_tokens
        num_groups = len(collected.groups) + collected.num_dropped
        mixed = len(useful_groups(samples, config, cap)) / num_groups if num_groups else math.nan
        nothing_to_learn = check(samples, config, cap, rl_step)
        if nothing_to_learn is not None:
            self.events.note(nothing_to_learn)

        start = t_stages = time.perf_counter()
        self.actors.trainers_turn(weights_follow=True)
        stale = ages(collected.trajectories, rl_step) if self.recipe.rollout.one_step_off else {}
        metrics = stale | collected.figures | asdict(self.trainers.old_logprobs(samples, rl_step))
        metrics["reward/mixed_groups"] = mixed
        inference_s = time.perf_counter() - start + collected.score_s

        start = time.perf_counter()
        metrics |= asdict(self.trainers.ask("update", rl_step))
        train_s = time.perf_counter() - start

        start = time.perf_counter()
        if not self.recipe.rollout.staleness:  # otherwise engines load new weights while they generate
            self._ahead.settle()
        # Training predicted the drafter's acceptance for the policy before the update, so its weights come first.
        self.actors.push_weights(self.state.policy_version + 1, before=lambda: self.drafting.publish(rl_step + 1))
        if self.recipe.train.lora is None:  # with adapters embedding and LM head stand still
            self.drafting.target_moved()
        sync_s = time.perf_counter() - start

        # If all training responses were whole before, no reward is new.
        rewards = list(collected.rewards.values()) or [t.reward for t in collected.trajectories if t.reward is not None]
        report = StepReport(
            rl_step=rl_step,
            policy=self.state.policy_name,
            reward_mean=sum(rewards) / len(rewards) if rewards else float("nan"),
            num_tokens=sum(len(r.token_ids) for part in collected.parts for r in part.responses),
            rollout_s=collected.rollout_s,
            reward_s=collected.reward_s,
            inference_s=inference_s,
            train_s=train_s,
            sync_s=sync_s,
            recorder_s=max(part.recorder_s for part in collected.parts),
            metrics=metrics,
            notes=self.events.take(),
        )
        report = self._record(report, rolled, t_step, t_stages - rolled.t_start - collected.reward_s)
        self.state.policy_version += 1
        self.state.rl_step += 1
        self.state.reports.append(report)
        every = self.recipe.checkpoint.every
        if every and self.rl_step % every == 0:
            self._save_checkpoint()
        self.watch(report)
        return report

    def _roll_out(self, rl_step: int) -> RolledOut:
        t_start, tools = time.perf_counter(), self._tools(rl_step)
        collected = self.data.rollouts.collect(tools)
        collected.figures.update(self._term_means())
        # Work of engines and drafters on the responses, before weights change.
        if self._first is not None:
            self._repeat(*self._first, rl_step)
        self.drafting.annotate()
        steps_left = self.recipe.train.steps - rl_step - 1
        self.pool.remember(collected.requests, collected.parts, lambda ids: self.data.next_use(ids, steps_left))
        return RolledOut(collected=collected, version=tools.policy_version, t_start=t_start)

    def _tools(self, rl_step: int) -> RolloutTools:
        """Return the calls that a rollout may make to engines, trainers and rewards."""
        every = self.recipe.rollout.repeat_every
        repeats = bool(every) and rl_step % every == 0
        self._first: tuple[Shares, Sequence[Rollout], float] | None = None
        self._scored: list[Scored] = []

        def generate(
            shares: Sequence[list[GenerationRequest]], number: int, quotas: Sequence[int] | None
        ) -> list[Rollout]:
            self.actors.engines_turn()
            # Later rounds train no drafter: the schedule decides once per RL step.
            if number == 0:
                self.drafting.rollout_starts(rl_step)
            start = time.perf_counter()
            first = number == 0
            parts = self.pool.generate(
                shares,
                rl_step,
                round=number,
                repeatable=repeats and first,
                quotas=quotas,
                on_idle=self.drafting.worker_idle if first else lambda n: None,
            )
            if first:
                self.drafting.rollout_ends(rl_step)
                self._first = (shares, parts, time.perf_counter() - start) if repeats else None
            return parts

        def rewards(trajectories: Sequence[Trajectory]) -> list[Scored]:
            scored = self.reward_pool.rewards([(t.prompt.text, t.token_ids, t.prompt.answer) for t in trajectories])
            for failure in self.reward_pool.take_failures():
                self.events.note(failure)
            self._scored += scored
            return scored

        def score(pairs: Any) -> list[np.ndarray]:
            self.actors.trainers_turn()
            return list(self.trainers.ask("score", ray.put(list(pairs))))

        return RolloutTools(
            generate=generate,
            share=partial(self.pool.share, placement=self.pool.placement),
            rewards=rewards,
            score=score,
            rl_step=rl_step,
            policy_version=self.state.policy_version,
        )

    def _term_means(self) -> dict[str, float]:
        """Return the mean of each term of the rewards of the rollout; none where there is one term."""
        terms = self.recipe.reward_terms
        if len(terms) == 1 or not self._scored:
            return {}
        means = np.mean([scored.terms for scored in self._scored], axis=0).tolist()
        return {f"reward/terms/{term.label}": mean for term, mean in zip(terms, means, strict=True)}

    def _repeat(
        self,
        shares: Shares,
        parts: Sequence[Rollout],
        rollout_s: float,
        rl_step: int,
    ) -> None:
        """Roll out the same requests once more and record both times in `repeats.json`; no state changes."""
        start = time.perf_counter()
        again = self.pool.repeat(shares, rl_step)
        repeat_s = time.perf_counter() - start
        if not again:
            self.events.note(f"the rollout of RL step {rl_step} was not repeated: a worker was restarted")
            return
        self.state.repeats.append(repeat_row(rl_step, parts, again, rollout_s=rollout_s, repeat_s=repeat_s))
        write_json(self.out / "repeats.json", sealed({"repeats": self.state.repeats}))

    def _record(self, report: StepReport, rolled: RolledOut, t_step: float, stages_s: float) -> StepReport:
        """Write the RL step's rows to the trace; return the report with their figures. `t_step`: its start."""
        start, collected, rollout = time.perf_counter(), rolled.collected, self.recipe.rollout
        rows = step_rows(
            report,
            collected.requests,
            collected.parts,
            rewards=collected.rewards,
            epochs=collected.epochs,
            policy_version=rolled.version,
            t_start=rolled.t_start - self._started,
            stages_s=stages_s if rollout.one_step_off or rollout.staleness else None,
            drafter=self.drafting.rows(report.rl_step, rollout_s=report.rollout_s, tokens=report.num_tokens),
        )
        for table, new in rows.items():
            self._recorder.append(table, new)
        # While the next rollout runs: a kill before the flush ends loses one RL step more.
        self._recorder.flush(wait=False)
        end = time.perf_counter()
        report = replace(report, record_s=end - start, step_s=end - t_step)
        return replace(report, measures=step_metrics(report, rows))

    def memory(self) -> list[ProcessMemory]:
        """Return the memory of each process of the run, rank 0 for trainers; `memory.json` has the newest answer."""

        def measured() -> list[ProcessMemory]:
            driver = ProcessMemory.now("driver", 0, {"history": self.pool.history.num_bytes})
            return [*self.pool.ask("memory"), self.trainers.ask("memory"), *self.drafting.memory(), driver]

        self._ahead.settle()
        memory = self._through(measured)
        write_json(self.out / "memory.json", sealed({"processes": [asdict(process) for process in memory]}))
        return memory

    def checkpoint(self) -> Path:
        """Save all that the run needs to continue; return the checkpoint's folder, `checkpoints/step-N`."""
        self._ahead.refuse("it saves at every checkpoint.every")
        return self._through(self._save_checkpoint)

    def _save_checkpoint(self) -> Path:
        """Save all that the run needs to continue; return the checkpoint's folder.

        Engines then load their saved state: a file changes the order of learned trees, and a continuing run must equal
        a resumed one.
        """
        # A resumed run needs the trace up to here.
        self._recorder.flush()
        start = time.perf_counter()
        # Failed workers are restarted here: a sleeping engine cannot return its learned state.
        self.actors.engines_turn()
        workers = self.pool.state_dicts()
        self.actors.trainers_turn()

        def write(folder: Path) -> None:
            self.trainers.ask("save_checkpoint", str((folder / "trainer").resolve()))
            parts = {
                "recipe_policy": self.policy.model_dump(mode="json"),
                **self.data.state_dict(folder / "rollouts"),
                "drafter": self.drafting.state_dict(folder / "drafter"),
                "history": self.pool.history.state_dict(folder / "history"),
                "lengths": self.pool.lengths,
                "belief": self.pool.belief.state_dict(),
            }
            write_state(folder, self.state, parts, workers, self.recipe)

        folder = self.checkpoints.save(self.rl_step, write)
        self.pool.load_state_dicts(workers)
        self.events.record(f"{folder.name} saved", seconds=round(time.perf_counter() - start, 3))
        return folder

    def _restart(self, error: TrainerDied) -> None:
        """Restart the trainers and go back to the newest checkpoint or the start, repeatedly if they fail again."""
        while True:
            self._restarts += 1
            if self._restarts > self.recipe.faults.max_restarts:
                raise RunError(f"{error}; that was more than faults.max_restarts = {self.recipe.faults.max_restarts}")
            folder = self.checkpoints.latest(self.events.note)
            self.events.note(f"{error}; trainers are restarted from {'the start' if folder is None else folder.name}")
            try:
                self.actors.restart_trainers()
                drafter = self._restore(folder)
                self.drafting.rewind(self.rl_step, drafter, None if folder is None else folder / "drafter")
                return
            except TrainerDied as again:
                error = again

    def _restore(self, folder: Path | None) -> Fields:
        """Restore everything but the drafter from a checkpoint, or the start; return the drafter's state."""
        pool = self.pool
        pool.lengths, pool.belief = {}, LengthBelief()
        now = self.policy.model_dump(mode="json")
        if folder is None:
            state, drafter, then, history = self._origin.copy(), self._origin_drafter, now, None
            self.data.begin()
        else:
            state, parts = read_state(folder, self.recipe)
            drafter, then, history = parts["drafter"], parts["recipe_policy"], parts.get("history")
            self.data.load_state_dict(parts, folder / "rollouts")
            pool.lengths = parts.get("lengths", {})
            pool.belief = LengthBelief(**parts.get("belief", {}))
            self.actors.trainers_turn()
            self.trainers.ask("load_checkpoint", str((folder / "trainer").resolve()))
        self.events.rl_step = state.rl_step
        # Before the drafters' record is restored: new weights make their canary check anew.
        self.actors.push_weights(state.policy_version)
        if then == now:
            latest = state.policies[-1]
            pool.set_policy(Policy.model_validate(latest["policy"]), latest["rl_step"])
            workers = self._origin_workers
            if folder is not None:
                files = [folder / f"worker-{number}.json" for number in range(len(workers))]
                # Engines of a tail shape may be new.
                workers = [read_json(f) if f.exists() else new for f, new in zip(files, workers, strict=True)]
            pool.load_state_dicts(workers)
            pool.history.load_state_dict(history, self.checkpoints.folder if folder is None else folder / "history")
        else:
            # Workers may have learned more since this run began.
            pool.set_policy(self.policy, 0)
            pool.load_state_dicts(self._origin_workers)
            pool.history.load_state_dict(None, self.checkpoints.folder)
            pool.set_policy(self.policy, state.rl_step)
            state.in_force(self.policy)
            self.events.note("another policy than before: learned state of the earlier one is dropped")
        if self._replay is not None:
            pool.replay(self._replay)
        self.drafting.target_moved()
        self.events.record(f"continues with RL step {state.rl_step}")
        self.state = state
        return drafter

    def evaluate(self, num_prompts: int | None = None) -> float:
        """Return the mean reward of `evaluation`."""
        return self.evaluation(num_prompts)["reward/heldout"]

    def evaluation(self, num_prompts: int | None = None) -> dict[str, float]:
        """Return measures of the policy on the first prompts of each held-out set, by name, `reward/heldout` first.

        Responses are drawn without speculation and not recorded. `num_prompts` are by default those of the recipe;
        means over 0 of them are nan.
        """
        if not self.data.heldout:
            raise ConfigError("evaluation needs data.heldout in the recipe")
        config, figures = self.recipe.eval, dict[str, float]()
        most = config.num_prompts if num_prompts is None else num_prompts
        for name, prompts in self.data.heldout.items():
            rewards = self._through(partial(self._heldout_rewards, prompts[:most])) if most else []
            figures |= heldout_figures(name, rewards, config)
        means = [figures[name] for name in figures if "@" not in name]
        return {"reward/heldout": fmean(means), **figures}

    def _heldout_rewards(self, prompts: Sequence[Prompt]) -> list[float]:
        """Return the rewards of `eval.samples` responses to each prompt, prompt by prompt."""
        self._ahead.settle()
        cap, samples = self.recipe.rollout.max_response_tokens, range(self.recipe.eval.samples)
        asked = [(prompt, sample) for prompt in prompts for sample in samples]
        requests = [
            GenerationRequest(
                key=(-1, p.prompt_id, n, 0), prompt_token_ids=p.token_ids, max_response_tokens=cap, prompt_text=p.text
            )
            for p, n in asked
        ]
        self.actors.engines_turn()
        responses = self.pool.evaluate(requests)
        pairs = zip(asked, responses, strict=True)
        scored = self.reward_pool.rewards([(p.text, token_ids, p.answer) for (p, _), token_ids in pairs])
        for failure in self.reward_pool.take_failures():
            self.events.note(f"evaluation: {failure}")
        return [each.reward for each in scored]

    def save(self) -> Path:
        """Write the policy's weights to `checkpoints/final` as a Hugging Face folder, with the drafter's."""

        def write() -> Path:
            final = self._save_policy("final")
            self.drafting.save()
            return final

        return self._through(write)

    @property
    def best(self) -> Json | None:
        """RL steps and reward of the policy in `checkpoints/best`; None without one."""
        record = self.checkpoints.folder / "best" / BEST
        return dict(read_json(record)) if record.is_file() else None

    def keep_best(self, reward: float) -> None:
        """Write the policy, of this held-out reward, to `checkpoints/best` unless an earlier one there is as good.

        The folder itself says how good: one of a later RL step is of a course that this run has left, or repeats.
        """
        best = self.best
        if best is None or best["rl_step"] > self.rl_step or reward > best["reward"]:
            self._through(partial(self._save_policy, "best", {"rl_step": self.rl_step, "reward": reward}))

    def _save_policy(self, name: str, record: Fields | None = None) -> Path:
        """Write weights, and a `record`, to the folder `name` of `checkpoints`, which is at no time half written."""
        folder = self.checkpoints.folder / name
        self.actors.trainers_turn()
        with new_folder(folder) as written:
            self.trainers.ask("save", str(written.resolve()))
            if record is not None:
                write_json(written / BEST, record)
        return folder

    def trace(self) -> Trace:
        """Return everything recorded so far."""
        return self._recorder.snapshot()

    def _write_notes(self) -> None:
        notes: Json = {"seed": self.recipe.seed, "policies": self.state.policies}
        if self.recipe.rollout.planner is not None:
            costs = {
                str(shape): engines.costs.model_dump(mode="json", exclude={"notes"})
                for shape, engines in self.pool.costs.items()
            }
            notes["planner"] = {"source": self.recipe.rollout.planner, "costs": costs}
        write_json(self.out / "policies.json", sealed(notes))
        if self.state.repeats or (self.out / "repeats.json").exists():
            write_json(self.out / "repeats.json", sealed({"repeats": self.state.repeats}))


class Stop:
    """Context manager in which the first Ctrl-C sets `requested` and calls `on_request` in another thread.

    A second Ctrl-C interrupts the main thread as SIGTERM does. So do `STOP_S` seconds, and the first Ctrl-C where the
    RL step, by `due`, takes longer. Outside of the main thread, and where Ctrl-C is ignored, nothing changes.
    """

    def __init__(self, on_request: Callable[[], None]):
        self.requested = False
        self._on_request = on_request
        self._due_s = 0.0
        self._stack = ExitStack()

    def __enter__(self) -> Stop:
        before: Any = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is threading.main_thread() and callable(before):
            signal.signal(signal.SIGINT, self._interrupted)
            self._stack.callback(signal.signal, signal.SIGINT, before)
            if not callable(signal.getsignal(signal.SIGTERM)):
                self._stack.enter_context(sigterm_handler(signal.default_int_handler))
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def due(self, seconds: float) -> None:
        """Note that an RL step begins, which is likely to take so many seconds."""
        self._due_s = time.monotonic() + seconds

    def _interrupted(self, number: int, frame: FrameType | None) -> None:
        if self.requested or self._due_s - time.monotonic() > STOP_S:
            # SIGTERM cleanly ends `Waiting`, in which the main thread waits for actors.
            signal.raise_signal(signal.SIGTERM)
            return
        self.requested = True
        main = threading.get_ident()
        late = threading.Timer(STOP_S, signal.pthread_kill, (main, signal.SIGINT))
        late.daemon = True
        self._stack.callback(late.cancel)
        late.start()
        # In a thread: the main thread may be in the middle of its own line.
        threading.Thread(target=self._on_request, daemon=True).start()
