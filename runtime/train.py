"""A GRPO run on Ray and vLLM, read from top to bottom: roll out, reward, log-probs, train, sync, record."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from tltlab.cli import write_json
from tltlab.drafters import DEFAULT_DRAFTERS
from tltlab.errors import ConfigError, RunError, TltlabError
from tltlab.policy import Policy, load_policy
from tltlab.recorder import Recorder
from tltlab.trace import Manifest, Trace

from .data import load_prompts, load_reward, prompt_batch
from .drafter_data import load_tokenizer
from .drafter_run import drafter_of
from .engine import GenerationRequest
from .environment import hardware, run_json, versions
from .recipe import Recipe
from .run_events import RunEvents
from .samples import Sample
from .step_rows import StepReport, step_rows
from .workers import start_ray, start_workers


class GrpoRun:
    """A run folder, its actors, and one method per thing to do: `step`, `evaluate`, `trace`, `save`.

    Use it as a context manager: leaving it closes engines and the Ray it started. The trace grows in `out/trace` by
    one durable chunk per RL step, so a killed run keeps every finished step.
    """

    def __init__(self, recipe: Recipe, out: Path, *, notes: str | None = None) -> None:
        self.recipe = recipe
        self.out = Path(out)
        self.reward = load_reward(str(recipe.reward))
        self.tokenizer = load_tokenizer(recipe.model)
        self.train_prompts = load_prompts(recipe.data.train, recipe.data, self.tokenizer)
        heldout = recipe.data.heldout
        self.heldout_prompts = load_prompts(heldout, recipe.data, self.tokenizer) if heldout else []
        self.policy = load_policy(recipe.rollout.policy)
        self.events = RunEvents(self.out / "events.jsonl")
        self.drafting = drafter_of(recipe, self.policy, self.out, self.events)
        self.policy_version = 0
        self.rl_step = 0
        self.reports: list[StepReport] = []
        self._policy_name = "none"
        self._policies: list[dict[str, Any]] = []
        self._repeats: list[dict[str, Any]] = []
        self._notes = notes
        self._owns_ray = False
        self._workers: list[Any] = []
        self._actors: list[Any] = []

    def __enter__(self) -> GrpoRun:
        self._owns_ray = start_ray()
        try:
            drafters = DEFAULT_DRAFTERS | self.policy.drafters | self.recipe.rollout.drafters
            drafters |= self.drafting.specs
            self.drafting.prepare()
            self._workers, self._trainer = start_workers(self.recipe, drafters, self.drafting.feed)
            self._actors = [*self._workers, self._trainer]
            self._get([actor.start.remote() for actor in self._actors])
            self.drafting.start(self._workers, self._trainer, self._get)
            self.set_policy(self.policy)
            self._recorder = Recorder(self.out / "trace", self._manifest())
        except BaseException:
            self._stop()
            raise
        self._started = time.perf_counter()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is not None:
            self.events.record(f"the run stopped: {type(error).__name__}: {error}")
        try:
            self._recorder.__exit__(kind, error, tb)
        finally:
            self._stop()

    def set_policy(self, policy: Policy, name: str | None = None) -> None:
        """Let every engine choose with a fresh selector of `policy`, seeded by the run, the worker and the RL step.

        `policies.json` keeps what was in force from which RL step on, so that a run can be predicted.
        """
        self._policy_name = name or policy.selector.kind
        self._get([w.set_policy.remote(policy, self.rl_step) for w in self._workers])
        self._policies = [p for p in self._policies if p["rl_step"] != self.rl_step]
        entry = {"rl_step": self.rl_step, "name": self._policy_name, "policy": policy.model_dump(mode="json")}
        self._policies.append(entry)
        write_json(self.out / "policies.json", {"seed": self.recipe.seed, "policies": self._policies})

    def step(self) -> StepReport:
        """One RL step under the policy in force."""
        rollout, rl_step = self.recipe.rollout, self.rl_step
        self.events.rl_step = rl_step
        t_step = time.perf_counter()
        picked = self._picked(rl_step)
        prompts = [self.train_prompts[i] for _, i in picked]
        requests = self._requests(rl_step)
        repeats = bool(rollout.repeat_every) and rl_step % rollout.repeat_every == 0
        self.drafting.rollout_starts(rl_step)
        t_rollout = time.perf_counter()
        parts = self._share(requests, lambda worker, part: worker.generate.remote(part, rl_step, repeatable=repeats))
        self.drafting.rollout_ends(rl_step)
        rollout_s = time.perf_counter() - t_rollout
        if repeats:
            self._repeat(requests, parts, rl_step, rollout_s)
        self.drafting.annotate()
        self._tell_others(requests, parts)

        start = time.perf_counter()
        responses = [r for part in parts for r in part.responses]
        groups = [n for n in range(len(prompts)) for _ in range(rollout.group_size)]
        rewards = [
            self.reward(prompts[g].text, self._text(r.token_ids), prompts[g].answer)
            for g, r in zip(groups, responses, strict=True)
        ]
        reward_s = time.perf_counter() - start

        start = time.perf_counter()
        samples = [
            Sample(
                prompt_token_ids=prompts[g].token_ids,
                token_ids=r.token_ids,
                logprobs=r.logprobs,
                reward=reward,
                group=g,
                token_versions=[self.policy_version] * len(r.token_ids),
                truncated=r.finish_reason == "length",
            )
            for g, r, reward in zip(groups, responses, rewards, strict=True)
        ]
        metrics = self._get(self._trainer.old_logprobs.remote(samples))
        inference_s = time.perf_counter() - start

        start = time.perf_counter()
        metrics = metrics | self._get(self._trainer.update.remote())
        train_s = time.perf_counter() - start

        start = time.perf_counter()
        # Training predicted the drafter's acceptance for the policy as it was, so its weights come first.
        self.drafting.publish(rl_step + 1)
        weights = self._trainer.weights.remote()
        self._get([w.update_weights.remote(weights, self.policy_version + 1) for w in self._workers])
        self.drafting.target_moved()
        sync_s = time.perf_counter() - start

        report = StepReport(
            rl_step=rl_step,
            policy=self._policy_name,
            reward_mean=sum(rewards) / len(rewards),
            num_tokens=sum(len(r.token_ids) for r in responses),
            rollout_s=rollout_s,
            reward_s=reward_s,
            inference_s=inference_s,
            train_s=train_s,
            sync_s=sync_s,
            recorder_s=max(part.recorder_s for part in parts),
            metrics=metrics,
            notes=self.events.take(),
        )
        rows = step_rows(
            report,
            requests,
            parts,
            rewards,
            epochs=[epoch for epoch, _ in picked for _ in range(rollout.group_size)],
            policy_version=self.policy_version,
            t_start=t_step - self._started,
            drafter=self.drafting.rows(rl_step, metrics["drift_kl"]),
        )
        for table, new in rows.items():
            self._recorder.append(table, new)
        self._recorder.flush()
        self.policy_version += 1
        self.rl_step += 1
        self.reports.append(report)
        return report

    def _picked(self, rl_step: int) -> list[tuple[int, int]]:
        """Epoch and number of each prompt of an RL step."""
        rollout = self.recipe.rollout
        return prompt_batch(len(self.train_prompts), rl_step, rollout.prompts_per_step, self.recipe.seed)

    def _requests(self, rl_step: int) -> list[GenerationRequest]:
        """What an RL step rolls out: `group_size` responses to each of its prompts."""
        rollout = self.recipe.rollout
        prompts = [self.train_prompts[i] for _, i in self._picked(rl_step)]
        return [
            GenerationRequest(
                key=(rl_step, prompt.prompt_id, sample, 0),
                prompt_token_ids=prompt.token_ids,
                max_response_tokens=rollout.max_response_tokens,
            )
            for prompt in prompts
            for sample in range(rollout.group_size)
        ]

    def _repeat(self, requests: Sequence[GenerationRequest], parts: Any, rl_step: int, rollout_s: float) -> None:
        """Roll out the same requests once more and note both times in `repeats.json`; nothing else remembers it."""
        start = time.perf_counter()
        again = self._share(requests, lambda worker, part: worker.repeat.remote(part, rl_step))
        repeat_s = time.perf_counter() - start
        tokens = [[r.token_ids for part in rollout for r in part.responses] for rollout in (parts, again)]
        self._repeats.append(
            {
                "rl_step": rl_step,
                "rollout_s": rollout_s,
                "repeat_s": repeat_s,
                "same_tokens": tokens[0] == tokens[1],
            }
        )
        write_json(self.out / "repeats.json", {"repeats": self._repeats})

    def _tell_others(self, requests: Sequence[GenerationRequest], parts: Any) -> None:
        """Show each worker's drafters what the others generated: a prompt may come back on another worker."""
        if len(self._workers) == 1:
            return
        prompts = {request.key: request.prompt_token_ids for request in requests}
        texts = [[(r.key, prompts[r.key], r.token_ids) for r in part.responses] for part in parts]
        self._get(
            [
                worker.remember.remote([text for n, part in enumerate(texts) if n != number for text in part])
                for number, worker in enumerate(self._workers)
            ]
        )

    def evaluate(self, num_prompts: int | None = None) -> float:
        """Mean reward over the first held-out prompts, one response each, without speculation. Not recorded."""
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
        parts = self._share(requests, lambda worker, part: worker.evaluate.remote(part))
        responses = [r for part in parts for r in part.responses]
        rewards = [
            self.reward(p.text, self._text(r.token_ids), p.answer) for p, r in zip(prompts, responses, strict=True)
        ]
        return sum(rewards) / len(rewards)

    def save(self) -> Path:
        """Write the policy's weights to `checkpoints/final` as a Hugging Face folder, and the drafter's beside them."""
        folder = self.out / "checkpoints" / "final"
        partial = folder.with_name(".final.partial")
        shutil.rmtree(partial, ignore_errors=True)
        self._get(self._trainer.save.remote(str(partial.resolve())))
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
        self.drafting.save()
        return folder

    def trace(self) -> Trace:
        """Everything recorded so far."""
        return self._recorder.snapshot()

    def _share(self, requests: Sequence[GenerationRequest], ask: Callable[[Any, list[GenerationRequest]], Any]) -> Any:
        """Ask every worker for its share of the requests, split in order: request i of N goes to worker i * W // N."""
        num, total = len(self._workers), len(requests)
        cuts = [-(-w * total // num) for w in range(num + 1)]
        return self._get([ask(w, list(requests[cuts[n] : cuts[n + 1]])) for n, w in enumerate(self._workers)])

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

    def _get(self, refs: Any) -> Any:
        """`ray.get` that raises our own errors as themselves and names a dead actor in one line."""
        try:
            return ray.get(refs)
        except RayTaskError as error:
            cause = error.cause
            if isinstance(cause, TltlabError):
                raise cause from None
            raise RunError(f"an actor failed: {type(cause).__name__}: {cause}") from error
        except RayActorError as error:
            raise RunError(f"an actor died: {str(error).splitlines()[0]}") from error

    def _stop(self) -> None:
        try:
            self.drafting.close()
        finally:
            for actor in self._actors:
                ray.kill(actor)
            if self._owns_ray:
                ray.shutdown()


def train(recipe: Recipe, out: Path, *, say: Callable[[str], None]) -> dict[str, Any]:
    """Run a recipe from its first step to its last into the folder `out`; returns the summary that it writes there."""
    out = Path(out)
    if (out / "run.json").exists():
        raise ConfigError(f"{out} already holds a run; choose another --out")
    with GrpoRun(recipe, out) as run:
        write_json(out / "run.json", run_json(recipe))
        run.policy.write(out / "policy.json")
        evaluates = bool(run.heldout_prompts) and recipe.eval.num_prompts > 0
        first = run.evaluate() if evaluates else None
        if first is not None:
            say(f"held-out reward before training {first:.3f}")
        for _ in range(recipe.train.steps):
            say(str(run.step()))
        last = run.evaluate() if evaluates else None
        if last is not None:
            say(f"held-out reward after training {last:.3f}")
        run.save()
        reports, drafter = run.reports, run.drafting.summary()
    summary = {
        "grpo_steps": len(reports),
        "reward_first": first,
        "reward_last": last,
        "steps": [
            {"rl_step": r.rl_step, "policy": r.policy, "reward": r.reward_mean, "rollout_s": r.rollout_s}
            for r in reports
        ],
        "drafter": drafter,
        "trace": "trace",
        "policy": "policy.json",
        "versions": versions(),
    }
    write_json(out / "summary.json", summary)
    return summary
