"""Dumps of texts: the rollouts that verl's `trainer.rollout_data_dir` has, and completions of TRL's GRPOTrainer.

verl: follows `RayPPOTrainer._dump_generations` and `_log_rollout_data` of verl 0.8 (the same since 0.4 but for extra
keys): one file `<step>.jsonl` per training step, one object per response with `input` and `output` (text, decoded
without special tokens), `score` (sum of the token-level scores), `step`, and since 0.5 `gts`; then extra reward keys.

TRL: follows `GRPOTrainer.log` of TRL 1.10 with `log_completions=True`:
`OUTPUT_DIR/completions/completions_<step>.parquet` with the columns `step`, `prompt`, `completion` (text), one column
per reward function, then columns that a reward function logged itself, and `advantage`; and the same table as the run's
loggers save it in JSON. TRL logs the last generation batch at every logging step, so with several updates per batch it
writes the same completions again; those are read once.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from functools import partial
from itertools import groupby, repeat
from pathlib import Path

from tltlab.errors import TraceError

from .length_table import PROMPT_TOKENS, RESPONSE_TOKENS
from .responses import Dump, ImportedResponse, has_lengths, responses_of_texts
from .rows import Row, rows_of
from .token_counts import TokenCounter

_STEP_OF_NAME = re.compile(r"completions_(\d+)")
_NO_REWARD = {"step", "advantage", *PROMPT_TOKENS, *RESPONSE_TOKENS}


def read_verl(path: Path, tokens: TokenCounter) -> Dump:
    """Read a folder of `<step>.jsonl`, or one such file. Raises TraceError, ConfigError.

    Responses to the same input in one step are a group. Lengths are counted by `tokens` unless all rows of a file
    have fields for both (`length_table.PROMPT_TOKENS`, `RESPONSE_TOKENS`). An empty output counts as 1 token, its end.
    """
    files = verl_files(path) if path.is_dir() else [path]
    if not files:
        raise TraceError(f"{path}: no <step>.jsonl in it; a verl dump is the folder of trainer.rollout_data_dir")
    responses: list[ImportedResponse] = []
    exact = True
    for file in files:
        rows = list(rows_of(file))
        for row in rows:
            row.require(["input"], "prompt")
            row.require(["output"], "response")
        steps = (_step(row, int(file.stem) if file.stem.isdecimal() else None) for row in rows)
        responses += responses_of_texts(rows, "input", "output", tokens, steps, lambda row: row.number("score"))
        exact = exact and has_lengths(rows)
    return Dump(responses=responses, notes=() if exact else (tokens.note,), exact=exact)


def verl_files(folder: Path) -> list[Path]:
    """The `<step>.jsonl` of a folder in the order of their steps."""
    return sorted((f for f in folder.glob("*.jsonl") if f.stem.isdecimal()), key=lambda f: (int(f.stem), f.name))


def _step(row: Row, step_of_file: int | None) -> int:
    """The row's own step, else that in the name of its file."""
    if row.find(["step"]) is None and step_of_file is not None:
        return step_of_file
    return row.whole(row.require(["step"], "step"))


def read_trl(path: Path, tokens: TokenCounter, reward_columns: Sequence[str] = ()) -> Dump:
    """Read an output folder, its `completions` folder, or one file of completions. Raises TraceError, ConfigError.

    The reward is the sum of `reward_columns`; by default of the column `reward`, else of all columns of numbers that
    are not known as something else. Unknown (null or NaN) addends are left out. Lengths are as in `read_verl`.
    """
    files = trl_files(path) if path.is_dir() else [path]
    if not files:
        raise TraceError(f"{path}: no completions_<step>.parquet in it or in its folder completions")
    responses: list[ImportedResponse] = []
    names = tuple(reward_columns)
    exact, num_repeats, last = True, 0, b""
    for file in files:
        name = _STEP_OF_NAME.fullmatch(file.stem)
        for rl_step, group in groupby(rows_of(file), partial(_step, step_of_file=int(name[1]) if name else None)):
            rows = list(group)
            for row in rows:
                row.require(["prompt"], "prompt")
                row.require(["completion"], "completion")
            names = names or _reward_columns(rows)
            if (content := _digest(rows)) == last:
                num_repeats += 1
                continue
            last = content
            exact = exact and has_lengths(rows)
            responses += responses_of_texts(
                rows, "prompt", "completion", tokens, repeat(rl_step), partial(_reward, names=names)
            )
    notes = [] if exact else [tokens.note]
    if names:
        notes.append(f"reward: {' + '.join(names)}")
    if num_repeats:
        notes.append(f"{num_repeats} logged steps repeat the completions of the step before and are left out")
    return Dump(responses=responses, notes=tuple(notes), exact=exact)


def trl_files(folder: Path) -> list[Path]:
    """The `completions_<step>.parquet` of a folder, or of `completions` in it, in the order of their steps."""
    files = list(folder.glob("completions_*.parquet")) or list(folder.glob("completions/completions_*.parquet"))
    return sorted(
        (f for f in files if _STEP_OF_NAME.fullmatch(f.stem)), key=lambda f: (int(f.stem.rpartition("_")[2]), f.name)
    )


def _reward_columns(rows: Sequence[Row]) -> tuple[str, ...]:
    columns = rows[0].fields
    if "reward" in columns:
        return ("reward",)
    # A reward function may not apply to the first rows, which then hold null.
    number = {
        n for row in rows for n, v in row.fields.items() if isinstance(v, int | float) and not isinstance(v, bool)
    }
    return tuple(name for name in columns if name in number and name not in _NO_REWARD)


def _reward(row: Row, names: Sequence[str]) -> float | None:
    for name in names:
        if name not in row.fields:
            row.require([name], "reward")
    rewards = [value for name in names if (value := row.number(name)) is not None]
    return sum(rewards) if rewards else None


def _digest(rows: Sequence[Row]) -> bytes:
    """Tells apart the completions of two steps."""
    content = hashlib.sha256()
    for row in rows:
        for field in ("prompt", "completion"):
            text = row.text(field).encode("utf-8", "surrogatepass")
            content.update(len(text).to_bytes(8) + text)
    return content.digest()
