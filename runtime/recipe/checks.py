"""What can be said against a run before anything starts: `check`. It imports no torch, but to look at a checkpoint."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import redirect_stdout
from pathlib import Path

from tltlab.drafters.specs import LearnedSpec, check_drafter, check_sampled_drafts
from tltlab.errors import ConfigError, InputError
from tltlab.files import read_object
from tltlab.policies.policy import Policy
from tltlab.runtime.data.prompts import first_row
from tltlab.runtime.engine.drafter_pool import DrafterPool
from tltlab.runtime.rollout.reward_pool import RewardPool
from tltlab.runtime.rollout.rewards import load_rewards
from tltlab.runtime.run.checkpoints import checkpoints_in, fault_of
from tltlab.traces.trace import read

from .gpus import bundles_of
from .graphs import drafters_of, engines_of
from .memory import shape_of
from .recipe import Recipe
from .rules import exact_replay, refuse, undivided_heads

_FILES = (".jsonl", ".json", ".csv", ".arrow", ".parquet")


def check(
    recipe: Recipe, out: Path, *, resume: bool = False, replay: Path | None = None, try_reward: bool = False
) -> None:
    """Raise ConfigError with all that keeps a run of `recipe` in the folder `out` from being done.

    Rewards and a policy's class are imported, the policy has to fit the engines, files and folders that are this
    machine's have to be there, and GPUs to add up. With `resume` the newest whole checkpoint of that run must be one
    that the recipe goes on with; `replay` must be a trace with decisions. First rows of files must have the columns;
    with `try_reward` the reward is called once, on the first of them. Models and datasets of the Hugging Face Hub
    are not looked for.
    """
    # Standard output is for results, and what a user's module prints is none.
    with redirect_stdout(sys.stderr):
        complaints = [complaint for rule in RULES for complaint in _all_of(rule, recipe)]
    complaints += writable_folder(out)
    if try_reward and not complaints:
        complaints += _all_of(tried_reward, recipe)
    if resume:
        complaints += _all_of(same_run, recipe, out)
    if replay is not None:
        complaints += _all_of(recorded_decisions, recipe, replay)
    refuse(complaints)


def _all_of(rule: Callable[..., Iterable[str]], *asked: object) -> Iterator[str]:
    """A rule's complaints, and what a part of tltlab raises that it asks, which ends the rule."""
    try:
        yield from rule(*asked)
    except InputError as error:
        yield str(error)


def rewards(recipe: Recipe) -> Iterable[str]:
    RewardPool(recipe)
    return ()


def policy(recipe: Recipe) -> Iterable[str]:
    return policy_on_engines(recipe, recipe.read_policy())


def policy_on_engines(recipe: Recipe, policy: Policy) -> Iterator[str]:
    """The recipe's engines lack what `policy` may choose: a drafter, or a draft that deep."""
    specs, trained = drafters_of(recipe, policy), recipe.drafter
    for name, spec in specs.items():
        if isinstance(spec, LearnedSpec) and (trained is None or name != trained.name or not spec.model):
            if spec.model:
                yield from model_folder(spec.model, f"rollout.drafters.{name}.model")
            check_drafter(recipe.model, name, spec)
    if trained is not None and trained.checkpoint is not None:
        yield from model_folder(trained.checkpoint, "drafter.checkpoint", weights=(".safetensors", ".bin"))
    check_sampled_drafts(specs, recipe.rollout.vllm.get("speculative_config"))
    pool = DrafterPool(specs, recipe.rollout.max_draft_depth)
    for strategy in policy.strategies:
        try:
            pool.check(strategy)
        except ConfigError as error:
            yield f"rollout.policy = {recipe.rollout.policy}: {error}"
            # Its other strategies lack the same.
            return


def model(recipe: Recipe) -> Iterable[str]:
    return model_folder(recipe.model, "model")


def model_folder(name: str, field: str, weights: Sequence[str] = (".safetensors",)) -> Iterator[str]:
    """A folder of this machine that holds no model with weights."""
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
            # A model that is not here or no dense one is looked at when the trainer loads it.
            return
        yield from undivided_heads(size, recipe.model, shape.heads, shape.kv_heads)


def data(recipe: Recipe) -> Iterator[str]:
    for field, source in (("data.train", recipe.data.train), ("data.heldout", recipe.data.heldout)):
        if source == "":
            yield f"{field} is empty: name a file, a folder or a dataset"
        elif source is not None and not Path(source).exists():
            of_a_file = any(suffix in _FILES for suffix in Path(source).suffixes[-2:])
            if of_a_file or _is_a_path(source):
                yield f"{field}: cannot read {source}: there is no such file or folder"


def first_rows(recipe: Recipe) -> Iterator[str]:
    """Columns that the first row of a file lacks."""
    for source in (recipe.data.train, recipe.data.heldout):
        if source is not None:
            yield from _all_of(_read, recipe, source)


def _read(recipe: Recipe, source: str) -> Iterable[str]:
    first_row(source, recipe.data)
    return ()


def context(recipe: Recipe) -> Iterator[str]:
    """A model whose context cannot hold a response of the longest allowed; one that just does is cut by its prompt."""
    file = Path(recipe.model) / "config.json"
    config = read_object(file) if file.is_file() else {}
    room = config.get("max_position_embeddings")
    longest = recipe.rollout.max_response_tokens
    if isinstance(room, int) and longest > room:
        yield (
            f"rollout.max_response_tokens = {longest}, but the context of {recipe.model} holds {room} tokens, prompt "
            "included: lower it, or take another model"
        )


def tried_reward(recipe: Recipe) -> Iterator[str]:
    """What the reward raises, or gives that is no number, for the first prompt with its own answer as the response."""
    row = first_row(recipe.data.train, recipe.data)
    if row is None:
        return
    prompt, answer = row
    reward = load_rewards(recipe.reward_terms, recipe.code)
    try:
        with redirect_stdout(sys.stderr):
            reward(prompt, answer, answer)
    except Exception as error:  # whatever a user's function raises
        yield (
            f"reward raised {type(error).__name__}: {error} for the first row of {recipe.data.train}, its answer taken "
            "for the response"
        )


def gpus(recipe: Recipe) -> Iterable[str]:
    bundles_of(recipe)
    return ()


def graphs(recipe: Recipe) -> Iterable[str]:
    engines_of(recipe)
    return ()


RULES = (rewards, policy, model, sequence_parallel, data, first_rows, context, gpus, graphs)
"""Of a recipe on this machine."""


def writable_folder(out: Path) -> Iterator[str]:
    above = next(path for path in (out.absolute(), *out.absolute().parents) if os.path.exists(path))
    if not above.is_dir():
        yield f"cannot write to {out}: {above} is a file; name another folder with --out"
    elif not os.access(above, os.W_OK | os.X_OK):
        yield f"cannot write to {out}: you may not write to {above}; name another folder with --out"


def same_run(recipe: Recipe, out: Path) -> Iterable[str]:
    """The newest whole checkpoint is of a run that the recipe does not go on with."""
    # Imported here: it brings torch, which takes long, and most runs do not need it.
    from tltlab.runtime.run.state import read_state

    checkpoints = reversed(checkpoints_in(out / "checkpoints"))
    newest = next((folder for folder in checkpoints if fault_of(folder) is None), None)
    if newest is not None:
        read_state(newest, recipe)
    return ()


def recorded_decisions(recipe: Recipe, replay: Path) -> Iterator[str]:
    yield from exact_replay(recipe)
    if "decisions" not in read(replay).names:
        yield f"{replay} has no decisions.parquet: without decisions there is nothing to replay"


def _is_a_path(name: str) -> bool:
    """Whether it cannot be an id of the Hugging Face Hub, which is a name or owner/name."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1
