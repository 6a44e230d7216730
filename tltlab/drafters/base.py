"""The contract of a model-free drafter: it receives the tokens that requests generate and proposes continuations.

A drafter holds no clock and draws nothing: the same calls give the same drafts. Requests are named by the trace's key
(rl_step, prompt_id, sample, turn): samples that share (rl_step, prompt_id) are a group, all that share prompt_id are of
one problem. Drafts are greedy, so verification keeps each drafted token with the target's own probability of it.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tltlab.records import Json
from tltlab.state import Key as Key


class Draft(NamedTuple):
    """Tokens to follow a request, and how many of them the drafter itself expects to be kept."""

    tokens: list[int]
    expected: float


class Drafter(ABC):
    """Proposes continuations from text it has seen. `open` a request, `extend` it as it grows, `close` it at its end.

    In each iteration an engine lets it index `piece_tokens` of the waiting tokens, which should take about 10 ms. A
    class of your own that does not draft from text sets attributes named as in `DrafterTraits`, such as `has_network =
    True`: the simulator then prices each drafted token as a pass of a network.

    >>> drafter.open((0, "p", 0, 0), [1, 2, 3])                                                     # doctest: +SKIP
    >>> drafter.extend((0, "p", 0, 0), [7, 8, 9, 7])                                                # doctest: +SKIP
    >>> drafter.propose((0, "p", 0, 0), depth=2)                                                    # doctest: +SKIP
    Draft(tokens=[8, 9], expected=2.0)
    """

    piece_tokens = 8192
    drafts_behind = False
    """True if drafts continue a request's last tokens also where these wait to be put in (`catch_up`)."""

    def begin(self, rl_step: int) -> None:  # noqa: B027
        """A rollout begins: what only served groups of earlier RL steps may be forgotten."""

    @abstractmethod
    def open(self, key: Key, tokens: Sequence[int]) -> None:
        """Begin request `key` with its prompt; it must not be open already."""

    @abstractmethod
    def extend(self, key: Key, tokens: Sequence[int]) -> None:
        """Take the tokens that request `key` has just generated."""

    @abstractmethod
    def propose(self, key: Key, depth: int) -> Draft:
        """Up to `depth` tokens to follow request `key`; fewer, or none, where nothing matches."""

    def propose_all(self, queries: Sequence[tuple[Key, int]]) -> list[Draft]:
        """`propose` for each of several (key, depth), in order."""
        return [self.propose(key, depth) for key, depth in queries]

    def catch_up(self, most: int | None = None) -> bool:
        """Put in the text that waits to be looked up for open requests, so that the next look-ups only look up.

        At most `most` tokens of it: then the next look-ups find what is in. True once nothing waits any more.
        """
        return True

    def observe(self, key: Key, num_drafted: int, num_accepted: int) -> None:  # noqa: B027
        """A draft of `num_drafted` tokens for `key` was verified and its first `num_accepted` were kept."""

    def observe_all(self, verified: Sequence[tuple[Key, int, int]]) -> None:
        """`observe` for each of several (key, num_drafted, num_accepted)."""
        if type(self).observe is not Drafter.observe:
            for key, num_drafted, num_accepted in verified:
                self.observe(key, num_drafted, num_accepted)

    @abstractmethod
    def close(self, key: Key) -> None:
        """Request `key` is over. Its text stays as long as the drafter's scope and window let it."""

    @abstractmethod
    def forget(self) -> None:
        """Drop everything: open requests and all that was learned."""

    @property
    def memory_bytes(self) -> int:
        """Approximate memory of the index in bytes, 0 where the drafter does not report it."""
        return 0

    def state_dict(self) -> Json:
        """Return the state of finished responses that outlives an RL step, as JSON types."""
        return {}

    def load_state_dict(self, state: Json) -> None:
        """Forget everything, then take back what `state_dict` gave."""
        self.forget()

    def remember(self, key: Key, prompt: Sequence[int], response: Sequence[int]) -> None:
        """Take a whole response that was generated elsewhere: another worker's, or a recorded one."""
        self.open(key, prompt)
        self.extend(key, response)
        self.close(key)

    def recall(self, responses: Iterable[tuple[Key, Sequence[int], Sequence[int]]]) -> None:  # noqa: B027
        """Remember these (key, prompt, response) and no others; nothing is open.

        The owner of a run's history calls this before each rollout. A drafter that keeps nothing beyond a
        group has nothing to do.
        """


class TextDrafter(Drafter):
    """A drafter that looks at a request's own text, `texts[key]`, and at nothing beyond its end.

    One method, `propose`, is enough for a drafter of your own. A constructor must call that of this class.

    >>> class Repeat(TextDrafter):
    ...     def propose(self, key, depth):
    ...         return Draft(self.texts[key][-1:] * depth, expected=depth / 2)
    """

    def __init__(self) -> None:
        self.texts: dict[Key, list[int]] = {}

    def open(self, key: Key, tokens: Sequence[int]) -> None:
        self.texts[key] = list(tokens)

    def extend(self, key: Key, tokens: Sequence[int]) -> None:
        self.texts[key].extend(tokens)

    def close(self, key: Key) -> None:
        del self.texts[key]

    def forget(self) -> None:
        self.texts.clear()
