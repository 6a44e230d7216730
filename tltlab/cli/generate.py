"""`tltlab trace generate`: write a synthetic trace of a regime, or one like a given trace."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import typer

from tltlab.console import Json, emit, progress
from tltlab.errors import ConfigError
from tltlab.lengths.fit import MAX_RESPONSES, fit_lengths, statistics
from tltlab.lengths.generate import StepTables, generate_steps, manifest_of
from tltlab.lengths.model import LengthModel, of_regime
from tltlab.traces.stream import StreamWriter
from tltlab.traces.trace import Trace, read

MODEL_FILE = "lengths.json"


def generate(
    out: Annotated[Path, typer.Option(help="Folder to write; it must not exist.")],
    regime: Annotated[
        str | None, typer.Option(help="base-rl (length is luck; the default) or reasoning (the prompt decides it).")
    ] = None,
    like: Annotated[
        str | None,
        typer.Option(metavar="TRACE|CSV|JSON", help="Fit lengths and shape to this; JSON: a trace's lengths.json."),
    ] = None,
    rl_steps: Annotated[int | None, typer.Option(help="RL steps (4, or those of --like).")] = None,
    prompts: Annotated[int | None, typer.Option(help="Prompts per RL step (64, or those of --like).")] = None,
    group_size: Annotated[int | None, typer.Option(help="Samples per prompt (8, or those of --like).")] = None,
    num_prompts: Annotated[
        int | None, typer.Option(help="Prompts in all, which come back in each epoch; without it all are new.")
    ] = None,
    cap: Annotated[int | None, typer.Option(help="Longest response in tokens; longer ones are cut.")] = None,
    median: Annotated[float | None, typer.Option(help="Median length in tokens before the cut; scales all.")] = None,
    sigma: Annotated[
        float | None, typer.Option(help="Log-normal lengths of this standard deviation of log length.")
    ] = None,
    prompt_share: Annotated[
        float | None, typer.Option(help="Share of the variance of log length that the prompt explains.")
    ] = None,
    prompt_memory: Annotated[
        float | None, typer.Option(help="How much a prompt's share correlates from one epoch to the next, 0 to 1.")
    ] = None,
    median_growth: Annotated[
        float | None, typer.Option(help="Growth of the median per RL step: 0.02 is 2 percent.")
    ] = None,
    tail_growth: Annotated[
        float | None, typer.Option(help="Growth per RL step of log length's distance above the median; cuts more.")
    ] = None,
    prompt_tokens: Annotated[float | None, typer.Option(help="Median tokens of a prompt.")] = None,
    workers: Annotated[int | None, typer.Option(help="Rollout workers to write into the manifest.")] = None,
    seed: Annotated[int, typer.Option(help="Same seed, same trace.")] = 0,
    as_json: Json = False,
) -> None:
    """Draw a synthetic trace of response lengths, from a regime or fitted to a trace, and print its statistics.

    The model that was drawn from is written beside the tables as lengths.json.

    Example: tltlab trace generate --regime reasoning --rl-steps 4 --prompts 64 --group-size 8 --out my-trace
    """
    if out.exists() or out.is_symlink():
        raise ConfigError(f"{out} exists; name a new folder, or remove it first")
    source = _source(regime, like, prompt_share)
    if cap is not None and cap > source.model.max_response_tokens and like is not None:
        progress(f"lengths above {source.model.max_response_tokens} tokens are extrapolated")
    changes = {
        "median": median, "sigma": sigma, "prompt_share": prompt_share, "max_response_tokens": cap,
        "prompt_memory": prompt_memory, "median_growth": median_growth, "tail_growth": tail_growth,
        "prompt_tokens_median": prompt_tokens,
    }  # fmt: skip
    model = _changed(source.model, {name: value for name, value in changes.items() if value is not None})
    asked = {"num_rl_steps": rl_steps, "prompts_per_step": prompts, "group_size": group_size}
    shape = source.shape | {name: value for name, value in asked.items() if value is not None}
    steps = generate_steps(
        model, **shape, num_prompts=source.num_prompts if num_prompts is None else num_prompts, seed=seed
    )
    manifest = manifest_of(
        model,
        group_size=shape["group_size"],
        num_workers=source.num_workers if workers is None else workers,
        seed=seed,
        name=out.name,
    )
    every = math.ceil(math.prod(shape.values()) / MAX_RESPONSES)
    kept: list[StepTables] = []
    num_tokens = 0
    with StreamWriter(out, manifest) as writer:
        for rl_step, (workload, outcomes) in enumerate(steps):
            writer.append(workload, outcomes)
            num_tokens += int(outcomes["response_tokens"].sum())
            if rl_step % every == 0:
                kept.append((workload, outcomes))
    model.write(out / MODEL_FILE)
    names = ("workload", "outcomes")
    tables = {n: pd.concat(frames) for n, frames in zip(names, zip(*kept, strict=True), strict=True)}
    found = statistics(Trace.from_tables(manifest, tables))
    result = {
        "path": str(out),
        "num_rl_steps": shape["num_rl_steps"],
        "num_responses": math.prod(shape.values()),
        "num_tokens": num_tokens,
        "model": model.model_dump(mode="json"),
        "statistics": found,
        "like": source.statistics,
    }
    emit(result, as_json=as_json, text=_text(result))


@dataclass(frozen=True, kw_only=True)
class _Source:
    model: LengthModel
    shape: dict[str, int]
    num_prompts: int | None = None
    num_workers: int | None = None
    statistics: dict[str, Any] | None = None


def _source(regime: str | None, like: str | None, prompt_share: float | None) -> _Source:
    shape = {"num_rl_steps": 4, "prompts_per_step": 64, "group_size": 8}
    if like is None:
        return _Source(model=of_regime(regime or "base-rl"), shape=shape)
    if regime is not None:
        raise ConfigError(f"got --regime {regime} and --like {like}; give one of them")
    if Path(like).suffix == ".json":
        return _Source(model=LengthModel.load(like), shape=shape)
    trace = read(like)
    found = statistics(trace)
    prompts = max(1, round(found["prompts_per_step"]))
    seen_groups = found["prompts_per_step"] * found["num_rl_steps_looked_at"]
    return _Source(
        model=fit_lengths(trace, prompt_share=prompt_share),
        shape={
            "num_rl_steps": len(trace.rl_steps),
            "prompts_per_step": prompts,
            "group_size": max(1, round(found["group_size"])),
        },
        num_prompts=max(prompts, found["num_prompts"]) if found["num_prompts"] < 0.999 * seen_groups else None,
        num_workers=trace.manifest.num_workers,
        statistics=found,
    )


def _changed(model: LengthModel, changes: dict[str, float]) -> LengthModel:
    """The model with the options that were given, and a note that they were."""
    if not changes:
        return model
    note = "set by hand: " + ", ".join(f"{name} {value:g}" for name, value in changes.items())
    return model.with_changes(**changes).model_copy(update={"notes": (*model.notes, note)})


def _text(result: dict[str, Any]) -> str:
    lines = [
        f"wrote {result['path']}: {result['num_responses']} responses, {result['num_tokens']} tokens, "
        f"{result['num_rl_steps']} RL steps"
    ]
    lines += result["model"]["notes"]
    like = result["like"]
    lines += ["", f"{'':30s}{'generated':>12s}" + ("" if like is None else f"{'like':>12s}")]
    for name, value in result["statistics"].items():
        cells = _cell(value) + ("" if like is None else _cell(like[name]))
        lines.append(f"{name:30s}{cells}")
    return "\n".join(lines)


def _cell(value: float | None) -> str:
    if value is None:
        return f"{'-':>12s}"
    return f"{value:12.0f}" if abs(value) >= 100 or value == int(value) else f"{value:12.3g}"
