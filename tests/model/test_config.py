"""config.json as published, in all its vintages, and what contradicts itself."""

import copy
import json
import re
from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig
from transformers import PaliGemmaConfig as HFConfig
from transformers.activations import ACT2FN

from model.config import GEMMA2_ONLY, PRESETS, PaliGemmaConfig, TextConfig, VisionConfig
from model.linear import ACTIVATIONS
from model.registry import read_config
from model.systems import configs
from tests.files import table, write_json
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
NEVER_MISSING = "hidden_size intermediate_size num_hidden_layers num_attention_heads".split()


def changed(raw, part, **values):
    return raw | {part: raw[part] | values}


def test_published_files_are_the_presets():
    """Breaks when a field that a published file leaves out gets another value than the model was
    trained with."""
    assert PaliGemmaConfig.from_dict(PUBLISHED_1) == PRESETS["paligemma-3b-224"]
    assert PaliGemmaConfig.from_dict(PUBLISHED_2) == PRESETS["paligemma2-3b-224"]
    text = GEMMA | {"pad_token_id": 3}
    few = PaliGemmaConfig.from_dict(
        {"model_type": "paligemma", "pad_token_id": 9, "text_config": text}
    )
    assert (few.image_token_id, few.pad_token_id) == (
        256000,
        9,
    )  # transformers' default; the outer one


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
def test_what_a_file_leaves_out_is_transformers_default(kind):
    """Breaks when a key that no shape shows means another number without a word."""
    known = AutoConfig.for_model(kind, num_attention_heads=64)
    raw = {name: getattr(known, name) for name in NEVER_MISSING}
    if kind == "gemma":  # which is refused without
        raw["num_key_value_heads"] = known.num_key_value_heads
    ours = configs.LanguageConfig.from_dict({"model_type": kind} | raw)
    for name in "max_position_embeddings bos_token_id".split():
        assert getattr(ours, name) == getattr(known, name), name
    assert list(ours.eos_token_id) == [id_ for id_ in [known.eos_token_id] if id_ is not None]
    for name in "rms_norm_eps tie_word_embeddings num_key_value_heads".split():
        assert getattr(ours.text, name) == getattr(known, name), name
    for name in GEMMA2_ONLY:
        assert getattr(ours.text, name) == getattr(known, name, None), name
    assert ours.text.rope_theta == known.rope_parameters["rope_theta"]
    widths = [getattr(known, "head_dim", None), known.hidden_size // known.num_attention_heads]
    assert ours.text.head_dim == (widths[0] or widths[1])


@pytest.mark.parametrize("kind", configs.FAMILIES)
@pytest.mark.parametrize("hidden_act", ["gelu", "silu", None])
@pytest.mark.parametrize("hidden_activation", ["gelu", "silu", None])
def test_the_activation_is_that_of_transformers(kind, hidden_act, hidden_activation):
    """Breaks when the name that a family ignores is read, or "gelu" of Gemma 1, which means the
    tanh, is believed."""
    raw = dict.fromkeys([*NEVER_MISSING, "num_key_value_heads", "head_dim"], 2) | {
        "model_type": kind
    }
    if hidden_act:
        raw["hidden_act"] = hidden_act
    if hidden_activation:
        raw["hidden_activation"] = hidden_activation
    hf = AutoConfig.for_model(**raw)
    x = torch.linspace(-4, 4, 99)
    theirs = ACT2FN[hf.hidden_activation if kind == "gemma2" else hf.hidden_act](x)
    assert torch.equal(ACTIVATIONS[configs.decoder_of(raw).hidden_activation](x), theirs)


@pytest.mark.parametrize("name", NEVER_MISSING)
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


# the file | what it says instead | a word of the message
REFUSED = """1 | {"model_type": "llava"} | 'llava'
    1 | {"text_config": {"model_type": "llama"}} | 'llama'
    1 | {"text_config": {"hidden_act": "relu"}} | 'relu'
    1 | {"text_config": {"attention_bias": true}} | attention_bias
    2 | {"text_config": {"use_bidirectional_attention": false}} | use_bidirectional_attention
    1 | {"text_config": {"rope_parameters": {"rope_type": "default"}, "rope_scaling": LINEAR}} | linear
    2 | {"text_config": {"rope_parameters": {"sliding_attention": LINEAR, "full_attention": LINEAR}}} | by layer
    2 | {"text_config": {"layer_types": [FULL]}} | layer_types
    2 | {"text_config": {"rms_norm_eps": null}} | rms_norm_eps is null
    2 | {"text_config": {"rope_theta": null}} | rope_theta is null
    2 | {"text_config": {"sliding_window": null}} | sliding_window is null
    2 | {"text_config": {"query_pre_attn_scalar": null}} | query_pre_attn_scalar is null
    1 | {"text_config": {"hidden_size": null}} | hidden_size is missing
    1 | {"text_config": {"intermediate_size": null}} | intermediate_size is missing
    1 | {"text_config": {"num_hidden_layers": null}} | num_hidden_layers is missing
    1 | {"text_config": {"num_attention_heads": null}} | num_attention_heads is missing
    1 | {"text_config": {"num_key_value_heads": null}} | num_key_value_heads is missing
    1 | {"text_config": {}} | is missing
    1 | {"text_config": {"num_key_value_heads": 3}} | no multiple of 3
    llama | {"num_attention_heads": 3, "num_key_value_heads": 2} | 3 heads are no multiple of 2
    1 | {"vision_config": {"num_attention_heads": 5}} | 1152 is no multiple of 5 heads
    1 | {"vision_config": {"patch_size": 300}} | patch_size 300
    1 | {"text_config": {"rms_norm_eps": NaN}} | rms_norm_eps is nan
    2 | {"text_config": {"query_pre_attn_scalar": 0.0}} | query_pre_attn_scalar is 0.0
    llama | {"rope_theta": -1.0} | rope_theta is -1.0
    llama | {"repetition_penalty": 0.0} | repetition_penalty is 0.0
    llama | {"head_dim": 15} | head_dim 15 is odd
    llama | {"head_dim": null, "hidden_size": 130} | 130 is no multiple of 4 heads
    llama | {"head_dim": null, "num_attention_heads": 0} | num_attention_heads is missing
    1 | {"image_token_id": 5} | two ids
    1 | {"image_token_index": null} | image_token_index
    1 | {"text_config": {"num_hidden_layers": 1000000000}} | num_hidden_layers
    1 | {"image_token_index": -1} | image_token_id is -1
    1 | {"vision_config": {"model_type": "clip"}} | siglip_vision_model
    llama | {"rope_scaling": {"rope_type": "dynamic"}} | 'dynamic'
    llama | {"rope_scaling": {"rope_type": "yarn"}} | 'yarn'
    llama | {"rope_scaling": {"factor": null}} | factor
    llama | {"rope_scaling": {"factor": Infinity}} | factor
    llama | {"rope_scaling": {"low_freq_factor": 4.0}} | factor
    llama | {"rope_scaling": {"high_freq_factor": NaN}} | factor
    llama | {"rope_scaling": {"partial_rotary_factor": 0.5}} | factor
    llama | {"rope_scaling": {"original_max_position_embeddings": 0}} | original
    llama | {"attention_bias": 1} | attention_bias
    llama | {"pad_token_id": 1728} | token id 1728
    qwen2 without a stop token | {"bos_token_id": 1728} | token id 1728
    qwen2 without a stop token | {"use_sliding_window": true} | use_sliding_window
    qwen2 without a stop token | {"hidden_act": "relu"} | hidden_activation
    gemma | {"use_bidirectional_attention": true} | use_bidirectional_attention
    qwen2 without a stop token | {"is_causal": false} | is_causal
    qmamba-2.8b | {"projector_config": {"queries": 730}} | 730 queries
    qmamba-2.8b | {"projector_config": {"num_attention_heads": 5}} | 5 heads
    qmamba-2.8b | {"vision_config": {"feature_layer": -29}} | feature_layer"""
REFUSED = REFUSED.replace("LINEAR", '{"rope_type": "linear", "factor": 2.0}')
REFUSED = REFUSED.replace("FULL", ", ".join(['"full_attention"'] * 26))


@pytest.mark.parametrize("name, change, word", table(REFUSED))
def test_other_architectures_and_contradictions_are_refused(name, change, word, tmp_path):
    """Breaks when a file that this code cannot honour is read as if it could, or ends in a
    traceback."""
    raw = {"1": PUBLISHED_1, "2": PUBLISHED_2}.get(name) or CONFIGS[name].to_dict()
    for key, value in json.loads(change).items():
        # an empty part stays empty
        raw = (
            changed(raw, key, **value) if value and isinstance(value, dict) else raw | {key: value}
        )
    file = write_json(tmp_path / "config.json", raw)
    assert re.match(f"{file}: .*{word}", refused(lambda: read_config(file)))


# generation_config.json | a word of the message
GENERATION = """
    {"eos_token_id": 1, "suppress_tokens": [257152]} |
    {"eos_token_id": [1], "stop_strings": null} |
    {"eos_token_id": [1, 107]} | eos_token_id
    {"eos_token_id": 107} | eos_token_id
    {"num_beams": 4} | num_beams
    {"suppress_tokens": [257152, 5]} | suppress_tokens
    {"forced_eos_token_id": 1} | forced_eos_token_id
    {"stop_strings": ["."]} | stop_strings"""


@pytest.mark.parametrize("given, word", table(GENERATION))
def test_what_generation_config_says_otherwise_is_refused(given, word, tmp_path):
    """Breaks when answers end elsewhere than transformers', which reads generation_config.json, or
    a file that says the same is refused."""
    file = write_json(tmp_path / "config.json", PUBLISHED_1)
    (tmp_path / "generation_config.json").write_text(given)
    if word:
        refused(lambda: read_config(file), f"generation_config.json: {word}")
    else:
        assert read_config(file) == PRESETS["paligemma-3b-224"]
