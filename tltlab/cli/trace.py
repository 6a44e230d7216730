"""`tltlab trace ...`: look at, check, repair, import, generate and annotate traces."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import pandas as pd
import typer

from tltlab.console import command_group, emit, progress, table, table_text
from tltlab.errors import ConfigError
from tltlab.importers.rows import Reading
from tltlab.importers.sources import Format, imported, read, read_lengths
from tltlab.lengths.fit import fit_lengths, shape_of
from tltlab.lengths.generate import ToolUse, generate_steps, manifest_of
from tltlab.lengths.model import LengthModel, of_regime
from tltlab.options import check, command, option
from tltlab.planning.beliefs import judge
from tltlab.records import Json, frozen
from tltlab.traces.metrics import count
from tltlab.traces.metrics import describe as describe_trace
from tltlab.traces.recorder import Recorder
from tltlab.traces.recorder import repair as repair_recording
from tltlab.traces.split import split_at_gaps
from tltlab.traces.storage import frame_to_arrow

from .annotate import annotate_trace

app = command_group(help="Describe, validate, repair, import, generate and annotate traces.")

MODEL_FILE = "lengths.json"
TraceArgument = Annotated[Path, typer.Argument(metavar="TRACE|RUN", help="A trace folder, a run, or a CSV of lengths.")]


@app.command()
def describe(trace: TraceArgument) -> None:
    """Print what is in a trace: manifest, tables, lengths and times of each RL step, and how lengths are predicted.

    Example: tltlab trace describe traces/tiny
    """
    source = read(trace)
    result = describe_trace(source) | {"lengths_known": judge(source)}
    emit(result, _describe_text(result))


@app.command()
def validate(trace: TraceArgument) -> None:
    """Check a trace against the format; exit code 2 and the first fault if it breaks it.

    Example: tltlab trace validate traces/tiny
    """
    counts = count(read(trace))
    emit(counts | {"valid": True}, f"valid: {_counts_text(counts)}")


@app.command()
@command
def repair(
    path: Annotated[
        Path, typer.Argument(metavar="TRACE|RUN", help="A trace that is damaged or whose recording was interrupted.")
    ],
    out: Path | None = option("Write the trace there and leave PATH as it is."),
) -> None:
    """Finish an interrupted recording, and leave out what is damaged; a trace that is whole stays unchanged.

    Commands read a recording as it is, of a run that was killed or continues; this puts an end to it. A damaged file
    goes with the rows that are not valid without it. What was lost is printed and written to the manifest.

    Example: tltlab trace repair runs/demo/trace
    """
    repaired = repair_recording(path, out)
    counts, notes = count(repaired), repaired.manifest.notes
    text = f"{repaired.path}: valid: {_counts_text(counts)}" + (f"\n{notes}" if notes else "")
    emit(counts | {"path": str(repaired.path), "notes": notes}, text)


@app.command("import")
@command
def import_trace(
    dump: Annotated[
        Path,
        typer.Argument(help="Rollouts, requests or lengths, of any program, or a training log; packed too."),
    ],
    out: Annotated[Path, typer.Option(help="Folder to write; a trace there is replaced.")],
    reading: Reading,
    form: Annotated[Format | None, typer.Option("--format", help="[default: by the content]")] = None,
    workers: int | None = option("Rollout workers to write into the manifest.", min=1),
    split: int | None = option("Split a recording of one RL step into so many, at its longest idle gaps.", min=2),
    split_gap: float | None = option("Split it at every idle gap of so many seconds.", min=0),
) -> None:
    """Make a trace of rollouts, of requests, of a table of response lengths, or of a training log.

    verl: the folder of trainer.rollout_data_dir. TRL: the output folder of a GRPOTrainer with log_completions. Others:
    JSON Lines, JSON, CSV or Parquet with a response, or a list of them, in each record. metrics: the console log of
    verl, TRL, NeMo-RL, SkyRL, slime, miles, OpenRLHF, ROLL, AReaL or prime-rl, a record a line, or their metrics in
    JSON Lines, CSV, TSV or TensorBoard. What was read and assumed is printed and written to the manifest.

    Example: tltlab trace import rollout_data --out my-trace --tokenizer Qwen2.5-7B --cap 16384

    Example: tltlab trace import lengths.csv --out my-trace --workers 8 --group-size 16

    Example: tltlab trace import recording --out my-trace --split 4
    """
    if split is None and split_gap is None:
        trace = imported(dump, reading, form=form, workers=workers).trace
    else:
        trace = split_at_gaps(read_lengths(dump, reading, form).trace, split, split_gap or 0.0)
    path = trace.write(out)
    for note in filter(None, (trace.manifest.notes or "").split("; ")):
        progress(f"assumed: {note}")
    counts = count(trace)
    emit(counts | {"path": str(path)}, f"wrote {path}: {_counts_text(counts)}")


app.command("annotate")(annotate_trace)


_REGIMES = (
    "base-rl (the prompt does not decide length; the default), reasoning (the prompt decides), production (a reasoning "
    "model in production), or long-tail (published summaries of TLT's rollouts)."
)
_LIKE = "Fit lengths and shape to this; JSON: a trace's lengths.json."
_OF_THE_MODEL = {
    "median": "median", "sigma": "sigma", "prompt_share": "prompt_share", "cap": "max_response_tokens",
    "prompt_memory": "prompt_memory", "median_growth": "median_growth", "tail_growth": "tail_growth",
    "prompt_tokens": "prompt_tokens_median",
}  # fmt: skip
"""Field of `LengthModel` that an option of `generate` replaces."""


@frozen
class GenerateConfig:
    """Options of `tltlab trace generate`; None is what the regime or `like` has."""

    regime: str | None = option(_REGIMES)
    like: str | None = option(_LIKE, metavar="TRACE|CSV|JSON")
    rl_steps: int | None = option("RL steps (4, or those of --like).")
    prompts: int | None = option("Prompts per RL step (64, or those of --like).")
    group_size: int | None = option("Samples per prompt (8, or those of --like).")
    num_prompts: int | None = option("Prompts in all, which come back in each epoch; without it all are new.")
    cap: int | None = option("Longest response in tokens; longer ones are cut.")
    median: float | None = option("Median length in tokens before the cut; scales all.")
    sigma: float | None = option("Log-normal lengths of this standard deviation of log length.")
    prompt_share: float | None = option("Share of the variance of log length that the prompt explains.")
    prompt_memory: float | None = option("How much a prompt's share correlates from one epoch to the next, 0 to 1.")
    median_growth: float | None = option("Growth of the median per RL step: 0.02 is 2 percent.")
    tail_growth: float | None = option("Growth per RL step of log length's distance above the median; cuts more.")
    prompt_tokens: float | None = option("Median tokens of a prompt.")
    workers: int | None = option("Rollout workers to write into the manifest.")
    turns: float | None = option("Mean turns of a response, with tools between them.")
    tool_seconds: float = option("With --turns: median seconds of a tool.", 2.0)
    observation_tokens: float = option("With --turns: median tokens that a tool returns.", 200.0)
    seed: int = option("Same seed, same trace.", 0)

    def __post_init__(self) -> None:
        check(self)

    def source(self) -> _Source:
        """Return what is drawn from, the options applied."""
        source = _source(self.regime, self.like, self.prompt_share)
        if self.cap is not None and self.cap > source.model.max_response_tokens and self.like is not None:
            progress(f"lengths above {source.model.max_response_tokens} tokens are extrapolated")
        values = {field: getattr(self, name) for name, field in _OF_THE_MODEL.items()}
        changes = {field: value for field, value in values.items() if value is not None}
        sizes = {"num_rl_steps": self.rl_steps, "prompts_per_step": self.prompts, "group_size": self.group_size}
        return replace(
            source,
            model=_changed(source.model, changes),
            shape=source.shape | {name: value for name, value in sizes.items() if value is not None},
            num_prompts=source.num_prompts if self.num_prompts is None else self.num_prompts,
            num_workers=source.num_workers if self.workers is None else self.workers,
        )


@app.command()
@command
def generate(
    out: Annotated[Path, typer.Option(help="Folder to write; it must not exist.")],
    config: GenerateConfig,
) -> None:
    """Draw a synthetic trace of response lengths, from a regime or fitted to a trace.

    The model that was drawn from is written beside the tables as lengths.json.

    Example: tltlab trace generate --regime reasoning --rl-steps 4 --prompts 64 --group-size 8 --out my-trace
    """
    if out.exists() or out.is_symlink():
        raise ConfigError(f"{out} exists; name a new folder, or remove it first")
    tools, seed = None, config.seed
    if config.turns is not None:
        tools = ToolUse(turns=config.turns, tool_s=config.tool_seconds, observation_tokens=config.observation_tokens)
    source = config.source()
    model, shape = source.model, source.shape
    steps = generate_steps(model, **shape, num_prompts=source.num_prompts, seed=seed)
    manifest = manifest_of(
        model, group_size=shape["group_size"], num_workers=source.num_workers, seed=seed, name=out.name
    )
    num_tokens = 0
    with Recorder(out, manifest) as recorder:
        for tables in steps:
            written = tables if tools is None else tools.cut(tables, seed)
            for name, frame in zip(("workload", "outcomes"), written, strict=True):
                recorder.append(name, frame_to_arrow(name, frame))
            recorder.flush(wait=False)
            num_tokens += int(tables[1]["response_tokens"].sum())
    model.write(out / MODEL_FILE)
    result = {
        "path": str(out),
        "num_rl_steps": shape["num_rl_steps"],
        "num_responses": math.prod(shape.values()),
        "num_tokens": num_tokens,
        "model": model.model_dump(mode="json"),
    }
    lines = [
        f"wrote {out}: {result['num_responses']} responses, {num_tokens} tokens, {shape['num_rl_steps']} RL steps",
        *model.notes, f"next: tltlab trace describe {out}",
    ]  # fmt: skip
    emit(result, "\n".join(lines))


def _counts_text(counts: Json) -> str:
    return (
        f"{counts['num_responses']} responses, {counts['num_tokens']} tokens, {counts['num_rl_steps']} RL steps; "
        f"tables: {', '.join(counts['tables'])}"
    )


def _describe_text(result: Json) -> str:
    said = {name: value for name, value in result["manifest"].items() if value is not None}
    fields = [(name, ", ".join(value) if isinstance(value, dict) else value) for name, value in said.items()]
    tables = ", ".join(f"{name} ({rows} rows)" for name, rows in result["tables"].items())
    columns = (
        "RL step: {rl_step}; responses: {num_responses}; tokens: {num_tokens}; cut: {num_cut}; aborted: {num_aborted}; "
        "p50: {p50_tokens:.0f}; p95: {p95_tokens:.0f}; max: {max_tokens:.0f}; prompt share: {prompt_share:.2f}; "
        "rollout s: {rollout_s:.2f}; bubble: {bubble_fraction:.1%}; tail: {tail_fraction:.1%}; "
        "accept len: {mean_accept_length:.2f}"
    )
    steps = table_text(pd.DataFrame(result["rl_steps"]), columns, left=0, unknown="-")
    known = [
        (name, f"{figures['coverage']:.0%}", f"{figures['median_error_tokens']:.0f}")
        for name, figures in result["lengths_known"].items()
    ]
    described = table([], [*fields, ("tables", tables)], left=2)
    predicted = table(
        ["lengths predicted once half have ended, by", "in the 10-90% range", "median error, tokens"], known
    )
    return f"{described}\n\n{steps}\n\n{predicted}"


@frozen
class _Source:
    model: LengthModel
    shape: dict[str, int]
    num_prompts: int | None = None
    num_workers: int | None = None


def _source(regime: str | None, like: str | None, prompt_share: float | None) -> _Source:
    shape = {"num_rl_steps": 4, "prompts_per_step": 64, "group_size": 8}
    if like is None:
        return _Source(model=of_regime(regime or "base-rl"), shape=shape)
    if regime is not None:
        raise ConfigError(f"got --regime {regime} and --like {like}; give one of them")
    if Path(like).suffix == ".json":
        return _Source(model=LengthModel.load(like), shape=shape)
    trace = read(like)
    sizes, num_prompts = shape_of(trace)
    model, workers = fit_lengths(trace, prompt_share=prompt_share), trace.manifest.num_workers
    return _Source(model=model, shape=sizes, num_prompts=num_prompts, num_workers=workers)


def _changed(model: LengthModel, changes: dict[str, float]) -> LengthModel:
    """The model with the options that were given, and a note that they were."""
    if not changes:
        return model
    note = "set by hand: " + ", ".join(f"{name} {value:g}" for name, value in changes.items())
    return model.with_changes(**changes).model_copy(update={"notes": (*model.notes, note)})
