"""What `tltlab train` refuses before anything starts: exit code 2, one line, and nothing written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.refused import refused
from tltlab.cli import app as cli
from tltlab.errors import ConfigError
from tltlab.policies.specs import code_allowed
from tltlab.runtime.recipe import checks
from tltlab.runtime.run.checkpoints import RunCheckpoints
from tltlab.traces.recorder import Recorder
from tltlab.traces.schema import Manifest

SHAPE = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 24,
}  # fmt: skip


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that commands run in: a model's shape, prompts, a recipe and things that are wrong."""
    monkeypatch.chdir(tmp_path)
    for model in ("m", "bare"):
        (tmp_path / model).mkdir()
        (tmp_path / model / "config.json").write_text(json.dumps(SHAPE))
    (tmp_path / "m" / "model.safetensors").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "t.jsonl").touch()
    (tmp_path / "policy.json").write_text("{}")
    (tmp_path / "recipe.toml").write_text(
        'model = "m"\nreward = "loud:reward"\ndata = {train = "t.jsonl"}\nrollout = {policy = "beg-mab"}\n'
    )
    (tmp_path / "loud.py").write_text("print('imported')\ndef reward(prompt, response, answer): return 0.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def train(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    """Exit code, standard output, standard error."""
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", *args])
    out, err = capsys.readouterr()
    assert isinstance(ended.value.code, int)
    return ended.value.code, out, err


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("rollout.max_draft_depth=4", "rollout.policy = beg-mab: strategy ngram:8: the engine is built for"),
        ("rollout.policy=beg-mab-learned", "strategy learned:8: this engine has the drafters ngram, suffix"),
        ("rollout.policy=policy.json", "policy.json: format: Input should be 'tltlab-policy'"),
        ("rollout.policy=gone.json", "cannot read gone.json"),
        ("reward=loud:rewards", "loud has no 'rewards'"),
        ("reward=silent:reward", "does not import: ModuleNotFoundError"),
        ("data.train=gone.jsonl", "data.train: cannot read gone.jsonl: there is no such file"),
        ("data.heldout=/no/such/folder", "data.heldout: cannot read /no/such/folder"),
        ("data.train=", "data.train is empty"),
        ("model=/no/Qwen2.5-7B", "model = /no/Qwen2.5-7B: there is no such folder"),
        ("model=empty", "model = empty is no model: it has no config.json"),
        ("model=bare", "model = bare has no weights"),
        ('rollout.drafters={"x":{"kind":"learned","method":"eagle","model":"./head"}}', "x.model = ./head: there"),
        ("drafter.checkpoint=./head", "drafter.checkpoint = ./head: there is no such folder"),
        ('cluster={"placement":"colocated","gpus_per_node":2}', "train.ranks = 1: set it to 2"),
        ("train.sequence_parallel=2", "train.ranks = 1 is no multiple of it"),
        ('train={"ranks":4,"sequence_parallel":4}', "does not divide the 2 heads and 2 KV heads of m: choose a div"),
        ("--out=t.jsonl/run", "t.jsonl is a file; name another folder with --out"),
        ("--replay-decisions=m", "m: no manifest.json"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_one_line(place: Path, capsys: pytest.CaptureFixture[str], override: str, said: str):
    before = sorted(place.iterdir())
    code, out, err = train(capsys, "recipe.toml", override)
    told = [line for line in err.splitlines() if line != "imported"]
    assert (code, out, len(told)) == (2, "", 1)
    assert said in told[0]
    assert {path for path in place.iterdir() if path.name != "__pycache__"} == set(before)


def test_all_that_is_in_the_way_is_told_at_once(place: Path, capsys: pytest.CaptureFixture[str]):
    wrong = ("model=bare", "data.train=gone.jsonl", "reward=loud:rewards", "train.gpus=2", "--out=t.jsonl/run")
    code, _, err = train(capsys, "recipe.toml", *wrong)
    assert code == 2
    for said in ("no weights", "cannot read gone.jsonl", "no 'rewards'", "raise train.ranks", "t.jsonl is a file"):
        assert said in err.splitlines()[-1]


def test_a_trace_without_decisions_cannot_be_replayed(place: Path, capsys: pytest.CaptureFixture[str]):
    Recorder(place / "trace", Manifest(kind="recorded")).close()
    code, _, err = train(capsys, "recipe.toml", "--replay-decisions=trace", "--dry-run")
    assert code == 2
    assert "trace has no decisions.parquet" in err


def test_a_resumed_run_imports_nothing_unasked(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delitem(sys.modules, "loud", raising=False)
    recipe = {"model": "m", "reward": "loud:reward", "data": {"train": "t.jsonl"}, "code": [str(place)]}
    (place / "run").mkdir()
    (place / "run" / "run.json").write_text(json.dumps({"recipe": recipe}))
    code, out, err = train(capsys, "--resume=run", "--dry-run")
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert "--allow-code loud" in err
    assert "loud" not in sys.modules


def test_rollouts_of_a_runs_engines_import_nothing_unasked(place: Path):
    from tltlab.runtime.rollout.policy_rounds import run_to_verify

    recipe = {"model": "m", "reward": "loud:reward", "data": {"train": "t"}, "rollout": {"environment": "tools:Shell"}}
    (place / "run").mkdir()
    (place / "run" / "run.json").write_text(json.dumps({"recipe": recipe}))
    with refused(ConfigError, naming=("--allow-code",)):
        run_to_verify(place / "run")
    with code_allowed(["tools"]):
        assert run_to_verify(place / "run").num_rl_steps == 0


def test_a_checkpoint_of_another_run_is_not_gone_on_with(place: Path, capsys: pytest.CaptureFixture[str]):
    recipe = {"model": "m", "reward": "loud:reward", "data": {"train": "t.jsonl"}}
    (place / "run").mkdir()
    (place / "run" / "run.json").write_text(json.dumps({"recipe": recipe}))
    state = {"format": "tltlab-checkpoint", "version": 1, "model": "m", "seed": 0, "num_workers": 2}
    RunCheckpoints(place / "run" / "checkpoints", 2).save(
        3, lambda folder: (folder / "state.json").write_text(json.dumps(state)) and None
    )
    for override in ("seed=7", "rollout.num_workers=3"):
        code, _, err = train(capsys, "--resume=run", "--allow-code=loud", override, "--dry-run")
        assert code == 2
        assert "step-000003 is of a run with" in err


def test_a_dry_run_prints_its_plan_alone_and_imports_nothing_heavy(place: Path):
    program = (
        "import sys; from tltlab.cli import app as cli\ntry: cli.main()\n"
        "finally: print(*{'torch', 'ray'} & set(sys.modules), file=sys.stderr)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program, "train", "recipe.toml", "--dry-run", "--json"],
        env=os.environ | {"PYTHONPATH": str(place)}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert json.loads(ran.stdout)["responses_per_step"] == 192
    assert ran.stderr.split() == ["imported"]


ROW = '{"prompt": "1 + 1", "answer": "2"}\n'


@pytest.mark.parametrize(
    ("files", "override", "said"),
    [
        ({"t.jsonl": '{"question": "1", "answer": "2"}'}, "seed=1", "t.jsonl: line 1 has no column 'prompt'; it has"),
        ({"t.jsonl": '{"prompt": "1 + 1", "answer": null}'}, "seed=1", "line 1 has nothing in column 'answer'"),
        ({"m/config.json": json.dumps(SHAPE | {"max_position_embeddings": 512})}, "seed=1", "of m holds 512 tokens"),
        ({"t.jsonl": 24 * ROW, "bad.py": "def reward(p, r, a): return 1 / int(r == '3')"}, "reward=bad:reward",
         "reward raised ZeroDivisionError: division by zero for the first row of t.jsonl"),
        ({"t.jsonl": 3 * ROW}, "seed=1", "rollout.prompts_per_step = 24, but t.jsonl has 3 prompts: set it to 3 or"),
        ({}, "rollout.vllm.max_model_len=700", "max_response_tokens = 768, but rollout.vllm.max_model_len = 700"),
        ({"m/config.json": json.dumps(SHAPE | {"vocab_size": 2_000_000})}, "seed=1", "m has 256 M. Set it; 1e-6 is"),
    ],
    ids=["column", "answer", "context", "reward", "prompts", "max_model_len", "lr"],
)  # fmt: skip
def test_a_dry_run_reads_the_first_rows_and_tries_the_reward(place: Path, capsys, files, override: str, said: str):
    for name, text in files.items():
        (place / name).write_text(text)
    code, out, err = train(capsys, "recipe.toml", override, "--dry-run")
    assert (code, out) == (2, "")
    assert said in err.splitlines()[-1]


def test_a_learning_rate_that_is_set_is_taken(place: Path, capsys):
    (place / "m" / "config.json").write_text(json.dumps(SHAPE | {"vocab_size": 2_000_000}))
    assert train(capsys, "recipe.toml", "train.lr=1e-6", "--dry-run")[0] == 0


def test_heads_and_types_that_the_cpu_engine_lacks_are_told_by_what_vllm_says_of_itself(place: Path, capsys):
    if find_spec("vllm") is None:  # importing it takes long, and nobody does
        pytest.skip("no engine installed: extra 'runtime' or 'runtime-cpu'")
    (place / "m" / "config.json").write_text(json.dumps(SHAPE | {"head_dim": 20}))
    code, _, err = train(capsys, "recipe.toml", "rollout.vllm.dtype=floa16", "--dry-run")
    assert code == 2
    assert "the heads of m have 20 numbers, and vLLM's attention on the CPU takes 32, 64, " in err.splitlines()[-1]
    assert "rollout.vllm.dtype = 'floa16': vLLM has auto, half, float16, bfloat16" in err.splitlines()[-1]
    assert "did you mean 'float16'" in err.splitlines()[-1]
    code, _, err = train(capsys, "recipe.toml", "cluster.gpus_per_node=3", "--dry-run")
    assert code == 0, f"other attention has other heads: {err}"


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("seed=1", "the tokenizer of m has 24 tokens and the model 20: they are not of one model"),
        ("data.chat=true", "tokenizer has no chat template"),
        ("rollout.vllm.max_model_len=3", "the first prompt of t.jsonl has 3 tokens, and the context of 3 must hold it"),
    ],
)
def test_the_first_prompt_is_rendered_with_the_models_own_tokenizer(
    place: Path, capsys, random_model: Path, override: str, said: str
):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (place / "m" / name).write_bytes((random_model / name).read_bytes())
    (place / "t.jsonl").write_text(24 * '{"prompt": "w1 w2 w3", "answer": "w4"}\n')
    size = 20 if override == "seed=1" else 24
    (place / "m" / "config.json").write_text(json.dumps(SHAPE | {"vocab_size": size}))
    code, _, err = train(capsys, "recipe.toml", override, "rollout.max_response_tokens=3", "--dry-run")
    assert code == 2
    assert said in err.splitlines()[-1]
    assert train(capsys, "recipe.toml", "rollout.max_response_tokens=3", "--dry-run")[0] == (0 if size == 24 else 2)


def test_a_reward_that_never_returns_is_not_waited_for(place: Path, capsys, monkeypatch):
    (place / "t.jsonl").write_text(24 * ROW)
    (place / "slow.py").write_text("import threading\ndef reward(p, r, a): return threading.Event().wait()\n")
    monkeypatch.setattr(checks, "IMPORTS_S", 0.0)
    code, _, err = train(capsys, "recipe.toml", "reward=slow:reward", "reward_pool.timeout_s=0.01", "--dry-run")
    assert code == 2
    assert "reward took more than 0.01 s for the first row of t.jsonl" in err.splitlines()[-1]
