"""Measurements that need a GPU: a long-tail rollout and plain steps; costs of a policy and of determinism.

Every engine runs in its own process, so memory is measured separately and a failure affects no other engine. The result
file is written again after each: an engine starts in 30 to 60 s, and a lent machine may be gone. Models have a shape
and random weights (`shape`), which take the same time as trained ones.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

import tltlab
from bench.harness import Progress, Table, Text, in_turn, shown
from tltlab.console import table as table_text
from tltlab.errors import ConfigError, RunError
from tltlab.files import write_json
from tltlab.records import Json
from tltlab.stats import interval_json, paired_interval

PARTS = ("seam", "update")
QUICK_SHAPES, QUICK = ("Qwen2.5-1.5B", "Qwen2.5-7B"), "stock,none,ngram:4,adaptive"
TRACE = Path(__file__).parents[2] / "traces" / "base-rl-16k"
SEAM_MODES = (
    "stock, synchronous, one process",
    "policy none",
    "policy none, recorded",
    "policy beg-mab-suffix",
    "policy beg-mab-suffix, planned graphs",
    "stock",
    "policy none, asynchronous",
)
"""Stock vLLM first: the ratio to it is what a policy costs that drafts nothing. What beg-mab-suffix costs at batches at
which it decodes plainly is the V1 runner's, which has full graphs for plain steps where they are planned alone."""
WARM_UP = 1
_WITHOUT_WEIGHTS = {"load_format": "dummy", "skip_tokenizer_init": True}
_PROMPT_TOKENS = 64
_TAIL = 1500


def shape(name: str, folder: Path, layers: int | None = None) -> Path:
    """Write the config.json of a model of `tltlab.hardware`, such as Qwen2.5-7B, without weights; the folder."""
    from tltlab.rehearsal.plan import shape_of

    config = shape_of(name)[1]
    write_json(folder / "config.json", config | {"num_hidden_layers": layers or config["num_hidden_layers"]})
    return folder


def bench_quick(
    shapes: Sequence[str], *, batches: Sequence[int], rounds: int, minutes: float, out: Path, progress: Progress
) -> Json:
    """Play one rollout of `TRACE` at each shape under `QUICK` policies, and time plain steps of stock vLLM and ours.

    A row is in a folder beside `out` as soon as it is measured, and in `out` once its shape is over; what does not fit
    into the minutes is left out.
    """
    from tltlab.rehearsal.plan import plan_of
    from tltlab.rehearsal.result import judged
    from tltlab.rehearsal.run import rehearse
    from tltlab.rehearsal.settings import RehearsalConfig
    from tltlab.runtime.engine.environment import hardware as machine
    from tltlab.runtime.engine.environment import versions
    from tltlab.runtime.rollout.played import played

    begun, rows, sentences = time.monotonic(), list[Json](), list[str]()
    result: Json = {
        "part": "quick", "hardware": machine(), "driver": _driver(), "versions": versions(), "minutes": minutes,
        "rows": rows, "sentences": sentences,
    }  # fmt: skip
    for name in shapes:
        size = (64, 2048) if result["driver"] else (8, 128)
        config = RehearsalConfig(policies=QUICK, responses=size[0], cap=size[1], rounds=rounds, plain_batches=batches)
        plan = plan_of(tltlab.read(TRACE), name, config)
        folder = out.with_suffix("") / plan.model
        rehearse(plan, folder, minutes=minutes - (time.monotonic() - begun) / 60, report=progress)
        engine = {"graphs": "planned" if plan.gpus else "none", "scheduling": "synchronous"}
        stock = {"graphs": "vLLM's own" if plan.gpus else "none", "scheduling": "vLLM's own"}
        rows += [row | {"model": name} | (stock if row["engine"] == "stock" else engine) for row in played(folder)]
        with suppress(RunError):
            sentences.append(f"{name}: {judged(plan, folder).sentence}")
        write_json(out, result)
    return result


def _driver() -> str | None:
    """GPUs, driver and memory by nvidia-smi, None without one."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip() or None
    except (OSError, subprocess.CalledProcessError):
        return None


def show(quick: Mapping[str, Any]) -> str:
    """A `quick.json` for people: by engine, plain steps' median milliseconds by batch, and each rollout's seconds."""
    names, table = ("model", "engine", "scheduling", "graphs"), []
    rows = quick["rows"]
    for engine in dict.fromkeys(tuple(row[name] for name in names) for row in rows):
        mine = [row for row in rows if tuple(row[name] for name in names) == engine]
        steps = [f"{row['median_s'] * 1e3:.2f} at {row['batch']}" for row in mine if row["row"] == "plain step"]
        table.append((*engine, "plain step, ms by batch", ", ".join(steps)))
        for policy in dict.fromkeys(row["policy"] for row in mine if row["row"] == "rollout"):
            seconds = [f"{row['seconds']:.2f} s" for row in mine if row.get("policy") == policy]
            table.append((*engine, f"rollout, {policy}", ", ".join(seconds)))
    lines = table_text([*names, "what", "measured"], table, left=6)
    return "\n".join([lines, *quick.get("sentences", ())])


def bench_gpu(
    part: str,
    model: Path,
    *,
    batches: Sequence[int],
    rounds: int,
    tokens: int,
    kv_bytes: int,
    out: Path | None,
    progress: Progress,
) -> Json:
    """Run one of PARTS on the model in a folder; `about` and one row per engine, failed ones with what they said."""
    if part not in PARTS:
        raise ConfigError(f"no part {part!r} of bench gpu; there are: quick, show, {', '.join(PARTS)}")
    if not (model / "config.json").is_file():
        raise ConfigError(f"{model} holds no config.json: give a model's folder, or make one with --shape NAME")
    from tltlab.runtime.engine.environment import hardware as machine
    from tltlab.runtime.engine.environment import versions

    settings: Json = {"model": str(model), "rounds": rounds, "tokens": tokens, "kv_bytes": kv_bytes}
    result: Json = {"part": part, **settings, "hardware": machine(), "versions": versions(), "rows": []}
    for case, environment in _cases(part):
        row = case | _alone(part, settings | {"batches": list(batches)} | case, environment)
        progress(f"{row['mode']}: {row['seconds']:.0f} s{' - failed' if 'failed' in row else ''}")
        result["rows"].append(row)
        if out is not None:
            write_json(out, result)
    return result


TEXT: Text = (
    "{part} of {model} on {hardware}",
    Table(
        "shown",
        "engine: {mode}; s: {seconds:.0f}; tokens/s by batch: {rates}; update s: {plain_s:.3f}; "
        "deterministic: {deterministic_s:.3f}; times as long: {ratio}; failed: {failed}",
    ),
)


def text(result: Json) -> str:
    """The result for people: a line for each engine."""
    rows = []
    for row in result["rows"]:
        rates = ", ".join(f"{statistics.median(r):.0f} at {b}" for b, r in row.get("tokens_per_s", {}).items())
        lines = row.get("failed", "").strip().splitlines()
        rows.append(row | {"rates": rates, "failed": lines[-1] if lines else ""})
    return shown(result | {"shown": rows}, TEXT)


def _cases(part: str) -> list[tuple[dict[str, str], dict[str, str]]]:
    """Arguments of each engine, and the environment of its process."""
    if part == "seam":
        return [({"mode": mode}, {}) for mode in SEAM_MODES]
    # Read when cuBLAS starts: it holds for both, and what it costs is in neither's favour.
    return [({"mode": "update"}, {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"})]


def _alone(part: str, arguments: Json, environment: dict[str, str]) -> Json:
    """Measure in another process: its result, or `failed`, and the seconds it took."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "row.json"
        command = [sys.executable, "-m", "bench.gpu", part, json.dumps(arguments), str(answer)]
        process = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)
        failed = process.returncode != 0 or not answer.is_file()
        row = {"failed": (process.stderr or process.stdout)[-_TAIL:]} if failed else json.loads(answer.read_text())
    return row | {"seconds": time.perf_counter() - start}


def _seam(mode: str, model: str, batches: list[int], kv_bytes: int, rounds: int, tokens: int) -> Json:
    """Tokens per second of rollouts of fixed length, by batch size, after a rollout that warms up."""
    from bench.vllm.plain import fixed_length, stock_llm
    from tltlab.runtime import vllm_options

    arguments = _WITHOUT_WEIGHTS | {
        "max_num_seqs": max(batches), "max_model_len": _PROMPT_TOKENS + tokens,
        "kv_cache_memory_bytes": kv_bytes, "generation_config": "vllm",
    }  # fmt: skip
    if mode != "stock":
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        arguments["async_scheduling"] = False
    with tempfile.TemporaryDirectory() as folder:
        if mode.startswith("policy"):
            record = f"{folder}/trace" if "recorded" in mode else None
            policy = mode.split()[1].strip(",")
            most = max(batches) if "planned" in mode else None
            arguments |= vllm_options(policy, max_batch=most, async_scheduling="asynchronous" in mode, record=record)
        start = time.perf_counter()
        llm = stock_llm(model, **arguments)
        try:
            started_s = time.perf_counter() - start
            params = fixed_length(tokens)
            rates: dict[int, list[float]] = {}
            for batch in batches:
                for visit in range(WARM_UP + rounds):
                    prompts = [{"prompt_token_ids": _prompt(model, n, visit)} for n in range(batch)]
                    start = time.perf_counter()
                    outputs = llm.generate(prompts, params, use_tqdm=False)
                    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
                    if visit >= WARM_UP:
                        rates.setdefault(batch, []).append(num_tokens / (time.perf_counter() - start))
        finally:
            llm.llm_engine.engine_core.shutdown()
    return {"started_s": started_s, "tokens_per_s": rates}


def _update(mode: str, model: str, batches: list[int], kv_bytes: int, rounds: int, tokens: int) -> Json:
    """Seconds of a trainer's update on as many responses as the first batch size, with deterministic algorithms and
    without, in turn."""
    import torch

    from tltlab.runtime.recipe.sections import TrainConfig
    from tltlab.runtime.trainer.ranks import make_deterministic
    from tltlab.runtime.trainer.samples import Sample
    from tltlab.runtime.trainer.trainer import Trainer

    vocabulary = json.loads(Path(model, "config.json").read_text())["vocab_size"]
    rng = np.random.default_rng(0)
    samples = [
        Sample(
            prompt_token_ids=_prompt(model, n, 0), token_ids=rng.integers(3, vocabulary, tokens).tolist(),
            logprobs=[-float(np.log(vocabulary))] * tokens, reward=float(n % 2), group=n // 8,
        )
        for n in range(batches[0])
    ]  # fmt: skip
    trainer = Trainer(model, TrainConfig(), temperature=1.0, max_response_tokens=tokens, seed=0)

    def measure(deterministic: bool, number: int) -> float:
        make_deterministic(deterministic)
        start = time.perf_counter()
        trainer.update(number + 1)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter() - start

    try:
        trainer.old_logprobs(samples)
        seconds = in_turn((False, True), measure, rounds, rng=rng)
    finally:
        make_deterministic(False)
        trainer.close()
    ratio = interval_json(paired_interval(seconds[True], seconds[False], rng=rng))
    return {"plain_s": seconds[False], "deterministic_s": seconds[True], "ratio": ratio}


def _prompt(model: str, request: int, visit: int) -> list[int]:
    """Token ids of a prompt of its own for each request and visit: a prefix cache serves none of them."""
    vocabulary = json.loads(Path(model, "config.json").read_text())["vocab_size"]
    tokens: list[int] = np.random.default_rng((request, visit)).integers(3, vocabulary, _PROMPT_TOKENS).tolist()
    return tokens


if __name__ == "__main__":
    part, arguments, answer = sys.argv[1:]
    measures: dict[str, Callable[..., Any]] = {"seam": _seam, "update": _update}
    Path(answer).write_text(json.dumps(measures[part](**json.loads(arguments))))
