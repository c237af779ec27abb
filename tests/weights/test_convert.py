"""Published pickles become safetensors without running what is in them."""

import json

import pytest
import torch
import transformers

from model.common import UserError
from weights.convert import convert, main
from weights.load import load_mamba


@pytest.fixture
def published(tmp_path):
    """A Mamba as its authors publish it: a pickle with a tied head, and config.json of the original repository."""
    sizes = {"vocab_size": 24, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4}
    torch.manual_seed(0)
    hf = transformers.MambaForCausalLM(transformers.MambaConfig(**sizes))
    folder = tmp_path / "published"
    folder.mkdir()
    state = {name.replace("embeddings.", "embedding."): tensor for name, tensor in hf.state_dict().items()}
    assert state["lm_head.weight"].data_ptr() == state["backbone.embedding.weight"].data_ptr()
    torch.save(state, folder / "pytorch_model.bin")
    raw = {"d_model": 16, "n_layer": 2, "vocab_size": 24, "ssm_cfg": {"d_state": 4}}
    (folder / "config.json").write_text(json.dumps(raw))
    return folder, hf


def test_a_published_pickle_is_opened(published, tmp_path, capsys):
    """Breaks when a tensor is lost or changed, an index is not followed, or the refusal does not say what to do."""
    folder, hf = published
    with pytest.raises(UserError, match="python -m weights.convert"):
        load_mamba(folder)
    main([str(folder), str(tmp_path / "out")])
    assert "without lm_head.weight" in capsys.readouterr().out
    state = torch.load(folder / "pytorch_model.bin", weights_only=True)
    parts = {"a.bin": dict(list(state.items())[:5]), "b.bin": dict(list(state.items())[5:])}
    for name, part in parts.items():
        torch.save(part, folder / name, _use_new_zipfile_serialization=name == "a.bin")
    weight_map = {name: file for file, part in parts.items() for name in part}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "pytorch_model.bin").unlink()
    convert(str(folder), tmp_path / "sharded")
    for out in ("out", "sharded"):
        model = load_mamba(tmp_path / out)
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, hf.get_parameter(name)), name
    with pytest.raises(UserError, match="exists and is not empty"):
        convert(str(folder), tmp_path / "out")


class Trap:
    def __reduce__(self):
        return open, ("trapped", "w")


def test_nothing_in_a_pickle_is_run(published, tmp_path, monkeypatch):
    """Breaks when a pickle runs code, holds something else than tensors by name, or leaves a folder half-written."""
    folder, _ = published
    monkeypatch.chdir(tmp_path)
    bad = {
        "is no file of tensors alone, and nothing in it was run": {"a": Trap()},
        "expected tensors by name": {"model": {"a": torch.ones(1)}},
        "tensors not in": {"a": torch.ones(1, dtype=torch.int8)},
        "holds no tensors": {},
    }
    for told, content in bad.items():
        torch.save(content, folder / "pytorch_model.bin")
        with pytest.raises(UserError, match=told) as caught:
            convert(str(folder), tmp_path / "out")
        assert "\n" not in str(caught.value)
    (folder / "pytorch_model.bin").write_bytes(b"no pickle at all")
    with pytest.raises(UserError, match="nothing in it was run"):
        convert(str(folder), tmp_path / "out")
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(UserError, match="nothing to convert"):
        convert(str(folder), tmp_path / "out")
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": {"a": "../outside.bin"}}))
    with pytest.raises(UserError, match="a file outside its folder"):
        convert(str(folder), tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"published"}
