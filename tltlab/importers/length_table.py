"""Trace tables of responses that are known by their lengths: which prompts they answer, how they ended.

A log with only mean, shortest, longest and share of cut responses gets its lengths from `max_entropy_lengths`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from tltlab.arrays import Floats, Ints
from tltlab.errors import TraceError

from .fields import NAMES, plain
from .rows import Reading

RECORD = "#record"
"""Column of the number of the record that a response was in a list of."""


def tables_of_responses(
    frame: pd.DataFrame, reading: Reading, *, names_prompts: bool
) -> tuple[dict[str, pd.DataFrame], list[str], str | None]:
    """Workload and outcomes of responses, notes on what was assumed, and the column that names the prompts.

    `frame` has what `responses.Reader.read` gives. Samples of a prompt without a number are numbered in their
    order. `epoch` counts the earlier RL steps with the same prompt. With `max_response_tokens` a response
    that long was cut ("length"); a longer one is a TraceError, or cut to it where lengths are counts of text. Without,
    the longest response is the cap. Times count from the first submission of the RL step. `names_prompts` numbers
    unnamed prompts within their RL step, else through the file.
    """
    frame = frame.sort_values("rl_step", kind="stable", ignore_index=True)
    notes: list[str] = []
    lengths = frame["response_tokens"].to_numpy(np.int64)
    if not lengths.any():
        raise TraceError(f"{frame['file'][0]}: no response has a token")
    known_cap = reading.max_response_tokens is not None
    caps = np.full(len(frame), reading.max_response_tokens or max(1, lengths.max()))
    if frame["cap"].notna().all():
        known_cap, caps = True, frame["cap"].to_numpy(np.int64)
    if (over := (lengths > caps) & frame["is_exact"].to_numpy(bool)).any():
        at = int(np.argmax(over))
        place = frame["place"][at] if isinstance(frame["place"][at], str) else f"line {frame['place'][at]}"
        raise TraceError(
            f"{frame['file'][at]}, {place}: the response has {lengths[at]} tokens, more than its maximum of {caps[at]}"
        )
    reason = frame["finish_reason"].to_numpy(object)
    unknown = pd.isna(reason)
    if not known_cap:
        all_finished = ", all count as finished" if unknown.all() and not names_prompts else ""
        notes.append(f"the cap is unknown: the longest response ({lengths.max()} tokens) is taken for it{all_finished}")
    if unknown.any() and (names_prompts or not unknown.all()):
        rule = "as cut where they reach the cap, else as finished" if known_cap else "as finished"
        notes.append(f"{unknown.sum()} responses have no finish reason: they count {rule}")
    prompts = frame["prompt_tokens"].to_numpy()
    if np.isnan(prompts).any():
        some = "" if np.isnan(prompts).all() else f" of {int(np.isnan(prompts).sum())} responses"
        notes.append(f"prompt tokens{some} are unknown: 0")
    key = frame[["rl_step"]].copy()
    key["prompt_id"], named_by = _prompt_ids(frame, reading, names_prompts, notes)
    key["sample"] = frame["sample"]
    if frame["sample"].isna().any() or (key.duplicated().any() and not frame["sample_is_ours"].all()):
        if frame["sample"].notna().all():
            notes.append("samples have numbers that repeat within a prompt: they are numbered anew")
        key["sample"] = key.groupby(["rl_step", "prompt_id"], sort=False).cumcount()
    key["sample"] = key["sample"].astype(np.int64)
    cut = (lengths >= caps) & known_cap
    tables = tables_of_lengths(key, np.minimum(lengths, caps), np.nan_to_num(prompts).astype(np.int64), caps, cut)
    times = ["t_submit", "t_first_token", "t_finish"]
    outcomes = tables["outcomes"].join(frame[["reward", "worker", *times]].astype(np.float64))
    outcomes[times] = outcomes[times].sub(outcomes.groupby("rl_step")["t_submit"].transform("min"), axis=0)
    outcomes.loc[outcomes["t_submit"].isna(), times] = np.nan
    if 0 < (num_untimed := int(outcomes["t_submit"].isna().sum())) < len(outcomes):
        notes.append(f"{num_untimed} requests have no start time: their times are unknown")
    outcomes["finish_reason"] = outcomes["finish_reason"].where(unknown, reason)
    return tables | {"outcomes": outcomes}, notes, named_by


def _prompt_ids(frame: pd.DataFrame, reading: Reading, names_prompts: bool, notes: list[str]) -> tuple[Any, str | None]:
    """Return the name of each response's prompt, and the column that the names are from.

    A column qualifies if several responses share a value, and different prompts of an RL step never do. Without such
    a column the prompt's text is the name, and prompts that are the same in different RL steps share a name.
    """
    step, text = frame["rl_step"], frame["text"] if frame["text"].notna().all() else None
    group_size = reading.group_size
    for column in [name for name in frame.columns if name.startswith("id:")]:
        name, ids = column[3:], frame[column]
        if ids.isna().any():
            continue
        repeats = frame[["rl_step", column]].duplicated().any()
        is_own, is_named = plain(name) == "promptid", plain(name).rpartition(".")[2] in NAMES["prompt_id"]
        if reading.group_column is None:
            text_repeats = text is not None and pd.concat([step, text], axis=1).duplicated().any()
            # Numbers of rows begin anew in each RL step.
            is_of_row = not (is_named or is_own) and (text is not None or ids.duplicated().any())
            if not repeats and (text_repeats or is_of_row or (group_size and not is_own)):
                continue
            different = next((c for c in ("text", "prompt_tokens") if frame[c].notna().all()), None)
            sizes = frame.groupby([step, ids], sort=False).size()
            # Groups of one size are groups, whatever was written of their prompts.
            is_group = is_own or (is_named and sizes.nunique() == 1 and ids.nunique() > 1)
            # Prompts differ where one id has several values of this column in an RL step.
            if repeats and different and not is_group and frame.groupby([step, ids])[different].nunique().max() > 1:
                notes.append(f"{name} is the same for different prompts: it does not name them")
                continue
        if group_size and repeats and set(frame.groupby([step, ids], sort=False).size()) != {group_size}:
            notes.append(f"groups are those of {name}, not of the given group size")
        return _across_rl_steps(step, ids, text, name, notes), name
    if text is not None:
        within = frame.groupby([step, text], sort=False).cumcount()
        if group_size and (within >= group_size).any():
            notes.append(f"prompts of the same text are separated after every {group_size} responses")
            return text + (within // group_size).map(lambda at: f"-{at}" if at else ""), None
        return text, None
    records = frame.get(RECORD)
    if records is not None and not group_size and records.notna().all() and records.nunique() > step.nunique():
        return "r" + records.astype(np.int64).astype(str), None
    group = group_size or 1
    at = frame.groupby("rl_step").cumcount() // group
    sizes = frame.groupby([step, at], sort=False).size()
    if len(incomplete := sizes[sizes < group]):
        subject = "the last group" if len(incomplete) == 1 else f"the last group of {len(incomplete)} RL steps"
        notes.append(f"{subject} is incomplete: {incomplete.iloc[0]} of {group} samples")
    if names_prompts:
        return "s" + step.astype(str) + "-p" + at.astype(str), None
    return "p" + frame.groupby([step, at], sort=False).ngroup().astype(str), None


def _across_rl_steps(
    step: pd.Series[Any], ids: pd.Series[Any], text: pd.Series[Any] | None, name: str, notes: list[str]
) -> pd.Series[Any]:
    """Names of prompts that are the same in all RL steps: the ids, or texts where ids are made anew in each RL step."""
    pairs = pd.DataFrame({"rl_step": step, "id": ids})
    if text is not None:
        pairs["text"] = text
        in_step = pairs.drop_duplicates()
    if text is not None and not in_step.duplicated(["rl_step", "id"]).any():
        if in_step.duplicated(["rl_step", "text"]).any():
            again = pairs[["id", "text"]].drop_duplicates()["id"].duplicated().any()
            return "s" + step.astype(str) + "-" + ids if again else ids
        overall = pairs[["id", "text"]].drop_duplicates()
        return text if overall["text"].duplicated().any() or overall["id"].duplicated().any() else ids
    if step.nunique() > 1 and plain(name).endswith(("idx", "index")):
        found = [set(part["id"]) for _, part in pairs.drop_duplicates().groupby("rl_step")]
        if all(part == set(map(str, range(len(part)))) for part in found):
            notes.append(f"{name} counts the prompts of each RL step: those of different RL steps are different")
            return "s" + step.astype(str) + "-p" + ids
    return ids


def tables_of_lengths(
    key: pd.DataFrame, lengths: Any, prompt_tokens: Any, cap: Any, cut: Any
) -> dict[str, pd.DataFrame]:
    """Workload and outcomes of responses known by their lengths alone; `cut` marks those that reached the cap.

    One cap counts for all, an array has one for each. `epoch` counts the earlier RL steps with the same prompt.
    """
    visits = key[["rl_step", "prompt_id"]].drop_duplicates().sort_values("rl_step", kind="stable")
    visits["epoch"] = visits.groupby("prompt_id", sort=False).cumcount()
    epoch = key.merge(visits, on=["rl_step", "prompt_id"], how="left")["epoch"].to_numpy()
    workload = key.assign(
        turn=0, epoch=epoch, prompt_tokens=prompt_tokens, max_response_tokens=cap, policy_version=key["rl_step"]
    )
    outcomes = key.assign(turn=0, response_tokens=lengths, finish_reason=np.where(cut, "length", "stop"))
    return {"workload": workload, "outcomes": outcomes}


def group_size_of(workload: pd.DataFrame) -> int | None:
    """Samples per prompt, where all groups have as many."""
    sizes = workload.groupby(["rl_step", "prompt_id"], sort=False).size().unique()
    return int(sizes[0]) if len(sizes) == 1 else None


_STEEPEST = 700.0
"""Largest decay over the range, in nats: e^-700 is the last that a double holds."""


def max_entropy_lengths(
    num: int, *, mean: float, least: int | None = None, most: int | None = None, cut: float = 0.0,
    cap: int | None = None,
) -> Ints:  # fmt: skip
    """`num` lengths in tokens, ascending, whose sum is `mean` times `num`, rounded.

    The maximum-entropy distribution on `least` (unknown: 1) .. `most` with this mean is the exponential cut off at both
    ends (Jaynes 1957; Cover and Thomas, chapter 12); the lengths are its quantiles, so they are the same each time.
    One response has the length `least` and one `most`, the extremes that the log states. Round(`cut` x
    `num`) of them have the length `cap`, `most` by default. Without `most` the distribution has no upper end below
    `cap`, and the longest is its last quantile. Raises ValueError where no such lengths exist.

    >>> max_entropy_lengths(4, mean=30.0, least=10, most=80).tolist()
    [10, 12, 18, 80]
    """
    low = 1 if least is None else least
    if num < 1 or low < 1 or (most is not None and most < low):
        raise ValueError(f"{num} lengths from {low} to {most} tokens")
    if (longest := max(mean, low, most or 0, cap or 0)) >= 1 << 31:
        raise ValueError(f"no response has {longest:.3g} tokens")
    total = round(mean * num)
    end = most if cap is None else cap
    num_cut = 0 if end is None else min(num, round(cut * num))
    fixed: list[int] = [] if end is None else [end] * num_cut
    if most is not None and not num_cut:
        fixed.append(most)
    if least is not None and len(fixed) < num and least != most:
        fixed.append(least)
    fixed = fixed[:num]
    free = num - len(fixed)
    free_total = total - sum(fixed)
    if most is not None:
        # A response at the cap counts as cut, so the others stay below it.
        high = max(low, most - 1) if num_cut and most == end else most
    else:
        # Practically no end: at 30 times the mean an exponential has 1e-13 of its mass left.
        high = (cap - 1 if num_cut else cap) if cap is not None else low + max(1, int(30 * (free_total / max(free, 1))))
    if (free == 0 and abs(free_total) > num) or (free and not free * low <= free_total <= free * high):
        raise ValueError(
            f"{num} responses of {low} to {most} tokens, {num_cut} of them cut at {end}, have no mean of {mean:g}"
        )
    drawn = _quantiles(free, free_total / free, float(low), float(high)) if free else np.zeros(0)
    return np.sort(np.concatenate([_round_to_total(drawn, free_total), np.asarray(fixed, np.int64)])).astype(np.int64)


def _quantiles(num: int, mean: float, low: float, high: float) -> Floats:
    """Middles of `num` equal parts of the truncated exponential's mass, its decay such that their mean is `mean`."""
    at = (np.arange(num) + 0.5) / num
    width = high - low
    if width <= 0 or mean <= low:
        return np.full(num, low)
    if mean >= high:
        return np.full(num, high)

    def lengths(decay: float) -> Floats:
        """`decay` is in nats over the whole range; below zero long lengths are the likelier ones."""
        if abs(decay) < 1e-9:
            return low + width * at
        values: Floats = low - width / decay * np.log1p(at * np.expm1(-decay))
        return np.clip(values, low, high)

    def off(decay: float) -> float:
        return float(lengths(decay).mean()) - mean

    from scipy.optimize import brentq  # takes longer to import than most commands that get here by way of others

    if off(_STEEPEST) >= 0:
        return lengths(_STEEPEST)
    if off(-_STEEPEST) <= 0:
        return lengths(-_STEEPEST)
    return lengths(float(brentq(off, -_STEEPEST, _STEEPEST, xtol=1e-12)))


def _round_to_total(values: Floats, total: int) -> Ints:
    """Whole numbers nearest to `values`, in their range, that sum to `total`: the largest remainders are rounded up."""
    if not len(values):
        return np.zeros(0, np.int64)
    whole = np.floor(values).astype(np.int64)
    missing = total - int(whole.sum())
    increment, remainder = divmod(missing, len(whole))
    order = np.argsort(whole - values, kind="stable")
    whole += increment
    whole[order[:remainder]] += 1
    return np.sort(whole)
