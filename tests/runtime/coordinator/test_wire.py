"""The coordinator's messages as bytes: they arrive as they were sent, and what is none is nobody's."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tltlab.coordination.messages import StopTraining, Train, WorkerReport
from tltlab.runtime.coordinator.wire import MAX_BYTES, decode_command, decode_report, encode

NUMBERS = st.integers(0, 1 << 53)
REPORTS = st.builds(
    WorkerReport, worker=NUMBERS, seq=NUMBERS, rl_step=st.integers(-1, 9), busy=st.booleans(),
    term=st.none() | NUMBERS, acked=NUMBERS, incarnation=NUMBERS,
)  # fmt: skip
TRAINS = st.builds(
    Train, worker=NUMBERS, seq=NUMBERS, term=NUMBERS, group=NUMBERS, rl_step=NUMBERS, leader=NUMBERS,
    members=st.lists(NUMBERS, min_size=1, max_size=9).map(tuple), incarnation=NUMBERS,
)  # fmt: skip
STOPS = st.builds(StopTraining, worker=NUMBERS, seq=NUMBERS, term=NUMBERS)
REPORT = WorkerReport(worker=0, seq=1, rl_step=0, busy=True)


@given(report=REPORTS, command=TRAINS | STOPS)
def test_messages_arrive_as_they_were_sent(report, command):
    assert decode_report(encode(report)) == report
    assert decode_command(encode(command)) == command
    assert decode_report(encode(command)) is None
    assert decode_command(encode(report)) is None


@given(message=REPORTS | TRAINS | STOPS, garbage=st.binary(max_size=40), at=st.integers(0, 200), bit=st.integers(0, 7))
def test_no_bytes_make_the_decoder_fail(message, garbage, at, bit):
    decode_report(garbage), decode_command(garbage)
    data = bytearray(encode(message))
    data[at % len(data)] ^= 1 << bit
    decode_report(bytes(data)), decode_command(bytes(data))
    decode_report(bytes(data[: at % len(data)])), decode_command(bytes(data) + garbage)


@pytest.mark.parametrize(
    "change", [{"version": 2}, {"type": "greeting"}, {"seq": -1}, {"seq": 1 << 60}, {"rl_step": "0"}, {"extra": 1}]
)
def test_what_is_no_message_is_none(change):
    fields = msgspec.msgpack.decode(encode(REPORT))
    assert decode_report(msgspec.msgpack.encode(fields)) == REPORT
    assert decode_report(msgspec.msgpack.encode(fields | change)) is None


def test_messages_without_version_or_too_large_are_none():
    fields = msgspec.msgpack.decode(encode(REPORT))
    del fields["version"]
    assert decode_report(msgspec.msgpack.encode(fields)) is None
    members = tuple(range(MAX_BYTES))
    train = Train(worker=0, seq=1, term=1, group=1, rl_step=0, leader=0, members=members)
    assert decode_command(encode(train)) is None
