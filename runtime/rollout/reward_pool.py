"""Rewards computed in processes of their own, each with a time limit: `RewardPool`.

Reward functions run over whatever a model writes: they hang, raise and crash. Here that costs one response its reward
and the run a process, which pebble starts again.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import redirect_stdout
from pathlib import Path
from types import TracebackType
from typing import Any

from pebble import ProcessExpired, ProcessPool

from tltlab.errors import RunError
from tltlab.runtime.recipe.recipe import Recipe

from .rewards import NotANumberError, WeightedReward, load_rewards

Item = tuple[str, str, str]
# A reward, or why there is none.
Outcome = float | str

# A task is a chunk of items, so that fast rewards cost no round trip each, and ends after the item this long after its
# start, so that a slow one neither holds up the rest of its chunk nor gets its time.
_CHUNK_S = 0.05
# How often in a row processes may die without having begun a reward: then they cannot start here at all.
_MAX_BREAKS = 3
_PR_SET_PDEATHSIG = 1


class RewardPool:
    """Computes rewards in `reward_pool.processes` processes, or in this one where that is 0; a context manager.

    Reward functions are imported here first: ConfigError for those that cannot be. Processes start on entering, which
    does not wait for them. One call of `rewards` at a time.
    """

    def __init__(self, recipe: Recipe) -> None:
        reward = recipe.reward
        terms = ((reward, 1.0),) if isinstance(reward, str) else tuple((term.path, term.weight) for term in reward)
        self._terms = terms
        self._reward = load_rewards(terms)
        self._config = recipe.reward_pool
        self._start_timeout_s = recipe.faults.start_timeout_s
        self._failures: Counter[str] = Counter()
        self._num_rewards = 0
        self._pool: ProcessPool | None = None

    def __enter__(self) -> RewardPool:
        if self._config.processes:
            self._start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def rewards(self, items: Sequence[Item]) -> list[float]:
        """The reward of each (prompt, response, answer), in order; `on_failure` where there is none.

        RunError where the processes cannot start.
        """
        outcomes = self._in_processes(items) if self._config.processes else self._here(items)
        self._num_rewards += len(outcomes)
        self._failures.update(outcome for outcome in outcomes if isinstance(outcome, str))
        return [self._config.on_failure if isinstance(outcome, str) else outcome for outcome in outcomes]

    def take_failures(self) -> list[str]:
        """A sentence for each way in which rewards failed since the last call, with how many; none of their text."""
        sentences = [
            f"{count} of {self._num_rewards} rewards {reason}: {self._config.on_failure:g} instead"
            for reason, count in self._failures.most_common()
        ]
        self._failures.clear()
        self._num_rewards = 0
        return sentences

    def close(self) -> None:
        """End the processes, whatever they do."""
        if self._pool is not None:
            self._pool.stop()  # type: ignore[no-untyped-call]
            self._pool.join()
            self._pool = None

    def _here(self, items: Sequence[Item]) -> list[Outcome]:
        # Standard output is for results, in this process as in the others.
        with redirect_stdout(sys.stderr):
            return [_outcome(self._reward, item) for item in items]

    def _start(self) -> ProcessPool:
        """A new pool; its processes start to import the reward functions."""
        processes = self._config.processes
        context = multiprocessing.get_context("spawn")
        # Tasks in flight: one for each process, and one that waits for it.
        self._begun = context.RawArray("q", 2 * processes)
        self._pool = ProcessPool(
            max_workers=processes,
            initializer=_start_process,
            initargs=(self._terms, self._begun, os.getpid()),
            context=context,
        )
        if not self._pool.active:  # asking starts it
            raise RunError(f"{processes} reward processes cannot be started: set reward_pool.processes lower")
        return self._pool

    def _in_processes(self, items: Sequence[Item]) -> list[Outcome]:
        try:
            return self._computed(items)
        except BaseException:
            self.close()  # tasks may still run, and the next call must not meet them
            raise

    def _computed(self, items: Sequence[Item]) -> list[Outcome]:
        pool = self._pool
        if pool is None or not pool.active:
            pool = self._restart()
        limit, patience = self._config.timeout_s, self._start_timeout_s
        outcomes: dict[int, Outcome] = {}
        waiting = list(range(len(items)))
        tasks: dict[Future[list[Outcome]], tuple[int, list[int]]] = {}
        breaks = 0
        while len(outcomes) < len(items):
            for slot in set(range(len(self._begun))) - {slot for slot, _ in tasks.values()}:
                if not waiting:
                    break
                # Chunks shrink towards the end, so that the processes are done at about the same time.
                chunk = waiting[: -(-len(waiting) // len(self._begun))]
                self._begun[slot] = 0
                try:
                    task = pool.schedule(_compute, (slot, [items[i] for i in chunk]), timeout=limit + _CHUNK_S)
                except RuntimeError:
                    break  # as below: the pool is not active any more
                tasks[task] = slot, chunk
                waiting = waiting[len(chunk) :]
            done, _ = wait(tasks, patience + limit, FIRST_COMPLETED)
            if tasks and not done:
                raise RunError(f"reward processes did not start within faults.start_timeout_s, {patience:g} s")
            for ended in done:
                slot, chunk = tasks.pop(ended)
                try:
                    outcomes.update(zip(chunk, ended.result(), strict=False))
                    breaks = 0
                except TimeoutError:
                    self._blame(slot, chunk, outcomes, f"took more than {limit:g} s")
                except ProcessExpired as death:
                    self._blame(slot, chunk, outcomes, f"ended their process ({_ending(death.exitcode)})")
                except BrokenProcessPool:
                    pass  # a process died between rewards, and the pool is not active any more
                waiting = [i for i in chunk if i not in outcomes] + waiting
            if not pool.active:
                waiting = [i for _, chunk in tasks.values() for i in chunk] + waiting
                tasks.clear()
                breaks += 1
                if breaks == _MAX_BREAKS:
                    raise RunError(
                        f"reward processes ended {breaks} times before a reward. Each imports the main program: "
                        'a script trains under `if __name__ == "__main__":`, or with reward_pool.processes = 0'
                    )
                pool = self._restart()
        return [outcomes[i] for i in range(len(items))]

    def _restart(self) -> ProcessPool:
        self.close()
        return self._start()

    def _blame(self, slot: int, chunk: Sequence[int], outcomes: dict[int, Outcome], reason: str) -> None:
        """Note the failure of the item that the chunk's process was at, if it was at one."""
        if self._begun[slot]:
            outcomes[chunk[self._begun[slot] - 1]] = reason


def _outcome(reward: WeightedReward, item: Item) -> Outcome:
    try:
        return reward(*item)
    except NotANumberError as error:
        return str(error)
    except (Exception, SystemExit) as error:  # whatever a user's function raises
        # Its message may quote the response, or a key: where it was raised has to do.
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return f"raised {type(error).__name__} ({Path(frame.filename).name}, line {frame.lineno})"[:80]


def _ending(exitcode: int | None) -> str:
    if exitcode is not None and exitcode < 0:
        return f"signal {-exitcode}"
    return f"exit code {exitcode}"


# ---- in a reward process --------------------------------------------------------------------------------------------


class _Process:
    """What a reward process keeps between tasks."""

    reward: WeightedReward
    begun: Any
    fault: Exception | None = None


def _start_process(terms: Sequence[tuple[str, float]], begun: Any, driver: int) -> None:
    if sys.platform == "linux":
        # A driver that is killed cannot end a reward that hangs.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != driver:
            os._exit(1)
    # Pebble's handler runs in the interpreter, which code in C may not return to for long.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.dup2(2, 1)  # standard output is for results, and a reward may print
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    _Process.begun = begun
    try:
        _Process.reward = load_rewards(terms)
    except Exception as error:  # raised where the driver sees it
        _Process.fault = error


def _compute(slot: int, items: Sequence[Item]) -> list[Outcome]:
    """Outcomes of the items that were begun within _CHUNK_S, at least one; `begun[slot]` says which is under way."""
    if _Process.fault is not None:
        raise RunError(f"a reward process cannot start: {_Process.fault}")
    start = time.monotonic()
    outcomes: list[Outcome] = []
    for number, item in enumerate(items, start=1):
        _Process.begun[slot] = number
        outcomes.append(_outcome(_Process.reward, item))
        if time.monotonic() - start > _CHUNK_S:
            break
    _Process.begun[slot] = 0
    return outcomes
