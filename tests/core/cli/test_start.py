"""What starting loads: little, so that it is quick; what a command says
where an extra is not installed; and that what ends it from outside lets it close what it holds."""

import ast
import json
import os
import re
import signal
import subprocess
import sys
import time
from importlib.metadata import entry_points, requires
from pathlib import Path

import pytest

import tltlab
from tests.refused import refused
from tltlab.cli import app

PACKAGE = Path(tltlab.__file__).parent
SLOW = {
    "matplotlib", "typer", "pandas", "pyarrow", "pydantic", "scipy", "sklearn", "rich", "numpy", "torch", "vllm", "ray",
}  # fmt: skip
FITS = {"scipy", "sklearn", "joblib", "optuna", "tltlab.sim.verification", "asyncio"}
"""Modules that simulating under given costs, and reading a trace, do not load."""
OF_EXTRAS = (
    "datasets", "huggingface_hub", "joblib", "math_verify", "msgspec", "optuna", "pebble", "peft", "ray", "safetensors",
    "simpy", "tensorboard", "tokenizers", "torch", "transformers", "vllm", "zmq",
)  # fmt: skip
COMES_WITH = {
    "sklearn": "scikit-learn",
    "threadpoolctl": "scikit-learn",
    "markupsafe": "jinja2",
    "pydantic_core": "pydantic",
    "llvmlite": "numba",
}
WITH_WORDS_OF_THEIR_OWN = {"prometheus_client", "wandb"}
"""No extra brings these: a recipe asks for them, and `RunLog` says how to install them."""

WITHOUT = """
import contextlib, io, json, sys

missing = set()

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in missing:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
for modules, argv in json.loads(sys.argv[1]):
    if missing != set(modules):
        missing = set(modules)
        # Modules that are there have those that are missing now, or saw others missing that are there now.
        for name in [name for name in sys.modules if name.split(".")[0] in (*modules, "tltlab")]:
            del sys.modules[name]
    from tltlab.cli.app import main
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(argv)
        except SystemExit as ended:
            code = ended.code or 0
    print(json.dumps([code, out.getvalue(), err.getvalue()]))
"""
TRACE = f"trace describe {Path(__file__).parents[3] / 'traces' / 'tiny'}"
"""Work of the core without any extra."""
Done = tuple[int, str, str]
"""Exit code, standard output, standard error."""


def loaded_by(code):
    """The names in `sys.modules` after `code`, in its own process."""
    code += "\nimport sys; sys.stderr.write(' '.join(sys.modules))"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stderr.split())


def without(*commands):
    """Results of command lines in one process, each without its missing modules."""
    program = [sys.executable, "-c", WITHOUT, json.dumps(commands)]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [(code, out, err) for code, out, err in map(json.loads, done.stdout.splitlines())]


def says_what_to_install(done, extra, module=""):
    """The last line, after progress, says it; there is no traceback, and no result."""
    code, out, err = done
    assert (code, out) == (2, ""), err
    assert "Traceback" not in err
    assert err.splitlines()[-1].startswith(f"tltlab: this needs {module}"), err
    assert f", which is not installed: pip install 'tltlab[{extra}]'" in err.splitlines()[-1]


@pytest.mark.parametrize(
    ("code", "needs", "leaves_out"),
    [
        ("import tltlab; tltlab.Strategy, tltlab.StepState, tltlab.ConfigError", "tltlab", SLOW),
        ("import tltlab.cli.app as cli\ntry: cli.main(['--help'])\nexcept SystemExit: pass", "tltlab", SLOW),
        (
            "import os, tltlab.cli.app as cli\n"
            "os.environ |= dict(_TLTLAB_COMPLETE='complete_bash', COMP_WORDS='tltlab ', COMP_CWORD='1')\n"
            "try: cli.main([])\nexcept SystemExit: pass",
            "typer", {"tltlab.cli.trace", "tltlab.sim", "tltlab.runtime", *SLOW} - {"typer", "rich", "pydantic"},
        ),
        (
            "import tltlab.runtime.engine.vllm.options, tltlab.console; from tltlab import load_policy", "pydantic",
            {"matplotlib", "typer", "rich", "pandas", "sklearn", "torch"},
        ),
        ("import tltlab.cli.costs", "typer", {"scipy", "sklearn", "torch"}),
        ("import tltlab.sim", "simpy", {"matplotlib", "typer", *FITS}),
        ("import tltlab.sim.cli.simulate", "simpy", {"matplotlib", *FITS}),
        ("import tltlab.cli.trace", "pyarrow", {"simpy", "matplotlib", *FITS}),
        ("import tltlab.cli.ui", "matplotlib", {"sklearn", "scipy.stats", "scipy.optimize", "torch", "simpy"}),
        (
            "import tltlab.runtime.engine.vllm.plugin", "torch",
            {"tltlab.policies", "matplotlib", "typer", "rich", "pandas", "pydantic", "scipy"},
        ),
    ],
    ids=["import", "overview", "completion", "policy", "costs", "simulator", "simulate", "trace", "ui", "plugin"],
)  # fmt: skip
def test_commands_load_no_slow_unneeded_modules(code, needs, leaves_out):
    pytest.importorskip(needs)
    loaded = loaded_by(code)
    assert {"tltlab", needs} <= loaded
    assert loaded.isdisjoint(leaves_out)


def test_garbage_is_collected_once_modules_are_loaded():
    ended = "\nexcept SystemExit: pass\nprint(gc.isenabled(), gc.get_freeze_count() > 10_000, file=sys.stderr)"
    begun = f"import gc, sys, tltlab.cli.app as cli\nsys.argv = ['tltlab', *{TRACE.split()}]\ntry: cli.main("
    for argv, found in (("", "True True"), ("sys.argv[1:]", "True False")):
        done = subprocess.run(
            [sys.executable, "-c", f"{begun}{argv}){ended}"], capture_output=True, text=True, check=True
        )
        assert done.stderr.splitlines()[-1] == found


def test_every_export_is_there_and_listed():
    for name in [*tltlab.__all__, "sim", "runtime"]:
        assert name in dir(tltlab)
    assert {getattr(tltlab, name).__name__ for name in tltlab._MODULE_OF} == set(tltlab._MODULE_OF)
    with refused(AttributeError, naming=("nope",)):
        _ = tltlab.nope


def test_overview_has_first_line_that_each_command_has():
    purposes = {}
    for entry in entry_points(group=app.GROUP):
        target = entry.load()
        purposes[entry.name] = getattr(getattr(target, "info", None), "help", None) or target.__doc__
    assert {name: text.strip().splitlines()[0] for name, text in purposes.items()} == app._words()


def imports_of(path):
    names = set()
    statements = [*ast.parse(path.read_text()).body]
    for node in statements:
        # Not `ast.walk`: most of a tree are expressions, which import nothing.
        for part in ("body", "orelse", "handlers", "finalbody"):
            statements += getattr(node, part, [])
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.add(str(node.module).split(".")[0])
    return names - sys.stdlib_module_names - {"tltlab"}


def test_every_import_is_a_requirement_or_extra():
    core = {re.split(r"[<>=;\[ ]", line)[0] for line in requires("tltlab") or () if "extra ==" not in line}
    sources = [path for part in ("", "sim", "runtime") for path in (PACKAGE / part).rglob("*.py")]
    imported = set().union(*map(imports_of, sources))
    assert {"numpy", "simpy", "zmq"} <= imported
    from_core = {name for name in imported if COMES_WITH.get(name, name) in core}
    for module in imported - WITH_WORDS_OF_THEIR_OWN - from_core:
        assert module in OF_EXTRAS
        assert "pip install 'tltlab[" in str(app._missing_extra(ModuleNotFoundError(name=module)))


@pytest.mark.parametrize("extra", ["sim", "runtime"])
def test_every_requirement_of_extra_is_named_with_it(extra):
    brings = {name: module for module, name in app._BROUGHT_BY.items() if module == "zmq"}
    for line in requires("tltlab") or ():
        if re.search(f"extra == ['\"]{extra}['\"]", line):
            name = re.split(r"[<>=;\[ ]", line)[0]
            module = brings.get(name, name.replace("-", "_"))
            assert module in OF_EXTRAS
            message = str(app._missing_extra(ModuleNotFoundError(name=f"{module}.inner")))
            assert message.startswith(f"this needs {module}, which is not installed: pip install 'tltlab[{extra}]'")


def test_what_no_extra_brings_stays_error_of_python():
    with refused(ModuleNotFoundError, naming=("of_the_users_own",)):
        app._missing_extra(ModuleNotFoundError("No module named 'of_the_users_own'", name="of_the_users_own"))


def test_missing_modules_name_their_extra(tmp_path):
    train = "train qwen2.5-0.5b-gsm8k reward=tltlab.runtime.rollout.rewards:math --out OUT"
    one_missing = [("optuna", "sim", "tune traces/tiny --out OUT"), ("pebble", "runtime", train),
                   ("math_verify", "runtime", train)]  # fmt: skip
    of_extras = {
        "simulate traces/tiny": "sim",
        "compare traces/tiny": "sim",
        "verify traces/tiny": "sim",
        "tune traces/tiny --out OUT": "sim",
        "train qwen2.5-0.5b-gsm8k --out OUT": "runtime",
        "train-drafter models/none texts.jsonl --out OUT": "runtime",
        "export-drafter runs/none --out OUT": "runtime",
        "make-model --out OUT": "runtime",
        "audit": "runtime",
        "demo --out OUT": "runtime",
    }
    # joblib comes with scikit-learn, so the core has it.
    all_missing = [name for name in OF_EXTRAS if name != "joblib"]
    cases = [*(([module], command) for module, _, command in one_missing),
             *((all_missing, command) for command in ("--help", TRACE, *of_extras))]  # fmt: skip
    found = without(*((modules, command.replace("OUT", str(tmp_path / "out")).split()) for modules, command in cases))
    for module, extra, _ in one_missing:
        says_what_to_install(found.pop(0), extra, module)
    code, out, _ = found.pop(0)
    assert code == 0
    assert "  train             Train with GRPO" in out
    assert found.pop(0)[0] == 0
    for done, extra in zip(found, of_extras.values(), strict=True):
        says_what_to_install(done, extra)


def test_sigterm_ends_a_command_as_ctrl_c_does(monkeypatch, capsys):
    closed = []

    def command(args):
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        finally:
            closed.append(args)

    monkeypatch.setattr(app, "_run", command)
    before = signal.getsignal(signal.SIGTERM)
    with refused(SystemExit, naming=("130",)):
        app.main(["train"])
    assert closed == [["train"]]
    assert "interrupted" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_full_disk_is_one_sentence(monkeypatch, command):
    def refuse(args):
        raise OSError(28, "No space left on device", "/tmp/ray/session")

    monkeypatch.setattr(app, "_run", refuse)
    code, _, err = command("train", "recipe.toml")
    (said,) = err.splitlines()
    assert (code, "disk is full: /tmp/ray/session" in said) == (1, True)
