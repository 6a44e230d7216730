"""A Hugging Face causal model as trainers use it: packed tokens in, log-probs out, sharded over ranks if need be."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from tltlab.arrays import Tokens
from tltlab.errors import ConfigError
from tltlab.runtime.engine.weights import Home, TensorMeta

from .attention import causal_attention
from .logprobs import distributions, token_logprobs

PACKED = "tltlab_packed"
"""Name of the attention that transformers' models are loaded with."""

_OTHER_LOGITS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedTokens:
    """Sequences back to back, T tokens in all, and the R positions whose next token is one of a response.

    token_ids and positions [1, T], boundaries [sequences + 1] as FlashAttention takes them, rows and next_tokens [R] in
    the order of sequences. Without sequences it is one token that nothing is asked of: a rank with nothing to do
    still takes part in the collectives of a sharded model.
    """

    token_ids: Tensor
    positions: Tensor
    boundaries: Tensor
    longest: int
    rows: Tensor
    next_tokens: Tensor

    @classmethod
    def of(
        cls, pairs: Sequence[tuple[Sequence[int] | Tokens, Sequence[int] | Tokens]], device: torch.device
    ) -> PackedTokens:
        """From (prompt, response) pairs; a prompt has one token at least."""
        pairs = pairs or [([0], [])]
        lengths = [len(prompt) + len(response) for prompt, response in pairs]
        starts = [0, *accumulate(lengths)]
        rows = [
            torch.arange(start + len(prompt) - 1, start + len(prompt) + len(response) - 1)
            for start, (prompt, response) in zip(starts, pairs, strict=False)
        ]
        flat = torch.from_numpy(np.concatenate([np.asarray(part, np.int64) for pair in pairs for part in pair]))
        picked = torch.cat(rows)
        return cls(
            token_ids=flat[None].to(device),
            positions=torch.cat([torch.arange(length) for length in lengths])[None].to(device),
            boundaries=torch.tensor(starts, dtype=torch.int32).to(device),
            longest=max(lengths),
            rows=picked.to(device),
            # The last row of a sequence may have no next token; only rows before a response token are picked.
            next_tokens=flat[picked + 1].to(device),
        )


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    sliding_window: int | None = None,
    **other: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each packed sequence, as transformers' AttentionInterface calls it.

    Queries (1, heads, T, D), keys and values (1, KV heads, T, D); returns (1, T, heads, D). FlashAttention's varlen
    kernel on CUDA in half precision, else one call per sequence. Dropout is never applied.
    """
    assert cu_seq_lens_q is not None
    assert max_length_q is not None
    assert sliding_window is None
    assert other.get("softcap") is None
    assert other.get("s_aux") is None
    if query.is_cuda and query.dtype in (torch.float16, torch.bfloat16):
        attended = varlen_attn(
            query[0].transpose(0, 1),
            key[0].transpose(0, 1),
            value[0].transpose(0, 1),
            cu_seq_lens_q,
            cu_seq_lens_q,
            max_length_q,
            max_length_q,
            scale=scaling,
            window_size=(-1, 0),
            enable_gqa=query.shape[1] != key.shape[1],
        )
        assert isinstance(attended, Tensor)  # which it is without `return_aux`
        return attended[None], None
    if scaling is not None:
        query = query * (scaling * query.shape[-1] ** 0.5)
    lengths = cu_seq_lens_q.diff().tolist()
    return causal_attention(query, key, value, lengths).transpose(1, 2).contiguous(), None


AttentionInterface.register(PACKED, packed_attention)


class PolicyModel(nn.Module):
    """Log-probs of response tokens under a causal model at `temperature`. On a CPU its weights may have a `home`.

    Everything happens in `forward`, the LM head too: FSDP2 gathers a module's parameters around its forward alone.
    """

    def __init__(self, model: PreTrainedModel, temperature: float) -> None:
        super().__init__()
        self.model = model
        self.temperature = temperature
        self.home: Home | None = None

    def forward(self, batch: PackedTokens, *, whole: bool = False) -> Tensor:
        """[R] log-probs of `batch.next_tokens`, or `whole` rows [R, V] of which those are entries; float32."""
        hidden: Tensor = self.model.base_model(
            input_ids=batch.token_ids,
            position_ids=batch.positions,
            use_cache=False,
            cu_seq_lens_q=batch.boundaries,
            cu_seq_lens_k=batch.boundaries,
            max_length_q=batch.longest,
            max_length_k=batch.longest,
        ).last_hidden_state[0]
        # Only positions before a response token need logits: prompts would waste the vocabulary projection.
        asked = hidden[batch.rows]
        head = self.model.get_output_embeddings().weight
        if whole:
            return distributions(asked, head, self.temperature)
        logprobs = token_logprobs(asked, head, batch.next_tokens, self.temperature)
        # The sum of nothing keeps all parameters in the graph where no row is asked for.
        return logprobs + 0.0 * hidden[:1].float().sum()


def load_policy_model(
    model: str, temperature: float, *, device: torch.device, mesh: DeviceMesh | None, dtype: torch.dtype
) -> PolicyModel:
    """The model of a folder or an id with float32 weights on `device`; ConfigError for one that cannot be trained here.

    With a `mesh` it is sharded over its ranks, layer by layer, and computes in `dtype` with gradients reduced in
    float32: rank 0 reads the weights and hands them on, so the host holds one copy of them and no device a whole one.
    """
    try:
        config = AutoConfig.from_pretrained(model)
        check_trainable(config, model)
        if mesh is None or mesh.get_rank() == 0:
            made = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation=PACKED)
        else:
            with torch.device("meta"):
                made = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=PACKED)
            made.to_empty(device="cpu")
            made.tie_weights()
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot load a model from {model}: {' '.join(str(error).split())[:300]}") from error
    if getattr(made.get_output_embeddings(), "bias", None) is not None:
        raise ConfigError(f"{model}: its LM head has a bias, which the trainer does not know: choose another model")
    policy = PolicyModel(made, temperature)
    if mesh is None:
        policy.to(device)
        policy.home = Home(made.state_dict(keep_vars=True).values()) if device.type == "cpu" else None
        return policy
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for module in [*_layers(made), policy]:
        for tensor in chain(module.parameters(), module.buffers()):
            if not isinstance(tensor, DTensor):
                tensor.data = tensor.data.to(device)
                if mesh.size() > 1:
                    dist.broadcast(tensor.data, 0)
        fully_shard(module, mesh=mesh, mp_policy=precision)
    return policy


def checkpoint_activations(model: PreTrainedModel) -> None:
    """Let layers keep their inputs alone and compute the rest again for the gradient.

    transformers does so in training mode only, which dropout would follow: layers are in it, not what is in them.
    """
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for layer in _layers(model):
        layer.training = True


def _layers(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def check_trainable(config: PretrainedConfig, model: str) -> None:
    """ConfigError for a model whose attention or logits are not what the trainer computes."""
    layers = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    if any(kind != "full_attention" for kind in layers) if layers else window is not None:
        raise ConfigError(
            f"{model}: a model with other layers than full attention (sliding windows, linear attention) cannot be "
            "trained on packed sequences here: choose one without"
        )
    for name in _OTHER_LOGITS:
        if getattr(config, name, None) not in (None, 1.0):
            raise ConfigError(f"{model}: the trainer does not know {name}, which changes its logits: choose another")


class WholeTensors:
    """Parameters and persistent buffers of a model by name, gathered one after the other; floating ones in `dtype`.

    What is tied comes once. All ranks of a sharded model iterate in step, and each gets what is gathered, on its
    device. `names` picks some. A `weights.Source`.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype, names: Sequence[str] | None = None) -> None:
        self._module, self._dtype, self._names = module, dtype, names

    def metadata(self) -> list[TensorMeta]:
        """What will come, without gathering it."""
        return [TensorMeta(name, self._dtype_of(tensor), tuple(tensor.shape)) for name, tensor in self._tensors()]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._tensors():
            whole = tensor.detach()
            whole = whole.full_tensor() if isinstance(whole, DTensor) else whole
            yield name, whole.to(self._dtype_of(tensor))

    def _tensors(self) -> list[tuple[str, Tensor]]:
        state = self._module.state_dict(keep_vars=True)
        first = {id(tensor): name for name, tensor in reversed(state.items())}
        return [(name, state[name]) for name in self._names or state if first[id(state[name])] == name]

    def _dtype_of(self, tensor: Tensor) -> torch.dtype:
        return self._dtype if tensor.is_floating_point() else tensor.dtype
