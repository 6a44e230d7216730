"""What is wrong is refused with an error of a class whose message names the facts: option, value, file, line."""

import re
from contextlib import contextmanager

import pytest


@contextmanager
def refused(error, naming=()):
    """Expect `error` within, and each of `naming` somewhere in its message, whole numbers whole; the sentence is free.

    >>> with refused(ValueError, naming=("--depth", 9)):
    ...     raise ValueError("--depth is 9: give 1 to 8")
    """
    with pytest.raises(error) as info:
        yield info
    message = str(info.value)
    missing = [fact for fact in map(str, naming) if not _names(message, fact)]
    assert not missing, f"the message does not name {', '.join(missing)}: {message}"


def _names(message, fact):
    """True where `fact` begins a word of the message, and ends it where it ends in a digit."""
    before = r"(?<!\w)" if fact[:1].isalnum() else ""
    after = r"(?!\w)" if fact[-1:].isdigit() else ""
    return re.search(before + re.escape(fact) + after, message) is not None
