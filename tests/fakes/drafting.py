"""A policy that follows a script, and a drafter that repeats what it heard last."""

from tltlab.drafters.base import Draft, Drafter
from tltlab.policies.selector import Selector


class Parrot(Drafter):
    """Drafts the request's last token again and again, keeps what it was told, and takes `token_s` for each token."""

    def __init__(self, expected=1.0, token_s=0.0):
        self.expected, self.token_s, self.now_s = expected, token_s, 0.0
        self.texts = {}
        self.told = []
        self.seen = []

    def open(self, key, tokens):
        assert key not in self.texts
        self.texts[key] = list(tokens)

    def extend(self, key, tokens):
        self.texts[key] += tokens
        self.told.append((key[1], len(tokens)))
        self.now_s += len(tokens) * self.token_s

    def propose(self, key, depth):
        return Draft([self.texts[key][-1]] * depth, self.expected)

    def observe(self, key, num_drafted, num_accepted):
        self.seen.append((key, num_drafted, num_accepted))

    def close(self, key):
        del self.texts[key]

    def forget(self):
        self.texts = {}

    memory_bytes = 0  # type: ignore[assignment]


class Script(Selector):
    """Chooses in the order given, and keeps what it is told."""

    def __init__(self, *choices):
        self.strategies = tuple(dict.fromkeys(choices))
        self.choices = list(choices)
        self.told = []

    def choose(self, state):
        self.state = state
        return self.choices.pop(0)

    def observe(self, choice, outcome):
        self.told.append((choice, outcome))

    @property
    def outcomes(self):
        """Draft depth of each choice whose outcome came, and how many drafts each request kept."""
        return [(choice.strategy.draft_depth, list(outcome.accepted)) for choice, outcome in self.told]
