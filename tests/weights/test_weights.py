"""Checkpoints: every published form loads bit for bit, leaves as it came, and is refused in one line when damaged."""

import errno
import json
import os
import pickle
import re
import shutil
import struct
import zipfile
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import PaliGemmaForConditionalGeneration, SiglipVisionConfig, SiglipVisionModel

import tests.make_checkpoint as make_checkpoint
import weights.checkpoint
import weights.export
import weights.inspect
from lora import adapter
from model.attention import set_attention_backend
from model.common import UserError, run_command
from model.config import PRESETS, PaliGemmaConfig, TextConfig, VisionConfig
from model.device import DTYPES
from model.differential import graft
from model.paligemma import PaliGemma, initialize
from model.processor import Processor
from model.system_configs import MambaConfig
from tests.peak_memory import in_own_process, load_peak
from tests.reference import batch, hf_forward, hf_model, relative_error
from weights.checkpoint import empty_model, examine
from weights.export import export_model
from weights.load import load_mamba, load_model, load_siglip
from weights.mapping import DIALECTS
from weights.npz import read_npz
from weights.streaming import CHUNK_BYTES, INDEX_FILE, SINGLE_FILE, STORED_DTYPES, read_header, write_checkpoint

# how each dialect spells the state dict of transformers 5, written down a second time
RENAMES = {
    "A": [
        ("^model.language_model", "language_model.model"),
        ("^model.vision_tower", "vision_tower.vision_model"),
        ("^model.multi_modal", "multi_modal"),
    ],
    "B": [("^model.vision_tower", "model.vision_tower.vision_model")],
    "C": [],
    "D": [
        ("^model.language_model", "language_model.model"),
        ("^model.vision_tower", "vision_tower"),
        ("^model.multi_modal", "multi_modal"),
    ],
}


@pytest.fixture(scope="module", params=[1, 2], ids=["generation 1", "generation 2"])
def hf(request):
    return hf_model(request.param)


@pytest.fixture(scope="module")
def hf1():
    return hf_model(1)


def tensors_of(hf, dialect: str = "A", head: str | None = None) -> dict[str, torch.Tensor]:
    """The state dict of a transformers model under the names of a dialect."""
    tensors = {}
    for name, tensor in hf.state_dict().items():
        for pattern, replacement in RENAMES[dialect]:
            name = re.sub(pattern.replace(".", r"\."), replacement, name)
        if name != "lm_head.weight":
            tensors[name] = tensor.clone()
        elif head:
            tensors[head] = tensor.clone()
    return tensors


def save(folder: Path, hf, tensors: dict[str, torch.Tensor], shards: int = 1) -> Path:
    """A model folder: config.json as transformers writes it, and the tensors in one file or in shards."""
    folder.mkdir(exist_ok=True)
    hf.config.save_pretrained(folder)
    if shards == 1:
        save_file(tensors, folder / SINGLE_FILE)
        return folder
    names = sorted(tensors)
    weight_map = {}
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in names[number::shards]}
        save_file(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def open_with_transformers(folder: Path) -> PaliGemmaForConditionalGeneration:
    return PaliGemmaForConditionalGeneration.from_pretrained(folder, attn_implementation="eager").eval()


def assert_same_state(model: PaliGemma, hf, dtype=torch.float32) -> None:
    theirs = {name.removeprefix("model."): t for name, t in hf.state_dict().items() if name != "lm_head.weight"}
    mine = model.state_dict()
    assert mine.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert mine[name].dtype == dtype and torch.equal(mine[name], tensor.to(dtype)), name


def assert_same_logits(model: PaliGemma, hf) -> None:
    """Equal to the bit on the eager path, where both do the same operations."""
    inputs = batch(hf)
    set_attention_backend(model, "eager")
    with torch.inference_mode():
        ours, theirs = model(**inputs), hf_forward(hf, inputs)
    valid = inputs["attention_mask"].bool()
    assert torch.equal(ours[valid], theirs[valid])


# ---------------------------------------------------------------------------------------------------------- loading


@pytest.mark.long
@pytest.mark.parametrize(
    ("shards", "head"), [(1, None), (3, None), (1, "lm_head.weight"), (3, "language_model.lm_head.weight")]
)
@pytest.mark.parametrize("dialect", DIALECTS)
def test_every_dialect_loads_bit_for_bit(hf, dialect, shards, head, tmp_path):
    """Breaks when a published name lands on another parameter, or several files or a tied head confuse the loader."""
    model = load_model(save(tmp_path, hf, tensors_of(hf, dialect, head), shards))
    assert not model.training and all(parameter.requires_grad for parameter in model.parameters())
    assert examine(tmp_path).dialect == dialect
    assert_same_state(model, hf)
    assert_same_logits(model, hf)


def test_what_transformers_saves_loads(hf, tmp_path):
    """Breaks when transformers' own save, in shards, is not opened."""
    hf.save_pretrained(tmp_path, max_shard_size="100KB")
    assert (tmp_path / INDEX_FILE).exists()
    assert_same_state(load_model(tmp_path), hf)


def test_a_tower_that_transformers_saves_alone_loads(tmp_path):
    """Breaks when the tower of a SigLIP by itself, whose names have no prefix since transformers 5, is not opened."""
    sizes = {"hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 1, "patch_size": 14, "image_size": 28}
    torch.manual_seed(0)
    theirs = SiglipVisionModel(SiglipVisionConfig(**sizes)).eval()
    theirs.save_pretrained(tmp_path)
    pixels = torch.randn(2, 3, 28, 28)
    with torch.no_grad():
        assert relative_error(load_siglip(tmp_path)(pixels), theirs(pixels).last_hidden_state) <= 1e-6


@pytest.mark.long
@pytest.mark.parametrize("stored", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16])
def test_tensors_are_cast_as_torch_casts_them(hf1, stored, wanted, tmp_path, monkeypatch):
    """Breaks when a chunk is cast through a third dtype, or lands at the wrong place."""
    monkeypatch.setattr("weights.streaming.CHUNK_BYTES", 1000)  # many chunks a tensor, the last one short
    tensors = {name: tensor.to(stored) for name, tensor in tensors_of(hf1, "D").items()}
    model = load_model(save(tmp_path, hf1, tensors), dtype=wanted)
    for name, tensor in tensors.items():
        ours = model.get_parameter(name.replace("language_model.model", "language_model"))
        assert ours.dtype == wanted and torch.equal(ours, tensor.to(wanted)), name


def test_dtypes_may_be_mixed(hf1, tmp_path):
    """Breaks when the dtype of one tensor is taken for that of all, or an odd offset is mapped as it is."""
    tensors = tensors_of(hf1)
    for name in list(tensors)[::2]:
        tensors[name] = tensors[name].bfloat16().float()
    expected = {name: tensor.clone() for name, tensor in tensors.items()}
    for name in list(tensors)[::2]:
        tensors[name] = tensors[name].bfloat16()
    model = load_model(save(tmp_path, hf1, tensors))
    name_map = examine(tmp_path).comparison.name_map
    assert all(torch.equal(model.get_parameter(name_map[name]), tensor) for name, tensor in expected.items())


def test_tensors_at_odd_addresses(hf1, tmp_path):
    """Breaks when a tensor that the file does not align is handed to kernels that need it aligned."""
    path = save(tmp_path, hf1, tensors_of(hf1)) / SINGLE_FILE
    raw = path.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    path.write_bytes(struct.pack("<Q", length + 1) + raw[8 : 8 + length] + b" " + raw[8 + length :])
    model = load_model(tmp_path)
    assert all(parameter.data_ptr() % 4 == 0 for parameter in model.parameters())
    assert_same_state(model, hf1)


def test_the_file_is_never_written_to(hf1, tmp_path):
    """Breaks when training a loaded model changes the checkpoint, which the parameters are views of."""
    path = save(tmp_path, hf1, tensors_of(hf1)) / SINGLE_FILE
    before = path.read_bytes()
    model = load_model(tmp_path)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    assert path.read_bytes() == before
    assert_same_state(load_model(tmp_path), hf1)


NAN, INF = float("nan"), float("inf")


@pytest.mark.long
@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize(("stored", "wanted"), [("F32", "F32"), ("F32", "BF16"), ("BF16", "BF16"), ("F64", "F16")])
def test_values_that_are_not_finite_are_refused(hf1, value, stored, wanted, tmp_path, monkeypatch):
    """Breaks when a broken weight is loaded, whether it is viewed, cast, or at the end of a chunk."""
    monkeypatch.setattr("weights.streaming.CHUNK_BYTES", 1000)
    tensors = {name: tensor.to(STORED_DTYPES[stored]) for name, tensor in tensors_of(hf1).items()}
    draw = np.random.default_rng(0)
    names = list(tensors)
    for name in (names[0], names[-1], "language_model.model.embed_tokens.weight", *draw.choice(names, 3)):
        flat = tensors[name].clone().view(-1)
        flat[draw.choice([0, len(flat) - 1, draw.integers(len(flat))])] = value
        save(tmp_path, hf1, tensors | {name: flat.view(tensors[name].shape)})
        with pytest.raises(UserError, match=f"{SINGLE_FILE}: {name} holds NaN or infinity: download") as caught:
            load_model(tmp_path, dtype=STORED_DTYPES[wanted])
        assert "\n" not in str(caught.value)


@pytest.mark.long
def test_values_that_the_dtype_cannot_hold_are_refused(hf1, tmp_path):
    """Breaks when a cast turns a large value into infinity without a word."""
    tensors = tensors_of(hf1)
    tensors[Q0][3, 5] = 70000
    save(tmp_path, hf1, tensors)
    load_model(tmp_path)
    with pytest.raises(UserError, match=f"{Q0} holds values beyond the range of float16: choose another dtype"):
        load_model(tmp_path, dtype=torch.float16)


@pytest.mark.long
def test_arrays_that_are_not_finite_are_refused(hf1, tmp_path):
    """Breaks when an .npz may hold what a safetensors file may not."""
    hf1.config.save_pretrained(tmp_path)
    arrays = arrays_of(hf1, rows=120)
    for key in (NPZ_GATING, "params/llm/embedder/input_embedding", "params/img/head/bias"):
        broken = arrays[key].copy()
        broken.reshape(-1)[-1] = NAN
        np.savez(tmp_path / "pt.npz", **(arrays | {key: broken}))
        with pytest.raises(UserError, match=f"pt.npz: {key.removeprefix('params/')} holds NaN or infinity"):
            load_model(tmp_path)


@pytest.mark.long
def test_a_model_that_is_not_finite_is_not_exported(hf1, tmp_path):
    """Breaks when a run that diverged is published."""
    model = load_model(save(tmp_path / "in", hf1, tensors_of(hf1)))
    with torch.no_grad():
        model.language_model.layers[1].mlp.up_proj.weight[2, 3] = NAN
    with pytest.raises(UserError, match="layers.1.mlp.up_proj.weight holds NaN or infinity: .* not exported"):
        export_model(model, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]


def test_a_head_may_stand_in_for_the_embedding(hf1, tmp_path):
    """Breaks when a file that stored the shared tensor under the head's name alone is refused; transformers ties it."""
    tensors = tensors_of(hf1, "A", "lm_head.weight")
    del tensors["language_model.model.embed_tokens.weight"]
    assert_same_state(load_model(save(tmp_path, hf1, tensors)), hf1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_head_of_its_own_is_refused(hf1, dtype, tmp_path):
    """Breaks when a checkpoint whose head was trained apart loses it in silence."""
    tensors = tensors_of(hf1, "A", "language_model.lm_head.weight")
    tensors["language_model.lm_head.weight"][-1, -1] += 1
    with pytest.raises(UserError, match="(lm_head|embed_tokens).weight differs from .*(lm_head|embed_tokens).weight"):
        load_model(save(tmp_path, hf1, tensors), dtype=dtype)


@pytest.mark.long
def test_published_geometries():
    """Breaks when a layer, norm or bias is added to or lost from the published 603 and 727 tensors."""
    for name, count, parameters in (
        ("paligemma-3b-224", 603, 2_923_466_480),
        ("paligemma2-3b-224", 727, 3_032_242_416),
    ):
        state = empty_model(PRESETS[name]).state_dict()
        assert len(state) == count and sum(tensor.numel() for tensor in state.values()) == parameters


def small(**text) -> PaliGemmaConfig:
    sizes = {
        "vocab_size": 96,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "head_dim": 8,
    }
    vision = VisionConfig(16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, image_size=28)
    return PaliGemmaConfig(vision, TextConfig(**(sizes | text)), image_token_id=95)


def test_presets_have_random_weights_and_folders_come_first(hf1, tmp_path, monkeypatch):
    """Breaks when a preset is not the documented seed-0 model, or hides a folder of the same name."""
    monkeypatch.setitem(PRESETS, "small", small())
    monkeypatch.chdir(tmp_path)
    model = load_model("small", dtype=torch.bfloat16)
    expected = initialize(PaliGemma(small()).bfloat16()).state_dict()
    assert not model.training
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())
    save(tmp_path / "small", hf1, tensors_of(hf1))
    assert_same_state(load_model("small"), hf1)


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from Linux's /proc")
@pytest.mark.parametrize(("stored", "wanted"), [("fp32", "bf16"), ("fp32", "fp32"), ("bf16", "bf16")])
def test_peak_memory(stored, wanted, tmp_path, monkeypatch):
    """Breaks when loading holds a second copy: the file's tensors beside the cast ones, or all of a file."""
    config = small(vocab_size=8192, hidden_size=1024, intermediate_size=8192)
    monkeypatch.setitem(PRESETS, "big", config)
    folder = tmp_path / "checkpoint"
    make_checkpoint.main([str(folder), "--preset", "big", "--dtype", stored, "--shards", "2"])
    peak, size = in_own_process(load_peak, folder, DTYPES[wanted])
    assert size > 100e6
    assert peak <= 1.1 * size + 2 * CHUNK_BYTES


@pytest.mark.parametrize("kind", ["int8", "int4", "nf4"])
def test_a_model_is_quantized_while_it_is_read(hf1, kind, tmp_path, monkeypatch):
    """Breaks when pieces of a matrix give other bits than all of it, or a file is checked less than else."""
    monkeypatch.setattr("model.linear.BLOCK_ELEMENTS", 1 << 12)
    tensors = {
        name: tensor.bfloat16() for name, tensor in tensors_of(hf1, "A", "language_model.lm_head.weight").items()
    }
    folder = save(tmp_path / "model", hf1, tensors, shards=3)
    for dtype in (torch.float32, torch.float16):
        model, whole = load_model(folder, dtype=dtype, quantize=kind), load_model(folder, dtype=dtype)
        fingerprint = adapter.fingerprint(whole)
        adapter.quantize(whole, kind, head=True)
        state = whole.state_dict()
        assert all(torch.equal(tensor, state.pop(name)) for name, tensor in model.state_dict().items()) and not state
        assert adapter.fingerprint(model) == adapter.fingerprint(whole) == fingerprint
        assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    for name, message in (
        ("language_model.lm_head.weight", "weight differs from .*save the checkpoint with tied weights"),
        ("language_model.model.layers.1.mlp.up_proj.weight", "up_proj.weight holds NaN or infinity"),
        ("language_model.model.norm.weight", "norm.weight holds NaN or infinity"),
    ):
        broken = tensors[name].clone()
        broken[-1] = 7 if "lm_head" in name else NAN
        with pytest.raises(UserError, match=message):
            load_model(save(tmp_path / "broken", hf1, tensors | {name: broken}, shards=3), quantize=kind)


# ------------------------------------------------------------------------------------------------------- big_vision


def arrays_of(hf, rows: int) -> dict[str, np.ndarray]:
    """The arrays that big_vision would hold for the weights of a transformers model, from its einsums' axes."""
    state = {name.removeprefix("model."): tensor.numpy() for name, tensor in hf.state_dict().items()}
    text, vision = hf.config.text_config, hf.config.vision_config
    heads, width, vision_heads = text.num_attention_heads, text.head_dim, vision.num_attention_heads

    def stack(template: str, change, layers: int) -> np.ndarray:
        return np.stack([change(state[template.format(layer)]) for layer in range(layers)])

    arrays = {
        "img/embedding/kernel": state["vision_tower.embeddings.patch_embedding.weight"].transpose(2, 3, 1, 0),
        "img/embedding/bias": state["vision_tower.embeddings.patch_embedding.bias"],
        "img/pos_embedding": state["vision_tower.embeddings.position_embedding.weight"][None],
        "img/Transformer/encoder_norm/scale": state["vision_tower.post_layernorm.weight"],
        "img/Transformer/encoder_norm/bias": state["vision_tower.post_layernorm.bias"],
        "img/head/kernel": state["multi_modal_projector.linear.weight"].T,
        "img/head/bias": state["multi_modal_projector.linear.bias"],
        "llm/embedder/input_embedding": state["language_model.embed_tokens.weight"][:rows],
        "llm/final_norm/scale": state["language_model.norm.weight"],
    }
    layer, count = "vision_tower.encoder.layers.{}", vision.num_hidden_layers
    block = "img/Transformer/encoderblock"
    for i in (0, 1):
        arrays[f"{block}/LayerNorm_{i}/scale"] = stack(f"{layer}.layer_norm{i + 1}.weight", lambda w: w, count)
        arrays[f"{block}/LayerNorm_{i}/bias"] = stack(f"{layer}.layer_norm{i + 1}.bias", lambda w: w, count)
        arrays[f"{block}/MlpBlock_0/Dense_{i}/kernel"] = stack(f"{layer}.mlp.fc{i + 1}.weight", lambda w: w.T, count)
        arrays[f"{block}/MlpBlock_0/Dense_{i}/bias"] = stack(f"{layer}.mlp.fc{i + 1}.bias", lambda w: w, count)
    attention = f"{block}/MultiHeadDotProductAttention_0"
    for key, name in (("query", "q_proj"), ("key", "k_proj"), ("value", "v_proj")):
        arrays[f"{attention}/{key}/kernel"] = stack(
            f"{layer}.self_attn.{name}.weight",
            lambda w: w.reshape(vision_heads, -1, w.shape[1]).transpose(2, 0, 1),
            count,
        )
        arrays[f"{attention}/{key}/bias"] = stack(
            f"{layer}.self_attn.{name}.bias", lambda w: w.reshape(vision_heads, -1), count
        )
    arrays[f"{attention}/out/kernel"] = stack(
        f"{layer}.self_attn.out_proj.weight",
        lambda w: w.reshape(w.shape[0], vision_heads, -1).transpose(1, 2, 0),
        count,
    )
    arrays[f"{attention}/out/bias"] = stack(f"{layer}.self_attn.out_proj.bias", lambda w: w, count)

    layer, count = "language_model.layers.{}", text.num_hidden_layers

    def per_head(w):  # BTD,NDH->BTNH
        return w.reshape(-1, width, w.shape[1]).transpose(0, 2, 1)

    def transposed(w):
        return w.T

    arrays["llm/layers/attn/q_einsum/w"] = stack(f"{layer}.self_attn.q_proj.weight", per_head, count)
    arrays["llm/layers/attn/kv_einsum/w"] = np.stack(  # BSD,2KDH->2BSKH
        [stack(f"{layer}.self_attn.{name}.weight", per_head, count) for name in ("k_proj", "v_proj")], axis=1
    )
    arrays["llm/layers/attn/attn_vec_einsum/w"] = stack(  # BTNH,NHD->BTD
        f"{layer}.self_attn.o_proj.weight", lambda w: w.T.reshape(heads, width, -1), count
    )
    arrays["llm/layers/mlp/gating_einsum"] = np.stack(
        [stack(f"{layer}.mlp.{name}.weight", transposed, count) for name in ("gate_proj", "up_proj")], axis=1
    )
    arrays["llm/layers/mlp/linear"] = stack(f"{layer}.mlp.down_proj.weight", transposed, count)
    norms = {"pre_attention_norm": "input_layernorm", "pre_ffw_norm": "post_attention_layernorm"}
    if text.model_type == "gemma2":
        norms = {
            "pre_attention_norm": "input_layernorm",
            "post_attention_norm": "post_attention_layernorm",
            "pre_ffw_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        }
    for key, name in norms.items():
        arrays[f"llm/layers/{key}/scale"] = stack(f"{layer}.{name}.weight", lambda w: w, count)
    return {f"params/{key}": np.ascontiguousarray(array) for key, array in arrays.items()}


@pytest.mark.long
@pytest.mark.parametrize("compressed", [False, True])
def test_big_vision_arrays(hf, compressed, tmp_path):
    """Breaks when a kernel is transposed wrongly, heads are mixed, or k and v, gate and up change places."""
    hf.config.save_pretrained(tmp_path)
    arrays = arrays_of(hf, rows=120) | {"opt/0/count": np.zeros(3)}  # 128 rows, of which the file has 120
    (np.savez_compressed if compressed else np.savez)(tmp_path / "pt_56.npz", **arrays)
    for source in (tmp_path, tmp_path / "pt_56.npz"):
        model = load_model(source)
        embedding = model.language_model.embed_tokens.weight
        assert_close = torch.testing.assert_close
        assert_close(embedding[120:], embedding[:120].mean(0).expand(8, -1), atol=1e-7, rtol=0)
        with torch.no_grad():
            embedding[120:] = hf.state_dict()["lm_head.weight"][120:]
        assert_same_state(model, hf)
        assert_same_logits(model, hf)
    assert examine(tmp_path).dialect == "big_vision"


def test_big_vision_einsums(hf1, tmp_path):
    """Breaks when the parameters compute anything else than big_vision's einsums on its own arrays."""
    hf1.config.save_pretrained(tmp_path)
    arrays = arrays_of(hf1, rows=128)
    np.savez(tmp_path / "pt.npz", **arrays)
    model = load_model(tmp_path)
    a = {key.removeprefix("params/"): torch.from_numpy(array) for key, array in arrays.items()}
    x = torch.randn(2, 5, 72, generator=torch.Generator().manual_seed(0))
    layer = model.language_model.layers[1]
    q = torch.einsum("btd,ndh->btnh", x, a["llm/layers/attn/q_einsum/w"][1])
    k, v = torch.einsum("bsd,ckdh->cbskh", x, a["llm/layers/attn/kv_einsum/w"][1])
    out = torch.einsum("btnh,nhd->btd", q, a["llm/layers/attn/attn_vec_einsum/w"][1])
    gate, up = torch.einsum("btd,cdf->cbtf", x, a["llm/layers/mlp/gating_einsum"][1])
    for ours, theirs in (
        (layer.self_attn.q_proj(x), q.flatten(2)),
        (layer.self_attn.k_proj(x), k.flatten(2)),
        (layer.self_attn.v_proj(x), v.flatten(2)),
        (layer.self_attn.o_proj(q.flatten(2)), out),
        (layer.mlp.gate_proj(x), gate),
        (layer.mlp.up_proj(x), up),
        (layer.mlp.down_proj(gate), gate @ a["llm/layers/mlp/linear"][1]),
    ):
        assert relative_error(ours, theirs) < 1e-6
    x = torch.randn(2, 5, 40, generator=torch.Generator().manual_seed(0))
    vision = model.vision_tower.encoder.layers[1].self_attn
    key = "img/Transformer/encoderblock/MultiHeadDotProductAttention_0"
    q = torch.einsum("btd,dnh->btnh", x, a[f"{key}/query/kernel"][1]) + a[f"{key}/query/bias"][1]
    assert relative_error(vision.q_proj(x), q.flatten(2)) < 1e-6
    out = torch.einsum("btnh,nhd->btd", q, a[f"{key}/out/kernel"][1]) + a[f"{key}/out/bias"][1]
    assert relative_error(vision.out_proj(q.flatten(2)), out) < 1e-6


def test_big_vision_dtypes_and_presets(hf1, tmp_path, monkeypatch):
    """Breaks when bfloat16, which numpy stores as raw bytes, is misread, or sizes no longer name the preset."""
    config = PaliGemmaConfig.from_dict(hf1.config.to_dict())
    monkeypatch.setattr(weights.checkpoint, "PRESETS", {"other": small(), "this": config})
    arrays = {}
    for number, (key, array) in enumerate(arrays_of(hf1, rows=128).items()):
        bf16 = torch.from_numpy(array).bfloat16()
        arrays[key] = bf16.view(torch.int16).numpy().view("V2") if number % 2 else bf16.float().numpy()
    np.savez(tmp_path / "pt.npz", **arrays)
    model = load_model(tmp_path, dtype=torch.bfloat16)
    assert model.config == config
    assert_same_state(model, hf1, torch.bfloat16)
    monkeypatch.setattr(weights.checkpoint, "PRESETS", {"other": small()})
    with pytest.raises(UserError, match="fit no preset.*write a config.json"):
        load_model(tmp_path)


# -------------------------------------------------------------------------------------------------------- bad input


class Bomb:
    """A pickle that leaves a trace when it is opened."""

    def __init__(self, trace: Path):
        self.trace = str(trace)

    def __reduce__(self):
        return (open, (self.trace, "w"))


def edit_header(path: Path, change) -> None:
    raw = path.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + length])
    text = json.dumps(change(header) or header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])


def edit_json(path: Path, **values) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def point_index_to(folder: Path, target: str) -> None:
    index = json.loads((folder / INDEX_FILE).read_text())
    first = min(index["weight_map"].values())
    index["weight_map"] = {name: target if file == first else file for name, file in index["weight_map"].items()}
    (folder / INDEX_FILE).write_text(json.dumps(index))


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def many_files(folder: Path) -> None:
    """An index that names far more files than a checkpoint has."""
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": {f"t{i}": f"{i}.safetensors" for i in range(20000)}}))


def raw_header(folder: Path, text: bytes) -> None:
    (folder / SINGLE_FILE).write_bytes(struct.pack("<Q", len(text)) + text)


Q0 = "language_model.model.layers.0.self_attn.q_proj.weight"
SHARD1, SHARD2 = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def truncate(folder, by=10):
    raw = (folder / SINGLE_FILE).read_bytes()
    (folder / SINGLE_FILE).write_bytes(raw[:-by])


def retyped(folder):
    tensors = load_file(folder / SINGLE_FILE)
    save_file(tensors | {Q0: tensors[Q0].to(torch.int8)}, folder / SINGLE_FILE)


def reshaped(folder):
    tensors = load_file(folder / SINGLE_FILE)
    save_file(tensors | {Q0: tensors[Q0].T.contiguous()}, folder / SINGLE_FILE)


def missing_and_unexpected(folder):
    tensors = load_file(folder / SINGLE_FILE)
    tensors["stranger.weight"] = tensors.pop(Q0)
    save_file(tensors, folder / SINGLE_FILE)


def mixed_dialects(folder):
    tensors = load_file(folder / SINGLE_FILE)
    renamed = {n: n.replace("vision_model.", "") if "encoder.layers.0" in n else n for n in tensors}
    save_file({renamed[name]: tensor for name, tensor in tensors.items()}, folder / SINGLE_FILE)


def other_model(folder):
    save_file({"transformer.wte.weight": torch.zeros(2)}, folder / SINGLE_FILE)


def name_twice(folder):
    raw = (folder / SINGLE_FILE).read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    text = raw[8 : 8 + length].decode()
    first = re.search(r'"[^"]+":\{"dtype"[^}]+\},', text)[0]
    text = text.replace(first, first + first)
    (folder / SINGLE_FILE).write_bytes(struct.pack("<Q", len(text)) + text.encode() + raw[8 + length :])


def overlapping(header):
    names = [name for name in header if name != "__metadata__"]
    header[names[0]]["data_offsets"] = header[names[1]]["data_offsets"]
    header[names[0]]["shape"] = header[names[1]]["shape"]


def duplicate(folder):
    tensors = load_file(folder / SHARD1) | {"vision_tower.vision_model.post_layernorm.bias": torch.zeros(40)}
    save_file(tensors | dict(list(load_file(folder / SHARD2).items())[:1]), folder / SHARD1)


def link_away(folder):
    target = folder.parent / "elsewhere.safetensors"
    shutil.move(folder / SHARD1, target)
    (folder / SHARD1).symlink_to(target)


def pickled_only(folder):
    (folder / SINGLE_FILE).unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(folder / "trace")))


def no_tensors(folder):
    (folder / SINGLE_FILE).unlink()


def adapter_only(folder):
    no_tensors(folder)
    (folder / "adapter_config.json").write_text("{}")


def text_config(folder, **values):
    raw = json.loads((folder / "config.json").read_text())
    raw["text_config"].update(values)
    (folder / "config.json").write_text(json.dumps(raw))


BAD_SINGLE = {
    "truncated": (truncate, r"model.safetensors: truncated, 10 of [\d,]+ bytes are missing: download"),
    "empty": (lambda f: (f / SINGLE_FILE).write_bytes(b""), "truncated, or no safetensors"),
    "html": (lambda f: (f / SINGLE_FILE).write_bytes(b"<html>sign in</html>" * 9), "truncated, or no safetensors"),
    "header of noise": (lambda f: (f / SINGLE_FILE).write_bytes(struct.pack("<Q", 8) + b"\xff" * 8), "damaged header"),
    "bytes to spare": (lambda f: (f / SINGLE_FILE).open("ab").write(b"x"), "1 bytes follow the last tensor"),
    "header is a list": (lambda f: edit_header(f / SINGLE_FILE, lambda h: [h]), "damaged header"),
    "bytes and shape disagree": (
        lambda f: edit_header(f / SINGLE_FILE, lambda h: h[Q0].update(shape=[3, 3])),
        "damaged header.*F32 of shape",
    ),
    "negative size": (lambda f: edit_header(f / SINGLE_FILE, lambda h: h[Q0].update(shape=[-64, -72])), "impossible"),
    "name twice": (name_twice, "damaged header: .*stands there twice"),
    "overlap": (lambda f: edit_header(f / SINGLE_FILE, overlapping), "overlaps another tensor or leaves a gap"),
    "no tensors": (lambda f: save_file({}, f / SINGLE_FILE), "holds no tensors"),
    "integers": (retyped, f"tensors not in F64, F32, F16, BF16, 1: {Q0} is I8: quantised"),
    "misshaped": (reshaped, rf"sizes than config.json says, 1: {Q0} is \(72, 64\), expected \(64, 72\): the files"),
    "missing and unexpected": (
        missing_and_unexpected,
        r"2 problems: \(1\).*tensors missing, 1: language_model.layers.0.self_attn.q_proj.weight: the files.*"
        r"\(2\).*tensors unexpected, 1: stranger.weight: the files",
    ),
    "mixed dialects": (mixed_dialects, "most names are of dialect A, 16 of D .*: take all files from one revision$"),
    "another model": (other_model, "no tensor has a name of PaliGemma's .transformer.wte.weight"),
    "fewer layers": (lambda f: text_config(f, num_hidden_layers=2), "tensors unexpected, 9: .* and 5 more: the files"),
    "more layers": (lambda f: text_config(f, num_hidden_layers=4), "tensors missing, 9: .* and 5 more: the files"),
    "wider": (lambda f: text_config(f, hidden_size=80), "tensors of other sizes than config.json says, .*expected"),
    "impossible sizes": (
        lambda f: text_config(f, hidden_size=2**40, vocab_size=2**40),
        "hidden_size is 1099511627776, expected",
    ),
    "no config": (lambda f: (f / "config.json").unlink(), "config.json: not found"),
    "other architecture": (lambda f: edit_json(f / "config.json", model_type="llava"), "model_type is 'llava'"),
    "truncated and no config": (
        lambda f: (truncate(f), (f / "config.json").unlink()),
        r"2 problems: \(1\).*config.json.*\(2\).*truncated",
    ),
    "pickle": (pickled_only, "pytorch_model.bin can run any code when opened.*python -m weights.convert"),
    "nothing": (no_tensors, f"holds neither {SINGLE_FILE} nor {INDEX_FILE} nor an .npz"),
    "adapter": (adapter_only, "holds an adapter"),
    "unfinished run": (
        lambda f: (no_tensors(f), (f / "checkpoints").mkdir()),
        "a run that has not ended: go on with python -m train.finetune --resume ",
    ),
    "many axes": (
        lambda f: edit_header(f / SINGLE_FILE, lambda h: h[Q0].update(shape=[10**18] * 10**5)),
        "damaged header .impossible",
    ),
    "huge size": (lambda f: edit_header(f / SINGLE_FILE, lambda h: h[Q0].update(shape=[10**30])), "impossible"),
    "deep header": (lambda f: raw_header(f, b"[" * 10**5), "damaged header: .*nested too deeply"),
    "long integer": (lambda f: raw_header(f, b'{"a": ' + b"9" * 10**5 + b"}"), "damaged header"),
    "pipe": (lambda f: pipe(f / SINGLE_FILE), f"{SINGLE_FILE}: is a pipe"),
    "pipe as config": (lambda f: pipe(f / "config.json"), "config.json: is a pipe"),
    "device": (
        lambda f: ((f / SINGLE_FILE).unlink(), (f / SINGLE_FILE).symlink_to("/dev/zero")),
        "is a pipe, socket or",
    ),
    "folder": (lambda f: ((f / SINGLE_FILE).unlink(), (f / SINGLE_FILE).mkdir()), f"{SINGLE_FILE}: is a folder"),
    "escape codes": (
        lambda f: save_file(load_file(f / SINGLE_FILE) | {"a\x1b[2J\n": torch.zeros(1)}, f / SINGLE_FILE),
        r"unexpected, 1: a\\x1b\[2J\\n: the files",
    ),
    "both forms": (lambda f: (f / INDEX_FILE).write_text("{}"), "holds both"),
}
BAD_SHARDS = {
    "missing file": (lambda f: (f / SHARD2).unlink(), f"{SHARD2}: not found"),
    "index without map": (lambda f: (f / INDEX_FILE).write_text("{}"), "weight_map must give a file name"),
    "index is no JSON": (lambda f: (f / INDEX_FILE).write_text("<html>"), "not valid JSON"),
    "index of numbers": (lambda f: (f / INDEX_FILE).write_text('{"weight_map": {"a": 1}}'), "must give a file name"),
    "index of nothing": (lambda f: (f / INDEX_FILE).write_text('{"weight_map": {}}'), "names 0 files"),
    "index of a list": (lambda f: (f / INDEX_FILE).write_text("[]"), "expected an object"),
    "deep index": (lambda f: (f / INDEX_FILE).write_text("[" * 10**5), "nested too deeply"),
    "huge index": (lambda f: many_files(f), "names 20000 files, expected 1 to 10000"),
    "name twice in the index": (
        lambda f: (f / INDEX_FILE).write_text('{"weight_map": {"a": "b", "a": "c"}}'),
        "stands there twice",
    ),
    "pipe as a file": (lambda f: pipe(f / SHARD1), f"{SHARD1}: is a pipe"),
    "pipe as the index": (lambda f: pipe(f / INDEX_FILE), "is a pipe"),
    "folder as a file": (lambda f: ((f / SHARD1).unlink(), (f / SHARD1).mkdir()), f"{SHARD1}: is a folder"),
    "long name": (lambda f: point_index_to(f, "x" * 5000), "x: the name is too long|a file outside its folder"),
    "escape codes in the index": (lambda f: point_index_to(f, "\x1b[2Ja\n.safetensors"), "x1b.*not found"),
    "absolute path": (lambda f: point_index_to(f, "/etc/passwd"), "names '/etc/passwd', a file outside its folder"),
    "parent folder": (lambda f: point_index_to(f, "../x.safetensors"), "'../x.safetensors', a file outside"),
    "zero byte": (lambda f: point_index_to(f, "a\0b"), "a file outside its folder"),
    "backslashes": (lambda f: point_index_to(f, "..\\x.safetensors"), "a file outside its folder"),
    "loop of links": (lambda f: ((f / SHARD1).unlink(), (f / SHARD1).symlink_to(f / SHARD1)), SHARD1),
    "link to elsewhere": (link_away, "a file outside its folder"),
    "the same tensor twice": (duplicate, f"{SHARD1}: holds what {INDEX_FILE} does not place there"),
    "other split": (
        lambda f: shutil.copy(f / SHARD1, f / SHARD2),
        rf"2 problems: .*{SHARD2}: lacks what {INDEX_FILE} places there .*and.*{SHARD2}: holds what",
    ),
    "no index": (lambda f: (f / INDEX_FILE).unlink(), "holds parts of a model, but no"),
}


@pytest.mark.long
@pytest.mark.parametrize("case", BAD_SINGLE | BAD_SHARDS)
def test_bad_checkpoints_are_refused_in_one_line(hf1, case, tmp_path, monkeypatch):
    """Breaks when damage ends in a traceback, is found only after gigabytes were read, or passes unseen."""
    for stream in ("stream_into", "stream_npz_into"):
        monkeypatch.setattr(weights.checkpoint, stream, lambda *_: pytest.fail("tensors were read"))
    damage, message = (BAD_SINGLE | BAD_SHARDS)[case]
    folder = save(tmp_path / "model", hf1, tensors_of(hf1), shards=1 if case in BAD_SINGLE else 2)
    damage(folder)
    with pytest.raises(UserError, match=message) as caught:
        load_model(folder)
    assert "\n" not in str(caught.value) and str(folder) in str(caught.value)
    assert not (folder / "trace").exists()


def test_a_pickle_beside_the_tensors_stays_closed(hf1, tmp_path):
    """Breaks when anything but safetensors is opened."""
    folder = save(tmp_path / "model", hf1, tensors_of(hf1))
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(tmp_path / "trace")))
    load_model(folder)
    assert not (tmp_path / "trace").exists()


def test_the_layout_of_the_hub_cache_is_allowed(hf1, tmp_path):
    """Breaks when the links of the download cache are taken for an escape."""
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    save(snapshot, hf1, tensors_of(hf1), shards=2)
    blobs = tmp_path / "models--a--b" / "blobs"
    blobs.mkdir()
    for number, file in enumerate(list(snapshot.iterdir())):
        file.rename(blobs / str(number))
        file.symlink_to(Path("..", "..", "blobs", str(number)))
    assert_same_state(load_model(snapshot), hf1)


def test_only_what_is_needed_is_fetched(hf1, tmp_path, monkeypatch):
    """Breaks when a hub id fetches pickles or other gigabytes that are never opened, or another revision."""
    folder, calls = save(tmp_path, hf1, tensors_of(hf1)), []

    def snapshot_download(repo_id, revision, allow_patterns):
        calls.append((repo_id, revision, allow_patterns))
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert_same_state(load_model("google/paligemma-3b-pt-224", revision="float16"), hf1)
    (repo_id, revision, patterns), files = calls[0], [SINGLE_FILE, INDEX_FILE, SHARD1, "config.json", "pt.npz"]
    assert (repo_id, revision) == ("google/paligemma-3b-pt-224", "float16")
    assert all(any(fnmatch(file, pattern) for pattern in patterns) for file in files)
    for file in ("pytorch_model.bin", "flax_model.msgpack", "consolidated.safetensors", "tokenizer.json"):
        assert not any(fnmatch(file, pattern) for pattern in patterns)


@pytest.mark.long
@pytest.mark.parametrize("read", [read_header, read_npz])
def test_random_damage_never_ends_in_a_traceback(read, tmp_path):
    """Breaks when some header makes the reader fail in its own words, or read beyond the file."""
    path = tmp_path / "file"
    tensors = {f"layers.{i}.weight": torch.zeros(2, i + 1) for i in range(5)}
    if read is read_header:
        save_file(tensors, path)
    else:
        np.savez(path.open("wb"), **{name: tensor.numpy() for name, tensor in tensors.items()})
    raw = path.read_bytes()
    random = np.random.default_rng(0)
    refused = 0
    for _ in range(500):
        damaged = bytearray(raw)
        for _ in range(random.integers(1, 4)):
            damaged[random.integers(0, len(raw))] = random.integers(0, 256)
        path.write_bytes(damaged[: random.integers(0, len(raw))] if random.random() < 0.2 else damaged)
        try:
            assert all(0 <= entry.start <= entry.end <= len(raw) for entry in read(path).values())
        except UserError as error:
            refused += 1
            assert str(error).startswith(f"{path}: ")
    assert refused > 200


def drop(arrays, key):
    return {name: array for name, array in arrays.items() if name != key}


NPZ_GATING = "params/llm/layers/mlp/gating_einsum"
BAD_NPZ = {
    "missing": (lambda a: drop(a, NPZ_GATING), "tensors missing, 6: language_model.layers.0.mlp.gate_proj.weight"),
    "unexpected": (lambda a: a | {"params/llm/stranger": np.zeros(3, "f4")}, "tensors unexpected, 1: llm/stranger"),
    "axes": (lambda a: a | {NPZ_GATING: a[NPZ_GATING][0, 0, 0]}, "other sizes.*llm/layers/mlp/gating_einsum is"),
    "swapped axes": (lambda a: a | {NPZ_GATING: a[NPZ_GATING].swapaxes(2, 3).copy()}, "other sizes.*gating_einsum is"),
    "layers": (lambda a: a | {NPZ_GATING: a[NPZ_GATING][:2]}, "other sizes.*of 3 layers"),
    "too few rows": (
        lambda a: a | {"params/llm/embedder/input_embedding": np.zeros((60, 72), "f4")},
        "sizes.*input_embedding",
    ),
    "too many rows": (
        lambda a: a | {"params/llm/embedder/input_embedding": np.zeros((129, 72), "f4")},
        "sizes.*input_embedding",
    ),
    "narrow rows": (
        lambda a: a | {"params/llm/embedder/input_embedding": np.zeros((120, 70), "f4")},
        "sizes.*input_embedding",
    ),
    "flat rows": (lambda a: a | {"params/llm/embedder/input_embedding": np.zeros(120, "f4")}, "sizes.*input_embedding"),
    "no axis": (lambda a: a | {"params/llm/embedder/input_embedding": np.float32(1)}, "sizes.*input_embedding"),
    "integers": (lambda a: a | {NPZ_GATING: a[NPZ_GATING].astype("i4")}, "gating_einsum is int32"),
    "big-endian": (lambda a: a | {NPZ_GATING: a[NPZ_GATING].astype(">f4")}, "gating_einsum is >f4"),
    "pickle": (lambda a: a | {NPZ_GATING: np.array([Bomb(Path("trace"))])}, "a pickled array"),
    "Fortran order": (lambda a: a | {NPZ_GATING: np.asfortranarray(a[NPZ_GATING])}, "Fortran order"),
}


@pytest.mark.long
@pytest.mark.parametrize("case", BAD_NPZ)
def test_bad_arrays_are_refused_in_one_line(hf1, case, tmp_path, monkeypatch):
    """Breaks when an .npz that does not fit is read, or a pickle in it is opened."""
    monkeypatch.setattr(weights.checkpoint, "stream_npz_into", lambda *_: pytest.fail("tensors were read"))
    monkeypatch.chdir(tmp_path)
    damage, message = BAD_NPZ[case]
    hf1.config.save_pretrained(tmp_path)
    np.savez(tmp_path / "pt.npz", **damage(arrays_of(hf1, rows=128)))
    with pytest.raises(UserError, match=message) as caught:
        load_model(tmp_path)
    assert "\n" not in str(caught.value) and "pt.npz" in str(caught.value)
    assert not Path("trace").exists()


def test_arrays_belong_to_a_paligemma(hf1, tmp_path):
    """Breaks when big_vision's arrays are read into another model, or end in a KeyError."""
    np.savez(tmp_path / "pt.npz", **arrays_of(hf1, rows=128))
    with pytest.raises(UserError, match="config.json: not found"):
        load_mamba(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(MambaConfig(vocab_size=60, hidden_size=36).to_dict()))
    with pytest.raises(UserError, match="holds a PaliGemma, but config.json is of another model: remove one"):
        load_mamba(tmp_path)
    with pytest.raises(UserError, match="model_type is 'mamba'"):
        load_model(tmp_path)


@pytest.mark.long
@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("a\0b", "not a path that can be opened"),
        ("x" * 5000, "not a path that can be opened .*too long"),
        ("~nobody-has-this-name/x", "not a path that can be opened"),
        ("\x1b[2J", "no such folder"),
        ("", "holds neither"),
    ],
)
def test_sources_that_are_no_paths(source, message, tmp_path, monkeypatch):
    """Breaks when a typing error in a path ends in a traceback."""
    monkeypatch.chdir(tmp_path)
    for read in (load_model, load_mamba, load_siglip, examine, Processor.from_source):
        with pytest.raises(UserError) as caught:
            read(source)
        assert "\n" not in str(caught.value)
    with pytest.raises(SystemExit), pytest.MonkeyPatch.context():
        run_command(lambda: load_model(source))
    with pytest.raises(UserError, match=message):
        load_model(source)


@pytest.mark.long
@pytest.mark.parametrize("size", [float("nan"), float("inf"), -1.0, 0.0])
def test_sizes_that_are_none(hf1, size, tmp_path):
    """Breaks when a size of files that is no number ends in a traceback, or in an empty file."""
    model = load_model(save(tmp_path / "in", hf1, tensors_of(hf1)))
    with pytest.raises(UserError, match="max_shard_gb is"):
        export_model(model, tmp_path / "out", max_shard_gb=size)
    export_model(model, tmp_path / "out", max_shard_gb=1e300)


@pytest.mark.long
@pytest.mark.parametrize("name", ["a\0b", "x" * 300, "file/x"])
def test_folders_that_cannot_be_made(hf1, name, tmp_path):
    """Breaks when an export to an impossible place ends in a traceback, or leaves a part of it."""
    model = load_model(save(tmp_path / "in", hf1, tensors_of(hf1)))
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError) as caught:
        export_model(model, tmp_path / name)
    assert "\n" not in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "in"]


def test_a_load_builds_its_model_once(hf1, tmp_path, monkeypatch):
    """Breaks when names and shapes come from one model on the meta device and the weights go to a second one."""
    folder, built = save(tmp_path, hf1, tensors_of(hf1)), []
    build = weights.checkpoint.build
    monkeypatch.setattr(weights.checkpoint, "build", lambda config: built.append(1) or build(config))
    assert_same_state(load_model(folder, dtype=torch.bfloat16), hf1, torch.bfloat16)
    assert built == [1]


def test_damaged_archives(hf1, tmp_path):
    """Breaks when a truncated .npz or one with flipped bits is opened, or leaves a traceback."""
    hf1.config.save_pretrained(tmp_path)
    path = tmp_path / "pt.npz"
    np.savez(path, **arrays_of(hf1, rows=128))
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    with pytest.raises(UserError, match="no .npz that can be read.*download"):
        load_model(tmp_path)
    with zipfile.ZipFile(path, "w"):
        pass
    with pytest.raises(UserError, match="tensors missing, 68"):
        load_model(tmp_path)
    (tmp_path / "whole").write_bytes(whole)
    with zipfile.ZipFile(tmp_path / "whole") as old, zipfile.ZipFile(path, "w") as new:
        for name in old.namelist():
            new.writestr(name, old.read(name)[: -4 if NPZ_GATING in name else None])
    with pytest.raises(UserError, match="no .npz that can be read .*gating_einsum has [0-9]+ bytes instead of"):
        load_model(tmp_path)
    path.write_bytes(whole)
    with zipfile.ZipFile(path) as archive:
        offset = archive.getinfo(NPZ_GATING + ".npy").header_offset
    flipped = bytearray(whole)
    flipped[offset + 2000] ^= 1
    path.write_bytes(flipped)
    with pytest.raises(UserError, match="damaged .Bad CRC-32"):
        load_model(tmp_path)


# ----------------------------------------------------------------------------------------------- export and inspect


@pytest.mark.long
@pytest.mark.parametrize("dialect", DIALECTS)
def test_transformers_opens_every_dialect_we_write(hf, dialect, tmp_path):
    """Breaks when an exported name, shape or config field means another model to transformers."""
    model = load_model(save(tmp_path / "in", hf, tensors_of(hf)))
    export_model(model, tmp_path / "out", dialect=dialect, max_shard_gb=2e-4)
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 1
    theirs, loading = PaliGemmaForConditionalGeneration.from_pretrained(
        tmp_path / "out", attn_implementation="eager", output_loading_info=True
    )
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    theirs.eval()
    inputs = batch(hf)
    with torch.inference_mode():
        assert torch.equal(hf_forward(theirs, inputs), hf_forward(hf, inputs))
    assert_same_state(load_model(tmp_path / "out"), hf)
    assert set(tensors_of(hf, dialect)) == set(examine(tmp_path / "out").entries)
    assert theirs.generation_config.eos_token_id == 1


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_exported_dtypes(hf1, dtype, tmp_path):
    """Breaks when a cast on the way out differs from torch's, or config.json names another dtype."""
    model = load_model(save(tmp_path / "in", hf1, tensors_of(hf1)))
    export_model(model, tmp_path / "out", dtype=dtype)
    with safe_open(tmp_path / "out" / SINGLE_FILE, "pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert_same_state(load_model(tmp_path / "out", dtype=dtype), hf1, dtype)
    assert PaliGemmaForConditionalGeneration.from_pretrained(tmp_path / "out", dtype="auto").dtype == dtype


def test_files_of_mixed_dtypes_stay_aligned(tmp_path):
    """Breaks when an odd number of bf16 values pushes the fp32 tensors after it off their boundary."""
    tensors = {"a": torch.arange(3).bfloat16(), "b": torch.arange(4.0).view(2, 2), "c": torch.tensor(5.0)}
    specs = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    write_checkpoint(tmp_path, specs, lambda name: tensors[name].reshape(-1).split(2), [list(specs)])
    for entry in read_header(tmp_path / SINGLE_FILE).values():
        assert entry.start % (4 if entry.dtype == "F32" else 2) == 0
    written = load_file(tmp_path / SINGLE_FILE)
    for name, tensor in tensors.items():
        assert torch.equal(written[name], tensor) and written[name].dtype == tensor.dtype


def test_a_value_that_fp16_cannot_hold_is_refused(hf1, tmp_path):
    """Breaks when a cast turns a weight into infinity in silence."""
    model = load_model(save(tmp_path / "in", hf1, tensors_of(hf1)))
    model.language_model.norm.weight.data[3] = 1e5
    with pytest.raises(UserError, match="language_model.model.norm.weight.*beyond the range of float16"):
        export_model(model, tmp_path / "out", dtype=torch.float16)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]


def test_merged_adapters_are_plain_weights(hf1, tmp_path):
    """Breaks when an adapter's update is lost or doubled on the way out, or an unmerged one is written as a base."""
    model = load_model(save(tmp_path / "in", hf1, tensors_of(hf1)))
    adapter.inject(model, adapter.DECODER_TARGETS, r=4, alpha=8)
    torch.manual_seed(0)
    for layer in adapter.lora_layers(model).values():
        torch.nn.init.normal_(layer.lora.lora_B.weight, std=0.1)
    adapter.save(model, tmp_path / "run")
    set_attention_backend(model, "eager")
    inputs = batch(hf1)
    with torch.inference_mode():
        adapted = model(**inputs)
    with pytest.raises(UserError, match="q_proj: carries an unmerged adapter"):
        export_model(model, tmp_path / "out")
    adapter.merge(model)
    export_model(model, tmp_path / "out")
    weights.export.main([str(tmp_path / "in"), str(tmp_path / "cli"), "--adapter", str(tmp_path / "run"), "--merge"])
    valid = inputs["attention_mask"].bool()
    for folder in ("out", "cli"):
        theirs = open_with_transformers(tmp_path / folder)
        with torch.inference_mode():
            logits = hf_forward(theirs, inputs)
        assert relative_error(logits[valid], adapted[valid]) < 1e-5
        assert relative_error(logits[valid], hf_forward(hf1, inputs)[valid]) > 1e-3
    assert load_file(tmp_path / "out" / SINGLE_FILE).keys() == tensors_of(hf1, "A").keys()


@pytest.mark.parametrize(
    ("options", "message"),
    [({"kind": "split"}, "self_attn"), ({"kind": "softmax", "feed_forward": "swiglu-new"}, r"mlp: is SwiGLU")],
)
def test_variants_that_the_format_cannot_express_are_refused(hf1, options, message, tmp_path):
    """Breaks when a grafted model is written as if it were plain."""
    model = load_model(save(tmp_path / "in", hf1, tensors_of(hf1)))
    graft(model, **options)
    with pytest.raises(UserError, match=f"{message}.*the published format cannot express it"):
        export_model(model, tmp_path / "out")


def test_a_swapped_activation_is_no_plain_model(hf1, tmp_path):
    """Breaks when a model with other activations, whose parameters look plain, is exported with the old config."""
    model = load_model(save(tmp_path / "in", hf1, tensors_of(hf1)))
    model.language_model.layers[1].mlp.activation = "silu"
    with pytest.raises(UserError, match="layers.1.mlp: is GemmaMLP silu, where a PaliGemma has GemmaMLP gelu"):
        export_model(model, tmp_path / "out")


def test_an_early_feature_layer_is_refused(hf1, tmp_path):
    """Breaks when a model that reads the tower before its end is exported, which transformers would read at its end."""
    model = load_model(save(tmp_path / "in", hf1, tensors_of(hf1)))
    model.config = replace(model.config, vision=replace(model.config.vision, feature_layer=-2))
    with pytest.raises(UserError, match="feature_layer is -2"):
        export_model(model, tmp_path / "out")


def test_a_silu_model_is_exported_as_one(hf1, tmp_path):
    """Breaks when the activation does not reach transformers."""
    model = load_model(save(tmp_path / "in", hf1, tensors_of(hf1)))
    for layer in model.language_model.layers:
        layer.mlp.activation = "silu"
    model.config = replace(model.config, text=replace(model.config.text, hidden_activation="silu"))
    export_model(model, tmp_path / "out")
    theirs = open_with_transformers(tmp_path / "out")
    assert_same_logits(model, theirs)
    assert_same_logits(load_model(tmp_path / "out"), theirs)


@pytest.mark.parametrize(
    ("failure", "raised"), [(KeyboardInterrupt(), KeyboardInterrupt), (OSError(errno.ENOSPC, "No space"), UserError)]
)
def test_an_interrupted_export_leaves_nothing(hf1, failure, raised, tmp_path, monkeypatch):
    """Breaks when half a checkpoint can be mistaken for a complete one."""
    model = load_model(save(tmp_path / "in", hf1, tensors_of(hf1)))
    write = weights.export.write_text

    def fail(path, text):
        write(path, text)
        raise failure

    monkeypatch.setattr(weights.export, "write_text", fail)  # config.json comes after the tensors
    with pytest.raises(raised):
        export_model(model, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]


def test_where_an_export_may_not_go(hf1, tmp_path, monkeypatch):
    """Breaks when an export overwrites a folder, or fills the disk before it fails."""
    model = load_model(save(tmp_path / "in", hf1, tensors_of(hf1)))
    with pytest.raises(UserError, match="in: exists and is not empty"):
        export_model(model, tmp_path / "in")
    with pytest.raises(UserError, match="dialect is 'E', expected one of A, B, C, D"):
        export_model(model, tmp_path / "out", dialect="E")
    with pytest.raises(UserError, match="max_shard_gb is 0"):
        export_model(model, tmp_path / "out", max_shard_gb=0)
    (tmp_path / "empty").mkdir()
    export_model(model, tmp_path / "empty")
    assert_same_state(load_model(tmp_path / "empty"), hf1)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1, 1, 1000))
    with pytest.raises(UserError, match="bytes, 1,000 are free"):
        export_model(model, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "in"]


def test_the_export_command(hf1, tmp_path, capsys):
    """Breaks when the command loses the tokenizer, the stored dtype, or a flag."""
    tensors = {name: tensor.bfloat16() for name, tensor in tensors_of(hf1, "C").items()}
    folder = save(tmp_path / "in", hf1, tensors)
    (folder / "tokenizer.model").write_bytes(b"pieces")
    (folder / "README.md").write_text("no companion")
    weights.export.main([str(folder), str(tmp_path / "out"), "--dialect", "A", "--max-shard-gb", "0.0002"])
    assert "dialect A" in capsys.readouterr().out
    assert (tmp_path / "out" / "tokenizer.model").read_bytes() == b"pieces"
    assert "no companion" not in (tmp_path / "out" / "README.md").read_text()
    found = examine(tmp_path / "out")
    assert found.dialect == "A" and {entry.dtype for entry in found.entries.values()} == {"BF16"}
    assert_same_state(load_model(tmp_path / "out", dtype=torch.bfloat16), hf1, torch.bfloat16)
    with pytest.raises(UserError, match="--adapter and --merge go together"):
        weights.export.main([str(folder), str(tmp_path / "more"), "--merge"])


def test_inspect(hf1, tmp_path, capsys):
    """Breaks when inspection miscounts, reads tensors, or reports a damaged checkpoint as complete."""
    folder = save(tmp_path / "in", hf1, tensors_of(hf1, "B", "lm_head.weight"), shards=2)
    weights.inspect.main([str(folder), "--json"])
    facts = json.loads(capsys.readouterr().out)
    count = {"vision": "vision_tower", "projector": "multi_modal", "embedding": "embed_tokens"}
    sizes = {name: p.numel() for name, p in hf1.named_parameters()}
    expected = {part: sum(n for name, n in sizes.items() if key in name) for part, key in count.items()}
    expected["decoder"] = sum(sizes.values()) - sum(expected.values())
    assert facts["parameters"] == expected | {"total": sum(sizes.values())}
    assert facts["bytes"]["total"] == 4 * (sum(sizes.values()) + expected["embedding"])
    assert (facts["dialect"], facts["dtypes"]) == ("B", {"F32": len(tensors_of(hf1)) + 1})
    assert facts["tied_head"] == ["lm_head.weight"] and facts["problems"] == []
    weights.inspect.main([str(folder)])
    text = capsys.readouterr().out
    assert "PaliGemma 1, 56 px, dialect B" in text and f"{expected['decoder']:,}" in text and "missing: none" in text

    (folder / SHARD2).unlink()
    with pytest.raises(SystemExit) as caught:
        run_command(lambda: weights.inspect.main([str(folder)]))
    shown = capsys.readouterr()
    assert caught.value.code == 2
    assert "dialect B" in shown.out and shown.err.startswith("error: ") and SHARD2 in shown.err
    (folder / "config.json").unlink()
    with pytest.raises(UserError, match="2 problems"):
        weights.inspect.main([str(folder), "--json"])
    facts = json.loads(capsys.readouterr().out)
    assert facts["model"] is facts["missing"] is None and facts["tensors"] > 0 and len(facts["problems"]) == 2


@pytest.mark.long
def test_names_are_printed_safely(hf1, tmp_path, capsys):
    """Breaks when a checkpoint's names can move the cursor, or forge a line."""
    folder = save(tmp_path / "in", hf1, tensors_of(hf1) | {"a\x1b[2J\nmissing: none": torch.zeros(1)})
    with pytest.raises(UserError):
        weights.inspect.main([str(folder)])
    printed = capsys.readouterr().out
    assert "\x1b" not in printed and r"  a\x1b[2J\nmissing: none" in printed


@pytest.mark.long
@pytest.mark.parametrize("preset", [1, 2])
def test_made_checkpoints_are_checkpoints(preset, tmp_path, monkeypatch):
    """Breaks when the script for full-size trials writes what neither side can open."""
    extra = {"model_type": "gemma2", "sliding_window": 6} if preset == 2 else {}
    monkeypatch.setitem(PRESETS, "small", small(**extra))
    make_checkpoint.main([str(tmp_path / "out"), "--preset", "small", "--dtype", "bf16", "--shards", "2"])
    assert len(list((tmp_path / "out").glob("model-*-of-00002.safetensors"))) == 2
    model = load_model(tmp_path / "out", dtype=torch.bfloat16)
    theirs, loading = PaliGemmaForConditionalGeneration.from_pretrained(
        tmp_path / "out", dtype=torch.bfloat16, output_loading_info=True
    )
    assert not loading["missing_keys"] and not loading["unexpected_keys"]
    assert_same_state(model, theirs, torch.bfloat16)
    hidden = F.normalize(torch.randn(3, 24), dim=-1) * 24**0.5
    assert 0.3 < model.language_model.layers[0].self_attn.q_proj(hidden.bfloat16()).float().std() < 3
    with pytest.raises(UserError, match="exists already"):
        make_checkpoint.main([str(tmp_path / "out"), "--preset", "small"])
