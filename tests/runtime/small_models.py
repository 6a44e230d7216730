"""The shape of models that tests make, and recipes of which one section matters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tltlab.runtime.recipe.recipe import Recipe


def small_shape(**changed: Any) -> dict[str, Any]:
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


def small_recipe(**sections: Any) -> Recipe:
    """A recipe whose model and data nobody reads."""
    from tltlab.runtime.recipe.recipe import Recipe

    return Recipe.model_validate({"model": "m", "reward": "r:f", "data": {"train": "t"}} | sections)
