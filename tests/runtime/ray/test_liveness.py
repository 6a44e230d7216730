"""Nobody is waited for without end: who was stopped is killed, who does not answer a call is taken for dead."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext

import pytest
import ray

from tests.refused import refused
from tltlab.console import sigterm_as_interrupt, sigterm_handler
from tltlab.errors import RunError
from tltlab.runtime.ray.actors import Waiting
from tltlab.runtime.ray.liveness import EndedServers, StoppedProcesses, is_stopped
from tltlab.runtime.rollout.pool import WorkerLost, WorkerPool
from tltlab.runtime.trainer.group import TrainerDied, TrainerGroup

from ..small_models import small_recipe


@contextmanager
def waiting(num):
    command = [sys.executable, "-S", "-c", "input()"]
    with ExitStack() as stack:
        made = [stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE)) for _ in range(num)]
        for process in made:
            stack.callback(process.kill)
        yield made


def stop(process):
    os.kill(process.pid, signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)


def test_only_who_is_stopped_too_long_is_killed():
    told = []
    with waiting(3) as (stays, rests, runs):
        watch = StoppedProcesses(
            lambda: {"trainer rank 0": stays.pid, "trainer rank 1": rests.pid, "engine": runs.pid, "none yet": 0},
            told.append,
            patience_s=60.0,
        )
        for process in (stays, rests):
            stop(process)
        watch.look(100.0)
        watch.look(159.0)
        os.kill(rests.pid, signal.SIGCONT)
        os.waitpid(rests.pid, os.WCONTINUED)
        watch.look(160.0)
        assert [fact in told[0] for fact in ("trainer rank 0", str(stays.pid), "60 s")] == [True] * 3
        assert stays.wait() == -signal.SIGKILL
        # What rested begins anew.
        stop(rests)
        watch.look(200.0)
        watch.look(259.0)
        assert (rests.poll(), runs.poll(), len(told)) == (None, None, 1)
    assert not is_stopped(runs.pid), "it is not there"


@pytest.mark.timeout(60)
def test_the_end_of_a_server_interrupts_who_waits():
    def waits():
        with sigterm_as_interrupt(), EndedServers({"first": lives.pid, "second": dies.pid}) as watch:
            dies.kill()
            try:
                threading.Event().wait()
            finally:
                assert watch.ended == f"second (process {dies.pid})"

    with waiting(2) as (lives, dies):
        with pytest.raises(KeyboardInterrupt):
            waits()
        with EndedServers({"first": lives.pid}) as watch:
            pass
        assert not watch.ended
    # Nobody is there any more, or was in time.
    with EndedServers({"first": lives.pid}) as watch:
        pass
    assert not watch.ended


KILLED = """
import os, signal, sys, threading
import ray
from tltlab.console import sigterm_as_interrupt
from tltlab.errors import RunError
from tltlab.runtime.ray import start

start.MODULES = ()  # no actor starts
try:
    with sigterm_as_interrupt(), start.ray_running():
        os.kill(ray._private.worker._global_node.all_processes["raylet"][0].process.pid, signal.SIGKILL)
        threading.Event().wait()
except RunError as error:
    sys.exit(f"ended well: {error}")
"""


@pytest.mark.engine
@pytest.mark.timeout(300)
def test_a_run_ends_with_its_ray(sockets):
    env = os.environ | {"TMPDIR": str(sockets), "RAY_TMPDIR": str(sockets)}
    env.pop("RAY_ADDRESS", None)
    ended = subprocess.run([sys.executable, "-c", KILLED], env=env, capture_output=True, text=True, timeout=280)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "ended well: Ray's raylet (process" in ended.stderr
    assert "state-dump" not in ended.stderr


def recipe(call_timeout_s):
    return small_recipe(faults={"call_timeout_s": call_timeout_s})


def test_a_rollout_worker_that_never_answers_is_lost():
    pool = WorkerPool.__new__(WorkerPool)
    pool.recipe, pool.handles, pool._longest_call_s = recipe(0.01), [None], 0.0
    with refused(WorkerLost, naming=("0", "01")):
        asyncio.run(pool._answer(0, never()))
    pool.recipe = recipe(600.0)
    assert asyncio.run(pool._answer(0, asyncio.sleep(0.0, 7))) == 7
    assert pool.recipe.faults.patience_s(30.0) == 600.0 + 20 * 30.0


async def never():
    await asyncio.Event().wait()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("handler", [signal.default_int_handler, lambda number, frame: None])
def test_a_sigterm_at_wakening_ends_the_wait(monkeypatch, handler):
    """Raised there, the task is never awake again, and `asyncio.run` waits for it at its end."""
    passed = 0
    run = asyncio.Handle._run

    def terminated_before(handle):
        nonlocal passed
        passed += 1
        if passed == nth:
            signal.raise_signal(signal.SIGTERM)
        run(handle)

    async def answers():
        return await asyncio.gather(*(asyncio.sleep(0.001) for _ in range(3)))

    monkeypatch.setattr(asyncio.Handle, "_run", terminated_before)
    with sigterm_handler(handler):
        for nth in range(1, 12):
            passed = 0
            with pytest.raises(KeyboardInterrupt) if handler is signal.default_int_handler else nullcontext():
                assert Waiting().run(answers()) == [None] * 3
            assert passed >= nth
            assert signal.getsignal(signal.SIGTERM) is handler


@pytest.mark.timeout(60)
def test_a_rollout_beside_training_ends_with_the_run():
    """Workers are killed then, and after Ray's end nobody hears of it."""
    waiting, begun = Waiting(), threading.Event()

    async def answers():
        begun.set()
        await never()

    with ThreadPoolExecutor(1) as beside:
        waits = beside.submit(waiting.run, answers())
        assert begun.wait(60)
        waiting.close()
        with refused(RunError):
            waits.result()


def test_silent_trainer_ranks_are_taken_for_dead(monkeypatch):
    monkeypatch.setattr(ray, "wait", lambda refs, **options: ([], refs))
    group = TrainerGroup(recipe(600.0), lambda rank: {})
    with refused(TrainerDied, naming=("2", "600")):
        group._wait([object(), object()], "update")
