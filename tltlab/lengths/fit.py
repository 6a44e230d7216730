"""Fits the model of lengths to a trace."""

import math

import numpy as np
import pandas as pd

from tltlab.arrays import Flags, Floats
from tltlab.errors import ConfigError
from tltlab.traces.metrics import prompt_share as measured_share
from tltlab.traces.trace import Trace

from .model import LengthModel, ParetoTail, normal_weights

MAX_RESPONSES = 1_000_000
"""Responses used at most: larger traces are sampled at evenly spaced RL steps."""

LEVELS = (
    0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.975, 0.99, 0.995, 0.999,
)  # fmt: skip
_MIN_BEYOND = 3
_MOST_LONGER = 2.0
"""Drawn responses are at most this many times as long as the longest one seen, or as long as the cap."""
_MIN_FINISHED = 10
_MIN_PEAKS = 50
_MIN_DRIFT_STEPS = 5
_SIGNIFICANT = 3.0


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
    tail = pareto_tail(np.exp(log_tokens), rows["cut"].to_numpy(), quantiles[-1][1])
    notes.append(_tail_note(tail, quantiles[-1], float(rows["at_cap"].mean())))
    notes.append("prompt memory is an assumption")
    model = LengthModel(
        quantiles=quantiles,
        tail=tail,
        prompt_share=0.0,
        max_response_tokens=int(rows["cap"].max()),
        median_growth=median_growth,
        notes=tuple(notes),
    )
    if prompt_share is None:
        measured = measured_share(sampled)
        if measured is None:
            raise ConfigError(
                f"{trace.path or 'trace'}: no prompt has two samples, so the share of the prompt in length is unknown; "
                "give it as prompt share (about .05 for a base model, .9 for a reasoning model)"
            )
        prompt_share = _share_before_cut(model, measured, int(rows["step"].max()) // 2)
    return model.with_changes(prompt_share=prompt_share, **_prompt_lengths(rows))


def shape_of(trace: Trace) -> tuple[dict[str, int], int | None]:
    """The size of a trace, as `generate` takes it, and how many prompts it has where they come back, else None."""
    rows, sampled = _rows(trace)
    sizes = rows.groupby(["step", "prompt_id"]).size()
    prompts, distinct = max(1, round(len(sizes) / len(sampled.rl_steps))), rows["prompt_id"].nunique()
    shape = {"num_rl_steps": len(trace.rl_steps), "prompts_per_step": prompts, "group_size": round(sizes.mean())}
    return shape, max(prompts, distinct) if distinct < 0.999 * len(sizes) else None


def _rows(trace: Trace) -> tuple[pd.DataFrame, Trace]:
    """Responses of at least a token, and the trace (or the RL steps of it) they are of.

    Columns: step (0 is the trace's first RL step), prompt_id, y (log length), cut (y is a lower bound), at_cap, cap,
    prompt_tokens.
    """
    if not trace.rl_steps:
        raise ConfigError(f"{trace.path or 'trace'}: no RL step in it, so there are no lengths to look at")
    first = trace.table("outcomes", rl_step=trace.rl_steps[0])
    every = math.ceil((1 if first is None else len(first)) * len(trace.rl_steps) / MAX_RESPONSES)
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


def _censored_median(y: Floats, cut: Flags) -> float | None:
    """Median of values some of which are lower bounds; None where the values do not identify it."""
    values, middles, end = _survival(y, cut)
    if not len(values) or (cut.any() and end < 0.5) or not middles[0] <= 0.5:
        return None
    return float(np.interp(0.5, middles, values))


def pareto_tail(tokens: Floats, cut: Flags, last: float) -> ParetoTail | None:
    """The tail beyond `last` tokens by peaks over threshold; None where too few responses are long.

    The threshold leaves the longest 2 sqrt(n) of n responses above it, or twice as many as were `cut`, but at least 50
    and at most a tenth; most of them have to have ended. Shape and scale have the largest likelihood for the excesses,
    those that were cut as lower bounds, times the penalty of Coles and Dixon (1999), which keeps the mean finite:
    exp(1 - 1 / (1 - shape)) above 0. The error of the shape is (1 + shape) / sqrt(number that ended) (Smith 1987).
    No response is drawn that is more than twice as long as the longest of these.
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
    error, most = (1 + shape) / math.sqrt(float(ended.sum())), _MOST_LONGER * float(tokens.max()) - last
    return ParetoTail(scale=scale, shape=shape, shape_error=error, most=most)


def with_tail_drawn(tokens: Floats, cut: Flags, rng: np.random.Generator) -> Floats:
    """Lengths of which the few longest are drawn anew from the tail of all; as they are where too few are long."""
    if len(tokens) < 10 * _MIN_PEAKS:
        return tokens
    last = float(np.partition(tokens, -1 - _MIN_BEYOND)[-1 - _MIN_BEYOND])
    tail = pareto_tail(tokens, cut, last)
    if tail is None:
        return tokens
    return np.where(tokens > last, last + tail.excess(rng.exponential(size=len(tokens))), tokens)


def _tail_note(tail: ParetoTail | None, last: tuple[float, float], cap_mass: float) -> str:
    """Note on the tail of the longest responses, in a line."""
    region = f"beyond {last[1]:.0f} tokens (all but {1 - last[0]:.2g} of the responses)"
    at_cap = f"; {cap_mass:.2g} of the responses are cut at the cap" if cap_mass else ""
    if tail is None:
        return f"{region} too few are long for a tail: the last two quantiles are extrapolated{at_cap}"
    return (
        f"{region} a generalised Pareto tail, shape {tail.shape:.2f} +- {tail.shape_error:.2f}, scale "
        f"{tail.scale:.0f} tokens, and none above {last[1] + (tail.most or 0):.0f}, twice the longest seen{at_cap}"
    )


def _quantiles(y: Floats, cut: Flags) -> tuple[tuple[float, float], ...]:
    """Quantiles of log lengths, at the levels that have a few responses beyond, and at the share that is cut."""
    from scipy.special import ndtri

    values, middles, end = _survival(y, cut)
    scores = ndtri(middles)
    least = _MIN_BEYOND / len(y)
    levels = [p for p in LEVELS if least <= p <= 1 - least and middles[0] <= p <= middles[-1]]
    last = []
    if cut.any() and end < 1 and (bound := float(y[cut].max())) >= values[-1]:
        levels = [p for p in levels if p < end and ndtri(end) - ndtri(p) > 0.15]
        last = [(end, bound)]
    if len(levels) + len(last) < 2:
        levels = [float(middles[0]), float(middles[-1])]
    logs = np.interp(ndtri(levels), scores, values)
    pairs = [*zip(levels, logs.tolist(), strict=True), *last]
    if pairs[0][0] >= pairs[-1][0]:
        pairs = [(0.25, pairs[0][1]), (0.75, pairs[0][1])]
    return tuple((p, math.exp(log)) for p, log in pairs)


def _growth(rows: pd.DataFrame, notes: list[str]) -> float:
    """Growth of the median per RL step where it is sure, else 0 and a note."""
    from scipy.stats import linregress

    medians = [
        (float(r["step"].iloc[0]), _censored_median(r["y"].to_numpy(), r["cut"].to_numpy()))
        for _, r in rows.groupby("step")
    ]
    known = np.array([pair for pair in medians if pair[1] is not None], np.float64)
    if len(known) < _MIN_DRIFT_STEPS:
        notes.append("growth of the median is not identified: 0")
        return 0.0
    line = linregress(*known.T)
    growth, error = math.expm1(line.slope), float(line.stderr)
    if abs(line.slope) > _SIGNIFICANT * error:
        return growth
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
