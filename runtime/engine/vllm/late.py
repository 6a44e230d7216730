"""Drafts of the host under asynchronous scheduling, whose tokens arrive when their iteration is already scheduled.

    schedule             reserves places for drafts, -1 each, while the iteration before runs
    execute_model        the V1 runner prepares its inputs
      _model_forward     waits for the tokens of the iteration before, has drafts made, and fills the places with them
                         while the model runs, the host's copies are written
    sample_tokens        a draft shorter than its places ends there: what was sampled behind it is removed
      _bookkeeping_sync  the last tokens stay on the device, as a drafter on the device leaves them

A place is filled by what `SchedulerOutput.scheduled_spec_decode_tokens` names then. A draft that begins with -1 is the
workers' own, and -1 after a token is padding. Where the model runs in other processes, drafts are made before the
iteration is sent there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import numpy as np
import torch

from tltlab.arrays import Array
from tltlab.errors import ConfigError

from . import attached, missing, replaced, replacing
from .runners import NoProposer, model_runners

ATTRIBUTE = "tltlab_late"
"""Attribute of a model runner for its `LateDrafts`, None where it takes none."""


class LateDrafts:
    """Places for drafts in the iteration that a runner prepares; `ask` names the drafts in its `SchedulerOutput`."""

    ask: Callable[[Any], object] | None = None

    def __init__(self, runner) -> None:
        self._runner = runner
        self._nothing = torch.zeros(1, dtype=torch.int32, device=runner.device)
        self._early = runner.supports_mm_inputs or runner.enable_prompt_embeds
        self._output: Any = None
        self._metadata: Any = None
        self._by_workers = False
        self._kept: Array | None = None
        self._drafts: Mapping[str, list[int]] = {}

    def begin(self, output, *_) -> None:
        """Note an iteration that begins, and make vLLM put zeros into places for which the workers made no drafts."""
        runner, self._output, self._metadata, self._kept = self._runner, output, None, None
        num_places = max(map(len, output.scheduled_spec_decode_tokens.values()), default=0)
        made, before = runner._draft_token_ids, runner.input_batch.prev_sampled_token_ids
        self._by_workers = (
            not isinstance(runner.drafter, NoProposer)
            and isinstance(made, torch.Tensor)
            and made.shape[1] >= num_places
        )
        if num_places and not self._by_workers:
            runner._draft_token_ids = self._nothing.expand(0 if before is None else len(before), num_places)
            runner.prev_num_spec_tokens, runner._draft_token_req_ids = num_places, None

    def found(self, metadata) -> None:
        """Note where the iteration's drafts are in the inputs; models with other inputs than tokens embed them next."""
        self._metadata = metadata
        if self._early:
            self.fill()

    def fill(self, *_) -> None:
        """Wait for drafts and put them into the inputs, once."""
        runner, output, metadata = self._runner, self._output, self._metadata
        self._output = self._metadata = None
        if metadata is None or output is None or not output.scheduled_spec_decode_tokens:
            return
        where = metadata.logits_indices[metadata.target_logits_indices + 1].long()
        counts = np.array(metadata.num_draft_tokens)
        ends = np.append(0, counts.cumsum())
        if self.ask is not None:
            self.ask(output)
        names, drafts = runner.input_batch.req_ids, output.scheduled_spec_decode_tokens
        tokens = np.array([token for name in names for token in drafts.get(name, ())], np.int32)
        kept = np.diff(np.append(0, (tokens >= 0).cumsum())[ends])
        own = (kept > 0) | (not self._by_workers)
        places = np.flatnonzero(own.repeat(counts))
        if not len(places):
            return
        # On the stream of the forward pass, before it.
        values = self._on_device(tokens[places].clip(0))
        if len(places) == len(tokens):
            metadata.draft_token_ids.copy_(values)
        else:
            at = self._on_device(places)
            metadata.draft_token_ids[at], where = values, where[at]
        runner.input_ids.gpu[where] = values
        self._drafts, kept = drafts, np.where(own, kept, counts)
        self._kept = kept if (kept < counts).any() else None

    def write(self, _) -> None:
        """Write drafts to the host's copies, by which vLLM computes penalties and validates by grammars."""
        runner, drafts, self._drafts = self._runner, self._drafts, {}
        if not drafts:
            return
        index: Mapping[str, int] = {}
        if self._by_workers and runner._draft_token_req_ids is not None:
            runner.draft_token_ids_event.synchronize()
            index = {name: row for row, name in enumerate(runner._draft_token_req_ids)}
        for row, name in enumerate(runner.input_batch.req_ids):
            draft = drafts.get(name)
            if draft and not (self._by_workers and draft[0] < 0):
                filled = runner.input_batch.spec_token_ids[row]
                filled[:] = [max(token, 0) for token in draft]
                if name in index:
                    runner.draft_token_ids_cpu[index[name], : len(filled)] = torch.tensor(filled)

    def cut(self, output) -> None:
        """Remove sampled tokens [batch, places + 1] behind drafts that are shorter than their places."""
        if self._kept is not None:
            sampled = output.sampled_token_ids
            kept = self._on_device(self._kept)
            sampled.masked_fill_(torch.arange(sampled.shape[1], device=sampled.device) > kept[:, None], -1)

    def keep(self, _, output, *__) -> None:
        """Keep the last tokens and their counts on the device, for the next iteration's inputs."""
        runner, sampled = self._runner, output.sampled_token_ids
        if sampled.shape[1] == 1 or runner.input_batch.prev_sampled_token_ids is not None:
            return
        counts = (sampled >= 0).sum(1)
        counts.masked_fill_(runner.discard_request_mask.gpu[: len(sampled)], 0)
        last = sampled.gather(1, (counts - 1).clamp(min=0)[:, None])[:, 0]
        runner._copy_valid_sampled_token_count(last, counts.int())

    def _on_device(self, numbers: Array) -> torch.Tensor:
        tensor, device = torch.from_numpy(numbers), self._runner.device
        return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


def schedule_host_drafts() -> None:
    """Let engines with drafts of the host schedule asynchronously where their runner takes late drafts, only there."""
    from vllm.config import vllm as configs

    @replacing(configs.VllmConfig, "__post_init__")
    def check(stock, self, *args) -> None:
        scheduling = self.scheduler_config
        if not attached(self).get("host_drafts") or scheduling.async_scheduling is False:
            stock(self, *args)
        elif without := missing("late drafts"):
            if scheduling.async_scheduling:
                raise ConfigError(f"{without}: leave async_scheduling out")
            scheduling.async_scheduling = False
            stock(self, *args)
        else:
            # vLLM refuses custom drafters under asynchronous scheduling: others' need tokens that are not there yet.
            allowed = Literal[(*get_args(configs.NgramGPUTypes), "custom_class")]  # type: ignore[valid-type]
            with replaced(configs, "NgramGPUTypes", allowed):
                stock(self, *args)


def take_late_drafts() -> None:
    """Make V1 runners of engines with drafts of the host take them late, under asynchronous scheduling."""
    V1Runner, _ = model_runners()

    @replacing(V1Runner, "__init__")
    def start(stock, self, *args, **kwargs) -> None:
        stock(self, *args, **kwargs)
        if attached(self.vllm_config).get("host_drafts") and self.use_async_spec_decode:
            setattr(self, ATTRIBUTE, LateDrafts(self))

    def around(
        name: str, before: Callable[..., object] | None = None, after: Callable[[LateDrafts, Any], object] | None = None
    ) -> None:
        @replacing(V1Runner, name)
        def method(stock, self, *args, **kwargs):
            late = vars(self).get(ATTRIBUTE)
            if late is not None and before is not None:
                before(late, *args)
            result = stock(self, *args, **kwargs)
            if late is not None and after is not None:
                after(late, result)
            return result

    around("execute_model", LateDrafts.begin, LateDrafts.write)
    around("_calc_spec_decode_metadata", after=LateDrafts.found)
    around("_model_forward", LateDrafts.fill)
    around("_sample", after=LateDrafts.cut)
    around("_bookkeeping_sync", LateDrafts.keep)
