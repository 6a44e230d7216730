"""The one distribution: what a wheel holds, what imports what, and which names are refused."""

import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import pytest

from tltlab.cli.app import click_command, command_names

ROOT = Path(__file__).parents[1]


def run(*command, cwd=ROOT, env=None):
    return subprocess.run([str(c) for c in command], cwd=cwd, env=env, capture_output=True, text=True, check=False)


def test_no_modules_import_each_other():
    graph = grimp.build_graph("tltlab", cache_dir=None)
    # The root names the API for type checkers, and is imported for its name alone.
    imports = {name: graph.find_modules_directly_imported_by(name) - {"tltlab"} for name in graph.modules}
    # Until dumps are read elsewhere.
    imports["tltlab.traces.trace"] -= {"tltlab.importers.sources"}
    # CycleError names the modules.
    TopologicalSorter(imports).prepare()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("built")
    built = run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT)
    assert built.returncode == 0, built.stdout[-2000:] + built.stderr[-2000:]
    return next(folder.glob("*.whl"))


def test_a_clean_environment_imports_the_wheel_alone(wheel, tmp_path):
    names = zipfile.ZipFile(wheel).namelist()
    tables = "importers/frameworks", "importers/fields", "planning/systems"
    assert {f"tltlab/{name}.toml" for name in tables} <= set(names)
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"tltlab"}
    venv.create(tmp_path / "venv", with_pip=False)
    site = next((tmp_path / "venv" / "lib").glob("python*/site-packages"))
    zipfile.ZipFile(wheel).extractall(site)
    # Dependencies come from this environment; the editable install in it stays invisible (no .pth on PYTHONPATH).
    env = os.environ | {"PYTHONPATH": sysconfig.get_paths()["purelib"]}
    code = "import tltlab, tltlab.sim, tltlab.runtime.recipe.recipe; print(tltlab.__file__, tltlab.sim.__file__)"
    done = run(tmp_path / "venv" / "bin" / "python", "-c", code, cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(str(site)) == 2


@pytest.mark.skipif("TLTLAB_INSTALL" not in os.environ, reason="TLTLAB_INSTALL=1 installs the wheel with each extra")
@pytest.mark.parametrize(
    ("extra", "module", "command"),
    [
        ("", "sklearn", "trace describe TRACE"),
        ("dumps", "tokenizers", "trace validate TRACE"),
        ("sim", "optuna", "what-if TRACE"),
        ("notebooks", "nbclient", "timeline TRACE --out picture.png"),
    ],
)
def test_the_wheel_with_one_extra_runs(wheel, tmp_path, extra, module, command):
    """`suffix` is built from source and `runtime-cpu` is what the other tests run in: see .ci/setup."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    venv.create(tmp_path / "venv", with_pip=True)
    programs = tmp_path / "venv" / "bin"
    asked = f"{wheel}[{extra}]" if extra else wheel
    installed = run(programs / "python", "-m", "pip", "install", "-q", asked, cwd=tmp_path, env=env)
    assert installed.returncode == 0, installed.stderr[-2000:]
    own = run(programs / "python", "-c", f"import tltlab, {module}; print(tltlab.__file__)", cwd=tmp_path, env=env)
    assert own.stdout.startswith(str(tmp_path / "venv")), own.stderr
    words = command.replace("TRACE", str(ROOT / "traces" / "tiny")).split()
    done = run(programs / "tltlab", *words, cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["sim", "runtime"])
def test_a_bare_import_names_the_right_one(name):
    done = run(sys.executable, "-c", f"import {name}")
    assert done.returncode != 0
    assert f"import this package as tltlab.{name}" in done.stderr


def test_every_command_explains_itself():
    overview = run(sys.executable, "-m", "tltlab", "--help")
    assert overview.returncode == 0
    for name in command_names():
        assert f"  {name} " in overview.stdout
        command = click_command(name)
        for inner, each in getattr(command, "commands", {"": command}).items():
            line = f"tltlab {name} {inner}".strip()
            assert each.hidden or re.search(f"Examples?: {line}", " ".join(each.help.split())), line


def test_what_is_elsewhere_is_told_in_one_line(tmp_path):
    shutil.copytree(ROOT / "tltlab", tmp_path / "tltlab")
    done = run(
        sys.executable, "-m", "tltlab", "bench", "sim", env=os.environ | {"PYTHONPATH": str(tmp_path)}, cwd=tmp_path
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "clone" in done.stderr


def test_volume_counts_neither_comments_nor_docstrings():
    volume = runpy.run_path(str(ROOT / ".ci/volume.py"))
    assert volume["tokens"]('"""Two."""\n\n\ndef f(x):  # three\n    """Four."""\n    return "five"\n') == 8
