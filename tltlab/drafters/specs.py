"""Drafters as values in policy files and recipes: which one, with which settings."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from tltlab.config import Built, FiniteModel
from tltlab.errors import ConfigError
from tltlab.files import read_json

from . import suffix
from .base import Draft, Drafter
from .ngram import NgramDrafter


class _BuiltDrafter(Built, init=False):
    def build(self) -> Drafter:
        """A fresh drafter; ConfigError where the library that it needs is not installed."""
        drafter: Drafter = self.make()
        return drafter


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
        """Whether responses of earlier RL steps serve, and not those of the group alone."""
        return not {"problem", "global"}.isdisjoint(self.scopes)

    def check(self) -> None:
        suffix.check_settings(self)


class LearnedSpec(FiniteModel):
    """A drafter with a network, which the engine runs: `model` is the folder of its weights, `method` what it is.

    "mtp" are multi-token-prediction layers, which some models bring along: without a `model` they are the target's own.

    While it is not `trained` (random weights until its first update), and when it is older than `max_age` RL steps, the
    model-free drafter named `fallback` serves in its place; without one nothing is drafted then.
    """

    kind: Literal["learned"] = "learned"
    method: Literal["eagle", "eagle3", "draft_model", "mtp"]
    model: str = ""
    trained: bool = True
    max_age: int | None = Field(default=None, ge=0)
    fallback: str | None = None

    @model_validator(mode="after")
    def _names_its_weights(self) -> Self:
        if not self.model and self.method != "mtp":
            raise ValueError(f"model: a drafter of method {self.method!r} needs the folder of its weights")
        return self

    @property
    def speculative_config(self) -> dict[str, Any]:
        """What it is in vLLM's words, which take the target's own MTP layers where no model is named."""
        return {"method": self.method} | ({"model": self.model} if self.model else {})


class HybridSpec(FiniteModel):
    """Per request, the draft of the model-free drafter `first` where it promises enough, else that of `otherwise`.

    Both are names of drafters of the same engine.
    """

    kind: Literal["hybrid"] = "hybrid"
    first: str = "suffix"
    otherwise: str = "learned"
    min_expected: float = Field(default=1.0, ge=0)

    def choose(self, first: Draft, other_expected: float) -> bool:
        """Whether to use the draft `first`; `other_expected` is what the other drafter's drafts lately brought.

        It is used where it has tokens and expects at least `min_expected` and `other_expected` accepted tokens.
        """
        return bool(first.tokens) and first.expected >= max(self.min_expected, other_expected)


ModelFreeSpec = NgramSpec | SuffixSpec
DrafterSpec = Annotated[NgramSpec | SuffixSpec | LearnedSpec | HybridSpec, Field(discriminator="kind")]

DEFAULT_DRAFTERS: dict[str, ModelFreeSpec] = {"ngram": NgramSpec(), "suffix": SuffixSpec()}
"""The drafters that every engine has, by the name that strategies use."""

SYSTEM_DRAFTERS: dict[str, ModelFreeSpec] = {
    # arXiv 2511.16665 section 5: retrieval among the responses of the group. Match lengths are not published.
    "tlt-base": NgramSpec(scope="group"),
    # arXiv 2511.13841: one tree per problem over its most recent rollouts; windows of 16 to 32 do best there.
    "das": SuffixSpec(scopes=("problem",), window=16),
    # arXiv 2511.14617: a tree per group, filled as its members generate. What is filtered out is not published.
    "seer": SuffixSpec(scopes=("group",), window=None),
    # arXiv 2601.09083: a tree per prompt, all history, running siblings included.
    "srt": SuffixSpec(scopes=("problem",), window=None),
    # arXiv 2508.18588's released code (He-Jingkai/specRL): last 7 tokens against the previous epoch's 16 responses.
    "histospec": SuffixSpec(scopes=("problem",), window=16, max_match=7, length="doubling", live=False),
    # arXiv 2411.04975, arctic-inference: trees 64 deep, every length of match tried, as many tokens as are matched.
    "suffix-decoding": SuffixSpec(
        scopes=("request", "global"), window=None, max_match=32, max_draft=32, min_match=1, length="match"
    ),
}
"""The drafting of published systems: what they search, how much history, how long. Their scheduling is not in it."""

MTP_LAYERS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules")
"""Where configs say how many MTP layers a model has, in vLLM 0.32 (`SpeculativeConfig.hf_config_override`)."""


def check_drafter(target: str, name: str, spec: LearnedSpec) -> None:
    """Raise ConfigError where the configurations of drafter and target, if they are folders, do not go together.

    A draft model needs the target's vocabulary, an EAGLE head its hidden size too; an EAGLE-3 head may draft from a
    part of the vocabulary. A target whose own MTP layers are to draft needs to have some.
    """
    theirs, ours = _config(target), _config(spec.model or target)
    if theirs is not None and not spec.model and not any(theirs.get(field) for field in MTP_LAYERS):
        raise ConfigError(
            f"drafter {name}: {target} brings no MTP layers along, its config.json has none of {', '.join(MTP_LAYERS)}"
        )
    if theirs is None or ours is None:
        return
    for field in ("vocab_size",) if spec.method == "draft_model" else ("vocab_size", "hidden_size"):
        if ours.get(field) != theirs.get(field):
            raise ConfigError(
                f"drafter {name}: {spec.model} has {field} {ours.get(field)} and the target {target} has "
                f"{theirs.get(field)}; they must be equal"
            )


def check_sampled_drafts(drafters: Mapping[str, Any], speculative: Mapping[str, Any] | None) -> None:
    """Raise ConfigError for a hybrid beside a learned drafter that samples its drafts.

    vLLM keeps the probabilities of such drafts and verifies with them whatever drafts it is given, so a request that
    gets other drafts instead would be sampled from the wrong distribution.
    """
    sampled = (speculative or {}).get("draft_sample_method") == "probabilistic"
    if sampled and any(isinstance(spec, HybridSpec) for spec in drafters.values()):
        raise ConfigError(
            'a hybrid cannot stand beside drafts that are sampled: leave out draft_sample_method "probabilistic"'
        )


def _config(model: str) -> dict[str, Any] | None:
    path = Path(model) / "config.json"
    if not path.is_file():
        return None
    config = read_json(path)
    return config if isinstance(config, dict) else None
