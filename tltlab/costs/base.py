"""How long one decode iteration takes: the interface of all cost models."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import Field, PositiveInt, field_validator

from tltlab.arrays import Floats
from tltlab.config import FrozenModel, StoredModel
from tltlab.drafters.specs import STANDARD, Drafters
from tltlab.errors import ConfigError
from tltlab.records import Json, frozen
from tltlab.strategy import NO_SPECULATION, Strategy

from .evidence import CalibratedRange, Evidence
from .noise import IterationNoise

if TYPE_CHECKING:
    from .samples import Iterations

Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
DRAFTING = ("per_token_s", "sd_base_s", "sd_idle_s", "draft_level_s", "draft_level_per_request_s")
"""Terms that only iterations with drafts show."""


class Waiting(FrozenModel):
    """Extra seconds of an iteration where the engine is scheduled synchronously: the device waits for the host.

    Linear in the batch; `source` says where it was measured.
    """

    base_s: Seconds
    per_request_s: Seconds
    source: str

    def seconds(self, batch: float | Floats) -> Any:
        """Return the seconds at a batch size, or at each of several."""
        return self.base_s + self.per_request_s * batch


class Coefficients:
    """Coefficients of a cost model; optional ones may be None."""

    def need(self, term: str) -> float:
        """The value of `term`; a ConfigError that names it where the data did not identify it."""
        value = getattr(self, term)
        if value is None:
            data = "one recorded with TLTLAB_POLICY=explore" if term in DRAFTING else "a trace that shows it"
            other = " (with other costs 'tltlab trace annotate' gives acceptance)" if term in DRAFTING else ""
            raise ConfigError(
                f"the cost model has no {term} (null: not identified by its data), which this simulation needs; "
                f"calibrate on {data}, write a value into the file, or take other costs, such as cpu-small{other}"
            )
        return float(value)

    def once_s(self, strategy: Strategy, drafter_loaded: bool) -> float:
        """Seconds of an iteration for drafting at all, or for a drafter that is loaded in plain decoding."""
        if strategy.speculates:
            return self.need("sd_base_s")
        return self.need("sd_idle_s") if drafter_loaded else 0.0


class CostModel(Coefficients, StoredModel, ABC):
    """Seconds of iterations and prefill on one worker, and that worker's limits; its file is for `load_costs`.

    `kv_capacity_tokens`, `max_num_seqs` and `max_num_batched_tokens` are per worker, None unlimited. The last is the
    tokens that an iteration may compute: with it prompts are prefilled in chunks during decoding, which itself is not
    cut, at the cost `IterationCost.added_s`. `graph_sizes` pads an iteration's tokens up to the next size, beyond
    the largest nothing is padded. `switch_s` is what it takes to bring speculation in after plain decoding, once in a
    rollout: the drafter then stays loaded (`sd_idle_s`). `outside_s` is what a rollout takes before its first
    iteration, and beside all of them: starting, collecting. `synchronous` says whether the engine waited for the host
    between these iterations, `waiting` what that takes; None where it is not known. `calibrated` is the range of the
    fit's data, `noise` the scatter of iterations around the fit, `evidence` its errors.
    """

    switch_s: Seconds = 0.0
    outside_s: Seconds = 0.0
    kv_capacity_tokens: PositiveInt | None = None
    max_num_seqs: PositiveInt | None = None
    max_num_batched_tokens: PositiveInt | None = None
    graph_sizes: tuple[PositiveInt, ...] | None = None
    synchronous: bool | None = None
    waiting: Waiting | None = None
    calibrated: CalibratedRange | None = None
    noise: IterationNoise | None = None
    evidence: Evidence | None = None
    notes: tuple[str, ...] = ()

    @field_validator("graph_sizes")
    @classmethod
    def _ascending(cls, sizes: tuple[int, ...] | None) -> tuple[int, ...] | None:
        return None if sizes is None else tuple(sorted(set(sizes)))

    @property
    def tensor_parallel(self) -> int:
        """GPUs of one worker, 1 where the model does not state it."""
        return 1

    def limits(self) -> Json:
        """The fields that every cost model has, for another model with the same limits."""
        return {name: getattr(self, name) for name in CostModel.model_fields}

    @abstractmethod
    def iteration(
        self,
        strategy: Strategy,
        *,
        tokens_to_verify: float | None = None,
        drafter_loaded: bool = False,
        drafters: Drafters = STANDARD,
    ) -> IterationCost:
        """The cost of an iteration under `strategy`, as a function of batch and context alone.

        `tokens_to_verify` per request replaces the strategy's own where a drafter returns fewer drafts than asked
        (1 + mean drafted). `drafters` holds the traits of the strategy's drafter. Raises ConfigError for a strategy
        that the model has no costs for.
        """

    @abstractmethod
    def prefill_s(self, tokens: float) -> float:
        """Seconds to prefill this many tokens: proportional to them, so that chunks add up to the whole."""

    def predict(self, rows: Iterations) -> Floats:
        """Seconds of measured iterations: what each verified, drafted and prefilled.

        Drafting counts in the iteration that verifies it: sums over a rollout are right, single rows are off by that.
        Raises ConfigError for a row that needs a term which the model does not have.
        """
        with_drafter = rows.loaded & np.isin(rows.rl_step, rows.rl_step[rows.spec])
        columns = (rows.batch, rows.tokens_to_verify, rows.context, rows.depth, rows.prefill, with_drafter)

        @cache
        def cost(depth: int, verify: float, loaded: bool) -> IterationCost:
            # The width is arbitrary: the verified tokens are passed apart and replace the strategy's own number.
            strategy = Strategy("learned", depth, 2, 2) if depth > 0 else NO_SPECULATION
            return self.iteration(strategy, tokens_to_verify=verify, drafter_loaded=loaded and depth == 0)

        seconds = []
        for batch, verify, context, depth, prefill, loaded in zip(*(c.tolist() for c in columns), strict=True):
            decoding_s = cost(depth, verify, loaded).seconds(int(batch), context)
            seconds.append(decoding_s + (self.prefill_s(prefill) if prefill else 0.0))
        return np.array(seconds, np.float64)

    def identified_s(self, rows: Iterations) -> Floats:
        """The same for the rows of a fit: a term that they do not identify stands for nothing."""
        return self.predict(rows)


class IterationCost(ABC):
    """Seconds of one iteration under one strategy: at each batch size linear in the context.

    Layers run one after another, so what depends on the context (reading the KV cache) adds to what does not; hence
    many iterations in a row have a closed form. `tokens_to_verify` is per request.
    """

    __slots__ = ()

    tokens_to_verify: float

    @abstractmethod
    def without_context_s(self, batch: int) -> float:
        """Everything but the context's share; drafting is in it."""

    @abstractmethod
    def context_slope_s(self, batch: int) -> float:
        """Seconds per token of context, summed over the batch."""

    @abstractmethod
    def draft_s(self, batch: int) -> float:
        """The drafting part of `without_context_s`."""

    def added_s(self, batch: int, prompt_tokens: float, apart_s: float) -> float:
        """Seconds that `prompt_tokens` add to the iteration that also computes them; by themselves they take `apart_s`.

        At most `apart_s`, and at least so many that the iteration takes as long as the prompts by themselves.
        """
        return apart_s

    def seconds(self, batch: int, context_tokens: float) -> float:
        return self.without_context_s(batch) + self.context_slope_s(batch) * context_tokens


def padded(tokens: float, graph_sizes: tuple[int, ...]) -> float:
    """Tokens that the captured graph for `tokens` runs; a float's rounding error does not push it a size up.

    >>> padded(5, (1, 8, 16)), padded(17, (1, 8, 16))
    (8.0, 17)
    """
    at = bisect_left(graph_sizes, math.ceil(tokens - 1e-9))
    return float(graph_sizes[at]) if at < len(graph_sizes) else tokens


@frozen
class DraftingIteration(IterationCost):
    """An iteration whose drafting is linear in the batch."""

    draft_fixed_s: float
    draft_per_request_s: float
    tokens_to_verify: float
    graph_sizes: tuple[int, ...] = ()

    def draft_s(self, batch: int) -> float:
        return self.draft_fixed_s + self.draft_per_request_s * batch


Fit = Callable[["Iterations"], CostModel]
