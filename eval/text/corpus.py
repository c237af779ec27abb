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
    files = [path for path in root.rglob("*.py") if not NOT_LIBRARY & set(path.relative_to(root).parts)]
    found = {path.relative_to(root).as_posix(): _decoded(path) for path in files}
    return {name: text for name, text in found.items() if text}


def read_texts(paths: Sequence[str | Path]) -> dict[str, str]:
    """Texts by name. A folder stands for all its UTF-8 files, and a line on stderr counts the others; fewer than
    HELD_OUT files are cut at line ends into HELD_OUT parts each, so that no split is empty. Raises UserError for a path
    that is absent or not text."""
    texts = {}
    for path in map(Path, paths):
        if path.is_dir():
            found = {str(file): _decoded(file) for file in sorted(path.rglob("*")) if file.is_file()}
            if not any(found.values()):
                raise UserError(f"--text {path}: no UTF-8 text in this folder: give files, or a folder that has some")
            texts |= {name: text for name, text in found.items() if text}
            if other := [name for name, text in found.items() if text is None]:
                counted = f"{len(other)} of {len(found)} files are no UTF-8 text and left out"
                print(f"--text {shown(path)}: {counted}, the first: {shown(other[0])}", file=sys.stderr)
        elif not path.is_file():
            raise UserError(f"--text {path}: no such file or folder: check the path")
        elif (text := _decoded(path)) is None:
            raise UserError(f"--text {path}: is not UTF-8 text: convert it, or leave it out")
        elif not text:
            raise UserError(f"--text {path}: is empty: leave it out")
        else:
            texts[str(path)] = text
    if len(texts) >= HELD_OUT:
        return texts
    return {f"{name}:{n}": part for name, text in texts.items() for n, part in enumerate(_parts(text)) if part}


def _decoded(path: Path) -> str | None:
    try:
        text = path.read_bytes().decode()
    except (UnicodeDecodeError, OSError):
        return None
    return None if "\0" in text else text.replace("\r\n", "\n")


def _parts(text: str) -> list[str]:
    """HELD_OUT parts of about equal length, each of whole lines."""
    lines, size = text.splitlines(keepends=True), len(text) / HELD_OUT
    parts, end = [""] * HELD_OUT, 0
    for line in lines:
        parts[min(HELD_OUT - 1, int(end / size))] += line
        end += len(line)
    return parts


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
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            byte_fallback=True,
            character_coverage=0.9995,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            split_digits=True,
            user_defined_symbols=[NEWLINE, *known],
            pad_id=PAD,
            eos_id=EOS,
            bos_id=BOS,
            unk_id=UNK,
            num_threads=1,
            minloglevel=2,
        )
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
    summary = {
        "digest": digest,
        "paths": list(map(str, paths)),
        "documents": {n: len(d) for n, d in parts.items()},
        "tokens": {name: len(tensors[f"{name}_ids"]) for name in parts},
    }
    write_text(folder / "corpus.json", json.dumps(summary, indent=1) + "\n")  # last: it marks the folder as complete
    return find_corpus(folder)


def find_corpus(folder: Path) -> Corpus | None:
    """The corpus in `folder`, None if there is none that can be read."""
    try:
        summary = json.loads((folder / "corpus.json").read_text())
        tensors = load_file(folder / "tokens.safetensors")
        tokenizer = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
        return Corpus(
            tokenizer,
            {name: tensors[f"{name}_ids"] for name in SPLITS},
            {name: tensors[f"{name}_starts"] for name in SPLITS},
            summary["digest"],
        )
    except (OSError, ValueError, KeyError, SafetensorError):
        return None


def kept_corpus(folder: Path) -> Corpus:
    """The corpus in `folder`. Raises UserError if there is none."""
    corpus = find_corpus(folder)
    if corpus is None:
        raise UserError(f"{folder}: no corpus here (tokenizer.model, tokens.safetensors, corpus.json): give the run's")
    return corpus
