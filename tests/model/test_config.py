"""config.json as published, in all its vintages, and what contradicts itself."""

import json

import pytest
from transformers import PaliGemmaConfig as HFConfig

from model.common import UserError
from model.config import PRESETS, PaliGemmaConfig, TextConfig

# what the hub's files hold, shortened to what matters; both leave out whatever equalled the defaults of their day
PUBLISHED_1 = {
    "architectures": ["PaliGemmaForConditionalGeneration"],
    "model_type": "paligemma",
    "hidden_size": 2048,
    "ignore_index": -100,
    "image_token_index": 257152,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "projection_dim": 2048,
    "vocab_size": 257216,
    "text_config": {
        "hidden_size": 2048,
        "intermediate_size": 16384,
        "model_type": "gemma",
        "num_attention_heads": 8,
        "num_hidden_layers": 18,
        "num_image_tokens": 256,
        "num_key_value_heads": 1,
        "vocab_size": 257216,
    },
    "vision_config": {
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "model_type": "siglip_vision_model",
        "num_attention_heads": 16,
        "num_hidden_layers": 27,
        "num_image_tokens": 256,
        "patch_size": 14,
        "projection_dim": 2048,
        "projector_hidden_act": "gelu_fast",
        "vision_use_head": False,
    },
}
PUBLISHED_2 = {
    "model_type": "paligemma",
    "hidden_size": 2048,
    "image_token_index": 257152,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "projection_dim": 2304,
    "text_config": {
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "model_type": "gemma2",
        "num_hidden_layers": 26,
        "num_image_tokens": 256,
        "num_key_value_heads": 4,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 50.0,
        "vocab_size": 257216,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
    },
    "vision_config": {
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "model_type": "siglip_vision_model",
        "num_attention_heads": 16,
        "num_hidden_layers": 27,
        "num_image_tokens": 256,
        "num_positions": 256,
        "patch_size": 14,
        "projection_dim": 2304,
        "vision_use_head": False,
    },
}


def changed(raw: dict, part: str | None = None, **values) -> dict:
    raw = json.loads(json.dumps(raw))
    (raw[part] if part else raw).update(values)
    return raw


def test_published_files_are_the_presets():
    """Breaks when a field that a published file leaves out gets another value than the model was trained with."""
    assert PaliGemmaConfig.from_dict(PUBLISHED_1) == PRESETS["paligemma-3b-224"]
    assert PaliGemmaConfig.from_dict(PUBLISHED_2) == PRESETS["paligemma2-3b-224"]


def test_the_stale_position_count_is_not_believed():
    """Breaks when a 448 px file, whose num_positions still says 256, gets the eye of 224 px."""
    raw = changed(PUBLISHED_2, "vision_config", num_image_tokens=1024)
    assert PaliGemmaConfig.from_dict(raw) == PRESETS["paligemma2-3b-448"]


@pytest.mark.parametrize("name", PRESETS)
def test_round_trip_through_our_file(name):
    """Breaks when an exported config.json reads back as another model."""
    assert PaliGemmaConfig.from_dict(json.loads(json.dumps(PRESETS[name].to_dict()))) == PRESETS[name]


@pytest.mark.parametrize("name", ["paligemma-3b-224", "paligemma2-3b-448", "paligemma2-28b-896"])
def test_transformers_reads_and_writes_the_same_model(name, tmp_path):
    """Breaks when transformers would build other sizes from our file, or we from theirs."""
    config = PRESETS[name]
    hf = HFConfig(**config.to_dict())
    for ours, theirs in ((config.text, hf.text_config), (config.vision, hf.vision_config)):
        for field in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
            assert getattr(ours, field) == getattr(theirs, field)
    assert hf.text_config.head_dim == config.text.head_dim
    assert hf.text_config.num_key_value_heads == config.text.num_key_value_heads
    assert hf.text_config.rope_parameters["rope_theta"] == config.text.rope_theta
    assert hf.image_token_index == config.image_token_id
    hf.save_pretrained(tmp_path)
    assert PaliGemmaConfig.from_file(tmp_path / "config.json") == config


def test_legacy_activation_names():
    """Breaks when the "gelu" of the first files, which never was what the model computed, is taken at its word."""
    for key in ("hidden_act", "hidden_activation"):
        raw = changed(PUBLISHED_1, "text_config", **{key: "gelu"})
        assert PaliGemmaConfig.from_dict(raw).text.hidden_activation == TextConfig.hidden_activation


def test_a_null_switches_a_cap_off():
    """Breaks when a cap that the file removes comes back by default."""
    raw = changed(PUBLISHED_2, "text_config", attn_logit_softcapping=None, sliding_window=None, head_dim=None)
    text = PaliGemmaConfig.from_dict(raw).text
    assert text.attn_logit_softcapping is None and text.sliding_window is None
    assert (text.final_logit_softcapping, text.head_dim) == (30.0, 256)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"model_type": "llava"}, "model_type is 'llava'"),
        (changed(PUBLISHED_1, "text_config", model_type="llama"), "'gemma' or 'gemma2'"),
        (changed(PUBLISHED_1, "vision_config", model_type="clip"), "siglip_vision_model"),
        (changed(PUBLISHED_1, "vision_config", image_size=225), "no multiple of patch_size"),
        (changed(PUBLISHED_1, "vision_config", num_attention_heads=7), "no multiple of 7 heads"),
        (changed(PUBLISHED_1, "text_config", num_key_value_heads=3), "cannot share"),
        (changed(PUBLISHED_1, "text_config", num_hidden_layers=0), "num_hidden_layers is 0"),
        (changed(PUBLISHED_1, "text_config", hidden_size="big"), "hidden_size is 'big'"),
        (changed(PUBLISHED_1, "text_config", hidden_activation="relu"), "'relu'"),
        (changed(PUBLISHED_1, "text_config", attention_bias=True), "attention_bias"),
        (changed(PUBLISHED_1, "text_config", rope_scaling={"type": "linear", "factor": 2}), "'linear'"),
        (changed(PUBLISHED_2, "text_config", layer_types=["full_attention"] * 26), "layer_types"),
    ],
)
def test_other_architectures_and_contradictions_are_refused(raw, message):
    """Breaks when a file that this code cannot honour is read as if it could."""
    with pytest.raises(UserError, match=message) as caught:
        PaliGemmaConfig.from_dict(raw, "folder/config.json")
    assert str(caught.value).startswith("folder/config.json: ") and "\n" not in str(caught.value)


@pytest.mark.parametrize(("text", "message"), [(None, "not found"), ("{", "not valid JSON"), ("[]", "a JSON list")])
def test_files_that_are_no_config(text, message, tmp_path):
    """Breaks when a damaged or absent file ends in a traceback."""
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=message):
        PaliGemmaConfig.from_file(tmp_path / "config.json")
