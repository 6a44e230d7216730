"""A policy that follows a script, and a drafter that repeats what it heard last."""

from __future__ import annotations

from collections.abc import Sequence

from tltlab.drafters.base import Draft, Drafter, Key
from tltlab.policies.selector import Selector
from tltlab.state import Choice, StepOutcome, StepState
from tltlab.strategy import Strategy


class Parrot(Drafter):
    """Drafts the request's last token again and again, keeps what it was told, and takes `token_s` for each token."""

    def __init__(self, expected: float = 1.0, token_s: float = 0.0) -> None:
        self.expected, self.token_s, self.now_s = expected, token_s, 0.0
        self.texts: dict[Key, list[int]] = {}
        self.told: list[tuple[str, int]] = []
        self.seen: list[tuple[Key, int, int]] = []

    def open(self, key: Key, tokens: Sequence[int]) -> None:
        assert key not in self.texts
        self.texts[key] = list(tokens)

    def extend(self, key: Key, tokens: Sequence[int]) -> None:
        self.texts[key] += tokens
        self.told.append((key[1], len(tokens)))
        self.now_s += len(tokens) * self.token_s

    def propose(self, key: Key, depth: int) -> Draft:
        return Draft([self.texts[key][-1]] * depth, self.expected)

    def observe(self, key: Key, num_drafted: int, num_accepted: int) -> None:
        self.seen.append((key, num_drafted, num_accepted))

    def close(self, key: Key) -> None:
        del self.texts[key]

    def forget(self) -> None:
        self.texts = {}

    memory_bytes = 0  # type: ignore[assignment]


class Script(Selector):
    """Chooses in the order given, and keeps what it is told."""

    def __init__(self, *choices: Strategy) -> None:
        self.strategies = tuple(dict.fromkeys(choices))
        self.choices = list(choices)
        self.told: list[tuple[Choice, StepOutcome]] = []

    def choose(self, state: StepState) -> Strategy:
        self.state = state
        return self.choices.pop(0)

    def observe(self, choice: Choice, outcome: StepOutcome) -> None:
        self.told.append((choice, outcome))

    @property
    def outcomes(self) -> list[tuple[int, list[int]]]:
        """Draft depth of each choice whose outcome came, and how many drafts each request kept."""
        return [(choice.strategy.draft_depth, list(outcome.accepted)) for choice, outcome in self.told]
