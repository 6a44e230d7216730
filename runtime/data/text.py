"""Text of users' files and code as a tokenizer takes it."""

from __future__ import annotations


def whole_text(text: str) -> str:
    """The text with "?" for halves of surrogate pairs, which output that was cut, or was no UTF-8, has.

    A tokenizer takes no such half.
    """
    return str.encode(text, errors="replace").decode()
