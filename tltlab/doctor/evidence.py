"""Evidence on a run; each piece is read once, when a check first needs it."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import field
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from tltlab.calibration.stages import measured_stages, stage_table
from tltlab.errors import TraceError
from tltlab.files import json_lines, read_object
from tltlab.importers.metrics_log import records_of
from tltlab.importers.sources import guess, is_log_folder, read
from tltlab.importers.step_metrics import LEARNING, SEVERAL_TURNS, StepMetrics, metrics_table, steps_of, turns_note
from tltlab.records import Fields, frozen
from tltlab.stats import Interval, paired_interval
from tltlab.traces.metrics import rollout_s
from tltlab.traces.storage import is_unfinished
from tltlab.traces.trace import Trace, locate

ENOUGH_STEPS = 3  # below it an interval over RL steps is no evidence
LOG_TAIL_BYTES = 1 << 20  # what a run died of stands at the end of its log
NO_LOG = "it is looked for in training logs alone"
TEXTS = tomllib.loads(files(__package__).joinpath("signatures.toml").read_text(encoding="utf-8"))


class NotChecked(Exception):
    """Evidence that a check needs is missing; the message names the evidence and how to get it."""


def need(known: object, why: str) -> None:
    """Raise NotChecked where `known` is false or empty."""
    if not known:
        raise NotChecked(why)


@frozen
class RunEvidence:
    """A run as its checks see it. Properties raise NotChecked where the run does not have what they return.

    `complaint` is the reason why there is no trace. `log` is the `metrics_table` of a training log, `turns` the note
    that its responses are not of one turn ("": they are, None: no log), `unit` the name of its rows. `events` are the
    lines of events.jsonl, `logs` the ends of log files by name, `recipe` the resolved recipe of run.json, `summary`
    what the run wrote at its end.
    """

    trace: Trace | None = None
    complaint: str = ""
    log: pd.DataFrame | None = None
    turns: str | None = None
    unit: str = "RL step"
    unfinished: Path | None = None
    events: tuple[Fields, ...] = ()
    logs: Mapping[str, str] = field(default_factory=dict)
    recipe: Fields = field(default_factory=dict)
    summary: Fields = field(default_factory=dict)

    @classmethod
    def of(cls, run: str | Path | Trace) -> RunEvidence:
        """Gather the evidence of a RUN folder, a trace folder or a Trace.

        Raises TraceError for a folder that holds no run, and for a damaged trace.
        """
        if isinstance(run, Trace):
            return cls(trace=run, turns=_turns(run))
        run = Path(run)
        steps = _log_of(run)
        try:
            trace, complaint, unfinished = _trace_of(run)
        except TraceError as error:
            # A log without lengths has its times and its drafts.
            if not steps:
                raise
            trace, complaint, unfinished = None, str(error), None
        turns = turns_note(steps)
        return cls(
            trace=trace,
            complaint=complaint,
            log=metrics_table(steps) if steps else None,
            turns=_turns(trace) if turns is None else turns.removeprefix(SEVERAL_TURNS),
            unit="report" if steps and steps[0].framework.advice else "RL step",
            unfinished=unfinished,
            events=json_lines(run / "events.jsonl"),
            logs=_logs(run),
            recipe=read_object(run / "run.json").get("recipe") or {},
            summary=read_object(run / "summary.json"),
        )

    def setting(self, name: str) -> Any:
        """A recipe's setting by its dotted name, None where it is not known."""
        value: Any = self.recipe
        for part in name.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value

    @property
    def is_over(self) -> bool:
        """True for a run whose last RL step is done."""
        return bool(self.summary.get("grpo_steps", 0) == self.setting("train.steps"))

    @property
    def known(self) -> Trace:
        """The trace."""
        if self.trace is None:
            raise NotChecked(self.complaint or "there is no trace")
        return self.trace

    @cached_property
    def steps(self) -> pd.DataFrame:
        """The table of RL steps; an engine's recording has the seconds of a rollout in its responses."""
        steps = self.known.steps
        if steps is None:
            raise NotChecked("the trace has no steps.parquet")
        if steps["rollout_s"].notna().all():
            return steps
        took_s = steps["rl_step"].map(rollout_s(self.known)).astype(np.float64)
        return steps.assign(rollout_s=steps["rollout_s"].astype(np.float64).fillna(took_s))

    @cached_property
    def learning(self) -> pd.DataFrame:
        """Signs that the policy learns, a row for each RL step: shares of cut responses and of groups without an
        advantage, rewards, and a log's figures (`step_metrics.LEARNING`); NaN is unknown."""
        if self.log is not None:
            return self.log[["rl_step", "cut", "reward_mean", *LEARNING]]
        rows = self.known.outcomes
        rows = rows.assign(cut=rows["finish_reason"] == "length", reward=rows["reward"].astype(np.float64))
        groups = rows.groupby(["rl_step", "prompt_id"])["reward"].agg(["min", "max", "count"]).query("count > 1")
        same = (groups["min"] == groups["max"]).groupby("rl_step").mean()
        by_step = rows.groupby("rl_step").agg(cut=("cut", "mean"), reward_mean=("reward", "mean"))
        unknown = dict.fromkeys(LEARNING, np.nan)
        return by_step.assign(**unknown | {"no_advantage": same}).reset_index()

    @cached_property
    def stages(self) -> pd.DataFrame:
        """Seconds of stages, a row for each RL step: those with their own column in a trace, timers of a log.

        "step" is the whole, the RL step's own time where that is known; what is in no stage is "other".
        """
        if self.log is None:
            return measured_stages(self.steps)
        seconds = pd.DataFrame(list(self.log["seconds"]), index=self.log["rl_step"], dtype=np.float64)
        return stage_table(seconds, self.log.set_index("rl_step")["step_s"])

    @cached_property
    def per_token(self) -> pd.DataFrame:
        """Rollouts' seconds per token of all responses and of the longest, for RL steps of a log that have these."""
        if self.log is None:
            raise NotChecked(NO_LOG)
        rows = self.log.assign(
            per_token=self.log["rollout_s"] / (self.log["mean"] * self.log["num_responses"].fillna(1.0)),
            per_longest=self.log["rollout_s"] / self.log["most"].fillna(self.log["mean"]),
        )
        rows = rows[rows["per_token"] > 0].reset_index(drop=True)
        if rows.empty:
            raise NotChecked("no RL step has both a rollout time and response lengths")
        return rows

    @property
    def training(self) -> pd.DataFrame:
        """Training periods of the drafter on idle workers."""
        rows = self.known.spot_training
        if rows is None or rows.empty:
            raise NotChecked("no drafter was trained on idle workers in this trace")
        return rows

    @cached_property
    def iterations(self) -> pd.DataFrame:
        """The iterations in order of time."""
        table = self.known.iterations
        if table is None or table.empty:
            raise NotChecked("the trace has no iterations (a simulation writes them with --record-iterations)")
        return table.sort_values(["rl_step", "worker", "iteration"], kind="stable", ignore_index=True)

    @cached_property
    def decoding(self) -> pd.DataFrame:
        """Iterations without prefill, in RL steps whose policy was not there to explore."""
        table = self.iterations
        table = table[(table["prefill_tokens"] == 0) & ~table["rl_step"].isin(self.explored)]
        if table.empty:
            raise NotChecked("all RL steps ran under policy explore, which tries everything on purpose")
        return table

    @cached_property
    def speculating(self) -> pd.DataFrame:
        """Iterations of `decoding` that verified, or could have verified, drafts."""
        table = self.decoding[self.decoding["draft_depth"] > 0]
        if table.empty:
            raise NotChecked("nothing was speculated outside policy explore")
        return table

    @property
    def explored(self) -> list[int]:
        """RL steps whose policy was there to explore."""
        steps = self.known.steps
        if steps is None:
            return []
        named = steps["policy"].astype(object).fillna("").astype(str).str.split().str[0]
        explored: list[int] = steps.loc[named == "explore", "rl_step"].tolist()
        return explored


def remedy(stage: str) -> str:
    """Return what to look at where a stage takes most of the time."""
    return str(TEXTS["remedies"].get(stage, f"what the framework times as {stage}"))


def stage_label(stage: str) -> str:
    """A stage in words."""
    return str(TEXTS["labels"].get(stage, stage))


def ratio(measured: Sequence[float] | pd.Series, reference: Sequence[float] | pd.Series) -> Interval:
    """Sum of `measured` over sum of `reference` with its 95 % interval over RL steps; the same for the same data."""
    return paired_interval(np.asarray(measured), np.asarray(reference))


def accepted_pairs(table: pd.DataFrame) -> pd.Series:
    """(request, iteration) pairs of each row, as `metrics.mean_accept_length` counts them."""
    lengths = table["accepted_per_request"].astype(object).str.len()
    return lengths.astype(np.float64).fillna(table["batch"])


def _log_of(run: Path) -> list[StepMetrics]:
    """Return the metrics of RL steps in a training log; empty if `run` is no log."""
    try:
        is_log = guess(run) == "metrics" if run.is_file() else is_log_folder(run)
        return steps_of(records_of(run))[0] if is_log else []
    except TraceError:
        return []


def _turns(trace: Trace | None) -> str | None:
    """The note of an imported log that its responses are of several turns; None without any."""
    notes = "" if trace is None else trace.manifest.notes or ""
    return next((n.removeprefix(SEVERAL_TURNS) for n in notes.split("; ") if n.startswith(SEVERAL_TURNS)), None)


def _trace_of(run: Path) -> tuple[Trace | None, str, Path | None]:
    """The trace, or why there is none, and a recording that was never finished. Raises TraceError."""
    unfinished = place if is_unfinished(place := locate(run)) else None
    try:
        trace = read(run)
    except TraceError as error:
        if unfinished is not None:
            return None, f"the recording {unfinished} was never finished, and cannot be read: {error}", unfinished
        if not any((run / name).is_file() for name in ("run.json", "events.jsonl")) or (run / "trace").exists():
            raise
        return None, f"{run} has no trace ({error})", None
    if unfinished is not None and not trace.rl_steps:
        return None, f"the recording {unfinished} was never finished and has no whole response", unfinished
    return trace, "", unfinished


def _logs(run: Path) -> dict[str, str]:
    tails = {}
    for path in sorted([*run.glob("*.log"), *run.glob("logs/*.log")]):
        with suppress(OSError), path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - LOG_TAIL_BYTES))
            tails[path.name] = file.read().decode(errors="replace")
    return tails
