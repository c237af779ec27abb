"""Checkpoints: every published form loads bit for bit, leaves as it came, and is refused in one line when damaged."""

import json
import pickle
import re
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PaliGemmaForConditionalGeneration, SiglipVisionConfig, SiglipVisionModel

import weights.export
import weights.inspect
import weights.load
from lora import adapter
from model.attention import set_attention_backend
from model.common import UserError, run_command
from model.config import PRESETS, PaliGemmaConfig, TextConfig, VisionConfig
from model.device import DTYPES
from model.differential import graft
from model.paligemma import PaliGemma, initialize
from tests.make_checkpoint import make_checkpoint
from tests.peak_memory import in_own_process, load_peak
from tests.reference import batch, hf_forward, hf_model, relative_error
from weights.export import export_model
from weights.load import INDEX_FILE, SINGLE_FILE, empty_model, examine, load_model, load_siglip
from weights.mapping import DIALECTS

# how each dialect spells the state dict of transformers 5, written down a second time
RENAMES = {
    "A": [
        ("^model.language_model", "language_model.model"),
        ("^model.vision_tower", "vision_tower.vision_model"),
        ("^model.multi_modal", "multi_modal"),
    ],
    "B": [("^model.vision_tower", "model.vision_tower.vision_model")],
    "C": [],
    "D": [("^model.language_model", "language_model.model"), ("^model.", "")],
}
Q0 = "language_model.model.layers.0.self_attn.q_proj.weight"
HEAD = "language_model.lm_head.weight"


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


def refused(call, *words: str) -> str:
    """The one line of the UserError that `call` raises, which holds all `words`."""
    with pytest.raises(UserError) as caught:
        call()
    line = str(caught.value)
    assert line.isprintable() and all(word in line for word in words), line
    return line


# ---------------------------------------------------------------------------------------------------------- loading


@pytest.mark.long
@pytest.mark.parametrize(
    ("dialect", "shards", "head"),
    [("A", 1, None), ("B", 3, "lm_head.weight"), ("C", 1, HEAD), ("D", 1, "lm_head.weight")],
)
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
    assert torch.equal(load_siglip("tiny").embeddings.patch_embedding.bias, torch.zeros(128))


@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16])
def test_tensors_are_cast_as_torch_casts_them(hf1, wanted, tmp_path):
    """Breaks when a tensor is cast through a third dtype, or the dtype of one is taken for that of all."""
    stored = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
    tensors = {name: t.to(stored[number % 4]) for number, (name, t) in enumerate(tensors_of(hf1, "D").items())}
    model = load_model(save(tmp_path, hf1, tensors), dtype=wanted)
    for name, tensor in tensors.items():
        ours = model.get_parameter(name.replace("language_model.model", "language_model"))
        assert ours.dtype == wanted and torch.equal(ours, tensor.to(wanted)), name


def test_the_file_is_never_written_to(hf1, tmp_path):
    """Breaks when training a loaded model changes the checkpoint, which the parameters are views of."""
    path = save(tmp_path, hf1, tensors_of(hf1)) / SINGLE_FILE
    before = path.read_bytes()
    with torch.no_grad():
        for parameter in load_model(tmp_path).parameters():
            parameter.add_(1)
    assert path.read_bytes() == before


@pytest.mark.parametrize("kind", [None, "int8", "nf4"])
def test_a_head_is_the_embedding_or_refused(hf1, kind, tmp_path):
    """Breaks when a head stored alone is not tied, or one that was trained apart is lost in silence."""
    tensors = tensors_of(hf1, "A", HEAD)
    embedding = tensors.pop("language_model.model.embed_tokens.weight")
    if kind is None:
        assert_same_state(load_model(save(tmp_path, hf1, tensors)), hf1)
    tensors |= {"language_model.model.embed_tokens.weight": embedding.clone()}
    load_model(save(tmp_path, hf1, tensors), dtype=torch.bfloat16, quantize=kind)
    tensors[HEAD][-1, -1] += 1
    save(tmp_path, hf1, tensors, shards=2)
    (tmp_path / SINGLE_FILE).unlink()
    refused(lambda: load_model(tmp_path, dtype=torch.bfloat16, quantize=kind), "differs from", "lm_head", "ties")


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
    sizes = {"vocab_size": 96, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "head_dim": 8}
    vision = VisionConfig(16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, image_size=28)
    return PaliGemmaConfig(vision, TextConfig(**(sizes | text)), image_token_id=95)


WIDE = replace(small(), vision=replace(small().vision, feature_layer=-2))


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
@pytest.mark.parametrize(
    ("stored", "wanted", "kind"), [("fp32", "bf16", None), ("bf16", "bf16", "int8"), ("bf16", "bf16", "nf4")]
)
def test_peak_memory(stored, wanted, kind, tmp_path, monkeypatch):
    """Breaks when loading holds a second copy: the file's tensors beside the cast or packed ones, or all of a file."""
    config = small(vocab_size=8192, hidden_size=1024, intermediate_size=8192, num_hidden_layers=6)
    monkeypatch.setitem(PRESETS, "big", config)
    make_checkpoint(tmp_path / "checkpoint", "big", DTYPES[stored], shards=2)
    peak, size = in_own_process(load_peak, tmp_path / "checkpoint", DTYPES[wanted], kind)
    assert size > 90e6
    # a matrix of 8 million values, mapped and in parts, and what the C library keeps of freed parts come on top (40 to
    # 115 MB): little beside the 3B of the published models, less than a second copy of these
    assert peak <= (1.15 if kind else 1.05) * size + 120e6


@pytest.mark.parametrize("kind", ["int8", "int4", "nf4"])
def test_a_model_is_quantized_while_it_is_read(hf1, kind, tmp_path, monkeypatch):
    """Breaks when rows that are cast as they are read give other bits than a model that is quantized afterwards."""
    monkeypatch.setattr("model.linear.BLOCK_ELEMENTS", 1 << 12)
    tensors = {name: tensor.bfloat16() for name, tensor in tensors_of(hf1, "A", HEAD).items()}
    folder = save(tmp_path / "model", hf1, tensors, shards=3)
    for dtype in (torch.float32, torch.float16):
        model, whole = load_model(folder, dtype=dtype, quantize=kind), load_model(folder, dtype=dtype)
        fingerprint = adapter.fingerprint(whole)
        adapter.quantize(whole, kind, head=True)
        state = whole.state_dict()
        assert all(torch.equal(tensor, state.pop(name)) for name, tensor in model.state_dict().items()) and not state
        assert adapter.fingerprint(model) == adapter.fingerprint(whole) == fingerprint
        assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


# ------------------------------------------------------------------------------------------------------- big_vision


def arrays_of(hf, rows: int) -> dict[str, np.ndarray]:
    """The arrays that big_vision would hold for the weights of a transformers model, from its einsums' axes."""
    state = {name.removeprefix("model."): tensor for name, tensor in hf.state_dict().items()}
    text, vision = hf.config.text_config, hf.config.vision_config
    width, vision_width = text.head_dim, vision.hidden_size // vision.num_attention_heads
    arrays = {
        "img/embedding/kernel": state["vision_tower.embeddings.patch_embedding.weight"].permute(2, 3, 1, 0),
        "img/embedding/bias": state["vision_tower.embeddings.patch_embedding.bias"],
        "img/pos_embedding": state["vision_tower.embeddings.position_embedding.weight"][None],
        "img/Transformer/encoder_norm/scale": state["vision_tower.post_layernorm.weight"],
        "img/Transformer/encoder_norm/bias": state["vision_tower.post_layernorm.bias"],
        "img/head/kernel": state["multi_modal_projector.linear.weight"].T,
        "img/head/bias": state["multi_modal_projector.linear.bias"],
        "llm/embedder/input_embedding": state["language_model.embed_tokens.weight"][:rows],
        "llm/final_norm/scale": state["language_model.norm.weight"],
    }

    def same(w):
        return w

    def per_head(w):  # (N·H, D) to (N, D, H)
        return w.unflatten(0, (-1, width)).transpose(1, 2)

    attention = "MultiHeadDotProductAttention_0"
    vision_arrays = {  # the array's key: how a layer's parameter enters it, and the parameter
        f"{attention}/out/kernel": (lambda w: w.T.unflatten(0, (-1, vision_width)), "self_attn.out_proj.weight"),
        f"{attention}/out/bias": (same, "self_attn.out_proj.bias"),
    }
    for key in ("query", "key", "value"):
        name = f"self_attn.{key[0]}_proj"
        vision_arrays[f"{attention}/{key}/kernel"] = lambda w: w.T.unflatten(1, (-1, vision_width)), f"{name}.weight"
        vision_arrays[f"{attention}/{key}/bias"] = lambda w: w.unflatten(0, (-1, vision_width)), f"{name}.bias"
    for i in (0, 1):
        vision_arrays[f"LayerNorm_{i}/scale"] = same, f"layer_norm{i + 1}.weight"
        vision_arrays[f"LayerNorm_{i}/bias"] = same, f"layer_norm{i + 1}.bias"
        vision_arrays[f"MlpBlock_0/Dense_{i}/kernel"] = torch.t, f"mlp.fc{i + 1}.weight"
        vision_arrays[f"MlpBlock_0/Dense_{i}/bias"] = same, f"mlp.fc{i + 1}.bias"
    text_arrays = {
        "attn/q_einsum/w": (per_head, "self_attn.q_proj.weight"),  # BTD,NDH->BTNH
        "attn/kv_einsum/w": (per_head, "self_attn.k_proj.weight", "self_attn.v_proj.weight"),  # BSD,2KDH->2BSKH
        "attn/attn_vec_einsum/w": (lambda w: w.T.unflatten(0, (-1, width)), "self_attn.o_proj.weight"),  # BTNH,NHD->BTD
        "mlp/gating_einsum": (torch.t, "mlp.gate_proj.weight", "mlp.up_proj.weight"),
        "mlp/linear": (torch.t, "mlp.down_proj.weight"),
        "pre_attention_norm/scale": (same, "input_layernorm.weight"),
        "pre_ffw_norm/scale": (same, "post_attention_layernorm.weight"),
    }
    if text.model_type == "gemma2":
        text_arrays |= {
            "post_attention_norm/scale": (same, "post_attention_layernorm.weight"),
            "pre_ffw_norm/scale": (same, "pre_feedforward_layernorm.weight"),
            "post_ffw_norm/scale": (same, "post_feedforward_layernorm.weight"),
        }
    for prefix, layers, count, rules in (
        ("img/Transformer/encoderblock", "vision_tower.encoder.layers", vision.num_hidden_layers, vision_arrays),
        ("llm/layers", "language_model.layers", text.num_hidden_layers, text_arrays),
    ):
        for key, (change, *names) in rules.items():
            parts = [torch.stack([change(state[f"{layers}.{i}.{name}"]) for i in range(count)]) for name in names]
            arrays[f"{prefix}/{key}"] = torch.stack(parts, 1) if len(parts) > 1 else parts[0]
    return {f"params/{key}": tensor.contiguous().numpy() for key, tensor in arrays.items()}


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
        mean = embedding[:120].mean(0).expand(8, -1)
        torch.testing.assert_close(embedding[120:], mean, atol=1e-7, rtol=0)
        with torch.no_grad():
            embedding[120:] = hf.state_dict()["lm_head.weight"][120:]
        assert_same_state(model, hf)
        assert_same_logits(model, hf)
    assert examine(tmp_path).dialect == "big_vision"


def test_big_vision_einsums(hf1, tmp_path, seeded):
    """Breaks when the parameters compute anything else than big_vision's einsums on its own arrays."""
    hf1.config.save_pretrained(tmp_path)
    arrays = arrays_of(hf1, rows=128)
    np.savez(tmp_path / "pt.npz", **arrays)
    model = load_model(tmp_path)
    a = {key.removeprefix("params/"): torch.from_numpy(array) for key, array in arrays.items()}
    text, vision = torch.randn(2, 5, 72), torch.randn(2, 5, 40)
    layer, tower = model.language_model.layers[1], model.vision_tower.encoder.layers[1].self_attn
    q = torch.einsum("btd,ndh->btnh", text, a["llm/layers/attn/q_einsum/w"][1])
    k, v = torch.einsum("bsd,ckdh->cbskh", text, a["llm/layers/attn/kv_einsum/w"][1])
    gate, up = torch.einsum("btd,cdf->cbtf", text, a["llm/layers/mlp/gating_einsum"][1])
    key = "img/Transformer/encoderblock/MultiHeadDotProductAttention_0"
    seen = torch.einsum("btd,dnh->btnh", vision, a[f"{key}/query/kernel"][1]) + a[f"{key}/query/bias"][1]
    out = torch.einsum("btnh,nhd->btd", seen, a[f"{key}/out/kernel"][1]) + a[f"{key}/out/bias"][1]
    for ours, theirs in (
        (layer.self_attn.q_proj(text), q.flatten(2)),
        (layer.self_attn.k_proj(text), k.flatten(2)),
        (layer.self_attn.v_proj(text), v.flatten(2)),
        (
            layer.self_attn.o_proj(q.flatten(2)),
            torch.einsum("btnh,nhd->btd", q, a["llm/layers/attn/attn_vec_einsum/w"][1]),
        ),
        (layer.mlp.gate_proj(text), gate),
        (layer.mlp.up_proj(text), up),
        (layer.mlp.down_proj(gate), gate @ a["llm/layers/mlp/linear"][1]),
        (tower.q_proj(vision), seen.flatten(2)),
        (tower.out_proj(seen.flatten(2)), out),
    ):
        assert relative_error(ours, theirs) < 1e-6


def test_big_vision_dtypes_and_presets(hf1, tmp_path, monkeypatch):
    """Breaks when bfloat16, which numpy stores as raw bytes, is misread, or sizes no longer name the preset."""
    config = PaliGemmaConfig.from_dict(hf1.config.to_dict())
    monkeypatch.setattr(weights.load, "PRESETS", {"other": small(), "this": config})
    arrays = {}
    for number, (key, array) in enumerate(arrays_of(hf1, rows=128).items()):
        bf16 = torch.from_numpy(array).bfloat16()
        arrays[key] = bf16.view(torch.int16).numpy().view("V2") if number % 2 else bf16.float().numpy()
    np.savez(tmp_path / "pt.npz", **arrays)
    model = load_model(tmp_path, dtype=torch.bfloat16)
    assert model.config == config
    assert_same_state(model, hf1, torch.bfloat16)
    monkeypatch.setattr(weights.load, "PRESETS", {"other": small()})
    refused(lambda: load_model(tmp_path), "fit no preset", "write a config.json")


# -------------------------------------------------------------------------------------------------------- bad input


class Bomb:
    """A pickle that leaves a trace when it is opened."""

    def __reduce__(self):
        return (open, ("trace", "w"))


def retensor(change):
    """A damage: the dictionary of tensors is changed in place."""

    def damage(folder: Path) -> None:
        tensors = load_file(folder / SINGLE_FILE)
        change(tensors)
        save_file(tensors, folder / SINGLE_FILE)

    return damage


def pickled_only(folder: Path) -> None:
    (folder / SINGLE_FILE).unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))


def index_outside(folder: Path) -> None:
    (folder / INDEX_FILE).write_text('{"weight_map": {"a": "../../etc/passwd"}}')


SHARD2 = "model-00002-of-00002.safetensors"
BAD = {
    "integers": (1, retensor(lambda t: t.update({Q0: t[Q0].to(torch.int8)})), f"{Q0} is I8", "not in F64"),
    "misshaped": (1, retensor(lambda t: t.update({Q0: t[Q0].T.contiguous()})), f"{Q0} is (72, 64), expected (64, 72)"),
    "missing": (1, retensor(lambda t: t.pop(Q0)), "missing, 1: language_model.layers.0.self_attn.q_proj.weight"),
    "unexpected": (1, retensor(lambda t: t.update({"a\x1b[2J": torch.zeros(1)})), r"unexpected, 1: a\x1b[2J"),
    "pickle": (1, pickled_only, "pickles", "safetensors"),
    "no index": (2, lambda folder: (folder / INDEX_FILE).unlink(), INDEX_FILE),
    "missing file": (2, lambda folder: (folder / SHARD2).unlink(), SHARD2, "not found"),
    "index outside": (2, index_outside, "model/passwd"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_checkpoints_are_refused_in_one_line(hf1, case, tmp_path, monkeypatch):
    """Breaks when damage ends in a traceback, is found only after gigabytes were read, or passes unseen."""
    shards, damage, *words = BAD[case]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(weights.load, "replaceable", lambda *_: pytest.fail("tensors were read"))
    folder = save(tmp_path / "model", hf1, tensors_of(hf1), shards)
    damage(folder)
    refused(lambda: load_model(folder, quantize="int8"), str(folder), *words)
    assert not Path("trace").exists()


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda a: a.swapaxes(2, 3).copy(), "gate_proj.weight is"),
        (lambda a: a[:2], "missing"),
        (lambda a: np.array([Bomb()]), "a pickled array"),
        (lambda a: np.asfortranarray(a), "Fortran order"),
    ],
)
def test_bad_arrays_are_refused_in_one_line(hf1, change, word, tmp_path, monkeypatch):
    """Breaks when an .npz that does not fit is read, or a pickle in it is opened."""
    monkeypatch.chdir(tmp_path)
    hf1.config.save_pretrained(tmp_path)
    arrays, key = arrays_of(hf1, rows=128), "params/llm/layers/mlp/gating_einsum"
    np.savez(tmp_path / "pt.npz", **(arrays | {key: change(arrays[key])}))
    refused(lambda: load_model(tmp_path), word)
    assert not Path("trace").exists()


def test_only_what_is_needed_is_fetched(hf1, tmp_path, monkeypatch):
    """Breaks when a hub id fetches pickles or other gigabytes that are never opened, or another revision."""
    folder, calls = save(tmp_path, hf1, tensors_of(hf1)), []

    def snapshot_download(repo_id, revision, allow_patterns):
        calls.append((repo_id, revision))
        fetched = [SINGLE_FILE, INDEX_FILE, SHARD2, "config.json", "pt.npz"]
        left = ["pytorch_model.bin", "flax_model.msgpack", "consolidated.safetensors", "tokenizer.json"]
        for file in fetched + left:
            assert any(fnmatch(file, pattern) for pattern in allow_patterns) == (file in fetched)
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert_same_state(load_model("google/paligemma-3b-pt-224", revision="float16"), hf1)
    assert calls == [("google/paligemma-3b-pt-224", "float16")]


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
    inputs = batch(hf)
    with torch.inference_mode():
        assert torch.equal(hf_forward(theirs.eval(), inputs), hf_forward(hf, inputs))
    assert_same_state(load_model(tmp_path / "out"), hf)
    assert set(tensors_of(hf, dialect)) == set(examine(tmp_path / "out").entries)
    assert theirs.generation_config.eos_token_id == 1


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
    refused(lambda: export_model(model, tmp_path / "out"), "q_proj: carries an unmerged adapter")
    adapter.merge(model)
    export_model(model, tmp_path / "out")
    weights.export.main([str(tmp_path / "in"), str(tmp_path / "cli"), "--adapter", str(tmp_path / "run"), "--merge"])
    valid = inputs["attention_mask"].bool()
    for folder in ("out", "cli"):
        theirs = PaliGemmaForConditionalGeneration.from_pretrained(
            tmp_path / folder, attn_implementation="eager"
        ).eval()
        with torch.inference_mode():
            logits = hf_forward(theirs, inputs)
        assert relative_error(logits[valid], adapted[valid]) < 1e-5
        assert relative_error(logits[valid], hf_forward(hf1, inputs)[valid]) > 1e-3
    assert load_file(tmp_path / "out" / SINGLE_FILE).keys() == tensors_of(hf1, "A").keys()


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda model: graft(model, "split"), "self_attn: is "),
        (lambda model: graft(model, "softmax", feed_forward="swiglu-new"), "mlp: is SwiGLU"),
        (
            lambda model: setattr(model.language_model.layers[1].mlp, "activation", "silu"),
            "layers.1.mlp: is GemmaMLP silu",
        ),
        (lambda model: model.language_model.norm.weight.data.fill_(1e5), "language_model.model.norm.weight holds"),
    ],
)
def test_models_that_the_format_cannot_express_are_not_exported(hf1, change, word, tmp_path):
    """Breaks when a variant, or a run that diverged, is published as if it were a plain model."""
    model = load_model(save(tmp_path / "in", hf1, tensors_of(hf1)))
    change(model)
    refused(lambda: export_model(model, tmp_path / "out", dtype=torch.float16), word)
    refused(lambda: export_model(model, tmp_path / "in"), "in: exists and is not empty")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_an_interrupted_export_leaves_nothing(hf1, tmp_path, monkeypatch):
    """Breaks when half a checkpoint can be mistaken for a complete one."""
    model = load_model(save(tmp_path / "in", hf1, tensors_of(hf1)))
    monkeypatch.setattr(weights.export, "write_text", Mock(side_effect=KeyboardInterrupt))  # after the tensors
    with pytest.raises(KeyboardInterrupt):
        export_model(model, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_the_export_command(hf1, tmp_path, capsys):
    """Breaks when the command loses the tokenizer or a flag, or casts otherwise than torch and config.json say."""
    tensors = {name: tensor.bfloat16() for name, tensor in tensors_of(hf1, "C").items()}
    folder = save(tmp_path / "in", hf1, tensors)
    (folder / "tokenizer.model").write_bytes(b"pieces")
    for flags, dtype in (("--dialect A --max-shard-gb 0.0002", torch.bfloat16), ("--dtype fp16", torch.float16)):
        out = tmp_path / str(dtype)
        weights.export.main([str(folder), str(out), *flags.split()])
        assert "dialect A" in capsys.readouterr().out and (out / "tokenizer.model").read_bytes() == b"pieces"
        assert PaliGemmaForConditionalGeneration.from_pretrained(out, dtype="auto").dtype == dtype
        for name, tensor in load_model(out, dtype=dtype).state_dict().items():
            assert torch.equal(tensor, tensors[f"model.{name}"].to(dtype)), name
    refused(lambda: weights.export.main([str(folder), str(tmp_path / "more"), "--merge"]), "--adapter and --merge")


def test_inspect(hf1, tmp_path, capsys):
    """Breaks when inspection miscounts, or reports a damaged checkpoint as complete."""
    folder = save(tmp_path / "in", hf1, tensors_of(hf1, "B", "lm_head.weight"), shards=2)
    weights.inspect.main([str(folder)])
    text = capsys.readouterr().out
    total = sum(parameter.numel() for parameter in hf1.parameters())
    assert "PaliGemma, 56 px, dialect B" in text and re.search(f"total +{total:,}", text)
    (folder / SHARD2).write_bytes((folder / SHARD2).read_bytes()[:-1])
    with pytest.raises(SystemExit) as caught:
        run_command(lambda: weights.inspect.main([str(folder)]))
    assert caught.value.code == 2 and SHARD2 in capsys.readouterr().err
