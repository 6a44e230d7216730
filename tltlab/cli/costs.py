"""`tltlab costs`: times of iterations by a cost model, plain and with speculation."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tltlab.console import emit, parse_strategy, table, table_text, whole_numbers
from tltlab.drafters.specs import STANDARD
from tltlab.errors import ConfigError
from tltlab.options import command, option
from tltlab.records import Json
from tltlab.strategy import NO_SPECULATION, Strategy

if TYPE_CHECKING:
    from tltlab.costs.base import CostModel


@command
def costs(
    name: Annotated[
        str | None,
        typer.Argument(
            help="A preset, a cost model's file, or ENGINE:GPUS:MODEL[:WEIGHTS[:KV]]; without one they are listed."
        ),
    ] = None,
    batch: str = option("Batch sizes, with commas between them.", "1,8,32,128"),
    context: int = option("Tokens of context per request.", 4096, min=0),
    strategy: str | None = option("ngram:4, or D,K,V: depth, top_k and tokens to verify of a draft."),
    drafter: str = option("The strategy's drafter: learned, ngram, suffix, ...", "learned"),
    accept_length: float | None = option("Tokens per request and speculative iteration, bonus token included.", min=1),
) -> None:
    """Print ms and tokens per second of an iteration by a cost model for each batch, plain and with speculation.

    Without a name, the cost models and engine profiles that come along. A profile is asked for GPUs (2xH100, or a JSON
    file of a GPU), a model (a name or its Hugging Face config.json) and types (bf16, fp8, int8, fp4, int4).

    Example: tltlab costs vllm:2xH100:Qwen3-32B:fp8 --batch 1,8,32 --context 4096
    """
    from tltlab.costs.load import load_costs, presets
    from tltlab.costs.profiles import profiles

    if name is None:
        listed = [_described(preset, load_costs(preset)) for preset in presets()]
        engines = [
            {
                "name": profile.engine,
                "versions": profile.versions,
                "measured": sorted({f"{m.model} on {m.gpu}" for m in profile.measured}),
            }
            for profile in profiles().engines.values()
        ]
        emit({"presets": listed, "profiles": engines}, _list(listed, engines))
        return
    if (strategy is None) != (accept_length is None):
        raise ConfigError("--strategy and --accept-length go together: what is drafted, and what comes of it")
    model = load_costs(name)
    asked = [(NO_SPECULATION, 1.0)]
    if strategy is not None and accept_length is not None:
        chosen = parse_strategy(strategy, drafter)
        STANDARD.check([chosen])
        if accept_length > 1 + chosen.reach:
            raise ConfigError(
                f"--accept-length is {accept_length:g}: drafts of {chosen} yield at most "
                f"{1 + chosen.reach} tokens, bonus included"
            )
        asked.append((chosen, accept_length))
    sizes = whole_numbers("--batch", batch, least=1)
    rows = []
    for size in sizes:
        rows += [_row(model, each, size, context, tokens) for each, tokens in asked]
    result = _described(name, model) | {"context_tokens_per_request": context, "rows": rows}
    result |= {"evidence": None if model.evidence is None else model.evidence.to_json()}
    emit(result | {"notes": list(model.notes)}, _table(result))


def _row(model: CostModel, strategy: Strategy, batch: int, context: int, tokens: float) -> Json:
    seconds = model.iteration(strategy).seconds(batch, float(batch * context))
    if not seconds > 0:
        raise ConfigError(
            f"an iteration of {batch} requests takes {seconds:g} s by this cost model: nothing to divide by"
        )
    verified = float(batch * strategy.tokens_to_verify)
    within = model.calibrated
    capacity, evidence = model.kv_capacity_tokens, model.evidence
    load = {"batch": batch, "verified_tokens": verified, "context_tokens": float(batch * context)}
    beyond = within.outside(**load) if within else []
    beyond += evidence.beyond([strategy.draft_depth], blocks=STANDARD.in_blocks(strategy)) if evidence else []
    drafts, interval_s = strategy.speculates, None
    if evidence:
        interval_s = evidence.interval(seconds, speculates=drafts, extrapolated=bool(beyond))
    return {
        "batch": batch,
        "strategy": str(strategy),
        "iteration_ms": 1e3 * seconds,
        "tokens_per_s_per_request": tokens / seconds,
        "tokens_per_s": batch * tokens / seconds,
        "interval_ms": None if interval_s is None else [1e3 * end for end in interval_s],
        "outside": beyond,
        "fits_kv_cache": capacity is None or batch * context <= capacity,
    }


def _described(name: str, model: CostModel) -> Json:
    """Name, kind, hardware where the model names it, and limit of the KV cache; the first note stands for the rest."""
    kind = str(model.model_dump(include={"kind"})["kind"])
    at: Any = model if kind == "roofline" else getattr(model, "roofline", None)
    hardware = {key: getattr(getattr(at, key, None), "name", getattr(at, key, None)) for key in ("gpu", "model", "tp")}
    note = model.notes[0] if model.notes else ""
    return {"name": name, "kind": kind, **hardware, "kv_capacity_tokens": model.kv_capacity_tokens, "note": note}


def _list(listed: list[Json], engines: list[Json]) -> str:
    on = [_on(row) or row["note"].split(":")[0].split(";")[0] for row in listed]
    rows = [(row["name"], row["kind"], description) for row, description in zip(listed, on, strict=True)]
    rows += [
        (f"{row['name']}:GPUS:MODEL", "profile", f"{row['versions']}: {', '.join(row['measured'])}") for row in engines
    ]
    return table([], rows, left=3)


def _on(row: Json) -> str:
    return f"{row['model']} on {row['tp']} x {row['gpu']}" if row["gpu"] else ""


def _table(result: Json) -> str:
    # pandas takes a while to import: --help should not wait for it.
    from pandas import DataFrame

    capacity = result["kv_capacity_tokens"]
    on = f", {_on(result)}" if result["gpu"] else ""
    heading = (
        f"{result['name']}: {result['kind']}{on}; KV cache {f'{capacity:,} tokens' if capacity else 'unlimited'}; "
        f"{result['context_tokens_per_request']:,} tokens of context per request"
    )
    rows = []
    for row in result["rows"]:
        low, high = row["interval_ms"] or (math.nan, math.nan)
        beyond = [name.replace("_", " ") for name in row["outside"]]
        beyond += [] if row["fits_kv_cache"] else ["does not fit the KV cache"]
        rows.append({**row, "low_ms": low, "high_ms": high, "beyond": ", ".join(beyond)})
    if result["evidence"] is not None:
        heading += f"\n{result['evidence']['says']}"
    columns = (
        "batch: {batch}; strategy: {strategy}; ms: {iteration_ms:.2f}; 90 %: {low_ms:.2f}-{high_ms:.2f}; "
        "tokens/s each: {tokens_per_s_per_request:.1f}; in all: {tokens_per_s:.0f}; beyond what was measured: {beyond}"
    )
    return f"{heading}\n{table_text(DataFrame(rows), columns, words=True)}"
