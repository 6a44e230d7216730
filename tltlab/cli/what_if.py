"""`tltlab what-if`: from a file of lengths to what speculation would bring."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from tltlab.charts import FORMATS, save_figure
from tltlab.console import emit, json_rows, made_by
from tltlab.files import check_writable, write_file, write_json
from tltlab.importers.rows import Reading
from tltlab.importers.sources import Format
from tltlab.options import Option, Without, command, option, to_json
from tltlab.records import Json
from tltlab.report.comparison import comparison_page
from tltlab.report.page import Part, render
from tltlab.report.parts import lengths_part, timelines_part
from tltlab.sim.cli.compare import SAMPLED
from tltlab.sim.options import counting
from tltlab.sim.printed import comparison_text, what_if_text
from tltlab.sim.study.what_if import WhatIf, WhatIfConfig
from tltlab.sim.study.what_if import what_if as run
from tltlab.traces.metrics import per_step

_PAGES = (".html", ".htm")


@command
def what_if(
    lengths: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="Lengths: CSV, JSON, JSONL, Parquet, rollouts, requests, a log, packed too; a trace or RUN.",
        ),
    ],
    config: Annotated[
        WhatIfConfig,
        Without(
            "mode",
            "max_response_tokens",
            "prefix_caching",
            "prefix",
            "max_tools",
            "tool_s",
            "decision_block",
            "spot",
            rl_steps=Option(SAMPLED),
            jobs=Option(default=None),
        ),
    ],
    reading: Annotated[Reading, Without("reward_columns")],
    form: Annotated[Format | None, typer.Option("--format", help="[default: by the content]")] = None,
    policy_out: Path | None = option("Write the policy that needs no training as a policy file."),
    out: Path | None = option("Write .html (a page), .png, .svg or .pdf (the picture) or .json (the result)."),
) -> None:
    """Estimate the speed-up of speculation for responses of these lengths, on which GPUs, and what limits it.

    Columns are found by their usual names, and the used ones are printed. All is simulated, nothing is measured here.

    Example: tltlab what-if lengths.csv --gpus 8xH100 --model Qwen2.5-7B --out what-if.html
    """
    check_writable(out, *_PAGES, *FORMATS, ".json")
    check_writable(policy_out)
    with counting():
        answer = run(lengths, config, reading=reading, form=form)
    rows = json_rows(answer.systems)
    result: Json = answer.json() | {"systems": rows, "figures": "simulated"}
    result |= {key: answer.systems.attrs[key] for key in ("baseline", "num_gpus")}
    origin = made_by()
    result |= {
        "policy_out": policy_out and str(policy_out),
        "trace": str(lengths),
        "settings": to_json(config),
        **origin,
    }
    if policy_out is not None:
        answer.policy.with_provenance(**origin, paths=[str(lengths)]).write(policy_out)
    if out is not None and out.suffix in _PAGES:
        write_file(out, render(comparison_page(result, lengths, _pictures(answer))))
    elif out is not None and out.suffix in FORMATS:
        save_figure(answer.plot(), out)
    elif out is not None:
        write_json(out, result)
    lines = [what_if_text(answer), "", comparison_text(answer.systems, rows, sampled=answer.is_sampled)]
    lines += [f"wrote {path}" for path in (out, policy_out) if path is not None]
    best, training = answer.best, "needs a trained drafter" if answer.best.trained else "needs no training"
    if policy_out is not None:
        lines.append("")
        lines.append(f"{policy_out} is the table of {best.drafter}, which {training}")
        lines.append(f"next: TLTLAB_POLICY={shlex.quote(str(policy_out.absolute()))} python train.py")
        if reading == Reading() and form is None and answer.logged.share_of != "log":
            lines.append(f"  or: {_simulation(answer, config.accept, lengths, policy_out)}")
    emit(result, "\n".join(lines))


def _simulation(answer: WhatIf, accept: float | None, lengths: Path, policy: Path) -> str:
    """Return the command that simulates the policy that was found as it was found."""
    asked = answer.config
    names = ("gpus", "model", "engine", "tp", "scheduling", "costs", "workers", "acceptance", "placement", "rl_steps")
    named = {name.replace("_", "-"): getattr(asked, name) for name in names}
    if accept is not None:
        named["acceptance"] = f"{answer.best.drafter}=geometric:{accept:g}"
    named["seed"] = asked.seed or None
    words = ["tltlab", "simulate", str(lengths), "--policy", str(policy)]
    for name, value in named.items():
        words += [] if value is None else [f"--{name}", str(value)]
    return shlex.join(words)


def _pictures(answer: WhatIf) -> tuple[Part, ...]:
    """The lengths that were asked about, and one RL step without speculation above the same one with it."""
    plain, drafting = answer.timelines()
    names = ("without speculation", "with the policy found")
    return lengths_part(answer.trace, per_step(answer.trace)), timelines_part(plain, drafting, names)
