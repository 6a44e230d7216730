"""The linear cost model, and its fit to recorded iterations or to a table of measured ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import numpy as np

from tltlab.arrays import Flags, Floats
from tltlab.drafters.specs import STANDARD, Drafters
from tltlab.records import Json, frozen
from tltlab.strategy import Strategy

from .base import CostModel, DraftingIteration, Seconds, padded
from .samples import Iterations, band, non_negative, robust_fit

FAR_TOKENS = 128
"""Tokens of an iteration from which on `LinearCosts.far_token_s` counts: on CPU cores and GPUs of today the time per
token changes between 100 and 250."""
_ENOUGH_FAR = 200
"""Iterations beyond twice FAR_TOKENS that it takes to fit a slope of their own."""
LEVELS = ("sd_base_s", "draft_level_s", "draft_level_per_request_s")


class LinearCosts(CostModel):
    """The linear cost model as it stands in a file; None is a term that the data did not identify.

    One iteration with b requests whose contexts sum to S tokens, v tokens to verify per request and draft depth d takes

        base_s + per_request_s*b + per_token_s*b*v + per_context_s*S
          + [if drafting]              sd_base_s + draft_per_request_s*b
                                       + d*(draft_level_s + draft_level_per_request_s*b)
          + [a drafter loaded, d = 0]  sd_idle_s

    `draft_per_request_s` is what finding a draft takes whatever its depth, as a model-free drafter searches once per
    request. A block drafter counts as one level at any depth. `prefill_per_token_s` is per prompt token. Where nothing
    was ever verified `per_token_s` is None and its share stands in `per_request_s`: at v = 1 the two are not separately
    identified. With `far_token_s` tokens beyond the first `FAR_TOKENS` of an iteration take that each: cores compute
    many at once better than few.
    """

    kind: Literal["linear"] = "linear"
    base_s: Seconds | None = None
    per_request_s: Seconds | None = None
    per_token_s: Seconds | None = None
    far_token_s: Seconds | None = None
    per_context_s: Seconds | None = None
    sd_base_s: Seconds | None = None
    sd_idle_s: Seconds | None = None
    draft_level_s: Seconds | None = None
    draft_level_per_request_s: Seconds | None = None
    draft_per_request_s: Seconds = 0.0
    prefill_per_token_s: Seconds | None = None

    def iteration(
        self,
        strategy: Strategy,
        *,
        tokens_to_verify: float | None = None,
        drafter_loaded: bool = False,
        drafters: Drafters = STANDARD,
    ) -> LinearIteration:
        verified = float(strategy.tokens_to_verify) if tokens_to_verify is None else tokens_to_verify
        fixed, per_request, passes = self.need("base_s"), self.need("per_request_s"), drafters.passes(strategy)
        fixed += self.once_s(strategy, drafter_loaded)
        draft_fixed = draft_per_request = 0.0
        per_token = self.per_token_s or 0.0
        if strategy.speculates:
            draft_fixed = passes * self.need("draft_level_s")
            draft_per_request = self.draft_per_request_s + passes * self.need("draft_level_per_request_s")
            per_token = self.need("per_token_s")
        return LinearIteration(
            fixed_s=fixed,
            per_request_s=per_request,
            per_token_s=per_token,
            far_token_s=per_token if self.far_token_s is None else self.far_token_s,
            per_context_s=self.need("per_context_s"),
            draft_fixed_s=draft_fixed,
            draft_per_request_s=draft_per_request,
            tokens_to_verify=verified,
            graph_sizes=self.graph_sizes or (),
        )

    def prefill_s(self, tokens: float) -> float:
        return self.need("prefill_per_token_s") * tokens

    def predict(self, rows: Iterations) -> Floats:
        if rows.spec.any():
            self.need("sd_base_s")
        if (rows.prefill > 0).any():
            self.need("prefill_per_token_s")
        return self.identified_s(rows)

    def identified_s(self, rows: Iterations) -> Floats:
        """As in the base; drafting counts in the row that did it."""
        columns = _verification(rows, far=self.far_token_s is not None) | _drafting(rows)
        columns["sd_idle_s"] = (rows.loaded & ~rows.spec).astype(np.float64)
        return np.asarray(sum((getattr(self, name) or 0.0) * x for name, x in columns.items()), np.float64)


@frozen
class LinearIteration(DraftingIteration):
    """Seconds of one iteration under one strategy, linear in batch, tokens and context.

    >>> LinearCosts(base_s=4e-3, per_request_s=1e-3, per_context_s=0.0).iteration(NO_SPECULATION).seconds(2, 100)
    0.006
    """

    fixed_s: float
    per_request_s: float
    per_token_s: float
    far_token_s: float
    per_context_s: float

    def without_context_s(self, batch: int) -> float:
        tokens = padded(batch * self.tokens_to_verify, self.graph_sizes)
        verified = self.per_token_s * min(tokens, FAR_TOKENS) + self.far_token_s * max(tokens - FAR_TOKENS, 0.0)
        return self.fixed_s + self.per_request_s * batch + verified + self.draft_s(batch)

    def context_slope_s(self, batch: int) -> float:
        return self.per_context_s


def fit(rows: Iterations, *, recorded: bool) -> LinearCosts:
    """Linear costs: robust to outliers for `recorded` rows, which have drafting apart, else by relative errors."""
    notes: list[str] = []
    terms = _recorded(rows, notes) if recorded else _measured(rows, notes)
    return LinearCosts.model_validate(terms | {"notes": tuple(notes), "calibrated": rows.covered})


def _recorded(rows: Iterations, notes: list[str]) -> Json:
    """Terms of recorded iterations, and notes on terms that are None or inside others.

    Verification is fitted to duration - draft_s and drafting to draft_s, both as `tltlab.costs.samples` does:
    robust to outliers, and with sums that are right.
    """
    plain = ~rows.spec
    columns = _verification(rows, far=(rows.verified[rows.spec] >= 2 * FAR_TOKENS).sum() >= _ENOUGH_FAR)
    idle_seen = bool((rows.loaded & plain).any())
    # Comparing RL steps would also measure how the machine's speed drifts; the drafter's own clock does not.
    if idle_seen and (~rows.loaded & plain).any() and not _idle(rows).any():
        columns["sd_idle_s"] = (rows.loaded & plain).astype(np.float64)
    verify = robust_fit(columns, rows.seconds - rows.draft_s, rows.group, rows.block)
    terms = dict(verify.coefficients)
    if abs(verify.level - 1.0) > 0.02:
        notes.append(
            f"outliers: typical iterations times {verify.level:.3f} give a typical rollout's time, as these costs do"
        )
    if not rows.spec.any():
        terms |= {"per_token_s": None, "sd_base_s": None}
        terms |= {"draft_level_s": None, "draft_level_per_request_s": None}
        notes.append("nothing was speculated: per_token_s is inside per_request_s, the drafting terms are unknown")
    else:
        _fit_drafting(rows, terms, notes)
    _fit_idle(rows, idle_seen, terms, notes)
    _note_unidentified(terms, notes)
    if rows.spec.any() and terms.get("per_token_s") is None:
        notes.append("per_token_s is not identified: drafts of one size only do not separate it from other terms")
    elif _drafts_but_in_prefill(rows) and terms["sd_base_s"] is None:
        terms["sd_base_s"] = 0.0
        notes.append("every iteration speculates: sd_base_s is inside base_s and written 0")
    return terms


def _measured(rows: Iterations, notes: list[str]) -> Json:
    """Terms of measured iterations, and notes: one non-negative least-squares fit of relative errors.

    Drafting is not measured apart here, so a chain's d drafted tokens per request are the same as d more to verify:
    then draft_level_per_request_s is inside per_token_s and written 0.
    """
    drafting = _drafting(rows)
    del drafting["draft_per_request_s"]
    columns = _verification(rows, far=False) | drafting
    terms: dict[str, float | None] = non_negative(columns, rows.seconds) | {"sd_idle_s": None}
    if rows.spec.any():
        terms |= measured_drafting(terms, notes)
    else:
        notes.append("nothing was drafted: the drafting terms are unknown")
    if (rows.verified == rows.batch).all():
        notes.append("one token was verified per request: per_token_s is inside per_request_s")
    elif terms["per_token_s"] is None:
        notes.append("per_token_s is not identified: it does not vary apart from other terms")
    _note_unidentified(terms, notes)
    return terms


def measured_drafting(terms: Mapping[str, float | None], notes: list[str]) -> dict[str, float]:
    """Drafting terms of measured iterations, and notes: 0 for a term that is inside others."""
    notes.append("what a loaded drafter costs in plain decoding was not measured: sd_idle_s is written 0")
    if inside := [name for name in LEVELS if terms[name] is None]:
        notes.append(f"{', '.join(inside)} not identified apart from other terms, which include them; written 0")
    return {name: terms[name] or 0.0 for name in LEVELS} | {"sd_idle_s": 0.0}


def _verification(rows: Iterations, *, far: bool) -> dict[str, Floats]:
    """The factors of the terms of verification in each row; earlier terms are identified first."""
    columns = {
        "base_s": np.ones_like(rows.batch),
        "per_request_s": rows.batch,
        "per_context_s": rows.context,
        "sd_base_s": rows.spec.astype(np.float64),
        "per_token_s": rows.verified,
        "prefill_per_token_s": rows.prefill,
    }
    if _drafts_but_in_prefill(rows):
        # What sets first iterations apart is their prefill.
        columns |= {name: columns.pop(name) for name in ("sd_base_s", "per_token_s")}
    if far:
        columns["per_token_s"] = np.minimum(rows.verified, FAR_TOKENS)
        columns["far_token_s"] = np.maximum(rows.verified - FAR_TOKENS, 0.0)
    return columns


def _drafts_but_in_prefill(rows: Iterations) -> bool:
    """True if every iteration speculates but those that prefill, as an engine's first does under a fixed draft."""
    return bool((rows.spec | (rows.prefill > 0)).all())


def _drafting(rows: Iterations) -> dict[str, Floats]:
    """The factors of the terms of drafting in each row."""
    return {
        "draft_level_s": rows.next_depth,
        "draft_level_per_request_s": rows.next_depth * rows.batch,
        "draft_per_request_s": rows.batch * (rows.next_depth > 0),
    }


def _note_unidentified(terms: dict[str, float | None], notes: list[str]) -> None:
    for name in ("base_s", "per_request_s", "per_context_s", "prefill_per_token_s"):
        if terms.get(name) is None:
            prefill = name == "prefill_per_token_s"
            why = "no iteration prefilled" if prefill else "it does not vary apart from other terms"
            notes.append(f"{name} is not identified: {why}")


def _fit_drafting(rows: Iterations, terms: dict[str, float | None], notes: list[str]) -> None:
    drafting = rows.draft_known & (rows.next_depth > 0)
    if not drafting.any() or not rows.draft_s[drafting].any():
        terms |= {"draft_level_s": 0.0, "draft_level_per_request_s": 0.0}
        notes.append("drafting time was not recorded apart: it is inside sd_base_s and per_token_s, draft terms are 0")
        return
    drafts = rows.where(drafting)
    columns = _drafting(drafts) | {"once": np.ones_like(drafts.batch)}
    draft_fit = robust_fit(columns, drafts.draft_s, band(drafts.batch), drafts.block)
    once = draft_fit.coefficients.pop("once")
    terms |= draft_fit.coefficients | {"draft_per_request_s": draft_fit.coefficients["draft_per_request_s"] or 0.0}
    if once:
        terms["sd_base_s"] = (terms["sd_base_s"] or 0.0) + once
    if once is None:
        notes.append("drafts of one depth only: their time is all in the draft_level terms, none in sd_base_s")
    if terms["draft_level_per_request_s"] is None:
        notes.append("draft_level_per_request_s is not identified: drafts at one batch size only")


def _fit_idle(rows: Iterations, idle_seen: bool, terms: dict[str, float | None], notes: list[str]) -> None:
    """sd_idle_s: measured as drafting time at depth 0, else by comparison, else inside base_s."""
    idle = _idle(rows)
    if idle.any():
        terms["sd_idle_s"] = float(rows.draft_s[idle].mean())
    elif terms.get("sd_idle_s") is not None:
        return
    elif idle_seen:
        terms["sd_idle_s"] = 0.0
        notes.append("plain iterations all had a drafter loaded: sd_idle_s is inside base_s and written 0")
    else:
        terms["sd_idle_s"] = None
        notes.append("sd_idle_s is not identified: no plain iteration with a drafter loaded")


def _idle(rows: Iterations) -> Flags:
    """Rows that recorded what a loaded drafter took to draft nothing."""
    idle: Flags = rows.draft_known & rows.loaded & (rows.next_depth == 0) & (rows.draft_s > 0)
    return idle
