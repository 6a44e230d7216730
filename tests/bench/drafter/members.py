"""What it costs drafter trainers to train together: bytes and rounds of an update by members, and seconds on paper.

Members are processes of this machine, which share its cores: their seconds here say nothing of machines with a device
each. Bytes and rounds are the same there.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import statistics
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from queue import Empty
from typing import Any

import torch
from transformers import LlamaConfig

from tltlab.console import table
from tltlab.errors import ConfigError, RunError
from tltlab.runtime.drafter.group import LEADER, DrafterGroup, MeetingPoint, meeting, tokens_of_member
from tltlab.runtime.drafter.heads.eagle import EagleHead
from tltlab.runtime.drafter.heads.target import FrozenTarget
from tltlab.runtime.drafter.sequences import TrainingSequence
from tltlab.runtime.drafter.training import DrafterTraining
from tltlab.runtime.engine.environment import hardware, versions
from tltlab.runtime.models.runs import Progress
from tltlab.runtime.recipe.drafter import LossConfig, OptimConfig

from .checkpoint import StateShape

MEMBERS = (1, 2, 3, 4)
HIDDEN, VOCABULARY, TOKENS = 256, 512, 256
TIMEOUT_S = 60.0
SMALL = 1200
"""Numbers of which each round carries a part in one segment."""
TCP_INFO_BYTES, BYTES_SENT, BYTES_RETRANS, NOTSENT_BYTES, DATA_SEGMENTS = 216, 200, 208, 144, 156
"""Of Linux's `struct tcp_info` (linux/tcp.h): its length with `tcpi_bytes_retrans`, the offsets of `tcpi_bytes_sent`,
of that, of `tcpi_notsent_bytes` and of `tcpi_data_segs_out`."""

HEADS = {
    "7B": StateShape(),
    "32B": StateShape(hidden=5120, intermediate=27648, kv_width=1024),
}
"""EAGLE heads of Qwen2.5's shapes."""
LINKS = {"NVLink": 370e9, "400 Gb/s": 45e9, "100 Gb/s": 11e9}
"""Bytes a second between neighbours in a ring, about what NCCL reaches."""
FLOPS, MEMORY = 400e12, 3.0e12
"""An H100's in bfloat16, about what training reaches, and its memory's bytes a second."""
PAPER_TOKENS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """What one member counted: bytes sent in an update, messages sent in a small sum, seconds."""

    bytes_sent: float
    messages: float
    update_s: float
    pass_s: float
    exchange_s: float


def bench_members(rounds: int = 8, *, progress: Progress) -> dict[str, Any]:
    """Have groups of 1 to 4 processes do `rounds` updates over gloo and loopback.

    Returns `rows`, by members: bytes that a member sends in an update, by Linux's counters of its sockets, and what a
    ring needs, 2 (n - 1) / n of the message; its messages in a small sum, of which gloo takes six a round, and a ring's
    2 (n - 1) rounds; median seconds. And `paper`: for heads of 7B and 32B models and links, an update's milliseconds
    alone and in groups, updates a second relative to one member, and the same with the tokens that members then take
    (`group.tokens_of_member`), and tokens a second. RunError where a member fails.
    """
    if rounds < 1:
        raise ConfigError("members are measured over at least one update")
    rows: list[dict[str, Any]] = []
    size = _training(0)._message.flat.nbytes
    for world in MEMBERS:
        members = _together(world, rounds)
        sent = statistics.mean(member.bytes_sent for member in members)
        rows.append(
            {
                "members": world,
                "message_bytes": size,
                "ring_bytes": 2 * (world - 1) / world * size,
                "bytes_sent": sent,
                "ring_rounds": 2 * (world - 1),
                "messages": statistics.mean(member.messages for member in members),
                "update_s": statistics.median(member.update_s for member in members),
                "exchange_s": statistics.median(member.exchange_s for member in members),
                "of_members": [asdict(member) for member in members],
            }
        )
        progress(f"{world} members: {sent / 1e6:.2f} MB sent by each in an update")
    return {
        "rows": rows,
        "paper": on_paper(),
        "rounds": rounds,
        "hardware": hardware(),
        "versions": versions(),
    }


def on_paper() -> list[dict[str, Any]]:
    """Updates of EAGLE heads by size, link and members, from `group`'s formula without latency.

    Alone 6 (P + V H) T FLOP for P parameters, V H of the LM head and T tokens, forward and backward of the head, of the
    LM head, which has no gradient of its own, and once the target's logits; AdamW moves 28 bytes a parameter.
    """
    tokens = PAPER_TOKENS
    rows = []
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
                        "model": model,
                        "parameters": parameters,
                        "link": link,
                        "members": world,
                        "alone_ms": alone_s * 1e3,
                        "exchange_ms": exchange_s * 1e3,
                        "updates_with_all_tokens": alone_s / all_s,
                        "tokens_of_member": member_tokens,
                        "updates": alone_s / less_s,
                        "tokens": world * member_tokens / tokens * alone_s / less_s,
                    }
                )
    return rows


def text(result: Mapping[str, Any]) -> str:
    """Tables of what `bench_members` returned."""
    measured_rows = [
        (
            str(row["members"]), f"{row['message_bytes'] / 1e6:.2f}", f"{row['bytes_sent'] / 1e6:.2f}",
            f"{row['ring_bytes'] / 1e6:.2f}", f"{row['messages']:.1f}", str(row["ring_rounds"]),
            f"{row['exchange_s'] * 1e3:.1f}", f"{row['update_s'] * 1e3:.1f}",
        )
        for row in result["rows"]
    ]  # fmt: skip
    paper_rows = [
        (
            row["model"], row["link"], str(row["members"]), f"{row['alone_ms']:.0f}", f"{row['exchange_ms']:.0f}",
            f"{row['updates_with_all_tokens']:.2f}", str(row["tokens_of_member"]), f"{row['updates']:.2f}",
            f"{row['tokens']:.2f}",
        )
        for row in result["paper"]
    ]  # fmt: skip
    head = ("members", "message MB", "sent MB", "ring's", "messages", "rounds", "exchange ms", "update ms")
    like = (
        "head of", "link", "members", "alone ms", "exchange ms", "updates/s", "tokens each", "updates/s", "tokens/s",
    )  # fmt: skip
    return "\n".join(
        [
            table(head, measured_rows),
            f"On paper, {PAPER_TOKENS} tokens an update and H100s, over one member alone: updates/s if each takes all",
            "of them; then tokens, updates/s and tokens/s as trainers do",
            table(like, paper_rows),
        ]
    )


def _training(rank: int) -> DrafterTraining:
    """A head of HIDDEN width, small enough for four on two cores and large enough that its message has many parts."""
    torch.manual_seed(rank)
    head = EagleHead(
        LlamaConfig(
            hidden_size=HIDDEN, intermediate_size=4 * HIDDEN, num_hidden_layers=1, num_attention_heads=4,
            num_key_value_heads=2, head_dim=HIDDEN // 4, vocab_size=VOCABULARY,
        )
    )  # fmt: skip
    weights = torch.randn(VOCABULARY, HIDDEN) * HIDDEN**-0.5
    return DrafterTraining(head, FrozenTarget(embedding=weights, lm_head=weights), LossConfig(), OptimConfig())


def _sequence() -> TrainingSequence:
    return TrainingSequence(
        key=(0, "p", 0, 0), token_ids=torch.randint(VOCABULARY, (TOKENS + 1,)), hidden=torch.randn(TOKENS, HIDDEN)
    )


def _member(rank: int, world: int, address: str, rounds: int) -> Member:
    torch.set_num_threads(1)
    training = _training(rank)
    store = None if world == 1 else meeting(address, f"of-{world}", TIMEOUT_S)
    group = None if store is None else DrafterGroup.join(store, rank, world, TIMEOUT_S, backend="gloo")
    if group is not None:
        training.share(group)
    training.update([_sequence()], group)
    # Nobody else's traffic, and not the store's.
    apart = int(address.rpartition(":")[2])
    before = _sent(apart)
    reports = [training.update([_sequence()], group) for _ in range(rounds)]
    between = _sent(apart)
    if group is not None:
        for _ in range(rounds):
            group.sum(torch.ones(SMALL))
    after = _sent(apart)
    if group is not None:
        # Whoever is done first must not take its connections away from the others.
        group.sum(torch.ones(1))
        group.close()
    return Member(
        bytes_sent=(between[0] - before[0]) / rounds,
        messages=(after[1] - between[1]) / rounds,
        update_s=statistics.median(report.seconds for report in reports),
        pass_s=statistics.median(report.pass_s for report in reports),
        exchange_s=training.exchange_s,
    )


def _sent(apart: int) -> tuple[int, int]:
    """Bytes that this process gave its TCP connections to send, and their data segments; without those of port `apart`.

    Bytes count once, sent or still to be sent: how far the kernel has come, and what it repeats, depends on the others.
    """
    total = segments = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as connection:
            if connection.type != socket.SOCK_STREAM or connection.getpeername()[1] == apart:
                continue
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES)
            if len(info) == TCP_INFO_BYTES:
                sent, again = struct.unpack_from("Q", info, BYTES_SENT), struct.unpack_from("Q", info, BYTES_RETRANS)
                total += sent[0] - again[0] + struct.unpack_from("I", info, NOTSENT_BYTES)[0]
                segments += struct.unpack_from("I", info, DATA_SEGMENTS)[0]
    return total, segments


def _run(rank: int, world: int, address: str, rounds: int, out: Any) -> None:
    try:
        out.put(_member(rank, world, address, rounds))
    except Exception as error:
        out.put(f"{type(error).__name__}: {error}")


def _together(world: int, rounds: int) -> list[Member]:
    # Forked from a process that has torch: importing it takes longer than the measurement.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    out, point = context.Queue(), MeetingPoint()
    processes = [
        context.Process(target=_run, args=(rank, world, point.address, rounds, out), daemon=True)
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
    failed = [answer for answer in answers if isinstance(answer, str)]
    if failed:
        raise RunError(f"a member of {world} failed: {failed[0]}")
    return [answer for answer in answers if isinstance(answer, Member)]
