"""What `tltlab train` refuses before anything starts: exit code 2, one line, and nothing written."""

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from importlib.util import find_spec

import pytest

from tests.refused import refused
from tests.typed import typed
from tltlab.errors import ConfigError
from tltlab.own import code_allowed
from tltlab.runtime.recipe import checks
from tltlab.runtime.recipe.engines import model_context
from tltlab.runtime.recipe.recipe import load_recipe
from tltlab.runtime.run.checkpoints import RunCheckpoints
from tltlab.traces.recorder import Recorder
from tltlab.traces.schema import Manifest

SHAPE = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 24,
}  # fmt: skip


@pytest.fixture
def place(tmp_path, monkeypatch):
    """The folder that commands run in: a model's shape, prompts, a recipe and things that are wrong."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(checks, "IMPORTS_S", 0.0)
    for model in ("m", "bare"):
        (tmp_path / model).mkdir()
        (tmp_path / model / "config.json").write_text(shape())
    (tmp_path / "m" / "model.safetensors").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "t.jsonl").touch()
    (tmp_path / "policy.json").write_text("{}")
    (tmp_path / "recipe.toml").write_text(
        'model = "m"\nreward = "loud:reward"\ndata = {train = "t.jsonl"}\nrollout = {policy = "beg-mab"}\n'
    )
    (tmp_path / "loud.py").write_text("print('imported')\ndef reward(prompt, response, answer): return 0.0\n")
    (tmp_path / "bad.py").write_text("def reward(p, r, a): return 1 / int(r == '3')")
    (tmp_path / "slow.py").write_text("import threading\ndef reward(p, r, a): return threading.Event().wait()\n")
    Recorder(tmp_path / "trace", Manifest(kind="recorded")).close()
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def shape(**changed):
    return json.dumps(SHAPE | changed)


def begun(place, **more):
    """The folder of a run that says of itself no more than its recipe."""
    recipe = {"model": "m", "reward": "loud:reward", "data": {"train": "t.jsonl"}} | more
    (place / "run").mkdir()
    (place / "run" / "run.json").write_text(json.dumps({"recipe": recipe}))
    return place / "run"


def train(capsys, *args):
    """Exit code, standard output, standard error."""
    return typed(capsys, "train", *args)


ROW = '{"prompt": "1 + 1", "answer": "2"}\n'
CANNOT = [
    ("log.wandb=tails --dry-run", ("log.wandb", "install")),
    ("rollout.max_draft_depth=4", ("rollout.policy", "beg-mab", "ngram:8")),
    ("rollout.policy=beg-mab-learned", ("learned:8", "ngram, suffix")),
    ("rollout.policy=policy.json", ("policy.json", "format", "tltlab-policy")),
    ("rollout.policy=gone.json", ("gone.json",)),
    ('rollout.drafters={"x":{"kind":"custom","path":"silent:Mine"}}', ("silent", "ModuleNotFoundError")),
    ("rollout.placement=longest_first", ("longest_first", "least_loaded")),
    ("train.advantage=loud:advantage", ("train.advantage", "loud", "'advantage'")),
    ("data.heldout=/no/such/folder", ("data.heldout", "/no/such/folder")),
    ("data.train=", ("data.train",)),
    ("model=/no/Qwen2.5-7B", ("model = /no/Qwen2.5-7B",)),
    ("model=empty", ("model = empty", "config.json")),
    ('rollout.drafters={"x":{"kind":"learned","method":"eagle","model":"./head"}}', ("x.model = ./head",)),
    ("drafter.checkpoint=./head", ("drafter.checkpoint = ./head",)),
    ('cluster={"placement":"colocated","gpus_per_node":2}', ("train.ranks = 1", "2")),
    ("train.sequence_parallel=2", ("train.ranks = 1",)),
    ('train={"ranks":4,"sequence_parallel":4}', ("2 heads", "2 KV heads", "m")),
    ("--replay-decisions=m", ("m", "manifest.json")),
    ("--replay-decisions=trace --dry-run", ("trace", "decisions.parquet")),
    ("model=bare data.train=gone.jsonl reward=loud:rewards train.gpus=2 --out=t.jsonl/run",
     ("model = bare", "weights", "data.train", "gone.jsonl", "loud", "'rewards'", "train.ranks", "--out",
      "t.jsonl is a file")),
    ("train.epochs=2 --dry-run", ("train.epochs = 2", "train.steps")),
    ("rollout.vllm.max_model_len=700 --dry-run", ("max_response_tokens = 768", "rollout.vllm.max_model_len = 700")),
]  # fmt: skip
"""What is asked, and the facts in what is said of it."""
WITH_FILES = [
    ({"t.jsonl": '{"question": "1", "answer": "2"}'}, "seed=1", ("t.jsonl", "line 1", "'prompt'")),
    ({"t.jsonl": '{"prompt": "1 + 1", "answer": null}'}, "seed=1", ("line 1", "'answer'")),
    ({"m/config.json": shape(max_position_embeddings=512)}, "seed=1", ("m", "512")),
    ({"t.jsonl": 24 * ROW}, "reward=bad:reward", ("ZeroDivisionError", "bad.py", "line 1", "t.jsonl")),
    ({"t.jsonl": 24 * ROW}, "reward=slow:reward reward_pool.timeout_s=0.01", ("0.01 s", "t.jsonl")),
    ({"t.jsonl": 3 * ROW}, "seed=1", ("rollout.prompts_per_step = 24", "t.jsonl", "3 prompts")),
    ({"m/config.json": shape(vocab_size=2_000_000)}, "seed=1", ("m", "256 M", "1e-6")),
]


@pytest.mark.parametrize(
    ("files", "asked", "facts"),
    [*(({}, *row) for row in CANNOT), *((files, f"{asked} --dry-run", facts) for files, asked, facts in WITH_FILES)],
)
def test_what_cannot_be_done_is_one_line(place, capsys, monkeypatch, files, asked, facts):
    for name, text in files.items():
        (place / name).write_text(text)
    monkeypatch.setitem(sys.modules, "wandb", None)
    before = sorted(place.iterdir())
    code, out, err = train(capsys, "recipe.toml", *asked.split())
    told = [line for line in err.splitlines() if line != "imported"]
    assert (code, out, len(told)) == (2, "", 1)
    assert [fact for fact in facts if fact not in told[0]] == [], told[0]
    assert sorted(path for path in place.iterdir() if path.name != "__pycache__") == before


def test_a_resumed_run_imports_nothing_unasked(place, capsys, monkeypatch):
    monkeypatch.delitem(sys.modules, "loud", raising=False)
    begun(place, code=[str(place)])
    code, out, err = train(capsys, "--resume=run", "--dry-run")
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert "--allow-code loud" in err
    assert "loud" not in sys.modules


def test_rollouts_of_a_runs_engines_import_nothing_unasked(place):
    from tltlab.runtime.rollout.policy_rounds import run_to_verify

    run = begun(place, rollout={"environment": "tools:Shell"})
    with refused(ConfigError, naming=("--allow-code",)):
        run_to_verify(run)
    with code_allowed(["tools"]):
        assert run_to_verify(run).num_rl_steps == 0


def test_another_runs_checkpoint_is_not_resumed(place, capsys):
    state = {"format": "tltlab-checkpoint", "version": 1, "model": "m", "seed": 0, "num_workers": 2}
    RunCheckpoints(begun(place) / "checkpoints", 2).save(
        3, lambda folder: (folder / "state.json").write_text(json.dumps(state)) and None
    )
    for override in ("seed=7", "rollout.num_workers=3"):
        code, _, err = train(capsys, "--resume=run", "--allow-code=loud", override, "--dry-run")
        assert (code, "step-000003" in err) == (2, True)


def test_a_dry_run_imports_nothing_heavy(place):
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


@pytest.mark.parametrize(
    ("asked", "settings"),
    [
        (("--steps", "4"), ("train.steps=4",)),
        (("--lr", "1e-6"), ("train.lr=1e-6", "drafter.optim.lr=1e-6")),
        (("--num-workers=3", "--dry-run"), ("rollout.num_workers=3",)),
        (("--steps",), ("train.steps=",)),
        (("steps=4",), ("train.steps",)),
        (("--stepz", "4"), ("--stepz",)),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) and value[0][0] in "-sr" else None,
)
def test_an_option_that_is_a_setting_is_suggested(place, capsys, asked, settings):
    code, out, err = train(capsys, "recipe.toml", *asked)
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert [setting for setting in settings if f" {setting}" not in err] == []


@pytest.mark.parametrize(
    ("found", "asked", "fits"),
    [
        (0, "cluster.gpus_per_node=8", False),
        (2, "cluster.gpus_per_node=8", False),
        (3, "cluster.gpus_per_node=8", True),
        (0, "rollout.gpus_per_worker=0.5", False),
        (0, "seed=1", True),
        (0, "cluster.gpus_per_node=8 cluster.num_nodes=2", True),
    ],
)
def test_missing_gpus_are_reported_at_once(place, monkeypatch, found, asked, fits):
    """Ray would wait for them."""
    from ray._private.accelerators.nvidia_gpu import NvidiaGPUAcceleratorManager as Gpus

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(Gpus, "get_current_node_num_accelerators", lambda: found)
    recipe = load_recipe("recipe.toml", asked.split())
    expected = nullcontext() if fits else refused(ConfigError, naming=("GPUs", found, "--dry-run"))
    with expected:
        checks.enough_gpus(recipe)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    checks.enough_gpus(recipe)


def test_a_learning_rate_that_is_set_is_taken(place, capsys):
    (place / "m" / "config.json").write_text(shape(vocab_size=2_000_000))
    assert train(capsys, "recipe.toml", "train.lr=1e-6", "--dry-run")[0] == 0


def test_the_cpu_engines_limits_are_vllms(place, capsys):
    if find_spec("vllm") is None:  # importing it takes long, and nobody does
        pytest.skip("no engine installed: extra 'runtime' or 'runtime-cpu'")
    (place / "m" / "config.json").write_text(shape(head_dim=20))
    code, _, err = train(capsys, "recipe.toml", "rollout.vllm.dtype=floa16", "--dry-run")
    facts = (" m ", " 20 ", "32, 64, ", "rollout.vllm.dtype = 'floa16'", "auto, half, float16, bfloat16", "'float16'")
    assert code == 2
    assert [fact for fact in facts if fact not in err.splitlines()[-1]] == []
    code, _, err = train(capsys, "recipe.toml", "cluster.gpus_per_node=3", "--dry-run")
    assert code == 0, f"other attention has other heads: {err}"


@pytest.mark.parametrize(
    ("config", "tokenizer", "context"),
    [
        ({"max_position_embeddings": 512}, {}, 512),
        ({"max_position_embeddings": 512}, {"model_max_length": 256}, 256),
        ({"max_position_embeddings": 512}, {"model_max_length": 10**30}, 512),
        ({"max_position_embeddings": 512, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}, {}, 2048),
        ({"text_config": {"max_position_embeddings": 64}}, {}, 64),
        ({"max_position_embeddings": "many"}, {}, None),
        ({}, {}, None),
    ],
    ids=["positions", "tokenizer", "no limit", "rope", "nested", "text", "unknown"],
)
def test_a_context_is_that_of_the_models_files(tmp_path, config, tokenizer, context):
    for name, value in (("config.json", config), ("tokenizer_config.json", tokenizer)):
        (tmp_path / name).write_text(json.dumps(value))
    assert model_context(str(tmp_path)) == context
    assert model_context("no/such-model") is None


@pytest.mark.parametrize(
    ("override", "facts"),
    [
        ("seed=1", (" m ", "24", "20")),
        ("data.chat=true", ("chat",)),
        ("rollout.vllm.max_model_len=3", ("t.jsonl", "line 1", "3")),
        ("data.heldout=h.jsonl rollout.vllm.max_model_len=4", ("h.jsonl", "line 2", "4 tokens")),
    ],
)
def test_a_dry_run_counts_all_prompts(place, capsys, random_model, override, facts):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (place / "m" / name).write_bytes((random_model / name).read_bytes())
    (place / "t.jsonl").write_text(24 * '{"prompt": "w1 w2 w3", "answer": "w4"}\n')
    size = 20 if override == "seed=1" else 24
    (place / "m" / "config.json").write_text(shape(vocab_size=size))
    (place / "h.jsonl").write_text('{"prompt": "w1", "answer": "w4"}\n{"prompt": "w1 w2 w3 w4", "answer": "w4"}\n')
    code, _, err = train(capsys, "recipe.toml", *override.split(), "rollout.max_response_tokens=3", "--dry-run")
    assert code == 2
    assert [fact for fact in facts if fact not in err.splitlines()[-1]] == []
    in_epochs = ["train.epochs=2", "train.warmup_steps=9", "rollout.max_response_tokens=3", "--dry-run", "--json"]
    code, out, _ = train(capsys, "recipe.toml", *in_epochs)
    assert code == (0 if size == 24 else 2)
    if not code:
        plan = json.loads(out)
        assert plan["forecast"]["num_steps"] == 2
        found = [[fact in note for note in plan["notes"]].count(True) for fact in ("2 RL steps", "4 optimizer steps")]
        assert found == [1, 1]
