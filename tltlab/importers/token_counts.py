"""Token counts of texts, for dumps that hold text alone: by a tokenizer, or by a stated approximation."""

import importlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from tltlab.errors import ConfigError

_BATCH_TEXTS = 256


class TokenCounter(Protocol):
    """Counts the tokens of texts; `note` describes the method for the manifest of the trace."""

    note: str

    def count(self, texts: Sequence[str]) -> list[int]: ...


class NoTokenCounter:
    """For dumps that bring their own counts: raises ConfigError when it is asked for one."""

    note = ""

    def count(self, texts: Sequence[str]) -> list[int]:
        raise ConfigError(
            "the file holds text without token counts: give `tltlab trace import` or `tltlab what-if` "
            "--tokenizer FOLDER, the model's tokenizer, or --chars-per-token 3.6 for an approximation"
        )


class CharsPerToken:
    """Characters / `chars_per_token`, rounded up: an approximation (English prose in BPE tokens is about 3.6 to 4.5).

    >>> CharsPerToken(3.6).count(["seventeen letters"])
    [5]
    """

    def __init__(self, chars_per_token: float):
        if not 0 < chars_per_token < math.inf:
            raise ConfigError(f"characters per token is {chars_per_token}, it must be a number above 0")
        self.chars_per_token = chars_per_token
        self.note = f"token counts are an approximation: characters / {chars_per_token:g}"

    def count(self, texts: Sequence[str]) -> list[int]:
        return [math.ceil(len(text) / self.chars_per_token) for text in texts]


class FolderTokenizer:
    """The tokenizer of a Hugging Face model folder (its `tokenizer.json`); needs the package `tokenizers`.

    Dumps are decoded without special tokens, so neither a final end token nor a begin token is counted, and text may
    be cut into other tokens than those that were generated. Raises ConfigError.
    """

    def __init__(self, folder: str | Path):
        path = Path(folder)
        file = path / "tokenizer.json" if path.is_dir() else path
        if not file.is_file():
            raise ConfigError(f"{file}: no such file; a tokenizer is a folder with tokenizer.json in it")
        try:
            tokenizers: Any = importlib.import_module("tokenizers")
        except ModuleNotFoundError as error:
            raise ConfigError(
                "counting tokens needs the package tokenizers: pip install 'tltlab[dumps]', "
                "or give --chars-per-token 3.6 for an approximation"
            ) from error
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # The library raises bare Exception.
            raise ConfigError(f"{file}: not a tokenizer: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.note = f"token counts are those of the text tokenized again ({path.name}), special tokens left out"

    def count(self, texts: Sequence[str]) -> list[int]:
        counts: list[int] = []
        for start in range(0, len(texts), _BATCH_TEXTS):
            # Half a character of a cut-off JSON string is no text for the library.
            batch = [t.encode("utf-8", "replace").decode() for t in texts[start : start + _BATCH_TEXTS]]
            encodings = self._tokenizer.encode_batch(batch, add_special_tokens=False)
            counts += [len(encoding) for encoding in encodings]
        return counts

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of tokens, special ones included."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False))


def token_counter(tokenizer: Path | None, chars_per_token: float | None) -> TokenCounter:
    """The counter that a user asked for. Raises ConfigError where both are given."""
    if tokenizer is not None and chars_per_token is not None:
        raise ConfigError("got a tokenizer and characters per token; give one of them")
    if tokenizer is not None:
        return FolderTokenizer(tokenizer)
    return NoTokenCounter() if chars_per_token is None else CharsPerToken(chars_per_token)
