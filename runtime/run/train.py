"""`train`: a whole run by a recipe, from its first RL step or its newest checkpoint to its last."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tltlab.errors import ConfigError
from tltlab.files import write_json
from tltlab.runtime.engine.environment import run_json, versions
from tltlab.runtime.recipe.recipe import Recipe

from .checkpoints import step_of
from .grpo import GrpoRun
from .logging import RunLog
from .state import json_number

__all__ = ["GrpoRun", "train"]


def train(
    recipe: Recipe,
    out: Path,
    *,
    resume: bool = False,
    replay: Path | None = None,
) -> dict[str, Any]:
    """Run a recipe from its first step, or with `resume` from its newest checkpoint, to its last into the folder `out`.

    Returns the summary that it writes there.
    """
    out = Path(out)
    if not resume and (out / "run.json").exists():
        raise ConfigError(f"{out} already holds a run; choose another --out, or go on with it by --resume {out}")
    run = GrpoRun(recipe, out, resume=resume, replay=replay)
    description = run_json(recipe)
    with (
        # Before anything is written there: loggers hide what a run in progress tells.
        run.locked(),
        RunLog(recipe.log, out, recipe.train.steps, resume_from=run.begins_at, settings=description) as log,
        run,
    ):
        write_json(out / "run.json", description)
        run.policy.write(out / "policy.json")
        last = _steps(run, log)
        newest = run.checkpoints.latest()
        if newest is None or step_of(newest) != run.rl_step:
            # So that a run that has ended can go on with more steps.
            run.checkpoint()
        run.save()
        reports, drafter = run.reports, run.drafting.summary()
    summary = {
        "grpo_steps": len(reports),
        "reward_first": run.state.reward_first,
        "reward_last": last,
        "steps": [
            {"rl_step": r.rl_step, "policy": r.policy, "reward": json_number(r.reward_mean), "rollout_s": r.rollout_s}
            for r in reports
        ],
        "recorder_share": sum(r.recorder_s + r.record_s for r in reports) / sum(r.step_s for r in reports),
        "drafter": drafter,
        "trace": "trace",
        "policy": "policy.json",
        "versions": versions(),
    }
    write_json(out / "summary.json", summary)
    return summary


def _steps(run: GrpoRun, log: RunLog) -> float | None:
    """Train to the end; the held-out reward then, None without evaluation."""
    config, last_step = run.recipe.eval, run.recipe.train.steps
    evaluates = bool(run.data.heldout) and config.num_prompts > 0
    if evaluates and not run.rl_step and run.state.reward_first is None:
        run.state.reward_first = _evaluated(run, log, "before training")
    if run.rl_step:
        log.say(f"goes on with RL step {run.rl_step}")
    run.watch = lambda report: log.step(report, report.measures)
    while run.rl_step < last_step:
        report = run.step()
        if evaluates and config.every and run.rl_step % config.every == 0 and run.rl_step < last_step:
            _evaluated(run, log, f"after RL step {report.rl_step}")
    return _evaluated(run, log, "after training") if evaluates else None


def _evaluated(run: GrpoRun, log: RunLog, when: str) -> float:
    reward = run.evaluate()
    log.say(f"held-out reward {when} {reward:.3f}")
    # Loggers know no RL step before the first.
    log.measured(max(run.rl_step - 1, 0), {"reward/heldout": reward})
    return reward
