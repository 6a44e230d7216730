"""A small reasoning model trained from scratch on two CPU cores, and its folder."""

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from tltlab.console import marked_folder
from tltlab.errors import ConfigError
from tltlab.records import Json, frozen

from .measure import measure
from .tasks import TASKS, Task, TaskProblem

MAX_RESPONSE_TOKENS = 768
NUM_TRAIN_PROMPTS = 4096
NUM_HELDOUT_PROMPTS = 512
_MAX_POSITIONS = 1024
# 32 is the smallest head the CPU attention kernels of vLLM take.
_HEAD_SIZE = 32
_IGNORED = -100
_POOL_ROWS = 1024
_WARMUP_STEPS = 20
_LR = 0.01
_MOMENTUM = 0.95
# Threads that share a training step: Python's, since torch's own spin where another process has their core.
_HALVES = 2
_LOSS_WINDOW_STEPS = 50
_EMBEDDING_STD = 0.3
_EMBEDDED_WAVE = 0.5
_OUTPUT_WAVE = 0.1

Batches = Iterator[tuple[torch.Tensor, torch.Tensor]]
"""Inputs and labels, both [rows, width]."""


@frozen
class Size:
    """A model's shape, and its training and evaluation in steps, not seconds, so that a seed fixes the weights."""

    hidden: int
    layers: int
    mlp: int
    steps: int
    tokens_per_batch: int = 1024
    measured_prompts: int = 64
    samples_per_prompt: int = 8


SIZES = {
    "tiny": Size(hidden=128, layers=2, mlp=256, steps=560, measured_prompts=32),
    "small": Size(hidden=128, layers=4, mlp=256, steps=1200),
    # One pass of these twelve thin layers costs many of the one-layer model, its draft model.
    "deep": Size(hidden=96, layers=12, mlp=192, steps=1800),
    "draft": Size(hidden=64, layers=1, mlp=256, steps=3000),
}


def make_model(out: Path, *, size: str | Size, task: str, seed: int, progress: Callable[[str], None]) -> Json:
    """Train a model on `task`, write its folder to `out` atomically, and return the report.

    `out` is an ordinary Hugging Face model (Llama architecture, float32, a tokenizer of one token a word) with
    train.jsonl and heldout.jsonl (prompt_id, prompt, answer; no prompt in both) and report.json next to it. An
    earlier model there is replaced; anything else is a ConfigError, as is an unknown size or task. Training always
    takes two threads of one core each, so that the weights depend on the seed and the machine alone.
    """
    out = Path(out)
    shape = SIZES.get(size) if isinstance(size, str) else size
    if shape is None:
        raise ConfigError(f"no model size named {size!r}; there are: {', '.join(SIZES)}")
    if task not in TASKS:
        raise ConfigError(f"no task named {task!r}; there are: {', '.join(TASKS)}")
    with marked_folder(out, "report.json", SafetensorError) as folder, _one_thread(seed):
        started = time.perf_counter()
        train, heldout = draw_problems(TASKS[task], seed)
        tokenizer = make_tokenizer(TASKS[task])
        model = _new_model(shape, tokenizer)
        num_parameters = sum(p.numel() for p in model.parameters())
        progress(f"training {num_parameters:,} parameters on {task}")
        initialise(model, tokenizer)
        batches = _batches(tokenizer, TASKS[task], train, shape.tokens_per_batch, np.random.default_rng(seed))
        loss = pretrain(model, batches, shape, progress)
        trained_s = time.perf_counter() - started
        progress(f"trained in {trained_s:.0f} s; sampling it")
        sampled = measure(
            model,
            tokenizer,
            heldout[: shape.measured_prompts],
            reward=TASKS[task].reward,
            samples_per_prompt=shape.samples_per_prompt,
            max_tokens=MAX_RESPONSE_TOKENS,
            seed=seed,
        )
        report = {
            "size": size if isinstance(size, str) else "custom",
            "task": task,
            "reward": TASKS[task].reward,
            "seed": seed,
            "parameters": num_parameters,
            "train_steps": shape.steps,
            "train_s": round(trained_s, 1),
            "final_loss": round(loss, 4),
            "max_response_tokens": MAX_RESPONSE_TOKENS,
            "sampled": sampled,
        }
        disable_progress_bar()
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        _write_problems(folder / "train.jsonl", "train", train)
        _write_problems(folder / "heldout.jsonl", "heldout", heldout)
        (folder / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    return report


def draw_problems(task: Task, seed: int) -> tuple[list[TaskProblem], list[TaskProblem]]:
    """Return problems to train on and problems held out, no prompt twice."""
    rng = np.random.default_rng(seed)
    by_prompt: dict[str, TaskProblem] = {}
    while len(by_prompt) < NUM_TRAIN_PROMPTS + NUM_HELDOUT_PROMPTS:
        problem = task.problem(rng)
        by_prompt.setdefault(problem.prompt, problem)
    problems = list(by_prompt.values())
    # A prompt that is drawn often is found early, so the two parts are cut from a shuffled list.
    order = rng.permutation(len(problems)).tolist()
    return [problems[i] for i in order[NUM_HELDOUT_PROMPTS:]], [problems[i] for i in order[:NUM_HELDOUT_PROMPTS]]


def make_tokenizer(task: Task) -> PreTrainedTokenizerFast:
    """Return a tokenizer with the task's words, one token each, that puts <bos> before a text."""
    special = ["<pad>", "<bos>", "<eos>", "<unk>"]
    words = [*special, *task.words]
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", words.index("<bos>"))])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
        model_max_length=_MAX_POSITIONS,
    )


def _new_model(size: Size, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    heads = size.hidden // _HEAD_SIZE
    special: Json = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos")}
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=math.ceil(len(tokenizer) / 64) * 64,
            hidden_size=size.hidden,
            num_hidden_layers=size.layers,
            intermediate_size=size.mlp,
            num_attention_heads=heads,
            num_key_value_heads=max(heads // 2, 1),
            max_position_embeddings=_MAX_POSITIONS,
            tie_word_embeddings=False,
            head_dim=_HEAD_SIZE,
            **special,
        )
    )


def pretrain(model: LlamaForCausalLM, batches: Batches, size: Size, progress: Callable[[str], None]) -> float:
    """Train `model` in place; return the mean loss of the last steps, nats per token.

    Only response tokens count. Muon updates block matrices, AdamW the rest; learning rates rise over the first steps,
    stay, and fall to 0 over the last 60 %. Nothing depends on the clock.
    """
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    of_blocks = {id(p) for p in matrices}
    params = list(model.parameters())
    optimizers: list[torch.optim.Optimizer] = [
        *(Muon(matrices[half::_HALVES], {"lr": _LR}) for half in range(_HALVES)),
        torch.optim.AdamW([p for p in params if id(p) not in of_blocks], lr=_LR, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    losses: list[float] = []
    model.train()

    def gradients(ids: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        """Return the loss, summed over tokens, and its gradients of `params`."""
        scored = labels != _IGNORED
        # Padding is on the right, where a causal model does not attend to it, so no attention mask is needed.
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
        loss = cross_entropy(model.lm_head(hidden[scored]), labels[scored], reduction="sum")
        return loss.detach(), torch.autograd.grad(loss, params)

    with ThreadPoolExecutor(_HALVES, initializer=torch.set_num_threads, initargs=(1,)) as threads:
        for step in range(size.steps):
            ids, labels = next(batches)
            halves = range(min(_HALVES, len(ids)))
            parts = threads.map(gradients, (ids[h::_HALVES] for h in halves), (labels[h::_HALVES] for h in halves))
            sums, grads = zip(*parts, strict=True)
            num_scored = int((labels != _IGNORED).sum())
            for param, shares in zip(params, zip(*grads, strict=True), strict=True):
                param.grad = torch.stack(shares).sum(0) / num_scored
            share = min(1.0, (step + 1) / _WARMUP_STEPS, (size.steps - step) / (0.6 * size.steps))
            for optimizer in optimizers:
                optimizer.param_groups[0]["lr"] = _LR * share
            list(threads.map(lambda optimizer: optimizer.step(), optimizers))
            losses.append(float(sum(sums)) / num_scored)
            if (step + 1) % max(size.steps // 10, 1) == 0:
                progress(f"step {step + 1} of {size.steps}: loss {np.mean(losses[-_LOSS_WINDOW_STEPS:]):.3f}")
    model.eval()
    return float(np.mean(losses[-_LOSS_WINDOW_STEPS:]))


@torch.no_grad()
def initialise(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    """Initialise `model` for fast learning: blocks that add nothing yet, and ordered embeddings of numbers.

    Embeddings are wide (standard deviation .3) and the last matrix of each block branch is 0, so depth costs no steps
    early on. The rows of number words, in the embedding and the output, get sines and cosines of their value with
    wavelengths from 2 to four times the largest number: there a sum is a rotation and a comparison is linear.
    """
    embedding, output = model.model.embed_tokens.weight, model.lm_head.weight
    embedding.normal_(std=_EMBEDDING_STD)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    numbers = {int(word): row for word, row in tokenizer.get_vocab().items() if word.isdecimal()}
    rows = torch.tensor(list(numbers.values()))
    num_waves = model.config.hidden_size // 4
    wavelength = torch.logspace(math.log10(2), math.log10(4 * max(numbers)), num_waves)
    angle = 2 * math.pi * torch.tensor(list(numbers), dtype=torch.float32)[:, None] / wavelength
    waves = torch.cat([angle.cos(), angle.sin()], dim=1)
    embedding[rows, : 2 * num_waves] += _EMBEDDED_WAVE * waves
    output[rows, : 2 * num_waves] += _OUTPUT_WAVE * waves


def _batches(
    tokenizer: PreTrainedTokenizerFast,
    task: Task,
    problems: Sequence[TaskProblem],
    tokens_per_batch: int,
    rng: np.random.Generator,
) -> Batches:
    """Inputs and labels, both [rows, width], of fresh traces of similar length; rows * width <= tokens_per_batch."""
    vocab = tokenizer.get_vocab()
    while True:
        pool = []
        for i in rng.integers(len(problems), size=_POOL_ROWS):
            prompt = [vocab["<bos>"], *(vocab[word] for word in problems[i].prompt.split())]
            response = [*(vocab[word] for word in task.trace(problems[i], rng).split()), vocab["<eos>"]]
            pool.append((prompt, response[:MAX_RESPONSE_TOKENS]))
        pool.sort(key=lambda row: len(row[0]) + len(row[1]))
        batches: list[list[tuple[list[int], list[int]]]] = [[]]
        for row in pool:
            if batches[-1] and (len(batches[-1]) + 1) * (len(row[0]) + len(row[1]) - 1) > tokens_per_batch:
                batches.append([])
            batches[-1].append(row)
        for i in rng.permutation(len(batches)):
            yield _pad(batches[i])


def _pad(rows: list[tuple[list[int], list[int]]]) -> tuple[torch.Tensor, torch.Tensor]:
    texts = [torch.tensor(prompt + response) for prompt, response in rows]
    targets = [torch.tensor([_IGNORED] * (len(prompt) - 1) + response) for prompt, response in rows]
    inputs = pad_sequence([text[:-1] for text in texts], batch_first=True)
    return inputs, pad_sequence(targets, batch_first=True, padding_value=_IGNORED)


def _write_problems(path: Path, split: str, problems: list[TaskProblem]) -> None:
    rows = [json.dumps({"prompt_id": f"{split}-{i}", **asdict(problem)}) for i, problem in enumerate(problems)]
    path.write_text("\n".join(rows) + "\n")


@contextmanager
def _one_thread(seed: int) -> Iterator[None]:
    """Seed torch and limit it to one thread; restore both after."""
    threads = torch.get_num_threads()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)


class Muon(torch.optim.Optimizer):
    """Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon): momentum with orthogonalised matrix steps.

    For the matrices inside transformer blocks; embeddings, heads and norms need AdamW. Each step moves a matrix by lr *
    sqrt(max(1, rows / columns)) along the nearest semi-orthogonal matrix to its Nesterov momentum, so every direction
    of the update has the same length.

    `torch.optim.Muon` has the same rule, but orthogonalises in bfloat16: its steps are 1 to 2 % off, so a seed would
    give another model, and on a CPU they take some 15 times as long.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient; `closure` is not used."""
        for group in self.param_groups:
            updates: dict[torch.Size, list[tuple[torch.Tensor, torch.Tensor]]] = {}
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["momentum"] = torch.zeros_like(param)
                state["momentum"].lerp_(param.grad, 1 - _MOMENTUM)
                update = param.grad.lerp(state["momentum"], _MOMENTUM)
                updates.setdefault(param.shape, []).append((param, update))
            for (rows, columns), moves in updates.items():
                scale = group["lr"] * max(1.0, rows / columns) ** 0.5
                steps = orthogonalise(torch.stack([update for _, update in moves]))
                for (param, _), step in zip(moves, steps, strict=True):
                    param.add_(step, alpha=-scale)


def orthogonalise(matrices: torch.Tensor) -> torch.Tensor:
    """Return about U V^T of each matrix [N, R, C] = U S V^T, by five steps of a quintic Newton-Schulz iteration.

    The coefficients trade accuracy for speed: singular values end between about 0.7 and 1.2.
    """
    tall = matrices.shape[-2] > matrices.shape[-1]
    x: torch.Tensor = matrices.mT if tall else matrices
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if tall else x
