"""GGUF files become folders whose weights are transformers', to the bit, and whose tokenizer is the
file's; damaged and foreign files are refused in one line."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
import tokenizers
import torch
import transformers

from model.source import BUNDLED_FOLDER
from model.systems.chat import load_text_tokenizer
from tests.files import read_json, table
from tests.reference import hf_language
from tests.runs import assert_same_tensors, refused, words
from weights.gguf import main
from weights.load import load_text

gguf = pytest.importorskip("gguf")

KINDS = "gemma gemma2 llama qwen2".split()
# llama.cpp's names, the rarest first
NAMES = """model.embed_tokens token_embd
model.norm output_norm
lm_head output
model.layers blk
input_layernorm attn_norm
pre_feedforward_layernorm ffn_norm
post_feedforward_layernorm post_ffw_norm
self_attn.o_proj attn_output
self_attn.q_proj attn_q
self_attn.k_proj attn_k
self_attn.v_proj attn_v
mlp.gate_proj ffn_gate
mlp.up_proj ffn_up
mlp.down_proj ffn_down"""
# the writer's names of sizes, and transformers'
SIZES = """context_length max_position_embeddings
embedding_length hidden_size
feed_forward_length intermediate_size
block_count num_hidden_layers
head_count num_attention_heads
head_count_kv num_key_value_heads
layer_norm_rms_eps rms_norm_eps
"""
WIDTHS = """key_length head_dim
value_length head_dim
"""
CAPS = """sliding_window sliding_window
attn_logit_softcapping attn_logit_softcapping
final_logit_softcapping final_logit_softcapping
"""
TEXTS = "Is there a dog?|  two  spaces|naïve 北京 🦒|a\n\nb\t|1,234.5 it's|we'll  ".split("|")


@pytest.fixture(scope="module")
def bpe(tmp_path_factory) -> Path:
    """A byte-level tokenizer.json, learned from a few words."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    split = tokenizers.pre_tokenizers
    tokenizer.pre_tokenizer = split.Sequence(
        [split.Digits(individual_digits=True), split.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=split.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def converted(name: str, tensor: torch.Tensor, hf) -> np.ndarray:
    """A tensor as llama.cpp writes it."""
    kind, config = hf.config.model_type, hf.config
    if kind.startswith("gemma") and "norm" in name:
        tensor = tensor + 1
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for part, count in heads.items():
        if kind == "llama" and part in name:
            tensor = tensor.unflatten(0, (count, 2, -1)).transpose(1, 2).reshape(tensor.shape)
    return tensor.numpy()


def write_file(
    path: Path,
    hf,
    bpe: Path,
    packed: str = "F32",
    factors=None,
    pre: str = "smollm",
    told=None,
    more=None,
    adds_bos=None,
) -> dict:
    """A GGUF file as llama.cpp's converter writes it, with `more` tensors; what its tensors are
    worth, by transformers' names."""
    config, kind = hf.config, hf.config.model_type
    writer = gguf.GGUFWriter(path, kind)
    # 1. sizes
    writer.add_rope_freq_base(10000.0)
    sizes = SIZES
    if kind != "qwen2":
        sizes += WIDTHS
    if kind == "gemma2":
        sizes += CAPS
    for name, ours in map(str.split, sizes.splitlines()):
        getattr(writer, f"add_{name}")(getattr(config, ours))
    # 2. the tokenizer
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(0)
    writer.add_chat_template("{{ messages }}")
    if kind.startswith("gemma"):
        sentencepiece_vocabulary(writer)
    else:
        byte_vocabulary(writer, bpe, pre)
    if adds_bos is not None:
        writer.add_add_bos_token(adds_bos)
    # 3. the tensors
    worth = {}
    for name, tensor in (more or {}).items():
        writer.add_tensor(name, tensor.numpy())
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", factors.astype(np.float32))
    for key, value in (told or {}).items():
        writer.add_key_value(f"{kind}.{key}", value, gguf.GGUFValueType.get_type(value))
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    for name, tensor in hf.state_dict().items():
        if name in tied:
            continue
        theirs = name
        for ours, other in map(str.split, NAMES.splitlines()):
            theirs = theirs.replace(ours, other)
        post = "post_attention_norm" if kind == "gemma2" else "ffn_norm"
        theirs = theirs.replace("post_attention_layernorm", post)
        stored = gguf.GGMLQuantizationType[packed if tensor.dim() == 2 else "F32"]
        data = gguf.quantize(converted(name, tensor, hf), stored)
        writer.add_tensor(theirs, data, raw_dtype=stored)
        value = torch.tensor(gguf.dequantize(gguf.quantize(tensor.numpy(), stored), stored))
        if kind.startswith("gemma") and "norm" in name:
            value = tensor + 1 - 1  # rounded as in the file
        worth[name] = value
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return worth


def converted_in(folder: Path, name: str = "out") -> Path:
    """The folder inside it that its a.gguf becomes."""
    out = folder / name
    main(words(folder / "a.gguf", out))
    return out


def vocabulary(bpe: Path) -> list[str]:
    """Its tokens, by their ids."""
    vocab = tokenizers.Tokenizer.from_file(str(bpe)).get_vocab()
    return sorted(vocab, key=vocab.__getitem__)


def byte_vocabulary(writer, bpe: Path, pre: str) -> None:
    tokens = vocabulary(bpe)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([*tokens, "[PAD0]"])
    writer.add_token_types([3] * 3 + [1] * (len(tokens) - 3) + [5])
    writer.add_token_merges([" ".join(pair) for pair in read_json(bpe)["model"]["merges"]])


def sentencepiece_vocabulary(writer) -> None:
    model = str(BUNDLED_FOLDER / "tokenizer.model")
    pieces = sentencepiece.SentencePieceProcessor(model_file=model)
    writer.add_tokenizer_model("llama")
    numbers = range(pieces.vocab_size())
    writer.add_token_list([pieces.id_to_piece(n) for n in numbers])
    writer.add_token_scores([pieces.get_score(n) for n in numbers])
    kinds = dict.fromkeys(numbers, 1)
    for n in numbers:
        if pieces.id_to_piece(n).startswith("<loc"):
            kinds[n] = 3 + n % 2  # in llama.cpp's files some are marked as control tokens
        for kind, test in {2: pieces.is_unknown, 3: pieces.is_control, 6: pieces.is_byte}.items():
            if test(n):
                kinds[n] = kind
    writer.add_token_types(list(kinds.values()))
    writer.add_add_space_prefix(False)
    writer.add_unk_token_id(3)


def rows_of(kind: str, bpe: Path) -> int:
    """Pieces of the vocabulary, with one that fills it up."""
    return 1722 if kind.startswith("gemma") else len(vocabulary(bpe)) + 1


@pytest.mark.long
@pytest.mark.parametrize("packed", "F32 F16 Q8_0 Q4_0 Q4_1".split())
@pytest.mark.parametrize("kind", KINDS)
def test_the_weights_are_the_files(kind, packed, bpe, tmp_path):
    """Breaks when a tensor is of another place, order, offset or value than the file means, or the
    folder is not transformers'."""
    more = {} if kind.startswith("gemma") else {"tie_word_embeddings": packed == "Q8_0"}
    if kind == "llama":
        more |= {"attention_bias": packed == "F16", "mlp_bias": packed == "F16"}
    hf = hf_language(kind, vocab_size=rows_of(kind, bpe), **more)
    worth = write_file(tmp_path / "a.gguf", hf, bpe, packed)
    out = converted_in(tmp_path)
    state = load_text(out).state_dict()
    named = {name.replace("language_model.lm_head", "lm_head"): t for name, t in state.items()}
    named = {name.replace("language_model.", "model."): t for name, t in named.items()}
    assert_same_tensors(named, worth)
    opened = transformers.AutoModelForCausalLM.from_pretrained(out)
    if kind != "gemma" and packed.startswith("Q4"):  # which transformers opens itself
        options = {"gguf_file": "a.gguf", "dtype": torch.float32}
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, **options)
        assert_same_tensors(opened.state_dict(), theirs.state_dict())
    ids = torch.randint(3, 100, (2, 9))
    with torch.no_grad():
        assert torch.allclose(load_text(out)(ids), opened(ids).logits, atol=1e-4)


@pytest.mark.parametrize("kind", ["gemma2", "llama", "qwen2"])
def test_the_tokenizer_is_the_files(kind, bpe, tmp_path):
    """Breaks when a text has other ids than with the tokenizer that the file was made from."""
    write_file(tmp_path / "a.gguf", hf_language(kind, vocab_size=rows_of(kind, bpe)), bpe)
    out = converted_in(tmp_path)
    ours = load_text_tokenizer(out)
    if kind != "gemma2":  # of a sentencepiece model transformers needs protobuf
        opened = transformers.AutoTokenizer.from_pretrained(out)
    assert ours.config.eos_token_id == (1,)
    assert ours.config.bos_token_id == 2
    theirs = sentencepiece.SentencePieceProcessor(str(BUNDLED_FOLDER / "tokenizer.model"))
    if kind != "gemma2":
        theirs = tokenizers.Tokenizer.from_file(str(bpe))
    for text in [*TEXTS, "detect dog <loc0012><loc0013>"]:
        ids = theirs.encode(text)
        if kind != "gemma2":
            ids = ids.ids
            assert ours.decode(ids) == text
            assert opened.encode(text, add_special_tokens=False) == ids
        assert ours.encode(text) == ids, text
    assert (out / "chat_template.jinja").read_text() == "{{ messages }}"


@pytest.mark.parametrize("adds_bos", [None, True, False])
def test_whether_a_text_begins_with_bos(adds_bos, bpe, tmp_path):
    """Breaks when what the file of pieces says of bos is not followed."""
    write_file(tmp_path / "a.gguf", hf_language("gemma2", vocab_size=1722), bpe, adds_bos=adds_bos)
    assert load_text_tokenizer(converted_in(tmp_path)).begin == ([] if adds_bos is False else [2])


def test_a_file_of_pieces_that_names_no_bos(bpe, tmp_path, monkeypatch):
    """Breaks when its texts begin with nothing: llama.cpp then takes piece 1."""
    for lost in ("add_bos_token_id", "add_add_space_prefix"):
        monkeypatch.setattr(gguf.GGUFWriter, lost, lambda *_: None)
    monkeypatch.setattr("weights.gguf.GEMMA2_27B", 2)  # layers
    write_file(tmp_path / "a.gguf", hf_language("gemma2", vocab_size=1722), bpe)
    out = converted_in(tmp_path)
    read = load_text_tokenizer(out)
    assert read.begin == [1]
    assert (
        read.tokenizer.id_to_piece(read.encode("a")[0])[0] == "\u2581"
    )  # by default, as llama.cpp
    assert read_json(out / "config.json")["query_pre_attn_scalar"] == 64 / 4


def test_a_llama_3(bpe, tmp_path):
    """Breaks when the stretched RoPE of Llama 3.1, which a file has as factors, is another one, or
    a text, or each of two, does not begin with bos."""
    rope = json.loads("""{"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0,
        "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}""")
    hf = hf_language("llama", vocab_size=rows_of("llama", bpe), rope_parameters=rope, head_dim=64)
    plain = 10000.0 ** -(torch.arange(0, 64, 2) / 64)
    factors = (plain / hf.model.rotary_emb.inv_freq).numpy().round(5)
    assert factors.min() == 1
    assert factors.max() == 8
    write_file(tmp_path / "a.gguf", hf, bpe, factors=factors, pre="llama-bpe")
    out = converted_in(tmp_path)
    ids = torch.randint(3, 100, (1, 400))
    with torch.no_grad():
        assert torch.allclose(load_text(out)(ids), hf(ids).logits, atol=1e-4)
    a = load_text_tokenizer(out).prompt("a")
    assert a[0] == 2
    assert transformers.AutoTokenizer.from_pretrained(out).encode("a", "a") == a + a
    for other in (factors**2, factors[:-1], factors[:0]):
        write_file(tmp_path / "a.gguf", hf, bpe, factors=other, pre="llama-bpe")
        refused(lambda: converted_in(tmp_path, "b"), "rope_freqs.weight")


# what is in a file | what is there instead | what is said
CHANGES = """layer_norm_rms_epsilon | layer_norm_rms_epsilo# | lacks qwen2.attention.layer_norm_rms_epsilon
context_length | context_lengt# | lacks qwen2.context_length
embedding_length | embedding_lengt# | lacks qwen2.embedding_length
tokenizer.ggml.pre | tokenizer.ggml.per | tokenizer.ggml.pre is None
qwen2 | qwen9 | 'qwen9', expected one of gemma
smollm | rollms | 'rollms'
blk.1.attn_q.w | blk.1.attn_z.w | missing language_model.layers.1.self_attn.q_proj.weight"""

# what the writer is told | what is said; the default's are llama.cpp's own, by four expressions
UNREAD = """
    {"pre": "default"} | tokenizer.ggml.pre is 'default'
    {"told": {"rope.scaling.type": "yarn"}} | scaling.type 'yarn'
    {"told": {"rope.scaling.factor": 4.0}} | scaling.factor 4.0
    {"told": {"rope.dimension_count": 2}} | turns 2 of
    {"told": {"attention.causal": false}} | not causal"""


@pytest.mark.long
def test_damaged_and_foreign_files(bpe, tmp_path):
    """Breaks when a bad file has a traceback, or leaves a folder."""
    hf = hf_language("qwen2", vocab_size=rows_of("qwen2", bpe))
    file, out = tmp_path / "a.gguf", tmp_path / "out"

    def said(*parts: str) -> None:
        refused(lambda: main(words(file, out)), "a.gguf", *parts)
        assert not out.exists()

    said("not found")
    write_file(file, hf, bpe)
    whole = file.read_bytes()
    for size in (0, 3, 20, 400, len(whole) // 2, len(whole) - 100):
        file.write_bytes(whole[:size])
        said("no whole GGUF file")
    for place in range(8, 20000, 499):  # whatever is damaged, it is one line or a model
        file.write_bytes(whole[:place] + b"\xff" * 8 + whole[place + 8 :])
        try:
            main(words(file, tmp_path / f"out{place}"))
        except ValueError as error:
            assert "\n" not in str(error)
    key = struct.pack("<Q1sI", 1, b"a", gguf.GGUFValueType.ARRAY)
    endless = struct.pack("<IQ", gguf.GGUFValueType.UINT8, 2**60)
    file.write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + key + endless)
    said("no whole GGUF file", "ends before byte")
    for old, new, told in table(CHANGES):
        file.write_bytes(whole.replace(old.encode(), new.encode()))
        said(told)
    head = torch.zeros(rows_of("qwen2", bpe), hf.config.hidden_size)
    write_file(file, hf, bpe, more={"lm_head.weight": head})
    said("GGUF's lm_head.weight")
    for change, told in table(UNREAD):
        write_file(file, hf, bpe, **json.loads(change))
        said(told)
