"""The drafter that a run leaves behind, on a task that the run did not train."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.train.figures import decimals
from tltlab.console import table
from tltlab.errors import RunError
from tltlab.runtime.drafter.offline.export import ExportConfig, ExportSource, export_drafter
from tltlab.runtime.models.runs import Progress, fixed_depth, prompts_of, recipe_of, trained_beside

from .runs import BenchSizes, judged, kept_folders, run_steps

TRAINED, OTHER = "subset-sum", "gcd"
BEGINS = {TRAINED: "nums ", OTHER: "gcd "}


def bench_by_product(
    model: Path, head: Path, out: Path, sizes: BenchSizes, *, seed: int, progress: Progress
) -> dict[str, Any]:
    """GRPO, and drafter training, on prompts of one of the two tasks that a model and its drafter know.

    `rows`: by task, the acceptance of the initial drafter on the initial policy, and of the initial and of the final
    drafter on the final policy, along fresh responses to held-out prompts. `exported`: what `tltlab export-drafter`
    says of the final drafter in stock vLLM on the other task, or `failed`, why it did not hand it out.
    """
    policy = fixed_depth(out / "policy.json", sizes.draft_depth)
    train = _of_task(model / "train.jsonl", TRAINED, out / "train.jsonl")
    recipe = recipe_of(model, sizes, seed=seed, policy=policy, drafter=trained_beside(head, sizes), train=train)
    progress(f"{sizes.steps} RL steps on {TRAINED} alone")
    run_steps(recipe, out / "run", sizes.steps, progress, keep=True)
    target, final = kept_folders(out / "run", sizes.steps)
    rows = []
    for task in (TRAINED, OTHER):
        prompts = prompts_of(model, "heldout", sizes.texts, BEGINS[task])
        (start,) = judged(model, [head], prompts, sizes, seed=seed)
        initial, trained = judged(target, [head, final], prompts, sizes, seed=seed)
        rows.append(
            {
                "task": task,
                "at_start": asdict(start),
                "initial_drafter": asdict(initial),
                "final_drafter": asdict(trained),
            }
        )
    source = ExportSource(
        head=final, target=target, prompts=_of_task(model / "heldout.jsonl", OTHER, out / "other.jsonl")
    )
    config = ExportConfig(depth=sizes.draft_depth, max_response_tokens=sizes.max_response_tokens, seed=seed)
    try:
        exported = export_drafter(source, out / "exported", config, progress)
    except RunError as error:
        exported = {"failed": str(error)}
    return {
        "trained_on": TRAINED,
        "steps": sizes.steps,
        "draft_depth": sizes.draft_depth,
        "rows": rows,
        "exported": exported,
    }


def _of_task(source: Path, task: str, out: Path) -> Path:
    """The problems of one task in a file of both, as a file."""
    lines = [line for line in source.read_text().splitlines() if json.loads(line)["prompt"].startswith(BEGINS[task])]
    out.write_text("\n".join(lines) + "\n")
    return out


def text(result: Mapping[str, Any]) -> str:
    """The result for people."""
    lines = [
        f"a drafter warmed up on two tasks, {result['steps']} GRPO steps on {result['trained_on']}: tokens per draft "
        f"of {result['draft_depth']}",
    ]
    drafters = ("at_start", "initial_drafter", "final_drafter")
    rows = [(row["task"], *(decimals(row[key]["accept_length"]) for key in drafters)) for row in result["rows"]]
    lines.append(table(("task", "at the start", "initial drafter, final policy", "final drafter"), rows))
    exported = result["exported"]
    if "failed" in exported:
        lines.append(f"not exported: {exported['failed']}")
    else:
        measured = exported["sampled"]["accept_length"]
        lines.append(
            f"exported, in stock vLLM on {OTHER}: {decimals(measured['measured'])} tokens per pass, "
            f"{decimals(measured['expected'])} expected"
        )
    return "\n".join(lines)
