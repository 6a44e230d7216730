"""Drafters as values in policy files and recipes: which one, with which settings; and what a drafter is, by name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, model_validator

from tltlab.config import Built, Count, FiniteModel
from tltlab.errors import ConfigError, did_you_mean
from tltlab.files import read_object
from tltlab.own import OwnPart
from tltlab.records import Fields, Json, frozen
from tltlab.strategy import Strategy

from . import suffix
from .base import Draft, Drafter
from .ngram import NgramDrafter


@frozen
class DrafterTraits:
    """Properties of a drafter that costs, acceptance, graphs and reports depend on.

    With `has_network` a draft level is a forward pass on the GPU, and its graphs are captured; else drafting takes host
    time alone. `needs_text` drafters look up the tokens that requests generate. `draws_trees`: a draft may branch.
    `made_by` is where drafts are made: next to the scheduler in the "engine" core, or in the model's "workers".
    A drafter that `drafts_blocks` makes all tokens of a draft in one pass, else each level is a pass. `layers` counts
    decoder layers of the network.
    """

    has_network: bool
    needs_text: bool
    draws_trees: bool
    made_by: Literal["engine", "workers"]
    drafts_blocks: bool = False
    layers: int = 1


TEXT = DrafterTraits(has_network=False, needs_text=True, draws_trees=False, made_by="engine")
"""Drafters that copy from text."""
NETWORK = DrafterTraits(has_network=True, needs_text=False, draws_trees=True, made_by="workers")
"""Drafters that run their own network."""
BLOCK = replace(NETWORK, draws_trees=False, drafts_blocks=True, layers=5)
"""Drafters that fill a block of masked tokens in one pass, with as many layers as DFlash's heads (arXiv 2602.06036)."""


class _BuiltDrafter(Built, init=False):
    traits: ClassVar[DrafterTraits] = TEXT


class NgramSpec(_BuiltDrafter, builds=NgramDrafter, init=False):
    kind: Literal["ngram"] = "ngram"
    min_match: int
    max_match: int


class SuffixSpec(_BuiltDrafter, builds=suffix.SuffixDrafter, init=False):
    """Settings of `SuffixDrafter`; they can be read without the library that the drafter itself needs."""

    kind: Literal["suffix"] = "suffix"
    scopes: tuple[suffix.Scope, ...] = ("problem",)

    @property
    def remembers(self) -> bool:
        """True if responses of earlier RL steps serve, not only those of the group."""
        return not {"problem", "global"}.isdisjoint(self.scopes)

    def check(self) -> None:
        suffix.check_settings(self)


class LearnedSpec(FiniteModel):
    """A drafter with a network, which the engine runs: `model` is the folder of its weights, `method` what it is.

    "mtp" are multi-token-prediction layers, which some models bring along: without a `model` they are the target's own.
    "dflash" and "dspark" draft a block in one pass. `layers` counts the decoder layers, None as `NETWORK` or `BLOCK`.
    "ngram_gpu" has no network: vLLM's own n-grams of 2 to 5 tokens in a request's text, looked up on the device.

    While it is not `trained` (random weights until its first update), and when it is older than `max_age` RL steps, the
    model-free drafter named `fallback` serves in its place; without one nothing is drafted then.
    """

    kind: Literal["learned"] = "learned"
    method: Literal["eagle", "eagle3", "draft_model", "mtp", "dflash", "dspark", "ngram_gpu"]
    model: str = ""
    trained: bool = True
    max_age: NonNegativeInt | None = None
    fallback: str | None = None
    layers: Count | None = None

    @property
    def traits(self) -> DrafterTraits:
        if self.method == "ngram_gpu":
            return replace(TEXT, made_by="workers")
        usual = BLOCK if self.method in ("dflash", "dspark") else NETWORK
        return replace(usual, layers=self.layers or usual.layers)

    @model_validator(mode="after")
    def _names_its_weights(self) -> Self:
        if not self.model and self.method not in ("mtp", "ngram_gpu"):
            raise ValueError(f"model: a drafter of method {self.method!r} needs the folder of its weights")
        return self

    @property
    def speculative_config(self) -> Json:
        """vLLM's `speculative_config`, which selects the target's own MTP layers where no model is named."""
        settings: Json = {"prompt_lookup_min": 2, "prompt_lookup_max": 5} if self.method == "ngram_gpu" else {}
        return {"method": self.method} | ({"model": self.model} if self.model else settings)


class HybridSpec(FiniteModel):
    """Per request, the draft of the model-free drafter `first` where it promises enough, else that of `otherwise`.

    `first` and `otherwise` are names of drafters of the same engine.
    """

    kind: Literal["hybrid"] = "hybrid"
    first: str = "suffix"
    otherwise: str = "learned"
    min_expected: NonNegativeFloat = 1.0

    def choose(self, first: Draft, other_expected: float) -> bool:
        """Return True if the draft `first` is to be used.

        The first draft is used where it has tokens and expects at least `min_expected` and `other_expected` accepted
        tokens; the latter is the recent result of the other drafter.
        """
        return bool(first.tokens) and first.expected >= max(self.min_expected, other_expected)


def traits_of(cls: type[Drafter]) -> DrafterTraits:
    """Traits that a drafter class has as attributes, by default those of `TEXT`."""
    return replace(TEXT, **{f.name: getattr(cls, f.name) for f in fields(TEXT) if hasattr(cls, f.name)})


class OwnDrafter(OwnPart):
    """A drafter class of the user's own, which the engine asks beside its scheduler, as it asks the suffix drafter.

    Its traits are attributes of the class by the names of `DrafterTraits`; those of `TEXT` are the default.
    """

    base = Drafter
    part = "drafter"
    contract = "check_drafter"

    @property
    def traits(self) -> DrafterTraits:
        return traits_of(self.load())

    @property
    def remembers(self) -> bool:
        """True where responses of earlier RL steps serve: the class overrides `recall`."""
        return self.load().recall is not Drafter.recall


ModelFreeSpec = NgramSpec | SuffixSpec | OwnDrafter
DrafterSpec = Annotated[ModelFreeSpec | LearnedSpec | HybridSpec, Field(discriminator="kind")]

DEFAULT_DRAFTERS: dict[str, ModelFreeSpec] = {"ngram": NgramSpec(), "suffix": SuffixSpec()}
"""The drafters that every engine has, by the name that strategies use."""


class Drafters(Mapping[str, DrafterTraits]):
    """Drafters of a run by name, with their traits: the standard ones, those of `specs` and those of `traits`.

    Standard are `ngram`, `suffix`, `learned` and `block`. `traits` are of drafters without a spec, such as those of a
    recorded trace. A hybrid has a network where one of its parts has. Names are for people: whatever
    depends on what a drafter is asks here.

    >>> drafters = Drafters({"own": SuffixSpec(window=4)})
    >>> drafters["own"].has_network, drafters["learned"].has_network
    (False, True)
    >>> drafters["sufix"]  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    tltlab.errors.ConfigError: no drafter named 'sufix' (did you mean 'suffix'?); there are block, learned, ngram, ...
    """

    def __init__(self, specs: Mapping[str, DrafterSpec] = {}, traits: Mapping[str, DrafterTraits] = {}):
        standard = {"learned": NETWORK, "block": BLOCK, **DEFAULT_DRAFTERS}
        self._known: dict[str, DrafterSpec | DrafterTraits] = {**standard, **traits, **specs}

    @property
    def specs(self) -> dict[str, DrafterSpec]:
        """The specs of the drafters that have one here."""
        return {name: known for name, known in self._known.items() if not isinstance(known, DrafterTraits)}

    def _of_hybrid(self, spec: HybridSpec) -> DrafterTraits:
        first, otherwise = self[spec.first], self[spec.otherwise]
        return DrafterTraits(
            has_network=first.has_network or otherwise.has_network,
            needs_text=first.needs_text or otherwise.needs_text,
            draws_trees=False,
            made_by="workers" if "workers" in (first.made_by, otherwise.made_by) else "engine",
            drafts_blocks=otherwise.drafts_blocks,
            layers=otherwise.layers,
        )

    def __getitem__(self, name: str) -> DrafterTraits:
        """The traits of a drafter; ConfigError for a name that no drafter of the run has."""
        if name not in self._known:
            names = ", ".join(sorted(self._known))
            raise ConfigError(
                f"no drafter named {name!r}{did_you_mean(name, self._known)}; there are {names}, and those under "
                '"drafters" in a policy file or in the manifest.json of a trace'
            )
        known = self._known[name]
        if isinstance(known, HybridSpec):
            return self._of_hybrid(known)
        return known if isinstance(known, DrafterTraits) else known.traits

    def __contains__(self, name: object) -> bool:
        return name in self._known

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)

    def __hash__(self) -> int:
        return hash(frozenset(self._known))

    def joined(self, specs: Mapping[str, DrafterSpec]) -> Drafters:
        """The same with further drafters, which replace those of their names."""
        both = Drafters()
        both._known = {**self._known, **specs}
        return both

    @property
    def own(self) -> dict[str, DrafterTraits]:
        """The drafters that are not standard, or not what the standard one of the name is."""
        return {name: traits for name, traits in self.items() if name not in STANDARD or STANDARD[name] != traits}

    def check(self, strategies: Iterable[Strategy]) -> None:
        """Raise ConfigError for a strategy of an unknown drafter, and for a tree of one that draws none."""
        for strategy in strategies:
            if strategy.speculates and not self[strategy.drafter].draws_trees and strategy.top_k > 1:
                raise ConfigError(
                    f"{strategy} is a tree (top_k = {strategy.top_k}), and drafter {strategy.drafter!r} drafts chains"
                )

    def copying(self, names: Iterable[str]) -> dict[str, bool]:
        """Return by drafter True if it copies text; ConfigError for an unknown one."""
        return {name: not self[name].has_network for name in names}

    def in_blocks(self, strategy: Strategy) -> bool:
        """Return whether one pass drafts all tokens; ConfigError for an unknown drafter."""
        return strategy.speculates and self[strategy.drafter].drafts_blocks

    def passes(self, strategy: Strategy) -> int:
        """Return how often the drafter runs for a draft: once for a block, else once per level."""
        return 1 if self.in_blocks(strategy) else strategy.draft_depth

    def network_passes(self, strategy: Strategy) -> int:
        """Return the passes that are forward passes of a network; ConfigError for an unknown drafter."""
        return self.passes(strategy) if strategy.speculates and self[strategy.drafter].has_network else 0

    def tokens_per_pass(self, strategy: Strategy) -> int:
        """Return the tokens of a request in one pass: the pending one and a block's, else a level's branches."""
        return strategy.draft_depth + 1 if self[strategy.drafter].drafts_blocks else strategy.top_k


STANDARD = Drafters()
"""Drafters of a run that defines none."""

SYSTEM_DRAFTERS: dict[str, ModelFreeSpec] = {
    # arXiv 2511.16665 section 5: retrieval among the responses of the group. Match lengths are not published.
    "tlt-base": NgramSpec(),
    # arXiv 2511.13841: one tree per problem over its most recent rollouts; windows of 16 to 32 do best there.
    "das": SuffixSpec(window=16),
    # arXiv 2511.14617: a tree per group, filled as its members generate. Its filter is not published.
    "seer": SuffixSpec(scopes=("group",), window=None),
    # arXiv 2601.09083: a tree per prompt, all history, running siblings included.
    "srt": SuffixSpec(window=None),
    # arXiv 2508.18588's released code (He-Jingkai/specRL): last 7 tokens against the previous epoch's 16 responses.
    "histospec": SuffixSpec(window=16, max_match=7, length="doubling", live=False),
    # arXiv 2411.04975, arctic-inference: trees 64 deep, every length of match tried, as many tokens as are matched.
    "suffix-decoding": SuffixSpec(
        scopes=("request", "global"), window=None, max_match=32, max_draft=32, min_match=1, length="match"
    ),
}
"""The drafting of published systems: what they search, how much history, how long. Their scheduling is not in it."""

MTP_LAYERS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules")
"""Keys of model configs with the number of MTP layers, as in vLLM 0.32 (`SpeculativeConfig.hf_config_override`)."""


def check_drafter(target: str, name: str, spec: LearnedSpec) -> None:
    """Raise ConfigError where the configurations of drafter and target, if they are folders, do not go together.

    A draft model needs the target's vocabulary, an EAGLE head its hidden size too; an EAGLE-3 head may draft from a
    part of the vocabulary. A target whose own MTP layers are to draft needs to have some.
    """
    theirs, ours = (read_object(Path(model) / "config.json") for model in (target, spec.model or target))
    if theirs and spec.method == "mtp" and not (spec.model or any(theirs.get(field) for field in MTP_LAYERS)):
        raise ConfigError(
            f"drafter {name}: {target} brings no MTP layers along, its config.json has none of {', '.join(MTP_LAYERS)}"
        )
    if not theirs or not ours:
        return
    for field in ("vocab_size",) if spec.method == "draft_model" else ("vocab_size", "hidden_size"):
        if ours.get(field) != theirs.get(field):
            raise ConfigError(
                f"drafter {name}: {spec.model} has {field} {ours.get(field)} and the target {target} has "
                f"{theirs.get(field)}; they must be equal"
            )


def check_sampled_drafts(drafters: Fields, speculative: Fields | None) -> None:
    """Raise ConfigError for a hybrid beside a learned drafter that samples its drafts.

    vLLM keeps the probabilities of such drafts and verifies with them whatever drafts it is given, so a request that
    gets other drafts instead would be sampled from the wrong distribution.
    """
    sampled = (speculative or {}).get("draft_sample_method") == "probabilistic"
    if sampled and any(isinstance(spec, HybridSpec) for spec in drafters.values()):
        raise ConfigError(
            'a hybrid cannot be combined with sampled drafts: leave out draft_sample_method "probabilistic"'
        )
