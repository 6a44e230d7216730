"""Runs whose responses call a tool, recorded turn by turn and replayed; and a run that is one step off."""

import pytest

import tltlab
from tests.refused import refused
from tltlab.errors import ConfigError
from tltlab.runtime.recipe.recipe import load_recipe
from tltlab.runtime.run.grpo import GrpoRun
from tltlab.sim import simulate
from tltlab.sim.verification.rollouts import verify

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("one_ray")]
ECHO = """
class Echo:
    stop = ("w0", "w1", "w2")

    def step(self, messages):
        return None if messages[0]["content"].startswith("w3") else "w5 w6"
"""


def test_turns_are_recorded_trained_on_replayed_and_verified(recipe_file, tmp_path):
    (recipe_file.parent / "echoing_run.py").write_text(ECHO)
    settings = ("environment.path=echoing_run:Echo", "environment.max_turns=3", "environment.timeout_s=60",
                "policy=ngram:4", "repeat_every=0", "num_workers=1")  # fmt: skip
    with GrpoRun(load_recipe(recipe_file, [f"rollout.{setting}" for setting in settings]), tmp_path / "run") as run:
        assert 0.0 <= run.evaluate() <= 1.0
        reports = [run.step() for _ in range(3)]
    for report in reports:
        # Were what the tool said counted, its log-probs of 0 would show.
        assert report.metrics["mismatch_abs"] < 1e-4
    assert (tmp_path / "run" / "code" / "echoing_run.py").is_file()
    trace = tltlab.read(tmp_path / "run" / "trace")
    assert trace.iterations["num_drafted"].sum() > 0
    outcomes = trace.outcomes
    assert set(outcomes["turn"]) == {0, 1, 2}
    assert len(outcomes[outcomes["turn"] == 0]) == 3 * 4 * 4
    assert (outcomes["tool_s"].notna() == (outcomes["turn"] > 0)).all()
    assert (outcomes["reward"].notna() == (outcomes["turn"] == 0)).all()
    key = ["rl_step", "prompt_id", "sample", "turn"]
    tokens = trace.tokens.set_index(key).sort_index()
    for at, row in tokens.iterrows():
        *of, turn = at
        if turn:
            before = tokens.loc[(*of, turn - 1)]
            expected = [*before["prompt_token_ids"], *before["token_ids"], 4 + 5, 4 + 6]
            assert list(row["prompt_token_ids"]) == expected
    replayed = simulate(trace, costs="cpu-small")
    turns = replayed.summary["multi_turn"]
    assert turns["num_responses"] == 3 * 4 * 4
    assert turns["tool_s"] == pytest.approx(outcomes["tool_s"].sum())
    assert replayed.summary["regret"] >= -1e-9
    assert len(verify(tmp_path / "run").rows) == 3


def test_one_step_off_learns_from_older_weights(recipe_file, tmp_path):
    settings = ("rollout.one_step_off=true", "rollout.repeat_every=0", "rollout.max_draft_depth=0", "train.lr=5e-3",
                "rollout.num_workers=1")  # fmt: skip
    with GrpoRun(load_recipe(recipe_file, settings), tmp_path / "run") as run:
        reports = [run.step()]
        for attempt in (run.checkpoint, lambda: run.set_policy("none")):
            with refused(ConfigError):
                attempt()
        reports += [run.step(), run.step()]
        run.checkpoint()
        on_policy, off_policy = reports[0].metrics, reports[2].metrics
        assert on_policy["mismatch_abs"] < 1e-4
        assert off_policy["mismatch_abs"] > 10 * on_policy["mismatch_abs"]
        assert 0.0 < off_policy["mismatch_ess"] < 1.0
        trace = run.trace()
    assert trace.workload.groupby("rl_step")["policy_version"].unique().map(list).tolist() == [[0], [0], [1]]
    assert trace.steps[["staleness", "off_policy_share"]].to_numpy().tolist() == [[0, 0], [1, 1], [1, 1]]
