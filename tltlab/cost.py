"""How long one decode iteration takes: a linear model in batch, tokens to verify, context and draft depth."""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from .cli import read_json, write_json
from .errors import ConfigError
from .strategy import Strategy

Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class LinearCosts(BaseModel):
    """The cost model as it stands in a file; None is a term that the data did not identify.

    One iteration with b requests whose contexts sum to S tokens, v tokens to verify per request and draft depth d takes

        base_s + per_request_s*b + per_token_s*b*v + per_context_s*S
          + [if drafting]              sd_base_s + d*(draft_level_s + draft_level_per_request_s*b)
          + [a drafter loaded, d = 0]  sd_idle_s

    `prefill_per_token_s` is per prompt token. `kv_capacity_tokens` and `max_num_seqs` are per worker, None unlimited;
    `graph_sizes` pads b*v up to the next size, beyond the largest nothing is padded. Where nothing was ever verified
    `per_token_s` is None and its share stands in `per_request_s`: at v = 1 the two cannot be told apart.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["linear"] = "linear"
    base_s: Seconds | None = None
    per_request_s: Seconds | None = None
    per_token_s: Seconds | None = None
    per_context_s: Seconds | None = None
    sd_base_s: Seconds | None = None
    sd_idle_s: Seconds | None = None
    draft_level_s: Seconds | None = None
    draft_level_per_request_s: Seconds | None = None
    prefill_per_token_s: Seconds | None = None
    kv_capacity_tokens: Annotated[int, Field(gt=0)] | None = None
    max_num_seqs: Annotated[int, Field(gt=0)] | None = None
    graph_sizes: tuple[Annotated[int, Field(gt=0)], ...] | None = None
    notes: tuple[str, ...] = ()

    @field_validator("graph_sizes")
    @classmethod
    def _ascending(cls, sizes: tuple[int, ...] | None) -> tuple[int, ...] | None:
        return None if sizes is None else tuple(sorted(set(sizes)))

    def iteration(
        self, strategy: Strategy, *, tokens_to_verify: float | None = None, drafter_loaded: bool = False
    ) -> IterationCost:
        """The cost of an iteration under `strategy`, as a function of batch and context alone.

        `tokens_to_verify` per request replaces the strategy's own where a drafter returns fewer drafts than asked
        (1 + mean drafted). Raises ConfigError for a term that is needed and None.
        """
        verified = float(strategy.tokens_to_verify) if tokens_to_verify is None else tokens_to_verify
        fixed, per_request, depth = self.need("base_s"), self.need("per_request_s"), strategy.draft_depth
        draft_fixed = draft_per_request = 0.0
        if strategy.speculates:
            fixed += self.need("sd_base_s")
            draft_fixed = depth * self.need("draft_level_s")
            draft_per_request = depth * self.need("draft_level_per_request_s")
        elif drafter_loaded:
            fixed += self.need("sd_idle_s")
        return IterationCost(
            fixed_s=fixed,
            per_request_s=per_request,
            per_token_s=self.need("per_token_s") if strategy.speculates else self.per_token_s or 0.0,
            per_context_s=self.need("per_context_s"),
            draft_fixed_s=draft_fixed,
            draft_per_request_s=draft_per_request,
            tokens_to_verify=verified,
            graph_sizes=self.graph_sizes or (),
        )

    def need(self, term: str) -> float:
        """The value of `term`; a ConfigError that names it where the data did not identify it."""
        value = getattr(self, term)
        if value is None:
            raise ConfigError(
                f"the cost model has no {term} (null: not identified by its data), which this simulation needs; "
                f"calibrate on a trace that shows it, or write a value into the file"
            )
        return float(value)

    def write(self, path: str | Path) -> Path:
        """Write the file that `load_costs` reads, in one move."""
        write_json(Path(path), self.model_dump(mode="json"))
        return Path(path)


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationCost:
    """Seconds of one iteration under one strategy.

    >>> LinearCosts(base_s=4e-3, per_request_s=1e-3, per_context_s=0.0).iteration(NO_SPECULATION).seconds(2, 100)
    0.006
    """

    fixed_s: float
    per_request_s: float
    per_token_s: float
    per_context_s: float
    draft_fixed_s: float
    draft_per_request_s: float
    tokens_to_verify: float
    graph_sizes: tuple[int, ...] = ()

    def seconds(self, batch: int, context_tokens: float) -> float:
        return self.without_context_s(batch) + self.per_context_s * context_tokens

    def without_context_s(self, batch: int) -> float:
        """Everything but the context's share; drafting is in it."""
        verified = self.per_token_s * self.padded(batch * self.tokens_to_verify)
        return self.fixed_s + self.per_request_s * batch + verified + self.draft_s(batch)

    def draft_s(self, batch: int) -> float:
        return self.draft_fixed_s + self.draft_per_request_s * batch

    def padded(self, tokens: float) -> float:
        """Tokens that the captured graph for `tokens` runs; a float's rounding error does not push it a size up."""
        at = bisect_left(self.graph_sizes, math.ceil(tokens - 1e-9))
        return float(self.graph_sizes[at]) if at < len(self.graph_sizes) else tokens


def presets() -> list[str]:
    """Names of the cost models that ship with the package."""
    return sorted(f.name.removesuffix(".json") for f in (files("tltlab") / "presets").iterdir())


def load_costs(source: LinearCosts | dict[str, Any] | str | Path) -> LinearCosts:
    """Return a cost model from itself, a dict, the name of a preset or a JSON file.

    >>> load_costs("cpu-small").base_s
    0.00324
    """
    if isinstance(source, LinearCosts):
        return source
    where = "costs"
    value: Any = source
    if isinstance(source, str | Path):
        where = str(source)
        value = _read(source)
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: a cost model is an object with 'kind' and terms, not {type(value).__name__}")
    try:
        return LinearCosts.model_validate(value)
    except ValidationError as error:
        found = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']} (got {e['input']!r})" for e in error.errors())
        raise ConfigError(f"{where}: {found}") from error


def _read(source: str | Path) -> Any:
    if isinstance(source, str) and source in presets():
        return json.loads((files("tltlab") / "presets" / f"{source}.json").read_text())
    if not Path(source).exists():
        raise ConfigError(f"no cost model at {source}: give a JSON file or one of the presets {', '.join(presets())}")
    return read_json(Path(source))
