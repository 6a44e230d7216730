"""Command lines that make no sense are refused in one line that names what is wrong, and nothing is written."""

import ctypes
import os
import shutil
import socket
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

TRACES = Path(__file__).resolve().parents[3] / "traces"
COSTS = "costs h100-qwen2.5-7b"


@pytest.mark.parametrize(
    ("line", "facts"),
    [
        ("simluate", ["'simluate'", "'simulate'"]),
        ("costs nowhere", ["cpu-small"]),
        (f"{COSTS} --batch 1,x", ["1,x", "--batch"]),
        (f"{COSTS} --batch 0", []),
        (f"{COSTS} --strategy 8,8 --accept-length 2", ["8,8", "--strategy"]),
        (f"{COSTS} --accept-length 2", ["together"]),
        (f"{COSTS} --strategy 2,2,4 --accept-length 3.5", ["3"]),
        ("doctor", ["tltlab doctor runs/first"]),
        ("doctor TRACES --json", [str(TRACES)]),
        ("doctor taken.py --json", ["taken.py"]),
        ("new experiment", ["'experiment'", "recipe", "policy"]),
        ("new policy taken", ["taken.py"]),
        ("settings rolout", ["'rolout'", "'rollout'"]),
        ("simulate two.csv --workers 1", ["step and iteration"]),
        ("timeline TRACES/tiny --out x.jpg", [".png", ".svg", ".pdf", ".json"]),
        ("timeline TRACES/tiny --size poster", ["'poster'", "column"]),
        ("trace", ["tltlab trace --help"]),
        ("simulate", ["simulate --help"]),
        ("train nosuch", ["there are", "cpu"]),
        ("what-if TRACES/tiny --gpus 8xH1000 --model Qwen2.5-7B", ["'H1000'", "'H100'"]),
        ("timeline TRACES/tiny --rl-step first", ["'all'"]),
        ("trace validate broken", ["outcomes.parquet"]),
        ("train qwen2.5-0.5b-gsm8k rollout.group_sise=4 --dry-run", ["rollout.group_sise", "'group_size'"]),
        ("ui nowhere", ["nowhere"]),
    ],
)
def test_a_wrong_command_line_is_refused(command, tmp_path, monkeypatch, line, facts):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(TRACES / "tiny", "broken")
    Path("broken/outcomes.parquet").write_text("PAR1")
    Path("taken.py").write_text("mine")
    Path("two.csv").write_text("step,iteration,length\n0,0,5\n0,1,9\n")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    code, out, err = command(*line.replace("TRACES", str(TRACES)).split())
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert all(fact in err for fact in facts)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


ON_A_SOURCE = [
    "calibrate SOURCE --out costs.json", "compare SOURCE", "doctor SOURCE", "rehearse SOURCE --model m",
    "report SOURCE --out page.html", "simulate SOURCE", "timeline SOURCE",
    "timeline TRACES/tiny --compare SOURCE", "trace annotate SOURCE --drafter ngram", "trace describe SOURCE",
    "trace generate --like SOURCE --out new", "trace import SOURCE --out new", "trace repair SOURCE",
    "trace validate SOURCE", "train qwen2.5-0.5b-gsm8k --dry-run --lengths SOURCE", "tune SOURCE --out policy.json",
    "verify SOURCE", "what-if SOURCE",
]  # fmt: skip
LONG = "x" * 300
SOURCES = ["/dev/null", "/dev/zero", "/proc/self/mem", "empty.csv", "file.csv/below", "folder", LONG, "locked/a.csv",
           "missing.csv", "pipe", "secret.csv", "socket"]  # fmt: skip


@contextmanager
def without_override():
    """Within, permissions stop root too: this thread has neither CAP_DAC_OVERRIDE nor CAP_DAC_READ_SEARCH."""
    library = ctypes.CDLL(None)
    header, before = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    library.capget(header, before)
    within = type(before)(before[0] & ~0b110, *before[1:])
    library.capset(header, within)
    try:
        yield
    finally:
        library.capset(header, before)


@pytest.fixture
def sources(tmp_path_factory, monkeypatch):
    """A current folder of sources that no command can read."""
    folder = tmp_path_factory.mktemp("sources")
    monkeypatch.chdir(folder)
    for name in ("folder", "locked"):
        Path(name).mkdir()
    for name in ("empty.csv", "file.csv"):
        Path(name).touch()
    for name in ("secret.csv", "locked/a.csv"):
        Path(name).write_text("5\n9\n")
    os.mkfifo("pipe")
    with closing(socket.socket(socket.AF_UNIX)) as server:
        server.bind("socket")
        for name in ("secret.csv", "locked"):
            Path(name).chmod(0)
        yield
    Path("locked").chmod(0o700)


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source[:20])
@pytest.mark.parametrize("line", ON_A_SOURCE)
def test_a_source_that_cannot_be_read_is_refused(command, sources, line, source):
    words = line.replace("SOURCE", source).replace("TRACES", str(TRACES)).split()
    with without_override():
        code, out, err = command(*words)
    assert (code, out, len(err.splitlines())) == (2, "", 1), err
    assert source in err


def test_a_path_the_system_refuses_is_named(command):
    for option in ("--costs", "--policy", "--acceptance"):
        code, out, err = command("simulate", TRACES / "tiny", f"{option}={LONG}")
        assert (code, out, len(err.splitlines())) == (2, "", 1), err
        assert LONG in err
