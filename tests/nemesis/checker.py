"""What a run's folder must be, by the docstrings of `traces/recording.py` and `run/checkpoints.py`, without tltlab.

A function returns what it read, and raises `Fault` where the folder is not what a reader may rely on.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
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
CHUNK = re.compile(r"(\d{6,})-([0-9a-f]{16})\.arrow")
Rows = dict[str, list[dict[str, Any]]]


class Fault(AssertionError):
    """A folder that is not what it must be."""


def require(holds: bool, *sentence: object) -> None:
    if not holds:
        raise Fault(" ".join(map(str, sentence)))


def sealed_json(path: Path) -> dict[str, Any]:
    """A JSON object whose "sha256" is that of its other keys: as ASCII JSON, keys sorted, without spaces."""
    value = json.loads(path.read_text(encoding="utf-8"))
    seal = value.pop("sha256", None)
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    require(seal == hashlib.sha256(text.encode()).hexdigest(), path, "is not what its seal says")
    return dict(value)


def recording(folder: Path) -> Rows:
    """The rows of a recording: of the chunks that are what their names say, without those that were taken back."""
    manifest(folder, sealed_json(folder / "manifest.json"))
    require("sums" not in sealed_json(folder / "manifest.json"), folder, "has sums already")
    cuts = sealed_json(folder / "cuts.json")["cuts"] if (folder / "cuts.json").exists() else []
    rows: Rows = {}
    numbers = []
    for path in sorted(folder.glob("*.arrow")):
        named = CHUNK.fullmatch(path.name)
        require(named is not None, path, "is not named as a chunk")
        assert named is not None
        data = path.read_bytes()
        require(hashlib.sha256(data).hexdigest()[:16] == named[2], path, "is not what its name says")
        numbers.append(int(named[1]))
        void = min([cut["rl_steps"] for cut in cuts if numbers[-1] < cut["chunks"]], default=None)
        table = pa.ipc.open_file(data).read_all()
        require(len(table) == 1, path, "has", len(table), "rows, not 1")
        for name in table.column_names:
            found = table[name].to_pylist()[0]
            rows.setdefault(name, []).extend(row for row in found if void is None or row["rl_step"] < void)
    require(len(numbers) == len(set(numbers)), folder, "has two chunks of one number", numbers)
    return rows


def trace(folder: Path) -> Rows:
    """The rows of a finished trace, its files being those that the manifest has sums of."""
    told = sealed_json(folder / "manifest.json")
    manifest(folder, told)
    files = {path.name: path for path in folder.glob("*.parquet")}
    require(set(told["sums"]) == set(files), folder, "has", sorted(files), "and sums of", sorted(told["sums"]))
    for name, path in files.items():
        require(hashlib.sha256(path.read_bytes()).hexdigest() == told["sums"][name], path, "is not what its sum says")
    rows = {path.stem: pq.read_table(path).to_pylist() for path in files.values()}
    require({"workload", "outcomes"} <= set(rows), folder, "has no", {"workload", "outcomes"} - set(rows))
    responses(folder, rows)
    return rows


def manifest(folder: Path, told: Mapping[str, Any]) -> None:
    require((told["format"], told["version"]) == ("tltlab-trace", 1), folder, "is no trace of version 1")


def responses(where: Path, rows: Rows) -> None:
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
    for row in rows["outcomes"]:
        require(row["finish_reason"] in ("stop", "length", "abort"), where, "ended by", row["finish_reason"])


def keys_of(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[Any, ...], Mapping[str, Any]]:
    return {tuple(row[column] for column in KEY): row for row in rows}


def rl_steps(rows: Rows) -> set[int]:
    """Those of which there is anything."""
    return {row["rl_step"] for row in rows.get("outcomes", ())}


def checkpoints(folder: Path) -> list[int]:
    """The RL steps of the checkpoints, each of which must be whole by its list of files."""
    return sorted(json.loads((path / "checkpoint.json").read_text())["rl_step"] for path in _checked(folder))


def _checked(folder: Path) -> Iterator[Path]:
    for path in folder.glob("step-*"):
        files = json.loads((path / "checkpoint.json").read_text())["files"]
        there = {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()} - {"checkpoint.json"}
        require(there == set(files), path, "has", there, "and lists", set(files))
        for name, told in files.items():
            data = (path / name).read_bytes()
            as_told = len(data) == told["bytes"] and hashlib.sha256(data).hexdigest() == told["sha256"]
            require(as_told, path / name, "is not what was written")
        yield path


def killed(run: Path, durable: int) -> None:
    """What is left of a run that was killed: all of RL steps 0 to `durable` - 1, and nothing twice or in halves."""
    there = run / "trace.recording"
    if there.exists():
        rows = recording(there)
        require(rl_steps(rows) >= set(range(durable)), there, "lost RL steps:", rl_steps(rows), "of", durable)
        if rows:
            responses(there, rows)
    if (run / "trace").exists():
        require(rl_steps(trace(run / "trace")) >= (set() if there.exists() else set(range(durable))), run, "lost steps")
    require(durable == 0 or there.exists() or (run / "trace").exists(), run, "has lost its trace")


def same(rows: Rows, others: Rows, tables: Mapping[str, Sequence[str]]) -> None:
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
