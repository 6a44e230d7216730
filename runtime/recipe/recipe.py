"""Settings of a training run: written as TOML, overridden by `key=value` with dotted names.

A recipe may name a system, whose row decides some of its fields.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from math import ceil
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from tltlab.config import WHOLE, json_or_text, leaves, section_of, settings_of, whole_text
from tltlab.costs.base import CostModel
from tltlab.costs.load import load_costs
from tltlab.costs.profiles import find_model, profile_costs
from tltlab.drafters.specs import LearnedSpec
from tltlab.errors import ConfigError, did_you_mean, refuse
from tltlab.files import found_in, read_json, read_text
from tltlab.own import OwnPart, allowed_modules, code_allowed
from tltlab.planning.composition import EarlierEpoch, Regrouped, Truncated
from tltlab.planning.execution import EngineRun, engine_run
from tltlab.planning.placement import Placement, load_placement
from tltlab.planning.planners import load_planner
from tltlab.planning.rollout import RolloutPlanner
from tltlab.planning.systems import find_system
from tltlab.policies.policy import SHIPPED, Policy, load_policy
from tltlab.records import Json

from .rules import RULES
from .sections import MOST_SAMPLES, SYSTEMS_POLICY, PartialConfig, ReuseConfig, Sections
from .user_code import CODE, code_of, refuse_code

FOLDER = Path(__file__).parent / "recipes"
"""Folder of the recipes that come with tltlab."""
MOST_TOML_BYTES = 1 << 20
"""Largest size of a recipe."""

DECIDED = ("policy", "max_draft_depth", "partial", "reuse", "one_step_off", "staleness")
"""Fields of `[rollout]` that follow from a system, as `drafter.schedule.kind` does."""


def sections_of_system(recipe: Sections) -> Json:
    """Return `[rollout]`, `[train]` and `[drafter]` of the recipe's system.

    ConfigError for an unknown system, and for parts of it that engines or the recipe lack, or that the recipe
    contradicts.
    """
    run, rollout, drafter = engine_run_of(recipe), recipe.rollout, recipe.drafter
    depth = max(strategy.draft_depth for strategy in run.policy.strategies)
    rollout = rollout.model_copy(update=_workload(recipe, run))
    reuse = run.workload if isinstance(run.workload, EarlierEpoch) else None
    decided: Json = {
        "policy": rollout.policy if _is_policy_of(run, rollout.policy) else SYSTEMS_POLICY,
        "max_draft_depth": max(depth, int(drafter is not None)),
        "partial": _partial(run, rollout.prompts_per_step * rollout.group_size),
        "reuse": None if reuse is None else ReuseConfig(leniency=reuse.leniency),
        "one_step_off": run.one_step_off,
        "staleness": run.staleness,
    }
    if run.placement != "contiguous":
        decided["placement"] = run.placement
    if run.planner is not None:
        decided["planner"] = run.planner
    given = {name: getattr(rollout, name) for name in decided if name in rollout.model_fields_set}
    if given.get("max_draft_depth", 0) >= depth:
        # An engine built for deeper drafts serves as well.
        decided |= {name: value for name, value in given.items() if name == "max_draft_depth"}
    kind = "always" if run.trains_drafter else "never"
    refuse([*_missing(recipe, run), *_contradictions(recipe, run, given, decided, kind)])
    sections: Json = {"rollout": rollout.model_copy(update=decided)}
    if isinstance(run.workload, Truncated):
        sections["train"] = recipe.train.model_copy(update={"overlong": "zero"})
    if drafter is not None:
        schedule = drafter.schedule.model_copy(update={"kind": kind})
        sections["drafter"] = drafter.model_copy(update={"schedule": schedule})
    return sections


def _workload(recipe: Sections, run: EngineRun) -> Json:
    """Return the sizes that a system makes of the recipe's; ConfigError where these do not divide."""
    rollout, workload = recipe.rollout, run.workload
    if rollout.workload is not None or not isinstance(workload, Truncated | Regrouped):
        return {}
    if isinstance(workload, Truncated):
        sizes = {"max_response_tokens": max(1, int(rollout.max_response_tokens * workload.share))}
    else:
        prompts, rest = divmod(rollout.prompts_per_step, workload.factor)
        if rest or rollout.group_size * workload.factor > MOST_SAMPLES:
            raise ConfigError(
                f"{rollout.system} has {workload.factor} times the samples, at most {MOST_SAMPLES}, of as many times "
                f"fewer prompts: rollout.group_size = {rollout.group_size} and rollout.prompts_per_step = "
                f"{rollout.prompts_per_step} do not go with that"
            )
        sizes = {"prompts_per_step": prompts, "group_size": rollout.group_size * workload.factor}
    return {**sizes, "workload": rollout.system}


def _partial(run: EngineRun, responses: int) -> PartialConfig | None:
    """Return the admission of a run that trains so many responses in an RL step."""
    if (rule := run.admission) is None:
        return None
    concurrency = None if rule.concurrency is None else int(rule.concurrency * responses)
    same = {name: getattr(rule, name) for name in ("issue", "samples", "leftover", "max_age")}
    return PartialConfig(concurrency=concurrency, **same)


def engine_run_of(recipe: Sections) -> EngineRun:
    """Return the settings that execute the recipe's system; ConfigError as `engine_run`."""
    system, costs = find_system(str(recipe.rollout.system)), None
    if system.budget is not None:
        costs = pass_costs(recipe, recipe.rollout.tensor_parallel_size, system.name)
    return engine_run(system, costs, _head(recipe) or "learned")


def pass_costs(recipe: Sections, gpus: int, part: str) -> CostModel:
    """Return the costs of passes on an engine of so many GPUs, for a `part` of the recipe; on CPUs those of cpu-small.

    ConfigError for a GPU or a model without a profile.
    """
    cluster = recipe.cluster
    if not cluster.gpus_per_node:
        return load_costs("cpu-small")
    if cluster.gpu is None:
        raise ConfigError(f"{part} needs the cost of a pass on a GPU: name the GPU, cluster.gpu")
    return profile_costs(None, cluster.gpu, find_model(recipe.model), gpus)


def system_settings(recipe: Sections) -> tuple[Json | None, list[str]]:
    """Return for a plan the settings that execute the recipe's system, and notes on how engines differ from it."""
    if recipe.rollout.system is None:
        return None, []
    system, run = find_system(recipe.rollout.system), engine_run_of(recipe)
    decided = {*DECIDED, "placement", "planner"} - {"policy"}
    if recipe.rollout.workload is not None:
        decided |= {"max_response_tokens", "prompts_per_step", "group_size"}
    rollout = recipe.rollout.model_dump(include=decided, exclude_defaults=True)
    settings = {f"rollout.{name}": value for name, value in leaves(rollout)}
    if recipe.drafter is not None:
        settings["drafter.schedule.kind"] = recipe.drafter.schedule.kind
    strategies = [str(strategy) for strategy in run.policy.strategies]
    plan = {"name": system.name, "title": system.title, "strategies": strategies, "settings": settings}
    return plan, [f"{system.name}: {note}" for note in run.notes]


def give_way(fields: Mapping[str, Any]) -> None:
    """Remove the fields that an overriding system decides from a recipe's fields."""
    rollout, drafter = fields.get("rollout"), fields.get("drafter")
    schedule = drafter.get("schedule") if isinstance(drafter, dict) else None
    for section, names in ((rollout, DECIDED), (schedule, ("kind",))):
        for name in names:
            if isinstance(section, dict):
                section.pop(name, None)


def _head(recipe: Sections) -> str | None:
    """Return the name of the recipe's drafter with a network, first the one that it trains."""
    if recipe.drafter is not None:
        return recipe.drafter.name
    return next((name for name, spec in recipe.rollout.drafters.items() if isinstance(spec, LearnedSpec)), None)


def _missing(recipe: Sections, run: EngineRun) -> Iterator[str]:
    name, drafter = recipe.rollout.system, recipe.drafter
    if run.trains_drafter and drafter is None:
        yield f"{name} trains its drafter on idle workers: add a [drafter]"
    elif run.drafts_by_network and _head(recipe) is None:
        yield f"{name} drafts with a trained head: add a [drafter] with its drafter.checkpoint"
    elif run.drafts_by_network and not run.trains_drafter and drafter is not None and not drafter.pretrained:
        yield f"{name} drafts with a head that the run does not train: give drafter.checkpoint"
    if run.planner == "gather" and recipe.rollout.tail_shape is None:
        yield f"{name} gathers requests onto engines of another shape: set rollout.tail_shape"
    # On a CPU a placement is all that is left of a system with GPUs of the trainers' own.
    devices = recipe.cluster.gpus_per_node or run.placement != "contiguous"
    if run.own_gpus and not (devices and recipe.cluster.placement == "separate"):
        yield f"{name} needs GPUs of the trainers' own: set cluster.gpus_per_node and cluster.placement = 'separate'"


def _contradictions(recipe: Sections, run: EngineRun, given: Json, decided: Json, kind: str) -> Iterator[str]:
    """Yield settings that contradict the recipe's system."""
    found = {f"rollout.{name}": (value, decided[name]) for name, value in given.items()}
    if recipe.drafter is not None and "kind" in recipe.drafter.schedule.model_fields_set:
        found["drafter.schedule.kind"] = recipe.drafter.schedule.kind, kind
    if isinstance(run.workload, Truncated) and "overlong" in recipe.train.model_fields_set:
        found["train.overlong"] = recipe.train.overlong, "zero"
    for name in run.policy.drafters.keys() & recipe.rollout.drafters.keys():
        found[f"rollout.drafters.{name}"] = recipe.rollout.drafters[name], run.policy.drafters[name]
    for name, (value, systems) in found.items():
        if value != systems:
            has = "a policy of its own" if systems == SYSTEMS_POLICY else systems
            yield f"{name} = {value} beside {recipe.rollout.system}, which has {has}: leave one of them out"


def _is_policy_of(run: EngineRun, policy: str) -> bool:
    """Return True for a `rollout.policy` that is the system's: unnamed, a shipped one, or the file of such a run."""
    if policy.endswith(".json") and Path(policy).is_file():
        return bool(load_policy(policy).provenance.get("system") == run.policy.provenance["system"])
    return policy == SYSTEMS_POLICY or SHIPPED.get(policy) == run.policy.model_copy(update={"provenance": {}})


class Recipe(Sections):
    """A whole run.

    `model` is a Hugging Face folder or id. `reward` is `package.module:function` or a list of terms, called as
    reward(prompt, response, answer) -> float. Without `drafter` none is trained. All randomness follows from `seed`.

    Modules of rewards, of an own advantage, and of a policy that is a class, are imported as usual and, last, from the
    folders `code`: by default that of the recipe's file and the current one. A run keeps copies of the modules it found
    there (`user_code.keep_code`).
    """

    def read_policy(self) -> Policy:
        """Load the rollouts' policy; its module and those of drafters are searched in `code` too.

        ConfigError as `load_policy`, and for a drafter of the user's own that breaks its contract.
        """
        if self.rollout.system is not None and self.rollout.policy == SYSTEMS_POLICY:
            return engine_run_of(self).policy
        with found_in(self.code), code_allowed(self.rollout.allow_code):
            for spec in self.rollout.drafters.values():
                if isinstance(spec, OwnPart):
                    spec.check()
            return load_policy(self.rollout.policy)

    def read_placement(self) -> Placement:
        """Load the rollouts' placement, its module searched in `code` too. ConfigError as `load_placement`.

        One by expected lengths has the costs of an engine on the cluster's GPU where model and GPU are known.
        """

        def costs() -> CostModel | None:
            with suppress(ConfigError):
                return pass_costs(self, self.rollout.tensor_parallel_size, "rollout.placement")
            return None

        with found_in(self.code):
            return load_placement(self.rollout.placement, costs=costs)

    def read_planner(self) -> RolloutPlanner | None:
        """Load the rollouts' planner, its module searched in `code` too; None without one.

        ConfigError as `load_planner`, and for one that needs true lengths.
        """
        with found_in(self.code):
            planner = load_planner(self.rollout.planner)
        if planner is not None and planner.needs:
            needs = ", ".join(sorted(planner.needs))
            raise ConfigError(f"rollout.planner = {self.rollout.planner!r} needs {needs}, which only a simulator has")
        return planner

    @model_validator(mode="after")
    def _check_rules(self) -> Recipe:
        refuse((complaint for rule in RULES for complaint in rule(self)), ValueError)
        return self

    @model_validator(mode="before")
    @classmethod
    def _fill_from_system(cls, fields: Any) -> Any:
        try:
            sections = Sections.model_validate(fields)
        except ValidationError:
            # The validation that follows reports the faults of the fields.
            return fields
        if sections.rollout.system is None or not isinstance(fields, dict):
            return fields
        try:
            return fields | sections_of_system(sections)
        except ConfigError as error:
            raise ValueError(f"rollout.system: {error}") from error


def builtin_recipes() -> dict[str, Path]:
    """Return the files by name."""
    return {file.name.removesuffix(".toml"): file for file in sorted(FOLDER.glob("*.toml"))}


def find_recipe(name_or_path: str | Path) -> Path:
    """Return the path itself where it is a file, else the recipe of that name; ConfigError lists all names."""
    path, recipes = Path(name_or_path), builtin_recipes()
    if path.is_file():
        return path
    if str(name_or_path) not in recipes:
        raise ConfigError(
            f"no recipe {name_or_path}{did_you_mean(str(name_or_path), recipes)}; there are {', '.join(recipes)}"
        )
    return recipes[str(name_or_path)]


def load_recipe(recipe: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a TOML recipe, a file or one that comes with tltlab, and apply `section.key=value` overrides.

    Where `rollout.system` is an override, the fields that it decides are not read from the file. ConfigError lists
    every fault with its path.
    """
    path = find_recipe(recipe)
    try:
        fields = tomllib.loads(read_text(path, MOST_TOML_BYTES))
    except OSError as error:
        raise ConfigError(f"cannot read recipe {path}: {error.strerror}") from error
    except ValueError as error:  # or not UTF-8, as TOML must be
        raise ConfigError(f"recipe {path} is not TOML: {error}") from error
    folders = [] if path.parent == FOLDER else [str(path.parent.resolve())]
    fields.setdefault("code", list(dict.fromkeys([*folders, os.getcwd()])))
    return _recipe(fields, overrides, f"recipe {path}")


def resumed_recipe(
    run: Path, overrides: Sequence[str] = (), allow_code: Sequence[str] = (), *, allow_other_data: bool = False
) -> Recipe:
    """Return the recipe of a run to resume, from its `run.json`, with overrides; ConfigError as in `load_recipe`.

    Its modules are searched in the run's own copies first, with `allow_other_data` last. A policy file that no longer
    exists is replaced by the run's `policy.json`, as is the policy of a system, even if the system has changed since.
    ConfigError too for a module, or an argument of vLLM that imports code, which is neither in `allow_code` nor allowed
    by `tltlab.own.code_allowed`: a run's folder does not choose what is imported.
    """
    path = Path(run) / "run.json"
    description = read_json(path)
    if not isinstance(description, dict) or not isinstance(description.get("recipe"), dict):
        raise ConfigError(f"{path} is not what tltlab train writes: it has no recipe")
    fields = description["recipe"]
    rollout, copy = fields.get("rollout"), Path(run) / "policy.json"
    policy = rollout.get("policy") if isinstance(rollout, dict) else None
    gone = isinstance(policy, str) and policy.endswith(".json") and not Path(policy).exists()
    if (gone or policy == SYSTEMS_POLICY) and copy.is_file():
        rollout["policy"] = str(copy.resolve())
    recipe, copies = _recipe(fields, overrides, str(path)), str((Path(run) / CODE).resolve())
    with code_allowed(allow_code):
        names = list(code_of(recipe))
        refuse_code(run, names)
        # Without an allowed module nothing there is imported, not even by other modules.
        code = [copies, *(recipe.code or (os.getcwd(),))] if allowed_modules() else []
    if allow_other_data:
        code = [*code[1:], *code[:1]]
    return recipe.model_copy(update={"code": tuple(dict.fromkeys(code))})


def located(recipe: Recipe) -> Recipe:
    """Return the recipe with absolute paths of files and folders in the current one."""

    def absolute(name: str | None) -> str | None:
        return os.path.abspath(name) if name and os.path.exists(name) else name

    data, rollout, drafter = recipe.data, recipe.rollout, recipe.drafter
    sets = {name: absolute(source) for name, source in data.heldout_sets.items()}
    heldout = sets if isinstance(data.heldout, dict) else sets.get("")
    policy = os.path.abspath(rollout.policy) if os.path.isfile(rollout.policy) else rollout.policy
    drafters = {
        name: spec.model_copy(update={"model": absolute(spec.model)}) if isinstance(spec, LearnedSpec) else spec
        for name, spec in rollout.drafters.items()
    }
    changes: Json = {
        "model": absolute(recipe.model),
        "data": data.model_copy(update={"train": absolute(data.train), "heldout": heldout}),
        "rollout": rollout.model_copy(update={"policy": policy, "drafters": drafters}),
    }
    if drafter is not None:
        changes["drafter"] = drafter.model_copy(update={"checkpoint": absolute(drafter.checkpoint)})
    return recipe.model_copy(update=changes)


def with_steps(recipe: Recipe, num_prompts: int) -> Recipe:
    """Return the recipe with `train.epochs`, if set, as RL steps: those that draw `num_prompts` prompts so often."""
    if recipe.train.epochs is None:
        return recipe
    per_epoch = max(num_prompts // recipe.rollout.prompts_per_step, 1)
    steps = ceil(round(recipe.train.epochs * per_epoch, 6))
    return recipe.model_copy(update={"train": recipe.train.model_copy(update={"steps": steps, "epochs": None})})


def _recipe(fields: Json, overrides: Sequence[str], source: str) -> Recipe:
    named = [override.partition("=")[2] for override in overrides if override.startswith("rollout.system=")]
    if any(json_or_text(name) for name in named):
        give_way(fields)
    lengths = {name for name in ("epochs", "steps") for override in overrides if override.startswith(f"train.{name}=")}
    if len(lengths) == 1 and isinstance(train := fields.get("train"), dict):
        # An override of the one replaces the other.
        train.pop("steps" if "epochs" in lengths else "epochs", None)
    for override in overrides:
        name, equals, text = override.partition("=")
        if not equals:
            raise ConfigError(f"override {override!r} is not key=value, for example train.steps=4")
        section = fields
        *parents, leaf = name.split(".")
        if not all([*parents, leaf]):
            raise ConfigError(f"override {override!r} has no name before the =, for example train.steps=4")
        for parent in parents:
            if section.get(parent) is None:
                section[parent] = {}
            section = section[parent]
            if not isinstance(section, dict):
                raise ConfigError(f"override {override!r}: {parent} is not a section of the recipe")
        section[leaf] = json_or_text(text)
    for name, value in leaves(fields, in_lists=True):
        # JSON permits it, TOML does not; neither files nor tokenizers accept it.
        if isinstance(value, str) and whole_text(value) != value:
            raise ConfigError(f"{source}: {name} has half a surrogate pair, which is no Unicode text")
    try:
        return Recipe.model_validate(fields)
    except ValidationError as error:
        raise ConfigError(f"{source}: {'; '.join(_fault(fault) for fault in error.errors())}") from error


def _fault(fault: ErrorDetails) -> str:
    """Describe one fault of a recipe: its place, if any, and its message."""
    place = ".".join(map(str, fault["loc"]))
    message = fault["msg"].removeprefix("Value error, ")
    if fault["type"] == "extra_forbidden":
        message = "there is no such field"
        name = str(fault["loc"][-1])
        elsewhere = [setting for setting in settings_named(name) if setting != place]
        message += f"; did you mean {' or '.join(elsewhere)}?" if elsewhere else ""
        message += "" if elsewhere else did_you_mean(name, fields_at(fault["loc"][:-1]))
    elif fault["type"] in ("model_type", "model_attributes_type", "dict_type"):
        message = f"should be a section of fields, got {type(fault['input']).__name__}"
    return f"{place}: {message}" if place else message


def fields_at(place: Sequence[int | str]) -> dict[str, FieldInfo]:
    """Return the fields of a section of recipes, all sections where `place` is empty; none for no section."""
    section: type[BaseModel] = Recipe
    for name in place:
        field = section.model_fields.get(str(name))
        inner = None if field is None else section_of(field)
        if inner is None:
            return {}
        section = inner
    return dict(section.model_fields)


def settings_named(name: str) -> list[str]:
    """Return the full names of settings of recipes with this name, or this dotted one.

    >>> settings_named("steps")
    ['train.steps']
    """
    names = [f"{row['section']}.{row['name']}".removeprefix(f"{WHOLE}.") for row in settings_of(Recipe)]
    return [whole for whole in names if name in (whole, whole.rpartition(".")[2])]
