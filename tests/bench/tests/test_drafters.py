from pathlib import Path

from bench.drafters import (
    TEXT,
    Visits,
    bench_drafters,
    made_up,
    recorded,
    replay,
)
from bench.harness import shown
from tests.refused import refused
from tltlab.drafters.ngram import NgramDrafter
from tltlab.drafters.specs import NgramSpec
from tltlab.errors import ConfigError, InputError

TRACES = Path(__file__).parents[3] / "traces"


def test_a_replay_counts_what_an_engine_would_accept():
    group = Visits(prompt_id="p", prompt=[1, 2, 3, 1, 2], earlier=[], replayed=[[3, 1, 2, 3, 9, 5]])
    found = replay(NgramDrafter(min_match=2), [group], depth=4)
    # The prefill gives 3. The draft "1 2 3 1" is kept up to the 3, then comes 9; nothing is known after it, then 5.
    assert found["drafted"] == 4 / 2
    assert found["accepted"] == 3 / 2


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
