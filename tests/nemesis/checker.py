"""What a run's folder must be, by the docstrings of `traces/recorder.py` and `run/checkpoints.py`, without tltlab.

A function returns what it read, and raises `Fault` where the folder is not what a reader may rely on.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pyarrow.parquet as pq

KEY = ("rl_step", "prompt_id", "sample", "turn")
UNIQUE = {
    "workload": KEY,
    "outcomes": KEY,
    "tokens": KEY,
    "iterations": ("rl_step", "worker", "iteration"),
    "steps": ("rl_step",),
    "spot_training": ("rl_step", "worker", "term"),
}
Rows = dict[str, list[dict[str, Any]]]


class Fault(AssertionError):
    """A folder that is not what it must be."""


def require(holds, *sentence):
    if not holds:
        raise Fault(" ".join(map(str, sentence)))


def sealed_json(path):
    """A JSON object whose "sha256" is that of its other keys: as ASCII JSON, keys sorted, without spaces."""
    value = json.loads(path.read_text(encoding="utf-8"))
    seal = value.pop("sha256", None)
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    require(seal == hashlib.sha256(text.encode()).hexdigest(), path, "is not what its seal says")
    return dict(value)


def trace(folder):
    """The rows of a trace, finished or not, in the parts that the manifest has sums of: others are nothing."""
    told = sealed_json(folder / "manifest.json")
    require((told["format"], told["version"]) == ("tltlab-trace", 1), folder, "is no trace of version 1")
    rows = {}
    for place, sha256 in told.get("parts", told.get("sums")).items():
        path = folder / place
        require(hashlib.sha256(path.read_bytes()).hexdigest() == sha256, path, "is not what its sum says")
        name = place.partition("/")[0].removesuffix(".parquet")
        rows.setdefault(name, []).extend(pq.ParquetFile(path).read().to_pylist())
    require(not rows or {"workload", "outcomes"} <= set(rows), folder, "has no workload or no outcomes")
    responses(folder, rows)
    return rows


def finished(folder):
    """The rows of a trace that is finished, with no file that the manifest does not name."""
    told = sealed_json(folder / "manifest.json")
    require("unfinished" not in told, folder, "is not finished")
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()} - {"manifest.json"}
    require(set(told["parts"]) == files, folder, "has", sorted(files), "and sums of", sorted(told["parts"]))
    return trace(folder)


def responses(where, rows):
    """How tables fit together: a row for each key, an outcome for each request, as many tokens as it says."""
    for name, columns in UNIQUE.items():
        keys = [tuple(row[column] for column in columns) for row in rows.get(name, ())]
        require(len(keys) == len(set(keys)), where, "has rows of", name, "twice")
    asked, ended = (keys_of(rows.get(name, ())) for name in ("workload", "outcomes"))
    require(set(asked) == set(ended), where, "has requests and outcomes of other keys")
    for key, row in keys_of(rows.get("tokens", ())).items():
        require(key in ended, where, "has tokens of no outcome:", key)
        require(len(row["token_ids"]) == ended[key]["response_tokens"], where, "tokens are not as many:", key)
        cap = asked[key]["max_response_tokens"]
        require(len(row["token_ids"]) <= cap, where, "has more tokens than may be:", key)
    for row in rows.get("outcomes", ()):
        require(row["finish_reason"] in ("stop", "length", "abort"), where, "ended by", row["finish_reason"])


def keys_of(rows):
    return {tuple(row[column] for column in KEY): row for row in rows}


def rl_steps(rows):
    """Those of which there is anything."""
    return {row["rl_step"] for row in rows.get("outcomes", ())}


def checkpoints(folder):
    """The RL steps of the checkpoints, each of which must be whole by its list of files."""
    return sorted(json.loads((path / "checkpoint.json").read_text())["rl_step"] for path in _checked(folder))


def _checked(folder):
    for path in folder.glob("step-*"):
        files = json.loads((path / "checkpoint.json").read_text())["files"]
        there = {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()} - {"checkpoint.json"}
        require(there == set(files), path, "has", there, "and lists", set(files))
        for name, told in files.items():
            data = (path / name).read_bytes()
            as_told = len(data) == told["bytes"] and hashlib.sha256(data).hexdigest() == told["sha256"]
            require(as_told, path / name, "is not what was written")
        yield path


def killed(run, durable):
    """What is left of a run that was killed: all of RL steps 0 to `durable` - 1, and nothing twice or in halves."""
    if (run / "trace").exists():
        there = rl_steps(trace(run / "trace"))
        require(there >= set(range(durable)), run, "lost RL steps:", there, "of", durable)
    else:
        require(durable == 0, run, "has lost its trace")


def same(rows, others, tables):
    """Two traces have the same rows, in these columns of these tables."""
    for name, columns in tables.items():
        ours, theirs = (
            sorted(
                ([row[column] for column in (*UNIQUE[name], *columns)] for row in rows.get(name, ())),
                key=lambda row: tuple(row[: len(UNIQUE[name])]),
            )
            for rows in (rows, others)
        )
        require(ours == theirs, name, "is not that of the run that nobody disturbed")
