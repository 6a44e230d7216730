"""Workers that are forks of a process which has imported their modules: real ones, of their own Ray."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import ray

from prefork import Prefork
from tltlab.runtime.ray import actors
from tltlab.runtime.ray.actors import runtime_env
from tltlab.runtime.ray.start import ray_running

WAIT_S = 200


class Actor:
    def seen(self):
        return os.getpid(), os.getppid(), "decimal" in sys.modules, os.environ.get("OWN")


@pytest.fixture(scope="module")
def prefork():
    with Prefork(["decimal", "no_such_module"], {"SAID": "once"}) as prefork:
        yield prefork


def run(prefork, code, folder, **options):
    """A script as Ray would start it."""
    script = folder / "script.py"
    script.write_text(code)
    return subprocess.Popen([*prefork.command.split(), str(script), "argument"], text=True, **options)


def test_a_fork_is_the_script_itself(prefork, tmp_path):
    code = """import os, sys
print(sys.argv[1], os.getcwd(), os.environ["OWN"], "SAID" in os.environ, "decimal" in sys.modules)
raise SystemExit(3)"""
    with run(prefork, code, tmp_path, cwd=tmp_path, env=os.environ | {"OWN": "mine"}, stdout=subprocess.PIPE) as asked:
        out, _ = asked.communicate(timeout=WAIT_S)
    assert out.split() == ["argument", str(tmp_path), "mine", "False", "True"]
    assert asked.returncode == 3


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGKILL])
def test_a_fork_ends_with_what_stands_for_it(prefork, tmp_path, sent):
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    with run(prefork, code, tmp_path, stdout=subprocess.PIPE) as asked:
        fork = psutil.Process(int(asked.stdout.readline()))
        asked.send_signal(sent)
        assert asked.wait(WAIT_S) == -sent
    psutil.wait_procs([fork], timeout=WAIT_S)
    assert not fork.is_running()


def test_a_forks_stand_in_ends_alike(prefork, tmp_path):
    with run(prefork, "import os; os.kill(os.getpid(), 9)", tmp_path) as asked:
        assert asked.wait(WAIT_S) == -signal.SIGKILL


def test_without_a_fork_the_script_runs_itself(tmp_path):
    with Prefork([], {}) as gone:
        pass
    with run(gone, "import sys; print('decimal' in sys.modules)", tmp_path, stdout=subprocess.PIPE) as asked:
        assert asked.communicate(timeout=WAIT_S)[0].strip() == "False"
    assert not Path(gone.command.split()[-1]).parent.exists()


@pytest.mark.engine
def test_actors_are_forks_and_die_as_actors_do(prefork, monkeypatch):
    monkeypatch.setattr(actors, "worker_commands", [prefork.command])
    with ray_running():
        actor = ray.remote(Actor).options(num_cpus=0, runtime_env=runtime_env({"OWN": "mine"})).remote()
        pid, parent, *rest = ray.get(actor.seen.remote())
        assert parent == prefork._process.pid
        assert rest == [True, "mine"]
        fork = psutil.Process(pid)
        ray.kill(actor)
        psutil.wait_procs([fork], timeout=WAIT_S)
        with contextlib.suppress(psutil.NoSuchProcess):
            assert fork.status() == psutil.STATUS_ZOMBIE
    assert not ray.is_initialized()


@pytest.mark.parametrize("level", [None, "info"])
def test_warnings_of_vllms_imports_are_not_printed(tmp_path, capfd, monkeypatch, level):
    (tmp_path / "noisy.py").write_text("import logging; logging.getLogger('vllm.noisy').warning('Triton is installed')")
    monkeypatch.delenv("VLLM_LOGGING_LEVEL", raising=False)
    env = {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]])}
    env |= {} if level is None else {"VLLM_LOGGING_LEVEL": level}
    with Prefork(["noisy"], env) as prefork, run(prefork, "", tmp_path) as asked:
        assert asked.wait(WAIT_S) == 0
    assert ("Triton" in capfd.readouterr().err) is (level is not None)
