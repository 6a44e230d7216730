"""Rows of spot_training.parquet from a clock that ticks update by update: what a run would write, the truth known."""

import numpy as np
import pandas as pd


def spot_rows(
    truth,
    rl_step,
    idle_s,
    end_s,
    rng,
    *,
    noise=0.0,
    own_tokens=True,
    saves=True,
):
    """Rows of one RL step's period: workers are idle from `idle_s` on, those before `end_s` join, all stop then.

    Updates are finished, workers leave `yield_s` after the order to. With `own_tokens` every member trains as many
    tokens as a single worker does, else they share an update's.
    """
    begin = min(idle_s)
    if begin >= end_s:
        return []
    rows = {}
    now, unsaved = begin, 0

    def join(workers, pause_s):
        nonlocal now
        for worker in workers:
            rows[worker] = {
                "rl_step": rl_step, "worker": worker, "term": 100 + rl_step, "t_start": now, "members": 1,
                "setup_s": 0.0, "train_s": 0.0, "wait_s": 0.0, "blocked_s": 0.0, "updates": 0, "tokens": 0,
                "sequences": 0, "checkpoints": 0, "ended": "stopped",
            }  # fmt: skip
        now += pause_s
        for row in rows.values():
            row["setup_s"] += pause_s
            row["members"] = len(rows)

    def save():
        nonlocal now, unsaved
        now, unsaved = now + truth.checkpoint_s, 0
        for row in rows.values():
            row["blocked_s"] += truth.checkpoint_s
            row["checkpoints"] += 1

    join([w for w, idle in enumerate(idle_s) if idle <= begin], truth.start_s)
    while True:
        late = [w for w, idle in enumerate(idle_s) if idle <= min(now, end_s - 1e-9) and w not in rows]
        if late:
            join(late, truth.join_s)
        if now >= end_s:
            break
        took = truth.update_s(len(rows)) * float(np.exp(rng.normal(0.0, noise)) if noise else 1.0)
        now, unsaved = now + took, unsaved + 1
        share = 1 if own_tokens else len(rows)
        for row in rows.values():
            row["train_s"] += took
            row["updates"] += 1
            row["sequences"] += truth.samples_per_update // share
            row["tokens"] += int(truth.update_tokens) // share
        if truth.checkpoint_every and unsaved == truth.checkpoint_every:
            save()
    if unsaved and saves:
        save()
    now += truth.yield_s
    for row in rows.values():
        row["duration"] = now - row["t_start"]
        row["yield_s"] = max(now - end_s, 0.0)
    return list(rows.values())


def frame(rows):
    """As a table of the trace."""
    return pd.DataFrame(rows).assign(loss=1.0, accept=[[0.8, 0.6]] * len(rows), detail=None)
