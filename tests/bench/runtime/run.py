"""Gain of speculation on this machine: one engine, the same prompts, every mode in turn within each round."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig

from bench.harness import Goals, Progress, Table, Text, in_turn, ratio, shown
from tltlab.drafters.base import Key
from tltlab.drafters.specs import DrafterSpec, LearnedSpec, NgramSpec, SuffixSpec
from tltlab.errors import ConfigError
from tltlab.files import read_json
from tltlab.policies.policy import LengthAwareBudgetSpec, Policy, load_policy
from tltlab.policies.specs import AdaptiveSpec, BegMabSpec, Bucket, FixedSpec, TableRow, TableSpec
from tltlab.runtime import vllm_options
from tltlab.runtime.data.prompts import Prompt
from tltlab.runtime.engine.engine import Engine
from tltlab.runtime.engine.environment import hardware, versions
from tltlab.runtime.engine.generation import GenerationRequest, Rollout
from tltlab.runtime.engine.vllm import replaced
from tltlab.runtime.engine.vllm.stock import PlainStock
from tltlab.runtime.models.make import MAX_RESPONSE_TOKENS
from tltlab.runtime.models.runs import prompts_of
from tltlab.runtime.rollout.collected import requests_of
from tltlab.strategy import NO_SPECULATION, Strategy
from tltlab.traces.metrics import tail_start

from .figures import NOTHING, Kind, ModeRollout, PlainSteps, stock_goal, summarise

TEMPERATURE = 1.0
MAX_DEPTH = 8
OFF_TOKENS = 64
"""Tokens of each response where engines without drafts are compared."""
BLOCK_S = 2.0
"""Seconds for which stock vLLM runs at a time, recorded or not: a recording writes about once a second."""


@contextmanager
def _recording(stock: PlainStock, path: Path) -> Iterator[None]:
    """Record the engine within the block, as by `vllm_options(None, record=path)`; then complete the trace."""
    from tltlab.runtime.engine.vllm.llm import scheduler_of
    from tltlab.runtime.engine.vllm.scheduler import record_only

    scheduler = scheduler_of(stock.llm)
    with replaced(scheduler.vllm_config, "additional_config", vllm_options(None, record=path)["additional_config"]):
        try:
            record_only(scheduler)
            yield
        finally:
            scheduler.close_recording()


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """A policy under a name. `kind` says what it is compared as; with `learned` its engine holds the draft model too.

    An engine with a draft model runs it in every iteration, drafting or not, so the others run in one without. "stock"
    runs in vLLM without speculation, with its own scheduler and none of tltlab's; "off" in an engine built for drafts.
    """

    name: str
    kind: Kind
    policy: Policy
    learned: bool = False


_suffix, _learned, _ngram = (partial(Strategy.chain, drafter) for drafter in ("suffix", "learned", "ngram"))

# By the batch size from which they are tried. Few arms in narrow buckets: a rollout has a few hundred iterations.
_MODEL_FREE = {
    1: (_suffix(8), _suffix(4)),
    5: (_suffix(8), _suffix(4)),
    17: (_suffix(8), _suffix(4), _ngram(8)),
    65: (_suffix(4), _ngram(4), _suffix(8)),
}
_WITH_LEARNED = {
    1: (_suffix(8), _learned(8)),
    5: (_suffix(8), _learned(8)),
    17: (_suffix(8), _learned(8), _learned(4)),
    65: (_learned(4), _suffix(4)),
}


def modes(*, learned: bool = False) -> list[Mode]:
    """Plain decoding by vLLM and by us, one depth throughout, one for each batch size, some that learn what pays."""
    table = tuple(TableRow(min_batch=b, strategy=_suffix(k)) for b, k in ((1, 8), (33, 4), (129, 2)))
    fixed = {k: Policy(selector=FixedSpec(strategy=_suffix(k))) for k in (1, 2, 4, 8)}
    by_length = _bandit(_MODEL_FREE).model_copy(update={"budget": LengthAwareBudgetSpec()})
    all_modes = [
        Mode(name="stock", kind="stock", policy=load_policy("none")),
        Mode(name="off", kind="off", policy=load_policy("none")),
        *(Mode(name=f"suffix {k}", kind="static", policy=policy) for k, policy in fixed.items()),
        Mode(name="table", kind="table", policy=Policy(selector=TableSpec(rows=table))),
        Mode(name="adaptive", kind="adaptive", policy=Policy(selector=AdaptiveSpec(drafters=("suffix",)))),
        Mode(name="beg-mab", kind="adaptive", policy=_bandit(_MODEL_FREE)),
        Mode(name="beg-mab by length", kind="adaptive", policy=by_length),
    ]
    if learned:
        all_modes.append(Mode(name="beg-mab learned", kind="adaptive", policy=_bandit(_WITH_LEARNED), learned=True))
    return all_modes


def _bandit(arms: Mapping[int, Sequence[Strategy]]) -> Policy:
    """BEG-MAB over `arms`, by the batch size from which they are tried, and no speculation."""
    buckets = tuple(Bucket(min_batch=b, strategies=(*tried, NO_SPECULATION)) for b, tried in arms.items())
    # Here a draft is often kept whole or not at all, so that medians mislead, and one unlucky try costs a rollout.
    return Policy(selector=BegMabSpec(buckets=buckets, epsilon=0.05, reward="relative", statistic="mean", tries=8))


def bench_runtime(
    model: Path,
    *,
    draft: Path | None = None,
    prompts: int = 24,
    group_size: int = 8,
    epochs: int = 2,
    rounds: int = 6,
    max_response_tokens: int = MAX_RESPONSE_TOKENS,
    off_batches: Sequence[int] = (),
    seed: int = 0,
    progress: Progress,
) -> dict[str, Any]:
    """Roll out the first `prompts` training prompts of the folder `model` under every mode, `rounds` times each epoch.

    In epoch 1 drafters know nothing when a rollout begins; in epoch n they know the responses of n - 1 plain rollouts
    of the same prompts. Policies that learn continue learning from round to round, in each epoch on their own; round 0
    warms up and counts in `rows` only. At each of `off_batches` requests of OFF_TOKENS tokens, engines that draft
    nothing are compared with stock vLLM, and stock vLLM that is recorded with itself; with 0 `epochs` nothing else.
    """
    if min(prompts, group_size, epochs + 1, rounds, max_response_tokens) < 1:
        raise ConfigError("prompts, group size, rounds and the cap on response tokens must be at least 1, epochs 0")
    work = prompts_of(model, "train", prompts)
    if len(work) < prompts:
        raise ConfigError(f"{model / 'train.jsonl'} has {len(work)} prompts, {prompts} were asked for")
    if draft is not None and not (draft / "config.json").is_file():
        raise ConfigError(f"{draft} is no folder of a draft model: it has no config.json")
    chosen = modes(learned=draft is not None)
    room = int(AutoConfig.from_pretrained(model).max_position_embeddings)
    cap = min(max_response_tokens, room - max(len(prompt.token_ids) for prompt in work))
    torch.set_num_threads(1)
    bench = _ModeBench(work, group_size, cap)
    drafters: dict[bool, dict[str, DrafterSpec]] = {False: {"ngram": NgramSpec(), "suffix": SuffixSpec()}}
    if draft is not None:
        drafters[True] = drafters[False] | {"learned": LearnedSpec(method="draft_model", model=str(draft))}
    vllm_args = {
        "max_num_seqs": max(prompts * group_size, *off_batches, 1), "max_model_len": room,
        "gpu_memory_utilization": 0.8 / (1 + len(drafters)),
    }  # fmt: skip
    if not torch.cuda.is_available():
        vllm_args["kv_cache_memory_bytes"] = 512 << 20
    try:
        progress(f"starting stock vLLM on {model}")
        bench.stock = PlainStock(str(model), seed=seed, vllm_args=vllm_args)
        for learned, specs in drafters.items():
            progress(f"starting an engine on {model} with the drafters {', '.join(specs)}")
            bench.engines[learned] = Engine(
                str(model), drafters=specs, max_draft_depth=MAX_DEPTH, seed=seed, vllm_args=vllm_args
            )
        progress(f"{len(chosen)} modes, {epochs} epochs, {prompts} prompts x {group_size} of up to {cap} tokens")
        rollouts = bench.measure(chosen, epochs, rounds, seed, progress) if epochs else []
        off = bench.measure_off(off_batches, rounds, seed, progress)
        record_only = bench.measure_recorded(off_batches, rounds, progress)
    finally:
        if bench.stock is not None:
            bench.stock.close()
        for engine in bench.engines.values():
            engine.close()
    summary = summarise([row for row in rollouts if row.round], seed=seed) if epochs else NOTHING
    files = [folder and folder / "report.json" for folder in (model, draft)]
    reports = [read_json(file) if file is not None and file.is_file() else None for file in files]
    return {
        "model": str(model),
        "model_report": reports[0],
        "draft": None if draft is None else str(draft),
        "draft_report": reports[1],
        "prompts": prompts,
        "group_size": group_size,
        "epochs": epochs,
        "rounds": rounds,
        "max_response_tokens": cap,
        "temperature": TEMPERATURE,
        "seed": seed,
        "hardware": hardware(),
        "versions": versions(),
        "policies": {mode.name: mode.policy.model_dump(mode="json") for mode in chosen},
        **summary,
        "goals": [
            *summary["goals"],
            *(stock_goal(f"off, {row['drafters']}", row) for row in off),
            *(stock_goal("record only", row) for row in record_only),
        ],
        "off": off,
        "record_only": record_only,
        "rows": [asdict(row) for row in rollouts],
    }


class _ModeBench:
    """Prompts, engines by `Mode.learned` to roll them out, and the next rollout's number, which is its RL step."""

    def __init__(self, prompts: Sequence[Prompt], group_size: int, cap: int) -> None:
        self.prompts = prompts
        self.group_size = group_size
        self.cap = cap
        self.stock: PlainStock | None = None
        self.engines: dict[bool, Engine] = {}
        self.rl_step = 0

    def measure(
        self, chosen: Sequence[Mode], epochs: int, rounds: int, seed: int, progress: Progress
    ) -> list[ModeRollout]:
        """Every mode in every epoch, `rounds` times after a round 0; what a mode learns in an epoch stays with it."""
        for engine in self.engines.values():
            engine.warm_up(TEMPERATURE)
        history = [self.rollout(self.engines[False]) for _ in range(epochs - 1)]
        learning = {
            (mode.name, epoch): (mode.policy.build(np.random.default_rng([seed, n, epoch])), mode.policy.build_budget())
            for n, mode in enumerate(chosen)
            for epoch in range(1, epochs + 1)
        }
        order = np.random.default_rng(seed)
        done: list[tuple[Mode, int, int, Rollout, float]] = []
        for round_ in range(rounds + 1):
            for epoch in range(1, epochs + 1):
                for n in order.permutation(len(chosen)):
                    mode = chosen[n]
                    decoder: Engine | PlainStock | None = self.stock
                    if mode.kind != "stock":
                        decoder = engine = self.engines[mode.learned]
                        engine.control.set_selector(*learning[mode.name, epoch])
                        engine.forget()
                        engine.remember(self._texts(history[: epoch - 1]))
                    assert decoder is not None
                    began = time.process_time()
                    rollout = self.rollout(decoder)
                    done.append((mode, epoch, round_, rollout, time.process_time() - began))
            seconds = sum(rollout.duration_s for _, _, n, rollout, _ in done if n == round_)
            progress(f"round {round_} of {rounds}: {seconds:.1f} s of rollouts" + (", to warm up" * (not round_)))
        plain = PlainSteps(
            [row for mode, _, _, r, _ in done if mode.kind == "stock" for row in r.iterations.to_pylist()]
        )
        rows = [
            replace(measured(rollout, plain, mode=mode, epoch=epoch, round_=round_), processor_s=processor_s)
            for mode, epoch, round_, rollout, processor_s in done
        ]
        names = [mode.name for mode in chosen]
        return sorted(rows, key=lambda row: (row.epoch, names.index(row.mode), row.round))

    def measure_off(self, batches: Sequence[int], rounds: int, seed: int, progress: Progress) -> list[dict[str, Any]]:
        """Stock vLLM and each engine with no drafts to make, in turn, at each batch size.

        Mean seconds of a rollout with their ratio and its interval, and the median seconds of an iteration.
        """
        order = np.random.default_rng(seed)
        assert self.stock is not None
        engines: dict[str, Engine | PlainStock] = {"stock": self.stock}
        for learned, engine in self.engines.items():
            engine.set_policy(load_policy("none"))
            engines["learned" if learned else "model-free"] = engine
        results = []
        for batch in batches:

            def measure(name: str, number: int, batch: int = batch) -> Rollout:
                return self._generate(engines[name], self._of_fixed_length(batch))

            found = in_turn(engines, measure, rounds, rng=order)
            seconds = {name: [rollout.duration_s for rollout in rollouts] for name, rollouts in found.items()}
            step_s = {
                name: float(
                    np.median(
                        [r["duration"] for of in rollouts for r in of.iterations.to_pylist() if not r["prefill_tokens"]]
                    )
                )
                for name, rollouts in found.items()
            }
            progress(f"batch {batch}: {sum(map(sum, seconds.values())):.1f} s with no drafts")
            stock = seconds.pop("stock")
            results += [
                {
                    "batch": batch, "drafters": name, "stock_s": fmean(stock), "off_s": fmean(off),
                    **ratio(stock, off, order), "stock_step_s": step_s["stock"], "off_step_s": step_s[name],
                }
                for name, off in seconds.items()
            ]  # fmt: skip
        return results

    def measure_recorded(self, batches: Sequence[int], rounds: int, progress: Progress) -> list[dict[str, Any]]:
        """Stock vLLM recorded and not, in turn, the same engine, for BLOCK_S at a time, at each batch size.

        Tokens per second, with the ratio and its interval over rounds. The writes of a recording count.
        """
        results = []
        for batch in batches:
            repeats = 1

            def measure(recorded: bool, number: int, batch: int = batch) -> float:
                nonlocal repeats
                speed, took_s = self._tokens_per_s(batch, repeats, recorded)
                if recorded:
                    repeats = max(repeats, round(repeats * BLOCK_S / took_s))
                return speed

            speeds = in_turn((False, True), measure, rounds)
            progress(f"batch {batch}: {rounds} x {repeats} rollouts recorded and not")
            results.append(
                {
                    "batch": batch, "stock_tokens_per_s": fmean(speeds[False]),
                    "recorded_tokens_per_s": fmean(speeds[True]), **ratio(speeds[True], speeds[False]),
                }
            )  # fmt: skip
        return results

    def _tokens_per_s(self, batch: int, repeats: int, recorded: bool) -> tuple[float, float]:
        """Tokens per second of so many rollouts on stock vLLM, and their seconds."""
        assert self.stock is not None
        with (
            TemporaryDirectory() as folder,
            _recording(self.stock, Path(folder) / "trace") if recorded else nullcontext(),
        ):
            rollouts = [self._generate(self.stock, self._of_fixed_length(batch)) for _ in range(repeats)]
        took_s = sum(rollout.duration_s for rollout in rollouts)
        return repeats * batch * OFF_TOKENS / took_s, took_s

    def _of_fixed_length(self, batch: int) -> list[GenerationRequest]:
        return [
            GenerationRequest(
                key=(self.rl_step, "off", n, 0),
                prompt_token_ids=self.prompts[n % len(self.prompts)].token_ids,
                max_response_tokens=OFF_TOKENS,
                ignore_eos=True,
            )
            for n in range(batch)
        ]

    def rollout(self, engine: Engine | PlainStock) -> Rollout:
        groups = (requests_of(prompt, self.rl_step, self.group_size, self.cap) for prompt in self.prompts)
        return self._generate(engine, [request for group in groups for request in group])

    def _generate(self, engine: Engine | PlainStock, requests: Sequence[GenerationRequest]) -> Rollout:
        self.rl_step += 1
        return engine.generate(requests, rl_step=self.rl_step - 1, temperature=TEMPERATURE)

    def _texts(self, rollouts: Sequence[Rollout]) -> list[tuple[Key, Sequence[int], Sequence[int]]]:
        prompts = {prompt.prompt_id: prompt.token_ids for prompt in self.prompts}
        return [(r.key, prompts[r.key[1]], r.token_ids) for old in rollouts for r in old.responses]


def measured(rollout: Rollout, plain: PlainSteps, *, mode: Mode, epoch: int, round_: int) -> ModeRollout:
    """The figures of a rollout; its tail is `tltlab.traces.metrics.tail_fraction`'s."""
    lengths = [len(response.token_ids) for response in rollout.responses]
    tail = tail_start([response.t_finish for response in rollout.responses])
    verifying = [row for row in rollout.iterations.to_pylist() if row["num_drafted"]]
    return ModeRollout(
        mode=mode.name,
        kind=mode.kind,
        epoch=epoch,
        round=round_,
        num_responses=len(lengths),
        seconds=rollout.duration_s,
        num_tokens=sum(lengths),
        plain_s=plain.seconds(lengths),
        tail_seconds=rollout.duration_s - tail,
        tail_tokens=sum(row["num_generated"] for row in rollout.iterations.to_pylist() if row["t_start"] >= tail),
        tail_plain_s=plain.seconds(lengths, beyond=tail_start(lengths)),
        num_pairs=sum(len(row["accepted_per_request"]) for row in verifying),
        num_accepted=sum(row["num_accepted"] for row in verifying),
        recorder_s=rollout.recorder_s,
        policy_s=rollout.policy_s,
        drafting_s=rollout.drafting_s,
    )


TEXT: Text = (
    "seconds of rollouts; plain: what plain decoding of the same responses would take, from the step times of stock",
    "vLLM's rollouts; a speed-up is its ratio to the seconds, over that of stock vLLM; record, policy, drafting: what",
    "of the seconds went into our book, our choices, drafters beside the scheduler. In epoch 1 drafters know nothing",
    Table(
        "modes",
        "mode: {mode}; epoch: {epoch}; seconds: {seconds:.2f}; tail: {tail_seconds:.2f}; plain: {plain_s:.2f}; "
        "tokens/s: {tokens_per_s:.0f}; accept: {mean_accept_length:.2f}; record: {recorder_share:.1%}; "
        "policy: {policy_share:.1%}; drafting: {drafting_share:.1%}; speed-up: {rollout}; in the tail: {tail}",
    ),
    Table(
        "off",
        "batch: {batch}; no drafts: {drafters}; stock s: {stock_s:.3f}; off: {off_s:.3f}; "
        "speed: {ratio:.2f} [{low:.2f}, {high:.2f}]; ms an iteration: {stock_step_s:1e3*.2f}; "
        "ms off: {off_step_s:1e3*.2f}",
    ),
    Table(
        "record_only",
        "batch: {batch}; tokens/s: {stock_tokens_per_s:.0f}; recorded: {recorded_tokens_per_s:.0f}; "
        "speed: {ratio:.3f} [{low:.3f}, {high:.3f}]",
    ),
    Goals("goals", "{mode}, epoch {epoch}: {ratio:.2f} [{low:.2f}, {high:.2f}] {goal}, goal {wanted:g}"),
)


def text(result: dict[str, Any]) -> str:
    """A row per epoch and mode, then the goals."""
    ratios = {(s["mode"], s["epoch"], s["part"]): s for s in result["speedups"] if s["measure"] == result["judged_by"]}
    modes = [
        row | {part: ratios.get((row["mode"], row["epoch"], part)) for part in ("rollout", "tail")}
        for row in result["modes"]
    ]
    return shown(result | {"modes": modes}, TEXT)
