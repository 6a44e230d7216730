"""baseline: no speculation, fixed depths and adaptive ones on the same prompts here; and TLT's claims, simulated.

The measured part is `tltlab bench runtime`: one engine, the same prompts, all modes in turn in every round, speed-ups
with intervals over rounds. The predicted part is in baseline_predicted.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pydantic import Field

from tltlab.charts import COLORS, draw_bars
from tltlab.errors import ConfigError
from tltlab.files import read_json

from .baseline_predicted import LONG_TAIL, PAPER_RANGE, predicted_rows
from .models import own_model
from .result import ExperimentResult

Count = Annotated[int, Field(ge=1)]
Part = Literal["measured", "predicted"]
_ENOUGH_ROUNDS = 10
_LEVEL = 0.05
_BEST_STATIC = "times the best static, "


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """`parts` says what is run. The first line of fields is the measured part's, as in `tltlab bench runtime`.

    `model` is a folder of `tltlab make-model`, else one of `size` is trained; `measured` is a file that `tltlab bench
    runtime --out` wrote, taken instead of measuring. `models` and what follows are the predicted part's: `lengths` are
    regimes of `tltlab.lengths.model` or "long-tail", `decision_block` is how many iterations a bandit's decision holds.
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
    models: tuple[str, ...] = ("Qwen2.5-7B", "Qwen2.5-32B")
    machines: tuple[str, ...] = ("H100", "A100")
    gpus: Annotated[int, Field(ge=8)] = 64
    gpu_prompts: Count = 256
    gpu_group_size: Count = 8
    gpu_cap: Count = 32_768
    gpu_rl_steps: Annotated[int, Field(ge=2)] = 8
    lengths: tuple[str, ...] = ("reasoning", LONG_TAIL)
    acceptance: str = "tlt-qwen2.5-32b"
    model_free_acceptance: str = "seer-siblings"
    decision_block: Count = 32
    repeats: Count = 1
    jobs: Count = 1


FAST: Mapping[str, Any] = {
    "size": "tiny", "prompts": 4, "group_size": 4, "epochs": 1, "rounds": 2, "cap": 256,
    "gpu_prompts": 32, "gpu_rl_steps": 2, "gpus": 8,
}  # fmt: skip


def run(settings: Settings, *, folder: Path, seed: int, progress: Callable[[str], None]) -> ExperimentResult:
    """The experiment; a model that is trained stays in `folder`/models."""
    rows: list[dict[str, Any]] = []
    notes: list[str] = []
    said: list[str] = []
    if "predicted" in settings.parts:
        predicted, notes = predicted_rows(settings, seed=seed, progress=progress)
        said.append(_predicted_verdict(settings, predicted))
        rows += predicted
    if "measured" in settings.parts:
        found = _measured(settings, folder, seed, progress)
        try:
            rows = [*measured_rows(found), *rows]
            said.insert(0, _measured_verdict(found))
            notes = [*_measured_notes(found), *notes]
        except (KeyError, TypeError, ValueError, AttributeError, StopIteration) as error:
            if settings.measured is None:
                raise
            raise ConfigError(f"{settings.measured} is not what `tltlab bench runtime --out` writes") from error
    if not rows:
        raise ConfigError("parts is empty: give measured, predicted or both")
    frame = pd.DataFrame(rows)
    return ExperimentResult(
        verdict="; ".join(said) + ".",
        rows=frame,
        figure=_picture(frame),
        prediction="measured" not in settings.parts,
        notes=tuple(notes),
    )


def _measured(settings: Settings, folder: Path, seed: int, progress: Callable[[str], None]) -> dict[str, Any]:
    """What `tltlab bench runtime` finds."""
    if settings.measured is not None:
        found: dict[str, Any] = read_json(settings.measured)
        if not isinstance(found, dict) or not {"modes", "speedups", "goals", "policies"} <= set(found):
            raise ConfigError(f"{settings.measured} is not what `tltlab bench runtime --out` writes")
        return found
    from .baseline_measured import bench_runtime

    return dict(
        bench_runtime(
            own_model(settings.model, folder, size=settings.size, progress=progress),
            prompts=settings.prompts,
            group_size=settings.group_size,
            epochs=settings.epochs,
            rounds=settings.rounds,
            max_response_tokens=settings.cap,
            seed=seed,
            progress=progress,
        )
    )


def measured_rows(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row per epoch and mode of what `tltlab bench runtime` found, plain decoding's speed being 1."""
    ratios = {
        (row["mode"], row["epoch"]): row
        for row in found["speedups"]
        if row["part"] == "rollout" and row["measure"] == found["judged_by"]
    }
    rows = []
    for mode in found["modes"]:
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


def _measured_verdict(found: Mapping[str, Any]) -> str:
    """The bandit of the last epoch against plain decoding and against the fixed depth that did best."""
    epoch = max(mode["epoch"] for mode in found["modes"])
    mode = "beg-mab"
    plain = next(
        row
        for row in found["speedups"]
        if (row["mode"], row["epoch"], row["part"], row["measure"]) == (mode, epoch, "rollout", found["judged_by"])
    )
    static = next(
        row
        for row in found["goals"]
        if (row["mode"], row["epoch"]) == (mode, epoch) and row["goal"].startswith(_BEST_STATIC)
    )
    best = static["goal"].removeprefix(_BEST_STATIC)
    told_apart = _against_one(static, found["modes"][0]["rollouts"])
    return (
        f"measured here, adaptive drafts (BEG-MAB) roll out {_times(plain)} as fast as no speculation and "
        f"{_times(static)} as fast as the best fixed depth ({best}), {told_apart}"
    )


def _against_one(ratio: Mapping[str, Any], rounds: int) -> str:
    if ratio["low"] is None or rounds < _ENOUGH_ROUNDS:
        return f"though {rounds} rounds are too few to tell them apart"
    if ratio["low"] > 1:
        return "so ahead of it"
    if ratio["high"] < 1:
        return "so behind it"
    if ratio["low"] > 1 - _LEVEL and ratio["high"] < 1 + _LEVEL:
        return f"so within {_LEVEL:.0%} of it, which nobody knows beforehand"
    return f"which {rounds} rounds do not tell apart"


def _measured_notes(found: Mapping[str, Any]) -> list[str]:
    rounds = found["modes"][0]["rollouts"]
    return [
        f"measured: {found['prompts']} prompts x {found['group_size']} up to {found['max_response_tokens']} tokens of "
        f"{found['model']}, all modes in turn, {rounds} rounds; from epoch 2 on drafters know earlier responses",
        "measured: speed-ups are of seconds per second that plain decoding of the same lengths would take, the best "
        "fixed depth is chosen afterwards, intervals are of 95 % over rounds"
        + (", too narrow below ten" if rounds < _ENOUGH_ROUNDS else ""),
    ]


def _predicted_verdict(settings: Settings, rows: Sequence[Mapping[str, Any]]) -> str:
    def spread(system: str, lengths: str = "") -> str:
        found = [r["speedup"] for r in rows if r["system"] == system and r["setting"].endswith(lengths)]
        if not found:
            return "an unknown number of"
        least, most = f"{min(found):.2f}", f"{max(found):.2f}"
        return least if least == most else f"{least} to {most}"

    tlt = " and ".join(f"{spread('TLT', each)} times with {each} lengths" for each in settings.lengths)
    return (
        f"predicted by simulation of TLT's settings ({', '.join(settings.models)} on {', '.join(settings.machines)}), "
        f"RL steps against VeRL's are {tlt} as fast under TLT (the paper says {PAPER_RANGE[0]} to {PAPER_RANGE[1]}), "
        f"{spread('TLT-Base')} times under TLT-Base and {spread('Open-R1')} times under Open-R1"
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
        panels.append((rows, labels, "Predicted, simulated: whole RL step, VeRL = 1", PAPER_RANGE))
    heights = [0.6 + 0.22 * len(rows) for rows, *_ in panels]
    figure = Figure(figsize=(7.2, sum(heights) + 0.5), layout="constrained")
    axes = figure.subplots(len(panels), 1, height_ratios=heights, squeeze=False)[:, 0]
    for each, (rows, labels, title, paper) in zip(axes, panels, strict=True):
        _bars(each, rows, labels, title, paper)
    return figure


def _bars(axes: Axes, rows: pd.DataFrame, labels: Sequence[str], title: str, paper: tuple[float, float] | None) -> None:
    size, low, high = (rows[name].to_numpy(np.float64) for name in ("speedup", "low", "high"))
    draw_bars(axes, labels, size, low, high, xlabel="times as fast (95 % intervals)", title=title, reference=1.0)
    if paper is not None:
        axes.axvspan(*paper, color=COLORS[1], alpha=0.25, linewidth=0, label="the paper, TLT over VeRL")
        axes.legend(fontsize=8, frameon=False, loc="lower right")
    axes.set_xlim(left=0)
