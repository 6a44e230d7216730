"""Responses in the records of other programs.

A record is a response, or as many as it has in a list. Its fields are found by their names (`fields.NAMES`), and its
lengths are, the first of these that is there: numbers of tokens, masks of generated tokens, lists of token ids, texts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from tltlab.config import shown
from tltlab.errors import TraceError

from .fields import (
    conversation_texts,
    is_list,
    is_message,
    is_missing,
    kind_of,
    lists_in,
    matches,
    missing_in,
    numbers,
    parsed,
    plain,
)
from .length_table import RECORD
from .requests import RequestReader
from .rows import BY_OPTION, Records, text_id
from .token_counts import NoTokenCounter

_RESPONSE_IDS = ("response_ids", "response_tokens", "response_text", "response_sizes", "sizes")
_UNNAMED = re.compile(r"c?\d+")
"""Names of columns without a heading."""
_PROMPT_IDS = ("prompt_ids", "prompt_tokens", "prompt_text")
"""Kinds of names under which lists of ids are."""
_OTHER_UNIT = re.compile(
    r"(?:^|[^a-z])(?:chars?|characters|bytes|words|lines|sentences|chunks|ns|us|ms|secs?|seconds?|minutes?|times?|"
    r"latency|duration|ids?|index|idx|rank|seed|scores?|rewards?|loss|rates?|percent|pct)(?:$|[^a-z])"
)
"""Words in the name of a column that does not count tokens."""


class Reader(RequestReader):
    """Reads records to a row of numbers for each response."""

    def read(self, records: Records) -> pd.DataFrame:
        """Return a row of numbers for each response of some records, with candidates for its prompt's name."""
        frame = records.frame
        self.columns |= dict.fromkeys(name for name in map(str, frame.columns) if not name.startswith("#"))
        own = list(frame.columns)
        failed = self._failed(records)
        lengths, exact = self._response_tokens(records, failed)
        prompts = self._prompt_tokens(records, lengths)
        self._note_turns(records)
        result = pd.DataFrame({"response_tokens": lengths, "is_exact": exact, "prompt_tokens": prompts})
        result["rl_step"] = self._rl_steps(records)
        result["place"] = frame.index.to_numpy()
        result["file"] = records.file
        result["finish_reason"] = self._reasons(records, failed | (lengths == 0))
        result["reward"] = self._rewards(records)
        for name, least in (("cap", 1), ("worker", 0), ("sample", 0)):
            column = self._column(records, name)
            result[name] = np.nan if column is None else self._whole(records, column, least, may_miss=True)
        result["sample_is_ours"] = "sample" in frame
        result = result.assign(**self._times(records))
        result["text"] = self._prompts(records)
        said = self._text_columns(records, "response_text")[:1]
        result["said"] = [text_id(cell) for cell in frame[said[0]]] if said else None
        wanted = self.reading.group_column and self._given(records, self.reading.group_column)
        if numbering := matches(own, "row_id"):
            # Logs of several programs call it differently.
            frame = frame.assign(**{numbering[0]: frame[numbering].bfill(axis=1).iloc[:, 0]})
        names = [wanted] if wanted else [*matches(own, "prompt_id"), *numbering]
        for name in names:
            if not (missing := missing_in(frame[name])).any() and not lists_in(frame[name]).any():
                is_text = frame[name].dtype == "str"
                result[f"id:{name}"] = (frame[name] if is_text else frame[name].map(_identity)).to_numpy(object)
            elif not missing.all() and "prompt_id" in kind_of(name):
                self.note(f"{name} is not one value in each record: it does not name the prompts")
            if wanted and missing.any():
                records.fault(int(np.argmax(missing)), name, "no value, although it was named as the column of groups")
        if RECORD in frame:
            result[RECORD] = frame[RECORD].to_numpy()
        return result

    def _prompts(self, records: Records) -> Any:
        """The `text_id` of each prompt's text, of what a conversation begins with, or of its token ids; else None."""
        frame, texts = records.frame, self._text_columns(records, "prompt_text")
        talks = [] if texts else self._text_columns(records, "conversation")
        column = next(iter([*texts, *talks, *self._listed(frame, *_PROMPT_IDS)]), None)
        if column is None:
            return None
        self._seen.add(column)
        cells = (
            [getattr(conversation_texts(parsed(c)), "before", "") for c in frame[column]] if talks else frame[column]
        )
        return [text_id(cell) for cell in cells]

    def _response_tokens(self, records: Records, failed: NDArray[np.bool_]) -> tuple[Any, NDArray[np.bool_]]:
        """Tokens of each response, 0 of failed requests, and whether they are more than a count of the text."""
        frame, size = records.frame, len(records.frame)
        values, exact = np.full(size, np.nan), np.full(size, True)
        lists = [c for k in ("mask", *_RESPONSE_IDS, "logprobs") for c in self._listed(frame, k)]
        texts = self._text_columns(records, "response_text") or self._text_columns(records, "conversation")
        chosen = self.reading.column and self._given(records, self.reading.column)
        if chosen:
            self.use("response_tokens", chosen)
            if self._lists.get(chosen) == "ids":
                lists, texts = [chosen], []
            elif np.isnan(numbers(frame[chosen])).all() and self._text_of(records, chosen):
                lists, texts = [], [chosen]
            else:
                return self._whole(records, chosen, 0, failed=failed), exact
        chosen = self._column(records, "response_sizes", "response_tokens") or self._column(records, "sizes", "tokens")
        others = self._listed(frame, "all_ids", "tokens")
        wholes = [frame[column].map(_size) for column in others]
        # Log-probs of the prompt too are no length of the response.
        lists = [
            column for column in lists
            if "logprobs" not in kind_of(column) or not any(frame[column].map(_size).equals(whole) for whole in wholes)
        ]  # fmt: skip
        if chosen:
            has_others = bool(lists or texts)
            values = self._whole(records, chosen, 0, may_miss=has_others, failed=failed)
            self._compare(frame, chosen, values, [*lists, *others])
        for column in lists:
            values = self._fill(values, failed, column, lambda column=column: self._sizes(frame, column))
        if np.isnan(values[~failed]).any():
            values = self._fill_from_whole(records, values, failed, [] if texts else others)
        if (open_ := np.isnan(values) & ~failed).any() and texts:
            column = texts[0]
            self.use("response_tokens", column)
            values[open_] = self._count(records, column, np.flatnonzero(open_))
            exact = exact & ~open_
            self.counts["text"] += int(open_.sum())
        values = np.where(np.isnan(values) & failed, 0.0, values)
        if np.isnan(values).all() and records.is_table and (chosen := self._only_numbers(records)):
            self.use("response_tokens", chosen)
            values = self._whole(records, chosen, 0, failed=failed)
        if (values < 0).any():
            at = int(np.argmax(values < 0))
            raise TraceError(f"{records.place(at)}: {self.used['response_tokens']} is less than the prompt's tokens")
        if np.isnan(values).any():
            at = int(np.argmax(np.isnan(values)))
            fields = ", ".join(n for n in map(str, frame.columns) if n[0] != "#" and not is_missing(frame[n].iloc[at]))
            raise TraceError(
                f"{records.place(at)}: no length of the response; wanted response_tokens, output_len, usage, token ids "
                f"or a text; there are: {fields}; name it ({BY_OPTION.format('--column')})"
            )
        return values, exact

    def _only_numbers(self, records: Records) -> str | None:
        """The only column of a table, except those that are known as something else, or the only one of numbers."""
        of_text = {"reward", "prompt_text", "response_text"}
        known = set(self.used.values()) | {c for c in records.frame.columns if kind_of(str(c)) - of_text}
        left = [str(name) for name in records.frame.columns if name not in known]
        numeric = [name for name in left if not np.isnan(numbers(records.frame[name])).any()]
        chosen = next((group[0] for group in (numeric, left) if len(group) == 1), None)
        words = re.sub(r"([a-z])([A-Z])", r"\1_\2", chosen or "").lower()
        if chosen is None or _OTHER_UNIT.search(words):
            raise TraceError(
                f"{records.file}: the column with the lengths is not clear: "
                f"{', '.join(map(str, records.frame.columns))}; name one ({BY_OPTION.format('--column')})"
            )
        if not _UNNAMED.fullmatch(chosen):
            self.note(f"{chosen} is taken for the tokens of each response")
        return chosen

    def _listed(self, frame: pd.DataFrame, *kinds: str) -> list[str]:
        """Columns of these kinds whose lists have an entry for each token."""
        return [
            column for kind in kinds for column in matches(frame.columns, kind)
            if self._lists.get(column) == "ids" and lists_in(frame[column]).any()
        ]  # fmt: skip

    def _sizes(self, frame: pd.DataFrame, column: str, end: str = "tail") -> Any:
        """Tokens of each list: the ones of a mask, else its entries without padding at an end; NaN without a list."""
        sizes, ones = _sizes(frame[column], column)
        if "mask" in kind_of(column):
            if np.nansum((sizes - ones)[ones > 0]) > 0:
                self.note(f"{column}: ones are the tokens generated, zeros (tools' tokens, padding) are left out")
            if ((ones == 0) & (sizes > 0)).any():
                self.note(f"{column}: where it has no ones its size is taken")
            return np.where(ones == 0, sizes, ones)
        step = 1 if end == "head" else -1
        runs = np.array([_run(cell[::step]) if is_list(cell) else 0 for cell in frame[column]])
        if len(sizes) > 1 and len(set(sizes)) == 1 and 2 * (runs > 0).sum() > len(sizes):
            self.note(f"{column}: lists of one size with repeated ids at the {end}, which are taken for padding")
            return sizes - runs
        return sizes

    def _fill(self, values: Any, failed: Any, column: str, sizes: Any) -> Any:
        open_ = np.isnan(values) & ~failed
        if open_.any():
            self.use("response_tokens", column)
            values = np.where(open_, sizes(), values)
        return values

    def _compare(self, frame: pd.DataFrame, chosen: str, values: Any, columns: Sequence[str]) -> None:
        """Note lists whose size is not the recorded number, which counts."""
        for column in columns:
            self._seen.add(column)
            sizes, ones = _sizes(frame[column], column)
            whole = bool(kind_of(column) & {"all_ids", "tokens"})
            differs = sizes < values if whole else ~np.isnan(sizes) & (values != sizes) & (values != ones)
            if differs.any():
                self.counts[f"{column}\n{chosen}"] += int(differs.sum())

    def _fill_from_whole(self, records: Records, values: Any, failed: Any, others: Sequence[str]) -> Any:
        """Fill in lists or numbers of prompt and response together, less the prompt."""
        frame = records.frame
        known = self._known_prompts(records)
        for column in others:
            sizes = frame[column].map(_size).to_numpy(np.float64)
            is_named = plain(column).rpartition(".")[2] in ("tokens", "tokenids", "ids", "toks")
            alone = is_named or column == self.reading.column
            begins = [
                is_list(cell) and any(is_list(p) and len(p) and list(cell[: len(p)]) == list(p) for p in prompts)
                for cell, *prompts in frame[[column, *self._listed(frame, *_PROMPT_IDS)]].itertuples(index=False)
            ]
            if known is not None and (not alone or all(begins)):
                values = self._fill(values, failed, column, lambda sizes=sizes: sizes - known)
            elif alone:
                values = self._fill(values, failed, column, lambda sizes=sizes: np.where(sizes < 0, np.nan, sizes))
                self.note(f"{column} are taken for the tokens of the response alone")
        total = self._column(records, "total") if known is not None and np.isnan(values[~failed]).any() else None
        if total is not None:
            values = self._fill(values, failed, total, lambda: self._whole(records, total, 0, may_miss=True) - known)
            self.note(f"response tokens are {total} less the prompt's")
        return values

    def _known_prompts(self, records: Records) -> Any:
        """Tokens of each prompt by numbers or lists; None where there is neither."""
        frame = records.frame
        if (column := self._column(records, "prompt_sizes", "prompt_tokens")) is not None:
            return self._whole(records, column, 0, may_miss=True)
        if columns := self._listed(frame, *_PROMPT_IDS):
            column = columns[0]
            self.use("prompt_tokens", column)
            return self._sizes(frame, column, "head")
        return None

    def _prompt_tokens(self, records: Records, lengths: Any) -> Any:
        """Tokens of each prompt, NaN unknown: as recorded, of a list, the whole less the response, or of its text."""
        frame = records.frame
        known = self._known_prompts(records)
        known = np.full(len(frame), np.nan) if known is None else known.copy()
        for column in self._listed(frame, "mask"):
            for at, mask in enumerate(frame[column]):
                # A prompt's length that is the whole's.
                lead = next((i for i, one in enumerate(mask) if one), 0) if is_list(mask) else 0
                known[at] = lead if lead and known[at] >= lead + lengths[at] else known[at]
        for column in self._listed(frame, "all_ids", "tokens") if np.isnan(known).any() else ():
            if self.used.get("response_tokens") == column:
                continue
            masks, answers = self._listed(frame, "mask"), self._listed(frame, *_RESPONSE_IDS)
            is_prompt = plain(column).endswith("inputids")
            for at, cell in enumerate(frame[column]):
                if not is_list(cell) or not np.isnan(known[at]):
                    continue
                answer = next((list(frame[c].iloc[at]) for c in answers if is_list(frame[c].iloc[at])), None)
                mask = next((frame[c].iloc[at] for c in masks if is_list(frame[c].iloc[at])), ())
                if len(mask) == len(cell):
                    known[at] = next((i for i, one in enumerate(mask) if one), len(cell))
                elif (answer is not None and is_prompt and (not answer or list(cell[-len(answer) :]) != answer)) or (
                    is_prompt and answer is None and not mask
                ):
                    known[at] = len(cell)
                elif len(cell) >= lengths[at]:
                    known[at] = len(cell) - max(lengths[at], len(mask) if len(mask) <= len(cell) else 0)
            self.use("prompt_tokens", column)
        total = self._column(records, "total") if np.isnan(known).all() else None
        if total is not None:
            whole = self._whole(records, total, 0, may_miss=True) - lengths
            known = np.where(whole >= 0, whole, np.nan)
        open_ = np.flatnonzero(np.isnan(known))
        texts = self._text_columns(records, "prompt_text") or self._text_columns(records, "conversation")
        if len(open_) and texts and not isinstance(self.reading.tokens, NoTokenCounter):
            self.use("prompt_tokens", texts[0])
            known[open_] = self._count(records, texts[0], open_, is_prompt=True)
            self.counts["text"] += len(open_)
        elif len(open_) and "prompt_tokens" in self.reading.needs:
            raise TraceError(
                f"{records.place(int(open_[0]))}: no prompt length; wanted a field prompt_tokens or input_len, there "
                f"are: {', '.join(map(str, frame.columns))}"
            )
        return known

    def _text_columns(self, records: Records, kind: str) -> list[str]:
        return [column for column in matches(records.frame.columns, kind) if self._text_of(records, column)]

    def _text_of(self, records: Records, column: str) -> bool:
        """Return True if the first cell with a value is a text (in a table: no number) or a conversation."""
        cells = records.frame[column]
        first = next((cell for cell in cells if not is_missing(cell)), None)
        if first is None:
            # An empty response is a text, and so is one such as "NULL".
            return not records.is_table and any(isinstance(cell, str) for cell in cells)
        if isinstance(first, str):
            return not records.is_table or bool(np.isnan(numbers(cells)).all())
        return self._lists.get(column) != "ids" and conversation_texts(first) is not None

    def _count(self, records: Records, column: str, rows: Any, *, is_prompt: bool = False) -> list[int]:
        """Tokens of the texts in some rows of a column: of a response what was generated, at least 1, its end."""
        texts, cells = [], records.frame[column]
        is_conversation = "conversation" in kind_of(column)
        for at in rows:
            cell = cells.iloc[at]
            if isinstance(cell, str) and cell.startswith("[{") and is_list(messages := parsed(cell)):
                cell = messages if all(map(is_message, messages)) else cell
            if (speech := conversation_texts(cell)) is None:
                records.fault(int(at), column, f"got {shown(cells.iloc[at])}, wanted a text or messages")
            for kind in () if is_prompt and is_conversation else speech.unread:
                self.counts[f"block {kind}"] += 1
            parts = speech.generated
            if is_prompt:
                parts = speech.before if is_conversation and speech.turns else [*speech.others, *speech.generated]
            elif is_conversation and not speech.turns:
                records.fault(int(at), column, "no message of the model: these are prompts without responses")
            texts.append("\n".join(parts))
        unique = list(dict.fromkeys(texts))
        count_of = dict(zip(unique, self.reading.tokens.count(unique), strict=True))
        return [count_of[text] if is_prompt else max(1, count_of[text]) for text in texts]

    def _note_turns(self, records: Records) -> None:
        """Count responses with several turns, by their number or by messages after the first generated one."""
        for column in matches(records.frame.columns, "turn")[:1]:
            self._seen.add(column)
            self.note(f"{column}: each turn counts as a separate response")
        if (number := self._column(records, "turns")) is not None:
            self.counts["turns"] += int((numbers(records.frame[number]) > 1).sum())
            return
        for kind in ("response_text", "conversation"):
            for column in matches(records.frame.columns, kind):
                if self._lists.get(column) == "messages":
                    conversations = [conversation_texts(cell) for cell in records.frame[column] if is_list(cell)]
                    several = sum(
                        s is not None and (s.turns > 1 or len(s.others) > len(s.before) > 0) for s in conversations
                    )
                    self.counts["turns"] += several
                    self._seen.add(column)
                    return


def _sizes(cells: pd.Series[Any], column: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Entries of each list, NaN without a list, and the ones of a mask, else 0."""
    sizes = [len(cell) if is_list(cell) else np.nan for cell in cells]
    is_mask = "mask" in kind_of(column)
    ones = [sum(one == 1 for one in cell) if is_mask and is_list(cell) else 0 for cell in cells]
    return np.array(sizes, np.float64), np.array(ones, np.float64)


def _run(values: Sequence[Any]) -> int:
    """How many equal values begin a list; 0 for one, and for all of them."""
    run = next((at for at, value in enumerate(values) if value != values[0]), len(values))
    return 0 if run in (1, len(values)) else run


def _size(cell: Any) -> int:
    return len(cell) if is_list(cell) else -1


def _identity(cell: Any) -> str:
    """Return a prompt's name as a text, the same for 1 and 1.0."""
    if isinstance(cell, float) and cell.is_integer():
        cell = int(cell)
    return json.dumps(cell, sort_keys=True, default=str) if isinstance(cell, list | dict) else str(cell)
