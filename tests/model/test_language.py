"""Gemma, Gemma 2, Llama, Qwen1.5 and Qwen2 as language models for text alone equal transformers'
`*ForCausalLM`."""

import json
import re
import shutil
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GenerationConfig

from lora import adapter
from model.differential import graft
from model.generate import generate
from model.processor import Processor
from model.registry import read_config
from model.source import BUNDLED_FOLDER
from model.systems.language import LanguageModel
from tests.files import read_json, write_json
from tests.reference import (
    hf_language,
    is_valid,
    outputs_by_layer,
    padded_texts,
    relative_error,
    reload_hf,
    right_padded,
    set_attention_backend,
)
from tests.runs import refused
from weights.export import export_model, main
from weights.load import INDEX_FILE, SINGLE_FILE, load_model, load_siglip, load_text

GATE = 1e-6
SIZES = {"hidden_size": 72, "num_hidden_layers": 3}
# of the nine waves of a head the first stays, the second is between, the others are stretched
STRETCH = json.loads("""{"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0,
    "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 40}""")
THETA = {"rope_theta": 1e6, "rope_type": "default"}
WINDOW = {"sliding_window": 6}
KINDS = {
    "gemma": {"num_key_value_heads": 1, "head_dim": 16},
    "gemma2": {"num_hidden_layers": 4, "head_dim": 16, "query_pre_attn_scalar": 24, **WINDOW},
    "llama": {"rope_parameters": STRETCH, "attention_bias": True, "mlp_bias": True},
    "tied llama": {"num_key_value_heads": 4, "tie_word_embeddings": True},
    "qwen2": {"max_window_layers": 2, "rope_parameters": THETA, **WINDOW},
}
ROWS = (20, 13, 1)  # tokens of each row; the longest passes the window


@pytest.fixture(scope="module", params=KINDS)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def hf(kind):
    """A random model in fp32, its norms near the identity, so that nothing vanishes."""
    hf = hf_language(kind.split()[-1], **SIZES | KINDS[kind])
    hf.set_attn_implementation("eager")
    for name, parameter in hf.named_parameters():
        parameter.data += float("gemma" not in kind and "norm" in name)
    return hf


@pytest.fixture(scope="module")
def folder(hf, tmp_path_factory):
    """As transformers saves it."""
    path = tmp_path_factory.mktemp("language")
    hf.save_pretrained(path)
    return path


@pytest.fixture
def model(folder):
    return opened(folder)


def opened(folder, backend="eager", **options):
    model = load_text(folder, **options)
    set_attention_backend(model, backend)
    return model


def batch(rows=ROWS):
    """A left-padded batch."""
    return padded_texts(rows, 3, 128)


def theirs(hf, inputs):
    """With the positions of transformers' own `generate`: the first token's is 0."""
    positions = (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    return hf(**inputs, position_ids=positions, use_cache=False).logits


@torch.no_grad()
def test_every_layer_and_the_logits(hf, model):
    """Breaks when a bias, norm, scale, position, window or head departs from the published
    computation."""
    left = re.compile(r"|layers|lm_head|embed_tokens|.*proj")
    names = [name for name, _ in model.language_model.named_modules() if not left.fullmatch(name)]
    assert len(names) >= 5 * 3 + 1
    for inputs in (batch(), right_padded(batch())):
        valid = is_valid(inputs)
        expected = outputs_by_layer(hf.model, names, partial(theirs, hf, inputs))
        mine = outputs_by_layer(model.language_model, names, partial(model, **inputs))
        for name in names:
            assert relative_error(mine[name][valid], expected[name][valid]) <= GATE, name
        logits = model(**inputs)
        assert logits.dtype == torch.float32
        assert relative_error(logits[valid], theirs(hf, inputs)[valid]) <= GATE
    ids = batch(rows=(20, 20))["input_ids"]
    assert relative_error(model(ids), hf(ids).logits) <= GATE
    set_attention_backend(model, "sdpa")
    assert relative_error(model(**inputs)[valid], logits[valid]) <= 1e-5


@pytest.mark.long
@torch.no_grad()
def test_bf16_is_equal_to_the_bit(kind, hf, folder, monkeypatch):
    """Breaks when a cast moves: the norm's factor before or after it, the √H, the RoPE tables, the
    first position."""
    monkeypatch.setattr("model.cpu.ways", frozenset())
    # soft-capped logits have no fused kernel
    for backend in ("eager",) if kind == "gemma2" else ("eager", "sdpa"):
        twin = reload_hf(hf, backend, torch.bfloat16)
        model = opened(folder, backend, dtype=torch.bfloat16)
        inputs = batch()
        valid = is_valid(inputs)
        assert torch.equal(model(**inputs)[valid], theirs(twin, inputs)[valid].float()), backend


def test_gradients_and_the_loss(hf, model):
    """Breaks when training would move the weights in another direction than transformers does."""
    inputs = batch()
    valid = is_valid(inputs)
    labels = inputs["input_ids"].roll(-1, 1).masked_fill(~valid, -100)
    model(**inputs, targets=labels).backward()
    hf.zero_grad()
    F.cross_entropy(theirs(hf, inputs)[valid], labels[valid], reduction="sum").backward()
    expected = dict(hf.named_parameters())
    for name, parameter in model.named_parameters():
        name = name.replace("language_model.", "" if "lm_head" in name else "model.")
        # of key biases: softmax is blind to a shift, what is left is rounding
        if expected[name].grad.norm() < 1e-4:
            assert "k_proj.bias" in name
            assert parameter.grad.norm() < 1e-3
        else:
            assert relative_error(parameter.grad, expected[name].grad) <= 1e-5, name


@pytest.mark.long
@torch.no_grad()
def test_greedy_tokens_are_those_of_transformers(hf, tmp_path):
    """Breaks when cache, positions, or one of several end tokens differ from transformers'
    `generate`."""
    inputs = batch(rows=(7, 4, 1))
    free = hf.generate(**inputs, max_new_tokens=16, do_sample=False, eos_token_id=127)[:, 7:]
    ends = [1, int(free[0, 5])]  # as in published chat models, the second ends a turn
    hf.save_pretrained(tmp_path)
    GenerationConfig(eos_token_id=ends, pad_token_id=0).save_pretrained(tmp_path)
    model = opened(tmp_path)
    assert model.config.eos_token_id == tuple(ends)
    ids, valid = inputs.values()
    asked = ids, None, torch.ones_like(ids), valid, 16
    mine = generate(model, *asked)
    for row, reference in zip(mine, free.tolist(), strict=True):
        stop = min([reference.index(end) + 1 for end in ends if end in reference], default=16)
        assert row.tolist() == reference[:stop]
    assert len(mine[0]) <= 6
    penalty = {"repetition_penalty": 1.7, "eos_token_id": 127, "pad_token_id": 0}
    GenerationConfig(**penalty).save_pretrained(tmp_path)
    for n, row in enumerate(generate(opened(tmp_path), *asked)):
        prompt = ids[n : n + 1, valid[n] > 0]  # without padding
        kept = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 16} | penalty
        reference = hf.generate(prompt, **kept, do_sample=False)[0, prompt.shape[1] :]
        assert torch.equal(row, reference)
        assert not torch.equal(row, free[n])
    assert read_config(tmp_path / "config.json").repetition_penalty == 1.7
    GenerationConfig(no_repeat_ngram_size=2).save_pretrained(tmp_path)
    refused(lambda: opened(tmp_path), "generation_config.json", "no_repeat_ngram_size")
    shutil.copy(BUNDLED_FOLDER / "config.json", tmp_path)
    GenerationConfig(repetition_penalty=1.7).save_pretrained(tmp_path)
    refused(lambda: read_config(tmp_path / "config.json"), "repetition_penalty")
    also = int(free[0, 1])
    assert generate(model, *asked, also_end=[also])[0][-1] == also


def change(folder, **changes):
    path = folder / "config.json"
    raw = read_json(path) | changes
    write_json(path, {name: value for name, value in raw.items() if value is not ...})


@torch.no_grad()
def test_files_of_all_layouts_are_opened(folder, hf, tmp_path):
    """Breaks when a weight file of several, an older spelling of config.json, or a stored tied head
    is misread."""
    several = tmp_path / "several"
    stored = tmp_path / "stored"
    hf.save_pretrained(several, max_shard_size="60KB")
    raw = read_json(several / "config.json")
    rope = raw["rope_parameters"]
    is_plain = rope["rope_type"] == "default"
    older = {
        "rope_theta": rope.pop("rope_theta"),
        "rope_parameters": ...,
        "rope_scaling": None if is_plain else rope,
    }
    change(several, **older, torch_dtype=raw["dtype"], dtype=..., layer_types=...)
    model = load_model(several)
    assert (several / INDEX_FILE).exists()
    assert type(model) is LanguageModel
    assert torch.equal(model(**batch()), load_text(folder)(**batch()))
    shutil.copytree(folder, stored)
    whole = load_file(folder / SINGLE_FILE)
    embedding = model.language_model.embed_tokens.weight
    # as files of the first Llamas
    waves = {f"model.layers.{n}.self_attn.rotary_emb.inv_freq": torch.ones(9) for n in range(3)}
    save_file(whole | waves | {"lm_head.weight": embedding.clone()}, stored / SINGLE_FILE)
    change(stored, tie_word_embeddings=True)
    tied = load_text(stored).language_model
    assert tied.lm_head is None
    assert torch.equal(tied.embed_tokens.weight, embedding)


@torch.no_grad()
def test_no_stop_token(folder, tmp_path):
    """Breaks when `eos_token_id: null`, which means that an answer ends at its limit alone, is
    refused."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "generation_config.json").unlink()
    change(tmp_path, eos_token_id=None)
    model = load_text(tmp_path)
    (ids, valid) = batch(rows=(7,)).values()
    assert model.config.eos_token_id == ()
    assert len(generate(model, ids, None, valid, valid, 30)[0]) == 30


@pytest.mark.long
@torch.no_grad()
def test_an_export_is_opened_by_transformers(hf, folder, tmp_path):
    """Breaks when the way back loses a tensor, a size, the head, an end token or the companions."""
    inputs = batch()
    model = load_text(folder)
    main(f"{folder} {tmp_path} --max-shard-gb 0.0001".split())
    assert (tmp_path / INDEX_FILE).exists()
    assert load_text(tmp_path).config == model.config
    again = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    assert type(again) is type(hf)
    assert torch.equal(theirs(again, inputs), theirs(hf, inputs))
    written = again.config.to_dict()
    differing = {name for name, value in hf.config.to_dict().items() if written.get(name) != value}
    others = "_name_or_path dtype max_window_layers sliding_window use_cache initializer_range"
    assert differing <= {*others.split()}, differing
    export_model(model, tmp_path / "again")
    assert torch.equal(load_text(tmp_path / "again")(**inputs), model(**inputs))


@torch.no_grad()
def test_grafts_lora_and_few_bits_stand_on_it(folder, model, tmp_path):
    """Breaks when a bias, a head or a stretched position is lost on the way to a variant, an
    adapter or weights of few bits."""
    inputs = batch()
    valid = is_valid(inputs)
    logits = model(**inputs)[valid]
    for variant in ("softmax", "twin", "dex"):
        grafted = opened(folder)
        graft(grafted, variant)
        assert relative_error(grafted(**inputs)[valid], logits) <= GATE, variant
    adapter.inject(model, adapter.DECODER_TARGETS, 3, 6.0)
    for parameter in adapter.adapter_parameters(model).values():
        torch.nn.init.normal_(parameter, std=0.1)
    changed = model(**inputs)[valid]
    assert relative_error(changed, logits) > 1e-3
    adapter.save(model, tmp_path, str(folder))
    adapter.merge(model)
    again = opened(folder)
    adapter.load(again, tmp_path)
    for each in (model, again):
        assert relative_error(each(**inputs)[valid], changed) <= 1e-5
    for bits, bound in (("int8", 0.1), ("nf4", 0.7)):
        few = load_model(folder, quantize=bits)
        rounded = few(**inputs)[valid]
        assert 1e-4 < relative_error(rounded, logits) < bound, bits
        adapter.merge(few)  # which puts whole weights back
        assert few.quantized is None
        assert relative_error(few(**inputs)[valid], rounded) <= 1e-5, bits


def test_what_is_not_computed_is_refused(hf, folder, tmp_path):
    """Breaks when a model of other sizes is opened, or one without a vision tower is asked for
    one."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    is_tied = hf.config.tie_word_embeddings
    change(tmp_path, **({"tie_word_embeddings": False} if is_tied else {"vocab_size": 129}))
    problem = "missing language_model.lm_head" if is_tied else "2 tensors do not fit"
    refused(lambda: load_text(tmp_path), problem)
    for call in (load_siglip, Processor.from_source):
        refused(partial(call, folder), "a language model for text alone")
