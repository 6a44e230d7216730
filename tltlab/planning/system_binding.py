"""Systems from the literature bound to known acceptance: the drafter that plays each role, and the assumptions made."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from tltlab.acceptance.base import Acceptance
from tltlab.acceptance.context import ContextAcceptance
from tltlab.acceptance.curves import SiblingAcceptance, TreeAcceptance
from tltlab.acceptance.freshness import FreshAcceptance
from tltlab.acceptance.load import load_acceptance
from tltlab.acceptance.per_drafter import PerDrafter
from tltlab.coordination.progress import SpotTraining
from tltlab.costs.base import CostModel
from tltlab.drafters.specs import STANDARD, Drafters
from tltlab.errors import ConfigError
from tltlab.policies.policy import Policy
from tltlab.records import Json, frozen
from tltlab.state import DrafterState
from tltlab.strategy import Strategy

from .composition import LadderStep, System, strategies

LEARNED_DEFAULT, TEXT_DEFAULT = "tlt-qwen2.5-32b-fresh", "seer-siblings"
"""Acceptance of drafters with a network, and of those that draft from text, if neither trace nor user gives any."""


class UnknownAcceptance(ConfigError):
    """No acceptance is known for the system's drafters."""


@frozen
class BoundSystem:
    """A system that can be simulated.

    `assumptions` are those of the system and of the binding; among them `stand_ins` use one drafter's acceptance for
    another's, and `defaults` use a stated default for a missing number. `registry` has the policy's drafters.
    """

    system: System
    policy: Policy
    acceptance: Acceptance | None
    spot: SpotTraining | None
    assumptions: tuple[str, ...]
    stand_ins: tuple[str, ...] = ()
    defaults: tuple[str, ...] = ()
    registry: Drafters = STANDARD


@dataclass(frozen=True)
class _Roles:
    """The drafters of a system, and the acceptance known for them, None where there is none."""

    system: System
    acceptance: Acceptance | None
    registry: Drafters

    def of_kind(self, *, text: bool, among: Sequence[str] | None = None) -> list[str]:
        """Drafters without a network, which draft from `text`, or those with one; by default the system's."""
        names = self.system.drafters if among is None else among
        return [name for name in names if self.registry[name].has_network != text]

    def knows(self, name: str) -> bool:
        return self.acceptance is not None and self.acceptance.knows(name, self.registry)

    def played_by(self, name: str) -> str | None:
        """Return the drafter whose acceptance serves drafter `name`; for one with a network any with a network."""
        model = self.acceptance
        if model is None or not self.registry[name].has_network:
            return name if self.knows(name) else None
        if model.trained_drafter is not None and self.registry[model.trained_drafter].has_network:
            return model.trained_drafter
        return name if self.knows(name) else next(iter(self.of_kind(text=False, among=model.drafters)), None)

    @property
    def known_network(self) -> str | None:
        """The drafter of the acceptance that plays the system's drafter with a network."""
        return next(map(self.played_by, self.of_kind(text=False)), None)

    @property
    def known_texts(self) -> list[str]:
        """The system's drafters from text whose acceptance is known."""
        return list(filter(self.knows, self.of_kind(text=True)))

    def model(self, names: Sequence[str]) -> Acceptance:
        """Return the acceptance of these drafters alone."""
        assert self.acceptance is not None, "known drafters have an acceptance"
        return self.acceptance.only(names) if isinstance(self.acceptance, PerDrafter) else self.acceptance

    def one_kind(self) -> tuple[list[str], list[str]]:
        """Return drafters of one kind that are known, those with a network first, and the stand-ins among them."""
        first, networks = self.system.drafters[0], self.of_kind(text=False)
        kinds: list[Sequence[str]] = [self.system.drafters]
        if isinstance(self.acceptance, PerDrafter):
            kinds = [networks, self.of_kind(text=True)]
        for names in kinds:
            if chosen := [player for player in map(self.played_by, names) if player]:
                title = self.system.title
                note = f"no learned drafter's acceptance is known: {title} runs on its model-free drafter throughout"
                return chosen, [note] if networks and not self.of_kind(text=False, among=chosen) else []
        for name in filter(self.knows, ("suffix", "ngram")):
            return [name], [f"the acceptance of drafter {first!r} is not known: {name!r} takes its place"]
        raise UnknownAcceptance(
            "no drafter's acceptance is known: give --acceptance, such as a fitted file or geometric:ALPHA"
            if networks
            else f"the acceptance of a model-free drafter ({first}) is not known: name a model of it, such as "
            f"--acceptance {first}=seer-siblings"
        )

    def together(self) -> tuple[list[str], list[str]]:
        """Return all drafters, or those recorded where acceptance is replayed, and a note if some are missing."""
        if self.acceptance is not None and self.acceptance.varies_by == "position":
            recorded = list(self.acceptance.drafters)
            note = f"recorded drafters are the ones to choose among: {', '.join(recorded)}"
            return recorded, [note] if len(recorded) < len(self.system.drafters) else []
        if self.known_network is not None and self.known_texts:
            return [self.known_network, *self.known_texts], []
        raise UnknownAcceptance(
            f"the acceptance of all its drafters ({', '.join(self.system.drafters)}) is not known: give --acceptance "
            "for each of them, such as learned=geometric:ALPHA,suffix=seer-siblings"
        )


def bind_assuming(
    system: System,
    costs: CostModel,
    acceptance: Acceptance | None,
    fitted: Acceptance | None = None,
    drafters: Drafters = STANDARD,
) -> BoundSystem:
    """Bind a system as `bind` does; use a default for missing acceptance and state it in `defaults`.

    The default is `fitted`, a model of this trace's own drafters, where it serves, else `LEARNED_DEFAULT` and
    `TEXT_DEFAULT`, published curves of other models.
    """
    with suppress(UnknownAcceptance):
        return bind(system, costs, acceptance, drafters)
    if fitted is not None:
        with suppress(UnknownAcceptance):
            note = "acceptance of all responses alike, fitted to those of acceptance.parquet that have it"
            return _assumed(bind(system, costs, fitted, drafters), note)
    roles = _Roles(system, acceptance, drafters)
    if system.together:
        network, texts = roles.known_network, roles.known_texts
        missing = [name for name, known in ((LEARNED_DEFAULT, network), (TEXT_DEFAULT, texts)) if not known]
        note = f"acceptance of all drafters is not known: the default {' and '.join(missing)} is taken"
        sources: Json = dict.fromkeys(roles.of_kind(text=True), TEXT_DEFAULT)
        sources |= {network or roles.of_kind(text=False)[0]: LEARNED_DEFAULT}
        for name in (*([network] if network else []), *texts):
            sources[name] = acceptance.of(name) if isinstance(acceptance, PerDrafter) else acceptance
        return _assumed(bind(system, costs, load_acceptance(sources), drafters), note)
    kind, name = ("learned", LEARNED_DEFAULT) if roles.of_kind(text=False) else ("model-free", TEXT_DEFAULT)
    note = f"acceptance of a {kind} drafter is not known: the default {name} is taken"
    return _assumed(bind(system, costs, load_acceptance(name), drafters), note)


def _assumed(bound: BoundSystem, note: str) -> BoundSystem:
    return replace(bound, assumptions=(*bound.assumptions, note), defaults=(note,))


def bind(system: System, costs: CostModel, acceptance: Acceptance | None, drafters: Drafters = STANDARD) -> BoundSystem:
    """Bind a system to known acceptance; ConfigError with the reason where it cannot run.

    `acceptance` serves every drafter that it knows. With a model per drafter those that draft from text serve only
    where no learned one is known; a curve fitted to a learned drafter's trees never serves them. A known model-free
    drafter replaces an unknown one, as stated in `stand_ins`. `drafters` has the traits of those in the acceptance.
    """
    drafters = drafters.joined(dict(system.specs))
    if not system.drafters:
        policy = system.policy(lambda ladder_step: (), costs)
        return BoundSystem(system=system, policy=policy, acceptance=None, spot=None, assumptions=system.assumptions)
    roles = _Roles(system, acceptance, drafters)
    chosen, stand_ins = roles.together() if system.together else roles.one_kind()
    model, notes = _adapted(roles.model(chosen), system.history)
    trained = model.trained_drafter in chosen
    learned = roles.of_kind(text=False, among=chosen)
    if learned and len(chosen) == 1 and not system.together and roles.of_kind(text=True):
        notes.append("the drafter was warmed up before RL step 0, so that the model-free one never has to serve")
    if learned and not trained:
        notes.append("acceptance does not depend on the drafter's age and training: a static one would fare alike")
    policy = system.policy(
        lambda ladder_step: [arm for name in chosen for arm in _arms(ladder_step, name, model, drafters)], costs
    )
    notes += _extrapolations(system, policy, chosen, model)
    if system.budget is not None and model.varies_by == "position":
        raise UnknownAcceptance(
            "its budget needs an acceptance model, and acceptance.parquet is replayed: name a model"
        )
    return BoundSystem(
        system=system,
        policy=policy,
        acceptance=model,
        spot=system.idle_use if trained else None,
        assumptions=(*system.assumptions, *stand_ins, *notes),
        stand_ins=tuple(stand_ins),
        registry=drafters,
    )


def _adapted(model: Acceptance, history: int) -> tuple[Acceptance, list[str]]:
    """Return the model with `history` earlier responses to retrieve from and with fresh drafters, and notes of both."""
    notes = []
    remembering = _changed(model, lambda part: _with_history(part, history))
    if remembering is not model:
        notes.append(f"{history} responses of an earlier epoch to retrieve from, as good as finished siblings")
    fresh = _changed(remembering, _with_freshness)
    if fresh is not remembering:
        notes.append(
            "acceptance is taken as the fresh and fully trained drafter's, and changes with age and training by the "
            "default values of Freshness"
        )
    return fresh, notes


def _with_freshness(model: Acceptance) -> Acceptance:
    """Return trees as those of a drafter that ages and is trained, and any other model as it is."""
    if isinstance(model, ContextAcceptance):
        return FreshAcceptance(base=model) if isinstance(model.base, TreeAcceptance) else model
    return FreshAcceptance(base=model) if isinstance(model, TreeAcceptance) else model


def _changed(model: Acceptance, change: Callable[[Acceptance], Acceptance]) -> Acceptance:
    """Apply `change` to the model, or to each drafter's; return `model` itself where nothing changes."""
    if not isinstance(model, PerDrafter):
        return change(model)
    changed = model.changed(change)
    return model if changed == model else changed


def _with_history(model: Acceptance, responses: int) -> Acceptance:
    """Return a model of siblings with so many earlier responses, and any other model unchanged."""
    if isinstance(model, ContextAcceptance):
        base = _with_history(model.base, responses)
        return model if base is model.base else model.with_parts([base])
    if not responses or not isinstance(model, SiblingAcceptance):
        return model
    alpha = float(model.alpha(np.array([float(responses)]), np.zeros(1))[0])
    return model.model_copy(update={"alone": alpha})


def _extrapolations(system: System, policy: Policy, chosen: Sequence[str], model: Acceptance) -> list[str]:
    """Notes on strategies beyond the model's measurements, and on those drafted in place of deeper published ones."""
    drafted = [arm for arm in policy.strategies if arm.speculates]
    outside = [str(arm) for arm in drafted if model.outside(arm)]
    options = product(system.ladder, chosen, (True, False))
    published = {arm for ladder_step, name, trees in options for arm in strategies(ladder_step, name, trees=trees)}
    shallower = [str(arm) for arm in drafted if arm not in published]
    notes = [f"acceptance is extrapolated for {'; '.join(outside)}"] if outside else []
    if shallower:
        notes.append(f"deeper drafts are not covered by the acceptance: {', '.join(shallower)} instead")
    return notes


def _arms(ladder_step: LadderStep, drafter: str, model: Acceptance, drafters: Drafters) -> list[Strategy]:
    """Return a rung's covered strategies, trees if any, else the deepest covered chain below; ConfigError if none."""
    for trees in (True, False) if ladder_step.trees and drafters[drafter].draws_trees else (False,):
        if covered := [arm for arm in strategies(ladder_step, drafter, trees=trees) if _covers(model, arm)]:
            return covered
    deepest = max(arm.draft_depth for arm in strategies(ladder_step, drafter, trees=False))
    for depth in range(deepest - 1, 0, -1):
        if _covers(model, arm := Strategy.chain(drafter, depth)):
            return [arm]
    raise UnknownAcceptance(f"the acceptance covers no draft of {drafter!r} at every batch size")


def _covers(model: Acceptance, strategy: Strategy) -> bool:
    if strategy.speculates:
        try:
            model.in_state({strategy.drafter: DrafterState()}).check(strategy)
        except ConfigError:
            return False
    return True
