"""Engine profiles: costs of any model on any GPU by name, what speaks for them, and precision and experts in them."""

import json

import pytest

from tests.refused import refused
from tltlab.costs.deployment import Deployment
from tltlab.costs.load import load_costs
from tltlab.costs.profiles import profile_costs
from tltlab.costs.roofline import expected_experts
from tltlab.errors import ConfigError
from tltlab.hardware import gpu, model
from tltlab.sim.fits import hardware
from tltlab.strategy import NO_SPECULATION, Strategy

QWEN3_MOE = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936, "num_experts": 128,
    "num_experts_per_tok": 8, "moe_intermediate_size": 768, "quantization_config": {"quant_method": "fp8"},
}  # fmt: skip


def plain_s(costs, batch=1, context=0):
    return costs.iteration(NO_SPECULATION).seconds(batch, batch * context)


def test_weights_of_fewer_bits_are_faster_and_smaller():
    bf16, fp8, int4 = (load_costs(f"vllm:H100:Llama-3.1-8B:{kind}") for kind in ("bf16", "fp8", "int4"))
    assert plain_s(int4) < plain_s(fp8) < plain_s(bf16)
    assert bf16.kv_capacity_tokens < fp8.kv_capacity_tokens < int4.kv_capacity_tokens
    halved = load_costs("vllm:H100:Llama-3.1-8B:bf16:fp8")
    assert load_costs("vllm:2xH100:Qwen3-32B").tensor_parallel == 2
    slope = bf16.iteration(NO_SPECULATION).context_slope_s(1)
    assert halved.iteration(NO_SPECULATION).context_slope_s(1) == pytest.approx(slope / 2, rel=0.02)
    assert halved.kv_capacity_tokens == pytest.approx(2 * bf16.kv_capacity_tokens, abs=2)


def test_only_touched_experts_are_read():
    assert expected_experts(8 / 128, 1) == pytest.approx(8 / 128)
    assert expected_experts(8 / 128, 1000) == pytest.approx(1.0)
    costs = load_costs("vllm:H200:Qwen3-30B-A3B")
    shape = model("Qwen3-30B-A3B")
    dense = shape.model_copy(update={"experts": 0, "experts_per_token": 0, "expert_intermediate": 0,
                                     "intermediate": shape.experts * shape.expert_intermediate})  # fmt: skip
    as_many_weights = costs.model_copy(update={"model": dense})
    saved = [plain_s(as_many_weights, b) - plain_s(costs, b) for b in (1, 16, 1024)]
    all_experts_s = 2 * shape.expert_params / gpu("H200").hbm_bytes_per_s
    assert saved[0] > 0.8 * all_experts_s
    assert saved[0] > saved[1] > 0
    # Verifying touches more experts than decoding, fewer than as many requests.
    verify = costs.iteration(Strategy.chain("ngram", 15))
    assert 0.2 * all_experts_s < verify.without_context_s(1) - plain_s(costs) < plain_s(costs, 16) - plain_s(costs)


def test_engines_agree_on_what_experts_take():
    """Few requests to many of a mixture that none of them measured: engines differ by their overhead alone."""
    engines = ("vllm", "vllm-0.12", "sglang", "tensorrt-llm")
    times = [[plain_s(load_costs(f"{engine}:2xH200:Qwen3-30B-A3B"), b) for engine in engines] for b in (8, 64)]
    assert all(max(each) < 1.25 * min(each) for each in times)


@pytest.mark.parametrize(
    ("name", "distance", "unmeasured"),
    [
        ("sglang:H200:Llama-3.1-8B", "measured together", ()),
        ("sglang:H200:Qwen3-32B", "interpolated", ("together",)),
        ("sglang:A100:Qwen3-14B", "never measured", ("gpu", "model")),
        ("vllm:2xH800:Qwen3-8B:int8", "never measured", ("gpu", "model", "weights")),
        ("vllm:4xB200:Llama-3.3-70B:fp4", "never measured", ("model",)),
    ],
)
def test_predictions_state_how_near_a_measurement_is(name, distance, unmeasured):
    evidence = load_costs(name).evidence
    assert (evidence.distance, evidence.unmeasured) == (distance, unmeasured)
    assert all(fact in str(evidence) for fact in (distance, *unmeasured) if fact != "together")
    assert ("speculation" in str(evidence)) == (not evidence.speculation)


@pytest.fixture
def own(tmp_path):
    """Files of a GPU with a slow memory and of a model."""
    device, config = tmp_path / "mine.json", tmp_path / "mine" / "config.json"
    config.parent.mkdir()
    device.write_text(gpu("H100").model_copy(update={"name": "mine", "hbm_bytes_per_s": 1e12}).model_dump_json())
    config.write_text(json.dumps(QWEN3_MOE))
    return device, config


def test_a_model_is_read_off_its_config_json(own):
    by_folder, by_file = (load_costs(f"sglang:H200:{path}") for path in (own[1].parent, own[1]))
    assert by_folder == by_file
    assert (by_folder.weights, by_folder.model.name) == ("fp8", "mine")
    known = profile_costs("sglang", "H200", "Qwen3-30B-A3B", weights="fp8")
    # Its drafter has the dense layers' width.
    assert plain_s(by_folder, 8, 1000) == pytest.approx(plain_s(known, 8, 1000))


def test_a_request_is_no_longer_than_the_models_positions(own):
    own[1].write_text(json.dumps(QWEN3_MOE | {"max_position_embeddings": 4096, "rope_scaling": {"factor": 2.0}}))
    assert Deployment.of("H200", str(own[1]), tokens=8192).model.max_context == 8192
    with refused(ConfigError, naming=("8,193", "8,192", "max_position_embeddings")):
        Deployment.of("H200", str(own[1]), tokens=8193)


def test_a_gpu_is_read_off_a_file(own):
    costs = load_costs(f"vllm:{own[0]}:Llama-3.1-8B")
    assert plain_s(costs) > 2 * plain_s(load_costs("vllm:H100:Llama-3.1-8B"))
    assert costs.evidence.unmeasured == ("gpu",)


def test_calibration_takes_files_and_known_names(own):
    device, config = own
    found = hardware(str(device), str(config), 1)
    assert (found.gpu.name, found.gpu.hbm_bytes_per_s, found.model.experts) == ("mine", 1e12, 128)
    assert hardware("H100", "Qwen/Qwen2.5-7B-Instruct", 1).model == "Qwen2.5-7B"
    config.write_text("{}")
    with refused(ConfigError, naming=("hidden_size",)):
        hardware("H100", str(config), 1)


def test_the_missing_share_of_attention_is_reported():
    """8,000 tokens attend to 4,000 on average: 4 FLOPs for each of 32 layers' 4,096 values, 2 for each weight."""
    (said,) = [note for note in load_costs("vllm:H100:Llama-3.1-8B").notes if "8,000" in note]
    share = 4 * 32 * 4096 * 4000 / (2 * model("Llama-3.1-8B").active_params)
    assert f"{share:.0%}" in said
