"""How one decode iteration speculates: a value, compared and hashed by its fields."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from .errors import ConfigError

_WRITTEN = re.compile(r"([\w.-]+):(\d+)(?:x(\d+))?(?:/(\d+))?")


@dataclass(frozen=True, slots=True)
class Strategy:
    """A speculative-decoding setting, as in TLT section 5 and SGLang.

    `drafter` is a name the run knows (`none`, `ngram`, `suffix`, `learned`, ...), `draft_depth` the number of draft
    levels, `top_k` the branching per level and `tokens_to_verify` the tokens per request in the target's pass, the
    pending token included. A chain of depth d verifies at most d + 1 tokens; fewer trim the draft.

    >>> Strategy.chain("ngram", 4)
    Strategy(drafter='ngram', draft_depth=4, top_k=1, tokens_to_verify=5)
    """

    drafter: str
    draft_depth: int
    top_k: int
    tokens_to_verify: int

    def __post_init__(self) -> None:
        got = f"Strategy({self.drafter!r}, {self.draft_depth}, {self.top_k}, {self.tokens_to_verify})"
        if not self.drafter:
            raise ConfigError(f"{got}: the drafter needs a name, 'none' for no speculation")
        if self.drafter == "none" or self.draft_depth == 0:
            if (self.drafter, self.draft_depth, self.top_k, self.tokens_to_verify) != ("none", 0, 0, 1):
                raise ConfigError(f"{got}: no speculation is written ('none', 0, 0, 1)")
            return
        if self.draft_depth < 1 or self.top_k < 1:
            raise ConfigError(f"{got}: draft_depth and top_k must be at least 1")
        if self.tokens_to_verify < 2:
            raise ConfigError(f"{got}: tokens_to_verify counts the pending token, so a draft needs at least 2")
        if self.top_k == 1 and self.tokens_to_verify > self.draft_depth + 1:
            raise ConfigError(f"{got}: a chain of depth {self.draft_depth} has {self.draft_depth + 1} tokens to verify")
        # Each level expands top_k nodes by top_k children each (EAGLE-2); the first has one parent.
        most = 1 + self.top_k + (self.draft_depth - 1) * self.top_k**2
        if self.tokens_to_verify > most:
            raise ConfigError(
                f"{got}: a tree of {self.draft_depth} levels and top_k {self.top_k} has {most} nodes at most"
            )

    @classmethod
    def chain(cls, drafter: str, depth: int) -> Strategy:
        """A chain draft of `depth` tokens (vLLM's k = depth); depth 0 is `NO_SPECULATION`."""
        return cls(drafter, depth, 1, depth + 1) if depth else NO_SPECULATION

    @classmethod
    def parse(cls, text: str) -> Strategy:
        """The strategy that `str` writes: `none`, `ngram:4` (depth), `learned:8x4/48` (depth x top-k / to verify).

        Parts left out default to a chain, or to every node of a tree. ConfigError for another text.

        >>> [str(Strategy.parse(text)) for text in ("ngram:4", "learned:8x4/48", "learned:2x2")]
        ['ngram:4', 'learned:8x4/48', 'learned:2x2/7']
        """
        if text == NO_SPECULATION.drafter:
            return NO_SPECULATION
        match = _WRITTEN.fullmatch(text)
        if match is None:
            raise ConfigError(f"{text!r} is no strategy: write none, ngram:4 or learned:8x4/48")
        depth, top_k = int(match[2]), int(match[3] or 1)
        most = 1 + top_k + (depth - 1) * top_k**2 if depth else 0
        return cls(match[1], depth, top_k, int(match[4] or most))

    @property
    def speculates(self) -> bool:
        return self.draft_depth > 0

    @property
    def reach(self) -> int:
        """Most drafted tokens that an iteration can accept: the depth, or fewer where fewer are verified.

        >>> Strategy.chain("ngram", 4).reach, Strategy("ngram", 4, 1, 3).reach, NO_SPECULATION.reach
        (4, 2, 0)
        """
        return min(self.draft_depth, self.tokens_to_verify - 1)

    def __str__(self) -> str:
        if not self.speculates:
            return "none"
        if self.top_k == 1 and self.tokens_to_verify == self.draft_depth + 1:
            return f"{self.drafter}:{self.draft_depth}"
        return f"{self.drafter}:{self.draft_depth}x{self.top_k}/{self.tokens_to_verify}"


NO_SPECULATION = Strategy("none", 0, 0, 1)


def drafters_of(strategies: Iterable[Strategy]) -> list[str]:
    """Return the names of the drafters of these strategies, sorted; none of those that do not speculate."""
    return sorted({strategy.drafter for strategy in strategies if strategy.speculates})
