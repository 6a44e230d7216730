"""What commands print: tables whose columns line up, and where a result comes from."""

import signal
import sys
import threading

import pytest

from tltlab.console import made_by, running, sigterm_interrupts, table


@pytest.mark.parametrize(
    ("options", "lines"),
    [
        ({}, ["batch  drafter  ms    beyond", "1         none  20", "128      ngram   7  contexts"]),
        ({"left": 2}, ["batch  drafter  ms    beyond", "1      none     20", "128    ngram     7  contexts"]),
        (
            {"left": 0, "words": True, "indent": 1},
            [" batch  drafter  ms  beyond", "     1     none  20", "   128    ngram   7  contexts"],
        ),
    ],
)
def test_words_begin_at_the_left_and_numbers_end_at_the_right(options, lines):
    rows = [(1, "none", "20"), (128, "ngram", 7, "contexts")]
    assert table(["batch", "drafter", "ms", "beyond"], rows, **options).split("\n") == lines


def test_a_table_is_never_cut_and_takes_what_stands_in_it_literally():
    rows = [("[red]name[/red]", "x" * 500), ("longer than that name", None)]
    assert table([], rows, left=2).split("\n") == [
        "[red]name[/red]        " + "x" * 500,
        "longer than that name  None",
    ]
    assert table(["only", "heads"], []) == "only  heads"


def test_a_result_says_the_command_that_made_it_and_the_versions():
    token = running.set(("simulate", "my trace"))
    try:
        assert made_by()["command"] == "tltlab simulate 'my trace'"
    finally:
        running.reset(token)
    outside = made_by("numpy", "no-such-package")
    assert outside["command"] is None
    assert set(outside["versions"]) == {"python", "tltlab", "numpy"}


@pytest.mark.timeout(60)
def test_an_interrupt_that_strikes_in_a_destructor_comes_again():
    class Struck:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGTERM)

    def lost() -> None:
        with sigterm_interrupts():
            Struck()
            threading.Event().wait()

    before = signal.getsignal(signal.SIGTERM), sys.unraisablehook
    with pytest.raises(KeyboardInterrupt):
        lost()
    assert (signal.getsignal(signal.SIGTERM), sys.unraisablehook) == before
