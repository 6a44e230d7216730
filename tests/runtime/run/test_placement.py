"""Where actors go: on a Ray cluster of two nodes with eight GPUs each, which are numbers here, and on loopback."""

import os
import time
from contextlib import suppress

import psutil
import pytest
import ray
from ray.cluster_utils import Cluster

from tests.refused import refused
from tltlab.errors import ConfigError, RunError
from tltlab.runtime.ray.start import MOST_STARTS, start_ray
from tltlab.runtime.recipe.sections import ClusterConfig
from tltlab.runtime.run.placement import GpuPlacement

from ..small_models import small_recipe

LOOPBACK = {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


@ray.remote
class Here:
    def seen(self):
        return ray.get_runtime_context().get_node_id(), os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")


def recipe(*, tp=1, workers, ranks, nodes=2, gpus=8, **more):
    return small_recipe(
        rollout={"num_workers": workers, "tensor_parallel_size": tp, "gpus_per_worker": more.get("worker_gpus")},
        train={"ranks": ranks, "gpus": more.get("rank_gpus")},
        cluster={"placement": more.get("placement", "separate"), "num_nodes": nodes, "gpus_per_node": gpus},
    )


def options_of(placement, workers, ranks):
    return [placement.worker_options(n) for n in range(workers)] + [placement.trainer_options(r) for r in range(ranks)]


def started(asked):
    """Node and GPUs of an actor each, all running at the same time."""
    actors = []
    for options in asked:
        env = {"env_vars": options["env_vars"]}
        placed = {name: value for name, value in options.items() if name != "env_vars"}
        actors.append(Here.options(runtime_env=env, **placed).remote())
    try:
        return ray.get([actor.seen.remote() for actor in actors], timeout=300)
    finally:
        for actor in actors:
            ray.kill(actor)


def servers():
    """Name and address of every socket that this process or one below it listens on."""
    found = set()
    me = psutil.Process()
    for process in (me, *me.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            name, connections = process.name(), process.net_connections("inet")
            found |= {(name, each.laddr.ip) for each in connections if each.status == psutil.CONN_LISTEN}
    return found


@pytest.mark.engine
def test_a_ray_started_here_listens_on_loopback_alone(monkeypatch):
    too_late(monkeypatch, times=1)
    assert start_ray()
    try:
        workers = os.cpu_count() or 1
        with GpuPlacement(recipe(workers=workers, ranks=1, nodes=1, gpus=0)) as placement:
            assert len(started(options_of(placement, workers, 1))) == workers + 1
            alive = Here.remote()
            ray.get(alive.seen.remote())
        listening = servers()
        assert {"gcs_server", "raylet", "ray::Here"} <= {name for name, _ in listening}
        assert {address for _, address in listening} <= LOOPBACK
        assert ray.get(alive.__ray_call__.remote(lambda self: os.nice(0))) == os.nice(0)
        assert not start_ray()
        with refused(ConfigError, naming=("4", "1", "2")):
            GpuPlacement(recipe(workers=4, ranks=2, nodes=1)).__enter__()
    finally:
        ray.shutdown()


def too_late(monkeypatch, times):
    """Let the server that Ray starts first have no time to answer, so many times; what is said of that."""
    said = []

    def once_more(message):
        said.append(message)
        if len(said) == times:
            monkeypatch.delenv("RAY_gcs_server_port_wait_time_s")

    monkeypatch.setenv("RAY_gcs_server_port_wait_time_s", "0")
    monkeypatch.setattr("tltlab.runtime.ray.start.progress", once_more)
    return said


@pytest.mark.engine
def test_a_ray_that_fails_leaves_nothing(monkeypatch):
    said = too_late(monkeypatch, times=MOST_STARTS)
    with refused(RunError, naming=("3",)):
        start_ray()
    assert len(said) == MOST_STARTS - 1
    assert not ray.is_initialized()
    assert not [child for child in psutil.Process().children() if "gcs_server" in child.name()]


def test_a_cluster_that_cannot_be_is_refused(monkeypatch):
    for host in ("192.0.2.1", "no host"):
        with refused(ConfigError, naming=("cluster", host)):
            start_ray(ClusterConfig(host=host))
    for address in ("", "local"):
        monkeypatch.setenv("RAY_ADDRESS", address)
        with refused(ConfigError, naming=("RAY_ADDRESS",)):
            start_ray(ClusterConfig(num_nodes=2))


@pytest.fixture(scope="module")
def ray_cluster():
    ray.shutdown()
    cluster = Cluster()
    for _ in range(2):
        cluster.add_node(num_cpus=1, num_gpus=8, object_store_memory=80 << 20)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def test_separate_actors_have_gpus_of_their_own(ray_cluster):
    with GpuPlacement(recipe(tp=6, workers=2, ranks=1)) as placement:
        seen = started(options_of(placement, 2, 1))
    assert [len(gpus) for _, gpus in seen] == [6, 6, 1]
    taken = [(node, gpu) for node, gpus in seen for gpu in gpus]
    assert len(taken) == len(set(taken)) == 13
    assert len({node for node, _ in seen}) == 2


def test_colocated_ranks_share_the_gpus_of_the_workers(ray_cluster):
    with GpuPlacement(recipe(tp=8, workers=2, ranks=16, placement="colocated")) as placement:
        workers = [placement.worker_options(n) for n in range(2)]
        ranks = [placement.trainer_options(r) for r in range(16)]
        seen = started([*workers, ranks[15]])
        # A worker that is started again finds the same GPUs.
        assert started([placement.worker_options(1)]) == [seen[1]]
    assert seen[0][0] != seen[1][0]
    assert [sorted(gpus) for _, gpus in seen[:2]] == [list("01234567")] * 2
    assert seen[2] == (seen[1][0], seen[1][1][7:])
    told = [options["env_vars"]["CUDA_VISIBLE_DEVICES"] for options in ranks]
    assert told == [gpu for _, gpus in seen[:2] for gpu in gpus]


def test_shares_of_a_gpu_are_one_each(ray_cluster):
    with GpuPlacement(recipe(workers=1, ranks=1, worker_gpus=0.3, rank_gpus=0.4)) as placement:
        seen = started(options_of(placement, 1, 1))
    assert len({(node, *gpus) for node, gpus in seen}) == 1
    assert [len(gpus) for _, gpus in seen] == [1, 1]


def test_held_gpus_are_not_waited_for_long(ray_cluster, monkeypatch):
    asked = recipe(tp=4, workers=4, ranks=16, placement="colocated")
    with GpuPlacement(asked):
        begun = time.monotonic()
        with monkeypatch.context() as brief, refused(ConfigError, naming=("4", "2")):
            brief.setattr("tltlab.runtime.run.placement.READY_S", 2.0)
            GpuPlacement(asked).__enter__()
        assert time.monotonic() - begun < 200
    with GpuPlacement(asked):
        pass


def test_more_than_the_cluster_is_refused(ray_cluster):
    begun = time.monotonic()
    for asked in (recipe(workers=17, ranks=1, gpus=16), recipe(tp=16, workers=1, ranks=1, gpus=32)):
        with refused(ConfigError, naming=("8",)):
            GpuPlacement(asked).__enter__()
    with refused(ConfigError, naming=("num_nodes", "3", "2")):
        GpuPlacement(recipe(workers=1, ranks=1, nodes=3)).__enter__()
    assert time.monotonic() - begun < 200
