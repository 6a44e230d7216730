"""The trainer's ranks as Ray actors, called as one: a call goes to all of them, and returns when all are done."""

import os
import shutil
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError

from tltlab.errors import RunError, TltlabError
from tltlab.runtime.engine.weights import Engines, WeightTransport
from tltlab.runtime.ray.actors import error_of, runtime_env
from tltlab.runtime.ray.scratch import scratch_folder
from tltlab.runtime.recipe.engines import start_timeout_s
from tltlab.runtime.recipe.recipe import Recipe

from .losses import Mismatch
from .ranks import ALLOCATOR
from .samples import Sample, share_out
from .trainer import Trainer

NOTICE_S = 10.0
"""Most seconds until Ray reports an actor's failure: its peers may notice before."""

_ENV = {
    "TQDM_DISABLE": "1",
    "RAY_DEDUP_LOGS": "0",
    # Threads that wait by spinning take the cores of engines and drafter trainers.
    "OMP_WAIT_POLICY": "passive",
    # Sequences of all lengths leave holes between blocks of fixed segments. An engine's sleep does not allow it.
    ALLOCATOR: os.environ.get(ALLOCATOR, "expandable_segments:True"),
}


class TrainerDied(RunError):
    """A rank failed, and all others were ended: `restart` and `load_checkpoint` continue from a checkpoint."""


class TrainerGroup:
    """All ranks of a recipe's trainer. `options(rank)` are Ray's options of an actor, "env_vars" among them.

    A TltlabError raised in a rank is raised here as itself. The others would wait forever for a failed rank: they are
    killed, and TrainerDied is raised.
    """

    def __init__(
        self, recipe: Recipe, options: Callable[[int], Mapping[str, Any]], env: Mapping[str, str] | None = None
    ):
        self.recipe = recipe
        self.handles: list[Any] = []
        self.pids: list[int] = []  # of the ranks' processes, once they have started
        self._options = options
        self._env = _ENV | dict(env or {}) | {"OMP_NUM_THREADS": str(recipe.train.threads)}
        self._meeting: Path | None = None
        self._sending = Lock()
        self._longest_s: dict[str, float] = {}  # of calls, by method

    def start(self) -> None:
        """Start the ranks and load the recipe's model into them; at most `faults.start_timeout_s` seconds."""
        timeout_s = start_timeout_s(self.recipe)
        for rank in range(self.recipe.train.ranks):
            options = dict(self._options(rank))
            env = self._env | dict(options.pop("env_vars", {}))
            actor = TrainerActor.options(**options, runtime_env=runtime_env(env))  # type: ignore[attr-defined]
            self.handles.append(actor.remote(self.recipe, rank))
        places = self._wait([actor.place.remote() for actor in self.handles], "start", timeout_s)
        rendezvous = self._rendezvous(places)
        self.pids = self._wait([actor.start.remote(rendezvous) for actor in self.handles], "start", timeout_s)

    def restart(self) -> None:
        """End the remaining ranks and start all anew, with the weights of the recipe's model."""
        self.close()
        self.start()

    def old_logprobs(self, samples: Sequence[Sample], rl_step: int = 0) -> Mismatch:
        """See `Trainer.old_logprobs`; a rank receives only the tokens of its own samples, once for all neighbours.

        Samples are shared out for the update of `rl_step`: for another one shares would be less even.
        """
        recipe = self.recipe
        rank_of = share_out(
            samples,
            recipe.train,
            recipe.train.data_ranks,
            seed=recipe.seed,
            rl_step=rl_step,
            max_response_tokens=recipe.rollout.max_response_tokens,
        )
        elsewhere = [sample.without_tokens() for sample in samples] if recipe.train.data_ranks > 1 else []
        shares = [
            ray.put([s.in_arrays() if rank_of[i] == rank else elsewhere[i] for i, s in enumerate(samples)])
            for rank in range(recipe.train.data_ranks)
        ]
        size = recipe.train.sequence_parallel
        mismatch: Mismatch = self._ask("old_logprobs", lambda rank: (shares[rank // size], rank_of, rl_step))
        return mismatch

    def send_weights(self, workers: Sequence[Any], version: int, transport: WeightTransport = "host") -> None:
        """Send the policy's weights to rollout workers as `version`; a worker's failure is raised by its next call.

        TrainerDied where a rank fails: unfinished workers then have only a part of the weights.
        """
        engines = Engines(workers, version, transport=transport, gpus_each=self.recipe.rollout.tensor_parallel_size)
        # Two calls at once might reach ranks in different orders.
        with self._sending:
            self.ask("send_weights", engines)

    def frozen(self) -> Any:
        """Return a reference to the FrozenTarget that a drafter shares with the policy, once all ranks are done."""
        if not self.handles:
            raise TrainerDied("no trainer is running to return its frozen weights: start the group first")
        refs = [actor.frozen.remote() for actor in self.handles]
        self._wait([done for done, _ in refs], "frozen")
        return refs[0][1]

    def release(self, *, keep: bool = False) -> None:
        """Free what only passes need, and with `train.offload` the ranks' tensors too, unless they `keep` them."""
        self.ask("offload" if self.recipe.train.offload and not keep else "release")

    def onload(self) -> None:
        """Move everything back."""
        if self.recipe.train.offload:
            self.ask("onload")

    def close(self) -> None:
        """End all ranks."""
        for actor in self.handles:
            ray.kill(actor)
        self.handles, self.pids = [], []
        if self._meeting is not None:
            shutil.rmtree(self._meeting, ignore_errors=True)
            self._meeting = None

    def _rendezvous(self, places: Sequence[tuple[str, str, int]]) -> str | None:
        """Return the ranks' meeting point: a private file on one machine, else a port on rank 0's machine."""
        if len(places) == 1:
            return None
        if {node for node, _, _ in places} == {ray.get_runtime_context().get_node_id()}:
            self._meeting = scratch_folder("t")
            return f"file://{self._meeting / 'rendezvous'}"
        _, address, port = places[0]
        return f"tcp://{address}:{port}"

    def ask(self, method: str, *args: Any, **options: Any) -> Any:
        """Call a method of `Trainer` on all ranks, and return the first one's answer.

        Folders must be visible on every rank's machine.
        """
        return self._ask(method, lambda rank: args, **options)

    def _ask(self, method: str, args_of: Callable[[int], tuple[Any, ...]], **options: Any) -> Any:
        """Do the same with each rank's own arguments."""
        if not self.handles:
            raise TrainerDied(f"no trainer is running to {method}: start the group first")
        calls = [actor.ask.remote(method, *args_of(rank), **options) for rank, actor in enumerate(self.handles)]
        return self._wait(calls, method)[0]

    def _wait(self, refs: list[Any], verb: str, timeout_s: float | None = None) -> list[Any]:
        pending, began = list(refs), time.monotonic()
        longest_s = self._longest_s.get(verb, 0.0)
        timeout_s = self.recipe.faults.patience_s(longest_s) if timeout_s is None else timeout_s
        while pending:
            left_s = max(timeout_s - (time.monotonic() - began), 0.0)
            done, pending = ray.wait(pending, num_returns=1, timeout=left_s)
            if not done:
                self.close()
                raise TrainerDied(f"{len(pending)} of {len(refs)} trainer ranks did not {verb} within {timeout_s:g} s")
            try:
                ray.get(done)
            except RayError as error:
                failure = self._failure(error, pending, verb)
                self.close()
                raise failure from None
        self._longest_s[verb] = max(longest_s, time.monotonic() - began)
        return list(ray.get(refs))

    def _failure(self, error: RayError, pending: Sequence[Any], verb: str) -> TltlabError:
        """Return the exception to raise for a rank's error: another rank's failure if that is the cause."""
        failure = error_of(error, died=TrainerDied)
        if type(failure) is RunError and pending:
            ended, _ = ray.wait(list(pending), num_returns=len(pending), timeout=NOTICE_S)
            for ref in ended:
                try:
                    ray.get(ref)
                except RayActorError as death:
                    failure = error_of(death, died=TrainerDied)
                except RayError:
                    continue
        if isinstance(failure, TrainerDied):
            return TrainerDied(f"a trainer rank failed during {verb}: {failure}")
        if "Timed out waiting" in str(failure):
            most_s = self.recipe.faults.collective_timeout_s
            return RunError(f"a trainer rank waited faults.collective_timeout_s = {most_s:g} s for another ({failure})")
        return failure


@ray.remote
class TrainerActor:
    """One rank in its own process."""

    def __init__(self, recipe: Recipe, rank: int):
        self.recipe = recipe
        self.rank = rank

    def place(self) -> tuple[str, str, int]:
        """Return the node, its address, and a free port there."""
        address = ray.util.get_node_ip_address()
        with socket.socket() as free:
            free.bind((address, 0))
            return ray.get_runtime_context().get_node_id(), address, free.getsockname()[1]

    def start(self, rendezvous: str | None) -> int:
        """Load the model; return the process id. Not in the constructor, whose errors Ray does not pass on."""
        recipe = self.recipe
        # An objective of the user's own is imported here.
        sys.path += [folder for folder in recipe.code if folder not in sys.path]
        self.trainer = Trainer(
            recipe.model,
            recipe.train,
            temperature=recipe.rollout.temperature,
            max_response_tokens=recipe.rollout.max_response_tokens,
            seed=recipe.seed,
            rank=self.rank,
            world=recipe.train.ranks,
            rendezvous=rendezvous,
            timeout_s=recipe.faults.collective_timeout_s,
        )
        return os.getpid()

    def ask(self, method: str, *args: Any, **options: Any) -> Any:
        """Call a method of the trainer; rank 0 answers for all."""
        answer = getattr(self.trainer, method)(*args, **options)
        return answer if self.rank == 0 else None

    @ray.method(num_returns=2)
    def frozen(self) -> tuple[None, Any]:
        """Return None when done, and, as a separate reference, the trainer's frozen weights."""
        return None, self.trainer.frozen()
