"""The part of a report on a drafter that was trained in the run: updates, training periods, and what they gave."""

from __future__ import annotations

import pandas as pd

from tltlab.calibration.idle_training import recorded_updates
from tltlab.charts import lines
from tltlab.stats import resampled_ratio
from tltlab.traces.drafts import walked_drafts
from tltlab.traces.trace import Trace

from .page import Absent, Block, PageTable, Part, Picture, Section
from .speculation import PER_DRAFT, Estimate, accept_length, banded


def drafter_part(trace: Trace, elsewhere: str | None = None) -> Part:
    """A trained drafter: its updates and age over the run, its training, and what age costs.

    `elsewhere` names a run inside this one that trained a drafter where this one did not.
    """
    title = "The trained drafter"
    steps, training, acceptance = trace.steps, trace.spot_training, trace.acceptance
    blocks: list[Block] = []
    if steps is not None and steps["drafter_updates"].notna().any():
        rows = steps[steps["drafter_updates"].notna()]
        updates, age = int(rows["drafter_updates"].iloc[-1]), int(rows["drafter_age"].fillna(0).max())
        series = {"updates so far": (rows["rl_step"], rows["drafter_updates"])}
        figure = lines(series, xlabel="RL step", ylabel="updates", title="Updates of the drafter in service")
        oldest = (
            "It was never older than the RL step before its own." if age == 0 else f"Its age reached {age} RL steps."
        )
        caption = f"The drafter of the last RL step had had {updates} updates. {oldest}"
        blocks.append(Picture.of(figure, alt=f"Updates so far, {updates} in the last RL step.", caption=caption))
    if training is not None and len(training):
        blocks += _training_blocks(training)
    if acceptance is not None and len(acceptance) and acceptance["drafter_updates"].notna().any():
        blocks += _acceptance_blocks(acceptance)
    if not blocks:
        page = f"; {elsewhere} did, and has a page of its own: tltlab report RUN/{elsewhere}" if elsewhere else ""
        return Absent(title=title, reason=f"no drafter was trained in this run{page}")
    return Section(title=title, blocks=tuple(blocks))


def _training_blocks(training: pd.DataFrame) -> list[Block]:
    updates = recorded_updates(training)
    rows = []
    for step, periods in training.groupby("rl_step"):
        loss = periods["loss"].dropna()
        rows.append((
            str(step), str(len(periods)), f"{periods['train_s'].sum():.2f}", f"{periods['setup_s'].sum():.2f}",
            f"{periods['yield_s'].max():.3f}", str(updates[int(periods["rl_step"].iloc[0])]),
            f"{int(periods['tokens'].sum()):,}", "–" if loss.empty else f"{loss.iloc[-1]:.3f}",
        ))  # fmt: skip
    columns = ("RL step", "periods", "training s", "set-up s", "longest yield s", "updates", "tokens", "loss")
    caption = "Training on idle workers: periods and their seconds over all workers; a group's update counts once."
    return [PageTable(caption=caption, columns=columns, rows=tuple(rows), summary="Training, RL step by RL step")]


def _acceptance_blocks(acceptance: pd.DataFrame) -> list[Block]:
    """Accept length on the same responses: of the drafter in service and of the first, and by age."""
    table = acceptance[acceptance["drafter_updates"].notna()]
    depth = int(table["max_depth"].min())  # one for all, or a deeper drafter would look better than a newer one
    newest = table[table["drafter_updates"] == table.groupby("rl_step")["drafter_updates"].transform("max")]
    oldest = table[table["drafter_updates"] == table["drafter_updates"].min()]
    series, bands = banded(
        {
            name: [(step, _accept_length(of_step)) for step, of_step in _by_response(rows, depth).groupby("rl_step")]
            for name, rows in (("in service", newest), ("as it was at first", oldest))
        }
    )
    lengths = "; ".join(f"{name}: {y[0]:.2f} at first, {y[-1]:.2f} at last" for name, (_, y) in series.items())
    figure = lines(series, bands=bands, xlabel="RL step", ylabel=PER_DRAFT, title="What training gave")
    alt = f"Tokens per draft of the drafter in service and of the first one, over RL steps. {lengths}."
    caption = (
        "What each would have had accepted on the same recorded responses, bonus token included. Bands: 95 % of "
        "resampled responses."
    )
    blocks: list[Block] = [Picture.of(figure, alt=alt, caption=caption)]
    ages = _by_age(table, depth)
    if len(ages) > 1:
        series, bands = banded({"kept": ages})
        xlabel = "age: RL steps since the drafter's last update"
        figure = lines(series, bands=bands, xlabel=xlabel, ylabel="% of the newest's", title="What age costs")
        lengths = ", ".join(f"{share:.0f} % at age {age}" for age, (share, _, _) in ages)
        caption = (
            "Tokens per draft of older drafters over the newest one's on the same responses. An older one has seen an "
            "older policy and has had fewer updates. Bands: 95 % of resampled RL steps, where there are at least three."
        )
        alt = f"Tokens per draft by the drafter's age, relative to the newest: {lengths}."
        blocks.append(Picture.of(figure, alt=alt, caption=caption))
    return blocks


def _by_response(rows: pd.DataFrame, depth: int) -> pd.DataFrame:
    """Sums over the drafts of that depth that decoding along each response would make: rl_step, kept, drafts."""
    drafts = walked_drafts(rows, depth)
    sums = drafts.groupby(["rl_step", "prompt_id", "sample", "turn"], as_index=False)["accepted"].agg(["sum", "size"])
    return sums.rename(columns={"sum": "kept", "size": "drafts"})


def _accept_length(rows: pd.DataFrame) -> Estimate:
    """With an interval from resampling responses."""
    return accept_length(rows["kept"].to_numpy(float), rows["drafts"].to_numpy(float), fewest=1)


def _by_age(table: pd.DataFrame, depth: int) -> list[tuple[int, Estimate]]:
    """Age, accept length in percent of the newest drafter's on RL steps that have both, and its interval."""
    per_age = {}
    for _, of_age in table.groupby("drafter_age"):
        sums = _by_response(of_age, depth).groupby("rl_step")[["kept", "drafts"]].sum()
        per_age[int(of_age["drafter_age"].iloc[0])] = 1 + sums["kept"] / sums["drafts"]
    means = pd.DataFrame(per_age)
    newest = means.bfill(axis=1).iloc[:, 0]
    rows = []
    for age in means.columns:
        shared = means[age].notna()
        a, b = means.loc[shared, age].to_numpy(), newest[shared].to_numpy()
        low, high = resampled_ratio(a, b)
        rows.append((int(age), (100 * float(a.sum() / b.sum()), 100 * low, 100 * high)))
    return rows
