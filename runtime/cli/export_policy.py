"""`tltlab export-policy`: a policy file as vLLM's own settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tltlab.console import Json, emit
from tltlab.errors import ConfigError
from tltlab.files import read_json, write_json

if TYPE_CHECKING:
    from tltlab.planning.graph_pool import GraphPool
    from tltlab.runtime.engine.graphs import GraphPlan

_MB = 1e6


def export_policy(
    policy: Annotated[str, typer.Argument(help="A policy file, a shipped name or package.module:Class.")],
    max_batch: Annotated[int, typer.Option(min=1, help="Most requests that run at a time (max_num_seqs).")] = 256,
    fill: Annotated[
        bool, typer.Option("--fill", help="Capture more sizes, until every batch and depth has a full graph.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Where the settings go: JSON, the arguments of vllm.LLM.")] = None,
    model_shape: Annotated[
        str | None,
        typer.Option(help="For memory: a model's folder (config.json), or a name such as Qwen2.5-7B."),
    ] = None,
    memory_gb: Annotated[float | None, typer.Option(help="GiB on each GPU that graphs may take.")] = None,
    tp: Annotated[int, typer.Option(min=1, help="GPUs that share the model.")] = 1,
    layer_mb: Annotated[
        float,
        typer.Option(
            min=0, help="MB that a graph keeps per layer: an assumption, until it is fitted to a measured pool."
        ),
    ] = 1.0,
    as_json: Json = False,
) -> None:
    """Draft depths by batch size and CUDA graphs for them, as settings that vLLM 0.32 takes.

    What it does not is refused: trees, several drafters, suffix decoding of several depths, depths that are chosen at
    run time. With --model-shape the memory of the graphs is predicted, also of a policy that is refused, and with
    --memory-gb refused where it is more.

    Example: tltlab export-policy policy.json --max-batch 64 --model-shape Qwen2.5-7B --memory-gb 4 --out vllm.json
    """
    from tltlab.policies.policy import load_policy
    from tltlab.runtime.engine.graphs import GIB, check_memory, plan_graphs

    if memory_gb is not None and model_shape is None:
        raise ConfigError("--memory-gb needs --model-shape: a model's folder, or a name such as Qwen2.5-7B")
    chosen = load_policy(policy)
    plan = plan_graphs(chosen, max_batch, fill=fill)
    if plan.drafts.get("method") == "suffix":
        # Which vLLM's V2 runner does not have.
        plan = plan_graphs(chosen, max_batch, runner="V1")
    refused = plan.refused()
    if refused is not None and (out is not None or model_shape is None):
        raise ConfigError(f"policy {policy} has no settings of plain vLLM: {refused}")
    memory = None
    if model_shape is not None:
        cap = float("inf") if memory_gb is None else memory_gb * GIB
        memory = check_memory(graph_pool(model_shape, tp, layer_mb * _MB), plan, cap)
    if out is not None:
        write_json(out, plan.settings())
    report = {
        "vllm": plan.settings() if refused is None else None,
        "num_full_graphs": len(plan.full_graphs()),
        "num_piecewise_graphs": len(plan.capture_sizes),
        "without_full_graph": [list(pair) for pair in plan.without_full_graph()],
        "predicted_graph_gib": None if memory is None else memory / GIB,
        "notes": [*plan.notes, *([] if refused is None else [f"no settings of plain vLLM: {refused}"])],
        "out": None if out is None else str(out),
    }
    emit(report, as_json=as_json, text=_text(plan, report))


def graph_pool(shape: str, tp: int, bytes_per_layer: float) -> GraphPool:
    """The pool of a model given by its folder or by a name that `tltlab.hardware` knows."""
    from tltlab.hardware import model
    from tltlab.runtime.engine.graphs import vllm_pool

    folder = Path(shape)
    if folder.is_dir():
        config = read_json(folder / "config.json")
        config = config.get("text_config", config) if isinstance(config, dict) else {}
        names = ("num_hidden_layers", "hidden_size", "vocab_size")
        if missing := [name for name in names if not isinstance(config.get(name), int)]:
            raise ConfigError(f"{folder / 'config.json'} has no {', '.join(missing)}: it describes no decoder")
        layers, hidden, vocab = (config[name] for name in names)
    else:
        known_shape = model(shape)
        layers, hidden, vocab = known_shape.layers, known_shape.hidden, known_shape.vocab
    return vllm_pool(layers, hidden, vocab, tensor_parallel=tp, bytes_per_layer=bytes_per_layer)


def _text(plan: GraphPlan, report: dict[str, Any]) -> str:
    depths = ", ".join(map(str, plan.depths))
    memory = report["predicted_graph_gib"]
    lines = [
        *([] if report["vllm"] is None else [json.dumps(report["vllm"], indent=2)]),
        f"K in {depths}; {report['num_full_graphs']} full and {report['num_piecewise_graphs']} piecewise graphs"
        + ("" if memory is None else f", {memory:.2f} GiB by the model"),
        *(f"note: {note}" for note in report["notes"]),
    ]
    return "\n".join(lines)
