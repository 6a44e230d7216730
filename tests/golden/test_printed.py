"""What each command prints, held by one file a command in `printed/`; `pytest --update-golden` writes them anew.

Seconds of this machine, its environment, sizes of pages and temporary paths are replaced by their names; numbers may
differ by 1 %, as processors round differently. Other tests check facts and leave sentences alone.
"""

import re
from pathlib import Path

import pytest

from ..sim.workloads import typed

PRINTED = Path(__file__).parent / "printed"
TINY = "traces/tiny"
GEOMETRIC = ("--acceptance", "geometric:0.7")
BY_DRAFTER = ("--acceptance", "learned=geometric:0.7,ngram=geometric:0.42,suffix=0.57")
H100 = ("--costs", "h100-qwen2.5-7b")
COMMANDS = {
    "overview": (("--help",),),
    "calibrate": (("calibrate", TINY, "--out", "{tmp}/costs.json"),),
    "compare": (
        ("compare", TINY, "--systems", "verl,tlt,das", *H100, *GEOMETRIC),
        ("compare", TINY, "--systems", "verl,tlt,das", *H100, *BY_DRAFTER),
        ("compare", TINY, "--policies", "none,fixed,adaptive", *GEOMETRIC),
        ("compare", TINY, "--systems", "verl,das,seer,open-r1"),
        ("compare", TINY, "--systems", "verl,das", *H100, "--acceptance", "tlt-qwen2.5-32b"),
        ("compare", TINY, "--systems", "verl,das", "--rl-steps", "0:2"),
        ("compare", TINY, "--policies", "none,fixed", "--workers", "1,2", "--acceptance", "0.5;0.7"),
    ),
    "costs": (
        ("costs",),
        ("costs", "h100-qwen2.5-7b", "--strategy", "4,1,5", "--accept-length", "2.5"),
        ("costs", "vllm:2xH100:Qwen3-32B:fp8", "--batch", "1,8"),
    ),
    "doctor": (("doctor", TINY),),
    "export-policy": (("export-policy", "table", "--max-batch", "16"),),
    "new": (
        ("new", "policy", "halving"), ("new", "reward"), ("new", "recipe", "mine"),
        ("new", "policy", "halving"), ("new", "recipie"), ("new", "policy", "My-Policy"),
    ),
    "report": (("report", TINY, "--no-verify", "--out", "{tmp}/page.html"),),
    "settings": (("settings", "rollout"),),
    "simulate": (
        ("simulate", TINY, "--policy", "beg-mab", *GEOMETRIC),
        ("simulate", TINY, "--system", "tlt", *H100, *BY_DRAFTER),
        ("simulate", "{lengths}", "--workers", "2", *H100, *GEOMETRIC, "--strategy", "4,1,5", "--sd-threshold", "8"),
    ),
    "sweep": (("sweep", TINY),),
    "timeline": (("timeline", TINY, "--out", "{tmp}/timeline.json"),),
    "trace": (
        ("trace", "describe", TINY),
        ("trace", "validate", TINY),
        ("trace", "import", "{lengths}", "--out", "{tmp}/imported"),
        ("trace", "generate", "--out", "{tmp}/drawn", "--prompts", "8", "--group-size", "4", "--rl-steps", "2"),
        ("trace", "annotate", TINY, "--drafter", "ngram", "--out", "{tmp}/annotated"),
    ),
    "train": (("train", "qwen2.5-7b-tlt", "--dry-run"),),
    "tune": (("tune", TINY, "--out", "{tmp}/policy.json", "--drafters", "ngram", *GEOMETRIC, "--trials", "2"),),
    "verify": (("verify", "traces/gcd-small", "--rl-steps", "4:6", "--samples", "1"),),
    "what-if": (
        ("what-if", "{lengths}", "--gpus", "8xH100", "--model", "Qwen2.5-7B"),
        ("what-if", "{lengths}", "--costs", "h100-qwen2.5-7b", "--workers", "2", *BY_DRAFTER, "--systems", "tlt"),
        ("what-if", TINY, "--systems", "verl,vllm-dynamic"),
        ("what-if", TINY, "--systems", "verl", "--gpus", "H100", "--model", "Qwen2.5-7B", "--accept", "0.02"),
        ("what-if", "{lengths}", "--gpus", "8xZ1"),
        ("what-if", "{lengths}", "--gpus", "1xRTX4090", "--model", "Llama-3.3-70B"),
        ("what-if", "{lengths}", "--column", "words"),
    ),
}  # fmt: skip
LENGTHS = "step,group,response_len\n" + "".join(f"0,{i // 4},{40 + 7 * i + i**3 // 90}\n" for i in range(64))
OF_THIS_MACHINE = (
    (r"(simulated in|in|takes|took)( +)[\d.]+ s\b", r"\1\2SECONDS s"),
    (r"\([\d.]+ MB\)", "(SIZE MB)"),
    (r"; \d+ s\n", "; SECONDS s\n"),
    (r"(?m)^simulation \d+\n", ""),
    (r"this machine has [\d.e+]+ GB(, TOO LITTLE for a run here)?", "this machine has SIZE GB"),
)


@pytest.mark.parametrize("name", COMMANDS)
def test_output_is_as_recorded(
    name,
    tmp_path,
    capsys,
    monkeypatch,
    request,
):
    (tmp_path / "traces").symlink_to(Path(__file__).parents[2] / "traces")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    lengths = tmp_path / "lengths.csv"
    lengths.write_text(LENGTHS)
    parts = []
    for arguments in COMMANDS[name]:
        code, out, err = typed(capsys, *(argument.format(tmp=tmp_path, lengths=lengths) for argument in arguments))
        line = " ".join(arguments).format(tmp="TMP", lengths="LENGTHS")
        parts.append(f"$ tltlab {line}\n{out}[{code}]\n{err}")
    text = "\n".join(parts).replace(str(lengths), "LENGTHS").replace(str(tmp_path), "TMP")
    for pattern, name_of_it in OF_THIS_MACHINE:
        text = re.sub(pattern, name_of_it, text)
    file = PRINTED / f"{name}.txt"
    if request.config.getoption("--update-golden"):
        file.write_text(text)
    words, numbers = words_and_numbers(text)
    golden_words, golden_numbers = words_and_numbers(file.read_text())
    assert words == golden_words, f"tltlab {name} prints something else; pytest --update-golden takes it"
    assert numbers == pytest.approx(golden_numbers, rel=0.01, abs=0.005)


def words_and_numbers(text):
    """The text with # for each number and one space for several, and the numbers."""
    number = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)?(?:e[-+]\d+)?")
    numbers = [float(each.replace(",", "")) for each in number.findall(text)]
    return re.sub(r"[ ─]+", " ", number.sub("#", text)), numbers
