"""Training text: files, split and tokenized once, with a tokenizer trained on the train split.

In: paths of plain text; by default the source of Python's standard library, which every machine
has. Out: a `Corpus`, kept in a folder (tokenizer.model, tokens.safetensors, corpus.json) and read
from it again while the text is unchanged.
"""

import io
import json
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import sentencepiece
import torch

from model.common import (
    UserError,
    atomic_path,
    read_bytes,
    read_json,
    short_hash,
    shown,
    write_text,
)
from model.systems.configs import BOS, EOS, PAD, UNK
from weights.load import open_tensors, save_tensors

NEWLINE = "\n"
# the settings of Gemma's tokenizer
GEMMA = {
    "model_type": "bpe",
    "normalization_rule_name": "identity",
    "byte_fallback": True,
    "split_digits": True,
    "add_dummy_prefix": False,
    "remove_extra_whitespaces": False,
    "allow_whitespace_only_pieces": True,
    "pad_id": PAD,
    "eos_id": EOS,
    "bos_id": BOS,
    "unk_id": UNK,
}
SPLITS = ("train", "validation", "test")
LINES = 100_000  # lines of the train split for the tokenizer's training, evenly spaced
HELD_OUT = 20  # one document in 20 is for validation, another one for testing
# not part of the library: installed packages, and tests, which some distributions omit
NOT_LIBRARY = set("site-packages dist-packages test tests idle_test lib2to3 distutils".split())


class Corpus(NamedTuple):
    """ids (T,) int32 of each split, its documents concatenated, and where they start (documents +
    1,)."""

    tokenizer: sentencepiece.SentencePieceProcessor
    ids: dict[str, torch.Tensor]
    starts: dict[str, torch.Tensor]
    digest: str  # of the text and the tokenizer's size


def read_texts(paths: Sequence[str | Path]) -> dict[str, str]:
    """Texts by name; of no paths, Python's standard library. A folder stands for all its UTF-8
    files; of equal files the last one counts. Fewer than HELD_OUT files are cut at line ends into
    up to HELD_OUT parts each. Raises UserError."""
    if not paths:
        return library_texts()
    texts = {}
    for path in map(Path, paths):
        files = [path] if path.is_file() else sorted(filter(Path.is_file, path.rglob("*")))
        read = {str(file): _decoded(file) for file in files}
        usable = {name: text for name, text in read.items() if text}
        if not usable:
            problem = "not found, empty, or not UTF-8 text"
            raise UserError(f"--text {path}: {problem}: give files of text, or their folder")
        if left_out := len(files) - len(usable):
            problem = f"left out {left_out} files that are empty or not UTF-8 text"
            print(f"--text {shown(path)}: {problem}", file=sys.stderr)
        texts |= usable
    # a copy would be in training and in test
    once = {text: name for name, text in texts.items()}
    texts = {name: text for text, name in once.items()}
    if len(texts) >= HELD_OUT:
        return texts
    parts = {}
    for name, text in texts.items():
        lines = text.splitlines(keepends=True)
        size = -(-len(lines) // HELD_OUT)
        for start in range(0, len(lines), size):
            parts[f"{name}:{start}"] = "".join(lines[start : start + size])
    return parts


def library_texts() -> dict[str, str]:
    """The source of Python's standard library."""
    root = Path(sysconfig.get_path("stdlib"))
    texts = {}
    for path in root.rglob("*.py"):
        name = path.relative_to(root)
        if NOT_LIBRARY.isdisjoint(name.parts) and (text := _decoded(path)):
            texts[name.as_posix()] = text
    return texts


def _decoded(path: Path) -> str:
    """The text of a file; "" for one that is not there, or not UTF-8."""
    if path.is_file():
        with suppress(UnicodeDecodeError):
            return read_bytes(path).decode().replace("\r\n", "\n")
    return ""


def split(names: Iterable[str]) -> dict[str, list[str]]:
    """The documents of each split, by the hash of their names: the same on every machine."""
    ordered = sorted(
        names, key=lambda name: sha256(name.encode(errors="backslashreplace")).digest()
    )
    held_out = -(-len(ordered) // HELD_OUT)
    parts = ordered[2 * held_out :], ordered[:held_out], ordered[held_out : 2 * held_out]
    return dict(zip(SPLITS, map(sorted, parts), strict=True))


def open_corpus(
    folder: Path,
    paths: Sequence[str | Path] = (),
    vocab_size: int = 2048,
    known: Sequence[str] = (),
) -> Corpus:
    """The corpus of `paths` (none: the standard library), made in `folder` unless it is there.
    Raises UserError."""
    texts = read_texts(paths)
    summary = folder / "corpus.json"
    digest = short_hash(json.dumps([vocab_size, list(known), sorted(texts.items())]))
    if summary.is_file() and read_json(summary).get("digest") == digest:
        return kept_corpus(folder)
    # 1. a tokenizer from the train split
    parts = split(texts)
    lines = [line for name in parts["train"] for line in texts[name].split(NEWLINE) if line]
    # sentencepiece's own sampling is not the same twice
    lines = lines[:: -(-len(lines) // LINES) or 1]
    model = io.BytesIO()
    spec = {
        "vocab_size": vocab_size,
        "user_defined_symbols": [NEWLINE, *known],
        "character_coverage": 0.9995,
        "sentence_iterator": iter(lines),
        "model_writer": model,
        "num_threads": 1,
        "minloglevel": 2,
    }
    try:
        sentencepiece.SentencePieceTrainer.train(**spec, **GEMMA)
    except RuntimeError as error:
        raise UserError(
            f"--text: too little for a tokenizer of {vocab_size} pieces ({error}): give more"
        ) from None
    tokenizer = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    # 2. its tokens of each split
    tensors = {}
    for name, documents in parts.items():
        ids = [[*tokenizer.encode(texts[document]), EOS] for document in documents]
        joined = [token for document in ids for token in document]
        tensors[f"{name}_ids"] = torch.tensor(joined, dtype=torch.int32)
        tensors[f"{name}_starts"] = torch.tensor([0, *map(len, ids)]).cumsum(0)
    # 3. the folder
    summary.unlink(missing_ok=True)  # written last, it marks the folder as complete
    with atomic_path(folder / "tokenizer.model") as temporary:
        temporary.write_bytes(model.getvalue())
    with atomic_path(folder / "tokens.safetensors") as temporary:
        save_tensors(tensors, temporary)
    written = {"digest": digest, "paths": list(map(str, paths))}
    write_text(summary, json.dumps(written, indent=1) + "\n")
    return kept_corpus(folder)


def kept_corpus(folder: Path) -> Corpus:
    """The corpus in `folder`. Raises UserError if there is none."""
    if not (folder / "corpus.json").is_file():
        problem = "no corpus here (tokenizer.model, tokens.safetensors, corpus.json)"
        raise UserError(f"{folder}: {problem}: give the run's")
    tensors = open_tensors(folder / "tokens.safetensors")
    tokenizer = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    ids = {name: tensors.get_tensor(f"{name}_ids") for name in SPLITS}
    starts = {name: tensors.get_tensor(f"{name}_starts") for name in SPLITS}
    return Corpus(tokenizer, ids, starts, read_json(folder / "corpus.json")["digest"])
