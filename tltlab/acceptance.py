"""How many drafted tokens the target accepts: constant, geometric, fitted to a recording, or replayed per position.

Everywhere `accepted` counts without the bonus token and `tokens` with it. A strategy's reach is the number of drafted
tokens that can be accepted: draft_depth, or tokens_to_verify - 1 where a chain is trimmed to fewer.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_left
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
import pandas as pd
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, field_validator

from .cli import read_json, write_json
from .errors import ConfigError
from .strategy import Strategy

Key = tuple[int, str, int, int]
FloatArray = npt.NDArray[np.float64]


def reach(strategy: Strategy) -> int:
    """Most drafted tokens that an iteration under `strategy` can accept.

    >>> reach(Strategy.chain("ngram", 4)), reach(Strategy("ngram", 4, 1, 3)), reach(NO_SPECULATION)
    (4, 2, 0)
    """
    return min(strategy.draft_depth, strategy.tokens_to_verify - 1) if strategy.top_k == 1 else strategy.draft_depth


class AcceptanceModel(BaseModel, ABC):
    """Acceptance as a distribution that is the same for every request and position.

    `drafters` names the drafters it knows, () where it holds for any. Without speculation nothing is drafted, one
    token comes out, and no model is asked.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    @property
    def drafters(self) -> tuple[str, ...]:
        return ()

    @abstractmethod
    def distribution(self, strategy: Strategy) -> FloatArray:
        """P(accepted = j) for j = 0..reach. Raises ConfigError for a strategy that the model does not cover."""

    def at(self, batch: int) -> AcceptanceModel:
        """The model that holds at a batch size: itself, unless it tells batch sizes apart."""
        return self

    def tokens_per_iteration(self, strategy: Strategy) -> float:
        """Expected tokens of one request in one iteration, the bonus token included."""
        p = self.distribution(strategy)
        return 1.0 + float(p @ np.arange(len(p)))

    def num_drafted(self, strategy: Strategy) -> float:
        """Expected tokens really drafted per request and iteration: a drafter may return fewer than asked."""
        return float(strategy.tokens_to_verify - 1)

    def write(self, path: str | Path) -> Path:
        """Write the file that `load_acceptance` reads, in one move."""
        write_json(Path(path), self.model_dump(mode="json"))
        return Path(path)


class ConstantAcceptance(AcceptanceModel):
    """Every speculative iteration yields `tokens` per request, but never more than the draft's reach plus the bonus.

    Sampled, a fractional value is a draw between the two whole numbers beside it.
    """

    kind: Literal["constant"] = "constant"
    tokens: Annotated[float, Field(ge=1, allow_inf_nan=False)]

    def tokens_per_iteration(self, strategy: Strategy) -> float:
        return min(self.tokens, reach(strategy) + 1.0)

    def distribution(self, strategy: Strategy) -> FloatArray:
        accepted = self.tokens_per_iteration(strategy) - 1.0
        low = math.floor(accepted)
        p = np.zeros(reach(strategy) + 1)
        p[low] = 1.0 - (accepted - low)
        if accepted > low:
            p[low + 1] = accepted - low
        return p


class GeometricAcceptance(AcceptanceModel):
    """Chain drafts, each token kept with probability `alpha` while all before it were kept.

    A draft of depth d yields (1 - alpha^(d+1)) / (1 - alpha) tokens on average (Leviathan et al. 2023, equation 1).
    """

    kind: Literal["geometric"] = "geometric"
    alpha: Annotated[float, Field(ge=0, le=1)]

    def distribution(self, strategy: Strategy) -> FloatArray:
        _only_chains(strategy, "geometric acceptance")
        kept = self.alpha ** np.arange(reach(strategy) + 1)
        return np.append(kept[:-1] - kept[1:], kept[-1])


class FittedDepth(BaseModel):
    """What was measured for one drafter at one depth: P(accepted = j) for j = 0..depth, and mean tokens drafted."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    accepted: tuple[Annotated[float, Field(ge=0, le=1)], ...]
    drafted: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    num_samples: int | None = None

    @field_validator("accepted")
    @classmethod
    def _sums_to_one(cls, p: tuple[float, ...]) -> tuple[float, ...]:
        if abs(sum(p) - 1.0) > 1e-6:
            raise ValueError(f"probabilities sum to {sum(p):.6g}, not to 1")
        return p


class FittedAcceptance(AcceptanceModel):
    """Distributions measured per drafter and depth.

    A depth that was not measured is the next larger measured one cut short: the first d tokens of a longer chain are
    the chain of depth d, so min(accepted, d) has the right distribution; tokens drafted scale with the depth. Beyond
    the largest measured depth nothing is known, which is a ConfigError.

    >>> FittedAcceptance(drafters_by_depth={"ngram": {2: FittedDepth(accepted=(0.5, 0.2, 0.3), drafted=1.0)}})
    """

    kind: Literal["fitted"] = "fitted"
    drafters_by_depth: Annotated[dict[str, dict[int, FittedDepth]], Field(alias="drafters")]
    notes: tuple[str, ...] = ()
    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True, serialize_by_alias=True)

    @field_validator("drafters_by_depth")
    @classmethod
    def _lengths(cls, drafters: dict[str, dict[int, FittedDepth]]) -> dict[str, dict[int, FittedDepth]]:
        for name, depths in drafters.items():
            for depth, fitted in depths.items():
                if depth < 1 or len(fitted.accepted) != depth + 1:
                    raise ValueError(
                        f"{name}: depth {depth} needs {depth + 1} probabilities, got {len(fitted.accepted)}"
                    )
                if fitted.drafted > depth + 1e-9:
                    raise ValueError(f"{name}: depth {depth} cannot draft {fitted.drafted} tokens")
        return drafters

    @property
    def drafters(self) -> tuple[str, ...]:
        return tuple(sorted(self.drafters_by_depth))

    def distribution(self, strategy: Strategy) -> FloatArray:
        _, fitted = self._measured(strategy)
        most = reach(strategy)
        p = np.asarray(fitted.accepted)
        cut: FloatArray = np.append(p[:most], p[most:].sum())
        normalised: FloatArray = cut / cut.sum()
        return normalised

    def num_drafted(self, strategy: Strategy) -> float:
        depth, fitted = self._measured(strategy)
        return fitted.drafted * reach(strategy) / depth

    def _measured(self, strategy: Strategy) -> tuple[int, FittedDepth]:
        _only_chains(strategy, "fitted acceptance")
        depths = self.drafters_by_depth.get(strategy.drafter)
        if not depths:
            raise ConfigError(
                f"the acceptance model knows no drafter {strategy.drafter!r}, only {', '.join(self.drafters) or 'none'}"
            )
        enough = [d for d in sorted(depths) if d >= reach(strategy)]
        if not enough:
            raise ConfigError(
                f"the acceptance model was fitted up to depth {max(depths)} of drafter {strategy.drafter!r}; "
                f"{strategy} is deeper: record that depth, or name a model such as geometric:0.7"
            )
        return enough[0], depths[enough[0]]


class Band(BaseModel):
    """What holds for batches up to `max_batch`, None for all larger ones."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True, serialize_by_alias=True)

    max_batch: Annotated[int, Field(gt=0)] | None
    drafters_by_depth: Annotated[dict[str, dict[int, FittedDepth]], Field(alias="drafters")]


class BatchAcceptance(AcceptanceModel):
    """Distributions measured per batch size too, as `tltlab calibrate` writes them: one `FittedAcceptance` per band.

    A drafter that retrieves from the group accepts little while the batch is large and responses are young, and more
    in the tail: one distribution for both would be wrong at both ends.
    """

    kind: Literal["by-batch"] = "by-batch"
    bands: tuple[Band, ...]

    @field_validator("bands")
    @classmethod
    def _ascend(cls, bands: tuple[Band, ...]) -> tuple[Band, ...]:
        ends = [math.inf if band.max_batch is None else band.max_batch for band in bands]
        if not ends or ends[-1] != math.inf or any(a >= b for a, b in pairwise(ends)):
            raise ValueError("max_batch must ascend, and be null in the last band only")
        return bands

    @property
    def drafters(self) -> tuple[str, ...]:
        return tuple(sorted({name for band in self.bands for name in band.drafters_by_depth}))

    @cached_property
    def models(self) -> tuple[FittedAcceptance, ...]:
        return tuple(FittedAcceptance(drafters_by_depth=band.drafters_by_depth) for band in self.bands)

    def at(self, batch: int) -> FittedAcceptance:
        ends = [band.max_batch for band in self.bands if band.max_batch is not None]
        return self.models[bisect_left(ends, batch)]

    def distribution(self, strategy: Strategy) -> FloatArray:
        raise TypeError("acceptance differs by batch size: ask at(batch)")


class TraceAcceptance:
    """Counterfactual acceptance per position, from acceptance.parquet: a draft at position p keeps min(reach, row[p]).

    Position p is before the request's token p (p tokens stand). Of several rows of one request and drafter the one
    with the youngest drafter counts.
    """

    def __init__(self, table: pd.DataFrame) -> None:
        youngest = table.sort_values("drafter_age", kind="stable").drop_duplicates([*_KEY, "drafter"])
        self.drafters: tuple[str, ...] = tuple(sorted(youngest["drafter"].unique()))
        self._rows: dict[tuple[str, Key], tuple[int, npt.NDArray[np.uint8]]] = {}
        columns = [youngest[c].tolist() for c in (*_KEY, "drafter", "max_depth", "accept_if_drafted")]
        for rl_step, prompt_id, sample, turn, drafter, max_depth, positions in zip(*columns, strict=True):
            self._rows[drafter, (rl_step, prompt_id, sample, turn)] = max_depth, np.asarray(positions, np.uint8)

    def check(self, strategy: Strategy) -> None:
        """Raise ConfigError for a strategy that the recorded counterfactuals do not cover."""
        _only_chains(strategy, "the trace's acceptance.parquet")
        if strategy.drafter not in self.drafters:
            raise ConfigError(
                f"the trace's acceptance.parquet knows no drafter {strategy.drafter!r}, only {', '.join(self.drafters)}"
            )
        deepest = min(depth for (name, _), (depth, _) in self._rows.items() if name == strategy.drafter)
        if reach(strategy) > deepest:
            raise ConfigError(
                f"the trace's acceptance.parquet goes to depth {deepest} of drafter {strategy.drafter!r}; "
                f"{strategy} is deeper: annotate the trace with a larger max_depth"
            )

    def positions(self, drafter: str, key: Key, num_tokens: int) -> npt.NDArray[np.uint8]:
        """Acceptable tokens at positions 0..num_tokens-1 of one request; ConfigError where the trace has none."""
        if (drafter, key) not in self._rows:
            raise ConfigError(f"acceptance.parquet has no row for drafter {drafter!r} and response {key}")
        row = self._rows[drafter, key][1]
        if len(row) < num_tokens:
            raise ConfigError(
                f"acceptance.parquet has {len(row)} positions for {key}, its response has {num_tokens} tokens"
            )
        return row[:num_tokens]


Acceptance = AcceptanceModel | TraceAcceptance

_KEY = ("rl_step", "prompt_id", "sample", "turn")
_FILE: TypeAdapter[ConstantAcceptance | GeometricAcceptance | FittedAcceptance | BatchAcceptance] = TypeAdapter(
    Annotated[
        ConstantAcceptance | GeometricAcceptance | FittedAcceptance | BatchAcceptance, Field(discriminator="kind")
    ]
)


def load_acceptance(source: Acceptance | dict[str, Any] | str | Path) -> Acceptance:
    """Return an acceptance model from itself, a dict, `constant:A`, `geometric:ALPHA` or a JSON file.

    >>> load_acceptance("geometric:0.5").tokens_per_iteration(Strategy.chain("ngram", 2))
    1.75
    """
    if isinstance(source, AcceptanceModel | TraceAcceptance):
        return source
    if isinstance(source, dict):
        return _validated(source, "acceptance")
    name, colon, number = str(source).partition(":")
    if colon and name in ("constant", "geometric"):
        field = {"constant": "tokens", "geometric": "alpha"}[name]
        return _validated({"kind": name, field: number}, str(source))
    if not Path(source).exists():
        raise ConfigError(
            f"no acceptance model {str(source)!r}: give constant:A, geometric:ALPHA, 'trace' or a fitted model's file"
        )
    return _validated(read_json(Path(source)), str(source))


def _validated(value: Any, where: str) -> AcceptanceModel:
    try:
        return _FILE.validate_python(value)
    except ValidationError as error:
        found = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']} (got {e['input']!r})" for e in error.errors())
        raise ConfigError(f"{where}: {found}") from error


def _only_chains(strategy: Strategy, what: str) -> None:
    if strategy.top_k > 1:
        raise ConfigError(f"{what} describes chain drafts; {strategy} is a tree (top_k = {strategy.top_k})")
