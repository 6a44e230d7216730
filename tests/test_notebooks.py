"""The notebooks run as a reader runs them, and what is shown in each pair is what its script says."""

import os
from pathlib import Path

import pytest

NEEDS = "notebooks need jupytext, nbclient and ipykernel: extra 'notebooks'"
jupytext = pytest.importorskip("jupytext", reason=NEEDS)
nbclient = pytest.importorskip("nbclient", reason=NEEDS)
nbformat = pytest.importorskip("nbformat", reason=NEEDS)

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = sorted((ROOT / "notebooks").glob("[0-9]*.py"))
ENGINES = {"05_tune_and_run"}
"""Start a real engine in the notebook."""


def forking():
    """Has the actors of a notebook's run be forks of the process that the tests have for that."""
    from tltlab.runtime.ray.start import worker_commands

    return f"from tltlab.runtime.ray import start\nstart.worker_commands[:] = {worker_commands}"


def cells(path):
    return [(cell.cell_type, cell.source) for cell in jupytext.read(path).cells]


def errors(notebook):
    return [output for cell in notebook.cells for output in cell.get("outputs", []) if output.output_type == "error"]


def pictures(notebook):
    shown = (output for cell in notebook.cells for output in cell.get("outputs", []))
    return sum("image/png" in output.get("data", {}) for output in shown)


def test_there_are_nine():
    assert [path.stem[:2] for path in SCRIPTS] == [f"{number:02}" for number in range(1, 10)]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_script_and_notebook_are_a_pair(script):
    notebook = script.with_suffix(".ipynb")
    assert cells(notebook) == cells(script), f"jupytext --sync notebooks/{script.name}"
    stored = jupytext.read(notebook)
    assert pictures(stored) >= 1, "a reader on the web sees the stored pictures"
    assert not errors(stored)
    assert str(ROOT) not in notebook.read_text(), "paths of a machine do not belong in a notebook"
    assert notebook.stat().st_size < 400_000


@pytest.fixture(scope="module")
def kernel():
    """A process that runs the notebooks in turn."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("TLTLAB_RUN", "TLTLAB_MODEL"):
            patch.delenv(name, raising=False)
        patch.setenv("OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", "1"))
        first = nbclient.NotebookClient(nbformat.v4.new_notebook(), kernel_name="python3")
        first.create_kernel_manager()
        first.start_new_kernel(cwd=str(ROOT))
    yield first.km
    first._cleanup_kernel()


@pytest.mark.parametrize(
    "script",
    [pytest.param(path, id=path.stem, marks=[pytest.mark.engine] if path.stem in ENGINES else []) for path in SCRIPTS],
)
def test_a_notebook_runs_from_its_script(script, kernel):
    """Within a minute where nothing else keeps the machine busy; the limit here leaves room for neighbours."""
    if engine := script.stem in ENGINES:
        pytest.importorskip("vllm", reason="no engine installed: extra 'runtime' or 'runtime-cpu'")
    notebook = jupytext.read(script)
    # Nothing of the notebook before is known, but what it imported need not be imported anew. Who starts processes by
    # multiprocessing looks for __spec__, which goes too.
    notebook.cells.insert(0, nbformat.v4.new_code_cell(f"{forking() if engine else ''}\n%reset -f\n__spec__ = None"))
    nbclient.NotebookClient(notebook, timeout=400, km=kernel).execute()
    assert not errors(notebook)
    assert pictures(notebook) == pictures(jupytext.read(script.with_suffix(".ipynb")))
