"""Prompts without token ids: a recording tells them apart by all that makes them, and knows their lengths."""

from types import SimpleNamespace

import pytest
import torch

from tltlab.runtime.engine.requests import Observer

pytestmark = pytest.mark.engine


def asked(name, ids=(1, 9, 5), rows=None, images=(), adapter=None, salt=None):
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.v1.request import Request

    embeds = None if rows is None else torch.arange(rows * 4, dtype=torch.bfloat16).view(rows, 4)
    lora = None if adapter is None else LoRARequest(adapter, 1, "/adapter")
    request = Request(
        name, None if embeds is not None else list(ids), SamplingParams(max_tokens=4), None,
        prompt_embeds=embeds, lora_request=lora, cache_salt=salt,
    )  # fmt: skip
    request.mm_features = [SimpleNamespace(identifier=image) for image in images]
    return request


KINDS = [
    {}, {"ids": (1, 9, 6)}, {"rows": 9}, {"rows": 11}, {"images": ["a"]}, {"images": ["b"]}, {"adapter": "a"},
    {"adapter": "b"}, {"salt": "a"}, {"salt": "b"},
]  # fmt: skip


def test_prompts_are_told_apart_by_all_that_makes_them():
    from tltlab.runtime.engine.vllm.options import Attachment
    from tltlab.runtime.engine.vllm.scheduler import Watch

    arrived = []
    control = Attachment().control(overlapped=False)
    observer = Observer()
    observer.arrived = arrived.append
    control.observers = (*control.observers, observer)
    watch = Watch(SimpleNamespace(requests={}), control, Attachment())
    for number, kind in enumerate([*KINDS, *KINDS]):
        request = asked(str(number), **kind)
        watch.enters(request)
        watch.entered(request)
    prompts = [live.prompt_id for live in arrived]
    assert len(set(prompts)) == len(KINDS)
    assert prompts[len(KINDS) :] == prompts[: len(KINDS)]
    assert [live.key[2] for live in arrived] == [0] * len(KINDS) + [1] * len(KINDS)
    assert [live.num_prompt_tokens for live in arrived[: len(KINDS)]] == [3, 3, 9, 11, 3, 3, 3, 3, 3, 3]
