"""What `tltlab simulate` says of the makespan of another RL step."""

import json

import numpy as np
import pytest

from tltlab.cli.app import main
from tltlab.lengths.generate import log_normal


@pytest.fixture
def simulated(capsys, tmp_path):
    """Runs `tltlab simulate --json` on a drawn trace."""
    log_normal(prompts=32, rl_steps=8, median=400, cap=8192, workers=2).write(tmp_path / "t")

    def run(*options):
        with pytest.raises(SystemExit) as ended:
            main(["simulate", str(tmp_path / "t"), "--costs", "h100-qwen2.5-7b", "--json", *options])
        assert not ended.value.code
        return json.loads(capsys.readouterr().out)

    return run


def test_another_step_lies_around_those_simulated(simulated):
    found = simulated()
    ahead, seen = found["another_rl_step"], np.array(found["makespan_s_per_step"])
    assert ahead["low"] < np.median(seen) < ahead["high"]
    assert ((seen >= ahead["low"]) & (seen <= ahead["high"])).mean() >= 0.75
    faster = simulated("--policy", "ngram:4", "--acceptance", "geometric:0.8")["another_rl_step"]
    assert faster["median"] < ahead["median"]


def test_system_that_changes_lengths_shows_no_other_step(simulated):
    assert simulated("--system", "verl")["another_rl_step"] is None
