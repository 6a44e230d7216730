"""The part of a report that shows a few responses: their text, and which of it was drafted by whom and kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
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
Decode = Callable[[Sequence[int]], str]
_SHOWN = 400
"""Tokens that are shown of a response."""


def responses_part(trace: Trace, run: Path, recipe: Any) -> Part:
    """The longest, the best and the worst rewarded response of the last RL step that drafted.

    Their text where the model's tokenizer.json lies in RUN/model or where the recipe's model is, else their token ids.
    """
    if not trace.num_rows("tokens"):
        return Absent(title=TITLE, reason="the trace has no tokens.parquet, so the texts are not known")
    last = trace.select([_step(trace)])
    tokens = last.tokens
    if tokens is None or tokens.empty:
        return Absent(title=TITLE, reason="tokens.parquet has none of the last RL step")
    rows = tokens.merge(last.outcomes, on=list(KEY), how="inner", sort=False)
    try:
        drafts, notes = recorded_drafts(last)
    except TltlabError as error:
        drafts, notes = recorded_drafts(last.replace(iterations=None))[0], [str(error)]
    names = {str(name): at % 4 + 1 for at, name in enumerate(sorted(drafts["drafter"].dropna().unique()))}
    decode = _decoder(run, recipe)
    lead = (
        f"The first {_SHOWN} tokens of responses of RL step {last.rl_steps[0]}; token ids are shown where the model's "
        "tokenizer is not available. Marked text was drafted and kept. Point at it to see how much of a draft was kept."
        + ("" if names else " None is known.")
    )
    blocks: list[Block] = [Paragraph(text=" ".join([lead, *(f"Note: {note}." for note in notes)]))]
    if names:
        legend = tuple(Piece(text=name, drafter=colour) for name, colour in names.items())
        blocks.append(Transcript(label="Drafters", pieces=legend))
    places: dict[str, Any] = {"The longest": rows["response_tokens"].idxmax()}
    if rows["reward"].nunique() > 1:
        places |= {"The highest reward": rows["reward"].idxmax(), "The lowest reward": rows["reward"].idxmin()}
    for label, at in places.items():
        row = rows.loc[at].to_dict()
        of_row = drafts[(drafts[list(KEY)] == [row[name] for name in KEY]).all(axis=1)]
        reward, num = number(row["reward"], ".3g"), f"{row['response_tokens']:,}"
        facts = f"reward {reward}, {num} tokens, ended: {row['finish_reason']}"
        pieces = _pieces(row["token_ids"].tolist()[:_SHOWN], of_row, names, decode)
        prompt = decode(row["prompt_token_ids"].tolist())
        blocks.append(Transcript(label=f"{label}: {facts}", prompt=prompt, pieces=pieces))
    return Section(title=TITLE, blocks=tuple(blocks))


def _step(trace: Trace) -> int:
    """The last RL step in which something was drafted, else the last one."""
    iterations = trace.iterations
    if iterations is None or not (iterations["num_drafted"] > 0).any():
        return trace.rl_steps[-1]
    return int(iterations.loc[iterations["num_drafted"] > 0, "rl_step"].max())


def _decoder(run: Path, recipe: Any) -> Decode:
    """Function that decodes token ids: the model's tokenizer if available, else the ids themselves."""
    model = recipe.get("model") if isinstance(recipe, dict) else None
    for folder in (run / "model", *([Path(model)] if isinstance(model, str) else [])):
        with suppress(ConfigError):
            return FolderTokenizer(folder).decode
    return lambda ids: " ".join(map(str, ids)) + " "


def _pieces(ids: list[int], drafts: pd.DataFrame, colours: Mapping[str, int], decode: Decode) -> tuple[Piece, ...]:
    """The response in pieces of one origin each."""
    origin = np.zeros(len(ids), np.int64)  # 0: the model's own; n + 1: kept of draft n
    rows: list[dict[str, Any]] = drafts.to_dict("records")  # type: ignore[assignment]
    for at, row in enumerate(rows):
        origin[int(row["generated_tokens"]) :][: int(row["accepted"])] = at + 1
    pieces = []
    for begin, end in pairwise([0, *(np.flatnonzero(np.diff(origin)) + 1).tolist(), len(ids)]):
        # The text of a token depends on the tokens before it: spaces, and letters that several tokens make.
        before, through = decode(ids[:begin]).rstrip("\ufffd") if begin else "", decode(ids[:end])
        text = through[len(before) :] if through.startswith(before) else decode(ids[begin:end])
        if not origin[begin]:
            pieces.append(Piece(text=text))
            continue
        row = rows[int(origin[begin]) - 1]
        title = f"{row['drafter']}: {row['accepted']} of up to {row['reach']} drafted tokens were kept"
        pieces.append(Piece(text=text, drafter=colours[str(row["drafter"])], title=title))
    return tuple(pieces)
