"""Acceptance models from a value, a name or a file, and those that come along.

base.py says what a model is; constant and geometric ones are there too. measured.py holds what `calibrate` writes,
trees.py trees, by_request.py what differs by request, freshness.py what changes with the drafter's age, replay.py the
replay per position.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter

from tltlab.config import faults_in
from tltlab.errors import ConfigError
from tltlab.files import read_json
from tltlab.own import OwnPart

from .base import Acceptance, SettledModel
from .by_request import SiblingAcceptance
from .freshness import Base, FreshAcceptance
from .trees import TreeAcceptance, TreeRange

_TLT_TREES = TreeAcceptance(
    late_miss=0.12428737,
    onset_levels=4.84687628,
    onset_shape=2.97470283,
    pruned=0.233194748,
    best_top_k=8.50430338,
    top_k_penalty=0.219142982,
    calibrated=TreeRange(draft_depth=(4, 16), top_k=(4, 16), tokens_to_verify=(16, 128)),
    notes=(
        "fitted to the accept lengths of TLT (arXiv 2511.16665) figure 13 (36 cells) and table 1 (6 values of "
        "topK): Qwen2.5-32B, EAGLE drafter, TP 4, H100, batch 1",
        "error 0.4 % mean, 1.7 % worst in sample; leaving out each depth 0.8 % and 2.5 %, each number of tokens to "
        "verify 0.5 % and 1.8 %",
        "chains are an extrapolation: only trees were measured",
    ),
)

SHIPPED: dict[str, Base | FreshAcceptance] = {
    "tlt-qwen2.5-32b": _TLT_TREES,
    "tlt-qwen2.5-32b-fresh": FreshAcceptance(
        base=_TLT_TREES,
        notes=(
            "assumption, see Freshness: tlt-qwen2.5-32b taken as the fresh and fully trained drafter's, acceptance "
            "falling with age and rising with training by default values",
            *_TLT_TREES.notes,
        ),
    ),
    "seer-siblings": SiblingAcceptance(
        alone=0.41591936,
        most=0.63463907,
        exponent=0.74728552,
        notes=(
            "fitted to accepted length per round against reference siblings (0, 1, 5, 15), linear drafts, of Seer "
            "(arXiv 2511.14617): within 0.03 tokens in sample, 0.15 leaving one out; three parameters on four points",
            "the table does not say how deep the drafts were: depth 8, its largest, is assumed",
        ),
    ),
}
"""Models that come along, by name."""

_FILE: TypeAdapter[Base | FreshAcceptance] = TypeAdapter(Annotated[Base | FreshAcceptance, Field(discriminator="kind")])
_SHORT = {"constant": "tokens", "geometric": "alpha"}


class OwnAcceptance(OwnPart):
    """An acceptance model class of the user's own: an `AcceptanceModel` or a `RequestAcceptance`."""

    base = SettledModel
    part = "acceptance model"
    contract = "check_acceptance"


def load_acceptance(source: Acceptance | type[SettledModel] | dict[str, Any] | str | Path) -> Acceptance:
    """Return an acceptance model from itself, a dict, `constant:A`, `geometric:ALPHA`, a shipped name or a JSON file.

    `module:Class(key=value,...)` is a user's own class, as is the class itself or an instance: it must pass
    `tltlab.testing.check_acceptance`.

    >>> load_acceptance("geometric:0.5").tokens_per_iteration(Strategy.chain("ngram", 2))
    1.75
    """
    if isinstance(source, dict):
        return _validated(source, "acceptance")
    name, colon, number = str(source).partition(":") if isinstance(source, str | Path) else ("", "", "")
    if colon and name in _SHORT:
        return _validated({"kind": name, _SHORT[name]: number}, str(source))
    own: Acceptance | None = OwnAcceptance.resolve(source)
    if own is not None:
        return own
    if not isinstance(source, str | Path):
        assert not isinstance(source, type)
        return source
    if str(source) in SHIPPED:
        return SHIPPED[str(source)]
    if not Path(source).exists():
        raise ConfigError(
            f"no acceptance model {str(source)!r}: give constant:A, geometric:ALPHA, 'trace', {', '.join(SHIPPED)} "
            f"(-fresh: with an assumed effect of the drafter's age and training), a fitted model's file or module:Class"
        )
    return _validated(read_json(Path(source)), str(source))


def _validated(value: Any, origin: str) -> Base | FreshAcceptance:
    with faults_in(origin):
        try:
            return _FILE.validate_python(value)
        except ConfigError as error:
            raise ConfigError(f"{origin}: {error}") from error
