"""Rules for a whole recipe: one function each; all complaints are collected.

A rule yields sentences that name the field and the remedy. Rules that need this machine's files are in `checks`, those
that count GPUs in `gpus`.
"""

from collections.abc import Iterator
from math import gcd

from tltlab.config import counted
from tltlab.errors import ConfigError, did_you_mean

from .sections import ALGORITHMS, Sections


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
    train = recipe.train
    if train.overlong_buffer > recipe.rollout.max_response_tokens:
        yield "train.overlong_buffer is more than rollout.max_response_tokens"
    if train.overlong_buffer and train.overlong != "penalty":
        yield f"train.overlong_buffer has no effect with train.overlong = {train.overlong!r}: it is for 'penalty'"


def reward_terms(recipe: Sections) -> Iterator[str]:
    labels, train = [term.label for term in recipe.reward_terms], recipe.train
    if not labels:
        yield "reward names no function: give package.module:function, or terms with path and weight"
    for label in sorted({label for label in labels if labels.count(label) > 1}):
        yield f"reward has {labels.count(label)} terms of the name {label!r}: give each a name of its own"
    if train.sampling_term is not None and train.sampling_term not in labels:
        near = did_you_mean(train.sampling_term, labels)
        yield f"train.sampling_term = {train.sampling_term!r} is no term of reward{near}: it has {', '.join(labels)}"
    if train.sampling_term is not None and train.sampling_rounds == 1:
        yield "train.sampling_term has no effect with train.sampling_rounds = 1: set sampling_rounds, or leave it out"


def advantage(recipe: Sections) -> Iterator[str]:
    """Settings of advantages that contradict each other, or need more than one response to a prompt."""
    train, size = recipe.train, recipe.rollout.group_size
    if train.advantage is not None:
        algorithm = ALGORITHMS.get(train.algorithm or "", {})
        for name in ("baseline", "advantage_scale"):
            if getattr(train, name) != algorithm.get(name, "group"):
                yield f"train.{name} has no effect with train.advantage, a function of your own: leave one of them out"
    elif train.baseline != "group" and train.advantage_scale == "group":
        yield (
            f"train.baseline = {train.baseline!r} needs train.advantage_scale = 'none' or 'batch': over the standard "
            "deviation of a group that baseline has no effect or no meaning"
        )
    if train.baseline == "none" and train.sampling_rounds > 1:
        yield (
            "train.sampling_rounds above 1 replaces groups whose rewards are all equal, and with train.baseline = "
            "'none' they train: set train.sampling_rounds = 1"
        )
    if size == 1 and train.baseline != "none" and train.advantage is None:
        yield (
            f"rollout.group_size = 1 leaves train.baseline = {train.baseline!r} no other response to compare with: set "
            "rollout.group_size to 2 or more, or train.algorithm = 'reinforce++'"
        )


def schedules(recipe: Sections) -> Iterator[str]:
    train = recipe.train
    if train.epochs is not None and "steps" in train.model_fields_set:
        yield f"train.epochs = {train.epochs:g} beside train.steps = {train.steps}: leave one of them out"
    if train.lr_min_share and train.lr_schedule == "constant":
        yield "train.lr_min_share needs a falling rate: set train.lr_schedule to 'cosine' or 'linear'"
    if not train.decay_all and not train.weight_decay:
        yield "train.decay_all = false exempts parameters from train.weight_decay, which is 0: set it, or leave it out"


def evaluations(recipe: Sections) -> Iterator[str]:
    config, data = recipe.eval, recipe.data
    if max(config.pass_at, default=0) > config.samples:
        yield f"eval.pass_at = {max(config.pass_at)} needs as many responses: eval.samples = {config.samples}"
    if config.temperature == 0 and config.samples > 1:
        yield f"eval.samples = {config.samples} with eval.temperature = 0: greedy responses are all the same"
    if recipe.checkpoint.best and not (data.heldout and config.num_prompts and config.every):
        yield "checkpoint.best needs evaluations: set data.heldout, eval.num_prompts and eval.every"
    if data.chat_template_kwargs and not data.chat:
        yield "data.chat_template_kwargs is for the model's chat template: set data.chat = true, or leave it out"
    for name in _OF_THE_CALL & data.chat_template_kwargs.keys():
        yield f"data.chat_template_kwargs.{name} is no variable of a chat template: leave it out"


_OF_THE_CALL = {
    "conversation", "add_generation_prompt", "continue_final_message", "tokenize", "padding", "truncation",
    "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs",
}  # fmt: skip
"""Arguments of `apply_chat_template` that are not passed on to the template."""


def long_warmup(recipe: Sections) -> Iterator[str]:
    """Warn of a learning rate that never reaches `train.lr`."""
    train = recipe.train
    num_steps = train.steps * train.passes * train.minibatches
    if train.warmup_steps > num_steps:
        yield (
            f"train.warmup_steps = {train.warmup_steps}, but the run has {counted(num_steps, 'optimizer step')}: the "
            f"rate never reaches train.lr = {train.lr:g}"
        )


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
            train.kl_in == "reward" and train.advantage is not None,
            "train.kl_in = 'reward' does not reach train.advantage, which sees rewards before the penalty: set 'loss'",
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
    restarts = rollout.partial is not None and rollout.partial.leftover == "restart"
    is_set = {
        "rollout.partial": rollout.partial is not None,
        "rollout.reuse": rollout.reuse is not None,
        "rollout.stop": bool(rollout.stop),
        "rollout.one_step_off": rollout.one_step_off,
        "rollout.staleness": rollout.staleness > 0,
        "rollout.environment": rollout.environment is not None,
        "rollout.planner": rollout.planner is not None,
        "rollout.repeat_every": rollout.repeat_every > 0,
        f"rollout.placement = {rollout.placement!r}": rollout.placement != "contiguous",
        "train.sampling_rounds above 1": train.sampling_rounds > 1,
        "train.correction = 'none'": train.correction == "none" and not restarts,
        "train.lora.serve = 'adapter'": train.served_adapter is not None,
        f"cluster.weights = {recipe.cluster.weights!r}": recipe.cluster.weights in ("nccl", "ipc"),
        "cluster.placement = 'colocated'": recipe.cluster.placement == "colocated",
        "[drafter]": recipe.drafter is not None,
    }
    chosen = [name for name, chosen in is_set.items() if chosen]
    for names, others, why in _APART:
        for name in (name for name in chosen if name.startswith(names)):
            for other in (other for other in chosen if other.startswith(others)):
                yield f"{name} does not go with {other}: {why}"
    if rollout.workload not in (None, rollout.system):
        yield f"rollout.workload = {rollout.workload!r}, whose sizes these are, needs that rollout.system: set both"
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
    (
        ("rollout.planner",),
        (*_CUTS, "rollout.one_step_off", "rollout.repeat_every"),
        "it moves requests as time passes",
    ),
    (("rollout.planner",), ("rollout.environment", "[drafter]"), "engines without requests may get some again"),
    (("rollout.reuse",), ("train.sampling_rounds",), "choose one"),
    (("rollout.reuse",), ("rollout.stop",), "a prefix that is reused is not searched for stop strings"),
    (("rollout.placement",), _CUTS, "only whole rollouts can be placed"),
    (("rollout.partial", *_AHEAD), ("train.correction",), "off-policy training needs a correction"),
    (_AHEAD, ("cluster.placement",), "engines need separate devices, 'separate'"),
    (_AHEAD, ("rollout.partial", "[drafter]"), "they need rollouts between two updates"),
    (("rollout.one_step_off",), ("rollout.reuse", "rollout.repeat_every"), "it overlaps with training"),
    (("rollout.staleness",), ("rollout.one_step_off",), "that is a staleness of 1 whose weights wait for the rollout"),
    (("train.lora",), ("cluster.weights",), "adapters go by the host"),
)
"""Settings of the first kind exclude those of the second; the reason."""


def tail_shape(recipe: Sections) -> Iterator[str]:
    """Engines of another shape that do not take the GPUs of whole others, and costs of other shapes."""
    rollout = recipe.rollout
    if len(rollout.planner_costs) not in (0, 1 + (rollout.tail_shape is not None)):
        yield "rollout.planner_costs: those of the engines, and of rollout.tail_shape where it is set"
    if rollout.tail_shape is None:
        return
    try:
        base, tail = rollout.shapes
        base.check_same_gpus(tail)
        if tail.gpus <= base.gpus:
            raise ConfigError(f"{tail} must have fewer engines of more GPUs than {base}")
    except ConfigError as error:
        yield f"rollout.tail_shape: {error}"
    if rollout.gpus_per_worker is not None or rollout.planner is None:
        yield "rollout.tail_shape needs rollout.planner, and engines of whole GPUs without rollout.gpus_per_worker"


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


def cut_sampling(recipe: Sections) -> Iterator[str]:
    """Note tokens drawn from a cut distribution that are trained on as if drawn from the whole one."""
    neutral = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
    values = {name: getattr(recipe.rollout, name) for name in neutral}
    if cut := ", ".join(f"rollout.{name} = {value}" for name, value in values.items() if value != neutral[name]):
        biased = "importance weights are biased" if recipe.train.correction != "none" else "nothing corrects for that"
        yield f"{cut} cuts tokens off that have nonzero probability in the trainer: {biased}"


def planner_costs(recipe: Sections) -> Iterator[str]:
    """Say by which costs a planner reckons."""
    rollout, cluster = recipe.rollout, recipe.cluster
    if rollout.planner is not None:
        default = f"a profile of {cluster.gpu}" if cluster.gpus_per_node else "cpu-small, whatever the shape"
        costs = ", ".join(rollout.planner_costs) or default
        yield f"rollout.planner reckons with plain decoding at these costs (rollout.planner_costs): {costs}"


NOTES = (uneven_minibatches, cut_sampling, long_warmup, planner_costs)
"""Notes in a dry run and in a run's log on settings that are allowed."""


def notes_of(recipe: Sections) -> Iterator[str]:
    for rule in NOTES:
        yield from rule(recipe)


def exact_replay(recipe: Sections) -> Iterator[str]:
    """Only for a run that follows recorded decisions."""
    environment = recipe.rollout.environment
    if environment is not None and environment.processes:
        yield "decisions are replayed exactly only where tools answer at once: set rollout.environment.processes = 0"
    if recipe.rollout.planner is not None:
        yield "decisions are replayed exactly only without rollout.planner, which moves requests as time passes"
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


RULES = (
    drafting, overlong_responses, reward_terms, advantage, losses, schedules, evaluations, modes,
    sequence_parallel, tail_shape,
)  # fmt: skip
"""Rules for a whole recipe, whose fields are each valid by themselves."""
