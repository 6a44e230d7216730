"""Changes to vLLM's model runners: drafting is timed, and an iteration without drafts costs what a plain one does.

An iteration of the V1 runner, in order, and the changes to each step:

    execute_model            no drafts to verify and none to make: speculation is hidden from the runner
    sample_tokens            the same
      _sample                no drafts to verify: ordinary sampling in place of rejection sampling
      propose_draft_token_ids  timed
    take_draft_token_ids     the seconds of drafting travel with the drafts
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

from . import guarded_call, replaced, replacing

if TYPE_CHECKING:
    from tltlab.runtime.engine.graphs import CapturedGraphs, Kind


def bypass_speculation() -> None:
    """Make the V1 runner run an iteration without drafts as an engine built without speculation does.

    Stock vLLM gathers the logits of no drafts, samples by rejection and proposes. That stays where the workers draft,
    whose network runs its first pass in each iteration, and for hybrid models (Mamba), whose states depend on the
    drafts. Sampled tokens do not depend on any of this. After the first exception in this code the runner is stock
    vLLM's for good.
    """
    V1Runner, _ = model_runners()

    @replacing(V1Runner, "execute_model")
    def execute_model(stock, self, scheduler_output, *args, **kwargs):
        plain = guarded_call(self, _begins_plain, self, scheduler_output, otherwise=False)
        with replaced(self, "speculative_config", None) if plain else nullcontext():
            return stock(self, scheduler_output, *args, **kwargs)

    @replacing(V1Runner, "sample_tokens")
    def sample_tokens(stock, self, *args, **kwargs):
        plain = guarded_call(self, _ends_plain, self, otherwise=False)
        with replaced(self, "speculative_config", None) if plain else nullcontext():
            return stock(self, *args, **kwargs)

    @replacing(V1Runner, "_sample")
    def sample(stock, self, logits, spec_decode_metadata):
        # Rejection sampling draws more random numbers, even without drafts.
        drafts = guarded_call(self, _has_drafts, spec_decode_metadata, otherwise=True)
        # It counts the rows of logits by drafts, and here each request has one.
        budgets = None if drafts else getattr(self.input_batch, "thinking_budget_state_holder", None)
        with nullcontext() if budgets is None else replaced(budgets, "in_spec_mode", False):
            return stock(self, logits, spec_decode_metadata if drafts else None)


def _begins_plain(runner, output) -> bool:
    """True if the iteration that `output` schedules neither verifies drafts nor makes any in the runner."""
    plain: bool = (
        not output.scheduled_spec_decode_tokens
        and isinstance(getattr(runner, "drafter", None), NoProposer)
        and not runner.model_config.is_hybrid
    )
    runner.tltlab_plain = plain
    return plain


def _ends_plain(runner) -> bool:
    """True if the iteration under way is plain and has computed something."""
    return vars(runner).get("tltlab_plain", False) and runner.execute_model_state is not None


def _has_drafts(metadata) -> bool:
    return metadata is not None and any(metadata.num_draft_tokens)


class NoProposer:
    """A `custom_class` proposer that drafts nothing: model-free drafts are made next to the scheduler."""

    def __init__(self, vllm_config):
        pass

    def load_model(self, *args, **kwargs) -> None:
        """Load nothing."""

    def propose(self, sampled_token_ids: list[list[int]], *args, **kwargs) -> list[list[int]]:
        return [[] for _ in sampled_token_ids]


def model_runners() -> tuple[Any, Any]:
    """vLLM's V1 and V2 model runners."""
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as V2Runner
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as V1Runner

    return V1Runner, V2Runner


def time_drafting() -> None:
    """Attach to the drafts that a model runner hands over the seconds that drafting took, as `draft_s`.

    On CUDA the time is the device's, between two events. Under asynchronous scheduling drafts are not handed over.
    """
    V1Runner, V2Runner = model_runners()

    @replacing(V1Runner, "propose_draft_token_ids")
    def propose(stock, self, *args, **kwargs):
        return _call_timed(self, stock, self, *args, **kwargs)

    for runner in (V1Runner, V2Runner):
        replacing(runner, "take_draft_token_ids")(_take_with_time)


class _DeviceStopwatch:
    """Seconds from `start` to `stop`, on the device where there is one."""

    events: tuple[Any, Any] | None = None
    seconds = 0.0

    def start(self) -> None:
        if torch.cuda.is_available():
            self.events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            self.events[0].record()
        self.seconds = -time.perf_counter()

    def stop(self) -> None:
        self.seconds += time.perf_counter()
        if self.events is not None:
            self.events[1].record()

    def read(self) -> float:
        """Return the seconds of the last interval, and reset them."""
        seconds, events = self.seconds, self.events
        if events is not None:
            events[1].synchronize()
            seconds = events[0].elapsed_time(events[1]) / 1e3
        self.seconds, self.events = 0.0, None
        return seconds


def _call_timed(runner, draft, *args, **kwargs):
    guarded_call(runner, lambda: _stopwatch(runner).start())
    result = draft(*args, **kwargs)
    guarded_call(runner, lambda: _stopwatch(runner).stop())
    return result


def _take_with_time(stock, self):
    guarded_call(self, _time_speculator, self)
    drafts = stock(self)
    if drafts is not None:
        guarded_call(self, lambda: setattr(drafts, "draft_s", _stopwatch(self).read()))
    return drafts


def _time_speculator(runner) -> None:
    """Time the V2 runner's drafter, a separate object; its first drafts are not timed."""
    speculator = getattr(runner, "speculator", None)
    if speculator is not None and not hasattr(speculator.propose, "tltlab"):
        replacing(speculator, "propose")(lambda propose, *args, **more: _call_timed(runner, propose, *args, **more))


def _stopwatch(runner) -> _DeviceStopwatch:
    watch: _DeviceStopwatch = runner.__dict__.setdefault("tltlab_stopwatch", _DeviceStopwatch())
    return watch


def held_bytes(worker) -> dict[str, int]:
    """Bytes of a rank's weights and caches, by the names of a dry run: the target's, and the draft model's own."""
    runner = getattr(worker, "worker", worker).model_runner
    target = _weight_bytes(runner.get_model())
    drafter = getattr(runner, "drafter", None) or getattr(runner, "speculator", None)
    model = getattr(drafter, "model", None)
    of_drafter_model = {} if model is None else _weight_bytes(model)
    layers = runner.vllm_config.compilation_config.static_forward_context
    caches = {name: getattr(layer, "kv_cache", None) for name, layer in layers.items()}
    # The V1 runner's proposers and the V2 runner's speculators use different names.
    names = ("_draft_attn_layer_names", "draft_attn_layer_names")
    of_drafter = {layer for name in names for layer in getattr(drafter, name, ())}
    sizes = {name: cache.nbytes for name, cache in caches.items() if isinstance(cache, torch.Tensor)}
    return {
        "engine weights": sum(target.values()),
        "drafter, serving": sum(size for place, size in of_drafter_model.items() if place not in target),
        "KV cache": sum(size for name, size in sizes.items() if name not in of_drafter),
        "KV cache, drafter": sum(size for name, size in sizes.items() if name in of_drafter),
    }


def _weight_bytes(model) -> dict[int, int]:
    """Return the bytes of a model's weights by address; weights packed by the CPU build, by their owner."""
    sizes: dict[int, int] = {}
    value = next((tensor.element_size() for tensor in model.parameters() if tensor.is_floating_point()), 0)
    for module in model.modules():
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            storage = tensor.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
        # vLLM replaces the parameter by a function around oneDNN's matrix.
        cells = getattr(getattr(module, "cpu_linear", None), "__closure__", None) or ()
        for handler in (cell.cell_contents for cell in cells):
            if hasattr(handler, "handler_tensor"):
                sizes[id(handler)] = handler.n * handler.k * value
    return sizes


GRAPH_KINDS: Mapping[str, Kind] = {"FULL": "full", "PIECEWISE": "piecewise", "NONE": "eager"}
"""Kind of CUDA graph by vLLM's name of the runtime mode."""


def keep_captured_bytes(*runners) -> None:
    """Make model runners of these classes keep what `capture_model` returns; call it before the engine starts.

    vLLM 0.32 logs that number ("Graph capturing finished in ... secs, took ... GiB") and forgets it.
    """

    def capture_model(stock, self, *args, **kwargs):
        self.tltlab_captured_bytes = stock(self, *args, **kwargs)
        return self.tltlab_captured_bytes

    for runner in runners:
        replacing(runner, "capture_model")(capture_model)


def captured_graphs(worker) -> CapturedGraphs:
    """CUDA graphs that a vLLM worker has captured."""
    from tltlab.runtime.engine.graphs import CapturedGraphs

    runner = worker.model_runner
    dispatcher = getattr(runner, "cudagraph_dispatcher", None)
    if dispatcher is not None:
        by_kind = {GRAPH_KINDS[mode.name]: descs for mode, descs in dispatcher.get_capture_descs()}
        full = {(d.num_tokens, d.num_tokens // d.num_reqs - 1 if d.uniform else None) for d in by_kind.get("full", ())}
        mode = dispatcher.cudagraph_mode
    else:
        manager = runner.cudagraph_manager
        by_kind = {GRAPH_KINDS[mode.name]: descs for mode, descs in manager._capture_descs.items()}
        lengths = [(d.num_tokens, d.uniform_token_count) for d in by_kind.get("full", ())]
        full = {(tokens, None if each is None else each - 1) for tokens, each in lengths}
        mode = manager.cudagraph_mode
    return CapturedGraphs(
        runner="V2" if dispatcher is None else "V1",
        mode=mode.name,
        full=tuple(sorted(full, key=lambda graph: (graph[0], graph[1] or 0))),
        piecewise=tuple(sorted({d.num_tokens for d in by_kind.get("piecewise", ())})),
        # None where nothing was captured.
        num_bytes=getattr(runner, "tltlab_captured_bytes", None) or None,
    )
