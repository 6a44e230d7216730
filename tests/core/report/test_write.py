"""`tltlab report`: what stands on the page, and that it needs nothing outside itself."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import numpy as np
import pandas as pd
import pytest
from tokenizers import Tokenizer, models

from tests.refused import refused
from tltlab.charts import bars, data_uri, lines, save_figure, scatter_identity, shares
from tltlab.doctor.signatures import Diagnosis, Finding
from tltlab.errors import ConfigError, InputError
from tltlab.files import write_json
from tltlab.report.page import Absent, PageTable, Pictures, Section, Transcript, render
from tltlab.report.parts import (
    acceptance_part,
    command_line,
    graphs_part,
    off_policy_part,
    responses_part,
    strategy_names,
    verify_part,
)
from tltlab.report.write import report, verdict
from tltlab.traces.schema import KEY
from tltlab.traces.trace import read

from ...traces_of_lengths import iterations, of_lengths, of_samples

TINY = Path(__file__).parents[3] / "traces" / "tiny"


@pytest.fixture(scope="module")
def made(run):
    return report(run, out=run.parent / "page.html")


@pytest.fixture(scope="module")
def page(run, made):
    return run.parent / "page.html"


def test_what_iterations_ran_in_is_told_by_draft_depth():
    trace = read(TINY)
    assert isinstance(graphs_part(trace, {}), Absent)
    kinds = trace.iterations["draft_depth"].map(lambda depth: "full" if depth else "piecewise")
    tokens = 2 * (trace.iterations["batch"] + trace.iterations["num_drafted"])
    ran = trace.replace(iterations=trace.iterations.assign(graph=kinds, graph_tokens=tokens))
    captured = {"runner": "V1", "mode": "FULL", "full": [[9, None]], "piecewise": [], "num_bytes": 2**30}
    part = graphs_part(ran, {"planned": None, "captured": [captured, captured]})
    told, table = part.blocks
    assert all(fact in told for fact in ("2 engines", "1 full", "0 piecewise", "1.00 GiB"))
    assert table.columns[2:] == ("one full graph", "piecewise", "no graph", "padding of decoding")
    assert {row[0]: row[2:] for row in table.rows}["plain"] == ("0.0%", "100.0%", "0.0%", "50.0%")
    assert all(row[2:4] == ("100.0%", "0.0%") for row in table.rows if row[0] != "plain")


def test_off_policy_training_is_told_by_rl_step():
    trace = read(TINY)
    assert isinstance(off_policy_part(trace), Absent)
    num = len(trace.steps)
    stale = trace.steps.assign(
        staleness=np.linspace(0, 1.5, num), off_policy_share=np.linspace(0, 0.75, num),
        dropped_groups=np.arange(num), length_bias=np.linspace(1, 0.8, num),
    )  # fmt: skip
    part = off_policy_part(trace.replace(steps=stale))
    picture, table = part.blocks
    assert "80%" in picture.caption
    assert table.rows[-1] == (str(trace.rl_steps[-1]), "1.50", "75.0%", str(num - 1), "0.800")


class _Links(HTMLParser):
    def __init__(self):
        super().__init__()
        self.found, self.tags, self.images, self.headings = [], set(), [], []

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.tags.add(tag)
        self.found += [attrs[k] for k in ("src", "href", "srcset", "action", "data", "poster") if k in attrs]
        if tag == "img" or attrs.get("role") == "img":
            self.images.append(attrs)
        if re.fullmatch("h[1-6]", tag):
            self.headings.append(int(tag[1]))


def parsed(text):
    links = _Links()
    links.feed(text)
    return links


def test_a_run_says_which_parts_are_left_out(page, made):
    titles = [section.title for section in made.sections]
    assert titles == ["Timeline", "Where the seconds go", "Response lengths", "RL steps", "Accept length by batch",
                      "What the policy chose", "A few responses", "Predicted against measured", "Findings", "Events",
                      "Where it comes from"]  # fmt: skip
    assert [part.title for part in made.absent] == ["Off-policy training", "CUDA graphs"]
    text = page.read_text()
    assert "tltlab train &#39;my recipe.toml&#39;" in text
    assert "0.32.0" in text


def test_the_page_asks_for_nothing_outside_itself(page):
    text = page.read_text()
    links = parsed(text)
    assert all(link.startswith(("data:image/", "#")) for link in links.found)
    assert not links.tags & {"link", "iframe", "object", "embed", "base", "form"}
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    sha = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{sha}'" in text, "no other script runs"
    assert text.count("<script") == 1
    assert not re.findall(r"url\((?!#)", text)
    assert "@import" not in text
    assert "default-src 'none'" in text
    assert "<b>bold</b>" not in text
    assert "&lt;script src=" in text
    assert page.stat().st_size < 1.5e6


def test_a_problem_leads_the_verdict():
    found = [Finding(code=name, severity=name, title=name, evidence=f"{name} seen") for name in ("hint", "problem")]
    assert verdict(read(TINY), Diagnosis(findings=tuple(found))).startswith("PROBLEM: problem. problem seen Workers")


def test_the_verdict_comes_before_a_slider_of_timelines(page, made):
    text = page.read_text()
    assert made.verdict.startswith("Workers were idle for ")
    assert text.index("Workers were idle for ") < text.index("<dl class=") < text.index("<h2")
    (slides,) = [block for section in made.sections for block in section.blocks if isinstance(block, Pictures)]
    assert slides.names == ("0", "1")
    assert "of median rollout time" in slides.pictures[slides.first].caption
    assert text.count('data-name="') == len(slides.pictures)
    assert "prefers-color-scheme: dark" in text


def test_pictures_have_words_and_headings_go_in_order(page):
    links = parsed(page.read_text())
    assert links.headings[0] == 1
    assert set(links.headings[1:]) == {2}
    assert len(links.images) >= 6
    assert all(len(image["alt"]) > 20 for image in links.images)


def test_responses_are_marked_where_a_draft_was_kept(tmp_path):
    """Three responses on one worker: tokens 1, drafts of depth 2 that keep 2, 0 and 1 for the first of them."""
    kept = [[0, 0, 0], [2, 0, 1], [0, 1], [1]]
    lengths = [1 + 3 + 1 + 2, 1 + 1 + 2, 1 + 2]
    made = iterations(batch=[3, 3, 2, 1], draft_depth=[0, 2, 2, 2], accepted_per_request=kept)
    trace = of_samples(lengths, 99, reward=[0.5, 1.0, 0.0], worker=0, t_submit=0.0, t_finish=[4.0, 3.0, 2.0])
    tokens = trace.outcomes[[*KEY]].assign(prompt_token_ids=[[8, 9]] * 3, token_ids=[list(range(n)) for n in lengths])
    part = responses_part(trace.replace(tokens=tokens, iterations=made), tmp_path, None)
    drafters, longest, highest, lowest = (block for block in part.blocks if isinstance(block, Transcript))
    assert [(piece.text, piece.drafter) for piece in drafters.pieces] == [("ngram", 1)]
    assert all(fact in longest.label for fact in ("longest", "reward 0.5", "7 tokens", "stop"))
    assert all(fact in highest.label for fact in ("highest", "reward 1,"))
    assert all(fact in lowest.label for fact in ("lowest", "reward 0,"))
    assert longest.prompt == "8 9 "
    assert [(piece.text, piece.drafter) for piece in longest.pieces] == [
        ("0 ", 0), ("1 2 ", 1), ("3 4 ", 0), ("5 ", 1), ("6 ", 0)
    ]  # fmt: skip
    assert longest.pieces[1].title == "ngram: 2 of up to 2 drafted tokens were kept"
    assert "token ids are shown" in part.blocks[0].lower()


def test_a_long_response_begins_in_its_own_words(tmp_path):
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    (tmp_path / "model").mkdir()
    tokenizer.save(str(tmp_path / "model" / "tokenizer.json"))
    key = {"rl_step": 0, "prompt_id": "p0", "sample": [0], "turn": 0}
    tokens = pd.DataFrame({**key, "prompt_token_ids": [[1]], "token_ids": [[0, 1] * 300]})
    part = responses_part(of_lengths([600]).replace(tokens=tokens), tmp_path, None)
    (told,) = (block for block in part.blocks if isinstance(block, Transcript))
    assert [piece.text for piece in told.pieces] == [" ".join("ab" * 200)]
    assert "attributed" in part.blocks[0]


def test_lengths_alone_make_a_page(tmp_path):
    made = report(of_lengths([3, 40, 100]).write(tmp_path / "bare"))
    assert "Response lengths" in [section.title for section in made.sections]
    reasons = {part.title: part.reason for part in made.absent}
    assert "no iterations.parquet" in reasons["Accept length by batch"]
    assert "no decisions.parquet" in reasons["What the policy chose"]
    assert "has no times" in reasons["RL steps"]


def test_accept_length_is_one_plus_accepted_over_drafts():
    trace = read(TINY)
    part = acceptance_part(trace)
    table = next(block for block in part.blocks if isinstance(block, PageTable))
    rows = trace.iterations[trace.iterations["num_drafted"] > 0]
    for name, depth in (("ngram:1", 1), ("ngram:4", 4)):
        own = rows[rows["draft_depth"] == depth]
        drafts = sum(len(kept) for kept in own["accepted_per_request"])
        told = next(row for row in table.rows if row[0] == name)
        assert told[2] == f"{drafts:,}"
        assert told[3] == f"{1 + own['num_accepted'].sum() / drafts:.2f}"
    table = pd.DataFrame({"drafter": ["none", "ngram", "learned"], "draft_depth": [0, 4, 8], "top_k": [0, 1, 4],
                          "tokens_to_verify": [1, 5, 32]})  # fmt: skip
    assert strategy_names(table).tolist() == ["none", "ngram:4", "learned:8x4/32"]


def test_a_comparison_is_recognised_by_its_keys(tmp_path):
    row = {"makespan_s": 2.0, "ratio": 0.8, "ratio_low": 0.7, "ratio_high": 0.9, "regret": None}
    base = {"makespan_s": 2.5, "ratio": 1.0, "ratio_low": None, "ratio_high": None, "regret": 0.2}
    told = {
        "Policies compared": {"rows": [row | {"policy": "table"}, base | {"policy": "none"}], "baseline": "none"},
        "Systems compared": {"rows": [row | {"system": "tlt", "lossless": True, "assumptions": ["b"], "source": "x"},
                                         base | {"system": "verl", "lossless": True}], "baseline": "verl",
                             "left_out": {"das": "why not"}},
        "A tuned policy": {"candidates": [row | {"name": "tuned"}, base | {"name": "fixed"}], "verdict": "worth it",
                           "provenance": {"command": "tltlab tune t"}},
        "Does the simulator's winner win on the machine?": {
            "policies": [{"policy": "a", "measured_s": 1.0, "low": 0.9, "high": 1.1, "predicted_s": 1.2, "error": 0.2}],
            "kendall_tau": None, "num_pairs": 0, "verdict": "20.0% off", "met": False},
    }  # fmt: skip
    for title, value in told.items():
        write_json(tmp_path / "result.json", value)
        made = report(tmp_path / "result.json", out=tmp_path / "page.html")
        assert made.title == title
        assert all(link.startswith(("data:", "#")) for link in parsed((tmp_path / "page.html").read_text()).found)
    write_json(tmp_path / "result.json", told["Does the simulator's winner win on the machine?"])
    made = report(tmp_path / "result.json")
    assert made.verdict == "20.0% off"
    assert ("met", "false") in made.sections[-1].blocks[0].rows
    write_json(tmp_path / "result.json", told["Policies compared"])
    text = render(report(tmp_path / "result.json"))
    verdict = report(tmp_path / "result.json").verdict
    assert all(fact in verdict for fact in ("table", "1.25x", "none", "1.11 to 1.43", "draws only"))
    assert "a prediction, not a measurement" in text


def test_whole_rl_steps_decide_which_system_is_fastest(tmp_path):
    base = {"makespan_s": 2.0, "ratio": 1.0, "ratio_low": 1.0, "ratio_high": 1.0, "regret": 0.2, "lossless": True}
    step = {"step_s": 3.0, "step_ratio": 1.0, "step_ratio_low": 1.0, "step_ratio_high": 1.0}
    rollouts_only = base | {"makespan_s": 1.0, "ratio": 0.5} | step | {"step_s": 4.0, "step_ratio": 4 / 3}
    better = base | step | {"step_s": 2.7, "step_ratio": 0.9, "step_ratio_low": 0.8, "step_ratio_high": 0.95}
    rows = [base | step | {"system": "verl"}, rollouts_only | {"system": "split"}, better | {"system": "tlt"}]
    write_json(tmp_path / "c.json", {"rows": rows, "baseline": "verl"})
    verdict = report(tmp_path / "c.json").verdict
    assert all(fact in verdict for fact in ("tlt", "RL step", "1.11x", "verl", "1.05 to 1.25", "draws only"))


def test_a_rehearsals_summary_is_shown(tmp_path):
    told = {"policies": [{"policy": "a", "measured_s": 1.0, "error": 0.2}], "num_rounds": 3, "verdict": "a it is",
            "command": "tltlab rehearse t", "versions": {"vllm": "0.32.0"}}  # fmt: skip
    write_json(tmp_path / "summary.json", told)
    text = render(report(tmp_path / "summary.json"))
    for fact in ("a it is", "<dt>num rounds</dt><dd>3</dd>", "tltlab rehearse t", "0.32.0"):
        assert fact in text


def test_what_is_no_run_and_no_comparison_is_refused(tmp_path, command):
    (tmp_path / "empty").mkdir()
    policy = {"format": "tltlab-policy", "version": 1, "selector": {"kind": "none"}}
    empty = [{key: []} for key in ("systems", "policies", "candidates")]
    wrong = [{"makespan_s": 1.0}, policy, {"policies": [{"policy": "a"}]}, [], *empty]
    for n, value in enumerate(wrong):
        write_json(tmp_path / f"{n}.json", value)
    for name in ("empty", "nowhere", *(f"{n}.json" for n in range(len(wrong)))):
        for out in ((), ("--out", tmp_path / "x.html")):
            code, _, err = command("report", tmp_path / name, *out)
            assert code == 2
            assert str(tmp_path / name) in err
    assert not list(tmp_path.glob("*.html"))
    assert "--out tiny.html" in command("report", TINY)[2], "a trace outside a RUN wants a place for its page"


def test_the_command_writes_the_same_bytes(run, page, command):
    code, out, _ = command("report", run, "--json")
    assert code == 0
    told = json.loads(out)
    assert Path(told["out"]) == run / "report.html"
    assert told["bytes"] == (run / "report.html").stat().st_size
    assert (run / "report.html").read_bytes() == page.read_bytes()
    assert "CUDA graphs" in told["left_out"]


def test_predictions_are_read_computed_or_left_out(tmp_path):
    trace = read(TINY).select([0, 1, 2])
    absent = Absent(title="Predicted against measured", reason="left out by --no-verify")
    assert verify_part(tmp_path, trace, {}, compute=False) == absent
    computed = verify_part(trace.write(tmp_path / "trace"), trace, {}, compute=True)
    assert isinstance(computed, Section)
    assert computed.title == "Predicted against measured"
    for steps in ([1], {"a": 1}, [{"measured_s": "x"}]):
        part = verify_part(tmp_path, trace, {"verify": {"steps": steps, "median_error": 0.1}}, compute=True)
        assert isinstance(part, Absent), "a summary that tltlab did not write"
        assert "summary.json" in part.reason


def test_commands_are_told_as_a_shell_takes_them():
    assert command_line(["/venv/lib/tltlab/__main__.py", "demo"]) == "python -m tltlab demo"
    assert command_line(["bench me.py", "--fast"]) == "python 'bench me.py' --fast"


def test_charts_take_unknown_values_and_save_the_same_bytes(tmp_path):
    figures = [
        lambda: bars(["a", "b"], [1.0, None], [0.5, None], [1.5, None], xlabel="s", title="t", reference=1.0),
        lambda: lines({"a": ([1, 2, 4], [1.0, None, 2.0])}, xlabel="x", ylabel="y", title="t", doubling=True,
                      bands={"a": ([0, None, 1], [2, None, 3])}),
        lambda: shares([0, 1], {"a": [0.5, 1.0], "b": [0.5, 0.0], "c": [0.0, 0.0]}, xlabel="x", title="t"),
        lambda: scatter_identity([1.0, None], [1.1, 2.0], ["a", "b"]),
    ]  # fmt: skip
    for make in figures:
        save_figure(make(), tmp_path / "one.svg")
        save_figure(make(), tmp_path / "two.svg")
        assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()
    for name in ("one", "two"):
        save_figure(make(), tmp_path / f"{name}.png")
    assert (tmp_path / "one.png").read_bytes() == (tmp_path / "two.png").read_bytes()
    assert data_uri(make()).startswith("data:image/png;base64,")
    with refused(ConfigError):
        save_figure(figures[0](), tmp_path / "one.jpg")
    (tmp_path / "file").write_text("")
    with refused(InputError, naming=("cannot",)):
        save_figure(figures[0](), tmp_path / "file" / "one.png")


LONG_NAMES = ["table 1+:ngram:8 8+:ngram:4 19+:ngram:2 51+:none", f"package.module:{'Long' * 12}(depth=8)", "none"]


@pytest.mark.parametrize(
    "draw",
    [
        lambda: lines({"rollout": ([0.3, 0.95], [1.0, 2.59]), "RL step": ([0.3, 0.95], [1.0, 2.05])},
                      xlabel="drafted tokens accepted, each", ylabel="speed-up", title="By acceptance"),
        lambda: lines({name: ([0, 1], [1, 2]) for name in LONG_NAMES}, xlabel=" ".join(LONG_NAMES),
                      ylabel=f"speed-up over {LONG_NAMES[0]}", title=" ".join(LONG_NAMES * 2)),
        lambda: bars(LONG_NAMES, [1, 2, 3], xlabel=f"speed-up over {LONG_NAMES[1]}", title=LONG_NAMES[0]),
        lambda: shares([0, 1], dict.fromkeys(LONG_NAMES, (0.2, 0.3)), xlabel="x", title=LONG_NAMES[0]),
    ],
)  # fmt: skip
def test_no_text_of_a_chart_is_cut_off(tmp_path, draw):
    figure = draw()
    save_figure(figure, tmp_path / "a.png")
    inches = figure.get_tightbbox()
    assert min(inches.x0, inches.y0) > -0.01
    assert max(inches.x1 - figure.get_figwidth(), inches.y1 - figure.get_figheight()) < 0.01
