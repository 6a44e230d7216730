"""Ends of responses at strings in their text."""

from collections.abc import Sequence
from typing import Any


class StopStrings:
    """Finds the token that completes one of `strings` in a response's text, special tokens included.

    Responses have up to `most` tokens: a request for fewer continues one, whose tokens so far end its prompt.
    """

    def __init__(self, strings: Sequence[str], tokenizer: Any, most: int):
        self._strings, self._tokenizer, self._most = tuple(strings), tokenizer, most
        # A token has one byte at least.
        self._window = max(len(text.encode()) for text in strings) + 1
        self._may_complete: dict[int, bool] = {}

    def completed(self, request: Any, new_token_ids: Sequence[int]) -> int | None:
        """Return the number of new tokens up to one that completes a stop string; None without one.

        `request` is vLLM's, still without the new tokens.
        """
        for num, token in enumerate(new_token_ids, 1):
            if (may := self._may_complete.get(token)) is None:
                may = self._may_complete[token] = self._ends_one(self._text([token]))
            if may:
                so_far = request.num_output_tokens + max(self._most - request.max_tokens, 0)
                before = request.all_token_ids[max(request.num_tokens - so_far, request.num_tokens - self._window) :]
                tokens = [*before, *new_token_ids[:num]]
                text, earlier = self._text(tokens), self._text(tokens[:-1])
                if any(text.count(stop) > earlier.count(stop) for stop in self._strings):
                    return num
        return None

    def _ends_one(self, text: str) -> bool:
        """Return False where a token of this text completes no stop string, whatever comes before it."""
        if "\ufffd" in text:  # a part of a character
            return True
        for stop in self._strings:
            # A tokenizer may drop the space that begins a text.
            if stop in f" {text}" or any(f" {text}".startswith((stop[i:], f" {stop[i:]}")) for i in range(len(stop))):
                return True
        return False

    def _text(self, token_ids: list[int]) -> str:
        # As it was drawn.
        return str(self._tokenizer.decode(token_ids, clean_up_tokenization_spaces=False))
