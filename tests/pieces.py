"""Tokenizers that several tests make: a sentencepiece model with Gemma's settings, and transformers' of its pieces."""

from pathlib import Path

import sentencepiece
from transformers import AddedToken, GemmaTokenizer
from transformers.tokenization_utils_base import generate_merges

CONTROL = ("pad", "eos", "bos", "unk")


def train_pieces(prefix: Path, corpus: list[str], size: int, symbols: list[str]) -> Path:
    """A sentencepiece model of at most `size` pieces, with `symbols` among them: PREFIX.model."""
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus),
        model_prefix=str(prefix),
        **{"model_type": "bpe", "vocab_size": size, "hard_vocab_limit": False, "byte_fallback": True},
        **{f"{name}_id": number for number, name in enumerate(CONTROL)},
        **{f"{name}_piece": f"<{name}>" for name in CONTROL},
        **{"normalization_rule_name": "identity", "add_dummy_prefix": False, "remove_extra_whitespaces": False},
        **{"split_digits": True, "allow_whitespace_only_pieces": True, "minloglevel": 2, "num_threads": 1},
        user_defined_symbols=symbols,
    )
    return prefix.with_name(f"{prefix.name}.model")


def gemma_tokenizer(file: Path, symbols: list[str] = (), renamed: dict[str, str] | None = None) -> GemmaTokenizer:
    """transformers' tokenizer of the pieces in `file`. symbols: pieces to find in text first. renamed: other names."""
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(file))
    names = map(pieces.id_to_piece, range(pieces.vocab_size()))
    vocabulary = {(renamed or {}).get(name, name): id_ for id_, name in enumerate(names)}
    tokenizer = GemmaTokenizer(vocab=vocabulary, merges=generate_merges(vocabulary))
    tokenizer.add_tokens([AddedToken(piece, normalized=False, special=False) for piece in symbols])
    return tokenizer
