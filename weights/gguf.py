"""A GGUF file, as llama.cpp and Ollama keep models, to a folder that `weights.load.load_text` opens.

    python -m weights.gguf model.gguf OUT

In: a language model of `ARCHITECTURES`. Its weights are floats or have few bits (Q4_0, Q4_1, Q8_0,
the K-quants: what the package `gguf` reads). Out: config.json, safetensors and the tokenizer, all
or nothing. The weights are those that the file stands for, in fp32 to the bit. What llama.cpp
changed for its own kernels is changed back: the order of rows in Llama's q and k, and Gemma's
norms, to which it adds 1.
"""

import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor

from model.common import Parser, UserError, file_errors, quoted, run_command, shown, without_none
from model.config import config_errors, require
from model.device import DTYPES
from model.registry import system_of
from model.tokenizer import SPACE, find_tokenizer, load_tokenizer
from weights.export import export_model
from weights.load import compare
from weights.mapping import Entry, dialect_names

ARCHITECTURES = "gemma gemma2 llama qwen2".split()
# config.json's name of a size, and the file's
SIZES = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "max_position_embeddings": "context_length",
    "sliding_window": "attention.sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
# without these no model is read, though a config.json may lack them
NEEDED = "hidden_size num_hidden_layers num_attention_heads rms_norm_eps max_position_embeddings"
SENTENCEPIECE = {"unk": 0, "bos": 1, "eos": 2}  # where a file does not say, as llama.cpp
# control tokens by transformers' names, and the file's; in the order of sentencepiece's fields
CONTROL = {"unk": "unknown", "bos": "bos", "eos": "eos", "pad": "padding"}
GEMMA2_27B = 46  # layers; its scale of attention is in no file, llama.cpp knows it by them
# what Llama 3.1's RoPE is made of, beside its longest factor: the file has the factors alone
ROPE_FACTORS = "rope_freqs.weight"
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

# the kinds of tokens
SPECIAL, NAMED, UNUSED, BYTE = 3, 4, 5, 6
# transformers' class by the kind of vocabulary
VOCABULARIES = {"gpt2": "PreTrainedTokenizerFast", "llama": "LlamaTokenizer"}
# how a byte-level vocabulary splits a text, by the file's name of it
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
WORDS = BYTES | {"use_regex": True}
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN = LLAMA3.replace("{1,3}", "")
SPLITS = {
    "gpt-2": [WORDS],
    "smollm": [{"type": "Digits", "individual_digits": True}, WORDS],
    "llama-bpe": [LLAMA3],
    "qwen2": [QWEN],
    "deepseek-r1-qwen": [QWEN],
}


class GgufFile:
    """What a file tells of its model."""

    def __init__(self, path: Path):
        """Raises UserError for a file that is not whole, or a model that is not computed here."""
        try:
            import gguf
        except ImportError:
            raise UserError(f"{path}: is read by a package: pip install gguf") from None

        class Reader(gguf.GGUFReader):
            def _get(self, offset, dtype, count=1, **order):
                """The package reads on behind the end, as often as the file says."""
                size = np.dtype(dtype).itemsize * int(count)
                if offset + size > len(self.data):
                    raise ValueError(f"ends before byte {offset + size}")
                return super()._get(offset, dtype, count, **order)

        # 1. the file
        self.path, self.package = path, gguf
        with file_errors(path), path.open("rb"):
            try:
                self.reader = Reader(path)
            except Exception as error:  # of many classes, from numpy and the package
                raise UserError(
                    f"{shown(path)}: no whole GGUF file ({shown(error)}): download it again"
                ) from None
        # 2. its model
        self.tensors = {tensor.name: tensor for tensor in self.reader.tensors}
        with config_errors(path):
            self.kind = self.told("general.architecture")
            # of the waves of RoPE (D/2,), where they are longer than usual
            self.factors = self.value(ROPE_FACTORS) if ROPE_FACTORS in self.tensors else None
            wanted = f"expected one of {', '.join(ARCHITECTURES)}"
            require(self.kind in ARCHITECTURES, f"holds a {quoted(self.kind)}, {wanted}")
            system = system_of(self.kind)
            assert system is not None, f"{self.kind} is in no table"
            self.config = system.config.from_dict(self.sizes())
            if self.factors is not None:
                text = self.config.text
                powers = torch.arange(0, text.head_dim, 2) / text.head_dim
                waves = text.rope_theta**-powers
                is_llama3 = self.factors.shape == waves.shape and torch.allclose(
                    text.stretch(waves) * self.factors, waves, rtol=1e-3
                )
                require(is_llama3, f"{ROPE_FACTORS} has other factors than Llama 3.1's")

    def told(self, key: str) -> Any:
        """An entry of the file; None where there is none."""
        field = self.reader.get_field(key)
        return field and field.contents()

    def vocabulary(self, name: str, default: Any = None) -> Any:
        """An entry about the tokenizer; `default` where there is none."""
        found = self.told(f"tokenizer.ggml.{name}")
        return default if found is None else found

    def control(self) -> dict[str, int | None]:
        """The ids of the control tokens, by transformers' names."""
        own = SENTENCEPIECE if self.vocabulary("model") == "llama" else {}
        return {
            ours: self.vocabulary(f"{name}_token_id", own.get(ours))
            for ours, name in CONTROL.items()
        }

    def sizes(self) -> dict[str, Any]:
        """The model's config.json."""
        # 1. what the file says, and what it leaves out
        raw = {name: self.told(f"{self.kind}.{theirs}") for name, theirs in SIZES.items()}
        raw = without_none(raw)
        # where RoPE's base is missing, llama.cpp has 10,000, too
        for name in NEEDED.split():
            require(name in raw, f"lacks {self.kind}.{SIZES[name]}")
        heads, width = raw["num_attention_heads"], raw["hidden_size"]
        raw.setdefault("num_key_value_heads", heads)
        raw.setdefault("head_dim", width // heads)
        raw["query_pre_attn_scalar"] = raw["head_dim"]
        if raw["num_hidden_layers"] == GEMMA2_27B:
            raw["query_pre_attn_scalar"] = width // heads
        raw["model_type"] = self.kind
        raw["vocab_size"] = self.shape("token_embd.weight")[0]
        raw["tie_word_embeddings"] = "output.weight" not in self.tensors
        raw["attention_bias"] = "blk.0.attn_output.bias" in self.tensors
        raw["mlp_bias"] = "blk.0.ffn_up.bias" in self.tensors
        raw |= {f"{name}_token_id": number for name, number in self.control().items()}
        # 2. what is not computed here
        for key in ("scaling.type", "scaling.factor", "scale_linear"):
            scaling = self.told(f"{self.kind}.rope.{key}")
            is_plain = scaling in (None, "none", 0, 1)
            require(is_plain, f"its RoPE is not computed here: {key} {quoted(scaling)}")
        is_causal = self.told(f"{self.kind}.attention.causal") is not False
        require(is_causal, "its attention is not causal, which is not computed here")
        turned = self.told(f"{self.kind}.rope.dimension_count")
        is_whole = turned in (None, raw["head_dim"])
        require(is_whole, f"its RoPE turns {turned} of {raw['head_dim']} dimensions of a head")
        # 3. the longer RoPE of Llama 3.1
        if self.factors is not None:
            require(self.factors.numel(), f"{ROPE_FACTORS} is empty")
            raw["rope_scaling"] = LLAMA3_ROPE | {"factor": self.factors.max().item()}
        return raw

    def shape(self, name: str) -> tuple[int, ...]:
        require(name in self.tensors, f"lacks the tensor {name}")
        return tuple(reversed(self.tensors[name].shape.tolist()))

    def names(self) -> dict[str, str]:
        """transformers' name of each tensor, or one that no model has."""
        model = compare(self.path, {}, self.config).model
        architecture = self.package.MODEL_ARCH[self.kind.upper()]
        table = self.package.get_tensor_name_map(architecture, self.config.text.num_hidden_layers)
        known = {}
        for theirs in dialect_names(model.state_dict(), model.published):
            known[table.get_name(theirs, (".weight", ".bias"))] = theirs
        # the factors of RoPE are no parameter
        names = {name: known.get(name, f"GGUF's {name}") for name in self.tensors}
        names.pop(ROPE_FACTORS, None)
        return names

    def value(self, name: str) -> Tensor:
        """A tensor in fp32."""
        stored = self.tensors[name]
        try:
            return torch.tensor(self.package.dequantize(stored.data, stored.tensor_type))
        except NotImplementedError:
            raise UserError(
                f"{self.path}: {name} is held as {stored.tensor_type.name}, which `gguf` does not "
                "read: take a file of another kind"
            ) from None

    def tensor(self, name: str) -> Tensor:
        """A tensor as transformers has it."""
        tensor = self.value(name)
        if self.kind.startswith("gemma") and name.endswith("norm.weight"):
            return tensor - 1
        text = self.config.text
        heads = {".attn_q.": text.num_attention_heads, ".attn_k.": text.num_key_value_heads}
        for part, count in heads.items():
            if self.kind == "llama" and part in name:  # pairs side by side, not half a head apart
                pairs = tensor.unflatten(0, (count, -1, 2))
                return pairs.transpose(1, 2).reshape(tensor.shape)
        return tensor


def read_model(file: GgufFile, dtype: torch.dtype = torch.float32) -> Any:
    """The language model in a file. Raises UserError, also for tensors that are not the model's."""
    names = file.names()
    entries = {theirs: Entry(file.path, file.shape(name), "F32") for name, theirs in names.items()}
    checkpoint = compare(file.path, entries, file.config)
    checkpoint.check()
    model = checkpoint.model.to(dtype)
    weights = {}
    for name, theirs in names.items():
        weights[checkpoint.names[theirs]] = file.tensor(name).to(dtype)
    model.load_state_dict(weights, assign=True)
    return model


# The tokenizer


def write_tokenizer(file: GgufFile, folder: Path) -> None:
    """The tokenizer's files, to `folder`. Raises UserError for a vocabulary that is not read
    here."""
    with config_errors(file.path):
        kind = file.vocabulary("model")
        require(kind in VOCABULARIES, f"has a vocabulary of kind {quoted(kind)}, not read here")
        if kind == "llama":
            (folder / "tokenizer.model").write_bytes(b"".join(sentencepiece_parts(file)))
        else:
            write(folder / "tokenizer.json", byte_level(file))
        tokens = file.vocabulary("tokens")
        reader = "GemmaTokenizer" if file.kind.startswith("gemma") else VOCABULARIES[kind]
        known = {"tokenizer_class": reader}
        for name, number in file.control().items():
            if number is not None:
                known[f"{name}_token"] = tokens[number]
        adds_bos = file.vocabulary("add_bos_token")
        if adds_bos is not None:
            known["add_bos_token"] = adds_bos
        template = file.told("tokenizer.chat_template")
        if template:
            (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    write(folder / "tokenizer_config.json", known)
    load_tokenizer(find_tokenizer(folder))


def write(path: Path, value: Mapping) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def byte_level(file: GgufFile) -> dict[str, Any]:
    """The tokenizer.json of a vocabulary of bytes and merges, as GPT-2's."""
    split = file.vocabulary("pre")
    require(split in SPLITS, f"tokenizer.ggml.pre is {quoted(split)}, which is not known here")
    # 1. how a text is split
    steps = []
    for step in SPLITS[split]:
        if isinstance(step, str):
            regex = {"type": "Split", "pattern": {"Regex": step}}
            steps += [regex | {"behavior": "Isolated", "invert": False}]
            step = BYTES | {"use_regex": False}
        steps.append(step)
    # 2. the pieces, and those that are found in a text before it is split
    vocab, added = {}, []
    kinds = file.vocabulary("token_type")
    for number, token in enumerate(file.vocabulary("tokens")):
        if kinds[number] == UNUSED:
            continue
        vocab[token] = number
        if kinds[number] in (SPECIAL, NAMED):
            flags = dict.fromkeys("single_word lstrip rstrip normalized".split(), False)
            known = {"id": number, "content": token, "special": kinds[number] == SPECIAL}
            added.append(known | flags)
    model = {"type": "BPE", "vocab": vocab, "merges": file.vocabulary("merges")}
    # 3. bos before a text; where no file says it, llama.cpp knows it of Llama 3
    is_llama3 = split == "llama-bpe"
    adds_bos = file.vocabulary("add_bos_token")
    opening = None
    if adds_bos or adds_bos is None and is_llama3:
        bos = file.control()["bos"]
        token = file.vocabulary("tokens")[bos]
        pair = []
        for place, text in enumerate("AB"):
            pair.append({"SpecialToken": {"id": token, "type_id": place}})
            pair.append({"Sequence": {"id": text, "type_id": place}})
        known = {token: {"id": token, "ids": [bos], "tokens": [token]}}
        opening = {"type": "TemplateProcessing", "single": pair[:2], "pair": pair}
        opening |= {"special_tokens": known}
    return {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": {"type": "NFC"} if split == "qwen2" else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "post_processor": opening,
        "decoder": WORDS,
        "model": model | {"ignore_merges": is_llama3},
    }


def sentencepiece_parts(file: GgufFile) -> Iterator[bytes]:
    """The tokenizer.model of pieces with scores: sentencepiece's ModelProto, field by field."""
    kinds = file.vocabulary("token_type")
    tokens = file.vocabulary("tokens")
    control = [tokens[number] for number in file.control().values() if number is not None]
    for token, score, kind in zip(tokens, file.vocabulary("scores"), kinds, strict=True):
        if kind == SPECIAL and token not in control:
            kind = NAMED  # is found in a text, as by transformers and llama.cpp
        if kind == NAMED:
            token = token.replace(" ", SPACE)
        yield field(1, field(1, token.encode()) + field(2, score) + field(3, kind))
    # the trainer's settings: byte-pair encoding, byte fallback, and the control tokens
    trainer = field(3, 2) + field(35, int(BYTE in kinds))
    for place, number in enumerate(file.control().values()):
        if number is not None:
            trainer += field(40 + place, number) + field(45 + place, tokens[number].encode())
    yield field(2, trainer)
    # the normalizer's: whether a space is put before a text; spaces stay as they are
    prefix = file.vocabulary("add_space_prefix")
    starts = int(prefix is None or prefix)
    yield field(3, field(1, b"identity") + field(3, starts) + field(4, 0) + field(5, 1))


def field(number: int, value: bytes | float | int) -> bytes:
    """A field of a protobuf message: a text or message, a float, or a whole number."""
    if isinstance(value, bytes):
        return varint(number << 3 | 2) + varint(len(value)) + value
    if isinstance(value, float):
        return varint(number << 3 | 5) + struct.pack("<f", value)
    return varint(number << 3) + varint(value)


def varint(value: int) -> bytes:
    """Seven bits a byte, the lowest first."""
    low = value & 127
    if value == low:
        return bytes([low])
    return bytes([low | 128]) + varint(value >> 7)


def main(argv: list[str] | None = None) -> None:
    parser = Parser(
        "python -m weights.gguf",
        description="Write the model of a GGUF file as a folder of safetensors.",
    )
    parser.add_argument("file", metavar="FILE", type=Path, help="a model.gguf")
    parser.add_argument("out", metavar="OUT", type=Path, help="folder to make")
    dtype = "dtype of the tensors (default: fp32, exact)"
    parser.add_argument("--dtype", choices=DTYPES, default="fp32", help=dtype)
    args = parser.parse_args(argv)
    with TemporaryDirectory() as folder:
        file = GgufFile(args.file)
        write_tokenizer(file, Path(folder))
        model = read_model(file, DTYPES[args.dtype])
        export_model(model, args.out, companions=Path(folder).iterdir())
    count = sum(parameter.numel() for parameter in model.parameters())
    print(f"{args.out}: a {model.config.text.model_type} of {count:,} parameters")


if __name__ == "__main__":
    run_command(main)
