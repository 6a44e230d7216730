"""Predicted against measured: the roofline on published measurements, in its fit and outside.

Measurements: `decode_tpot_h100.csv` (AIConfigurator, Apache-2.0), `tlt_sd_tables.csv` and `tlt_gpu_diversity.csv` (TLT,
arXiv 2511.16665: Fig. 13, Tables 2 and 4), and kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd

from bench.presets.fit import Fitted, fit, predict
from bench.presets.kernels import Kernels
from bench.presets.measurements import (
    ERRORS,
    error_row,
    fits_kv_cache,
    from_speedups,
    from_tpot,
    from_waves,
    measured_table,
    tlt_cells,
)
from tltlab.arrays import Flags, Floats
from tltlab.calibration.cross_validation import error_quantiles
from tltlab.costs.evidence import SPECULATING, CalibratedRange, Evidence
from tltlab.costs.roofline import Constants, Ideal, RooflineCosts
from tltlab.hardware import gpu, kv_capacity_tokens, model

SHAPES = (("Qwen2.5-7B", 1), ("Qwen2.5-32B", 4), ("Llama-3.3-70B", 4))
"""Models, and the number of GPUs each runs on, that presets are made for."""
MOST_EFFICIENT = 0.95
MEMORY_FRACTION = 0.9
SWITCH_S = 1.4
SWITCH_NOTE = "switch_s lies between 0.95 and 1.8 s, measured apart"
_DECODE = ("tp_size", "concurrency", "isl", "osl", "silicon_tpot_ms", "silicon_ttft_ms")
GPUS = ("H100", "H200", "A100")
_TLT = "TLT, Qwen2.5-32B, TP 4, H100"
_VLLM = "vLLM 0.12, Qwen3-32B bf16, H100, time per output token"
SHORT_CONTEXT = 2048
"""New tokens per request in the benchmark script that TLT released; the paper gives no context."""
_CONSTANTS = "one set of constants for vLLM and TLT"


@cache
def fitted(data: Path) -> Fitted:
    """One set of constants from vLLM's decode times on H100 and TLT's speed-ups, cross-validated.

    Rows whose requests exceed the KV capacity by the arithmetic of `tltlab.hardware` are left out: their measured time
    holds queueing and preemption. Folds: `tp` (vLLM), `batch` above 1 (Table 4), `draft_depth` and `tokens_to_verify`
    (Fig. 13). ConfigError where a file is missing.
    """
    rows = _measurements(data)
    for fold, source, column in (
        ("fold tp", _VLLM, "tp"),
        ("fold batch", "table4", "batch"),
        ("fold draft_depth", "fig13", "draft_depth"),
        ("fold tokens_to_verify", "fig13", "tokens_to_verify"),
    ):
        rows[fold] = rows[column].where(rows["source"] == source)
    return fit(rows, [name for name in map(str, rows.columns) if name.startswith("fold ")])


@cache
def fitted_at(data: Path, context_tokens: float) -> Fitted:
    """The same fit with the context of TLT's speed-ups held at so many tokens per request; no cross-validation."""
    rows = _measurements(data)
    contexts = rows["context_tokens"].mask(rows["kind"] == "speedup", float(context_tokens))
    return fit(rows.assign(context_tokens=contexts))


def rows(data: Path) -> pd.DataFrame:
    """The table "predicted against measured": relative errors, one row per set of measurements (`ERRORS`).

    Everything is fitted anew from the folder `data`; ConfigError where that has no measurements.
    """
    fitting = fitted(data)
    return pd.DataFrame(
        [*_fit_rows(fitting, data), *_fold_rows(fitting), *_unseen_rows(fitting, data)], columns=list(ERRORS)
    )


def presets(data: Path) -> dict[str, RooflineCosts]:
    """The cost models that ship with the package for H100, H200 and A100, made anew from the measurements."""
    fitting = fitted(data)
    errors = _by_source(fitting)
    left_out = fitting.cross_validation.groupby("fold")["mean_abs_error"].mean()
    short = _by_source(fitted_at(data, SHORT_CONTEXT))
    origin = (
        f"Fitted to {len(fitting.predictions)} published measurements on H100: vLLM 0.12, "
        f"Qwen3-32B bf16, TP 2/4/8 (AIConfigurator; error {errors[_VLLM]:.1%}, {left_out['fold tp']:.1%} with each TP "
        f"left out) and TLT's speed-ups (arXiv 2511.16665; Fig. 13 {errors['fig13']:.1%}, Table 4 "
        f"{errors['table4']:.1%}, {left_out['fold batch']:.0%} with each batch left out)."
    )
    drafting = (
        f"TLT does not give its context; drafting terms assume {fitting.context_tokens:.0f} tokens per request, the "
        f"most allowed, which fit best: Table 4 above batch 1 within {errors['table4']:.1%}, against "
        f"{short['table4']:.1%} with {SHORT_CONTEXT}, what its released benchmark generates. A learned drafter is one "
        f"decoder layer and the LM head. sd_idle_s = 0 is an assumption; {SWITCH_NOTE}."
    )
    limits = f"kv_capacity_tokens: {MEMORY_FRACTION:.0%} of memory, less weights, activations and runtime, as in vLLM."
    end_to_end = shares(data, GPUS[0])
    models: dict[str, RooflineCosts] = {}
    for name in GPUS:
        reached = shares(data, name)
        constants = fitting.constants if name == GPUS[0] else transfer(fitting.constants, end_to_end, reached)
        for shape, tp in SHAPES:
            notes = [origin, *fitting.notes[1:], drafting, limits]
            calibrated = fitting.calibrated
            if name != GPUS[0]:
                notes.insert(1, f"Efficiencies carried over from H100 in proportion to kernels measured on {name}.")
            if (name, shape) != (GPUS[0], "Qwen2.5-32B"):
                calibrated = CalibratedRange(batch=calibrated.batch, verified_tokens=calibrated.verified_tokens)
                notes.insert(1, "No end-to-end measurement of this model on this GPU is in the fit.")
            predictions = fitting.predictions.assign(gpu=name, model=shape, tp=tp)
            speculates, spread = predictions["draft_depth"].to_numpy() > 0, fitting.open(predictions, constants)
            evidence = _evidence(fitting, data, name, shape).model_copy(
                update={
                    "parameter": {
                        "all": error_bound_90(spread[~speculates]),
                        "all" + SPECULATING: error_bound_90(spread[speculates]),
                    }
                }
            )
            key = f"{name}-{shape}" + (f"-tp{tp}" if tp > 1 else "")
            models[key.lower()] = preset(constants, name, shape, tp, calibrated, tuple(notes), evidence)
    return models


def error_bound_90(spread: Floats) -> float:
    """Upper bound of nine in ten absolute normal errors of these standard deviations."""
    return round(1.645 * float(np.sqrt(np.mean(spread**2))), 4)


def _evidence(fitting: Fitted, data: Path, gpu: str, model: str) -> Evidence:
    """Measurements of an engine, and errors by left-out part; for a smaller model those of another engine."""
    folds = {
        str(fold).removeprefix("fold "): (float(parts["median_error"].median()), float(parts["most_error"].max()))
        for fold, parts in fitting.cross_validation.groupby("fold", sort=False)
    }
    table, fits = _decode(data, "trtllm")
    smaller = error_quantiles(_error(fitting.constants, from_tpot(table[fits], "trtllm")))
    plain, speedup, _ = _table_2(data)
    tp, *speculating = folds.items()
    left_out = {tp[0]: tp[1], "model": smaller, "gpu": error_quantiles(plain)}
    left_out |= {name + SPECULATING: errors for name, errors in speculating}
    left_out["gpu" + SPECULATING] = error_quantiles(np.array([speedup]))
    depth = fitting.predictions["draft_depth"]
    return Evidence(
        engine="vLLM 0.12 and TLT",
        unmeasured=(*(["gpu"] if gpu != GPUS[0] else []), *(["model"] if model != "Qwen2.5-32B" else [])),
        left_out={name: (float(f"{a:.3g}"), float(f"{b:.3g}")) for name, (a, b) in left_out.items()},
        draft_depth=(float(depth[depth > 0].min()), float(depth.max())),
    )


def _measurements(data: Path) -> pd.DataFrame:
    """Data of the fit: vLLM's times where requests fit in memory, Fig. 13, Table 4 above batch 1."""
    vllm, fits = _decode(data, "vllm")
    served = from_tpot(vllm[fits], _VLLM)
    figure = from_speedups(_tlt(data, "fig13"), "fig13")
    table = from_speedups(_tlt(data, "table4").query("batch_size > 1"), "table4")
    return pd.concat([served, figure, table], ignore_index=True)


def _by_source(fitting: Fitted) -> pd.Series[float]:
    return fitting.predictions["error"].abs().groupby(fitting.predictions["source"]).mean()


def _fit_rows(fitting: Fitted, data: Path) -> list[tuple[object, ...]]:
    error = fitting.predictions.set_index("source")["error"]
    table = from_speedups(_tlt(data, "table4"), "table4")
    whole = _error(fitting.constants, table, fitting.context_tokens)
    batches = "16 cells; the 4 at batch 1 are a row of Fig. 13"
    short = fitted_at(data, SHORT_CONTEXT).predictions.set_index("source")["error"]
    above_one = from_speedups(_tlt(data, "table4").query("batch_size > 1"), "table4")
    unfitted = _error(fitting.constants, above_one, SHORT_CONTEXT)
    context = f"context fitted: {fitting.context_tokens:,.0f} tokens per request, the most allowed"
    note = (
        f"what TLT's released benchmark generates, constants fitted anew (Fig. 13 {_mean(short['fig13']):.1%}); "
        f"{_mean(unfitted):.1%} with those of the row above"
    )
    return [
        error_row(_TLT, "Fig. 13: depth x tokens to verify, speed-up", True, error["fig13"], _CONSTANTS),
        error_row(_TLT, "Table 4: batch x tokens to verify, speed-up", True, whole, f"{_CONSTANTS}; {batches}"),
        error_row(_TLT, "Table 4 above batch 1, speed-up", True, error["table4"], context),
        error_row(_TLT, f"Table 4 above batch 1, context held at {SHORT_CONTEXT:,}", True, short["table4"], note),
        error_row(_VLLM, "within the KV capacity", True, error[_VLLM], _CONSTANTS),
    ]


def _fold_rows(fitting: Fitted) -> list[tuple[object, ...]]:
    named = {
        "fold tp": (_VLLM, "each TP left out"),
        "fold batch": (_TLT, "Table 4, each batch above 1 left out"),
        "fold draft_depth": (_TLT, "Fig. 13, each depth left out"),
        "fold tokens_to_verify": (_TLT, "Fig. 13, each number of tokens to verify left out"),
    }
    folds: list[tuple[object, ...]] = []
    for fold, parts in fitting.cross_validation.groupby("fold", sort=False):
        source, what = named[str(fold)]
        each = ", ".join(f"{p.left_out:g}: {p.mean_abs_error:.1%}" for p in parts.itertuples())
        mean, most = float(parts["mean_abs_error"].mean()), float(parts["max_abs_error"].max())
        folds.append((source, what, int(parts["num_points"].sum()), False, mean, most, f"mean of the folds ({each})"))
    return folds


def _unseen_rows(fitting: Fitted, data: Path) -> list[tuple[object, ...]]:
    c = fitting.constants
    vllm, fits = _decode(data, "vllm")
    sglang, sglang_fits = _decode(data, "sglang")
    trtllm, trtllm_fits = _decode(data, "trtllm")
    waves = "its times to first token say that all requests came at once: predicted with these times"
    at_once = _mean(_error(c, from_waves(trtllm[trtllm_fits], "trtllm")))
    unclear = f"how requests come is not stated: a closed loop as in the fit; {at_once:.1%} if all come at once"
    beyond = "not a step time: requests queue and are preempted"
    sglang_wave = from_waves(sglang[sglang_fits], "sglang")
    trtllm_loop = from_tpot(trtllm[trtllm_fits], "trtllm")
    unseen = [
        error_row(_VLLM, "beyond the KV capacity", False, _error(c, from_tpot(vllm[~fits], _VLLM)), beyond),
        error_row("SGLang 0.5, Qwen3-32B bf16, H100", "time per output token", False, _error(c, sglang_wave), waves),
        error_row(
            "TensorRT-LLM 1.0, Llama-3.1-8B bf16, H100", "time per output token", False, _error(c, trtllm_loop), unclear
        ),
    ]
    return [*unseen, *_other_gpu_rows(data)]


def _other_gpu_rows(data: Path) -> list[tuple[object, ...]]:
    errors, speedup, accepted = _table_2(data)
    source = "TLT Table 2, Qwen2.5-7B, batch 1"
    implied = f"with the accept length that H100's speed-up implies at depth 8 and 48 tokens ({accepted:.1f})"
    each = "time per token " + ", ".join(f"{name} {e:+.1%}" for name, e in zip(("H100", "A100"), errors, strict=True))
    return [
        error_row(source, "tokens/s without speculation, H100 and A100", False, errors, each),
        error_row(source, "speed-up on A100", False, np.array([speedup]), implied),
    ]


@cache
def _table_2(data: Path) -> tuple[Floats, float, float]:
    """Errors of plain times on H100 and A100, that of A100's speed-up, and the accept length that H100's implies."""
    fitting = fitted(data)
    path = data / "tlt_gpu_diversity.csv"
    table = measured_table(path, ("tok_s_no_sd", "tok_s_with_sd"), ("gpu",)).set_index("gpu")
    plain_rate: pd.Series[float] = table["tok_s_no_sd"]
    on_a100 = transfer(fitting.constants, shares(data, "H100"), shares(data, "A100"))
    cells = pd.DataFrame({"model": ["Qwen2.5-7B"], "tp": 1, "batch_size": 1, "topk": 8, "draft_depth": 8})
    cells = cells.assign(tokens_to_verify=48, accept_length=1.0, speedup=1.0)
    errors, costs = [], {}
    for name, constants in (("H100", fitting.constants), ("A100", on_a100)):
        speculative = from_speedups(cells.assign(gpu=name), "table2")
        plain = speculative.assign(kind="iteration", draft_depth=0, tokens_to_verify=1)
        plain["context_tokens"] = fitting.context_tokens
        took = float(predict(constants, plain)[0])
        errors.append(took * plain_rate[name] - 1)
        costs[name] = float(predict(constants, speculative, fitting.context_tokens)[0])
    speedups = table["tok_s_with_sd"] / plain_rate
    accepted = float(speedups["H100"]) / costs["H100"]
    speedup_error = accepted * costs["A100"] / float(speedups["A100"]) - 1
    return np.array(errors), speedup_error, accepted


def _mean(error: Floats) -> float:
    return float(np.abs(error).mean())


def _error(constants: Constants, rows: pd.DataFrame, context_tokens: float | None = None) -> Floats:
    measured = rows["measured"].to_numpy(np.float64)
    return np.asarray(predict(constants, rows, context_tokens) / measured - 1, np.float64)


def _decode(data: Path, backend: str) -> tuple[pd.DataFrame, Flags]:
    """bf16 rows of a backend on H100, and which of them fit into the KV cache when every response is complete."""
    table = measured_table(data / "decode_tpot_h100.csv", _DECODE, ("backend", "precision", "model_path"))
    chosen = table[(table["backend"] == backend) & (table["precision"] != "fp8")].reset_index(drop=True)
    renamed = chosen.rename(columns={"model_path": "model", "tp_size": "tp"})
    servers = renamed.assign(gpu="H100", tpot_s=chosen["silicon_tpot_ms"] / 1e3, ttft_s=chosen["silicon_ttft_ms"] / 1e3)
    return servers, fits_kv_cache(servers)


def _tlt(data: Path, name: str) -> pd.DataFrame:
    cells = tlt_cells(data)
    return cells[cells["table"] == name]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Shares of the data sheet's rates that measured kernels reach, the median over `SHAPES`; one all-reduce in s."""

    memory: float
    compute: float
    kv: float
    link: float
    allreduce_s: float


def shares(data: Path, gpu_name: str) -> Shares:
    """Rates of the kernels of one GPU: 16 tokens for weights, 1,024 to 4,096 for FLOPs, 4 Ki to 16 Ki of context."""
    kernels, device = Kernels.read(data, gpu_name), gpu(gpu_name)
    ratios = []
    for name, tp in SHAPES:
        shape = model(name)
        ideal = Ideal.of(device, shape, tp)
        reduces = [2 * shape.layers * float(kernels.all_reduce_s(tp, m * shape.hidden)) for m in (16, 1024, 4096)]
        few, many, more = kernels.forward_s(shape, tp, [16, 1024, 4096]) - reduces
        short, long = (kernels.attention_s(shape, tp, 32, past) for past in (4096, 16384))
        ratios.append(
            (
                float(ideal.weights_s) / few,
                float(ideal.token_s) * 3072 / (more - many),
                float(ideal.context_s) * 32 * 12288 / (long - short),
                float(ideal.link_token_s) * 3072 / (reduces[2] - reduces[1]) if tp > 1 else np.nan,
            )
        )
    memory, compute, kv, link = np.nanmedian(ratios, axis=0).tolist()
    smallest = float(kernels.all_reduce_s(4, 4096))
    return Shares(memory=memory, compute=compute, kv=kv, link=link, allreduce_s=smallest)


def transfer(constants: Constants, measured_on: Shares, to: Shares) -> Constants:
    """Constants fitted on one GPU for another: each efficiency in proportion to what kernels reach, at most 95 %.

    Times of the engine's own, of launches and of drafting overhead stay in seconds: the host is taken to be as fast.
    """
    most = {"memory": MOST_EFFICIENT, "compute": MOST_EFFICIENT, "kv": MOST_EFFICIENT, "link": 1.0}
    update = {"allreduce_s": constants.allreduce_s * to.allreduce_s / measured_on.allreduce_s}
    for name, limit in most.items():
        term = f"{name}_efficiency"
        update[term] = min(getattr(constants, term) * getattr(to, name) / getattr(measured_on, name), limit)
    return constants.model_copy(update=update)


def preset(
    constants: Constants,
    gpu_name: str,
    model_name: str,
    tp: int,
    calibrated: CalibratedRange | None,
    notes: tuple[str, ...],
    evidence: Evidence,
) -> RooflineCosts:
    """A cost model for one GPU, model and tp, its numbers rounded to three digits; speculation off costs nothing."""
    rounded = {name: None if value is None else float(f"{value:.3g}") for name, value in constants.model_dump().items()}
    return RooflineCosts(
        gpu=gpu_name,
        model=model_name,
        tp=tp,
        constants=Constants.model_validate(rounded | {"sd_idle_s": 0.0}),
        switch_s=SWITCH_S,
        kv_capacity_tokens=kv_capacity_tokens(gpu(gpu_name), model(model_name), tp, MEMORY_FRACTION),
        calibrated=calibrated,
        notes=notes,
        evidence=evidence,
    )
