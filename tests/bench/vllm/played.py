"""A worker played to vLLM's scheduler, so that what ours costs in an iteration can be timed without a model.

The tokens are those of texts made up beforehand, and a draft is kept as far as it agrees with them. A clock of this
thread's processor time runs while code of tltlab does and stands while vLLM's own does, wherever one calls the other.
"""

from __future__ import annotations

import copy
import gc
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from tltlab.drafters import grams
from tltlab.drafters.specs import LearnedSpec
from tltlab.policies.policy import Policy
from tltlab.records import Json
from tltlab.runtime.engine.tracker import Stopwatch
from tltlab.runtime.engine.vllm.capture import Capture, RunnerCapture
from tltlab.runtime.engine.vllm.options import vllm_options
from tltlab.runtime.engine.vllm.scheduler import PolicyScheduler, record_only

_WARM_UP = 12
_FEWEST = 10
_BLOCK = 16
_HIDDEN = 256
_ITERATION_S, _TOKEN_S = 1e-2, 1e-4
_PARTS = {
    "schedule": "schedule",
    "_update_after_schedule": "schedule",
    "update_from_output": "outputs",
    "update_draft_token_ids": "drafts",
    "_draft": "drafts",
}
"""The part of an iteration that a method belongs to; requests come and go in the others."""
_VLLM, _REQUESTS, _CAPTURED = "vllm", "requests", "capture"
_OF_REQUESTS = ("add_request", "_update_request_as_session", "_free_request", "reset_prefix_cache")
_WRAPPED = (*_OF_REQUESTS, *(name for name in _PARTS if name != "_draft"))
"""The methods that `record_only` wraps."""


@dataclass(kw_only=True)
class World:
    """Common data of all cases: vLLM's configurations of `model`, and the texts of the requests, some per prompt.

    A response has `response_tokens`; `group` requests in a row have a prompt. Traces go into `folder`.
    """

    folder: Path
    model: str
    prompts: Sequence[list[int]]
    texts: Sequence[Sequence[list[int]]]
    max_batch: int
    group: int
    response_tokens: int
    num_engines: int = 0
    _configs: Json = field(default_factory=dict)

    def config(self, speculative: Json | None) -> Any:
        """vLLM's configuration of an engine with this speculative configuration, or that speculates not."""
        name = repr(speculative)
        if name not in self._configs:
            arguments = EngineArgs(
                model=self.model,
                skip_tokenizer_init=True,
                load_format="dummy",
                dtype="float32",
                enforce_eager=True,
                enable_prefix_caching=False,
                async_scheduling=False,
                max_num_seqs=self.max_batch,
                max_model_len=2 * self.response_tokens,
                max_num_batched_tokens=self.max_batch * 2 * self.response_tokens,
                kv_cache_memory_bytes=1 << 20,
                block_size=_BLOCK,
                speculative_config=speculative,
            )
            self._configs[name] = arguments.create_engine_config()
        return copy.copy(self._configs[name])

    def request(self, number: int) -> tuple[tuple[int, str, int, int], list[int], list[int]]:
        """Key, prompt and text of a request."""
        visit, place = divmod(number, self.max_batch)
        group, sample = divmod(place, self.group)
        return (
            (0, f"p{group}", sample + self.group * visit, 0),
            self.prompts[group],
            self.texts[group][(sample + self.group * visit) % len(self.texts[group])],
        )


class _Clock:
    """Microseconds of this thread's processor time by part, but what asking takes; one part runs at a time."""

    def __init__(self) -> None:
        self.us: defaultdict[str, float] = defaultdict(float)
        self._part, self._since = _VLLM, time.thread_time_ns()
        self._asking_us = 0.0
        self._asking_us = self._empty_us()

    def switch(self, part: str) -> str:
        """Let `part` run from now on; the one that ran."""
        now = time.thread_time_ns()
        self.us[self._part] += (now - self._since) / 1e3 - self._asking_us
        before, self._part, self._since = self._part, part, now
        return before

    def _empty_us(self) -> float:
        """Least measured time of a method that does nothing."""
        nothing = self.switching(lambda: None, "")
        least = math.inf
        for _ in range(200):
            nothing()
            least = min(least, self.us.pop(""))
        self.us.clear()
        return least

    def switching(self, inner: Callable[..., Any], part: str) -> Callable[..., Any]:
        """The function or method `inner`, while which `part` runs."""

        def function(*args: Any, **kwargs: Any) -> Any:
            before = self.switch(part)
            try:
                return inner(*args, **kwargs)
            finally:
                self.switch(before)

        return function


def _policy_scheduler(scheduler_cls: Any, clock: _Clock, **arguments: Any) -> Any:
    """A scheduler of this class, with the clock switched wherever what is ours and the class below call each other."""
    (stock_cls,) = scheduler_cls.__bases__
    hooks = [
        n for n, value in vars(scheduler_cls).items() if callable(value) and hasattr(stock_cls, n) and n[:2] != "__"
    ]
    stock = {name: clock.switching(getattr(stock_cls, name), _VLLM) for name in (*hooks, *_OF_REQUESTS)}
    ours = {n: clock.switching(getattr(scheduler_cls, n), _PARTS.get(n, _REQUESTS)) for n in (*hooks, "_draft")}
    scheduler = type("Timed", (scheduler_cls, type("Stock", (stock_cls,), stock)), ours)(**arguments)
    _time_wrapped(scheduler, clock, _OF_REQUESTS)
    return scheduler


def _recorded_scheduler(clock: _Clock, **arguments: Any) -> Any:
    """vLLM's own scheduler, recorded, with the clock switched wherever it and what is ours call each other."""
    stock = {name: clock.switching(getattr(Scheduler, name), _VLLM) for name in _WRAPPED}
    scheduler = type("Stock", (Scheduler,), stock)(**arguments)
    record_only(scheduler)
    _time_wrapped(scheduler, clock, _WRAPPED)
    return scheduler


def _time_wrapped(scheduler: Any, clock: _Clock, names: Sequence[str]) -> None:
    for name in names:
        setattr(scheduler, name, clock.switching(getattr(scheduler, name), _PARTS.get(name, _REQUESTS)))


class PlayedEngine:
    """The scheduler under `policy` and the worker that is played to it, with `batch` requests at a time.

    The policy has a `learned` drafter or not; in its place a trace is recorded, or next to it hidden states are
    captured. `cold` empties the processor's caches before each call.
    """

    def __init__(
        self,
        world: World,
        policy: Policy,
        batch: int,
        *,
        learned: bool = False,
        record: bool = False,
        capture: bool = False,
        cold: bool = False,
    ) -> None:
        self.world = world
        self.batch = batch
        self.clock = _Clock()
        self._now_s = 0.0
        self._ages: dict[str, int] = {}
        self._number = 0
        self._sweep = np.zeros(1 << 24, np.uint32) if cold else None
        world.num_engines += 1
        options = vllm_options(
            None if record else policy,
            drafters={"learned": LearnedSpec(method="draft_model", model=world.model)} if learned else None,
            record=world.folder / f"trace-{world.num_engines}" if record else None,
        )
        config = world.config(options.get("speculative_config"))
        config.additional_config = options["additional_config"]
        make = partial(_recorded_scheduler if record else partial(_policy_scheduler, PolicyScheduler), self.clock)
        self.scheduler: Any = make(
            vllm_config=config,
            kv_cache_config=self._blocks(config),
            structured_output_manager=StructuredOutputManager(config),
            block_size=_BLOCK,
            hash_block_size=_BLOCK,
        )
        self.control = self.scheduler.control
        self.control.deciding = Stopwatch(time.thread_time)
        if not record:
            # Speculation pays by this clock, so that a policy that learns continues drafting.
            self.control.tracker.clock = lambda: self._now_s
            self.control.begin(0)
        self._runner = _capture(self.scheduler) if capture else None
        for n in range(batch):
            # Ages are even, as in the middle of a rollout; a captured one begins at its beginning.
            self._add(0 if capture else n * world.response_tokens // batch)

    def _blocks(self, config: Any) -> Any:
        num_blocks = self.batch * (2 * self.world.response_tokens // _BLOCK) + 64
        config.cache_config.num_gpu_blocks = num_blocks
        spec = FullAttentionSpec(block_size=_BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
        return KVCacheConfig(
            num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
        )

    def _add(self, age: int) -> None:
        key, prompt, text = self.world.request(self._number)
        name = str(self._number)
        self._number += 1
        self._ages[name] = age
        params = SamplingParams(max_tokens=len(text), ignore_eos=True, extra_args={"tltlab": list(key)})
        self.scheduler.add_request(
            Request(request_id=name, prompt_token_ids=list(prompt), sampling_params=params, pooling_params=None)
        )

    def measure(self, iterations: int, *, drafting: bool) -> Json | None:
        """The row of this case; None where it is to draft and hardly ever does."""
        for _ in range(_WARM_UP):
            self.iterate()
        if drafting:
            # What the requests brought along is no iteration's.
            for fed in self.control.drafters._drafter_feeds.values():
                fed.feed(self.control.live.values())
                fed.drafter.catch_up()
        gc.collect()
        gc.freeze()
        rows: list[Json] = []
        try:
            for n in range(iterations + iterations // 2 * drafting):
                # Machines get slower and faster: what indices take is measured in between.
                with self._index_timed(drafting and n % 3 == 2) as index_us:
                    row = self.iterate()
                if row["speculates"] == drafting:
                    rows.append(row | {"index_us": index_us})
        finally:
            gc.unfreeze()
        timed = [row for row in rows if not row["index_us"]]
        if len(timed) < _FEWEST:
            return None
        by_part = {part: np.array([row["us"][part] for row in timed]) for part in dict.fromkeys(_PARTS.values())}
        ours = np.array([_own_us(row) for row in timed])
        index = [row["index_us"] for row in rows if row["index_us"]]
        self.scheduler.close_recording()
        return {
            "us_per_iteration": float(np.median(ours)),
            "p99_us": float(np.percentile(ours, 99)),
            "mean_us": float(ours.mean()),
            "vllm_us": float(np.median([row["us"][_VLLM] for row in timed])),
            "parts": {part: float(np.median(us)) for part, us in by_part.items()}
            | {"policy": float(np.median([row["policy"] for row in timed]))}
            | {part: float(np.mean([row["us"][part] for row in timed])) for part in (_REQUESTS, _CAPTURED)},
            "lookup_us": float(np.median([us["lookup"] for us in index])) if index else 0.0,
            "insert_us": float(np.median([us["insert"] for us in index])) if index else 0.0,
            **_beyond_us(rows),
            "iterations": len(timed),
            "drafted": float(np.mean([row["drafted"] for row in timed])),
            "accepted": float(np.mean([row["accepted"] for row in timed])),
        }

    def iterate(self) -> Json:
        """One iteration: what each part took, and whether it verified drafts and made new ones."""
        us: defaultdict[str, float] = defaultdict(float)
        scheduler = self.scheduler
        deciding_s = self.control.seconds[1]
        # What is played between the calls is nobody's.
        for _ in range(self.batch - len(scheduler.requests)):
            self._call(us, self._add, 0)
        output = self._call(us, scheduler.schedule)
        ids = list(output.num_scheduled_tokens)
        drafts = output.scheduled_spec_decode_tokens
        sampled = [self._tokens(i, drafts.get(i, ())) for i in ids]
        drafted = sum(map(len, drafts.values()))
        accepted = sum(len(tokens) - 1 for i, tokens in zip(ids, sampled, strict=True) if drafts.get(i))
        self._now_s += _ITERATION_S + _TOKEN_S * drafted / len(ids)
        if self._runner is not None:
            self._call(us, self.clock.switching(self._runner.execute_model, _CAPTURED), output)
            self._runner.ran(output.num_scheduled_tokens)
            self._call(us, self.clock.switching(self._runner.sample_tokens, _CAPTURED))
        depth = output.num_spec_tokens_to_schedule
        learned = [self._learned(i, depth) if scheduler.num_spec_tokens else [] for i in ids]
        index = {name: n for n, name in enumerate(ids)}
        result = ModelRunnerOutput(req_ids=list(ids), req_id_to_index=index, sampled_token_ids=sampled)
        self._call(us, scheduler.update_from_output, output, result)
        strategy, speculates = self.control.tracker.in_force.strategy, False
        if scheduler.num_spec_tokens:
            speculates = bool(drafts) and strategy.speculates
            self._call(us, scheduler.update_draft_token_ids, DraftTokenIds(list(ids), learned))
        return {
            "us": us,
            "policy": (self.control.seconds[1] - deciding_s) * 1e6,
            "speculates": speculates,
            "strategy": strategy,
            "drafted": drafted,
            "accepted": accepted,
        }

    def _call(self, us: defaultdict[str, float], function: Callable[..., Any], *args: Any) -> Any:
        """Call, and add what it took, by part, to `us`."""
        if self._sweep is not None:
            self._sweep += 1
        clock = self.clock
        clock.switch(_VLLM)
        clock.us.clear()
        result = function(*args)
        clock.switch(_VLLM)
        for part, part_us in clock.us.items():
            us[part] += part_us
        return result

    def _tokens(self, name: str, draft: Sequence[int]) -> list[int]:
        """Tokens that the target accepts of a draft: those that agree with the text, and one more."""
        text = self.world.request(int(name))[2]
        at = len(self.scheduler.requests[name]._output_token_ids)
        if at == 0 and self._ages[name]:
            return text[: self._ages[name]]
        kept = 0
        while kept < len(draft) and at + kept < len(text) - 1 and draft[kept] == text[at + kept]:
            kept += 1
        return text[at : at + kept + 1]

    def _learned(self, name: str, depth: int) -> list[int]:
        """A learned drafter's draft: right, then wrong."""
        text = self.world.request(int(name))[2]
        at = len(self.scheduler.requests[name]._output_token_ids)
        draft, right = text[at + 1 : at + 1 + depth], at % (depth + 1)
        return [token if n < right else token + 1 for n, token in enumerate(draft)]

    @contextmanager
    def _index_timed(self, active: bool) -> Iterator[dict[str, float]]:
        """Within, if `active`, microseconds that the drafters' indices take for look-ups and insertions.

        What timing a call takes is left out here, but not by the clock.
        """
        seconds: dict[str, list[float]] = {"lookup": [0.0], "insert": [0.0]}
        index_us: dict[str, float] = {}
        if not active:
            yield index_us
            return
        drafters = [fed.drafter for fed in self.control.drafters._drafter_feeds.values()]
        trees = [tree for drafter in drafters for tree in getattr(drafter, "_trees", {}).values() if tree.index]
        for tree in trees:
            tree.index = _TimedIndex(tree.index, {"speculate": seconds["lookup"], "extend": seconds["insert"]})
        loops = grams.propose, grams.add
        grams.propose, grams.add = map(_timed_call, loops, (seconds["lookup"], seconds["insert"]))
        yield index_us
        index_us.update({part: total * 1e6 for part, (total,) in seconds.items()})
        for tree in trees:
            if tree.index is not None:
                tree.index = tree.index._index
        grams.propose, grams.add = loops


def _own_us(row: Json) -> float:
    return float(sum(us for part, us in row["us"].items() if part != _VLLM))


def _beyond_us(rows: Sequence[Json]) -> dict[str, float]:
    """Time of tltlab in an iteration beyond its indices: the difference of medians by strategy, weighted by how often.

    With its standard error: either median is several times the difference.
    """
    plain: defaultdict[Any, list[float]] = defaultdict(list)
    index: defaultdict[Any, list[float]] = defaultdict(list)
    for row in rows:
        if row["index_us"]:
            index[row["strategy"]].append(sum(row["index_us"].values()))
        else:
            plain[row["strategy"]].append(_own_us(row))
    strategies = plain.keys() & index.keys()
    if not strategies:
        return {"beyond_us": 0.0, "beyond_se_us": 0.0}
    beyond, errors, weights = [], [], []
    for strategy in strategies:
        beyond.append(np.median(plain[strategy]) - np.median(index[strategy]))
        errors.append(math.hypot(_error_of_median(plain[strategy]), _error_of_median(index[strategy])))
        weights.append(len(plain[strategy]))
    shares = np.array(weights) / sum(weights)
    return {"beyond_us": float(shares @ beyond), "beyond_se_us": float(np.linalg.norm(shares * errors))}


def _error_of_median(values: Sequence[float]) -> float:
    """Standard error of a median, from the quartiles, since an iteration that other programs slow down lies far out."""
    low, high = np.percentile(values, [25, 75])
    return float(1.2533 * (high - low) / 1.349 / math.sqrt(len(values)))


class _TimedIndex:
    """Stands before an index and adds up the seconds of some of its calls."""

    def __init__(self, index: Any, seconds_by_call: dict[str, list[float]]) -> None:
        self._index = index
        for name, seconds in seconds_by_call.items():
            setattr(self, name, _timed_call(getattr(index, name), seconds))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._index, name)


def _timed_call(function: Any, seconds: list[float]) -> Any:
    clock = time.thread_time
    asking_s = min(-clock() + clock() for _ in range(100))

    def call(*args: Any) -> Any:
        began = clock()
        result = function(*args)
        seconds[0] += clock() - began - asking_s
        return result

    return call


class _Runner:
    """The part of a model runner that hidden states are taken from."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self._computed: dict[str, int] = {}

    def execute_model(self, output: SchedulerOutput) -> None:
        """Nothing is computed here."""

    def sample_tokens(self) -> None:
        """Nothing is sampled here."""

    def ran(self, scheduled: dict[str, int]) -> None:
        """A forward pass over what was scheduled is over."""
        starts = [self._computed.get(name, 0) for name in scheduled]
        counts = list(scheduled.values())
        self._computed.update({name: at + n for name, at, n in zip(scheduled, starts, counts, strict=True)})
        positions = np.concatenate([np.arange(at, at + n) for at, n in zip(starts, counts, strict=True)])
        self.positions = torch.from_numpy(positions)
        self.input_batch = SimpleNamespace(num_reqs=len(scheduled), req_ids=list(scheduled))
        self.query_start_loc = SimpleNamespace(np=np.concatenate([[0], np.cumsum(counts)]))
        states = torch.zeros(sum(counts), _HIDDEN)
        self.execute_model_state = SimpleNamespace(hidden_states=states, aux_hidden_states=None)


def _capture(scheduler: Any) -> _Runner:
    """Have `scheduler` capture hidden states from a runner that is played."""
    runner = _Runner()
    rows = RunnerCapture(runner, lambda sequence: None, max_bytes=1 << 30, max_positions=4096, max_tokens=1 << 20)
    rows.attach()
    scheduler.capture = Capture(None)  # it is never idle
    scheduler.control.observers += (scheduler.capture,)
    return runner
