"""A model-free drafter over suffix trees of text: the request's own, its group's, its problem's, or all there is."""

from __future__ import annotations

import importlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal, get_args

import numpy as np

from tltlab.errors import ConfigError

from .base import Draft, Drafter, Key

Scope = Literal["request", "group", "problem", "global"]
Length = Literal["depth", "match", "doubling"]

# HistoSpec's released code: a draft window that starts at 2 and stays within [2, 16].
WIDTHS = 2, 16
# Stands before a request's first token. The tree never matches the first token of a context, only what follows it.
BEFORE_TEXT = -1


class SuffixDrafter(Drafter):
    """Drafts along the most frequent continuation of what the request's last tokens match in its trees.

    The trees are those of SuffixDecoding (arXiv 2411.04975; package arctic-inference). For every match of `min_match`
    to `max_match` tokens the tree walks on to the most frequent next token; the path of a draft token has the
    probability `count(match + path) / count(match)`, counts being occurrences in the tree. A draft ends before the
    first token whose path falls below `min_token_prob`. The draft's `expected` is the sum of its path probabilities,
    and the highest `expected` wins: among the lengths of match in a tree (ties to the longest), then among trees
    (ties to the scope named first). So a short match that always went on alike beats a long one that did not.

    `scopes` are all searched. "request" is the request's own prompt and text; "group" the texts of its (rl_step,
    prompt_id), dropped by `begin` of a later RL step; "problem" those of its prompt_id over all RL steps; "global"
    every response, without prompts. Group and problem trees hold each prompt once, while a response to it is there;
    its last `max_match` tokens also stand before each response, so that a response's first tokens can be drafted.
    `window` is how many finished responses each tree keeps, the oldest go first, None keeps all; running ones stay.

    With `live`, running responses are in their trees: siblings see them, and a request matches its own text there.
    The end of a running text counts as an occurrence that nothing follows, which makes `expected` cautious. Without
    `live` a response enters the shared trees when it is closed; the request tree always grows at once.

    `length` is how much of the depth asked for is used: "depth" all of it; "match" at most `match_factor` tokens for
    each matched token from the min_match-th on (SuffixDecoding); "doubling" a window per request that `observe`
    doubles when all of a draft was accepted and halves otherwise (HistoSpec). Trees are max_match + max_draft deep:
    after the longest match a draft can have `max_draft` tokens.

    Time: about 2 us per token inserted and 4 us per look-up and tree; text is inserted when its tree is next searched,
    so what never is costs nothing. Memory: 0.2 to 0.4 kB per token held; the window is per tree, so problem trees grow
    with the number of problems. ConfigError where the settings make no sense or the library is missing.

    >>> drafter = SuffixDrafter(scopes=("group",))
    >>> drafter.remember((0, "p", 0, 0), [1, 2, 3], [7, 8, 9])
    >>> drafter.open((0, "p", 1, 0), [1, 2, 3])
    >>> drafter.extend((0, "p", 1, 0), [7])
    >>> drafter.propose((0, "p", 1, 0), depth=4)
    Draft(tokens=[8, 9], expected=1.0)
    """

    def __init__(
        self,
        scopes: Sequence[Scope] = ("problem",),
        window: int | None = 32,
        *,
        max_match: int = 16,
        max_draft: int = 16,
        min_match: int = 2,
        min_token_prob: float = 0.1,
        length: Length = "depth",
        match_factor: float = 1.0,
        live: bool = True,
    ) -> None:
        check_settings(scopes, window, max_match, max_draft, min_match, min_token_prob, length, match_factor)
        self.scopes = tuple(scopes)
        self.window = window
        self.max_match = max_match
        self.max_draft = max_draft
        self.min_match = min_match
        self.min_token_prob = min_token_prob
        self.length = length
        self.match_factor = match_factor
        self.live = live
        self._new_index = load_index()
        self.forget()

    def forget(self) -> None:
        self._rl_step = 0
        self._trees: dict[_Name, TextTree] = {}
        self._running: dict[Key, _Running] = {}
        self._finished: dict[Key, _Finished] = {}

    def begin(self, rl_step: int) -> None:
        self._rl_step = rl_step
        for name in list(self._trees):
            self._free_if_done(name)

    def open(self, key: Key, tokens: Sequence[int]) -> None:
        """Begin request `key` with its prompt. A finished response of the same key makes way for the new one."""
        assert key not in self._running, f"request {key!r} is open already"
        prompt = array("i", tokens)
        names = [_name(scope, key) for scope in self.scopes]
        for name in names:
            tree = self._trees.get(name)
            if tree is None:
                tree = self._trees[name] = TextTree(self._new_index(self.max_match + self.max_draft))
            elif key in tree.finished:
                tree.remove(key)
                self._release(key)
            tree.open(key, prompt, whole=name[0] == "request", num_before=0 if name[0] == "global" else self.max_match)
        text = array("i", [BEFORE_TEXT]) + prompt
        trees = [self._trees[name] for name in names]
        growing = [tree for tree, name in zip(trees, names, strict=True) if self.live or name[0] == "request"]
        self._running[key] = _Running(names, trees, growing, text, start=len(text), width=WIDTHS[0])

    def extend(self, key: Key, tokens: Sequence[int]) -> None:
        request = self._running[key]
        new = array("i", tokens)
        request.text.extend(new)
        for tree in request.growing:
            tree.extend(key, new)

    def propose(self, key: Key, depth: int) -> Draft:
        return self.propose_all([(key, depth)])[0]

    def propose_all(self, asked: Sequence[tuple[Key, int]]) -> list[Draft]:
        drafts = []
        running, least, before = self._running, self.min_token_prob, -self.max_match - 1
        doubling, matching, shorter = self.length == "doubling", self.length == "match", self.min_match - 1
        for key, depth in asked:
            request = running[key]
            if doubling:
                depth = min(depth, request.width)
            best, most = None, 0.0
            if depth > 0:
                # The tree allows a match of m tokens factor * m + offset tokens; with this offset none below min_match.
                factor = self.match_factor if matching else float(depth)
                context = request.text[before:].tolist()
                for tree in request.trees:
                    if tree.waiting:
                        tree.catch_up()
                    found = tree.index.speculate(context, depth, factor, -factor * shorter, least, False)
                    score = found.score
                    if score > most:
                        best, most = found, score
            drafts.append(Draft([], 0.0) if best is None else Draft(best.token_ids, most))
        return drafts

    def catch_up(self) -> None:
        for request in self._running.values():
            for tree in request.trees:
                if tree.waiting:
                    tree.catch_up()

    def observe(self, key: Key, num_drafted: int, num_accepted: int) -> None:
        request = self._running.get(key) if self.length == "doubling" else None
        if request is not None and num_drafted:
            width = request.width * 2 if num_accepted >= num_drafted else request.width // 2
            request.width = min(max(width, WIDTHS[0]), WIDTHS[1])

    def close(self, key: Key) -> None:
        request = self._running.pop(key)
        response = request.text[request.start :]
        shared = [name for name in request.names if name[0] != "request"]
        if shared:
            self._finished[key] = _Finished(request.text[1 : request.start], response, num_trees=len(shared))
        for name in request.names:
            tree = self._trees[name]
            if tree not in request.growing:
                tree.extend(key, response)
            tree.running.discard(key)
            if name[0] == "request":
                del self._trees[name]
                continue
            for oldest in tree.finish(key, self.window):
                self._release(oldest)
            self._free_if_done(name)

    @property
    def memory_bytes(self) -> int:
        """The trees by their own estimate, and the text. It walks all trees, so ask now and then only."""
        trees = sum(tree.memory_bytes for tree in self._trees.values())
        finished = sum(len(text.prompt) + len(text.response) for text in self._finished.values())
        return trees + 4 * (finished + sum(len(request.text) for request in self._running.values()))

    def state_dict(self) -> dict[str, Any]:
        """The finished responses that some tree holds, in the order they finished, as JSON types; none that runs.

        `responses` has rows [rl_step, prompt_id, sample, turn, index into `prompts`, tokens].
        """
        prompts: dict[bytes, int] = {}
        rows = [
            [*key, prompts.setdefault(text.prompt.tobytes(), len(prompts)), text.response.tolist()]
            for key, text in self._finished.items()
        ]
        unpacked = [np.frombuffer(prompt, np.int32).tolist() for prompt in prompts]
        return {"rl_step": self._rl_step, "prompts": unpacked, "responses": rows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Forget everything, then learn what `state_dict` gave: this drafter's, or one's with other settings, or {}.

        The drafts are the same, except that among equally frequent continuations a tree prefers one by the order in
        which texts came, grew side by side and left.
        """
        self.forget()
        self._rl_step = state.get("rl_step", 0)
        for rl_step, prompt_id, sample, turn, prompt, response in state.get("responses", ()):
            self.remember((rl_step, prompt_id, sample, turn), state["prompts"][prompt], response)

    def _free_if_done(self, name: _Name) -> None:
        """Drop a tree that holds nothing any more, or that of a group of an earlier RL step in which nothing runs."""
        tree = self._trees[name]
        past = name[0] == "group" and name[1][0] < self._rl_step
        if not tree.running and (past or not tree.finished):
            del self._trees[name]
            for key in tree.finished:
                self._release(key)

    def _release(self, key: Key) -> None:
        """One tree less holds the finished response `key`; with the last its text goes."""
        text = self._finished[key]
        text.num_trees -= 1
        if not text.num_trees:
            del self._finished[key]


_Name = tuple[Scope, Any]


def _name(scope: Scope, key: Key) -> _Name:
    return scope, {"request": key, "group": key[:2], "problem": key[1], "global": None}[scope]


@dataclass(slots=True, eq=False)
class _Running:
    """An open request: `growing` are those of its `trees` that its text enters at once; `start` is its response's."""

    names: list[_Name]
    trees: list[TextTree]
    growing: list[TextTree]
    text: array[int]
    start: int
    width: int


@dataclass(slots=True)
class _Finished:
    """The text of a finished response, and how many trees hold it."""

    prompt: array[int]
    response: array[int]
    num_trees: int


def check_settings(
    scopes: Sequence[str],
    window: int | None,
    max_match: int,
    max_draft: int,
    min_match: int,
    min_token_prob: float,
    length: str,
    match_factor: float,
) -> None:
    """ConfigError for settings of `SuffixDrafter` that make no sense."""
    known = get_args(Scope)
    if not scopes or len(set(scopes)) != len(scopes) or not set(scopes) <= set(known):
        raise ConfigError(f"suffix: scopes must be some of {', '.join(known)}, each once, got {list(scopes)}")
    if window is not None and window < 1:
        raise ConfigError(f"suffix: window must be at least 1 response, or none for all, got {window}")
    if not 1 <= min_match <= max_match:
        raise ConfigError(f"suffix: needs 1 <= min_match <= max_match, got {min_match} and {max_match}")
    if max_draft < 1:
        raise ConfigError(f"suffix: max_draft must be at least 1, got {max_draft}")
    if not 0 <= min_token_prob <= 1:
        raise ConfigError(f"suffix: min_token_prob must be from 0 to 1, got {min_token_prob}")
    if length not in get_args(Length):
        raise ConfigError(f"suffix: length must be one of {', '.join(get_args(Length))}, got {length!r}")
    if not match_factor > 0:
        raise ConfigError(f"suffix: match_factor must be above 0, got {match_factor}")


class TextTree:
    """The texts of one scope, and each prompt once while a response to it is there.

    `index` is the library's tree; it knows texts by number. Text is `waiting` outside of it until `catch_up`, which
    whoever searches calls first: what is never searched, as while speculation is off, costs no insertion. `finished` is
    in the order of finishing.
    """

    def __init__(self, index: Any) -> None:
        self.index = index
        self.running: set[Key] = set()
        self.finished: dict[Key, None] = {}
        self.waiting: list[tuple[int, array[int]]] = []
        self._number: dict[Key | bytes, int] = {}
        self._prompt: dict[Key, bytes] = {}
        self._users: dict[bytes, int] = {}
        self._next = 0

    def open(self, key: Key, prompt: array[int], *, whole: bool, num_before: int) -> None:
        """Begin a text with its prompt: all of it, or its last `num_before` tokens and the whole beside it, once."""
        self.running.add(key)
        self._number[key] = self._new_number()
        if whole:
            self.extend(key, prompt)
        elif num_before:
            packed = prompt.tobytes()
            if packed not in self._users:
                self._users[packed] = 0
                self._number[packed] = self._new_number()
                self.extend(packed, prompt)
            self._users[packed] += 1
            self._prompt[key] = packed
            self.extend(key, prompt[-num_before:])

    def extend(self, key: Key | bytes, tokens: array[int]) -> None:
        self.waiting.append((self._number[key], tokens))

    def catch_up(self) -> None:
        """Put what waits into the index, in the order it came."""
        waiting, self.waiting = self.waiting, []
        for number, tokens in waiting:
            self.index.extend(number, tokens.tolist())

    @property
    def memory_bytes(self) -> int:
        """The index by its own estimate, for which it is walked, and what waits."""
        return int(self.index.estimate_memory()) + sum(tokens.itemsize * len(tokens) for _, tokens in self.waiting)

    def finish(self, key: Key, window: int | None) -> list[Key]:
        """The text is complete; which older ones had to leave."""
        self.finished[key] = None
        surplus = 0 if window is None else len(self.finished) - window
        oldest = list(islice(self.finished, max(surplus, 0)))
        for left in oldest:
            self.remove(left)
        return oldest

    def remove(self, key: Key) -> None:
        """Take out a finished text, and its prompt if it was the last of it."""
        del self.finished[key]
        self._take_out(key)
        packed = self._prompt.pop(key, None)
        if packed is not None:
            self._users[packed] -= 1
            if not self._users[packed]:
                del self._users[packed]
                self._take_out(packed)

    def _take_out(self, key: Key | bytes) -> None:
        number = self._number.pop(key)
        self.waiting = [text for text in self.waiting if text[0] != number]
        self.index.remove(number)

    def _new_number(self) -> int:
        self._next += 1
        return self._next


def load_index() -> Any:
    """The class of the library's trees (package arctic-inference); ConfigError without it."""
    try:
        return importlib.import_module("arctic_inference.suffix_decoding._C").SuffixTree
    except ImportError as error:
        raise ConfigError("the suffix drafter needs: pip install 'tltlab[suffix]'") from error
