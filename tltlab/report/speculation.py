"""Parts of a report on speculation: accept length by batch, and what policies chose."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from tltlab.charts import lines, shares
from tltlab.doctor.evidence import accepted_pairs
from tltlab.stats import resampled_ratio
from tltlab.traces.trace import Trace

from .page import Absent, Block, PageTable, Paragraph, Part, Picture, Section, number

_MOST_ARMS = 8
_COLUMNS = 24
_FEWEST_DRAFTS = 20
"""Accept lengths of fewer drafts are not drawn."""


def strategy_names(table: pd.DataFrame) -> pd.Series[str]:
    """Each row's strategy in short: "none", "ngram:4", or drafter (depth, top-k, tokens to verify) of a tree."""
    depth, chain = table["draft_depth"].astype(str), table["tokens_to_verify"] == table["draft_depth"] + 1
    drafter = table["drafter"].fillna("drafter").astype(str)
    tree = (
        drafter + " (" + depth + ", " + table["top_k"].astype(str) + ", " + table["tokens_to_verify"].astype(str) + ")"
    )
    named = (drafter + ":" + depth).where(chain & (table["top_k"] <= 1), tree)
    return named.where(table["draft_depth"] > 0, "none")


def batch_bins(batch: pd.Series[int]) -> pd.Series[int]:
    """Running requests in bins of doubling width, each by its first: 1, 2, 4 (to 7), 8 (to 15), ..."""
    return pd.Series(2 ** np.floor(np.log2(batch.clip(lower=1).to_numpy())), index=batch.index).astype(int)


def acceptance_part(trace: Trace) -> Part:
    """Accept length over running requests, per drafter, with intervals, and by strategy."""
    title = "Accept length by batch"
    table = trace.iterations
    if table is None:
        return Absent(title=title, reason="the trace has no iterations.parquet, so what each draft gave is not known")
    table = table[table["num_drafted"] > 0]
    if table.empty:
        return Absent(title=title, reason="no iteration verified a draft")
    table = table.assign(
        drafts=accepted_pairs(table),
        drafter=table["drafter"].fillna("drafter"),
        strategy=strategy_names(table),
        bin=batch_bins(table["batch"]),
    )
    series: dict[str, tuple[list[Any], list[float]]] = {}
    bands: dict[str, tuple[list[float], list[float]]] = {}
    for name, of_name in table.groupby("drafter", sort=True):
        bins = {at: rows for at, rows in of_name.groupby("bin") if rows["drafts"].sum() >= _FEWEST_DRAFTS}
        if bins:
            length, low, high = zip(*map(_accept_length, bins.values()), strict=True)
            series[str(name)], bands[str(name)] = (list(bins), list(length)), (list(low), list(high))
    blocks: list[Block] = []
    if series:
        lengths = "; ".join(
            f"{name}: " + ", ".join(f"{number(v, '.2f')} from {at}" for at, v in zip(*xy, strict=True))
            for name, xy in series.items()
        )
        xlabel = "running requests on the worker (bins of doubling width)"
        figure = lines(
            series, bands=bands, doubling=True, xlabel=xlabel, ylabel="tokens per draft", title="Accept length"
        )
        caption = (
            "Tokens per request and speculative iteration, bonus token included. Bands: 95 % of resampled RL steps, "
            "where there are at least three. Small batches are the end of a rollout, whose requests are other ones "
            "than those in the large batches."
        )
        blocks.append(Picture.of(figure, alt=f"Accept length over running requests. {lengths}.", caption=caption))
    blocks.append(_by_strategy(table))
    return Section(title=title, blocks=tuple(blocks))


def _accept_length(rows: pd.DataFrame) -> tuple[float, float, float]:
    """1 + accepted / drafts, and its interval from resampling RL steps: NaN ends below three of them."""
    accepted, drafts = rows.groupby("rl_step")[["num_accepted", "drafts"]].sum().to_numpy(float).T
    low, high = resampled_ratio(accepted, drafts)
    return 1 + float(accepted.sum() / drafts.sum()), 1 + low, 1 + high


def _by_strategy(table: pd.DataFrame) -> PageTable:
    rows = []
    for name, part in table.groupby("strategy", sort=True):
        value, low, high = _accept_length(part)
        share, drafts = part["num_accepted"].sum() / part["num_drafted"].sum(), int(part["drafts"].sum())
        interval = "–" if np.isnan(low) else f"{low:.2f} to {high:.2f}"
        rows.append((str(name), f"{len(part):,}", f"{drafts:,}", f"{value:.2f}", interval, f"{share:.1%}"))
    return PageTable(
        caption="By strategy, over all batches. Each was chosen for other batches and RL steps: this is "
        "no comparison of strategies.",
        columns=("drafter:depth", "iterations", "drafts", "accept length", "95 % interval", "draft tokens kept"),
        rows=tuple(rows),
    )


def arms_part(trace: Trace) -> Part:
    """Which strategies were chosen over the run, or over the iterations of a single rollout."""
    title = "What the policy chose"
    table = trace.decisions
    if table is None or table.empty:
        return Absent(title=title, reason="the trace has no decisions.parquet")
    table = table.assign(arm=strategy_names(table))
    counts = table["arm"].value_counts(sort=False).sort_index().sort_values(ascending=False, kind="stable")
    shown = sorted(counts.index[: _MOST_ARMS if len(counts) <= _MOST_ARMS else _MOST_ARMS - 1], key=_arm_order)
    table["arm"] = table["arm"].where(table["arm"].isin(shown), "other")
    arms = [*shown, *(["other"] if (table["arm"] == "other").any() else [])]
    if len(arms) == 1:
        only = f"Every one of {len(table):,} decisions was {arms[0]}: there was nothing to choose from."
        return Section(title=title, blocks=(Paragraph(text=only),))
    alt = ", ".join(f"{name} {num / len(table):.0%}" for name, num in counts.items())
    if len(trace.rl_steps) > 1:
        across, xlabel, heading = table["rl_step"], "RL step", "Choices over the run"
    else:
        width = max(1, -(-int(table["iteration"].max() + 1) // _COLUMNS))
        across = table["iteration"] // width * width
        xlabel, heading = "iteration of each worker", "Choices over the rollout"
    share = pd.crosstab(across.to_numpy(), table["arm"].to_numpy(), normalize="index")
    figure = shares(share.index.to_numpy(), {arm: share[arm] for arm in arms}, xlabel=xlabel, title=heading)
    caption = f"{len(table):,} decisions, one per engine iteration that had something to decide."
    picture = Picture.of(figure, alt=f"Share of decisions for each strategy: {alt}.", caption=caption)
    return Section(title=title, blocks=(picture,))


def _arm_order(name: str) -> tuple[bool, str, int, str]:
    drafter, _, depth = name.partition(":")
    return (name != "none", drafter, int(depth) if depth.isdigit() else 0, name)
