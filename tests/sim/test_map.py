"""The map: what pays at a point is what simulating its systems by hand gives, and how sure that is has three parts."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from bench.simulator import COSTS
from tltlab.costs.profiles import nearest_engine, profiles
from tltlab.errors import ConfigError
from tltlab.lengths.generate import log_normal
from tltlab.planning.system_binding import bind_assuming
from tltlab.sim.config import SimulationConfig
from tltlab.sim.maps import (
    FAMILIES,
    Map,
    MapGrid,
    Point,
    PointResult,
    break_even,
    compositions,
    search_systems,
    survey,
)
from tltlab.sim.maps.grid import WARM_UP_STEPS, beyond_measured, scheduled
from tltlab.sim.maps.survey import Gain
from tltlab.sim.systems import compare_systems, simulate_system
from tltlab.stats import Interval, paired_ratio

from .workloads import typed

TINY = Path(__file__).resolve().parents[2] / "traces" / "tiny"
SMALL = MapGrid(models=["Qwen3-32B"], weights=["bf16"], contexts=[4096], loads=[4], workers=2, rl_steps=2)


@pytest.fixture(scope="module")
def found() -> Map:
    return survey(SMALL)


def gain(low: float, estimate: float, high: float, believed: tuple[float, float] | None, least: float | None) -> Gain:
    step = Interval(estimate=estimate, low=low, high=high, level=0.95, method="t")
    return Gain(step=step, rollout=step, believed=believed, least=least)


def test_a_point_is_the_simulation_of_its_systems_without_the_first_rl_step(found: Map):
    assert [f.point.schedule for f in found.results] == ["synchronous", "one step off"]
    for one in found.results:
        costs = SMALL.costs(one.point)
        seconds = {}
        for name in ("off", "model-free"):
            run = simulate_system(
                SMALL.trace(one.point),
                bind_assuming(scheduled(FAMILIES[name], one.point.schedule), costs, None),
                costs=costs, workers=2, decision_block=16, stages=SMALL.stages(one.point, costs),
                gpus_per_worker=costs.tensor_parallel,
            )  # fmt: skip
            assert run.whole is not None
            seconds[name] = run.whole.steps["step_s"].to_numpy()[WARM_UP_STEPS:]
        expected = paired_ratio(seconds["off"], seconds["model-free"], rng=np.random.default_rng(0))
        assert one.gains["model-free"].step == expected
        assert one.step_s == pytest.approx(seconds["off"].mean())
        assert set(one.gains) == set(FAMILIES) - {"off"}


def test_worse_acceptance_is_worse_and_order_has_none(found: Map):
    for one in found.results:
        for name in ("model-free", "trained", "trained + order"):
            least = one.gains[name].least
            assert least is not None
            assert least < one.gains[name].step.estimate
        assert one.gains["order"].least is None
        assert one.gains["order"].believed == (one.gains["order"].step.low, one.gains["order"].step.high)


def test_a_verdict_needs_the_luck_of_lengths_then_costs_and_acceptance_too():
    assert gain(0.7, 0.8, 0.9, (0.5, 1.2), 0.7).verdict == "does not pay"
    assert gain(0.9, 1.2, 1.5, (0.5, 2.0), 1.1).verdict == "open"
    assert gain(1.1, 1.2, 1.3, (0.9, 1.6), 1.1).verdict == "likely pays"
    assert gain(1.1, 1.2, 1.3, None, 1.1).verdict == "likely pays"
    assert gain(1.5, 1.6, 1.7, (1.1, 2.5), 0.9).verdict == "likely pays"
    assert gain(1.5, 1.6, 1.7, (1.1, 2.5), 1.2).verdict == "pays"
    assert gain(1.1, 1.2, 1.3, (1.1, 1.3), None).verdict == "pays"


def test_the_best_family_is_the_fastest_that_is_not_slower_and_else_none():
    point = next(SMALL.points())
    slow, fast = gain(0.7, 0.8, 0.9, None, 0.7), gain(1.1, 1.2, 1.3, None, 1.1)
    assert PointResult(point=point, gains={"trained": slow, "order": fast}).best == "order"
    nothing = PointResult(point=point, gains={"trained": slow, "order": slow})
    assert (nothing.best, nothing.gain, nothing.sure) == ("off", None, "pays")


def test_at_the_break_even_acceptance_a_family_is_as_fast_as_plain_decoding(found: Map):
    (one,) = (one for one in found.results if one.point.schedule == "synchronous")
    factor = break_even(SMALL, one.point, "model-free", within=0.1)
    assert factor is not None
    assert (factor < 1.05) == (one.gains["model-free"].step.estimate > 1.0)
    assert break_even(SMALL, one.point, "order") is None


def test_costs_are_those_of_the_engine_measured_nearest_and_what_they_lack_is_named(found: Map):
    assert nearest_engine("H200", "Qwen3-30B-A3B", "bf16") == "sglang"
    assert nearest_engine("H100", "Qwen3-235B-A22B", "fp8") == "tensorrt-llm"
    costs = SMALL.costs(next(SMALL.points()))
    longest = max(m.context_tokens[1] for m in profiles().engines["sglang"].measured)
    assert beyond_measured(costs, int(longest)) == []
    assert beyond_measured(costs, int(longest) + 1) == ["context"]
    assert all(one.distance == "measured together" and "draft depth" in one.beyond for one in found.results)


def test_a_model_that_does_not_fit_is_a_point_with_a_reason():
    grid = MapGrid(
        models=["Qwen3-235B-A22B"], weights=["bf16"], schedules=["synchronous"], contexts=[131072], loads=[8],
        gpu="RTX4090",
    )  # fmt: skip
    (one,) = survey(grid).results
    assert one.fault is not None
    assert one.json()["fault"] == one.fault
    assert not one.gains


def test_lengths_are_the_same_for_every_model_and_reach_the_limit():
    grid = MapGrid(contexts=(2048,), loads=(128,))
    traces = [grid.trace(point) for point in grid.points()]
    first = traces[0].outcomes["response_tokens"]
    assert all(first.equals(trace.outcomes["response_tokens"]) for trace in traces[1:])
    assert first.max() == 2048
    assert len(first) == 4 * 128 * (grid.rl_steps + WARM_UP_STEPS)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"models": []}, "models must have at least one"),
        ({"loads": [8, 8]}, "each once"),
        ({"contexts": [1 << 20]}, "256 to 131072 tokens"),
        ({"loads": [1]}, "2 to 4096"),
        ({"workers": 3}, "even number"),
        ({"rl_steps": 1}, "at least 2 RL steps"),
        ({"regime": "none"}, "no regime"),
        ({"models": ["Qwen9"]}, "unknown model"),
    ],
)
def test_a_grid_says_what_is_wrong_with_it(changes: dict[str, object], complaint: str):
    with pytest.raises(ConfigError, match=complaint):
        replace(SMALL, **changes)


def test_the_command_prints_a_table_and_writes_csv_json_and_a_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    files = [tmp_path / name for name in ("map.csv", "map.png", "map.json")]
    options = (
        "--models Qwen3-30B-A3B --weights fp8 --schedules synchronous --contexts 2K --loads 4 --workers 2 --rl-steps 2"
    )
    written = ("--csv", files[0], "--plot", files[1], "--out", files[2], "--json")
    code, shown, _ = typed(capsys, "map", *options.split(), *written)
    told = json.loads(shown)
    assert (code, told) == (0, json.loads(files[2].read_text()))
    (point,) = told["points"]
    assert (point["kind"], point["context"], point["load"]) == ("MoE", 2048, 4)
    rows = pd.read_csv(files[0])
    assert rows["family"].tolist() == list(point["families"])
    assert rows.loc[rows["best"], "family"].tolist() == ([point["best"]] if point["best"] != "off" else [])
    assert files[1].read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    "options", ["--contexts many", "--schedules later", "--weights fp3", "--plot map.pdf", "--loads 1.5"]
)
def test_what_cannot_be_mapped_is_refused_in_one_sentence(options: str, capsys: pytest.CaptureFixture[str]):
    code, _, said = typed(capsys, "map", *options.split())
    assert (code, len(said.strip().splitlines())) == (2, 1)


def test_points_have_names_and_kinds():
    point = Point(model="Qwen3-32B", weights="fp8", schedule="one step off", context=131072, load=64)
    assert point.name == "Qwen3-32B fp8, one step off, 128K, 64 a worker"
    assert point.kind == "dense"


def test_a_search_chooses_on_half_of_the_rl_steps_and_judges_on_the_others():
    trace = log_normal(prompts=4, group_size=4, rl_steps=3, median=100, cap=400, workers=2)
    settings = {"costs": COSTS, "acceptance": "geometric:0.7", "ranges": False, "decision_block": 16}
    config = SimulationConfig(costs=COSTS, acceptance="geometric:0.7", decision_block=16)
    found = search_systems(trace, config, finalists=2)
    tried = list(compositions())
    assert found.attrs["searched"] == len(tried) == len({system.name for system in tried})
    assert found.attrs["chosen_on"] == [0, 2]
    first = compare_systems(trace, tried, rl_steps=[0, 2], **settings)
    names = [name for name in first["system"] if name != "verl"][:2]
    assert sorted(found["system"]) == sorted(["verl", *names])
    judged = compare_systems(trace, [s for s in tried if s.name in ("verl", *names)], rl_steps=[1], **settings)
    assert found["makespan_s"].tolist() == judged["makespan_s"].tolist()
    assert all(system.lossless and system.on_policy for system in tried)


def test_a_search_needs_rl_steps_to_judge_on():
    with pytest.raises(ConfigError, match="at least two"):
        search_systems(log_normal(prompts=2, group_size=2, rl_steps=1, workers=2))


def test_the_command_searches(capsys: pytest.CaptureFixture[str]):
    options = "--search --rl-steps 0:2 --no-ranges --decision-block 32 --json"
    code, shown, _ = typed(capsys, "compare", TINY, *options.split())
    told = json.loads(shown)
    assert code == 0
    assert told["chosen_on"] == [0]
    assert told["num_rl_steps"] == 1
    assert len(told["systems"]) == 6
