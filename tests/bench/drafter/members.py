"""What it costs drafter trainers to train together: seconds of an update by members, and on paper.

Members are processes of this machine, which share its cores: their seconds here say nothing of machines with a device
each, for which `on_paper` has the formula of `tltlab.runtime.drafter.group`.
"""

from __future__ import annotations

import multiprocessing
import statistics
from queue import Empty
from typing import Any

import torch

from bench.harness import Progress, Table, Text
from tltlab.errors import ConfigError, RunError
from tltlab.runtime.drafter.group import LEADER, DrafterGroup, MeetingPoint, meeting, tokens_of_member
from tltlab.runtime.drafter.training import DrafterTraining
from tltlab.runtime.engine.environment import hardware, versions
from tltlab.runtime.recipe.drafter import LossConfig, OptimConfig

from .trainer import HeadShape, StateShape

MEMBERS = (1, 2, 3, 4)
SHAPE, TOKENS = HeadShape(hidden_size=256, intermediate_size=1024), 256
"""Small enough for four on two cores and large enough that a message has many parts."""
TIMEOUT_S = 60.0
HEADS = {"7B": StateShape(), "32B": StateShape(hidden=5120, intermediate=27648, kv_width=1024)}
"""EAGLE heads of Qwen2.5's shapes."""
LINKS = {"NVLink": 370e9, "400 Gb/s": 45e9, "100 Gb/s": 11e9}
"""Bytes a second between neighbours in a ring, about what NCCL reaches."""
FLOPS, MEMORY = 400e12, 3.0e12
"""An H100's in bfloat16, about what training reaches, and its memory's bytes a second."""
PAPER_TOKENS = 4096


def bench_members(rounds: int = 8, *, progress: Progress) -> dict[str, Any]:
    """Have groups of 1 to 4 processes do `rounds` updates over gloo and loopback.

    Returns `rows`, by members: bytes of the message, those that a ring makes each member send, 2 (n - 1) / n of it, its
    2 (n - 1) rounds, and median seconds; and `paper`. RunError where a member fails.
    """
    if rounds < 1:
        raise ConfigError("members are measured over at least one update")
    rows: list[dict[str, Any]] = []
    size = _training(0)._message.flat.nbytes
    for world in MEMBERS:
        members = _together(world, rounds)
        rows.append(
            {
                "members": world, "message_bytes": size, "ring_bytes": 2 * (world - 1) / world * size,
                "ring_rounds": 2 * (world - 1), "of_members": members,
                **{name: statistics.median(m[name] for m in members) for name in ("update_s", "exchange_s")},
            }
        )  # fmt: skip
        progress(f"{world} members: {rows[-1]['update_s']:.3f} s an update")
    return {"rows": rows, "paper": on_paper(), "rounds": rounds, "hardware": hardware(), "versions": versions()}


def on_paper() -> list[dict[str, Any]]:
    """Updates of EAGLE heads by size, link and members, from `group`'s formula without latency.

    Alone 6 (P + V H) T FLOP for P parameters, V H of the LM head and T tokens, forward and backward of the head, of the
    LM head, which has no gradient of its own, and once the target's logits; AdamW moves 28 bytes a parameter.
    """
    tokens, rows = PAPER_TOKENS, []
    for model, shape in HEADS.items():
        parameters = sum(shape.trained().values())
        adam_s = 28 * parameters / MEMORY
        pass_s = 6 * (parameters + shape.vocabulary * shape.hidden) * tokens / FLOPS
        for link, speed in LINKS.items():
            for world in (2, 4, 8):
                exchange_s = 2 * (world - 1) / world * 4 * parameters / speed
                member_tokens = tokens_of_member(tokens, world, pass_s, exchange_s)
                alone_s, all_s = pass_s + adam_s, pass_s + exchange_s + adam_s
                less_s = pass_s * member_tokens / tokens + exchange_s + adam_s
                rows.append(
                    {
                        "model": model, "parameters": parameters, "link": link, "members": world,
                        "alone_ms": alone_s * 1e3, "exchange_ms": exchange_s * 1e3,
                        "updates_with_all_tokens": alone_s / all_s, "tokens_of_member": member_tokens,
                        "updates": alone_s / less_s, "tokens": world * member_tokens / tokens * alone_s / less_s,
                    }
                )  # fmt: skip
    return rows


TEXT: Text = (
    Table(
        rows="rows",
        columns={
            "members": "{members}", "message MB": "{message_bytes:1e-6*.2f}", "sent MB": "{ring_bytes:1e-6*.2f}",
            "exchange ms": "{exchange_s:1e3*.1f}", "update ms": "{update_s:1e3*.1f}",
        },
    ),
    "On paper, 4,096 tokens an update and H100s, over one member alone: updates/s if each takes all of them; then "
    "tokens, updates/s and tokens/s as trainers do",
    Table(
        rows="paper",
        columns={
            "head of": "{model}", "link": "{link}", "members": "{members}", "alone ms": "{alone_ms:.0f}",
            "exchange ms": "{exchange_ms:.0f}", "updates/s": "{updates_with_all_tokens:.2f}",
            "tokens each": "{tokens_of_member}", "updates/s ": "{updates:.2f}", "tokens/s": "{tokens:.2f}",
        },
    ),
)  # fmt: skip


def _training(rank: int) -> DrafterTraining:
    return DrafterTraining(SHAPE.head(rank), SHAPE.frozen(), LossConfig(), OptimConfig())


def _member(rank: int, world: int, address: str, rounds: int, out: Any) -> None:
    """Put what one member counted, or a sentence about its failure, into the queue `out`."""
    try:
        torch.set_num_threads(1)
        training, group = _training(rank), None
        if world > 1:
            store = meeting(address, f"of-{world}", TIMEOUT_S)
            group = DrafterGroup.join(store, rank, world, TIMEOUT_S, backend="gloo")
            training.share(group)
        training.update([SHAPE.sequence(TOKENS, rank)], group)
        reports = [training.update([SHAPE.sequence(TOKENS, rank)], group) for _ in range(rounds)]
        if group is not None:
            # Whoever is done first must not take its connections away from the others.
            group.sum(torch.ones(1))
            group.close()
        out.put(
            {
                "update_s": statistics.median(report.seconds for report in reports),
                "pass_s": statistics.median(report.pass_s for report in reports),
                "exchange_s": training.exchange_s,
            }
        )
    except Exception as error:
        out.put(f"{type(error).__name__}: {error}")


def _together(world: int, rounds: int) -> list[dict[str, float]]:
    # Forked from a process that has torch: importing it takes longer than the measurement.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    out, point = context.Queue(), MeetingPoint()
    processes = [
        context.Process(target=_member, args=(rank, world, point.address, rounds, out), daemon=True)
        for rank in range(LEADER, world)
    ]
    try:
        for process in processes:
            process.start()
        answers = [out.get(timeout=3 * TIMEOUT_S) for _ in processes]
    except Empty:
        raise RunError(f"{world} members did not end in {3 * TIMEOUT_S:g} s") from None
    finally:
        for process in processes:
            process.kill()
            process.join()
        point.close()
    if failed := [answer for answer in answers if isinstance(answer, str)]:
        raise RunError(f"a member of {world} failed: {failed[0]}")
    return answers
