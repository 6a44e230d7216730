"""Command lines that make no sense are refused in one line that names what is wrong, and nothing is written."""

import shutil
from pathlib import Path

import pytest

from tltlab.experiments import GONE

from ..conftest import Command

TRACES = Path(__file__).resolve().parents[3] / "traces"
COSTS = "costs h100-qwen2.5-7b"


@pytest.mark.parametrize(
    ("line", "facts"),
    [
        ("simluate", ["'simluate'", "'simulate'"]),
        ("off-policy traces/tiny --json", ["off-policy", "decisions.parquet"]),
        ("completion traces/tiny --json", ["completion", "tltlab --install-completion"]),
        ("costs nowhere", ["cpu-small"]),
        (f"{COSTS} --batch 1,x", ["1,x", "--batch"]),
        (f"{COSTS} --batch 0", []),
        (f"{COSTS} --strategy 8,8 --accept-length 2", ["8,8", "--strategy"]),
        (f"{COSTS} --strategy 8,8,48", ["together"]),
        (f"{COSTS} --accept-length 2", ["together"]),
        (f"{COSTS} --strategy 2,2,4 --accept-length 3.5", ["3"]),
        ("doctor --quick --costs nothing.json", ["--costs"]),
        ("doctor TRACES/tiny --costs none.json", ["none.json"]),
        ("doctor TRACES --json", [str(TRACES)]),
        ("doctor nowhere --json", ["nowhere"]),
        ("doctor taken.py --json", ["taken.py"]),
        ("experiment baselin", ["'baselin'", "'baseline'", "staleness"]),
        *((f"experiment {name}", [name, *GONE[name].split()]) for name in GONE),
        ("new recipie", ["'recipie'", "'recipe'", "policy"]),
        ("new policy My-Policy", ["My-Policy"]),
        ("new policy taken", ["taken.py"]),
        ("settings rolout", ["'rolout'", "'rollout'"]),
        ("simulate two.csv --workers 1", ["step and iteration"]),
        ("timeline TRACES/tiny --out x.pdf", [".png", ".svg", ".json"]),
        ("timeline TRACES/tiny --rl-step first", ["'all'"]),
        ("timeline TRACES/tiny --rl-step 99", ["99", "0..3"]),
        ("trace generate --out new --prompts 0", ["prompts is 0"]),
        ("trace validate broken", ["outcomes.parquet"]),
        ("train qwen2.5-0.5b-gsm8k rollout.group_sise=4 --dry-run", ["rollout.group_sise", "'group_size'"]),
        ("ui nowhere", ["nowhere"]),
    ],
)
def test_a_wrong_command_line_is_refused(command: Command, tmp_path: Path, monkeypatch, line: str, facts: list[str]):
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
