"""Drafting as a training log has it: tokens per draft of each RL step, the draft depth, and the acceptance."""

from __future__ import annotations

from typing import Self

import numpy as np
import pandas as pd

from tltlab.acceptance.base import GeometricAcceptance, chain_alpha
from tltlab.acceptance.per_drafter import PerDrafter
from tltlab.errors import ConfigError
from tltlab.records import frozen
from tltlab.strategy import Strategy
from tltlab.traces.trace import Trace

COLLAPSED = 1.05
"""Accept length up to which no draft is kept, up to rounding."""
DRAFTED, MOST_DEPTH = "drafted", 16
"""`depth_from` of a depth that was given, and the largest that is read off accept lengths."""
_DRAFTER, _MOST_ALPHA = "learned", 0.999


@frozen
class LoggedDrafting:
    """The strategy of a log's run, and its `accept_length` by RL step (NaN: not logged).

    `depth_from` names the source of the draft depth. `kept` are the RL steps in which any draft was kept.
    """

    strategy: Strategy
    accept_length: pd.Series[float]
    depth_from: str

    @classmethod
    def of(cls, trace: Trace) -> Self | None:
        """The drafting of a trace of a log; None where the log does not have the tokens that a draft yields.

        The depth is that of the manifest, else tokens kept per draft over the share of drafted tokens that is kept.
        Raises ConfigError where the log has neither.
        """
        steps = trace.steps if trace.manifest.kind == "imported" else None
        if steps is None or "accept_length" not in steps:
            return None
        rows = steps.set_index("rl_step").reindex(columns=["accept_length", "draft_rate"]).astype(np.float64)
        length, rate = rows["accept_length"], rows["draft_rate"]
        # A log may write one token per draft where nothing was drafted.
        if not ((length > COLLAPSED) | (length.notna() & rate.notna())).any():
            return None
        known, place = Strategy.parse(trace.manifest.drafting or "none"), trace.path or trace.manifest.source
        if known.speculates:
            if length.max() > known.reach + 1.0:
                raise ConfigError(f"{place}: {known} keeps at most {known.reach + 1} tokens, the log {length.max():g}")
            return cls(strategy=known, accept_length=length, depth_from=DRAFTED)
        depths = ((length - 1.0) / rate)[(rate > 0) & (length > COLLAPSED)]
        if depths.empty:
            raise ConfigError(
                f"{place}: accept lengths without a draft depth: name what drafted with --drafted learned:7 "
                "(`tltlab what-if` and `tltlab trace import` take it)"
            )
        strategy = Strategy.chain(_DRAFTER, min(max(round(float(depths.median())), 1), MOST_DEPTH))
        return cls(strategy=strategy, accept_length=length, depth_from="tokens per draft and the share that is kept")

    @property
    def kept(self) -> pd.Series[float]:
        """Accept lengths of the RL steps in which drafts were kept; of all where none were."""
        kept = self.accept_length[self.accept_length > COLLAPSED]
        return kept if len(kept) else self.accept_length.dropna()

    @property
    def mean_accept_length(self) -> float:
        """Tokens per draft while drafts were kept: the harmonic mean, as of RL steps with equally many tokens."""
        return float(len(self.kept) / (1.0 / self.kept).sum())

    @property
    def text(self) -> str:
        return f"the log's {self.mean_accept_length:.2f} tokens per draft of {self.strategy}"

    def acceptance(self, accept_length: float | None = None) -> PerDrafter:
        """Chains whose mean at the log's depth is this accept length, by default that while drafts were kept."""
        tokens = self.mean_accept_length if accept_length is None else accept_length
        alpha = min(chain_alpha(tokens - 1.0, self.strategy.reach), _MOST_ALPHA)
        drafter = self.strategy.drafter
        return PerDrafter({drafter: GeometricAcceptance(alpha=alpha)}, None, {drafter: self.text})
