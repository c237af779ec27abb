"""Tokenizers: Gemma's tokenizer.json as transformers 5 saves it, a sentencepiece model, or GPT-NeoX's tokenizer.json.

In: a file. Out: an object with the methods of `sentencepiece.SentencePieceProcessor` that `model/processor.py` calls.
Gemma's tokenizer.json is read without the package `tokenizers`; GPT-NeoX's is read with it (`model/bpe.py`).
"""

import heapq
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import sentencepiece

from model.bpe import BytePairTokenizer, load_bpe
from model.common import UserError, quoted, read_json
from model.source import BUNDLED_FOLDER, EMBEDDED, preset_of, resolve
from model.turns import SLOT

ADDED = "added_tokens.json"
SPACE = "\u2581"  # stands for a space in pieces
MAX_PIECES = 1 << 24
NORMALIZER = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
_MAX_WORDS = 1 << 16  # encoded words that are remembered
_UNUSED = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "ignore_merges")
# tokens that transformers' GemmaTokenizer and PaliGemmaProcessor add, whatever a file says of them
SPECIAL = ("<pad>", "<eos>", "<bos>", "<unk>", "<mask>")
LOCATIONS = [f"<loc{number:04}>" for number in range(1024)] + [f"<seg{number:03}>" for number in range(128)]


class _AddedTokens:
    """Tokens that are found in text before anything else: the leftmost first, and the longest at one place."""

    def __init__(self, ids: dict[str, int]):
        self.ids = ids
        lengths: dict[str, set[int]] = {}
        for token in ids:
            lengths.setdefault(token[0], set()).add(len(token))
        self._lengths = {first: sorted(all_, reverse=True) for first, all_ in lengths.items()}
        self._first = re.compile("[" + re.escape("".join(lengths)) + "]") if lengths else None

    def cut(self, text: str) -> Iterator[str | int]:
        """The ids of the added tokens in `text`, and the pieces of text between them."""
        done = place = 0
        while self._first and (found := self._first.search(text, place)):
            place = found.start()
            candidates = (text[place : place + length] for length in self._lengths[text[place]])
            token = next((candidate for candidate in candidates if candidate in self.ids), None)
            if token is None:
                place += 1
                continue
            if place > done:
                yield text[done:place]
            yield self.ids[token]
            done = place = place + len(token)
        if done < len(text):
            yield text[done:]


class GemmaTokenizer:
    """Byte-pair encoding of characters, equal to transformers' GemmaTokenizer with the same tokenizer.json.

    Text is cut at the added tokens, spaces become U+2581, characters that have no piece become UTF-8 bytes, and
    adjacent pieces are merged: the pair of the lowest rank first, the leftmost of equal ones. `encode` adds no bos.

    vocabulary: id by piece. merges: pairs of pieces in the order of their ranks. exact and normalized: ids of added
    tokens by their text, which are found before and after spaces are replaced. special: ids that `decode` leaves out.
    """

    def __init__(
        self,
        vocabulary: dict[str, int],
        merges: Sequence[Sequence[str]],
        exact: dict[str, int],
        normalized: dict[str, int],
        special: set[int],
        unknown: str,
    ):
        self._ids = vocabulary | exact | normalized
        self._pieces = {id_: piece for piece, id_ in self._ids.items()}
        self._size = max(self._pieces) + 1
        self._special, self._unknown = special, self._ids[unknown]
        self._exact = _AddedTokens(exact)
        self._normalized = _AddedTokens({token.replace(" ", SPACE): id_ for token, id_ in normalized.items()})
        self._characters = {piece: id_ for piece, id_ in vocabulary.items() if len(piece) == 1}
        self._byte_ids = [vocabulary[piece] for piece in _BYTES]
        keys = (vocabulary[left] * self._size + vocabulary[right] for left, right in merges)
        self._ranks = dict(zip(keys, range(len(merges)), strict=True))
        pieces = [left + right for left, right in merges]
        self._merged = [vocabulary[piece] for piece in pieces]
        before_space = {SPACE}  # characters that may be merged with a space behind them
        for piece in pieces:
            if SPACE in piece[1:]:
                before_space.update(one for one, other in zip(piece, piece[1:], strict=False) if other == SPACE)
        # no merge reaches over these boundaries, so that a word can be encoded once and remembered
        self._boundary = re.compile(f"(?<=[^{re.escape(''.join(before_space))}])(?={SPACE})")
        self._words: dict[str, list[int]] = {}

    def vocab_size(self) -> int:
        return self._size

    def pad_id(self) -> int:
        return self.piece_to_id("<pad>")

    def eos_id(self) -> int:
        return self.piece_to_id("<eos>")

    def bos_id(self) -> int:
        return self.piece_to_id("<bos>")

    def unk_id(self) -> int:
        return self._unknown

    def id_to_piece(self, id_: int) -> str:
        """The piece of an id; an empty string where the vocabulary has a gap."""
        return self._pieces.get(id_, "")

    def piece_to_id(self, piece: str) -> int:
        """The id of a piece, `unk_id` if there is none."""
        return self._ids.get(piece, self._unknown)

    def encode(self, text: str | Sequence[str]) -> list:
        """The ids of a text, or a list of them for a list of texts."""
        if not isinstance(text, str):
            return [self.encode(one) for one in text]
        ids = []
        for part in self._exact.cut(text):
            if isinstance(part, int):
                ids.append(part)
                continue
            for piece in self._normalized.cut(part.replace(" ", SPACE)):
                if isinstance(piece, int):
                    ids.append(piece)
                else:
                    for word in self._boundary.split(piece):
                        ids += self._encode_word(word)
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids, without special tokens. Bytes that are no UTF-8 become U+FFFD each."""
        text, pending = [], bytearray()
        for id_ in [*ids, None]:
            piece = "" if id_ is None or id_ in self._special else self.id_to_piece(id_).replace(SPACE, " ")
            if id_ in self._special:
                continue
            if byte := _BYTE.fullmatch(piece):
                pending.append(int(byte[1], 16))
                continue
            if pending:
                try:
                    text.append(pending.decode())
                except UnicodeDecodeError:
                    text.append("\ufffd" * len(pending))
                pending.clear()
            text.append(piece)
        return "".join(text)

    def _encode_word(self, word: str) -> list[int]:
        known = self._words.get(word)
        if known is None:
            if len(self._words) >= _MAX_WORDS:
                self._words.clear()
            ids = []
            for character in word:
                id_ = self._characters.get(character)
                ids += [self._byte_ids[byte] for byte in character.encode()] if id_ is None else [id_]
            known = self._words[word] = self._merge(ids)
        return known

    def _merge(self, ids: list[int]) -> list[int]:
        """Merge adjacent pieces in the order of the ranks. A heap holds the pairs, a linked list the pieces left."""
        following, preceding = [*range(1, len(ids)), -1], list(range(-1, len(ids) - 1))
        queue: list[tuple[int, int, int]] = []

        def propose(left: int) -> None:
            right = following[left] if left >= 0 else -1
            if right >= 0:
                pair = ids[left] * self._size + ids[right]
                if (rank := self._ranks.get(pair)) is not None:
                    heapq.heappush(queue, (rank, left, pair))

        for position in range(len(ids) - 1):
            propose(position)
        while queue:
            rank, left, pair = heapq.heappop(queue)
            right = following[left]
            if ids[left] < 0 or right < 0 or ids[left] * self._size + ids[right] != pair:
                continue  # one of the two has been merged since
            ids[left], ids[right] = self._merged[rank], -1
            following[left] = following[right]
            if following[left] >= 0:
                preceding[following[left]] = left
            propose(preceding[left])
            propose(left)
        return [id_ for id_ in ids if id_ >= 0]


# what `model/processor.py` and `model/chat.py` read besides
BESIDE = ("config.json", "processor_config.json", "preprocessor_config.json")

Tokenizer = sentencepiece.SentencePieceProcessor | GemmaTokenizer | BytePairTokenizer


def find_tokenizer(source: str | Path, revision: str | None = None) -> Path:
    """The tokenizer.json of a model, or tokenizer.model where it has none; presets read with the embedded base's.

    Downloads from the hub the small files beside it, too. The file of the second name need not exist: `load_tokenizer`
    says so.
    """
    source = EMBEDDED if preset_of(source) else source
    file = resolve(source, ["tokenizer.json", *BESIDE], revision) / "tokenizer.json"
    is_exported = file.parent == BUNDLED_FOLDER  # there it is for transformers
    if file.exists() and not is_exported:
        return file
    return resolve(source, ["tokenizer.model", ADDED], revision) / "tokenizer.model"


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The sentencepiece model or tokenizer.json at `path`. Raises UserError if it is absent or another kind of file."""
    path = Path(path)
    if not path.is_file():
        raise UserError(
            f"{path}: not found, nor a tokenizer.json: copy it from the model that this one was made from, such as "
            "huggingface.co/google/paligemma-3b-pt-224 (for a Mamba, state-spaces/mamba-130m-hf)"
        )
    if path.suffix == ".json":
        raw = read_json(path)
        parts = (raw.get(part) for part in ("decoder", "pre_tokenizer"))
        if any(isinstance(part, dict) and part.get("type") == "ByteLevel" for part in parts):
            return load_bpe(path)
        return _read_gemma(raw, path)
    try:
        found = sentencepiece.SentencePieceProcessor(model_proto=path.read_bytes())
    except (RuntimeError, OSError) as error:
        raise UserError(f"{path}: not a sentencepiece model ({error}): download the file again") from None
    beside = path.with_name(ADDED)  # of a model that has learned more tokens
    added = read_json(beside).keys() - {SLOT} if beside.is_file() else ()
    if foreign := [token for token in sorted(added) if found.id_to_piece(found.piece_to_id(token)) != token]:
        raise UserError(f"{beside}: adds {quoted(foreign)} to {path.name}: save both as a tokenizer.json")
    return found


def _read_gemma(raw: dict, path: Path) -> GemmaTokenizer:
    """Check a tokenizer.json and build the tokenizer. Raises UserError for a kind that is encoded otherwise."""
    model, added = raw.get("model"), raw.get("added_tokens") or []
    if not isinstance(model, dict) or not isinstance(added, list):
        raise UserError(f"{path}: not a tokenizer: expected a model and added_tokens: download the file again")
    foreign = [
        f"{name} is {value!r}"
        for name, value, expected in (
            ("model.type", model.get("type", "BPE"), ("BPE",)),
            ("model.byte_fallback", model.get("byte_fallback"), (True,)),
            ("normalizer", raw.get("normalizer"), (NORMALIZER,)),
            *((f"model.{name}", model.get(name), (None, "", False)) for name in _UNUSED),
        )
        if value not in expected
    ]
    if foreign:
        raise UserError(f"{path}: not Gemma's kind of tokenizer ({'; '.join(foreign)[:200]}): take PaliGemma's own")
    try:
        return _build(model, added)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise UserError(f"{path}: a damaged vocabulary ({repr(error)[:200]}): download the file again") from None


def _build(model: dict, added: list[dict]) -> GemmaTokenizer:
    """The tokenizer of a checked file. Raises KeyError, TypeError or ValueError for one that contradicts itself."""
    vocabulary = model["vocab"]
    tokens: dict[bool, dict[str, int]] = {True: {}, False: {}}
    for token in added:
        if not token["content"] or token.get("single_word") or token.get("lstrip") or token.get("rstrip"):
            raise ValueError(f"added token {token} has options that Gemma's do not have")
        tokens[bool(token["normalized"])][token["content"]] = token["id"]
    exact, normalized = tokens[False], tokens[True]
    exact |= {piece: vocabulary[piece] for piece in SPECIAL if piece in vocabulary and piece not in normalized}
    normalized |= {piece: vocabulary[piece] for piece in LOCATIONS if piece in vocabulary and piece not in exact}
    ids = vocabulary | exact | normalized
    if not all(type(id_) is int and 0 <= id_ < MAX_PIECES for id_ in ids.values()) or len(set(ids.values())) < len(ids):
        raise ValueError(f"ids must be whole numbers below {MAX_PIECES}, each of one piece")
    pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
    if SPACE not in vocabulary or not set(_BYTES).isdisjoint(itertools.chain.from_iterable(pairs)):
        raise ValueError("a vocabulary without spaces, or merges of bytes")
    special = {token["id"] for token in added if token.get("special")}
    special |= {ids[piece] for piece in SPECIAL if piece in ids}
    return GemmaTokenizer(vocabulary, pairs, exact, normalized, special, model.get("unk_token") or "<unk>")
