"""The environment that a run's actors start in."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

from .start import LOOPBACK

# One thread per process: two on a busy machine stall for seconds. Numba's own threads belong to vLLM's n-gram drafter.
_ENV = {
    "OMP_NUM_THREADS": "1",
    "NUMBA_NUM_THREADS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TQDM_DISABLE": "1",
    "RAY_DEDUP_LOGS": "0",
}
# Else vLLM and process groups take the machine's outward address for their own sockets.
_ON_LOOPBACK = {"VLLM_HOST_IP": "127.0.0.1", "MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}


def actor_env(extra: Mapping[str, str], host: str = LOOPBACK[0]) -> dict[str, Any]:
    """A `runtime_env` for an actor, `extra` variables winning. `host` is `cluster.host`: on loopback, all stay on it.

    Modules that this process finds outside its installation import in the actor too, such as a user's policy.
    """
    env = _ENV | {"PYTHONPATH": os.pathsep.join(_user_paths())}
    if host in LOOPBACK:
        env |= _ON_LOOPBACK
    return {"env_vars": env | dict(extra)}


def _user_paths() -> list[str]:
    installed = (sys.prefix, sys.base_prefix)
    return [path or os.getcwd() for path in sys.path if not path.startswith(installed)]
