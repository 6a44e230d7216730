"""baseline: no speculation, fixed depths and adaptive ones on the same prompts here; and TLT's claims, simulated.

The measured part is `tltlab bench runtime`: one engine, the same prompts, all modes in turn in every round, speed-ups
with intervals over rounds. The predicted part simulates whole RL steps of TLT, TLT-Base and Open-R1 over VeRL in the
set-ups of TLT's scripts, on H100 and on A100.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from pydantic import Field

from tltlab.charts import COLORS, bars
from tltlab.costs.profiles import nearest_engine, profile_costs
from tltlab.costs.stages import RooflineStages
from tltlab.errors import ConfigError
from tltlab.files import read_json
from tltlab.lengths.generate import generate
from tltlab.lengths.model import of_regime
from tltlab.planning.claims import CLAIMS
from tltlab.sim.systems import compare_systems

from . import Progress
from .models import Count, bench_on, own_model
from .result import ExperimentResult

SYSTEMS = "verl,open-r1,tlt-base,tlt"
CLAIM = CLAIMS["tlt"]
"""TLT's end-to-end speed-ups over VeRL, the range over its models and clusters: nothing finer is known."""
Part = Literal["measured", "predicted"]
_ENOUGH_ROUNDS = 10
_LEVEL = 0.05
_BEST_STATIC = "times the best static, "


CAP, LOAD, GROUP_SIZE = 32_768, 256, 8
MEDIAN_TOKENS = 0.18 * CAP
"""With a response in fifty at the limit, as reasoning models have it."""


@dataclass(frozen=True, kw_only=True)
class Published:
    """A set-up of TLT's scripts: `workers` of `tp` GPUs with `LOAD` responses each in an RL step."""

    name: str
    about: str
    model: str
    workers: int
    tp: int


PUBLISHED = (
    Published(name="7B as published", about="64 prompts x 8 on 8 GPUs", model="Qwen2.5-7B", workers=2, tp=4),
    Published(name="32B as published", about="256 prompts x 8 on 64 GPUs", model="Qwen2.5-32B", workers=8, tp=8),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineSettings:
    """`parts` says what is run. The first line of fields is the measured part's, as in `tltlab bench runtime`.

    `model` is a folder of `tltlab make-model`, else one of `size` is trained; `measured` is a file that `tltlab bench
    runtime --out` wrote, taken instead of measuring. `machines` and what follows are the predicted part's:
    `rl_steps` of each set-up on a `share` of its workers, with the load of each as it is.
    """

    parts: tuple[Part, ...] = ("measured", "predicted")
    model: Path | None = None
    size: str = "deep"
    prompts: Count = 24
    group_size: Count = 8
    epochs: Count = 2
    rounds: Count = 10
    cap: Count = 768
    measured: Path | None = None
    machines: tuple[str, ...] = ("H100", "A100")
    rl_steps: Annotated[int, Field(ge=2)] = 4
    share: Annotated[float, Field(gt=0, le=1)] = 1.0


FAST: Mapping[str, Any] = {
    "size": "tiny", "prompts": 4, "group_size": 4, "epochs": 1, "rounds": 2, "cap": 256,
    "rl_steps": 2, "share": 0.25,
}  # fmt: skip


def run(settings: BaselineSettings, *, folder: Path, seed: int, progress: Progress) -> ExperimentResult:
    """The experiment; a model that is trained stays in `folder`/models."""
    rows: list[dict[str, Any]] = []
    notes: list[str] = []
    verdicts: list[str] = []
    if "predicted" in settings.parts:
        predicted, notes = predicted_rows(settings, seed=seed, progress=progress)
        verdicts.append(_predicted_verdict(predicted))
        rows += predicted
    if "measured" in settings.parts:
        measurement = _measurement(settings, folder, seed, progress)
        try:
            rows = [*measured_rows(measurement), *rows]
            verdicts.insert(0, _measured_verdict(measurement))
            notes = [*_measured_notes(measurement), *notes]
        except (KeyError, TypeError, ValueError, AttributeError, StopIteration) as error:
            if settings.measured is None:
                raise
            raise ConfigError(f"{settings.measured} is not what `tltlab bench runtime --out` writes") from error
    if not rows:
        raise ConfigError("parts is empty: give measured, predicted or both")
    frame = pd.DataFrame(rows)
    return ExperimentResult(
        verdict="; ".join(verdicts) + ".",
        rows=frame,
        figure=_picture(frame),
        prediction="measured" not in settings.parts,
        notes=tuple(notes),
    )


def _measurement(settings: BaselineSettings, folder: Path, seed: int, progress: Progress) -> dict[str, Any]:
    """What `tltlab bench runtime` finds."""
    if settings.measured is not None:
        measurement: dict[str, Any] = read_json(settings.measured)
        return measurement
    model = own_model(settings.model, folder, size=settings.size, progress=progress)
    return bench_on(model, settings, seed=seed, progress=progress)


def measured_rows(measurement: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row per epoch and mode of what `tltlab bench runtime` found, plain decoding's speed being 1."""
    ratios = {
        (row["mode"], row["epoch"]): row
        for row in measurement["speedups"]
        if row["part"] == "rollout" and row["measure"] == measurement["judged_by"]
    }
    rows = []
    for mode in measurement["modes"]:
        ratio = ratios.get((mode["mode"], mode["epoch"]), {"ratio": 1.0, "low": None, "high": None})
        rows.append(
            {
                "kind": "measured",
                "setting": f"here, epoch {mode['epoch']}",
                "system": mode["mode"],
                "of": "rollout",
                "speedup": ratio["ratio"],
                "low": ratio["low"],
                "high": ratio["high"],
                "tokens_per_s": mode["tokens_per_s"],
                "rollout_s": mode["seconds"],
                "accept_length": mode["mean_accept_length"],
            }
        )
    return rows


def _measured_verdict(measurement: Mapping[str, Any]) -> str:
    """The bandit of the last epoch against plain decoding and against the fixed depth that did best."""
    epoch = max(mode["epoch"] for mode in measurement["modes"])
    mode = "beg-mab"
    plain = next(
        row
        for row in measurement["speedups"]
        if (row["mode"], row["epoch"], row["part"], row["measure"])
        == (mode, epoch, "rollout", measurement["judged_by"])
    )
    static = next(
        row
        for row in measurement["goals"]
        if (row["mode"], row["epoch"]) == (mode, epoch) and row["goal"].startswith(_BEST_STATIC)
    )
    best = static["goal"].removeprefix(_BEST_STATIC)
    comparison = _against_best(static, measurement["modes"][0]["rollouts"])
    return (
        f"measured here, adaptive drafts (BEG-MAB) roll out {_times(plain)} as fast as no speculation and "
        f"{_times(static)} as fast as the best fixed depth ({best}), {comparison}"
    )


def _against_best(ratio: Mapping[str, Any], rounds: int) -> str:
    if ratio["low"] is None or rounds < _ENOUGH_ROUNDS:
        return f"though {rounds} rounds are too few to tell them apart"
    if ratio["low"] > 1:
        return "so ahead of it"
    if ratio["high"] < 1:
        return "so behind it"
    if ratio["low"] > 1 - _LEVEL and ratio["high"] < 1 + _LEVEL:
        return f"so within {_LEVEL:.0%} of it, which nobody knows beforehand"
    return f"which {rounds} rounds do not tell apart"


def _measured_notes(measurement: Mapping[str, Any]) -> list[str]:
    rounds = measurement["modes"][0]["rollouts"]
    return [
        f"measured: {measurement['prompts']} prompts x {measurement['group_size']} up to "
        f"{measurement['max_response_tokens']} tokens of {measurement['model']}, all modes in turn, {rounds} rounds; "
        "from epoch 2 on drafters know earlier responses",
        "measured: speed-ups are of seconds per second that plain decoding of the same lengths would take, the best "
        "fixed depth is chosen afterwards, intervals are of 95 % over rounds"
        + (", too narrow below ten" if rounds < _ENOUGH_ROUNDS else ""),
    ]


def _predicted_verdict(rows: Sequence[Mapping[str, Any]]) -> str:
    def spread(system: str) -> str:
        speedups = [row["speedup"] for row in rows if row["system"] == system]
        least, most = f"{min(speedups):.2f}", f"{max(speedups):.2f}"
        return least if least == most else f"{least} to {most}"

    return (
        f"predicted by simulation of TLT's set-ups, RL steps against VeRL's are {spread('TLT')} times as fast under "
        f"TLT (the paper says {CLAIM.least} to {CLAIM.most}), {spread('TLT-Base')} times under TLT-Base and "
        f"{spread('Open-R1')} times under Open-R1"
    )


def _times(ratio: Mapping[str, Any]) -> str:
    if ratio["ratio"] is None:
        return "an unknown number of times"
    interval = "" if ratio["low"] is None else f" [{ratio['low']:.2f}, {ratio['high']:.2f}]"
    return f"{ratio['ratio']:.2f}{interval} times"


def _picture(frame: pd.DataFrame) -> Figure:
    """A panel for what was measured in the last epoch, one for what is predicted."""
    panels: list[tuple[pd.DataFrame, list[str], str, tuple[float, float] | None]] = []
    measured = frame[frame["kind"] == "measured"]
    if len(measured):
        last = measured[measured["setting"] == measured["setting"].iloc[-1]]
        panels.append((last, last["system"].tolist(), f"Measured {last['setting'].iloc[0]}: rollout, off = 1", None))
    predicted = frame[frame["kind"] == "predicted"]
    if len(predicted):
        rows = pd.concat([predicted[predicted["system"] == system] for system in ("TLT", "TLT-Base", "Open-R1")])
        labels = [f"{row.system} · {row.setting}" for row in rows.itertuples()]
        panels.append((rows, labels, "Predicted, simulated: whole RL step, VeRL = 1", (CLAIM.least, CLAIM.most)))
    heights = [0.6 + 0.22 * len(rows) for rows, *_ in panels]
    figure = Figure(figsize=(7.2, sum(heights) + 0.5), layout="constrained")
    axes = figure.subplots(len(panels), 1, height_ratios=heights, squeeze=False)[:, 0]
    for panel, (rows, labels, title, paper) in zip(axes, panels, strict=True):
        size, low, high = (rows[name].to_numpy(np.float64) for name in ("speedup", "low", "high"))
        bars(labels, size, low, high, xlabel="times as fast (95 % intervals)", title=title, reference=1.0, axes=panel)
        if paper is not None:
            panel.axvspan(*paper, color=COLORS[1], alpha=0.25, linewidth=0, label="the paper, TLT over VeRL")
            panel.legend(fontsize=8, frameon=False, loc="lower right")
        panel.set_xlim(left=0)
    return figure


def predicted_rows(
    settings: BaselineSettings, *, seed: int, progress: Progress
) -> tuple[list[dict[str, Any]], list[str]]:
    """A row per published set-up, machine and system, VeRL's speed being 1; and what is assumed, in sentences."""
    rows: list[dict[str, Any]] = []
    assumptions: dict[str, None] = {}
    for case, machine in product(PUBLISHED, settings.machines):
        progress(f"simulating {settings.rl_steps} RL steps of {case.name}, {case.about}, {machine}")
        for row in compared(case, machine, settings, seed).to_dict("records"):
            rows.append(_row(row, f"{case.name}, {machine}"))
            assumptions |= dict.fromkeys(f"{row['title']}: {each}" for each in row["assumptions"])
    notes = [
        f"predicted: {settings.rl_steps} RL steps up to {CAP} tokens, lengths of reasoning models and as many "
        "A100 as H100 are assumptions: the paper does not say; log-probs, training and weight sync follow from FLOPs, "
        "grading takes nothing",
        "predicted: low to high is of 95 % over RL steps, the luck of the lengths; least to most is over what was "
        "assumed: acceptance, its loss untrained or old, 30 % of speculation's costs",
        f"paper: TLT's range over all its models and clusters, {CLAIM.least}-{CLAIM.most} times VeRL; figures by model "
        "and for the other systems are not at hand; nothing here was fitted to it",
    ]
    return rows, [*notes, *assumptions]


def compared(case: Published, machine: str, settings: BaselineSettings, seed: int) -> pd.DataFrame:
    """The rows of `compare_systems` on a set-up's responses: whole RL steps on so many GPUs of the `machine`."""
    workers = max(2, round(settings.share * case.workers))
    lengths = of_regime("reasoning").with_changes(median=MEDIAN_TOKENS, max_response_tokens=CAP)
    trace = generate(
        lengths, num_rl_steps=settings.rl_steps, prompts_per_step=workers * LOAD // GROUP_SIZE, group_size=GROUP_SIZE,
        seed=seed, num_workers=workers, name=case.name,
    )  # fmt: skip
    costs = profile_costs(nearest_engine(machine, case.model, "bf16"), machine, case.model, case.tp, weights="bf16")
    stages = RooflineStages(kind="roofline", gpu=machine, model=case.model, num_gpus=workers * case.tp).build()
    return compare_systems(
        trace, SYSTEMS, costs=costs, workers=workers, seed=seed, stages=stages, gpus_per_worker=case.tp,
        decision_block=CAP // 256, ranges=True,
    )  # fmt: skip


def _row(row: Mapping[Any, Any], setting: str) -> dict[str, Any]:
    """Speed-ups are the ratios of times turned round, so the ends of an interval change places; one may have no end."""
    base = row["system"] == "verl"
    return {
        "kind": "predicted",
        "setting": setting,
        "system": row["title"],
        "of": "RL step",
        "speedup": 1 / row["step_ratio"],
        "low": None if base else 1 / row["step_ratio_high"],
        "high": None if base or not row["step_ratio_low"] else 1 / row["step_ratio_low"],
        "least": 1 / row["ratio_most"],
        "most": 1 / row["ratio_least"],
        "paper": f"{CLAIM.least}-{CLAIM.most}" if row["system"] == "tlt" else None,
        "rollout_speedup": 1 / row["ratio"],
        "rollout_s": row["makespan_s"],
        "step_s": row["step_s"],
        "rollout_share": row["rollout_share"],
        "accept_length": row["mean_accept_length"],
    }
