"""Scripts that are forks of a process which has imported their modules."""

import os
import signal
import subprocess

import psutil
import pytest

from prefork import Prefork

WAIT_S = 200


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
