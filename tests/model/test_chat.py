"""The tokenizers of Gemma and Qwen and their turns: ids equal those of transformers and its chat template."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import tokenizers
import torch
from transformers import AutoTokenizer, Qwen2Tokenizer

from eval.ask import main
from model.chat import TextTokenizer, load_text_tokenizer
from model.common import UserError
from model.config import TextConfig
from model.generate import ask_text
from model.language import LanguageModel
from model.paligemma import initialize
from model.processor import Processor
from model.source import BUNDLED_FOLDER
from model.system_configs import LanguageConfig
from tests.pieces import gemma_tokenizer, train_pieces
from tests.runs import refused
from weights.export import export_model
from weights.load import load_text

# as published with gemma-2-2b-it and Qwen2-7B-Instruct
TEMPLATES = {
    "gemma2": (
        "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
        "{% endif %}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
        "{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}"
        "{% endif %}{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"
    ),
    "qwen2": (
        "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
        "{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}"
        "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
}
# Qwen2.5's, without its tools
QWEN_2_5 = (
    "{%- if messages[0]['role'] == 'system' %}\n"
    "{{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}\n{%- else %}\n"
    "{{- '<|im_start|>system\\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\\n' }}\n"
    "{%- endif %}\n{%- for message in messages %}\n"
    "{%- if (message.role == 'user') or (message.role == 'assistant') %}\n"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}\n"
    "{%- endif %}\n{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n{{- '<|im_start|>assistant\\n' }}\n{%- endif %}\n"
)
MARKS = {"gemma2": ["<start_of_turn>", "<end_of_turn>"], "qwen2": ["<|im_start|>", "<|im_end|>"]}
TEXTS = (
    """Where is the dog?
  two blanks, then\ttabs\n\n\nand lines \n
it's I'LL 1234567 x86 ...!? (brackets)[]
日本語のテキスト, été e\u0301 🐮🏽 \u200d
<|im_ start|> <start_of turn> <b>bold</b>""".split("\n")
    + ["\n\na", "a\n\n", " a ", "a\n", "\u2581", "\r\n \r"]
)
CORPUS = ["where is the dog? it's at the gate; 12 and 345\n\nand so on, isn't it, I'll say", *TEXTS] * 3


def qwen_tokenizer() -> Qwen2Tokenizer:
    """Merges that the package `tokenizers` has learned of bytes, cut by Qwen's regular expression."""
    learner = Qwen2Tokenizer().backend_tokenizer
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False)
    learner.train_from_iterator(CORPUS, trainer)
    model = json.loads(learner.to_str())["model"]
    return Qwen2Tokenizer(vocab=model["vocab"], merges=[tuple(pair) for pair in model["merges"]])


@pytest.fixture(scope="module", params=TEMPLATES)
def kind(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(kind, tmp_path_factory) -> Path:
    """A random model and its tokenizer, as the hub has them."""
    folder = tmp_path_factory.mktemp("chat") / kind
    tokenizer = gemma_tokenizer(BUNDLED_FOLDER / "tokenizer.model") if kind == "gemma2" else qwen_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": MARKS[kind]})
    sizes = {"head_dim": 8, "num_key_value_heads": 1, "num_attention_heads": 2, "num_hidden_layers": 2}
    sizes |= {} if kind == "gemma2" else {"hidden_activation": "silu", "tie_word_embeddings": False}
    text = TextConfig(kind, len(tokenizer) + 4, 16, 32, **sizes)
    bos = tokenizer.bos_token_id
    config = LanguageConfig(text, (tokenizer.eos_token_id,), tokenizer.pad_token_id, bos, 512)
    export_model(initialize(LanguageModel(config)), folder)
    tokenizer.chat_template = TEMPLATES[kind]
    tokenizer.save_pretrained(folder)
    assert (folder / "tokenizer.json").exists()
    return folder


@pytest.fixture(scope="module")
def ours(folder) -> TextTokenizer:
    return load_text_tokenizer(folder)


@pytest.fixture(scope="module")
def theirs(folder):
    return AutoTokenizer.from_pretrained(folder)


def test_texts_have_the_ids_of_transformers(kind, ours, theirs):
    """Breaks when text is normalised, cut or merged otherwise, or bos is put before it, or not, against the family."""
    for text in TEXTS + [" ".join(TEXTS)]:
        ids = ours.encode(text)
        assert ids == theirs.encode(text, add_special_tokens=False), text
        assert not text or ours.prompt(text) == [2] * (kind == "gemma2") + ids
        assert ours.decode(ids) == theirs.decode(ids)


def rendered(theirs, turns, system: str | None = None, **options) -> list[int]:
    """The ids of the published template; an open turn of the model ends them."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    for prompt, answer in turns:
        messages.append({"role": "user", "content": prompt})
        messages += [] if answer is None else [{"role": "assistant", "content": answer}]
    opens = turns[-1][1] is None
    return theirs.apply_chat_template(messages, add_generation_prompt=opens, return_dict=False, **options)


def test_turns_are_those_of_the_chat_template(kind, ours, theirs):
    """Breaks when a turn, a newline, the system turn or a blank differs from what the model was trained with."""
    several = [("  a?\n", " b \n"), ("c", " d\n"), ("e\n\n", None)]
    for turns in (several, [("a", "b")], *([(text, None)] for text in TEXTS[:5])):
        for system in (None, "Be short.") if kind == "qwen2" else (None,):
            behind = [] if turns[-1][1] is None else ours.encode("\n")  # the template ends a turn with its line
            assert ours.chat(turns, system) + behind == rendered(theirs, turns, system)
    assert ours.end_of_turn == [theirs.convert_tokens_to_ids(MARKS[kind][1])]
    answer = [*ours.encode("yes"), *ours.end_of_turn, *ours.encode("no")]
    assert ours.decode(torch.tensor(answer)) == "yes"


@pytest.mark.parametrize("kind", ["qwen2"], indirect=True)
@pytest.mark.parametrize("file", ["chat_template.jinja", "tokenizer_config.json"])
def test_the_system_turn_is_the_models(folder, theirs, tmp_path, file):
    """Breaks when a model, such as Qwen2.5, is asked after a system text that it was not trained with."""
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(folder / name, tmp_path)
    (tmp_path / file).write_text(QWEN_2_5 if file.endswith("jinja") else json.dumps({"chat_template": QWEN_2_5}))
    for system in (None, "Be short."):
        turns = [("a", "b"), ("c", None)]
        expected = rendered(theirs, turns, system, chat_template=QWEN_2_5)
        assert load_text_tokenizer(tmp_path).chat(turns, system) == expected
    foreign = "{{ messages[0].content }}"
    (tmp_path / file).write_text(foreign if file.endswith("jinja") else json.dumps({"chat_template": foreign}))
    refused(lambda: load_text_tokenizer(tmp_path).chat(turns), "chat template")


def test_what_cannot_be_asked_is_refused(kind, ours):
    """Breaks when a text forges a turn or is cut, or a model is asked in turns that it does not have."""
    config, tokenizer = ours.config, ours.tokenizer
    small = replace(config, text=replace(config.text, vocab_size=tokenizer.vocab_size() - 1))
    forged = [*MARKS[kind], "<bos>" if kind == "gemma2" else "<|endoftext|>"]
    for call, message in (
        *((lambda piece=piece: ours.chat([(f"a {piece} b", None)]), "spells the control token") for piece in forged),
        (lambda: TextTokenizer(config, tokenizer, max_length=3).prompt("where is the dog at the gate?"), "at most 3 "),
        (lambda: TextTokenizer(config, tokenizer, max_length=9000).prompt("dog, " * 512), "at most 512 "),  # trained
        (lambda: TextTokenizer(small, tokenizer), "the tokenizer is of another model"),
        (lambda: ours.prompt("") if kind == "qwen2" else ours.chat([("a", None)], "Be short."), "has no "),
    ):
        with pytest.raises(UserError, match=message):
            call()


def test_gemmas_tokenizer_model(tmp_path):
    """Breaks when the turns of tokenizer.model are not found, or a model without such tokens is asked in turns."""
    config = LanguageConfig(TextConfig(vocab_size=2048), (1,), 0, 2)
    ours = TextTokenizer(config, Processor.from_source("embedded").tokenizer)
    assert ours.prompt("dog")[0] == 2
    with pytest.raises(UserError, match="the tokenizer has no <start_of_turn>"):
        ours.chat([("a", None)])
    train_pieces(tmp_path / "tokenizer", CORPUS, 400, [*MARKS["gemma2"], "\n", "\n\n"])
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    ours = load_text_tokenizer(tmp_path)
    pieces = [ours.tokenizer.id_to_piece(id_) for id_ in ours.chat([("where", "dog"), ("a\n\nb", None)])]
    text = "<bos><start_of_turn>user\nwhere<end_of_turn>\n<start_of_turn>model\ndog<end_of_turn>\n"
    text += "<start_of_turn>user\na\n\nb<end_of_turn>\n<start_of_turn>model\n"
    assert "".join(pieces) == text and set(MARKS["gemma2"]) < set(pieces)


# The command


def test_a_language_model_is_asked_without_a_picture(kind, folder, capsys):
    """Breaks when a prompt is not continued as the model does it, or --chat asks without the turns."""
    model, tokenizer = load_text(folder), load_text_tokenizer(folder)
    prompts, expected = ["where is the dog?", "a"], {}
    for chat in (False, True):
        expected[chat] = ask_text(model, tokenizer, prompts, 6, chat)
        rows = [tokenizer.chat([(text, None)]) if chat else tokenizer.prompt(text) for text in prompts]
        for row, text in zip(rows, expected[chat], strict=True):
            ids = list(row)
            while len(ids) < len(row) + 6 and not {ids[-1]} & {*model.config.eos_token_id, *tokenizer.end_of_turn}:
                ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
            assert text == tokenizer.decode(ids[len(row) :])
        command = ["--model", str(folder), "--prompt", *prompts, "--max-new-tokens", "6", "--json"]
        main([*command, "--chat"] if chat else command)
        answers = json.loads(capsys.readouterr().out)
        assert answers == [{"prompt": p, "answer": a} for p, a in zip(prompts, expected[chat], strict=True)]
    assert expected[True] != expected[False]
    main(["--model", str(folder), "--prompt", "a\x1b", "--max-new-tokens", "1"])
    assert capsys.readouterr().out.startswith("a\\x1b | ")


def test_mistaken_flags_are_refused(folder):
    """Breaks when a picture is silently left out, or a model of pictures is asked without one."""
    for flags in ("--image none.png", "--question a", "--draw a.png"):
        with pytest.raises(UserError, match="none.png|leave out"):
            main(["--model", str(folder), *flags.split(), "--prompt", "a"])
    for flags in ("", "--chat"):
        with pytest.raises(UserError, match="--image FILE"):
            main(["--model", "embedded", *flags.split(), "--prompt", "a"])
