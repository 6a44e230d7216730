"""What an inference engine and speculation add to the kernels, fitted to times per output token and to speed-ups.

Of vLLM's measured time per output token (Qwen3-32B, H100, 1,024 tokens in and out) kernels cover 88 % at best, 48 % on
8 GPUs at 128 requests. The rest is launching, scheduling, sampling and the prompts of others, prefilled in between:

    tpot = kernels * K(c, c*(isl + osl/2)) + prefill * c * isl * P / osl + base_s + per_request_s * c

at concurrency c, with K and P the kernel table's seconds of an iteration and of a prompt token. An iteration of b
requests that speculates takes what its tokens to verify take, and on top

    sd_base_s + depth * (draft_level_s + draft_level_per_request_s * b)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd

from bench.presets.folder import fits_kv_cache, measured_table, tlt_cells
from bench.presets.kernels import Kernels, from_kernels
from bench.presets.roofline import COLUMNS
from bench.presets.transfer import SWITCH_NOTE, SWITCH_S
from tltlab.arrays import Flags, Floats
from tltlab.calibration.cross_validation import most_errors, nine_in_ten
from tltlab.calibration.robust import non_negative
from tltlab.calibration.roofline import uncertainty
from tltlab.costs.evidence import SPECULATING, Evidence
from tltlab.costs.table import TableCosts
from tltlab.errors import ConfigError
from tltlab.hardware import model
from tltlab.strategy import NO_SPECULATION, Strategy

_TERMS = ("kernels", "prefill", "base_s", "per_request_s")
_DRAFTING = ("sd_base_s", "draft_level_s", "draft_level_per_request_s")
_CONTEXT = 2048  # Tokens per request in TLT's tables: not stated there; its released benchmark generates as many.


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOverhead:
    """Factors on kernel and prefill times, seconds per iteration, seconds per request and iteration."""

    kernels: float
    prefill: float
    base_s: float
    per_request_s: float

    def on(self, costs: TableCosts) -> TableCosts:
        """The kernel table with this engine around it."""
        return costs.model_copy(
            update={
                "forward": tuple(k.model_copy(update={"seconds": self.kernels * k.seconds}) for k in costs.forward),
                "attention": tuple(
                    k.model_copy(
                        update={"fixed_s": self.kernels * k.fixed_s, "per_context_s": self.kernels * k.per_context_s}
                    )
                    for k in costs.attention
                ),
                "prefill_per_token_s": self.prefill * costs.prefill_s(1.0),
                "base_s": self.base_s,
                "per_request_s": self.per_request_s,
            }
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class SecondsByTerm:
    """Measured seconds that are `known` ones and terms times their columns."""

    columns: dict[str, Floats]
    measured: Floats
    known: Floats | float = 0.0

    @property
    def ranges(self) -> Mapping[str, tuple[float, float, float]]:
        """No term has one."""
        return {}

    def where(self, chosen: Flags) -> SecondsByTerm:
        """Some of the rows."""
        columns = {name: column[chosen] for name, column in self.columns.items()}
        known = self.known if isinstance(self.known, float) else self.known[chosen]
        return SecondsByTerm(columns=columns, measured=self.measured[chosen], known=known)

    def fit(self) -> dict[str, float]:
        """Terms of least relative error, none below 0."""
        return {name: c or 0.0 for name, c in non_negative(self.columns, self.measured, known=self.known).items()}

    def predict(self, terms: Mapping[str, float]) -> Floats:
        return np.asarray(sum(c * self.columns[name] for name, c in terms.items()) + self.known, np.float64)

    def open(self) -> Floats:
        """Standard deviation that the rows leave to predictions of them, relative; a term of 0 has none."""
        return uncertainty(self, {name: c for name, c in self.fit().items() if c > 0})


@dataclass(frozen=True, kw_only=True)
class EngineFit:
    """`points`: measured rows with `fits_memory`, `predicted_s` and, by a fit without the rows of its tp, `held_out_s`.

    Rows whose requests do not fit in the KV cache are in no fit: their time per token holds waiting and preemption.
    `used` are the others.
    """

    engine: EngineOverhead
    points: pd.DataFrame
    used: SecondsByTerm


def read_tpot(data: Path, backend: str, model_name: str) -> pd.DataFrame:
    """Measured times per output token on H100: tp, concurrency, isl, osl and seconds, `fits_memory` by arithmetic."""
    path = data / "decode_tpot_h100.csv"
    numbers = ("tp_size", "concurrency", "isl", "osl", "silicon_tpot_ms")
    table = measured_table(path, numbers, ("backend", "precision", "model_path"))
    shape = model(model_name)
    names = table["model_path"].str.split("/").str[-1].str.removesuffix("-Instruct")
    rows = table[(table["backend"] == backend) & (names == shape.name) & (table["precision"] == "bf16?")]
    if rows.empty:
        raise ConfigError(f"{path} has no rows of {backend}, {model_name}, bf16?")
    points = rows[["tp_size", "concurrency", "isl", "osl"]].rename(columns={"tp_size": "tp"})
    points = points.astype({"tp": int, "concurrency": int}).assign(seconds=rows["silicon_tpot_ms"] * 1e-3)
    points = points.reset_index(drop=True)
    return points.assign(fits_memory=fits_kv_cache(points.assign(gpu="H100", model=shape.name)))


@cache
def fit_engine(data: Path, backend: str = "vllm", model_name: str = "Qwen3-32B") -> EngineFit:
    """Fit the four terms to the H100 rows of a backend and model; each tensor parallelism is left out in turn."""
    points = read_tpot(data, backend, model_name)
    rows = _terms(data, points, model_name)
    fits = points["fits_memory"].to_numpy()
    held_out = np.full(len(points), np.nan)
    for tp in points["tp"].unique():
        of_tp = (points["tp"] == tp).to_numpy()
        held_out[of_tp] = rows.predict(rows.where(fits & ~of_tp).fit())[of_tp]
    used = rows.where(fits)
    terms = used.fit()
    predicted = points.assign(predicted_s=rows.predict(terms), held_out_s=held_out)
    return EngineFit(engine=EngineOverhead(**terms), points=predicted, used=used)


def read_speedups(data: Path) -> pd.DataFrame:
    """TLT's Fig 13 and Table 4 (Qwen2.5-32B, tp 4, H100): batch_size, draft_depth, tokens_to_verify, accept_length,
    speedup.
    """
    cells = tlt_cells(data)
    return cells[cells["table"].isin(["fig13", "table4"])].reset_index(drop=True)


def with_speculation(costs: TableCosts, cells: pd.DataFrame) -> TableCosts:
    """The table with the drafting terms of least relative error over measured speed-ups, as `read_speedups` has them.

    A speed-up is accept_length * T(1 token) / T(speculating), so a cell measures what its iteration took.
    """
    return costs.model_copy(update=_drafting(costs, cells).fit() | {"sd_idle_s": 0.0})


def _drafting(costs: TableCosts, cells: pd.DataFrame) -> SecondsByTerm:
    plain, verify = _decoding(costs, cells)
    took = cells["accept_length"].to_numpy(np.float64) / cells["speedup"].to_numpy(np.float64) * plain
    depth, batch = (cells[c].to_numpy(np.float64) for c in ("draft_depth", "batch_size"))
    columns = dict(zip(_DRAFTING, (np.ones_like(depth), depth, depth * batch), strict=True))
    return SecondsByTerm(columns=columns, measured=took, known=verify)


def speedups(costs: TableCosts, cells: pd.DataFrame) -> Floats:
    """Predicted speed-up of each cell over plain decoding at its batch."""
    plain, _ = _decoding(costs, cells)
    needed = cells[["batch_size", "draft_depth", "topk", "tokens_to_verify"]].itertuples(index=False)
    took = [
        costs.iteration(Strategy("learned", depth, top_k, verify)).seconds(batch, batch * _CONTEXT)
        for batch, depth, top_k, verify in needed
    ]
    return np.asarray(cells["accept_length"] * plain / took, np.float64)


def shipped_table(data: Path) -> TableCosts:
    """The preset `h100-qwen2.5-32b-tp4-table`, made anew: kernels, vLLM around them, TLT's drafting."""
    fitted, cells = fit_engine(data), read_speedups(data)
    plain = fitted.engine.on(from_kernels(Kernels.read(data, "H100"), "Qwen2.5-32B", 4))
    table = with_speculation(plain, cells).model_copy(update={"network_levels": True, "switch_s": SWITCH_S})
    points = fitted.points[fitted.points["fits_memory"]]
    errors = (points["held_out_s"] / points["seconds"] - 1).abs()
    held_out = errors.groupby(points["tp"]).mean().mean()
    missed = np.abs(speedups(table, cells) / cells["speedup"] - 1)
    off = missed.groupby(cells["table"]).mean()
    evidence = Evidence(
        engine="vLLM 0.12 and TLT",
        left_out={"tp": most_errors(errors)},
        fitted={"all" + SPECULATING: most_errors(missed)},
        parameter={
            "all": nine_in_ten(fitted.used.open()),
            "all" + SPECULATING: nine_in_ten(_drafting(plain, cells).open()),
        },
        draft_depth=(float(cells["draft_depth"].min()), float(cells["draft_depth"].max())),
    )
    notes = (
        "made of measured kernel times (AIConfigurator, Apache-2.0: vLLM on H100 SXM, bf16), Qwen2.5-32B tp 4: knots "
        "are sums of kernels times a fitted factor",
        f"factors and engine terms fitted to vLLM 0.12 Qwen3-32B on H100, tp 2, 4 and 8, concurrency 8 to 128; "
        f"each tp left out in turn: {held_out:.1%} mean error of time per output token",
        f"drafting terms fitted to TLT (arXiv 2511.16665), which ran another engine: Fig 13 within {off['fig13']:.1%}, "
        f"Table 4 within {off['table4']:.1%} on average; they assume {_CONTEXT} tokens of context per request, what "
        f"its released benchmark generates: the paper gives none",
        f"a learned drafter's levels are what was fitted, model-free ones have none; sd_idle_s is assumed 0; "
        f"{SWITCH_NOTE}",
    )
    return _rounded(table.model_copy(update={"notes": (*notes, *table.notes[1:]), "evidence": evidence}))


def accuracy_rows(data: Path) -> pd.DataFrame:
    """Predicted against measured, for kernel tables with the engine around them; relative errors, `COLUMNS`."""
    fitting = fit_engine(data)
    fits = fitting.points["fits_memory"]
    what = "vLLM Qwen3-32B H100 time per output token"
    source = "AIConfigurator measurements"
    off = {name: (fitting.points[name] / fitting.points["seconds"] - 1).abs() for name in ("predicted_s", "held_out_s")}
    folds = off["held_out_s"][fits].groupby(fitting.points["tp"]).mean()
    e = fitting.engine
    terms = (
        f"{e.kernels:.3f} of kernels, {e.prefill:.3f} of prefill, {e.base_s * 1e3:.2f} ms, "
        f"{e.per_request_s * 1e6:.0f} us a request"
    )
    each = "mean of folds: " + ", ".join(f"tp {tp} {error:.1%}" for tp, error in folds.items())
    fitted, inside, beyond = off["predicted_s"][fits], off["held_out_s"][fits], off["held_out_s"][~fits]
    rows: list[tuple[object, ...]] = [
        (source, what, len(fitted), True, fitted.mean(), fitted.max(), terms),
        (source, f"{what}, each tp left out", len(inside), False, folds.mean(), inside.max(), each),
        (source, f"{what}, beyond the KV cache", len(beyond), False, beyond.mean(), beyond.max(), "in no fit"),
    ]
    cells = read_speedups(data)
    plain = e.on(from_kernels(Kernels.read(data, "H100"), "Qwen2.5-32B", 4))
    first = cells["table"] == "fig13"
    missed = (speedups(with_speculation(plain, cells[first]), cells) / cells["speedup"] - 1).abs()
    for name, part, used in (("Fig 13", missed[first], True), ("Table 4", missed[~first], False)):
        note = "table of kernels with vLLM's terms, three drafting terms"
        label = f"speed-ups of {name}, fitted to Fig 13"
        rows.append(("TLT", label, len(part), used, part.mean(), part.max(), note))
    return pd.DataFrame(rows, columns=list(COLUMNS))


def _decoding(costs: TableCosts, cells: pd.DataFrame) -> tuple[Floats, Floats]:
    """Seconds of plain decoding and of verifying alone, per cell."""
    pairs = []
    for batch, verify in cells[["batch_size", "tokens_to_verify"]].itertuples(index=False):
        each = (costs.iteration(NO_SPECULATION, tokens_to_verify=v) for v in (1.0, float(verify)))
        pairs.append([cost.seconds(batch, batch * _CONTEXT) for cost in each])
    plain, wide = np.asarray(pairs, np.float64).T
    return plain, wide


def _rounded(costs: TableCosts) -> TableCosts:
    """Five digits: the data has no more, and the file stays readable."""

    def short(value: object) -> object:
        if isinstance(value, dict):
            return {key: short(v) for key, v in value.items()}
        if isinstance(value, list | tuple):
            return [short(v) for v in value]
        return float(f"{value:.5g}") if isinstance(value, float) and value < 1 else value

    return TableCosts.model_validate(short(costs.model_dump(mode="json")))


def _terms(data: Path, points: pd.DataFrame, model_name: str) -> SecondsByTerm:
    kernels = Kernels.read(data, "H100")
    tables = {tp: from_kernels(kernels, model_name, int(tp)) for tp in points["tp"].unique()}
    cost = {tp: table.iteration(NO_SPECULATION) for tp, table in tables.items()}
    numbers = points[["tp", "concurrency", "isl", "osl"]].itertuples(index=False)
    pairs = [
        (cost[tp].seconds(c, c * (isl + osl / 2)), c * tables[tp].prefill_s(isl) / osl) for tp, c, isl, osl in numbers
    ]
    kernels, prefill = np.asarray(pairs, np.float64).T
    concurrency = points["concurrency"].to_numpy(np.float64)
    columns = dict(zip(_TERMS, (kernels, prefill, np.ones_like(kernels), concurrency), strict=True))
    return SecondsByTerm(columns=columns, measured=points["seconds"].to_numpy(np.float64))
