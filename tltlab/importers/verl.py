"""Rollout dumps of verl: what `trainer.rollout_data_dir` makes it write.

Follows `RayPPOTrainer._dump_generations` and `_log_rollout_data` of verl 0.8 (the same since 0.4 but for extra keys):
one file `<step>.jsonl` per training step, one object per response with `input` and `output` (text, decoded without
special tokens), `score` (sum of the token-level scores), `step`, and since 0.5 `gts`; then any extra reward keys.
"""

from __future__ import annotations

from pathlib import Path

from tltlab.errors import TraceError

from .responses import Imported, Response, has_lengths, responses_of_texts
from .rows import Row, rows_of
from .token_counts import TokenCounter


def read_verl(path: Path, tokens: TokenCounter) -> Imported:
    """Read a folder of `<step>.jsonl`, or one such file. Raises TraceError, ConfigError.

    Responses to the same input in one step are a group. Lengths are counted by `tokens` unless all rows of a file
    have fields for both (`traces.csv.PROMPT_TOKENS`, `RESPONSE_TOKENS`). An empty output counts as 1 token, its end.
    """
    files = verl_files(path) if path.is_dir() else [path]
    if not files:
        raise TraceError(f"{path}: no <step>.jsonl in it; a verl dump is the folder of trainer.rollout_data_dir")
    responses: list[Response] = []
    counted = False
    for file in files:
        rows = list(rows_of(file))
        for row in rows:
            row.require(["input"], "prompt")
            row.require(["output"], "response")
        steps = (row.whole("step") if row.find(["step"]) else _step_of_name(file, row) for row in rows)
        responses += responses_of_texts(rows, "input", "output", tokens, steps, lambda row: row.number("score"))
        counted = counted or not has_lengths(rows)
    return Imported(responses=responses, notes=(tokens.note,) if counted else (), exact=not counted)


def verl_files(folder: Path) -> list[Path]:
    """The `<step>.jsonl` of a folder in the order of their steps."""
    return sorted((f for f in folder.glob("*.jsonl") if f.stem.isdecimal()), key=lambda f: (int(f.stem), f.name))


def _step_of_name(file: Path, row: Row) -> int:
    if not file.stem.isdecimal():
        row.require(["step"], "step")
    return int(file.stem)
