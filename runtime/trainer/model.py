"""A Hugging Face causal model for trainers: packed tokens in, log-probs out, sharded over ranks if need be."""

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
from tltlab.errors import ConfigError, one_line, refuse
from tltlab.runtime.engine.weights import ModelMemory, TensorMeta
from tltlab.runtime.recipe.rules import undivided_heads

from .attention import ALONE, SequenceGroup, causal_attention

PACKED = "tltlab_packed"
"""Name of the attention that transformers' models are loaded with."""

_OTHER_LOGITS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedTokens:
    """Sequences back to back, T tokens in all, and the R positions whose next token is one of a response.

    Each of P ranks that share a batch has T / P tokens, token_ids and positions [1, T / P], and r of the R
    positions. Its rows and next_tokens [r], in the order of sequences, are numbers `own` of `num_rows`. boundaries
    [sequences + 1], as FlashAttention takes them, are those of all T. Padding tokens that make T a multiple of P are a
    sequence of their own, without rows. Without sequences there is one such token per rank: an idle rank still takes
    part in the collectives of a sharded model.
    """

    token_ids: Tensor
    positions: Tensor
    boundaries: Tensor
    longest: int
    rows: Tensor
    next_tokens: Tensor
    own: slice
    num_rows: int

    @classmethod
    def of(
        cls,
        pairs: Sequence[tuple[Sequence[int] | Tokens, Sequence[int] | Tokens]],
        device: torch.device,
        ranks: SequenceGroup,
    ) -> PackedTokens:
        """Pack (prompt, response) pairs; a prompt has at least one token."""
        num_tokens = sum(map(len, chain.from_iterable(pairs)))
        filling = -num_tokens % ranks.size if pairs else ranks.size
        pairs = [*pairs, ([0] * filling, [])] if filling else pairs
        lengths = [len(prompt) + len(response) for prompt, response in pairs]
        starts = [0, *accumulate(lengths)]
        rows = [
            torch.arange(start + len(prompt) - 1, start + len(prompt) + len(response) - 1)
            for start, (prompt, response) in zip(starts, pairs, strict=False)
        ]
        flat = torch.from_numpy(np.concatenate([np.asarray(part, np.int64) for pair in pairs for part in pair]))
        positions = torch.cat([torch.arange(length) for length in lengths])
        picked = torch.cat(rows)
        share = len(flat) // ranks.size
        begin, end = ranks.rank * share, (ranks.rank + 1) * share
        own = slice(*torch.searchsorted(picked, torch.tensor([begin, end])).tolist())
        return cls(
            token_ids=flat[None, begin:end].to(device),
            positions=positions[None, begin:end].to(device),
            boundaries=torch.tensor(starts, dtype=torch.int32).to(device),
            longest=max(lengths),
            rows=(picked[own] - begin).to(device),
            # The last row of a sequence may have no next token; only rows before a response token are picked.
            next_tokens=flat[picked[own] + 1].to(device),
            own=own,
            num_rows=len(picked),
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
    sequence_ranks: SequenceGroup = ALONE,
    **options: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each packed sequence, as transformers' AttentionInterface calls it.

    Queries (1, heads, T / P, D), keys and values (1, KV heads, T / P, D) of this one of P `sequence_ranks`; returns (1,
    T / P, heads, D). FlashAttention's varlen kernel on CUDA in half precision, else one call per sequence. Dropout is
    never applied.
    """
    assert cu_seq_lens_q is not None
    assert max_length_q is not None
    assert sliding_window is None
    assert options.get("softcap") is None
    assert options.get("s_aux") is None
    query, key, value = (sequence_ranks.swap(tensor[0])[None] for tensor in (query, key, value))
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
        return sequence_ranks.swap(attended)[None], None
    if scaling is not None:
        query = query * (scaling * query.shape[-1] ** 0.5)
    lengths = cu_seq_lens_q.diff().tolist()
    attended = causal_attention(query, key, value, lengths)[0].transpose(0, 1).contiguous()
    return sequence_ranks.swap(attended)[None], None


AttentionInterface.register(PACKED, packed_attention)


class PolicyModel(nn.Module):
    """Log-probs of response tokens under a causal model at `temperature`. On a CPU `model_memory` may hold its weights.

    Everything happens in `forward`, the LM head too: FSDP2 gathers a module's parameters around its forward alone.
    """

    def __init__(self, model: PreTrainedModel, temperature: float, sequence_ranks: SequenceGroup) -> None:
        super().__init__()
        self.model = model
        self.temperature = temperature
        self.model_memory: ModelMemory | None = None
        self.sequence_ranks = sequence_ranks

    def forward(self, batch: PackedTokens, *, whole: bool = False) -> Tensor:
        """Return [R] log-probs of the responses' tokens, or their `whole` rows [R, V]; float32.

        `batch` is this rank's share of a micro-batch; all `sequence_ranks` call it, and each gets all R.
        """
        hidden: Tensor = self.model.base_model(
            input_ids=batch.token_ids,
            position_ids=batch.positions,
            use_cache=False,
            cu_seq_lens_q=batch.boundaries,
            cu_seq_lens_k=batch.boundaries,
            max_length_q=batch.longest,
            max_length_k=batch.longest,
            sequence_ranks=self.sequence_ranks,
        ).last_hidden_state[0]
        # Only positions before a response token need logits: prompts would waste the vocabulary projection.
        states = hidden[batch.rows]
        head = self.model.get_output_embeddings().weight
        if whole:
            rows = distributions(states, head, self.temperature)
            return self.sequence_ranks.join(rows, batch.own, batch.num_rows)
        logprobs = token_logprobs(states, head, batch.next_tokens, self.temperature)
        # An empty sum keeps all parameters in the graph of a rank without rows.
        logprobs = logprobs + 0.0 * hidden[:1].float().sum()
        return self.sequence_ranks.join(logprobs, batch.own, batch.num_rows)


def load_policy_model(
    model: str,
    temperature: float,
    *,
    device: torch.device,
    mesh: DeviceMesh | None,
    dtype: torch.dtype,
    sequence_ranks: SequenceGroup,
) -> PolicyModel:
    """Load the model of a folder or an id with float32 weights on `device`; ConfigError if it cannot be trained here.

    With a `mesh` the model is sharded over its ranks, layer by layer, and computes in `dtype` with gradients reduced in
    float32. Rank 0 reads and sends the weights: the host holds one copy, and no device a whole one.
    """
    try:
        config = AutoConfig.from_pretrained(model)
        check_trainable(config, model, sequence_ranks.size)
        if mesh is None or mesh.get_rank() == 0:
            network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation=PACKED)
        else:
            with torch.device("meta"):
                network = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=PACKED)
            network.to_empty(device="cpu")
            network.tie_weights()
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot load a model from {model}: {one_line(error)[:300]}") from error
    if getattr(network.get_output_embeddings(), "bias", None) is not None:
        raise ConfigError(f"{model}: its LM head has a bias, which the trainer does not support: choose another model")
    policy = PolicyModel(network, temperature, sequence_ranks)
    if mesh is None:
        policy.to(device)
        policy.model_memory = ModelMemory(network.state_dict(keep_vars=True).values()) if device.type == "cpu" else None
        return policy
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for module in [*_layers(network), policy]:
        for tensor in chain(module.parameters(), module.buffers()):
            if not isinstance(tensor, DTensor):
                tensor.data = tensor.data.to(device)
                if mesh.size() > 1:
                    dist.broadcast(tensor.data, 0)
        fully_shard(module, mesh=mesh, mp_policy=precision)
    return policy


def checkpoint_activations(model: PreTrainedModel) -> None:
    """Let layers keep their inputs alone and recompute the rest for the gradient.

    transformers does so in training mode only, in which dropout is active: only layers are put in it, not their
    submodules.
    """
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for layer in _layers(model):
        layer.training = True


def _layers(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def check_trainable(config: PretrainedConfig, model: str, sequence_parallel: int) -> None:
    """Raise ConfigError for a model with attention or logits that the trainer does not compute."""
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    refuse(undivided_heads(sequence_parallel, model, heads, kv_heads))
    rope = getattr(config, "rope_parameters", None) or {}
    if sequence_parallel > 1 and rope.get("rope_type") in ("dynamic", "longrope"):
        raise ConfigError(f"{model}: its rotary embedding ({rope['rope_type']}) needs train.sequence_parallel = 1")
    layers = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    if any(kind != "full_attention" for kind in layers) if layers else window is not None:
        raise ConfigError(f"{model}: only full attention can be trained here, no sliding windows or linear attention")
    for name in _OTHER_LOGITS:
        if getattr(config, name, None) not in (None, 1.0):
            raise ConfigError(f"{model}: the trainer does not support {name}, which changes its logits: choose another")


class WholeTensors:
    """Parameters and persistent buffers of a model by name, gathered one by one; floating ones in `dtype`.

    Tied tensors come once. All ranks of a sharded model iterate in step, and each gets the gathered tensor, on its
    device. `names` selects some. A `weights.WeightSource`.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype, names: Sequence[str] | None = None) -> None:
        self._module, self._dtype, self._names = module, dtype, names

    def metadata(self) -> list[TensorMeta]:
        """Describe the tensors to come, without gathering them."""
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


LOGITS_AT_A_TIME = 1 << 26
"""Logits held at a time, 256 MiB in float32."""


def token_logprobs(hidden: Tensor, head: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    """Return log softmax(hidden @ head^T / temperature) at `tokens`: [R] in float32, natural logarithms.

    `hidden` [R, H] and `head` [V, H] of one dtype, `tokens` [R]. The softmax is in float32 for any dtype; the head's
    gradient is summed over chunks in float32. Gradients reach `hidden` and `head`.
    """
    return _TokenLogprobs.apply(hidden, head, tokens, temperature)  # type: ignore[no-any-return, no-untyped-call]


def distributions(hidden: Tensor, head: Tensor, temperature: float) -> Tensor:
    """Return log softmax(hidden @ head^T / temperature) whole: [R, V] in float32, without gradient."""
    with torch.no_grad():
        return torch.log_softmax((hidden @ head.T).float() / temperature, -1)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, tokens: Tensor, temperature: float) -> Tensor:
        logprobs = hidden.new_empty(len(hidden), dtype=torch.float32)
        normaliser = torch.empty_like(logprobs)
        for rows in _chunks(len(hidden), len(head)):
            logits = (hidden[rows] @ head.T).float().div_(temperature)
            normaliser[rows] = torch.logsumexp(logits, -1)
            logprobs[rows] = logits.gather(1, tokens[rows, None])[:, 0] - normaliser[rows]
        ctx.save_for_backward(hidden, head, tokens, normaliser)
        ctx.temperature = temperature
        return logprobs

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        hidden, head, tokens, normaliser = ctx.saved_tensors
        of_hidden = torch.empty_like(hidden)
        of_head = torch.zeros_like(head, dtype=torch.float32)
        for rows in _chunks(len(hidden), len(head)):
            logits = (hidden[rows] @ head.T).float().div_(ctx.temperature)
            # d logp / d logits = (one-hot - softmax) / temperature
            scale = gradient[rows, None] / ctx.temperature
            of_logits = logits.sub_(normaliser[rows, None]).exp_().mul_(-scale)
            of_logits.scatter_add_(1, tokens[rows, None], scale)
            of_logits = of_logits.to(head.dtype)
            of_hidden[rows] = of_logits @ head
            of_head += of_logits.T @ hidden[rows]
        return of_hidden, of_head.to(head.dtype), None, None


def _chunks(rows: int, vocabulary: int) -> list[slice]:
    size = max(LOGITS_AT_A_TIME // vocabulary, 1)
    return [slice(start, start + size) for start in range(0, rows, size)]
