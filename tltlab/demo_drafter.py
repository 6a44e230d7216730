"""The demo's last part: a second GRPO run whose drafter learns on workers that are idle, beside what it was before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tltlab.bench.drafter.runs import Sizes, fixed_depth, recipe_of, run_steps, trained_beside, warmed_up
from tltlab.report.timeline import timeline
from tltlab.runtime.drafter.figures import annotated_drafts, by_position, idle_times, last_third
from tltlab.runtime.engine.environment import run_json
from tltlab.sim.verification.rollouts import verify

from .errors import RunError
from .files import write_json


def run_drafter(model: Path, out: Path, sizes: Sizes, *, seed: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Warm up a drafter for `model`, run GRPO with it into `out`, and say what its training gave.

    Four workers, as with two only one is ever idle. Frozen and adaptive drafter are compared on the same responses,
    those of the last third of the RL steps: the one that the run began with, and the one in service.
    """
    head = warmed_up(model, out / "warm-up", sizes, say)
    drafter = trained_beside(head, sizes).model_copy(update={"annotate": 8})
    policy = fixed_depth(out / "fixed.json", sizes.draft_depth)
    recipe = recipe_of(model, sizes, seed=seed, policy=policy, drafter=drafter)
    trace = run_steps(recipe, out, sizes.steps, say)
    write_json(out / "run.json", run_json(recipe))
    pairs = annotated_drafts(trace)
    if not pairs:
        raise RunError(f"{out}: no response of the run with the adaptive drafter was annotated")
    late = set(last_third([pair[0].rl_step for pair in pairs]))
    frozen, adaptive = ([pair[i] for pair in pairs if pair[i].rl_step in late] for i in (0, 1))
    idle = idle_times(trace)
    assert trace.steps is not None
    timeline(trace.select(trace.rl_steps[-1:]), out=out / "timeline.png")
    idle_s = sum(step.idle_s for step in idle)
    return {
        "frozen_accept_length": float(np.mean([step.accept_length for step in frozen])),
        "adaptive_accept_length": float(np.mean([step.accept_length for step in adaptive])),
        "accept_length_at_start": pairs[0][0].accept_length,
        "kept_by_position": {"frozen": by_position(frozen), "adaptive": by_position(adaptive)},
        "steps": [
            {
                "rl_step": first.rl_step,
                "frozen_accept_length": first.accept_length,
                "adaptive_accept_length": second.accept_length,
            }
            for first, second in pairs
        ],
        "drift_kl": float(trace.steps["drift_kl"].mean()),
        "updates": sum(step.updates for step in idle),
        "idle_share_used": sum(step.train_s for step in idle) / idle_s if idle_s else None,
        "verify": verify(out, seed=seed).json(),
        "run": out.name,
        "timeline": f"{out.name}/timeline.png",
    }
