"""`what_if`: files of lengths of different origin, the same answer; its words say what its figures say."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from tltlab.sim.study.sweep import drafters_text, granted_text

import tltlab
from tests.refused import refused
from tltlab.acceptance.base import GeometricAcceptance
from tltlab.acceptance.freshness import FreshAcceptance, Freshness
from tltlab.acceptance.load import DEFAULTS
from tltlab.costs.deployment import Deployment
from tltlab.errors import ConfigError
from tltlab.sim.rl_steps import run_steps
from tltlab.sim.simulate import simulate
from tltlab.sim.study import what_if as questions
from tltlab.sim.study.what_if import what_if
from tltlab.sim.topology import Colocated

from ...traces_of_lengths import of_lengths
from ..workloads import typed

RNG = np.random.default_rng(0)
LENGTHS = np.minimum(RNG.lognormal(5.5, 1, (3, 32)).astype(int) + 1, 2000)
ROWS = [(step, f"g{i // 4}", 90 + i, int(n)) for step, row in enumerate(LENGTHS) for i, n in enumerate(row)]
FRAME = pd.DataFrame(ROWS, columns=["step", "group", "prompt_len", "response_length"])
FAST = {"systems": "verl,vllm-dynamic"}


@pytest.fixture(autouse=True)
def few_points(monkeypatch: pytest.MonkeyPatch) -> None:
    """Acceptance that nobody asks for is only in the picture."""
    monkeypatch.setattr(questions, "_CURVE", ())


@pytest.fixture
def lengths(tmp_path: Path) -> Path:
    FRAME.assign(note="x").to_csv(tmp_path / "lengths.csv", index=False)
    return tmp_path / "lengths.csv"


def test_an_answer_shows_which_columns_it_used(lengths: Path):
    found, same = what_if(lengths, **FAST), what_if(FRAME.rename(columns={"group": "uid"}), **FAST)
    assert found.trace.outcomes["response_tokens"].tolist() == LENGTHS.ravel().tolist()
    assert (len(found.trace.rl_steps), found.trace.workload["prompt_id"].nunique()) == (3, LENGTHS.shape[1] // 4)
    assert (found.ignored, found.verdict) == (["note"], same.verdict)
    used = {"response_tokens": "response_length", "rl_step": "step", "prompt_tokens": "prompt_len"}
    assert (found.used, same.used) == (used | {"prompt_id": "group"}, used | {"prompt_id": "uid"})


@pytest.mark.parametrize(("turns", "bound"), [(7.4, True), (2.0, False)], ids=["several turns", "one turn"])
def test_lengths_of_several_turns_bound_the_answer(tmp_path: Path, turns: float, bound: bool):
    metrics = f"response_length/mean:300.0 - response_length/max:900.0 - timing_s/gen:20.0 - num_turns/mean:{turns}"
    log = tmp_path / "verl.log"
    log.write_text("".join(f"step:{step} - {metrics} - timing_s/step:50.0\n" for step in (1, 2, 3)))
    found = what_if(log, **FAST).json()
    assert found["verdict"].startswith("An upper bound") == bound
    assert ("7.4 turns" in found["verdict"]) == bound
    assert any("several turns" in note for note in found["notes"]) == bound
    assert any("20 s in the log, 40%" in note for note in found["notes"])


def test_the_answer_is_what_simulating_its_policy_gives(tmp_path: Path):
    found = what_if(FRAME, accept=0.6, **FAST)
    machine = Deployment.of("8xH100", "Qwen2.5-7B", tokens=5000)
    config = {"costs": machine.costs.name, "acceptance": "learned=geometric:0.6", "workers": 8}
    before = simulate(FRAME, "none", **config)
    after = simulate(FRAME, found.chosen.policy, **config)
    assert found.chosen.rollout.estimate == pytest.approx(before.makespan_s / after.makespan_s, rel=1e-9)
    whole = [
        run_steps(r, machine.stages, topology=Colocated(gpus_per_worker=1)).steps.step_s.sum() for r in (before, after)
    ]
    assert found.chosen.rl_step.estimate == pytest.approx(whole[0] / whole[1], rel=1e-9)
    assert 1.0 < found.chosen.rl_step.estimate < found.chosen.rollout.estimate
    by_accept = [s.rollout.estimate for s in found.speed_ups]
    assert by_accept == sorted(by_accept)
    assert found.band.estimate == found.chosen.rollout.estimate
    assert found.rl_step_band.estimate == pytest.approx(found.chosen.rl_step.estimate, rel=1e-12)
    speed_up, share = found.chosen.rollout.estimate, found.rollout_share
    figures = (
        f"{speed_up:.2f}x",
        f"{100 * share:.0f} %",
        f"{1 / (1 - share):.1f}x",
        found.band.range_text,
        found.rl_step_band.range_text,
    )
    assert all(figure in found.verdict for figure in figures)


ASKED = [
    ("--gpus", "8xH100", "--model", "Qwen2.5-7B"),
    ("--gpus", "4xH100", "--acceptance", "learned=geometric:0.8,ngram=0.3"),
    ("--model", "Qwen2.5-7B", "--acceptance", "all=geometric:0.7"),
    ("--costs", "h100-qwen2.5-7b", "--workers", "4", "--acceptance", "learned=0.8/0.6/0.5/0.4,all=seer-siblings"),
]


@pytest.mark.parametrize("asked", ASKED, ids=lambda asked: " ".join(asked[:2]))
def test_the_same_question_has_the_same_answer(lengths: Path, tmp_path: Path, capsys, asked: tuple[str, ...]):
    """Systems as `compare` has them, the verdict as `simulate` has its policy: to the last digit."""
    names = "verl,tlt,tlt-base,vllm-dynamic"
    found, systems = (
        json.loads(typed(capsys, command, lengths, *asked, "--systems", names, *more, "--json")[1])
        for command, more in (("what-if", ()), ("compare", ("--no-ranges",)))
    )
    rows = {row["system"]: row for row in systems["systems"]}
    same = ("makespan_s", "ratio", "interval", "drafters", "acceptance", "mean_accept_length")
    for row in found["systems"]:
        if row["system"] in rows:
            keys = [*same, *(key for key in ("step_s", "step_ratio", "step_interval") if key in row)]
            assert {key: row[key] for key in keys} == {key: rows[row["system"]][key] for key in keys}
    assert (systems["acceptance"], systems["costs"]) == (found["notes"][-1].partition(": ")[2], found["costs"])
    (tmp_path / "policy.json").write_text(json.dumps(found["policy"]))
    plain, drafting = (
        json.loads(typed(capsys, "simulate", lengths, *asked, "--policy", policy, "--json")[1])
        for policy in ("none", tmp_path / "policy.json")
    )
    for name, key in (("rollout", "makespan_s"), ("rl_step", "step_s")):
        if found["speedup"][name] is not None:
            assert found["speedup"][name]["mean"] == pytest.approx(plain[key] / drafting[key], rel=1e-12)
    assert set(found["acceptance"]) == set(found["drafters"]) == {"learned"}


def test_every_command_means_the_same_machine_and_acceptance(lengths: Path, tmp_path: Path, capsys):
    """Without --acceptance it is the default of each drafter, in every row's words; n-grams are no learned drafter."""
    machine = ("--gpus", "2xH100", "--model", "Qwen2.5-7B")
    policies = "none,learned:4,ngram:4"

    def asked(command: str, *options: object) -> dict:
        code, out, err = typed(capsys, command, lengths, *machine, *options, "--json")
        assert code == 0, err
        return json.loads(out)

    alone = {name: asked("simulate", "--policy", name) for name in policies.split(",")}
    compared = {row["policy"]: row for row in asked("compare", "--policies", policies)["policies"]}
    swept = {row["policy"]: row for row in asked("sweep", "--policies", policies)["points"]}
    for name, result in alone.items():
        both = [compared[name]["makespan_s"], swept[name]["makespan_s"]]
        assert both == pytest.approx([result["makespan_s"]] * 2, rel=1e-12)
        assert swept[name]["step_s"] if "step_s" in swept[name] else result["step_s"] > result["makespan_s"]
    for rows, granted in ((compared, "acceptance"), (swept, "granted")):
        assert [rows[name]["drafters"] for name in alone] == [[], ["learned"], ["ngram"]]
        assert rows["ngram:4"][granted] == {"ngram": "geometric:0.42 (default)"}
    options = ("--trials", "0", "--repeats", "1", "--depths", "4", "--out", tmp_path / "policy.json")
    tuned = asked("tune", *options)
    assert all(
        row["acceptance"] == {n: f"{DEFAULTS[n]} (default)" for n in row["drafters"]} for row in tuned["candidates"]
    )
    assert any("learned" in row["drafters"] for row in tuned["candidates"])
    assert tuned["provenance"]["costs"] == ["sglang-0.4:1xH100:Qwen2.5-7B"]
    expected = alone["learned:4"]["makespan_s"]
    assert asked("simulate", "--policy", "learned:4", "--acceptance", "default")["makespan_s"] == expected
    on = {"gpus": "2xH100", "model": "Qwen2.5-7B"}
    for acceptance in (None, "learned=0.7", {"learned": GeometricAcceptance(alpha=0.7)}):
        assert simulate(FRAME, "learned:4", acceptance=acceptance, **on).makespan_s == expected
        found = tltlab.compare(FRAME, ["none", "learned:4"], acceptance=acceptance, **on)
        assert found.set_index("policy").loc["learned:4", "makespan_s"] == expected


def test_a_row_names_its_drafters_within_100_columns(capsys):
    for options in (("--no-ranges",), ("--ranges", "--rl-steps", "0:1"), ("--no-ranges", "--stages", "cpu-small")):
        code, out, _ = typed(capsys, "compare", "traces/tiny", "--systems", "all", "--acceptance", "default", *options)
        table = out.split("\nacceptance: ")[0].splitlines()
        assert (code, len(table) > 20, max(map(len, table)) <= 100) == (0, True, True)
        named = {line.split()[0].rstrip("*+"): line.split()[1] for line in table[1:]}
        assert (named["verl"], named["das"], named["tlt"]) == ("none", "suffix", "learned")
    drafters = ["learned", "ngram", "suffix"]
    many = {"policy": "a", "drafters": drafters, "acceptance": dict.fromkeys(drafters, "0.5")}
    other = {"policy": "b", "drafters": ["ngram"], "acceptance": {"ngram": "0.4"}}
    assert drafters_text(drafters) == "3 drafters"
    said = granted_text([many, other], "policy")
    assert all(
        f in said for f in ("ngram 0.4 (b)", "ngram 0.5 (a)", "learned 0.5;", "a drafts with learned, ngram, suf")
    )


def test_accept_is_short_for_one_drafter(lengths: Path):
    short = what_if(lengths, accept=0.6, systems="tlt,tlt-base")
    long = what_if(lengths, acceptance="learned=geometric:0.6,ngram=0.42,suffix=0.57", systems="tlt,tlt-base")
    assert short.chosen.rollout == long.chosen.rollout
    assert short.systems["makespan_s"].tolist() == long.systems["makespan_s"].tolist()
    assert [s.rollout for s in short.speed_ups] == [s.rollout for s in long.speed_ups]
    row = short.systems.set_index("system").loc["tlt-base"]
    assert (row["drafters"], row["acceptance"]) == (["ngram"], {"ngram": "geometric:0.42 (default)"})
    text = what_if(lengths, accept=0.6, drafter="ngram", **FAST)
    assert (text.drafters, text.acceptance) == (("ngram",), {"ngram": "geometric:0.6"})
    assert {row.strategy.drafter for row in text.drafting} <= {"ngram", "none"}
    assert text.chosen.rollout.estimate > short.chosen.rollout.estimate, "n-grams cost no draft level"


def test_a_drafter_of_short_responses_gains_less(lengths: Path):
    short, full = (what_if(lengths, acceptance=f"learned=0.7@{trained}", **FAST) for trained in ("100", "window"))
    assert [s.accept for s in short.speed_ups] == [s.accept for s in full.speed_ups]
    assert len(short.speed_ups) == 3
    for less, more in zip(short.speed_ups, full.speed_ups, strict=True):
        assert less.rollout.estimate < more.rollout.estimate
    assert short.acceptance == {"learned": "0.7@100"}


@pytest.mark.parametrize("num_steps", [2, 3, 12])
def test_the_verdict_is_a_row_of_its_table(num_steps: int):
    lengths = np.tile(LENGTHS, (4, 1))[:num_steps]
    found = what_if(lengths, systems="vllm-dynamic")
    assert found.systems.attrs["baseline"] == "verl"
    row = found.systems.set_index("system").loc["verdict-table"]
    for name, said in (("ratio", found.chosen.rollout), ("step_ratio", found.chosen.rl_step)):
        assert 1 / row[name] == pytest.approx(said.estimate, rel=1e-9)
        assert 1 / row[f"{name}_high"] == pytest.approx(said.low, rel=1e-9)
        assert 1 / row[f"{name}_low"] == pytest.approx(said.high, rel=1e-9)


def test_what_nobody_can_draft_for_is_not_promised():
    assert not any(row.strategy.speculates for row in what_if([300] * 40, accept=0.02, **FAST).drafting)


def test_a_recorded_trace_has_costs_and_acceptance():
    found = what_if("traces/tiny", **FAST)
    assert found.chosen.accept is None
    assert found.chosen.rl_step is None
    assert found.workers == tltlab.read("traces/tiny").manifest.num_workers


def test_training_drafter_is_reported_where_trace_knows(tmp_path: Path):
    base, half = GeometricAcceptance(alpha=0.8), Freshness(untrained=0.5, floor=0.5)
    trace = tltlab.read(FRAME).write(tmp_path / "trace")
    FreshAcceptance(base=base, freshness=half).write(trace / "acceptance.json")
    found = what_if(trace, accept=0.8, gpus="8xH100", **FAST)
    stale = what_if(FRAME, accept=0.4, **FAST)
    assert (found.training.drafter, found.training.level) == ("learned", pytest.approx(0.5))
    times = found.chosen.rollout.estimate / stale.chosen.rollout.estimate
    assert found.training.speed_up.estimate == pytest.approx(times, rel=1e-6)
    assert found.training.saved_s == pytest.approx(found.plain_s * (1 - 1 / times) / stale.chosen.rollout.estimate)
    assert found.training.delay_s is None
    assert stale.training is None
    assert stale.json()["drafter_training"] is None


def test_recorded_drafter_s_ages_show_what_training_brought(capsys, tmp_path: Path):
    asked = ("what-if", "traces/h100-smoke", "--accept", "0.5", "--systems", "verl")
    code, out, _ = typed(capsys, *asked, "--json", "--out", tmp_path / "answer.html")
    known = json.loads(out)["drafter_training"]
    assert code == 0
    assert known["drafter"] == "learned"
    assert known["level"] == pytest.approx(0.0301 / 0.0387, abs=0.03), "of the tokens tried in RL step 1 at either age"
    assert known["delay_s"] == pytest.approx(tltlab.read("traces/h100-smoke").spot_training["yield_s"].mean())
    assert known["says"] in (tmp_path / "answer.html").read_text()


@pytest.mark.parametrize(
    ("gpus", "model", "tp", "workers"),
    [("8xH100", "Qwen/Qwen2.5-7B-Instruct", 1, 8), ("8xH100", "Llama-3.3-70B", 4, 2), ("H200", "Qwen2.5-7B", 1, 1)],
)
def test_worker_has_fewest_gpus_that_hold_model(gpus: str, model: str, tp: int, workers: int):
    machine = Deployment.of(gpus, model, tokens=20_000)
    assert (machine.costs.tensor_parallel, machine.workers) == (tp, workers)
    assert machine.stages.num_gpus == tp * workers
    assert not machine.assumed


def test_unknown_costs_of_experts_are_reported():
    machine = Deployment.of("8xH100", "Qwen3-30B-A3B")
    (said,) = machine.assumed
    assert "--stages" in said
    assert said in what_if(of_lengths([100, 900]), gpus="8xH100", model="Qwen3-30B-A3B").notes


def test_a_model_of_ones_own_is_its_configuration(tmp_path: Path):
    config = {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
              "num_key_value_heads": 4, "vocab_size": 152064, "model_type": "mine"}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    mine = Deployment.of("8xH100", str(tmp_path / "config.json"), engine="vllm")
    known = Deployment.of("8xH100", "Qwen2.5-7B", engine="vllm")
    assert mine.costs.model.name == tmp_path.name
    assert mine.costs.kv_capacity_tokens == known.costs.kv_capacity_tokens
    assert mine.stages.train == known.stages.train


def test_command_answers_in_json_and_as_page(lengths: Path, tmp_path: Path, capsys):
    asked = ("what-if", lengths, "--systems", "verl,vllm-dynamic")
    code, _, err = typed(capsys, *asked, "--out", tmp_path / "answer.html")
    assert code == 0, err
    page = (tmp_path / "answer.html").read_text()
    result = json.loads(typed(capsys, *asked, "--json")[1])
    assert result["verdict"] in page
    assert ">geometric:0.7 (default)</td>" in page
    assert result["acceptance"] == {"learned": "geometric:0.7 (default)"}
    assert f"<dt>RL step</dt><dd>{result['speedup']['rl_step']['mean']:.2f}x</dd>" in page
    assert f"drafted tokens accepted, each: 0.5\\nrollout: {result['by_accept'][0]['rollout']['mean']:.4g}\\n" in page
    for name, times in result["speedup"].items():
        band = result["band"][name]
        assert (times["low"], times["high"]) == (band["low"], band["high"])
        assert [part["name"] for part in band["parts"]] == ["costs", "acceptance", "lengths"]
        assert sum(part["share"] for part in band["parts"]) == pytest.approx(1)
        assert all(
            band["low"] <= part["low"] <= times["mean"] <= part["high"] <= band["high"] for part in band["parts"]
        )
        assert f"{times['low']:.2f}x to {times['high']:.2f}x" in page
    assert (result["num_rl_steps"], result["num_responses"]) == (3, 96)
    assert result["columns"]["ignored"] == ["note"]
    assert result["distance"] == "never measured", "plain decoding was, speculation was not"
    assert {row["system"] for row in result["systems"]} == {"verdict-table", "vllm-dynamic", "verl"}
    assert typed(capsys, "what-if", lengths, "--systems", "verl", "--out", tmp_path / "p.svg")[0] == 0
    assert (tmp_path / "p.svg").read_text().startswith("<?xml")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--gpus", "8xZ1"], "'Z1'"),
        (["--gpus", "1xRTX4090", "--model", "Llama-3.3-70B"], "131 GiB"),
        (["--tp", "3"], "3 GPUs"),
        (["--accept", "70"], "70"),
        (["--accept", "0.7", "--acceptance", "all=0.7"], "0.7"),
        (["--accept", "0.7", "--drafter", "ngarm"], "'ngarm'"),
        (["--gpus", "8xH100", "--costs", "cpu-small"], "--costs"),
        (["--model", "Qwen2.5-7B", "--workers", "2"], "--workers"),
        (["--acceptance", "geometric:0.7"], "all=geometric:0.7"),
        (["--out", "x.doc"], ".html, .png, .svg or .json"),
        (["--column", "words"], "'words'"),
        (["--step-column", "words"], "'words'"),
        (["--group-column", "words"], "'words'"),
        (["--cap", "7"], "maximum of 7"),
        (["--format", "slime"], "verl, trl, vllm, csv"),
        (["--lists", "words"], "lengths, ids"),
        (["--time-unit", "min"], "s, ms, us, ns"),
        (["--tokenizer", "nowhere"], "nowhere"),
        (["--group-size", "0"], "--group-size"),
    ],
)
def test_what_cannot_be_asked_is_refused(lengths: Path, capsys, options: list[str], said: str):
    code, out, err = typed(capsys, "what-if", lengths, *options)
    assert (code, out) == (2, "")
    assert said in err.splitlines()[-1]


def test_reading_of_file_is_asked_as_import_asks(tmp_path: Path, capsys):
    rows = [{"k": {"n": [7] * n}, "at": s, "of": p, "text": "x" * n} for s in (3, 4) for p in (0, 1) for n in (5, 90)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ["--column", "k.n", "--lists", "ids", "--step-column", "at", "--group-column", "of", "--cap", "90"]
    options += ["--chars-per-token", "3"]
    code, out, _ = typed(capsys, "what-if", path, *options, "--systems", "verl", "--gpus", "1xH100", "--json")
    assert (code, json.loads(out)["num_rl_steps"], json.loads(out)["num_responses"]) == (0, 2, 8)
    assert json.loads(out)["columns"]["used"] == {"response_tokens": "k.n", "rl_step": "at", "prompt_id": "of"}
    assert typed(capsys, "trace", "import", path, "--out", tmp_path / "t", *options)[0] == 0
    trace = tltlab.read(tmp_path / "t")
    assert trace.outcomes["response_tokens"].tolist() == [5, 90] * 4
    assert (trace.rl_steps, trace.manifest.group_size, trace.manifest.max_response_tokens) == ([3, 4], 2, 90)


def test_a_result_in_a_notebook():
    found = what_if(LENGTHS, **FAST)
    assert "<table" in found._repr_html_()
    assert found.to_frame()["speed_up"].tolist() == (1 / found.systems["ratio"]).tolist()
    assert len(found.plot().axes) == 3
    assert len(what_if("traces/tiny", systems="verl,tlt-base").plot().axes) == 2, "acceptance is known"
    with refused(ConfigError, naming=("70",)):
        what_if(LENGTHS, accept=70)
