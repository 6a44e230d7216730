"""Rollouts of given lengths on one engine under each policy, with a model's shape and random weights.

    python -m tltlab.runtime.rollout.played OUT WORKER stock|ours [DEADLINE]

plays the rollouts of `OUT/rehearsal.json` that are not in OUT yet, in its own process, which releases all of a
device's memory. Text does not matter: responses run to their lengths, vLLM accepts drafts at given rates
(`synthetic_rejection`), a model-free drafter drafts as deep as asked at no cost, a learned one is an untrained EAGLE
head. A line of JSON is on disk once its rollout is over, after the rollout itself, which has its own file.
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import numpy as np

from tltlab.config import FrozenModel
from tltlab.drafters.base import Drafter
from tltlab.drafters.specs import Drafters, DrafterSpec, LearnedSpec
from tltlab.files import json_lines, read_json, write_file
from tltlab.own import code_allowed
from tltlab.policies.policy import Policy
from tltlab.policies.specs import ExploreSpec
from tltlab.records import Json
from tltlab.runtime.engine.generation import GenerationRequest, Rollout
from tltlab.strategy import NO_SPECULATION, Strategy

from .session import Visit, visits

PLAN, STOCK = "rehearsal.json", "stock"
"""The plan's file, and the name of vLLM with its own scheduler and no speculation beside policies."""
_SETTLING_TOKENS, _PLAIN_TOKENS = 16, 96
_KV_BLOCK, _LEAST_KV_BYTES = 128, 64 << 20


class RehearsalPlan(FrozenModel):
    """The plan of all engines. `lengths` are tokens by worker and response, `about` describes their source.

    `rates[i]` of a policy is the acceptance probability of its drafts up to token i, counted from 0, () where it never
    drafts; `granted` is the source of the rates, by each drafter that is used. `modules` hold classes that policies
    name. Plain steps are timed at `plain_batches`. `config` is the model's config.json, `kv_token_bytes` the KV cache
    of a token in bf16.
    """

    model: str
    config: Json
    kv_token_bytes: int
    lengths: tuple[tuple[int, ...], ...]
    prompt_tokens: int
    group_size: int
    about: str
    policies: dict[str, Policy]
    modules: tuple[str, ...]
    rates: dict[str, tuple[float, ...]]
    granted: dict[str, str]
    plain_batches: tuple[int, ...] = ()
    rounds: int
    gpus: int
    seed: int

    @property
    def visits(self) -> list[Visit]:
        """Every rollout, in order."""
        return visits(list(self.policies), self.rounds, self.seed)

    @property
    def specs(self) -> dict[str, DrafterSpec]:
        """The drafters that the policies define."""
        return {name: spec for policy in self.policies.values() for name, spec in policy.drafters.items()}

    @property
    def learned(self) -> list[str]:
        """The drafters that are heads."""
        drafters = Drafters(self.specs)
        return [name for name in self.granted if drafters[name].has_network]

    def of_engine(self, stock: bool) -> list[str]:
        """Return the policies that stock vLLM, or tltlab's engine, plays."""
        return [name for name in self.policies if (name == STOCK) == stock]

    def kv_bytes(self, worker: int) -> int:
        """Return the bytes of keys and values, in fp32, of a worker's largest batch, in whole blocks and one more."""
        plain = [_PLAIN_TOKENS] * max(self.plain_batches, default=0)
        batches = [np.array(tokens) + self.prompt_tokens for tokens in (self.lengths[worker], plain)]
        blocks = max(int((-(-(tokens + _SETTLING_TOKENS) // _KV_BLOCK)).sum()) for tokens in batches)
        return max(_LEAST_KV_BYTES, 2 * self.kv_token_bytes * (blocks + 1) * _KV_BLOCK)


def read_plan(out: Path) -> RehearsalPlan:
    """Read the plan in a folder; the modules of its classes were allowed when it was made."""
    value = read_json(out / PLAN)
    with code_allowed(value["modules"]):
        return RehearsalPlan.model_validate(value)


def played(out: Path, engine: str = "engine-*") -> list[Json]:
    """Return the rows on disk, of one engine or all; the last one of each may be torn."""
    return [row for path in sorted(out.glob(f"{engine}.jsonl")) for row in json_lines(path)]


def engine_file(worker: int, stock: bool) -> str:
    """Return the name of an engine's files, without suffix."""
    return f"engine-{STOCK if stock else 'ours'}-{worker}"


def rollout_of(out: Path, visit: Visit, worker: int) -> Rollout:
    """Return a worker's share of a rollout, as its engine returned it."""
    return msgspec.json.decode(_rollout_file(out, visit.rl_step, worker).read_bytes(), type=Rollout)


def _rollout_file(out: Path, rl_step: int, worker: int) -> Path:
    return out / "rollouts" / f"{rl_step}-{worker}.json"


def pending_rollouts(plan: RehearsalPlan, out: Path, worker: int, stock: bool) -> list[Visit]:
    """Return the rollouts that an engine has not played yet."""
    rows = played(out, engine_file(worker, stock))
    done = {row["rl_step"] for row in rows if row["row"] == "rollout"}
    return [v for v in plan.visits if v.policy in plan.of_engine(stock) and v.rl_step not in done]


def requests_of(plan: RehearsalPlan, worker: int, visit: Visit, lengths: list[int]) -> list[GenerationRequest]:
    """Return one request per length; order and random prompts depend on seed, worker and round alone."""
    rng = np.random.default_rng([plan.seed, worker, visit.round])
    prompts = rng.integers(3, plan.config["vocab_size"], (len(lengths), plan.prompt_tokens)).tolist()
    return [
        GenerationRequest(
            key=(visit.rl_step, f"p{worker}-{n // plan.group_size}", n % plan.group_size, 0),
            prompt_token_ids=prompts[n],
            max_response_tokens=lengths[at],
            ignore_eos=True,
        )
        for n, at in enumerate(rng.permutation(len(lengths)))
    ]


def play(plan: RehearsalPlan, out: Path, worker: int, *, stock: bool, deadline: float | None = None) -> Iterator[Json]:
    """Start the engine; yield a row for the start, per plain batch and per rollout. Engine errors are raised.

    No rollout begins after `deadline`, in seconds of `time.time`, or where it would end later by the duration of the
    previous rollout of its policy.
    """
    from tltlab.runtime.engine.vllm.llm import keep_drafts_at

    visits, begun, lengths = pending_rollouts(plan, out, worker, stock), time.perf_counter(), list(plan.lengths[worker])
    labels = {"worker": worker, "engine": STOCK if stock else "ours"}
    with closing(_engine(plan, out, worker, stock)) as engine:

        def generate(visit: Visit, lengths: list[int]) -> Rollout:
            engine.llm.reset_prefix_cache()
            requests = requests_of(plan, worker, visit, lengths)
            rollout: Rollout = engine.generate(requests, rl_step=visit.rl_step, temperature=1.0)
            return rollout

        settling = Visit(rl_step=-1, round=0, policy="")
        if not stock:
            engine.warm_up(1.0)
        # Compilation and other one-time work is done then.
        for name in plan.of_engine(stock):
            if not stock:
                engine.set_policy(plan.policies[name])
            generate(settling, [_SETTLING_TOKENS] * len(lengths))
        yield {"row": "started", **labels, "seconds": time.perf_counter() - begun}
        for batch in plan.plain_batches:
            if not stock:
                engine.set_policy(None)
            steps = generate(settling, [_PLAIN_TOKENS] * batch).iterations.to_pylist()
            seconds = [row["duration"] for row in steps if row["batch"] == batch and not row["prefill_tokens"]]
            yield {"row": "plain step", **labels, "batch": batch, "steps": len(seconds), "median_s": median(seconds)}
        took: dict[str, float] = {}
        for visit in visits:
            if deadline is not None and time.time() + took.get(visit.policy, 0.0) > deadline:
                continue
            if not stock:
                engine.forget()
                engine.set_policy(plan.policies[visit.policy], [plan.seed, worker, visit.rl_step])
                if plan.rates[visit.policy]:
                    keep_drafts_at(engine.llm, plan.rates[visit.policy])
            rollout = generate(visit, lengths)
            took[visit.policy] = rollout.duration_s
            kept = replace(
                rollout, responses=[replace(response, logprobs=()) for response in rollout.responses],
                # Stock vLLM reports only the times of its iterations.
                iterations=[] if stock else rollout.iterations.to_pylist(), decisions=rollout.decisions.to_pylist(),
            )  # fmt: skip
            text = msgspec.json.encode(kept, enc_hook=lambda value: value.tolist())
            write_file(_rollout_file(out, visit.rl_step, worker), text)
            yield {"row": "rollout", **labels, **visit.model_dump(), "seconds": rollout.duration_s}


def _strategies(plan: RehearsalPlan) -> list[Strategy]:
    """Return all strategies that a policy may choose, the deepest last."""
    chosen = {strategy for policy in plan.policies.values() for strategy in policy.strategies}
    return sorted({NO_SPECULATION, *chosen}, key=lambda strategy: (strategy.draft_depth, strategy.drafter))


def _engine(plan: RehearsalPlan, out: Path, worker: int, stock: bool) -> Any:
    """Return stock vLLM, or tltlab's engine with graphs for all strategies; the same arguments otherwise."""
    import torch

    from tltlab.runtime.drafter.heads.kinds import new_head
    from tltlab.runtime.engine.engine import Engine
    from tltlab.runtime.engine.graphs import plan_graphs
    from tltlab.runtime.engine.profile import ForcedDrafter
    from tltlab.runtime.engine.vllm import starting
    from tltlab.runtime.engine.vllm.options import speculative_config
    from tltlab.runtime.engine.vllm.sampling import synthetic_rejection
    from tltlab.runtime.engine.vllm.stock import PlainStock

    strategies, model = _strategies(plan), str(out / "model")
    depth, most = strategies[-1].draft_depth, max(len(plan.lengths[worker]), *plan.plain_batches, 1)
    longest = max(*plan.lengths[worker], _PLAIN_TOKENS if plan.plain_batches else _SETTLING_TOKENS)
    arguments: Json = {
        "load_format": "dummy", "skip_tokenizer_init": True, "max_num_seqs": most,
        "max_model_len": plan.prompt_tokens + longest + depth + 1,
    }  # fmt: skip
    if not plan.gpus:
        arguments["kv_cache_memory_bytes"] = plan.kv_bytes(worker)
    if stock:
        return PlainStock(model, seed=plan.seed, vllm_args=arguments)
    drafters: dict[str, DrafterSpec | Drafter] = {name: ForcedDrafter() for name in plan.granted}
    for name in plan.learned:
        head = out / f"head-{worker}"
        new_head(model, "eagle", plan.seed).to(torch.bfloat16).save(head)
        drafters[name] = LearnedSpec(method="eagle", model=str(head))
    if depth:
        rates = max(plan.rates.values(), key=len)
        with starting():
            synthetic = synthetic_rejection([*rates, *(0.0,) * (depth - len(rates))])
        arguments["speculative_config"] = {**(speculative_config(drafters, depth) or {}), **synthetic}
    graphs = None
    if plan.gpus:
        everything = Policy(selector=ExploreSpec(strategies=tuple(strategies)))
        graphs = plan_graphs(
            everything,
            most,
            drafters=plan.specs,
            runner="V1" if len(drafters) > len(plan.learned) else "V2",
            any_lengths=True,
            plain=True,
        )
    return Engine(
        model, worker=worker, drafters=drafters, max_draft_depth=depth, seed=plan.seed, graphs=graphs,
        vllm_args=arguments,
    )  # fmt: skip


def main(out: Path, worker: int, stock: bool, deadline: float | None) -> None:
    """Play and append a line for each row."""
    with (out / f"{engine_file(worker, stock)}.jsonl").open("a", encoding="utf-8") as file:
        # Ends a torn line.
        file.write("\n" if file.tell() else "")
        for row in play(read_plan(out), out, worker, stock=stock, deadline=deadline):
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())


if __name__ == "__main__":
    folder, number, kind, *until = sys.argv[1:]
    main(Path(folder), int(number), kind == STOCK, float(until[0]) if until else None)
