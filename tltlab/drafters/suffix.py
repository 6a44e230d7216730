"""A model-free drafter over suffix trees of text: the request's own, its group's, its problem's, or all there is."""

from __future__ import annotations

import importlib
import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from tltlab.arrays import Tokens
from tltlab.errors import ConfigError
from tltlab.records import Json

from .base import Draft, Drafter, Key

TEXT_BYTES = 1024
"""Bytes of a text apart from its tokens: names, places in dictionaries."""
LOW = 15 / 16
"""Share of a budget that stays filled after an eviction: the order of eviction is not computed for each text."""
Waiting: TypeAlias = "Tokens | array[int] | list[int]"
"""Text that is to be put in."""
Scope = Literal["request", "group", "problem", "global"]
Length = Literal["depth", "match", "doubling"]

# HistoSpec's released code: a draft window that starts at 2 and stays within [2, 16].
WIDTHS = 2, 16
# Stands before a request's first token. The tree never matches the first token of a context, only what follows it.
BEFORE_TEXT = -1
TREE_BYTES_PER_TOKEN = 300
"""Bytes of a response's token in a tree, about; more where texts differ more."""
TEXT_SHARE = 0.25
"""Share of the history budget for texts; the rest is for trees. A token of a text takes 4 bytes."""


@dataclass(slots=True)
class FinishedText:
    """A finished response, int32, with its packed prompt; `num_trees` is how many trees count on it."""

    prompt: bytes
    response: Tokens
    num_trees: int


class History:
    """Finished responses in the order they finished, `texts`, of at most `max_bytes`.

    Prompts are held once. The owner evicts what exceeds the budget (`evictable`): the oldest visits of prompts first,
    those of prompts with a running request last.
    """

    def __init__(self, max_bytes: float):
        self.max_bytes = max_bytes
        self.texts: dict[Key, FinishedText] = {}
        self.num_bytes = 0
        self._prompts: dict[bytes, tuple[bytes, int]] = {}

    def add(self, key: Key, prompt: bytes, response: Tokens, num_trees: int) -> FinishedText:
        """Hold a text, which is returned, until as many trees have released it."""
        prompt, users = self._prompts.get(prompt, (prompt, 0))
        self._prompts[prompt] = prompt, users + 1
        text = self.texts[key] = FinishedText(prompt, response, num_trees)
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

    def evictable(self, running: Iterable[Key]) -> Iterator[list[Key]]:
        """The texts of one visit after the other, to be released at once, until the budget has some room."""
        if self.num_bytes <= self.max_bytes:
            return
        visits: dict[tuple[int, str], list[Key]] = {}
        for key in self.texts:
            visits.setdefault(key[:2], []).append(key)
        used = {key[1] for key in running}
        for visit in sorted(visits, key=lambda visit: (visit[1] in used, visit[0])):
            if self.num_bytes <= LOW * self.max_bytes:
                return
            yield visits[visit]


def _as_list(tokens: Waiting) -> list[int]:
    return tokens if isinstance(tokens, list) else tokens.tolist()


class TextTree:
    """The texts of one scope, and each prompt once while a response to it is there.

    `finished` is in the order of finishing. `index` is the library's tree, which knows texts by number; it is None
    until `build`, and need not have all that is finished. Text is `waiting` outside of it until `catch_up`, which
    comes before each search. `num_tokens` counts finished texts in the index and outside.
    """

    def __init__(self, new_index: Callable[[], Any], *, whole: bool, num_before: int):
        self.running: set[Key] = set()
        self.finished: dict[Key, None] = {}
        self._new_index = new_index
        self._whole = whole
        self._num_before = num_before
        self._numbers = count(1)
        self.empty()

    def empty(self) -> None:
        """Release the index; nothing may be running."""
        assert not self.running
        self.index: Any = None
        self.waiting: list[tuple[int, Waiting]] = []
        self.num_tokens = 0
        self.number: dict[Key | bytes, int] = {}
        self._prompt: dict[Key, bytes] = {}
        self._users: dict[bytes, int] = {}
        self._size: dict[Key, int] = {}

    def build(self, texts: Mapping[Key, FinishedText], room: float) -> None:
        """Index finished texts: the newest responses that fit into `room` tokens."""
        self.index = self._new_index()
        fitting = []
        for key in reversed(self.finished):
            room -= self.size(texts[key])
            if room < 0:
                break
            fitting.append(key)
        for key in reversed(fitting):
            self.add(key, np.frombuffer(texts[key].prompt, np.int32), texts[key].response)
            self._count(key, texts[key])

    def open(self, key: Key, prompt: Tokens) -> None:
        """Begin a running text with its prompt."""
        self.running.add(key)
        self._begin(key, prompt)

    def add(self, key: Key, prompt: Tokens, response: Tokens) -> None:
        """Index a whole text, which is to be finished."""
        self._begin(key, prompt)
        self.extend(key, response)

    def _begin(self, key: Key, prompt: Tokens) -> None:
        """Begin a text with all of its prompt, or with the prompt's last tokens and, once, the whole prompt."""
        self.number[key] = next(self._numbers)
        if self._whole:
            self.extend(key, prompt)
        elif self._num_before:
            packed = prompt.tobytes()
            if packed not in self._users:
                self._users[packed] = 0
                self.number[packed] = next(self._numbers)
                self.extend(packed, prompt)
            self._users[packed] += 1
            self._prompt[key] = packed
            self.extend(key, prompt[-self._num_before :])

    def extend(self, key: Key | bytes, tokens: Waiting) -> None:
        self.waiting.append((self.number[key], tokens))

    def catch_up(self, most: float = math.inf) -> int:
        """Put waiting text into the index in order of arrival, at most `most` tokens; return their number."""
        waiting, self.waiting = self.waiting, []
        extend, room = self.index.extend, most
        for place, (number, tokens) in enumerate(waiting):
            if len(tokens) > room:
                cut = int(room)
                extend(number, _as_list(tokens[:cut]))
                self.waiting = [(number, tokens[cut:]), *waiting[place + 1 :]]
                return int(most)
            extend(number, _as_list(tokens))
            room -= len(tokens)
        return int(most - room) if room < most else 0

    @property
    def memory_bytes(self) -> int:
        """The index by its own estimate, for which it is walked, and what waits."""
        return int(self.index.estimate_memory()) + 8 * sum(len(tokens) for _, tokens in self.waiting)

    def finish(self, key: Key, text: FinishedText, window: int | None) -> list[Key]:
        """Note that a text is complete; return the older ones that had to leave."""
        self.finished[key] = None
        if self.index is not None:
            self._count(key, text)
        surplus = 0 if window is None else len(self.finished) - window
        oldest = list(islice(self.finished, max(surplus, 0)))
        for evicted in oldest:
            self.remove(evicted)
        return oldest

    def remove(self, key: Key) -> None:
        """Remove a finished text, and its prompt with the last response to it."""
        del self.finished[key]
        self.unindex(key)

    def unindex(self, key: Key) -> int:
        """Remove a finished text from the index, if it is there; return its number of tokens."""
        if key not in self._size:
            return 0
        self._take_out(key)
        packed = self._prompt.pop(key, None)
        if packed is not None:
            self._users[packed] -= 1
            if not self._users[packed]:
                del self._users[packed]
                self._take_out(packed)
        num_tokens = self._size.pop(key)
        self.num_tokens -= num_tokens
        return num_tokens

    def _take_out(self, key: Key | bytes) -> None:
        number = self.number.pop(key)
        self.waiting = [text for text in self.waiting if text[0] != number]
        self.index.remove(number)

    def size(self, text: FinishedText) -> int:
        """Return the tokens of a text in this tree: the response's, and those of the prompt that stand before."""
        return len(text.response) + self._num_before

    def _count(self, key: Key, text: FinishedText) -> None:
        self._size[key] = self.size(text)
        self.num_tokens += self._size[key]


def load_index() -> Any:
    """The class of the library's trees (package arctic-inference); ConfigError without it."""
    try:
        return importlib.import_module("arctic_inference.suffix_decoding._C").SuffixTree
    except ImportError as error:
        raise ConfigError("the suffix drafter needs: pip install 'tltlab[suffix]'") from error


class SuffixDrafter(Drafter):
    """Drafts along the most frequent continuation of what the request's last tokens match in its trees.

    The trees are those of SuffixDecoding (arXiv 2411.04975; package arctic-inference). For every match of `min_match`
    to `max_match` tokens the tree walks on to the most frequent next token; the path of a draft token has the
    probability `count(match + path) / count(match)`, counts being occurrences in the tree. A draft ends before the
    first token whose path falls below `min_token_prob`. The draft's `expected` is the sum of its path probabilities,
    and the highest `expected` wins: among the lengths of match in a tree (ties to the longest), then among trees
    (ties to the scope named first). So a short match that always continued alike beats a long one that did not.

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

    `history_mib` bounds what finished responses take, in MiB; None is no bound. A quarter of it is for texts: over that
    the responses to a prompt of the oldest RL step leave first, those to prompts of running requests last. The rest is
    for trees. A problem's tree is built when a request of it is opened; unused trees are dropped first, then the oldest
    responses leave trees in use, and their texts stay. Running responses and prompts come on top.

    Time: about 2 us per token inserted and 4 us per look-up and tree; a problem that recurs pays for its window.
    Text is inserted when its tree is next searched: what never is costs nothing. Memory: 0.2 to 0.4 kB per token in a
    tree, 4 bytes per token of text. ConfigError where the settings make no sense or the library is missing.

    >>> drafter = SuffixDrafter(scopes=("group",))
    >>> drafter.remember((0, "p", 0, 0), [1, 2, 3], [7, 8, 9])
    >>> drafter.open((0, "p", 1, 0), [1, 2, 3])
    >>> drafter.extend((0, "p", 1, 0), [7])
    >>> drafter.propose((0, "p", 1, 0), depth=4)
    Draft(tokens=[8, 9], expected=1.0)
    """

    drafts_behind = True

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
        history_mib: float | None = 256.0,
    ):
        self.scopes = tuple(scopes)
        self.window = window
        self.max_match = max_match
        self.max_draft = max_draft
        self.min_match = min_match
        self.min_token_prob = min_token_prob
        self.length = length
        self.match_factor = match_factor
        self.live = live
        self.history_mib = history_mib
        check_settings(self)
        self._new_index = load_index()
        most_bytes = math.inf if history_mib is None else history_mib * 2**20
        self._most_text_bytes = most_bytes * TEXT_SHARE
        self._most_tokens = most_bytes * (1 - TEXT_SHARE) / TREE_BYTES_PER_TOKEN
        self.forget()

    def forget(self) -> None:
        self._rl_step = 0
        self._trees: dict[_Name, TextTree] = {}
        # Those with an index, the one that was opened longest ago first.
        self._built: dict[_Name, TextTree] = {}
        # Those in which something runs.
        self._used: dict[_Name, TextTree] = {}
        self._running: dict[Key, _SuffixRequest] = {}
        self._has_backlog = False
        # An upper bound of the finished text in trees: an exact count takes time that grows with the trees.
        self._held_bound = 0
        self._history = History(self._most_text_bytes)

    def begin(self, rl_step: int) -> None:
        self._rl_step = rl_step
        for name in list(self._trees):
            self._free_if_done(name)

    def open(self, key: Key, tokens: Sequence[int]) -> None:
        """Begin request `key` with its prompt. A finished response of the same key is replaced by the new one."""
        assert key not in self._running, f"request {key!r} is open already"
        prompt = np.array(tokens, dtype=np.int32)
        if key in self._history.texts:
            self._take_out([key])
        names = [_name(scope, key) for scope in self.scopes]
        for name in names:
            tree = self._tree(name)
            if name not in self._built:
                tree.build(self._history.texts, self._make_room(tree))
                self._held_bound += tree.num_tokens
            self._built.pop(name, None)
            self._built[name] = tree
            tree.open(key, prompt)
        text = array("i", [BEFORE_TEXT])
        text.frombytes(prompt.tobytes())
        trees = [self._trees[name] for name in names]
        growing = [
            (tree, tree.number[key])
            for tree, name in zip(trees, names, strict=True)
            if self.live or name[0] == "request"
        ]
        self._running[key] = _SuffixRequest(names, trees, growing, text, start=len(text), width=WIDTHS[0])
        self._used.update(zip(names, trees, strict=True))

    def extend(self, key: Key, tokens: Sequence[int]) -> None:
        request = self._running[key]
        new = tokens if isinstance(tokens, list) else list(tokens)
        request.text.fromlist(new)
        for tree, number in request.growing:
            tree.waiting.append((number, new))

    def propose_all(self, queries: Sequence[tuple[Key, int]]) -> list[Draft]:
        drafts = []
        running, least, before = self._running, self.min_token_prob, -self.max_match - 1
        doubling, matching, shorter = self.length == "doubling", self.length == "match", self.min_match - 1
        for key, depth in queries:
            request = running[key]
            if doubling:
                depth = min(depth, request.width)
            best, most = None, 0.0
            if depth > 0:
                # The tree allows a match of m tokens factor * m + offset tokens; with this offset none below min_match.
                factor = self.match_factor if matching else float(depth)
                context = request.text[before:].tolist()
                for tree in request.trees:
                    if tree.waiting and not self._has_backlog:
                        tree.catch_up()
                    draft = tree.index.speculate(context, depth, factor, -factor * shorter, least, False)
                    score = draft.score
                    if score > most:
                        best, most = draft, score
            drafts.append(Draft([], 0.0) if best is None else Draft(best.token_ids, most))
        return drafts

    def propose(self, key: Key, depth: int) -> Draft:
        return self.propose_all([(key, depth)])[0]

    def catch_up(self, most: int | None = None) -> bool:
        room = math.inf if most is None else most
        self._has_backlog = False
        for tree in self._used.values():
            if tree.waiting:
                if room > 0:
                    room -= tree.catch_up(room)
                if tree.waiting:
                    self._has_backlog = True
                    break
        return not self._has_backlog

    def observe(self, key: Key, num_drafted: int, num_accepted: int) -> None:
        request = self._running.get(key)
        if request is not None and num_drafted:
            width = request.width * 2 if num_accepted >= num_drafted else request.width // 2
            request.width = min(max(width, WIDTHS[0]), WIDTHS[1])

    def observe_all(self, verified: Sequence[tuple[Key, int, int]]) -> None:
        if self.length == "doubling":
            super().observe_all(verified)

    def close(self, key: Key) -> None:
        request = self._running.pop(key)
        response = np.frombuffer(request.text[request.start :], np.int32)
        growing = [tree for tree, _ in request.growing]
        for name in request.names:
            tree = self._trees[name]
            if tree not in growing:
                tree.extend(key, response)
            tree.running.discard(key)
            if not tree.running:
                del self._used[name]
            if name[0] == "request":
                self._drop(name)
        self._finish(key, request.text[1 : request.start].tobytes(), response)
        self._keep_budget()

    def remember(self, key: Key, prompt: Sequence[int], response: Sequence[int]) -> None:
        """Add a whole response; unused trees are not built for it."""
        assert key not in self._running, f"request {key!r} is open"
        if key in self._history.texts:
            self._take_out([key])
        context, text = np.array(prompt, np.int32), np.array(response, np.int32)
        for scope in self.scopes:
            if scope != "request":
                name = _name(scope, key)
                tree = self._tree(name)
                if name in self._built:
                    tree.add(key, context, text)
        self._finish(key, context.tobytes(), text)
        self._keep_budget()

    def recall(self, responses: Iterable[tuple[Key, Sequence[int], Sequence[int]]]) -> None:
        assert not self._running, "what is remembered is exchanged between rollouts only"
        rl_step = self._rl_step
        self.forget()
        self._rl_step = rl_step
        for key, prompt, response in responses:
            self.remember(key, prompt, response)

    @property
    def memory_bytes(self) -> int:
        """The trees by their own estimate, and the text. It walks all trees, so ask now and then only."""
        trees = sum(tree.memory_bytes for tree in self._built.values())
        return trees + self._history.num_bytes + 4 * sum(len(request.text) for request in self._running.values())

    def state_dict(self) -> Json:
        """The finished responses that some tree holds, in the order they finished, as JSON types; none that runs.

        `responses` has rows [rl_step, prompt_id, sample, turn, index into `prompts`, tokens].
        """
        prompts: dict[bytes, int] = {}
        rows = [
            [*key, prompts.setdefault(text.prompt, len(prompts)), text.response.tolist()]
            for key, text in self._history.texts.items()
        ]
        unpacked = [np.frombuffer(prompt, np.int32).tolist() for prompt in prompts]
        return {"rl_step": self._rl_step, "prompts": unpacked, "responses": rows}

    def load_state_dict(self, state: Json) -> None:
        """Forget everything, then learn what `state_dict` gave: this drafter's, or one's with other settings, or {}.

        The drafts are the same, except that among equally frequent continuations a tree prefers one by the order in
        which texts came, grew side by side and left.
        """
        self.forget()
        self._rl_step = state.get("rl_step", 0)
        for rl_step, prompt_id, sample, turn, prompt, response in state.get("responses", ()):
            self.remember((rl_step, prompt_id, sample, turn), state["prompts"][prompt], response)

    def _tree(self, name: _Name) -> TextTree:
        tree = self._trees.get(name)
        if tree is None:
            num_before = 0 if name[0] == "global" else self.max_match
            depth = self.max_match + self.max_draft
            tree = TextTree(lambda: self._new_index(depth), whole=name[0] == "request", num_before=num_before)
            self._trees[name] = tree
        return tree

    def _drop(self, name: _Name) -> None:
        del self._trees[name]
        self._built.pop(name, None)

    def _finish(self, key: Key, prompt: bytes, response: Tokens) -> None:
        """Hold a text for the trees that it is in from now on; the window's oldest leave them."""
        names = [_name(scope, key) for scope in self.scopes if scope != "request"]
        if not names:
            return
        text = self._history.add(key, prompt, response, len(names))
        self._held_bound += (len(response) + self.max_match) * len(names)
        for name in names:
            for oldest in self._trees[name].finish(key, text, self.window):
                self._history.release(oldest)
            self._free_if_done(name)

    def _free_if_done(self, name: _Name) -> None:
        """Drop a tree that holds nothing any more, or that of a group of an earlier RL step in which nothing runs."""
        tree = self._trees[name]
        past = name[0] == "group" and name[1][0] < self._rl_step
        if not tree.running and (past or not tree.finished):
            self._drop(name)
            for key in tree.finished:
                self._history.release(key)

    def _take_out(self, keys: Sequence[Key]) -> None:
        """Forget finished responses. A tree with no others goes at once, not token by token."""
        for name in {_name(scope, key): None for key in keys for scope in self.scopes if scope != "request"}:
            tree = self._trees.get(name)
            if tree is None:
                continue
            leaving = [key for key in keys if key in tree.finished]
            if not tree.running and len(leaving) == len(tree.finished):
                self._drop(name)
            else:
                for key in leaving:
                    tree.remove(key)
            for key in leaving:
                self._history.release(key)

    def _keep_budget(self) -> None:
        for keys in self._history.evictable(self._running):
            self._take_out(keys)
        if self._held_bound <= self._most_tokens or self._make_room() >= 0:
            return
        surplus = self._held_tokens() - LOW * self._most_tokens
        for key in self._history.texts:
            for scope in self.scopes:
                tree = self._built.get(_name(scope, key))
                if tree is not None and surplus > 0:
                    surplus -= tree.unindex(key)
            if surplus <= 0:
                return

    def _make_room(self, tree: TextTree | None = None) -> float:
        """Empty unused trees until the tokens for `tree` have room; return how many fit."""
        texts = self._history.texts
        needed = sum(tree.size(texts[key]) for key in tree.finished) if tree is not None else 0
        total = self._held_tokens()
        for name, candidate in list(self._built.items()):
            if total + needed <= self._most_tokens:
                break
            # The tree of all responses is in use as soon as anything is.
            if not candidate.running and name[0] != "global":
                total -= candidate.num_tokens
                candidate.empty()
                del self._built[name]
        self._held_bound = total
        return self._most_tokens - total

    def _held_tokens(self) -> int:
        return sum(tree.num_tokens for tree in self._built.values())


_Name = tuple[Scope, Any]


def _name(scope: Scope, key: Key) -> _Name:
    return scope, {"request": key, "group": key[:2], "problem": key[1], "global": None}[scope]


@dataclass(slots=True, eq=False)
class _SuffixRequest:
    """An open request: `growing` are those of its `trees` that its text enters at once, and its number in each.

    `start` is where its response begins.
    """

    names: list[_Name]
    trees: list[TextTree]
    growing: list[tuple[TextTree, int]]
    text: array[int]
    start: int
    width: int


def check_settings(spec: Any) -> None:
    """ConfigError for settings that make no sense, of a `SuffixDrafter` or its spec."""
    scopes, names = list(spec.scopes), get_args(Scope)
    if not scopes or len(set(scopes)) != len(scopes) or not set(scopes) <= set(names):
        raise ConfigError(f"suffix: scopes must be some of {', '.join(names)}, each once, got {scopes}")
    if spec.window is not None and spec.window < 1:
        raise ConfigError(f"suffix: window must be at least 1 response, or none for all, got {spec.window}")
    if not 1 <= spec.min_match <= spec.max_match:
        raise ConfigError(f"suffix: needs 1 <= min_match <= max_match, got {spec.min_match} and {spec.max_match}")
    if spec.max_draft < 1:
        raise ConfigError(f"suffix: max_draft must be at least 1, got {spec.max_draft}")
    if not 0 <= spec.min_token_prob <= 1:
        raise ConfigError(f"suffix: min_token_prob must be from 0 to 1, got {spec.min_token_prob}")
    if not spec.match_factor > 0:
        raise ConfigError(f"suffix: match_factor must be above 0, got {spec.match_factor}")
    if spec.history_mib is not None and not 0 < spec.history_mib < math.inf:
        raise ConfigError(f"suffix: history_mib must be above 0 MiB, or none for no bound, got {spec.history_mib}")
