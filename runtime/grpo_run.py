"""A GRPO run on Ray and vLLM, read from top to bottom: roll out, reward, log-probs, train, sync, record, checkpoint."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import IO, Any, TypeVar

import numpy as np

from tltlab.cli import write_json
from tltlab.errors import ConfigError, RunError
from tltlab.policy import Policy, load_policy
from tltlab.recorder import Recorder
from tltlab.recording_folder import lock
from tltlab.trace import Manifest, Trace, read

from .data import Prompt, load_prompts, read_prompts
from .data_order import DataOrder
from .drafter_data import load_tokenizer
from .drafter_run import drafter_of
from .engine import GenerationRequest, Rollout
from .environment import hardware, versions
from .recipe import Recipe
from .reward_pool import RewardPool
from .rollouts import Collected, RolloutTools, rollouts_of
from .run_actors import RunActors
from .run_checkpoints import RunCheckpoints, step_of
from .run_events import RunEvents
from .run_metrics import step_metrics
from .run_state import RunState, read_state, read_workers, write_state
from .samples import Sample, Trajectory
from .step_rows import StepReport, step_rows
from .trainer_group import TrainerDied

Done = TypeVar("Done")


class GrpoRun:
    """A run folder, its actors, and one method per thing to do: `step`, `evaluate`, `checkpoint`, `trace`, `save`.

    Use it as a context manager: leaving it closes engines and the Ray it started. The trace grows in `out/trace` by
    one durable chunk per RL step, so a killed run keeps every finished step. With `resume` it goes on from the newest
    whole checkpoint below `out`, or from the start where there is none; steps after that are done, and recorded, again.
    `replay` is a trace whose decisions the policy follows for as long as there are any. A rollout worker that dies is
    replaced while the others go on; when a trainer dies the run goes back to its newest checkpoint.
    """

    def __init__(
        self, recipe: Recipe, out: Path, *, notes: str | None = None, resume: bool = False, replay: Path | None = None
    ) -> None:
        self.recipe = recipe
        self.out = Path(out)
        self.reward_pool = RewardPool(recipe)
        self.tokenizer = load_tokenizer(recipe.model)
        data = recipe.data
        found = read_prompts(data.train, data, self.tokenizer)
        self.train_prompts = found.prompts
        self.heldout_prompts: list[Prompt] = []
        if data.heldout is not None:
            self.heldout_prompts = load_prompts(data.heldout, data, self.tokenizer, split=data.heldout_split)
        self._check_prompts()
        self.policy = load_policy(recipe.rollout.policy)
        self.events = RunEvents(self.out / "events.jsonl")
        self._num_dropped = found.num_dropped
        self.drafting = drafter_of(recipe, self.policy, self.out, self.events)
        self.checkpoints = RunCheckpoints(self.out / "checkpoints", recipe.checkpoint.keep)
        self._begin_data()
        self.policy_version = 0
        self.rl_step = 0
        self.reports: list[StepReport] = []
        self.reward_first: float | None = None
        self._policy_name = "none"
        self._policies: list[dict[str, Any]] = []
        self._repeats: list[dict[str, Any]] = []
        self._notes = notes
        self._resume = resume
        self._replay = read(replay) if replay is not None else None
        if self._replay is not None and (recipe.drafter is not None or recipe.train.sampling_rounds > 1):
            raise ConfigError(
                "decisions are replayed exactly only where nothing else depends on the clock: leave out [drafter], "
                "which learns in idle time, and set train.sampling_rounds = 1"
            )
        self._restarts = 0

    @property
    def begins_at(self) -> int:
        """The RL step that a run which has not started yet will do first."""
        folder = self.checkpoints.latest() if self._resume else None
        return step_of(folder) if folder is not None else 0

    def _check_prompts(self) -> None:
        """Refuse prompts that leave no room in the engines' context, before an engine is started to say so."""
        room = self.recipe.rollout.vllm.get("max_model_len")
        for prompt in [*self.train_prompts, *self.heldout_prompts] if room else []:
            if len(prompt.token_ids) >= room:
                raise ConfigError(
                    f"prompt {prompt.prompt_id} has {len(prompt.token_ids)} tokens, and rollout.vllm.max_model_len = "
                    f"{room} must hold it and a response: raise it, or leave such prompts out by data.max_prompt_tokens"
                )

    def _begin_data(self) -> None:
        self.order = DataOrder(len(self.train_prompts), self.recipe.seed)
        self.rollouts = rollouts_of(self.recipe, self.train_prompts, self.order)

    def __enter__(self) -> GrpoRun:
        self._stack = ExitStack()
        try:
            self._start()
        except BaseException:
            self._stack.close()
            raise
        self._started = time.perf_counter() - sum(r.step_s for r in self.reports)
        return self

    def _start(self) -> None:
        self._stack.enter_context(self._locked())
        folder = self._newest() if self._resume else None
        if folder is not None:
            self.drafting.load_state_dict(read_state(folder, self.recipe).drafter, folder / "drafter")
        if self._num_dropped:
            self.events.note(
                f"{self._num_dropped} prompts of more than data.max_prompt_tokens = "
                f"{self.recipe.data.max_prompt_tokens} are left out"
            )
        self._stack.enter_context(self.reward_pool)
        actors = RunActors(self.recipe, self.policy.drafters, self.drafting, self.events)
        self.actors = self._stack.enter_context(actors)
        self.pool, self.trainers = self.actors.pool, self.actors.trainers
        self._choose_by(self.policy)
        self.actors.engines_turn()
        self._origin, self._origin_workers = self._state(), self.pool.state_dicts()
        if self._resume:
            try:
                self._go_back(folder)
            except TrainerDied as error:
                self._restart_trainers(error)
            self._recorder = Recorder.reopen(self.out / "trace", self._manifest(), self.rl_step)
        else:
            if self._replay is not None:
                self.pool.replay(self._replay)
            self._recorder = Recorder(self.out / "trace", self._manifest())
        self._write_notes()

    def _locked(self) -> IO[bytes]:
        """The run's folder, for this process alone while it runs."""
        try:
            self.out.mkdir(parents=True, exist_ok=True)
            return lock(self.out, "this run")
        except OSError as error:
            raise ConfigError(f"cannot write to {self.out}: {error.strerror}") from error

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is not None:
            self.events.record(f"the run stopped: {type(error).__name__}: {error}")
        try:
            self._recorder.__exit__(kind, error, tb)
        finally:
            self._stack.close()

    def set_policy(self, policy: Policy, name: str | None = None) -> None:
        """Let every engine choose with a fresh selector of `policy`, seeded by the run, the worker and the RL step.

        `policies.json` keeps what was in force from which RL step on, so that a run can be predicted.
        """
        self._choose_by(policy, name)
        self._write_notes()

    def _choose_by(self, policy: Policy, name: str | None = None) -> None:
        self._policy_name = name or policy.selector.kind
        self.pool.set_policy(policy, self.rl_step)
        self._policies = [p for p in self._policies if p["rl_step"] != self.rl_step]
        entry = {"rl_step": self.rl_step, "name": self._policy_name, "policy": policy.model_dump(mode="json")}
        self._policies.append(entry)

    def step(self) -> StepReport:
        """One RL step under the policy in force; where a trainer dies, steps since the checkpoint are done again."""
        return self._through(self._step)

    def _through(self, do: Callable[[], Done]) -> Done:
        """What `do` returns; where a trainer dies in it, the run goes back, comes to this RL step again and does it."""
        target = self.rl_step
        while True:
            try:
                while self.rl_step < target:
                    self._step()
                return do()
            except TrainerDied as error:
                self._restart_trainers(error)
                self._recorder.rewind(self.rl_step)
                self._write_notes()

    def _step(self) -> StepReport:
        rl_step = self.rl_step
        self.events.rl_step = rl_step
        t_step = time.perf_counter()
        collected = self.rollouts.collect(self._tools(rl_step))
        self._after_rollout(collected, rl_step)

        start = time.perf_counter()
        self.actors.trainers_turn()
        samples = _samples(collected)
        metrics = self.trainers.old_logprobs(samples)
        inference_s = time.perf_counter() - start + collected.score_s

        start = time.perf_counter()
        metrics = metrics | self.trainers.update(rl_step)
        train_s = time.perf_counter() - start

        start = time.perf_counter()
        # Training predicted the drafter's acceptance for the policy as it was, so its weights come first.
        self.drafting.publish(rl_step + 1)
        self.actors.push_weights(self.policy_version + 1)
        self.drafting.target_moved()
        sync_s = time.perf_counter() - start

        rewards = list(collected.rewards.values())
        report = StepReport(
            rl_step=rl_step,
            policy=self._policy_name,
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
        report = self._record(report, collected, t_step)
        self.policy_version += 1
        self.rl_step += 1
        self.reports.append(report)
        every = self.recipe.checkpoint.every
        if every and self.rl_step % every == 0:
            self._checkpoint()
        return report

    def _tools(self, rl_step: int) -> RolloutTools:
        """What a rollout may ask of engines, trainers and rewards."""
        every = self.recipe.rollout.repeat_every
        repeats = bool(every) and rl_step % every == 0
        self._first: tuple[Sequence[Sequence[GenerationRequest]], Sequence[Rollout], float] | None = None

        def generate(
            shares: Sequence[list[GenerationRequest]], number: int, quotas: Sequence[int] | None
        ) -> list[Rollout]:
            self.actors.engines_turn()
            # Later rounds train no drafter: whether it is time to was decided for the RL step.
            if number == 0:
                self.drafting.rollout_starts(rl_step)
            start = time.perf_counter()
            parts = self.pool.generate(shares, rl_step, round=number, repeatable=repeats and number == 0, quotas=quotas)
            if number == 0:
                self.drafting.rollout_ends(rl_step)
                self._first = (shares, parts, time.perf_counter() - start) if repeats else None
            return parts

        def score(pairs: Any, *, distributions: bool = False) -> list[np.ndarray]:
            self.actors.trainers_turn()
            return self.trainers.score(pairs, distributions=distributions)

        return RolloutTools(
            generate=generate,
            share=self.pool.share,
            rewards=self._rewards,
            score=score,
            rl_step=rl_step,
            policy_version=self.policy_version,
        )

    def _rewards(self, trajectories: Sequence[Trajectory]) -> list[float]:
        rewards = self.reward_pool.rewards(
            [(t.prompt.text, self._text(t.token_ids), t.prompt.answer) for t in trajectories]
        )
        for failure in self.reward_pool.take_failures():
            self.events.note(failure)
        return rewards

    def _after_rollout(self, collected: Collected, rl_step: int) -> None:
        """What engines and drafters do with what was rolled out, before weights move."""
        if self._first is not None:
            self._repeat(*self._first, rl_step)
        self.drafting.annotate()
        self.pool.remember_others(collected.requests, collected.parts)
        for note in collected.notes:
            self.events.note(note)

    def _repeat(
        self,
        shares: Sequence[Sequence[GenerationRequest]],
        parts: Sequence[Rollout],
        rollout_s: float,
        rl_step: int,
    ) -> None:
        """Roll out the same requests once more and note both times in `repeats.json`; nothing else remembers it."""
        start = time.perf_counter()
        again = self.pool.repeat(shares, rl_step)
        repeat_s = time.perf_counter() - start
        tokens = [[r.token_ids for part in rollout for r in part.responses] for rollout in (parts, again)]
        same = tokens[0] == tokens[1]
        self._repeats.append({"rl_step": rl_step, "rollout_s": rollout_s, "repeat_s": repeat_s, "same_tokens": same})
        write_json(self.out / "repeats.json", {"repeats": self._repeats})

    def _record(self, report: StepReport, collected: Collected, t_step: float) -> StepReport:
        """Write the RL step's rows to the trace, durably; the report with what they say of it. `t_step`: its start."""
        start = time.perf_counter()
        requests = [request for share in collected.requests for request in share]
        rows = step_rows(
            report,
            requests,
            collected.parts,
            [collected.rewards.get(request.key) for request in requests],
            epochs=[collected.epochs[request.key] for request in requests],
            submitted_s=[collected.submitted_s.get(request.key, 0.0) for request in requests],
            policy_version=self.policy_version,
            t_start=t_step - self._started,
            drafter=self.drafting.rows(report.rl_step, report.metrics["drift_kl"]),
        )
        for table, new in rows.items():
            self._recorder.append(table, new)
        self._recorder.flush()
        end = time.perf_counter()
        report = replace(report, record_s=end - start, step_s=end - t_step)
        return replace(report, measures=step_metrics(report, rows))

    # ---- checkpoints, and going back to them ----

    def checkpoint(self) -> Path:
        """Save all that the run needs to go on from here; returns the checkpoint's folder, `checkpoints/step-N`.

        Engines then load what they have just told: learned trees come out of a file in an order of their own, and a
        run that goes on must be no other than one that is resumed.
        """
        return self._through(self._checkpoint)

    def _checkpoint(self) -> Path:
        start = time.perf_counter()
        # Who died is started again here: what an engine that sleeps has learned cannot be asked for.
        self.actors.engines_turn()
        workers = self.pool.state_dicts()
        self.actors.trainers_turn()

        def write(folder: Path) -> None:
            self.trainers.save_checkpoint(str((folder / "trainer").resolve()))
            (folder / "rollouts").mkdir()
            rollouts = self.rollouts.state_dict(folder / "rollouts")
            state = replace(self._state(), rollouts=rollouts, drafter=self.drafting.state_dict(folder / "drafter"))
            write_state(folder, state, workers, self.recipe)

        folder = self.checkpoints.save(self.rl_step, write)
        self.pool.load_state_dicts(workers)
        self.events.record(f"{folder.name} saved", seconds=round(time.perf_counter() - start, 3))
        return folder

    def _state(self) -> RunState:
        return RunState(
            rl_step=self.rl_step,
            policy_version=self.policy_version,
            policy=self._policies[-1],
            policies=list(self._policies),
            recipe_policy=self.policy.model_dump(mode="json"),
            repeats=list(self._repeats),
            reports=list(self.reports),
            reward_first=self.reward_first,
            order=self.order.state_dict(),
            rollouts={},
            drafter={},
        )

    def _restart_trainers(self, error: TrainerDied) -> None:
        """Start the trainers again and go back to the newest checkpoint or the start, however often they die in it."""
        while True:
            self._restarts += 1
            if self._restarts > self.recipe.faults.max_restarts:
                raise RunError(f"{error}; that was more than faults.max_restarts = {self.recipe.faults.max_restarts}")
            folder = self._newest()
            self.events.note(f"{error}; trainers start again from {'the start' if folder is None else folder.name}")
            try:
                self.actors.restart_trainers()
                self._go_back(folder)
                self.drafting.went_back(self.rl_step)
            except TrainerDied as again:
                error = again
            else:
                return

    def _newest(self) -> Path | None:
        """The newest whole checkpoint; those that are not whole are noted."""
        folder = self.checkpoints.latest()
        for complaint in self.checkpoints.complaints:
            self.events.note(complaint)
        self.checkpoints.complaints.clear()
        return folder

    def _go_back(self, folder: Path | None) -> None:
        """Be what the checkpoint in `folder` says, or what the run was at its start."""
        state = read_state(folder, self.recipe) if folder is not None else self._origin
        self.rl_step, self.policy_version = state.rl_step, state.policy_version
        self.reports, self.reward_first = list(state.reports), state.reward_first
        self._policies, self._repeats = list(state.policies), list(state.repeats)
        self._begin_data()
        if folder is not None:
            self.order.load_state_dict(state.order)
            self.rollouts.load_state_dict(state.rollouts, folder / "rollouts")
        if folder is not None:
            self.trainers.load_checkpoint(str((folder / "trainer").resolve()))
        if state.recipe_policy == self.policy.model_dump(mode="json"):
            self._policy_name = state.policy["name"]
            self.pool.set_policy(Policy.model_validate(state.policy["policy"]), state.policy["rl_step"])
            workers = self._origin_workers if folder is None else read_workers(folder, len(self.pool.handles))
            self.pool.load_state_dicts(workers)
        else:
            self._choose_by(self.policy)
            self.events.note("another policy than before: what engines had learned under that one is left behind")
        if self._replay is not None:
            self.pool.replay(self._replay)
        self.actors.push_weights(self.policy_version)
        self.drafting.target_moved()
        self.events.record(f"goes on with RL step {self.rl_step}")

    # ---- everything else ----

    def evaluate(self, num_prompts: int | None = None) -> float:
        """Mean reward over the first held-out prompts, one response each, without speculation. Not recorded."""
        return self._through(lambda: self._evaluate(num_prompts))

    def _evaluate(self, num_prompts: int | None) -> float:
        prompts = self.heldout_prompts[: num_prompts or self.recipe.eval.num_prompts]
        if not prompts:
            raise ConfigError("evaluation needs data.heldout in the recipe")
        requests = [
            GenerationRequest(
                key=(-1, p.prompt_id, 0, 0),
                prompt_token_ids=p.token_ids,
                max_response_tokens=self.recipe.rollout.max_response_tokens,
            )
            for p in prompts
        ]
        self.actors.engines_turn()
        responses = self.pool.evaluate(requests)
        rewards = self.reward_pool.rewards(
            [(p.text, self._text(r.token_ids), p.answer) for p, r in zip(prompts, responses, strict=True)]
        )
        return sum(rewards) / len(rewards)

    def save(self) -> Path:
        """Write the policy's weights to `checkpoints/final` as a Hugging Face folder, and the drafter's beside them."""
        return self._through(self._save)

    def _save(self) -> Path:
        folder = self.out / "checkpoints" / "final"
        partial = folder.with_name(".final.partial")
        shutil.rmtree(partial, ignore_errors=True)
        self.actors.trainers_turn()
        self.trainers.save(str(partial.resolve()))
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
        self.drafting.save()
        return folder

    def trace(self) -> Trace:
        """Everything recorded so far."""
        return self._recorder.snapshot()

    def _write_notes(self) -> None:
        write_json(self.out / "policies.json", {"seed": self.recipe.seed, "policies": self._policies})
        if self._repeats or (self.out / "repeats.json").exists():
            write_json(self.out / "repeats.json", {"repeats": self._repeats})

    def _text(self, token_ids: list[int]) -> str:
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=True))

    def _manifest(self) -> Manifest:
        rollout = self.recipe.rollout
        return Manifest(
            kind="recorded",
            name=self.out.name,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            model=Path(self.recipe.model).name,
            hardware=hardware(),
            engine=f"vllm {versions()['vllm']}",
            num_workers=rollout.num_workers,
            max_response_tokens=rollout.max_response_tokens,
            group_size=rollout.group_size,
            license="Apache-2.0",
            source="tltlab",
            seed=self.recipe.seed,
            notes=self._notes,
        )


def _samples(collected: Collected) -> list[Sample]:
    """What the trainer learns from: the whole responses of the RL step."""
    return [
        Sample(
            prompt_token_ids=t.prompt.token_ids,
            token_ids=t.token_ids,
            logprobs=t.logprobs,
            reward=t.reward if t.reward is not None else 0.0,
            group=group,
            token_versions=t.token_versions,
            truncated=t.truncated,
        )
        for t, group in zip(collected.trajectories, collected.groups, strict=True)
    ]
