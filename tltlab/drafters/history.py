"""The finished responses that a drafter remembers: their texts by problem, and who leaves when they take too much."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from tltlab.arrays import Tokens

from .base import Key

TEXT_BYTES = 1024
"""Bytes of a text apart from its tokens: names, places in dictionaries."""
LOW = 15 / 16
"""How full a budget is once something had to leave: the order of leaving is worked out now and then only."""


@dataclass(slots=True)
class FinishedText:
    """A finished response, int32, with its packed prompt; `num_trees` is how many trees count on it."""

    prompt: bytes
    response: Tokens
    num_trees: int


@dataclass(slots=True)
class _ProblemHistory:
    """History of a problem: its texts, the newest RL step it was seen in, tokens it ever had accepted."""

    rl_step: int
    accepted: int = 0
    num_running: int = 0
    keys: dict[Key, None] = field(default_factory=dict)


class History:
    """Finished responses in the order they finished, `texts`, of at most `max_bytes`.

    Prompts are held once. The owner evicts what exceeds the budget (`evictable`): first the oldest visits of problems
    that were seen again since, so that many problems keep something; then whole problems, those seen longest
    ago first, among equals those that ever had the fewest tokens accepted. Problems with a running request go last.
    """

    def __init__(self, max_bytes: float) -> None:
        self.max_bytes = max_bytes
        self.texts: dict[Key, FinishedText] = {}
        self.num_bytes = 0
        self._problems: dict[str, _ProblemHistory] = {}
        self._prompts: dict[bytes, tuple[bytes, int]] = {}

    def opened(self, key: Key) -> None:
        """A request of this name runs from now on."""
        self._problem(key).num_running += 1

    def closed(self, key: Key) -> None:
        """It is over."""
        problem = self._problems[key[1]]
        problem.num_running -= 1
        self._drop_if_unused(key[1], problem)

    def add(self, key: Key, prompt: bytes, response: Tokens, num_trees: int) -> FinishedText:
        """Hold a text, which is returned, until as many trees have released it."""
        prompt, users = self._prompts.get(prompt, (prompt, 0))
        self._prompts[prompt] = prompt, users + 1
        text = self.texts[key] = FinishedText(prompt, response, num_trees)
        self._problem(key).keys[key] = None
        self.num_bytes += TEXT_BYTES + response.nbytes + (0 if users else len(prompt))
        return text

    def release(self, key: Key) -> None:
        """One tree less counts on the text `key`; with the last it goes."""
        text = self.texts[key]
        text.num_trees -= 1
        if text.num_trees:
            return
        del self.texts[key]
        prompt, users = self._prompts.pop(text.prompt)
        if users > 1:
            self._prompts[prompt] = prompt, users - 1
        self.num_bytes -= TEXT_BYTES + text.response.nbytes + (0 if users > 1 else len(prompt))
        problem = self._problems[key[1]]
        del problem.keys[key]
        self._drop_if_unused(key[1], problem)

    def evictable(self) -> Iterator[list[Key]]:
        """The texts of one visit or problem after the other, to be released at once, until the budget has some room."""
        if self.num_bytes <= self.max_bytes:
            return
        visits: dict[tuple[int, str], list[Key]] = {}
        for key in self.texts:
            problem = self._problems[key[1]]
            if key[0] < problem.rl_step and not problem.num_running:
                visits.setdefault(key[:2], []).append(key)
        for keys in visits.values():
            if self.num_bytes <= LOW * self.max_bytes:
                return
            yield keys
        problems = self._problems.items()
        order = sorted((p.num_running > 0, p.rl_step, p.accepted, prompt_id) for prompt_id, p in problems)
        for *_, prompt_id in order:
            if self.num_bytes <= LOW * self.max_bytes:
                return
            yield list(self._problems[prompt_id].keys)

    def note_accepted(self, prompt_id: str, num_tokens: int) -> None:
        """A draft for a request of the problem had so many tokens accepted."""
        problem = self._problems.get(prompt_id)
        if problem is not None:
            problem.accepted += num_tokens

    @property
    def accepted(self) -> dict[str, int]:
        """Tokens that each problem with texts ever had accepted, where there are any."""
        problems = sorted(self._problems.items())
        return {name: problem.accepted for name, problem in problems if problem.accepted and problem.keys}

    def _problem(self, key: Key) -> _ProblemHistory:
        problem = self._problems.get(key[1])
        if problem is None:
            problem = self._problems[key[1]] = _ProblemHistory(rl_step=key[0])
        problem.rl_step = max(problem.rl_step, key[0])
        return problem

    def _drop_if_unused(self, prompt_id: str, problem: _ProblemHistory) -> None:
        if not problem.keys and not problem.num_running:
            del self._problems[prompt_id]
