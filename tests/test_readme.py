"""What the READMEs show: commands parse and the quick ones run, examples run, figures of shipped data are printed."""

import json
import pkgutil
import re
import shlex
import shutil
import sys
import tomllib
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.sim.workloads import typed
from tltlab.cli.app import click_command, main
from tltlab.config import entries
from tltlab.costs.load import load_costs, load_stages
from tltlab.drafters.specs import OwnDrafter
from tltlab.hardware import Gpu, ModelShape
from tltlab.importers.step_metrics import frameworks_of
from tltlab.policies.policy import SHIPPED, load_policy
from tltlab.runtime.recipe.recipe import Recipe, load_recipe
from tltlab.testing import check_selector

ROOT = Path(__file__).parents[1]
READMES = {
    name: (ROOT / name).read_text()
    for name in ("README.md", *(f"{part}/README.md" for part in ("tltlab", "sim", "runtime", "traces", "notebooks")))
}
PAGES = READMES | {name: (ROOT / name).read_text() for name in ("notebooks/LOG.md", "tests/README.md")}
EVERY_README = pytest.mark.parametrize("name", READMES)
EVERY_PAGE = pytest.mark.parametrize("name", PAGES)

QUICK = """
    tltlab simulate traces/tiny --policy mine:Halving
    tltlab what-if lengths.csv --gpus 8xH100 --model Qwen2.5-7B
    tltlab what-if lengths.csv --gpus 8xH100 --model Qwen2.5-7B --out what-if.html
    tltlab simulate lengths.csv --workers 8 --costs cpu-small --acceptance geometric:0.7 --strategy 4,1,5 --sd-threshold 32
    tltlab trace generate --regime reasoning --rl-steps 4 --prompts 256 --cap 32768 --workers 8 --out my-trace
    tltlab costs h100-qwen2.5-32b-tp4 --batch 1,8,32 --context 4096 --strategy 8,8,48 --accept-length 7.2
    tltlab simulate my-trace --costs h100-qwen2.5-7b
    tltlab costs vllm:4xH100:MiniMax-M2.5:fp8 --context 8000
    tltlab simulate my-trace --costs sglang:2xH200:Qwen3-32B --acceptance geometric:0.7
    tltlab simulate my-trace --workers 16 --costs h100-qwen2.5-32b-tp4 --acceptance tlt-qwen2.5-32b --strategy 8,8,32 --sd-threshold 32 --stages h100x64-qwen2.5-32b --gpus-per-worker 4
    tltlab compare my-trace --costs h100-qwen2.5-7b --policies none,table,beg-mab --acceptance geometric:0.7 --decision-block 32
    tltlab simulate traces/reasoning-32k --costs h100-qwen2.5-7b
    tltlab calibrate traces/tiny --out costs.json --acceptance siblings --stages-out stages.json
    tltlab calibrate traces/h100-smoke --out costs.json
    tltlab timeline traces/h100-smoke --out timeline.png
    tltlab export-policy table --max-batch 64
""".strip().splitlines()  # noqa: E501


def blocks(page, language):
    return re.findall(rf"```{language}\n(.*?)```", PAGES[page], re.DOTALL)


def prose(page):
    """A page without its fenced and indented blocks."""
    text = re.sub(r"```.*?```", "", PAGES[page], flags=re.DOTALL)
    return re.sub(r"^    .*$", "", text, flags=re.MULTILINE)


def inline_code(page):
    return [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose(page))]


def shown_lines(page):
    """Indented lines, without their comments."""
    return [line.split("  #")[0].strip() for line in re.findall(r"^    (\S.*)$", PAGES[page], re.MULTILINE)]


def commands(page):
    """The arguments of every `tltlab` command of a page."""
    lines = shown_lines(page) + inline_code(page)
    return [shlex.split(line)[1:] for line in lines if re.match(r"tltlab \w", line)]


def parsed(arguments):
    """The values that a command line gives to its options, none where it only names the command.

    Raises where the command refuses the line.
    """
    command, rest = click_command(arguments[0]), arguments[1:]
    if hasattr(command, "commands") and not rest[0].startswith("-"):
        assert rest[0] in command.commands, f"tltlab {arguments[0]} has no {rest[0]}"
        command, rest = command.commands[rest[0]], rest[1:]
    return {} if rest in ([], ["--help"]) else dict(command.make_context(arguments[0], rest).params)


def run(line, capsys):
    """What a command prints."""
    code, out, err = typed(capsys, *shlex.split(line)[1:])
    assert code == 0, f"{line}: {err}"
    return out


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A folder to work in, the current one, that has the shipped traces."""
    (tmp_path / "traces").symlink_to(ROOT / "traces")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


def test_the_pages_are_short_enough_to_be_read():
    assert len(READMES["README.md"].encode()) <= 8_000
    assert sum(len(text.encode()) for text in READMES.values()) <= 45_000


@EVERY_README
def test_every_command_parses_and_its_presets_load(name):
    for arguments in commands(name):
        values = parsed(arguments)
        for option, loads in {"costs": load_costs, "stages": load_stages}.items():
            if values.get(option) and not str(values[option]).endswith(".json"):
                loads(values[option])
        if arguments[0] == "train" and values and not values["resume"]:
            recipe = values["recipe"]
            if (ROOT / recipe).exists() or not recipe.endswith(".toml"):
                load_recipe(ROOT / recipe if (ROOT / recipe).exists() else recipe)


def test_the_recipe_takes_the_overrides_that_are_shown(tmp_path):
    (tmp_path / "recipe.toml").write_text(blocks("README.md", "toml")[0])
    lines = [arguments for page in READMES for arguments in commands(page) if arguments[0] == "train"]
    overrides = [word for words in lines for word in words if re.match(r"\w+\.\w+=", word)]
    assert "rollout.policy=mine:Halving" in overrides
    assert "train.steps=24" in overrides
    assert load_recipe(tmp_path / "recipe.toml", overrides).train.steps == 24


@EVERY_README
def test_options_in_a_sentence_are_some_command_s(name):
    named = {code.split()[0] for code in inline_code(name) if code.startswith("--")}
    offered = set()
    for command in ("simulate", "train", "tune", "trace", "bench", "audit", "compare", "calibrate", "verify"):
        found = click_command(command)
        for each in getattr(found, "commands", {"": found}).values():
            offered |= {option for parameter in each.params for option in parameter.opts}
    assert named <= offered | {"--no-build-isolation"}


def test_the_table_of_policies_has_the_shipped_ones():
    table = READMES["tltlab/README.md"].partition("## Policies")[2].partition("\n## ")[0]
    first_cells = "".join(re.findall(r"^\| (`[^|]*)\|", table, re.MULTILINE))
    assert set(re.findall(r"`([^`]+)`", first_cells)) == set(SHIPPED)


@EVERY_README
def test_targets_extras_markers_and_variables_are_there(name):
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    markers = (ROOT / "pyproject.toml").read_text()
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for line in [*shown_lines(name), *inline_code(name)]:
        words = shlex.split(line) if not line.count("'") % 2 and not line.count('"') % 2 else line.split()
        if words[0] == "make" and len(words) > 1:
            assert words[1] in targets, line
        for asked in re.findall(r"(?:tltlab|'\.)\[([\w,-]+)\]", line):
            assert set(asked.split(",")) <= set(extras), line
        if any(word.endswith("pytest") for word in words):
            for marker in re.findall(r'-m "(?:not )?(\w+)"', line):
                assert f'"{marker}: ' in markers, line
    sources = "".join(path.read_text() for path in [*ROOT.glob("notebooks/*.py"), *ROOT.glob("tests/**/*.py")])
    for variable in re.findall(r"\bTLTLAB_\w+", READMES[name]):
        assert variable in sources, variable


@EVERY_PAGE
def test_links_lead_to_a_file_and_a_heading(name):
    for target in re.findall(r"\]\(([^)\s]+)\)", PAGES[name]):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        page = (ROOT / name).parent / path if path else ROOT / name
        assert page.exists(), target
        if anchor:
            text = (page / "README.md" if page.is_dir() else page).read_text()
            headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
            anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in anchors, target


@pytest.mark.parametrize("name", [*READMES, "tests/README.md"])
def test_files_and_names_in_a_sentence_are_there(name):
    for code in inline_code(name):
        path, _, test = code.partition("::")
        if re.fullmatch(r"[\w./-]+(/|\.py|\.toml)|\w+/.+\.(json|txt)", path) and not code.startswith("demo/"):
            assert (ROOT / path).exists() or ((ROOT / name).parent / path).exists(), code
            assert not test or f"def {test}(" in (ROOT / path).read_text(), code
        if re.fullmatch(r"tltlab(\.\w+)+(:\w+)?", code):
            pkgutil.resolve_name(code)


def test_the_log_has_every_question_in_its_index():
    page = PAGES["notebooks/LOG.md"]
    headings = re.findall(r"^## (.*)$", page, re.MULTILINE)
    assert headings == re.findall(r"^\| \[(.*)\]\(#", page, re.MULTILINE)
    for _, section in pairwise(re.split(r"^## .*$", page, flags=re.MULTILINE)):
        assert all(line.startswith(("- 2026-", "  ")) for line in section.splitlines() if line)


@pytest.fixture(scope="module")
def my_trace(tmp_path_factory):
    """What the shown `trace generate` writes, once for all commands that read it."""
    out = tmp_path_factory.mktemp("generated") / "my-trace"
    (line,) = (shlex.split(each)[1:] for each in QUICK if "trace generate" in each)
    with pytest.raises(SystemExit) as ended:
        main([*line[:-1], str(out)])
    assert not ended.value.code
    return out


@pytest.mark.parametrize("line", QUICK, ids=lambda line: " ".join(line.split()[1:3]))
def test_quick_commands_run_as_they_stand(line, checkout, my_trace, capsys):
    shown = [arguments for page in READMES for arguments in commands(page)]
    assert shlex.split(line)[1:] in shown, "no README shows this any more"
    (checkout / "mine.py").write_text(blocks("README.md", "python")[0])
    (checkout / "lengths.csv").write_text("120\n" * 60 + "3000\n" * 4)
    if "my-trace" in line and "generate" not in line:
        (checkout / "my-trace").symlink_to(my_trace)
    assert run(line, capsys).strip()


def test_the_verdict_of_the_first_page_is_printed(checkout, capsys):
    shown = " ".join(re.findall(r"^    (\S.*)$", READMES["README.md"], re.MULTILINE))
    printed = run("tltlab what-if traces/base-rl-16k --gpus 8xH100 --model Qwen2.5-7B", capsys)
    assert " ".join(printed.partition("\n\n")[0].split()) in shown


def test_python_of_first_page_draws_picture(checkout):
    exec(blocks("README.md", "python")[1], {})
    assert (checkout / "timeline.png").exists()


def test_your_own_vllm_gets_the_policy(checkout, monkeypatch, capsys):
    given = {}
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=lambda model, **options: given.update(options)))
    shutil.copy(ROOT / "traces/subset-sum-small/policy.json", "policy.json")
    exec(blocks("README.md", "python")[2], {})
    selector = given["additional_config"]["tltlab"]["policy"]["selector"]
    assert load_policy("policy.json").selector.kind == selector["kind"]
    assert "speculative_config" in capsys.readouterr().out


def test_python_of_format_makes_valid_trace(checkout, capsys):
    (checkout / "mine").mkdir()
    (example,) = [block for block in blocks("traces/README.md", "python") if "manifest.json" in block]
    exec(example, {})
    assert run("tltlab trace validate mine", capsys).startswith("valid: 4 responses")


def test_figures_of_h100_are_those_of_its_trace(checkout, capsys):
    (example,) = [block for block in blocks("traces/README.md", "python") if "h100-smoke" in block]
    exec(example, {})
    shown = [line.rstrip() for line in PAGES["traces/README.md"].splitlines()]
    for line in capsys.readouterr().out.splitlines():
        assert f"    {line}".rstrip() in shown
    text = " ".join(PAGES["traces/README.md"].split())
    assert " 6.80 " in run("tltlab costs h100-qwen2.5-7b --batch 1 --context 200", capsys)
    assert "predicts 6.80 ms" in text
    fitted = json.loads(run("tltlab calibrate traces/h100-smoke --out costs.json --json", capsys))
    assert f"floor of {fitted['costs']['base_s'] * 1e3:.1f} ms" in text


def test_examples_of_what_to_add_are_true():
    gpu, model = (json.loads(block) for block in blocks("tests/README.md", "json"))
    assert entries(Gpu, [gpu], "page")
    assert entries(ModelShape, [model], "page")[0].weight_params == pytest.approx(71.5e9, rel=0.01)
    (log,) = blocks("tests/README.md", "toml")
    assert frameworks_of(tomllib.loads(log)["framework"])[0].marks.search("ours/tokens")
    names = {"DEFAULT_DRAFTERS": {}, "OwnDrafter": OwnDrafter}
    for block in ("from tltlab import *", *blocks("tests/README.md", "python")):
        exec(block, names)
    assert names["DEFAULT_DRAFTERS"]["copier"].module.startswith("tltlab.drafters.")
    check_selector(names["Halving"])
    for name, path in re.findall(r"`([A-Z_]{5,})`\s+of\s+`([\w/.]+)`", PAGES["tests/README.md"]):
        assert re.search(rf"^{name}\b", (ROOT / path).read_text(), re.MULTILINE), name


def test_every_recipe_parses():
    shown = [block for page in READMES for block in blocks(page, "toml")]
    for text in [*shown, *(path.read_text() for path in ROOT.glob("traces/*/recipe.toml"))]:
        Recipe.model_validate(tomllib.loads(text))


def test_shipped_traces_are_valid_and_small(capsys):
    for folder in sorted((ROOT / "traces").glob("*/manifest.json")):
        run(f"tltlab trace validate {folder.parent}", capsys)
    assert sum(file.stat().st_size for file in (ROOT / "traces" / "tiny").iterdir()) < 200_000
