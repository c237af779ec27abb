"""config.json as published, in all its vintages, and what contradicts itself."""

import copy
import json
import math
import re
from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig
from transformers import PaliGemmaConfig as HFConfig
from transformers.activations import ACT2FN

from model.config import PRESETS, PaliGemmaConfig, TextConfig, VisionConfig
from model.linear import ACTIVATIONS
from model.registry import read_config
from model.systems import configs
from tests.files import write_json
from tests.runs import refused

# what the hub's files hold, shortened to what matters; both leave out whatever equalled the
# defaults of their day
PUBLISHED_1 = json.loads("""{"model_type": "paligemma", "vocab_size": 257216,
    "text_config": {"model_type": "gemma", "hidden_size": 2048, "intermediate_size": 16384, "num_attention_heads": 8,
        "num_hidden_layers": 18, "num_image_tokens": 256, "num_key_value_heads": 1, "vocab_size": 257216},
    "vision_config": {"model_type": "siglip_vision_model", "hidden_size": 1152, "intermediate_size": 4304,
        "num_attention_heads": 16, "num_hidden_layers": 27, "num_image_tokens": 256, "num_positions": 256,
        "patch_size": 14},
    "image_token_index": 257152, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1}""")
GEMMA = PUBLISHED_1["text_config"]
TOWER = PUBLISHED_1["vision_config"]
PUBLISHED_2 = json.loads("""{"model_type": "paligemma",
    "text_config": {"model_type": "gemma2", "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
        "num_image_tokens": 256, "num_key_value_heads": 4, "query_pre_attn_scalar": 256, "sliding_window": 4096,
        "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0, "vocab_size": 257216},
    "image_token_index": 257152, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1}""")
PUBLISHED_2["vision_config"] = TOWER
LINEAR = {"rope_type": "linear", "factor": 2.0}
LAYERS = ["sliding_attention", "full_attention"]
# transformers refuses it, too
NEVER_NULL = "rms_norm_eps rope_theta sliding_window query_pre_attn_scalar".split()
NEVER_MISSING = "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads".split()


def changed(raw, part, **values):
    return raw | {part: raw[part] | values}


def test_published_files_are_the_presets():
    """Breaks when a field that a published file leaves out gets another value than the model was
    trained with."""
    assert PaliGemmaConfig.from_dict(PUBLISHED_1) == PRESETS["paligemma-3b-224"]
    assert PaliGemmaConfig.from_dict(PUBLISHED_2) == PRESETS["paligemma2-3b-224"]


FAMILY = vars(PRESETS["tiny"].text) | {"hidden_activation": "silu", "tie_word_embeddings": False}
QWEN = configs.LlamaConfig(**FAMILY | {"model_type": "qwen2"})
LLAMA = configs.LlamaConfig(
    **FAMILY | {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    stretch=configs.RopeStretch(32, 1.0, 4.0, 8192),
)
TINY = PRESETS["tiny"]
UNCAPPED = TextConfig("gemma2", query_pre_attn_scalar=256.0, sliding_window=8)
CONFIGS = {
    **PRESETS,
    **configs.QMAMBA_PRESETS,
    "connector": replace(
        configs.QMambaConfig(), projector=configs.ProjectorConfig("connector", scan_order="forward")
    ),
    "wings": configs.WingsConfig(**vars(TINY), rank=4, routed=False),
    "wings-language": configs.LanguageWingsConfig(
        VisionConfig(feature_layer=-2), QWEN, 1728, chat=True
    ),
    "wings on llama": configs.LanguageWingsConfig(text=LLAMA, system="You are a parrot."),
    "wings on gemma": configs.LanguageWingsConfig(text=TINY.text),
    "differential": configs.TextModelConfig.of(TextConfig(num_key_value_heads=2), True),
    "mamba": configs.MambaConfig(vocab_size=60, hidden_size=40, time_step_rank=7, eos_token_id=1),
    "gemma": configs.LanguageConfig(TINY.text, (1, 107), 0, 2),
    "gemma2 without caps": configs.LanguageConfig(UNCAPPED, (1,), 0, 2),
    "llama": configs.LanguageConfig(LLAMA, (2,), 2, 1),
    "qwen2 without a stop token": configs.LanguageConfig(QWEN),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_round_trip_through_our_file(name, tmp_path):
    """Breaks when an exported config.json reads back as another model."""
    write_json(tmp_path / "config.json", CONFIGS[name].to_dict())
    assert type(CONFIGS[name]).from_file(tmp_path / "config.json") == CONFIGS[name]
    if name != "mamba":  # a part of other models
        assert read_config(tmp_path / "config.json") == CONFIGS[name]


@pytest.mark.parametrize("name", ["paligemma-3b-224", "paligemma2-3b-448", "paligemma2-28b-896"])
def test_transformers_reads_and_writes_the_same_model(name, tmp_path):
    """Breaks when transformers would build other sizes from our file, or we from theirs."""
    config = PRESETS[name]
    hf = HFConfig(**config.to_dict())
    sizes = "hidden_size intermediate_size num_hidden_layers num_attention_heads"
    for ours, theirs, more in (
        (config.text, hf.text_config, "head_dim num_key_value_heads vocab_size rms_norm_eps"),
        (config.vision, hf.vision_config, "patch_size image_size layer_norm_eps"),
    ):
        for field in f"{sizes} {more}".split():
            assert getattr(ours, field) == getattr(theirs, field), field
    assert hf.text_config.rope_parameters["rope_theta"] == config.text.rope_theta
    assert hf.image_token_index == config.image_token_id
    hf.save_pretrained(tmp_path)
    assert PaliGemmaConfig.from_file(tmp_path / "config.json") == config


def test_what_a_file_says_otherwise_than_it_means():
    """Breaks when a cap that is null comes back, or Gemma 1 gets those of Gemma 2."""
    raw = changed(PUBLISHED_2, "text_config", attn_logit_softcapping=None, head_dim=None)
    text = PaliGemmaConfig.from_dict(raw).text
    assert text.attn_logit_softcapping is None
    assert (text.final_logit_softcapping, text.head_dim) == (30.0, 256)
    for kind in ("gemma", "llama", "qwen2"):
        plain = GEMMA | {"model_type": kind}
        given = {"attn_logit_softcapping": 50.0, "sliding_window": 8, "query_pre_attn_scalar": 144}
        assert configs.decoder_of(plain | given) == configs.decoder_of(plain)


@pytest.mark.parametrize("kind", configs.FAMILIES)
@pytest.mark.parametrize("hidden_act", ["gelu", "silu", None])
@pytest.mark.parametrize("hidden_activation", ["gelu", "silu", None])
def test_the_activation_is_that_of_transformers(kind, hidden_act, hidden_activation):
    """Breaks when the name that a family ignores is read, or "gelu" of Gemma 1, which means the
    tanh, is believed."""
    raw = {
        "model_type": kind,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
    }
    if hidden_act:
        raw["hidden_act"] = hidden_act
    if hidden_activation:
        raw["hidden_activation"] = hidden_activation
    hf = AutoConfig.for_model(**raw)
    x = torch.linspace(-4, 4, 99)
    theirs = ACT2FN[hf.hidden_activation if kind == "gemma2" else hf.hidden_act](x)
    assert torch.equal(ACTIVATIONS[configs.decoder_of(raw).hidden_activation](x), theirs)


@pytest.mark.parametrize("name", NEVER_MISSING[:4])
def test_a_size_that_is_left_out_is_that_of_transformers(name):
    """Breaks when a tower of 12 heads, which older versions leave out as the default, is cut into
    16: no shape says so.

    So of a SigLIP by itself, whose published files leave out more."""
    tower = {key: value for key, value in TOWER.items() if key != name}
    raw = PUBLISHED_1 | {"vision_config": tower}
    theirs = HFConfig(**copy.deepcopy(raw)).vision_config
    alone = VisionConfig.from_dict({"model_type": "siglip", "vision_config": tower})
    for vision in (PaliGemmaConfig.from_dict(raw).vision, alone):
        assert getattr(vision, name) == getattr(theirs, name)


QMAMBA = configs.QMambaConfig().to_dict()
QWEN_FILE = CONFIGS["qwen2 without a stop token"].to_dict()
LLAMA_FILE = CONFIGS["llama"].to_dict()
LLAMA3 = LLAMA_FILE["rope_scaling"]
GEMMA_FILE = CONFIGS["gemma"].to_dict()


def of_text(raw=PUBLISHED_1, **values):
    return changed(raw, "text_config", **values)


REFUSED = [
    ({"model_type": "llava"}, "'llava'"),
    (of_text(model_type="llama"), "'llama'"),
    (of_text(hidden_act="relu"), "'relu'"),
    (of_text(attention_bias=True), "attention_bias"),
    (of_text(PUBLISHED_2, use_bidirectional_attention=False), "use_bidirectional_attention"),
    (of_text(rope_parameters={"rope_type": "default"}, rope_scaling=LINEAR), "linear"),
    (
        of_text(PUBLISHED_2, rope_parameters=dict.fromkeys(LAYERS, LINEAR | {"factor": 1.0})),
        "by layer",
    ),
    (of_text(PUBLISHED_2, layer_types=["full_attention"] * 26), "layer_types"),
    *((of_text(PUBLISHED_2, **{name: None}), f"{name} is null") for name in NEVER_NULL),
    *((of_text(**{name: None}), f"{name} is missing") for name in NEVER_MISSING),
    (PUBLISHED_1 | {"text_config": {}}, "is missing"),
    (PUBLISHED_1 | {"image_token_id": 5}, "two ids"),
    (PUBLISHED_1 | {"image_token_index": None}, "image_token_index"),
    (of_text(num_hidden_layers=10**9), "num_hidden_layers"),
    (PUBLISHED_1 | {"image_token_index": -1}, "image_token_id is -1"),
    (changed(PUBLISHED_1, "vision_config", model_type="clip"), "siglip_vision_model"),
    *(
        (LLAMA_FILE | {"rope_scaling": {"rope_type": other, "factor": 4.0}}, f"'{other}'")
        for other in ("dynamic", "yarn")
    ),
    *(
        (LLAMA_FILE | {"rope_scaling": LLAMA3 | {name: value}}, "factor")
        for name, value in (
            ("factor", None),
            ("factor", math.inf),
            ("low_freq_factor", 4.0),
            ("high_freq_factor", math.nan),
            ("partial_rotary_factor", 0.5),
        )
    ),
    (LLAMA_FILE | {"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 0}}, "original"),
    (LLAMA_FILE | {"attention_bias": 1}, "attention_bias"),
    (QWEN_FILE | {"use_sliding_window": True}, "use_sliding_window"),
    (QWEN_FILE | {"hidden_act": "relu"}, "hidden_activation"),
    (GEMMA_FILE | {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    (QMAMBA | {"projector_config": {"queries": 730}}, "730 queries"),
    (QMAMBA | {"projector_config": {"num_attention_heads": 5}}, "5 heads"),
    (changed(QMAMBA, "vision_config", feature_layer=-29), "feature_layer"),
]


@pytest.mark.parametrize("raw, word", REFUSED)
def test_other_architectures_and_contradictions_are_refused(raw, word, tmp_path):
    """Breaks when a file that this code cannot honour is read as if it could, or ends in a
    traceback."""
    file = write_json(tmp_path / "config.json", raw)
    assert re.match(f"{file}: .*{word}", refused(lambda: read_config(file)))


GENERATION = {
    '{"eos_token_id": 1, "suppress_tokens": [257152]}': "",
    '{"eos_token_id": [1], "stop_strings": null}': "",
    '{"eos_token_id": [1, 107]}': "eos_token_id",
    '{"eos_token_id": 107}': "eos_token_id",
    '{"suppress_tokens": [257152, 5]}': "suppress_tokens",
    '{"forced_eos_token_id": 1}': "forced_eos_token_id",
    '{"stop_strings": ["."]}': "stop_strings",
}


@pytest.mark.parametrize("given, word", GENERATION.items())
def test_what_generation_config_says_otherwise_is_refused(given, word, tmp_path):
    """Breaks when answers end elsewhere than transformers', which reads generation_config.json, or
    a file that says the same is refused."""
    file = write_json(tmp_path / "config.json", PUBLISHED_1)
    (tmp_path / "generation_config.json").write_text(given)
    if word:
        refused(lambda: read_config(file), f"generation_config.json: {word}")
    else:
        assert read_config(file) == PRESETS["paligemma-3b-224"]
