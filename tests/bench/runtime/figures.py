"""Figures of rollouts by mode: what plain decoding would have taken, speed-ups with their intervals, and the goals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from sklearn.isotonic import IsotonicRegression

from bench.harness import ratio
from tltlab.stats import finite, paired_ratio

Kind = Literal["stock", "off", "static", "table", "adaptive"]
Part = Literal["rollout", "tail"]
PER_SECONDS = ("duration", "per_token", "per_plain_second")
"""Compared figures: seconds of a rollout, per generated token, and per second of plain decoding."""
JUDGED_BY = "per_plain_second"
PROCESSOR = "processor_per_plain_second"
"""The same of this process's processor seconds, which a busy machine stretches little; 0 where none were counted."""

CLOCKS = {"wall": (JUDGED_BY, "seconds"), "processor": (PROCESSOR, "processor_s")}
"""Comparison of modes on each clock, and the rollout's field with its seconds."""

NOTHING: dict[str, Any] = {"modes": [], "speedups": [], "judged_by": JUDGED_BY, "goals": [], "over_best_fixed": []}
"""Result of `summarise` without rollouts."""

TAIL_GOAL, ROLLOUT_GOAL, NEVER_BELOW, OFF_GOAL = 1.7, 1.3, 0.97, 0.98


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeRollout:
    """One rollout of one mode. Seconds, tokens and plain seconds are of the whole rollout and of its tail.

    `plain_s` is what plain decoding of the same lengths would take (`PlainSteps`), `tail_plain_s` its tail's part. The
    longest of a few hundred sampled responses varies by a third, and durations with it; seconds per plain second hardly
    vary with it, so their ratio is that of the durations that equal lengths would give. `num_pairs` are the (request,
    iteration) pairs of iterations that verified drafts, as in `tltlab.traces.metrics.mean_accept_length`.
    """

    mode: str
    kind: Kind
    epoch: int
    round: int
    num_responses: int
    seconds: float
    num_tokens: int
    plain_s: float
    tail_seconds: float
    tail_tokens: int
    tail_plain_s: float
    num_pairs: int
    num_accepted: int
    recorder_s: float
    policy_s: float
    drafting_s: float
    processor_s: float = 0.0

    def rate(self, part: Part, per: str) -> float:
        """Seconds of `part`, per what `per` names; NaN where there was nothing to divide by."""
        whole = part == "rollout"
        seconds = self.seconds if whole else self.tail_seconds
        if per == "duration":
            return seconds
        if per == PROCESSOR:
            return self.processor_s / self.plain_s if whole and self.plain_s > 0 else math.nan
        tokens, plain_s = (self.num_tokens, self.plain_s) if whole else (self.tail_tokens, self.tail_plain_s)
        amount = tokens if per == "per_token" else plain_s
        return seconds / amount if amount > 0 else math.nan


class PlainSteps:
    """Seconds of plain decoding of given lengths, from plain iterations: step times that rise with the batch.

    `rows` are the iterations of plain rollouts. Step times are fitted by isotonic regression (scikit-learn), prompts
    take the mean of what prefilling took.
    """

    def __init__(self, rows: Sequence[Mapping[str, Any]]) -> None:
        steps = [(row["batch"], row["duration"]) for row in rows if not row["prefill_tokens"]]
        prefills = [row["duration"] for row in rows if row["prefill_tokens"]]
        batches, seconds = np.array(steps).T
        self._step_s = IsotonicRegression(out_of_bounds="clip").fit(batches, seconds)
        self._prefill_s = float(np.sum(prefills)) / max(sum(row["iteration"] == 0 for row in rows), 1)

    def seconds(self, lengths: Sequence[int], beyond: float = 0.0) -> float:
        """Seconds of a rollout of these lengths in tokens, or of its part beyond the length `beyond`."""
        ends = np.unique(np.maximum(np.array([beyond, *lengths]), beyond))
        running = np.array([sum(length > start for length in lengths) for start in ends[:-1]], np.float64)
        decoding = float(np.diff(ends) @ self._step_s.predict(running)) if len(running) else 0.0
        return decoding + (self._prefill_s if beyond == 0 else 0.0)


def summarise(rollouts: Sequence[ModeRollout], *, seed: int = 0) -> dict[str, Any]:
    """Means of every mode and epoch, speed-ups over stock vLLM with 95 % intervals, the goals, and `over_best_fixed`.

    Where no mode is of kind "stock", as in files of old, they are over the one of kind "off".
    """
    rng = np.random.default_rng(seed)
    epochs = sorted({r.epoch for r in rollouts})
    kinds = {r.mode: r.kind for r in rollouts}
    of_kind = {kind: mode for mode, kind in kinds.items()}
    base = of_kind.get("stock", of_kind.get("off"))
    assert base is not None
    speedups = [
        {"mode": mode, "epoch": epoch, "part": part, "measure": per}
        | _speedup(_of(rollouts, base, epoch), _of(rollouts, mode, epoch), part, per, rng)
        for epoch in epochs
        for mode in kinds
        if mode != base
        for part in ("rollout", "tail")
        for per in PER_SECONDS
    ]
    return {
        "modes": [_means(_of(rollouts, mode, epoch)) for epoch in epochs for mode in kinds],
        "speedups": speedups,
        "judged_by": JUDGED_BY,
        "goals": _goals(rollouts, kinds, epochs, speedups, rng),
        "over_best_fixed": [row for clock in CLOCKS for row in over_best_fixed(rollouts, clock)],
    }


def _of(rollouts: Sequence[ModeRollout], mode: str, epoch: int) -> list[ModeRollout]:
    return sorted((r for r in rollouts if (r.mode, r.epoch) == (mode, epoch)), key=lambda r: r.round)


def _means(rollouts: list[ModeRollout]) -> dict[str, Any]:
    seconds = sum(r.seconds for r in rollouts)
    pairs = sum(r.num_pairs for r in rollouts)
    return {
        "mode": rollouts[0].mode,
        "epoch": rollouts[0].epoch,
        "rollouts": len(rollouts),
        "seconds": seconds / len(rollouts),
        "tail_seconds": sum(r.tail_seconds for r in rollouts) / len(rollouts),
        "num_tokens": sum(r.num_tokens for r in rollouts) / len(rollouts),
        "tokens_per_s": sum(r.num_tokens for r in rollouts) / seconds,
        "plain_s": sum(r.plain_s for r in rollouts) / len(rollouts),
        "tail_plain_s": sum(r.tail_plain_s for r in rollouts) / len(rollouts),
        "mean_accept_length": 1 + sum(r.num_accepted for r in rollouts) / pairs if pairs else None,
        "recorder_share": sum(r.recorder_s for r in rollouts) / seconds,
        "policy_share": sum(r.policy_s for r in rollouts) / seconds,
        "drafting_share": sum(r.drafting_s for r in rollouts) / seconds,
    }


def _speedup(
    slow: list[ModeRollout], fast: list[ModeRollout], part: Part, per: str, rng: np.random.Generator
) -> dict[str, float | None]:
    """Ratio of the two modes' sums over rounds, `slow` / `fast`, with its interval; None where it is not known."""
    a, b = (np.array([r.rate(part, per) for r in side]) for side in (slow, fast))
    if not (np.isfinite(a).all() and np.isfinite(b).all() and (b > 0).all()):
        return {"ratio": None, "low": None, "high": None}
    return ratio(a, b, rng)


def _goals(
    rollouts: Sequence[ModeRollout],
    kinds: dict[str, Kind],
    epochs: list[int],
    speedups: list[dict[str, Any]],
    rng: np.random.Generator,
) -> list[dict[str, Any]]:
    ratios = {(s["mode"], s["epoch"], s["part"]): s for s in speedups if s["measure"] == JUDGED_BY}
    rows = []
    for mode in (mode for mode, kind in kinds.items() if kind == "adaptive"):
        last = epochs[-1]
        rows.append(_goal("times plain decoding in the tail", mode, last, TAIL_GOAL, ratios[mode, last, "tail"]))
        if last > 1:
            rows.append(_goal("times plain decoding", mode, last, ROLLOUT_GOAL, ratios[mode, last, "rollout"]))
        for epoch in epochs:
            rows.append(_goal("never slower", mode, epoch, NEVER_BELOW, ratios[mode, epoch, "rollout"]))
        for epoch in epochs:
            statics = [_of(rollouts, static, epoch) for static, kind in kinds.items() if kind == "static"]
            best = min(statics, key=lambda of: float(np.mean([r.rate("rollout", JUDGED_BY) for r in of])))
            ratio = _speedup(best, _of(rollouts, mode, epoch), "rollout", JUDGED_BY, rng)
            row = _goal(f"times the best static, {best[0].mode}", mode, epoch, 1.0, ratio)
            # Only a difference that is sure counts as behind.
            surely = ratio["high"] if ratio["high"] is not None else ratio["ratio"]
            rows.append(row | {"met": surely is not None and surely >= 1.0})
    return rows


def over_best_fixed(rollouts: Sequence[ModeRollout], clock: str) -> list[dict[str, Any]]:
    """A row per epoch and mode: its time over that of the fixed depth, or none, that did best, with its interval.

    `best_fixed` is that mode, chosen in hindsight; time is per second that plain decoding would take, by one of CLOCKS.
    There are no rows where a rollout's time by that clock is unknown.
    """
    per, field = CLOCKS[clock]
    rows = []
    for epoch in sorted({r.epoch for r in rollouts}):
        of_mode = {mode: _of(rollouts, mode, epoch) for mode in dict.fromkeys(r.mode for r in rollouts)}
        rates = {mode: np.array([r.rate("rollout", per) for r in of]) for mode, of in of_mode.items()}
        if not all((rate > 0).all() for rate in rates.values()):
            continue
        fixed = {r.mode for r in rollouts if r.kind in ("stock", "off", "static")}
        best = min(sorted(fixed), key=lambda mode: float(rates[mode].mean()))
        for mode, rate in rates.items():
            over = paired_ratio(rate, rates[best], rng=np.random.default_rng(0))
            took = [getattr(r, field) for r in of_mode[mode]]
            rows.append(
                {"clock": clock, "mode": mode, "epoch": epoch, "seconds": float(np.mean(took)),
                 "tokens_per_s": sum(r.num_tokens for r in of_mode[mode]) / sum(took), "best_fixed": best,
                 "ratio": over.estimate, "low": finite(over.low), "high": finite(over.high)}
            )  # fmt: skip
    return rows


def _goal(goal: str, mode: str, epoch: int, bound: float, speedup: dict[str, Any]) -> dict[str, Any]:
    ratio = speedup["ratio"]
    return {
        "goal": goal,
        "mode": mode,
        "epoch": epoch,
        "wanted": bound,
        "ratio": ratio,
        "low": speedup["low"],
        "high": speedup["high"],
        "met": ratio is not None and ratio >= bound,
    }


def stock_goal(mode: str, row: dict[str, Any]) -> dict[str, Any]:
    """The goal of what drafts nothing, beside stock vLLM at a batch size."""
    return _goal(f"times stock at batch {row['batch']}", mode, 1, OFF_GOAL, row)
