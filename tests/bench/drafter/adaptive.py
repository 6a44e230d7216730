"""What training the drafter beside the rollout is worth: the same runs with a frozen drafter and an adaptive one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from bench.train.figures import as_text, decimals
from tltlab.console import table
from tltlab.errors import RunError
from tltlab.runtime.drafter.offline.data import PromptedText
from tltlab.runtime.drafter.offline.runs import (
    Kept,
    annotated_drafts,
    by_position,
    last_third,
    live_drafts,
)
from tltlab.runtime.models.runs import DRAFTER, Kind, Progress, fixed_depth, prompts_of, recipe_of, trained_beside
from tltlab.stats import Interval, interval_json, mean_of_few, paired_interval
from tltlab.traces.trace import Trace

from .runs import BenchSizes, judged, kept_folders, policy_kl, run_steps

GOAL = 1.15
KINDS: dict[str, Kind] = {"frozen": "never", "adaptive": "always"}
LITTLE = 0.03
"""A target has drifted little where the drafter it began with loses less than this share of its accept length."""
KL_TEXTS = 64


def bench_adaptive(
    model: Path, head: Path, out: Path, sizes: BenchSizes, *, seed: int, progress: Progress
) -> dict[str, Any]:
    """Two GRPO runs per seed from the same model, head, seed and prompts, drafting at the same fixed depth.

    In one the drafter stays as it is, in the other idle workers train it in every rollout. `live` is what the engines
    kept, step by step; `paired` the adaptive runs' own responses as the first drafter would have drafted them beside
    the one in service; `updates` what the trained drafter's first token was worth before and after each update of the
    policy, on fresh responses to held-out prompts; `drift` how far the policy went. Ratios are of the last third of the
    RL steps, their intervals from resampled RL steps; `goal` is what is to be reached.
    """
    policy = fixed_depth(out / "policy.json", sizes.draft_depth)
    rng = np.random.default_rng(seed)
    runs = []
    for number in range(seed, seed + sizes.seeds):
        traces = {}
        for name, kind in KINDS.items():
            progress(f"{name} drafter, seed {number}, {sizes.steps} RL steps of {sizes.workers} workers")
            recipe = recipe_of(model, sizes, seed=number, policy=policy, drafter=trained_beside(head, sizes, kind))
            folder = out / f"{name}-{number}"
            traces[name] = run_steps(recipe, folder, sizes.steps, progress, keep=name == "adaptive")
        progress("judging the kept drafters on fresh responses")
        runs.append(
            {
                "seed": number,
                **compared(traces["frozen"], traces["adaptive"]),
                "updates": around_updates(model, head, out / f"adaptive-{number}", sizes, number),
                "drift": {
                    name: drift(model, out / f"{name}-{number}" / "checkpoints" / "final", trace)
                    for name, trace in traces.items()
                },
            }
        )
    return {
        "workers": sizes.workers,
        "steps": sizes.steps,
        "draft_depth": sizes.draft_depth,
        "goal": GOAL,
        **summary(runs, rng),
        "runs": runs,
    }


def compared(frozen: Trace, adaptive: Trace) -> dict[str, Any]:
    """What the traces of two runs say: `live` and `paired` drafts by RL step. RunError where nothing was drafted."""
    live = {name: live_drafts(trace, DRAFTER) for name, trace in (("frozen", frozen), ("adaptive", adaptive))}
    for name, steps in live.items():
        if not steps:
            raise RunError(f"the learned drafter drafted nothing in the {name} run; its notes may say why")
    pairs = annotated_drafts(adaptive)
    paired = {"initial": [pair[0] for pair in pairs], "in_service": [pair[1] for pair in pairs]}
    return {
        part: {
            name: [asdict(step) | {"accept_length": step.accept_length} for step in steps] for name, steps in of.items()
        }
        for part, of in (("live", live), ("paired", paired))
    }


def around_updates(model: Path, head: Path, run: Path, sizes: BenchSizes, seed: int) -> list[dict[str, Any]]:
    """The first token's acceptance around each update of the policy, on fresh responses to the same held-out prompts.

    `before`: the drafter that training left, on the policy it was trained for; `after`: the same on the updated policy;
    `recovered`: the next rollout's training done, on that same policy, None after the last. `initial_length` and
    `length`: accept lengths on the updated policy of the drafter that the run began with and of the one in service.
    """
    prompts = prompts_of(model, "heldout", sizes.texts)
    targets = [model, *(kept_folders(run, step)[0] for step in range(1, sizes.steps + 1))]
    heads = [head, *(kept_folders(run, step)[1] for step in range(1, sizes.steps + 1))]
    judgements = []
    for step, target in enumerate(targets):
        following = heads[min(step + 1, sizes.steps)]
        judgements.append(judged(target, [heads[0], heads[step], following], prompts, sizes, seed=seed))
    rows = []
    for step, (before, after) in enumerate(pairwise(judgements)):
        rows.append(
            {
                "rl_step": step,
                "before": before[2].positions[0],
                "after": after[1].positions[0],
                "recovered": after[2].positions[0] if step + 1 < sizes.steps else None,
                "initial_length": after[0].accept_length,
                "length": after[1].accept_length,
                "initial_length_at_start": judgements[0][0].accept_length,
            }
        )
    return rows


def drift(model: Path, final: Path, trace: Trace) -> dict[str, Any]:
    """How far a run's policy went: `kl` from its start on the last step's responses, and `per_step`; nats per token."""
    tokens = trace.select(trace.rl_steps[-1:]).tokens
    assert tokens is not None
    assert trace.steps is not None
    rows = tokens.sample(min(KL_TEXTS, len(tokens)), random_state=0)
    texts = [
        PromptedText(prompt_token_ids=prompt.tolist(), token_ids=response.tolist())
        for prompt, response in zip(rows["prompt_token_ids"], rows["token_ids"], strict=True)
    ]
    return {"kl": policy_kl(final, model, texts), "per_step": [float(kl) for kl in trace.steps["drift_kl"].fillna(0.0)]}


def summary(runs: Sequence[Mapping[str, Any]], rng: np.random.Generator) -> dict[str, Any]:
    """The figures of all seeds together, from what each run's `compared`, `around_updates` and `drift` gave."""
    live = {name: _numbered(runs, "live", name) for name in ("frozen", "adaptive")}
    paired = {name: _numbered(runs, "paired", name) for name in ("initial", "in_service")}
    late = _late(live["adaptive"])
    rows = [row for run in runs for row in run["updates"]]
    pairs = {
        "falls": [(row["after"], row["before"]) for row in rows],
        "recovers": [(row["recovered"], row["after"]) for row in rows],
    }
    start = float(np.mean([run["updates"][0]["initial_length_at_start"] for run in runs]))
    end = float(np.mean([run["updates"][-1]["initial_length"] for run in runs]))
    return {
        "accept_length_at_start": {name: steps[0].accept_length for name, steps in live.items()},
        "accept_length": {name: _mean(_in(steps, late)) for name, steps in live.items()},
        "ratio": interval_json(length_ratio(_in(live["adaptive"], late), _in(live["frozen"], late), rng)),
        "paired_ratio": interval_json(length_ratio(_in(paired["in_service"], late), _in(paired["initial"], late), rng)),
        "by_position": {name: by_position(_in(steps, late)) for name, steps in live.items()},
        **{name: _change(values) for name, values in pairs.items()},
        "initial_drafter": {"at_start": start, "at_end": end, "change": end / start - 1},
        "little_drift": end / start - 1 > -LITTLE,
        "kl_from_start": float(np.mean([run["drift"]["adaptive"]["kl"] for run in runs])),
        "kl_per_step": float(np.mean([kl for run in runs for kl in run["drift"]["adaptive"]["per_step"]])),
    }


def _numbered(runs: Sequence[Mapping[str, Any]], part: str, name: str) -> list[Kept]:
    """The steps of all runs, those of run n numbered from n million on."""
    return [
        Kept(rl_step=n * 1_000_000 + step["rl_step"], drafts=step["drafts"], kept=tuple(step["kept"]))
        for n, run in enumerate(runs)
        for step in run[part][name]
    ]


def _late(steps: Sequence[Kept]) -> set[int]:
    """The last third of each run's RL steps, numbered as by `_numbered`."""
    by_run: dict[int, list[int]] = {}
    for step in steps:
        by_run.setdefault(step.rl_step // 1_000_000, []).append(step.rl_step)
    return {number for numbers in by_run.values() for number in last_third(numbers)}


def _in(steps: Sequence[Kept], rl_steps: set[int]) -> list[Kept]:
    return [step for step in steps if step.rl_step in rl_steps]


def _mean(steps: Sequence[Kept]) -> float | None:
    return float(np.mean([step.accept_length for step in steps])) if steps else None


def _change(pairs: Sequence[tuple[float | None, float | None]]) -> dict[str, Any] | None:
    """The mean difference of pairs of which both are known."""
    changes = [now - then for now, then in pairs if now is not None and then is not None]
    return interval_json(mean_of_few(changes)) if changes else None


def text(result: Mapping[str, Any]) -> str:
    """The result for people."""
    depth = result["draft_depth"]
    lines = [
        f"{result['steps']} GRPO steps, {result['workers']} workers, {len(result['runs'])} seed(s), draft depth {depth}"
        ": tokens per draft, live",
    ]
    run = result["runs"][0]
    frozen = {step["rl_step"]: step["accept_length"] for step in run["live"]["frozen"]}
    rows = [
        (
            at := step["rl_step"], decimals(frozen.get(at)), f"{step['accept_length']:.2f}",
            f"{run['drift']['adaptive']['per_step'][at]:.2g}",
        )
        for step in run["live"]["adaptive"]
    ]  # fmt: skip
    lines.append(table(("step", "frozen", "adaptive", "policy moved, nats/token"), rows, left=0))
    start, late = result["accept_length_at_start"], result["accept_length"]
    drafter = result["initial_drafter"]
    lines += [
        f"at step 0: frozen {start['frozen']:.2f}, adaptive {start['adaptive']:.2f}; "
        f"last third: frozen {decimals(late['frozen'])}, adaptive {decimals(late['adaptive'])}",
        f"adaptive / frozen in the last third  {as_text(result['ratio'])} (goal {result['goal']})",
        f"the same responses, in service / initial drafter  {as_text(result['paired_ratio'])}",
        "kept at each position, frozen    " + " ".join(decimals(p) for p in result["by_position"]["frozen"]),
        "kept at each position, adaptive  " + " ".join(decimals(p) for p in result["by_position"]["adaptive"]),
        f"first token around an update of the policy: falls by {as_text(result['falls'], sign=-1)}, "
        f"the next training gives {as_text(result['recovers'])}",
        f"the policy went {result['kl_from_start']:.3g} nats per token from its start, {result['kl_per_step']:.2g} a "
        f"step; the initial drafter's accept length went from {drafter['at_start']:.2f} to {drafter['at_end']:.2f}",
    ]
    if result["little_drift"]:
        lines.append(
            "The target drifted little, as its first drafter sees it: what the adaptive one gains comes from more "
            "training, not from following."
        )
    return "\n".join(lines)


def length_ratio(adaptive: Sequence[Kept], frozen: Sequence[Kept], rng: np.random.Generator) -> Interval | None:
    """Mean accept length of one over that of the other in the RL steps that both have; None where there is none."""
    first, second = ({step.rl_step: step.accept_length for step in steps} for steps in (adaptive, frozen))
    shared = sorted(first.keys() & second.keys())
    if not shared:
        return None
    return paired_interval([first[s] for s in shared], [second[s] for s in shared], rng=rng)
