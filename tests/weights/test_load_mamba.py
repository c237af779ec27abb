"""Published Mambas load, damaged ones are refused in one line, and their tokenizer is read."""

import pytest
import tokenizers
import torch
import transformers
from safetensors.torch import load_file, save_file

from model.processor import Processor
from model.source import BUNDLED_FOLDER
from model.systems.configs import MambaConfig, ProjectorConfig, QMambaConfig
from tests.files import write_json
from tests.reference import hf_mamba
from tests.runs import refused
from weights.load import SINGLE_FILE, load_system


@pytest.fixture
def published(tmp_path):
    """As transformers saves it."""
    hf_mamba().save_pretrained(tmp_path / "hf")
    return tmp_path / "hf"


def change_tensors(folder, changes):
    """Replace tensors, or take them away."""
    tensors = load_file(folder / SINGLE_FILE) | changes
    save_file(
        {name: tensor for name, tensor in tensors.items() if tensor is not None},
        folder / SINGLE_FILE,
    )


@pytest.mark.parametrize("name", ["lm_head.weight", "backbone.embedding.weight"])
def test_other_names_of_the_embedding(published, name):
    """Breaks when a file that has the tied matrix under another of its published names is not
    opened, or loses one."""
    embedding = load_file(published / SINGLE_FILE)["backbone.embeddings.weight"]
    change_tensors(published, {"backbone.embeddings.weight": None, name: embedding})
    assert torch.equal(load_system(published, "mamba").backbone.embeddings.weight, embedding)
    change_tensors(published, {"backbone.embeddings.weight": embedding + 1})
    refused(lambda: load_system(published, "mamba"), "differs from")


TEXT = "Is there a dog?|  two  spaces|yes|naïve 北京 🦒|a\n\nb\t|1,234.5".split("|")


@pytest.fixture(scope="module")
def neox_file(tmp_path_factory):
    """A tokenizer.json of GPT-NeoX's making, learned from a few words: byte-level BPE,
    <|endoftext|> first."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    options = {
        "show_progress": False,
        "initial_alphabet": tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    }
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|endoftext|>", "<|padding|>"], **options
    )
    tokenizer.train_from_iterator(TEXT * 3, trainer)
    path = tmp_path_factory.mktemp("neox") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def folder_of(folder, file, vocab_size, image, **ids):
    """A Q-Mamba's folder, as far as the processor reads it."""
    text = MambaConfig(vocab_size=vocab_size, hidden_size=36, num_hidden_layers=1, **ids)
    projector = ProjectorConfig(queries=3, hidden_size=24, num_blocks=1, num_attention_heads=4)
    config = QMambaConfig(projector=projector, text=text, image_token_id=image)
    folder.mkdir(exist_ok=True)
    write_json(folder / "config.json", config.to_dict())
    (folder / file.name).write_bytes(file.read_bytes())
    return folder


def test_the_processor_reads_with_either_tokenizer(neox_file, tmp_path):
    """Breaks when a Q-Mamba's folder is opened with one kind of tokenizer alone, or rows are laid
    out otherwise."""
    pictures = [torch.zeros(8, 8, 3, dtype=torch.uint8).numpy()] * 2
    bpe = Processor.from_source(folder_of(tmp_path / "bpe", neox_file, 304, 303))
    rows = bpe(pictures, ["Is there a dog?", "yes"], ["yes", "no dog"])
    fast = transformers.PreTrainedTokenizerFast(tokenizer_file=str(neox_file))
    for row, prefix, suffix in ((0, "Is there a dog?\n", "yes"), (1, "yes\n", "no dog")):
        ids = rows.input_ids[row]
        types = rows.token_type_ids[row].bool()
        assert ids[types].tolist() == [*fast.encode(suffix), 0]
        assert bpe.decode(ids[types]) == suffix
        assert ids[~types & rows.attention_mask[row].bool()].tolist() == [303] * 3 + [
            0
        ] + fast.encode(prefix)
    ids = {"eos_token_id": 1, "bos_token_id": 2}
    bundled = folder_of(tmp_path / "pieces", BUNDLED_FOLDER / "tokenizer.model", 1728, 1722, **ids)
    assert Processor.from_source(bundled).encode("dog") == Processor.from_source("embedded").encode(
        "dog"
    )
    other = folder_of(tmp_path / "other", neox_file, 304, 303, eos_token_id=5)
    refused(lambda: Processor.from_source(other), "of another model")
