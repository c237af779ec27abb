"""The tokenizers of Gemma, Qwen and Llama and their turns: ids equal those of transformers and its chat
template."""

import json
import shutil
from dataclasses import replace
from functools import partial

import pytest
from transformers import AutoTokenizer

from eval import ask
from model.systems import chat
from model.systems.chat import TextTokenizer, ask_text, load_text_tokenizer
from tests.files import read_json, write_json
from tests.pieces import TEXTS, language_folder
from tests.runs import refused, refuses
from weights.load import load_text

# as published with gemma-2-2b-it and Qwen2-7B-Instruct, without checks of the roles
GEMMA = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = "
    "message['role'] %}"
    "{% endif %}{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' "
    "}}{% endfor %}"
    "{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"
)
QWEN = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% "
    "endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# a Llama that is asked in ChatML, as SmolLM2-Instruct, and after bos
LLAMA = "{{ bos_token }}" + QWEN.replace("assistant.", "AI assistant named SmolLM")
TEMPLATES = {"gemma2": GEMMA, "llama": LLAMA, "qwen2": QWEN}
CHATML = ["<|im_start|>", "<|im_end|>"]
MARKS = {"gemma2": ["<start_of_turn>", "<end_of_turn>"], "llama": CHATML, "qwen2": CHATML}
TURNS = "{% for message in messages %}" + QWEN.partition("{% endif %}")[2]
# templates, as of Hermes and of Qwen2.5-Math, of which ours are not the turns of the last ones
WRITTEN = r"""TURNS
{{ bos_token }}TURNS
{{ '<|im_start|>system\nAnswer in \\boxed{}.<|im_end|>\n' }}TURNS
{{ messages[0].content }}
{{ raise }}{{ raise.at.all }}TURNS
{{ '<|im_start|>tool\n<|im_end|>\n' }}TURNS
TURNS<think>"""
WRITTEN = [line.replace("TURNS", TURNS) for line in WRITTEN.splitlines()]


@pytest.fixture(scope="module", params=TEMPLATES)
def folder(request, tmp_path_factory):
    """A random model and its tokenizer, as the hub has them."""
    kind = request.param
    folder = tmp_path_factory.mktemp("chat") / kind
    tokenizer = language_folder(folder, kind, 512, [*MARKS[kind], "<|fim|>"])
    tokenizer.chat_template = TEMPLATES[kind]
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def both(folder):
    """Our tokenizer and that of transformers."""
    return load_text_tokenizer(folder), AutoTokenizer.from_pretrained(folder)


def rendered(theirs, turns, **options):
    """The ids of the published template; an open turn of the model ends them."""
    messages = []
    for asked, said in turns:
        messages.append({"role": "user", "content": asked})
        if said is not None:
            messages.append({"role": "assistant", "content": said})
    is_open = len(messages) % 2 == 1
    template = partial(theirs.apply_chat_template, add_generation_prompt=is_open, **options)
    return template(messages)["input_ids"]


def test_texts_and_turns_have_the_ids_of_transformers(both):
    """Breaks when text is normalised, cut or merged otherwise, or bos, a turn, a newline or a blank
    is another."""
    ours, theirs = both
    for text in TEXTS + [" ".join(TEXTS), "a<|fim|>b"]:
        ids = ours.encode(text)
        assert ids == theirs.encode(text, add_special_tokens=False), text
        begun = [2, *ids] if ours.is_gemma else theirs.encode(text)
        assert ours.prompt(text) == begun, text
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True), text
    several = [("  a?\n", " b \n"), ("c", " d\n"), ("e\n\n", None)]
    for turns in (several, [("a", "b")], *([(text, None)] for text in TEXTS[:5])):
        # the template ends a turn with its line
        behind = [] if turns[-1][1] is None else ours.encode("\n")
        assert ours.conversation(turns)[0] + behind == rendered(theirs, turns)
    assert ours.decode([*ours.encode("yes"), *ours.end_of_turn, *ours.encode("no")]) == "yes"


def test_the_turns_are_those_of_the_template(folder, both, tmp_path):
    """Breaks when a model is asked after a system text, or in turns, that it was not trained with."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "chat_template.jinja").unlink()
    file = tmp_path / "tokenizer_config.json"
    config = read_json(file)
    turns = [("a", "b"), (" c", None)]
    for number, template in enumerate(WRITTEN):
        for told in (template, [{"name": "default", "template": template}]):
            write_json(file, config | {"chat_template": told})
            ours = load_text_tokenizer(tmp_path)
            if number > 2 or ours.is_gemma:
                refused(partial(ours.conversation, turns), "chat template")
                continue
            assert ours.conversation(turns)[0] == rendered(both[1], turns, chat_template=template)
    # a mark that takes the line break behind it is another tokenizer's
    write_json(file, config | {"chat_template": WRITTEN[0]})
    whole = tmp_path / "tokenizer.json"
    whole.write_text(whole.read_text().replace('"rstrip": false', '"rstrip": true'))
    refused(partial(load_text_tokenizer(tmp_path).conversation, turns), "chat template")


def test_what_cannot_be_asked_is_refused(both):
    """Breaks when a text forges a turn or is cut, or a model is asked in turns that it does not
    have."""
    ours, _ = both
    config, tokenizer = ours.config, ours.tokenizer
    mark = MARKS[config.text.model_type][0]
    refused(lambda: ours.prompt(f"a {mark} b", chat=True), "control token")
    long = TextTokenizer(config, tokenizer, max_length=9000)
    refused(lambda: long.prompt("dog, " * 512), "512")  # trained
    small = replace(config, text=replace(config.text, vocab_size=tokenizer.vocab_size() - 1))
    refused(lambda: TextTokenizer(small, tokenizer), "another model")


def test_a_language_model_is_asked_without_a_picture(folder, printed, monkeypatch):
    """Breaks when a prompt is not continued as the model does it, or --chat asks without the
    turns."""
    model = load_text(folder)
    tokenizer = load_text_tokenizer(folder)
    answers = {}
    for flag in ("--json", "--json --chat"):
        ask.main(f"--model {folder} --prompt dog? a --max-new-tokens 6 {flag}".split())
        answers[flag] = json.loads(printed())
        sure = []
        said = ask_text(model, tokenizer, ["dog?", "a"], 6, "chat" in flag, sure=sure)
        assert answers[flag] == [
            {"prompt": "dog?", "answer": said[0], "confidence": sure[0].confidence},
            {"prompt": "a", "answer": said[1], "confidence": sure[1].confidence},
        ]
        alone = [ask_text(model, tokenizer, [text], 6, "chat" in flag)[0] for text in ("dog?", "a")]
        assert said == alone
        monkeypatch.setattr(chat, "generate_texts", lambda *_, also_end, **__: also_end)
        assert ask_text(model, tokenizer, ["dog?"]) == tokenizer.end_of_turn  # as `decode`
        monkeypatch.undo()
    assert answers["--json"] != answers["--json --chat"]
    refuses(ask, f"--model {folder} --draw a.png --prompt a", "--draw")
    refuses(ask, "--model embedded --chat --prompt a", "--image")
