"""Step times of a real engine over batch, draft depth and context: the table that `tltlab calibrate` reads.

A cell is a batch size, a draft depth and a prompt length. Its requests are prefilled, decode with exactly that depth
until enough iterations were timed, and are aborted. Cells are visited twice, in random orders, so that drift of the
machine's speed appears in the spread instead of biasing the table.
"""

import time
from collections.abc import Callable, Sequence
from itertools import product

import numpy as np
import pandas as pd
import torch

from tltlab.drafters.base import Draft, Key, TextDrafter
from tltlab.drafters.specs import LearnedSpec
from tltlab.errors import ConfigError, RunError
from tltlab.policies.policy import Policy
from tltlab.policies.simple import Fixed
from tltlab.policies.specs import ExploreSpec
from tltlab.records import Fields, Json, frozen
from tltlab.runtime.drafter.heads.target import read_config
from tltlab.strategy import Strategy

from .engine import Engine
from .generation import GenerationRequest, Rollout, Until
from .graphs import GraphPlan, Runner, plan_graphs
from .tracker import Iteration

TEMPERATURE = 1.0
VISITS = 2
WARM_UP = 3
"""Iterations after prefill that are not timed: the first one verifies the prefill's drafts."""
_FEWEST = 5
_PREFILLS = 3
"""Prefills per visit and cell, each of new prompts."""


class ForcedDrafter(TextDrafter):
    """Drafts exactly as deep as asked, at no cost to the device: the start of the text, repeated."""

    def propose(self, key: Key, depth: int) -> Draft:
        text = self.texts[key][:depth]
        return Draft((text * (depth // len(text) + 1))[:depth], 0.0)


@frozen
class Load:
    """Requests in the batch, tokens drafted for each, tokens in each prompt; `prefill` times the prompts alone."""

    batch: int
    depth: int
    context: int
    prefill: bool = False


@frozen
class ProfileGrid:
    """All cells of some batches, depths and contexts, and `iterations` to time in each, over all visits."""

    batches: tuple[int, ...]
    depths: tuple[int, ...]
    contexts: tuple[int, ...]
    iterations: int = 30

    def __post_init__(self) -> None:
        for name, values, least in (
            ("batches", self.batches, 1),
            ("depths", self.depths, 0),
            ("contexts", self.contexts, 1),
            ("iterations", (self.iterations,), VISITS),
        ):
            if not values or min(values) < least or len(set(values)) < len(values):
                raise ConfigError(f"{name} are {list(values)}: give whole numbers from {least} up, each once")

    @property
    def cells(self) -> list[Load]:
        decoding = [Load(batch=b, depth=d, context=c) for b, d, c in product(self.batches, self.depths, self.contexts)]
        # Prefills of two batches, so that a fit with either left out still has data.
        few = sorted(self.batches)[:2]
        return decoding + [Load(batch=b, depth=0, context=c, prefill=True) for b, c in product(few, self.contexts)]

    @property
    def per_visit(self) -> int:
        return -(-self.iterations // VISITS)

    def response_tokens(self, cell: Load, token_budget: int) -> int:
        """Cap of a cell's responses: none ends before the last timed iteration, even if every draft is accepted.

        `token_budget` is the tokens of an iteration; requests prefilled early decode during the other prefills.
        """
        if cell.prefill:
            return 1
        for_prefill = max(1, token_budget - cell.batch * (cell.depth + 1))
        prefills = -(-cell.batch * cell.context // for_prefill)
        return (cell.depth + 1) * (prefills + WARM_UP + self.per_visit + 3)

    @property
    def longest(self) -> int:
        """Most tokens of the longest request, prefilled in pieces of 2048."""
        return max(c.context + self.response_tokens(c, 2048) for c in self.cells)


@frozen
class Profile:
    """Result of a measurement.

    `table` has the columns of `tltlab.calibration.iterations`, `drafter`, `scheduling`, and `draft_seconds`,
    `num_samples` and `spread`, the interquartile range of its seconds. `skipped` lists the cells that were not
    measured, with the reason (`why`). `spread` is the median over rows of spread / seconds, `repeat_error` the median
    relative difference of the two visits' medians, None where unknown.
    """

    table: pd.DataFrame
    skipped: list[Json]
    seconds: float
    spread: float
    repeat_error: float | None


def start_engine(
    model: str, grid: ProfileGrid, drafter: tuple[str, LearnedSpec] | None, vllm_args: Fields, seed: int = 0
) -> Engine:
    """Start an engine for the grid; `drafter` is a learned one and its name, by default drafts are forced, as "ngram".

    `vllm_args` override max_num_seqs, by default the largest batch, and max_model_len, by default the longest request.
    On a GPU every depth has graphs, as in a training run: vLLM's own are for the deepest alone, so plain steps would
    not compare.
    """
    name, spec = drafter if drafter is not None else ("ngram", ForcedDrafter())
    # Asynchronous iterations do not tell how long drafting took.
    args: Json = {"max_num_seqs": max(grid.batches), "async_scheduling": False} | dict(vllm_args)
    positions = getattr(read_config(model).get_text_config(), "max_position_embeddings", None) or grid.longest
    args.setdefault("max_model_len", min(grid.longest, int(positions)))
    graphs = graphs_for(grid, name, drafter) if torch.cuda.is_available() else None
    return Engine(
        model, drafters={name: spec}, max_draft_depth=max(grid.depths), seed=seed, graphs=graphs, vllm_args=args
    )


def graphs_for(grid: ProfileGrid, name: str, drafter: tuple[str, LearnedSpec] | None) -> GraphPlan:
    """Return graphs of every depth of a grid at all batch sizes, for drafts of the drafter `name`."""
    policy = Policy(
        selector=ExploreSpec(strategies=tuple(Strategy.chain(name, depth) for depth in grid.depths)),
        drafters={} if drafter is None else dict([drafter]),
    )
    # The V2 runner's schedule has a batch size for each depth.
    most = max(*grid.batches, len(grid.depths) + 1)
    runner: Runner = "V1" if drafter is None else "V2"
    return plan_graphs(policy, most, runner=runner, any_lengths=True, plain=True, spacing=1.25)


def profile(
    engine: Engine, grid: ProfileGrid, *, seed: int = 0, report: Callable[[str], None] = lambda message: None
) -> Profile:
    """Measure every cell of the grid that fits the engine; ConfigError where none does.

    Rows carry the context at the time of measurement: prompts and generated tokens.
    """
    return _Profiler(engine, grid, np.random.default_rng(seed), report).run()


def engine_settings(engine: Engine) -> Json:
    """Settings of the engine that step times depend on."""
    config = engine.llm.llm_engine.vllm_config
    return {
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "enforce_eager": config.model_config.enforce_eager,
        "cudagraph_mode": config.compilation_config.cudagraph_mode.name,
        "max_model_len": config.model_config.max_model_len,
        "max_num_seqs": config.scheduler_config.max_num_seqs,
        "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
        "block_size": config.cache_config.block_size,
        # One block is vLLM's own.
        "kv_cache_tokens": (config.cache_config.num_gpu_blocks - 1) * config.cache_config.block_size,
        "tensor_parallel_size": config.parallel_config.tensor_parallel_size,
        "threads": torch.get_num_threads(),
        "temperature": TEMPERATURE,
        "scheduling": "asynchronous" if config.scheduler_config.async_scheduling else "synchronous",
    }


class _Profiler:
    def __init__(self, engine: Engine, grid: ProfileGrid, rng: np.random.Generator, report: Callable[[str], None]):
        self.engine, self.grid, self.rng, self.report = engine, grid, rng, report
        self.settings = engine_settings(engine)
        (self.drafter,) = engine.drafters
        self.vocabulary = engine.llm.llm_engine.vllm_config.model_config.get_vocab_size()
        # Both visits have the same prompts, which prefix caching keeps: only decoding is timed with them.
        self.prompts = rng.integers(0, self.vocabulary, (max(grid.batches), max(grid.contexts))).tolist()
        self.visits = 0

    def run(self) -> Profile:
        started = time.perf_counter()
        reasons = {cell: self._misfit(cell) for cell in self.grid.cells}
        cells = [cell for cell in self.grid.cells if reasons[cell] is None]
        if not any(not cell.prefill for cell in cells):
            raise ConfigError(f"no cell of the grid fits this engine; the first: {next(iter(reasons.values()))}")
        self.engine.warm_up(TEMPERATURE)
        timed: dict[Load, list[list[Fields]]] = {cell: [] for cell in cells}
        for visit in range(VISITS):
            for number, at in enumerate(self.rng.permutation(len(cells))):
                timed[cells[at]].append(self._visit(cells[at]))
                if number % max(1, len(cells) // 4) == 0:
                    self.report(f"visit {visit + 1} of {VISITS}: {number + 1} of {len(cells)} cells")
        fewest = min(_FEWEST, self.grid.iterations)
        for cell, visits in timed.items():
            if (num := sum(map(len, visits))) < (VISITS if cell.prefill else fewest):
                reasons[cell] = f"only {num} iterations had the batch and depth of this cell"
        measured = [cell for cell in cells if reasons[cell] is None]
        if all(cell.prefill for cell in measured):
            raise RunError(f"no cell was measured; the first: {reasons[cells[0]]}")
        table = pd.DataFrame([self._row(cell, [row for rows in timed[cell] for row in rows]) for cell in measured])
        medians = [[np.median([r["duration"] for r in rows]) for rows in timed[cell] if rows] for cell in measured]
        repeat_errors = [abs(pair[1] / pair[0] - 1.0) for pair in medians if len(pair) == VISITS]
        return Profile(
            table=table,
            skipped=[
                {"batch": c.batch, "draft_depth": c.depth, "context": c.context, "prefill": c.prefill, "why": reason}
                for c, reason in reasons.items()
                if reason is not None
            ],
            seconds=time.perf_counter() - started,
            spread=float((table["spread"] / table["seconds"]).median()),
            repeat_error=float(np.median(repeat_errors)) if repeat_errors else None,
        )

    def _misfit(self, cell: Load) -> str | None:
        """Why the engine cannot measure a cell; None where it can."""
        length = cell.context + self.grid.response_tokens(cell, self.settings["max_num_batched_tokens"])
        blocks = -(-(length + self.engine.max_draft_depth) // self.settings["block_size"])
        limits = (
            (cell.batch, "max_num_seqs", "requests"),
            (length, "max_model_len", "tokens in a request"),
            (cell.batch * blocks * self.settings["block_size"], "kv_cache_tokens", "tokens of KV cache"),
            (cell.batch * cell.context if cell.prefill else 0, "max_num_batched_tokens", "tokens prefilled at once"),
        )
        for needed, name, unit in limits:
            if needed > self.settings[name]:
                place = f"batch {cell.batch}, depth {cell.depth}, context {cell.context}"
                return f"{place}: {needed} {unit}, {name} is {self.settings[name]}"
        return None

    def _visit(self, cell: Load) -> list[Fields]:
        """Return the rows of one visit's iterations that match the cell exactly."""
        self.engine.set_policy(Fixed(Strategy.chain(self.drafter, cell.depth)))
        if cell.prefill:
            fresh = self.rng.integers(0, self.vocabulary, (_PREFILLS, cell.batch, cell.context)).tolist()
            rows = [row for prompts in fresh for row in self._generate(cell, prompts).iterations.to_pylist()]
            return [row for row in rows if row["prefill_tokens"] == cell.batch * cell.context]
        timed: set[int] = set()

        def enough(_: Sequence[Key]) -> bool:
            timed.update(each.number for each in self.engine.control.tracker.ended[-1:] if _is_of(each, cell))
            return len(timed) >= WARM_UP + self.grid.per_visit

        prompts = [prompt[: cell.context] for prompt in self.prompts[: cell.batch]]
        iterations = self._generate(cell, prompts, enough).iterations.to_pylist()
        return [row for row in iterations if row["iteration"] in timed][WARM_UP:][: self.grid.per_visit]

    def _generate(self, cell: Load, prompts: list[list[int]], until: Until | None = None) -> Rollout:
        self.visits += 1
        step, cap = self.visits, self.grid.response_tokens(cell, self.settings["max_num_batched_tokens"])
        requests = [
            GenerationRequest(key=(step, "profile", n, 0), prompt_token_ids=p, max_response_tokens=cap, ignore_eos=True)
            for n, p in enumerate(prompts)
        ]
        return self.engine.generate(requests, rl_step=step, temperature=TEMPERATURE, until=until)

    def _row(self, cell: Load, rows: Sequence[Fields]) -> Json:
        seconds = np.array([row["duration"] for row in rows])
        return {
            "batch": cell.batch,
            "tokens_to_verify": cell.depth + 1,
            "context_tokens": float(np.median([row["context_tokens"] for row in rows])),
            "seconds": float(np.median(seconds)),
            "draft_depth": cell.depth,
            "top_k": 1,
            "prefill_tokens": cell.batch * cell.context if cell.prefill else 0,
            "drafter": self.drafter if cell.depth else "none",
            "scheduling": self.settings["scheduling"],
            "draft_seconds": float(np.median([row["draft_duration"] or 0.0 for row in rows])),
            "num_samples": len(rows),
            "spread": float(np.subtract(*np.percentile(seconds, [75, 25]))),
        }


def _is_of(iteration: Iteration, cell: Load) -> bool:
    return (
        iteration.batch == cell.batch
        and not iteration.prefill_tokens
        and iteration.verified.strategy.draft_depth == cell.depth == iteration.next_depth
        and sum(iteration.drafted) == cell.batch * cell.depth
    )
