"""Tools that responses call: `Environment`, the processes that run one, and the turns of a rollout on an engine.

A turn ends at a stop string. The environment reads the conversation so far and answers, or ends it. Its tokens are
appended to the turn, excluded from the loss, and the model continues.
"""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from tltlab.config import counted, whole_text
from tltlab.drafters.base import Key
from tltlab.errors import ConfigError
from tltlab.files import found_in
from tltlab.own import load_name
from tltlab.runtime.engine.generation import FollowUp, GenerationRequest

from .reward_pool import UserProcesses, error_place, process_object

if TYPE_CHECKING:
    from tltlab.runtime.recipe.sections import EnvironmentConfig

Message = dict[str, str]
"""{"role": "user" | "assistant" | "tool", "content": text}."""


class Environment(Protocol):
    """Answers tool calls. Every process makes one environment, without arguments; its only input is messages.

    A class may have `stop`, the strings that end a turn, for recipes that name none.
    """

    def step(self, messages: list[Message]) -> str | None:
        """Return the observation that follows the assistant's last message; None to end the conversation."""


class Calculator:
    """Computes the last `ask 3 + 4 =` of a turn, sums and differences of whole numbers; anything else ends it.

    >>> Calculator().step([{"role": "assistant", "content": "ask 3 + 4 - 2 ="}])
    '5'
    """

    stop = ("=",)

    def step(self, messages: list[Message]) -> str | None:
        call = _CALL.search(messages[-1]["content"])
        if call is None:
            return None
        return str(sum(int(term.replace(" ", "")) for term in _TERM.findall(call[1])))


_CALL = re.compile(r"ask (\d{1,9}(?: [+-] \d{1,9})*) =$")
_TERM = re.compile(r"(?:[+-] )?\d+")
BUILT_IN = {"calculator": "tltlab.runtime.rollout.environments:Calculator"}


def load_environment(path: str, code: Sequence[str] = ()) -> Environment:
    """Create an environment of `package.module:Class` or a built-in name, searched last in the folders `code`.

    ConfigError for a failed import or a class without `step(messages)`.
    """
    where = BUILT_IN.get(path, path)
    module, _, name = where.partition(":")
    if not (module and name):
        raise ConfigError(f"environment {path!r} is neither package.module:Class nor one of {', '.join(BUILT_IN)}")
    with found_in(code):
        cls = load_name(where, f"environment {path!r}")
        try:
            environment: Environment = cls()
        except (Exception, SystemExit) as error:  # a user's class may raise anything
            raise ConfigError(f"environment {path!r} cannot be made: {type(error).__name__}: {error}") from error
    try:
        inspect.signature(environment.step).bind([])
    except (AttributeError, TypeError) as error:
        raise ConfigError(f"environment {path!r} has no step(messages) that takes a list of messages") from error
    return environment


def stop_token_ids(config: EnvironmentConfig, code: Sequence[str], tokenizer: Any) -> tuple[int, ...]:
    """Return the tokens that end a turn. ConfigError where there are none, and for a stop string of several tokens."""
    strings = config.stop or getattr(load_environment(config.path, code), "stop", ())
    strings = (strings,) if isinstance(strings, str) and strings else strings
    if not strings or not isinstance(strings, Sequence):
        raise ConfigError(f"environment {config.path!r} has no stop strings: name them in rollout.environment.stop")
    token_ids = []
    for text in strings:
        ids = tokenizer.encode(whole_text(text), add_special_tokens=False) if isinstance(text, str) else []
        if len(ids) != 1 or ids[0] == tokenizer.unk_token_id:
            raise ConfigError(f"rollout.environment.stop {text!r} is not one token of the model: take one that is")
        token_ids.append(int(ids[0]))
    return tuple(token_ids)


Reply = tuple[str | None, str]
"""The environment's observation, None for the end; and an error, empty on success."""


class EnvironmentPool(UserProcesses):
    """Calls the environment in `config.processes` processes with a time limit, or synchronously where that is 0.

    A call that takes longer, raises or ends its process ends its response; `take_failures` counts such calls. Processes
    start with the first call.
    """

    def __init__(self, config: EnvironmentConfig, code: Sequence[str]):
        super().__init__(config.processes, "rollout.environment.processes", load_environment, config.path, tuple(code))
        self._config = config
        self._local = None if config.processes else load_environment(config.path, code)
        self._failures: Counter[str] = Counter()

    def ask(self, messages: list[Message]) -> Future[Reply]:
        """Return a future of the answer. RunError where processes cannot start."""
        if self._local is not None:
            future: Future[Reply] = Future()
            future.set_result(_observation(self._local, messages))
            return future
        while True:
            try:
                task: Future[Reply] = self.ready().schedule(_step, (messages,), timeout=self._config.timeout_s)
            except RuntimeError:
                continue  # the pool broke after the check
            return task

    def answer(self, task: Future[Reply]) -> str | None:
        """Return the observation of a finished call; None, and counted, where it failed."""
        try:
            answer, failure = self.result(task, self._config.timeout_s)
        except BrokenProcessPool:
            answer, failure = None, "lost their process"
        observation, error = answer or (None, failure)
        self._failures.update([error] if error else [])
        return observation

    def take_failures(self) -> list[str]:
        """Return and clear a sentence for each kind of failure."""
        sentences = [
            f"{counted(count, 'tool call')} {why}: the response ended" for why, count in self._failures.items()
        ]
        self._failures.clear()
        return sentences


_MOST_LETTERS = 256
"""Bound on the characters of a token, above those of known vocabularies."""


@dataclass(slots=True, eq=False)
class _Call:
    request: GenerationRequest
    token_ids: list[int]
    task: Future[Reply]
    asked_s: float


class Conversations:
    """The turns of one rollout on an engine (`FollowUps`): a response that ends at a stop token is continued.

    A response has at most `max_turns` turns, and with its prompt at most `room` tokens. Observations count towards its
    cap: one that leaves no room for another token ends the response, and `cut` has the key of its last turn.
    """

    def __init__(
        self, pool: EnvironmentPool, config: EnvironmentConfig, tokenizer: Any, stops: Sequence[int], room: int
    ):
        self._pool, self._config, self._tokenizer = pool, config, tokenizer
        self.cut: set[Key] = set()
        self._stops, self._room = frozenset(stops), room
        self._calls: list[_Call] = []
        self._messages: dict[tuple[int, str, int], list[Message]] = {}

    @property
    def pending(self) -> int:
        return len(self._calls)

    def ended(self, request: GenerationRequest, token_ids: Sequence[int], now_s: float) -> None:
        if not len(token_ids) or token_ids[-1] not in self._stops or request.key[3] + 1 >= self._config.max_turns:
            return
        first = [{"role": "user", "content": request.prompt_text or self._text(request.prompt_token_ids)}]
        messages = self._messages.setdefault(request.key[:3], first)
        messages.append({"role": "assistant", "content": self._text(token_ids)})
        self._calls.append(_Call(request, list(token_ids), self._pool.ask(list(messages)), now_s))

    def ready(self, now_s: Callable[[], float], *, wait_for_one: bool) -> list[FollowUp]:
        if wait_for_one and self._calls:
            wait([call.task for call in self._calls], return_when=FIRST_COMPLETED)
        done = [call for call in self._calls if call.task.done()]
        # Only those found above: one more may be done by now.
        self._calls = [call for call in self._calls if call not in done]
        follow_ups = (self._next(call, now_s()) for call in done)
        return [follow_up for follow_up in follow_ups if follow_up is not None]

    def _next(self, call: _Call, now_s: float) -> FollowUp | None:
        answer = self._pool.answer(call.task)
        if answer is None:
            return None
        request, config = call.request, self._config
        room = min(request.max_response_tokens - len(call.token_ids), self._room)
        if len(answer) > room * _MOST_LETTERS:
            # Tokenizing it would take long, and the engine would wait.
            self.cut.add(request.key)
            return None
        observed = self._tokenizer.encode(f"{config.before}{answer}{config.after}", add_special_tokens=False)
        prompt = [*request.prompt_token_ids, *call.token_ids, *observed]
        cap = request.max_response_tokens - len(call.token_ids) - len(observed)
        if cap < 1 or len(prompt) >= self._room:
            self.cut.add(request.key)
            return None
        self._messages[request.key[:3]].append({"role": "tool", "content": answer})
        key: Key = (*request.key[:3], request.key[3] + 1)
        following = replace(request, key=key, prompt_token_ids=prompt, max_response_tokens=cap)
        return FollowUp(request=following, observed=observed, submit_s=now_s, tool_s=now_s - call.asked_s)

    def _text(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(token_ids)))


def _observation(
    environment: Environment,
    messages: list[Message],
    caught: tuple[type[BaseException], ...] = (Exception, SystemExit),
) -> Reply:
    try:
        observation = environment.step(messages)
    except caught as error:  # a user's environment may raise anything
        return None, error_place(error)
    if observation is None:
        return None, ""
    if not isinstance(observation, str):
        return None, f"returned a {type(observation).__name__}, neither text nor None"
    return whole_text(observation), ""


def _step(messages: list[Message]) -> Reply:
    """Run in a separate process."""
    # Panics of Rust are no `Exception`, and no keyboard interrupts reach this process.
    return _observation(process_object("an environment's process"), messages, (BaseException,))
