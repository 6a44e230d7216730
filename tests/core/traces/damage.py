"""Damages files, as a bad disk does."""

import os
import random
from contextlib import suppress

from tltlab.errors import TraceError
from tltlab.traces.trace import read


def check_flips(folder, seed):
    """A flipped bit in any file of a trace is refused, or read as it was: a space in the manifest.

    TLTLAB_FLIPS: how many bits are flipped, one at a time.
    """
    written, passed, num = read(folder), 0, int(os.environ.get("TLTLAB_FLIPS", 40))
    inside = [file for file in sorted(folder.rglob("*")) if file.is_file()]
    files = {file: data for file in inside if (data := file.read_bytes())}
    draw = random.Random(seed)
    for _ in range(num):
        file = draw.choice(list(files))
        data, bit = bytearray(files[file]), draw.randrange(8 * len(files[file]))
        data[bit // 8] ^= 1 << bit % 8
        file.write_bytes(data)
        with suppress(TraceError):
            trace = read(folder)
            passed += 1
            assert file.name == "manifest.json"
            assert trace.manifest == written.manifest
            assert all(trace.arrow(name) == written.arrow(name) for name in written.names)
        file.write_bytes(files[file])
    assert passed < 0.2 * num
