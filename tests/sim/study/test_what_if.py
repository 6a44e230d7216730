"""`what_if`: files of lengths of different origin, the same answer; its words say what its figures say."""

import json
import shlex
from importlib.metadata import version

import numpy as np
import pytest

import tltlab
from tltlab.acceptance.base import GeometricAcceptance
from tltlab.acceptance.freshness import FreshAcceptance, Freshness
from tltlab.costs.deployment import Deployment
from tltlab.costs.evidence import Evidence
from tltlab.costs.load import load_costs
from tltlab.costs.profiles import profile_costs
from tltlab.hardware import gpu
from tltlab.policies.policy import load_policy
from tltlab.sim.study.reduce import drafters_text, granted_text
from tltlab.sim.study.what_if import what_if
from tltlab.strategy import NO_SPECULATION, Strategy
from tltlab.traces.metrics import rollout_s

from ...traces_of_lengths import of_lengths
from ..workloads import grouped, typed

RNG = np.random.default_rng(0)
LENGTHS = np.minimum(RNG.lognormal(5.5, 1, (3, 32)).astype(int) + 1, 2000)
FRAME = grouped(LENGTHS, 90)
FAST = {"systems": "verl,vllm-dynamic"}
MACHINE = ("--gpus", "2xH100", "--model", "Qwen2.5-7B")


@pytest.fixture
def lengths(tmp_path):
    FRAME.assign(note="x").to_csv(tmp_path / "lengths.csv", index=False)
    return tmp_path / "lengths.csv"


def test_an_answer_shows_which_columns_it_used(lengths):
    found, same = what_if(lengths, **FAST), what_if(FRAME.rename(columns={"group": "uid"}), **FAST)
    assert found.trace.outcomes["response_tokens"].tolist() == LENGTHS.ravel().tolist()
    assert (len(found.trace.rl_steps), found.trace.workload["prompt_id"].nunique()) == (3, LENGTHS.shape[1] // 4)
    assert (found.source.ignored, found.verdict) == (["note"], same.verdict)
    used = {"response_tokens": "response_length", "rl_step": "step", "prompt_tokens": "prompt_len"}
    assert (found.source.used, same.source.used) == (used | {"prompt_id": "group"}, used | {"prompt_id": "uid"})


@pytest.mark.parametrize(("turns", "bound"), [(7.4, True), (2.0, False)], ids=["several turns", "one turn"])
def test_lengths_of_several_turns_bound_the_answer(tmp_path, turns, bound):
    metrics = f"response_length/mean:300.0 - response_length/max:900.0 - timing_s/gen:20.0 - num_turns/mean:{turns}"
    log = tmp_path / "verl.log"
    log.write_text("".join(f"step:{step} - {metrics} - timing_s/step:50.0\n" for step in (1, 2, 3)))
    found = what_if(log, **FAST).json()
    assert found["verdict"].startswith("An upper bound") == bound
    assert ("7.4 turns" in found["verdict"]) == bound
    assert any("several turns" in note for note in found["notes"]) == bound
    assert any("20 s in the log, 40%" in note for note in found["notes"])


@pytest.mark.parametrize(("cut", "is_about"), [(1.0, True), (0.25, True), (0.15, False)])
def test_strangers_cut_lengths_are_lower_bounds(tmp_path, cut, is_about):
    metrics = f"response_length/mean:{800 * cut + 100} - response_length/max:900.0 - response_length/clip_ratio:{cut}"
    log = tmp_path / "verl.log"
    log.write_text(
        "".join(f"step:{step} - {metrics} - prompt_length/mean:9 - perf/total_num_tokens:30000\n" for step in (1, 2))
    )
    verdict = what_if(log, **FAST).verdict
    assert ("lower bounds" in verdict) == is_about
    assert (f"{cut:.0%} of the responses are cut" in verdict) == is_about


def test_responses_that_nothing_states_are_in_the_range(tmp_path):
    metrics = {"completions/mean_length": 300.0, "completions/max_length": 900.0, "step_time": 20.0}
    (tmp_path / "trl.log").write_text(f"{metrics}\n" * 3)
    stated, assumed = (what_if(tmp_path / "trl.log", responses=num, drafter="ngram", **FAST) for num in (16, None))
    assert "responses" not in stated.best.by_assumption
    few, many = assumed.best.by_assumption["responses"].values()
    assert few == pytest.approx(stated.best.band.estimate, rel=1e-9)
    assert many < assumed.best.band.estimate < few < assumed.best.band.high
    (row,) = [row for row in assumed.assumed if row["what"].startswith("responses per")]
    assert (row["value"], f"with 16 rollout {few:.2f}x" in row["effect"]) == ("512", True)


def test_each_assumption_is_in_the_range_and_named_where_it_moves_the_answer(tmp_path):
    (tmp_path / "trl.log").write_text("{'completions/mean_length': 3000.0, 'step_time': 20.0}\n" * 2)
    found = what_if(tmp_path / "trl.log", responses=64, gpus="1xH100", **FAST)
    text, learned = found.answers
    assert set(text.by_assumption) == {"prompts", "longest"}
    (at_2k,) = learned.by_assumption["context"].values()
    assert learned.band.low < at_2k < 0.9 * learned.band.estimate
    named = {row["what"] for row in found.assumed if row["effect"] and "with" in row["effect"]}
    assert {"longest response", "context that the drafter was trained at"} <= named
    assert text.band.of_input("longest")[0] < text.band.estimate
    assert not what_if([200] * 64, gpus="1xH100", accept=0.7, **FAST).best.by_assumption.get("context")


def test_the_verdict_has_the_figures_of_both_answers():
    found = what_if(FRAME, acceptance="learned=0.6", **FAST)
    text, learned = found.answers
    assert (text.trained, learned.trained, learned.drafter) == (False, True, "learned")
    assert found.best is text
    assert 1.0 < text.rl_step.estimate < text.rollout.estimate
    own = [(at, times.rollout_s.sum()) for at, times in found.by_accept.items()]
    assert own == sorted(own, key=lambda pair: -pair[1])
    share = found.rollout_share
    trained = f"{learned.band.estimate:.2f}x ({learned.band.range_text})"
    for figure in (f"{text.band}"[:-1], text.rl_step_band.range_text, trained, f"{100 * share:.0f} %",
                   f"{1 / (1 - share):.1f}x", "60 % of drafted tokens", "--policy-out"):  # fmt: skip
        assert figure in found.verdict
    assert len(found.verdict.splitlines()) == 3
    assert ("--placement longest_expected" in found.verdict) == (text.placement_gain >= 1.005)
    json_of = found.json()
    assert list(json_of["answers"]) == ["without_training", "with_training"]
    for answer, row in zip(found.answers, json_of["answers"].values(), strict=True):
        assert (row["drafters"], row["rollout"]) == ([answer.drafter], answer.band.ends_json())
    assert json_of["answers"]["without_training"]["rollout"] == json_of["speedup"]["rollout"]
    assumed = {row["what"]: row for row in json_of["assumed"]}
    assert f"acceptance of {text.drafter}" in assumed
    assert ("vllm" in assumed["engine"]["value"], "sglang" in assumed["engine"]["effect"]) == (True, True)


def test_earlier_epochs_are_an_assumption_with_its_effect():
    once, again = (what_if(frame, **FAST) for frame in (FRAME.assign(group=range(len(FRAME))), FRAME))
    assert (once.with_epochs is None, again.with_epochs is None) == (False, True)
    assert f"{once.with_epochs:.2f}x" in once.verdict
    suffix = what_if(FRAME.assign(group=range(len(FRAME))), acceptance="suffix=0.57", drafter="suffix", **FAST)
    assert once.with_epochs == pytest.approx(suffix.best.rollout.estimate, rel=1e-12)
    assert suffix.with_epochs is None, "what a user gives is taken as given"
    (row,) = [row for row in once.assumed if "epochs" in row["what"]]
    assert f"{once.with_epochs:.2f}x" in row["effect"]


@pytest.mark.parametrize(
    "asked",
    [
        (*MACHINE, "--acceptance", "learned=geometric:0.8,ngram=0.3"),
        ("--costs", "h100-qwen2.5-7b", "--workers", "4", "--acceptance", "learned=0.8/0.6/0.5/0.4,all=seer-siblings"),
    ],
    ids=["GPUs", "costs"],
)
def test_systems_are_the_rows_of_compare(lengths, capsys, asked):
    names = "verl,tlt,tlt-base,vllm-dynamic"
    found, compared = (
        json.loads(typed(capsys, command, lengths, *asked, "--systems", names, "--json")[1])
        for command in ("what-if", "compare")
    )
    rows = {row["system"]: row for row in found["systems"]}
    assert set(rows) > {row["system"] for row in compared["rows"]} == {*names.split(",")}
    for row in compared["rows"]:
        assert rows[row["system"]] == row
    assert (compared["acceptance"], compared["costs"]) == (found["notes"][-1].partition(": ")[2], found["costs"])
    assert set(found["acceptance"]) == set(found["drafters"])


def test_a_row_names_its_drafters_within_100_columns(capsys):
    for options in ((), ("--rl-steps", "0:1"), ("--stages", "cpu-small")):
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


def test_accept_is_short_for_one_drafter(lengths):
    short, long = (
        what_if(lengths, systems="tlt,tlt-base", drafter="learned", **how)
        for how in ({"accept": 0.6}, {"acceptance": "learned=geometric:0.6"})
    )
    assert short.json() | {"wall_s": 0} == long.json() | {"wall_s": 0}
    assert what_if(lengths, accept=0.6, **FAST).best.rollout == short.best.rollout
    row = short.systems.set_index("system").loc["tlt-base"]
    assert (row["drafters"], row["acceptance"]) == (["ngram"], {"ngram": "geometric:0.42 (default)"})
    text = what_if(lengths, accept=0.6, drafter="ngram", **FAST).best
    assert (text.drafter, text.acceptance) == ("ngram", {"ngram": "geometric:0.6"})
    assert {row.strategy.drafter for row in text.rows} <= {"ngram", "none"}
    assert text.rollout.estimate > short.best.rollout.estimate, "n-grams cost no draft level"


def test_drafts_deeper_than_measured_are_an_assumption(lengths):
    found = what_if(lengths, acceptance="learned=0.8/0.7", drafter="learned", **FAST)
    (row,) = [row for row in found.assumed if row["what"].startswith("drafts deeper")]
    assert "learned:" in row["value"]
    low, high = found.best.band.of_input("acceptance")
    assert low < found.best.rollout.estimate < high


def test_costs_that_cannot_say_ask_to_be_measured(lengths):
    vague = {"model": (0.5, 1.5), "model, speculating": (0.5, 1.5)}
    costs = load_costs("h100-qwen2.5-7b").model_copy(update={"evidence": Evidence(engine="mine", left_out=vague)})
    said = what_if(lengths, costs=costs, workers=2, acceptance="learned=0.7", drafter="learned", **FAST).verdict
    assert said.startswith("Cannot say")
    assert "tltlab profile" in said


def test_a_drafter_of_short_responses_gains_less(lengths):
    short, full = (
        what_if(lengths, acceptance=f"learned=0.7@{trained}", drafter="learned", **FAST)
        for trained in ("100", "window")
    )
    assert list(short.by_accept) == list(full.by_accept) == [0.5, 0.7, 0.85]
    for at, times in short.by_accept.items():
        assert times.rollout_s.sum() > full.by_accept[at].rollout_s.sum()
    assert short.best.acceptance == {"learned": "0.7@100"}


@pytest.mark.parametrize("num_steps", [2, 12])
def test_answers_are_rows_of_their_table(num_steps):
    found = what_if(np.tile(LENGTHS, (4, 1))[:num_steps], systems="vllm-dynamic")
    assert found.systems.attrs["baseline"] == "verl"
    rows = found.systems.set_index("system")
    for answer in found.answers:
        row = rows.loc[f"table-{answer.drafter}"]
        for name, said in (("speed_up", answer.rollout), ("step_speed_up", answer.rl_step)):
            ends = [row[f"{name}{end}"] for end in ("", "_low", "_high")]
            assert ends == pytest.approx([said.estimate, said.low, said.high], rel=1e-9)


def test_what_nobody_can_draft_for_is_not_promised():
    assert not what_if([300] * 40, accept=0.02, **FAST).best.drafts


def test_a_recorded_trace_has_costs_and_acceptance():
    found = what_if("traces/tiny", **FAST)
    assert (found.best.accept, found.best.rl_step, found.recorded) == (None, None, True)
    assert found.scenario.workers == tltlab.read("traces/tiny").manifest.num_workers


def test_training_drafter_is_reported_where_trace_knows(tmp_path):
    base, half = GeometricAcceptance(alpha=0.8), Freshness(untrained=0.5, floor=0.5)
    trace = tltlab.read(FRAME).write(tmp_path / "trace")
    FreshAcceptance(base=base, freshness=half).write(trace / "acceptance.json")
    found = what_if(trace, accept=0.8, gpus="8xH100", **FAST)
    stale = what_if(FRAME, accept=0.4, **FAST)
    assert (found.training.drafter, found.training.level) == ("learned", pytest.approx(0.5))
    times = found.best.rollout.estimate / stale.best.rollout.estimate
    assert found.training.speed_up.estimate == pytest.approx(times, rel=1e-6)
    assert found.training.saved_s == pytest.approx(
        found.plain.makespan_s * (1 - 1 / times) / stale.best.rollout.estimate
    )
    assert found.training.delay_s is None
    assert stale.training is None
    assert stale.json()["drafter_training"] is None


def test_recorded_drafter_s_ages_show_what_training_brought(capsys, tmp_path):
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
    [("8xH100", "Qwen/Qwen2.5-7B-Instruct", 1, 8), ("8H100", "Llama-3.3-70B", 4, 2), ("H200", "Qwen2.5-7B", 1, 1)],
)
def test_worker_has_fewest_gpus_that_hold_model(gpus, model, tp, workers):
    machine = Deployment.of(gpus, model, tokens=20_000)
    assert (machine.costs.tensor_parallel, machine.workers) == (tp, workers)
    assert machine.stages.num_gpus == tp * workers
    assert not machine.assumed


@pytest.mark.parametrize("model", ["Qwen2.5-7B", "Qwen3-30B-A3B", "Llama-3.1-8B"])
@pytest.mark.parametrize("name", ["A100", "H20", "H100", "H200", "B200", "RTX4090"])
def test_a_gpu_of_another_name_differs_by_what_was_measured_on_it(name, model):
    """Whatever others were measured on, the engine is the same; efficiencies are those of the GPU, or typical ones."""
    known = profile_costs(None, name, model, 4)
    mine = profile_costs(None, gpu(name).model_copy(update={"name": "mine"}), model, 4)
    assert known.evidence.engine == mine.evidence.engine == "vllm"
    assert known.constants.step_s == mine.constants.step_s
    for strategy in (NO_SPECULATION, Strategy.chain("learned", 4)):
        seconds = [costs.iteration(strategy).seconds(8, 8e3) for costs in (known, mine)]
        assert 0.75 < seconds[0] / seconds[1] < 1.33


def test_a_named_engine_is_not_in_doubt():
    found = [what_if(FRAME, gpus="2xH100", engine=engine, **FAST) for engine in (None, "vllm")]
    assert found[0].best.rollout == found[1].best.rollout
    low, high = found[0].best.band.effects["engine"]
    assert low < 0 <= high
    assert found[1].best.band.effects["engine"] == (0.0, 0.0)
    assert found[0].best.band.low < found[1].best.band.low


def test_unknown_costs_of_experts_are_reported():
    (said,) = Deployment.of("8xH100", "Qwen3-30B-A3B").assumed
    assert "--stages" in said
    assert said in what_if(of_lengths([100, 900]), gpus="8xH100", model="Qwen3-30B-A3B").notes


def test_the_command_answers_in_json_and_as_page(lengths, tmp_path, capsys):
    asked = ("what-if", lengths, *MACHINE, "--systems", "verl")
    code, printed, err = typed(capsys, *asked, "--out", tmp_path / "answer.html")
    assert code == 0, err
    page = (tmp_path / "answer.html").read_text()
    result = json.loads(typed(capsys, *asked, "--json")[1])
    assert printed.startswith(result["verdict"])
    assert printed.count(result["verdict"].splitlines()[0]) == 1
    assert result["verdict"] in page
    assert all(title in page for title in ("Response lengths", "Timelines", "without speculation"))
    speed_up, band = result["speedup"], result["band"]
    assert (speed_up["rollout"]["low"], speed_up["rollout"]["high"]) == (band["low"], band["high"])
    assert (set(band["parts"]), band["level"]) == ({"costs", "acceptance", "engine", "lengths"}, 0.9)
    assert sum(part["share"] for part in band["parts"].values()) == pytest.approx(1)
    for part in band["parts"].values():
        assert band["low"] <= part["low"] <= speed_up["rollout"]["mean"] <= part["high"] <= band["high"]
    assert f"{speed_up['rl_step']['low']:.2f}x to {speed_up['rl_step']['high']:.2f}x" in page
    assert (result["num_rl_steps"], result["num_responses"]) == (3, 96)
    assert result["columns"]["ignored"] == ["note"]
    tables = {f"table-{answer['drafters'][0]}" for answer in result["answers"].values()}
    assert {row["system"] for row in result["systems"]} == {"verl", *tables}
    assert typed(capsys, *asked, "--out", tmp_path / "p.svg")[0] == 0
    assert (tmp_path / "p.svg").read_text().startswith("<?xml")


@pytest.mark.parametrize(
    "options",
    [MACHINE, ("--costs", "h100-qwen2.5-7b", "--workers", "2", "--accept", "0.8"), ("--rl-steps", "0", "--seed", "3")],
)
def test_the_command_printed_simulates_the_policy_found(lengths, capsys, options):
    out = lengths.parent / "policy file.json"
    asked = ("what-if", lengths, *options, "--systems", "verl", "--policy-out", out)
    code, printed, _ = typed(capsys, *asked, "--json")
    found = json.loads(printed)
    assert (code, found["policy_out"]) == (0, str(out))
    told = load_policy(out).provenance
    assert told["command"] == found["command"]
    assert told["simulated"]
    assert (told["versions"]["tltlab"], told["machine"]) == (version("tltlab"), found["setting"])
    line = next(line for line in typed(capsys, *asked)[1].splitlines() if "tltlab simulate" in line)
    _, *command = shlex.split(line.partition(": ")[2])
    replayed = json.loads(typed(capsys, *command, "--json")[1])
    row = next(row for row in found["systems"] if row["system"] == f"table-{found['drafters'][0]}")
    assert replayed["makespan_s"] == pytest.approx(row["makespan_s"])
    for name, ratio in found["speedup"].items():
        assert replayed["speedup"][name] == (ratio and pytest.approx(ratio["mean"]))


def test_the_timelines_are_of_the_median_step():
    found = what_if([[100, 400], [100, 3000], [100, 900]], costs="h100-qwen2.5-7b", workers=1, systems="verl")
    plain, drafting = found.timelines()
    assert list(plain.rl_steps) == list(drafting.rl_steps) == [2]
    assert rollout_s(drafting)[2] < rollout_s(plain)[2]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--tp", "3"], "3 GPUs"),
        (["--accept", "70"], "70"),
        (["--accept", "0.7", "--acceptance", "all=0.7"], "0.7"),
        (["--accept", "0.7", "--drafter", "ngarm"], "'ngarm'"),
        (["--gpus", "8xH100", "--costs", "cpu-small"], "--costs"),
        (["--acceptance", "geometric:0.7"], "all=geometric:0.7"),
        (["--out", "x.doc"], ".html, .htm, .png, .svg, .pdf, .json"),
        (["--policy-out", "."], "."),
        (["--cap", "7"], "maximum of 7"),
        (["--lists", "words"], "lengths, ids"),
        (["--group-size", "0"], "--group-size"),
    ],
)
def test_what_cannot_be_asked_is_refused(lengths, capsys, options, said):
    code, out, err = typed(capsys, "what-if", lengths, *options)
    assert (code, out) == (2, "")
    assert said in err.splitlines()[-1]


def test_reading_of_file_is_asked_as_import_asks(tmp_path, capsys):
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
    assert len(found.plot().axes) == 2
