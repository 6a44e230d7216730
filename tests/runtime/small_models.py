"""The shape of models that tests make, recipes of which one section matters, and waiting."""

import time


def small_shape(**changed):
    """Of a Hugging Face config: two layers of 64, and the random model's 24 words, the first of which are special."""
    return {
        "vocab_size": 24,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    } | changed


def small_recipe(**sections):
    """A recipe whose model and data nobody reads."""
    from tltlab.runtime.recipe.recipe import Recipe

    return Recipe.model_validate({"model": "m", "reward": "r:f", "data": {"train": "t"}} | sections)


def loaded(folder):
    """A model's folder as transformers loads it, in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def until(condition):
    """Wait until something holds; what it is worth then."""
    end = time.monotonic() + 300.0
    while not (found := condition()):
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)
    return found
