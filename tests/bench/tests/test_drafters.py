from pathlib import Path

import pytest

from bench.drafters import (
    TEXT,
    Visits,
    bench_drafters,
    made_up,
    recorded,
    replay,
    visit,
)
from bench.harness import shown
from tests.refused import refused
from tltlab.drafters.ngram import NgramDrafter
from tltlab.drafters.specs import NgramSpec, SuffixSpec
from tltlab.errors import ConfigError, InputError
from tltlab.traces.trace import read

TRACES = Path(__file__).parents[3] / "traces"


def test_a_replay_counts_what_an_engine_would_accept():
    group = Visits(prompt_id="p", prompt=[1, 2, 3, 1, 2], earlier=[], replayed=[[3, 1, 2, 3, 9, 5]])
    found = replay(NgramDrafter(min_match=2), [group], depth=4)
    # The prefill gives 3. The draft "1 2 3 1" is kept up to the 3, then comes 9; nothing is known after it, then 5.
    assert found["drafted"] == 4 / 2
    assert found["accepted"] == 3 / 2


def test_history_helps_where_a_drafter_keeps_it():
    pytest.importorskip("arctic_inference")
    groups = recorded(TRACES / "tiny", 4)
    for scope, helps in (("group", False), ("problem", True)):
        spec = SuffixSpec(scopes=(scope,))
        first, later = visit(spec, groups, 8, False), visit(spec, groups, 8, True)
        assert (later["accepted"] > first["accepted"]) == helps


def test_half_the_samples_are_history_after_one_visit():
    groups = recorded(TRACES / "tiny")
    assert {(len(group.earlier), len(group.replayed)) for group in groups} == {(2, 2)}
    assert recorded(TRACES / "tiny", 2) == groups[:2]
    assert {len(one) for group in made_up(2, 4, 100) for one in group.earlier + group.replayed} == {100}


def test_the_last_visit_to_a_prompt_is_replayed(tmp_path):
    trace = read(TRACES / "tiny")
    tokens, workload, outcomes = trace.tokens, trace.workload, trace.outcomes
    again = tokens["prompt_id"].iloc[0]
    other = tokens.loc[tokens["rl_step"] == trace.rl_steps[1], "prompt_id"].iloc[0]
    for table in (tokens, workload, outcomes):
        table["prompt_id"] = table["prompt_id"].replace(other, again)
    trace.replace(tokens=tokens, workload=workload, outcomes=outcomes, iterations=None, decisions=None).write(tmp_path)
    group = recorded(tmp_path, 1)[0]
    assert group.prompt_id == again
    texts = [list(text) for text in tokens.loc[tokens["prompt_id"] == again, "token_ids"]]
    assert (group.earlier, group.replayed) == (texts[:4], texts[4:])


def test_the_benchmark_has_a_row_for_each_drafter():
    found = bench_drafters(TRACES / "tiny", num_groups=2, cases={"one": NgramSpec(), "two": NgramSpec(scope="request")})
    assert [row["drafter"] for row in found["rows"]] == ["one", "two"]
    for row in found["rows"]:
        assert 0 < row["first"]["accepted"] <= row["first"]["drafted"] <= 8
        assert row["first"]["insert_us_per_token"] > 0
        assert row["first"]["lookup_us"] > 0
    assert len(shown(found, TEXT).splitlines()) == 4


def test_a_trace_without_tokens_is_refused():
    with refused(InputError, naming=("tokens.parquet",)):
        recorded(TRACES / "reasoning-32k")
    with refused(ConfigError, naming=("2",)):
        made_up(1, 2, 1)
