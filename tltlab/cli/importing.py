"""`tltlab trace import`: a trace of another program's dump."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tltlab.console import Json, emit, progress
from tltlab.errors import ConfigError
from tltlab.importers.formats import FORMATS, import_dump
from tltlab.importers.token_counts import token_counter
from tltlab.traces.stream import count


def import_trace(
    dump: Annotated[
        Path,
        typer.Argument(help="A folder of verl or TRL, a vLLM result or request log, or a CSV with a length per row."),
    ],
    out: Annotated[Path, typer.Option(help="Folder to write; a trace there is replaced.")],
    form: Annotated[
        str | None, typer.Option("--format", help=f"{', '.join(FORMATS)}; without it the content decides.")
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="verl, trl: the model's folder, to count tokens of text (tokenizer.json).")
    ] = None,
    chars_per_token: Annotated[
        float | None, typer.Option(help="verl, trl: approximate token counts by so many characters each, such as 3.6.")
    ] = None,
    reward: Annotated[
        list[str] | None, typer.Option(help="trl: a column of rewards; given more than once they are added.")
    ] = None,
    column: Annotated[str | None, typer.Option(help="csv: the column of lengths, where it cannot be told.")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Rollout workers to write into the manifest.")] = None,
    group_size: Annotated[
        int | None,
        typer.Option(min=1, help="csv, vllm: samples per prompt, so many rows in a row; without prompt ids."),
    ] = None,
    max_response_tokens: Annotated[
        int | None, typer.Option(min=1, help="The run's cap: responses of this length count as cut.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Make a trace of a rollout dump of verl or TRL, of vLLM's requests, or of a CSV of response lengths.

    verl: the folder of trainer.rollout_data_dir. TRL: the output folder of a GRPOTrainer with log_completions.
    vLLM: `vllm bench serve --save-result --save-detailed`, or one JSON object per request. What had to be assumed is
    printed and written to the manifest.

    Example: tltlab trace import rollout_data --out my-trace --tokenizer Qwen2.5-7B --max-response-tokens 16384

    Example: tltlab trace import lengths.csv --out my-trace --workers 8 --group-size 16
    """
    if form is not None and form not in FORMATS:
        raise ConfigError(f"--format is {form!r}; there are: {', '.join(FORMATS)}")
    given = tokenizer is not None or chars_per_token is not None
    trace = import_dump(
        dump,
        form=form,
        tokens=token_counter(tokenizer, chars_per_token) if given else None,
        workers=workers,
        group_size=group_size,
        max_response_tokens=max_response_tokens,
        column=column,
        reward_columns=tuple(reward or ()),
    )
    path = trace.write(out)
    for note in filter(None, (trace.manifest.notes or "").split("; ")):
        progress(f"assumed: {note}")
    counts = count(trace)
    text = "{num_responses} responses, {num_tokens} tokens, {num_rl_steps} RL steps".format(**counts)
    tables = ", ".join(counts["tables"])
    emit(counts | {"path": str(path)}, as_json=as_json, text=f"wrote {path}: {text}; tables: {tables}")
