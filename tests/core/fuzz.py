"""Coverage-guided fuzzing of the readers of `test_fuzz.py` by atheris, which tltlab itself does not need.

    pip install atheris
    python tests/core/fuzz.py costs.json verl.log -runs=100000 -rss_limit_mb=2000

Each reader gets that many inputs; without a name it says which there are. An input that raises anything but a sentence
is kept in the folder `found`; whoever mends the reader moves it to `FELL`.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["tltlab"]):
    import test_fuzz

    import tltlab.runtime.coordinator.wire
    import tltlab.runtime.recipe.recipe  # noqa: F401 - `test_fuzz` imports them when they are needed


def fuzz(name: str, options: list[str]) -> None:
    """Never returns: libFuzzer ends the process."""
    place = Path(tempfile.mkdtemp(prefix="fuzz-"))
    corpus, words, seed = place / "corpus", place / "words", test_fuzz.source(name)
    corpus.mkdir()
    (corpus / name).write_bytes(seed)
    tokens = sorted({*re.findall(rb"[\w/.]+", seed), *(token for token in test_fuzz.TOKENS if token)})[:500]
    words.write_text("".join('"' + "".join(f"\\x{byte:02x}" for byte in token[:60]) + '"\n' for token in tokens))
    fell: set[str] = set()

    def one(data: bytes) -> None:
        try:
            test_fuzz.check(place, name, data)
        except Exception as error:
            where = str(traceback.extract_tb(error.__traceback__)[-1])
            if where not in fell:
                fell.add(where)
                kept = Path("found", f"{hashlib.sha256(data).hexdigest()[:8]}-{name}")
                kept.parent.mkdir(exist_ok=True)
                kept.write_bytes(data)
                print(f"FELL {kept}: {type(error).__name__}: {str(error)[:200]} in {where}", flush=True)

    atheris.Setup([sys.argv[0], f"-dict={words}", *options, str(corpus)], one)
    atheris.Fuzz()


if __name__ == "__main__":
    names = [argument for argument in sys.argv[1:] if not argument.startswith("-")]
    given = [argument for argument in sys.argv[1:] if argument.startswith("-")]
    if not names:
        sys.exit("which of " + " ".join(test_fuzz.READERS))
    if len(names) == 1:
        fuzz(names[0], given)
    for one_name in names:
        subprocess.run([sys.executable, __file__, one_name, *given], check=True)
