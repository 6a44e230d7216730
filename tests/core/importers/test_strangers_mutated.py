"""Changed logs and records: what is accepted has the numbers that an independent reader finds in the same bytes."""

import csv
import io
import json
import random
import re
from contextlib import suppress

import pytest

from tests.traces_of_lengths import import_dump
from tltlab.errors import TraceError
from tltlab.importers.fields import plain

NUM = 20
EACH = 400
"""Changed files of each kind."""
LENGTHS = [(at // 8, 10 + 37 * at % 900) for at in range(NUM)]
RECORDS = [
    {"step": step, "prompt_id": f"p{at}", "response_tokens": length, "prompt_tokens": 7 + at, "finish_reason": "stop"}
    for at, (step, length) in enumerate(LENGTHS)
]
SEPARATORS = {"csv": ",", "tsv": "\t"}
LINE = "step:{} - actor/pg_loss:-0.1 - response_length/mean:{}.5 - response_length/max:990.0 - prompt_length/mean:90.0"


def written(kind):
    """Records, or RL steps of a log, as text."""
    if kind == "jsonl":
        return "".join(json.dumps(record) + "\n" for record in RECORDS)
    if kind == "json":
        return json.dumps(RECORDS, indent=1)
    if kind == "log":
        return "".join(LINE.format(step, 100 + step * 13) + " - timing_s/gen:12.5\n" for step in range(1, 13))
    mark, rows = SEPARATORS[kind], [list(RECORDS[0]), *(list(map(str, record.values())) for record in RECORDS)]
    return "".join(mark.join(row) + "\n" for row in rows)


def changed(text, rng):
    """The text with one or two changes: letters, digits, marks, lines."""
    for _ in range(rng.randint(1, 2)):
        at = rng.randrange(max(len(text), 1))
        to = min(len(text), at + rng.randint(1, 30))
        start, end = text.rfind("\n", 0, at) + 1, text.find("\n", at) + 1 or len(text)
        digit = next((match.start() for match in re.finditer(r"\d", text) if match.start() >= at), at)
        text = rng.choice(
            [
                text[:at] + text[to:],
                text[:to] + text[at:],
                text[:digit] + rng.choice("0123456789.-e,_ ") + text[digit + rng.randint(0, 1) :],
                text[:at] + rng.choice(",;:{}[]\"'\t\r\n \\-/=") + text[at + rng.randint(0, 1) :],
                text[:end] + text[start:end] + text[end:],
                text[:start] + text[end:],
                text[:at],
            ]
        )
    return text


def whole(value):
    """A number as a record may hold it; ValueError for what is none."""
    if isinstance(value, bool) or not isinstance(value, int | float | str) or "_" in str(value):
        raise ValueError
    return float(value)


def unique(pairs):
    if len(dict(pairs)) < len(pairs):
        raise ValueError
    return {plain(name): value for name, value in pairs}


def read_again(kind, text):
    """(RL step, length) of each response by json or csv, for a log (RL step, mean); ValueError for what is broken."""
    if kind == "log":
        means = {}
        for line in re.split(r"\n|(?=\bstep:)", text):
            items = dict(item.split(":", 1) for item in line.strip().split(" - ") if ":" in item)
            with suppress(KeyError, ValueError):
                means[int(items["step"])] = float(items["response_length/mean"])
        return means
    if kind in SEPARATORS:
        header, *rows = [row for row in csv.reader(io.StringIO(text), delimiter=SEPARATORS[kind]) if any(row)]
        rows = [unique(list(zip(header, row, strict=True))) for row in rows]
    else:
        rows = json.loads(text, object_pairs_hook=unique) if kind == "json" else [
            json.loads(line, object_pairs_hook=unique) for line in text.split("\n") if line.strip()
        ]  # fmt: skip
    return sorted((whole(row["step"]), whole(row.get("responsetokens", row.get("responsetoken")))) for row in rows)


def accepted(path):
    """(RL step, length) of each response, or (RL step, mean) of a log, as imported."""
    trace = import_dump(path, **({"responses": 64} if path.suffix == ".log" else {}))
    if path.suffix == ".log":
        return trace.outcomes.groupby("rl_step")["response_tokens"].mean().to_dict()
    return sorted(zip(*(trace.outcomes[name].astype(float) for name in ("rl_step", "response_tokens")), strict=True))


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "tsv", "log"])
def test_strangers_files_are_read_right_or_refused(tmp_path, kind):
    rng, path, plain_text = random.Random(kind), tmp_path / f"a.{kind}", written(kind)
    path.write_text(plain_text)
    assert len(accepted(path)) == len(read_again(kind, plain_text))
    num_accepted = 0
    for number in range(EACH):
        text = changed(plain_text, rng)
        path.write_bytes(text.encode())
        try:
            found = accepted(path)
        except TraceError:
            continue
        num_accepted += 1
        try:
            expected = read_again(kind, text)
        except (ValueError, KeyError, TypeError) as error:
            pytest.fail(f"change {number} is accepted, and broken ({error!r}): {text!r}")
        if kind == "log":
            expected = {step: round(64 * expected[step]) / 64 for step in found if step in expected}
        assert found == expected, f"change {number}: {text!r}"
    assert EACH / 10 < num_accepted < EACH
