"""The page of a comparison: what `compare`, `tune`, `verify` and `experiment` say in JSON, and a policy file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tltlab.charts import bars, lines, scatter_identity
from tltlab.errors import ConfigError

from .origin import repeat_blocks, versions_of
from .page import Absent, Block, Code, Facts, Items, Page, Paragraph, Part, Picture, Section, number, records
from .verify import from_result

SIMULATED = "Simulated: a prediction, not a measurement."
_ROWS = ("systems", "candidates", "policies", "steps", "rows")
_COLUMNS = {
    "system": ("system", ""), "policy": ("policy", ""), "name": ("candidate", ""), "makespan_s": ("rollout s", ".4g"),
    "speed_up": ("speed-up", ".2f"), "ratio": ("ratio", ".3f"), "ratio_interval": ("95 % interval", ""),
    "regret": ("regret", ".1%"),
    "regret_to_bound": ("to the bound", ".1%"), "mean_accept_length": ("accept length", ".2f"),
    "bubble_fraction": ("bubble", ".1%"), "step_s": ("RL step s", ".4g"),
    "step_speed_up": ("speed-up", ".2f"), "step_ratio": ("ratio", ".3f"),
    "step_ratio_interval": ("95 % interval", ""), "lossless": ("lossless", ""),
}  # fmt: skip
_MEASURED = {
    "policy": ("policy", ""), "measured_s": ("measured s", ".3f"), "interval": ("interval", ""),
    "predicted_s": ("predicted s", ".3f"), "error": ("error", "+.1%"), "predicted_common_s": ("same lengths s", ".3f"),
    "error_common": ("error", "+.1%"), "error_at_speed": ("error at step time", "+.1%"),
}  # fmt: skip


def comparison_page(result: Mapping[str, Any], path: Path) -> Page:
    """The page of a result; it is recognised by its keys. Raises ConfigError for another object."""
    try:
        return _page(result, path)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        why = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{path}: not as tltlab writes it ({why}); write it anew") from error


def _page(result: Mapping[str, Any], path: Path) -> Page:
    if (empty := next((key for key in _ROWS if result.get(key) == []), None)) is not None:
        raise ConfigError(f"{path}: its {empty} are an empty list, so there is nothing to report")
    if result.get("format") == "tltlab-policy":
        return _policy(result, result.get("provenance") or {}, path)
    lists = {key for key, value in result.items() if isinstance(value, list)}
    if {"systems", "by_accept"} <= lists:
        return _what_if(result, path)
    if "systems" in lists:
        return _ratios(result, result["systems"], "system", "Systems compared", path)
    if "candidates" in lists:
        return _ratios(result, result["candidates"], "name", "A tuned policy", path)
    if "policies" in lists and all("measured_s" in row for row in result["policies"]):
        return _verified_policies(result, path)
    if "policies" in lists:
        return _ratios(result, result["policies"], "policy", "Policies compared", path)
    if "steps" in lists and "median_error" in result:
        part = from_result(result, "As tltlab verify wrote it.")
        return Page(title="Predicted against measured", subtitle=path.name, key_figures=_errors(result), parts=(part,))
    if "rows" in lists and "verdict" in result:
        return _experiment(result, path)
    raise ConfigError(
        f"{path}: no comparison; it has {', '.join(map(str, result)) or 'nothing'}, and a report is made of what "
        "compare, tune, verify or experiment print with --json, or of a RUN"
    )


def _ratios(result: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], key: str, title: str, path: Path) -> Page:
    """Rows of makespans with their ratios to a baseline."""
    tuned = key == "name"
    baseline = str(result.get("baseline") or ("the best fixed strategy" if tuned else rows[0][key]))
    labels = [str(row[key]) for row in rows]
    whole = all(row.get("step_s") is not None for row in rows)
    best = min(rows, key=lambda row: row["step_s" if whole else "makespan_s"])
    verdict = result.get("verdict") or _verdict(best, str(best[key]), baseline, whole=whole)
    blocks: list[Block] = [Paragraph(text=SIMULATED)]
    for ratio, subject, heading in (("ratio", "rollout", "Rollouts"), ("step_ratio", "RL step", "Whole RL steps")):
        if ratio == "ratio" or any(row.get(ratio) is not None for row in rows):
            blocks.append(_ratio_picture(rows, labels, ratio, f"{subject} time over that of {baseline}", heading))
    shown = [_with_words(row) for row in rows]
    columns = {key: _COLUMNS[key]} | {k: v for k, v in _COLUMNS.items() if k not in ("system", "policy", "name")}
    caption = (
        f"Ratios to {baseline}, below 1 faster (speed-up: 1 / ratio), with paired 95 % intervals over RL steps on the "
        "same responses and the same luck. Regret: to the best that any policy could do"
        + (" (the per-iteration oracle)." if tuned else ".")
    )
    blocks.append(records(shown, columns, caption=caption))
    parts: list[Part] = [Section(title="Result", blocks=tuple(blocks)), *_about_systems(result, rows)]
    notes = result.get("notes")
    if isinstance(notes, list) and notes:
        parts.append(Section(title="Notes", blocks=tuple(Paragraph(text=str(note)) for note in notes)))
    above = {"systems", "policies", "candidates", "verdict", "notes", "left_out", "ranges", "by_accept", "speedup"}
    parts.append(_origin(result, above))
    fastest = best.get("step_ratio" if whole else "ratio")
    keys = [("fastest", str(best[key])), ("its ratio", number(fastest, ".3f"))]
    if tuned:
        keys = [("chosen", str(result.get("name", best[key]))), ("worth it", "yes" if result.get("worth_it") else "no")]
    steps = result.get("num_rl_steps")
    keys += [("baseline", baseline)] + ([("RL steps", str(steps))] if steps is not None else [])
    subtitle = " · ".join(dict.fromkeys(v for v in (result.get("trace"), path.name) if isinstance(v, str) and v))
    return Page(title=title, subtitle=subtitle, key_figures=tuple(keys), parts=tuple(parts), verdict=str(verdict))


def _what_if(result: Mapping[str, Any], path: Path) -> Page:
    """The answer of `tltlab what-if`: how many times as fast, and by acceptance where that is not known."""
    page = _ratios(result, result["systems"], "system", "What speculation would bring", path)
    series: dict[str, tuple[list[float], list[float]]] = {}
    bands: dict[str, tuple[list[float | None], list[float | None]]] = {}
    for key, name in (("rollout", "rollout"), ("rl_step", "RL step")):
        if rows := [row for row in result["by_accept"] if row["accept"] is not None and row[key] is not None]:
            series[name] = [row["accept"] for row in rows], [row[key]["mean"] for row in rows]
            bands[name] = [row[key]["low"] for row in rows], [row[key]["high"] for row in rows]
    parts = page.parts
    if series:
        figure = lines(series, bands=bands, xlabel="drafted tokens accepted, each", ylabel="times as fast",
                       title="By acceptance (simulated)")  # fmt: skip
        points_text = "; ".join(
            f"{name}: " + ", ".join(f"{y:.2f}x at {x:.0%}" for x, y in zip(*points, strict=True))
            for name, points in series.items()
        )
        caption = "Over decoding without speculation, each with the best table for that acceptance. Bands: 95 %."
        picture = Picture.of(figure, alt=f"Times as fast by acceptance. {points_text}.", caption=caption)
        parts = (Section(title="By acceptance", blocks=(picture,)), *parts)
    speedups = {"rollout": result["speedup"]["rollout"], "RL step": result["speedup"]["rl_step"]}
    keys = [(name, f"{times['mean']:.2f}x") for name, times in speedups.items() if times is not None]
    accept = result["accept"]
    keys += [("drafted tokens accepted", "as recorded" if accept is None else f"{accept:.0%}")]
    keys += [("responses", f"{result['num_responses']:,}"), ("RL steps", str(result["num_rl_steps"]))]
    subtitle = f"{page.subtitle} · {result['setting']}"
    return replace(page, subtitle=subtitle, key_figures=tuple(keys), parts=parts)


def _with_words(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row with its intervals and yes or no in words."""
    words = dict(row)
    for name in ("ratio", "step_ratio"):
        if name in row:
            words[name.replace("ratio", "speed_up")] = 1 / row[name] if row[name] else None
            words[f"{name}_interval"] = _interval(row, f"{name}_low", f"{name}_high")
    if "lossless" in row:
        words["lossless"] = "yes" if row["lossless"] else "no"
    return words


def _interval(row: Mapping[str, Any], low: str, high: str) -> str | None:
    if row.get(low) is None or row.get(high) is None:
        return None
    return f"{row[low]:.3f} to {row[high]:.3f}"


def _ratio_picture(
    rows: Sequence[Mapping[str, Any]], labels: list[str], key: str, xlabel: str, title: str
) -> Picture:  # fmt: skip
    ratios = ", ".join(f"{n} {number(row.get(key), '.3f')}" for n, row in zip(labels, rows, strict=True))
    return Picture.of(
        bars(labels, [row.get(key) for row in rows], [row.get(f"{key}_low") for row in rows],
             [row.get(f"{key}_high") for row in rows], xlabel=xlabel, title=f"{title} (simulated)", reference=1.0),
        alt=f"{title}: {ratios}.",
        caption="Bars left of the dashed line are faster than the baseline. Lines on the bars: 95 % intervals; a "
        "row without one has a single RL step, or never differs.",
    )  # fmt: skip


def _verdict(best: Mapping[str, Any], name: str, baseline: str, *, whole: bool) -> str:
    """`whole`: of RL steps, where they are known; else of rollouts."""
    ratio, time = ("step_ratio", "RL step time") if whole else ("ratio", "rollout time")
    low, high = best.get(f"{ratio}_low"), best.get(f"{ratio}_high")
    if name == baseline:
        return f"Nothing is faster than {baseline}."
    sentence = f"{name} is fastest: {number(best.get(ratio), '.3f')} times the {time} of {baseline}"
    if low is None or high is None:
        return f"{sentence}; on a single RL step, so without an interval."
    sure = "" if high < 1 else ", which may be chance"
    return f"{sentence}, 95 % interval {low:.3f} to {high:.3f}{sure}."


def _about_systems(result: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> list[Part]:
    parts: list[Part] = []
    about = []
    for row in rows:
        if "system" in row:
            assumed = "; ".join(map(str, row.get("assumptions") or ["nothing"]))
            title = str(row.get("title") or row["system"])
            about.append((title, f"{assumed}. Source: {row.get('source') or 'not told'}."))
    if about:
        parts.append(Section(title="What was assumed", blocks=(Items(rows=tuple(about)),)))
    ends = result.get("ranges")
    if isinstance(ends, list) and ends:
        orders = tuple((f"{end['number']} x {end['factor']:g}", ", ".join(map(str, end["order"]))) for end in ends)
        lead = Paragraph(text="The order, fastest first, with each number that was assumed at the ends of its range.")
        parts.append(Section(title="Over the plausible ranges", blocks=(lead, Items(rows=orders))))
    exclusions = result.get("left_out")
    if isinstance(exclusions, dict) and exclusions:
        items = Items(rows=tuple((str(name), str(why)) for name, why in exclusions.items()))
        parts.append(Section(title="Left out", blocks=(items,)))
    return parts


def _verified_policies(result: Mapping[str, Any], path: Path) -> Page:
    """Policies that ran for real, each with its prediction."""
    rows = sorted(result["policies"], key=lambda row: row["measured_s"])
    shown = [dict(row) | {"interval": _interval(row, "low", "high")} for row in rows]
    labels = [str(row["policy"]) for row in rows]
    tau, pairs = result.get("kendall_tau"), result.get("num_pairs")
    missed = result.get("missed")
    why = f" Missed: {'; '.join(map(str, missed))}." if isinstance(missed, list) and missed else ""
    verdict = (
        f"The simulator's order of the policies against the machine's: Kendall tau {number(tau, '.2f')} over "
        f"{number(pairs, 'd')} pairs whose measured intervals do not overlap; median error "
        f"{number(result.get('median_error'), '.1%')}, worst {number(result.get('worst_error'), '.1%')}.{why}"
    )
    blocks: list[Block] = [
        Picture.of(
            bars(labels, [r["measured_s"] for r in rows], [r.get("low") for r in rows], [r.get("high") for r in rows],
                 xlabel="seconds", title="Measured rollout time"),
            alt="Measured rollout seconds: " + ", ".join(f"{n} {r['measured_s']:.3g}" for n, r in zip(labels, rows,
                                                                                                    strict=True)),
            caption="Mean over the rounds, each with all policies on the same prompts in turn; lines: intervals.",
        ),
        Picture.of(
            scatter_identity([r["measured_s"] for r in rows], [r.get("predicted_s") for r in rows], labels=labels,
                             xlabel="measured, s", ylabel="predicted (simulated), s", title="Each policy"),
            shape="square", alt="Predicted over measured rollout time, one point per policy.",
            caption="On the dashed line prediction and measurement agree.",
        ),
        records(shown, _MEASURED, caption="Each policy, measured and predicted from rollouts of other policies."),
    ]  # fmt: skip
    settings = {k: v for k, v in result.items() if k not in ("policies", "rounds", "missed")}
    return Page(
        title="Does the simulator's winner win on the machine?", subtitle=path.name, key_figures=_errors(result),
        parts=(Section(title="Result", blocks=tuple(blocks)), _origin(settings, set())), verdict=verdict,
    )  # fmt: skip


def _errors(result: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    figures = [
        ("median error", number(result.get("median_error"), ".1%")),
        ("worst", number(result.get("worst_error"), ".1%")),
        ("repeat spread", number(result.get("repeat_spread"), ".1%")),
    ]  # fmt: skip
    if "kendall_tau" in result:
        figures.append(("Kendall tau", number(result["kendall_tau"], ".2f")))
    if "met" in result:
        figures.append(("goal", "met" if result["met"] else "missed"))
    return tuple(figures)


def _experiment(result: Mapping[str, Any], path: Path) -> Page:
    """The verdict, the picture and the table of `tltlab experiment`."""
    rows = result["rows"]
    keys = list(dict.fromkeys(key for row in rows for key in row))
    text = tuple(k for k in keys if any(isinstance(row.get(k), str) for row in rows))
    columns = {key: (key.replace("_", " "), "" if key in text else ".4g") for key in keys}
    blocks: list[Block] = []
    if result.get("prediction"):
        blocks.append(Paragraph(text=SIMULATED))
    beside = path.parent / "picture.png" if path.name == "result.json" else None
    if beside is not None and (
        picture := Picture.of_png(beside, alt=str(result["verdict"]), caption="What the table below has in figures.")
    ):
        blocks.append(picture)
    blocks.append(records(rows, columns, caption=str(result.get("question", "Result")), text=text))
    blocks += [Paragraph(text=str(note)) for note in result.get("notes") or ()]
    title = f"Experiment: {result.get('name', path.stem)}"
    origin = dict(result.get("settings") or {}) | {key: result.get(key) for key in ("command", "versions")}
    parts = (Section(title="Result", blocks=tuple(blocks)), _origin(origin, set()))
    question, verdict = str(result.get("question", "")), str(result["verdict"])
    return Page(title=title, subtitle=question, key_figures=(), parts=parts, verdict=verdict)


def _policy(result: Mapping[str, Any], provenance: Mapping[str, Any], path: Path) -> Page:
    """A policy file without candidates: the policy and where it came from."""
    code = Code(code=json.dumps({k: v for k, v in result.items() if k != "provenance"}, indent=2), label="policy file")
    reason = "a policy file does not list what it was chosen among: tltlab tune --json does"
    parts = (
        Section(title="The policy", blocks=(code,)), _origin(provenance, {"verdict"}),
        Absent(title="Comparison", reason=reason),
    )  # fmt: skip
    figures = (("selector", str((result.get("selector") or {}).get("kind", "not told"))),)
    verdict = str(provenance.get("verdict", ""))
    return Page(title="A policy", subtitle=path.name, key_figures=figures, parts=parts, verdict=verdict)


def _origin(result: Mapping[str, Any], shown_above: set[str]) -> Part:
    """What else the result says: settings as facts, longer things folded, and the command to repeat it."""
    provenance = result.get("provenance")
    more = dict(provenance) if isinstance(provenance, dict) else {}
    settings = {k: v for k, v in (more | dict(result)).items() if k not in shown_above | {"provenance"}}
    command = settings.pop("command", None) or settings.pop("argv", None)
    versions = versions_of(settings)
    settings.pop("versions", None)
    plain: list[tuple[str, str]] = []
    folded: list[Block] = []
    for key, value in settings.items():
        if isinstance(value, dict | list) and len(json.dumps(value)) > 80:
            name = key.replace("_", " ")
            folded.append(Code(code=json.dumps(value, indent=2), label=name, summary=name))
        elif value is not None:
            plain.append((key.replace("_", " "), f"{value:.6g}" if isinstance(value, float) else _text(value)))
    blocks: list[Block] = [Facts(rows=(*plain, *versions.items()))] if plain or versions else []
    blocks += repeat_blocks(command, "The command that made it is not told by this file.")
    return Section(title="Where it comes from", blocks=(*blocks, *folded))


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
