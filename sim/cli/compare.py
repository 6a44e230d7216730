"""`tltlab compare`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import typer

from tltlab.calibration.api import parse_rl_steps
from tltlab.console import AllowCode, Json, emit, json_rows, made_by, table
from tltlab.errors import ConfigError
from tltlab.files import write_json
from tltlab.importers.sources import read
from tltlab.own import code_allowed
from tltlab.planning.systems import SYSTEMS
from tltlab.sim.comparison.logged import logged_share, machine_of
from tltlab.sim.comparison.sample import sample_text
from tltlab.sim.comparison.sweep import compare as compare_policies
from tltlab.sim.comparison.sweep import drafters_text, granted_text, speed_up_cells, speed_ups
from tltlab.sim.config import SimulationConfig
from tltlab.sim.placement import PLACEMENTS
from tltlab.sim.scenario import named_policies
from tltlab.sim.simulate import outside_text

from . import options

_POLICIES = "none,table,beg-mab,adaptive"
DRAWS_ONLY = "draws only: 95 % interval over RL steps, without errors of costs and acceptance"
REGRET = "regret: time above the clairvoyant bound, which knows every length and all that will be accepted"


def compare(
    trace: Annotated[Path, typer.Argument(help="A trace or RUN folder, or a CSV of lengths.")],
    policies: Annotated[
        str | None,
        typer.Option(
            help="Names, files or package.module:Class, with commas between; the first is the baseline. "
            f"[default: {_POLICIES}]"
        ),
    ] = None,
    systems: Annotated[
        str | None,
        typer.Option(help=f"Systems from the literature instead: all, or {','.join(SYSTEMS)}; verl is the baseline."),
    ] = None,
    workers: options.Workers = None,
    costs: options.Costs = None,
    gpus: options.Gpus = None,
    model: options.Model = None,
    engine: options.Engine = None,
    tp: options.TensorParallel = None,
    acceptance: options.Acceptance = None,
    stages: Annotated[
        str | None, typer.Option(help="With --systems: stage costs, a file or preset, for whole RL steps too.")
    ] = None,
    gpus_per_worker: options.GpusPerWorker = None,
    ranges: Annotated[
        bool | None,
        typer.Option(help="With --systems: the order over plausible ranges. [default: where a number was assumed]"),
    ] = None,
    search: Annotated[
        bool, typer.Option("--search", help="Systems' parts in combinations instead: half of the RL steps choose.")
    ] = False,
    claims: Annotated[
        bool, typer.Option("--claims", help="With --systems: what their papers claim, beside what is found.")
    ] = False,
    placement: Annotated[
        str | None,
        typer.Option(help=f"Of policies: one of {', '.join(PLACEMENTS)}, or module:Class. [default: contiguous]"),
    ] = None,
    mode: options.Mode = "fluid",
    rl_steps: options.SampledRlSteps = None,
    prefix_caching: options.PrefixCaching = False,
    repeats: Annotated[int, typer.Option(help="Seeds, each the same for all policies.")] = 1,
    decision_block: options.DefaultDecisionBlock = None,
    jobs: options.Jobs = None,
    seed: options.Seed = 0,
    prefix: options.Prefix = "kept",
    max_tools: options.MaxTools = None,
    tool_seconds: options.ToolSeconds = None,
    out: Annotated[Path | None, typer.Option(help="Write the result as JSON too, for `tltlab report`.")] = None,
    allow_code: AllowCode = None,
    as_json: Json = False,
) -> None:
    """Simulate several policies, or systems from the literature, on one trace with common random numbers.

    Ratios have paired 95 % intervals over RL steps; regret is against a clairvoyant bound over all their strategies.
    A number that is not known takes a default, which is marked; the order is then shown over its plausible range too.

    Example: tltlab compare traces/tiny --systems all --stages cpu-small
    """
    if out is not None and out.is_dir():
        raise ConfigError(f"--out {out} is a folder: give the name of a JSON file")
    if search:
        if systems is not None:
            raise ConfigError("--search tries systems' parts: leave out --systems")
        systems = "all"
    source = read(trace)
    result: dict[str, Any]
    rows: pd.DataFrame
    decision_block = options.decisions(decision_block, source, systems)
    config = SimulationConfig(
        costs=costs, acceptance=acceptance, workers=workers,
        placement=placement, mode=mode, seed=seed, rl_steps=parse_rl_steps(rl_steps, source.rl_steps),
        decision_block=decision_block, prefix_caching=prefix_caching, prefix=prefix, max_tools=max_tools,
        tool_s=tool_seconds, gpus=gpus, model=model, engine=engine, tp=tp,
    )  # fmt: skip
    if not config.is_on_machine and costs is None and workers is None and "gpus" in (logged := machine_of(source)):
        config = replace(config, **logged)
    if systems is None:
        if any(option is not None for option in (stages, gpus_per_worker, ranges, claims or None)):
            raise ConfigError("--stages, --gpus-per-worker, --ranges and --claims are for --systems")
        with code_allowed(allow_code or ()), options.counting():
            chosen = named_policies(policies or _POLICIES)
            if len(chosen) < 2:
                raise ConfigError(f"--policies {policies!r}: give at least two to compare")
            rows = compare_policies(source, chosen, config, repeats=repeats, jobs=jobs)
        result, lines = {"policies": json_rows(rows)}, policy_table(rows, sampled=rl_steps is None)
    else:
        if policies is not None or placement is not None:
            raise ConfigError("--systems bring their policies and placement: leave out --policies and --placement")
        if gpus_per_worker is not None and stages is None and not config.is_on_machine:
            raise ConfigError("--gpus-per-worker places the stages of RL steps: give --stages")
        from tltlab.sim.comparison.systems import compare_systems

        arguments: dict[str, Any] = {
            "gpus_per_worker": gpus_per_worker, "repeats": repeats, "jobs": jobs, "ranges": ranges, "stages": stages,
        }  # fmt: skip
        with options.counting():
            if search:
                from tltlab.sim.tuning.compositions import search_systems

                rows = search_systems(source, config, **arguments)
            else:
                rows = compare_systems(source, systems, config, **arguments)
        result, lines = {"systems": system_rows(rows), "figures": "simulated"}, system_table(rows, rl_steps is None)
        attributes = ("ranges", "left_out", "num_workers", "num_gpus", *(("searched", "chosen_on") if search else ()))
        result |= {"stages": stages, **{key: rows.attrs[key] for key in attributes}}
    attributes = ("baseline", "num_rl_steps", "num_rl_steps_of", "evidence", "outside_calibration")
    result |= {key: rows.attrs[key] for key in (*attributes, "costs", "acceptance")}
    text = "\n".join([lines, *evidence_lines(rows.attrs["evidence"], rows.attrs["outside_calibration"])])
    share = logged_share(source)
    if share is not None:
        text += f"\nthe rollout is {share:.0%} of the RL step in the log"
    result["logged_rollout_share"] = share
    if search:
        text += f"\nthe fastest of {rows.attrs['searched']} compositions on the other RL steps"
    if claims:
        text += f"\n\n{claim_table(rows)}"
        text += "\ntlt at the responses to a worker of its own scripts: notebook 09_published_setups"
    result |= {
        "trace": source.manifest.name or str(trace), "num_repeats": repeats, "mode": mode, "seed": seed,
        "decision_block": decision_block, "prefix_caching": prefix_caching,
        **made_by("numpy", "scipy", "simpy"),
    }  # fmt: skip
    if out is not None:
        write_json(out, result)
    if prefix_caching:
        text += "\na group's prompt is prefilled, and held, once on each worker"
    emit(result, as_json=as_json, text=text)


def evidence_lines(evidence: dict[str, Any], outside: Mapping[str, float]) -> list[str]:
    """How far the costs of a comparison are to be believed, and what it extrapolates, a line each."""
    ratios = evidence["speedup_error"]
    more = "" if ratios is None else f", ratios of speculating to not by less than {ratios:.0%}"
    beyond = outside_text(outside)
    return [f"costs: {evidence['says']}{more}", *([f"extrapolated: {beyond}"] if beyond else [])]


def system_rows(comparison: pd.DataFrame) -> list[dict[str, Any]]:
    """The comparison's rows for JSON: unknown figures are None, and each interval is a pair too."""
    rows = json_rows(comparison)
    for row in rows:
        row["interval"] = _pair(row, "ratio")
        if "step_s" in row:
            row["step_interval"] = _pair(row, "step_ratio")
    return rows


def _pair(row: dict[str, Any], name: str) -> list[float] | None:
    low, high = row[f"{name}_low"], row[f"{name}_high"]
    return None if low is None else [low, high]


def system_table(comparison: pd.DataFrame, sampled: bool) -> str:
    """The comparison of systems for people, what was assumed below it; of whole RL steps where they are known.

    `sampled` if it chose its RL steps itself.
    """
    whole, ranked = "step_s" in comparison, "rank_least" in comparison
    rows = []
    notes: dict[str, list[str]] = {}
    records = comparison.to_dict("records")
    for row in records:
        name = row["system"] + ("*" if row["stand_ins"] else "") + ("+" if row["defaults"] else "")
        accept = "" if pd.isna(row["mean_accept_length"]) else f"{row['mean_accept_length']:.2f}"
        times = ("rollout s", "speed-up", "draws only")
        rollout = list(zip(times, _times(row, "makespan_s", "ratio"), strict=True))
        cells = [("system", name), ("drafters", drafters_text(row["drafters"])), *rollout[:2]]
        if whole:
            cells += zip(("RL step s", *times[1:]), _times(row, "step_s", "step_ratio"), strict=True)
            cells += [] if ranked else [("accept", accept)]
        else:
            tokens = f"{row['tokens_per_s_ratio']:.2f}x"
            cells += [rollout[2], ("tokens/s", tokens), ("regret", _regret(row)), ("accept", accept)]
        if ranked:
            least, most = int(row["rank_least"]), int(row["rank_most"])
            cells.append(("ranks", str(least) if least == most else f"{least}-{most}"))
        rows.append(cells)
        marked = [f"* {note}" for note in row["stand_ins"]] + [f"+ {note}" for note in row["defaults"]]
        missing = [] if row["runs_here"] is True else [row["runs_here"]]
        for note in [*marked, *([] if row["lossless"] else ["not lossless"]), *missing]:
            notes.setdefault(note, []).append(row["system"])
    lines = [table([name for name, _ in rows[0]], [[cell for _, cell in cells] for cells in rows], left=2)]
    lines += filter(None, [granted_text(records, "system")])
    of_what = "speed-ups" if whole else "speed-ups, also of tokens trained on per second,"
    lines.append(
        f"simulated on {comparison.attrs['num_workers']} workers, {_steps(comparison, sampled)}; "
        f"{of_what} over {comparison.attrs['baseline']}; --json has each system's assumptions and source, and the rest "
        "of its figures and intervals"
    )
    legend = [DRAWS_ONLY, *([] if whole else [REGRET])]
    legend += [] if whole and ranked else ["accept: tokens per request and speculative iteration"]
    legend += ["ranks: over the plausible range of what was assumed"] if ranked else []
    lines.append("; ".join(legend))
    lines += [f"{note} ({', '.join(names)})" for note, names in notes.items()]
    biased = [f"{row.system} {row.length_bias:.2f}" for row in comparison.itertuples() if row.length_bias != 1.0]
    lines += [f"length of what is trained on over what is begun: {', '.join(biased)}"] if biased else []
    split = comparison[comparison["workers"] < comparison.attrs["num_workers"]]
    lines += [
        f"{row.system} generates on {row.workers} of them, on the others' GPUs it trains" for row in split.itertuples()
    ]
    lines += [
        f"{end['number']} x {end['factor']:g}: fastest {end['order'][0]}, order Kendall tau {end['kendall_tau']:.2f}"
        for end in comparison.attrs["ranges"]
        if end["kendall_tau"] is not None
    ]
    others = ", ".join(row["system"] for row in records if row["runs_here"] is not True)
    lines.append(
        f"engines here run every system of the table{f' but {others}' if others else ''}: "
        "`tltlab train RECIPE rollout.system=NAME`, measured by `tltlab bench systems --only NAME`"
    )
    return "\n".join(lines)


def claim_table(comparison: pd.DataFrame) -> str:
    """Table of papers' claims beside the simulated speed-ups, for people."""
    rows = []
    for row in comparison.to_dict("records"):
        if (claim := row["claim"]) is None:
            continue
        least, most = claim["least"], claim["most"]
        published = f"{least:g}x" if least == most else f"{least:g}-{most:g}x"
        ends = claim["interval"]
        interval = "" if ends is None else f"[{ends[0]:.2f}, {'?' if ends[1] is None else format(ends[1], '.2f')}]"
        cells = [row["system"], claim["of"], published, f"{claim['speed_up']:.2f}x", interval, claim["difference"]]
        rows.append([*cells, claim["source"]])
    return table(["system", "speed-up of", "published", "here", "draws only", "difference", "source"], rows, words=True)


def policy_table(comparison: pd.DataFrame, sampled: bool) -> str:
    """The comparison of policies for people, with the acceptance granted to their drafters; `sampled` as above."""
    records = comparison.to_dict("records")
    rows = [
        [row["policy"], drafters_text(row["drafters"]), *_times(row, "makespan_s", "ratio"), _regret(row)]
        for row in records
    ]
    columns = ["policy", "drafters", "makespan s", "speed-up", "draws only", "regret"]
    lines = [table(columns, rows, left=2), *filter(None, [granted_text(records, "policy")])]
    few = comparison.attrs["num_rl_steps"] < comparison.attrs["num_rl_steps_of"]
    simulated = f"; simulated on {_steps(comparison, sampled)}" if few else ""
    lines.append(f"speed-up: over {comparison.attrs['baseline']}{simulated}; {DRAWS_ONLY}; {REGRET}")
    return "\n".join(lines)


def _steps(comparison: pd.DataFrame, sampled: bool) -> str:
    num, num_of = (comparison.attrs[name] for name in ("num_rl_steps", "num_rl_steps_of"))
    return sample_text([num], num_of, sampled=sampled)


def _times(row: dict[Any, Any], seconds: str, ratio: str) -> list[str]:
    """Seconds, times as fast, and the interval of that."""
    return [f"{row[seconds]:.4g}", *speed_up_cells(speed_ups("speed_up", row, ratio), "speed_up")]


def _regret(row: dict[Any, Any]) -> str:
    return "" if pd.isna(row["regret"]) else f"{row['regret']:.1%}"
