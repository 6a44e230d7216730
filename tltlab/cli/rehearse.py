"""`tltlab rehearse`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from tltlab.console import AllowCode, Json, emit
from tltlab.importers.sources import read
from tltlab.own import code_allowed


def rehearse(
    trace: Annotated[Path, typer.Argument(help="A trace, or lengths in any format that `what-if` takes.")],
    model: Annotated[str, typer.Option(help="A shape: a name such as Qwen2.5-7B, a config.json, or tiny-shape.")],
    policies: Annotated[
        str, typer.Option(help="What to play: stock (vLLM alone), shipped names, files, module:Class, ngram:4.")
    ] = "stock,none,table,beg-mab,adaptive",
    acceptance: Annotated[
        str, typer.Option(help="How drafts are kept: learned=0.8/0.6/0.5 by token, others by default; or all=0.7.")
    ] = "all=geometric:0.7",
    responses: Annotated[
        int | None, typer.Option(min=1, help="Responses of each worker. [default: as in the trace]")
    ] = None,
    cap: Annotated[int | None, typer.Option(min=1, help="Tokens of the longest. [default: as in the trace]")] = None,
    rl_step: Annotated[int | None, typer.Option("--rl-step", help="Whose lengths. [default: the first]")] = None,
    workers: Annotated[int, typer.Option(min=1, help="Engines, on a GPU each or one after another.")] = 1,
    rounds: Annotated[int, typer.Option(min=1, help="Rollouts of each policy.")] = 3,
    minutes: Annotated[
        float | None, typer.Option(min=0.1, help="Plan what fits into so many, starts of engines included.")
    ] = None,
    gpus: Annotated[int | None, typer.Option(min=0, help="GPUs to use. [default: all that there are]")] = None,
    out: Annotated[Path, typer.Option(help="A RUN; the same command goes on with what is not there yet.")] = Path(
        "rehearsal"
    ),
    seed: Annotated[int, typer.Option(min=0, help="Seed of prompts, orders and policies.")] = 0,
    allow_code: AllowCode = None,
    as_json: Json = False,
) -> None:
    """Play a recorded rollout on a real engine, with a model's shape and no weights, under each policy.

    Lengths are forced and drafts are kept at given rates, so makespans are measured and need neither weights nor data.

    Example: tltlab rehearse traces/base-rl-16k --model tiny-shape --responses 32 --cap 256
    """
    # Two threads on a busy machine stall for seconds; torch reads this when it is imported.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from tltlab.rehearsal.plan import plan_of
    from tltlab.rehearsal.result import judged
    from tltlab.rehearsal.run import rehearse as play

    with code_allowed(allow_code or ()):
        plan = plan_of(
            read(trace), model, policies=policies, acceptance=acceptance, rl_step=rl_step, responses=responses, cap=cap,
            workers=workers, rounds=rounds, gpus=gpus, seed=seed,
        )  # fmt: skip
        play(plan, out, minutes=minutes)
        result = judged(plan, out)
    emit(result.json() | {"out": str(out)}, as_json=as_json, text=f"{result.text()}\n\nwritten to {out}")
