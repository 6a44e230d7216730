"""The part of a report that shows a few responses: their text, and which of it was drafted by whom and kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from tltlab.errors import ConfigError, TltlabError
from tltlab.importers.token_counts import FolderTokenizer
from tltlab.traces.drafts import recorded_drafts
from tltlab.traces.schema import KEY
from tltlab.traces.trace import Trace

from .page import Absent, Block, Paragraph, Part, Piece, Section, Transcript, number

TITLE = "A few responses"
_HEAD, _TAIL = 400, 120
"""Tokens that are shown of a response's beginning and end, where it has more."""
_MOST_ITERATIONS = 200_000


def responses_part(trace: Trace, run: Path, recipe: Any) -> Part:
    """The longest, the median, the best and the worst rewarded response of the last RL step that drafted.

    Their text where the model's tokenizer.json lies in RUN/model or where the recipe's model is, else their token ids.
    Text of refused drafts is not recorded, so only their number is told.
    """
    if not trace.num_rows("tokens"):
        return Absent(title=TITLE, reason="the trace has no tokens.parquet, so what was said is not known")
    last = trace.select([_step(trace)])
    tokens = last.tokens
    if tokens is None or tokens.empty:
        return Absent(title=TITLE, reason="tokens.parquet has none of the last RL step")
    rows = tokens.merge(last.outcomes, on=list(KEY), how="inner", sort=False)
    drafts, notes = _drafts(last)
    names = {str(name): at for at, name in enumerate(sorted(drafts["drafter"].dropna().unique()))}
    decode, decoding = _decoder(run, recipe)
    remarks = [*notes, *([] if names or notes else ["nothing was drafted in this RL step"]), decoding]
    blocks: list[Block] = [
        Paragraph(
            text=f"Of RL step {last.rl_steps[0]}. Marked text was drafted and kept, in a colour for each drafter; the "
            "rest is the model's own, underlined where nothing of a draft was kept. Point at it to see how much of a "
            f"draft was kept. {'; '.join(remarks).capitalize()}."
        )
    ]
    for label, row in _examples(rows):
        of_row = drafts[(drafts[list(KEY)] == [row[name] for name in KEY]).all(axis=1)]
        pieces = _pieces(row["token_ids"].tolist(), of_row, names, decode)
        facts = (
            f"reward {number(row['reward'], '.3g')}", f"{row['response_tokens']:,} tokens",
            f"ended: {row['finish_reason']}",
            f"{int(of_row['accepted'].sum()):,} of them drafted, {len(of_row):,} drafts"
            if len(of_row) else "no drafts known",
        )  # fmt: skip
        prompt = decode(row["prompt_token_ids"].tolist())
        blocks.append(Transcript(label=f"{label}: {', '.join(facts)}", prompt=prompt, pieces=pieces))
    if names:
        legend = tuple(Piece(text=name, drafter=at % 4 + 1) for name, at in names.items())
        blocks.insert(1, Transcript(label="Drafters", pieces=legend))
    return Section(title=TITLE, blocks=tuple(blocks))


def _step(trace: Trace) -> int:
    """The last RL step in which something was drafted, else the last one."""
    iterations = trace.iterations
    if iterations is None or not (iterations["num_drafted"] > 0).any():
        return trace.rl_steps[-1]
    return int(iterations.loc[iterations["num_drafted"] > 0, "rl_step"].max())


def _drafts(step: Trace) -> tuple[pd.DataFrame, list[str]]:
    if step.num_rows("iterations") > _MOST_ITERATIONS:
        return recorded_drafts(step.replace(iterations=None))[0], ["drafts are not told apart in an RL step so long"]
    try:
        return recorded_drafts(step)
    except TltlabError as error:
        return recorded_drafts(step.replace(iterations=None))[0], [str(error)]


def _examples(rows: pd.DataFrame) -> list[tuple[str, Mapping[str, Any]]]:
    """At most four rows, each once, with what it is."""
    by_length = rows["response_tokens"].sort_values(kind="stable").index
    places = {"The longest": by_length[-1], "Of median length": by_length[(len(rows) - 1) // 2]}
    if rows["reward"].nunique() > 1:
        places |= {"The highest reward": rows["reward"].idxmax(), "The lowest reward": rows["reward"].idxmin()}
    labels: dict[Any, str] = {}
    for label, at in places.items():
        labels[at] = f"{labels[at]}, {label.lower()}" if at in labels else label
    return [(label, rows.loc[at].to_dict()) for at, label in labels.items()]


def _decoder(run: Path, recipe: Any) -> tuple[Callable[[Sequence[int]], str], str]:
    """What makes text of token ids, and a word on it."""
    model = recipe.get("model") if isinstance(recipe, dict) else None
    for folder in (run / "model", *([Path(model)] if isinstance(model, str) else [])):
        try:
            return FolderTokenizer(folder).decode, "special tokens are shown"
        except ConfigError as error:
            why = str(error) if (folder / "tokenizer.json").is_file() else ""
    note = f"token ids are shown, for there is no tokenizer here {why}".strip()
    return lambda ids: " ".join(map(str, ids)) + " ", note


def _pieces(
    ids: list[int], drafts: pd.DataFrame, drafters: Mapping[str, int], decode: Callable[[Sequence[int]], str]
) -> tuple[Piece, ...]:
    """The response in pieces of one origin each; of a long one the beginning and the end."""
    origin = np.zeros(len(ids), np.int64)  # 0: the model's own; n + 1: kept of draft n
    refused: dict[int, str] = {}
    rows: list[dict[str, Any]] = drafts.to_dict("records")  # type: ignore[assignment]
    for at, row in enumerate(rows):
        begin, accepted = int(row["generated_tokens"]), int(row["accepted"])
        origin[begin : begin + accepted] = at + 1
        if not accepted and begin < len(ids):
            refused[begin] = f"{row['drafter']} drafted up to {row['reach']}, none was kept"
    gap = range(_HEAD, max(_HEAD, len(ids) - _TAIL))
    cuts = {0, len(ids), *(np.flatnonzero(np.diff(origin)) + 1).tolist(), *refused, *(at + 1 for at in refused)}
    pieces: list[Piece] = []
    for begin, end in pairwise(sorted(cuts | ({gap.start, gap.stop} if gap else set()))):
        if begin in gap:
            if begin == gap.start:
                pieces.append(Piece(text=f" [{len(gap):,} tokens are left out] "))
            continue
        first = gap.stop if gap and begin >= gap.stop else 0
        # What a token says depends on those before it: spaces, and letters that several of them make.
        before, through = decode(ids[first:begin]).rstrip("\ufffd"), decode(ids[first:end])
        text = through[len(before) :] if through.startswith(before) else decode(ids[begin:end])
        if not origin[begin]:
            pieces.append(Piece(text=text, title=refused.get(begin, "")))
            continue
        row = rows[int(origin[begin]) - 1]
        title = f"{row['drafter']}: {row['accepted']} of up to {row['reach']} drafted tokens were kept"
        pieces.append(Piece(text=text, drafter=drafters[str(row["drafter"])] % 4 + 1, title=title))
    return tuple(pieces)
