"""`sweep` over workload, machine and policies or systems: each point is what simulating it alone gives."""

import json
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from tltlab.sim.study.grid import Axes, SweepGrid

import tltlab
from tests.refused import refused
from tltlab.costs.deployment import Deployment
from tltlab.errors import ConfigError
from tltlab.sim.config import SimulationConfig
from tltlab.sim.study.systems import compare_systems

from ..workloads import typed

FRAME = pd.DataFrame(
    [(step, f"g{n // 4}", 20, 30 + 40 * (n % 4) + 900 * (n == 7) + step) for step in range(2) for n in range(16)],
    columns=["step", "group", "prompt_len", "response_length"],
)
CONFIG = SimulationConfig(costs="cpu-small")
AXES = Axes(workers=(1, 2), acceptance=("0.5", "0.8"))


def grid(axes: Axes = AXES, **options) -> SweepGrid:
    return tltlab.sweep(FRAME, axes, "ngram:4", CONFIG, **options)


def test_each_point_is_what_simulate_gives():
    frame = grid().to_frame()
    assert frame["policy"].tolist() == ["none", "ngram:4"] * 4
    for row in frame.to_dict("records"):
        settings = {"costs": "cpu-small", "workers": row["workers"], "acceptance": f"geometric:{row['acceptance']}"}
        seconds, plain = (tltlab.simulate(FRAME, policy, **settings).makespan_s for policy in (row["policy"], "none"))
        assert row["makespan_s"] == seconds
        assert row["speed_up"] == pytest.approx(plain / seconds, rel=1e-12)
        assert row["speed_up_low"] <= row["speed_up"] <= row["speed_up_high"]


def test_caps_group_sizes_and_gpus_are_axes():
    frame = grid(Axes(caps=(100,), group_sizes=(2, 4), gpus=("2xH100",), acceptance=("0.7",))).to_frame()
    machine = Deployment.of("2xH100", "Qwen2.5-7B", tokens=200)
    for size in (2, 4):
        kept = FRAME[FRAME.groupby(["step", "group"]).cumcount() < size]
        expected = tltlab.simulate(kept, costs=machine.costs, workers=machine.workers, max_response_tokens=100)
        assert frame[(frame.group_sizes == size) & (frame.policy == "none")]["makespan_s"].item() == pytest.approx(
            expected.makespan_s, rel=1e-12
        )


def test_systems_at_points_equal_their_comparison():
    axes = {"gpus": ("1xH100", "2xH100"), "acceptance": ("0.7",), "systems": ("tlt-base", "streamrl")}
    found = tltlab.sweep(FRAME, axes)
    assert found.frame["system"].tolist() == ["verl", "tlt-base", "streamrl"] * 2
    for gpus, rows in found.frame.groupby("gpus"):
        machine = Deployment.of(str(gpus), "Qwen2.5-7B", tokens=1200)
        expected = compare_systems(
            tltlab.read(FRAME), "verl,tlt-base,streamrl", costs=machine.costs, workers=machine.workers,
            acceptance="geometric:0.7", stages=machine.stages, ranges=False,
        ).set_index("system")  # fmt: skip
        for row in rows.to_dict("records"):
            alone = expected.loc[row["system"]]
            assert (row["makespan_s"], row["step_s"]) == (alone["makespan_s"], alone["step_s"])
            assert row["speed_up"] == pytest.approx(1 / alone["ratio"], rel=1e-12)
            assert row["step_speed_up"] == pytest.approx(1 / alone["step_ratio"], rel=1e-12)
            assert row["step_speed_up_low"] == pytest.approx(1 / alone["step_ratio_high"], rel=1e-12)
    (panel,) = found.plot().axes
    assert (panel.get_xlabel(), panel.get_ylabel()) == ("gpus", "system")


def test_systems_without_gpus_have_rollouts_alone():
    frame = tltlab.sweep(FRAME, {"workers": (1, 2), "systems": ("tlt-base",)}, config=CONFIG).frame
    assert "step_s" not in frame
    assert frame["assumed"].notna().tolist() == [False, True] * 2
    assert "seer-siblings" in frame["assumed"][1]


def test_an_interrupted_sweep_continues_with_more_values(tmp_path: Path):
    journal, told = tmp_path / "deep" / "s.points", []

    class Interrupted(Exception):
        pass

    def twice(point: str) -> None:
        told.append(point)
        if len(told) == 2:
            raise Interrupted

    with pytest.raises(Interrupted):
        grid(journal=journal, done=twice)
    with journal.open("a") as file:
        file.write('["half a li')  # as a killed process leaves it
    more = Axes(workers=(1, 2, 3), acceptance=("0.5", "0.8"))
    again = grid(more, journal=journal)
    assert again.resumed == 2
    assert again.frame.equals(grid(more).frame)
    assert grid(more, journal=journal).resumed == 6
    with refused(ConfigError):
        tltlab.sweep(FRAME, more, "ngram:8", CONFIG, journal=journal)
    with refused(ConfigError):
        tltlab.sweep(FRAME, replace(more, systems=("tlt",)), config=CONFIG, journal=journal)


def test_heat_map_has_panels_or_rows_of_policies():
    figure = grid().plot()
    assert [axes.get_title(loc="left").startswith("ngram:4: speed-up") for axes in figure.axes] == [True]
    (axes,) = figure.axes
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("workers", "acceptance")
    (axes,) = grid(Axes(workers=(1, 2), acceptance=("0.8",))).plot().axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["none", "ngram:4"]


@pytest.mark.parametrize(
    ("axes", "policies", "naming"),
    [
        ({"workers": (1,), "gpus": ("1xH100",)}, "none", ()),
        ({"workers": (1, 1)}, "none", (1,)),
        ({"caps": (0,)}, "none", (0,)),
        ({"gpus": ("8xZ1",)}, "none", ("Z1", "GPU")),
        ({"acceptance": ("1.5",)}, "none", ("1.5",)),
        ({"systems": ("tlt", "tlt")}, "none", ("tlt",)),
        ({"systems": ("tlx",)}, "none", ("tlx",)),
        ({"cap": (100,)}, "none", ("cap",)),
        ({"systems": ("tlt",)}, "ngram:4", ("systems",)),
        ({"group_sizes": (8,)}, "ngram:4", (4, 8)),
        ({"acceptance": ("0.5",), "workers": (2,)}, "ngram:4,learned:4", ("learned", "ngram", "all=0.5")),
        ({"acceptance": ("learned=0.5",), "workers": (2,)}, "ngram:4", ("'ngram'", "learned")),
    ],
)
def test_what_cannot_be_swept_is_refused(axes: dict, policies: str, naming: tuple):
    with refused(ConfigError, naming=naming):
        tltlab.sweep(FRAME, axes, policies, CONFIG)


def test_command_writes_table_json_csv_and_picture(tmp_path: Path, capsys):
    FRAME.to_csv(tmp_path / "lengths.csv", index=False)
    asked = ("sweep", tmp_path / "lengths.csv", "--workers", "1,2", "--acceptance", "0.8", "--costs", "cpu-small")
    asked = (*asked, "--policies", "ngram:4")
    result = json.loads(typed(capsys, *asked, "--json", "--out", tmp_path / "s.csv")[1])
    assert result["axes"] == {"workers": [1, 2], "acceptance": ["0.8"]}
    written = pd.read_csv(tmp_path / "s.csv")["speed_up"].tolist()
    assert [row["speed_up"] for row in result["points"]] == pytest.approx(written, rel=1e-12)
    code, text, _ = typed(capsys, *asked, "--out", tmp_path / "s.svg")
    assert code == 0
    assert f"{result['points'][1]['speed_up']:.2f}x" in text
    assert (tmp_path / "s.svg").read_text().startswith("<?xml")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lengths.csv", "s.csv", "s.svg"]
    result = json.loads(typed(capsys, *asked[:4], "--costs", "cpu-small", "--systems", "tlt-base", "--json")[1])
    assert result["axes"] == {"workers": [1, 2], "systems": ["tlt-base"]}
    assert [row["system"] for row in result["points"]] == ["verl", "tlt-base"] * 2
    by_drafter = ("--acceptance", "learned=0.8,ngram=0.4;all=0.5", "--policies", "ngram:4", "--json")
    points = json.loads(typed(capsys, *asked[:4], "--costs", "cpu-small", *by_drafter)[1])["points"]
    granted = [(row["workers"], row["granted"]) for row in points if row["policy"] != "none"]
    assert granted == [(workers, {"ngram": kept}) for workers in (1, 2) for kept in ("0.4", "0.5")]
    for wrong, said in ((("--workers", "two"), "two"), (("--out", tmp_path / "s.txt"), "s.txt")):
        code, _, err = typed(capsys, "sweep", tmp_path / "lengths.csv", *wrong)
        assert (code, said in err) == (2, True)
