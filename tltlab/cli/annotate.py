"""`tltlab trace annotate`: add to a trace what drafters would have had accepted at every position of its text."""

import importlib
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from pydantic import Field, TypeAdapter

from tltlab.calibration.annotate import (
    AcceptedLengths,
    Annotator,
    DraftedBy,
    ReplayedDrafter,
    annotate,
    merged,
)
from tltlab.config import faults_in
from tltlab.console import emit, table
from tltlab.drafters.specs import NETWORK, Drafters, DrafterTraits, ModelFreeSpec, OwnDrafter
from tltlab.errors import ConfigError, InputError
from tltlab.importers.sources import read
from tltlab.options import command, option
from tltlab.own import parse_call
from tltlab.records import Json
from tltlab.strategy import NO_SPECULATION
from tltlab.traces.schema import Contents
from tltlab.traces.storage import TableWriter, is_unfinished, new_trace_folder, table_writer, write_tables
from tltlab.traces.trace import Trace

FILE = "acceptance.parquet"
_DEPTHS = (1, 2, 4, 8, 16)
_OLDEST = 2**31 - 1
_LEARNED = ("learned", "draft_model", "eagle", "eagle3")
_TEXT_SPECS: TypeAdapter[ModelFreeSpec] = TypeAdapter(Annotated[ModelFreeSpec, Field(discriminator="kind")])


@command
def annotate_trace(
    trace: Annotated[Path, typer.Argument(metavar="TRACE|RUN", help="A trace with the tokens of its responses.")],
    drafter: Annotated[
        list[str],
        typer.Option(
            metavar="[NAME=]SPEC",
            help='ngram, suffix, "suffix(window=16)", draft_model:FOLDER, eagle:FOLDER, or '
            "learned:FOLDER (what it holds), or module:Class; @N at the end: it is N RL steps old. Repeatable.",
        ),
    ],
    max_depth: int = option("Tokens drafted at each position.", 16),
    out: Path | None = option("Write a trace there and leave TRACE as it is."),
    model: Path | None = option("eagle: the folder of the model that wrote the text."),
) -> None:
    """Replay recorded text under drafters and write acceptance.parquet: tokens kept of a draft at every position.

    Rows of other drafters stay, those of the same name and age are replaced. Prints the accepted length that a run
    would have at several depths.

    Example: tltlab trace annotate traces/tiny --drafter ngram --out annotated
    """
    source = read(trace)
    if not source.num_rows("tokens"):
        raise InputError(f"{trace}: no tokens.parquet in it, and drafters are replayed over recorded tokens")
    if source.path is None or is_unfinished(source.path):
        if out is None:
            raise ConfigError(f"{trace} is no finished trace: set the place of the annotated one with --out")
        source = read(source.write(out))
    annotators: dict[DraftedBy, Annotator] = {}
    drafters = source.drafters
    for text in drafter:
        named, annotator, traits = parse_drafter(text, model)
        if named.drafter in drafters and drafters[named.drafter] != traits:
            raise ConfigError(f"--drafter {text}: {named.drafter!r} is a drafter of another kind, name it NAME=SPEC")
        drafters = Drafters(traits={**drafters, named.drafter: traits})
        if named in annotators:
            raise ConfigError(f"--drafter {named.drafter!r} of age {named.age} is given twice; name one NAME=SPEC")
        annotators[named] = annotator
    depths = (*(depth for depth in _DEPTHS if depth < max_depth), max_depth)
    lengths = AcceptedLengths(depths)
    path = out or source.path
    assert path is not None
    num_positions = 0
    with _acceptance_file(source, path, drafters.own) as writer:
        for step, rows in annotate(source, annotators, max_depth):
            # Replacing the table checks it as readers of the trace will.
            table = step.replace(acceptance=merged(step.arrow("acceptance"), rows)).arrow("acceptance")
            if table is not None and len(table):
                writer.append(table)
            lengths.add(rows)
            num_positions += sum(map(len, rows["accept_if_drafted"].to_pylist())) // len(annotators)
    result = {
        "path": str(path),
        "max_depth": max_depth,
        "num_positions": num_positions,
        "drafters": lengths.result(),
    }
    emit(result, _text(result))


def parse_drafter(text: str, target: Path | None = None) -> tuple[DraftedBy, Annotator, DrafterTraits]:
    """The name, age, annotator and traits of one `[NAME=]SPEC[@AGE]`. Raises ConfigError.

    Without a name a model-free drafter has that of its kind, a user's own that of its module, a learned one "learned".
    """
    parts = re.fullmatch(r"(?:([\w.-]+)=)?(.*?)(?:@(\d+))?", text, re.DOTALL)
    assert parts is not None
    name, spec_text, age = parts[1], parts[2], int(parts[3] or 0)
    if name == NO_SPECULATION.drafter:
        raise ConfigError(f"--drafter {text}: {name!r} stands for no speculation; give the drafter another name")
    if age > _OLDEST:
        raise ConfigError(f"--drafter {text}: an age of {age} RL steps does not fit the trace, at most {_OLDEST} does")
    kind, _, folder = spec_text.partition(":")
    if kind in _LEARNED:
        return DraftedBy(name or "learned", age), _learned(kind, folder, target), NETWORK
    spec = _model_free(spec_text)
    named = spec.module if isinstance(spec, OwnDrafter) else spec.kind
    return DraftedBy(name or named, age), ReplayedDrafter(spec.make), spec.traits


def _model_free(text: str) -> ModelFreeSpec:
    """A drafter without a network from `KIND(key=value,...)`, or a user's own from `module:Class`."""
    if (own := OwnDrafter.parse(text)) is not None:
        own.check()
        return own
    kind, settings = parse_call(text)
    with faults_in(f"--drafter {text}"):
        return _TEXT_SPECS.validate_python({"kind": kind, **settings})


def _learned(method: str, folder: str, target: Path | None) -> Annotator:
    # By name: the core does not import the runtime.
    runtime = importlib.import_module("tltlab.runtime.drafter.offline.annotate")
    annotator: Annotator = runtime.learned_annotator(method, folder, None if target is None else str(target))
    return annotator


@contextmanager
def _acceptance_file(source: Trace, path: Path, drafters: Mapping[str, DrafterTraits]) -> Iterator[TableWriter]:
    """A writer for acceptance.parquet of the trace at `path`, where the trace is as a whole once the block ended well.

    The manifest describes `drafters` with other than the standard names.
    """
    described = source.manifest.model_copy(update={"drafters": {**source.manifest.drafters, **drafters}})
    with new_trace_folder(path) as folder:
        parts = write_tables(folder, {name: table for name, table in source.tables.items() if name != "acceptance"})
        with table_writer(folder / FILE, "acceptance", 0) as writer:
            yield writer
        Contents(manifest=described, parts=parts | {FILE: writer.sha256}).write(folder)


def _text(result: Json) -> str:
    lines = [f"wrote {result['path']}: {result['num_positions']} positions, drafts of {result['max_depth']} tokens"]
    lines += ["", "tokens per draft, bonus included, by depth"]
    depths = list(result["drafters"][0]["accepted_length"]) if result["drafters"] else []
    rows = [
        (row["drafter"], row["drafter_age"],
         *("-" if v is None else f"{v:.2f}" for v in row["accepted_length"].values()))
        for row in result["drafters"]
    ]  # fmt: skip
    lines.append(table(["drafter", "age", *depths], rows))
    return "\n".join(lines)
