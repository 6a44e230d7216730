"""What commands print and where they write: tables whose columns line up, where a result comes from, --out's folder."""

import signal
import sys
import threading
from pathlib import Path

import pytest

from tests.refused import refused
from tltlab.console import made_by, marked_folder, sigterm_interrupts, table
from tltlab.errors import ConfigError, InputError, RunError


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
def test_words_stand_left_and_numbers_right(options, lines):
    rows = [(1, "none", "20"), (128, "ngram", 7, "contexts")]
    assert table(["batch", "drafter", "ms", "beyond"], rows, **options).split("\n") == lines


def test_a_table_is_never_cut():
    rows = [("[red]name[/red]", "x" * 500), ("longer than that name", None)]
    assert table([], rows, left=2).split("\n") == ["[red]name[/red]        " + "x" * 500, "longer than that name  None"]
    assert table(["only", "heads"], []) == "only  heads"


def test_a_result_outside_a_command_has_versions_alone():
    made = made_by("numpy", "no-such-package")
    assert (made["command"], set(made["versions"])) == (None, {"python", "tltlab", "numpy"})


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


def test_only_a_folder_with_the_mark_is_replaced(tmp_path: Path):
    out = tmp_path / "out"
    for text in ("first", "second"):
        with marked_folder(out, "mark.json") as folder:
            (folder / "mark.json").write_text(text)
    assert (out / "mark.json").read_text() == "second"
    (out / "mark.json").unlink()
    (out / "thesis.tex").write_text("years of work")
    with refused(ConfigError, naming=("mark.json",)), marked_folder(out, "mark.json"):
        pass
    assert (out / "thesis.tex").read_text() == "years of work"


def test_a_librarys_full_disk_is_a_sentence(tmp_path: Path):
    class LibraryError(Exception):
        pass

    for refusal, known in ((OSError(28, "No space left"), ()), (LibraryError("No space left"), (LibraryError,))):
        with refused(RunError), marked_folder(tmp_path / "o", "m", *known):
            raise refusal
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_place_of_a_parent_is_said_before_the_work(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with refused(InputError, naming=("cannot",)), marked_folder(tmp_path / "file" / "out", "mark.json"):
        raise AssertionError("the block must not begin")
