"""The trace format, version 1: its tables, their columns and its manifest.

A trace is a folder with `manifest.json` and one Parquet file per table. `workload` (what a policy may know before the
rollout) and `outcomes` (what was measured) are required, the other tables optional. Times are seconds since the start
of the RL step a row names (`steps.t_start`: since the start of the run). Unknown is null, never a sentinel.
"""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, Self

import pyarrow as pa
from pydantic import Field, ValidationError, field_validator

from tltlab.config import FrozenModel, faults
from tltlab.errors import TraceError

FORMAT = "tltlab-trace"
VERSION = 1
MANIFEST_FILE = "manifest.json"
REQUIRED_TABLES = ("workload", "outcomes")

KEY = ("rl_step", "prompt_id", "sample", "turn")
"""One row of `workload` and `outcomes`. The samples of one prompt in one RL step are its group."""

FINISH_REASONS = ("stop", "length", "abort")
"""How a response ended; "abort" is right-censored: its response_tokens is a lower bound."""

TRAINING_ENDS = ("stopped", "killed", "failed", "declined")
"""How a worker's part in a training period ended: told to stop, killed (it did not yield, or its process died), by an
error of its own, or by itself because it has trained all that it may."""

SPAN_KINDS = (
    "prefill", "decode", "speculative_decode", "idle", "spot_train", "weight_sync", "switch",
    "inference", "reward", "train", "checkpoint",
)  # fmt: skip

UNIQUE: dict[str, tuple[str, ...]] = {
    "workload": KEY,
    "outcomes": KEY,
    "tokens": KEY,
    "iterations": ("rl_step", "worker", "iteration"),
    "decisions": ("rl_step", "worker", "iteration"),
    "acceptance": (*KEY, "drafter", "drafter_age"),
    "steps": ("rl_step",),
    "spot_training": ("rl_step", "worker", "term"),
}
"""The columns that together name one row of a table; spans may overlap and have none."""

_I32, _I64, _F32, _F64, _STR = pa.int32(), pa.int64(), pa.float32(), pa.float64(), pa.string()
_KEY_COLUMNS = {"rl_step": _I32, "prompt_id": _STR, "sample": _I32, "turn": _I32}


def _schema(columns: dict[str, pa.DataType], nullable: dict[str, pa.DataType], order: str = "") -> pa.Schema:
    names = order.split() or [*columns, *nullable]
    assert set(names) == {*columns, *nullable}
    return pa.schema([pa.field(n, columns[n] if n in columns else nullable[n], nullable=n in nullable) for n in names])


_STRATEGY = {"draft_depth": _I32, "top_k": _I32, "tokens_to_verify": _I32}

TABLES: dict[str, pa.Schema] = {
    "workload": _schema(
        {**_KEY_COLUMNS, "epoch": _I32, "prompt_tokens": _I32, "max_response_tokens": _I32, "policy_version": _I32}, {}
    ),
    "outcomes": _schema(
        {**_KEY_COLUMNS, "response_tokens": _I32, "finish_reason": _STR},
        {"reward": _F32, "worker": _I32, "t_submit": _F64, "t_first_token": _F64, "t_finish": _F64, "tool_s": _F64},
    ),
    "tokens": _schema(
        {**_KEY_COLUMNS, "prompt_token_ids": pa.list_(_I32), "token_ids": pa.list_(_I32)},
        {"logprobs": pa.list_(_F32), "token_versions": pa.list_(_I32)},
    ),
    "iterations": _schema(
        {"rl_step": _I32, "worker": _I32, "iteration": _I32, "t_start": _F64, "duration": _F64, "batch": _I32,
         "context_tokens": _I64, "prefill_tokens": _I32, **_STRATEGY, "num_drafted": _I32, "num_accepted": _I32,
         "num_generated": _I32},
        {"draft_duration": _F64, "num_waiting": _I32, "kv_tokens": _I64, "drafter": _STR,
         "accepted_per_request": pa.list_(_I32), "next_draft_depth": _I32},
        "rl_step worker iteration t_start duration draft_duration batch num_waiting context_tokens kv_tokens"
        " prefill_tokens drafter draft_depth top_k tokens_to_verify num_drafted num_accepted num_generated"
        " accepted_per_request next_draft_depth",
    ),
    "decisions": _schema(
        {"rl_step": _I32, "worker": _I32, "iteration": _I32, "drafter": _STR, **_STRATEGY, "propensity": _F32},
        {"bucket": _I32, "reward": _F64},
        "rl_step worker iteration bucket drafter draft_depth top_k tokens_to_verify propensity reward",
    ),
    "acceptance": _schema(
        {**_KEY_COLUMNS, "drafter": _STR, "drafter_age": _I32, "max_depth": _I32,
         "accept_if_drafted": pa.list_(pa.uint8())},
        {"drafter_updates": _I64},
        "rl_step prompt_id sample turn drafter drafter_age drafter_updates max_depth accept_if_drafted",
    ),
    "steps": _schema(
        {"rl_step": _I32, "t_start": _F64, "policy_version": _I32},
        {"rollout_s": _F64, "inference_s": _F64, "reward_s": _F64, "train_s": _F64, "sync_s": _F64, "policy": _STR,
         "drafter_version": _I32, "drafter_age": _I32, "drafter_updates": _I64, "reward_mean": _F32, "drift_kl": _F32},
        "rl_step t_start rollout_s inference_s reward_s train_s sync_s policy policy_version drafter_version"
        " drafter_age drafter_updates reward_mean drift_kl",
    ),
    "spans": _schema(
        {"rl_step": _I32, "lane": _STR, "kind": _STR, "t_start": _F64, "duration": _F64},
        {"batch": _I32, "detail": _STR},
    ),
    "spot_training": _schema(
        {"rl_step": _I32, "worker": _I32, "term": _I64, "t_start": _F64, "duration": _F64, "members": _I32,
         "setup_s": _F64, "train_s": _F64, "wait_s": _F64, "blocked_s": _F64, "updates": _I32, "tokens": _I64,
         "sequences": _I32, "checkpoints": _I32, "ended": _STR},
        {"yield_s": _F64, "loss": _F64, "accept": pa.list_(_F32), "detail": _STR},
        "rl_step worker term t_start duration members setup_s train_s wait_s blocked_s yield_s updates tokens"
        " sequences checkpoints ended loss accept detail",
    ),
}  # fmt: skip
"""Arrow schema of each table; `nullable` says where null ("unknown") is allowed."""


class Manifest(FrozenModel):
    """What a trace is and where it comes from: `manifest.json`. Unknown is None.

    `engine` holds name and version, `created` is ISO 8601, `num_workers` counts rollout workers (engines, not GPUs),
    `group_size` samples per prompt.

    >>> Manifest(kind="recorded", engine="vllm 0.32.0", num_workers=8).version
    1
    """

    format: Literal["tltlab-trace"] = "tltlab-trace"
    version: Literal[1] = 1
    kind: Literal["recorded", "synthetic", "imported", "simulated"]
    name: str | None = None
    created: str | None = None
    model: str | None = None
    hardware: str | None = None
    engine: str | None = None
    num_workers: int | None = Field(default=None, ge=1)
    max_response_tokens: int | None = Field(default=None, ge=1)
    group_size: int | None = Field(default=None, ge=1)
    num_rl_steps: int | None = Field(default=None, ge=0)
    license: str | None = None
    source: str | None = None
    seed: int | None = None
    notes: str | None = None

    @field_validator("created")
    @classmethod
    def _iso_8601(cls, value: str | None) -> str | None:
        if value is not None:
            datetime.fromisoformat(value)
        return value

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a `manifest.json`; keys unknown to this version are ignored. Raises TraceError."""
        try:
            found: Any = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise TraceError(f"{path}: cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise TraceError(f"{path}: not JSON: {error}") from error
        if not isinstance(found, dict):
            raise TraceError(f"{path}: got a {type(found).__name__}, a manifest is a JSON object")
        if found.get("format") != FORMAT:
            raise TraceError(f"{path}: format is {found.get('format')!r}, this reads {FORMAT!r}")
        if isinstance(found.get("version"), bool) or found.get("version") != VERSION:
            raise TraceError(f"{path}: version is {found.get('version')!r}, this reads version {VERSION}")
        try:
            return cls.model_validate({k: v for k, v in found.items() if k in cls.model_fields})
        except ValidationError as error:
            raise TraceError(f"{path}: {faults(error)}") from error

    def to_json(self) -> str:
        """The text of `manifest.json`; every field is there, None as null."""
        return json.dumps(self.model_dump(), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
