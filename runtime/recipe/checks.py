"""What can be said against a run before anything starts: `check`. It imports no torch, but to look at a checkpoint."""

from __future__ import annotations

import os
import sys
from contextlib import redirect_stdout
from pathlib import Path

from tltlab.drafters.specs import DEFAULT_DRAFTERS, DrafterSpec, LearnedSpec
from tltlab.errors import ConfigError
from tltlab.policies.policy import Policy, load_policy
from tltlab.runtime.engine.drafter_pool import DrafterPool
from tltlab.runtime.engine.vllm.options import check_drafter, check_sampled_drafts
from tltlab.runtime.rollout.reward_pool import RewardPool
from tltlab.runtime.run.checkpoints import checkpoints_in, fault_of
from tltlab.traces.trace import read

from .gpus import bundles_of
from .recipe import Recipe

_FILES = (".jsonl", ".json", ".csv", ".arrow", ".parquet")


def check(recipe: Recipe, out: Path, *, resume: bool = False, replay: Path | None = None) -> None:
    """Raise ConfigError for what a run of `recipe` in the folder `out` cannot be done with.

    Rewards and a policy's class are imported, the policy has to fit the engines, files and folders that are this
    machine's have to be there, and GPUs to add up. With `resume` the newest whole checkpoint of that run must be one
    that the recipe goes on with; `replay` must be a trace with decisions. Models and datasets of the Hugging Face Hub
    are not looked for.
    """
    # Standard output is for results, and what a user's module prints is none.
    with redirect_stdout(sys.stderr):
        RewardPool(recipe)
        policy = load_policy(recipe.rollout.policy)
    check_policy(recipe, policy)
    check_model(recipe.model, "model")
    for name, source in (("train", recipe.data.train), ("heldout", recipe.data.heldout)):
        if source is not None:
            check_data(source, f"data.{name}")
    bundles_of(recipe)
    check_folder(out)
    if resume:
        # Imported here: it brings torch, which takes long, and most runs do not need it.
        from tltlab.runtime.run.state import read_state

        found = reversed(checkpoints_in(out / "checkpoints"))
        whole = next((folder for folder in found if fault_of(folder) is None), None)
        if whole is not None:
            read_state(whole, recipe)
    if replay is not None:
        check_replay(recipe)
    if replay is not None and "decisions" not in read(replay).names:
        raise ConfigError(f"{replay} has no decisions.parquet: without decisions there is nothing to replay")


def check_policy(recipe: Recipe, policy: Policy) -> None:
    """Raise ConfigError where the recipe's engines lack what `policy` may choose: a drafter, or a draft that deep."""
    specs: dict[str, DrafterSpec] = DEFAULT_DRAFTERS | policy.drafters | recipe.rollout.drafters
    for name, spec in specs.items():
        if isinstance(spec, LearnedSpec):
            check_model(spec.model, f"rollout.drafters.{name}.model")
            check_drafter(recipe.model, name, spec)
    trained = recipe.drafter
    if trained is not None:
        if trained.checkpoint is not None:
            check_model(trained.checkpoint, "drafter.checkpoint")
        model = trained.checkpoint or "its own"
        specs[trained.name] = LearnedSpec(method=trained.loss.method, model=model, fallback=trained.fallback)
    check_sampled_drafts(specs, recipe.rollout.vllm.get("speculative_config"))
    pool = DrafterPool(specs, recipe.rollout.max_draft_depth)
    for strategy in policy.strategies:
        try:
            pool.check(strategy)
        except ConfigError as error:
            raise ConfigError(f"rollout.policy = {recipe.rollout.policy}: {error}") from error


def check_replay(recipe: Recipe) -> None:
    """Raise ConfigError where a run of `recipe` cannot follow recorded decisions exactly."""
    if recipe.drafter is not None or recipe.train.sampling_rounds > 1:
        raise ConfigError(
            "decisions are replayed exactly only where nothing else depends on the clock: leave out [drafter], "
            "which learns in idle time, and set train.sampling_rounds = 1"
        )


def check_model(name: str, field: str) -> None:
    """Raise ConfigError for a folder of this machine that holds no model with weights."""
    folder = Path(name)
    if not name:
        raise ConfigError(f"{field} is empty: name a folder, or a model of the Hugging Face Hub")
    if not folder.exists():
        if _is_a_path(name):
            raise ConfigError(f"{field} = {name}: there is no such folder")
    elif not (folder / "config.json").is_file():
        raise ConfigError(f"{field} = {name} is no model: it has no config.json")
    elif not any(folder.glob("*.safetensors")):
        raise ConfigError(f"{field} = {name} has no weights: it needs a .safetensors file")


def check_data(source: str, field: str) -> None:
    """Raise ConfigError for a file or folder of this machine that is not there."""
    if not source:
        raise ConfigError(f"{field} is empty: name a file, a folder or a dataset")
    of_a_file = any(suffix in _FILES for suffix in Path(source).suffixes[-2:])
    if not Path(source).exists() and (of_a_file or _is_a_path(source)):
        raise ConfigError(f"{field}: cannot read {source}: there is no such file or folder")


def check_folder(out: Path) -> None:
    """Raise ConfigError where no folder can be written at `out`."""
    above = next(path for path in (out.absolute(), *out.absolute().parents) if os.path.exists(path))
    if not above.is_dir():
        raise ConfigError(f"cannot write to {out}: {above} is a file; name another folder with --out")
    if not os.access(above, os.W_OK | os.X_OK):
        raise ConfigError(f"cannot write to {out}: you may not write to {above}; name another folder with --out")


def _is_a_path(name: str) -> bool:
    """Whether it cannot be an id of the Hugging Face Hub, which is a name or owner/name."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1
