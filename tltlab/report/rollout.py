"""Parts of a report on the rollouts themselves: their timeline, their lengths, and a row per RL step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from tltlab.arrays import Ints
from tltlab.charts import lines
from tltlab.console import json_rows
from tltlab.errors import TltlabError
from tltlab.traces import metrics
from tltlab.traces.lanes import median_step
from tltlab.traces.schema import GRAPH_KINDS
from tltlab.traces.trace import Trace

from .page import Absent, Block, Paragraph, Part, Picture, Pictures, Section, number, records
from .timeline import timeline

PERCENTILES = (10, 50, 90, 95, 99, 100)
_MOST_POINTS = 200
_MOST_TIMELINES = 6
_STAGES = ("inference_s", "reward_s", "train_s", "sync_s")


def timeline_part(trace: Trace) -> Part:
    """RL steps lane by lane: the first, the last and some between, that of median rollout time shown first."""
    title = "Timeline"
    try:
        median = median_step(trace)
        between = np.linspace(0, len(trace.rl_steps) - 1, min(_MOST_TIMELINES - 1, len(trace.rl_steps)))
        steps = sorted({median, *(trace.rl_steps[round(place)] for place in between)})
        pictures = tuple(_timeline_picture(trace, step, median=step == median) for step in steps)
    except TltlabError as error:
        return Absent(title=title, reason=str(error))
    if len(pictures) == 1:
        return Section(title=title, blocks=pictures)
    names = tuple(map(str, steps))
    slides = Pictures(pictures=pictures, label="RL step", names=names, first=steps.index(median))
    return Section(title=title, blocks=(slides,))


def _timeline_picture(trace: Trace, step: int, *, median: bool) -> Picture:
    figure, part = timeline(trace, rl_step=step), trace.select([step])
    idle, tail = metrics.bubble_fraction(part, idle=True), metrics.tail_fraction(part)
    alt = (
        f"One lane per worker over RL step {step}, and the number of running requests below: "
        f"{number(metrics.rollout_s(part)[step], '.3g', ' s')} of rollout, {number(idle, '.0%')} of worker time idle."
    )
    label = f"RL step {step}{', of median rollout time' * median}."
    caption = (
        f"{label} Workers are idle for {number(idle, '.0%')} of the rollout: what trains a drafter is not. For "
        f"{number(tail, '.0%')} of it fewer than 1/8 of the responses were running."
    )
    return Picture.of(figure, alt=alt, caption=caption)


def graphs_part(trace: Trace, graphs: Mapping[str, Any]) -> Part:
    """CUDA graphs of the target's passes by draft depth, and captured graphs; `graphs` is the run's graphs.json."""
    title = "CUDA graphs"
    table = trace.iterations
    if table is None or (table := table[table["graph"].notna()]).empty:
        return Absent(title=title, reason="the trace has no CUDA graphs of iterations (graph in iterations.parquet)")
    blocks: list[Block] = []
    captured = graphs.get("captured") or [{}]
    if (mode := captured[0].get("mode")) is not None:
        first, num_bytes = captured[0], captured[0].get("num_bytes")
        memory = "" if num_bytes is None else f", which took {num_bytes / 2**30:.2f} GiB"
        num = f"{len(first['full'])} full and {len(first['piecewise'])} piecewise graphs{memory}"
        sentence = f"Captured by each of {len(captured)} engines: {num} ({first['runner']} runner, {mode})."
        blocks.append(Paragraph(text=sentence))
    shares_of = table.groupby(["draft_depth", "graph"])["duration"].sum().unstack(fill_value=0)
    decoding = table[table["prefill_tokens"] == 0]
    tokens = (decoding["batch"] + decoding["num_drafted"]).groupby(decoding["draft_depth"]).sum()
    padded = 1.0 - tokens / decoding["graph_tokens"].groupby(decoding["draft_depth"]).sum()
    rows = [
        {
            "depth": "plain" if not depth else str(depth),
            "iterations": int((table["draft_depth"] == depth).sum()),
            **{kind: row.get(kind, 0.0) / row.sum() for kind in GRAPH_KINDS},
            "padding": padded.get(depth),
        }
        for depth, row in shares_of.iterrows()
    ]
    columns = {
        "depth": ("draft depth", ""), "iterations": ("iterations", ",d"), "full": ("one full graph", ".1%"),
        "piecewise": ("piecewise", ".1%"), "eager": ("no graph", ".1%"), "padding": ("padding of decoding", ".1%"),
    }  # fmt: skip
    caption = "Share of the time of iterations by what the target's pass ran in, as vLLM's dispatcher counted it."
    return Section(title=title, blocks=(*blocks, records(rows, columns, caption=caption)))


def lengths_part(trace: Trace, rows: Sequence[Mapping[str, Any]]) -> Part:
    """How long responses were: the tail of the distribution, and percentiles per RL step, from `metrics.per_step`."""
    num = sum(row["num_responses"] for row in rows)
    if not num:
        return Absent(title="Response lengths", reason="the trace has no responses")
    percentiles = zip(PERCENTILES, metrics.length_percentiles(trace, PERCENTILES), strict=True)
    cut = sum(row["num_cut"] for row in rows) / num
    steps = trace.rl_steps
    quantiles = ", ".join(f"{'longest' if p == 100 else f'p{p}'} {number(v, ',.0f')}" for p, v in percentiles)
    caption = f"{num:,} responses. Tokens: {quantiles}. Cut at the cap: {cut:.1%}."
    alt = f"Share of responses longer than a number of tokens: {quantiles}."
    figure = _longer_than({"all RL steps": _lengths(trace)})
    blocks: list[Block] = [Picture.of(figure, alt=alt, caption=caption)]
    if len(steps) > 1:
        over = {
            name: (steps, [row[key] for row in rows])
            for name, key in (("longest", "max_tokens"), ("95th percentile", "p95_tokens"), ("median", "p50_tokens"))
        }
        figure = lines(over, xlabel="RL step", ylabel="tokens", title="Lengths over the run")
        trained = trace.manifest.kind != "simulated"
        caption = "How lengths changed while the model was trained." if trained else "Lengths of each RL step."
        alt = "Median, 95th percentile and longest response of each RL step."
        blocks.append(Picture.of(figure, alt=alt, caption=caption))
    return Section(title="Response lengths", blocks=tuple(blocks))


def _lengths(trace: Trace) -> Ints:
    return np.sort(np.concatenate([part.outcomes["response_tokens"].to_numpy() for part in trace.parts()]))


def _longer_than(lengths_of: Mapping[str, Ints]) -> Figure:
    """Percent of responses longer than x, at so few x that they can be drawn, for ascending lengths by name."""
    series = {}
    for name, lengths in lengths_of.items():
        at = np.unique(np.concatenate([[0], np.quantile(lengths, np.linspace(0, 1, _MOST_POINTS), method="nearest")]))
        series[name] = at, 100 * (1 - np.searchsorted(lengths, at, side="right") / len(lengths))
    return lines(series, xlabel="tokens", ylabel="% still running", title="Responses longer than ...")


def steps_part(trace: Trace, rows: Sequence[Mapping[str, Any]]) -> Part:
    """A row per RL step, with the seconds of its stages; `rows` are those of `metrics.per_step`."""
    rows = steps_rows(trace, rows)
    if all(row["rollout_s"] is None for row in rows):
        reason = "the trace has no times: simulate it first (tltlab simulate TRACE --out)"
        return Absent(title="RL steps", reason=reason)
    blocks = _step_pictures(rows) if len(rows) > 1 else []
    columns = {
        "rl_step": ("RL step", "d"), "policy": ("policy", ""), "reward": ("reward", ".3f"),
        "num_responses": ("responses", ",d"), "num_tokens": ("tokens", ",d"), "rollout_s": ("rollout s", ".2f"),
        "tokens_per_s": ("tokens/s", ",.0f"), "mean_accept_length": ("accept length", ".2f"),
        "idle_fraction": ("idle", ".1%"), "tail_fraction": ("tail", ".1%"),
        "drafter_updates": ("drafter updates", ",.0f"),
    }  # fmt: skip
    caption = (
        "Each rollout. Accept length: tokens per request and speculative iteration, the bonus token included. Idle: "
        "share of worker time without decoding or drafter training. Tail: share of the time in which fewer than 1/8 of "
        "the responses ran."
    )
    blocks.append(records(rows, columns, caption=caption, text=("policy",)))
    stages = {
        "rl_step": ("RL step", "d"), "rollout_s": ("rollout s", ".2f"), "inference_s": ("inference s", ".2f"),
        "reward_s": ("reward s", ".3f"), "train_s": ("train s", ".2f"), "sync_s": ("sync s", ".3f"),
        "drift_kl": ("policy moved, nats/token", ".2g"),
    }  # fmt: skip
    if any(row[key] is not None for row in rows for key in [*_STAGES, "drift_kl"]):
        caption = "Seconds of each stage, and how far the step's update moved the policy (KL)."
        blocks.append(records(rows, stages, caption=caption, summary="Every stage, RL step by RL step"))
    return Section(title="RL steps", blocks=tuple(blocks))


def steps_rows(trace: Trace, per_step: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each RL step's metrics next to the trace's own `steps`; None where unknown."""
    by_step = {} if trace.steps is None else {row["rl_step"]: row for row in json_rows(trace.steps)}
    rows = []
    for each in per_step:
        recorded, measured = by_step.get(each["rl_step"], {}), each["rollout_s"]
        row = {**each} | {key: recorded.get(key) for key in ("policy", *_STAGES, "drift_kl", "drafter_updates")}
        row |= {"reward": recorded.get("reward_mean")}
        rows.append(row | {"tokens_per_s": row["num_tokens"] / measured if measured else None})
    return rows


def _step_pictures(rows: Sequence[Mapping[str, Any]]) -> list[Block]:
    steps = [row["rl_step"] for row in rows]
    blocks: list[Block] = []
    if all(row["reward"] is not None for row in rows):
        reward = [row["reward"] for row in rows]
        figure = lines({"reward": (steps, reward)}, xlabel="RL step", ylabel="mean reward", title="Reward")
        alt = f"Mean reward of each RL step, from {reward[0]:.3f} to {reward[-1]:.3f}."
        blocks.append(Picture.of(figure, alt=alt, caption="Mean reward of the responses of each RL step."))
    by_policy: dict[str, tuple[list[int], list[float]]] = {}
    for row in rows:
        at, seconds = by_policy.setdefault(row["policy"] or "rollout", ([], []))
        at.append(row["rl_step"])
        seconds.append(row["rollout_s"])
    title = "Rollout time" + (" by policy" if len(by_policy) > 1 else "")
    figure = lines(by_policy, xlabel="RL step", ylabel="seconds", title=title)
    caption = (
        "Seconds of rollout. Rows of different RL steps had different responses: compare policies on the same ones "
        "(tltlab compare) before you trust a difference."
    )
    blocks.append(Picture.of(figure, alt="Seconds of rollout in each RL step.", caption=caption))
    return blocks


def off_policy_part(trace: Trace) -> Part:
    """How old the tokens trained on were, RL step by RL step, and what was dropped for its age."""
    title = "Off-policy training"
    steps = trace.steps
    if steps is None or not (steps["off_policy_share"] > 0).any():
        return Absent(title=title, reason="every RL step learnt from its own policy, or off_policy_share is unknown")
    bias = steps["length_bias"].dropna()
    note = "" if bias.empty else (
        f" Responses trained on have {bias.iloc[-1]:.0%} of the mean length of those generated: below 100 % long ones "
        "are starved."
    )  # fmt: skip
    series = {"updates behind": (steps["rl_step"], steps["staleness"].astype(float))}
    figure = lines(series, xlabel="RL step", ylabel="updates", title="Age of the tokens trained on")
    alt = f"Mean updates behind in each RL step, {number(steps['staleness'].iloc[-1], '.2f')} at last."
    caption = f"Updates between the policy that drew a token and the one that learns from it, mean.{note}"
    picture = Picture.of(figure, alt=alt, caption=caption)
    columns = {
        "rl_step": ("RL step", "d"), "staleness": ("updates behind, mean", ".2f"),
        "off_policy_share": ("tokens of older policies", ".1%"), "dropped_groups": ("groups dropped so far", ".0f"),
        "length_bias": ("length trained on / generated, so far", ".3f"),
    }  # fmt: skip
    caption = "Of the tokens that each RL step trained on."
    table = records(json_rows(steps), columns, caption=caption, summary="RL step by RL step")
    return Section(title=title, blocks=(picture, table))


def side_by_side_parts(first: Trace, second: Trace, *, names: tuple[str, ...]) -> tuple[Part, ...]:
    """Two runs in the same charts: an RL step of each on one time axis, figures over RL steps, and lengths."""
    traces = dict(zip(names, (first, second), strict=True))
    rows = {name: steps_rows(trace, metrics.per_step(trace)) for name, trace in traces.items()}
    blocks: list[Block] = []
    for key, ylabel, title in (
        ("reward", "mean reward", "Reward"),
        ("rollout_s", "seconds", "Rollout time"),
        ("mean_accept_length", "tokens per draft", "Accept length"),
        ("p95_tokens", "tokens", "95th percentile of lengths"),
    ):
        series: dict[str, tuple[list[int], list[float]]] = {}
        for name, of_run in rows.items():
            points = [row for row in of_run if row[key] is not None]
            if points:
                series[name] = [row["rl_step"] for row in points], [row[key] for row in points]
        if series:
            ends = "; ".join(f"{name}: {y[0]:.3g} at first, {y[-1]:.3g} at last" for name, (_, y) in series.items())
            figure = lines(series, xlabel="RL step", ylabel=ylabel, title=title)
            blocks.append(Picture.of(figure, alt=f"{title} over RL steps. {ends}.", caption=f"{ends}."))
    over: Part = Absent(title="Over the run", reason="neither has responses")
    if blocks:
        over = Section(title="Over the run", blocks=tuple(blocks))
    return (timelines_part(first, second, names), over, _both_lengths(traces))


def timelines_part(first: Trace, second: Trace, names: tuple[str, ...]) -> Part:
    """An RL step of two runs, lane by lane, the first above the second on one time axis."""
    try:
        figure = timeline(first, compare=second, title=(names[0], names[1]))
    except TltlabError as error:
        return Absent(title="Timelines", reason=str(error))
    caption = "The RL step that both have whose rollout is of median length, on the same time axis."
    alt = f"One lane per worker over an RL step of {names[0]}, and below on the same axis of {names[1]}."
    return Section(title="Timelines", blocks=(Picture.of(figure, alt=alt, caption=caption),))


def _both_lengths(traces: Mapping[str, Trace]) -> Part:
    drawn = {name: _lengths(trace) for name, trace in traces.items() if trace.num_rows("outcomes")}
    if not drawn:
        return Absent(title="Response lengths", reason="neither has responses")
    longest = "; ".join(f"{name}: the longest has {lengths[-1]:,.0f} tokens" for name, lengths in drawn.items())
    alt = f"Share of responses longer than a number of tokens. {longest}."
    return Section(title="Response lengths", blocks=(Picture.of(_longer_than(drawn), alt=alt, caption=f"{longest}."),))
