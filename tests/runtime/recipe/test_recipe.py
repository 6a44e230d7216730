"""What a run is told: recipes, and what is said when they are wrong."""

import os
import re

import pytest

from tests.refused import refused
from tltlab.errors import ConfigError
from tltlab.files import write_json
from tltlab.policies.policy import load_policy
from tltlab.runtime.recipe.recipe import load_recipe, located, resumed_recipe, with_steps
from tltlab.runtime.recipe.user_code import code_of

RECIPE = """
model = "m"
reward = "a:b"
[data]
train = "t.jsonl"
[train]
steps = 3
"""


NO_DEVICES = "cluster.placement=colocated train.correction=none"


def written(path, text):
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("train.stepz=3", ("train",)),
        ("train.steps=0", ("train",)),
        ("train.steps", ("key=value",)),
        ("model.x=1", ()),
        ("=3", ()),
        ("train=5", ()),
        ("rollout=[]", ()),
        ("faults.collective_timeout_s=0", ("collective_timeout_s",)),
        ("train.algorithm=[1]", ()),
        ("train.kl_coef=Infinity", ("kl_coef",)),
        (
            "train.lr_min_share=0.1 train.decay_all=false train.epochs=2 train.steps=3",
            ("train.lr_schedule", "train.weight_decay", "train.epochs = 2", "train.steps = 3"),
        ),
        (
            'eval={"pass_at":[1,8],"samples":4,"temperature":0} checkpoint.best=true',
            ("eval.pass_at = 8", "eval.samples = 4", "eval.temperature = 0", "eval.every"),
        ),
        (
            'data.chat_template_kwargs={"tokenize":0} rollout={"stop":["x"],"reuse":{}}',
            ("data.chat = true", "chat_template_kwargs.tokenize", "rollout.stop"),
        ),
        ('data.heldout={"a/b":"h.jsonl"}', ("data.heldout", "a/b")),
        ("reward_pool.on_failure=NaN", ("reward_pool", "on_failure")),
        ("train.betas=[0.9,2]", ("1",)),
        ("seed=-1", ()),
        ('data.system="\\ud83d"', ("system", "surrogate")),
        ('rollout.environment={"path":"calculator","stop":["\\udcff"]}', ("stop", "surrogate")),
        ("rollout.vllm.max_num_seqs=many", ("many", "max_num_seqs", "0")),
        ("rollout.vllm.kv_cache_memory_bytes=1G", ()),
        ("rollout.vllm.gpu_memory_utilization=90", ("1",)),
        ("rollout.vllm.swap_space=NaN", ()),
        ('rollout={"partial":{"concurrency":8},"prompts_per_step":1}', ("2", "rollout.prompts_per_step", "1")),
        ('rollout={"environment":"calculator","partial":{"concurrency":8}}', ("rollout.partial", "environment")),
        ('rollout={"environment":"calculator","reuse":{}}', ("rollout.environment", "rollout.reuse")),
        ('rollout={"one_step_off":true,"reuse":{}}', ("one_step_off", "rollout.reuse")),
        ('rollout={"one_step_off":true,"repeat_every":2}', ("one_step_off", "rollout.repeat_every")),
        ('rollout={"staleness":2,"one_step_off":true}', ("1",)),
        ('rollout={"staleness":2,"partial":{"concurrency":9}}', ("rollout.partial",)),
        ('rollout={"staleness":2,"environment":"calculator"}', ()),
        ('rollout={"staleness":2,"num_workers":9,"prompts_per_step":8}', ()),
        ("rollout.staleness=-1", ("0",)),
        *(
            (f'rollout={{"placement":"round_robin",{mode}}}', ("rollout.placement", "round_robin", name))
            for name, mode in (("partial", '"partial":{"concurrency":8}'), ("staleness", '"staleness":2'))
        ),
        ("drafter={} rollout.max_draft_depth=0", ("max_draft_depth", "0")),
        ('drafter={} rollout.drafters={"learned":{"kind":"ngram"}}', ("learned",)),
        ('drafter={"checkpoint":"head","loss":{"kind":"mtp"}}', ("MTP",)),
        *(
            (f"rollout.{name}=1 {NO_DEVICES}", (f"rollout.{name}", "cluster.placement", "train.correction"))
            for name in ("one_step_off", "staleness")
        ),
        ("train.overlong_buffer=9", ("train.overlong_buffer", "'keep'", "'penalty'")),
        ("reward=[]", ("reward",)),
        ('reward=[{"path":"a:f"},{"path":"b:f"}]', ("reward", "2", "'f'")),
        ('reward=[{"path":"a:f","name":"a/b"}]', ("reward", "name")),
        ("train.sampling_term=d train.sampling_rounds=9", ("train.sampling_term", "'d'", "b")),
        ("train.sampling_term=b", ("train.sampling_term", "train.sampling_rounds", "1")),
        ("rollout.group_size=1", ("rollout.group_size", "1", "'group'")),
        ("rollout.group_size=1 train.algorithm=rloo", ("rollout.group_size", "'leave_one_out'")),
        ("train.baseline=leave_one_out", ("train.baseline", "train.advantage_scale", "'none'")),
        ("train.algorithm=reinforce++ train.sampling_rounds=2", ("train.sampling_rounds", "train.baseline")),
        ("train.advantage=a:b train.baseline=none", ("train.baseline", "train.advantage")),
        # All that is wrong is told at once.
        ("rollout.min_p=0.1 train.overlong_buffer=4096", ("rollout.min_p", "train.overlong_buffer")),
        ('rollout.min_p=0.1 rollout.vllm={"x":NaN,"max_num_seqs":0}', ("rollout.vllm", "max_num_seqs", "0")),
    ],
)
def test_a_wrong_override_is_named(tmp_path, override, complaint):
    with refused(ConfigError, naming=complaint):
        load_recipe(written(tmp_path / "r.toml", RECIPE), override.split())


@pytest.mark.parametrize("options", ['{"api_key":"x"}', '{"hf_overrides":{"a":[{"HF_TOKEN":"x"}]}}'])
def test_a_secret_option_is_refused_unrepeated(tmp_path, options):
    with refused(ConfigError) as info:
        load_recipe(written(tmp_path / "r.toml", RECIPE), [f"rollout.vllm={options}".replace('"x"', '"sk-1234"')])
    assert "sk-1234" not in str(info.value)


def test_epochs_become_rl_steps(tmp_path):
    path = written(tmp_path / "r.toml", RECIPE)
    for epochs, prompts, steps in ((2, 50, 4), (0.5, 50, 1), (1.1, 240, 11), (3, 5, 3)):
        recipe = load_recipe(path, [f"train.epochs={epochs}"])
        resolved = with_steps(recipe, prompts)
        assert (resolved.train.steps, resolved.train.epochs) == (steps, None)
        assert with_steps(resolved, 7) is resolved
    again = load_recipe(written(tmp_path / "e.toml", RECIPE.replace("steps", "epochs")), ["train.steps=5"])
    assert (again.train.steps, again.train.epochs) == (5, None)


def test_a_file_that_is_no_recipe_is_refused(tmp_path):
    path = tmp_path / "r.toml"
    for data, facts in (
        (b"seed = 1", ("model",)),
        (b"model = ", ("TOML",)),
        (b'model = "\xe9"', ("TOML",)),
        (None, ()),
    ):
        if data is None:
            path.unlink()
        else:
            path.write_bytes(data)
        with refused(ConfigError, naming=("r.toml", *facts)):
            load_recipe(path)


def test_one_response_to_a_prompt_needs_no_group(tmp_path):
    path = written(tmp_path / "r.toml", RECIPE)
    for way in ("train.algorithm=reinforce++", "train.advantage=mine.of:f"):
        recipe = load_recipe(path, ["rollout.group_size=1", way])
        assert recipe.rollout.group_size == 1
    assert list(code_of(recipe)) == ["a", "mine.of"]


def test_a_run_continues_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.jsonl").touch()
    load_policy("table").write(tmp_path / "mine.json")
    load_policy("table").write(tmp_path / "run" / "policy.json")
    recipe = load_recipe(written(tmp_path / "r.toml", RECIPE), ["rollout.policy=mine.json"])
    assert (recipe.data.train, recipe.rollout.policy) == ("t.jsonl", "mine.json")
    assert recipe.code == (str(tmp_path),)
    write_json(tmp_path / "run" / "run.json", {"recipe": located(recipe).model_dump(mode="json")})

    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    again = resumed_recipe(tmp_path / "run", (), ["a"])
    assert (again.model, again.data.train) == ("m", str(tmp_path / "t.jsonl"))
    assert again.rollout.policy == str(tmp_path / "mine.json")
    assert again.code == (str(tmp_path / "run" / "code"), str(tmp_path))
    (tmp_path / "mine.json").unlink()
    again = resumed_recipe(tmp_path / "run", ["train.steps=9"], ["a"])
    assert (again.rollout.policy, again.train.steps) == (str(tmp_path / "run" / "policy.json"), 9)


RESUMED = {"model": "m", "data": {"train": "t"}, "reward": "tltlab.runtime.rollout.rewards:math"}
IMPORTING = {
    "worker_cls": "w.W",
    "trust_remote_code": True,
    "speculative_config": {"trust_remote_code": 1},
    "kv_transfer_config": {"kv_connector_module_path": "m"},
    "compilation_config": {"backend": "a.b"},
}
"""Options of vLLM that import code."""


@pytest.mark.parametrize(
    ("rollout", "reward", "asked"),
    [
        ({"policy": "ngram:4", "environment": "calculator", "vllm": {"seed": 1, "dtype": "float32"}}, None, []),
        ({"policy": "learned:8x4/48@8"}, "tltlab.runtime.rollout.rewards:gsm8k", []),
        ({}, "mine:reward", ["mine"]),
        ({}, [{"path": "mine:reward"}, {"path": "os:system"}], ["mine", "os"]),
        ({"policy": "yours.deep:Policy"}, None, ["yours.deep"]),
        ({"policy": "yours:Policy(depth=4)", "placement": "ours:Order(x=1)"}, None, ["yours", "ours"]),
        ({"policy": "goodput(costs=prices:Mine)"}, None, ["prices"]),
        ({"policy": "goodput(costs=cpu-small)", "placement": "round_robin"}, None, []),
        ({"drafters": {"own": {"kind": "custom", "path": "drafts:Mine"}}}, None, ["drafts"]),
        ({"allow_code": ["theirs"]}, None, ["theirs"]),
        ({"environment": {"path": "tools:Shell"}}, None, ["tools"]),
        ({"vllm": {"trust_remote_code": False, "hf_overrides": {}}}, None, []),
        *(({"vllm": {name: value}}, None, [f"rollout.vllm.{name}"]) for name, value in IMPORTING.items()),
    ],
)
def test_a_resumed_run_imports_what_is_allowed(tmp_path, monkeypatch, rollout, reward, asked):
    fields = RESUMED | {"rollout": rollout, "code": ["/theirs"]} | ({"reward": reward} if reward else {})
    run = tmp_path / "run"
    write_json(run / "run.json", {"recipe": fields})
    write_json(run / "code.json", {"hmac": "of earlier versions"})
    copies = str(run / "code")
    if not asked:
        assert resumed_recipe(run).code == (), "nothing is imported from there"
        return
    for allowed in (asked[1:], ["elsewhere"]):
        with refused(ConfigError, naming=(copies,)) as info:
            resumed_recipe(run, (), allowed)
        missing = [name for name in asked if name not in allowed]
        assert re.findall(r"--allow-code (\S+)", str(info.value)) == missing
    assert resumed_recipe(run, (), asked).code == (copies, "/theirs")
    monkeypatch.setenv("TLTLAB_ALLOW_CODE", ",".join(asked))
    assert resumed_recipe(run).code == (copies, "/theirs")


def test_an_override_is_no_permission(tmp_path):
    write_json(tmp_path / "run.json", {"recipe": RESUMED})
    with refused(ConfigError, naming=("--allow-code",)):
        resumed_recipe(tmp_path, ["reward=mine:reward"])
    with refused(ConfigError, naming=("run.json",)):
        resumed_recipe(tmp_path / "none")
    assert resumed_recipe(tmp_path, ["reward=mine:reward"], ["mine"]).code == (str(tmp_path / "code"), os.getcwd())
