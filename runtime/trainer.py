"""The trainer: log-probs of recorded responses and GRPO updates of a Hugging Face causal model, on CPU or CUDA."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer

from tltlab.errors import ConfigError

from .grpo import group_advantages, grpo_loss
from .recipe import TrainConfig
from .samples import Sample
from .target_states import FrozenTarget

DRIFT_SAMPLES = 16
"""Responses on which an update's step is measured."""


class Trainer:
    """Holds the policy and its optimizer. float32 on CPU; on CUDA the forward runs in bfloat16 over float32 weights."""

    def __init__(self, model: str, config: TrainConfig, *, temperature: float, seed: int) -> None:
        torch.manual_seed(seed)
        torch.set_num_threads(config.threads)
        self.config = config
        self.temperature = temperature
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        try:
            self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).to(self.device)
            self.tokenizer = AutoTokenizer.from_pretrained(model)
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot load a model from {model}: {' '.join(str(error).split())[:300]}") from error
        self.reference = copy.deepcopy(self.model).requires_grad_(False) if config.kl_coef else None
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=config.lr, betas=config.betas, weight_decay=config.weight_decay
        )
        self.generator = torch.Generator().manual_seed(seed)
        self._samples: list[Sample] = []
        self._old: list[torch.Tensor] = []

    def old_logprobs(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Recompute the log-probs of `samples` under the policy before it moves, and keep both for `update`.

        Returns the distance to what the engine recorded: mean absolute difference and the k3 estimate of
        KL(behaviour || trainer) per token. Engine and trainer hold the same weights, so both should be near 0.
        """
        self._samples = list(samples)
        self._old = self._logprobs_of(self.model, self._samples)
        if not samples:
            return {"mismatch_abs": 0.0, "mismatch_kl": 0.0}
        behaviour = torch.cat([torch.tensor(s.logprobs) for s in samples])
        difference = torch.cat(self._old) - behaviour
        kl = torch.exp(difference) - difference - 1
        return {"mismatch_abs": float(difference.abs().mean()), "mismatch_kl": float(kl.mean())}

    def update(self) -> dict[str, float]:
        """Take `minibatches` optimizer steps on the kept samples. Returns means over tokens.

        Responses of groups with equal rewards carry no gradient and are left out; with none left nothing moves.
        `drift_kl` is the k3 estimate of KL(policy before || policy after) per token, on some of the samples.
        """
        rewards = torch.tensor([s.reward for s in self._samples])
        groups = torch.tensor([s.group for s in self._samples])
        advantages = group_advantages(rewards, groups, scale_by_std=self.config.advantage_scale != "none")
        useful = torch.nonzero(advantages)[:, 0]
        useful = useful[torch.randperm(len(useful), generator=self.generator)]
        ref = self._logprobs_of(self.reference, self._samples) if self.reference is not None else None
        totals = {"loss": 0.0, "clip_fraction": 0.0, "kl": 0.0, "grad_norm": 0.0}
        parts = [p.tolist() for p in useful.chunk(self.config.minibatches)] if len(useful) else []
        self.model.train()
        for part in parts:
            num_tokens = sum(len(self._samples[i].token_ids) for i in part)
            for rows in self._micro_batches(part, self._samples):
                logp, mask = self._forward(self.model, [self._samples[i] for i in rows])
                terms = grpo_loss(
                    logp,
                    self._pad([self._old[i] for i in rows]),
                    advantages[rows].to(self.device),
                    mask,
                    num_tokens=num_tokens,
                    clip_low=self.config.clip_low,
                    clip_high=self.config.clip_high,
                    kl_coef=self.config.kl_coef,
                    ref_logp=None if ref is None else self._pad([ref[i] for i in rows]),
                )
                terms.loss.backward()
                totals["loss"] += float(terms.loss.detach())
                totals["clip_fraction"] += terms.clip_fraction
                totals["kl"] += terms.kl
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.max_grad_norm)
            totals["grad_norm"] += float(norm)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        self.model.eval()
        mean = {name: value / max(len(parts), 1) for name, value in totals.items()}
        return mean | {"trained_responses": float(len(useful)), "drift_kl": self._drift()}

    def weights(self) -> dict[str, torch.Tensor]:
        """The policy's weights by Hugging Face name, on the host."""
        return {name: tensor.detach().cpu().clone() for name, tensor in self.model.state_dict().items()}

    def frozen(self) -> FrozenTarget:
        """Copies on the host of what a drafter shares with the policy: embedding and LM head."""
        embedding = self.model.get_input_embeddings().weight
        lm_head = self.model.get_output_embeddings().weight
        copied = embedding.detach().cpu().clone()
        return FrozenTarget(
            embedding=copied, lm_head=copied if lm_head is embedding else lm_head.detach().cpu().clone()
        )

    def save(self, folder: str) -> None:
        """Write the policy as a Hugging Face folder that vLLM loads."""
        Path(folder).parent.mkdir(parents=True, exist_ok=True)
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)

    def _drift(self) -> float:
        """How far the policy is from what it was when `old_logprobs` was asked, on samples of every length."""
        stride = max(len(self._samples) // DRIFT_SAMPLES, 1)
        rows = sorted(range(len(self._samples)), key=lambda i: len(self._samples[i].token_ids))[::stride]
        if not rows:
            return 0.0
        now = self._logprobs_of(self.model, [self._samples[i] for i in rows])
        difference = torch.cat(now) - torch.cat([self._old[i] for i in rows])
        return float((torch.exp(difference) - difference - 1).mean())

    def _logprobs_of(self, model: torch.nn.Module, samples: Sequence[Sample]) -> list[torch.Tensor]:
        out: list[torch.Tensor] = [torch.empty(0)] * len(samples)
        with torch.no_grad():
            for rows in self._micro_batches(list(range(len(samples))), samples):
                logp, _ = self._forward(model, [samples[i] for i in rows])
                for row, i in enumerate(rows):
                    out[i] = logp[row, : len(samples[i].token_ids)].cpu()
        return out

    def _micro_batches(self, rows: list[int], samples: Sequence[Sample]) -> Iterator[list[int]]:
        """Cut `rows` into batches of similar length whose padded size stays within the token budget."""
        length = {i: len(samples[i].prompt_token_ids) + len(samples[i].token_ids) for i in rows}
        batch: list[int] = []
        for i in sorted(rows, key=lambda i: -length[i]):
            if batch and length[batch[0]] * (len(batch) + 1) > self.config.tokens_per_microbatch:
                yield batch
                batch = []
            batch.append(i)
        if batch:
            yield batch

    def _forward(self, model: torch.nn.Module, samples: Sequence[Sample]) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs and mask, both [N, T] over response tokens, T the longest response of the batch."""
        ids = [torch.tensor(s.prompt_token_ids + s.token_ids) for s in samples]
        inputs = pad_sequence(ids, batch_first=True).to(self.device)
        lengths = torch.tensor([len(i) for i in ids], device=self.device)
        attention = torch.arange(inputs.shape[1], device=self.device)[None] < lengths[:, None]
        starts = torch.tensor([len(s.prompt_token_ids) for s in samples], device=self.device)
        num = torch.tensor([len(s.token_ids) for s in samples], device=self.device)
        offsets = torch.arange(int(num.max()), device=self.device)[None]
        mask = offsets < num[:, None]
        position = (starts[:, None] + offsets).clamp(max=inputs.shape[1] - 1)
        with self._autocast():
            hidden = model.base_model(input_ids=inputs, attention_mask=attention).last_hidden_state
            # Only positions before a response token need logits: prompts would waste the vocabulary projection.
            rows = torch.arange(len(samples), device=self.device)[:, None]
            logits = model.get_output_embeddings()(hidden[rows, position - 1])
        logp = torch.log_softmax(logits.float() / self.temperature, dim=-1)
        return torch.gather(logp, 2, inputs[rows, position][:, :, None])[:, :, 0], mask.float()

    def _autocast(self) -> AbstractContextManager[None]:
        if self.device.type == "cuda":
            return torch.autocast("cuda", torch.bfloat16)
        return nullcontext()

    def _pad(self, rows: list[torch.Tensor]) -> torch.Tensor:
        return pad_sequence(rows, batch_first=True).to(self.device)
