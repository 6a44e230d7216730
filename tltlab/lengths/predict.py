"""How long a response will be, or will still be: from its prompt, its prompt's history, siblings and what is there.

Responses cut at their cap are longer than they look. So what is learned is the chance to end in an interval of lengths,
given that it is reached (discrete-time hazards, Singer and Willett 1993), of which a cut response tells all but the
last. One thread does it: several that wait for each other on a busy machine take many times as long.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import numpy as np
import pandas as pd
from sklearn.base import BaseEstimator
from sklearn.ensemble import HistGradientBoostingClassifier
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped, unused-ignore]

from tltlab.arrays import Flags, Floats
from tltlab.errors import ConfigError

KNOWN = ("prompt", "history", "siblings")
"""What a prediction may know, beside that the response is still running."""


class LengthPredictor(BaseEstimator):  # type: ignore[misc, unused-ignore]
    """Expected tokens to come, at most up to a cap, from features of a response that is running.

    `num_intervals` intervals of equal probability hold the training lengths; a boosted classifier over features and
    interval gives each one's hazard. Missing features are NaN. Fitting is O(responses * intervals).

    >>> rng = np.random.default_rng(0)
    >>> x = rng.integers(0, 2, (400, 1)).astype(float)
    >>> tokens = rng.geometric(np.where(x[:, 0] > 0, 0.001, 0.01))
    >>> short, long = LengthPredictor().fit(x, tokens, np.zeros(400, bool)).predict(np.array([[0.0], [1.0]]))
    >>> bool(long > 3 * short)
    True
    """

    def __init__(self, num_intervals: int = 12, max_iter: int = 60) -> None:
        self.num_intervals = num_intervals
        self.max_iter = max_iter

    def fit(self, x: Floats, tokens: Floats, cut: Flags) -> Self:
        """Learn from features (responses, features), tokens that came, and whether the cap cut them.

        ConfigError where nothing ended by itself.
        """
        tokens = np.asarray(tokens, np.float64)
        if cut.all():
            raise ConfigError("no response ended by itself, so nothing tells how long they are")
        inner = np.quantile(tokens[~cut], np.linspace(0.0, 1.0, self.num_intervals + 1)[1:-1])
        self.edges_ = np.unique(np.concatenate([[0.0], inner, [max(float(tokens.max()), 1.0)]]))
        last = np.clip(np.searchsorted(self.edges_, tokens, side="left") - 1, 0, len(self.edges_) - 2)
        # A cut response was not seen to the end of its last interval, unless the cap is that end.
        whole = np.where(cut & (tokens < self.edges_[last + 1]), last, last + 1)
        response = np.repeat(np.arange(len(tokens)), whole)
        interval = np.concatenate([np.arange(n) for n in whole]) if len(whole) else np.zeros(0, np.int64)
        ended = (interval == last[response]) & ~cut[response]
        # The mean of what ended in an interval stands for it.
        middle = (self.edges_[1:] + self.edges_[:-1]) / 2
        inside = [tokens[~cut & (last == k)] for k in range(len(middle))]
        self.middle_ = np.array([group.mean() if len(group) else at for group, at in zip(inside, middle, strict=True)])
        self.base_ = np.array(
            [ended[interval == k].mean() if (interval == k).any() else 0.5 for k in range(len(middle))]
        )
        self.model_: HistGradientBoostingClassifier | None = None
        if 0 < ended.sum() < len(ended):
            x = np.asarray(x, np.float64)
            # What is never known, or always the same, splits nothing.
            self.used_ = np.array([len(np.unique(column[np.isfinite(column)])) > 1 for column in x.T], bool)
            features = np.column_stack([interval, x[response][:, self.used_]])
            self.model_ = HistGradientBoostingClassifier(
                max_iter=self.max_iter, min_samples_leaf=30, max_leaf_nodes=8, learning_rate=0.1,
                l2_regularization=1.0, early_stopping=False, random_state=0,
            )  # fmt: skip
            with threadpool_limits(1):
                self.model_.fit(features, ended)
        return self

    def hazards(self, x: Floats) -> Floats:
        """The chance to end in each interval, where it is reached; (responses, intervals)."""
        x = np.asarray(x, np.float64)
        intervals = len(self.middle_)
        if self.model_ is None:
            return np.tile(self.base_, (len(x), 1))
        used = x[:, self.used_]
        features = np.column_stack([np.tile(np.arange(intervals), len(x)), np.repeat(used, intervals, axis=0)])
        with threadpool_limits(1):
            chances: Floats = self.model_.predict_proba(features)[:, 1].reshape(len(x), intervals)
        return chances

    def predict(self, x: Floats) -> Floats:
        """Expected tokens to come; what goes beyond the last interval counts as its end."""
        hazard = self.hazards(x)
        reached = np.cumprod(np.column_stack([np.ones(len(hazard)), 1.0 - hazard]), axis=1)
        expected: Floats = (reached[:, :-1] * hazard) @ self.middle_ + reached[:, -1] * self.edges_[-1]
        return expected


def features(rows: pd.DataFrame, at_tokens: float = 0.0, knows: Sequence[str] = KNOWN) -> Floats:
    """What may be known of responses when all that run have `at_tokens` tokens; (responses, features), NaN: unknown.

    `rows` are workload and outcomes, joined. "prompt": its tokens' logarithm. "history": of the same prompt's responses
    in earlier RL steps the mean logarithm of length, how many, and the share that was cut. "siblings": of the other
    responses to the prompt in this RL step the share that has ended by `at_tokens`, and the mean logarithm of their
    lengths. O(responses).
    """
    if unknown := [name for name in knows if name not in KNOWN]:
        raise ConfigError(f"a length cannot be predicted from {unknown[0]!r}; there are {', '.join(KNOWN)}")
    log = np.log(np.maximum(rows["response_tokens"].to_numpy(np.float64), 1.0))
    columns = [np.zeros(len(rows))]
    if "prompt" in knows:
        columns.append(np.log1p(rows["prompt_tokens"].to_numpy(np.float64)))
    if "history" in knows:
        columns += _history(rows, log)
    if "siblings" in knows:
        ended = (rows["response_tokens"] <= at_tokens).to_numpy()
        table = pd.DataFrame({"ended": ended, "log": np.where(ended, log, 0.0), "one": 1.0})
        sums = table.groupby([rows["rl_step"].to_numpy(), rows["prompt_id"].to_numpy()]).transform("sum")
        count = (sums["ended"] - ended).to_numpy(np.float64)
        with np.errstate(invalid="ignore", divide="ignore"):
            columns.append(count / (sums["one"].to_numpy() - 1.0))
            columns.append(np.where(count > 0, (sums["log"].to_numpy() - table["log"].to_numpy()) / count, np.nan))
    return np.column_stack(columns)


def _history(rows: pd.DataFrame, log: Floats) -> list[Floats]:
    """Mean logarithm of length, number and share cut of a prompt's responses in earlier RL steps."""
    table = pd.DataFrame(
        {
            "rl_step": rows["rl_step"].to_numpy(), "prompt": rows["prompt_id"].to_numpy(), "log": log,
            "cut": is_cut(rows).astype(np.float64), "one": 1.0,
        }
    )  # fmt: skip
    steps = table.groupby(["prompt", "rl_step"])[["log", "cut", "one"]].sum()
    before = steps.groupby("prompt").cumsum() - steps
    earlier = before.reindex(pd.MultiIndex.from_frame(table[["prompt", "rl_step"]]))
    number = earlier["one"].to_numpy()
    with np.errstate(invalid="ignore", divide="ignore"):
        mean, share = earlier["log"].to_numpy() / number, earlier["cut"].to_numpy() / number
    return [np.where(number > 0, mean, np.nan), number, np.where(number > 0, share, np.nan)]


def is_cut(rows: pd.DataFrame) -> Flags:
    """Which responses their cap, or whoever ended the RL step, cut."""
    cut: Flags = (rows["finish_reason"] != "stop").to_numpy()
    return cut
