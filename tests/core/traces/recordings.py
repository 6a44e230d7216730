"""Rows as a run records them, and recordings that a run has left."""

import multiprocessing

from tltlab.traces.recorder import Recorder, repair
from tltlab.traces.schema import Manifest

from ...traces_of_lengths import iterations as made

MANIFEST = Manifest(kind="recorded", name="live", num_workers=2, model="m", group_size=1, seed=3, hardware="h")
FORKING = multiprocessing.get_context("fork")
Rows = list[dict[str, object]]


def rows(step, attempt=0):
    """An RL step's rows, of 4 responses of 1 to 4 tokens, each longer by `attempt`: so attempts are told apart."""
    key = [{"rl_step": step, "prompt_id": f"p{i}", "sample": 0} for i in range(4)]
    asked = {"epoch": 0, "prompt_tokens": 3, "max_response_tokens": 9, "policy_version": step}
    made = {"finish_reason": "stop", "worker": 0, "t_submit": 0.0, "t_finish": 1.0}
    ids = [[step] * (1 + attempt + i) for i in range(4)]
    return {
        "workload": [k | asked for k in key],
        "outcomes": [k | made | {"response_tokens": len(x)} for k, x in zip(key, ids, strict=True)],
        "tokens": [
            k | {"prompt_token_ids": [1], "token_ids": x, "token_versions": x} for k, x in zip(key, ids, strict=True)
        ],
        "steps": [{"rl_step": step, "t_start": float(step), "policy_version": step}],
    }


def iterations(step):
    return made(rl_step=step, batch=[4, 4]).to_dict("records")


def add(recorder, step, attempt=0):
    for table, new in rows(step, attempt).items():
        recorder.append(table, new)
    if attempt == 1:
        recorder.append("spans", [{"rl_step": step, "lane": "x", "kind": "idle", "t_start": 0.0, "duration": 1.0}])


def record(recorder, steps, attempt=0):
    for step in steps:
        add(recorder, step, attempt)
        recorder.flush()


def left(path, steps, *, how, attempt=0):
    """A trace that another process left at `path`: killed, closed, or killed and repaired."""
    recorder = Recorder(path, MANIFEST)
    record(recorder, range(steps), attempt)
    if how == "closed":
        recorder.close()
        return
    recorder._lock.close()
    if how == "repaired":
        repair(path)


def go_on(path, begins_at, steps):
    """What a run that resumes at an RL step records, to its end."""
    with Recorder.reopen(path, MANIFEST, begins_at) as recorder:
        record(recorder, steps)
