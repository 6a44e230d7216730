"""Exceptions of tltlab. Arguments are positional only: SimPy re-raises a failure as `type(e)(*e.args)`."""

from collections.abc import Iterable


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """For a message about an unknown `name`: the nearest that there is, or nothing.

    >>> did_you_mean("simluate", ["simulate", "tune"])
    " (did you mean 'simulate'?)"
    """
    from difflib import get_close_matches

    nearest = get_close_matches(name, list(names), n=1)
    return f" (did you mean {nearest[0]!r}?)" if nearest else ""


def one_line(text: object) -> str:
    """A text, such as another program's error, with one space for every run of white space.

    >>> one_line(ValueError("no such file:\\n    a.json"))
    'no such file: a.json'
    """
    return " ".join(str(text).split())


def disk_full(error: BaseException, path: object = None) -> str:
    """Return a sentence for an error that is of a full disk, "" for another; libraries quote the system's words.

    `path` is what was written, where the error does not name it.

    >>> disk_full(OSError(28, "No space left on device", "runs/a/trace"))
    'the disk is full: runs/a/trace cannot be written; make room, then go on with --resume'
    """
    if not any(words in str(error) for words in ("No space left on device", "Disk quota exceeded")):
        return ""
    path = getattr(error, "filename", None) or path
    what = f": {path} cannot be written" if path else ""
    return f"the disk is full{what}; make room, then go on with --resume"


class TltlabError(Exception):
    """Error that a user can understand and act on; the message states what was got and what to do.

    `exit_code` is what the command line returns: 1, the work failed; 2, the input was wrong.
    """

    exit_code = 1


class InputError(TltlabError):
    """The input was wrong; nothing was written."""

    exit_code = 2


class ConfigError(InputError):
    """A recipe, a policy file, a cost file or an option is wrong."""


class TraceError(InputError):
    """A trace breaks the format; the message names the file, the column and the first offending row."""


class RunError(TltlabError):
    """A run on real engines failed after its input was found good."""


def refuse(complaints: Iterable[str], error: type[Exception] = ConfigError) -> None:
    """Raise `error` with all complaints in one line, each once, where there are any; pydantic wants ValueError."""
    if sentences := dict.fromkeys(complaints):
        raise error("; ".join(sentences))
