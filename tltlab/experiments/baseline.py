"""baseline: no speculation, fixed depths and adaptive ones on the same prompts here; and TLT's claims, simulated.

The measured part is `tltlab bench runtime`: one engine, the same prompts, all modes in turn in every round, speed-ups
with intervals over rounds. The predicted part simulates whole RL steps of TLT, TLT-Base and Open-R1 over VeRL at TLT's
published settings.

What the paper says (arXiv 2511.16665, set-up): 64 H100 and, apart, A100; GRPO, up to 32,768 response tokens, tensor
parallelism 2, 4 or 8 by size. Its released recipe: 32 prompts a node of 8 GPUs, 8 responses each, a reference model.
What it does not say, and what is taken here: 64 A100 too, the same prompts for 7B, TP 2 for 7B and 4 for 32B, stages
by a roofline, acceptance of its 32B drafter for 7B too. Lengths decide most and are not published, so there are two
kinds: those of open reasoning models (`tltlab.lengths.model`), and `LONG_TAIL`, which reaches the cap in every RL step,
as its figure 2 shows of a production run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from pydantic import Field

from tltlab.charts import COLORS, bars
from tltlab.costs.base import CostModel
from tltlab.costs.load import load_costs, load_stages
from tltlab.costs.roofline import RooflineCosts
from tltlab.errors import ConfigError
from tltlab.files import read_json
from tltlab.hardware import gpu as find_gpu
from tltlab.hardware import kv_capacity_tokens
from tltlab.hardware import model as find_model
from tltlab.lengths.generate import generate, log_normal
from tltlab.lengths.model import REGIMES
from tltlab.traces.trace import Trace

from . import Progress
from .models import Count, bench_on, own_model
from .result import ExperimentResult

SYSTEMS = "verl,open-r1,tlt-base,tlt"
PAPER_RANGE = (1.7, 2.1)
"""TLT's end-to-end speed-ups over VeRL, the range over its models and clusters: nothing finer is known."""
PAPER_ROLLOUT_SHARE = 0.85
LONG_TAIL = "long-tail"
"""Log-normal around the median of the regime "reasoning", sigma 1: one response in a hundred reaches 32,768 tokens."""
_TENSOR_PARALLEL = {"Qwen2.5-7B": 2, "Qwen2.5-32B": 4}
_INFINIBAND_BYTES_PER_S = 5e10
Part = Literal["measured", "predicted"]
_ENOUGH_ROUNDS = 10
_LEVEL = 0.05
_BEST_STATIC = "times the best static, "


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineSettings:
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


def run(settings: BaselineSettings, *, folder: Path, seed: int, progress: Progress) -> ExperimentResult:
    """The experiment; a model that is trained stays in `folder`/models."""
    rows: list[dict[str, Any]] = []
    notes: list[str] = []
    verdicts: list[str] = []
    if "predicted" in settings.parts:
        predicted, notes = predicted_rows(settings, seed=seed, progress=progress)
        verdicts.append(_predicted_verdict(settings, predicted))
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


def _predicted_verdict(settings: BaselineSettings, rows: Sequence[Mapping[str, Any]]) -> str:
    def spread(system: str, lengths: str = "") -> str:
        speedups = [r["speedup"] for r in rows if r["system"] == system and r["setting"].endswith(lengths)]
        if not speedups:
            return "an unknown number of"
        least, most = f"{min(speedups):.2f}", f"{max(speedups):.2f}"
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
    """A row per machine, model and system, VeRL's speed being 1; and what is assumed, in sentences."""
    from tltlab.sim.systems import compare_systems

    rows: list[dict[str, Any]] = []
    notes: dict[str, None] = {}
    for lengths in settings.lengths:
        trace = lengths_trace(lengths, settings, seed)
        for name, machine in product(settings.models, settings.machines):
            costs = costs_of(machine, name)
            workers = settings.gpus // costs.tensor_parallel
            progress(
                f"simulating {settings.gpu_rl_steps} RL steps of {name} on {settings.gpus} {machine}, {lengths} lengths"
            )
            compared = compare_systems(
                trace,
                SYSTEMS,
                costs=costs,
                acceptance=settings.acceptance,
                model_free_acceptance=settings.model_free_acceptance,
                # As the shipped ones for H100: with a reference model, and weights over one InfiniBand link.
                stages=load_stages(
                    {
                        "kind": "roofline",
                        "gpu": machine,
                        "model": name,
                        "num_gpus": settings.gpus,
                        "inference_passes": 2,
                        "sync_bytes_per_s": _INFINIBAND_BYTES_PER_S,
                    }
                ),
                workers=workers,
                repeats=settings.repeats,
                seed=seed,
                decision_block=settings.decision_block,
                jobs=settings.jobs,
            )
            for row in compared.to_dict("records"):
                rows.append(_row(row, f"{name}, {settings.gpus} {machine}, {lengths}"))
                notes |= dict.fromkeys(f"{row['title']}: {each}" for each in row["assumptions"])
    return rows, [*_common_notes(settings), *notes]


def costs_of(machine: str, name: str) -> CostModel:
    """Step times of a model on GPUs at the tensor parallelism that is taken for it. ConfigError where none ships."""
    if name not in _TENSOR_PARALLEL:
        raise ConfigError(f"no settings of TLT's for {name}; there are {', '.join(_TENSOR_PARALLEL)}")
    tp = _TENSOR_PARALLEL[name]
    shipped = load_costs(f"{machine.lower()}-{name.lower()}" + ("" if name == "Qwen2.5-7B" else "-tp4"))
    if not isinstance(shipped, RooflineCosts) or shipped.tensor_parallel == tp:
        return shipped
    room = kv_capacity_tokens(find_gpu(machine), find_model(name), tp)
    return load_costs(shipped.model_dump(mode="json") | {"tp": tp, "kv_capacity_tokens": room})


def lengths_trace(lengths: str, settings: BaselineSettings, seed: int) -> Trace:
    """Responses to simulate: of one of `length_model.REGIMES`, or `LONG_TAIL`. ConfigError for another name."""
    if lengths == LONG_TAIL:
        return log_normal(
            median=REGIMES["reasoning"].quantile(0.5), sigma=1.0, cap=settings.gpu_cap, rl_steps=settings.gpu_rl_steps,
            prompts=settings.gpu_prompts, group_size=settings.gpu_group_size, seed=seed,
        )  # fmt: skip
    if lengths not in REGIMES:
        raise ConfigError(f"no lengths named {lengths!r}; there are {', '.join(REGIMES)}, {LONG_TAIL}")
    return generate(
        REGIMES[lengths].with_changes(max_response_tokens=settings.gpu_cap), num_rl_steps=settings.gpu_rl_steps,
        prompts_per_step=settings.gpu_prompts, group_size=settings.gpu_group_size, seed=seed,
    )  # fmt: skip


def _row(row: Mapping[Any, Any], setting: str) -> dict[str, Any]:
    """Speed-ups are the ratios of times turned round, so the ends of an interval change places; one may have no end."""
    tlt = row["system"] == "tlt"
    base = row["system"] == "verl"
    return {
        "kind": "predicted",
        "setting": setting,
        "system": row["title"],
        "of": "RL step",
        "speedup": 1 / row["step_ratio"],
        "low": None if base else 1 / row["step_ratio_high"],
        "high": None if base or not row["step_ratio_low"] else 1 / row["step_ratio_low"],
        "paper": f"{PAPER_RANGE[0]}-{PAPER_RANGE[1]}" if tlt else None,
        "rollout_speedup": 1 / row["ratio"],
        "rollout_s": row["makespan_s"],
        "step_s": row["step_s"],
        "rollout_share": row["rollout_share"],
        "accept_length": row["mean_accept_length"],
    }


def _common_notes(settings: BaselineSettings) -> Iterator[str]:
    least, most = (PAPER_ROLLOUT_SHARE / (1 / speedup - (1 - PAPER_ROLLOUT_SHARE)) for speedup in PAPER_RANGE)
    yield (
        f"predicted: {settings.gpu_prompts} prompts x {settings.gpu_group_size} up to {settings.gpu_cap} tokens an RL "
        f"step, {settings.gpu_rl_steps} RL steps; lengths, as many A100 as H100, TP 2 for 7B and 4 for 32B, and the "
        "same prompts for both are assumptions: the paper does not say"
    )
    yield (
        "predicted: 95 % intervals are over RL steps"
        + (", Student's below ten," if settings.gpu_rl_steps < 10 else "")
        + " and hold for the luck of the lengths, not for errors of the models"
    )
    yield (
        "predicted: log-probs (with a reference model), training and sync by a roofline with assumed shares of peak "
        f"FLOPs; for {PAPER_RANGE[0]} to {PAPER_RANGE[1]} times end to end with {PAPER_ROLLOUT_SHARE:.0%} of an RL "
        f"step in rollout, as the paper has it, rollouts must be {least:.1f} to {most:.1f} times as fast: compare "
        "rollout_share and rollout_speedup"
    )
    yield (
        f"predicted: acceptance {settings.acceptance}, measured by TLT for its 32B drafter on H100, also for 7B; "
        f"{settings.model_free_acceptance} for TLT-Base, another system's drafts: TLT publishes none of its own"
    )
    yield (
        f"paper: TLT's range over all its models and clusters, {PAPER_RANGE[0]}-{PAPER_RANGE[1]} times VeRL; figures "
        "by model and for the other systems are not at hand; nothing here was fitted to it"
    )
