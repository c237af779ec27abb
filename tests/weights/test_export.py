"""What is handed on opens in transformers by its automatic classes: the same pixels, ids and greedy
tokens as here."""

import json
import re
from dataclasses import replace

import pytest
import torch
from transformers import (
    AutoImageProcessor,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
)

import weights.export
from eval.data.scenes import sample
from lora import adapter
from model.config import PRESETS
from model.differential import fold, graft
from model.generate import generate
from model.paligemma import PaliGemma, initialize
from model.processor import Processor
from model.source import BUNDLED_FOLDER
from model.tokenizer import load_tokenizer
from tests.files import read_json, table, write_json
from tests.pieces import texts
from tests.reference import inputs_of
from tests.runs import refused, words
from weights.card import model_card
from weights.export import Origin, companions, export_model, locate, plain_tensors
from weights.load import load_model

GEMMA2 = json.loads("""{"model_type": "gemma2", "query_pre_attn_scalar": 48,
    "num_key_value_heads": 2, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
    "sliding_window": 12}""")
PROMPTS = ["answer en Where is the dog?", "detect dog", "caption en  \tétang 日本 🐮"]
SUMMARY = """{
    "before": {"vqa": 12.5, "needle": null, "vqa_details": {"per_answer_type": {"number": 7.5}}},
    "start": {"vqa": 12.5, "vqa_details": {"per_answer_type": {"number": 7.5}}},
    "held_out": {"examples": 40, "before": {"loss": 2.25}, "start": {"loss": 2.25},
        "after": {"loss": 0.75}, "best": {"loss": 0.5}, "over_blind": {"low": 3.0}}
}"""
ANSWERS = r"""{"question": "What is\n it?", "right": false}
{"question": "Is it \"red\"?<image>", "right": true}
"""


def learned(model, folder, kind):
    """A run whose adapter changes the answers, with a graft."""
    torch.manual_seed(0)
    graft(model, kind)
    adapter.inject(model, adapter.DECODER_TARGETS, 4, 8)
    for name, parameter in adapter.adapter_parameters(model).items():
        if "lora_B" in name or "w_d" in name:
            torch.nn.init.normal_(parameter, std=0.05)
        elif name.endswith("temperature"):
            torch.nn.init.constant_(parameter, 1.5)
    adapter.save(model, folder, "embedded")
    data = {"data": ["jsonl:/home/me and/a|b.jsonl"], "tasks": "vqa"}
    write_json(folder / "config.json", {"base": "embedded", "r": 4, "workers": 2, **data})
    (folder / "answers.jsonl").write_text(ANSWERS)
    (folder / "summary.json").write_text(SUMMARY)
    return folder


def random_base(folder, **text):
    """A model of random weights with the embedded tokenizer, which may answer with any id."""
    config = PRESETS["tiny"]
    model = initialize(PaliGemma(replace(config, text=replace(config.text, **text))), seed=3)
    for name, parameter in model.named_parameters():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            parameter.data *= 2
    batch = Processor.from_source("embedded")([sample("vqa", "test", 0).image], PROMPTS[:1])
    (chosen,) = generate(model, *inputs_of(batch), 1)
    rows = model.language_model.embed_tokens.weight.data
    rows[config.image_token_id] = 2 * rows[chosen]  # the largest logit, and never an answer
    export_model(model, folder, companions=companions("embedded"))
    return folder


def exported(case, tmp_path):
    """The exported folder, and the model that it must answer as."""
    source = tmp_path / "run"
    model = load_model("embedded")
    if case in ("dex", "temperature"):
        learned(model, source, case)
    elif case == "full":
        model.language_model.layers[0].mlp.down_proj.weight.data *= -1
        export_model(model, source / "model", companions=[BUNDLED_FOLDER / "tokenizer.model"])
        write_json(source / "config.json", {"base": "embedded", "data": "embedded", "full": True})
    elif case == "embedded":
        source = "embedded"
    else:
        model = load_model(random_base(source, **(GEMMA2 if case == "random2" else {})))
    weights.export.main(words(source, tmp_path / "out", "--dtype fp32"))
    return tmp_path / "out", model


@pytest.mark.parametrize("case", "embedded dex temperature full random1 random2".split())
def test_automatic_classes_answer_as_we_do(case, tmp_path):
    """Breaks when the files beside the weights mean other pixels, ids or an end of answers to
    transformers."""
    folder, model = exported(case, tmp_path)
    theirs = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager").eval()
    prepare = AutoProcessor.from_pretrained(folder)
    ours = Processor.from_source(folder)
    # a token that the processor adds would have no row
    assert max(prepare.tokenizer.get_vocab().values()) < model.config.text.vocab_size
    pictures = [sample("vqa", "test", number).image for number in range(len(PROMPTS))]
    pictures[1] = pictures[1].resize((70, 201))
    marked = [f"<image>{prompt}" for prompt in PROMPTS]
    given = {"padding": "longest", "return_tensors": "pt"}
    inputs = prepare(images=pictures, text=marked, **given)
    batch = ours(pictures, PROMPTS)
    for name in "pixel_values input_ids token_type_ids attention_mask".split():
        assert torch.equal(inputs[name], getattr(batch, name)), name
    inputs.pop("labels")
    with torch.inference_mode():
        new = theirs.generate(**inputs, max_new_tokens=12)[:, batch.input_ids.shape[1] :]
    for row, expected in zip(new, generate(model, *inputs_of(batch), 12), strict=True):
        assert row[: len(expected)].tolist() == expected.tolist()
        assert prepare.decode(row, skip_special_tokens=True) == ours.decode(expected)
    taught = prepare(images=pictures, text=marked, suffix=PROMPTS, **given)
    expected = ours(pictures, PROMPTS, PROMPTS)
    assert torch.equal(taught["labels"], expected.labels)


def test_the_shipped_tokenizer_has_the_ids_of_sentencepiece():
    """Breaks when the embedded base's tokenizer.json is not that of its tokenizer.model."""
    pieces = load_tokenizer(BUNDLED_FOLDER / "tokenizer.model")
    theirs = AutoTokenizer.from_pretrained(BUNDLED_FOLDER, tokenizer_class="GemmaTokenizer")
    theirs.add_bos_token = False
    image = pieces.vocab_size()
    assert theirs.convert_tokens_to_ids("<image>") == image == PRESETS["tiny"].image_token_id
    # may differ, see `Processor`
    by_design = re.compile(r"<(pad|eos|bos|unk|image|mask)>|\u2581| {32}|\t{32}|\n{32}")
    names = [pieces.id_to_piece(i) for i in range(image)]
    drawn = [text for text in texts(900, names) if not by_design.search(text)]
    assert len(drawn) > 200
    for text in drawn:
        assert theirs(text, add_special_tokens=False)["input_ids"] == pieces.encode(text), repr(
            text
        )


def test_the_best_step_of_whole_weights_has_its_run(tmp_path):
    """Breaks when RUN/best of `--full` gets a card without base and scores, or a foreign folder
    those of its parent."""
    for name in "run run/best run/model alone/best".split():
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
        (tmp_path / name / "config.json").write_text('{"base": "google/x"}')
    run = tmp_path / "run"
    model = str(tmp_path / "run/model")
    assert locate(str(run)) == locate(model) == Origin(model, "google/x", run=run)
    assert locate(str(run / "best")) == Origin(str(run / "best"), "google/x", run=run)
    alone = str(tmp_path / "alone/best")
    assert locate(alone) == Origin(alone, alone)


LINES = r"""license: apache-2.0
| before | vqa | 12.5 |
| before | vqa_details per_answer_type number | 7.5 |
| after | held-out loss | 0.75 |
| best | held-out loss | 0.5 |
| over_blind | held-out low | 3 |
| r | 4 |
| data | jsonl:a\|b.jsonl |"""


def test_the_card_says_what_it_was_made_of(tmp_path):
    """Breaks when a card loses base, data, scores or the prompt of published questions, tells paths
    or an untrained prompt, or a merge rounds twice."""
    model = load_model("embedded")
    learned(model, tmp_path / "run", "softmax")
    (tmp_path / "run/best").mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / "run" / name).rename(tmp_path / "run/best" / name)
    weights.export.main(words(tmp_path / "run/best", tmp_path / "out", "--dtype fp32"))
    card = (tmp_path / "out/README.md").read_text(encoding="utf-8")
    assert not set(LINES.splitlines()) - set(card.splitlines())
    assert r'text="<image>Is it \"red\"?"' in card
    assert "to its best step" in card
    assert "Trained from embedded on jsonl:a\\|b.jsonl to" in card
    assert not re.search(r"home|tasks|workers|dog|\| start", card)
    card = model_card(PRESETS["paligemma2-3b-224"], 7, "x", "google/paligemma2-x")
    assert "base_model: google/paligemma2-x\nlicense: gemma\n---\n\n# x\n\nPaliGemma 2, 7" in card
    adapter.merge(model)  # in fp32, although the base is stored in bf16
    merged = load_model(tmp_path / "out").state_dict()
    path = "language_model.layers.1.self_attn.q_proj"
    assert torch.equal(merged[f"{path}.weight"], model.state_dict()[f"{path}.base_layer.weight"])
    settings = '{"data": ["vqa:train.json"], "prompt": "{question}", "full": true, "r": 4}'
    (tmp_path / "run/config.json").write_text(settings)
    card = model_card(model.config, 7, "x", "embedded", tmp_path / "run")
    assert "\n| prompt | {question} |\n" in card
    assert "| r |" not in card


EVIL = "a`b\n# head|[x](//y)<script>\u2028license: mit\x85---\r- x\u202e"


def test_no_value_of_the_card_writes_markup(tmp_path):
    """Breaks when a name, a setting or a question in somebody's run becomes YAML, a heading, a link
    or a script of the page that its exporter uploads."""
    files = {
        "config.json": {"data": [f"jsonl:{EVIL}", "embedded"], EVIL: EVIL, "lr": [EVIL]},
        "summary.json": {"best": {EVIL: 1}, "held_out": {"blind": {EVIL: {EVIL: 2}}}},
        "answers.jsonl": {"question": EVIL, "right": True},
    }
    for name, value in files.items():
        write_json(tmp_path / name, value)
    for base in (EVIL, f"a/b{EVIL}", f"google/paligemma{EVIL}", "a/b\n"):
        card = model_card(PRESETS["tiny"], 7, EVIL, base, tmp_path)
        lines = card.splitlines()
        assert [n for n, line in enumerate(lines) if line == "---"] == [0, lines.index("---", 1)]
        assert not [line for line in lines if line.startswith(("# head", "license: mit", "- x"))]
        prose = [line for line in lines if line[:1] not in "-" and "inputs" not in line]
        assert not re.search(r"(?<!\\)[`<\[]", "\n".join(prose).partition("## Use")[0])
        assert "\u202e" not in card
        assert "base_model" not in card


DAMAGED = """
    config.json | []
    summary.json | [1]
    summary.json | {"held_out": [1]}
    summary.json | {"best": 3}
    summary.json | {"best": {"a": HUGE}}
    summary.json | {"best": DEEP}
    answers.jsonl | []
    answers.jsonl | {"question": 5, "right": true}"""
DAMAGED = DAMAGED.replace("HUGE", "1" + "0" * 400)
DAMAGED = DAMAGED.replace("DEEP", '{"a":' * 900 + "1" + "}" * 900)


@pytest.mark.parametrize("name, text", table(DAMAGED))
def test_a_damaged_file_of_a_run_is_named(name, text, tmp_path):
    """Breaks when a run's damaged file ends its export with a traceback, or in words that do not
    say where."""
    (tmp_path / name).write_text(text)
    refused(lambda: model_card(PRESETS["tiny"], 7, "x", "embedded", tmp_path), f"/{name}: ")


def test_a_stopped_run_is_exported(tmp_path):
    """Breaks when the cut last line of answers.jsonl keeps the model from being exported, or a line
    separator in a question cuts it."""
    asked = json.dumps({"question": "a\u2028b", "right": True}, ensure_ascii=False)
    (tmp_path / "answers.jsonl").write_text(f'{asked}\n{{"question": "cu', encoding="utf-8")
    assert 'text="<image>a\\u2028b"' in model_card(PRESETS["tiny"], 7, "x", "embedded", tmp_path)


def test_a_link_hands_on_no_private_file(tmp_path):
    """Breaks when the export of somebody's folder copies what a link in it points to elsewhere, or
    one of the hub's cache is refused."""
    model = load_model("embedded")
    cache = tmp_path / "models--a--b/snapshots/0f"
    for folder in (cache, tmp_path / "models--a--b/blobs", tmp_path / "in"):
        folder.mkdir(parents=True)
    private = tmp_path / "private.json"
    file = tmp_path / "in/tokenizer_config.json"
    private.write_text('{"token": "secret"}')
    (tmp_path / "chain").symlink_to(private)
    for target in (private, "../private.json", "../chain", "../in/../chain"):
        file.unlink(missing_ok=True)
        file.symlink_to(target)
        refused(lambda: companions(tmp_path / "in"), "link")
    file.unlink()
    file.symlink_to(file)  # a circle is no file
    assert companions(tmp_path / "in") == []
    refused(lambda: model_card(PRESETS["tiny"], 7, "x", "embedded", linked(tmp_path)), "link")
    (cache / "../../blobs/5e").write_text('{"a": 1}')
    (cache / "tokenizer_config.json").symlink_to("../../blobs/5e")
    (tmp_path / "alias").symlink_to(cache)
    export_model(model, tmp_path / "hub", companions=companions(tmp_path / "alias"))
    assert read_json(tmp_path / "hub" / file.name) == {"a": 1}


def linked(folder):
    """A run whose settings are a link to a private file."""
    (folder / "run").mkdir()
    (folder / "run/config.json").symlink_to(folder / "private.json")
    return folder / "run"


def test_no_code_is_handed_on_and_all_may_read(tmp_path):
    """Breaks when `auto_map` of a copied config makes transformers run code from elsewhere, or the
    weights are readable to their owner alone."""
    code = {"auto_map": {"AutoTokenizer": "evil--x.Y"}, "a": "é"}
    (tmp_path / "in").mkdir()
    for name in ("tokenizer_config.json", "processor_config.json", "preprocessor_config.json"):
        write_json(tmp_path / "in" / name, code | {"image_processor": code})
    export_model(load_model("embedded"), tmp_path / "out", companions=companions(tmp_path / "in"))
    modes = {file.stat().st_mode & 0o777 for file in (tmp_path / "out").iterdir()}
    texts_ = [file.read_text() for file in (tmp_path / "out").glob("*.json")]
    assert len(texts_) == 4
    assert len(modes) == 1
    assert not any("auto" in text for text in texts_)
    plain = {"a": "é", "image_processor": {"a": "é"}}
    assert read_json(tmp_path / "out/processor_config.json") == plain


def test_a_merge_for_bf16_rounds_once(tmp_path):
    """Breaks when `--dtype bf16` rounds weights of fp32 before an adapter is merged into them."""
    model = load_model(random_base(tmp_path / "base"))
    learned(model, tmp_path / "run", "softmax")
    flags = f"--adapter {tmp_path}/run --merge --dtype bf16"
    weights.export.main(words(tmp_path / "base", tmp_path / "out", flags))
    adapter.merge(model)
    fold(model)
    ours = load_model(tmp_path / "out", dtype=torch.bfloat16).state_dict()
    for name, tensor in plain_tensors(model).items():
        assert torch.equal(ours[name], tensor.bfloat16()), name


def test_published_files_are_copied_and_nothing_is_put_beside_them(tmp_path, warned):
    """Breaks when the files of a published folder are replaced, or it gets a second image
    processor."""
    published = {
        "processor_config.json": "{}",
        "tokenizer.json": "{}",
        "generation_config.json": "{}",
    }
    random_base(tmp_path / "in")
    for name, text in published.items():
        (tmp_path / "in" / name).write_text(text)
    weights.export.main(words(tmp_path / "in", tmp_path / "out"))
    assert {name: (tmp_path / "out" / name).read_text() for name in published} == published
    assert not (tmp_path / "out/preprocessor_config.json").exists()
    assert warned() == ""
    for name in ("tokenizer.json", "processor_config.json"):
        (tmp_path / "in" / name).unlink()
    weights.export.main(words(tmp_path / "in", tmp_path / "bare"))
    assert "AutoProcessor will not open it" in warned()
    assert AutoImageProcessor.from_pretrained(tmp_path / "bare").size == {
        "height": 112,
        "width": 112,
    }
