"""A trainer rank's side of the transfer of new weights to engines."""

from __future__ import annotations

from typing import Any

from tltlab.runtime.engine.weights import BucketSlots, Engines, ModelMemory, WeightSource, load_buckets


class WeightSender:
    """Rank 0 sends, the others help to gather. `model_memory`: the memory that holds the weights."""

    def __init__(self, source: WeightSource, rank: int, model_memory: ModelMemory | None = None) -> None:
        self.source, self.rank, self.model_memory = source, rank, model_memory
        self._slots: BucketSlots | None = None
        self._device: Any = None

    def send(self, engines: Engines) -> dict[int, str]:
        """Send the source's weights to engines; return the errors of those that failed, by number."""
        if engines.transport != "host":
            from tltlab.runtime.engine.vllm.transfer import DeviceSender

            if self._device is None or self._device.transport != engines.transport:
                self._device = DeviceSender(self.source, self.rank, engines.transport)
            self._device.send(engines)
        elif self.rank:
            for _ in self.source:
                pass
        else:
            self._send(engines)
        return engines.failed

    def _send(self, engines: Engines) -> None:
        bucket = self.model_memory.bucket(self.source) if self.model_memory is not None else None
        if self.model_memory is not None and bucket is not None:
            engines.start_weight_update(self.model_memory)
            if not engines.far:
                engines.wait(engines.load(bucket, self.model_memory.memory.numpy()))
                engines.finish_weight_update()
                return
        if self._slots is None:
            self._slots = BucketSlots.fit(self.source.metadata())
        if bucket is None:
            engines.start_weight_update(self._slots)
        load_buckets(self.source, self._slots, engines)
