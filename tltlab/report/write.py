"""A report: one page of HTML on a run, a trace or a comparison, which needs nothing outside itself."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tltlab.config import leaves
from tltlab.doctor.signatures import Diagnosis
from tltlab.errors import ConfigError, TltlabError
from tltlab.files import read_json, read_object, write_file
from tltlab.importers.sources import read
from tltlab.traces import metrics
from tltlab.traces.trace import Trace, locate, run_folder

from .comparison import comparison_page
from .page import Block, Lacking, Page, PageTable, Section, number, render, titled
from .parts import (
    acceptance_part,
    arms_part,
    diagnosis_of,
    events_part,
    findings_part,
    graphs_part,
    lengths_part,
    off_policy_part,
    origin_part,
    over_run_part,
    responses_part,
    steps_part,
    timeline_part,
    timelines_part,
    verify_part,
    waterfall_part,
)


def report(source: str | Path, *, out: str | Path | None = None, verify: bool = True) -> Page:
    """The page of a RUN, a trace, or a JSON file of a comparison; written to `out` where it is given.

    Parts for which there is no data are left out, each with its reason. `verify` simulates the RL steps of a recorded
    run: what each step of the waterfall costs, and predictions where its summary.json has none yet. Raises TraceError
    or ConfigError for what is none of these.

    >>> page = report("demo", out="demo/report.html")  # doctest: +SKIP
    """
    source = Path(source)
    page = comparison_page(read_json(source), source) if _is_comparison(source) else run_page(source, verify=verify)
    if out is not None:
        write_file(Path(out), render(page))
    return page


def default_out(source: Path) -> Path:
    """Return a report's default path: in the RUN, or next to a comparison's file. Raises ConfigError for a trace."""
    if _is_comparison(source):
        return source.with_suffix(".html")
    inside = locate(source)
    if (run := run_folder(inside)) != inside:
        return run / "report.html"
    raise ConfigError(f"{source} is no RUN folder: name the page with --out {source.stem or 'trace'}.html")


def _is_comparison(source: Path) -> bool:
    return source.is_file() and source.suffix == ".json"


def run_page(source: Path, *, verify: bool) -> Page:
    """The page of a RUN or a trace."""
    trace = read(source)
    folder = locate(source)
    run = run_folder(folder)
    summary, run_json = read_object(run / "summary.json"), read_object(run / "run.json")
    rows = metrics.per_step(trace)
    diagnosis = diagnosis_of(run)
    parts = (
        timeline_part(trace), waterfall_part(trace, compute=verify), lengths_part(trace, rows),
        steps_part(trace, rows), off_policy_part(trace),
        acceptance_part(trace), arms_part(trace), graphs_part(trace, read_object(run / "graphs.json")),
        responses_part(trace, run, run_json.get("recipe")), verify_part(run, trace, summary, compute=verify),
        findings_part(diagnosis), events_part(run), origin_part(run, trace, run_json),
    )  # fmt: skip
    manifest = trace.manifest
    kind = "simulated: a prediction, not a measurement" if manifest.kind == "simulated" else manifest.kind
    facts = (kind, manifest.model, manifest.hardware, manifest.engine, manifest.created)
    return Page(
        title=f"Run {manifest.name or source.resolve().stem}", subtitle=" · ".join(str(fact) for fact in facts if fact),
        key_figures=key_figures(trace), parts=parts, verdict=verdict(trace, diagnosis),
    )  # fmt: skip


def verdict(trace: Trace, diagnosis: Diagnosis | TltlabError) -> str:
    """Summary of a run in a few sentences, its first problem before all; empty where no times are known."""
    idle, tail = metrics.bubble_fraction(trace, idle=True), metrics.tail_fraction(trace)
    sentences = [] if isinstance(diagnosis, TltlabError) else [diagnosis.headline()]
    if idle is not None and tail is not None:
        sentences.append(
            f"Workers were idle for {idle:.0%} of the rollouts' time, and for {tail:.0%} of it fewer than 1/8 of the "
            "responses were still running."
        )
    if (accept := metrics.mean_accept_length(trace)) is not None:
        sentences.append(f"Speculative iterations gave {accept:.2f} tokens per request.")
    if len(rewards := _rewards(trace)) > 1:
        sentences.append(f"The mean reward went from {rewards[0]:.3f} to {rewards[-1]:.3f}.")
    return " ".join(filter(None, sentences))


def _rewards(trace: Trace) -> list[float]:
    steps = trace.steps
    if steps is None:
        return []
    return steps.loc[steps["rl_step"].isin(trace.rl_steps), "reward_mean"].dropna().tolist()


def compare_runs(first: str | Path, second: str | Path) -> Page:
    """The page of two runs or traces side by side: their figures, charts with both, and the settings that differ.

    Raises TraceError for what is no trace.
    """
    traces, runs = (read(first), read(second)), [run_folder(locate(path)) for path in (first, second)]
    names = tuple(f"{letter}: {Path(path).resolve().name}" for letter, path in zip("AB", (first, second), strict=True))
    figures = [dict(key_figures(trace)) for trace in traces]
    rows = tuple((name, *(run.get(name, "–") for run in figures)) for name in dict.fromkeys([*figures[0], *figures[1]]))
    caption = "Over all RL steps of each. Different runs had different responses and perhaps different machines."
    blocks = (
        PageTable(caption=caption, columns=("figure", *names), rows=rows),
        "tltlab compare replays policies on the same responses with common random numbers.",
    )
    parts = (
        Section(title="Figures", blocks=blocks),
        timelines_part(*traces, names),
        over_run_part(dict(zip(names, traces, strict=True))),
        _settings_part([read_object(run / "run.json").get("recipe") for run in runs], names),
    )
    return Page(title=" and ".join(names), subtitle=" · ".join(map(str, runs)), parts=parts)


@titled("Settings that differ")
def _settings_part(recipes: Sequence[Any], names: tuple[str, ...]) -> Sequence[Block]:
    """The settings in which two recipes differ."""
    if not all(isinstance(recipe, dict) for recipe in recipes):
        raise Lacking("not both have a run.json with the recipe")
    flat = [dict(leaves(recipe)) for recipe in recipes]
    keys = [key for key in dict.fromkeys([*flat[0], *flat[1]]) if flat[0].get(key) != flat[1].get(key)]
    rows = tuple((key, *(json.dumps(of_run[key]) if key in of_run else "–" for of_run in flat)) for key in keys)
    if not rows:
        return ["None: both were started with the same recipe."]
    columns = ("setting", *names)
    return [PageTable(caption="From run.json.", columns=columns, rows=rows, text_columns=frozenset({0, 1, 2}))]


def key_figures(trace: Trace) -> tuple[tuple[str, str], ...]:
    """Names and values of what a run comes to, without those that are unknown."""
    rewards = _rewards(trace)
    reward = "–" if not rewards else f"{rewards[0]:.3f} → {rewards[-1]:.3f}"
    figures = (
        ("RL steps", f"{len(trace.rl_steps)}"),
        ("responses", f"{trace.num_rows('outcomes'):,}"),
        ("response tokens", f"{metrics.num_tokens(trace):,}"),
        ("mean rollout", number(metrics.makespan_s(trace), ",.4g", " s")),
        ("tokens/s in rollout", number(metrics.tokens_per_s(trace), ",.0f")),
        ("idle workers", number(metrics.bubble_fraction(trace, idle=True), ".1%")),
        ("tail", number(metrics.tail_fraction(trace), ".1%")),
        ("accept length", number(metrics.mean_accept_length(trace), ".2f")),
        ("reward, first → last step", reward),
    )
    return tuple((name, value) for name, value in figures if value != "–")
