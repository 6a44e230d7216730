"""What the README shows runs as it stands there."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

from tltlab.runtime.recipe.recipe import Recipe

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def tltlab(line: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    words = line.split("#")[0].split()
    return subprocess.run([sys.executable, "-m", *words], cwd=cwd, capture_output=True, text=True, check=False)


def test_the_policy_of_the_readme_runs_in_the_simulator(tmp_path: Path):
    (tmp_path / "mine.py").write_text(blocks("python")[0])
    shutil.copytree(ROOT / "traces" / "tiny", tmp_path / "traces" / "tiny")
    line = next(line for line in README.splitlines() if line.strip().startswith("tltlab simulate traces/tiny"))
    done = tltlab(line, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "makespan" in done.stdout


def test_a_csv_of_lengths_is_enough(tmp_path: Path):
    (tmp_path / "lengths.csv").write_text("120\n" * 60 + "3000\n" * 4)
    line = next(line for line in README.splitlines() if line.strip().startswith("tltlab simulate lengths.csv"))
    done = tltlab(line, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "accept length" in done.stdout


def test_the_python_of_the_readme_runs(tmp_path: Path):
    shutil.copytree(ROOT / "traces" / "tiny", tmp_path / "traces" / "tiny")
    done = subprocess.run([sys.executable, "-c", blocks("python")[1]], cwd=tmp_path, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    assert (tmp_path / "timeline.png").exists()


def test_gpus_you_do_not_have_can_be_simulated(tmp_path: Path):
    lines = [line.strip() for line in README.splitlines() if "my-trace" in line and line.startswith("    tltlab")]
    assert [line.split()[1] for line in lines] == ["trace", "simulate", "simulate", "compare"]
    shown = [tltlab(line, tmp_path) for line in lines]
    assert [done.returncode for done in shown] == [0] * 4, [done.stderr for done in shown]
    assert "rollout share" in shown[2].stdout
    assert "regret" in shown[3].stdout


def test_every_recipe_parses():
    for text in [*blocks("toml"), *(path.read_text() for path in ROOT.glob("traces/*/recipe.toml"))]:
        Recipe.model_validate(tomllib.loads(text))


def test_shipped_traces_are_valid_and_tiny_is_small():
    for folder in sorted((ROOT / "traces").glob("*/manifest.json")):
        done = tltlab(f"tltlab trace validate {folder.parent}", ROOT)
        assert done.returncode == 0, done.stderr
    assert sum(file.stat().st_size for file in (ROOT / "traces" / "tiny").iterdir()) < 200_000
