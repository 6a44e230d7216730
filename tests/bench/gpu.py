"""Measurements that need a GPU: memory and kinds of CUDA graphs; costs of a policy, weight sync and determinism.

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
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

import tltlab
from bench.harness import Progress, Table, Text, in_turn, shown
from tltlab.console import table as table_text
from tltlab.errors import ConfigError, RunError
from tltlab.files import write_json
from tltlab.policies.policy import Policy
from tltlab.policies.specs import ExploreSpec, FixedSpec, TableRow, TableSpec
from tltlab.records import Json
from tltlab.stats import interval_json, paired_interval
from tltlab.strategy import Strategy

PARTS = ("graphs", "seam", "sync", "update")
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
SYNC_WAYS = ("host", "device")
GRAPH_PLANS = ("no speculation", "one strategy", "every strategy apart", "bucketed")
"""Of `_chain_policies`: TLT's Table 5, of chains."""
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
        progress(f"{_name(row)}: {row['seconds']:.0f} s{' - failed' if 'failed' in row else ''}")
        result["rows"].append(row)
        if out is not None:
            write_json(out, result)
    return result


TEXT: Text = (
    "{part} of {model} on {hardware}",
    Table(
        "shown",
        "engine: {name}; s: {seconds:.0f}; tokens/s by batch: {rates}; sync s: {sync_s:.3f}; GB: {bytes:1e-9*.2f}; "
        "update s: {plain_s:.3f}; deterministic: {deterministic_s:.3f}; times as long: {ratio}; "
        "graphs GB: {memory.measured_bytes:1e-9*.2f}; predicted: {memory.predicted_bytes:1e-9*.2f}; failed: {failed}",
    ),
    Table(
        "cells",
        "engine: {name}; batch: {batch}; depth: {depth}; step ms: {median_s:1e3*.2f}; ran in: {ran_in}; "
        "plain step over one without speculation: {slowdown:.2f}",
    ),
)


def text(result: Json) -> str:
    """The result for people: a line for each engine, and for each batch size and depth."""
    rows, slowdowns = [], plain_steps(result["rows"])
    for row in result["rows"]:
        rates = ", ".join(f"{statistics.median(r):.0f} at {b}" for b, r in row.get("tokens_per_s", {}).items())
        lines = row.get("failed", "").strip().splitlines()
        rows.append(row | {"name": _name(row), "rates": rates, "failed": lines[-1] if lines else ""})
    cells = [
        {**cell, "name": _name(row), "ran_in": json.dumps(cell["ran_in"]),
         "slowdown": None if cell["depth"] else slowdowns.get(cell["batch"], {}).get(_name(row))}
        for row in result["rows"]
        for cell in row.get("cells", ())
    ]  # fmt: skip
    return shown(result | {"shown": rows, "cells": cells}, TEXT)


def _name(row: Mapping[str, Any]) -> str:
    return str(row.get("mode") or row.get("way") or f"{row['plan']}, {row['runner']} {row['graphs']}")


def _cases(part: str) -> Iterator[tuple[dict[str, str], dict[str, str]]]:
    """Arguments of each engine, and the environment of its process."""
    if part == "seam":
        yield from (({"mode": mode}, {}) for mode in SEAM_MODES)
    elif part == "sync":
        yield from (({"way": way}, {}) for way in SYNC_WAYS)
    elif part == "update":
        # Read when cuBLAS starts: it holds for both, and what it costs is in neither's favour.
        yield {"mode": "update"}, {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    else:
        # First what plain steps cost in an engine that adapts, against those of one that never drafts.
        for graphs in ("stock", "planned"):
            yield {"plan": GRAPH_PLANS[-1], "runner": "V1", "graphs": graphs}, {"VLLM_USE_V2_MODEL_RUNNER": "0"}
        for plan in GRAPH_PLANS:
            yield {"plan": plan, "runner": "V2", "graphs": "planned"}, {"VLLM_USE_V2_MODEL_RUNNER": "1"}


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


def _chain_policies(drafter: str) -> dict[str, Policy]:
    """The policies of TLT's table of graph memory by name, as chains of one drafter."""
    every = tuple(Strategy.chain(drafter, depth) for depth in (8, 4, 2))
    rows = tuple(TableRow(min_batch=n, strategy=chain) for n, chain in zip((1, 5, 17), every, strict=True))
    return {
        "no speculation": Policy(selector=FixedSpec(strategy=Strategy.chain(drafter, 0))),
        "one strategy": Policy(selector=FixedSpec(strategy=every[0])),
        "every strategy apart": Policy(selector=ExploreSpec(strategies=every)),
        "bucketed": Policy(selector=TableSpec(rows=rows)),
    }


def _graphs(
    plan: str, runner: str, graphs: str, model: str, batches: list[int], kv_bytes: int, rounds: int, tokens: int
) -> Json:
    """Bytes that capture took, and what iterations ran in at each batch and depth, with the median step.

    Drafts cost nothing on the V1 runner (`ForcedDrafter`); on V2 an untrained EAGLE head makes them.
    """
    import torch

    from tltlab.costs.profiles import find_model
    from tltlab.drafters.specs import LearnedSpec
    from tltlab.policies.simple import Fixed
    from tltlab.runtime.drafter.heads.kinds import new_head
    from tltlab.runtime.engine.engine import Engine
    from tltlab.runtime.engine.generation import GenerationRequest
    from tltlab.runtime.engine.graphs import memory_bytes, plan_graphs
    from tltlab.runtime.engine.profile import ForcedDrafter
    from tltlab.strategy import Strategy

    drafter = "ngram" if runner == "V1" else "learned"
    policy = _chain_policies(drafter)[plan]
    planned = plan_graphs(
        policy, max(batches), runner="V1" if runner == "V1" else "V2", any_lengths=graphs == "planned", plain=True
    )
    shape = find_model(model)
    settings = _WITHOUT_WEIGHTS | {"max_num_seqs": max(batches), "kv_cache_memory_bytes": kv_bytes}
    with tempfile.TemporaryDirectory() as folder:
        drafters: Json = {}
        if runner == "V1":
            drafters = {drafter: ForcedDrafter()}
        elif planned.deepest:
            new_head(model, "eagle", 0).to(torch.bfloat16).save(folder)
            drafters = {drafter: LearnedSpec(method="eagle", model=folder)}
        start = time.perf_counter()
        engine = Engine(
            model, drafters=drafters, max_draft_depth=planned.deepest, vllm_args=settings,
            graphs=planned if graphs == "planned" else None,
        )  # fmt: skip
    try:
        captured, predicted = engine.captured_graphs(), memory_bytes(planned, shape.layers, shape.vocab)
        cells: list[Json] = []
        row = {
            "started_s": time.perf_counter() - start, "captured": asdict(captured), "depths": planned.depths,
            "planned": planned.full_graphs() if graphs == "planned" else None, "cells": cells,
            "memory": {
                "predicted_bytes": predicted, "measured_bytes": captured.num_bytes,
                "relative_error": None if captured.num_bytes is None else predicted / captured.num_bytes - 1.0,
            },
        }  # fmt: skip
        for visit, (batch, depth) in enumerate((b, k) for b in batches for k in planned.depths):
            engine.set_policy(Fixed(Strategy.chain(drafter, depth)))
            requests = [
                GenerationRequest(
                    key=(visit, "probe", n, 0), prompt_token_ids=_prompt(model, n, visit),
                    max_response_tokens=32 * (depth + 1), ignore_eos=True,
                )
                for n in range(batch)
            ]  # fmt: skip
            iterations = engine.generate(requests, rl_step=visit, temperature=1.0).iterations.to_pylist()
            steps = [
                row
                for row in iterations
                if row["batch"] == batch and row["num_drafted"] == batch * depth and not row["prefill_tokens"]
            ]
            seconds = statistics.median(row["duration"] for row in steps) if steps else None
            ran_in = dict(Counter(row["graph"] for row in steps))
            cells.append({"batch": batch, "depth": depth, "ran_in": ran_in, "steps": len(steps), "median_s": seconds})
    finally:
        engine.close()
    return row


def plain_steps(rows: Sequence[Mapping[str, Any]]) -> dict[int, dict[str, float]]:
    """By batch size and engine, the median plain step over that of the V2 runner without speculation, which runs in a
    full graph: what adaptivity costs where V1 runs it in pieces."""
    medians = {
        (_name(row), cell["batch"]): cell["median_s"]
        for row in rows
        for cell in row.get("cells", ())
        if cell["depth"] == 0 and cell["median_s"]
    }
    reference = _name({"plan": GRAPH_PLANS[0], "runner": "V2", "graphs": "planned"})
    slowdowns: dict[int, dict[str, float]] = {}
    for (name, batch), seconds in medians.items():
        if (reference, batch) in medians and name != reference:
            slowdowns.setdefault(batch, {})[name] = seconds / medians[reference, batch]
    return slowdowns


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


def _sync(way: str, model: str, batches: list[int], kv_bytes: int, rounds: int, tokens: int) -> Json:
    """Seconds to give an engine new weights, and how much of them went into the copy to the host."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from tltlab.runtime.engine.engine import Engine

    config = AutoConfig.from_pretrained(model)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        state = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).state_dict()
    if config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    arguments = {"max_num_seqs": 8, "max_model_len": 512, "kv_cache_memory_bytes": kv_bytes, "enforce_eager": True}
    engine = Engine(model, max_draft_depth=0, vllm_args=_WITHOUT_WEIGHTS | arguments)
    seconds, copies = [], []
    try:
        for version in range(1, WARM_UP + rounds + 1):
            start = time.perf_counter()
            weights = {k: v.cpu() for k, v in state.items()} if way.startswith("host") else state
            copies.append(time.perf_counter() - start)
            engine.update_weights(weights.items(), version)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
    finally:
        engine.close()
    num_bytes = sum(tensor.nbytes for tensor in state.values())
    return {"bytes": num_bytes, "sync_s": seconds[WARM_UP:], "of_which_to_host_s": copies[WARM_UP:]}


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
    measures: dict[str, Callable[..., Any]] = {"graphs": _graphs, "seam": _seam, "sync": _sync, "update": _update}
    Path(answer).write_text(json.dumps(measures[part](**json.loads(arguments))))
