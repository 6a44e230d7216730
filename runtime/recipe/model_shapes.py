"""The shape of a recipe's model, from its configuration on this machine or by its name; nothing is downloaded."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from tltlab.errors import ConfigError
from tltlab.files import read_json
from tltlab.hardware import ModelShape
from tltlab.hardware import model as model_by_name


def shape_of(model: str) -> ModelShape:
    """Read MODEL/config.json where that is a folder, else look the last part of the id up in `tltlab.hardware`.

    ConfigError for a model of neither kind, and for one that is no dense decoder.
    """
    path = Path(model) / "config.json"
    if not path.is_file():
        try:
            return model_by_name(model)
        except ConfigError as error:
            raise ConfigError(
                f"cannot tell the shape of model {model!r}: there is no {path}, and it is an {error}; download it first"
            ) from error
    config = read_json(path)
    if not isinstance(config, dict):
        raise ConfigError(f"{path} is no model configuration: expected an object")
    if config.get("num_experts") or config.get("num_local_experts"):
        raise ConfigError(f"{path} is of a mixture of experts, and estimates are for dense models")
    try:
        heads = config["num_attention_heads"]
        return ModelShape(
            name=Path(model).resolve().name,
            hidden=config["hidden_size"],
            intermediate=config["intermediate_size"],
            layers=config["num_hidden_layers"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            vocab=config["vocab_size"],
            tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        )
    except (KeyError, TypeError, ValidationError, ZeroDivisionError) as error:
        raise ConfigError(f"{path} is not of a dense decoder: {type(error).__name__}: {error}") from error
