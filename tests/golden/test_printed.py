"""What each command prints, held by one file a command in `printed/`; `pytest --update-golden` writes them anew.

The lines of a file that begin with "$ tltlab" are what is run; TMP is a folder of the test, LENGTHS a table in it.

Seconds of this machine, its environment, sizes of pages and temporary paths are replaced by their names; numbers may
differ by 1 %, as processors round differently. Other tests check facts and leave sentences alone.
"""

import re
from pathlib import Path

import pytest

from ..sim.workloads import typed

PRINTED = Path(__file__).parent / "printed"
LENGTHS = "step,group,response_len\n" + "".join(f"0,{i // 4},{40 + 7 * i + i**3 // 90}\n" for i in range(64))
OF_THIS_MACHINE = (
    (r"(simulated in|in|takes|took)( +)[\d.]+ s\b", r"\1\2SECONDS s"),
    (r"\([\d.]+ MB\)", "(SIZE MB)"),
    (r"(?m)^simulation \d+.*\n", ""),
    (r"this machine has [\d.e+]+ GB(, TOO LITTLE for a run here)?", "this machine has SIZE GB"),
)


@pytest.mark.parametrize("file", sorted(PRINTED.glob("*.txt")), ids=lambda file: file.stem)
def test_output_is_as_recorded(file, tmp_path, capsys, monkeypatch, request):
    (tmp_path / "traces").symlink_to(Path(__file__).parents[2] / "traces")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    lengths = tmp_path / "lengths.csv"
    lengths.write_text(LENGTHS)
    parts = []
    for line in re.findall(r"(?m)^\$ tltlab (.*)", file.read_text()):
        code, out, err = typed(capsys, *line.replace("TMP", str(tmp_path)).replace("LENGTHS", str(lengths)).split())
        parts.append(f"$ tltlab {line}\n{out}[{code}]\n{err}")
    text = "\n".join(parts).replace(str(lengths), "LENGTHS").replace(str(tmp_path), "TMP")
    for pattern, name_of_it in OF_THIS_MACHINE:
        text = re.sub(pattern, name_of_it, text)
    if request.config.getoption("--update-golden"):
        file.write_text(text)
    words, numbers = words_and_numbers(text)
    golden_words, golden_numbers = words_and_numbers(file.read_text())
    assert words == golden_words, f"tltlab {file.stem} prints something else; pytest --update-golden takes it"
    assert numbers == pytest.approx(golden_numbers, rel=0.01, abs=0.005)


def words_and_numbers(text):
    """The text with # for each number and one space for several, and the numbers."""
    number = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)?(?:e[-+]\d+)?")
    numbers = [float(each.replace(",", "")) for each in number.findall(text)]
    return re.sub(r"[ ─]+", " ", number.sub("#", text)), numbers
