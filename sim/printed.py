"""Results of the simulator for people: tables and sentences, as commands print them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from tltlab.console import table, verdict_text
from tltlab.records import Fields, Json
from tltlab.sim.simulate import outside_text
from tltlab.sim.study.reduce import DRAWS_ONLY, REGRET, drafters_text, granted_text, speed_up_cells
from tltlab.sim.study.sample import sample_text

if TYPE_CHECKING:
    from tltlab.sim.study.reduce import Comparison
    from tltlab.sim.study.what_if import WhatIf
    from tltlab.sim.tuning.tune import TuneResult

STAYING = "; staying: above the bound where all stay on their workers"


def summary_lines(summary: Json) -> list[tuple[str, str]]:
    """The summary for people: a label and a figure in words each."""

    def shown(key: str, form: str) -> str:
        return "unknown" if summary[key] is None else format(summary[key], form)

    between = ""
    if summary["makespan_interval_s"] is not None:
        low, high = summary["makespan_interval_s"]
        between = f", 90 %: {low:.4g} to {high:.4g} s"
    once = ", a group's prompt once on each worker" if summary["prefix_caching"] else ""
    accept = "no speculation" if summary["mean_accept_length"] is None else shown("mean_accept_length", ".3f")
    steps = len(summary["makespan_s_per_step"])
    regret = f"regret {shown('regret', '.1%')}); {shown('fixed_bound_s', '.4g')} s where all stay on their workers"
    bound = f"{shown('lower_bound_s', '.4g')} s, any use of the drafts that the acceptance covers ({regret}"
    speed_up = []
    if ratios := summary["speedup"]:
        step = "" if ratios["rl_step"] is None else f", of the RL step {ratios['rl_step']:.2f}x"
        speed_up = [("speed-up", f"{ratios['rollout']:.2f}x over no speculation{step}")]
    lines = [
        ("makespan", f"{shown('makespan_s', '.4g')} s (mean of {steps} RL steps){between}"),
        *speed_up,
        ("costs", summary["evidence"]["says"]),
        ("lower bound", bound),
        ("throughput", f"{shown('tokens_per_s', '.4g')} tokens/s"),
        ("responses, tokens", f"{summary['num_responses']}, {summary['num_tokens']}"),
        ("prefilled", f"{summary['prefilled_tokens']} tokens{once}"),
        ("idle workers", f"{shown('bubble_fraction', '.1%')} of worker time"),
        ("tail", f"{shown('tail_fraction', '.1%')} of the rollout"),
        ("accept length", accept),
        ("costs, acceptance", f"{summary['costs']}; {summary['acceptance'] or 'none needed'}"),
        ("simulated in", f"{shown('wall_s', '.3g')} s"),
    ]
    if outside := outside_text(summary["outside_calibration"]):
        lines.append(("extrapolated", outside))
    if stale := summary["asynchronous"]:
        bias = "unknown" if stale["length_bias"] is None else f"{stale['length_bias']:.3f}"
        means = f"{stale['mean_length_trained']:.4g} of {stale['mean_length_generated']:.4g} tokens: bias {bias}"
        ages = f"{stale['staleness_mean']:.2f} updates old, {stale['staleness_max']} at most"
        lines.append(("trained, generated", f"{means}; {ages}, {stale['dropped_share']:.1%} dropped"))
    if turns := summary["multi_turn"]:
        waited = f", {turns['tool_wait_s']:.4g} s waiting for one" if turns["tool_wait_s"] else ""
        prefilled = f"{turns['prefilled_tokens'] / max(1, turns['prompt_tokens']):.1%} of prompt tokens prefilled"
        away = f"{turns['turns_per_response']:.2f} per response, {turns['tool_s']:.4g} s at tools{waited}"
        lines.append(("turns", f"{away}, {prefilled}"))
    if spot := summary["spot_training"]:
        idle = f"{spot['used_share']:.1%} of {spot['idle_worker_s']:.4g} idle worker seconds"
        lines.append(("spot training", f"{spot['updates']} updates in {idle}, {spot['checkpoints']} checkpoints"))
    if "step_s" in summary:
        each = (f"{name.removesuffix('_s')} {seconds:.4g} s" for name, seconds in summary["stages"].items())
        lines += [
            ("RL step", f"{summary['step_s']:.4g} s ({summary['topology']}, {summary['num_gpus']} GPUs)"),
            ("stages", ", ".join(each)),
            ("rollout share", shown("rollout_share", ".1%")),
            ("idle GPUs", f"{summary['idle_gpu_fraction'] or 0.0:.1%} of GPU time"),
        ]
    return lines


def comparison_text(found: Comparison, rows: Sequence[Fields], *, sampled: bool) -> str:
    """Return the comparison for people, what was assumed below it; `sampled` if it chose its RL steps itself."""
    kind, attrs = found.compared, found.attrs
    whole = any(row.get("step_s") is not None for row in rows)
    shown = [_cells(row, kind, attrs["axes"], whole=whole) for row in rows]
    lines = [table(list(shown[0]), [list(cells.values()) for cells in shown], left=2 + len(attrs["axes"]))]
    lines += filter(None, [granted_text(rows, kind)])
    nums = [row.get("num_rl_steps", attrs["num_rl_steps"]) for row in rows]
    steps = sample_text(nums, attrs["num_rl_steps_of"], sampled=sampled)
    lines.append(
        f"simulated, {steps}; speed-up: over {attrs['baseline']}; {DRAWS_ONLY}; {REGRET}{'' if whole else STAYING}"
    )
    notes: dict[str, list[str]] = {}
    for row in rows if kind == "system" else ():
        marked = [f"* {note}" for note in row["stand_ins"]] + [f"+ {note}" for note in row["defaults"]]
        marked += [] if row["lossless"] else ["not lossless"]
        marked += [] if row["runs_here"] is True else [str(row["runs_here"])]
        marked += (
            []
            if row["workers"] == attrs["num_workers"]
            else [f"generates on {row['workers']} workers, the others train"]
        )
        if row["length_bias"] != 1.0:
            marked.append(f"length of what is trained on over what is begun: {row['length_bias']:.2f}")
        for note in marked:
            notes.setdefault(note, []).append(row["system"])
    lines += [f"{note} ({', '.join(dict.fromkeys(names))})" for note, names in notes.items()]
    lines += [f"left out: {name}: {why}" for name, why in attrs.get("left_out", {}).items()]
    if kind == "system":
        lines.append("--json has each system's assumptions, source and claim, and the rest of its figures")
    return "\n".join(lines)


def _cells(row: Fields, kind: str, axes: Fields, *, whole: bool) -> dict[str, str]:
    """Return the cells of a row by column."""
    marks = "*" * bool(row.get("stand_ins")) + "+" * bool(row.get("defaults"))
    times, draws = speed_up_cells(row)
    cells = {kind: row[kind] + marks} | {name: str(row[name]) for name in axes}
    cells |= {"drafters": drafters_text(row["drafters"]), "rollout s": f"{row['makespan_s']:.4g}", "speed-up": times}
    if whole:
        times, draws = speed_up_cells(row, "step_speed_up")
        cells |= {"RL step s": f"{row['step_s']:.4g}", "speed-up ": times}
    cells["draws only"] = draws
    if kind == "system" and not whole:
        cells["tokens/s"] = f"{row['tokens_per_s_ratio']:.2f}x"
    bounds = {"regret": "regret", "staying": "fixed_regret"}
    for title in ["regret"] if whole else bounds:  # The table of whole RL steps has no room for both.
        cells[title] = "" if row[bounds[title]] is None else f"{row[bounds[title]]:.1%}"
    return cells


def tuning_text(result: TuneResult, out: Path) -> str:
    """Return the result for people."""
    rows: list[tuple[str, ...]] = []
    for row in result.candidates:
        ratio = {"": row.ratio, "_low": row.ratio_high, "_high": row.ratio_low}
        speed_up = speed_up_cells({f"speed_up{end}": value and 1.0 / value for end, value in ratio.items()})
        regret = "" if row.regret is None else f"{row.regret:.1%}"
        name = row.name if len(row.name) <= 29 else row.name[:26] + "..."
        rows.append((name, drafters_text(row.drafters), f"{row.makespan_s:.4g}", *speed_up, regret))
    rows += [
        ("per-iteration oracle", "", f"{result.oracle_s:.4g}"),
        ("clairvoyant bound", "", f"{result.bound_s:.4g}"),
        ("bound where all stay", "", f"{result.fixed_bound_s:.4g}"),
    ]
    searched = f"{len(result.searched)} policies and {len(result.trials)} settings in {result.wall_s:.0f} s"
    if result.trials:
        settings = ", ".join(f"{name} {value}" for name, value in result.trials[0].settings.items())
        searched += f"; tuned {result.tuned}: {settings}"
    origin = result.policy.provenance
    steps = [
        f"{name}: tuned on {len(tuned)} and judged on {len(judged)} of {num} RL steps"
        for name, num, tuned, judged in zip(
            origin["trace"], origin["num_rl_steps"], result.tuned_on, result.judged_on, strict=True
        )
    ]
    lists = {
        "assumed": [
            *filter(None, [granted_text([asdict(row) for row in result.candidates], "name")]),
            f"costs: {' and '.join(map(str, origin['costs']))}",
            *result.notes,
        ],
        "read": steps,
        "searched": [searched],
        "wrote": [f"{out}: {result.name}"],
    }
    return "\n".join([
        verdict_text(result.lines(out), lists),
        "",
        table(["policy", "drafters", "makespan s", "speed-up", "draws only", "regret"], rows, left=2),
        f"simulated, on RL steps held out; speed-up: over {result.best_fixed}; {DRAWS_ONLY}; {REGRET}",
    ])  # fmt: skip


def what_if_text(answer: WhatIf) -> str:
    """The answer for people, words first."""
    num_of = len(answer.trace.rl_steps)
    simulated = sample_text([len(answer.scenario.steps)], num_of, sampled=answer.is_sampled)
    evidence = [] if answer.evidence == answer.setting else [answer.evidence.partition(";")[0]]
    lists = {
        "assumed": [", ".join(filter(None, each.values())) for each in answer.assumed],
        "read": [*answer.source.read, *([simulated] if len(answer.scenario.steps) < num_of else [])],
        "ignored": [", ".join(answer.source.ignored)] if answer.source.ignored else [],
        "on": [", ".join([f"{answer.setting}: {answer.scenario.workers} workers", *evidence])],
        "tables": [
            f"{each.drafter}: {', '.join(f'{row.strategy} from batch {row.min_batch}' for row in each.rows)}"
            for each in answer.answers
        ],
        "training": [] if answer.training is None else [str(answer.training)],
    }
    return verdict_text(answer.verdict, lists)
