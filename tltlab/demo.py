"""The whole loop on this machine: make a model, train, record, calibrate, predict, tune a policy, train on with it."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, zip_longest
from pathlib import Path

import numpy as np
import pandas as pd

from tltlab.calibration.api import Calibration, calibrate
from tltlab.calibration.idle_training import recorded_updates
from tltlab.console import progress, table_text
from tltlab.errors import RunError
from tltlab.files import sealed, write_json
from tltlab.policies.policy import Policy, load_policy
from tltlab.report.timeline import timeline, write_perfetto
from tltlab.runtime.drafter.offline.runs import annotated_drafts, last_third
from tltlab.runtime.engine.environment import run_json, versions
from tltlab.runtime.models.make import Size, make_model
from tltlab.runtime.models.runs import Sizes, prompts_of, recipe_of, trained_beside, warmed_up
from tltlab.runtime.ray.start import ray_running
from tltlab.runtime.recipe.recipe import Recipe
from tltlab.runtime.recipe.sections import DataConfig, EvalConfig, RolloutConfig, TrainConfig
from tltlab.runtime.run.grpo import GrpoRun
from tltlab.runtime.run.rows import StepReport
from tltlab.sim import SimResult, simulate
from tltlab.sim.tuning.tune import TuneResult, tune
from tltlab.sim.verification.rollouts import Verification, nearest, verify
from tltlab.traces.metrics import mean_accept_length, summary
from tltlab.traces.trace import Trace, read

from .records import Json, frozen

PLAIN, EXPLORE, TUNED, ADAPTIVE = "none", "explore", "tuned", "adaptive"
TRIALS = 12


@frozen
class DemoSetting:
    """How much of everything: RL steps without speculation, exploring, tuned, under `adaptive`; a drafter's run."""

    size: str | Size
    plain_steps: int
    explore_steps: int
    tuned_steps: int
    adaptive_steps: int
    heldout: int
    drafter: Sizes

    def policies(self) -> list[str]:
        """The policy of each RL step. Plain and exploring steps alternate, so neither owns a stage of training."""
        mixed = chain.from_iterable(zip_longest([EXPLORE] * self.explore_steps, [PLAIN] * self.plain_steps))
        return [*filter(None, mixed), *[TUNED] * self.tuned_steps, *[ADAPTIVE] * self.adaptive_steps]


FULL = DemoSetting(
    size="small", plain_steps=4, explore_steps=6, tuned_steps=6, adaptive_steps=4, heldout=512,
    drafter=Sizes(steps=8, prompts_per_step=16, heldout=0),
)  # fmt: skip
FAST = DemoSetting(
    size="tiny", plain_steps=2, explore_steps=2, tuned_steps=2, adaptive_steps=2, heldout=256,
    drafter=Sizes(steps=6, heldout=0),
)  # fmt: skip


def run_demo(out: Path, setting: DemoSetting, *, task: str, seed: int) -> Json:
    """Run every stage into `out`; return the content of `summary.json`."""
    began = time.perf_counter()

    def report(message: str) -> None:
        progress(f"[{time.perf_counter() - began:4.0f} s] {message}")

    report(f"1/7 training a {setting.size} model from scratch on {task}")
    model = make_model(out / "model", size=setting.size, task=task, seed=seed, progress=report)
    recipe = demo_recipe(out / "model", setting, model, seed)
    with ray_running(), ThreadPoolExecutor(1) as beside:
        report("2/7 starting Ray, two vLLM engines and the trainer")
        with GrpoRun(recipe, out) as run:
            write_json(out / "run.json", sealed(run_json(recipe)))
            reward_first = run.evaluate()
            report(f"held-out reward {reward_first:.3f} before training; 3/7 GRPO, recorded")
            names = setting.policies()
            first = names.index(TUNED)
            for name in names[:first]:
                run.set_policy(load_policy(name), name)
                report(str(run.step()))
            report("4/7 calibrating and tuning a policy in the simulator")
            fitted, tuning = fit_and_tune(run.trace(), out, seed)
            for candidate in tuning.candidates[:3]:
                report(f"{candidate.name}: {candidate.makespan_s:.2f} s a rollout in simulation")
            report(tuning.verdict)
            report(f"5/7 GRPO continues under {tuning.name}, from {out / 'policy.json'}, then under {ADAPTIVE}")
            tuned = load_policy(out / "policy.json")
            run.set_policy(tuned, TUNED)
            for _ in range(setting.tuned_steps):
                report(str(run.step()))
            run.set_policy(load_policy(ADAPTIVE), ADAPTIVE)
            for _ in range(setting.adaptive_steps):
                report(str(run.step()))
            reward_last = run.evaluate()
            report(f"held-out reward {reward_last:.3f} after {len(names)} steps")
            reports = run.reports
            run.save()
        report("6/7 predicting every step from the others, while the last run starts")
        predicting = beside.submit(predict, out, names, fitted, tuned, seed)
        report("7/7 GRPO once more from the start, four workers, with a drafter that learns on those that are idle")
        drafter = run_drafter(
            out / "model", out / "adaptive", setting.drafter, seed=seed, report=report, before_steps=predicting.result
        )
        verification, without_s = predicting.result()
    trace = read(out / "trace")
    predicted = verification.rows.set_index("rl_step")["predicted_s"]
    tuned_steps = [s for s, name in enumerate(names) if name == TUNED]
    result = {
        "grpo_steps": len(reports),
        "reward_first": reward_first,
        "reward_last": reward_last,
        "heldout_prompts": setting.heldout,
        "steps": [
            _step(report, trace.select([report.rl_step]), float(predicted[report.rl_step])) for report in reports
        ],
        "mean_accept_length": mean_accept_length(trace),
        "median_prediction_error": verification.median_error,
        "verify": verification.json(),
        "tuned_rollout_s": float(np.mean([reports[s].rollout_s for s in tuned_steps])),
        "predicted_rollout_s_without_speculation": without_s,
        "drafter": drafter,
        "candidates": [{"name": c.name, "makespan_s": c.makespan_s} for c in tuning.candidates],
        "model": model,
        "trace": "trace",
        "policy": "policy.json",
        "costs": "costs.json",
        "timeline": "timeline.png",
        "wall_s": time.perf_counter() - began,
        "versions": versions(),
    }
    write_json(out / "summary.json", result)
    report(f"done: {out / 'summary.json'}, {out / 'timeline.png'}")
    return result


def predict(out: Path, names: list[str], fitted: Calibration, tuned: Policy, seed: int) -> tuple[Verification, float]:
    """Predict each RL step from the others and draw one; mean seconds of the tuned steps without speculation too."""
    trace, steps = read(out / "trace"), [s for s, name in enumerate(names) if name == TUNED]
    # Luck in acceptance moves a single simulation by some percent.
    without_s = [sampled(trace, s, load_policy(PLAIN), fitted, seed + n).makespan_s for s in steps for n in range(5)]
    pictures(trace, steps[(len(steps) - 1) // 2], tuned, out, seed)
    return verify(out, seed=seed), float(np.mean(without_s))


def fit_and_tune(recorded: Trace, out: Path, seed: int) -> tuple[Calibration, TuneResult]:
    """Costs and acceptance of the later half of the steps, and a policy tuned on them; all three are written to `out`.

    RunError where nothing was drafted.
    """
    # Training makes responses more predictable, so drafts are accepted more and more: fit what is recent.
    recent = recorded.rl_steps[len(recorded.rl_steps) // 2 :]
    fitted = calibrate(recorded.select(recent))
    if fitted.acceptance is None:
        raise RunError("nothing was drafted while exploring, so there is no policy to tune")
    fitted.costs.write(out / "costs.json")
    fitted.acceptance.write(out / "acceptance.json")
    tuning = tune(
        recorded.select(recent),
        costs=fitted.costs,
        acceptance=fitted.acceptance,
        placement="recorded",
        trials=TRIALS,
        seed=seed,
        provenance={"trace": "trace", "costs": "costs.json", "acceptance": "acceptance.json", "fitted_on": recent},
    )
    tuning.policy.write(out / "policy.json")
    return fitted, tuning


def _step(report: StepReport, step: Trace, predicted_s: float) -> Json:
    return {
        "rl_step": report.rl_step,
        "policy": report.policy,
        "reward": report.reward_mean,
        "num_tokens": report.num_tokens,
        "rollout_s": report.rollout_s,
        "predicted_rollout_s": predicted_s,
        "tokens_per_s": report.num_tokens / report.rollout_s,
        "mean_accept_length": mean_accept_length(step),
        "bubble_fraction": summary(step)["bubble_fraction"],
        "train_s": report.train_s,
        "mismatch_kl": report.metrics["mismatch_kl"],
        "recorder_s": report.recorder_s,
    }


def demo_recipe(model: Path, setting: DemoSetting, report: Json, seed: int) -> Recipe:
    """The recipe of the demo's training run on the model that it just made."""
    return Recipe(
        model=str(model),
        reward=report["reward"],
        data=DataConfig(train=str(model / "train.jsonl"), heldout=str(model / "heldout.jsonl")),
        rollout=RolloutConfig(max_draft_depth=8, repeat_every=3, vllm={"max_num_seqs": 256}),
        train=TrainConfig(steps=len(setting.policies()), ranks=2),
        eval=EvalConfig(num_prompts=setting.heldout),
        seed=seed,
    )


def sampled(trace: Trace, rl_step: int, policy: Policy, fitted: Calibration, seed: int) -> SimResult:
    """A sampled simulation of a step's recorded lengths."""
    return simulate(
        trace.select([rl_step]),
        policy,
        costs=fitted.costs,
        acceptance=fitted.acceptance,
        placement="recorded",
        mode="sampled",
        seed=seed,
    )


def pictures(trace: Trace, rl_step: int, tuned: Policy, out: Path, seed: int) -> None:
    """Write the recorded step above its simulation from the steps around it, as a picture and for Perfetto."""
    fitted = calibrate(trace.select(nearest(trace.rl_steps, rl_step, 8)))
    simulated = sampled(trace, rl_step, tuned, fitted, seed)
    timeline(trace.select([rl_step]), compare=simulated, out=out / "timeline.png", rollout_only=True)
    write_perfetto(out / "timeline.json", trace)


def demo_text(result: Json) -> str:
    """The demo's result for a terminal: a row per policy, then what it comes to."""
    steps = pd.DataFrame(result["steps"])
    drafter = result["drafter"]
    spread = result["verify"]["repeat_spread"]
    policies = steps.groupby("policy", sort=False)
    rows = policies.mean(numeric_only=True).fillna({"mean_accept_length": 1.0}).assign(steps=policies.size())
    columns = (
        "policy: {policy}; steps: {steps}; reward: {reward:.3f}; tokens/s: {speed:.0f}; rollout s: {rollout_s:.2f}; "
        "predicted s: {predicted_rollout_s:.2f}; accept len: {mean_accept_length:.2f}; bubbles: {bubble_fraction:.1%}"
    )
    rows["speed"] = rows["num_tokens"] / rows["rollout_s"]
    lines = [
        table_text(rows.reset_index(), columns, left=1),
        "",
        f"held-out reward {result['reward_first']:.3f} -> {result['reward_last']:.3f} "
        f"({result['heldout_prompts']} prompts, {result['grpo_steps']} GRPO steps)",
        f"rollout time of a step predicted from the other steps: median error {result['median_prediction_error']:.1%}, "
        f"worst {result['verify']['worst_error']:.1%}; the same rollout run twice varies by "
        f"{'an unknown amount' if spread is None else format(spread, '.1%')}; with the machine's speed known "
        f"{result['verify']['median_error_at_step_time']:.1%}, {result['verify']['worst_step']}",
        f"the tuned steps took {result['tuned_rollout_s']:.2f} s each; the same responses without speculation would "
        f"take {result['predicted_rollout_s_without_speculation']:.2f} s (simulated)",
        f"a drafter trained on idle workers: {drafter['adaptive_accept_length']:.2f} tokens per draft in the last "
        f"third of {len(drafter['steps'])} steps, the one it was at first {drafter['frozen_accept_length']:.2f} on the "
        f"same responses, to prompts that neither has seen; {drafter['updates']} updates",
        f"{result['wall_s']:.0f} s in all",
    ]
    return "\n".join(lines)


def run_drafter(
    model: Path,
    out: Path,
    sizes: Sizes,
    *,
    seed: int,
    report: Callable[[str], None],
    before_steps: Callable[[], object],
) -> Json:
    """Warm up a drafter for `model`, run GRPO with it into `out`, and return the effect of its training.

    Four workers, as with two only one is ever idle. Frozen and adaptive drafter are compared on the same responses,
    those of the last third of the RL steps to prompts that neither has seen: the one that the run began with, and the
    one in service. `before_steps` is called once all has started.
    """
    head = warmed_up(model, out / "warm-up", sizes, report)
    drafter = trained_beside(head, sizes).model_copy(update={"annotate": 8})
    recipe = recipe_of(model, sizes, seed=seed, drafter=drafter, **sizes.drafting)
    with GrpoRun(recipe, out) as run:
        # Rollouts are measured, so nothing else may run meanwhile.
        before_steps()
        for _ in range(sizes.steps):
            report(str(run.step()))
        run.save()
    trace = read(out / "trace")
    write_json(out / "run.json", sealed(run_json(recipe)))
    warmed_on = {prompt.prompt_id for prompt in prompts_of(model, "train", sizes.warm_up_texts)}
    pairs = annotated_drafts(trace, warmed_on)
    if not pairs:
        raise RunError(f"{out}: no response to a new prompt of the run with the adaptive drafter was annotated")
    late = set(last_third([pair[0].rl_step for pair in pairs]))
    frozen, adaptive = ([pair[i] for pair in pairs if pair[i].rl_step in late] for i in (0, 1))
    timeline(trace.select(trace.rl_steps[-1:]), out=out / "timeline.png")
    return {
        "frozen_accept_length": float(np.mean([step.accept_length for step in frozen])),
        "adaptive_accept_length": float(np.mean([step.accept_length for step in adaptive])),
        "steps": [
            {
                "rl_step": first.rl_step,
                "frozen_accept_length": first.accept_length,
                "adaptive_accept_length": second.accept_length,
            }
            for first, second in pairs
        ],
        "updates": 0 if trace.spot_training is None else sum(recorded_updates(trace.spot_training).values()),
        "verify": verify(out, seed=seed).json(),
        "run": out.name,
        "timeline": f"{out.name}/timeline.png",
    }
