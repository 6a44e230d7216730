"""`tltlab export-policy`: a policy file as vLLM's own settings."""

import json
from pathlib import Path
from typing import Annotated

import typer

from tltlab.console import emit
from tltlab.errors import ConfigError
from tltlab.files import write_json
from tltlab.options import command, option
from tltlab.records import Json


@command
def export_policy(
    policy: Annotated[str, typer.Argument(help="A policy file, a shipped name or package.module:Class.")],
    max_batch: int = option("Most requests that run at a time (max_num_seqs).", 256, min=1),
    fill: bool = option("Capture more sizes, until every batch and depth has a full graph.", False),
    out: Path | None = option("File for the settings: JSON, the arguments of vllm.LLM."),
) -> None:
    """Draft depths by batch size and CUDA graphs for them, as settings for vLLM 0.32.

    Refused where vLLM has no such setting: trees, several drafters, suffix decoding of several depths, depths that are
    chosen at run time.

    Example: tltlab export-policy policy.json --max-batch 64 --out vllm.json
    """
    from tltlab.policies.policy import load_policy
    from tltlab.runtime.engine.graphs import VLLM_SUFFIX, differences, plan_graphs

    chosen = load_policy(policy)
    plan = plan_graphs(chosen, max_batch, fill=fill)
    if plan.drafts.get("method") == VLLM_SUFFIX:
        # vLLM's V2 runner does not have it.
        plan = plan_graphs(chosen, max_batch, runner="V1")
    if (refused := plan.refused()) is not None:
        raise ConfigError(f"policy {policy} has no settings of plain vLLM: {refused}")
    if out is not None:
        write_json(out, plan.settings())
    report = {
        "vllm": plan.settings(),
        "num_full_graphs": len(plan.full_graphs()),
        "num_piecewise_graphs": len(plan.capture_sizes),
        "without_full_graph": [list(pair) for pair in plan.without_full_graph()],
        "notes": [*differences(chosen, plan), *plan.notes()],
        "out": None if out is None else str(out),
    }
    emit(report, _text(report))


def _text(report: Json) -> str:
    return "\n".join([json.dumps(report["vllm"], indent=2), *(f"note: {note}" for note in report["notes"])])
