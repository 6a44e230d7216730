"""Start of Ray: joined where there is a cluster, else on this machine, listening on loopback."""

import os
import shutil
import socket
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import ray
from ray._private import ray_constants
from ray._private.node import Node

from tltlab.console import progress, sigterm_handler
from tltlab.errors import ConfigError, RunError, one_line
from tltlab.records import Json
from tltlab.runtime.engine.vllm import replaced
from tltlab.runtime.recipe.sections import ClusterConfig

from .liveness import EndedServers
from .scratch import register

ENV = {
    # One thread per process: two on a busy machine stall for seconds. Numba's own belong to vLLM's n-gram drafter.
    "OMP_NUM_THREADS": "1",
    "NUMBA_NUM_THREADS": "1",
    "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
    "TQDM_DISABLE": "1",
    "RAY_DEDUP_LOGS": "0",
}
"""Environment variables of every actor."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")
MOST_STARTS = 3
"""Attempts to start Ray: on a busy machine its servers may answer too late."""


worker_commands: list[str] = []
"""Ray's command for workers instead of `python`, if there is one: tests have theirs forked."""


@contextmanager
def ray_running(cluster: ClusterConfig = ClusterConfig()) -> Iterator[None]:
    """Within the block, Ray runs: see `start_ray`; one that was started here ends.

    RunError where one of its servers has ended meanwhile; the main thread is interrupted then.
    """
    if not start_ray(cluster):
        yield
        return
    node = ray._private.worker._global_node
    assert node is not None
    session = Path(node.get_session_dir_path())
    register(session)
    servers = {name: node.all_processes[name][0].process.pid for name in ("raylet", "gcs_server")}
    watch = EndedServers(servers)
    with replaced(ray._private.worker, "print_to_stdstream", _print_line):
        try:
            with watch:
                yield
        finally:
            ray.shutdown()
            if watch.ended:
                # Replaces the interrupt, or its consequences.
                raise RunError(
                    f"Ray's {watch.ended} has ended: it was killed, or the machine is short of memory; its "
                    f"logs are in {node.get_logs_dir_path()} until the next run starts"
                )
        # Not after an error: Ray's logs may have the cause.
        shutil.rmtree(session, ignore_errors=True)


def _print_line(data: Json, ignore_prefix: bool) -> None:
    """Print output of Ray's servers on standard error, one line each.

    Standard output is for results, and Ray would print the last lines of its logs there.
    """
    for text in data["lines"]:
        progress(f"Ray: {text.strip().partition(chr(10))[0][:300]}")


def start_ray(cluster: ClusterConfig = ClusterConfig()) -> bool:
    """Join the Ray cluster that RAY_ADDRESS names, else start one on this machine; return True if started here.

    A Ray started here listens on loopback alone, unless `cluster.host` is another address of this machine: then it
    listens on all interfaces, Ray's default. Actors of a run take no logical CPUs, so any number of actors fits.
    ConfigError where `cluster` has several nodes and RAY_ADDRESS is not set, where there is none to join, or where
    `cluster.host` is no address of this machine; RunError where Ray does not start.
    """
    if ray.is_initialized():
        return False
    # For Ray, "local" means a cluster that it is to start.
    address = os.environ.get("RAY_ADDRESS") or "local"
    if address == "local" and cluster.num_nodes > 1:
        raise ConfigError(
            f"cluster.num_nodes = {cluster.num_nodes} needs a Ray cluster: start it with `ray start` on every node and "
            "set RAY_ADDRESS to its head"
        )
    _guard_token()
    quiet: Json = {"log_to_driver": False, "logging_level": "ERROR"}
    if address != "local":
        try:
            with sigterm_handler():
                ray.init(address=address, **quiet)
        except (ConnectionError, RuntimeError, ValueError) as error:  # unreachable, of another version, or no address
            raise ConfigError(f"cannot join a Ray cluster at RAY_ADDRESS={address}: {one_line(error)[:200]}") from error
        return False
    _check_host(cluster.host)
    # Ray 2.60 would replace a loopback address by the machine's, and GCS, raylet and every worker would listen on all
    # interfaces. Ray's switch for this, RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0, is only read at import.
    on_interfaces = ray_constants.ENABLE_RAY_CLUSTER and cluster.host not in LOOPBACK
    loopback = replaced(ray_constants, "ENABLE_RAY_CLUSTER", on_interfaces)
    # Ray's own handler of SIGTERM ends the actors before they can be closed.
    with loopback, sigterm_handler():
        for starts_left in reversed(range(MOST_STARTS)):
            try:
                ray.init(
                    address="local",
                    _node_ip_address=cluster.host,
                    include_dashboard=False,
                    # Models on GPUs are sent through it; Ray's own default is a third of the host's memory.
                    object_store_memory=None if cluster.gpus_per_node else 512 << 20,
                    # A busy machine is not a failed one. Records of calls are not used, and Ray would keep 100,000. No
                    # actor takes one of the workers that start ahead. With Ray's niceness of 15 other processes of a
                    # busy machine would be served first, and distort measurements.
                    _system_config={
                        "worker_niceness": int(os.environ.get(ray_constants.RAY_WORKER_NICENESS, 0)),
                        "health_check_failure_threshold": 60,
                        "task_events_report_interval_ms": 0,
                        "prestart_worker_first_driver": False,
                    },
                    **quiet,
                )
                break
            except Exception as error:  # Ray's exceptions have no common base
                _end(error)
                if not starts_left:
                    raise RunError(
                        f"Ray did not start on this machine, {MOST_STARTS} times; at last: {one_line(error)[:200]}; "
                        "is it too busy, or short of memory?"
                    ) from error
                progress(f"Ray did not start ({one_line(error)[:200]}); trying again")
    return True


def _guard_token() -> None:
    """Make Ray's token readable for this user alone: with it anybody could run code as this user.

    Ray creates it at its first start on a machine, readable for others by the umask, and requires it from then on.
    ConfigError where another user's token is readable by others.
    """
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    if os.environ.get("RAY_AUTH_MODE", "").lower() == "token" and not os.environ.get("RAY_AUTH_TOKEN"):
        try:
            mode = path.stat().st_mode & 0o777
            if mode & 0o077:
                path.chmod(0o600)
        except PermissionError as error:
            raise ConfigError(
                f"{path}, Ray's token, can be read by others (its mode is {mode:o}): chmod 600 {path}"
            ) from error
        except OSError:
            return  # Ray reports a missing token


def _check_host(host: str) -> None:
    """Refuse an address that is not this machine's: Ray would wait a quarter of an hour for itself there."""
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[:1]:
            with socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
    except OSError as error:
        raise ConfigError(
            f"cluster.host = {host!r} is no address of this machine ({error.strerror}): Ray listens there"
        ) from error


def _end(error: Exception) -> None:
    """End the servers of a Ray whose start failed: only its stack frame refers to the unfinished node."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        node = frame.f_locals.get("self")
        if isinstance(node, Node):
            node.kill_all_processes(check_alive=False, allow_graceful=False, wait=True)
            break
    ray.shutdown()
