"""Cost of a GRPO run's driver alone: seconds and bytes of an RL step by part, against scripted engines.

Everything is the run's own code (`GrpoRun._step`, rollouts, rewards, trace, what ranks are sent) but engines, models
and Ray: a call to an actor is carried out here, and what it takes and returns goes through pickle as on its way to a
its own process. The work of actors is left out; the first rank's work on its samples besides the model's passes is
measured separately.
"""

from __future__ import annotations

import json
import multiprocessing
import pickle
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from bench.harness import Progress, Table, Text, shown
from fakes.scripted import PROMPT_TOKENS, RANK, SCRIPTED, SYNC, WRITER, DriverCase, Meter, scripted_actors, without_ray
from tltlab.runtime.recipe.recipe import Recipe
from tltlab.runtime.rollout.rewards import Scored
from tltlab.runtime.run import grpo
from tltlab.runtime.run.memory import ProcessMemory


def parity(prompt: str, response: str, answer: str) -> float:
    """A reward that takes no time: whether the response has an even number of characters."""
    return float(len(response) % 2 == 0)


def bench_host(tokens: Sequence[int], progress: Progress, weights_mib: int = 1024) -> dict[str, Any]:
    """Measure a batch of 512 responses on one engine and one rank, by their mean tokens: `rows` of `PARTS`.

    Each has milliseconds of an RL step, `ms`, and of each response, `ms_each`; what an engine and a model do is left
    out. Weights of a GiB are sent.
    """
    most = DriverCase(workers=1, responses=512, tokens=max(tokens), ranks=1, weights_mib=weights_mib)
    rows = []
    for each in (replace(most, tokens=number) for number in tokens):
        (case,) = bench_driver(each, (), progress)["cases"]
        seconds = case["seconds"] | {RANK: case["rank_s"], WRITER: case["writer_s"]}
        for part, names in PARTS.items():
            ms = 1e3 * sum(s for name, s in seconds.items() if name.rpartition(": ")[2] in names)
            rows.append({"tokens": each.tokens, "part": part, "ms": ms, "ms_each": ms / each.responses})
    return {"case": asdict(most), "rows": rows}


def bench_driver(case: DriverCase, growth: Sequence[int], progress: Progress) -> dict[str, Any]:
    """Measure `case`, and before it the same with each of `growth` workers, each in a fork of this process.

    Per case: `tokens` of an RL step, `seconds` of the driver by part (the last RL step's processor time), `rank_s` of
    the first rank's own work, `writer_s` of the recorder's thread, `bytes` by what travels, `trace_bytes` on disk,
    `rank_samples` that the first rank was sent, and `peak_rss_bytes`, with `start_rss_bytes` before the first RL step.
    """
    cases = []
    for workers in [*(n for n in growth if n < case.workers), case.workers]:
        progress(f"{workers} workers x {case.responses} responses x {case.tokens} tokens")
        # Imports are inherited, leftovers of a case are not.
        context = multiprocessing.get_context("fork")
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            cases.append(pool.submit(measured, replace(case, workers=workers)).result())
    return {"case": asdict(case), "cases": cases}


def measured(case: DriverCase) -> dict[str, Any]:
    """One case in this process, which cannot use Ray afterwards."""
    meter = Meter()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="driver-bench.") as temporary:
        folder = Path(temporary)
        recipe = _recipe(case, folder)
        words = json.loads((folder / "model" / "tokenizer.json").read_text())["model"]["vocab"]
        run = grpo.GrpoRun(recipe, folder / "run", actors=scripted_actors(meter, case, len(words)))
        with ExitStack() as stack:
            stack.enter_context(without_ray(meter))
            stack.enter_context(run)
            _watch(run, meter, stack)
            before = ProcessMemory.now("driver", 0, {})
            for _ in range(case.rl_steps):
                meter.seconds.clear()
                meter.bytes.clear()
                trace = _size(folder / "run")
                with meter.part("rest"):
                    run.step()
                    run._recorder._settle()
            rank = run.trainers.handles[0]._actor.trainer
            samples = rank._rank_of.count(0)
            # What is taken apart is the trace, which is not the question here.
            trace_bytes = _size(folder / "run") - trace
            after = ProcessMemory.now("driver", 0, {})
    _, rank_s, writer_s = (meter.seconds.pop(name, 0.0) for name in (SCRIPTED, RANK, WRITER))
    return {
        "workers": case.workers,
        "tokens": run.reports[-1].num_tokens,
        "driver_s": sum(meter.seconds.values()),
        "rank_s": rank_s,
        "writer_s": writer_s,
        "seconds": dict(sorted(meter.seconds.items(), key=lambda item: -item[1])),
        "bytes": dict(meter.bytes.most_common()),
        "trace_bytes": trace_bytes,
        "rank_samples": samples,
        "start_rss_bytes": before.peak_bytes,
        "peak_rss_bytes": after.peak_bytes,
    }


def _watch(run: grpo.GrpoRun, meter: Meter, stack: ExitStack) -> None:
    """Put the parts of an RL step on the meter."""
    for owner, method, part in (
        (run.data.rollouts, "collect", "collected"),
        (run.pool, "generate", "rollouts"),
        (run.pool, "remember", "history"),
        (run.reward_pool, "rewards", "rewards"),
        (run.trainers, "old_logprobs", "samples"),
        (run.trainers, "ask", "samples"),
        (run, "_record", "trace rows"),
        (grpo, "step_metrics", "figures"),
        (run._recorder, "_write", WRITER),
    ):
        stack.enter_context(patch.object(owner, method, meter.wrapped(part, getattr(owner, method))))
    rewards = run.reward_pool.rewards

    def counted(items: Sequence[Any]) -> list[Scored]:
        with meter.part(SCRIPTED):
            meter.bytes["rewards"] += sum(len(pickle.dumps(item, protocol=5)) for item in items)
        return rewards(items)

    stack.enter_context(patch.object(run.reward_pool, "rewards", counted))


def _recipe(case: DriverCase, folder: Path) -> Recipe:
    """The recipe of a run in `folder`, with a tokenizer and prompts that are made there."""
    prompts = case.workers * case.responses // case.group_size
    rng = np.random.default_rng(0)
    words = ["".join(chr(97 + letter) for letter in rng.integers(0, 26, rng.integers(2, 8))) for _ in range(500)]
    text = [" ".join(words[i] for i in rng.integers(0, len(words), 1000)) for _ in range(20)]
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(vocab_size=2000, special_tokens=["<eos>"], show_progress=False)
    tokenizer.train_from_iterator(text, trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(folder / "model")
    with open(folder / "train.jsonl", "w", encoding="utf-8") as file:
        for n in range(prompts * case.rl_steps):
            words_of = " ".join(words[i] for i in rng.integers(0, len(words), PROMPT_TOKENS))
            file.write(json.dumps({"prompt_id": f"p{n}", "prompt": words_of, "answer": ""}) + "\n")
    return Recipe.model_validate(
        {
            "model": str(folder / "model"),
            "reward": "bench.train.driver:parity",
            "reward_pool": {"processes": case.reward_processes},
            "data": {"train": str(folder / "train.jsonl")},
            "rollout": {
                "num_workers": case.workers,
                "prompts_per_step": prompts,
                "group_size": case.group_size,
                "max_response_tokens": 2 * case.tokens,
                "policy": case.policy,
            },
            "train": {"steps": case.rl_steps, "ranks": case.ranks, "tokens_per_microbatch": 4 * case.tokens},
            "checkpoint": {"every": 0},
        }
    )


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*.arrow"))


PARTS = {
    "recording": ("trace rows", "figures", WRITER),
    "Ray transfers": ("pickled", "unpickled"),
    "rewards": ("rewards",),
    "packing": ("samples", "collected", RANK),
    "weight sync": (SYNC,),
    "the rest": ("rollouts", "history", "rest"),
}

HOST: Text = (
    "{case.responses} responses, {case.weights_mib} MiB of weights; processor time beside engine and model",
    Table("rows", "tokens: {tokens}; part: {part}; ms per RL step: {ms:.1f}; ms per response: {ms_each:.3f}", left=2),
)

TEXT: Text = (
    "an RL step, by number of workers",
    Table(
        "cases",
        "workers: {workers}; M tokens: {tokens:1e-6*.2f}; driver s: {driver_s:.2f}; trace writer s: {writer_s:.2f}; "
        "first rank s: {rank_s:.2f}; its samples: {rank_samples}; trace MB: {trace_bytes:1e-6*.1f}; "
        "peak MB: {peak_rss_bytes:1e-6*.0f}; before: {start_rss_bytes:1e-6*.0f}",
    ),
    "of the most workers",
    Table(
        "most.seconds",
        "seconds of the driver: {name}; : {value:.3f}",
    ),
    Table(
        "most.bytes",
        "MB that travel: {name}; : {value:1e-6*.2f}",
    ),
)


def text(result: Mapping[str, Any]) -> str:
    """The result for people."""
    return shown({**result, "most": result["cases"][-1]}, TEXT)
