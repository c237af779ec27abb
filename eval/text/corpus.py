"""Training text: files, split and tokenized once, with a tokenizer trained on the train split.

In: paths of plain text; by default the source of Python's standard library, which every machine has. Out: a `Corpus`,
kept in a folder (tokenizer.model, tokens.safetensors, corpus.json) and read from it again while the text is unchanged.
`eval/text/tasks.py` hides needles in it; `train/systems/text.py` and `eval/text/measures.py` read it.
"""

import io
import json
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import sentencepiece
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from model.common import UserError, atomic_path, shown, write_text

PAD, EOS, BOS, UNK = range(4)
NEWLINE = "\n"
SPLITS = ("train", "validation", "test")
LINES = 100_000  # lines of the train split for the tokenizer's training, evenly spaced
HELD_OUT = 20  # one document in 20 is for validation, another one for testing
# not part of the library: installed packages, and tests, which some distributions omit
NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "distutils"}


@dataclass(frozen=True)
class Corpus:
    """ids (T,) int32 of each split, its documents concatenated, and where they start (documents + 1,)."""

    tokenizer: sentencepiece.SentencePieceProcessor
    ids: dict[str, torch.Tensor]
    starts: dict[str, torch.Tensor]
    digest: str  # of the text and the tokenizer's size

    @property
    def newline(self) -> int:
        return self.tokenizer.piece_to_id(NEWLINE)


def standard_library() -> dict[str, str]:
    """The .py files of Python's standard library by their path in it."""
    root = Path(sysconfig.get_path("stdlib"))
    files = {path.relative_to(root): path for path in root.rglob("*.py")}
    texts = {name.as_posix(): _decoded(path) for name, path in files.items() if not NOT_LIBRARY & set(name.parts)}
    return {name: text for name, text in texts.items() if text}


def read_texts(paths: Sequence[str | Path]) -> dict[str, str]:
    """Texts by name. A folder stands for all its UTF-8 files, and a line on stderr counts the others; fewer than
    HELD_OUT files are cut at line ends into HELD_OUT parts each, so that no split is empty. Raises UserError for a path
    that is absent or not text."""
    texts = {}
    for path in map(Path, paths):
        files = sorted(filter(Path.is_file, path.rglob("*"))) if path.is_dir() else [path]
        read = {str(file): _decoded(file) for file in files}
        if not any(read.values()):
            raise UserError(f"--text {path}: not found, empty, or not UTF-8 text: give files of text, or their folder")
        if other := [name for name, text in read.items() if text is None]:
            print(f"{len(other)} of {len(read)} files are not UTF-8: {shown(other[0])}, …: left out", file=sys.stderr)
        texts |= {name: text for name, text in read.items() if text}
    if len(texts) >= HELD_OUT:
        return texts
    parts: dict[str, list[str]] = {}
    for name, text in texts.items():
        start = 0
        for line in text.splitlines(keepends=True):
            parts.setdefault(f"{name}:{HELD_OUT * start // len(text)}", []).append(line)
            start += len(line)
    return {name: "".join(lines) for name, lines in parts.items()}


def _decoded(path: Path) -> str | None:
    try:
        text = path.read_bytes().decode()
    except (UnicodeDecodeError, OSError):
        return None
    return None if "\0" in text else text.replace("\r\n", "\n")


def split(names: Iterable[str]) -> dict[str, list[str]]:
    """The documents of each split, by the hash of their names: the same on every machine."""
    ordered = sorted(names, key=lambda name: sha256(name.encode()).digest())
    held_out = -(-len(ordered) // HELD_OUT)
    parts = ordered[2 * held_out :], ordered[:held_out], ordered[held_out : 2 * held_out]
    return dict(zip(SPLITS, map(sorted, parts), strict=True))


def train_tokenizer(texts: Iterable[str], vocab_size: int, known: Sequence[str] = ()) -> bytes:
    """A sentencepiece BPE model, serialised: byte fallback, single digits, no normalisation, "\\n" a symbol.

    known: texts that become one piece each. Raises UserError if the text is too short for the number of pieces.
    """
    model = io.BytesIO()
    lines = [line for text in texts for line in text.split(NEWLINE) if line]
    lines = lines[:: -(-len(lines) // LINES) or 1]  # sentencepiece's own sampling is not the same twice
    spaces = {"add_dummy_prefix": False, "remove_extra_whitespaces": False, "allow_whitespace_only_pieces": True}
    pieces = {"user_defined_symbols": [NEWLINE, *known], "byte_fallback": True, "split_digits": True}
    ids = {"pad_id": PAD, "eos_id": EOS, "bos_id": BOS, "unk_id": UNK, "vocab_size": vocab_size}
    rules = {"model_type": "bpe", "character_coverage": 0.9995, "normalization_rule_name": "identity"}
    options = {**spaces, **pieces, **ids, **rules, "num_threads": 1, "minloglevel": 2}
    try:
        sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(lines), model_writer=model, **options)
    except RuntimeError as error:
        reason = str(error).rpartition("] ")[2] or str(error)
        raise UserError(f"no tokenizer of {vocab_size} pieces can be made of this text: {reason}") from None
    return model.getvalue()


def open_corpus(
    folder: Path, paths: Sequence[str | Path] = (), vocab_size: int = 2048, known: Sequence[str] = ()
) -> Corpus:
    """The corpus of `paths` (none: the standard library), made in `folder` unless it is there already.

    Raises UserError for paths that cannot be read, and for too little text.
    """
    texts = read_texts(paths) if paths else standard_library()
    parts = split(texts)
    digest = sha256(json.dumps([vocab_size, list(known), sorted(texts.items())]).encode()).hexdigest()[:16]
    if (corpus := find_corpus(folder)) is not None and corpus.digest == digest:
        return corpus
    if not all(parts.values()):
        raise UserError(f"{len(texts)} documents cannot be split into {', '.join(SPLITS)}: give longer text")
    proto = train_tokenizer((texts[name] for name in parts["train"]), vocab_size, known)
    tokenizer = sentencepiece.SentencePieceProcessor(model_proto=proto)
    tensors = {}
    for name, documents in parts.items():
        ids = [[*tokenizer.encode(texts[document]), EOS] for document in documents]
        tensors[f"{name}_ids"] = torch.tensor([token for document in ids for token in document], dtype=torch.int32)
        tensors[f"{name}_starts"] = torch.tensor([0, *map(len, ids)]).cumsum(0)
    (folder / "corpus.json").unlink(missing_ok=True)  # until all is written, the folder is not complete
    with atomic_path(folder / "tokenizer.model") as temporary:
        temporary.write_bytes(proto)
    with atomic_path(folder / "tokens.safetensors") as temporary:
        save_file(tensors, temporary)
    documents = {name: len(names) for name, names in parts.items()}
    tokens = {name: len(tensors[f"{name}_ids"]) for name in parts}
    summary = {"digest": digest, "paths": list(map(str, paths)), "documents": documents, "tokens": tokens}
    write_text(folder / "corpus.json", json.dumps(summary, indent=1) + "\n")  # last: it marks the folder as complete
    return kept_corpus(folder)


def find_corpus(folder: Path) -> Corpus | None:
    """The corpus in `folder`, None if there is none that can be read."""
    try:
        digest = json.loads((folder / "corpus.json").read_text())["digest"]
        tensors = load_file(folder / "tokens.safetensors")
        tokenizer = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    except (OSError, ValueError, KeyError, SafetensorError):
        return None
    ids, starts = ({name: tensors[f"{name}_{part}"] for name in SPLITS} for part in ("ids", "starts"))
    return Corpus(tokenizer, ids, starts, digest)


def kept_corpus(folder: Path) -> Corpus:
    """The corpus in `folder`. Raises UserError if there is none."""
    corpus = find_corpus(folder)
    if corpus is None:
        raise UserError(f"{folder}: no corpus here (tokenizer.model, tokens.safetensors, corpus.json): give the run's")
    return corpus
