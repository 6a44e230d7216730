"""Published summaries of lengths: read, fitted, refused, and measured again on what is drawn from the fit."""

import json

import numpy as np
import pandas as pd
import pytest

from tests.refused import refused
from tltlab.errors import ConfigError
from tltlab.lengths.fit import outlook
from tltlab.lengths.generate import generate
from tltlab.lengths.model import REGIMES, LengthModel
from tltlab.lengths.summaries import from_summaries, read_summaries, summaries_of


def law_of(text):
    return from_summaries(read_summaries(text))


def measured(law, *, prompts=64, group=8):
    return outlook(generate(law, num_rl_steps=30, prompts_per_step=prompts, group_size=group, seed=5)).summaries


def test_tail_is_what_at_most_32_requests_leave():
    # 40 responses of 1 to 40 tokens: when 32 are left 8 tokens have passed; in RL step 1 all take twice as long.
    steps = [pd.DataFrame({"rl_step": t, "response_tokens": np.arange(1, 41) * (t + 1)}) for t in (0, 1)]
    outcomes = pd.concat(steps).assign(prompt_id="p", finish_reason="stop")
    found = summaries_of(outcomes, cap=None, prompt_share=None)
    assert found.tail == pytest.approx(1 - (8 + 16) / (40 + 80))
    assert (found.max, found.responses, found.cut, found.cap) == (60.0, 40.0, 0.0, None)
    few = summaries_of(outcomes[outcomes["response_tokens"] > 60], cap=None, prompt_share=None)
    assert few.tail is None


@pytest.mark.parametrize(
    "text",
    [
        "p50=1500,p75=4000,cap=20480,cut=0.02",
        "p50=1500,cap=20480,cut=0.005,tail=0.8,responses=512",
        "mean=3000,p50=1500,cap=100000",
        "p50=1000,tail=0.8,max=20000,responses=512",
        "p10=100,p50=400,p90=1000,p99=2500,max=5000,cap=16384,cut=0,responses=512,group=8,prompt_share=0.05",
    ],
)
def test_law_has_summaries_it_was_fitted_to(text):
    given = read_summaries(text)
    law, found = from_summaries(given)
    assert found.keys() == given.given().keys() - {"cap", "responses", "group", "prompt_share"}
    for name, (asked, fitted) in found.items():
        assert fitted == pytest.approx(asked, rel=0.005, abs=1e-4), name
    again = measured(law.with_changes(prompt_share=given.prompt_share or 0.0)).given()
    for name in found.keys() & {"p50", "p75", "p90", "cut", "tail", "mean"}:
        assert again[name] == pytest.approx(found[name][0], rel=0.07, abs=0.003), name
    if "max" in found:
        assert again["max"] == pytest.approx(given.max, rel=0.15)


@pytest.mark.parametrize("name", REGIMES)
def test_summaries_of_a_trace_draw_it_again(name):
    was = measured(REGIMES[name])
    now = measured(from_summaries(was)[0])
    for key, value in was.given().items():
        # The longest of a prompt's responses that share their length vary most.
        within = 0.25 if key in ("max", "tail") else 0.08
        assert now.given()[key] == pytest.approx(value, rel=within, abs=0.03 if key == "prompt_share" else 0.002), key


def test_surplus_summaries_are_fitted_by_least_squares():
    law, found = law_of("mean=3000,p50=1500,p75=2500,p90=6000,p99=20000,cap=40000")
    assert len(law.quantiles) == 4
    off = {name: fitted / asked for name, (asked, fitted) in found.items()}
    assert off["mean"] < 0.97
    assert all(off[name] > 1.001 for name in ("p50", "p90", "p99"))
    assert any("p50 1500" in note and "mean 3000" in note for note in law.notes)


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("p50", ("p50", "mean")),
        ("p50=many,p75=3", ("p50=many",)),
        ("p5O=3,p75=3", ("p5O",)),
        ("p50=1500,p50=1600", ("p50", "twice")),
        ("p50=1500", ("two",)),
        ("p50=2000,p75=1000", ("p50", "p75")),
        ("p50=1500,p75=30000,cap=20480", ("p75", "cap")),
        ("p50=1500,cut=0.02", ("cut", "cap")),
        ("p50=100,p99=4000,cap=20480,cut=0.02", ("p99", "cut")),
        ("p50=100,mean=30,cap=1000", ("mean", "50", "550")),
        ("p50=100,tail=0.8,responses=32", ("responses", "32")),
        ("p50=100,p90=900,max=800", ("p90", "max")),
        ("p50=15000,p75=18000,tail=0.9,cap=20480", ("0.9", "20480")),
        ("p50=100,p75=120,prompt_share=2", ("prompt_share",)),
    ],
)
def test_summaries_that_cannot_be_are_refused(text, facts):
    with refused(ConfigError, naming=facts):
        law_of(text)


def test_the_long_tail_regime_matches_its_source():
    law = REGIMES["long-tail"]
    summaries = law.notes[0].split("--like ")[1].rstrip("`")
    assert law.quantiles == tuple((round(p, 5), round(q)) for p, q in law_of(summaries)[0].quantiles)
    found = measured(law)
    assert 0.74 <= found.tail <= 0.85
    assert found.max > 0.9 * found.cap
    assert found.quantiles[75.0] < found.cap / 8


def test_the_production_regime_is_the_measured_distribution(shared_data):
    pdf = pd.read_csv(shared_data / "deepseek_r1_output_tokens_pdf.csv.gz")
    share = pdf["prob"].cumsum() / pdf["prob"].sum()
    for level, tokens in REGIMES["production"].quantiles:
        assert tokens == pdf["output_tokens"][np.searchsorted(share, level)]


def test_the_command_takes_summaries(command, tmp_path):
    out = tmp_path / "t"
    code, text, _ = command(
        "trace",
        "generate",
        "--like",
        "p50=1500,p75=2500,cap=20480,cut=0.02,responses=96,group=4",
        "--out",
        out,
        "--json",
    )
    assert code == 0
    result = json.loads(text)
    assert [result["statistics"][key] for key in ("prompts_per_step", "group_size")] == [24, 4]
    assert LengthModel.load(out / "lengths.json").cap_mass() == pytest.approx(0.02, abs=0.001)
    described = json.loads(command("trace", "describe", out, "--json")[1])["summaries"]
    assert (described["cap"], described["responses"], described["group"]) == (20480, 96, 4)
    assert described["cut"] == pytest.approx(0.02, abs=0.015)
    line = command("trace", "describe", out)[1].splitlines()[-1].removeprefix("summaries: ")
    assert command("trace", "generate", "--like", line, "--out", tmp_path / "again")[0] == 0
    for wrong in ("p50=1500,mode=3", "p50=1500,p75=1000"):
        code, text, err = command("trace", "generate", "--like", wrong, "--out", tmp_path / "w")
        assert (code, text, err.count("\n")) == (2, "", 1)
