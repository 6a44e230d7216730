"""The page of a comparison: the JSON output of `compare`, `tune`, `what-if`, `verify` and `rehearse`."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from tltlab.charts import bars, lines
from tltlab.errors import ConfigError
from tltlab.records import Fields, Json

from .page import Block, Code, Facts, Items, Page, Part, Picture, Section, number, records
from .parts import from_result, repeat_blocks, versions_of

SIMULATED = "Simulated: a prediction, not a measurement."
DRAWS_ONLY = "Draws only: 95 % intervals over RL steps, without what costs and acceptance may be wrong by."
_ROWS = ("rows", "systems", "candidates", "policies", "steps")
_COLUMNS = (
    "drafters: {drafters}; rollout s: {makespan_s:.4g}; speed-up: {speed_up:.2f}; draws only: {draws}; "
    "regret: {regret:.1%}; staying: {fixed_regret:.1%}; accept length: {mean_accept_length:.2f}; "
    "bubble: {bubble_fraction:.1%}; RL step s: {step_s:.4g}; speed-up: {step_speed_up:.2f}; draws only: {step_draws}; "
    "lossless: {lossless}; acceptance: {acceptance}"
)


def comparison_page(result: Fields, path: Path, more: Sequence[Part] = ()) -> Page:
    """The page of a result, recognised by its keys, with `more` parts behind the first. ConfigError for another."""
    try:
        return _page(result, path, more)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        why = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{path}: not as tltlab writes it ({why}); write it anew") from error


def _page(result: Fields, path: Path, more: Sequence[Part]) -> Page:
    if (empty := next((key for key in _ROWS if result.get(key) == []), None)) is not None:
        raise ConfigError(f"{path}: its {empty} are an empty list, so there is nothing to report")
    if "answers" in result:
        return _what_if(result, path, more)
    if "rows" in result:
        kind = "system" if "system" in result["rows"][0] else "policy"
        return _ratios(result, result["rows"], kind, f"{'Systems' if kind == 'system' else 'Policies'} compared", path)
    if "candidates" in result:
        return _ratios(result, result["candidates"], "name", "A tuned policy", path)
    if "policies" in result and all("measured_s" in row for row in result["policies"]):
        return _measured(result, path)
    if "steps" in result and "median_error" in result:
        part = from_result(result, "As tltlab verify wrote it.")
        return Page(title=part.title, subtitle=path.name, parts=(part,))
    raise ConfigError(
        f"{path} has the keys {', '.join(map(str, result)) or '(none)'}: give the --json output of compare, tune, "
        "verify or rehearse, or a RUN"
    )


def _ratios(result: Fields, rows: Sequence[Fields], key: str, title: str, path: Path) -> Page:
    """Rows of makespans with their speed-ups over a baseline."""
    tuned, axes = key == "name", list(result.get("axes") or ())
    baseline = str(result.get("baseline") or ("the best fixed strategy" if tuned else rows[0][key]))
    shown = [_in_words(row) for row in rows]
    labels = [", ".join(str(row[name]) for name in (key, *axes)) for row in rows]
    whole = all(row.get("step_s") is not None for row in rows)
    best = min(range(len(rows)), key=lambda at: rows[at]["step_s" if whole else "makespan_s"])
    verdict = result.get("verdict") or _verdict(shown[best], labels[best], baseline, whole=whole)
    blocks: list[Block] = [SIMULATED]
    for name, heading in (("speed_up", "Rollouts"), ("step_speed_up", "Whole RL steps")):
        if name == "speed_up" or any(row.get(name) is not None for row in shown):
            blocks.append(_speed_up_picture(shown, labels, name, f"speed-up over {baseline}", heading))
    headings = {key: "candidate" if tuned else key} | {axis: axis.replace("_", " ") for axis in axes}
    columns = "; ".join([*(f"{heading}: {{{name}}}" for name, heading in headings.items()), _COLUMNS])
    caption = (
        f"Speed-ups over {baseline} on the same responses with common random numbers. {DRAWS_ONLY} Regret: time above "
        "the clairvoyant bound; staying: above the bound where all stay on their workers."
    )
    blocks.append(records(shown, columns, caption=caption))
    parts: list[Part] = [Section(title="Result", blocks=tuple(blocks)), *_about_systems(rows)]
    if tuned and (bands := result.get("band")):
        named = {f"over {'plain decoding' if name == 'none' else name}": band for name, band in bands.items()}
        parts.insert(0, _band_section(named, named))
    if isinstance(notes := result.get("notes"), list) and notes and "assumed" not in result:
        parts.append(Section(title="Notes", blocks=tuple(map(str, notes))))
    above = {*_ROWS, "answers", "verdict", "notes", "by_accept", "speedup", "band", "drafter_training", "assumed"}
    parts.append(_origin(result, above))
    fastest = number(shown[best].get("step_speed_up" if whole else "speed_up"), ".2f")
    keys = [("fastest", labels[best]), ("its speed-up", f"{fastest}x")]
    if tuned:
        keys = [("chosen", str(result.get("name"))), ("worth it", "yes" if result.get("worth_it") else "no")]
    steps = result.get("num_rl_steps")
    keys += [("baseline", baseline)] + ([("RL steps", str(steps))] if steps is not None else [])
    subtitle = " · ".join(dict.fromkeys(v for v in (result.get("trace"), path.name) if isinstance(v, str) and v))
    return Page(title=title, subtitle=subtitle, key_figures=tuple(keys), parts=tuple(parts), verdict=str(verdict))


def _what_if(result: Fields, path: Path, more: Sequence[Part]) -> Page:
    """The answer of `tltlab what-if`: the speed-ups with their ranges, and by acceptance where that is not known."""
    page = _ratios(result, result["systems"], "system", "What speculation would bring", path)
    answers = {", ".join(answer["drafters"]): answer["rollout"] for answer in result["answers"].values()}
    speedups = {f"rollout, {drafters}": times for drafters, times in answers.items()}
    if result["speedup"]["rl_step"] is not None:
        speedups[f"RL step, {', '.join(result['drafters'])}"] = result["speedup"]["rl_step"]
    parts: list[Part] = [_band_section(speedups, {next(iter(speedups)): result["band"]}), *more]
    if (training := result.get("drafter_training")) is not None:
        parts.append(Section(title="Training the drafter", blocks=(training["says"],)))
    series = {}
    for key, name in (("rollout", "rollout"), ("rl_step", "RL step")):
        if rows := [row for row in result["by_accept"] if row[key] is not None]:
            series[name] = [row["accept"] for row in rows], [row[key]["mean"] for row in rows]
    if series:
        figure = lines(series, xlabel="drafted tokens accepted, each", ylabel="speed-up",
                       title="By acceptance (simulated)")  # fmt: skip
        points_text = "; ".join(
            f"{name}: " + ", ".join(f"{y:.2f}x at {x:.0%}" for x, y in zip(*points, strict=True))
            for name, points in series.items()
        )
        caption = "Over decoding without speculation, each with the best table for that acceptance."
        picture = Picture.of(figure, alt=f"Speed-up by acceptance. {points_text}.", caption=caption)
        parts.append(Section(title="By acceptance", blocks=(picture,)))
    assumed = tuple((str(each["what"]), ", ".join(filter(None, (each["value"], each["effect"]))) or "assumed")
                    for each in result["assumed"])  # fmt: skip
    parts += [Section(title="Assumed", blocks=(Items(rows=assumed),))] if assumed else []
    keys = [(name, f"{times['mean']:.2f}x") for name, times in speedups.items()]
    accept = result["accept"]
    keys += [("drafted tokens accepted", "as recorded" if accept is None else f"{accept:.0%}")]
    keys += [("responses", f"{result['num_responses']:,}"), ("RL steps", str(result["num_rl_steps"]))]
    subtitle = f"{page.subtitle} · {result['setting']}"
    return replace(page, subtitle=subtitle, key_figures=tuple(keys), parts=(*parts, *page.parts))


def _band_section(speedups: Mapping[str, Mapping[str, float]], bands: Mapping[str, Fields]) -> Section:
    """The speed-ups with their 90 % ranges, and what each input may be wrong by."""
    ends = list(speedups.values())
    text = ", ".join(f"{name} {t['mean']:.2f}x ({t['low']:.2f}x to {t['high']:.2f}x)" for name, t in speedups.items())
    picture = Picture.of(
        bars(list(speedups), [t["mean"] for t in ends], [t["low"] for t in ends], [t["high"] for t in ends],
             xlabel="speed-up", title="With its 90 % range (simulated)", reference=1.0),
        alt=f"Speed-up with its 90 % range: {text}.",
        caption="Lines on the bars: what costs, acceptance and lengths may be wrong by, together.",
    )  # fmt: skip
    rows = []
    for name, band in bands.items():
        for part, alone in band["parts"].items():
            between = f"{alone['low']:.2f}x to {alone['high']:.2f}x"
            rows.append({"of": name, "input": part, "alone": between, "share": alone["share"]})
    columns = "speed-up of: {of}; input: {input}; its range alone: {alone}; share of variance: {share:.0%}"
    table = records(rows, columns, caption="Each input at the ends of its 90 % range.")
    return Section(title="Speed-up", blocks=(picture, table))


def _in_words(row: Fields) -> Json:
    """The row with its speed-ups, and with intervals and yes or no in words."""
    words = dict(row)
    for prefix in ("", "step_"):
        if f"{prefix}ratio" in row:
            ends = {"": row[f"{prefix}ratio"], "_low": row[f"{prefix}ratio_high"], "_high": row[f"{prefix}ratio_low"]}
            words |= {f"{prefix}speed_up{end}": 1 / value if value else None for end, value in ends.items()}
        low, high = (words.get(f"{prefix}speed_up{end}") for end in ("_low", "_high"))
        words[f"{prefix}draws"] = None if low is None or high is None else f"{low:.2f} to {high:.2f}"
    if isinstance(row.get("drafters"), list) and isinstance(granted := row.get("granted", row.get("acceptance")), dict):
        words |= {
            "drafters": ", ".join(row["drafters"]) or "none",
            "acceptance": ", ".join(dict.fromkeys(granted.values())) or None,
        }
    if "lossless" in row:
        words["lossless"] = "yes" if row["lossless"] else "no"
    return words


def _speed_up_picture(
    rows: Sequence[Fields], labels: list[str], key: str, xlabel: str, title: str
) -> Picture:  # fmt: skip
    values = ", ".join(f"{n} {number(row.get(key), '.2f')}x" for n, row in zip(labels, rows, strict=True))
    return Picture.of(
        bars(labels, [row.get(key) for row in rows], [row.get(f"{key}_low") for row in rows],
             [row.get(f"{key}_high") for row in rows], xlabel=xlabel, title=f"{title} (simulated)", reference=1.0),
        alt=f"{title}: {values}.",
        caption=f"Bars right of the dashed line are faster than the baseline. {DRAWS_ONLY} A row without one has "
        "one RL step, or never differs.",
    )  # fmt: skip


def _verdict(row: Fields, name: str, baseline: str, *, whole: bool) -> str:
    """`whole`: of RL steps, where they are known; else of rollouts."""
    prefix, subject = ("step_", "the RL step") if whole else ("", "the rollout")
    if name == baseline:
        return f"Nothing is faster than {baseline}."
    sentence = f"{name} is fastest: {subject} {number(row.get(f'{prefix}speed_up'), '.2f')}x as fast as {baseline}'s"
    if (ends := row.get(f"{prefix}draws")) is None:
        return f"{sentence}; on a single RL step, so without an interval."
    sure = "" if row[f"{prefix}speed_up_low"] > 1 else ", which may be chance"
    return f"{sentence}, 95 % interval {ends} of draws only{sure}."


def _about_systems(rows: Sequence[Fields]) -> list[Part]:
    about = {}
    for row in rows:
        if "system" in row:
            assumed = "; ".join(map(str, row.get("assumptions") or ["nothing"]))
            title = str(row.get("title") or row["system"])
            about[title] = f"{assumed}. Source: {row.get('source') or 'not given'}."
    return [Section(title="What was assumed", blocks=(Items(rows=tuple(about.items())),))] if about else []


def _measured(result: Fields, path: Path) -> Page:
    """Page of policies that were measured: the verdict and the rows."""
    rows = [_in_words(row) for row in result["policies"]]
    columns = (
        "policy: {policy}; drafters: {drafters}; measured s: {measured_s:.4g}; from: {low:.4g}; to: {high:.4g}; "
        "tail s: {tail_s:.3g}; tokens/s: {tokens_per_s:.0f}; accept length: {accept_length:.2f}; "
        "predicted s: {predicted_s:.4g}; error: {error:+.1%}; at the round's speed: {error_at_speed:+.1%}; "
        "acceptance: {acceptance}; without: {why_not}"
    )
    table = records(rows, columns, caption="Measured on engines, beside what was predicted.")
    parts = (Section(title="Result", blocks=(table,)), _origin(result, {"policies", "verdict", "rounds"}))
    title = "Does the simulator's winner win on the machine?"
    return Page(title=title, subtitle=path.name, parts=parts, verdict=str(result.get("verdict", "")))


def _origin(result: Fields, shown_above: set[str]) -> Part:
    """Section on the origin of a result: settings as facts, long values folded, and the command to repeat it."""
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
            folded.append(Code(code=json.dumps(value, indent=2), label=name, folded=True))
        elif value is not None:
            text = value if isinstance(value, str) else json.dumps(value)
            plain.append((key.replace("_", " "), f"{value:.6g}" if isinstance(value, float) else text))
    blocks: list[Block] = [Facts(rows=(*plain, *versions.items()))] if plain or versions else []
    blocks += repeat_blocks(command, "This file does not name the command that made it.")
    return Section(title="Where it comes from", blocks=(*blocks, *folded))
