"""A long-tail rollout played on one GPU: a model's shape without weights, forced lengths, drafts kept at given rates.

Lengths are quantiles of one RL step of a trace, scaled so that the longest is the cap. For each shape one process runs
stock vLLM (its own scheduler, no speculation) and another an engine of ours that plays each policy in turn, with drafts
that cost nothing to make (a model-free drafter) and are kept by vLLM's synthetic rejection sampling: draft token i with
probability ALPHA ** i. Both also decode plainly at fixed batch sizes. A row is on disk as soon as it is measured.

    python tests/bench/rehearsal.py FOLDER --shapes Qwen2.5-1.5B,Qwen2.5-7B --minutes 7
    python tests/bench/rehearsal.py traces/h200-rehearsal --show       # what one H200 did, from its quick.json
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
PROMPT_TOKENS = 128
POLICIES = ("none", "ngram:4", "adaptive")
SEAM_TOKENS = 96
START_S = 60.0
"""Seconds that an engine is expected to take to start: the next one is begun only while so many are left."""


def lengths(trace: str, rl_step: int, responses: int, cap: int) -> list[int]:
    """Response lengths at `responses` evenly spaced quantiles of an RL step, times cap / the longest; at least 1."""
    import tltlab

    table = tltlab.read(trace).outcomes
    recorded = table.loc[table["rl_step"] == rl_step, "response_tokens"].to_numpy()
    quantiles = np.quantile(recorded, (np.arange(responses) + 0.5) / responses)
    return [max(1, round(length)) for length in quantiles * (cap / quantiles.max())]


def requests(visit: int, caps: list[int], vocabulary: int) -> list[Any]:
    """One request per cap, in a fixed random order, each with a prompt of its own that no prefix cache holds."""
    from tltlab.runtime.engine.generation import GenerationRequest

    order = np.random.default_rng(0).permutation(len(caps))
    prompts = np.random.default_rng(visit + 1).integers(3, vocabulary, (len(caps), PROMPT_TOKENS)).tolist()
    return [
        GenerationRequest(
            key=(visit, f"p{n // 8}", n % 8, 0),
            prompt_token_ids=prompts[n],
            max_response_tokens=caps[at],
            ignore_eos=True,
        )
        for n, at in enumerate(order)
    ]


def engine_of(case: dict[str, Any]) -> Any:
    """Stock vLLM, or ours with graphs planned for all policies; the same arguments otherwise."""
    from tltlab.policies.policy import Policy, load_policy
    from tltlab.policies.specs import ExploreSpec
    from tltlab.runtime.engine.engine import Engine
    from tltlab.runtime.engine.graphs import plan_graphs
    from tltlab.runtime.engine.profile import ForcedDrafter
    from tltlab.runtime.engine.vllm.options import speculative_config
    from tltlab.runtime.engine.vllm.stock import PlainStock

    most = max(case["batches"])
    arguments: dict[str, Any] = {
        "load_format": "dummy", "skip_tokenizer_init": True, "max_num_seqs": most,
        "max_model_len": PROMPT_TOKENS + max(case["cap"], SEAM_TOKENS) + 16,
        "kv_cache_memory_bytes": int(case["kv_gib"] * 2**30),
    }  # fmt: skip
    if case["engine"] == "stock":
        return PlainStock(case["model"], vllm_args=arguments)
    strategies = {s for name in POLICIES for s in load_policy(name).strategies}
    deepest = max(s.draft_depth for s in strategies)
    everything = Policy(selector=ExploreSpec(strategies=tuple(sorted(strategies, key=lambda s: s.draft_depth))))
    drafters = {"ngram": ForcedDrafter()}
    if case["alpha"] is not None:
        rates = [case["alpha"] ** (i + 1) for i in range(deepest)]
        arguments["speculative_config"] = {
            **(speculative_config(drafters, deepest) or {}),
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_rates": rates,
        }
    plan = None
    if case["graphs"]:
        plan = plan_graphs(everything, most, runner="V1", any_lengths=True, plain=True)
    return Engine(case["model"], drafters=drafters, max_draft_depth=deepest, graphs=plan, vllm_args=arguments)


def rows(case: dict[str, Any], begun: float) -> Iterator[dict[str, Any]]:
    """Start the engine and measure: plain steps by batch size, then rounds of rollouts under each policy."""
    from tltlab.policies.policy import load_policy

    engine = engine_of(case)
    stock = case["engine"] == "stock"
    try:
        yield {"row": "started", "seconds": time.perf_counter() - begun}
        vocabulary = json.loads(Path(case["model"], "config.json").read_text())["vocab_size"]
        visit = 0

        def play(caps: list[int], policy: str) -> tuple[Any, float]:
            nonlocal visit
            visit += 1
            if not stock:
                engine.set_policy(load_policy(policy))
            wanted = requests(visit, caps, vocabulary)
            start = time.perf_counter()
            rollout = engine.generate(wanted, rl_step=visit, temperature=1.0)
            return rollout, time.perf_counter() - start

        policies = ("none",) if stock else POLICIES
        play([8] * 4, "none")
        if not stock:
            play([24] * 16, "ngram:4")
        for batch in case["batches"]:
            rollout, seconds = play([SEAM_TOKENS] * batch, "none")
            steps = [r["duration"] for r in rollout.iterations if r["batch"] == batch and not r["prefill_tokens"]]
            yield {
                "row": "plain step", "batch": batch, "seconds": seconds, "steps": len(steps),
                "median_s": statistics.median(steps) if steps else None,
                "quartiles_s": statistics.quantiles(steps, n=4) if len(steps) > 4 else None,
            }  # fmt: skip
        for number in range(case["rounds"]):
            for policy in policies:
                rollout, seconds = play(case["lengths"], policy)
                yield {
                    "row": "rollout", "policy": "stock" if stock else policy, "round": number, "seconds": seconds,
                    "tokens": sum(len(r.token_ids) for r in rollout.responses), "steps": len(rollout.iterations),
                    "drafted": sum(r["num_drafted"] for r in rollout.iterations),
                    "accepted": sum(r["num_accepted"] for r in rollout.iterations),
                    "recorder_s": rollout.recorder_s, "policy_s": rollout.policy_s,
                    "drafting_s": getattr(rollout, "drafting_s", None),
                    "detail": {
                        "iterations": rollout.iterations, "decisions": rollout.decisions,
                        "responses": [
                            {"key": r.key, "tokens": len(r.token_ids), "t_first_token": r.t_first_token,
                             "t_finish": r.t_finish, "finish_reason": r.finish_reason}
                            for r in rollout.responses
                        ],
                    },
                }  # fmt: skip
    finally:
        engine.close()


def show(quick: Path) -> str:
    """Text of a `quick.json`: median milliseconds of plain steps by batch, and seconds of each rollout, by engine."""
    rows = json.loads(quick.read_text())["rows"]
    names = ("model", "engine", "scheduling", "graphs")
    lines = [f"{'model':13s} {'engine':7s} {'scheduling':13s} {'graphs':11s} {'what':24s} measured"]
    for engine in dict.fromkeys(tuple(row[name] for name in names) for row in rows):
        mine = [row for row in rows if tuple(row[name] for name in names) == engine]
        place = "{:13s} {:7s} {:13s} {:11s}".format(*engine)
        steps = [f"{row['median_s'] * 1e3:.2f} at {row['batch']}" for row in mine if row["row"] == "plain step"]
        lines.append(f"{place} {'plain step, ms by batch':24s} {', '.join(steps)}")
        for policy in dict.fromkeys(row["policy"] for row in mine if row["row"] == "rollout"):
            seconds = [row["seconds"] for row in mine if row.get("policy") == policy]
            lines.append(f"{place} {f'rollout, {policy}':24s} {', '.join(f'{s:.2f} s' for s in seconds)}")
    return "\n".join(lines)


def child(case_file: str) -> None:
    """Measure one engine and append its rows to its file."""
    begun = time.perf_counter()
    case = json.loads(Path(case_file).read_text())
    with gzip.open(case["out"], "at") as file:
        for row in rows(case, begun):
            file.write(json.dumps(row, default=float) + "\n")
            file.flush()
            shown = {name: value for name, value in row.items() if name != "detail"}
            print(case["shape"], case["engine"], json.dumps(shown, default=float), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shapes", default="Qwen2.5-1.5B,Qwen2.5-7B")
    parser.add_argument("--trace", default="traces/base-rl-16k")
    parser.add_argument("--rl-step", type=int, default=0)
    parser.add_argument("--responses", type=int, default=64)
    parser.add_argument("--cap", type=int, default=2048)
    parser.add_argument("--batches", default="1,8,64,256")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--alpha", type=float, default=0.7, help="0: whatever the model keeps")
    parser.add_argument("--kv-gib", type=float, default=14.0)
    parser.add_argument("--minutes", type=float, default=6.0)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--no-graphs", action="store_true")
    parser.add_argument("--show", action="store_true", help="print FOLDER/quick.json; measure nothing")
    options = parser.parse_args()
    if options.show:
        print(show(options.folder / "quick.json"))
        return
    from bench.gpu import shape

    deadline = time.monotonic() + 60 * options.minutes
    options.folder.mkdir(parents=True, exist_ok=True)
    common = {
        "lengths": lengths(options.trace, options.rl_step, options.responses, options.cap), "cap": options.cap,
        "batches": [int(b) for b in options.batches.split(",")], "rounds": options.rounds,
        "alpha": options.alpha or None, "kv_gib": options.kv_gib, "graphs": not options.no_graphs,
    }  # fmt: skip
    for name in options.shapes.split(","):
        model = shape(name, options.folder / "models" / name, options.layers)
        for engine in ("stock", "ours"):
            left = deadline - time.monotonic()
            if left < START_S and options.minutes > 2:
                print(f"left out for lack of time: {name} {engine}", flush=True)
                continue
            stem = options.folder / f"{name}-{engine}"
            case = common | {
                "shape": name, "model": str(model), "engine": engine, "out": str(stem) + ".jsonl.gz",
            }  # fmt: skip
            case_file = Path(str(stem) + ".case.json")
            case_file.write_text(json.dumps(case))
            with open(str(stem) + ".log", "w") as log:
                process = subprocess.Popen(
                    [sys.executable, __file__, "--child", str(case_file)], stdout=None, stderr=log, env=os.environ
                )
                try:
                    process.wait(timeout=max(left, 30.0))
                except subprocess.TimeoutExpired:
                    process.kill()
                    print(f"{name} {engine}: killed at the deadline", flush=True)
            if process.returncode:
                print(f"{name} {engine}: failed\n{Path(str(stem) + '.log').read_text()[-3000:]}", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2])
    else:
        main()
