"""A target that a small head learns quickly, and texts of it."""

import json

import torch
from safetensors.torch import load_file, save_file

from ...small_models import loaded


def changed_model(source, folder, change):
    """A copy of a model folder with its weights changed one by one."""
    for file in source.iterdir():
        if file.suffix in (".json", ".jsonl"):
            (folder / file.name).write_bytes(file.read_bytes())
    weights = load_file(source / "model.safetensors")
    changed = {name: change(name, weight).contiguous() for name, weight in weights.items()}
    save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def easy_target(random_model, folder, max_positions=256, sharper=4.0):
    """The random model with weak attention and sharp logits: the next token follows mostly from the last one."""
    factors = {"o_proj": 0.1, "lm_head": sharper}
    changed_model(
        random_model, folder, lambda name, weight: weight * next((f for p, f in factors.items() if p in name), 1.0)
    )
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": max_positions}))
    return folder


def naive(text, start, depth, propose):
    """Tokens kept at each position from `start` on, drafting anew at every one."""
    kept = []
    for at in range(start, len(text)):
        draft, count = propose(text[:at], depth), 0
        while count < min(len(draft), len(text) - at) and draft[count] == text[at + count]:
            count += 1
        kept.append(count)
    return kept


def quiet(message):
    """Who listens to progress here."""


LONG_CONTEXT = 1 << 19
"""Positions for which the KV cache that an engine has on a CPU is too small."""


@torch.no_grad()
def sampled_rows(target, num, tokens):
    """Prompts of six tokens with responses that the target sampled at temperature 1."""
    model = loaded(target)
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(4, model.config.vocab_size, (num, 6), generator=generator)
    for _ in range(tokens):
        chances = torch.softmax(model(text).logits[:, -1], -1)
        text = torch.cat([text, torch.multinomial(chances, 1, generator=generator)], 1)
    return [{"prompt": row[:6], "response": row[6:]} for row in text.tolist()]


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
