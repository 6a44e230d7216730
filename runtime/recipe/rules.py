"""Rules for a whole recipe: one function each; all complaints are collected.

A rule yields sentences that name the field and the remedy. Rules that need this machine's files are in `checks`, those
that count GPUs in `gpus`.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd

from tltlab.config import counted

from .sections import Sections


def biased_sampling(recipe: Sections) -> Iterator[str]:
    rollout, train = recipe.rollout, recipe.train
    if train.correction == "none" or train.accept_biased_sampling:
        return
    neutral = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
    biased = [f"{name} = {getattr(rollout, name)}" for name in neutral if getattr(rollout, name) != neutral[name]]
    if biased:
        yield (
            f"rollout.{', rollout.'.join(biased)} cuts tokens off that have nonzero probability in the trainer, so "
            "importance weights are biased: leave it out, or set train.accept_biased_sampling = true"
        )


def drafting(recipe: Sections) -> Iterator[str]:
    rollout, drafter = recipe.rollout, recipe.drafter
    if rollout.min_p and rollout.max_draft_depth:
        yield "rollout.min_p needs rollout.max_draft_depth = 0: vLLM does not speculate with it"
    if drafter is not None and not rollout.max_draft_depth:
        yield "a recipe with a [drafter] needs rollout.max_draft_depth above 0"
    if drafter is not None and drafter.loss.method == "mtp" and drafter.checkpoint is not None:
        yield "drafter.checkpoint with drafter.loss.kind = 'mtp': an MTP layer comes with the model, so leave it out"
    if drafter is not None and drafter.name in rollout.drafters:
        yield (
            f"drafter {drafter.name!r} is in both rollout.drafters and [drafter]: leave it out of "
            "rollout.drafters, or give one of them another name"
        )


def overlong_responses(recipe: Sections) -> Iterator[str]:
    if recipe.train.overlong_buffer > recipe.rollout.max_response_tokens:
        yield "train.overlong_buffer is more than rollout.max_response_tokens"


def partial_rollouts(recipe: Sections) -> Iterator[str]:
    rollout = recipe.rollout
    if rollout.partial is None:
        return
    if rollout.reuse is not None:
        yield "rollout.partial and rollout.reuse do not go together: choose one"
    if rollout.prompts_per_step < rollout.num_workers:
        yield (
            f"rollout.partial needs a group for every worker to complete in an RL step, and there are "
            f"{counted(rollout.num_workers, 'worker')} for rollout.prompts_per_step = {rollout.prompts_per_step}"
        )
    if recipe.train.correction == "none":
        yield "rollout.partial is off-policy and needs train.correction to be 'truncated' or 'behaviour'"
    if rollout.repeat_every:
        yield "rollout.repeat_every repeats whole rollouts, and rollout.partial has none"


def environments(recipe: Sections) -> Iterator[str]:
    rollout = recipe.rollout
    if rollout.environment is not None and (rollout.partial is not None or rollout.reuse is not None):
        yield "rollout.environment has responses of several turns, which rollout.partial and rollout.reuse cannot cut"


def off_policy(recipe: Sections) -> Iterator[str]:
    """Rollouts in parallel with training."""
    rollout = recipe.rollout
    if not (rollout.one_step_off or rollout.staleness):
        return
    name = "rollout.staleness" if rollout.staleness else "rollout.one_step_off"
    if recipe.cluster.placement == "colocated":
        yield f"{name} needs devices of the engines' own: set cluster.placement = 'separate'"
    if recipe.train.correction == "none":
        yield f"{name} is off-policy and needs train.correction to be 'truncated' or 'behaviour'"
    conflicts: dict[str, object] = {
        "[drafter]": recipe.drafter, "rollout.reuse": rollout.reuse, "rollout.partial": rollout.partial,
        "rollout.repeat_every": rollout.repeat_every,
    }  # fmt: skip
    if rollout.staleness:
        conflicts |= {
            "rollout.one_step_off, which is a staleness of 1 whose weights wait for the rollout": rollout.one_step_off,
            "rollout.environment, whose turns it cannot cut": rollout.environment,
            "train.sampling_rounds above 1": recipe.train.sampling_rounds > 1,
            "rollout.vllm.async_scheduling": rollout.vllm.get("async_scheduling"),
        }
        if rollout.prompts_per_step < rollout.num_workers:
            yield (
                "rollout.staleness needs a group for every worker in an RL step, and there are "
                f"{counted(rollout.num_workers, 'worker')} for rollout.prompts_per_step = {rollout.prompts_per_step}"
            )
    yield from (f"{name} does not go with {setting}" for setting, is_set in conflicts.items() if is_set)


def placement(recipe: Sections) -> Iterator[str]:
    """Only whole rollouts can be placed, not requests that begin as others end."""
    rollout = recipe.rollout
    if rollout.placement == "contiguous":
        return
    modes = {"partial": rollout.partial, "one_step_off": rollout.one_step_off, "staleness": rollout.staleness}
    for mode in (name for name, value in modes.items() if value):
        yield f"rollout.placement = {rollout.placement!r} places whole rollouts: leave out rollout.{mode}"


def uneven_minibatches(recipe: Sections) -> Iterator[str]:
    """Warn of optimizer steps of one RL step that average over different numbers of responses.

    >>> sections = {"model": "m", "reward": "r:f", "data": {"train": "t"}, "rollout": {"prompts_per_step": 16}}
    >>> list(uneven_minibatches(Sections.model_validate(sections | {"train": {"minibatches": 4}})))
    []
    """
    num, minibatches = recipe.rollout.prompts_per_step * recipe.rollout.group_size, recipe.train.minibatches
    size, larger = divmod(num, minibatches)
    if larger:
        sizes = f"{larger} have {size + 1} and {minibatches - larger} have {size}" if size else f"there are only {num}"
        divisor = min((n for n in range(1, num + 1) if num % n == 0), key=lambda n: abs(n - minibatches))
        yield (
            f"train.minibatches = {minibatches} does not divide the {num} responses of an RL step "
            f"(rollout.prompts_per_step x rollout.group_size): {sizes}; {divisor} divides them"
        )


def sampling_rounds(recipe: Sections) -> Iterator[str]:
    rollout = recipe.rollout
    if (rollout.partial is not None or rollout.reuse is not None) and recipe.train.sampling_rounds > 1:
        yield "train.sampling_rounds above 1 needs neither rollout.partial nor rollout.reuse"


def exact_replay(recipe: Sections) -> Iterator[str]:
    """Only for a run that follows recorded decisions."""
    environment = recipe.rollout.environment
    if environment is not None and environment.processes:
        yield "decisions are replayed exactly only where tools answer at once: set rollout.environment.processes = 0"
    if recipe.drafter is not None or recipe.train.sampling_rounds > 1:
        yield (
            "decisions are replayed exactly only where nothing else depends on the clock: leave out [drafter], "
            "which learns in idle time, and set train.sampling_rounds = 1"
        )


def sequence_parallel(recipe: Sections) -> Iterator[str]:
    train = recipe.train
    if train.ranks % train.sequence_parallel:
        yield (
            f"train.sequence_parallel = {train.sequence_parallel} ranks share a sequence, and train.ranks = "
            f"{train.ranks} is no multiple of it"
        )


def undivided_heads(size: int, model: str, heads: int, kv_heads: int) -> Iterator[str]:
    """Complain where `train.sequence_parallel` = `size` does not divide the heads, which ranks share evenly."""
    if heads % size or kv_heads % size:
        yield (
            f"train.sequence_parallel = {size} does not divide the {heads} heads and {kv_heads} KV heads of {model}: "
            f"choose a divisor of {gcd(heads, kv_heads)}"
        )


RULES = (
    biased_sampling, drafting, overlong_responses, partial_rollouts, environments, off_policy, placement,
    sampling_rounds, sequence_parallel,
)  # fmt: skip
"""Rules for a whole recipe, whose fields are each valid by themselves."""
