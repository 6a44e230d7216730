"""Rewards computed in separate processes, each with a time limit: `RewardPool`.

Reward functions read arbitrary model output: they hang, raise and crash. Here that costs one response its reward and
the run a process, which pebble restarts.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import resource
import signal
import sys
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pebble import ProcessExpired, ProcessPool

from tltlab.config import counted
from tltlab.errors import RunError
from tltlab.files import found_in
from tltlab.runtime.ray.scratch import register_memory

from .rewards import LARGEST_REWARD, NotANumberError, Reward, Scored, load_rewards, number_of

if TYPE_CHECKING:
    # A reward process imports this module, and needs no recipe.
    from tltlab.runtime.recipe.recipe import Recipe

Item = tuple[str, str | Sequence[int], str]
# The value of a reward's term, or the reason for its absence.
Outcome = float | str

# Starts in a row without a result, after which processes cannot start here at all.
_MAX_STARTS = 3
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Decoder:
    """Decodes like `tokenizer.decode(ids, skip_special_tokens=True)` of a Hugging Face tokenizer.

    It loads without transformers, so that a reward process can have one.
    """

    backend: Any

    @classmethod
    def of(cls, tokenizer: Any) -> Decoder | None:
        """Return None where the tokenizer's decoding does more than its `tokenizers.Tokenizer`."""
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None or type(tokenizer)._decode.__module__ != "transformers.tokenization_utils_tokenizers":
            return None
        tidies = tokenizer.clean_up_tokenization_spaces and type(backend.model).__name__ != "BPE"
        forced = getattr(tokenizer, "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", False)
        return None if tidies or forced else cls(backend)

    def __call__(self, token_ids: Sequence[int]) -> str:
        return str(self.backend.decode(list(token_ids), skip_special_tokens=True))


class UserProcesses:
    """`processes` processes that run user code with a time limit for each call; a `setting` has their number.

    They begin with `make(*args)`, when they are first needed.
    """

    def __init__(self, processes: int, setting: str, make: Callable[..., Any], *args: Any):
        self._processes, self._setting, self._make, self._args = processes, setting, make, args
        self._pool: ProcessPool | None = None
        self._starts = 0  # since the last result

    def ready(self) -> ProcessPool:
        """Return the pool, a new one where the last one broke. RunError where its processes cannot start."""
        if self._pool is not None and self._pool.active:
            return self._pool
        starts = self._starts + 1
        self.close()
        if starts > _MAX_STARTS:
            raise RunError(
                f"processes of {self._setting} ended {_MAX_STARTS} times before a result. Each imports the main "
                'program: a script trains under `if __name__ == "__main__":`, or with 0 processes'
            )
        self._starts = starts
        self._pool = ProcessPool(
            max_workers=self._processes,
            initializer=_start_process,
            initargs=(os.getpid(), self._make, self._args),
            context=multiprocessing.get_context("spawn"),
        )
        try:
            if not self._pool.active:  # asking starts it
                raise RunError(f"{self._processes} processes cannot be started: set {self._setting} lower")
        except BaseException:
            self.close()  # exiting would wait for those that have started
            raise
        register_memory()
        return self._pool

    def result(self, task: Future[Any], limit_s: float) -> tuple[Any, str]:
        """Return the result of an ended call, and the reason where there is none. BrokenProcessPool for a lost one."""
        try:
            answer = task.result()
        except TimeoutError:
            return None, f"took more than {limit_s:g} s"
        except ProcessExpired as death:
            code = death.exitcode
            reason = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
            return None, f"ended their process ({reason})"
        self._starts = 1
        return answer, ""

    def close(self) -> None:
        """Kill the processes."""
        self._starts = 0
        if self._pool is not None:
            self._pool.stop()  # type: ignore[no-untyped-call]
            self._pool.join()
            self._pool = None


class RewardPool(UserProcesses):
    """Computes rewards in `reward_pool.processes` processes, or in this one where that is 0; a context manager.

    Reward functions are imported here first: ConfigError for those that cannot be. Processes start on entering, without
    a wait. One call of `rewards` at a time. With a `tokenizer` responses may be token ids, decoded in the reward's
    process if the tokenizer allows that (`Decoder.of`). A process computes all terms of a response; where that hangs or
    ends the process, each term is computed by itself, so that the others keep their values.
    """

    def __init__(self, recipe: Recipe, tokenizer: Any = None):
        self._terms, self._code, self._config = recipe.reward_terms, recipe.code, recipe.reward_pool
        paths = [term.path for term in self._terms]
        self._rewards = load_rewards(paths, self._code)
        self._start_timeout_s = recipe.faults.start_s()
        self._failures: Counter[tuple[str, str]] = Counter()  # by term and reason
        self._num_rewards = 0
        self._tokenizer = tokenizer
        self._decoder = None if tokenizer is None else Decoder.of(tokenizer)
        args = (paths, self._code, self._decoder, self._config.memory_bytes)
        super().__init__(self._config.processes, "reward_pool.processes", _own_rewards, *args)

    def __enter__(self) -> RewardPool:
        if self._config.processes:
            self.ready()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def rewards(self, items: Sequence[Item]) -> list[Scored]:
        """Return the reward of each (prompt, response, answer), in order: the sum of its terms by weight.

        A term without a value has `on_failure` for it. RunError where the processes cannot start.
        """
        scored = [self._scored(outcomes) for outcomes in self.outcomes(items)]
        self._num_rewards += len(scored)
        return scored

    def _scored(self, outcomes: Sequence[Outcome]) -> Scored:
        instead, values = self._config.on_failure, list[float]()
        for term, outcome in zip(self._terms, outcomes, strict=True):
            if isinstance(outcome, str):
                self._failures[term.label, outcome] += 1
            values.append(instead if isinstance(outcome, str) else outcome)
        reward = sum(term.weight * value for term, value in zip(self._terms, values, strict=True))
        if not abs(reward) <= LARGEST_REWARD:
            self._failures["", "have a sum beyond what float32 holds"] += 1
            reward = instead
        return Scored(reward, tuple(values))

    def outcomes(self, items: Sequence[Item]) -> list[list[Outcome]]:
        """Return the values of each one's terms, or the reasons for their absence; errors as `rewards`."""
        if self._decoder is None:
            items = [
                (p, r if isinstance(r, str) else str(self._tokenizer.decode(list(r), skip_special_tokens=True)), a)
                for p, r, a in items
            ]
        if self._config.processes:
            try:
                return self._in_processes(items)
            except BaseException:
                self.close()  # tasks may still run, and must not interfere with the next call
                raise
        # Standard output is for results, in this process as in the others.
        with redirect_stdout(sys.stderr), found_in(self._code):
            return [_outcomes(self._rewards, item, self._decoder) for item in items]

    def take_failures(self) -> list[str]:
        """Return and clear a sentence for each kind of failure, with its count and none of the response's text."""
        sentences = []
        for (label, reason), count in self._failures.most_common():
            num = counted(self._num_rewards, "reward")
            if label and len(self._terms) > 1:
                num = f"{counted(self._num_rewards, 'value')} of {label}"
            sentences.append(f"{count} of {num} {reason}: {self._config.on_failure:g} instead")
        self._failures.clear()
        self._num_rewards = 0
        return sentences

    def _in_processes(self, items: Sequence[Item]) -> list[list[Outcome]]:
        pool = self.ready()
        limit, patience = self._config.timeout_s, self._start_timeout_s
        terms: Sequence[int] = range(len(self._terms))
        outcomes: list[list[Outcome]] = [[""] * len(terms) for _ in items]
        # Numbers of an item and of its terms to compute.
        waiting: deque[tuple[int, Sequence[int]]] = deque((number, terms) for number in range(len(items)))
        tasks: dict[Future[list[Outcome]], tuple[int, Sequence[int]]] = {}
        while waiting or tasks:
            # Two tasks per process: tasks in flight when the pool breaks are lost.
            while waiting and len(tasks) < 2 * self._config.processes:
                try:
                    number, terms = waiting[0]
                    task = pool.schedule(_compute, (items[number], terms), timeout=limit)
                except RuntimeError:
                    break  # as below: the pool is no longer active
                tasks[task] = waiting.popleft()
            deadline = time.monotonic() + patience + limit
            done: set[Future[list[Outcome]]] = set()
            # A pool that breaks while a task is scheduled may never end that task.
            while tasks and not done and pool.active and time.monotonic() < deadline:
                done, _ = wait(tasks, 1.0, FIRST_COMPLETED)
            if tasks and not done and pool.active:
                raise RunError(f"reward processes did not start within faults.start_timeout_s, {patience:g} s")
            for ended in done:
                number, terms = tasks.pop(ended)
                try:
                    values, failure = self.result(ended, limit)
                except BrokenProcessPool:
                    # A process failed between rewards, and the pool is no longer active.
                    waiting.appendleft((number, terms))
                    continue
                if failure and len(terms) > 1:
                    waiting.extendleft((number, [term]) for term in terms)
                    continue
                for term, value in zip(terms, [failure] if failure else values, strict=True):
                    outcomes[number][term] = value
            if not pool.active:
                waiting.extendleft(tasks.values())
                tasks.clear()
                pool = self.ready()
        return outcomes


def _outcomes(
    rewards: Sequence[Reward],
    item: Item,
    decoder: Decoder | None,
    caught: tuple[type[BaseException], ...] = (Exception, SystemExit),
) -> list[Outcome]:
    prompt, response, answer = item
    if not isinstance(response, str):
        assert decoder is not None
        response = decoder(response)
    outcomes: list[Outcome] = []
    for reward in rewards:
        try:
            outcomes.append(number_of(reward(prompt, response, answer)))
        except NotANumberError as error:
            outcomes.append(str(error))
        except caught as error:  # a user's function may raise anything
            outcomes.append(error_place(error))
    return outcomes


def error_place(error: BaseException) -> str:
    """Return type and place of a user's exception, without its message, which may quote the response or a key."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"raised {type(error).__name__} ({Path(frame.filename).name}, line {frame.lineno})"[:80]


# ---- in a process of a user's code ----------------------------------------------------------------------------------


class _ProcessState:
    """State of a process between tasks: the object made at its start, or the error."""

    value: Any = None
    fault: Exception | None = None


def process_object(name: str) -> Any:
    """Return the object made at this process's start. RunError, which begins with `name`, where that failed."""
    if _ProcessState.fault is not None:
        raise RunError(f"{name} cannot start: {_ProcessState.fault}")
    return _ProcessState.value


def _start_process(driver: int, make: Callable[..., Any], args: Sequence[Any]) -> None:
    """Initialise a process: end with process `driver`, end on SIGTERM, keep standard output for results."""
    if sys.platform == "linux":
        # A killed driver cannot end a hanging reward.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != driver:
            os._exit(1)
    # Pebble's handler runs in the interpreter, which C code may not return to for long.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.dup2(2, 1)  # standard output is for results, and a reward may print
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        _ProcessState.value = make(*args)
    except Exception as error:  # raised in the driver
        _ProcessState.fault = error


def _own_rewards(
    paths: Sequence[str], code: Sequence[str], decoder: Decoder | None, memory_bytes: int | None
) -> tuple[list[Reward], Decoder | None]:
    # Permanently: imports of a reward at run time are found there too.
    sys.path += code
    rewards = load_rewards(paths)
    if memory_bytes is not None:
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    return rewards, decoder


def _compute(item: Item, terms: Sequence[int]) -> list[Outcome]:
    rewards, decoder = process_object("a reward process")
    pid = os.getpid()
    # Panics of Rust are no `Exception`, and no keyboard interrupts reach this process.
    outcomes = _outcomes([rewards[term] for term in terms], item, decoder, (BaseException,))
    if os.getpid() != pid:
        # A fork made by the reward must not answer in its place.
        os._exit(0)
    return outcomes
