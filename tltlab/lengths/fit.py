"""Fits the model of lengths to a trace, predicts another RL step, and measures statistics to compare traces by."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import Any

import numpy as np
import pandas as pd

from tltlab.arrays import Flags, Floats
from tltlab.errors import ConfigError
from tltlab.records import frozen
from tltlab.traces.metrics import prompt_share as measured_share
from tltlab.traces.metrics import rollout_s
from tltlab.traces.trace import Trace

from .model import LengthModel, ParetoTail, normal_weights

LEVEL = 0.9
_SCORES = np.linspace(-9.0, 9.0, 9001)
_FAR = 5.0
MAX_RESPONSES = 1_000_000
"""Responses used at most: larger traces are sampled at evenly spaced RL steps."""

LEVELS = (
    0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.975, 0.99, 0.995, 0.999,
)  # fmt: skip
_OUTLOOK_RESPONSES = 100_000
_MIN_BEYOND = 3
_MIN_FINISHED = 10
_MIN_PEAKS = 50
_MIN_DRIFT_STEPS = 5
_SIGNIFICANT = 3.0
_NORMAL = NormalDist()


@frozen
class Longest:
    """Tokens of the longest of `num_responses` in another RL step: the median, and the ends of the `level` interval.

    The interval has the chance of that step's draws, the variation between the `num_steps` RL steps that the law was
    fitted to, and the error of its tail. No end is beyond the cap.
    """

    num_responses: int
    num_steps: int
    level: float
    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return (
            f"longest of {self.num_responses} responses in another RL step: {self.median:.0f} tokens, {self.level:.0%} "
            f"prediction interval {self.low:.0f} to {self.high:.0f}"
        )


@frozen
class Makespan:
    """Seconds of another RL step's rollout: the median, and the ends of the `level` prediction interval."""

    num_steps: int
    level: float
    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return (
            f"makespan of another RL step: {self.median:.4g} s, {self.level:.0%} prediction interval {self.low:.4g} to "
            f"{self.high:.4g} s"
        )


def makespan(steps: Sequence[tuple[Floats, Floats, float]], ahead: Longest) -> Makespan | None:
    """Predict the makespan of another RL step from `steps`: tokens and ends of their responses, and their makespans.

    In the tail a response's end is straight in its tokens, with the slope of the longest eighth of each RL step. The
    longest response of another RL step adds its tokens times the slope to what precedes it, whose variation between
    the RL steps is added in quadrature. None where no RL step has times, or times do not rise with tokens.

    >>> ahead = Longest(num_responses=2, num_steps=2, level=0.9, median=300.0, low=200.0, high=500.0)
    >>> seen = [(np.array([100.0, most]), np.array([2.0, most / 100 + 1]), most / 100 + 1) for most in (200.0, 400.0)]
    >>> print(makespan(seen, ahead))
    makespan of another RL step: 4 s, 90% prediction interval 3 to 6 s
    """
    tokens_off, ends_off = [], []
    for tokens, ends, _ in steps:
        last = np.argsort(tokens)[-max(2, len(tokens) // 8) :]
        tokens_off.append(tokens[last] - tokens[last].mean())
        ends_off.append(ends[last] - ends[last].mean())
    off = np.concatenate([*tokens_off, np.zeros(0)])
    squares = float(off @ off)
    slope = float(off @ np.concatenate(ends_off)) / squares if squares > 0 else 0.0
    if slope <= 0:
        return None
    before = np.array([seconds - slope * tokens.max() for tokens, _, seconds in steps])
    spread = _NORMAL.inv_cdf((1 + ahead.level) / 2) * (float(before.std(ddof=1)) if len(before) > 1 else 0.0)
    median, low, high = (float(before.mean()) + slope * tokens for tokens in (ahead.median, ahead.low, ahead.high))
    return Makespan(
        num_steps=len(steps),
        level=ahead.level,
        median=median,
        low=max(0.0, median - math.hypot(median - low, spread)),
        high=median + math.hypot(high - median, spread),
    )


def step_score(law: LengthModel, tokens: float, num_responses: int, rl_step: int = 0, *, cut: bool = False) -> float:
    """Standard normal score of an RL step's longest response: 0 where the law's median maximum is met.

    The chance, under the law, that the longest of `num_responses` independent responses is no longer, as a score. The
    score of a response that was `cut` is the mean of the scores beyond.
    """
    from scipy.special import log_ndtr

    reached = np.searchsorted(law.log_tokens(_SCORES, rl_step), math.log(tokens))
    log_chance = num_responses * float(log_ndtr(_SCORES[min(int(reached), len(_SCORES) - 1)]))
    chance = min(max(math.exp(max(log_chance, -700.0)), 1e-300), 1 - 1e-12)
    score = min(max(_NORMAL.inv_cdf(chance), -_FAR), _FAR)
    return min(_NORMAL.pdf(score) / (1 - _NORMAL.cdf(score)), _FAR) if cut else score


def longest(law: LengthModel, num_responses: int, *, rl_step: int = 0) -> Longest:
    """Predict the longest of `num_responses` in another RL step.

    The predictive distribution is Student's over scores. `law.step_scores` has the score of each RL step that the law
    was fitted to; with k of them and one step of mean 0 and variance 1 in advance, which is the law taken at its word,
    there are k + 1 degrees of freedom, and the mean's error adds 1 / (k + 1) of the variance. The error of the tail's
    shape adds the square of what it moves. Without such scores the interval is the law's own and that error.

    >>> from tltlab.lengths.model import LengthModel
    >>> law = LengthModel(quantiles=((0.5, 800), (0.9, 3200)), prompt_share=0.1, max_response_tokens=16384)
    >>> print(longest(law, 512))
    longest of 512 responses in another RL step: 16384 tokens, 90% prediction interval 12244 to 16384
    """
    mean, variance, freedom = _spread(law.step_scores)
    center = _length_at(law, mean, num_responses, rl_step)
    variance += _tail_variance(law, center, num_responses, rl_step)
    from scipy.special import stdtrit

    half = float(stdtrit(freedom, (1 + LEVEL) / 2)) if freedom else _NORMAL.inv_cdf((1 + LEVEL) / 2)
    ends = (mean - half * math.sqrt(variance), mean, mean + half * math.sqrt(variance))
    low, median, high = (_length_at(law, score, num_responses, rl_step) for score in ends)
    return Longest(
        num_responses=num_responses, num_steps=len(law.step_scores), level=LEVEL, low=low, median=median, high=high
    )


def _spread(scores: Sequence[float]) -> tuple[float, float, int]:
    """Mean, variance of another score and degrees of freedom; 0 of them is a normal distribution."""
    num = len(scores)
    if not num:
        return 0.0, 1.0, 0
    mean = sum(scores) / (num + 1)
    squares = sum((score - mean) ** 2 for score in scores) + mean**2
    return mean, (1 + squares) / (num + 1) * (1 + 1 / (num + 1)), num + 1


def _tail_variance(law: LengthModel, tokens: float, num_responses: int, rl_step: int) -> float:
    """Squared score by which the median maximum moves when the tail's shape is off by its standard error."""
    tail = law.tail
    if tail is None or not tail.shape_error or tokens >= law.max_response_tokens:
        return 0.0
    moved = []
    for error in (-tail.shape_error, tail.shape_error):
        # Shape and scale are estimated together: correlation of their errors as Smith (1987) has it.
        new = {"shape": min(tail.shape + error, 0.99), "scale": tail.scale * math.exp(-error / (1 + tail.shape))}
        other = law.model_copy(update={"tail": tail.model_copy(update=new)})
        moved.append(step_score(other, tokens, num_responses, rl_step))
    return ((moved[1] - moved[0]) / 2) ** 2


def _length_at(law: LengthModel, score: float, num_responses: int, rl_step: int) -> float:
    """Tokens, cut at the cap, of the longest response at a score of the RL step."""
    from scipy.special import log_ndtr

    beyond = -math.expm1(float(log_ndtr(score)) / num_responses)
    own = -_NORMAL.inv_cdf(beyond) if beyond < 1 - 1e-15 else -_FAR
    logs: Floats = law.log_tokens(np.array([own]), rl_step)
    cap = float(law.max_response_tokens)
    return min(math.exp(min(max(float(logs[0]), 0.0), math.log(cap))), cap)


def fit_lengths(trace: Trace, *, prompt_share: float | None = None) -> LengthModel:
    """Fit quantiles, prompt share, cap, drift and prompt lengths to a trace's responses.

    Responses that were cut or aborted are lower bounds: quantiles are those of Kaplan and Meier (1958), after the drift
    is taken out. The prompt share is chosen so that the model's intraclass correlation of log length after the cut is
    the measured one (`metrics.prompt_share`). Drift is a regression of each RL step's log median on its number, kept
    where it is 3 standard errors from 0 over at least 5 RL steps; tail growth, prompt memory and the correlation of
    prompt length are not fitted. `prompt_share` is for traces with one sample per prompt, which do not identify it.
    `notes` of the model list what was not identified. Raises ConfigError.
    """
    rows, sampled = _rows(trace)
    finished = int((~rows["cut"]).sum())
    if finished < _MIN_FINISHED:
        raise ConfigError(
            f"{trace.path or 'trace'}: {finished} responses ran to their end, a fit of lengths needs {_MIN_FINISHED}"
        )
    notes = [f"fitted to {len(rows)} responses of {len(sampled.rl_steps)} RL steps"]
    median_growth = _growth(rows, notes)
    log_tokens: Floats = rows["y"].to_numpy() - rows["step"].to_numpy() * math.log1p(median_growth)
    quantiles = _quantiles(log_tokens, rows["cut"].to_numpy())
    longest = pareto_tail(np.exp(log_tokens), rows["cut"].to_numpy(), quantiles[-1][1])
    notes.append(_tail_note(longest, quantiles[-1], float(rows["at_cap"].mean())))
    notes.append("prompt memory is an assumption")
    model = LengthModel(
        quantiles=quantiles,
        tail=longest,
        prompt_share=0.0,
        max_response_tokens=int(rows["cap"].max()),
        median_growth=median_growth,
        notes=tuple(notes),
    )
    last = rows.loc[rows.groupby("step")["y"].idxmax(), ["step", "y", "cut"]]
    sizes = rows.groupby("step").size()
    scores = [
        step_score(model, math.exp(y), int(sizes[step]), int(step), cut=bool(cut))
        for step, y, cut in last.itertuples(index=False)
    ]
    model = model.model_copy(update={"step_scores": tuple(round(score, 4) for score in scores)})
    if prompt_share is None:
        measured = measured_share(sampled)
        if measured is None:
            raise ConfigError(
                f"{trace.path or 'trace'}: no prompt has two samples, so the share of the prompt in length is unknown; "
                "give it as prompt share (about .05 for a base model, .9 for a reasoning model)"
            )
        prompt_share = _share_before_cut(model, measured, int(rows["step"].max()) // 2)
    return model.with_changes(prompt_share=prompt_share, **_prompt_lengths(rows))


@frozen
class Outlook:
    """Predictions for another RL step of a trace's size; None where unknown."""

    longest: Longest | None = None
    makespan: Makespan | None = None

    def __str__(self) -> str:
        return "\n".join(str(each) for each in (self.longest, self.makespan) if each is not None)


def outlook(trace: Trace, timed: Sequence[tuple[Floats, Floats, float]] | None = None) -> Outlook:
    """The longest response and the makespan of another RL step, by the law fitted to a trace.

    `timed` replaces the trace's own times: tokens and ends of the responses, and the makespan, of each RL step. Drift
    stays where the last RL step has it. A cap that the longest response equals without being cut is not known, and
    bounds no interval. Responses with several turns are not predicted. A larger trace is sampled: RL steps with about
    100,000 responses.
    """
    try:
        rows, sampled = _rows(trace, _OUTLOOK_RESPONSES)
    except ConfigError:
        return Outlook()
    cap = int(rows["cap"].max())
    known = bool(rows["at_cap"].any()) or cap > round(math.exp(float(rows["y"].max())))
    if (sampled.outcomes["turn"] > 0).any():
        return Outlook()
    try:
        law = fit_lengths(sampled, prompt_share=0.0)
    except ConfigError:
        return Outlook()
    last = int(rows["step"].max())
    if not known:
        law = law.with_changes(max_response_tokens=2**31 - 1)
    ahead = longest(law, max(1, round(len(rows) / len(sampled.rl_steps))), rl_step=last)
    return Outlook(longest=ahead, makespan=makespan(_timed(sampled) if timed is None else timed, ahead))


def _timed(trace: Trace) -> list[tuple[Floats, Floats, float]]:
    """Tokens and ends of the responses, and the makespan, of each RL step in which all of these are known."""
    found = []
    for rl_step, seconds in rollout_s(trace).items():
        part = trace.table("outcomes", rl_step=rl_step)
        if seconds and part is not None and len(part) > 1 and part["t_finish"].notna().all():
            found.append((part["response_tokens"].to_numpy(float), part["t_finish"].to_numpy(float), seconds))
    return found


def statistics(trace: Trace) -> dict[str, Any]:
    """Statistics of lengths measured on a trace, as in the model of lengths; None where a value is unknown.

    Percentiles and mean in tokens as they were cut, standard deviation of log length (`log_sigma`), the mean over
    groups of standard deviation / mean (`within_group_cv`), intraclass correlation of log length (`prompt_share`),
    share of cut responses (`cap_mass`, and in the first and last quarter of the RL steps), growth of the median per
    RL step with its standard error, and median prompt tokens.
    """
    rows, sampled = _rows(trace)
    tokens = np.rint(np.exp(rows["y"].to_numpy()))
    group = pd.Series(tokens).groupby([rows["step"].to_numpy(), rows["prompt_id"].to_numpy()], sort=False)
    sizes = group.size()
    spread = (group.std() / group.mean()).dropna()
    growth, growth_error = _drift(rows)
    quarter = max(1, len(sampled.rl_steps) // 4)
    at_cap = rows["at_cap"].groupby(rows["step"]).agg(["sum", "size"])
    p50, p75, p90, p99, longest = (float(q) for q in np.percentile(tokens, (50, 75, 90, 99, 100)))
    return {
        "num_rl_steps": len(trace.rl_steps),
        "num_rl_steps_looked_at": len(sampled.rl_steps),
        "num_responses_looked_at": len(rows),
        "num_prompts": int(rows["prompt_id"].nunique()),
        "prompts_per_step": float(len(sizes) / len(sampled.rl_steps)),
        "group_size": float(sizes.mean()),
        "p50_tokens": p50,
        "p75_tokens": p75,
        "p90_tokens": p90,
        "p99_tokens": p99,
        "max_tokens": longest,
        "mean_tokens": float(tokens.mean()),
        "log_sigma": float(rows["y"].std(ddof=0)),
        "within_group_cv": float(spread.mean()) if len(spread) else None,
        "prompt_share": measured_share(sampled),
        "cap_mass": float(rows["at_cap"].mean()),
        "cap_mass_first": float(at_cap["sum"][:quarter].sum() / at_cap["size"][:quarter].sum()),
        "cap_mass_last": float(at_cap["sum"][-quarter:].sum() / at_cap["size"][-quarter:].sum()),
        "median_growth": growth,
        "median_growth_standard_error": growth_error,
        "p50_prompt_tokens": float(rows["prompt_tokens"].median()),
    }


def _rows(trace: Trace, most: int = MAX_RESPONSES) -> tuple[pd.DataFrame, Trace]:
    """Responses of at least a token, and the trace (or the RL steps of it) they are of.

    Columns: step (0 is the trace's first RL step), prompt_id, y (log length), cut (y is a lower bound), at_cap, cap,
    prompt_tokens.
    """
    if not trace.rl_steps:
        raise ConfigError(f"{trace.path or 'trace'}: no RL step in it, so there are no lengths to look at")
    first = trace.table("outcomes", rl_step=trace.rl_steps[0])
    every = math.ceil((1 if first is None else len(first)) * len(trace.rl_steps) / most)
    if every > 1:
        trace = trace.select(trace.rl_steps[::every])
    on = ["rl_step", "prompt_id", "sample", "turn"]
    rows = trace.outcomes.merge(trace.workload, on=on, validate="one_to_one")
    rows = rows[rows["response_tokens"] >= 1]
    if rows.empty:
        raise ConfigError(f"{trace.path or 'trace'}: no response has a token, so there are no lengths to look at")
    frame = pd.DataFrame(
        {
            "step": rows["rl_step"].astype(np.int64) - trace.rl_steps[0],
            "prompt_id": rows["prompt_id"],
            "y": np.log(rows["response_tokens"].astype(float)),
            "cut": rows["finish_reason"] != "stop",
            "at_cap": rows["finish_reason"] == "length",
            "cap": rows["max_response_tokens"],
            "prompt_tokens": rows["prompt_tokens"],
        }
    )
    return frame.reset_index(drop=True), trace


def _survival(y: Floats, cut: Flags) -> tuple[Floats, Floats, float]:
    """Kaplan and Meier's estimate: finished values, the middle of F's jump at each, and F after the last."""
    # Lengths are read by commands that should start quickly, and scipy does not load quickly.
    from scipy.stats import CensoredData, ecdf

    survival = ecdf(CensoredData(uncensored=y[~cut], right=y[cut])).sf
    after = survival.probabilities
    before = np.concatenate([[1.0], after[:-1]])
    jump = after < before
    return survival.quantiles[jump], 1 - (before[jump] + after[jump]) / 2, 1 - float(after[-1])


def _censored_quantile(y: Floats, cut: Flags, level: float) -> float | None:
    """Quantile of values some of which are lower bounds; None where the values do not identify it."""
    values, middles, end = _survival(y, cut)
    if not len(values) or (cut.any() and level > end) or not middles[0] <= level:
        return None
    return float(np.interp(level, middles, values))


def pareto_tail(tokens: Floats, cut: Flags, last: float) -> ParetoTail | None:
    """The tail beyond `last` tokens by peaks over threshold; None where too few responses are long.

    The threshold leaves the longest 2 sqrt(n) of n responses above it, or twice as many as were `cut`, but at least 50
    and at most a tenth; most of them have to have ended. Shape and scale have the largest likelihood for the excesses,
    those that were cut as lower bounds, times the penalty of Coles and Dixon (1999), which keeps the mean finite:
    exp(1 - 1 / (1 - shape)) above 0. The error of the shape is (1 + shape) / sqrt(number that ended) (Smith 1987).
    """
    from scipy.optimize import minimize

    num = len(tokens)
    above = int(min(num / 10, max(_MIN_PEAKS, 2 * math.sqrt(num), 2 * cut.sum())))
    if above < _MIN_PEAKS:
        return None
    threshold = min(float(np.partition(tokens, num - above - 1)[num - above - 1]), last)
    over = tokens > threshold
    excess, ended = tokens[over] - threshold, ~cut[over]
    if ended.sum() < max(_MIN_PEAKS, len(ended)) / 2:
        return None
    unit = float(excess.mean())

    def loss(at: Floats) -> float:
        # At 0 the logarithm below is undefined; 1e-9 gives its limit.
        shape, log_scale = float(at[0]) or 1e-9, float(at[1])
        growth = shape * excess / (unit * math.exp(log_scale))
        if not -0.5 <= shape < 0.99 or (growth <= -1).any():
            return math.inf
        rarity = np.log1p(growth) / shape
        penalty = 1 / (1 - shape) - 1 if shape > 0 else 0.0
        return float((log_scale + shape * rarity)[ended].sum() + rarity.sum()) + penalty

    optimum = minimize(loss, np.array([0.1, 0.0]), method="Nelder-Mead", options={"xatol": 1e-5, "fatol": 1e-7})
    shape, scale = float(optimum.x[0]), unit * math.exp(float(optimum.x[1]))
    scale += shape * (last - threshold)
    if scale <= 0:
        # A bounded tail that ends at the last quantile: there is nothing beyond it to draw.
        return None
    return ParetoTail(scale=scale, shape=shape, shape_error=(1 + shape) / math.sqrt(float(ended.sum())))


def _tail_note(tail: ParetoTail | None, last: tuple[float, float], cap_mass: float) -> str:
    """Note on the tail of the longest responses, in a line."""
    region = f"beyond {last[1]:.0f} tokens (all but {1 - last[0]:.2g} of the responses)"
    at_cap = f"; {cap_mass:.2g} of the responses are cut at the cap" if cap_mass else ""
    if tail is None:
        return f"{region} too few are long for a tail: the last two quantiles are extrapolated{at_cap}"
    return (
        f"{region} a generalised Pareto tail, shape {tail.shape:.2f} +- {tail.shape_error:.2f}, scale "
        f"{tail.scale:.0f} tokens{at_cap}"
    )


def _quantiles(y: Floats, cut: Flags) -> tuple[tuple[float, float], ...]:
    """Quantiles of log lengths, at the levels that have a few responses beyond, and at the share that is cut."""
    values, middles, end = _survival(y, cut)
    scores = np.array([_NORMAL.inv_cdf(p) for p in middles])
    least = _MIN_BEYOND / len(y)
    levels = [p for p in LEVELS if least <= p <= 1 - least and middles[0] <= p <= middles[-1]]
    last = []
    if cut.any() and end < 1 and (bound := float(y[cut].max())) >= values[-1]:
        levels = [p for p in levels if p < end and _NORMAL.inv_cdf(end) - _NORMAL.inv_cdf(p) > 0.15]
        last = [(end, bound)]
    if len(levels) + len(last) < 2:
        levels = [float(middles[0]), float(middles[-1])]
    logs = np.interp([_NORMAL.inv_cdf(p) for p in levels], scores, values)
    pairs = [*zip(levels, logs.tolist(), strict=True), *last]
    if pairs[0][0] >= pairs[-1][0]:
        pairs = [(0.25, pairs[0][1]), (0.75, pairs[0][1])]
    return tuple((p, math.exp(log)) for p, log in pairs)


def _drift(rows: pd.DataFrame) -> tuple[float | None, float | None]:
    """Growth of the median per RL step, and the standard error of its logarithm; None where too few have a median."""
    medians = [
        (float(r["step"].iloc[0]), _censored_quantile(r["y"].to_numpy(), r["cut"].to_numpy(), 0.5))
        for _, r in rows.groupby("step")
    ]
    known = np.array([pair for pair in medians if pair[1] is not None], np.float64)
    if len(known) < _MIN_DRIFT_STEPS:
        return None, None
    off, logs = (known - known.mean(axis=0)).T
    slope = float(off @ logs / (off @ off))
    misfit = logs - slope * off
    return math.expm1(slope), math.sqrt(float(misfit @ misfit) / (len(known) - 2) / float(off @ off))


def _growth(rows: pd.DataFrame, notes: list[str]) -> float:
    growth, error = _drift(rows)
    if growth is None or error is None:
        notes.append("growth of the median is not identified: 0")
    elif abs(math.log1p(growth)) > _SIGNIFICANT * error:
        return growth
    else:
        notes.append(f"growth of the median is {growth:.2g} +- {error:.2g} per step, too uncertain: 0")
    return 0.0


def _share_before_cut(model: LengthModel, measured: float, rl_step: int) -> float:
    """Correlation of two scores whose log lengths, after the cut, have the measured one."""
    from scipy.optimize import brentq

    scores = np.linspace(-6.0, 6.0, 401)
    weights = normal_weights(scores)
    y = np.clip(model.log_tokens(scores, rl_step), 0.0, math.log(model.max_response_tokens))
    y = y - weights @ y

    def covariance(correlation: float) -> float:
        other = correlation * scores[:, None] + math.sqrt(1.0 - correlation**2) * scores
        return float((weights * y) @ np.interp(other, scores, y) @ weights)

    wanted = measured * covariance(1.0)
    return float(brentq(lambda correlation: covariance(correlation) - wanted, 0.0, 1.0)) if wanted > 1e-9 else 0.0


def _prompt_lengths(rows: pd.DataFrame) -> dict[str, float]:
    """Log-normal prompt lengths."""
    tokens = rows.groupby("prompt_id")["prompt_tokens"].mean().to_numpy()
    if (tokens <= 0).any():
        return {"prompt_tokens_median": 0.0}
    logs = np.log(tokens)
    return {"prompt_tokens_median": float(np.exp(np.median(logs))), "prompt_tokens_sigma": min(5.0, float(logs.std()))}
