"""Checks of a recipe before anything starts: `check`. Imports no torch, except to read a checkpoint."""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from importlib.util import find_spec
from pathlib import Path

from tltlab.config import counted
from tltlab.drafters.specs import LearnedSpec, check_drafter, check_sampled_drafts
from tltlab.errors import ConfigError, InputError, did_you_mean, refuse
from tltlab.files import found_in
from tltlab.hardware import per_gpu_heads
from tltlab.policies.policy import Policy
from tltlab.runtime.data.prompts import first_row, num_rows
from tltlab.runtime.engine.drafter_pool import DrafterPool
from tltlab.runtime.rollout.reward_pool import RewardPool
from tltlab.runtime.run.checkpoints import newest_whole
from tltlab.traces.trace import read

from .engines import drafters_of, engine_context, engines_of, shape_of
from .gpus import bundles_of
from .planner import costs_of_shapes
from .recipe import Recipe
from .rules import exact_replay, undivided_heads

_FILES = (".jsonl", ".json", ".csv", ".arrow", ".parquet")
_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
MOST_PARAMS_BY_DEFAULT = 100e6
"""Parameters of a model that may be trained at the default learning rate."""
IMPORTS_S = 60.0
"""Seconds for a reward's imports in its first call, beyond its own time limit."""


def check(recipe: Recipe, out: Path, *, resume: bool = False, replay: Path | None = None, tries: bool = False) -> None:
    """Raise ConfigError with all faults that prevent a run of `recipe` in the folder `out`.

    Rewards and a policy's class are imported. The policy has to fit the engines, local files and folders must exist,
    and GPUs add up. With `resume` the recipe must be able to continue that run's newest whole checkpoint; `replay` must
    be a trace with decisions. First rows of files must have the columns; with `tries` the reward is called once on the
    first. Models and datasets of the Hugging Face Hub are not checked.
    """
    # Standard output is for results only, not for output of a user's module.
    with redirect_stdout(sys.stderr):
        complaints = [complaint for rule in RULES for complaint in _all_of(rule, recipe)]
    complaints += writable_folder(out)
    if tries and not complaints:
        complaints += _all_of(check_reward, recipe)
    if resume:
        complaints += _all_of(same_run, recipe, out)
    if replay is not None:
        complaints += _all_of(recorded_decisions, recipe, replay)
    refuse(complaints)


def _all_of(rule: Callable[..., object], *arguments: object) -> Iterator[str]:
    """Yield the complaints of a rule that yields some, or the InputError that ends it."""
    try:
        if isinstance(complaints := rule(*arguments), Iterator):
            yield from complaints
    except InputError as error:
        yield str(error)


def policy(recipe: Recipe) -> Iterator[str]:
    return policy_on_engines(recipe, recipe.read_policy())


def policy_on_engines(recipe: Recipe, policy: Policy) -> Iterator[str]:
    """Yield what the recipe's engines lack for `policy`: a drafter, or a draft that deep."""
    specs, config = drafters_of(recipe, policy), recipe.drafter
    for name, spec in specs.items():
        if isinstance(spec, LearnedSpec) and (config is None or name != config.name or not spec.model):
            if spec.model:
                yield from model_folder(spec.model, f"rollout.drafters.{name}.model")
            check_drafter(recipe.model, name, spec)
    if config is not None and config.checkpoint is not None:
        yield from model_folder(config.checkpoint, "drafter.checkpoint", weights=(".safetensors", ".bin"))
    check_sampled_drafts(specs, recipe.rollout.vllm.get("speculative_config"))
    pool = DrafterPool(specs, recipe.rollout.max_draft_depth)
    for strategy in policy.strategies:
        try:
            pool.check(strategy)
        except ConfigError as error:
            yield f"{recipe.rollout.chosen_by}: {error}"
            # Its other strategies lack the same.
            return


def model(recipe: Recipe) -> Iterator[str]:
    return model_folder(recipe.model, "model")


def model_folder(name: str, field: str, weights: Sequence[str] = (".safetensors",)) -> Iterator[str]:
    """Complain about a local folder that holds no model with weights."""
    folder = Path(name)
    if not name:
        yield f"{field} is empty: name a folder, or a model of the Hugging Face Hub"
    elif not folder.exists():
        if _is_a_path(name):
            yield f"{field} = {name}: there is no such folder"
    elif not (folder / "config.json").is_file():
        yield f"{field} = {name} is no model: it has no config.json"
    elif not any(file.suffix in weights for file in folder.iterdir()):
        yield f"{field} = {name} has no weights: it needs a .safetensors file"


def sequence_parallel(recipe: Recipe) -> Iterator[str]:
    size = recipe.train.sequence_parallel
    if size > 1:
        try:
            shape = shape_of(recipe.model)
        except ConfigError:
            # A model that is not here, or not dense, is checked when the trainer loads it.
            return
        yield from undivided_heads(size, recipe.model, shape.heads, shape.kv_heads)


def planner(recipe: Recipe) -> None:
    """Raise ConfigError for a planner that cannot be loaded, unknown costs, and heads that an engine cannot share."""
    recipe.read_planner()
    costs_of_shapes(recipe)
    for shape in recipe.rollout.shapes[1:]:
        per_gpu_heads(shape_of(recipe.model), shape.gpus)


def lora_targets(recipe: Recipe) -> None:
    """Raise ConfigError for modules to adapt that a model in a folder does not have."""
    config = recipe.train.lora
    if config is not None and config.targets != "all-linear" and (Path(recipe.model) / "config.json").is_file():
        # Imported here: it imports torch.
        from tltlab.runtime.trainer.lora import outline, targets_of

        targets_of(outline(recipe.model), config, recipe.model)


def data(recipe: Recipe) -> Iterator[str]:
    for field, source in recipe.data.sources.items():
        if source == "":
            yield f"{field} is empty: name a file, a folder or a dataset"
        elif not Path(source).exists():
            of_a_file = any(suffix in _FILES for suffix in Path(source).suffixes[-2:])
            if of_a_file or _is_a_path(source):
                yield f"{field}: cannot read {source}: there is no such file or folder"


def first_rows(recipe: Recipe) -> Iterator[str]:
    """Complain about columns that the first row of a file lacks."""
    for source in recipe.data.sources.values():
        yield from _all_of(first_row, source, recipe.data)


def enough_prompts(recipe: Recipe) -> Iterator[str]:
    """Complain about a file of fewer prompts than an RL step takes."""
    per_step = recipe.rollout.prompts_per_step
    rows = num_rows(recipe.data.train) if recipe.data.train else None
    if rows and rows < per_step:
        yield f"rollout.prompts_per_step = {per_step}: lower it, {recipe.data.train} has {counted(rows, 'prompt')}"


def context(recipe: Recipe) -> Iterator[str]:
    """Complain about a context shorter than the longest response allowed; its prompt may still shorten a response."""
    longest, room, vllm = recipe.rollout.max_response_tokens, engine_context(recipe), recipe.rollout.vllm
    if room is not None and longest > room:
        where = "rollout.vllm.max_model_len" if vllm.get("max_model_len") else f"the context of {recipe.model}"
        yield f"rollout.max_response_tokens = {longest}, but {where} = {room} tokens, prompt included: lower it"


def cpu_engine(recipe: Recipe) -> Iterator[str]:
    """Complain about a head size that vLLM's attention on the CPU lacks: vLLM would fail in its first batch."""
    if bundles_of(recipe).all or not (Path(recipe.model) / "config.json").is_file():
        return
    from tltlab.runtime.engine.vllm import cpu_head_sizes

    sizes = cpu_head_sizes()
    try:
        size = shape_of(recipe.model).head_dim
    except ConfigError:  # no dense decoder
        return
    if sizes and size not in sizes:
        yield f"heads of {recipe.model} have {size} numbers, vLLM takes {sizes} on a CPU: take another model, or GPUs"


def engine_dtype(recipe: Recipe) -> Iterator[str]:
    """Complain about a dtype unknown to vLLM."""
    dtype = recipe.rollout.vllm.get("dtype")
    if dtype is None:
        return
    from tltlab.runtime.engine.vllm import dtypes

    names = dtypes()
    if names and dtype not in names:
        near = did_you_mean(str(dtype), names)
        yield f"rollout.vllm.dtype = {dtype!r}: vLLM has {', '.join(names)}{near}"


def enough_gpus(recipe: Recipe) -> None:
    """Raise ConfigError where a run would start Ray on this machine, which has fewer GPUs than its actors take.

    GPUs are those that Ray would find. Not one of the rules of `check`: a dry run works on any machine.
    """
    asked = bundles_of(recipe).num_gpus
    if not asked or recipe.cluster.num_nodes > 1 or os.environ.get("RAY_ADDRESS", "local") != "local":
        return
    # Imported here: not needed by a recipe without GPUs, or by a dry run.
    import ray
    from ray._private.accelerators import get_accelerator_manager_for_resource

    manager = get_accelerator_manager_for_resource("GPU")
    visible = manager.get_current_process_visible_accelerator_ids()
    found = min(manager.get_current_node_num_accelerators(), len(visible) if visible is not None else sys.maxsize)
    if not ray.is_initialized() and found < asked:
        raise ConfigError(
            f"workers and trainer ranks ask for {asked:g} GPUs (cluster.gpus_per_node = "
            f"{recipe.cluster.gpus_per_node}), and Ray finds {found} on this machine: ask for fewer, set RAY_ADDRESS "
            "to a cluster that has them, or look at the plan with --dry-run"
        )


def learning_rate(recipe: Recipe) -> Iterator[str]:
    """Complain about a missing learning rate: the default is for tltlab's small models and ruins large ones."""
    if "lr" in recipe.train.model_fields_set:
        return
    try:
        params = shape_of(recipe.model).stored_params
    except ConfigError:
        return
    if params > MOST_PARAMS_BY_DEFAULT:
        yield (
            f"set train.lr (1e-6 is usual): its default {recipe.train.lr:g} is for small models, {recipe.model} has "
            f"{params / 1e6:.0f} M parameters"
        )


def loggers(recipe: Recipe) -> Iterator[str]:
    """Complain about a service that the metrics go to and that is not installed."""
    for name, project in recipe.log:
        if project and find_spec(name) is None:
            yield f"log.{name} = {project!r}: pip install {name}, or leave log.{name} out"


def objective(recipe: Recipe) -> None:
    """Raise ConfigError for an objective of the user's own that cannot be imported, or is none."""
    if ":" in recipe.train.objective:
        # Imported here: it imports torch.
        from tltlab.runtime.trainer.losses import load_objective

        with found_in(recipe.code):
            load_objective(recipe.train.objective, recipe.train)


def with_prompts(recipe: Recipe) -> tuple[Recipe, tuple[str, ...]]:
    """Return the recipe in RL steps, and a run's notes on its prompts, all of which are read.

    Without notes where prompts or tokenizer are not here. ConfigError for `train.epochs` there, and where a prompt
    cannot be read, or leaves an engine no room to respond.
    """
    sources = recipe.data.sources.values()
    if not all(map(os.path.exists, sources)) or not any((Path(recipe.model) / name).is_file() for name in _TOKENIZERS):
        if recipe.train.epochs is not None:
            raise ConfigError(
                f"train.epochs = {recipe.train.epochs:g}: the prompts of {recipe.data.train} cannot be counted before "
                "they and the tokenizer are files here; for a dry run set train.steps instead"
            )
        return recipe, ()
    # Imported here: they import torch.
    from tltlab.runtime.drafter.offline.data import load_tokenizer
    from tltlab.runtime.run.data import RunData

    data = RunData(recipe, load_tokenizer(recipe.model))
    return data.recipe, tuple(data.notes)


def own_advantage(recipe: Recipe) -> None:
    """Raise ConfigError where `train.advantage` breaks its contract."""
    if recipe.train.advantage is not None:
        # Imported here: it imports torch.
        from tltlab.runtime.trainer.samples import OwnAdvantage

        OwnAdvantage(recipe)


def check_reward(recipe: Recipe) -> Iterator[str]:
    """Complain about a reward that raises, or returns no number, for the first prompt's own answer as response."""
    row = first_row(recipe.data.train, recipe.data)
    if row is None:
        return
    config = recipe.reward_pool
    patient = config.model_copy(update={"processes": 1, "timeout_s": config.timeout_s + IMPORTS_S})
    with RewardPool(recipe.model_copy(update={"reward_pool": patient})) as pool:
        (outcomes,) = pool.outcomes([(row[0], row[1], row[1])])
    for term, outcome in zip(recipe.reward_terms, outcomes, strict=True):
        if isinstance(outcome, str):
            where = f"the first row of {recipe.data.train}, its answer taken for the response"
            yield f"reward {term.path} {outcome} for {where}; it returns one number for one response"


RULES = (
    RewardPool, policy, Recipe.read_placement, planner, model, sequence_parallel, lora_targets, data, first_rows,
    enough_prompts, context, cpu_engine, engine_dtype, learning_rate, loggers, objective, bundles_of, engines_of,
    own_advantage,
)  # fmt: skip
"""Rules for a recipe on this machine."""


def writable_folder(out: Path) -> Iterator[str]:
    above = next(path for path in (out.absolute(), *out.absolute().parents) if os.path.exists(path))
    if not above.is_dir():
        yield f"cannot write to {out}: {above} is a file; name another folder with --out"
    elif not os.access(above, os.W_OK | os.X_OK):
        yield f"cannot write to {out}: you may not write to {above}; name another folder with --out"


def same_run(recipe: Recipe, out: Path) -> None:
    """Raise ConfigError for a newest whole checkpoint of a run that the recipe cannot continue."""
    # Imported here: it imports torch, which is slow, and most runs do not need it.
    from tltlab.runtime.run.state import read_state

    newest = newest_whole(out / "checkpoints")
    if newest is not None:
        read_state(newest, recipe)


def recorded_decisions(recipe: Recipe, replay: Path) -> Iterator[str]:
    yield from exact_replay(recipe)
    if "decisions" not in read(replay).names:
        yield f"{replay} has no decisions.parquet: without decisions there is nothing to replay"


def _is_a_path(name: str) -> bool:
    """Return True if it cannot be an id of the Hugging Face Hub, which is a name or owner/name."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1
