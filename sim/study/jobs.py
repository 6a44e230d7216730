"""Independent simulations side by side in processes. Results do not depend on where they run."""

import contextlib
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import TypeVar

Result = TypeVar("Result")

ALONE_S = 2.0
"""Seconds that sharing must save before the first processes are started, which takes about that."""

_DONE: ContextVar[Callable[[], None]] = ContextVar("done", default=lambda: None)
_started = False
"""True once this process has started others: joblib keeps them."""


@contextlib.contextmanager
def counted(done: Callable[[], None]) -> Iterator[None]:
    """Within, call `done` after each task of `side_by_side`: the progress of a command."""
    token = _DONE.set(done)
    try:
        yield
    finally:
        _DONE.reset(token)


def cores() -> int:
    """Return the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def side_by_side(
    tasks: Sequence[Callable[[], Result]], *, jobs: int | None = None, expected_s: Sequence[float] = ()
) -> Iterator[Result]:
    """Yield the results of tasks in their order; `jobs` processes (None: one per core) share what takes long.

    Tasks run here, one after another, until it is known that sharing the rest would save `ALONE_S`. Where `expected_s`
    has about the seconds of each, tasks are shared from the first on if that saves more. Where processes are running
    already, tenths of a second are worth it.
    """
    global _started
    jobs = cores() if jobs is None else jobs
    worth_s = ALONE_S / 20 if _started else ALONE_S
    began, done = time.perf_counter(), 0
    total_s = sum(expected_s)
    saves = total_s - max([total_s / jobs, *expected_s]) > worth_s
    if not (saves and min(jobs, len(tasks)) > 1):
        for done, task in enumerate(tasks, 1):
            result = task()
            _DONE.get()()
            yield result
            left_s = (time.perf_counter() - began) / done * (len(tasks) - done)
            if len(tasks) > done + 1 and left_s - left_s / jobs > worth_s:
                break
    if left := tasks[done:]:
        from joblib import Parallel, delayed, parallel_config

        _started = True
        with parallel_config(backend="loky", inner_max_num_threads=1), warnings.catch_warnings():
            # joblib replaces a process whose memory has grown by 300 MB, as long rollouts do; no task is lost.
            warnings.filterwarnings("ignore", "A worker stopped while", UserWarning)
            parallel = Parallel(n_jobs=min(jobs, len(left)), return_as="generator")
            for result in parallel(delayed(task)() for task in left):
                _DONE.get()()
                yield result
