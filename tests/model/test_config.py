"""config.json as published, in all its vintages, and what contradicts itself."""

import json
import math
from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig
from transformers import PaliGemmaConfig as HFConfig
from transformers.activations import ACT2FN

from model.common import UserError
from model.config import PRESETS, PaliGemmaConfig, TextConfig, VisionConfig
from model.linear import ACTIVATIONS
from model.registry import read_config
from model.systems import configs

# what the hub's files hold, shortened to what matters; both leave out whatever equalled the
# defaults of their day
IDS = {"image_token_index": 257152, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1}
TOWER = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_attention_heads": 16,
    "num_hidden_layers": 27,
}
TOWER |= {
    "model_type": "siglip_vision_model",
    "num_image_tokens": 256,
    "num_positions": 256,
    "patch_size": 14,
}
GEMMA = {
    "model_type": "gemma",
    "hidden_size": 2048,
    "intermediate_size": 16384,
    "num_attention_heads": 8,
}
GEMMA |= {
    "num_hidden_layers": 18,
    "num_image_tokens": 256,
    "num_key_value_heads": 1,
    "vocab_size": 257216,
}
GEMMA2 = {
    "model_type": "gemma2",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
}
GEMMA2 |= {
    "num_image_tokens": 256,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
GEMMA2 |= {"final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0, "vocab_size": 257216}
PUBLISHED_1 = {
    "model_type": "paligemma",
    "vocab_size": 257216,
    "text_config": GEMMA,
    "vision_config": TOWER,
} | IDS
PUBLISHED_2 = {"model_type": "paligemma", "text_config": GEMMA2, "vision_config": TOWER} | IDS
LINEAR, LAYERS = {"rope_type": "linear", "factor": 2.0}, ["sliding_attention", "full_attention"]
NEVER_NULL = [
    "rms_norm_eps",
    "rope_theta",
    "sliding_window",
    "query_pre_attn_scalar",
]  # transformers refuses it, too


def changed(raw: dict, part: str, **values) -> dict:
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
TINY, UNCAPPED = (
    PRESETS["tiny"],
    TextConfig("gemma2", query_pre_attn_scalar=256.0, sliding_window=8),
)
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
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name].to_dict()))
    assert type(CONFIGS[name]).from_file(tmp_path / "config.json") == CONFIGS[name]
    if name != "mamba":  # a part of other models
        assert read_config(tmp_path / "config.json") == CONFIGS[name]


@pytest.mark.parametrize("name", ["paligemma-3b-224", "paligemma2-3b-448", "paligemma2-28b-896"])
def test_transformers_reads_and_writes_the_same_model(name, tmp_path):
    """Breaks when transformers would build other sizes from our file, or we from theirs."""
    config = PRESETS[name]
    hf = HFConfig(**config.to_dict())
    sizes = ["hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"]
    for ours, theirs, more in (
        (
            config.text,
            hf.text_config,
            ["head_dim", "num_key_value_heads", "vocab_size", "rms_norm_eps"],
        ),
        (config.vision, hf.vision_config, ["patch_size", "image_size", "layer_norm_eps"]),
    ):
        assert all(getattr(ours, field) == getattr(theirs, field) for field in [*sizes, *more])
    assert hf.text_config.rope_parameters["rope_theta"] == config.text.rope_theta
    assert hf.image_token_index == config.image_token_id
    hf.save_pretrained(tmp_path)
    assert PaliGemmaConfig.from_file(tmp_path / "config.json") == config


def test_what_a_file_says_otherwise_than_it_means():
    """Breaks when a cap that is null comes back, or Gemma 1 gets those of Gemma 2."""
    text = PaliGemmaConfig.from_dict(
        changed(PUBLISHED_2, "text_config", attn_logit_softcapping=None, head_dim=None)
    ).text
    assert (text.attn_logit_softcapping, text.final_logit_softcapping, text.head_dim) == (
        None,
        30.0,
        256,
    )
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
    names = {"hidden_act": hidden_act, "hidden_activation": hidden_activation}
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    raw = {"model_type": kind, "num_attention_heads": 2, "num_key_value_heads": 1, **sizes} | {
        k: v for k, v in names.items() if v
    }
    hf, x = AutoConfig.for_model(**raw), torch.linspace(-4, 4, 99)
    theirs = ACT2FN[hf.hidden_activation if kind == "gemma2" else hf.hidden_act](x)
    assert torch.equal(ACTIVATIONS[configs.decoder_of(raw).hidden_activation](x), theirs)


@pytest.mark.parametrize(
    "name", ["hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"]
)
def test_a_size_that_is_left_out_is_that_of_transformers(name):
    """Breaks when a tower of 12 heads, which older versions leave out as the default, is cut into
    16: no shape says so.

    So of a SigLIP by itself, whose published files leave out more."""
    tower = {key: value for key, value in TOWER.items() if key != name}
    theirs = HFConfig(
        **json.loads(json.dumps(PUBLISHED_1 | {"vision_config": tower}))
    ).vision_config
    whole = PaliGemmaConfig.from_dict(PUBLISHED_1 | {"vision_config": tower}).vision
    for vision in (whole, VisionConfig.from_dict({"model_type": "siglip", "vision_config": tower})):
        assert getattr(vision, name) == getattr(theirs, name)


QMAMBA = configs.QMambaConfig().to_dict()
QWEN_FILE = CONFIGS["qwen2 without a stop token"].to_dict()
LLAMA_FILE = CONFIGS["llama"].to_dict()
LLAMA3 = LLAMA_FILE["rope_scaling"]
REFUSED = [
    ({"model_type": "llava"}, "'llava'"),
    (changed(PUBLISHED_1, "text_config", model_type="llama"), "'llama'"),
    (changed(PUBLISHED_1, "text_config", hidden_act="relu"), "'relu'"),
    (changed(PUBLISHED_1, "text_config", attention_bias=True), "attention_bias"),
    (
        changed(PUBLISHED_2, "text_config", use_bidirectional_attention=False),
        "use_bidirectional_attention",
    ),
    (
        changed(
            PUBLISHED_1,
            "text_config",
            rope_parameters={"rope_type": "default"},
            rope_scaling=LINEAR,
        ),
        "linear",
    ),
    (
        changed(
            PUBLISHED_2,
            "text_config",
            rope_parameters=dict.fromkeys(LAYERS, LINEAR | {"factor": 1.0}),
        ),
        "by layer",
    ),
    (changed(PUBLISHED_2, "text_config", layer_types=["full_attention"] * 26), "layer_types"),
    *(
        (changed(PUBLISHED_2, "text_config", **{name: None}), f"{name} is null")
        for name in NEVER_NULL
    ),
    *(
        (changed(PUBLISHED_1, "text_config", **{name: None}), f"{name} is missing")
        for name in (
            *(name for name in GEMMA if "hidden" in name or "heads" in name),
            "intermediate_size",
        )
    ),
    (PUBLISHED_1 | {"text_config": {}}, "is missing"),
    (PUBLISHED_1 | {"image_token_id": 5}, "two ids"),
    (PUBLISHED_1 | {"image_token_index": None}, "image_token_index"),
    (changed(PUBLISHED_1, "text_config", num_hidden_layers=10**9), "num_hidden_layers"),
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
    (
        CONFIGS["gemma"].to_dict() | {"use_bidirectional_attention": True},
        "use_bidirectional_attention",
    ),
    (QMAMBA | {"projector_config": {"queries": 730}}, "730 queries"),
    (QMAMBA | {"projector_config": {"num_attention_heads": 5}}, "5 heads"),
    (changed(QMAMBA, "vision_config", feature_layer=-29), "feature_layer"),
]


@pytest.mark.parametrize(("raw", "word"), REFUSED)
def test_other_architectures_and_contradictions_are_refused(raw, word, tmp_path):
    """Breaks when a file that this code cannot honour is read as if it could, or ends in a
    traceback."""
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(UserError, match=word) as caught:
        read_config(tmp_path / "config.json")
    assert str(caught.value).startswith(f"{tmp_path / 'config.json'}: ") and "\n" not in str(
        caught.value
    )


GENERATION = [
    ({"eos_token_id": 1, "suppress_tokens": [257152]}, ""),
    ({"eos_token_id": [1], "stop_strings": None}, ""),
    ({"eos_token_id": [1, 107]}, "eos_token_id"),
    ({"eos_token_id": 107}, "eos_token_id"),
    ({"suppress_tokens": [257152, 5]}, "suppress_tokens"),
    ({"forced_eos_token_id": 1}, "forced_eos_token_id"),
    ({"stop_strings": ["."]}, "stop_strings"),
]


@pytest.mark.parametrize(("given", "word"), GENERATION)
def test_what_generation_config_says_otherwise_is_refused(given, word, tmp_path):
    """Breaks when answers end elsewhere than transformers', which reads generation_config.json, or
    a file that says the same is refused."""
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED_1))
    (tmp_path / "generation_config.json").write_text(json.dumps(given))
    if word:
        with pytest.raises(UserError, match=f"generation_config.json: {word}"):
            read_config(tmp_path / "config.json")
    else:
        assert read_config(tmp_path / "config.json") == PRESETS["paligemma-3b-224"]
