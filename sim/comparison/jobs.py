"""Independent simulations side by side: processes here, or a Ray cluster. Results do not depend on where they run."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from importlib.util import find_spec
from typing import TypeVar

from tltlab.errors import ConfigError, one_line
from tltlab.sim.config import at_least

Result = TypeVar("Result")

ALONE_S = 2.0
"""Seconds that sharing must save: processes take about that to start."""


_DONE: ContextVar[Callable[[], None]] = ContextVar("done", default=lambda: None)


@contextlib.contextmanager
def counted(done: Callable[[], None]) -> Iterator[None]:
    """Within, call `done` after each task of `side_by_side`: the progress of a command."""
    token = _DONE.set(done)
    try:
        yield
    finally:
        _DONE.reset(token)


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def side_by_side(
    tasks: Sequence[Callable[[], Result]],
    *,
    jobs: int | None = None,
    ray_address: str | None = None,
    expected_s: Sequence[float] = (),
    running: bool = False,
) -> Iterator[Result]:
    """Yield the results of tasks in their order; `jobs` processes (None: one per core) share what takes long.

    Tasks run here, one after another, until it is known that sharing the rest would save `ALONE_S`; they are to be of
    about the same size. Where tasks differ, `expected_s` has about the seconds of each: they are shared from the
    first on if that saves more than `ALONE_S`. Where processes of an earlier call are `running`, they are at once. With
    a `ray_address` ("auto", "local", or an address) all run on that cluster, which is left as it was found. Raises
    ConfigError for fewer than one job, and where there is no such cluster.
    """
    jobs = cores() if jobs is None else jobs
    at_least(1, jobs=jobs)
    began, done = time.perf_counter(), 0
    total_s = sum(expected_s)
    saves = total_s - max([total_s / jobs, *expected_s]) > ALONE_S
    if ray_address is None and not ((saves or running) and min(jobs, len(tasks)) > 1):
        for done, task in enumerate(tasks, 1):
            result = task()
            _DONE.get()()
            yield result
            left_s = (time.perf_counter() - began) / done * (len(tasks) - done)
            if len(tasks) > done + 1 and left_s - left_s / jobs > ALONE_S:
                break
    left = tasks[done:]
    if left:
        from joblib import Parallel, delayed

        with _backend(ray_address, min(jobs, len(left))) as num_jobs:
            # Ray's backend knows lists alone.
            ordered = "list" if ray_address is not None else "generator"
            for result in Parallel(n_jobs=num_jobs, return_as=ordered)(delayed(task)() for task in left):
                _DONE.get()()
                yield result


@contextlib.contextmanager
def _backend(ray_address: str | None, jobs: int) -> Iterator[int]:
    """Where joblib runs, and with how many jobs."""
    from joblib import parallel_config

    if ray_address is None:
        with parallel_config(backend="loky", inner_max_num_threads=1):
            yield jobs
        return
    if find_spec("ray") is None:
        raise ConfigError("running on Ray needs the package ray: pip install 'tltlab[runtime]'")
    import ray
    from ray.util.joblib import register_ray

    started = not ray.is_initialized()
    if started:
        try:
            ray.init(ray_address, log_to_driver=False, include_dashboard=False, logging_level=logging.ERROR)
        except (ConnectionError, RuntimeError, ValueError) as error:
            reason = one_line(error)[:200]
            raise ConfigError(f"no Ray cluster at {ray_address!r} ({reason}); 'local' starts one here") from error
    try:
        register_ray()
        with parallel_config(backend="ray"):
            # One job is no parallel work for joblib: it would stay in this process.
            yield max(2, jobs if jobs > 1 else int(ray.cluster_resources().get("CPU", 2)))
    finally:
        if started:
            ray.shutdown()
