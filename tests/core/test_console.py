"""What commands print and where they write: tables whose columns line up, where a result comes from, --out's folder."""

import signal
import sys
import threading

import pytest

from tests.refused import refused
from tltlab.console import emit, made_by, marked_folder, sigterm_as_interrupt, table
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


@pytest.fixture
def narrow(monkeypatch):
    monkeypatch.setattr("tltlab.console.screen_columns", lambda: 60)


def test_cells_wrap_on_a_narrow_terminal(narrow):
    header = ["policy", "drafters", "makespan s", "speed-up", "95 % interval", "regret"]
    name = "a policy of a rather long name"
    lines = table(header, [[name, "ngram", "0.4788", "2.34x", "[2.26, 2.43]", "38.7%"]], left=2).split("\n")
    assert max(map(len, lines)) <= 60
    assert {*" ".join(header).split(), *name.split(), "0.4788", "2.34x", "38.7%"} <= {*" ".join(lines).split()}


def test_a_narrow_terminal_wraps_between_words(narrow, capsys):
    text = "a bound that holds for any use of the strategies of the policy"
    lines = table([], [("lower bound", text)], left=2).split("\n")
    assert [line[:11].strip() for line in lines] == ["lower bound", ""]
    assert " ".join(line[11:].strip() for line in lines) == text
    emit({}, f"  {text} {text}")
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 3
    assert all(line.startswith("  ") and len(line) <= 60 for line in printed)


def test_a_result_outside_a_command_has_versions_alone():
    made = made_by()
    assert made["command"] is None
    assert {"python", "tltlab", "numpy"} <= set(made["versions"])


@pytest.mark.timeout(60)
def test_an_interrupt_that_strikes_in_a_destructor_recurs():
    class Struck:
        def __del__(self):
            signal.raise_signal(signal.SIGTERM)

    def lost():
        with sigterm_as_interrupt():
            Struck()
            threading.Event().wait()

    before = signal.getsignal(signal.SIGTERM), sys.unraisablehook
    with pytest.raises(KeyboardInterrupt):
        lost()
    assert (signal.getsignal(signal.SIGTERM), sys.unraisablehook) == before


def test_only_a_folder_with_the_mark_is_replaced(tmp_path):
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


def test_a_librarys_full_disk_is_a_sentence(tmp_path):
    class LibraryError(Exception):
        pass

    for refusal, known in ((OSError(28, "No space left"), ()), (LibraryError("No space left"), (LibraryError,))):
        with refused(RunError), marked_folder(tmp_path / "o", "m", *known):
            raise refusal
    assert list(tmp_path.iterdir()) == []


def test_a_file_as_parent_fails_before_the_work(tmp_path):
    (tmp_path / "file").write_text("")
    with refused(InputError, naming=("cannot",)), marked_folder(tmp_path / "file" / "out", "mark.json"):
        raise AssertionError("the block must not begin")
