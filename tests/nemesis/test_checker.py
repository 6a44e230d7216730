"""The checker that the nemesis asks is worth asking: it takes what the format allows, and sees what is wrong."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np

import tltlab
from tests.refused import refused
from tltlab.traces.recorder import Recorder
from tltlab.traces.schema import Contents

from . import checker
from .storage import MANIFEST, STEPS, drive, rows_at

TINY = Path(__file__).parents[2] / "traces" / "tiny"


def test_a_trace_with_another_bit_is_found(tmp_path):
    rows = checker.trace(TINY)
    assert checker.rl_steps(rows) == set(tltlab.read(TINY).rl_steps)
    checker.same(rows, rows, {"tokens": ("token_ids",)})
    with refused(checker.Fault):
        checker.same(rows | {"tokens": rows["tokens"][1:]}, rows, {"tokens": ("token_ids",)})
    for name in ("outcomes.parquet", "manifest.json"):
        damaged = Path(shutil.copytree(TINY, tmp_path / name))
        data = bytearray((damaged / name).read_bytes())
        data[200] ^= 1
        (damaged / name).write_bytes(data)
        with refused((checker.Fault, ValueError, KeyError)):
            checker.trace(damaged)


def test_a_lost_or_doubled_part_is_found(tmp_path):
    recorder = Recorder(tmp_path / "trace", MANIFEST)
    for rl_step in range(3):
        for table, rows in rows_at(rl_step, np.ones(4)).items():
            recorder.append(table, rows)
        recorder.flush()
    checker.killed(tmp_path, 3)
    with refused(checker.Fault):
        checker.killed(tmp_path, 4)
    recorder.rewind(2)
    with refused(checker.Fault):
        checker.killed(tmp_path, 3)
    folder = tmp_path / "trace"
    contents, first = Contents.read(folder), folder / "steps" / "part-000000.parquet"
    shutil.copy(first, first.with_name("part-000009.parquet"))
    checker.killed(tmp_path, 2)
    named = {**contents.parts, "steps/part-000009.parquet": contents.parts["steps/part-000000.parquet"]}
    replace(contents, parts=named).write(folder)
    with refused(checker.Fault, naming=("twice",)):
        checker.killed(tmp_path, 2)
    contents.write(folder)
    first.write_bytes(first.read_bytes()[:-1])
    with refused(checker.Fault):
        checker.killed(tmp_path, 2)


def test_a_changed_checkpoint_is_found(tmp_path):
    drive(tmp_path, lambda what, value: None)
    assert checker.checkpoints(tmp_path / "checkpoints") == [STEPS - 1, STEPS]
    (tmp_path / "checkpoints" / f"step-{STEPS:06d}" / "state.json").write_bytes(b"1")
    with refused(checker.Fault):
        checker.checkpoints(tmp_path / "checkpoints")


def test_missing_outcomes_and_tokens_are_found():
    rows = rows_at(0, np.ones(4))
    for table in rows.values():
        for row in table:
            row["turn"] = 0
    checker.responses(Path("here"), rows)
    for table in ("outcomes", "workload"):
        with refused(checker.Fault):
            checker.responses(Path("here"), rows | {table: rows[table][1:]})
    rows["tokens"][0]["token_ids"].append(1)
    with refused(checker.Fault):
        checker.responses(Path("here"), rows)
