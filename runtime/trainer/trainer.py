"""The trainer: log-probs of recorded responses and policy updates of a Hugging Face causal model, on one or more ranks.

Ranks share weights, gradients and optimizer state through FSDP2 and split every batch by tokens. Each rank has the
tokens of its own samples, and the data of all samples that determine advantages, weights and the order of mini-batches.
With `train.sequence_parallel` that many neighbours have the same samples and split each micro-batch (`SequenceGroup`):
together they are one data rank. Results are the same for any number of ranks and any size of micro-batches, up to
rounding; the same state and samples on the same number of ranks give the same bits.
"""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from io import IOBase
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.attention.varlen import varlen_attn
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
)

from tltlab.arrays import Tokens
from tltlab.errors import ConfigError, RunError, disk_full, one_line, refuse
from tltlab.files import Hashing, fsync_file, read_text, write_sum
from tltlab.records import Json, frozen
from tltlab.runtime.drafter.heads.head import mtp_weights, save_with_mtp
from tltlab.runtime.drafter.heads.target import FrozenTarget, is_mimo
from tltlab.runtime.engine.weights import (
    BucketSlots,
    Engines,
    WeightSource,
    load_buckets,
    write_adapter,
)
from tltlab.runtime.recipe.rules import undivided_heads
from tltlab.runtime.recipe.sections import LoraConfig, TrainConfig
from tltlab.runtime.run.memory import Peak, ProcessMemory, tensor_bytes

from .attention import ALONE, SequenceGroup, causal_attention
from .losses import (
    LossTokens,
    Mismatch,
    correction_weights,
    kl_estimate,
    load_objective,
    mismatch,
    mismatch_sums,
    policy_loss,
)
from .offload import HostPlaces, pinned, with_part
from .ranks import (
    device_of,
    make_deterministic,
    meet,
    micro_batches,
    ordinary_segments,
    own_micro_batches,
    sequence_groups,
)
from .samples import Pair, Sample, TrainingValues, UpdateBatch, minibatches_of, pairs_of
from .whole import WholeTensors, decoder_layers, local_part, whole_tensor

DRIFT_SAMPLES = 16
"""Responses on which an update's step is measured."""

TENSORS, STATE = "tensors", "state.json"

PACKED = "tltlab_packed"
"""Name of the attention that transformers' models are loaded with."""

_OTHER_LOGITS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")


@frozen
class UpdateMetrics:
    """Means over the mini-batches of an update; the first four are sums over micro-batches.

    `clip_fraction` and `kl` are means over their tokens, by weight, and `correction_mean` over those computed. `lr` is
    that of the last step. `drift_kl` is the k3 estimate of KL(policy before || policy after) per token, on some of the
    samples. `entropy` is that of the policy before, in nats at the sampling temperature: mean over all drawn tokens.
    """

    loss: float
    clip_fraction: float
    kl: float
    correction_mean: float
    grad_norm: float
    lr: float
    trained_responses: float
    drift_kl: float
    entropy: float


class Trainer:
    """One rank of `world`: its share of the policy and of its optimizer. All ranks call the same methods in turn.

    `rendezvous` is the meeting point of more than one rank: `file:///PATH` of a file that does not exist yet, on one
    machine, or `tcp://HOST:PORT`, where rank 0 listens. Weights are float32; in bfloat16, or with other ranks, the
    model is sharded (FSDP2) and casts them layer by layer. `max_response_tokens` is the cap of responses.
    """

    def __init__(
        self,
        model: str,
        config: TrainConfig,
        *,
        temperature: float,
        max_response_tokens: int,
        seed: int,
        rank: int = 0,
        world: int = 1,
        rendezvous: str | None = None,
        timeout_s: float = 600.0,
    ):
        torch.manual_seed(seed)
        torch.set_num_threads(config.threads)
        self.config = config
        self._objective = load_objective(config.objective, config)
        self._origin = model
        self.max_response_tokens = max_response_tokens
        self.seed = seed
        self.rank, self.world = rank, world
        self.device, self.dtype = device_of(config)
        if config.deterministic:
            make_deterministic()
        mesh: DeviceMesh | None = None
        if world > 1 or self.dtype == torch.bfloat16:
            meet(self.device, rank, world, rendezvous, timeout_s)
            mesh = init_device_mesh(self.device.type, (world,))
        # `_across`: one rank of each data rank; None: all ranks.
        self.sequence_ranks, self._across = sequence_groups(rank, world, config.sequence_parallel, timeout_s)
        self.data_ranks, self.data_rank = world // self.sequence_ranks.size, rank // self.sequence_ranks.size
        """Number of sets of ranks that each compute their own samples, and this rank's set."""

        def load() -> PolicyModel:
            return load_policy_model(
                model,
                temperature,
                device=self.device,
                mesh=mesh,
                dtype=self.dtype,
                sequence_ranks=self.sequence_ranks,
                lora=config.lora,
            )

        self.policy = load()
        network = self.policy.model
        self.whole = sent = WholeTensors(network, self.dtype)
        self.reference: nn.Module | None = None
        if config.lora is not None:
            # Imported here: slow, and most runs train all weights.
            from .lora import AdapterTensors, BasePolicy, MergedTensors

            self.whole, self._adapters = MergedTensors(network, self.dtype), AdapterTensors(network, self.dtype)
            # Engines hold the base.
            sent = self._adapters if config.served_adapter else MergedTensors(network, self.dtype, touched=True)
            self._adapts = self.policy.adapts.tolist()
            self.reference = BasePolicy(self.policy) if config.kl_coef else None
        elif config.kl_coef:
            self.reference = load().requires_grad_(False)
        if name := self._infinite_weight():
            raise ConfigError(f"{model}: its weight {name} holds NaN or infinite numbers: train from a whole model")
        # Dropout would change log-probs from those that drew the tokens.
        self.policy.eval()
        if config.activation_checkpointing:
            # Layers keep their inputs alone and recompute the rest for the gradient. transformers does so in training
            # mode only, in which dropout is active: only layers are put in it, not their submodules.
            self.policy.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            for layer in decoder_layers(self.policy.model):
                layer.training = True
        self._sent: WeightSource = sent
        self._slots: BucketSlots | None = None
        self._device_sender: Any = None
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.optimizer = torch.optim.AdamW(
            _decay_groups(self.policy, config),
            lr=config.lr,
            betas=config.betas,
            weight_decay=config.weight_decay,
            fused=True,
        )
        self.steps = 0
        self._work = Peak(self.device)
        self._host = HostPlaces()
        self._samples: list[Sample] = []
        self._rank_of: list[int] = []  # data rank of each of them
        self._old: list[Tensor] = []  # this rank's own log-probs before the policy moves, [0] of others
        self._entropy = 0.0  # the policy's then

    def old_logprobs(
        self, samples: Sequence[Sample], rank_of: Sequence[int] | None = None, rl_step: int = 0
    ) -> Mismatch:
        """Recompute the log-probs of `samples` under the policy before it moves, and keep both for `update`.

        `rank_of` has the data rank of each (`share_out`; None: 0); this one needs no tokens of the others'. Return the
        distance to the engine's log-probs. Engine and trainer hold the same weights, so on-policy it should be near 0.
        RunError where a log-prob is not finite.
        """
        self._samples = list(samples)
        config = self.config
        self._rank_of = [0] * len(samples) if rank_of is None else list(rank_of)
        rows = range(len(samples))
        both = self._own_logprobs(self.policy, rows, entropy=True)
        self._old = [part[:, 0].contiguous() for part in both]
        self._refuse_infinite(self._old, f"RL step {rl_step}: the policy's log-probs", "look at the policy's weights")
        old, behaviour, entropies = (
            self._drawn(parts, rows) for parts in (self._old, self._behaviour(), [part[:, 1] for part in both])
        )
        sums, largest = mismatch_sums(old, behaviour, cap=config.correction_cap)
        sums = torch.cat([sums, entropies.double().sum()[None]])
        self._sum(sums)
        self._entropy = float(sums[-1] / sums[0].clamp(min=1))
        of_ranks = torch.zeros(self.data_ranks, dtype=torch.float64)
        of_ranks[self.data_rank] = largest
        self._sum(of_ranks)
        return mismatch(sums[:-1], float(of_ranks.max()))

    def update(self, rl_step: int) -> UpdateMetrics:
        """Take up to `passes` x `minibatches` optimizer steps on the kept samples, each at its `learning_rate`.

        Responses without an advantage count in their mini-batch, as in the papers, and are not computed. Truncated ones
        do not count where they are filtered. Without a token left nothing is updated. Ratios of later passes are still
        to the log-probs of `old_logprobs`. RunError where the reference's log-probs, a loss, a gradient or the new
        weights are not finite: engines and checkpoints never get those.
        """
        with self._work.measured():
            config, batch = self.config, self._batch(rl_step)
            planned: list[Tensor] = []
            for number in range(config.passes):
                planned += minibatches_of(len(batch.pairs), config, self.seed, rl_step, number)
            trained, first = batch.values.trained, rl_step * len(planned)
            minibatches = [(place, rows) for place, rows in enumerate(planned, first) if trained[rows].any()]
            totals = torch.zeros(4, dtype=torch.float64)
            norms = lr = 0.0
            for place, minibatch in minibatches:
                weights = batch.token_weights(minibatch, config, self.max_response_tokens)
                for rows in self._own_batches(minibatch[trained[minibatch]].tolist()):
                    totals += self._backward(batch, weights, rows)
                lr = learning_rate(config, self.steps, place)
                norms += self._optimizer_step(lr, rl_step)
            if minibatches:
                self._refuse_new_weights(rl_step)
            self._sum(totals)
            num = max(len(minibatches), 1)
            means = dict(zip(("loss", "clip_fraction", "kl", "correction_mean"), (totals / num).tolist(), strict=True))
            return UpdateMetrics(
                **means,
                grad_norm=norms / num,
                lr=lr,
                trained_responses=float(trained.sum()),
                drift_kl=self._drift(),
                entropy=self._entropy,
            )

    def score(self, pairs: Sequence[Pair]) -> list[np.ndarray]:
        """Return natural log-probs under the policy of each pair's N response tokens given its prompt, [N] each.

        They are float32, at the rollout temperature. All ranks get all.
        """
        sizes = [len(response) for _, response in pairs]
        starts = [0, *accumulate(sizes)]
        logprobs = torch.zeros(starts[-1], device=self.device)
        with torch.no_grad():
            lengths = [sum(map(len, pair)) for pair in pairs]
            for rows in micro_batches(lengths, self.data_ranks, self.config.tokens_per_microbatch)[self.data_rank]:
                logp = self.policy(self._packed([pairs[i] for i in rows]))
                for i, part in zip(rows, logp.split([sizes[i] for i in rows]), strict=True):
                    logprobs[starts[i] : starts[i + 1]] = part
        self._sum(logprobs)
        return [logp.numpy() for logp in logprobs.cpu().split(sizes)]

    def weights(self) -> dict[str, Tensor]:
        """Return the policy's weights by Hugging Face name, on the host, in the compute dtype; on rank 0 alone."""
        return self._on_host(self.whole)

    def send_weights(self, engines: Engines) -> dict[int, str]:
        """Send the weights to engines, bucket by bucket; return the errors of those that failed, by number."""
        if engines.transport != "host":
            from tltlab.runtime.engine.vllm.transfer import DeviceSender

            if self._device_sender is None or self._device_sender.transport != engines.transport:
                self._device_sender = DeviceSender(self._sent, self.rank, engines.transport)
            with ordinary_segments():
                self._device_sender.send(engines)
        elif self.rank:
            # Rank 0 sends, the others help to gather.
            for _ in self._sent:
                pass
        else:
            if self._slots is None:
                self._slots = BucketSlots.fit(self._sent.metadata())
                pinned(self._slots.memory)
            engines.start_weight_update(self._slots)
            load_buckets(self._sent, self._slots, engines)
        return engines.failed

    def frozen(self) -> FrozenTarget | None:
        """Return host copies of weights that a drafter shares (`FrozenTarget`), None on other ranks."""
        # Other ranks help to gather, and keep nothing.
        device = torch.device("cpu" if self.rank == 0 else "meta")
        frozen = FrozenTarget.of(
            self.policy.model, lambda weight: whole_tensor(weight.detach().to(self.dtype)).to(device, copy=True)
        )
        return frozen if self.rank == 0 else None

    def _on_host(self, whole: WholeTensors) -> dict[str, Tensor]:
        return {name: tensor.to("cpu", copy=True) for name, tensor in whole if self.rank == 0}

    def save(self, folder: str) -> None:
        """Write the policy as a Hugging Face folder that vLLM loads, in files of up to 5 GB.

        Adapters are merged, and alone in `adapter` in that folder, as peft's `PeftModel` and vLLM load them.
        """
        weights = self.weights()
        adapters = {} if self.config.lora is None else self._on_host(self._adapters)
        if self.rank == 0:
            Path(folder).parent.mkdir(parents=True, exist_ok=True)
            model = self.policy.model
            if is_mimo(model.config):
                # transformers lacks the MTP layer, which is unchanged.
                save_with_mtp(model, folder, weights, mtp_weights(self._origin))
            else:
                model.save_pretrained(folder, state_dict=weights, max_shard_size="5GB")
            self.tokenizer.save_pretrained(folder)
            if self.config.lora is not None:
                write_adapter(Path(folder) / "adapter", adapters, self.config.lora.alpha, self._origin)
        self._wait()

    def save_checkpoint(self, folder: str) -> None:
        """Write all that `load_checkpoint` needs to continue, each rank its share (`checkpoint`)."""
        save_trainer(Path(folder), self.policy, self.optimizer, steps=self.steps, rank=self.rank)
        self._wait()

    def load_checkpoint(self, folder: str) -> None:
        """Restore a checkpoint of any number of ranks. The reference stays the model that this one was made of."""
        self.steps = load_trainer(Path(folder), self.policy, self.optimizer, rank=self.rank)
        if self.config.lora is not None and self.policy.adapts.tolist() != self._adapts:
            raise RunError(
                f"{folder}: its adapters are of another model than {self._origin}, or of another train.lora.alpha than "
                f"{self.config.lora.alpha}: take those of that run"
            )
        if name := self._infinite_weight():
            raise RunError(f"{folder}: its weight {name} holds NaN or infinity: take another checkpoint")
        self._samples, self._rank_of, self._old = [], [], []

    def release(self) -> None:
        """Free what passes leave for the next ones: gathered weights, and blocks that torch's allocator has cached."""
        for module in self._modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        if self.device.type == "cuda":
            # cuBLAS keeps a workspace per stream (32 MiB on Hopper), which counts as allocated until cleared.
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.empty_cache()

    def offload(self) -> None:
        """Move weights and optimizer state to the host, so that an engine can have the device."""
        self.release()
        if self.device.type == "cuda":
            self._move(self._host.copies)
            self.release()

    def onload(self) -> None:
        """Move everything back."""
        if self.device.type == "cuda":
            self._move(lambda held: [local_part(tensor).to(self.device, non_blocking=True) for tensor in held])

    def memory(self) -> ProcessMemory:
        """Return the memory of this process; `update` is the most that the last one took in addition."""
        moments = [state[name] for state in self.optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
        parts = {
            "master weights": tensor_bytes(self.policy.parameters()),
            "Adam moments": tensor_bytes(moments),
            "reference model": 0 if self.reference is None else tensor_bytes(self.reference.parameters()),
            "update": self._work.bytes,
        }
        return ProcessMemory.now("trainer rank", self.rank, parts)

    def close(self) -> None:
        """Leave the process group."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def _batch(self, rl_step: int) -> UpdateBatch:
        """Return the kept samples with all that an update needs of them before it is split."""
        config, samples = self.config, self._samples
        values = TrainingValues.of(samples, config, self.max_response_tokens)
        behaviour, drawn = self._behaviour(), [sample.drawn() for sample in samples]
        corrections = []
        for old, engine, mask in zip(self._old, behaviour, drawn, strict=True):
            whole = mask[: len(old)] if config.correction_level == "sequence" else None
            corrections.append(correction_weights(old, engine, config.correction_cap, config.correction, whole))
        columns = {
            "old_logp": behaviour if config.correction == "behaviour" else self._old,
            "behaviour_logp": behaviour,
            "correction": corrections,
        }
        if self.reference is not None:
            # In rewards the penalty of a filtered response is part of its group's mean.
            used = values.num_drawn if config.kl_in == "reward" else values.trained
            reference, rows = [torch.empty(0)] * len(samples), used.nonzero()[:, 0].tolist()
            for i, logp in zip(rows, self._own_logprobs(self.reference, rows), strict=True):
                reference[i] = logp
            subject = f"RL step {rl_step}: the reference model's log-probs, used by train.kl_coef,"
            self._refuse_infinite(reference, subject, "look at the weights of the recipe's model")
            if config.kl_in == "reward":
                values = TrainingValues.of(self._penalised(reference), config, self.max_response_tokens)
            columns["ref_logp"] = reference
        return UpdateBatch(pairs=pairs_of(samples), values=values, drawn=drawn, columns=columns)

    def _backward(self, batch: UpdateBatch, weights: Tensor, rows: list[int]) -> Tensor:
        """Add the gradient of the responses `rows`, a micro-batch of the mini-batch with token weights `weights` [N].

        Return its part of the first four `UpdateMetrics` of that mini-batch.
        """
        config, values, lengths = self.config, batch.values, batch.values.lengths[rows]
        shares = weights * values.num_drawn
        whole, computed = float(shares.sum()), float(shares[values.trained].sum())
        with_entropy = bool(config.entropy_coef)
        found = self.policy(self._packed([batch.pairs[i] for i in rows]), entropy=with_entropy)
        logp, entropy = found.unbind(-1) if with_entropy else (found, None)
        columns = {name: self._joined(parts, rows) for name, parts in batch.columns.items()}
        token_weight = weights[rows].repeat_interleave(lengths).to(self.device) * self._joined(batch.drawn, rows)
        tokens = LossTokens(
            logp=logp,
            entropy=entropy,
            **columns,
            advantages=values.advantages[rows].repeat_interleave(lengths).to(self.device),
            weights=token_weight,
            responses=torch.arange(len(rows)).repeat_interleave(lengths).to(self.device),
        )
        terms = policy_loss(tokens, config, self._objective)
        # FSDP2 averages gradients over ranks; the loss is a sum over data ranks, and each neighbour in a rank's group
        # has the gradient of its own tokens.
        (terms.loss * self.world).backward()
        corrected = float((token_weight * columns["correction"]).sum())
        return torch.tensor(
            [float(terms.loss.detach()), terms.clip_fraction / whole, terms.kl / whole, corrected / computed]
        )

    def _penalised(self, reference: Sequence[Tensor]) -> list[Sample]:
        """Return the kept samples, their rewards less kl_coef times the estimated KL, summed over the response.

        Unweighted: a reward belongs to its response, and the loss corrects for the policy that drew the response.
        """
        config, sums = self.config, torch.zeros(len(self._samples), dtype=torch.float64)
        for i, (sample, old, ref) in enumerate(zip(self._samples, self._old, reference, strict=True)):
            estimate = kl_estimate(old[: len(ref)], ref, config.kl_estimator)
            sums[i] = estimate[sample.drawn()[: len(ref)]].double().sum()
        self._sum(sums)
        less = zip(self._samples, (config.kl_coef * sums).tolist(), strict=True)
        return [replace(sample, reward=sample.reward - penalty) for sample, penalty in less]

    def _optimizer_step(self, lr: float, rl_step: int) -> float:
        """Step once at `lr`; return the gradient's norm before clipping."""
        norm = torch.nn.utils.clip_grad_norm_(self.policy.parameters(), self.config.max_grad_norm)
        value = float(whole_tensor(norm))
        if not math.isfinite(value):
            self._refuse_new_weights(rl_step)
            raise RunError(
                f"RL step {rl_step}: the gradient's norm is {value}; the weights were left as they are: lower train.lr "
                "or look at the rewards and log-probs of that step"
            )
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.steps += 1
        return value

    def _refuse_infinite(self, parts: Sequence[Tensor], subject: str, remedy: str) -> None:
        """Raise RunError on every rank where a number of any rank is not finite; `parts` has an entry per sample."""
        bad = torch.tensor([float(not part.isfinite().all()) for part in parts])
        self._sum(bad)
        if bool(bad.any()):
            first = self._samples[int(bad.ne(0).int().argmax())].name
            num = int(bad.count_nonzero())
            raise RunError(f"{subject} of {first} are not finite ({num} of {len(bad)} responses); {remedy}")

    def _refuse_new_weights(self, rl_step: int) -> None:
        if name := self._infinite_weight():
            raise RunError(
                f"RL step {rl_step}: an optimizer step at train.lr = {self.config.lr:g} made {name} infinite or NaN; "
                "engines and checkpoints keep the last good weights: lower train.lr, or set train.warmup_steps higher"
            )

    def _infinite_weight(self) -> str:
        """Return the name of a weight that is not finite in the engines' dtype, on any rank; empty for none."""
        largest, names, bad = torch.finfo(self.dtype).max, [], []
        for name, weight in self.policy.model.named_parameters():
            part = local_part(weight.detach())
            names.append(name)
            low, high = part.aminmax() if part.numel() else part.new_zeros(2)
            bad.append(~((low >= -largest) & (high <= largest)))
        # One synchronisation with the device instead of one for each weight.
        flags = torch.stack(bad).to(self.device, torch.float32)
        if self.world > 1:
            dist.all_reduce(flags)
        return names[int(flags.argmax())] if bool(flags.any()) else ""

    def _drift(self) -> float:
        """Return the KL of the policy from its state at `old_logprobs`, on samples of every length."""
        stride = max(len(self._samples) // DRIFT_SAMPLES, 1)
        rows = sorted(range(len(self._samples)), key=lambda i: len(self._samples[i].token_ids))[::stride]
        new = self._drawn(self._own_logprobs(self.policy, rows), rows)
        old = self._drawn([self._old[i] for i in rows], rows)
        sums = torch.stack([kl_estimate(old, new).double().sum(), torch.tensor(len(old)).double()])
        self._sum(sums)
        kl, num = sums.tolist()
        return kl / num if num else 0.0

    def _drawn(self, parts: Sequence[Tensor], rows: Sequence[int]) -> Tensor:
        """Return together the numbers of tokens that a policy drew; `parts` are this rank's of the samples `rows`."""
        samples = zip(parts, rows, strict=True)
        return torch.cat([torch.empty(0), *(part[self._samples[i].drawn()[: len(part)]] for part, i in samples)])

    def _behaviour(self) -> list[Tensor]:
        """Return [n] of the samples that this rank computes, [0] of the others."""
        computed = zip(self._samples, self._rank_of, strict=True)
        return [torch.from_numpy(np.array(s.logprobs if n == self.data_rank else (), np.float32)) for s, n in computed]

    def _own_logprobs(self, model: nn.Module, rows: Sequence[int], *, entropy: bool = False) -> list[Tensor]:
        """Return log-probs of the kept samples `rows` on the host: [n] of this rank's own, [0] of others.

        With `entropy` [n, 2], each beside its distribution's entropy.
        """
        logprobs = dict.fromkeys(rows, torch.empty(0, 2) if entropy else torch.empty(0))
        with torch.no_grad():
            for batch in self._own_batches(rows):
                pairs = pairs_of([self._samples[i] for i in batch])
                logp = model(self._packed(pairs), entropy=entropy).float().cpu()
                logprobs |= zip(batch, logp.split([len(response) for _, response in pairs]), strict=True)
        return list(logprobs.values())

    def _own_batches(self, rows: Sequence[int]) -> Iterator[list[int]]:
        """Yield this rank's micro-batches of the kept samples `rows`."""
        lengths = [sum(map(len, pair)) for pair in pairs_of([self._samples[i] for i in rows])]
        rank_of = [self._rank_of[i] for i in rows]
        budget = self.config.tokens_per_microbatch
        for members in own_micro_batches(lengths, rank_of, self.data_rank, self.data_ranks, budget):
            yield [rows[m] for m in members]

    def _packed(self, pairs: Sequence[Pair]) -> PackedTokens:
        return PackedTokens.of(pairs, self.device, self.sequence_ranks)

    def _joined(self, tensors: Sequence[Tensor], rows: Sequence[int]) -> Tensor:
        return torch.cat([tensors[i] for i in rows] or [torch.empty(0)]).to(self.device)

    def _sum(self, tensor: Tensor) -> None:
        """Replace by the sum over data ranks."""
        if self.data_ranks > 1 and tensor.numel():
            shared = tensor.to(self.device)
            dist.all_reduce(shared, group=self._across)
            tensor.copy_(shared)

    def _wait(self) -> None:
        if self.world > 1:
            dist.barrier()

    def _modules(self) -> list[nn.Module]:
        return [module for module in (self.policy, self.reference) if module is not None]

    def _move(self, moved: Callable[[list[Tensor]], list[Tensor]]) -> None:
        """Replace this rank's part of each tensor by what `moved` makes of them, in an order that stays."""
        modules, states = self._modules(), list(self.optimizer.state.values())
        tensors = [tensor for module in modules for tensor in chain(module.parameters(), module.buffers())]
        tensors += [value for state in states for value in state.values()]
        with torch.no_grad():
            parts = dict(zip(map(id, tensors), moved(tensors), strict=True))
        for module in modules:
            module._apply(lambda tensor: with_part(tensor, parts[id(tensor)]))
        for state in states:
            state |= {name: with_part(value, parts[id(value)]) for name, value in state.items()}


class SafetensorsWriter(HuggingFaceStorageWriter):
    """DCP's storage as safetensors, one file for each rank that saves; each with its SHA-256, `NAME.sha256`.

    Any number of ranks reads them through DCP's Hugging Face storage, whose index is the header of each file. (DCP's
    own storage would pickle an index.) The sums have the format of sha256sum and are computed while a file is written.
    """

    def __init__(self, folder: Path):
        super().__init__(str(folder), save_distributed=True)
        self.fs = _HashingFiles()


class _HashingFiles(FileSystem):
    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[IOBase]:
        with super().create_stream(path, mode) as stream:
            hashing = Hashing(cast(Any, stream))
            yield cast(IOBase, hashing)
        # DCP's own fsync precedes the flush of Python's last write.
        fsync_file(Path(path))
        write_sum(Path(path), hashing.hexdigest())


def save_trainer(folder: Path, module: nn.Module, optimizer: torch.optim.Optimizer, *, steps: int, rank: int) -> None:
    """Write weights, AdamW's moments after `steps` steps and torch's random state into the folder. All ranks call it.

    The folder does not appear atomically: the caller's checkpoint store does that. RunError where it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with warnings.catch_warnings(action="ignore"):
            save(
                _tensors(module, optimizer, with_moments=steps > 0),
                storage_writer=SafetensorsWriter(folder / TENSORS),
                no_dist=not dist.is_initialized(),
            )
        generators = {"cpu": torch.get_rng_state()}
        if torch.cuda.is_available():
            generators["cuda"] = torch.cuda.get_rng_state()
        save_file(generators, folder / f"random-{rank}.safetensors")
        if rank == 0:
            (folder / STATE).write_text(json.dumps({"steps": steps}))
    except (OSError, SafetensorError, CheckpointException) as error:
        cause = one_line(str(error).strip().rpartition("\n")[2])[:200]
        raise RunError(
            disk_full(error, folder) or f"cannot write the trainer's checkpoint {folder}: {cause}"
        ) from error


def load_trainer(folder: Path, module: nn.Module, optimizer: torch.optim.Optimizer, *, rank: int) -> int:
    """Restore the result of `save_trainer`, and return its `steps`. RunError where the folder is incomplete.

    The random state is restored on ranks that existed; the same number of ranks continues bitwise the same.
    """
    try:
        steps = int(json.loads(read_text(folder / STATE))["steps"])
        optimizer.state.clear()
        if steps:
            # AdamW creates its moments at a first step; with zero gradients it changes nothing that is not loaded. The
            # gradients are the parameters' own: a sharded module has gathered parameters after a forward without
            # backward.
            for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            for state in optimizer.state.values():
                state["step"].fill_(steps)
        with warnings.catch_warnings(action="ignore"):
            load(
                _tensors(module, optimizer, with_moments=steps > 0),
                storage_reader=HuggingFaceStorageReader(str(folder / TENSORS)),
                no_dist=not dist.is_initialized(),
            )
        random = folder / f"random-{rank}.safetensors"
        if random.is_file():
            generators = load_file(random)
            torch.set_rng_state(generators["cpu"])
            if "cuda" in generators and torch.cuda.is_available():
                torch.cuda.set_rng_state(generators["cuda"])
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError, CheckpointException) as error:
        raise RunError(f"{folder}: no whole checkpoint of this model's trainer: {str(error)[:300]}") from error
    return steps


def _tensors(module: nn.Module, optimizer: torch.optim.Optimizer, *, with_moments: bool) -> dict[str, Tensor]:
    """Return weights that are trained, and moments, by name, tied ones once."""
    tensors: dict[str, Tensor] = {}
    ids: set[int] = set()
    for name, tensor in module.state_dict(keep_vars=True).items():
        if id(tensor) in ids or (isinstance(tensor, nn.Parameter) and not tensor.requires_grad):
            continue
        ids.add(id(tensor))
        tensors[name] = tensor.detach()
        if with_moments and isinstance(tensor, nn.Parameter):
            for moment in ("exp_avg", "exp_avg_sq"):
                tensors[f"{moment}.{name}"] = optimizer.state[tensor][moment]
    return tensors


@frozen
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
    """Log-probs of response tokens under a causal model at `temperature`.

    Everything happens in `forward`, the LM head too: FSDP2 gathers a module's parameters around its forward alone.
    """

    adapts: Tensor

    def __init__(self, model: PreTrainedModel, temperature: float, sequence_ranks: SequenceGroup):
        super().__init__()
        self.model = model
        self.temperature = temperature
        self.sequence_ranks = sequence_ranks

    def forward(self, batch: PackedTokens, *, entropy: bool = False) -> Tensor:
        """Return [R] float32 log-probs of the responses' tokens.

        With `entropy` [R, 2]: beside each the entropy of its distribution, in nats, with gradient as the log-prob has.
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
        logprobs = token_logprobs(states, head, batch.next_tokens, self.temperature, entropy=entropy)
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
    lora: LoraConfig | None = None,
) -> PolicyModel:
    """Load the model of a folder or an id with float32 weights on `device`; ConfigError if it cannot be trained here.

    With `lora` it has fresh adapters, and its own weights are frozen; the buffer `adapts` (2) identifies what adapters
    are added to: a sum over these weights, and `alpha`.

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
    if lora is not None:
        from .lora import add_adapters, base_sum

        add_adapters(network, lora, model)
    policy = PolicyModel(network, temperature, sequence_ranks)
    if mesh is None:
        policy.to(device)
    else:
        _shard(policy, device, mesh, dtype)
    if lora is not None:
        policy.register_buffer("adapts", torch.tensor([base_sum(network), lora.alpha]))
    return policy


def _shard(policy: PolicyModel, device: torch.device, mesh: DeviceMesh, dtype: torch.dtype) -> None:
    """Shard a policy of rank 0's weights over the ranks of `mesh`, layer by layer."""
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for module in [*decoder_layers(policy.model), policy]:
        for tensor in chain(module.parameters(), module.buffers()):
            if not isinstance(tensor, DTensor):
                tensor.data = tensor.data.to(device)
                if mesh.size() > 1:
                    dist.broadcast(tensor.data, 0)
        fully_shard(module, mesh=mesh, mp_policy=precision)


def learning_rate(config: TrainConfig, num_taken: int, place: int) -> float:
    """Return the rate of an optimizer step after `num_taken` others, for mini-batch `place` of the run, from 0.

    All mini-batches of all passes and RL steps have a place, also those without a gradient, which take no step. So the
    schedule ends with the run, and a rate depends on the number of RL steps and the place alone, once warm.
    """
    warmup, planned = config.warmup_steps, config.steps * config.passes * config.minibatches
    rate = config.lr * min(1.0, (num_taken + 1) / max(warmup, 1))
    if config.lr_schedule == "constant":
        return rate
    progress = min(max(place - warmup, 0) / max(planned - warmup, 1), 1.0)
    left = 1 - progress if config.lr_schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return rate * (config.lr_min_share + (1 - config.lr_min_share) * left)


def _decay_groups(policy: nn.Module, config: TrainConfig) -> list[Json]:
    parameters = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    if config.decay_all:
        return [{"params": parameters}]
    exempt = [parameter for parameter in parameters if parameter.ndim < 2]
    decayed = [parameter for parameter in parameters if parameter.ndim >= 2]
    return [{"params": decayed}, {"params": exempt, "weight_decay": 0.0}]


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


LOGITS_AT_A_TIME = 1 << 26
"""Logits held at a time, 256 MiB in float32."""


def token_logprobs(
    hidden: Tensor, head: Tensor, tokens: Tensor, temperature: float, *, entropy: bool = False
) -> Tensor:
    """Return log softmax(hidden @ head^T / temperature) at `tokens`: [R] in float32, natural logarithms.

    With `entropy` [R, 2]: beside each the softmax's entropy. `hidden` [R, H] and `head` [V, H] of one dtype, `tokens`
    [R]. The softmax is in float32 for any dtype; the head's gradient is summed over chunks in float32. Gradients reach
    `hidden` and `head`.
    """
    found: Tensor = _TokenLogprobs.apply(hidden, head, tokens, temperature, entropy)  # type: ignore[no-untyped-call]
    return found if entropy else found[:, 0]


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, tokens: Tensor, temperature: float, entropy: bool) -> Tensor:
        found = hidden.new_empty(len(hidden), 1 + entropy, dtype=torch.float32)
        normaliser = found.new_empty(len(hidden))
        for rows in _chunks(len(hidden), len(head)):
            logits = (hidden[rows] @ head.T).float().div_(temperature)
            drawn, most = logits.gather(1, tokens[rows, None])[:, 0], logits.amax(-1)
            # As torch.logsumexp, whose exponentials the entropy shares.
            exps = logits.sub_(most[:, None]).exp()
            total = exps.sum(-1)
            normaliser[rows] = total.log() + most
            found[rows, 0] = drawn - normaliser[rows]
            if entropy:
                found[rows, 1] = total.log() - exps.mul_(logits).sum(-1) / total
            del logits, exps  # before the next are made
        ctx.save_for_backward(hidden, head, tokens, normaliser, *found[:, 1:].clone().unbind(-1))
        ctx.temperature = temperature
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:
        hidden, head, tokens, normaliser, *entropy = ctx.saved_tensors
        of_hidden = torch.empty_like(hidden)
        of_head = torch.zeros_like(head, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for rows in _chunks(len(hidden), len(head)):
            logp = (hidden[rows] @ head.T).float().div_(ctx.temperature).sub_(normaliser[rows, None])
            # d logp / d logits = (one-hot - softmax) / temperature, d entropy = -softmax (logp + entropy) / temperature
            scale = gradient[rows] / ctx.temperature
            factor = logp.add(entropy[0][rows, None]).mul_(-scale[:, 1:]).sub_(scale[:, :1]) if entropy else -scale
            of_logits = logp.exp_().mul_(factor)
            of_logits.scatter_add_(1, tokens[rows, None], scale[:, :1])
            of_logits = of_logits.to(head.dtype)
            of_hidden[rows] = of_logits @ head
            if of_head is not None:
                of_head += of_logits.T @ hidden[rows]
            del logp, factor, of_logits
        return of_hidden, of_head if of_head is None else of_head.to(head.dtype), None, None, None


def _chunks(rows: int, vocabulary: int) -> list[slice]:
    size = max(LOGITS_AT_A_TIME // vocabulary, 1)
    return [slice(start, start + size) for start in range(0, rows, size)]
