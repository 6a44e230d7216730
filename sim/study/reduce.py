"""Reducers of a study's table: ratios with paired intervals, regret, order, and their words.

Of cells of one point (the same axes) all are compared with the point's baseline.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from tltlab.arrays import Floats
from tltlab.planning.claims import CLAIMS
from tltlab.planning.execution import missing_part
from tltlab.planning.system_binding import BoundSystem
from tltlab.records import Fields, Json
from tltlab.sim.scenario import Scenario
from tltlab.stats import Interval, paired_ratio

from .study import Cell

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DRAWS_ONLY = "draws only: 95 % interval over RL steps, without errors of costs and acceptance"
REGRET = (
    "regret: time above the clairvoyant bound, which knows every length and uses any draft that the acceptance covers"
)
_DRAFTERS_CHARACTERS = 16
_MOST_PANELS = 6


def next_line(gains: Mapping[str, float], command: str = "") -> str:
    """Return the last line of a verdict: options that make a rollout faster, by what factor, and the command to go on.

    >>> next_line({"--placement x": 1.08, "--planner y": 1.0}, "python train.py")
    'Next: --placement x makes it 8% faster still; python train.py'
    """
    steps = [f"{what} makes it {gain - 1:.0%} faster still" for what, gain in gains.items() if gain >= 1.005]
    steps += [command] if command else []
    return f"Next: {'; '.join(steps)}" if steps else ""


class Comparison(pd.DataFrame):
    """A comparison's rows: a DataFrame that draws itself."""

    @property
    def _constructor(self) -> Callable[..., pd.DataFrame]:
        """Parts of it are DataFrames and nothing else."""
        return pd.DataFrame

    def to_frame(self) -> pd.DataFrame:
        """Return a plain DataFrame of the same rows."""
        return pd.DataFrame(self)

    @property
    def compared(self) -> str:
        """The column that names the rows."""
        return "policy" if "policy" in self else "system"

    def plot(self) -> Figure:  # type: ignore[override]
        """Draw the speed-up of each row over the baseline, with its interval of draws only; of axes heat maps.

        A heat map is over the two axes with most values, a panel for each row's name; other axes are averaged over, as
        the title states.
        """
        from tltlab.charts import bars, heat_maps

        name = "title" if "title" in self else self.compared
        sizes = {axis: self[axis].map(str).nunique() for axis in self.attrs["axes"]}
        if not sizes:
            low, high = (1.0 / self[end] for end in ("ratio_high", "ratio_low"))
            return bars(self[name].tolist(), (1.0 / self["ratio"]).tolist(), low.tolist(), high.tolist(),
                        title="Rollouts (simulated)", xlabel="speed-up over the baseline (intervals: draws only)",
                        reference=1.0)  # fmt: skip
        across = sorted(sizes, key=lambda axis: -sizes[axis])
        x, y, averaged = across[0], (*across[1:2], self.compared)[0], across[2:]
        values = "step_speed_up" if "step_speed_up" in self else "speed_up"
        whole = {f"all {self.compared}s".replace("ys", "ies"): self.to_frame()}
        named = dict(list(self.to_frame().groupby(self.compared, sort=False)))
        panels = whole if y == self.compared else {n: p for n, p in named.items() if n != self.attrs["baseline"]}
        tables = {
            str(title): rows.pivot_table(index=y, columns=x, values=values, sort=False, aggfunc="mean")
            for title, rows in list(panels.items())[:_MOST_PANELS]
        }
        mean = f", mean over {', '.join(averaged)}" if averaged else ""
        what = "speed-up of the RL step" if values.startswith("step") else "speed-up"
        return heat_maps(tables, xlabel=x, ylabel=y, title=f"{what} over {self.attrs['baseline']} (simulated{mean})")


def comparison(rows: Sequence[Fields], axes: Fields, attrs: Fields) -> Comparison:
    """Return the rows as a frame, the fastest first unless there are axes."""
    frame = pd.DataFrame(rows)
    if not axes:
        order = "step_s" if "step_s" in frame else "makespan_s"
        frame = frame.sort_values(order, kind="stable", ignore_index=True)
    result = Comparison(frame)
    result.attrs |= {"axes": axes, **attrs}
    return result


def compared(cells: Sequence[Cell], table: pd.DataFrame, nominal: Scenario, baseline: str) -> list[Json]:
    """Return a row for each name among the cells of one point, which are repeats of it under other seeds.

    `nominal` is the point's scenario under its first seed, with all its workers and the acceptance that was given.
    Where the `baseline` failed, ratios are NaN.
    """
    kind = "policy" if "policy" in table else "system"
    first = {cell.name: cell for cell in reversed(cells)}
    counted = table.drop(columns=["outside", "drafters", "acceptance"])
    means = counted.groupby([kind, "rl_step"], sort=False).mean(numeric_only=True)
    names = [name for name in dict.fromkeys(cell.name for cell in cells) if name in means.index.get_level_values(0)]
    of_name = {name: _columns(means.loc[[name]].sort_index()) for name in names}
    base = of_name.get(baseline, {})
    return [_row(first[name], of_name[name], base, nominal, kind) for name in names]


def _row(cell: Cell, column: Mapping[str, Floats], base: Mapping[str, Floats], nominal: Scenario, kind: str) -> Json:
    seed, bound = nominal.seed, cell.system
    bounds_s = cell.bounds_s(nominal)
    tokens = column["tokens"] + column["wasted_tokens"]
    drafts = column["drafts"].sum()
    row: Json = {kind: cell.name}
    row |= {} if bound is None else {"title": bound.system.title}
    granted = cell.scenario.granted(cell.policy.strategies)
    row |= granted
    row |= dict(cell.axes) | ({"granted": granted["acceptance"]} if "acceptance" in cell.axes else {})
    row |= {name: float(np.mean(column[name])) for name in ("makespan_s", "tokens_per_s")}
    row |= _ratios("", column["makespan_s"], base.get("makespan_s"), seed)
    row |= _ratios("tokens_per_s_", column["tokens_per_s"], base.get("tokens_per_s"), seed, of_rates=True)
    row |= {
        "bubble_fraction": _share(column["idle_s"], column["worker_s"]),
        "off_policy_share": _share(column["old_tokens"], column["tokens"]),
        "wasted_share": _share(column["wasted_tokens"], tokens),
    }
    for at, name in enumerate(("regret", "fixed_regret")):
        row[name] = None if bounds_s is None else _share(column["makespan_s"], bounds_s[at], less=1.0)
    row["mean_accept_length"] = math.fsum(column["kept_tokens"]) / drafts if drafts else None
    if np.isfinite(column["step_s"]).all():
        row["step_s"] = float(np.mean(column["step_s"]))
        row |= _ratios("step_", column["step_s"], base.get("step_s"), seed)
        row["rollout_share"] = float(column["makespan_s"].sum() / column["step_s"].sum())
    return row if bound is None else row | _about(bound, row, column, nominal)


def _about(bound: BoundSystem, row: Fields, column: Mapping[str, Floats], nominal: Scenario) -> Any:
    """Return a system's own columns."""
    from .systems import generating_workers

    system = bound.system
    same = ("lossless", "on_policy", "source", "algorithm", "exact")
    return {name: getattr(system, name) for name in same} | {
        "runs_here": missing_part(system) or True,
        "length_bias": float(column["length_bias"][0]),
        "workers": generating_workers(system, nominal.workers),
        "claim": _beside_claim(row),
        "assumptions": bound.assumptions,
        "stand_ins": bound.stand_ins,
        "defaults": bound.defaults,
    }


def _columns(steps: pd.DataFrame) -> dict[str, Floats]:
    """Return the columns with the tokens per second that are trained on, 0 where nothing is generated."""
    columns = {str(name): steps[name].to_numpy(np.float64) for name in steps}
    seconds = columns["makespan_s"]
    per_s = np.divide(columns["tokens"], seconds, out=np.zeros_like(seconds), where=seconds > 0)
    return columns | {"tokens_per_s": per_s}


def _ratios(prefix: str, values: Floats, base: Floats | None, seed: int, of_rates: bool = False) -> Json:
    """Return the ratio to the baseline with its interval, and of times the speed-up likewise."""
    if base is None:
        ratio = Interval(estimate=math.nan, low=math.nan, high=math.nan)
    else:
        ratio = paired_ratio(values, base, rng=seed)
    columns = {f"{prefix}ratio": ratio.estimate, f"{prefix}ratio_low": ratio.low, f"{prefix}ratio_high": ratio.high}
    if of_rates:
        return columns
    ends = {"": ratio.estimate, "_low": ratio.high, "_high": ratio.low}
    return columns | {f"{prefix}speed_up{end}": 1.0 / v if v > 0 else math.nan for end, v in ends.items()}


def _share(part: Floats, whole: Floats, less: float = 0.0) -> float | None:
    """Return sum(part) / sum(whole) - less; None where there is nothing to share."""
    return float(part.sum() / whole.sum()) - less if whole.all() else None


def _beside_claim(row: Fields) -> Json | None:
    """Return the claim of the system's paper, and the simulated speed-up of the same kind, else of the rollout."""
    if (claim := CLAIMS.get(row["system"])) is None:
        return None
    kinds = {"RL step": "step_speed_up", "rollout": "speed_up", "tokens per second": "tokens_per_s_ratio"}
    name = kinds[claim.of] if kinds[claim.of] in row else "speed_up"
    estimate, low, high = (row[f"{name}{end}"] for end in ("", "_low", "_high"))
    interval = None if low != low else (low, None if high != high else high)
    return asdict(claim) | {"speed_up": estimate, "interval": interval}


def intervals_of(rows: Sequence[Fields]) -> list[Interval]:
    """Return the ratios of rollouts and of RL steps that these rows have, with their intervals."""
    return [
        Interval(estimate=row[name], low=row[f"{name}_low"], high=row[f"{name}_high"])
        for name, row in product(("ratio", "step_ratio"), rows)
        if row.get(name) is not None and row[name] == row[name]
    ]


def drafters_text(names: Sequence[str]) -> str:
    """Return the drafters of a row for a table's cell; many are counted, and `granted_text` has their names.

    >>> drafters_text(["learned", "ngram"]), drafters_text([])
    ('learned+ngram', 'none')
    """
    text = "+".join(names) or "none"
    return text if len(text) <= _DRAFTERS_CHARACTERS else f"{len(names)} drafters"


def granted_text(rows: Sequence[Mapping[Any, Any]], name: str) -> str:
    """Return a line with the acceptance granted to each drafter in a table's `rows`; "" where none drafts.

    Rows are named, by their `name`, where a drafter has another acceptance in another row.

    >>> granted_text([{"policy": "fixed", "drafters": ["ngram"], "acceptance": {"ngram": "geometric:0.4"}}], "policy")
    'acceptance: ngram geometric:0.4'
    """
    rows_of: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for drafter, text in row.get("granted", row["acceptance"]).items():
            rows_of.setdefault((drafter, text), []).append(str(row[name]))
    drafters = [drafter for drafter, _ in rows_of]
    parts = []
    for (drafter, text), names in sorted(rows_of.items()):
        several = f" ({', '.join(dict.fromkeys(names))})" if drafters.count(drafter) > 1 else ""
        parts.append(f"{drafter} {text}{several}")
    counted = {str(row[name]): row["drafters"] for row in rows if len("+".join(row["drafters"])) > _DRAFTERS_CHARACTERS}
    parts += [f"{row} drafts with {', '.join(names)}" for row, names in counted.items()]
    return f"acceptance: {'; '.join(parts)}" if parts else ""


def speed_up_cells(row: Fields, name: str = "speed_up") -> tuple[str, str]:
    """Return a speed-up and its interval for a table."""
    value, low, high = (row.get(f"{name}{end}") for end in ("", "_low", "_high"))
    unknown = [end is None or end != end for end in (value, low, high)]
    times = "" if unknown[0] else f"{value:.2f}x"
    if unknown[1]:
        return times, "one RL step"
    return times, f"[{low:.2f}, {'inf' if unknown[2] else format(high, '.2f')}]"
