"""Published Mambas load under both name sets, damaged ones are refused in one line, and their tokenizer is read."""

import json
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file

from model.common import UserError
from model.generate import generate
from model.mamba import MambaLM
from model.processor import Processor
from model.source import BUNDLED_FOLDER
from model.system_configs import MambaConfig, ProjectorConfig, QMambaConfig
from tests.model.test_mamba import ORIGINAL, hf_mamba, prompts
from tests.reference import relative_error
from weights.load import load_mamba
from weights.streaming import INDEX_FILE, SINGLE_FILE

# hf_mamba's sizes, as the original repository writes them: 57 tokens, padded to 60
ORIGINAL_CONFIG = ORIGINAL | {
    "d_model": 36,
    "n_layer": 3,
    "vocab_size": 57,
    "pad_vocab_size_multiple": 4,
    "ssm_cfg": {"d_state": 5, "d_conv": 3},
    "layer_norm_epsilon": 1e-3,
    "eos_token_id": 1,
}


@pytest.fixture(scope="module")
def hf():
    return hf_mamba()


@pytest.fixture
def published(hf, tmp_path) -> Path:
    """As transformers saves it."""
    hf.save_pretrained(tmp_path / "hf")
    return tmp_path / "hf"


def original(hf, folder: Path, **tied: torch.Tensor) -> Path:
    """As the original repository does: `backbone.embedding`, and the head once more."""
    tensors = {name.replace("embeddings", "embedding"): tensor.clone() for name, tensor in hf.state_dict().items()}
    folder.mkdir()
    save_file(tensors | tied, folder / SINGLE_FILE)
    (folder / "config.json").write_text(json.dumps(ORIGINAL_CONFIG))
    return folder


def change_config(folder: Path, **changes) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_tensors(folder: Path, **changes: torch.Tensor | None) -> None:
    """Replace tensors, their dots written as __, or take them away."""
    changes = {name.replace("__", "."): tensor for name, tensor in changes.items()}
    tensors = load_file(folder / SINGLE_FILE) | changes
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, folder / SINGLE_FILE)


# ---------------------------------------------------------------------------------------------------------------------
# What loads
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("names", ["transformers", "original"])
def test_logits_and_gradients_equal_transformers(hf, published, tmp_path, names):
    """Breaks when a published name or size of either repository lands on another parameter, or on none."""
    model = load_mamba(published if names == "transformers" else original(hf, tmp_path / "original"))
    assert isinstance(model, MambaLM) and not model.training
    twin, inputs = transformers.MambaForCausalLM.from_pretrained(published).eval(), prompts()
    valid = inputs["attention_mask"].bool()
    mine, theirs = model(**inputs), twin(**inputs, use_cache=False).logits
    assert relative_error(mine[valid], theirs[valid]) <= 1e-6
    labels = torch.arange(int(valid.sum())) % 60
    F.cross_entropy(mine[valid], labels).backward()
    F.cross_entropy(theirs[valid], labels).backward()
    theirs = dict(twin.named_parameters())
    for name, parameter in model.named_parameters():
        assert relative_error(parameter.grad, theirs[name].grad) <= 3e-6, name


@pytest.mark.long
def test_a_loaded_model_answers_as_transformers_does(published):
    """Breaks when the end token is not read from the file, or a padded batch is continued otherwise."""
    twin, inputs = transformers.MambaForCausalLM.from_pretrained(published).eval(), prompts((9, 4, 1))
    ids = inputs["input_ids"]
    theirs = twin.generate(**inputs, max_new_tokens=12, do_sample=False)[:, ids.shape[1] :]
    mine = generate(load_mamba(published), ids, None, torch.zeros_like(ids), inputs["attention_mask"], 12)
    for a, b in zip(mine, theirs, strict=True):
        assert a.tolist() == b[: len(a)].tolist() and len(a) == (b.tolist() + [1]).index(1) + (1 in b.tolist())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_several_files_and_dtypes(hf, published, tmp_path, dtype):
    """Breaks when a file is skipped, or a cast is not torch's own."""
    hf.save_pretrained(tmp_path / "shards", max_shard_size="40KB")
    assert (tmp_path / "shards" / INDEX_FILE).exists()
    model = load_mamba(tmp_path / "shards", dtype)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, hf.get_parameter(name).to(dtype)), name


def test_the_head_may_stand_for_the_embedding(published):
    """Breaks when a file that holds the tied matrix as lm_head alone is not opened."""
    embedding = load_file(published / SINGLE_FILE)["backbone.embeddings.weight"]
    change_tensors(published, backbone__embeddings__weight=None, lm_head__weight=embedding)
    assert torch.equal(load_mamba(published).backbone.embeddings.weight, embedding)


# ---------------------------------------------------------------------------------------------------------------------
# What is refused
# ---------------------------------------------------------------------------------------------------------------------


def refusal(folder: Path) -> str:
    """The one line of a UserError that comes before any tensor is read."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(UserError) as caught:
        patch.setattr("weights.streaming.view", lambda *args: pytest.fail("a tensor was read"))
        load_mamba(folder)
    assert "\n" not in str(caught.value) and str(folder) in str(caught.value)
    return str(caught.value)


def test_weights_of_another_state_size_are_refused(published):
    """Breaks when config.json and tensors that disagree are found in the middle of loading, or not at all."""
    change_config(published, state_size=4)
    message = refusal(published)
    assert "mixer.A_log is (72, 5), expected (72, 4)" in message and "config.json is another model's" in message


def test_all_problems_are_reported_at_once(published):
    """Breaks when the user repairs one problem only to meet the next."""
    change_config(published, use_bias=True, tie_word_embeddings=False)
    (published / SINGLE_FILE).write_bytes((published / SINGLE_FILE).read_bytes()[:-8])
    message = refusal(published)
    assert "2 problems" in message and "use_bias is True" in message and "tie_word_embeddings is False" in message
    assert "8 of" in message and "bytes are missing" in message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"backbone__norm_f__weight": None}, "missing, 1: backbone.norm_f.weight"),
        ({"backbone__embeddings__weight": None}, "missing, 1: backbone.embeddings.weight"),
        ({"backbone__layers__3__norm__weight": torch.ones(36)}, "unexpected, 1: backbone.layers.3.norm.weight"),
        ({"backbone__norm_f__weight": torch.ones(36, dtype=torch.int8)}, "I8"),
        ({"lm_head__weight": torch.ones(61, 36)}, r"lm_head.weight is (61, 36), expected (60, 36)"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(published, changes, message):
    """Breaks when a layer stays as it was initialised, or a tensor of the file is dropped in silence."""
    change_tensors(published, **changes)
    assert message in refusal(published)


@pytest.mark.parametrize("names", ["transformers", "original"])
def test_a_head_of_its_own_is_refused(hf, published, tmp_path, names):
    """Breaks when a checkpoint without the tied head is opened, and answers with another matrix than it was trained."""
    head = hf.state_dict()["lm_head.weight"].clone()
    head[7, 7] += 1e-3
    folder = published if names == "transformers" else original(hf, tmp_path / "original", **{"lm_head.weight": head})
    if names == "transformers":
        change_tensors(folder, lm_head__weight=head)
    with pytest.raises(UserError, match="lm_head.weight differs from backbone.embedding.*tied weights"):
        load_mamba(folder)


def test_pickles_are_refused_with_a_remedy(published):
    """Breaks when a file that can run code is opened, or the user is not shown what to take instead."""
    (published / SINGLE_FILE).rename(published / "pytorch_model.bin")
    assert "pytorch_model.bin" in (message := refusal(published)) and "state-spaces/mamba-130m-hf" in message


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (None, "config.json: not found"),
        ("{", "config.json: not valid JSON"),
        ("[]", "config.json: holds a JSON list, expected an object"),
        ('{"model_type": "mamba2"}', "model_type is 'mamba2'"),
    ],
)
def test_unusable_configs_are_refused(published, write, message):
    """Breaks when a folder without a readable config.json ends in a traceback."""
    (published / "config.json").unlink()
    if write:
        (published / "config.json").write_text(write)
    assert message in refusal(published)


def test_an_empty_prompt_is_refused(published):
    """Breaks when L = 0 fails somewhere inside the scan."""
    with pytest.raises(UserError, match="L = 0"):
        load_mamba(published)(torch.zeros(1, 0, dtype=torch.long))


# ---------------------------------------------------------------------------------------------------------------------
# GPT-NeoX's tokenizer
# ---------------------------------------------------------------------------------------------------------------------

TEXT = ["Is there a dog?", "  two  spaces", "yes", "naïve 北京 🦒", "a\n\nb\t", "1,234.5"]


@pytest.fixture(scope="module")
def neox_file(tmp_path_factory) -> Path:
    """A tokenizer.json of GPT-NeoX's making, learned from a few words: byte-level BPE, <|endoftext|> first."""
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.post_processor = tokenizers.processors.ByteLevel(trim_offsets=True)
    tokenizer.normalizer = tokenizers.normalizers.NFC()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>", "<|padding|>"],
        show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(TEXT * 3, trainer)
    tokenizer.enable_padding(length=40)  # what a file may ask for, and a processor must not get
    path = tmp_path_factory.mktemp("neox") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def folder_of(folder: Path, file: Path, **ids: int) -> Path:
    """A Q-Mamba's folder, as far as the processor reads it."""
    text = MambaConfig(vocab_size=304, hidden_size=36, num_hidden_layers=1, **ids)
    projector = ProjectorConfig(queries=3, hidden_size=24, num_blocks=1, num_attention_heads=4)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(
        json.dumps(QMambaConfig(projector=projector, text=text, image_token_id=303).to_dict())
    )
    (folder / file.name).write_bytes(file.read_bytes())
    return folder


def test_the_processor_reads_with_either_tokenizer(neox_file, tmp_path):
    """Breaks when a Q-Mamba's folder is opened with one kind of tokenizer alone, or rows are laid out otherwise."""
    pictures = [torch.zeros(8, 8, 3, dtype=torch.uint8).numpy()] * 2
    bpe = Processor.from_source(folder_of(tmp_path / "bpe", neox_file))
    rows = bpe(pictures, ["Is there a dog?", "yes"], ["yes", "no dog"])
    assert (rows.input_ids == 303).sum(1).tolist() == [3, 3]
    fast = transformers.PreTrainedTokenizerFast(tokenizer_file=str(neox_file))
    for row, prefix, suffix in ((0, "Is there a dog?\n", "yes"), (1, "yes\n", "no dog")):
        ids, types = rows.input_ids[row], rows.token_type_ids[row].bool()
        assert ids[types].tolist() == [*fast.encode(suffix), 0]
        given = ids[~types & rows.attention_mask[row].bool()].tolist()
        assert given == [303] * 3 + [0] + fast.encode(prefix)
        assert bpe.decode(ids[types]) == suffix

    bundled = folder_of(tmp_path / "pieces", BUNDLED_FOLDER / "tokenizer.model", eos_token_id=1, bos_token_id=2)
    raw = json.loads((bundled / "config.json").read_text())
    raw["text_config"]["vocab_size"], raw["image_token_id"] = 1728, 1722
    (bundled / "config.json").write_text(json.dumps(raw))
    assert Processor.from_source(bundled).encode("dog") == Processor.from_source("embedded").encode("dog")


@pytest.mark.parametrize("text", TEXT)
def test_text_comes_back(neox_file, tmp_path, text):
    """Breaks when a text does not survive encoding, ids differ from transformers', or a list is treated otherwise."""
    tokenizer = Processor.from_source(folder_of(tmp_path, neox_file)).tokenizer
    ids = tokenizer.encode(text)
    assert ids == transformers.PreTrainedTokenizerFast(tokenizer_file=str(neox_file)).encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode([text, "yes"]) == [ids, tokenizer.encode("yes")]
    assert [tokenizer.piece_to_id(piece) for piece in tokenizer.encode(text, out_type=str)] == ids


def test_control_tokens_cannot_be_spelled(neox_file, tmp_path):
    """Breaks when a prompt can end its own sequence, or hide in padding."""
    processor = Processor.from_source(folder_of(tmp_path, neox_file))
    with pytest.raises(UserError, match=r"<\|endoftext\|>"):
        processor.encode("yes<|endoftext|>")
    assert 1 not in processor.encode("yes<|padding|>")


def test_a_missing_package_is_named(neox_file, tmp_path, monkeypatch):
    """Breaks when the optional package is imported without need, or its absence is not reported in one line."""
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UserError, match="pip install tokenizers"):
        Processor.from_source(folder_of(tmp_path, neox_file))
    Processor.from_source("embedded")


def test_unusable_tokenizers_are_refused(neox_file, tmp_path):
    """Breaks when the tokenizer of another model is taken, or a broken one ends in a traceback."""
    folder = folder_of(tmp_path, neox_file)
    file = folder / "tokenizer.json"
    raw = json.loads(neox_file.read_text())
    raw["added_tokens"] = []
    del raw["model"]["vocab"]["<|endoftext|>"]
    for content, message in ((json.dumps(raw), "not GPT-NeoX's"), ("{", "not valid JSON")):
        file.write_text(content)
        with pytest.raises(UserError, match=message):
            Processor.from_source(folder)
    file.unlink()
    with pytest.raises(UserError, match="not found, nor a tokenizer.json"):
        Processor.from_source(folder)
    with pytest.raises(UserError, match="its eos id is 0, but config.json says 5"):
        Processor.from_source(folder_of(tmp_path, neox_file, eos_token_id=5))
