"""The files beside the weights of a PaliGemma that transformers' AutoProcessor and `generate` read.

In: the configuration, and the tokenizer.model of sentencepiece. Out: the texts of tokenizer.json,
tokenizer_config.json, preprocessor_config.json and generation_config.json. transformers prepares the same pixels and
ids from them as `model/processor.py`.
"""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from model.common import UserError, shown
from model.config import PaliGemmaConfig
from model.tokenizer import NORMALIZER, SPACE, load_tokenizer
from model.turns import SLOT

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4  # types of pieces, in sentencepiece_model.proto
BPE = 2  # of a trainer's model types there

# the constant parts of Gemma's tokenizer.json
_GEMMA = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "normalizer": NORMALIZER,
    "pre_tokenizer": {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False},
    "post_processor": None,
    "decoder": {
        "type": "Sequence",
        "decoders": [
            {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
        ],
    },
}
_BPE = {
    "type": "BPE",
    "dropout": None,
    "unk_token": "<unk>",
    "continuing_subword_prefix": None,
    "end_of_word_suffix": None,
    "fuse_unk": True,
    "byte_fallback": True,
    "ignore_merges": False,
}


def processor_files(config: PaliGemmaConfig, tokenizer: Path | None) -> dict[str, str]:
    """The texts of all such files by name; without a tokenizer.model, of those that need none.

    Raises UserError for a tokenizer that a tokenizer.json of Gemma's kind cannot express.
    """
    size = config.vision.image_size
    files: dict[str, Any] = {
        "preprocessor_config.json": {
            "image_processor_type": "SiglipImageProcessor",
            "processor_class": "PaliGemmaProcessor",
            "image_seq_length": config.num_image_tokens,
            "size": {"height": size, "width": size},
            "do_convert_rgb": True,
            "do_resize": True,
            "resample": 3,  # bicubic
            "do_rescale": True,
            "rescale_factor": 1 / 255,
            "do_normalize": True,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
        },
        "generation_config.json": {
            "bos_token_id": config.bos_token_id,
            "eos_token_id": config.eos_token_id,
            "pad_token_id": config.pad_token_id,
            "suppress_tokens": [config.image_token_id],  # as `model.generate.generate`
        },
    }
    if tokenizer is not None:
        files["tokenizer.json"] = tokenizer_json(tokenizer, config.image_token_id)
        files["tokenizer_config.json"] = {
            "tokenizer_class": "GemmaTokenizer",
            "processor_class": "PaliGemmaProcessor",
            **{f"{name}_token": f"<{name}>" for name in ("bos", "eos", "pad", "unk")},
            "extra_special_tokens": {"image_token": SLOT},
        }
    return {name: json.dumps(content, indent=1, ensure_ascii=False) + "\n" for name, content in files.items()}


def tokenizer_json(path: Path, image_token_id: int) -> dict[str, Any]:
    """A sentencepiece model as tokenizer.json: what transformers makes of Gemma's, and `<image>` after its pieces.

    Any two pieces whose concatenation is a piece are a merge, in the order of the pieces' scores.
    Raises UserError for a model that is not BPE with byte fallback, or that changes texts before it cuts them.
    """
    pieces = read_pieces(path)
    ids = {piece: id_ for id_, (piece, _, _) in enumerate(pieces)}
    joined = {piece for piece, _, kind in pieces if kind in (NORMAL, USER_DEFINED)}
    if ids.get(SLOT, len(pieces)) != image_token_id:
        problem = f"config.json has {SLOT} at {image_token_id}, which is no piece and not the id after the last one"
        raise UserError(f"{shown(path)}: {problem}: take both files from one model")
    merges = [
        (-score, ids[piece], cut, piece)
        for piece, score, _ in pieces
        if piece in joined
        for cut in range(1, len(piece))
        if piece[:cut] in joined and piece[cut:] in joined
    ]
    added = {ids[piece]: (piece, kind == CONTROL) for piece, _, kind in pieces if kind in (CONTROL, USER_DEFINED)}
    added[image_token_id] = (SLOT, True)
    options = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return _GEMMA | {
        "added_tokens": [
            {"id": id_, "content": piece, "special": special, **options}
            for id_, (piece, special) in sorted(added.items())
        ],
        "model": _BPE | {"vocab": ids, "merges": [[piece[:cut], piece[cut:]] for _, _, cut, piece in sorted(merges)]},
    }


def read_pieces(path: Path) -> list[tuple[str, float, int]]:
    """Piece, score and type of every id of a sentencepiece model. Raises UserError as `tokenizer_json`."""
    load_tokenizer(path)  # refuses a damaged file
    model: dict[int, list] = {1: [], 2: [], 3: []}  # pieces, trainer_spec, normalizer_spec
    for number, value in _fields(path.read_bytes()):
        if number in model:
            model[number].append(dict(_fields(value)))
    trainer, normalizer = (model[number][-1] if model[number] else {} for number in (2, 3))
    problems = [
        name
        for name, value, expected in (
            ("is not BPE", trainer.get(3, 1), BPE),
            ("has no byte fallback", trainer.get(35, 0), 1),
            ("replaces characters", normalizer.get(2, b""), b""),
            ("puts a space before a text", normalizer.get(3, 1), 0),
            ("removes spaces", normalizer.get(4, 1), 0),
        )
        if value != expected
    ]
    if problems:
        raise UserError(f"{shown(path)}: {', '.join(problems)}: not Gemma's kind of tokenizer, take PaliGemma's own")
    return [(p[1].decode(), struct.unpack("<f", p.get(2, bytes(4)))[0], p.get(3, NORMAL)) for p in model[1]]


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Number and value of each field of a protobuf message: an int, or the bytes of a number, text or message."""
    place = 0

    def varint() -> int:
        nonlocal place
        value = shift = 0
        while True:
            byte = message[place]
            place += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while place < len(message):
        key = varint()
        if key & 7 == 0:
            yield key >> 3, varint()
            continue
        length = {1: lambda: 8, 2: varint, 5: lambda: 4}[key & 7]()
        yield key >> 3, message[place : place + length]
        place += length
