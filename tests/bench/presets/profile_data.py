"""The measurements that engine profiles are fitted to, as one table: servers, single iterations, speed-ups, kernels.

Beside the columns of `measurements.COLUMNS` a row has `family` and `version` of its engine, `weights` and
`draft_vocab`. Left out, because their times are no step times or not of the server that they name:

- requests that do not fit into the KV cache, and those that wait for a first token 5 s or more, or a fifth of the time
  that they decode: queueing;
- ranks that attend to requests of their own: what one batch is, is not said (MiniMax-M2.5's are one rank's over again);
- Qwen3-235B with more GPUs for experts than for attention, for the same reason;
- Qwen3-235B on vLLM 0.12: 52 ms on two GPUs and 35 on four, with 4 requests as with 48; no law of bytes does that;
- prompts of 4,000 and responses of 1,000 tokens in fp8: so fast that prompts cannot have been prefilled next to them;
- A100 rollouts above 512 tokens: contexts are nominal, reading them would take twice the GPU's bandwidth.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd

from tltlab.errors import ConfigError
from tltlab.hardware import model, per_gpu_heads

from .kernels import Kernels
from .measurements import (
    COLUMNS,
    REPEATED,
    eagle3_cells,
    fits_kv_cache,
    from_speedups,
    from_waves,
    measured_table,
    tlt_cells,
)

KERNEL_GPUS = ("H100", "H200", "A100")
_SHAPES = (
    "Qwen2.5-0.5B", "Qwen2.5-1.5B", "Qwen2.5-3B", "Llama-3.1-8B", "Qwen2.5-14B", "Llama-3.1-70B",
)  # fmt: skip
_KERNEL_TOKENS = (1, 16, 64, 256, 512)
_ATTENTION = ((1, 4095), (32, 1023), (128, 4095))
_LONGEST_WAIT_S = 5.0
_LONGEST_WAIT = 0.2
_BENCH_CONTEXT = 800.0
"""Tokens per request of SpecBundle's chats and problems: not given, and of little weight at batch 1 and 8."""
_BUNDLE_GPUS = {"Qwen3-235B-A22B": 4, "Ling-flash-2.0": 2}
_TABLE_2_CONTEXT = 2048.0
_SERVING_CONTEXT = 900.0
_KV_BLOCKS = 2588 * 16
EAGLE3_VOCAB = 32_000
GOODPUT = "vLLM study's goodput"
VLLM = "0.18-0.24"
"""Versions whose terms are one: each alone was measured on one or two GPUs, and their terms do not differ."""
_EAGLE3_DRAFTER = "lmsys/sglang-EAGLE3-LLaMA3.1-Instruct-8B"
_SERVERS = {"vllm": ("vllm", VLLM), "sglang": ("sglang", "0.5"), "trtllm": ("tensorrt-llm", "1.0")}
"""Family of each server, and its versions, whose terms are one."""


def measurements(data: Path) -> pd.DataFrame:
    """All of them from the folder `data`; ConfigError where a file is missing."""
    parts = [*_served(data), *_iterations(data), *_speculation(data), *_kernels(data)]
    table = pd.concat(parts, ignore_index=True)
    return table.assign(weights=table["weights"].fillna("bf16"), kv=table["kv"].fillna("bf16"))


def _served(data: Path) -> Iterator[pd.DataFrame]:
    numbers = ("tp_size", "isl", "osl", "silicon_ttft_ms", "silicon_tpot_ms")
    texts = ("system", "backend", "precision", "model_path")
    dense = measured_table(data / "decode_tpot_h100.csv", (*numbers, "concurrency"), texts)
    parallel = ("batch_size", "moe_tp_size", "moe_ep_size")
    moe, more = (
        measured_table(data / f"decode_tpot_{name}.csv", (*numbers, *parallel), texts)
        for name in ("fp8_and_moe", "experts")
    )
    # Experts on all of n GPUs in both ways are listed as n * n GPUs: their times are those of n.
    squared = (more["moe_tp_size"] == more["moe_ep_size"]) & (more["tp_size"] > 1)
    more = more.assign(tp_size=more["tp_size"].where(~squared, more["moe_tp_size"]), moe_ep_size=1.0)
    moe = pd.concat([moe, more], ignore_index=True).rename(columns={"batch_size": "concurrency"})
    experts = moe["moe_tp_size"] * moe["moe_ep_size"]
    dense_model = np.array([not model(name).experts for name in moe["model_path"]])
    moe = moe[(dense_model | (experts == moe["tp_size"])) & (moe["attention_dp_size"].fillna(1) == 1)]
    strange = (moe["backend"] == "vllm") & (moe["backend_version"] == "0.12.0")
    servers = pd.concat([dense, moe[~strange]], ignore_index=True)
    servers = servers.assign(
        gpu=servers["system"].str[:4].str.upper(),
        model=[model(name).name for name in servers["model_path"]],
        tp=servers["tp_size"].astype(int),
        tpot_s=servers["silicon_tpot_ms"] * 1e-3,
        ttft_s=servers["silicon_ttft_ms"] * 1e-3,
        weights=servers["precision"].where(servers["precision"].isin(["fp8", "fp4", "int4"]), "bf16"),
    )
    apart = (servers["isl"] == 4000) & (servers["osl"] == 1000) & (servers["gpu"] == "H100")
    at_once = (servers["backend"] == "sglang") & (servers["weights"] == "bf16")
    longest = (_LONGEST_WAIT * servers["osl"] * servers["tpot_s"]).clip(upper=_LONGEST_WAIT_S)
    waited = ~at_once & (servers["ttft_s"] >= longest)
    servers = servers[~apart & ~waited & fits_kv_cache(servers)]
    for key, rows in servers.groupby(["backend", "backend_version", "model"], dropna=False, sort=False):
        backend, version, _ = map(str, key)
        part = from_waves(rows, "AIConfigurator")
        # TensorRT-LLM's times to first token do not add up with its times per token to the batch.
        part = part.assign(kind="wave" if at_once[rows.index[0]] else "tpot" if backend == "trtllm" else "served")
        # Without a version: one campaign with MiniMax-M2.5's, of 0.18: same lengths, same batches.
        family, of = _SERVERS[backend]
        of = "0.12" if version.startswith("0.12") else of
        yield part.assign(family=family, version=of, weights=rows["weights"].to_numpy())


def _iterations(data: Path) -> Iterator[pd.DataFrame]:
    took = measured_table(data / "step_times_a100_qwen2.5_7b.csv", ("batch", "seq", "gamma", "median_ms"), ("mode",))
    took = took[took["seq"].between(1, 512) & took["mode"].isin(["target_decode", "target_verify"])]
    yield _plain(
        took.assign(
            gpu="A100", model="Qwen2.5-7B",
            tokens_to_verify=np.where(took["mode"] == "target_verify", took["gamma"] + 1, 1),
            context_tokens=took["seq"], measured=took["median_ms"] * 1e-3,
        ), "EfficientRollout", family="gpu time", version="",
    )  # fmt: skip
    rates = measured_table(data / "tlt_gpu_diversity.csv", ("tok_s_no_sd",), ("gpu",))
    yield _plain(
        rates.assign(model="Qwen2.5-7B", batch=1, context_tokens=_TABLE_2_CONTEXT, measured=1 / rates["tok_s_no_sd"]),
        "TLT Table 2", family="sglang", version="0.4",
    )  # fmt: skip
    second = measured_table(
        data / "timeline_rtx4090_llama_8b.csv", ("prompt_throughput", "gen_throughput", "running", "kv_cache_pct")
    )
    # In seconds without prompts; where few run, requests ended within the second.
    second = second[(second["prompt_throughput"] == 0) & (second["gen_throughput"] > 0) & (second["running"] >= 16)]
    yield _plain(
        second.assign(
            gpu="RTX4090", model="Llama-3.1-8B", batch=second["running"],
            context_tokens=second["kv_cache_pct"] / 100 * _KV_BLOCKS / second["running"],
            measured=second["running"] / second["gen_throughput"],
        ), "LLMServingSim", family="vllm", version=VLLM,
    )  # fmt: skip
    serving = _serving(data)
    yield _plain(serving[~serving["drafts"]], REPEATED, family="vllm", version=VLLM)
    bundle = _bundle(data).drop_duplicates(["model", "bench"])
    yield _plain(
        bundle.assign(measured=bundle["batch"] / bundle["plain_tokens_per_s"]), "SpecBundle", family="sglang",
        version="0.5",
    )  # fmt: skip


def _speculation(data: Path) -> Iterator[pd.DataFrame]:
    bundle = _bundle(data)
    speedups = bundle.rename(
        columns={
            "batch": "batch_size",
            "steps": "draft_depth",
            "num_draft_tokens": "tokens_to_verify",
            "accept": "accept_length",
        }
    )
    serving = _serving(data)
    serving = serving[serving["drafts"]].rename(
        columns={"batch": "batch_size", "k": "draft_depth", "tau": "accept_length"}
    )
    cells = serving.assign(
        topk=1,
        tokens_to_verify=serving["draft_depth"] + 1,
        speedup=serving["accept_length"] * serving["plain_s"] / serving["measured"],
    ).drop(columns="measured")
    rows = from_speedups(cells, REPEATED).assign(family="vllm", version=VLLM, draft_vocab=float(EAGLE3_VOCAB))
    rows = rows.assign(weights=serving["weights"].to_numpy(), kv=serving["kv"].to_numpy())
    yield rows
    ratio = serving["goodput"] / serving["plain_goodput"]
    yield rows.assign(
        kind="goodput", source=GOODPUT, ttft_s=serving["prompt_s"].to_numpy(), output_tokens=256.0,
        measured=ratio.to_numpy(),
    )  # fmt: skip
    yield from_speedups(speedups, "SpecBundle").assign(family="sglang", version="0.5", draft_vocab=float(EAGLE3_VOCAB))
    cells = tlt_cells(data)
    # Batch 1 of Table 4 is a row of Fig. 13.
    cells = cells[(cells["table"] != "table4") | (cells["batch_size"] > 1)]
    yield from_speedups(cells, "TLT").assign(family="sglang", version="0.4")
    # Not published there: SpecBundle ran the same drafter on the same questions.
    same = (bundle["bench"] == "mtbench") & (bundle["steps"] == 3) & (bundle["drafter"] == _EAGLE3_DRAFTER)
    table = eagle3_cells(data, float(bundle.loc[same, "accept"].mean()))
    yield from_speedups(table, "EAGLE-3 Table 3").assign(
        family="sglang", version="0.4", draft_vocab=float(EAGLE3_VOCAB)
    )


def _serving(data: Path) -> pd.DataFrame:
    """Closed loops of requests on one A100, one row per run: seconds of the median iteration, in which no prompt is.

    `measured` is the median time between chunks of a response, `plain_s` that of the same load without drafts.
    """
    numbers = (
        "k",
        "concurrency",
        "batch_mean",
        "tau",
        "itl_p50",
        "ttft_mean",
        "goodput",
        "wall_s",
        "completion_tokens",
    )
    table = measured_table(data / "serving_a100_llama31_8b_eagle3.csv", numbers, ("weight", "kv", "spec", "workload"))
    table["goodput"] = table["completion_tokens"] / table["wall_s"]
    table = table[table["batch_mean"].notna()].drop_duplicates().assign(
        gpu="A100", model="Llama-3.1-8B", tp=1, batch=table["batch_mean"], context_tokens=_SERVING_CONTEXT,
        weights=table["weight"].map({"fp16": "bf16", "w4a16": "int4"}), drafts=table["spec"] != "none",
        kv=table["kv"].replace("fp16", "bf16"), measured=table["itl_p50"] * 1e-3,
    )  # fmt: skip
    load = ["weights", "kv", "workload", "concurrency"]
    plain = table[~table["drafts"]].groupby(load)[["measured", "goodput"]].mean()
    # A lone request's first token comes with its prompt and an iteration.
    alone = table[~table["drafts"] & (table["concurrency"] == 1)].groupby(load[:3])[["ttft_mean", "itl_p50"]].mean()
    prompt_s = ((alone["ttft_mean"] - alone["itl_p50"]) * 1e-3).rename("prompt_s")
    plain = plain.rename(columns={"measured": "plain_s", "goodput": "plain_goodput"})
    return table.join(plain, on=load).join(prompt_s, on=load[:3]).reset_index(drop=True)


def _kernels(data: Path) -> Iterator[pd.DataFrame]:
    """Forward passes and attention of dense models as sums of kernels: an engine that adds nothing."""
    rows: list[dict[str, object]] = []
    for name in KERNEL_GPUS:
        kernels = Kernels.read(data, name)
        for shape in map(model, _SHAPES):
            for tp in (1, 2, 4, 8):
                at = {"gpu": name, "model": shape.name, "tp": tp}
                try:
                    per_gpu_heads(shape, tp)
                    attention = [float(kernels.attention_s(shape, tp, b, past)) for b, past in _ATTENTION]
                    forward = kernels.forward_s(shape, tp, _KERNEL_TOKENS)
                except ConfigError:
                    continue
                rows += [{**at, "kind": "attention", "batch": b, "context_tokens": past, "measured": s}
                         for (b, past), s in zip(_ATTENTION, attention, strict=True)]  # fmt: skip
                rows += [{**at, "kind": "iteration", "batch": t, "context_tokens": 0.0, "measured": s}
                         for t, s in zip(_KERNEL_TOKENS, forward, strict=True)]  # fmt: skip
    table = pd.DataFrame(rows)
    yield _plain(table, "kernels", family="kernels", version="").assign(kind=table["kind"])


def _bundle(data: Path) -> pd.DataFrame:
    numbers = ("batch", "steps", "topk", "num_draft_tokens", "accept", "plain_tokens_per_s", "speedup")
    files = ("eagle3_sglang_h200.csv", "eagle3_sglang_experts.csv")
    tables = [measured_table(data / name, numbers, ("model", "bench", "drafter")) for name in files]
    table = pd.concat(tables, ignore_index=True)
    table = table.assign(model=[model(name).name for name in table["model"]])
    # Not published where there are several: the fewest GPUs that hold the model.
    return table.assign(gpu="H200", tp=table["model"].map(_BUNDLE_GPUS).fillna(1), context_tokens=_BENCH_CONTEXT)


def _plain(table: pd.DataFrame, source: str, *, family: str, version: str) -> pd.DataFrame:
    kinds = ("weights", "kv")
    measured = pd.DataFrame({name: table.get(name, np.nan) for name in (*COLUMNS, *kinds)}).reset_index(drop=True)
    measured = measured.assign(kind="iteration", source=source, draft_depth=np.nan, top_k=np.nan, accept_length=np.nan)
    return measured.assign(tp=measured["tp"].fillna(1), family=family, version=version)
