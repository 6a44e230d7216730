"""`tltlab what-if`: from a file of lengths to what speculation would bring."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tltlab.charts import FORMATS, save_figure
from tltlab.console import Json, emit, made_by, progress_bar, table
from tltlab.errors import ConfigError
from tltlab.files import check_writable, write_file, write_json
from tltlab.planning.systems import SYSTEMS
from tltlab.report.comparison import comparison_page
from tltlab.report.page import Part, render
from tltlab.report.parts import lengths_part, timelines_part
from tltlab.sim.cli import options
from tltlab.traces.metrics import per_step

from . import reading as readings

if TYPE_CHECKING:
    from tltlab.sim.comparison.verdict import WhatIf

_PAGES = (".html", ".htm")


def what_if(
    lengths: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="Lengths: CSV, JSON, JSONL, Parquet, rollouts, requests, a log, packed too; a trace or RUN.",
        ),
    ],
    gpus: options.Gpus = None,
    model: options.Model = None,
    engine: options.Engine = None,
    tp: options.TensorParallel = None,
    costs: Annotated[
        str | None, typer.Option(help="Cost file or preset instead. [default: the trace's, else --gpus 8xH100]")
    ] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="With --costs: rollout workers.")] = None,
    acceptance: options.Acceptance = None,
    accept: Annotated[
        float | None,
        typer.Option(
            help="Short for the chance of --drafter's tokens, the others' as usual. [default: 0.7 of learned]"
        ),
    ] = None,
    drafter: Annotated[
        str | None, typer.Option(help="Of the verdict's table. [default: the recorded ones, else learned]")
    ] = None,
    systems: Annotated[
        str | None, typer.Option(help=f"Systems of the table: all, or of {', '.join(SYSTEMS)}. [default: four of them]")
    ] = None,
    form: readings.Form = None,
    tokenizer: readings.Tokenizer = None,
    chars_per_token: readings.CharsPerToken = None,
    column: readings.Column = None,
    step_column: readings.StepColumn = None,
    group_column: readings.GroupColumn = None,
    lists: readings.ListsOption = None,
    time_unit: readings.TimeUnitOption = None,
    group_size: readings.GroupSize = None,
    responses: readings.Responses = None,
    cap: readings.Cap = None,
    rl_steps: options.SampledRlSteps = None,
    jobs: options.Jobs = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of policies and of intervals.")] = 0,
    policy_out: Annotated[Path | None, typer.Option(help="Write the policy that was found as a policy file.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write .html (a page), .png or .svg (the picture) or .json (the result).")
    ] = None,
    as_json: Json = False,
) -> None:
    """Estimate the speed-up of speculation for responses of these lengths, on which GPUs, and what limits it.

    Columns are found by their usual names, and the used ones are printed. All is simulated, nothing is measured here.

    Example: tltlab what-if lengths.csv --gpus 8xH100 --model Qwen2.5-7B --out what-if.html
    """
    if out is not None and (out.is_dir() or out.suffix not in (*_PAGES, *FORMATS, ".json")):
        raise ConfigError(f"--out {out}: name a file that ends in .html, .png, .svg or .json")
    if policy_out is not None:
        check_writable(policy_out)
    from tltlab.sim.cli.compare import system_rows, system_table
    from tltlab.sim.comparison.what_if import what_if as run

    facts: dict[str, Any] = {
        "column": column, "step_column": step_column, "group_column": group_column, "lists": lists,
        "time_unit": time_unit, "tokenizer": tokenizer, "chars_per_token": chars_per_token, "group_size": group_size,
        "cap": cap, "responses": responses,
    }  # fmt: skip
    asked = readings.reading(**facts)
    with ExitStack() as stack:
        left: list[Callable[[str], None]] = []

        def on_stage(stage: str, total: int) -> None:
            if not left:
                # A larger sample has the same stages again.
                stack.close()
                left.extend([stack.enter_context(progress_bar("stage", total))] * total)
            left.pop()(stage)

        answer = run(
            lengths, gpus=gpus, model=model, engine=engine, tp=tp, costs=costs, workers=workers,
            acceptance=acceptance, accept=accept, drafter=drafter, systems=systems, reading=asked, jobs=jobs, seed=seed,
            form=readings.known_format(form), rl_steps=rl_steps, on_stage=on_stage,
        )  # fmt: skip
    attributes = ("baseline", "left_out", "num_gpus")
    result: dict[str, Any] = answer.json() | {"systems": system_rows(answer.systems), "figures": "simulated"}
    result |= {key: answer.systems.attrs[key] for key in attributes}
    origin = made_by("numpy", "scipy", "simpy")
    result |= {"policy_out": policy_out and str(policy_out), "trace": str(lengths), "seed": seed, **origin}
    if policy_out is not None:
        answer.policy.with_provenance(**origin, paths=[str(lengths)]).write(policy_out)
    if out is not None and out.suffix in _PAGES:
        page = comparison_page(result, lengths)
        write_file(out, render(replace(page, parts=(*page.parts[:1], *_pictures(answer), *page.parts[1:]))))
    elif out is not None and out.suffix in FORMATS:
        save_figure(answer.plot(), out)
    elif out is not None:
        write_json(out, result)
    lines = [text(answer), "", system_table(answer.systems, answer.is_sampled)]
    lines += [f"wrote {path}" for path in (out, policy_out) if path is not None]
    lines += ["", answer.verdict]
    if policy_out is not None:
        lines.append(f"next: TLTLAB_POLICY={shlex.quote(str(policy_out.absolute()))} python train.py")
        if not any([*facts.values(), form, answer.share_of == "log", lengths.is_fifo()]):
            lines.append(f"  or: {_simulation(answer, lengths, policy_out, accept, rl_steps)}")
    elif answer.drafts:
        lines.append("next: --policy-out policy.json, then TLTLAB_POLICY=policy.json python train.py")
    emit(result, as_json=as_json, text="\n".join(lines))


def _simulation(answer: WhatIf, lengths: Path, policy: Path, accept: float | None, rl_steps: str | None) -> str:
    """The command that simulates the policy that was found as it was found."""
    asked = answer.config
    named = {name: getattr(asked, name) for name in ("gpus", "model", "engine", "tp", "costs", "workers", "acceptance")}
    if accept is not None:
        named["acceptance"] = f"{answer.drafters[0]}=geometric:{accept:g}"
    named |= {"rl-steps": rl_steps, "seed": asked.seed or None}
    options = [word for name, value in named.items() if value is not None for word in (f"--{name}", str(value))]
    return shlex.join(["tltlab", "simulate", str(lengths), "--policy", str(policy), *options])


def _pictures(answer: WhatIf) -> tuple[Part, ...]:
    """The lengths that were asked about, and one RL step without speculation above the same one with it."""
    plain, drafting = answer.timelines()
    names = ("without speculation", "with the policy found")
    return lengths_part(answer.trace, per_step(answer.trace)), timelines_part(plain, drafting, names)


def text(answer: WhatIf) -> str:
    """The answer for people, words first."""
    from tltlab.sim.comparison.sample import sample_text
    from tltlab.sim.comparison.what_if import THE_VERDICT

    num_of = len(answer.trace.rl_steps)
    simulated = sample_text([answer.num_rl_steps], num_of, sampled=answer.is_sampled)
    used = ", ".join(column if column == name else f"{column} ({name})" for name, column in answer.used.items())
    evidence = [] if answer.evidence == answer.setting else [answer.evidence.partition(";")[0]]
    rows = [
        ("on", ", ".join([f"{answer.setting}: {answer.workers} workers", *evidence])),
        ("drafting", ", ".join(f"{row.strategy} from batch {row.min_batch}" for row in answer.drafting)),
        ("in the table", f"the verdict's speed-up is that of {THE_VERDICT.name}"),
        *([] if answer.training is None else [("training", str(answer.training))]),
        ("used", used or "a trace"),
        *([("ignored", ", ".join(answer.ignored))] if answer.ignored else []),
        ("responses", f"{answer.trace.num_rows('outcomes')} of {num_of} RL steps"),
        *([("simulated", simulated)] if answer.num_rl_steps < num_of else []),
        *(("assumed", note) for note in answer.notes),
        ("simulated in", f"{answer.wall_s:.1f} s"),
    ]
    return "\n".join([answer.verdict, "", table([], rows, words=True)])
