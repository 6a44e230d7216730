"""Text of users' files and code in the form that tokenizers accept."""

from __future__ import annotations


def whole_text(text: str) -> str:
    """Return the text with "?" for halves of surrogate pairs, which truncated or non-UTF-8 output contains.

    Tokenizers reject such halves.
    """
    return str.encode(text, errors="replace").decode()
