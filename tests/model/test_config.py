"""config.json as published, in all its vintages, and what contradicts itself."""

import json

import pytest
from transformers import PaliGemmaConfig as HFConfig

from model.common import UserError
from model.config import PRESETS, PaliGemmaConfig, TextConfig, read_decoder
from model.system_configs import MambaConfig, QMambaConfig, TextModelConfig, WingsConfig, read_config
from weights.load import read_siglip

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
LINEAR = {"rope_type": "linear", "factor": 2.0}


def changed(raw: dict, part: str | None = None, **values) -> dict:
    raw = json.loads(json.dumps(raw))
    (raw[part] if part else raw).update(values)
    return raw


def test_published_files_are_the_presets():
    """Breaks when a field that a published file leaves out gets another value than the model was trained with."""
    assert PaliGemmaConfig.from_dict(PUBLISHED_1) == PRESETS["paligemma-3b-224"]
    assert PaliGemmaConfig.from_dict(PUBLISHED_2) == PRESETS["paligemma2-3b-224"]


def test_the_stale_position_count_is_not_believed():
    """Breaks when a 448 px file, whose num_positions still says 256, gets the vision tower of 224 px."""
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


@pytest.mark.parametrize("name", ["hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"])
def test_a_size_that_is_left_out_is_that_of_transformers(name, tmp_path):
    """Breaks when a tower of 12 heads, which older versions leave out as the default, is cut into 16: no shape says so.

    So of a SigLIP by itself, whose published files leave out more."""
    raw = changed(PUBLISHED_1, "vision_config", hidden_size=1152)
    del raw["vision_config"][name]
    theirs = HFConfig(**json.loads(json.dumps(raw))).vision_config
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "siglip", "vision_config": raw["vision_config"]}))
    for vision in (PaliGemmaConfig.from_dict(raw).vision, read_siglip(tmp_path / "config.json")):
        assert getattr(vision, name) == getattr(theirs, name)


@pytest.mark.parametrize("model_type", ["gemma", "qwen2"])
def test_fields_of_gemma_2_are_its_own(model_type):
    """Breaks when another decoder gets caps, a window or a scale, which transformers does not read there."""
    raw = changed(PUBLISHED_1["text_config"], None, model_type=model_type)
    given = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "sliding_window": 8}
    assert read_decoder(raw | given | {"query_pre_attn_scalar": 144}, "config.json") == read_decoder(raw, "config.json")


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
        (
            changed(PUBLISHED_1, "text_config", rope_parameters={"rope_type": "default"}, rope_scaling=LINEAR),
            "'linear'",
        ),
        (changed(PUBLISHED_1, "vision_config", hidden_act="gelu"), "hidden_act is 'gelu'"),
        (changed(PUBLISHED_2, "vision_config", hidden_act="quick_gelu"), "hidden_act is 'quick_gelu'"),
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


# ---------------------------------------------------------------------------------------------------------------------
# Hostile values, in every field of every model's configuration
# ---------------------------------------------------------------------------------------------------------------------

QMAMBA = QMambaConfig()
FILES = {
    "paligemma 1": PRESETS["paligemma-3b-224"].to_dict(),
    "paligemma 2": PRESETS["paligemma2-3b-224"].to_dict(),
    "wings": WingsConfig.beside(PRESETS["tiny"]).to_dict(),
    "qmamba": QMAMBA.to_dict(),
    "text": TextModelConfig(TextConfig(), True).to_dict(),
    "mamba": MambaConfig().to_dict(),
}
READERS = {
    "paligemma 1": PaliGemmaConfig,
    "paligemma 2": PaliGemmaConfig,
    "wings": WingsConfig,
    "qmamba": QMambaConfig,
    "text": TextModelConfig,
    "mamba": MambaConfig,
}
# what the readers do not use, or have other names for
IGNORED = {
    "architectures",
    "projection_dim",
    "vision_use_head",
    "model_type",
    "tie_word_embeddings",
    "hidden_act",
    "num_image_tokens",
}
HOSTILE = [
    10**400,
    10**9,
    -1,
    -(2**63) - 1,
    1.5e300,
    float("inf"),
    float("-inf"),
    float("nan"),
    "8",
    "",
    [],
    [8],
    {},
    {"a": 1},
    "\x1b[2J",
]


def leaves(raw: dict, path: tuple[str, ...] = ()):
    """The path of every field of a file."""
    for name, value in raw.items():
        if isinstance(value, dict):
            yield from leaves(value, (*path, name))
        yield (*path, name)


def with_value(raw: dict, path: tuple[str, ...], value) -> dict:
    raw = dict(raw)
    raw[path[0]] = value if len(path) == 1 else with_value(raw[path[0]], path[1:], value)
    return raw


def is_read(kind: str, path: tuple[str, ...], value) -> bool:
    """Whether a file's value of a field must be possible."""
    *parts, name = path
    if name in IGNORED or name.endswith("_token_id") and parts[-1:] == ["text_config"] and kind != "qmamba":
        return False
    if name == "intermediate_size" and (kind == "mamba" or kind == "qmamba" and parts == ["text_config"]):
        return False
    if name == "hidden_size" and parts in ([], ["paligemma_config"]) and kind != "mamba":
        return False
    large = (
        "rope_theta",
        "query_pre_attn_scalar",
        "attn_logit_softcapping",
        "final_logit_softcapping",
        "sliding_window",
    )
    return not (value == 10**9 and name in large or value == -1 and name == "feature_layer")


@pytest.mark.long
@pytest.mark.parametrize("kind", FILES)
def test_every_field_is_checked(kind):
    """Breaks when an impossible value of any field is built into a model, hangs, or ends in a traceback."""
    raw, read = FILES[kind], READERS[kind].from_dict
    assert read(json.loads(json.dumps(raw))) == read(raw)
    for path in leaves(raw):
        for value in [*HOSTILE, True] if not isinstance(value_at(raw, path), bool) else [*HOSTILE, 0, 1]:
            try:
                read(with_value(raw, path, value), "config.json")
            except UserError as error:
                assert str(error).startswith("config.json: ") and str(error).isprintable() and len(str(error)) < 500
            else:
                is_section = isinstance(value_at(raw, path), dict) and isinstance(value, dict)
                assert is_section or not is_read(kind, path, value), (path, value)


def value_at(raw: dict, path: tuple[str, ...]):
    return value_at(raw[path[0]], path[1:]) if len(path) > 1 else raw[path[0]]


@pytest.mark.long
@pytest.mark.parametrize(
    ("part", "name", "value", "message"),
    [
        ("text_config", "rope_theta", float("inf"), "text_config.rope_theta is inf, expected a number from"),
        ("text_config", "rope_theta", -10000.0, "rope_theta is -10000.0"),
        ("text_config", "rms_norm_eps", float("nan"), "text_config.rms_norm_eps is nan, expected a number from 0 to 1"),
        ("vision_config", "layer_norm_eps", -1e-6, "vision_config.layer_norm_eps is -1e-06"),
        (
            "text_config",
            "num_hidden_layers",
            10**9,
            "num_hidden_layers is 1000000000, expected an integer from 1 to 1024",
        ),
        ("text_config", "attn_logit_softcapping", 0, "attn_logit_softcapping is 0"),
        ("text_config", "sliding_window", -1, "sliding_window is -1"),
        ("text_config", "num_attention_heads", True, "num_attention_heads is True"),
        ("vision_config", "image_size", 14 * 300, "has 90000 tokens"),
        ("text_config", "rope_parameters", 5, "rope_parameters is 5, expected an object"),
        ("vision_config", "num_image_tokens", 250, "num_image_tokens is 250, expected a square"),
        (None, "vision_config", [1], r"vision_config is \[1\], expected an object"),
        (None, "eos_token_id", 300_000, "eos_token_id is 300000, but vocab_size only 257216"),
        (None, "pad_token_id", [0, 1], r"pad_token_id is \[0, 1\]"),
    ],
)
def test_impossible_values_are_named(part, name, value, message):
    """Breaks when NaN, infinite or negative numbers are built into a model, or a message does not name the field."""
    with pytest.raises(UserError, match=message):
        PaliGemmaConfig.from_dict(changed(PUBLISHED_2, part, **{name: value}))


@pytest.mark.long
def test_repeated_fields_are_refused(tmp_path):
    """Breaks when the second of two equal keys silently wins."""
    (tmp_path / "config.json").write_text('{"model_type": "paligemma", "model_type": "wings"}')
    with pytest.raises(UserError, match="the key model_type stands there twice"):
        read_config(tmp_path / "config.json")
