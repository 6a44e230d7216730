"""What a worker keeps to train on, and what it draws from it."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.refused import refused
from tltlab.errors import ConfigError, RunError
from tltlab.runtime.drafter.sequences import TrainingSequence, pack
from tltlab.runtime.drafter.worker import SHORTEST_STRETCH, DataBuffer, read_data, write_data
from tltlab.runtime.recipe.drafter import BufferConfig

from .drafting_text import largest_file

HIDDEN = 3
ROW_BYTES = HIDDEN * 4 + 8


def made(number, rows, *, prompt=0, rl_step=0, aux=False):
    """Row t of sequence n holds the state 1000 n + t, so that whatever comes back says where it is from."""
    states = (1000.0 * number + torch.arange(rows))[:, None].expand(rows, HIDDEN)
    return TrainingSequence(
        key=(rl_step, str(number), 0, 0),
        token_ids=1000 * number + torch.arange(rows + 1),
        hidden=states.clone(),
        aux=states.repeat(1, 2) if aux else None,
        first_position=5,
        prompt_tokens=prompt,
    )


def rng(seed=0):
    return np.random.default_rng(seed)


def filled(*sequences, rl_step=0, **config):
    buffer = DataBuffer(BufferConfig(**config))
    buffer.begin(rl_step)
    for sequence in sequences:
        buffer.add(sequence)
    return buffer


def numbers(drawn):
    return [int(sequence.key[1]) for sequence in drawn]


def same(one, other):
    def parts(sequence):
        tensors = (sequence.token_ids, sequence.hidden, sequence.aux)
        told = [None if tensor is None else tensor.tolist() for tensor in tensors]
        return (*told, sequence.key, sequence.first_position, sequence.prompt_tokens)

    return parts(one) == parts(other)


def is_stretch(part, whole):
    start = part.first_position - whole.first_position
    return same(part, whole.stretch(start, part.num_rows))


def test_half_an_update_is_of_earlier_steps():
    buffer = filled(*(made(n, 20 + 10 * n) for n in range(8)))
    buffer.begin(1)
    for n in range(10, 30):
        buffer.add(made(n, 40, rl_step=1))
    for seed in range(5):
        drawn = buffer.sample(400, rng(seed))
        old = [sequence for sequence in drawn if sequence.rl_step == 0]
        assert sum(sequence.num_rows for sequence in drawn) == 400
        assert sum(sequence.num_rows for sequence in old) == 200
        assert set(numbers(old)) <= {4, 5, 6, 7}


def test_what_one_side_lacks_the_other_gives():
    buffer = filled(made(0, 50), made(1, 50), made(2, 60), made(3, 60))
    buffer.begin(1)
    assert sorted(numbers(buffer.sample(10_000, rng()))) == [0, 1, 2, 3]
    buffer.begin(1)
    assert sorted(numbers(buffer.sample(120, rng()))) == [2, 3]
    buffer.add(made(4, 30, rl_step=1))
    drawn = buffer.sample(150, rng())
    assert sorted(numbers(drawn)) == [2, 3, 4]


def test_every_sequence_is_drawn_once_an_epoch():
    buffer = filled(*(made(n, 40) for n in range(10)))
    source = rng()
    for _ in range(3):
        epoch = [number for _ in range(5) for number in numbers(buffer.sample(80, source))]
        assert sorted(epoch) == list(range(10))


def test_a_long_sequence_is_cut_to_random_stretches():
    whole = made(1, 1000, prompt=400, aux=True)
    buffer = filled(whole)
    starts = set()
    for seed in range(40):
        (part,) = buffer.sample(100, rng(seed))
        assert part.num_rows == 100
        assert is_stretch(part, whole)
        assert part.prompt_tokens <= 50
        assert torch.equal(pack([part]).positions, part.first_position + torch.arange(99))
        starts.add(part.first_position)
    assert len(starts) > 30
    assert min(starts) < 450 < 850 < max(starts)


def test_few_rows_left_stay_empty():
    buffer = filled(*(made(n, 100) for n in range(4)))
    drawn = buffer.sample(100 + SHORTEST_STRETCH - 1, rng())
    assert [sequence.num_rows for sequence in drawn] == [100]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_buffer_from_a_file_draws_alike(dtype, tmp_path):
    held = [made(n, 6 + n, rl_step=n // 4, aux=n == 2) for n in range(8)]
    buffer = filled(*(replace(s, hidden=s.hidden.to(dtype)) for s in held), rl_step=1, max_bytes=8 * 16 * ROW_BYTES)
    generator = rng(3)
    buffer.sample(40, generator)
    path = tmp_path / "of" / "data.pt"
    write_data(path, [*buffer.sequences(), made(9, 5)], generator.bit_generator.state)
    found, random_state = read_data(path)
    other, theirs = filled(*found[:-1], rl_step=1, max_bytes=8 * 16 * ROW_BYTES), rng()
    theirs.bit_generator.state = random_state
    assert same(found[-1], made(9, 5))
    assert found[0].hidden.dtype == dtype
    assert (other.nbytes, len(other)) == (buffer.nbytes, 8)
    for each in (buffer, other):
        each.begin(2)
        each.add(made(10, 12, rl_step=2))
    for _ in range(5):
        drawn, again = buffer.sample(30, generator), other.sample(30, theirs)
        assert numbers(drawn) == numbers(again)
        assert all(map(same, drawn, again))


def test_damaged_files_and_full_disks_are_refused(tmp_path):
    path = tmp_path / "data-0.pt"
    data = [made(0, 200)], rng().bit_generator.state
    write_data(path, *data)
    path.write_bytes(path.read_bytes()[:-1])
    with refused(ConfigError, naming=("data-0",)):
        read_data(path)
    before = path.read_bytes()
    with largest_file(100), refused(RunError):
        write_data(path, *data)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_view_of_something_larger_is_copied():
    states = torch.zeros(10_000, HIDDEN)
    buffer = filled(replace(made(1, 20), hidden=states[100:120]))
    (kept,) = buffer.sample(100, rng())
    assert kept.hidden.untyped_storage().nbytes() == 20 * HIDDEN * 4


def held_then(held, new, now, config):
    """Add to `held` as a buffer does: the end that fits; the oldest step gives way first, and in it the shortest."""
    ends = (new.stretch(new.num_rows - rows, rows) for rows in range(new.num_rows, 1, -1))
    end = next((end for end in ends if end.nbytes <= config.max_bytes), None)
    if end is not None and pack([end]).mask.any() and end.rl_step > now - config.rl_steps:
        held.append(end)
    while sum(sequence.nbytes for sequence in held) > config.max_bytes:
        del held[min(range(len(held)), key=lambda n: (held[n].rl_step, held[n].num_rows, n))]


steps = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 60), st.integers(0, 70), st.integers(-3, 1)),
        st.tuples(st.just("begin"), st.integers(0, 2)),
        st.tuples(st.just("sample"), st.integers(0, 150), st.integers(0, 9)),
    ),
    max_size=60,
)


configs = st.builds(
    BufferConfig,
    max_bytes=st.integers(1, 150 * ROW_BYTES),
    carried_share=st.floats(0, 1),
    rl_steps=st.integers(1, 3),
)


@given(steps, configs)
def test_it_holds_and_draws_what_it_should(steps, config):
    buffer, now = DataBuffer(config), 0
    given_ = {}
    held = []
    for what, *args in steps:
        if what == "add":
            rows, prompt, back = args
            given_[len(given_)] = sequence = made(len(given_), rows, prompt=prompt, rl_step=max(0, now + back))
            buffer.add(sequence)
            held_then(held, sequence, now, config)
        elif what == "begin":
            now += args[0]
            buffer.begin(now)
            held = [sequence for sequence in held if sequence.rl_step > now - config.rl_steps]
        else:
            tokens, seed = args
            drawn = buffer.sample(tokens, rng(seed))
            assert sum(sequence.num_rows for sequence in drawn) <= tokens
            assert len(set(numbers(drawn))) == len(drawn)
            for sequence in drawn:
                assert is_stretch(sequence, given_[int(sequence.key[1])])
                assert pack([sequence]).mask.any()
        assert len(buffer) == len(held) == len(buffer.sample(10**6, rng()))
        assert all(map(same, buffer.sequences(), held))
        assert buffer.nbytes == sum(sequence.nbytes for sequence in held)
