"""Damages files, as a bad disk does."""

from __future__ import annotations

import os
import random


def flipped(folder, seed):
    """Flip a bit of a file in `folder` and yield the file, then put it back. TLTLAB_FLIPS: how many bits."""
    inside = [file for file in sorted(folder.rglob("*")) if file.is_file()]
    files = {file: data for file in inside if (data := file.read_bytes())}
    draw = random.Random(seed)
    for _ in range(int(os.environ.get("TLTLAB_FLIPS", 40))):
        file = draw.choice(list(files))
        data, bit = bytearray(files[file]), draw.randrange(8 * len(files[file]))
        data[bit // 8] ^= 1 << bit % 8
        file.write_bytes(data)
        yield file
        file.write_bytes(files[file])
