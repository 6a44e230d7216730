"""Engine profiles: what an engine adds to the hardware, fitted jointly over models and GPUs, and costs made of it.

`profiles.json` holds one joint fit (`tests/bench/presets`): efficiencies that all engines share, by GPU,
and terms of each engine. `ENGINE:GPUS:MODEL[:WEIGHTS[:KV]]` names costs by them, as `vllm:2xH100:Qwen3-32B:fp8`.
"""

import re
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import Field, PositiveInt

from tltlab.arrays import Floats
from tltlab.config import FrozenModel, faults_in
from tltlab.errors import ConfigError
from tltlab.files import read_json
from tltlab.hardware import DTYPE_BYTES, GPUS, MODELS, Dtype, Gpu, ModelShape, gpu, kv_capacity_tokens, model
from tltlab.records import Fields, Json

from .base import Seconds, Waiting
from .evidence import GOODPUT, SPECULATING, CalibratedRange, Error, Evidence, Span
from .roofline import Constants, Ideal, RooflineCosts, Share, Times, prefill_token_s, rounded_max

_CONFIGS: Json = read_json(Path(__file__).with_name("configs.json"))
"""Keys of a `config.json` about experts (Qwen, DeepSeek, Kimi, GLM, Llama-4, Mixtral, MiniMax, GPT-OSS, Granite,
Hunyuan, Ernie, Ling, OLMoE), model types that normalise queries and keys, and types of quantized weights, by the method
or, with compressed-tensors and ModelOpt, which describe the weights' numbers, by kind and bits."""
_MOE_KEYS: dict[str, list[str]] = _CONFIGS["experts"]
_ABOUT_EXPERTS = re.compile("expert|moe|hybrid_override_pattern", re.IGNORECASE)
_NO_SHAPE = re.compile(
    "rout(er|ing)|aux|loss|gate|gating|scor|group|norm|scal|dtype|drop|capacity|backend|parallel|bias|jitter|hidden_act|impl"
)
"""Settings of experts that change no shape."""
Factor = Annotated[float, Field(gt=0, le=10)]
Bound = tuple[Error, Error]
ENGINE = "vllm"
"""The engine where none is named: the newest measured one of the kind that tltlab runs, whatever GPU and model."""
_OLDER = re.compile(r"-[\d.]+$")
"""Ends the name of a profile of an engine that has a newer one."""
MEASURED = "a third of its measurements"
LEFT_OUT = "model, GPU, engine or weights"
"""Parts left out of a fit to measure its errors, as `Profiles.errors` and `Evidence.left_out` name them."""
MOST_EFFICIENT = 1.0
"""Share of a data sheet's rates: no kernel reads or computes faster."""
VLLM_WAITING = Waiting(base_s=1.689e-3, per_request_s=8.4e-6, source="vLLM 0.32 at the shape of Qwen2.5-7B on one H200")
"""Plain iterations at batch 1 to 256, `traces/h200-rehearsal/quick.json`."""
_SHARPNESS = 12.0
_LONG_PROMPT = 8_000
_Numbers = TypeVar("_Numbers", float, Floats)
_Record = TypeVar("_Record", Gpu, ModelShape)


def shape_of_config(config: Fields, name: str = "") -> ModelShape:
    """The shape that a Hugging Face `config.json` describes; its text model where it has several.

    Reads experts (`_MOE_KEYS`), latent attention, sliding, chunked and linear layers and the quantization of the
    checkpoint. Raises ConfigError that names a key which is missing, or one about experts that is not understood.
    """
    text: Fields = config.get("text_config") or config
    first = partial(_first, text)
    hidden, layers, heads = first("hidden_size"), first("num_hidden_layers"), first("num_attention_heads")
    experts = _experts(text, layers)
    latent = first("kv_lora_rank", default=0)
    rotated = first("qk_rope_head_dim", default=0) if latent else 0
    head_dim = first("head_dim", default=hidden // heads)
    if latent:
        head_dim = first("qk_nope_head_dim", default=head_dim) + rotated
    kinds = text.get("layer_types") or ()
    rope = text.get("rope_parameters") or text.get("rope_scaling")
    # Releases of vLLM differ in scaled rotary embeddings: the longest context of any of them.
    stretch = (rope.get("factor") if isinstance(rope, dict) else None) or 1.0
    window = first("sliding_window", "attention_chunk_size", default=0)
    sliding = sum(kind in ("sliding_attention", "chunked_attention") for kind in kinds)
    if not kinds and text.get("attention_chunk_size"):
        # Llama-4: layers without rotary embeddings, every fourth, see the whole context.
        sliding, kinds = sum(text.get("no_rope_layers") or [i % 4 != 3 for i in range(layers)]), ("chunked",)
    if window and not kinds and text.get("use_sliding_window", True):
        sliding = layers
    return ModelShape(
        name=name or str(config.get("_name_or_path") or config.get("model_type") or "model"),
        hidden=hidden,
        intermediate=first("intermediate_size_mlp", "intermediate_size", default=0 if experts else None),
        layers=layers,
        heads=heads,
        kv_heads=heads if latent else first("num_key_value_heads", default=heads),
        head_dim=head_dim,
        vocab=first("vocab_size"),
        tied_embeddings=bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings", False))),
        **experts,
        latent=latent + rotated,
        latent_queries=first("q_lora_rank", default=0) if latent else 0,
        value_dim=first("v_head_dim", default=0) if latent else 0,
        window=window if sliding else 0,
        window_layers=sliding,
        state_layers=sum(kind in ("linear_attention", "mamba") for kind in kinds),
        qk_norm=str(text.get("model_type", config.get("model_type"))).startswith(tuple(_CONFIGS["qk_norm"]))
        or bool(text.get("use_qk_norm")),
        weights=_checkpoint_type(config.get("quantization_config") or text.get("quantization_config")),
        max_context=int(first("max_position_embeddings", default=0) * max(float(stretch), 1.0)),
    )


def _first(text: Fields, *keys: str, default: int | None = None) -> int:
    """Return the first of these keys that is set; a list has one value for all layers, else it is a ConfigError."""
    for key in keys:
        if (value := text.get(key)) is not None:
            values = set(value) if isinstance(value, list) else {value}
            if len(values) > 1:
                raise ConfigError(f"the model's config.json has a {key} that differs by layer, which is not understood")
            return int(values.pop()) if values else 0
    if default is None:
        raise ConfigError(f"the model's config.json has no {' or '.join(keys)}")
    return default


def _experts(text: Fields, layers: int) -> dict[str, int]:
    """Return the fields of `ModelShape` about experts, none where there are none."""
    understood = {key for keys in _MOE_KEYS.values() for key in keys}
    about = [key for key, value in text.items() if value and _ABOUT_EXPERTS.search(key) and key not in understood]
    if strange := [key for key in about if not _NO_SHAPE.search(key.lower())]:
        raise ConfigError(
            f"the model's config.json has settings of experts that are not understood: {', '.join(strange)}; describe "
            "the model by the fields of ModelShape"
        )
    first = partial(_first, text)
    experts = first(*_MOE_KEYS["experts"], default=0)
    if not experts:
        return {}
    width = first(*_MOE_KEYS["expert_intermediate"])
    # Llama-4 has one shared expert and no key for it.
    implicit = int(str(text.get("model_type", "")).startswith("llama4"))
    shared = first(*_MOE_KEYS["shared"], default=implicit) * width
    return {
        "experts": experts,
        "experts_per_token": first(*_MOE_KEYS["experts_per_token"]),
        "expert_intermediate": width,
        "shared_intermediate": first(*_MOE_KEYS["shared_intermediate"], default=shared),
        "dense_layers": layers - _sparse_layers(text, layers),
    }


def _sparse_layers(text: Fields, layers: int) -> int:
    """Return how many layers have experts."""
    if kinds := text.get("mlp_layer_types"):
        return sum(kind == "sparse" for kind in kinds)
    if listed := text.get("moe_layers"):
        return len(listed)
    dense, frequency = text.get("mlp_only_layers") or (), text.get("moe_layer_freq")
    start, end = _first(text, *_MOE_KEYS["from"], default=0), text.get("moe_layer_end_index") or layers
    if isinstance(frequency, list):
        return sum(bool(value) for i, value in enumerate(frequency) if start <= i <= end)
    every = _first(text, *_MOE_KEYS["every"], default=1)
    # DeepSeek counts every n-th layer from 0, others from 1.
    first = 0 if frequency else 1
    return sum((i + first) % every == 0 and start <= i <= end and i not in dense for i in range(layers))


def _checkpoint_type(quantization: Fields | None) -> Dtype:
    """The type of a checkpoint's matrices by its `quantization_config`; ConfigError for one that is not known."""
    if not quantization:
        return "bf16"
    names = [quantization.get("quant_method", quantization.get("quant_algo", ""))]
    groups = (quantization.get("config_groups") or {}).values()
    names += [
        "{type}:{num_bits}".format_map({"type": "", "num_bits": ""} | (group.get("weights") or {})) for group in groups
    ]
    for name in (*names, quantization.get("quant_algo", "")):
        if (kind := _CONFIGS["quantized"].get(str(name).lower())) is not None:
            return parse_dtype(kind)
    raise ConfigError(
        f"the checkpoint's quantization {str(names[0]).lower() or quantization!r} is not known: name the weights' type"
    )


def capped(value: _Numbers, most: float) -> _Numbers:
    """The lesser of both, rounded off, so that a fit can leave the cap again: 6 % below it where both are equal.

    >>> round(capped(0.5, 0.97), 3), round(capped(3.0, 0.97), 3)
    (0.5, 0.97)
    """
    return rounded_max(value, most, -_SHARPNESS)


class Efficiencies(FrozenModel):
    """Shares of one GPU's rates that engines reach, and seconds of launching relative to other GPUs'.

    With keys and values in fp8 `quantised_kv` multiplies the share of the KV cache, and a speculative iteration takes
    `sd_quantised_kv_s` more. `verify_reads` is as in `Constants`: kernels for more than one query.
    """

    memory: Factor
    compute: Factor
    kv: Factor
    link: Factor
    launch: Factor = 1.0
    quantised_kv: Factor = 1.0
    sd_quantised_kv_s: Seconds = 0.0
    verify_reads: Times = 1.0


class Experts(FrozenModel):
    """Costs of mixtures of experts, whatever the engine and the GPU; fields as in `Constants`.

    `expert_prefill` multiplies the prefill efficiency. A layer with an MLP for all tokens beside its experts, which are
    then chosen within groups, takes `shared_layer_s` more.
    """

    expert_efficiency: Share
    expert_rows: Times
    draft_spread: Share
    expert_prefill: Factor
    shared_layer_s: Seconds


class Quantised(FrozenModel):
    """Memory and compute efficiency of products with weights of fewer bits, relative to bf16."""

    memory: Factor
    compute: Factor


class MeasurementSet(FrozenModel):
    """One set of measurements of the fit: what was run, and the spans covered.

    `batch` counts requests, `context_tokens` are per request, `draft_depth` is None where nothing was drafted.
    """

    gpu: str
    model: str
    weights: Dtype
    tp: tuple[int, ...]
    batch: Span
    context_tokens: Span
    draft_depth: Span | None = None
    source: str

    def of(self, gpu: str, model: str, weights: str) -> bool:
        """Return whether the GPU, the model and the weights' type are these."""
        return (self.gpu, self.model, self.weights) == (gpu, model, weights)


class EngineProfile(FrozenModel):
    """Terms of one engine, in seconds where they end in `_s`; `memory` is relative to the GPU's efficiency.

    Per layer: `layer_s`, `qk_norm_layer_s` where queries and keys are normalised, `quantised_layer_s` where weights
    have fewer bits than 16 (inputs are quantised too), `quantised_kv_layer_s` where keys and values have,
    `expert_layer_s` where there are experts (routing, dispatch).
    Drafting terms are those of a drafter with weights.
    """

    engine: str
    versions: str
    memory: Factor
    prefill_efficiency: Factor
    step_s: Seconds
    layer_s: Seconds
    qk_norm_layer_s: Seconds
    quantised_layer_s: Seconds
    quantised_kv_layer_s: Seconds
    expert_layer_s: Seconds
    allreduce_s: Seconds
    per_request_s: Seconds
    sd_base_s: Seconds
    draft_level_s: Seconds
    draft_level_per_request_s: Seconds
    tree_s: Seconds
    verify_token_s: Seconds
    draft_vocab: PositiveInt | None = None
    measured: tuple[MeasurementSet, ...]
    notes: tuple[str, ...] = ()

    def unmeasured(self, gpu: str, model: str, weights: Dtype, *, drafting: bool = False) -> tuple[str, ...]:
        """Parts never measured with this engine; "together" where each was measured, but not in one set."""
        query = {"gpu": gpu, "model": model, "weights": str(weights)}
        sets = [m for m in self.measured if m.draft_depth or not drafting]
        missing = tuple(name for name, value in query.items() if all(getattr(m, name) != value for m in sets))
        return missing or (() if any(m.of(**query) for m in sets) else ("together",))


class Profiles(FrozenModel):
    """One joint fit: `typical` efficiencies stand for GPUs that were not measured.

    `quantised` is for weights of 8 bits and fp4, `int4` for weights that are unpacked to 16 bits. `errors` of dense
    models and of ones with experts are those of all engines, as in `Evidence`: with a third of each set of measurements
    left out (`MEASURED`), and with its model, GPU, engine or type of weights (`LEFT_OUT`).
    """

    knee: Annotated[float, Field(ge=1, le=20)]
    quantised: Quantised
    int4: Quantised
    experts: Experts
    typical: Efficiencies
    gpus: dict[str, Efficiencies]
    engines: dict[str, EngineProfile]
    errors: dict[Literal["dense", "experts"], dict[str, Bound]] = Field(default_factory=dict)
    provenance: tuple[str, ...]

    def evidence(self, engine: str, gpu: str, model: ModelShape, weights: Dtype) -> Evidence:
        """Evidence for this engine's costs of a model on one kind of GPU."""
        profile, errors = self.engines[engine], self.errors.get("experts" if model.experts else "dense", {})
        nearest = [m for m in profile.measured if m.of(gpu, model.name, weights)]
        drafted = [m for m in profile.measured if m.draft_depth]
        depths = [m.draft_depth for m in ([m for m in nearest if m.draft_depth] or drafted) if m.draft_depth]
        kinds = {kind: LEFT_OUT + kind for kind in ("", SPECULATING, GOODPUT)}
        fitted = {f"all{kind}": errors[MEASURED + kind] for kind in kinds if MEASURED + kind in errors}
        return Evidence(
            engine=engine,
            unmeasured=profile.unmeasured(gpu, model.name, weights),
            drafting_unmeasured=profile.unmeasured(gpu, model.name, weights, drafting=True),
            speculation=bool(drafted),
            left_out={name: errors[name] for name in kinds.values() if name in errors},
            fitted=fitted,
            draft_depth=(min(d[0] for d in depths), max(d[1] for d in depths)) if depths else None,
        )

    def constants(self, engine: str, gpu: str, model: ModelShape, weights: Dtype, kv: Dtype = "bf16") -> Constants:
        """The roofline's constants of this engine for one model on one kind of GPU."""
        e, on = self.engines[engine], self.gpus.get(gpu, self.typical)
        fewer, fewer_kv = (DTYPE_BYTES[kind] < DTYPE_BYTES["bf16"] for kind in (weights, kv))
        products = Quantised(memory=1.0, compute=1.0)
        if fewer:
            products = self.int4 if weights == "int4" else self.quantised
        experts = self.experts
        shared = model.expert_layers * bool(model.shared_intermediate)
        per_layer = (
            e.layer_s
            + e.qk_norm_layer_s * model.qk_norm
            + e.quantised_layer_s * fewer
            + e.quantised_kv_layer_s * fewer_kv
            + (e.expert_layer_s * model.expert_layers + experts.shared_layer_s * shared) / model.layers
        )
        # Terms of the same name are the engine's own.
        fields = set(Constants.model_fields)
        terms = (
            e.model_dump(include=fields)
            | experts.model_dump(include=fields)
            | {
                "memory_efficiency": capped(on.memory * e.memory * products.memory, MOST_EFFICIENT),
                "compute_efficiency": capped(on.compute * products.compute, MOST_EFFICIENT),
                "kv_efficiency": capped(on.kv * (on.quantised_kv if fewer_kv else 1.0), MOST_EFFICIENT),
                "link_efficiency": capped(on.link, MOST_EFFICIENT),
                "prefill_efficiency": e.prefill_efficiency * (experts.expert_prefill if model.experts else 1.0),
                "verify_reads": on.verify_reads,
                "knee": self.knee,
                "layer_s": per_layer * on.launch,
                "sd_base_s": e.sd_base_s + (on.sd_quantised_kv_s if fewer_kv else 0.0),
                "sd_idle_s": 0.0,
            }
        )
        return Constants.model_validate(terms)


@cache
def profiles() -> Profiles:
    """The fit that ships with the package."""
    with faults_in("profiles.json"):
        return Profiles.model_validate(read_json(Path(__file__).with_name("profiles.json")))


def profile_costs(
    engine: str | None, gpu_source: str | Gpu, model_source: str | ModelShape, tp: int = 1,
    *, weights: Dtype | None = None, kv: Dtype = "bf16",
) -> RooflineCosts:  # fmt: skip
    """Costs of a model on `tp` GPUs under one engine, with their errors as `evidence`.

    `gpu_source` is a name, a JSON file of a `Gpu`; `model_source` a name, a Hugging Face `config.json` or its folder.
    Without an `engine` it is `ENGINE`, and the evidence names the others. Raises ConfigError for what is not known, and
    where the weights do not fit.
    """
    fit = profiles()
    others = () if engine else tuple(name for name in fit.engines if name != ENGINE and not _OLDER.search(name))
    engine = engine or ENGINE
    if engine not in fit.engines:
        raise ConfigError(f"no engine profile {engine!r}; there are {', '.join(fit.engines)}")
    device, shape = find_gpu(gpu_source), find_model(model_source)
    kind = weights or shape.weights
    profile = fit.engines[engine]
    # Where it was measured itself only those batches count.
    nearest = [m.batch for m in profile.measured if m.of(device.name, shape.name, kind) and not m.draft_depth]
    batches = nearest or [m.batch for m in profile.measured]
    constants = fit.constants(engine, device.name, shape, kind, kv)
    ideal = Ideal.of(device, shape, tp, kind, kv)
    attending = ideal.query_context_s * _LONG_PROMPT / 2 / (constants.compute_efficiency * constants.prefill_efficiency)
    lacking = attending / prefill_token_s(ideal, constants)
    proportional = (
        "Prefill is proportional to tokens, so that chunks add up: attention within a prompt of "
        f"{_LONG_PROMPT:,} tokens would add {lacking:.0%}, which the fit takes into account and these costs do not."
    )
    return RooflineCosts(
        gpu=listed(device),
        model=listed(shape),
        tp=tp,
        weights=kind,
        kv=kv,
        draft_vocab=profile.draft_vocab,
        constants=constants,
        synchronous=False if engine == ENGINE else None,
        waiting=VLLM_WAITING if engine == ENGINE else None,
        evidence=fit.evidence(engine, device.name, shape, kind).model_copy(update={"other_engines": others}),
        kv_capacity_tokens=kv_capacity_tokens(device, shape, tp, weights=kind, kv=kv),
        calibrated=CalibratedRange(batch=(min(b[0] for b in batches), max(b[1] for b in batches))),
        notes=(f"Engine profile {engine} ({profile.versions}).", proportional, *profile.notes, *fit.provenance),
    )


def named_costs(name: str) -> RooflineCosts | None:
    """Costs by `ENGINE:GPUS:MODEL[:WEIGHTS[:KV]]`; None where `name` begins with no engine's name and a colon.

    >>> named_costs("vllm:2xH100:Qwen3-32B:fp8").tp
    2
    """
    engine, *parts = name.split(":")
    if not parts or engine not in profiles().engines:
        return None
    if not 2 <= len(parts) <= 4:
        raise ConfigError(f"{name!r}: give ENGINE:GPUS:MODEL[:WEIGHTS[:KV]], such as {engine}:2xH100:Qwen3-32B:fp8")
    count, times, device = parts[0].partition("x")
    tp, on = (int(count), device) if times and count.isdigit() else (1, parts[0])
    types = [parse_dtype(part) for part in parts[2:]]
    return profile_costs(
        engine, on, parts[1], tp, weights=types[0] if types else None, kv=types[1] if len(types) > 1 else "bf16"
    )


def listed(record: _Record) -> str | _Record:
    """The name of a GPU or model that is known by it, else the record: how files of costs write them."""
    return record.name if record in (*GPUS, *MODELS) else record


def find_gpu(source: str | Gpu) -> Gpu:
    """A GPU by name, or by a JSON file with the fields of `Gpu`."""
    if isinstance(source, Gpu) or not Path(source).is_file():
        return gpu(source)
    with faults_in(source):
        return Gpu.model_validate(read_json(Path(source)))


def find_model(source: str | ModelShape) -> ModelShape:
    """A model by name, by its Hugging Face `config.json` or that one's folder, or by a JSON of `ModelShape`."""
    if isinstance(source, ModelShape):
        return source
    path = Path(source) / "config.json" if Path(source).is_dir() else Path(source)
    if not path.is_file():
        return model(source)
    config: Any = read_json(path)
    if not isinstance(config, dict):
        raise ConfigError(f"{path} is no model configuration: expected an object")
    with faults_in(str(path)):
        if "kv_heads" in config:
            return ModelShape.model_validate(config)
        return shape_of_config(config, path.resolve().parent.name if path.name == "config.json" else path.stem)


def parse_dtype(name: str) -> Dtype:
    """The type of weights or of a KV cache by its name, in capitals too. ConfigError names those that there are."""
    kinds: tuple[Dtype, ...] = get_args(Dtype)
    for kind in kinds:
        if kind == name.lower():
            return kind
    raise ConfigError(f"no type {name!r} of weights or KV cache; there are {', '.join(kinds)}")
