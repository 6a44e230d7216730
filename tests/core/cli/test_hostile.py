"""Folders of others: whatever stands in them, no command runs code of theirs, unpickles or starts a program for it."""

import hashlib
import json
import os
import pickle
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tltlab.files import read_json
from tltlab.traces.recorder import Recorder
from tltlab.traces.schema import Contents
from tltlab.traces.trace import read

TINY = Path(__file__).parents[3] / "traces" / "tiny"
CLASS = {"kind": "custom", "path": "evil:Evil", "args": {}}
POLICY = {"format": "tltlab-policy", "version": 1, "selector": CLASS}
DRAFTS = POLICY | {"selector": {"kind": "fixed", "strategy": "x:4"}, "drafters": {"x": CLASS}}
PRICES = POLICY | {"selector": {"kind": "goodput", "strategies": ["ngram:4"], "costs": "evil:Evil"}}

# Every command in one process, in which what must not happen is refused and told.
WATCHED = """
import json, os, sys
told, folder = [], os.getcwd()
STARTS = {"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "pickle.find_class"}

def watch(event, args):
    wrong = event in STARTS
    wrong |= event == "import" and args[0].partition(".")[0] in ("evil", "antigravity")
    wrong |= event == "exec" and getattr(args[0], "co_filename", "").startswith(folder)
    if wrong:
        told.append(f"{event} {args!r}"[:300])
        raise RuntimeError(f"refused: {told[-1]}")

sys.addaudithook(watch)
from tltlab.cli.app import main

ended = []
for command in json.loads(sys.argv[1]):
    before = [*sys.path]
    try:
        main(command)
    except SystemExit as error:
        ended.append(error.code or 0)
    except BaseException as error:
        ended.append(f"{type(error).__name__}: {error}")
    assert sys.path == before, command
sys.stderr.flush()
print("ENDED", json.dumps({"codes": ended, "told": told}))
"""


class Evil:
    """Pickled, leaves a file where it is read."""

    def __reduce__(self):
        return os.system, ("touch unpickled",)


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder of hostile runs, traces, recordings, policies and dumps, which is the current one."""
    monkeypatch.chdir(tmp_path)
    payload = pickle.dumps(Evil())
    Path("evil.py").write_text("open('imported', 'w').close()\nclass Evil: ...\n")
    Path("sitecustomize.py").write_text("open('imported', 'w').close()\n")
    run = Path("run")
    # Two RL steps, of which each can be predicted from the other.
    read(TINY).select([0, 1]).write(run / "trace")
    for name in ("costs.json", "acceptance.json"):
        shutil.copy(TINY / name, run / "trace")
    policies = [{"rl_step": n, "name": "mine", "policy": p} for n, p in enumerate((POLICY, DRAFTS))]
    write = {
        "policies.json": {"seed": 0, "policies": policies},
        "policy.json": POLICY,
        "run.json": {
            "recipe": {
                "model": "m",
                "reward": "evil:reward",
                "code": ["."],
                "rollout": {"placement": "evil:Evil", "drafters": {"x": CLASS}},
            },
            "argv": ["evil"],
        },
        "summary.json": {"steps": [], "policy": "evil:Evil"},
        "graphs.json": {"__reduce__": ["os.system", "touch unpickled"]},
    }
    for name, value in write.items():
        (run / name).write_text(json.dumps(value))
    (run / "code").mkdir()
    (run / "code" / "evil.py").write_text(Path("evil.py").read_text())
    checkpoint = run / "checkpoints" / "step-000001"
    checkpoint.mkdir(parents=True)
    for name in (".metadata", "state.json", "checkpoint.json"):
        (checkpoint / name).write_bytes(payload)

    # Arrow's way to say "this column is of a type that a pickle makes".
    extension = {"ARROW:extension:name": "arrow.py_extension_type", "ARROW:extension:metadata": payload}
    shutil.copytree(run / "trace", "typed")
    table = pq.read_table("typed/outcomes.parquet")
    field = table.schema.field("reward").with_metadata(extension)
    at = table.schema.get_field_index("reward")
    pq.write_table(table.set_column(at, field, table["reward"]), "typed/outcomes.parquet")

    recorder = Recorder("live/trace", read(TINY).manifest)
    recorder.append("workload", read(TINY).workload.to_dict("records"))
    recorder.flush()
    recorder._lock.close()
    contents = Contents.read(Path("live/trace"))
    for name, data in (("outcomes", Path("typed/outcomes.parquet").read_bytes()), ("tokens", payload)):
        part = f"{name}/part-000000.parquet"
        Path("live/trace", name).mkdir()
        Path("live/trace", part).write_bytes(data)
        contents = replace(contents, parts={**contents.parts, part: hashlib.sha256(data).hexdigest()})
    contents.write(Path("live/trace"))

    shutil.copytree(run, "priced")
    priced = [{"rl_step": 0, "name": "mine", "policy": PRICES}]
    Path("priced/policies.json").write_text(json.dumps({"seed": 0, "policies": priced}))
    Path("policy.json").write_text(json.dumps(POLICY))
    Path("drafts.json").write_text(json.dumps(DRAFTS))
    Path("prices.json").write_text(json.dumps(PRICES))
    Path("standard.json").write_text(json.dumps({**POLICY, "selector": {**CLASS, "path": "antigravity:Fly"}}))
    for name in ("dump.pkl", "dump.pt", "dump.jsonl", "dump.parquet", "dump.csv", "dump.json", "events.out.tfevents.1"):
        Path(name).write_bytes(payload)
    rows = [{"prompt": "p", "response": "r", "length": 3, "__class__": "evil.Evil", "py/object": "evil.Evil"}]
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows * 4)))
    return tmp_path


def test_nothing_in_a_folder_is_run(place):
    per_trace = [
        ["verify"], ["report", "--no-verify"], ["doctor"], ["simulate", "--costs", "cpu-small"], ["trace", "describe"],
        ["trace", "validate"], ["timeline", "--out", "t.json"], ["calibrate", "--out", "c.json"],
        ["compare", "--policies", "none,table", "--acceptance", "constant:2"],
    ]  # fmt: skip
    commands = [[*command, trace] for command in per_trace for trace in ("run", "live")]
    commands += [["verify", "priced"], ["report", "priced"], ["doctor", "priced"]]
    for policy in ("policy.json", "standard.json", "drafts.json", "prices.json", "antigravity:Fly"):
        commands += [
            ["simulate", "typed", "--policy", policy],
            ["compare", "typed", "--policies", f"none,{policy}"],
            ["export-policy", policy],
        ]
    commands += [
        ["trace", "repair", "live/trace", "--out", "repaired"],
        ["verify", "typed"],
        ["train", "--resume", "run", "--dry-run"],
    ]
    for dump in (*Path().glob("dump.*"), "events.out.tfevents.1", "rows.jsonl"):
        commands += [["trace", "import", str(dump), "--out", "new"], ["simulate", "typed", "--costs", str(dump)]]
        commands.append(["simulate", "typed", "--acceptance", str(dump)])

    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", WATCHED, json.dumps(commands)],
        capture_output=True, text=True, timeout=300, env=environ, check=False,
    )  # fmt: skip
    told = [line for line in done.stdout.splitlines() if line.startswith("ENDED ")]
    assert told, done.stderr[-2000:]
    found = json.loads(told[-1].removeprefix("ENDED "))
    assert found["told"] == []
    assert {" ".join(c): code for c, code in zip(commands, found["codes"], strict=True) if code not in (0, 1, 2)} == {}
    assert found["codes"].count(0) > 10
    for left in ("imported", "unpickled"):
        assert not any(place.rglob(left)), left
    assert read_json(place / "policy.json") == POLICY
