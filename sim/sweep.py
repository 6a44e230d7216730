"""Many policies on one trace: prepared once, run one after another or over processes or a Ray cluster."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import pandas as pd
from joblib import Parallel, delayed, parallel_config

from tltlab.errors import ConfigError

from .scenario import PolicyLike, Scenario


def sweep(
    scenario: Scenario, policies: Mapping[str, PolicyLike], *, jobs: int = 1, ray_address: str | None = None
) -> pd.DataFrame:
    """Simulate every policy on the scenario: one row per policy and RL step, in order, with `makespan_s`.

    `jobs` processes share the policies; with `ray_address` ("auto", "local", or an address) they run on a Ray cluster
    instead, `jobs` at a time, or as many as it has CPUs where jobs is 1. The numbers do not depend on either. Raises
    ConfigError for jobs < 1 or a missing Ray.

    >>> sweep(Scenario.of(trace), {"plain": load_policy("none")}).makespan_s.tolist()  # doctest: +SKIP
    """
    if jobs < 1:
        raise ConfigError(f"jobs must be at least 1, got {jobs}")
    names = list(policies)
    if not names:
        raise ConfigError("no policy to simulate: give at least one")
    # The table rows are for writing traces: workers need not receive them.
    lean = replace(scenario, steps=tuple(replace(step, rows=step.rows.iloc[:0]) for step in scenario.steps))
    if jobs == 1 and ray_address is None:
        found = [_makespans(lean, policies[name]) for name in names]
    else:
        with _backend(ray_address, jobs) as num_jobs:
            parts = [names[i::num_jobs] for i in range(min(num_jobs, len(names)))]
            done = Parallel(n_jobs=num_jobs)(
                delayed(_makespans_of)(lean, {name: policies[name] for name in part}) for part in parts
            )
        by_name = {name: made for part in done for name, made in part.items()}
        found = [by_name[name] for name in names]
    steps = [step.rl_step for step in scenario.steps]
    return pd.DataFrame(
        {
            "policy": np.repeat(names, len(steps)),
            "rl_step": steps * len(names),
            "makespan_s": [seconds for made in found for seconds in made],
        }
    )


def _makespans(scenario: Scenario, policy: PolicyLike) -> list[float]:
    return [rollout.makespan_s for rollout in scenario.rollouts(policy)]


def _makespans_of(scenario: Scenario, policies: Mapping[str, PolicyLike]) -> dict[str, Sequence[float]]:
    return {name: _makespans(scenario, policy) for name, policy in policies.items()}


@contextlib.contextmanager
def _backend(ray_address: str | None, jobs: int) -> Iterator[int]:
    """Where joblib runs, and with how many jobs: processes here, or a Ray cluster that is left as it was found."""
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
        address = None if ray_address == "local" else ray_address
        try:
            ray.init(address, log_to_driver=False, include_dashboard=False, logging_level=logging.ERROR)
        except (ConnectionError, RuntimeError, ValueError) as error:
            found = " ".join(str(error).split())[:200]
            raise ConfigError(f"no Ray cluster at {ray_address!r} ({found}); 'local' starts one here") from error
    try:
        register_ray()  # type: ignore[no-untyped-call]
        with parallel_config(backend="ray"):
            # One job is no parallel work for joblib: it would stay in this process.
            yield max(2, jobs if jobs > 1 else int(ray.cluster_resources().get("CPU", 2)))  # type: ignore[no-untyped-call]
    finally:
        if started:
            ray.shutdown()
