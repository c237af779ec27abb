"""Tokenizers and texts of several tests: sentencepiece with Gemma's settings, transformers' of its
pieces, Qwen's."""

import json
import random
from pathlib import Path

import sentencepiece
import tokenizers
from transformers import AddedToken, GemmaTokenizer, PreTrainedTokenizerFast, Qwen2Tokenizer
from transformers.tokenization_utils_base import generate_merges

from model.config import TextConfig
from model.paligemma import initialize
from model.source import BUNDLED_FOLDER
from model.systems.configs import LanguageConfig, LlamaConfig
from model.systems.language import LanguageModel
from weights.export import export_model

CONTROL = "pad eos bos unk".split()
GEMMA2 = {"sliding_window": 6, "query_pre_attn_scalar": 8}
TEXTS = [
    "Where is the dog?",
    "  two blanks, then\ttabs\n\n\nand lines \n",
    "it's I'LL 1234567 x86 ...!? (brackets)[]",
]
TEXTS += ["日本語のテキスト, été e\u0301 🐮🏽 \u200d", "<|im_ start|> <start_of turn> <b>bold</b>"]
TEXTS += ["\n\na", "a\n\n", " a ", "a\n", "\u2581", "\r\n \r"]
ASKED = [
    "where is the dog? it's at the gate; 12 and 345\n\nand so on, isn't it, I'll say",
    *TEXTS,
] * 3
SENTENCES = """caption en the cow is standing in the green field beside two dogs
the cat is on the mat, and the dog isn't; 12 34 567. <b>bold</b> <unused0> <table>
日本語のテキスト と 絵 un éléphant gris près de l'étang aaaa abab aabbaa""".splitlines()
ODD = r"< <<b> </ <unused <unused1 <0x41> <0x09> <loc00011> <seg> ▁▁a▁".split()
ODD += (
    "\u200d|\ufeff|\0|\r\n|e\u0301|🐮🏽|👩‍🚀|日本語|<unused0><b>\n\n|> </|aab|a b|cow stand".split(
        "|"
    )
)


def train_pieces(
    prefix: Path, corpus: list[str], size: int, symbols: list[str], dummy_prefix: bool = False
) -> Path:
    """A sentencepiece model of at most `size` pieces, with `symbols` among them: PREFIX.model.
    dummy_prefix: a text begins with a blank of its own, as in Llama 2."""
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus),
        model_prefix=str(prefix),
        model_type="bpe",
        vocab_size=size,
        hard_vocab_limit=False,
        byte_fallback=True,
        normalization_rule_name="identity",
        add_dummy_prefix=dummy_prefix,
        remove_extra_whitespaces=False,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        minloglevel=2,
        num_threads=1,
        user_defined_symbols=symbols,
        **{f"{name}_id": number for number, name in enumerate(CONTROL)},
        **{f"{name}_piece": f"<{name}>" for name in CONTROL},
    )
    return prefix.with_name(f"{prefix.name}.model")


def gemma_tokenizer(
    file: Path, symbols: list[str] = (), renamed: dict[str, str] | None = None
) -> GemmaTokenizer:
    """transformers' tokenizer of the pieces in `file`. symbols: pieces to find in text first.
    renamed: other names."""
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(file))
    names = map(pieces.id_to_piece, range(pieces.vocab_size()))
    vocabulary = {(renamed or {}).get(name, name): id_ for id_, name in enumerate(names)}
    tokenizer = GemmaTokenizer(vocab=vocabulary, merges=generate_merges(vocabulary))
    tokenizer.add_tokens([AddedToken(piece, normalized=False, special=False) for piece in symbols])
    return tokenizer


def qwen_tokenizer() -> Qwen2Tokenizer:
    """Merges that the package `tokenizers` has learned of bytes, cut by Qwen's regular
    expression."""
    learner = Qwen2Tokenizer().backend_tokenizer
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=330, initial_alphabet=alphabet, show_progress=False
    )
    learner.train_from_iterator(ASKED, trainer)
    model = json.loads(learner.to_str())["model"]
    return Qwen2Tokenizer(vocab=model["vocab"], merges=[tuple(pair) for pair in model["merges"]])


def llama_tokenizer() -> PreTrainedTokenizerFast:
    """Those merges, and Llama 3's control tokens: its file puts bos before a text."""
    bos = "<|begin_of_text|>"
    end = "<|end_of_text|>"
    raw = qwen_tokenizer().backend_tokenizer.to_str().replace("<|endoftext|>", end)
    backend = tokenizers.Tokenizer.from_str(raw)
    backend.add_special_tokens([bos])
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, backend.token_to_id(bos))]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=bos, eos_token=end)


def language_folder(folder: Path, kind: str, most: int, control: list[str] = (), seed: int = 0):
    """A random tiny model of `kind`, gemma2, llama or qwen2, in `folder`, and its tokenizer. most:
    tokens of a sequence."""
    if kind == "gemma2":
        tokenizer = gemma_tokenizer(BUNDLED_FOLDER / "tokenizer.model")
    else:
        tokenizer = llama_tokenizer() if kind == "llama" else qwen_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": control})
    family = TextConfig if kind == "gemma2" else LlamaConfig
    own = (
        GEMMA2 if kind == "gemma2" else {"hidden_activation": "silu", "tie_word_embeddings": False}
    )
    text = family(kind, len(tokenizer) + 4, 16, 32, 2, 2, 1, 8, **own)
    ends = (tokenizer.eos_token_id,)
    config = LanguageConfig(text, ends, tokenizer.pad_token_id, tokenizer.bos_token_id, most)
    export_model(initialize(LanguageModel(config), seed), folder)
    tokenizer.save_pretrained(folder)
    return tokenizer


def texts(count: int, pieces: list[str]) -> list[str]:
    """Random texts: words, pieces, runs of white space, any code point, fragments of reserved
    pieces."""
    draw = random.Random(0)
    kinds = [
        lambda: draw.choice(draw.choice(SENTENCES).split()) + draw.choice(" ,\n\t"),
        lambda: draw.choice(" \t\n▁") * draw.choice([1, 2, 3, 30, 31, 32, 33, 62, 63, 64, 100]),
        lambda: draw.choice(pieces).replace("▁", draw.choice("▁ ")),
        lambda: chr(draw.choice([draw.randrange(0xD800), draw.randrange(0xE000, 0x110000)])),
        lambda: draw.choice(ODD),
        lambda: "".join(draw.choices("ab ", k=12)),
    ]
    drawn = []
    for _ in range(count):
        drawn.append("".join([draw.choice(kinds)() for _ in range(draw.randrange(1, 25))]))
    return drawn
