"""Reads measured iterations, which a run recorded or a table holds."""

from pathlib import Path

import numpy as np
import pandas as pd

from tltlab.costs.base import Waiting
from tltlab.costs.samples import Iterations
from tltlab.errors import ConfigError
from tltlab.files import read_object
from tltlab.traces.trace import Trace, file_of_run

REQUIRED = ("batch", "tokens_to_verify", "context_tokens", "seconds")
OPTIONAL = {"draft_depth": 0.0, "prefill_tokens": 0.0}
"""Columns that may be missing or empty, and what that means."""
_LEAST = {
    "batch": 1, "tokens_to_verify": 1, "context_tokens": 0, "draft_depth": 0, "prefill_tokens": 0,
}  # fmt: skip
_WHOLE = ("batch", "draft_depth")


def iterations_of(trace: Trace) -> pd.DataFrame:
    """The trace's iterations; ConfigError where it has none."""
    table = trace.iterations
    if table is None or table.empty:
        raise ConfigError(f"{trace.path or 'the trace'} has no iterations.parquet to calibrate on: record a run")
    return table


def recorded_rows(table: pd.DataFrame, steps: pd.DataFrame | None = None) -> Iterations:
    """Rows of iterations.parquet; steps.parquet marks RL steps in which a drafter was loaded without ever drafting."""
    depth = table["draft_depth"]
    spec = depth.to_numpy() > 0
    with_drafter = set(table.loc[spec, "rl_step"].unique().tolist())
    if steps is not None:
        with_policy = steps.loc[steps["policy"].notna() & (steps["policy"] != "none"), "rl_step"]
        with_drafter |= set(with_policy.tolist())
    draft, following = table["draft_duration"], table["next_draft_depth"]
    # Drafting is timed where the engine waits for its drafts.
    synchronous = np.where(draft.notna(), 1.0, np.where(following.notna(), 0.0, np.nan))
    batch, prefill = table["batch"].to_numpy(np.float64), table["prefill_tokens"].to_numpy(np.float64)
    num_drafted = table["num_drafted"].to_numpy(np.float64)
    return Iterations(
        rl_step=table["rl_step"].to_numpy(np.int64),
        worker=table["worker"].to_numpy(np.int64),
        batch=batch,
        context=table["context_tokens"].to_numpy(np.float64),
        prefill=prefill,
        tokens_to_verify=1.0 + num_drafted / np.maximum(batch, 1.0),
        verified=batch + num_drafted,
        depth=depth.to_numpy(np.int64),
        loaded=table["rl_step"].isin(list(with_drafter)).to_numpy(),
        next_depth=np.asarray(following.fillna(0), np.float64),
        draft_s=np.asarray(draft.fillna(0.0), np.float64),
        draft_known=(draft.notna() & following.notna()).to_numpy(),
        seconds=table["duration"].to_numpy(np.float64),
        synchronous=synchronous,
        block=np.asarray(table.groupby(["rl_step", "worker"]).ngroup(), np.int64),
    )


def measured_waiting(trace: Trace) -> Waiting | None:
    """Seconds that an engine waits for the host, up to the trace's largest batch, None where it was not measured.

    It was in a rehearsal: its quick.json has plain iterations of stock vLLM with either scheduling, of the trace's
    model.
    """
    path = file_of_run(trace, "quick.json")
    rows = pd.DataFrame([] if path is None else read_object(path).get("rows"))
    if not {"model", "engine", "row", "scheduling", "batch", "median_s"} <= {*rows} or trace.iterations is None:
        return None
    alike = rows["model"].map(lambda name: str(trace.manifest.model).startswith(str(name)))
    plain = rows[alike & (rows["engine"] == "stock") & (rows["row"] == "plain step")]
    seconds = plain.pivot_table(index="batch", columns="scheduling", values="median_s").dropna()
    seconds = seconds[seconds.index <= trace.iterations["batch"].max()]
    if len(seconds) < 2 or not {"synchronous", "asynchronous"} <= {*seconds}:
        return None
    per_request_s, base_s = np.polyfit(
        seconds.index.to_numpy(), seconds["synchronous"] - seconds["asynchronous"], 1
    ).clip(0.0)
    return Waiting(base_s=base_s, per_request_s=per_request_s, source=f"quick.json of {trace.manifest.name}")


def measured_rows(points: pd.DataFrame) -> Iterations:
    """Rows of a table that `checked` has seen; a row's time holds its own drafting."""
    batch, verify, context, prefill, depth, seconds = (
        points[name].to_numpy(np.float64)
        for name in (
            "batch", "tokens_to_verify", "context_tokens", "prefill_tokens", "draft_depth", "seconds"
        )
    )  # fmt: skip
    unknown, nothing = np.zeros(len(points), dtype=bool), np.zeros(len(points), np.int64)
    scheduling = points.get("scheduling", pd.Series(None, points.index))
    return Iterations(
        rl_step=nothing,
        worker=nothing,
        batch=batch,
        context=context,
        prefill=prefill,
        tokens_to_verify=verify,
        verified=batch * verify,
        depth=depth.astype(np.int64),
        loaded=unknown,
        next_depth=depth,
        draft_s=np.zeros(len(points)),
        draft_known=unknown,
        seconds=seconds,
        synchronous=np.asarray(scheduling.map({"synchronous": 1.0, "asynchronous": 0.0}), np.float64),
        block=np.arange(len(points)),
    )


def read_step_times(path: Path) -> pd.DataFrame:
    """Read and check a `.csv` or `.parquet` file; ConfigError names the fault and its row."""
    try:
        table = pd.read_parquet(path) if path.suffix == ".parquet" else pd.read_csv(path)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not a table of measured iterations: {error}") from error
    return checked(table, str(path))


def checked(points: pd.DataFrame, place: str = "measured iterations") -> pd.DataFrame:
    """The table with all of REQUIRED and OPTIONAL as floats, other columns as they are.

    A row is one measured iteration: `batch` requests, each verifying `tokens_to_verify` tokens (the pending one
    counts), contexts that sum to `context_tokens`, `prefill_tokens` prompt tokens next to them, in `seconds`.
    `draft_depth` tokens were drafted for each within that time. `scheduling`, where it is there, is synchronous or
    asynchronous. Raises ConfigError.

    >>> checked(pd.DataFrame({"batch": [1], "tokens_to_verify": [1], "context_tokens": [9], "seconds": [0.1]})).shape
    (1, 6)
    """
    if missing := [name for name in REQUIRED if name not in points]:
        raise ConfigError(
            f"{place}: no column {', '.join(missing)} among {', '.join(map(str, points.columns))}; a table of measured "
            f"iterations has {', '.join(REQUIRED)}"
        )
    if points.empty:
        raise ConfigError(f"{place}: no rows, so there is nothing to fit")
    table = points.reset_index(drop=True).copy()
    for name in (*REQUIRED, *OPTIONAL):
        column = table[name] if name in table else pd.Series(np.nan, index=table.index)
        values = pd.to_numeric(column, errors="coerce").astype(np.float64)
        if name in OPTIONAL:
            values = values.where(column.notna(), OPTIONAL[name])
        wrong = ~np.isfinite(values)
        wrong |= values <= 0 if name == "seconds" else values < _LEAST[name]
        if name in _WHOLE:
            wrong |= values != np.floor(values)
        if wrong.any():
            at = int(np.flatnonzero(wrong)[0])
            kind = "a whole number" if name in _WHOLE else "a number"
            rule = "a time above 0" if name == "seconds" else f"{kind}, at least {_LEAST[name]}"
            raise ConfigError(f"{place}: row {at}: {name} is {column.tolist()[at]!r}; it is {rule}")
        table[name] = values
    return table
