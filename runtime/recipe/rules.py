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
        yield f"drafter {drafter.name!r} is in both rollout.drafters and [drafter]: rename one, or leave it out"


def overlong_responses(recipe: Sections) -> Iterator[str]:
    if recipe.train.overlong_buffer > recipe.rollout.max_response_tokens:
        yield "train.overlong_buffer is more than rollout.max_response_tokens"


def losses(recipe: Sections) -> Iterator[str]:
    """Settings of the loss that contradict each other, or have no effect together."""
    train = recipe.train
    weighs, penalised = train.correction in ("truncated", "masked"), train.kl_coef > 0
    correction = f"train.correction = {train.correction!r}"
    for wrong, complaint in (
        (
            train.ratio == "sequence" and weighs and train.correction_level == "token",
            f"train.ratio = 'sequence' (GSPO) with weights of tokens by {correction}: set train.correction_level = "
            "'sequence', or train.correction = 'behaviour'",
        ),
        (
            train.correction_level == "sequence" and not weighs and train.ratio == "token",
            f"train.correction_level = 'sequence' has no effect with {correction}: leave one out",
        ),
        (
            train.correction_cap != 2.0 and not weighs and (train.correction == "none" or not penalised),
            f"train.correction_cap = {train.correction_cap:g} has no effect with {correction}: leave one out",
        ),
        (
            train.dual_clip is not None and train.objective != "clip",
            f"train.dual_clip is a bound of train.objective = 'clip', not of {train.objective!r}: leave one out",
        ),
        (
            not penalised and (train.kl_estimator, train.kl_in) != ("k3", "loss"),
            "train.kl_estimator and train.kl_in have no effect without a penalty: set train.kl_coef above 0",
        ),
        (
            penalised and (train.kl_estimator, train.kl_in, train.correction) == ("k1", "loss", "none"),
            "train.kl_estimator = 'k1' in the loss has no gradient on average with train.correction = 'none': choose "
            "k2 or k3, train.kl_in = 'reward', or a correction",
        ),
    ):
        if wrong:
            yield complaint


def modes(recipe: Sections) -> Iterator[str]:
    """Settings of rollouts that do not go together, and what some of them need."""
    rollout, train = recipe.rollout, recipe.train
    is_set = {
        "rollout.partial": rollout.partial is not None,
        "rollout.reuse": rollout.reuse is not None,
        "rollout.one_step_off": rollout.one_step_off,
        "rollout.staleness": rollout.staleness > 0,
        "rollout.environment": rollout.environment is not None,
        "rollout.repeat_every": rollout.repeat_every > 0,
        f"rollout.placement = {rollout.placement!r}": rollout.placement != "contiguous",
        "rollout.vllm.async_scheduling": bool(rollout.vllm.get("async_scheduling")),
        "train.sampling_rounds above 1": train.sampling_rounds > 1,
        "train.correction = 'none'": train.correction == "none",
        "cluster.placement = 'colocated'": recipe.cluster.placement == "colocated",
        "[drafter]": recipe.drafter is not None,
    }
    chosen = [name for name, chosen in is_set.items() if chosen]
    for names, others, why in _APART:
        for name in (name for name in chosen if name.startswith(names)):
            for other in (other for other in chosen if other.startswith(others)):
                yield f"{name} does not go with {other}: {why}"
    for name in chosen:
        if name in ("rollout.partial", "rollout.staleness") and rollout.prompts_per_step < rollout.num_workers:
            yield (
                f"{name} needs a group for every worker in an RL step, and there are "
                f"{counted(rollout.num_workers, 'worker')} for rollout.prompts_per_step = {rollout.prompts_per_step}"
            )


_CUTS = ("rollout.partial", "rollout.staleness")
_AHEAD = ("rollout.one_step_off", "rollout.staleness")
_APART = (
    (_CUTS, ("rollout.reuse", "rollout.repeat_every", "train.sampling_rounds"), "there are no whole rollouts"),
    (("rollout.environment",), ("rollout.partial", "rollout.reuse", "rollout.staleness"), "turns cannot be cut"),
    (("rollout.reuse",), ("train.sampling_rounds",), "choose one"),
    (("rollout.placement",), ("rollout.partial", *_AHEAD), "only whole rollouts can be placed"),
    (("rollout.partial", *_AHEAD), ("train.correction",), "off-policy training needs a correction"),
    (_AHEAD, ("cluster.placement",), "engines need separate devices, 'separate'"),
    (_AHEAD, ("rollout.partial", "[drafter]"), "they need rollouts between two updates"),
    (("rollout.one_step_off",), ("rollout.reuse", "rollout.repeat_every"), "it overlaps with training"),
    (("rollout.staleness",), ("rollout.one_step_off",), "that is a staleness of 1 whose weights wait for the rollout"),
    (("rollout.staleness",), ("rollout.vllm.async_scheduling",), "weights come between two iterations"),
)
"""Settings of the first kind exclude those of the second; the reason."""


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


def exact_replay(recipe: Sections) -> Iterator[str]:
    """Only for a run that follows recorded decisions."""
    environment = recipe.rollout.environment
    if environment is not None and environment.processes:
        yield "decisions are replayed exactly only where tools answer at once: set rollout.environment.processes = 0"
    if recipe.drafter is not None or recipe.train.sampling_rounds > 1:
        yield "decisions are replayed exactly only without [drafter] and with train.sampling_rounds = 1"


def sequence_parallel(recipe: Sections) -> Iterator[str]:
    train = recipe.train
    if train.ranks % train.sequence_parallel:
        yield f"train.ranks = {train.ranks} is no multiple of train.sequence_parallel = {train.sequence_parallel}"


def undivided_heads(size: int, model: str, heads: int, kv_heads: int) -> Iterator[str]:
    """Complain where `train.sequence_parallel` = `size` does not divide the heads, which ranks share evenly."""
    if heads % size or kv_heads % size:
        yield (
            f"train.sequence_parallel = {size} does not divide the {heads} heads and {kv_heads} KV heads of {model}: "
            f"choose a divisor of {gcd(heads, kv_heads)}"
        )


RULES = (biased_sampling, drafting, overlong_responses, losses, modes, sequence_parallel)
"""Rules for a whole recipe, whose fields are each valid by themselves."""
