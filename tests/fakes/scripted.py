"""Engines, trainers and Ray played in the driver's process, and a meter of the seconds and bytes they cost it."""

from __future__ import annotations

import itertools
import pickle
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import wraps
from typing import Any, ClassVar
from unittest.mock import patch
from weakref import WeakValueDictionary

import numpy as np
import ray
import torch

from tltlab.runtime.engine.generation import GenerationRequest, GenerationResponse, Rollout
from tltlab.runtime.engine.weights import BucketSlots, MappedMemory, WeightTransport
from tltlab.runtime.recipe.engines import drafters_of, engine_build
from tltlab.runtime.recipe.recipe import Recipe
from tltlab.runtime.rollout.pool import WorkerPool
from tltlab.runtime.rollout.worker import packed
from tltlab.runtime.run.grpo import RunActors
from tltlab.runtime.run.memory import Peak
from tltlab.runtime.trainer.attention import ALONE
from tltlab.runtime.trainer.group import TrainerGroup
from tltlab.runtime.trainer.losses import load_objective
from tltlab.runtime.trainer.trainer import PackedTokens, Trainer
from tltlab.strategy import NO_SPECULATION, Strategy

PROMPT_TOKENS = 256
DRAFTS_BELOW = 32
"""Scripted engines verify drafts while at most so many requests run."""
STRATEGY = Strategy.chain("suffix", 4)

SCRIPTED = "scripted"
RANK = "first rank"
WRITER = "trace writer"
SYNC = "weight sync"
"""Parts that are not the driver's main thread: what is replaced here, a trainer's, and the recorder's thread."""


@dataclass(frozen=True, kw_only=True)
class DriverCase:
    """A run's size: every worker answers `responses` requests, of `tokens` tokens in the mean and evenly spread from
    half to one and a half of that, for as many iterations as the longest takes."""

    workers: int = 64
    responses: int = 128
    tokens: int = 8000
    group_size: int = 16
    ranks: int = 8
    policy: str = "beg-mab-suffix"
    reward_processes: int = 1
    rl_steps: int = 2
    weights_mib: int = 0


class Meter:
    """Seconds of this thread's processor time and bytes by part; a part within another does not count for that."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.bytes: Counter[str] = Counter()
        self._open = threading.local()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        around: list[float] = self._open.__dict__.setdefault("parts", [])
        start = time.thread_time()
        around.append(0.0)
        try:
            yield
        finally:
            took = time.thread_time() - start
            self.seconds[name] += took - around.pop()
            if around:
                around[-1] += took

    def wrapped(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def timed(*args: Any, **options: Any) -> Any:
            with self.part(name):
                return function(*args, **options)

        return timed

    def sent(self, name: str, value: Any, *, to_driver: bool = False) -> Callable[[], Any]:
        """`value` as another process gets it when it asks; the driver's own half of that takes its time."""
        buffers: list[pickle.PickleBuffer] = []
        with nullcontext() if to_driver else self.part(f"{name}: pickled"):
            body = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
            # Ray lays buffers into shared memory: a copy on the way there, none on the way back.
            raw = [bytes(buffer.raw()) for buffer in buffers]
        self.bytes[name] += len(body) + sum(map(len, raw))

        def received() -> Any:
            with self.part(f"{name}: unpickled") if to_driver else nullcontext():
                return pickle.loads(body, buffers=raw)

        return received


class Ref:
    """Stands for `ray.ObjectRef`: a result that is worked out when it is asked for; it travels as its number."""

    _all: ClassVar[WeakValueDictionary[int, Ref]] = WeakValueDictionary()
    _numbers = itertools.count()

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make: Callable[[], Any] | None = make
        self._value: Any = None
        self.number = next(self._numbers)
        self._all[self.number] = self

    def get(self) -> Any:
        if self._make is not None:
            make, self._make = self._make, None
            self._value = make()
        return self._value

    def __await__(self) -> Generator[Any, None, Any]:
        yield from ()
        return self.get()

    def __reduce__(self) -> Any:
        return _ref, (self.number, b"\0" * 28)


def _ref(number: int, _: bytes) -> Ref:
    return Ref._all[number]


class ScriptedActor:
    """A handle whose calls are methods of this process: `handle.method.remote(...)` gives a `Ref`."""

    def __init__(self, actor: Any, meter: Meter, name: str) -> None:
        self._actor, self._meter, self._name = actor, meter, name

    def __getattr__(self, method: str) -> Any:
        if method.startswith("_"):
            raise AttributeError(method)
        meter, label = self._meter, f"{self._name}.{method}"

        def remote(*args: Any, **options: Any) -> Ref:
            with meter.part(SCRIPTED):
                args, options = meter.sent(label, (args, options))()

            def answer() -> Any:
                with meter.part(SCRIPTED):
                    result = getattr(self._actor, method)(*args, **options)
                    received = meter.sent(f"{label} returns", result, to_driver=True)()
                    del result
                    return received

            return Ref(answer)

        return type("Method", (), {"remote": staticmethod(remote)})


class ScriptedWorker:
    """A rollout worker whose responses are random tokens of given lengths, with the rows of every iteration."""

    def __init__(self, number: int, case: DriverCase, num_words: int) -> None:
        self.number, self.case = number, case
        self.rng = np.random.default_rng(number)
        self.num_words = num_words

    def generate(self, requests: list[GenerationRequest], rl_step: int, *_: Any, **__: Any) -> Rollout:
        lengths = np.linspace(0.5, 1.5, len(requests)) * self.case.tokens
        responses = [
            GenerationResponse(
                key=request.key,
                token_ids=self.rng.integers(0, self.num_words, int(length)).tolist(),
                logprobs=(-self.rng.random(int(length), np.float32)).tolist(),
                finish_reason="stop",
                t_first_token=0.02,
                t_finish=0.02 * float(length),
            )
            for request, length in zip(requests, lengths, strict=True)
        ]
        ends = lengths.astype(int)
        batches = len(ends) - np.searchsorted(ends, np.arange(ends[-1]), side="right")
        rollout = Rollout(
            responses=responses,
            iterations=[self._iteration(rl_step, i, int(batch)) for i, batch in enumerate(batches)],
            decisions=[self._decision(rl_step, i, int(batch)) for i, batch in enumerate(batches)],
            duration_s=0.02 * float(ends[-1]),
            recorder_s=0.1,
            policy_s=0.1,
        )
        return packed(rollout)

    def state_dict(self, *_: Any) -> dict[str, Any]:
        return {}

    def __getattr__(self, method: str) -> Callable[..., None]:
        if method.startswith("_"):
            raise AttributeError(method)
        return lambda *_, **__: None

    def _iteration(self, rl_step: int, number: int, batch: int) -> dict[str, Any]:
        """As `IterationTracker.iterations` has it."""
        ran = STRATEGY if batch <= DRAFTS_BELOW else NO_SPECULATION
        accepted = [number % 4] * batch
        return {
            "rl_step": rl_step,
            "worker": self.number,
            "iteration": number,
            "t_start": 0.02 * number,
            "duration": 0.02,
            "draft_duration": 0.001,
            "batch": batch,
            "num_waiting": 0,
            "context_tokens": batch * number,
            "prefill_tokens": PROMPT_TOKENS if number == 0 else 0,
            **asdict(ran),
            "num_drafted": ran.draft_depth * batch,
            "num_accepted": sum(accepted) if ran.speculates else 0,
            "num_generated": batch,
            "accepted_per_request": accepted if ran.speculates else None,
            "next_draft_depth": ran.draft_depth,
        }

    def _decision(self, rl_step: int, number: int, batch: int) -> dict[str, Any]:
        key = {"rl_step": rl_step, "worker": self.number, "iteration": number, "bucket": 1}
        ran = STRATEGY if batch <= DRAFTS_BELOW else NO_SPECULATION
        return key | asdict(ran) | {"propensity": 0.5, "reward": 1.0}


class ScriptedPolicy(torch.nn.Module):
    """A model of one weight that gives every token the same log-prob."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((1,), -0.5))
        self.tokens = 0

    def forward(self, batch: PackedTokens, whole: bool = False, entropy: bool = False) -> torch.Tensor:
        self.tokens += batch.token_ids.numel()
        return self.weight * torch.ones(len(batch.rows), *[2] * entropy)


class ScriptedTrainer(Trainer):
    """The first of `world` ranks: all that a rank does with its samples but a model's passes and collectives."""

    def __init__(self, recipe: Recipe) -> None:
        self.config = recipe.train
        self.max_response_tokens = recipe.rollout.max_response_tokens
        self.seed, self.rank, self.world, self.sequence_ranks = recipe.seed, 0, recipe.train.ranks, ALONE
        self.data_ranks, self.data_rank = self.world, 0
        self.device, self.dtype = torch.device("cpu"), torch.float32
        self.policy: Any = ScriptedPolicy()
        self.reference, self._objective = None, load_objective(recipe.train.objective, recipe.train)
        self.optimizer = torch.optim.AdamW(self.policy.parameters())
        self.steps = 0
        self._work = Peak(self.device)
        self._samples, self._rank_of, self._old = [], [], []

    def weights(self) -> dict[str, torch.Tensor]:
        return {}

    def _infinite_weight(self) -> str:
        """There is one, which stays near where it was."""
        return ""

    def _sum(self, tensor: torch.Tensor) -> None:
        """Other ranks have nothing to add."""


class ScriptedRank:
    """A rank's actor; those after the first are sent what they need and do nothing."""

    def __init__(self, recipe: Recipe, rank: int, meter: Meter) -> None:
        self.trainer = ScriptedTrainer(recipe) if rank == 0 else None
        self.meter = meter

    def ask(self, method: str, *args: Any, **options: Any) -> Any:
        if self.trainer is None:
            return None
        with self.meter.part(RANK):
            values = [arg.get() if isinstance(arg, Ref) else arg for arg in args]
            return getattr(self.trainer, method)(*values, **options)


def scripted_actors(meter: Meter, case: DriverCase, num_words: int) -> type[RunActors]:
    """Engines and trainers of a run without Ray: scripted ones, whose calls are on the meter."""

    class Pool(WorkerPool):
        async def _start_worker(self, n: int) -> None:
            self.handles[n] = ScriptedActor(ScriptedWorker(n, case, num_words), meter, "worker")
            self._workers[n].alive = True

        def close(self) -> None:
            self.handles = []

    class Trainers(TrainerGroup):
        def start(self) -> None:
            ranks = range(self.recipe.train.ranks)
            self.handles = [ScriptedActor(ScriptedRank(self.recipe, rank, meter), meter, "rank") for rank in ranks]

        def send_weights(self, workers: Sequence[Any], version: int, transport: WeightTransport = "host") -> None:
            """By shared memory: one engine maps and copies them."""
            with meter.part(SCRIPTED):
                weights = [(str(n), torch.ones(1 << 24, dtype=torch.bfloat16)) for n in range(case.weights_mib // 32)]
                slots, mapped = BucketSlots.fit(dict(weights).values()), MappedMemory()
            with meter.part(SYNC):
                for bucket in slots.filled(weights):
                    for _, weight in mapped.tensors(bucket):
                        weight.clone()

        def close(self) -> None:
            self.handles = []

    class Actors(RunActors):
        def _start(self, stack: ExitStack) -> None:
            build = engine_build(self.recipe, self._policy, drafters_of(self.recipe, self._policy))
            self.pool = Pool(
                self.recipe, build, lambda n: None, lambda n: {}, events=self._events, on_restart=lambda n: None
            )
            self.trainers = Trainers(self.recipe, lambda rank: {})
            self.pool.start()
            self.trainers.start()

    return Actors


@contextmanager
def without_ray(meter: Meter) -> Iterator[None]:
    """Within, `ray.put`, `ray.get` and `ray.wait` are of `Ref`s."""

    def put(value: Any) -> Ref:
        with meter.part(SCRIPTED):
            return Ref(meter.sent("ray.put", value))

    def get(refs: Any) -> Any:
        return [ref.get() for ref in refs] if isinstance(refs, list) else refs.get()

    def wait(refs: Sequence[Any], **_: Any) -> tuple[list[Any], list[Any]]:
        return list(refs[:1]), list(refs[1:])

    with patch.multiple(ray, put=put, get=get, wait=wait):
        yield
