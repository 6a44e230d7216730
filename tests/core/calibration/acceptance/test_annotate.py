"""Drafters replayed over recorded text: who sees what when, what is kept, and the command that writes it down."""

from __future__ import annotations

import json
import shutil
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tltlab.calibration.annotate import AcceptedLengths, DraftedBy, ReplayedDrafter, annotate, merged
from tltlab.drafters.base import Draft, Drafter
from tltlab.drafters.ngram import NgramDrafter
from tltlab.drafters.specs import TEXT
from tltlab.errors import ConfigError
from tltlab.traces.drafts import RecordedResponse, recorded_responses
from tltlab.traces.schema import KEY, MANIFEST_FILE
from tltlab.traces.trace import read

from ....annotation_agreement import agreement
from ....traces_of_lengths import iterations, of_samples

TINY = Path(__file__).resolve().parents[4] / "traces" / "tiny"


class Copycat(Drafter):
    """Drafts how the longest other response to the same prompt continues from where the request is."""

    def __init__(self):
        self.texts = {}
        self.log = []

    def begin(self, rl_step):
        self.log.append(("begin", rl_step))

    def open(self, key, tokens):
        self.texts[key] = []
        self.log.append(("open", key, len(tokens)))

    def extend(self, key, tokens):
        self.texts[key] += tokens

    def propose(self, key, depth):
        others = [text for other, text in self.texts.items() if other[1] == key[1] and other != key]
        at = len(self.texts[key])
        tokens = max(others, key=len, default=[])[at : at + depth]
        return Draft(tokens, float(len(tokens)))

    def observe(self, key, num_drafted, num_accepted):
        self.log.append(("observe", key, num_drafted, num_accepted))

    def close(self, key):
        self.log.append(("close", key))

    def forget(self):
        self.texts.clear()

    @property
    def memory_bytes(self):
        return 0


def response(sample, text, times, **fields):
    values = {"key": (0, "p", sample, 0), "worker": 0, "prompt_token_ids": [1, 2], "opened_s": 0.0} | fields
    return RecordedResponse(token_ids=list(text), times_s=np.asarray(times, float), **values)  # type: ignore[arg-type]


def kept(drafter, responses, depth):
    return [row.tolist() for row in ReplayedDrafter(drafter).annotate(responses, depth)]


def trace_of(texts, **outcomes):
    """One group of responses; `outcomes` are further columns, all else is unknown."""
    trace = of_samples([len(t) for t in texts], 50, **outcomes)
    tokens = trace.outcomes[[*KEY]].assign(prompt_token_ids=[[1, 2]] * len(texts), token_ids=list(texts))
    return trace.replace(tokens=tokens)


@pytest.mark.parametrize(
    ("texts", "times", "accepted"),
    [
        # A draft is made when the last token came, the one at 0 just before the first: 2, 2, 3 and 4 tokens are there.
        (([5, 6, 7, 8], [5, 6, 7, 8]), ([1, 2, 3, 4], [2.5, 3.5, 4.5, 5.5]), [2, 1, 1, 1]),
        # At its tokens 1 and 2 the second has the whole of the first next to it: told in the order of the batch.
        (([5, 6, 7, 8], [5, 6, 7, 8]), ([1, 2, 2, 2], [1, 2, 2, 3]), [0, 0, 2, 1]),
        (([], [5]), ([], [1]), [0]),
    ],
    ids=["behind", "in one iteration", "of no tokens"],
)
def test_a_position_accepts_what_the_text_continues_with(texts, times, accepted):
    responses = [response(sample, *each) for sample, each in enumerate(zip(texts, times, strict=True))]
    assert kept(Copycat, responses, depth=4) == [[0] * len(texts[0]), accepted]


def test_responses_without_times_run_side_by_side():
    same = trace_of([[5, 6, 7, 8], [5, 6, 7, 8]])
    assert kept(Copycat, recorded_responses(same), depth=4) == [[0, 0, 0, 0], [0, 0, 0, 0]]


def test_tokens_are_spread_between_first_and_last():
    timed = trace_of([[5, 6, 7], [5]], t_submit=0.0, t_first_token=[1.0, 4.0], t_finish=[2.0, 4.0])
    first, second = recorded_responses(timed)
    assert first.times_s.tolist() == [1.0, 1.5, 2.0]
    assert second.times_s.tolist() == [4.0]
    assert second.opened_s == 0.0


def test_turn_is_unknown_before_last_is_over():
    two_turns = trace_of([[5, 6, 7], [8, 9]])
    frames = {name: two_turns.table(name).assign(sample=0, turn=[0, 1]) for name in two_turns.names}
    drafter = Copycat()
    ReplayedDrafter(lambda: drafter).annotate(recorded_responses(two_turns.replace(**frames)), 2)
    turns = [(what, key[-1]) for what, key, *_ in drafter.log if what in ("open", "close")]
    assert turns == [("open", 0), ("close", 0), ("open", 1), ("close", 1)]


def test_recorded_iterations_time_each_token():
    table = iterations(batch=[2, 2, 1], draft_depth=[0, 3, 3], accepted_per_request=[None, [2, 1], [2]])
    bare = trace_of([[5, 6, 7, 8], [5, 6, 7, 8, 9]], worker=0, t_first_token=0.5, t_finish=9.0)
    told = bare.replace(iterations=table)
    assert [r.times_s.tolist() for r in recorded_responses(told)] == [[1, 2, 2, 2], [1, 2, 2, 3, 3]]
    # Batches that do not follow from the lengths say nothing: then it is first token and finish.
    wrong = bare.replace(iterations=table.assign(batch=2, accepted_per_request=None))
    assert [r.times_s[-1] for r in recorded_responses(wrong)] == [9.0, 9.0]


def test_workers_exchange_responses_between_rl_steps():
    replayed, text = ReplayedDrafter(Copycat), [5, 6, 7]
    for step, accepted in ((0, [0, 0, 0]), (1, [3, 2, 1])):
        responses = [response(n, text, [11 * n, 12, 13], worker=n, key=(step, "p", n, 0)) for n in (0, 1)]
        assert [row.tolist() for row in replayed.annotate(responses, 3)] == [accepted] * 2


def test_a_drafter_receives_accepted_tokens():
    drafter = Copycat()
    sibling, text = response(0, [5, 6, 0, 8, 9], range(5)), response(1, [5, 6, 7, 8, 9], range(10, 15))
    ReplayedDrafter(lambda: drafter).annotate([sibling, text], 3)
    # Drafts at 0 (keeps 2), 3 (keeps 2); the text ends before the second is told of.
    assert [e for e in drafter.log if e[0] == "observe"] == [("observe", (0, "p", 1, 0), 3, 2)]


texts = st.lists(st.lists(st.integers(3, 6), min_size=1, max_size=25), min_size=1, max_size=4)


@given(texts, st.integers(1, 6), st.randoms(use_true_random=False))
def test_a_replay_is_what_fresh_drafters_propose(texts, depth, random):
    clock = list(range(sum(map(len, texts))))
    random.shuffle(clock)
    responses, used = [], 0
    for sample, text in enumerate(texts):
        responses.append(response(sample, text, sorted(clock[used : used + len(text)])))
        used += len(text)
    events = sorted((t, r.key, at) for r in responses for at, t in enumerate(r.times_s))
    rows = kept(NgramDrafter, responses, depth)
    for r, row in zip(responses, rows, strict=True):
        for at in range(len(r.token_ids)):
            fresh = NgramDrafter()
            for each in responses:
                fresh.open(each.key, each.prompt_token_ids)
            # Position 0 is drafted just before the request's first token.
            now = r.times_s[at - 1] if at else r.times_s[0] - 0.5
            for time, key, position in events:
                if time <= now:
                    fresh.extend(key, [responses[key[2]].token_ids[position]])
            draft, count = fresh.propose(r.key, depth).tokens, 0
            while r.token_ids[at + count : at + count + 1] == draft[count : count + 1] != []:
                count += 1
            assert row[at] == count


def test_rows_of_same_drafter_and_age_are_replaced():
    def rows(age, depth):
        drafters = {DraftedBy("learned", age): ReplayedDrafter(NgramDrafter)}
        ((_, table),) = annotate(trace_of([[5, 6], [7]]), drafters, depth)
        return table

    found = merged(merged(rows(0, 2), rows(3, 2)), rows(3, 7)).to_pandas()
    assert found.groupby("drafter_age")["max_depth"].unique().map(list).to_dict() == {0: [2], 3: [7]}
    assert not found.duplicated([*KEY, "drafter", "drafter_age"]).any()


@pytest.fixture
def tltlab(command):
    return partial(command, "trace")


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    """Two RL steps of a recorded trace."""
    path = tmp_path_factory.mktemp("traces") / "tiny"
    read(TINY).select([0, 1]).write(path)
    return path


@pytest.fixture
def tiny(recording, tmp_path):
    return Path(shutil.copytree(recording, tmp_path / "tiny"))


def test_an_annotation_agrees_with_what_was_recorded(tltlab, tiny):
    def others():
        return {p.name: p.read_bytes() for p in tiny.iterdir() if p.name not in ("acceptance.parquet", MANIFEST_FILE)}

    before, said = others(), read(tiny).manifest
    code, out, err = tltlab("annotate", tiny, "--drafter", "ngram", "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    lengths = found["drafters"][0]["accepted_length"]
    assert list(lengths) == ["1", "2", "4", "8", "16"]
    assert sorted(lengths.values()) == list(lengths.values())
    drafts = agreement(read(tiny), "ngram")
    difference = drafts["annotated"] - drafts["recorded"]
    # The recording engine told siblings' tokens one slot of its batch after the other; the rest is exact.
    assert (difference == 0).mean() > 0.98
    assert abs(difference.mean()) < 0.03
    assert found["num_positions"] == read(tiny).outcomes["response_tokens"].sum()
    # The manifest has the sum of the new table besides.
    assert (others(), read(tiny).manifest) == (before, said)
    first = (tiny / "acceptance.parquet").read_bytes()
    tltlab("annotate", tiny, "--drafter", "ngram")
    assert (tiny / "acceptance.parquet").read_bytes() == first


def test_rows_of_several_annotations_add_up(tltlab, tiny, tmp_path):
    out = tmp_path / "out"
    tltlab("annotate", tiny, "--drafter", "ngram", "--drafter", "own=ngram(max_match=3)", "--out", out)
    assert not (tiny / "acceptance.parquet").exists()
    tltlab("annotate", out, "--drafter", "own=ngram(min_match=1)@4", "--max-depth", "3")
    table = read(out).acceptance
    kinds = table[["drafter", "drafter_age", "max_depth"]].drop_duplicates()
    assert sorted(kinds.itertuples(index=False, name=None)) == [("ngram", 0, 16), ("own", 0, 16), ("own", 4, 3)]
    # The manifest says what a drafter of a name of its own is, and the file's sums still hold.
    assert (read(out).manifest.drafters, read(tiny).manifest.drafters) == ({"own": TEXT}, {})
    code, _, err = tltlab("annotate", out, "--drafter", "learned=ngram(min_match=3)")
    assert (code, "'learned'" in err) == (2, True)


def test_a_trace_without_tokens_is_refused(tltlab, tiny):
    (tiny / "tokens.parquet").unlink()
    code, out, err = tltlab("annotate", tiny, "--drafter", "ngram")
    assert (code, out, err.count("\n"), "tokens.parquet" in err) == (2, "", 1, True)


def test_a_failed_annotation_leaves_the_trace_alone(tltlab, tiny, monkeypatch):
    tltlab("annotate", tiny, "--drafter", "ngram")
    before = {p.name: p.read_bytes() for p in tiny.iterdir()}

    def fail(*args):
        raise ConfigError("no more")

    monkeypatch.setattr(AcceptedLengths, "add", fail)
    assert tltlab("annotate", tiny, "--drafter", "suffix=ngram(min_match=3)")[0] == 2
    assert {p.name: p.read_bytes() for p in tiny.iterdir()} == before


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        ("ngram --drafter ngram(min_match=3)", "twice"),
        ("magic", "'magic'"),
        ("ngram(min_match)", "'min_match'"),
        ("ngram(min_match=9)", "max_match"),
        ("ngram(depth=3)", "depth"),
        ('suffix(scopes=["planet"])', "planet"),
        ("nowhere.json", "'nowhere.json'"),
        ("hybrid", "'hybrid'"),
        ("none=ngram", "'none'"),
        ("ngram@2147483648", "2147483647"),
        ("ngram --max-depth 0", "255"),
        ("ngram --max-depth 256", "255"),
    ],
)
def test_what_makes_no_sense_is_refused(text, fact, tltlab, tiny):
    code, out, err = tltlab("annotate", tiny, "--drafter", *text.split(" "))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert fact in err
    assert not (tiny / "acceptance.parquet").exists()


def test_a_learned_drafter_needs_the_runtime(tltlab, tiny, monkeypatch):
    monkeypatch.delitem(sys.modules, "tltlab.runtime.drafter.offline.annotate", raising=False)
    monkeypatch.delitem(sys.modules, "tltlab.runtime.drafter.heads.head", raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)
    code, _, err = tltlab("annotate", tiny, "--drafter", "eagle:some/folder")
    assert code == 2
    assert "tltlab[runtime]" in err
