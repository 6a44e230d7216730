"""Rollouts of several policies on real engines, interleaved: the same prompts, random state and drafter history.

The model does not change. Every rollout is a rehearsal: the engines' state is restored afterwards, so each policy of a
round starts from the same state, and a rollout can be repeated. The rollouts are recorded as a trace with one RL step
per rollout, beside it `policies.json` and `repeats.json` as a training run writes them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from pydantic import ValidationError

from tltlab.drafters.specs import DEFAULT_DRAFTERS, DrafterSpec, LearnedSpec
from tltlab.errors import ConfigError
from tltlab.files import read_json, sealed, write_json
from tltlab.policies.policy import EXPLORE, Policy
from tltlab.policies.specs import ExploreSpec
from tltlab.runtime.data.order import prompt_batch
from tltlab.runtime.data.prompts import load_prompts
from tltlab.runtime.drafter.offline.data import load_tokenizer
from tltlab.runtime.engine.drafter_pool import DrafterPool
from tltlab.runtime.engine.environment import run_json
from tltlab.runtime.engine.generation import GenerationRequest
from tltlab.runtime.ray.start import ray_running
from tltlab.runtime.recipe.engines import engine_build
from tltlab.runtime.recipe.recipe import Recipe
from tltlab.runtime.recipe.user_code import code_of_engines, refuse_code
from tltlab.runtime.run.placement import Placement
from tltlab.runtime.run.rows import repeat_row, rollout_alone, run_manifest
from tltlab.runtime.run.state import RunEvents
from tltlab.strategy import NO_SPECULATION
from tltlab.traces.recorder import Recorder
from tltlab.traces.trace import read

from .collected import all_requests, requests_of
from .pool import WorkerPool

HOLD_ITERATIONS = 10
NUM_REPEATED = 2
"""Rollouts of each round that are repeated."""


@dataclass(frozen=True, kw_only=True)
class RunToVerify:
    """A RUN to roll out again: its recipe with its final model, and its learned drafters, by name."""

    recipe: Recipe
    drafters: dict[str, DrafterSpec]
    num_rl_steps: int


@dataclass(frozen=True, kw_only=True)
class RoundRollout:
    """One recorded rollout: its RL step in the trace, its round, its policy, and its seconds."""

    rl_step: int
    round: int
    policy: str
    rollout_s: float


def run_to_verify(run: Path) -> RunToVerify:
    """Read a RUN's recipe, with its final checkpoint as the model where there is one. ConfigError names the fault.

    A drafter that the run trained is taken from `drafter/final`, fully trained. Tools, and arguments of vLLM that
    import code, must be allowed by name (`tltlab.own.code_allowed`).
    """
    manifest = read_json(Path(run) / "run.json")
    try:
        recipe = Recipe.model_validate(manifest["recipe"])
    except (ValidationError, KeyError, TypeError) as error:
        raise ConfigError(f"{run}/run.json holds no recipe of a training run: {str(error).splitlines()[0]}") from error
    refuse_code(run, code_of_engines(recipe.rollout))
    final, head = Path(run) / "checkpoints" / "final", Path(run) / "drafter" / "final"
    if (final / "config.json").is_file():
        recipe = recipe.model_copy(update={"model": str(final.resolve())})
    drafters: dict[str, DrafterSpec] = {}
    if recipe.drafter is not None and (head / "config.json").is_file():
        drafters[recipe.drafter.name] = LearnedSpec(
            method=recipe.drafter.loss.method, model=str(head.resolve()), fallback=recipe.drafter.fallback
        )
    steps = read(run).rl_steps if (Path(run) / "trace").is_dir() else []
    return RunToVerify(
        recipe=recipe.model_copy(update={"drafter": None}), drafters=drafters, num_rl_steps=max(steps, default=-1) + 1
    )


def all_drafters(run: RunToVerify, policies: Mapping[str, Policy]) -> dict[str, DrafterSpec]:
    """Return the engines' drafters. ConfigError for different drafters of one name, or one that cannot run."""
    needed: dict[str, DrafterSpec] = {}
    for name, policy in policies.items():
        available = DEFAULT_DRAFTERS | policy.drafters | run.recipe.rollout.drafters | run.drafters
        used = {s.drafter for s in policy.strategies if s.speculates}
        for drafter in sorted((used | set(policy.drafters)) & set(available)):
            if needed.setdefault(drafter, available[drafter]) != available[drafter]:
                raise ConfigError(
                    f"policy {name}: its drafter {drafter!r} has other settings than another policy's of that name; "
                    "rename one, or verify them apart"
                )
    specs = DEFAULT_DRAFTERS | run.recipe.rollout.drafters | run.drafters | needed
    pool, longest = DrafterPool(specs, deepest(run, policies)), run.recipe.rollout.max_response_tokens
    for name, policy in policies.items():
        for strategy in policy.strategies:
            if strategy.draft_depth > longest:
                raise ConfigError(
                    f"policy {name}: a draft of {strategy.draft_depth} tokens is longer than the run's longest "
                    f"response, {longest} tokens"
                )
            try:
                pool.check(strategy)
            except ConfigError as error:
                raise ConfigError(f"policy {name}: {error}") from error
    return specs


def deepest(run: RunToVerify, policies: Mapping[str, Policy]) -> int:
    """Return the draft depth to build engines for: the largest of the run's and the policies'."""
    depths = [s.draft_depth for policy in policies.values() for s in policy.strategies]
    return max([run.recipe.rollout.max_draft_depth, *depths])


def explore_all(policies: Mapping[str, Policy]) -> Policy:
    """Return the policy that tries all strategies of these policies, so that learned state favours none of them."""
    strategies = dict.fromkeys([NO_SPECULATION, *(s for policy in policies.values() for s in policy.strategies)])
    return Policy(selector=ExploreSpec(strategies=tuple(strategies), hold_iterations=HOLD_ITERATIONS))


def roll_out(
    run: Path,
    policies: Mapping[str, Policy],
    out: Path,
    *,
    rounds: int,
    seed: int = 0,
    report: Callable[[str], None] = lambda message: None,
) -> None:
    """Roll out each policy once a round on real engines, with RUN's model and data.

    `out` becomes a RUN with one RL step per rollout; RUN itself is unchanged. ConfigError for policies that the engines
    cannot run, RunError where an engine fails.
    """
    session = PolicyRounds(run_to_verify(run), policies, out, seed=seed)
    session.events.watch = report
    report(f"starting {session.recipe.rollout.num_workers} engines on {session.recipe.model}")
    with session:
        session.settle()
        for number in range(rounds):
            done = session.round(number, num_repeated=NUM_REPEATED)
            report(f"round {number + 1} of {rounds}: " + ", ".join(f"{r.policy} {r.rollout_s:.2f} s" for r in done))


class PolicyRounds:
    """The engines of a session and its recording in `out`; a context manager. Leaving it ends engines and own Ray."""

    def __init__(self, run: RunToVerify, policies: Mapping[str, Policy], out: Path, *, seed: int) -> None:
        self.run = run
        self.policies = dict(policies)
        self.out = Path(out)
        self.seed = seed
        self.specs = all_drafters(run, policies)
        depth = deepest(run, policies)
        self.recipe = _engines_alone(run.recipe, depth, seed)
        self.prompts = load_prompts(self.recipe.data.train, self.recipe.data, load_tokenizer(self.recipe.model))
        self.rollouts: list[RoundRollout] = []
        self._in_force: list[dict[str, Any]] = []
        self._repeats: list[dict[str, Any]] = []
        self.events = RunEvents(self.out / "events.jsonl")
        self._stack = ExitStack()

    def __enter__(self) -> PolicyRounds:
        try:
            self._stack.enter_context(ray_running(self.recipe.cluster))
            place = self._stack.enter_context(Placement(self.recipe))
            self._pool = WorkerPool(
                self.recipe,
                engine_build(self.recipe, explore_all(self.policies), self.specs),
                lambda worker: None,
                place.worker_options,
                events=self.events,
                on_restart=lambda worker: None,
            )
            self._stack.callback(self._pool.close)
            self._pool.start()
            notes = "tltlab verify: each RL step is one policy's rollout, the model does not move"
            self._recorder = Recorder(self.out / "trace", run_manifest(self.recipe, self.out.name, self.specs, notes))
            write_json(self.out / "run.json", run_json(self.recipe))
        except BaseException:
            self._stack.close()
            raise
        self._started = time.perf_counter()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        try:
            self._recorder.__exit__(kind, error, tb)
        finally:
            self._stack.close()

    def settle(self) -> None:
        """Run an uncounted rollout, so that one-time work of engines is done."""
        self._pool.set_policy(explore_all(self.policies), 0)
        self._pool.rehearse(self._pool.share(self._requests(0, 0)[0]), 0)

    def round(self, number: int, *, num_repeated: int) -> list[RoundRollout]:
        """Roll out each policy once and an exploring one, in random order, on the prompts of round `number`.

        The first `num_repeated` of that order run twice.
        """
        rng = np.random.default_rng([self.seed, number])
        names = [EXPLORE, *self.policies]
        order = [names[i] for i in rng.permutation(len(names))]
        rollouts = [self._rollout(name, number, again=n < num_repeated) for n, name in enumerate(order)]
        self._recorder.flush()
        self.rollouts += rollouts
        return rollouts

    def _rollout(self, name: str, number: int, *, again: bool) -> RoundRollout:
        rl_step = self.events.rl_step = len(self._in_force)
        policy = explore_all(self.policies) if name == EXPLORE else self.policies[name]
        self._pool.set_policy(policy, rl_step)
        self._in_force.append({"rl_step": rl_step, "name": name, "policy": policy.model_dump(mode="json")})
        write_json(self.out / "policies.json", sealed({"seed": self.seed, "policies": self._in_force}))
        requests, epochs = self._requests(number, rl_step)
        shares = self._pool.share(requests)
        t_start = time.perf_counter() - self._started
        parts = self._pool.rehearse(shares, rl_step)
        # The engines' state is restored, so the repeated rollout is the same.
        repeated = self._pool.repeat(shares, rl_step) if again else []
        rollout_s = max(part.duration_s for part in parts)
        epoch_of = dict(zip((request.key for request in requests), epochs, strict=True))
        requests = [request for share in all_requests(shares, parts) for request in share]
        epochs = [epoch_of[*request.key[:3], 0] for request in requests]
        for table, new in rollout_alone(rl_step, name, requests, parts, epochs=epochs, t_start=t_start).items():
            self._recorder.append(table, new)
        if repeated:
            again_s = max(part.duration_s for part in repeated)
            self._repeats.append(repeat_row(rl_step, parts, repeated, rollout_s=rollout_s, repeat_s=again_s))
            write_json(self.out / "repeats.json", sealed({"repeats": self._repeats}))
        return RoundRollout(rl_step=rl_step, round=number, policy=name, rollout_s=rollout_s)

    def _requests(self, number: int, rl_step: int) -> tuple[list[GenerationRequest], list[int]]:
        """Return the prompts that follow the run's own, round by round, and the epoch of each response."""
        rollout, run = self.recipe.rollout, self.run
        batch = prompt_batch(len(self.prompts), run.num_rl_steps + number, rollout.prompts_per_step, run.recipe.seed)
        groups = [
            requests_of(self.prompts[i], rl_step, rollout.group_size, rollout.max_response_tokens) for _, i in batch
        ]
        return [r for group in groups for r in group], [epoch for epoch, _ in batch for _ in range(rollout.group_size)]


def _engines_alone(recipe: Recipe, max_draft_depth: int, seed: int) -> Recipe:
    """Return a recipe for its engines alone, with whole GPUs, which roll out every response whole."""
    rollout = {"max_draft_depth": max_draft_depth, "repeat_every": 0, "partial": None, "reuse": None}
    return recipe.model_copy(
        update={
            "rollout": recipe.rollout.model_copy(update=rollout),
            "train": recipe.train.model_copy(update={"gpus": 0.0}),
            "cluster": recipe.cluster.model_copy(update={"placement": "separate"}),
            "seed": seed,
            # For policies that are named here; a run does not choose what code is imported.
            "code": (os.getcwd(),),
        }
    )
