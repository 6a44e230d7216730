"""Fits the linear cost model and acceptance to the iterations of a recorded trace, and says how well they hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import numpy as np
import numpy.typing as npt
import pandas as pd
import typer

from .acceptance import BatchAcceptance
from .cli import Json, emit
from .cost import CalibratedRange, LinearCosts
from .errors import ConfigError
from .fit import FloatArray, fit
from .fit_acceptance import fit_acceptance
from .residuals import NUM_BANDS, band, residuals, table, worker_sums
from .trace import Trace, read


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """A fit with its residuals.

    `residuals` has one row per regime: `regime`, `num_iterations`, `mean_abs_relative_error` of single iterations, and
    `bias`, summed prediction / summed duration - 1. `sums` has one row per RL step and worker: measured and predicted
    seconds, which is what a rollout time is made of. `notes` says which terms are None or folded into others, and why.
    `by_worker` holds a cost model per worker where that was asked for.
    """

    costs: LinearCosts
    acceptance: BatchAcceptance | None
    residuals: pd.DataFrame
    sums: pd.DataFrame
    notes: tuple[str, ...]
    by_worker: dict[int, LinearCosts] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """Iterations as columns. What row i verified: batch, verified, spec; what it drafted: next_depth, draft_s."""

    batch: FloatArray
    context: FloatArray
    prefill: FloatArray
    verified: FloatArray
    spec: npt.NDArray[np.bool_]
    loaded: npt.NDArray[np.bool_]
    next_depth: FloatArray
    draft_s: FloatArray
    draft_known: npt.NDArray[np.bool_]
    duration: FloatArray
    regime: npt.NDArray[np.int64]
    block: npt.NDArray[np.int64]


def calibrate(trace: Trace, rl_steps: Sequence[int] | None = None, by_worker: bool = False) -> Calibration:
    """Fit costs and acceptance to `trace.iterations`, of some RL steps or all.

    An iteration's duration holds its verification and the drafting for the next one, told apart by `draft_duration`:

        duration - draft_duration = base + per_request*b + per_token*(b + drafted) + per_context*S
                                    + prefill_per_token*prefill_tokens + [speculative] sd_base + [loaded, plain] sd_idle
        draft_duration            = [next depth d > 0] sd_base' + d*(draft_level + draft_level_per_request*b)

    with sd_base_s = sd_base + sd_base'. A term that the rows cannot tell from others is None; without speculation
    per_token_s is one with per_request_s, which then holds both. Raises ConfigError for a trace without iterations.
    """
    chosen = trace if rl_steps is None else trace.select(rl_steps)
    table = chosen.iterations
    if table is None or table.empty:
        raise ConfigError(f"{trace.path or 'the trace'} has no iterations.parquet to calibrate on: record a run")
    rows = _rows(table, chosen.steps)
    costs, notes = _fit_costs(rows)
    acceptance, more = fit_acceptance(table)
    predicted = _predict(costs, rows)
    notes += [*more, *_coverage(table, chosen.steps)]
    workers = sorted(table["worker"].unique().tolist()) if by_worker else []
    return Calibration(
        costs=costs.model_copy(update={"notes": tuple(notes), "calibrated": _range(rows)}),
        acceptance=acceptance,
        residuals=residuals(rows.regime, rows.batch, rows.duration, predicted),
        sums=worker_sums(table, rows.duration, predicted),
        notes=tuple(notes),
        by_worker={int(w): _fit_costs(_rows(table[table["worker"] == w], chosen.steps))[0] for w in workers},
    )


def iteration_times(costs: LinearCosts, trace: Trace) -> FloatArray:
    """Seconds of each recorded iteration under a cost model, in the order of `trace.iterations`."""
    if trace.iterations is None:
        raise ConfigError(f"{trace.path or 'the trace'} has no iterations.parquet")
    return _predict(costs, _rows(trace.iterations, trace.steps))


def _rows(table: pd.DataFrame, steps: pd.DataFrame | None) -> _Rows:
    spec = table["draft_depth"].to_numpy() > 0
    with_drafter = set(table.loc[spec, "rl_step"].unique().tolist())
    if steps is not None and "policy" in steps:
        named = steps.loc[steps["policy"].notna() & (steps["policy"] != "none"), "rl_step"]
        with_drafter |= set(named.tolist())
    batch = table["batch"].to_numpy(np.float64)
    draft = table["draft_duration"] if "draft_duration" in table else pd.Series(np.nan, index=table.index)
    next_depth = table["next_draft_depth"] if "next_draft_depth" in table else pd.Series(np.nan, index=table.index)
    prefill = table["prefill_tokens"].to_numpy(np.float64)
    return _Rows(
        batch=batch,
        context=table["context_tokens"].to_numpy(np.float64),
        prefill=prefill,
        verified=batch + table["num_drafted"].to_numpy(np.float64),
        spec=spec,
        loaded=table["rl_step"].isin(list(with_drafter)).to_numpy(),
        next_depth=np.asarray(next_depth.fillna(0), np.float64),
        draft_s=np.asarray(draft.fillna(0.0), np.float64),
        draft_known=(draft.notna() & next_depth.notna()).to_numpy(),
        duration=table["duration"].to_numpy(np.float64),
        regime=np.where(prefill > 0, 2, spec.astype(np.int64)),
        block=np.asarray(table.groupby(["rl_step", "worker"]).ngroup(), np.int64),
    )


def _range(rows: _Rows) -> CalibratedRange:
    spans = {"batch": rows.batch, "verified_tokens": rows.verified, "context_tokens": rows.context}
    return CalibratedRange(**{name: (float(x.min()), float(x.max())) for name, x in spans.items()})


def _fit_costs(rows: _Rows) -> tuple[LinearCosts, list[str]]:
    notes: list[str] = []
    plain = ~rows.spec
    columns = {
        "base_s": np.ones_like(rows.batch),
        "per_request_s": rows.batch,
        "per_context_s": rows.context,
        "sd_base_s": rows.spec.astype(np.float64),
        "per_token_s": rows.verified,
        "prefill_per_token_s": rows.prefill,
    }
    idle_seen = bool((rows.loaded & plain).any())
    # Comparing RL steps would also measure how the machine's speed drifts; the drafter's own clock does not.
    if idle_seen and (~rows.loaded & plain).any() and not _idle(rows).any():
        columns["sd_idle_s"] = (rows.loaded & plain).astype(np.float64)
    verify = fit(columns, rows.duration - rows.draft_s, rows.regime * NUM_BANDS + band(rows.batch), rows.block)
    terms = dict(verify.coefficients)
    if abs(verify.level - 1.0) > 0.02:
        notes.append(
            f"outliers: typical iterations times {verify.level:.3f} give a typical rollout's time, as these costs do"
        )
    if not rows.spec.any():
        terms |= {"per_token_s": None, "sd_base_s": None}
        terms |= {"draft_level_s": None, "draft_level_per_request_s": None}
        notes.append("nothing was speculated: per_token_s is inside per_request_s, the drafting terms are unknown")
    else:
        _fit_drafting(rows, terms, notes)
    _fit_idle(rows, idle_seen, terms, notes)
    for name in ("base_s", "per_request_s", "per_context_s", "prefill_per_token_s"):
        if terms.get(name) is None:
            prefill = name == "prefill_per_token_s"
            why = "no iteration prefilled" if prefill else "it does not vary apart from other terms"
            notes.append(f"{name} is not identified: {why}")
    if rows.spec.any() and terms.get("per_token_s") is None:
        notes.append("per_token_s is not identified: drafts of one size only, so it cannot be told from other terms")
    elif rows.spec.all() and terms["sd_base_s"] is None:
        terms["sd_base_s"] = 0.0
        notes.append("every iteration speculates: sd_base_s is inside base_s and written 0")
    return LinearCosts.model_validate(terms), notes


def _fit_drafting(rows: _Rows, terms: dict[str, float | None], notes: list[str]) -> None:
    drafting = rows.draft_known & (rows.next_depth > 0)
    if not drafting.any() or not rows.draft_s[drafting].any():
        terms |= {"draft_level_s": 0.0, "draft_level_per_request_s": 0.0}
        notes.append("drafting time was not recorded apart: it is inside sd_base_s and per_token_s, draft terms are 0")
        return
    depth, batch = rows.next_depth[drafting], rows.batch[drafting]
    columns = {"draft_level_s": depth, "draft_level_per_request_s": depth * batch, "once": np.ones_like(depth)}
    found = fit(columns, rows.draft_s[drafting], band(batch), rows.block[drafting])
    once = found.coefficients.pop("once")
    terms |= found.coefficients
    if once:
        terms["sd_base_s"] = (terms["sd_base_s"] or 0.0) + once
    if once is None:
        notes.append("drafts of one depth only: their time is all in the draft_level terms, none in sd_base_s")
    if terms["draft_level_per_request_s"] is None:
        notes.append("draft_level_per_request_s is not identified: drafts at one batch size only")


def _fit_idle(rows: _Rows, idle_seen: bool, terms: dict[str, float | None], notes: list[str]) -> None:
    """sd_idle_s: measured as drafting time at depth 0, else by comparison, else inside base_s."""
    idle = _idle(rows)
    if idle.any():
        terms["sd_idle_s"] = float(rows.draft_s[idle].mean())
    elif terms.get("sd_idle_s") is not None:
        return
    elif idle_seen:
        terms["sd_idle_s"] = 0.0
        notes.append("plain iterations all had a drafter loaded: sd_idle_s is inside base_s and written 0")
    else:
        terms["sd_idle_s"] = None
        notes.append("sd_idle_s is not identified: no plain iteration with a drafter loaded")


def _idle(rows: _Rows) -> npt.NDArray[np.bool_]:
    """Rows that recorded what a loaded drafter took to draft nothing."""
    idle: npt.NDArray[np.bool_] = rows.draft_known & rows.loaded & (rows.next_depth == 0) & (rows.draft_s > 0)
    return idle


def _predict(costs: LinearCosts, rows: _Rows) -> FloatArray:
    """Duration of each row under the fit; terms that are None stand for nothing here."""
    c = {name: getattr(costs, name) or 0.0 for name in LinearCosts.model_fields if name.endswith("_s")}
    verify = c["base_s"] + c["per_request_s"] * rows.batch + c["per_token_s"] * rows.verified
    verify += c["per_context_s"] * rows.context + c["prefill_per_token_s"] * rows.prefill
    verify += c["sd_base_s"] * rows.spec + c["sd_idle_s"] * (rows.loaded & ~rows.spec)
    return verify + rows.next_depth * (c["draft_level_s"] + c["draft_level_per_request_s"] * rows.batch)


def _coverage(table: pd.DataFrame, steps: pd.DataFrame | None) -> list[str]:
    """A note where the busiest worker's iterations leave part of the rollout time unexplained."""
    if steps is None or steps["rollout_s"].isna().all():
        return []
    busiest = table.groupby(["rl_step", "worker"])["duration"].sum().groupby("rl_step").max()
    rollout = steps.dropna(subset=["rollout_s"]).set_index("rl_step")["rollout_s"]
    share = float(busiest.reindex(rollout.index).sum() / rollout.sum())
    if share > 0.98:
        return []
    return [f"the busiest worker's iterations cover {share:.1%} of rollout_s, the rest is not modelled"]


def _text(found: Calibration) -> str:
    terms = {name: value for name, value in found.costs.model_dump().items() if name.endswith("_s")}
    lines = [f"{name:28s}{'not identified' if v is None else format(v, '.4g')}" for name, v in terms.items()]
    notes = [f"note: {note}" for note in found.notes]
    return "\n".join([*lines, "", table(found.residuals, found.sums), *notes])


def command(
    trace: Annotated[Path, typer.Argument(help="A recorded trace or RUN folder.")],
    out: Annotated[Path, typer.Option(help="Where the cost model goes (JSON).")],
    acceptance_out: Annotated[
        Path | None, typer.Option(help="Where the acceptance model goes. [default: acceptance.json beside --out]")
    ] = None,
    rl_steps: Annotated[
        str | None, typer.Option("--rl-steps", help="a:b, RL steps a to b - 1; or one. [default: all]")
    ] = None,
    as_json: Json = False,
) -> None:
    """Fit step-time and acceptance models to a trace; print residuals per regime.

    Example: tltlab calibrate run/trace --out run/costs.json
    """
    source = read(trace)
    found = calibrate(source, parse_rl_steps(rl_steps, source.rl_steps))
    found.costs.write(out)
    beside = acceptance_out or out.parent / "acceptance.json"
    if found.acceptance is not None:
        found.acceptance.write(beside)
    result = {
        "costs": found.costs.model_dump(mode="json", exclude={"notes"}),
        "residuals": found.residuals.to_dict("records"),
        "sums": found.sums.to_dict("records"),
        "notes": list(found.notes),
        "out": str(out),
        "acceptance_out": str(beside) if found.acceptance is not None else None,
    }
    emit(result, as_json=as_json, text=_text(found))


def parse_rl_steps(text: str | None, known: list[int]) -> list[int] | None:
    """`a:b` as the RL steps a <= step < b that the trace has; either may be left out; `a` alone is one step."""
    if text is None:
        return None
    first, colon, last = text.partition(":")
    try:
        low = int(first) if first else min(known, default=0)
        high = (int(last) if last else max(known, default=0) + 1) if colon else low + 1
    except ValueError as error:
        raise ConfigError(f"--rl-steps {text!r}: give a:b, such as 0:5") from error
    steps = [step for step in known if low <= step < high]
    if not steps:
        span = f"{known[0]}..{known[-1]}" if known else "none"
        raise ConfigError(f"--rl-steps {text}: the trace has none of these; its RL steps are {span}")
    return steps
