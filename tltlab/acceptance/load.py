"""Acceptance models from a value, a name or a file, and the shipped ones.

All kinds are under the contract `Acceptance`: constant; chains by one chance, a chance per token or an accept length
per depth (base.py); measured distributions, as `calibrate` writes them (measured.py); trees and growth by siblings
(curves.py); replayed per position (replay.py). `FreshAcceptance` makes
any of them depend on the drafter's age and training, `ContextAcceptance` on context beyond the length at which the
drafter was trained, `PerDrafter` gives each drafter its own, `Scaled` multiplies the chances of some drafters.
"""

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter

from tltlab.config import validated
from tltlab.errors import ConfigError
from tltlab.files import read_json
from tltlab.own import OwnPart, is_own, split
from tltlab.records import Fields

from .base import (
    Acceptance,
    AcceptanceModel,
    ChainAcceptance,
    ConstantAcceptance,
    GeometricAcceptance,
    LengthsAcceptance,
)
from .context import TRAINED_TOKENS, ContextAcceptance, split_trained, trained_at, trained_text
from .curves import SiblingAcceptance, TreeAcceptance
from .freshness import Base, FreshAcceptance
from .per_drafter import EVERY, PerDrafter

_TLT = "tlt-qwen2.5-32b"
_FITTED = validated(
    TypeAdapter(dict[str, Annotated[TreeAcceptance | SiblingAcceptance, Field(discriminator="kind")]]),
    read_json(Path(__file__).with_name("shipped.json")),
    "shipped.json",
)
_ASSUMED = (
    f"assumption, see Freshness: {_TLT} taken as the fresh and fully trained drafter's, acceptance falling with age "
    "and rising with training by default values"
)

SHIPPED: dict[str, Base | FreshAcceptance] = {
    _TLT: _FITTED[_TLT],
    f"{_TLT}-fresh": FreshAcceptance(base=_FITTED[_TLT], notes=(_ASSUMED, *_FITTED[_TLT].notes)),
    "seer-siblings": _FITTED["seer-siblings"],
}
"""Models that come along, by name."""

DEFAULTS = {"learned": "geometric:0.7", "ngram": "geometric:0.42", "suffix": "geometric:0.42"}
WITH_EPOCHS = {"suffix": "geometric:0.57"}
"""Assumed acceptance of each drafter, named "default", and that of drafters which remember earlier epochs of the same
prompts.

- `learned`: an assumption, 3.2 tokens per iteration at depth 8; with trees TLT reports 4.6 to 6.5 (arXiv 2511.16665,
  table 6).
- `ngram`: a lone request of Seer (arXiv 2511.14617), 1.70 tokens per round without sibling responses.
- `suffix`: a request's own text alone gives what n-grams give. With responses of earlier epochs, a tree of the group's
  text in the same table: 2.32 tokens per round with 5 sibling responses; 2.04 with one, 2.53 with 15.
"""
DEFAULT, EARLIER = "default", "earlier epochs"

_FILE: TypeAdapter[Base | FreshAcceptance] = TypeAdapter(Annotated[Base | FreshAcceptance, Field(discriminator="kind")])
_SHORT = {"constant": "tokens", "geometric": "alpha"}
_NAMED = re.compile(r"\s*[A-Za-z_][\w.-]*\s*=")


class OwnAcceptance(OwnPart):
    """An acceptance model class of the user's own."""

    base = AcceptanceModel
    part = "acceptance model"
    contract = "check_acceptance"


def load_acceptance(
    source: Acceptance | type[AcceptanceModel] | Fields | str | Path, *, epochs: bool = False
) -> Acceptance:
    """Return an acceptance model from itself, a dict, `constant:A`, `geometric:ALPHA`, a shipped name or a JSON file.

    A number is a geometric model's ALPHA, `0.8/0.6/0.5` the chances that a chain is kept up to each of its tokens, and
    `lengths:1.8/2.4/2.2` the accept lengths at depth 1, 2 and 3, bonus included. By drafter:
    `learned=MODEL,ngram=MODEL` or a dict of models by drafter, of which the drafters that are not named keep their
    default, `all=MODEL`, or "default" for all of `DEFAULTS`, with `epochs` of the same prompts before those of
    `WITH_EPOCHS`. `MODEL@2k` is a
    drafter trained at 2,048 tokens, `MODEL@short` one of `context.TRAINED_TOKENS`. `module:Class(key=value,...)` is a
    user's own class, as is the class itself or an instance: it must pass `tltlab.testing.check_acceptance`.

    >>> load_acceptance("geometric:0.5").tokens_per_iteration(Strategy.chain("ngram", 2))
    1.75
    >>> str(load_acceptance("learned=geometric:0.5,ngram=0.4"))
    'learned=geometric:0.5,ngram=0.4,suffix=geometric:0.42 (default)'
    """
    if isinstance(source, Mapping):
        by_drafter = (
            source
            and "kind" not in source
            and all(isinstance(each, str | Path | Mapping | Acceptance) for each in source.values())
        )
        return _by_drafter(source, epochs) if by_drafter else validated(_FILE, source, "acceptance")
    text = str(source) if isinstance(source, str | Path) else ""
    if text and split_by_drafter(text) is None and not Path(text).exists() and (trained := split_trained(text)):
        return trained_at(load_acceptance(trained[0]), trained[1], text)
    name, colon, number = text.partition(":")
    if colon and name == "lengths":
        return validated(_FILE, {"kind": name, "lengths": number.split("/")}, text)
    if colon and name in _SHORT:
        return validated(_FILE, {"kind": name, _SHORT[name]: number}, text)
    own: Acceptance | None = OwnAcceptance.resolve(source)
    if own is not None:
        return own
    if not isinstance(source, str | Path):
        assert not isinstance(source, type)
        return source
    if text == DEFAULT:
        return _by_drafter({}, epochs)
    if text in SHIPPED:
        return SHIPPED[text]
    if (parts := split_by_drafter(text)) is not None:
        return _by_drafter(parts, epochs)
    with suppress(ValueError):
        first, *others = map(float, text.split("/"))
        value = {"kind": "chances", "kept": (first, *others)} if others else {"kind": "geometric", "alpha": first}
        return validated(_FILE, value, text)
    if not Path(source).exists():
        raise ConfigError(
            f"no acceptance model {text!r}: give constant:A, geometric:ALPHA, lengths:A1/A2/..., 'trace', '{DEFAULT}', "
            f"{', '.join(SHIPPED)} (-fresh: with an assumed effect of the drafter's age and training), a fitted "
            "model's file, module:Class, or one for each drafter as learned=geometric:ALPHA,ngram=geometric:ALPHA; "
            f"behind it @TOKENS or {', '.join(f'@{name}' for name in TRAINED_TOKENS)}, where the drafter was trained"
        )
    return validated(_FILE, read_json(Path(source)), text)


def split_by_drafter(text: str) -> dict[str, str] | None:
    """Model of each drafter in `learned=geometric:0.7,ngram=geometric:0.42`; None for text that names no drafter.

    Raises ConfigError for a part without a name or a model, and for a name that comes twice.
    """
    if not _NAMED.match(text) or Path(text).exists():
        return None
    parts: dict[str, str] = {}
    for part in split(text):
        name, _, model = (word.strip() for word in part.partition("="))
        if not name or not model or name in parts:
            wrong = f"{name} is there twice" if name in parts else f"{part.strip()!r} is no DRAFTER=MODEL"
            raise ConfigError(f"acceptance {text}: {wrong}; write learned=geometric:ALPHA,ngram=geometric:ALPHA")
        parts[name] = model
    return parts


def acceptance_text(model: Acceptance | None) -> str:
    """How a user writes a model, else its kind.

    >>> acceptance_text(load_acceptance("geometric:0.5"))
    'geometric:0.5'
    """
    if model is not None and is_own(model):
        return type(model).__name__
    if shipped := next((name for name, known in SHIPPED.items() if known == model), None):
        return shipped
    match model:
        case GeometricAcceptance():
            return f"geometric:{model.alpha:g}"
        case ConstantAcceptance():
            return f"constant:{model.tokens:g}"
        case ChainAcceptance():
            return "/".join(f"{chance:g}" for chance in model.kept)
        case LengthsAcceptance():
            return f"lengths:{'/'.join(f'{length:g}' for length in model.lengths)}"
        case ContextAcceptance():
            return f"{acceptance_text(model.base)}@{trained_text(model.trained_tokens)}"
        case FreshAcceptance():
            return f"{acceptance_text(model.base)}, by age and training"
        case PerDrafter():
            return str(model)
    return str(getattr(model, "kind", "trace"))


def granted(model: Acceptance | None, name: str | None, drafters: Iterable[str]) -> dict[str, str]:
    """The acceptance of each drafter in words, for the rows of tables; `name` is how the user wrote the model."""
    if isinstance(model, PerDrafter):
        return {drafter: model.text(drafter) for drafter in drafters}
    return dict.fromkeys(drafters, name or acceptance_text(model))


def with_drafter(model: Acceptance, drafter: str, own: Acceptance) -> PerDrafter:
    """The model with another one for one drafter."""
    base = model if isinstance(model, PerDrafter) else PerDrafter({}, model, {EVERY: acceptance_text(model)})
    texts = {**base.texts, drafter: acceptance_text(own)}
    return PerDrafter({**base.models, drafter: own}, base.others, texts)


def _named(model: Acceptance, drafter: str) -> Acceptance:
    """The model as one of this drafter, where the model does not name its drafter."""
    if isinstance(model, FreshAcceptance):
        return model.model_copy(update={"base": _named(model.base, drafter), "drafter": drafter})
    if isinstance(model, ContextAcceptance):
        return model.with_parts([_named(model.base, drafter)])
    if isinstance(model, SiblingAcceptance | TreeAcceptance) and model.drafter is None:
        return model.model_copy(update={"drafter": drafter})
    return model


def _by_drafter(sources: Fields, epochs: bool) -> PerDrafter:
    """Return one model of these; without one for `EVERY` drafter those not named keep their default."""
    texts: dict[str, str] = {}
    models: dict[str, Acceptance] = {}
    for name, source in sources.items():
        model = load_acceptance(source)
        models[name] = model if name == EVERY else _named(model, name)
        if isinstance(models[name], PerDrafter):
            raise ConfigError(f"acceptance of {name}: {source} is by drafter itself; give one model")
        texts[name] = str(source) if isinstance(source, str | Path) else acceptance_text(model)
    others = models.pop(EVERY, None)
    if others is None:
        for name, text in (DEFAULTS | (WITH_EPOCHS if epochs else {})).items():
            if name not in models:
                models[name] = load_acceptance(text)
                which = f"{DEFAULT}, {EARLIER}" if epochs and name in WITH_EPOCHS else DEFAULT
                texts[name] = f"{text} ({which})"
    return PerDrafter(models, others, texts)
