"""What tests ask of an engine, and how they read the answer."""

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tltlab.policies.policy import Policy
from tltlab.policies.specs import ExploreSpec, FixedSpec
from tltlab.runtime.engine.generation import GenerationRequest, Rollout
from tltlab.runtime.engine.tracker import IterationTracker, Scheduled
from tltlab.strategy import NO_SPECULATION, Strategy

CONTEXT, BLOCK = 96, 32
"""Tokens that a request and a page may have in the cramped engine."""


def fixed(drafter: str, depth: int = 4) -> Policy:
    return Policy(selector=FixedSpec(strategy=Strategy.chain(drafter, depth)))


def switching(*strategies: Strategy, hold_iterations: int = 3) -> Policy:
    """Explores these and none."""
    return Policy(selector=ExploreSpec(strategies=(NO_SPECULATION, *strategies), hold_iterations=hold_iterations))


def request(name: str, number: int, prompt: list[int], tokens: int, rl_step: int = 0, **more: Any) -> GenerationRequest:
    """One that runs to its cap."""
    settings = {"key": (rl_step, name, number, 0), "max_response_tokens": tokens, "ignore_eos": True} | more
    return GenerationRequest(prompt_token_ids=prompt, **settings)


def requests(num: int, tokens: int, *, rl_step: int = 0) -> list[GenerationRequest]:
    """As many prompts of three tokens; each request runs to its cap."""
    return [request(f"p{n}", 0, [1, 4 + n, 5], tokens, rl_step=rl_step) for n in range(num)]


def groups_of_four(num: int, tokens: int, prompt_tokens: int = 6, rl_step: int = 0) -> list[GenerationRequest]:
    """As many requests that run to their cap, four samples of each prompt."""
    prompts = [[1, *([4 + n, 5, 6] * prompt_tokens)[: prompt_tokens - 1]] for n in range(-(-num // 4))]
    return [request(f"p{n // 4}", n % 4, prompts[n // 4], tokens, rl_step=rl_step) for n in range(num)]


def timed_by_work(tracker: IterationTracker, patch: pytest.MonkeyPatch):
    """Have an engine's time continue by its work alone: 10 ms an iteration, and 0.1 ms for each token that it verifies.

    What a policy learns from times is then the same on every machine, however busy.
    """
    now_s, verified = 0.0, tracker.verified

    def later(what, counts):
        nonlocal now_s
        now_s += 1e-2 + 1e-4 * (len(what.request_ids) + sum(map(len, what.drafts.values())))
        return verified(what, counts)

    patch.setattr(tracker, "clock", lambda: now_s)
    patch.setattr(tracker, "verified", later)


def settings() -> dict[str, Any]:
    """What of this process a user's program could notice that an engine changes."""
    import torch._dynamo
    import torch._inductor.config

    return {
        "environment": {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"},
        "sys.path": list(sys.path),
        "dynamo": torch._dynamo.config.get_config_copy(),
        "inductor": {name: repr(value) for name, value in torch._inductor.config.get_config_copy().items()},
    }


def changed(since: dict[str, Any]) -> list[str]:
    now = settings()
    return [name for name in now if now[name] != since[name]]


def scheduled(*request_ids: str, drafts: Mapping[str, Sequence[int]] | None = None, **more: int) -> Scheduled:
    """An iteration of an engine that is only played, without requests that wait, context and prefill if not told so."""
    counts = {"waiting": 0, "context_tokens": 0, "prefill_tokens": 0} | more
    return Scheduled(request_ids=list(request_ids), drafts=drafts or {}, **counts)


def raising(error: BaseException) -> Callable[..., Any]:
    """A function that raises this, whatever it is called with."""

    def raises(*_, **__):
        raise error

    return raises


def said_once(caplog: pytest.LogCaptureFixture, about: str = "the engine continues") -> str:
    """The only line of the log that says this."""
    (said,) = [record.getMessage() for record in caplog.records if about in record.getMessage()]
    return said


def run_program(text: str, *arguments: object) -> tuple[str, str]:
    """What a program in a process of its own prints and says; it can import these tests."""
    paths = os.pathsep.join([str(Path(__file__).parents[3]), os.environ["PYTHONPATH"]])
    command = [sys.executable, "-W", "ignore", "-c", text, *map(str, arguments)]
    environ = os.environ | {"PYTHONPATH": paths}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=550, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout, done.stderr


def texts(rollout: Rollout) -> list[list[int]]:
    return [response.token_ids for response in rollout.responses]


def kept_and_refused(rollout: Rollout) -> tuple[int, int]:
    """Draft tokens."""
    kept = sum(row["num_accepted"] for row in rollout.iterations)
    return kept, sum(row["num_drafted"] for row in rollout.iterations) - kept


def accept_length(rollout: Rollout) -> float:
    rows = [row for row in rollout.iterations if row["num_drafted"]]
    return 1 + sum(row["num_accepted"] for row in rows) / sum(row["batch"] for row in rows)
