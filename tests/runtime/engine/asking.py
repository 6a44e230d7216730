"""What tests ask of an engine, and how they read the answer."""

import os
import subprocess
import sys
from pathlib import Path

from tltlab.policies.policy import Policy
from tltlab.policies.specs import ExploreSpec, FixedSpec
from tltlab.runtime.engine.generation import GenerationRequest
from tltlab.runtime.engine.requests import LiveRequest
from tltlab.runtime.engine.tracker import Iteration
from tltlab.strategy import NO_SPECULATION, Strategy

CONTEXT, BLOCK = 96, 32
"""Tokens that a request and a page may have in the cramped engine."""


def fixed(drafter, depth=4):
    return Policy(selector=FixedSpec(strategy=Strategy.chain(drafter, depth)))


def switching(*strategies, hold_iterations=3):
    """Explores these and none."""
    return Policy(selector=ExploreSpec(strategies=(NO_SPECULATION, *strategies), hold_iterations=hold_iterations))


def request(name, number, prompt, tokens, rl_step=0, **more):
    """One that runs to its cap."""
    settings = {"key": (rl_step, name, number, 0), "max_response_tokens": tokens, "ignore_eos": True} | more
    return GenerationRequest(prompt_token_ids=prompt, **settings)


def requests(num, tokens, *, rl_step=0):
    """As many prompts of three tokens; each request runs to its cap."""
    return [request(f"p{n}", 0, [1, 4 + n, 5], tokens, rl_step=rl_step) for n in range(num)]


def groups_of_four(num, tokens, prompt_tokens=6, rl_step=0):
    """As many requests that run to their cap, four samples of each prompt."""
    prompts = [[1, *([4 + n, 5, 6] * prompt_tokens)[: prompt_tokens - 1]] for n in range(-(-num // 4))]
    return [request(f"p{n // 4}", n % 4, prompts[n // 4], tokens, rl_step=rl_step) for n in range(num)]


def timed_by_work(tracker, patch):
    """Have an engine's time continue by its work alone: 10 ms an iteration, and 0.1 ms for each token that it verifies.

    What a policy learns from times is then the same on every machine, however busy.
    """
    now_s, verified = 0.0, tracker.verified

    def later(counts):
        nonlocal now_s
        what = tracker.in_flight[0]
        now_s += 1e-2 + 1e-4 * (len(what.request_ids) + sum(map(len, what.drafts.values())))
        return verified(counts)

    patch.setattr(tracker, "clock", lambda: now_s)
    patch.setattr(tracker, "verified", later)


def preempted_by(engine, patch):
    """The requests that an engine preempts from now on."""
    names, scheduler = [], engine.llm.llm_engine.engine_core.engine_core.scheduler
    stock = scheduler._preempt_request

    def preempt(request, *args, **kwargs):
        names.append(request.request_id)
        return stock(request, *args, **kwargs)

    patch.setattr(scheduler, "_preempt_request", preempt)
    return names


def settings():
    """What of this process a user's program could notice that an engine changes."""
    import torch._dynamo
    import torch._inductor.config

    return {
        "environment": {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"},
        "sys.path": list(sys.path),
        "dynamo": torch._dynamo.config.get_config_copy(),
        "inductor": {name: repr(value) for name, value in torch._inductor.config.get_config_copy().items()},
    }


def changed(since):
    now = settings()
    return [name for name in now if now[name] != since[name]]


def scheduled(*request_ids, drafts=None, **more):
    """An iteration of an engine that is only played, without requests that wait, context and prefill if not told so."""
    counts = {"waiting": 0, "context_tokens": 0, "prefill_tokens": 0} | more
    return Iteration(request_ids=list(request_ids), drafts=drafts or {}, **counts)


def running(key, prompt, output=(), **more):
    """The record of a request that runs."""
    return LiveRequest(name=key[1], key=key, prompt=prompt, output=output, max_response_tokens=100, **more)


def rows_of(source):
    """Rows of iterations and of decisions: of a control whose rollout ends, or of a tracker so far."""
    tables = source.end() if hasattr(source, "driver") else source.drain().tables()
    return [table.to_pylist() for table in tables]


def raising(error):
    """A function that raises this, whatever it is called with."""

    def raises(*_, **__):
        raise error

    return raises


def said_once(caplog, about="the engine continues"):
    """The only line of the log that says this."""
    (said,) = [record.getMessage() for record in caplog.records if about in record.getMessage()]
    return said


def run_program(text, *arguments):
    """What a program in a process of its own prints and says; it can import these tests."""
    paths = os.pathsep.join([str(Path(__file__).parents[3]), os.environ["PYTHONPATH"]])
    command = [sys.executable, "-W", "ignore", "-c", text, *map(str, arguments)]
    environ = os.environ | {"PYTHONPATH": paths}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=550, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout, done.stderr


def texts(rollout):
    return [response.token_ids for response in rollout.responses]


def kept_and_refused(rollout):
    """Draft tokens."""
    kept = sum(row["num_accepted"] for row in rollout.iterations.to_pylist())
    return kept, sum(row["num_drafted"] for row in rollout.iterations.to_pylist()) - kept
