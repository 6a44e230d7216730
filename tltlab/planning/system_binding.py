"""A system from the literature fitted to what is known here: which drafter plays which role, with whose acceptance."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tltlab.acceptance.base import Acceptance
from tltlab.acceptance.by_request import SiblingAcceptance
from tltlab.acceptance.freshness import FreshAcceptance
from tltlab.acceptance.load import load_acceptance
from tltlab.acceptance.per_drafter import PerDrafter
from tltlab.acceptance.trees import TreeAcceptance
from tltlab.coordination.progress import SpotTraining
from tltlab.costs.base import CostModel
from tltlab.drafters.specs import STANDARD, Drafters
from tltlab.errors import ConfigError
from tltlab.policies.policy import Policy
from tltlab.state import DrafterState
from tltlab.strategy import Strategy

from .composition import Rung, System, strategies

LEARNED_DEFAULT, TEXT_DEFAULT = "tlt-qwen2.5-32b-fresh", "seer-siblings"
"""Acceptance of drafters with a network, and of those that draft from text, where a trace and its user know none."""


class UnknownAcceptance(ConfigError):
    """No acceptance is known that serves the system's drafters."""


@dataclass(frozen=True, kw_only=True)
class BoundSystem:
    """A system that can be simulated.

    `assumptions` are the system's and those of the binding; `stand_ins` the ones among them where one drafter's
    acceptance is taken for another's, `defaults` those where a number is missing and the stated default taken.
    `registry` says what the policy's drafters are.
    """

    system: System
    policy: Policy
    acceptance: Acceptance | None
    spot: SpotTraining | None
    assumptions: tuple[str, ...]
    stand_ins: tuple[str, ...] = ()
    defaults: tuple[str, ...] = ()
    registry: Drafters = STANDARD


def bind_assuming(
    system: System,
    costs: CostModel,
    acceptance: Acceptance | None,
    fitted: Acceptance | None = None,
    drafters: Drafters = STANDARD,
) -> BoundSystem:
    """Bind a system as `bind` does; where acceptance is missing take a default and say so in `defaults`.

    The default is `fitted`, a model of this trace's own drafters, where it serves, else `LEARNED_DEFAULT` and
    `TEXT_DEFAULT`, published curves of other models.
    """
    with suppress(UnknownAcceptance):
        return bind(system, costs, acceptance, drafters)
    if fitted is not None:
        with suppress(UnknownAcceptance):
            note = "acceptance of all responses alike, fitted to those of acceptance.parquet that have it"
            return _assumed(bind(system, costs, fitted, drafters), note)
    network, text = _of_kind(system.drafters, False, drafters), _of_kind(system.drafters, True, drafters)
    if system.together:
        learned = None if acceptance is None else _network(system, acceptance, drafters)
        texts = [] if acceptance is None else _texts(system, acceptance, drafters)
        missing = [name for name, known in ((LEARNED_DEFAULT, learned), (TEXT_DEFAULT, texts)) if not known]
        note = f"acceptance of all drafters is not known: the default {' and '.join(missing)} is taken"
        sources: dict[str, Any] = dict.fromkeys(text, TEXT_DEFAULT)
        sources |= {learned or network[0]: LEARNED_DEFAULT}
        for name in (*([learned] if learned else []), *texts):
            sources[name] = acceptance.of(name) if isinstance(acceptance, PerDrafter) else acceptance
        return _assumed(bind(system, costs, load_acceptance(sources), drafters), note)
    kind, name = ("learned", LEARNED_DEFAULT) if network else ("model-free", TEXT_DEFAULT)
    note = f"acceptance of a {kind} drafter is not known: the default {name} is taken"
    return _assumed(bind(system, costs, load_acceptance(name), drafters), note)


def _assumed(bound: BoundSystem, note: str) -> BoundSystem:
    return replace(bound, assumptions=(*bound.assumptions, note), defaults=(note,))


def bind(system: System, costs: CostModel, acceptance: Acceptance | None, drafters: Drafters = STANDARD) -> BoundSystem:
    """Fit a system to what is known; ConfigError with the reason where it cannot run.

    `acceptance` serves every drafter that it knows. Where each has a model of its own, those that draft from text stand
    in for a learned one only. A curve fitted to a learned drafter's trees says nothing of n-grams, though it names no
    drafter. A drafter that is not known is replaced by a model-free one that is, which `stand_ins` says. `drafters` has
    the traits of those that the acceptance names.
    """
    drafters = drafters.beside(dict(system.specs))
    if not system.drafters:
        policy = system.policy(lambda rung: (), costs)
        return BoundSystem(system=system, policy=policy, acceptance=None, spot=None, assumptions=system.assumptions)
    choose = _together if system.together else _drafters
    chosen, model, stand_ins = choose(system, acceptance, drafters)
    notes = [*stand_ins]
    remembering = _changed(model, lambda part: _remembering(part, system.history))
    if remembering is not model:
        model = remembering
        notes.append(f"{system.history} responses of an earlier epoch to retrieve from, as good as finished siblings")
    trained = _changed(model, lambda part: FreshAcceptance(base=part) if isinstance(part, TreeAcceptance) else part)
    if trained is not model:
        model = trained
        notes.append(
            "acceptance is taken as the fresh and fully trained drafter's, and changes with age and training by the "
            "default values of Freshness"
        )
    depends = model.trained_drafter in chosen
    learned = _of_kind(chosen, False, drafters)
    if learned and len(chosen) == 1 and not system.together and _of_kind(system.drafters, True, drafters):
        notes.append("the drafter was warmed up before RL step 0, so that the model-free one never has to serve")
    if learned and not depends:
        notes.append("acceptance does not depend on the drafter's age and training: a static one would fare alike")
    policy = system.policy(lambda rung: [arm for name in chosen for arm in _arms(rung, name, model, drafters)], costs)
    published = {
        arm for rung in system.ladder for name in chosen for trees in (True, False)
        for arm in strategies(rung, name, trees=trees)
    }  # fmt: skip
    drafted = [arm for arm in policy.strategies if arm.speculates]
    outside = [str(arm) for arm in drafted if model.outside(arm)]
    if outside:
        notes.append(f"acceptance is extrapolated for {'; '.join(outside)}")
    if shallower := [str(arm) for arm in drafted if arm not in published]:
        notes.append(f"deeper drafts are not covered by the acceptance: {', '.join(shallower)} instead")
    if system.budget is not None and model.varies_by == "position":
        raise UnknownAcceptance(
            "its budget needs an acceptance model, and acceptance.parquet is replayed: name a model"
        )
    return BoundSystem(
        system=system,
        policy=policy,
        acceptance=model,
        spot=system.idle_use if depends else None,
        assumptions=(*system.assumptions, *notes),
        stand_ins=tuple(stand_ins),
        registry=drafters,
    )


def _changed(model: Acceptance, change: Callable[[Acceptance], Acceptance]) -> Acceptance:
    """What `change` makes of the model, of each drafter's where it has several; itself where nothing changes."""
    if not isinstance(model, PerDrafter):
        return change(model)
    changed = model.changed(change)
    return model if changed == model else changed


def _remembering(model: Acceptance, responses: int) -> Acceptance:
    """A model of siblings with so many responses of an earlier epoch beside them; any other one as it is."""
    if not responses or not isinstance(model, SiblingAcceptance):
        return model
    alpha = float(model.alpha(np.array([float(responses)]), np.zeros(1))[0])
    return model.model_copy(update={"alone": alpha})


def _drafters(
    system: System, acceptance: Acceptance | None, drafters: Drafters
) -> tuple[list[str], Acceptance, list[str]]:
    """The drafters that serve, the one model that knows them all, and what stands in for what."""
    network, text = _of_kind(system.drafters, False, drafters), _of_kind(system.drafters, True, drafters)
    tries: list[Sequence[str]] = [network, text] if isinstance(acceptance, PerDrafter) else [system.drafters]
    for names in tries if acceptance is not None else ():
        assert acceptance is not None
        chosen = [played for name in names if (played := _played_by(name, acceptance, drafters))]
        if chosen:
            note = f"no learned drafter's acceptance is known: {system.title} runs on its model-free drafter throughout"
            alone = network and not _of_kind(chosen, False, drafters)
            model = acceptance.only(chosen) if isinstance(acceptance, PerDrafter) else acceptance
            return chosen, model, [note] if alone else []
    substitutes = [] if acceptance is None else [n for n in ("suffix", "ngram") if acceptance.knows(n, drafters)]
    if substitutes and acceptance is not None:
        note = f"the acceptance of drafter {system.drafters[0]!r} is not known: {substitutes[0]!r} takes its place"
        return substitutes[:1], acceptance, [note]
    if network:
        raise UnknownAcceptance(
            "no drafter's acceptance is known: give --acceptance, such as a fitted file or geometric:ALPHA"
        )
    raise UnknownAcceptance(
        f"the acceptance of a model-free drafter ({system.drafters[0]}) is not known: name a model of it, such as "
        f"--acceptance {system.drafters[0]}=seer-siblings"
    )


def _together(
    system: System, acceptance: Acceptance | None, drafters: Drafters
) -> tuple[list[str], Acceptance, list[str]]:
    """All drafters side by side; those that were recorded where acceptance is replayed."""
    if acceptance is not None and acceptance.varies_by == "position":
        recorded = list(acceptance.drafters)
        note = f"recorded drafters are the ones to choose among: {', '.join(recorded)}"
        return recorded, acceptance, [note] if len(recorded) < len(system.drafters) else []
    learned = None if acceptance is None else _network(system, acceptance, drafters)
    texts = [] if acceptance is None else _texts(system, acceptance, drafters)
    if acceptance is not None and learned is not None and texts:
        chosen = [learned, *texts]
        return chosen, acceptance.only(chosen) if isinstance(acceptance, PerDrafter) else acceptance, []
    raise UnknownAcceptance(
        f"the acceptance of all its drafters ({', '.join(system.drafters)}) is not known: give --acceptance "
        "for each of them, such as learned=geometric:ALPHA,suffix=seer-siblings"
    )


def _texts(system: System, model: Acceptance, drafters: Drafters) -> list[str]:
    """The system's drafters that draft from text and that the model knows."""
    return [name for name in _of_kind(system.drafters, True, drafters) if model.knows(name, drafters)]


def _network(system: System, model: Acceptance, drafters: Drafters) -> str | None:
    """The drafter of the model that plays the system's drafter with a network."""
    return next((_played_by(name, model, drafters) for name in _of_kind(system.drafters, False, drafters)), None)


def _of_kind(names: Sequence[str], text: bool, drafters: Drafters) -> list[str]:
    """The drafters without a network, which draft from text, or those with one."""
    return [name for name in names if drafters[name].has_network != text]


def _played_by(name: str, model: Acceptance, drafters: Drafters) -> str | None:
    """The drafter of the model that plays `name`."""
    if not drafters[name].has_network:
        return name if model.knows(name, drafters) else None
    if model.trained_drafter is not None and drafters[model.trained_drafter].has_network:
        return model.trained_drafter
    return name if model.knows(name, drafters) else next(iter(_of_kind(model.drafters, False, drafters)), None)


def _arms(rung: Rung, drafter: str, model: Acceptance, drafters: Drafters) -> list[Strategy]:
    """The rung's strategies that the model covers, trees where it can; else the deepest chain below that it covers.

    ConfigError where it covers none.
    """
    if drafters[drafter].draws_trees and rung.trees:
        trees = [arm for arm in strategies(rung, drafter, trees=True) if _covers(model, arm)]
        if trees:
            return trees
    chains = strategies(rung, drafter, trees=False)
    covered = [arm for arm in chains if _covers(model, arm)]
    if covered:
        return covered
    deepest = max(arm.draft_depth for arm in chains)
    shallower = (Strategy.chain(drafter, depth) for depth in range(deepest - 1, 0, -1))
    deepest_arm = next((arm for arm in shallower if _covers(model, arm)), None)
    if deepest_arm is None:
        raise UnknownAcceptance(f"the acceptance covers no draft of {drafter!r} at every batch size")
    return [deepest_arm]


def _covers(model: Acceptance, strategy: Strategy) -> bool:
    settled = model.in_state({strategy.drafter: DrafterState()})
    if not strategy.speculates:
        return True
    try:
        settled.check(strategy)
    except ConfigError:
        return False
    return True
