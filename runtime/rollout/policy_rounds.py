"""Rollouts of several policies on real engines, interleaved: the same prompts, random state and drafter history.

The model does not change. Every rollout is a rehearsal: the engines' state is restored afterwards, so each policy of a
round starts from the same state, and a rollout can be repeated. The rollouts are recorded as a trace with one RL step
per rollout, next to it `policies.json` and `repeats.json` as a training run writes them.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from pydantic import ValidationError

from tltlab.drafters.base import Key
from tltlab.drafters.specs import DEFAULT_DRAFTERS, DrafterSpec, LearnedSpec
from tltlab.errors import ConfigError
from tltlab.files import read_json, sealed, write_json
from tltlab.policies.policy import EXPLORE, Policy
from tltlab.policies.specs import ExploreSpec
from tltlab.records import frozen
from tltlab.runtime.data.order import DataOrder
from tltlab.runtime.data.prompts import Prompt, read_prompts
from tltlab.runtime.drafter.offline.data import load_tokenizer
from tltlab.runtime.engine.drafter_pool import DrafterPool
from tltlab.runtime.engine.environment import run_json
from tltlab.runtime.engine.generation import GenerationRequest
from tltlab.runtime.ray.start import ray_running
from tltlab.runtime.recipe.engines import engine_build
from tltlab.runtime.recipe.recipe import Recipe
from tltlab.runtime.recipe.user_code import code_of_engines, refuse_code
from tltlab.runtime.run.placement import GpuPlacement
from tltlab.runtime.run.rows import repeat_row, run_manifest
from tltlab.runtime.run.state import RunEvents
from tltlab.strategy import NO_SPECULATION
from tltlab.traces.trace import read

from .collected import requests_of
from .pool import WorkerPool
from .session import SessionRecorder, visits

HOLD_ITERATIONS = 10
NUM_REPEATED = 2
"""Rollouts of each round that are repeated."""


@frozen
class RunToVerify:
    """A RUN to roll out again: its recipe with its final model, and its learned drafters, by name."""

    recipe: Recipe
    drafters: dict[str, DrafterSpec]
    num_rl_steps: int


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
                raise ConfigError(f"policy {name}: drafter {drafter!r} of another policy differs: rename one")
    specs = DEFAULT_DRAFTERS | run.recipe.rollout.drafters | run.drafters | needed
    pool, longest = DrafterPool(specs, deepest(run, policies)), run.recipe.rollout.max_response_tokens
    for name, policy in policies.items():
        for strategy in policy.strategies:
            if strategy.draft_depth > longest:
                raise ConfigError(
                    f"policy {name}: drafts of {strategy.draft_depth} tokens exceed responses of {longest}"
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
    source = run_to_verify(run)
    specs, exploring = all_drafters(source, policies), explore_all(policies)
    chosen = {EXPLORE: exploring, **policies}
    recipe = _engines_alone(source.recipe, deepest(source, policies), seed)
    prompts, _ = read_prompts(recipe.data.train, recipe.data, load_tokenizer(recipe.model))
    order = DataOrder(len(prompts), source.recipe.seed)
    batches = [order.take(recipe.rollout.prompts_per_step) for _ in range(source.num_rl_steps + rounds)]
    # Those that follow the run's own.
    batches = batches[source.num_rl_steps :]
    events = RunEvents(out / "events.jsonl")
    events.watch = report
    report(f"starting {recipe.rollout.num_workers} engines on {recipe.model}")
    repeats = []
    with ExitStack() as stack:
        stack.enter_context(ray_running(recipe.cluster))
        place = stack.enter_context(GpuPlacement(recipe))
        build = engine_build(recipe, exploring, specs)
        pool = WorkerPool(
            recipe, build, lambda worker: None, place.worker_options, events=events, on_restart=lambda worker: None
        )
        stack.callback(pool.close)
        pool.start()
        notes = "tltlab verify: each RL step is one policy's rollout, the model does not move"
        manifest = run_manifest(recipe, out.name, specs, notes)
        recorder = stack.enter_context(SessionRecorder(out, manifest, chosen, seed))
        write_json(out / "run.json", run_json(recipe))
        # An uncounted rollout, so that one-time work of engines is done.
        pool.set_policy(exploring, 0)
        pool.rehearse(pool.share(_requests(recipe, prompts, batches[0], 0)[0]), 0)
        for visit in visits(list(chosen), rounds, seed):
            rl_step = events.rl_step = visit.rl_step
            pool.set_policy(chosen[visit.policy], rl_step)
            requests, epochs = _requests(recipe, prompts, batches[visit.round], rl_step)
            shares = pool.share(requests)
            parts = pool.rehearse(shares, rl_step)
            # The engines' state is restored, so the repeated rollout is the same.
            again = pool.repeat(shares, rl_step) if rl_step % len(chosen) < NUM_REPEATED else []
            rollout_s = recorder.add(visit, shares, parts, epochs)
            if again:
                repeat_s = max(part.duration_s for part in again)
                repeats.append(repeat_row(rl_step, parts, again, rollout_s=rollout_s, repeat_s=repeat_s))
                write_json(out / "repeats.json", sealed({"repeats": repeats}))
            report(f"round {visit.round + 1} of {rounds}: {visit.policy} {rollout_s:.2f} s")


def _requests(
    recipe: Recipe, prompts: Sequence[Prompt], batch: Sequence[tuple[int, int]], rl_step: int
) -> tuple[list[GenerationRequest], dict[Key, int]]:
    """Return the requests of a batch of (epoch, prompt number), and the epochs of the responses by key."""
    rollout, requests, epochs = recipe.rollout, list[GenerationRequest](), dict[Key, int]()
    for epoch, at in batch:
        group = requests_of(prompts[at], rl_step, rollout.group_size, rollout.max_response_tokens)
        requests += group
        epochs |= dict.fromkeys((request.key for request in group), epoch)
    return requests, epochs


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
