"""Every reader of a file against damaged and hostile ones, drawn from a seed: a result, or one
clear line; in time.

A case takes a valid file, changes its bytes, its JSON values or its kind, and opens it as the
commands do.
"""

import contextlib
import copy
import dataclasses
import json
import random
import shutil
import signal
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors import safe_open

from eval import answer, bench, needle, pope
from eval.data import mmneedle, published, records
from eval.open import last_run
from eval.question import Question
from lora import adapter
from model.common import UserError
from model.images import to_pixels
from model.masks import MaskCoder
from model.processor import Processor, load_tokenizer
from model.source import BUNDLED_FOLDER
from model.systems.configs import LanguageConfig
from tests.files import write_json, write_vqav2
from train.settings import Settings, parse
from weights.load import load_model, load_system
from weights.masks import load_mask_coder

CASES = 60  # of each reader
SECONDS = 10  # of CPU time that one case may take: a busy machine is no hang
NASTY = [
    *json.loads("""[null, true, -1, 0, 1, 1.5, -0.0, 1e308, NaN, Infinity, "<bos>", "(a+)+$", "", " ", "1", "\\u0000",
        "\\u001b[31mred", "/etc/passwd", "ﬀ\\u202e", "{question}", [], {}, [[]], [null], {"": {}}, ["a", 1],
        {"question_id": 1}]"""),
    *(2**31, 2**63, 10**400, "a" * 100_000),
]

# --- the valid files ---
VALID = {
    "run/config.json": json.dumps(dataclasses.asdict(Settings())),
    "tokenizer/tokenizer.json": """{"version": "1.0", "pre_tokenizer": null, "post_processor": null,
        "decoder": {"type": "Fuse"}, "truncation": null,
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
        "added_tokens": [{"id": 8, "content": "<x>", "special": false, "single_word": false, "lstrip": false,
            "rstrip": false, "normalized": false}],
        "model": {"type": "BPE", "merges": [["a", "b"]], "unk_token": "<unk>", "vocab": {"<pad>": 0, "<eos>": 1,
            "<bos>": 2, "<unk>": 3, "a": 4, "b": 5, "ab": 6, "\u2581": 7}}}""",
    "language/config.json": """{"model_type": "qwen2", "eos_token_id": [1], "layer_types": ["full_attention"],
        "vocab_size": 9, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 1, "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}""",
    "vqa/results.json": """[{"question_id": 1, "answer": "a", "confidence": 0.5, "ended": true},
        {"question_id": 2, "answer": "b"}]""",
    "examples/data.jsonl": """{"image": "a.png", "prefix": "what", "suffix": "this"}
{"image": "a.png", "prefix": "what", "suffix": "that"}
""",
    "llava/data.json": """[{"image": ["a.png"], "conversations": [{"from": "human", "value": "what<image>"},
        {"from": "gpt", "value": "this"}]}, {"prefix": "a", "answers": ["b", "c"]}]""",
    "coco/boxes.json": """{"images": [{"id": 1, "file_name": "a.png", "width": 8, "height": 8}],
        "annotations": [{"image_id": 1, "category_id": 1, "bbox": [1, 2, 3, 4.5], "area": 9.5, "iscrowd": 0},
            {"image_id": 1, "category_id": 1, "bbox": [1, 2, 3, 4.5], "area": 9.5, "iscrowd": 1}],
        "categories": [{"id": 1, "name": "dog"}]}""",
    "coco/masks.json": """{"images": [{"id": 1, "file_name": "a.png", "width": 8, "height": 8}],
        "annotations": [{"image_id": 1, "category_id": 1, "bbox": [1, 1, 6, 6], "area": 9.5, "iscrowd": 0,
            "segmentation": [[1, 1, 7.5, 1, 7, 7, 1, 7]]},
            {"image_id": 1, "category_id": 1, "bbox": [0, 0, 8, 8], "area": 9.5, "iscrowd": 1,
            "segmentation": {"size": [8, 8], "counts": [8, 56]}}, {"image_id": 1, "category_id": 1,
            "bbox": [0, 0, 8, 8], "segmentation": {"size": [8, 8], "counts": "8h1"}}],
        "categories": [{"id": 1, "name": "dog"}]}""",
    "pope/questions.jsonl": """{"question_id": 1, "image": "a.jpg", "text": "Is there a dog?", "label": "yes"}
{"question_id": 2, "image": "a.jpg", "text": "Is there a dog?", "label": "yes"}
""",
    "captions/captions.json": '{"a.jpg": "a dog", "b.jpg": "a cat"}',
    "gqa/gqa.json": """{"1": {"question": "Is it?", "imageId": "7", "answer": "yes", "isBalanced": true,
        "types": {"structural": "query"}}, "2": {"question": "Is it?", "imageId": "7", "answer": "yes",
        "isBalanced": true, "types": {"structural": "query"}}}""",
    "textvqa/textvqa.json": """{"data": [{"question_id": 3, "image_id": "0f", "question": "Who?",
        "answers": ["x", "y"]}]}""",
    "docvqa/docvqa.json": """{"data": [{"questionId": 3, "image": "a.png", "question": "Who?",
        "answers": ["x", "y"]}, {"questionId": 4, "image": "a.png", "question": "Who?", "answers": ["x"]}]}""",
    "chartqa/chartqa.json": """[{"imgname": "a.png", "query": "Who?", "label": "x"},
        {"imgname": "a.png", "query": "Who?", "label": "y"}]""",
    "needle/2_2.json": '{"s.jpg": {"0_0": "00.jpg", "0_1": "01.jpg", "1_0": "10.jpg", "1_1": "11.jpg"}}',
    "needle/c.json": '{"01.jpg": "a dog"}',
    "needle/a.json": """[{"id": 0, "image_ids": ["s.jpg"], "index": 0, "row": 0, "col": 1,
        "target": "01.jpg"}]""",
    "needle/responses.json": """[{"id": 0, "gt": "1, 1, 1", "response": "1, 1, 1", "target": [[0, 0, 0]],
        "ground_truth": "1, 1, 1"}]""",
    "log/answers.jsonl": '{"id": "1", "answer": "a", "mark": "f"}\n',
}
PICTURES = [f"pictures/a.{kind}" for kind in "png jpg webp gif tiff bmp ppm".split()]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder with a valid file for each of READERS."""
    root = tmp_path_factory.mktemp("files")
    for name, text in VALID.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    shutil.copytree(BUNDLED_FOLDER, root / "base")
    shutil.copytree(BUNDLED_FOLDER.parent / "tiny-mamba", root / "mamba")
    model = load_model("tiny")
    adapter.inject(model, r".*layers\.0\.self_attn\.q_proj", 2, 4.0)
    adapter.save(model, root / "lora", base="embedded")
    write_vqav2(root / "vqav2", images=3)
    for name in "npz index pictures masks".split():
        (root / name).mkdir()
    np.savez_compressed(root / "masks/coder.npz", **MaskCoder(1, 2).state_dict())
    np.savez(root / "npz/model.npz", **{"params/a": np.zeros(3, np.float32)})
    part = "model-00001-of-00001.safetensors"
    shutil.copy(BUNDLED_FOLDER / "config.json", root / "index")
    shutil.copy(BUNDLED_FOLDER / "model.safetensors", root / "index" / part)
    with safe_open(root / "index" / part, "pt") as file:
        index = {"weight_map": dict.fromkeys(file.keys(), part)}
    write_json(root / "index/model.safetensors.index.json", index)
    pixels = Image.fromarray(np.arange(16 * 16 * 3, dtype=np.uint8).reshape(16, 16, 3))
    for name in PICTURES:
        pixels.save(root / name)
    for folder in ("examples", "llava", "coco"):
        shutil.copy(root / "pictures/a.png", root / folder)
    return root


def read_log(path):
    with answer.open_log(path):
        pass


def read_pope(path):
    (path.parent / "a.jpg").touch()  # looked for, not opened
    flags = {"questions": [path], "images": path.parent, "template": "{question}"}
    pope.Pope().questions(Namespace(**flags, limit=None, probability=False))


LORA = "lora/adapter_config.json", "lora/adapter_model.safetensors"
VQAV2 = f"vqav2/{records.QUESTIONS_FILE}", f"vqav2/{records.ANNOTATIONS_FILE}"
QUESTIONS = [Question(n, "a.jpg", (), "Is there a dog?") for n in (1, 2)]
READERS: dict[str, Callable[[Path], object]] = {  # each opens its file as the commands do
    **dict.fromkeys(
        ("base/config.json", "base/model.safetensors"), lambda path: load_model(path.parent)
    ),
    "base/tokenizer.model": lambda path: Processor.from_source(path.parent),
    "index/model.safetensors.index.json": lambda path: load_model(path.parent),
    "npz/model.npz": load_model,
    "masks/coder.npz": load_mask_coder,
    "tokenizer/tokenizer.json": load_tokenizer,
    "mamba/config.json": lambda path: load_system(path.parent, "mamba"),
    "language/config.json": LanguageConfig.from_file,
    **dict.fromkeys(LORA, lambda path: adapter.load(load_model("tiny"), path.parent)),
    "run/config.json": lambda path: parse(["--resume", str(path.parent)]),
    **dict.fromkeys(VQAV2, lambda path: records.vqav2_records(path.parent)),
    "vqa/results.json": lambda path: bench.read_answers(path, QUESTIONS),
    "examples/data.jsonl": records.read_examples,
    "llava/data.json": records.read_examples,
    "coco/boxes.json": records.read_coco,
    "coco/masks.json": partial(records.read_coco, coder=MaskCoder(1, 2)),
    "pope/questions.jsonl": read_pope,
    "captions/captions.json": mmneedle.read_captions,
    "gqa/gqa.json": published.read_vqa,
    "textvqa/textvqa.json": published.read_vqa,
    **dict.fromkeys(
        ("docvqa/docvqa.json", "chartqa/chartqa.json"),
        lambda path: records.read_data(f"vqa:{path}"),
    ),
    "needle/a.json": lambda path: mmneedle.read_needle_tests(
        path.with_name("2_2.json"), path, path.with_name("c.json")
    ),
    "needle/responses.json": needle.read_responses,
    "log/answers.jsonl": read_log,
    **dict.fromkeys(PICTURES, lambda path: to_pixels(path, 28)),
}

# --- what is done to a file ---


def broken_bytes(raw, dice):
    at = dice.randrange(len(raw) + 1)
    before = raw[:at]
    after = raw[at:]
    junk = dice.randbytes(300)
    zeros = bytes(dice.choice((1, 100, 5000)))
    flipped = bytearray(raw)
    for place in range(min(len(raw), 20_000)):
        if dice.random() < 0.01:
            flipped[place] ^= 1 << dice.randrange(8)
    return dice.choice(
        (before, before + junk[:8] + after[8:], before + zeros + after, raw + after, junk, flipped)
    )


def places_of(value):
    """Each container of a JSON tree with each of its keys."""
    children = enumerate(value) if isinstance(value, list) else ()
    if isinstance(value, dict):
        children = value.items()
    for key, child in children:
        yield value, key
        yield from places_of(child)


def broken_values(value, dice):
    """The JSON tree with one to three values replaced, removed, renamed or doubled."""
    for _ in range(dice.randint(1, 3)):
        parent, key = dice.choice(list(places_of(value)) or [(None, None)])
        action = dice.randrange(4)
        if parent is None:
            return copy.deepcopy(dice.choice(NASTY))
        if action == 0 and isinstance(parent, dict):
            parent[dice.choice(("", "x" * 5000, "\x1b[2J", "__class__"))] = parent.pop(key)
        elif action == 1:
            del parent[key]
        elif action == 2 and isinstance(parent, list):
            parent.append(parent[key])
        else:
            parent[key] = copy.deepcopy(dice.choice(NASTY))
    return value


EXTREME = ["[" * 200_000, "9" * 10_000, '{"a":' * 50_000]
EXTREME += '\ufeff{}|{"a": 1, "a": 2}|\u2028|nul'.split("|")


def broken_json(raw, dice):
    lines = raw.decode().splitlines()
    number = dice.randrange(len(lines))
    with contextlib.suppress(json.JSONDecodeError):  # one value over several lines
        lines = [json.dumps(json.loads(raw))]
        number = 0
    lines[number] = json.dumps(broken_values(json.loads(lines[number]), dice))
    if dice.random() < 0.15:
        lines[number] = dice.choice(EXTREME)
    encoding = dice.choice("utf-8 utf-8 utf-8 utf-16".split())
    return "\n".join([*lines, ""]).encode(encoding, "surrogatepass")


# --- the cases ---


class TooLong(BaseException):
    """Raised by the timer; no `except Exception` of a reader may take it for a broken file."""


def expire(*_):
    raise TooLong("no end in SECONDS")


def verdict(read, path):
    """What is wrong with how `read` takes the file, None if nothing."""
    signal.signal(signal.SIGPROF, expire)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        read(path)
    except UserError as error:
        line = str(error)
        return None if line.isprintable() and len(line) < 2000 else f"a bad line: {line[:200]!r}"
    except (Exception, TooLong) as error:  # what the test is for
        return f"{type(error).__name__}: {str(error)[:200]}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return None


@pytest.mark.long
@pytest.mark.parametrize("name", READERS)
def test_a_damaged_file_opens_or_gives_one_line(name, files, tmp_path):
    """Breaks when a file that somebody else made, or a folder, ends a command with a traceback."""
    read = READERS[name]
    wrong = {}
    path = tmp_path / "files" / Path(name).name
    shutil.copytree((files / name).parent, path.parent)
    whole = path.read_bytes()
    if not name.startswith("npz"):
        read(path)  # it is valid; what it imports takes seconds
    for seed in range(CASES):
        dice = random.Random(f"{name}/{seed}")
        is_json = path.suffix in (".json", ".jsonl") and dice.random() < 0.75
        path.write_bytes((broken_json if is_json else broken_bytes)(whole, dice))
        if problem := verdict(read, path):
            wrong[seed] = f"{problem} ({path.read_bytes()[:80]!r})"
    path.unlink()
    path.mkdir()
    wrong["folder"] = verdict(read, path)
    assert not {case: problem for case, problem in wrong.items() if problem}


def test_sessions_find_the_last_run_among_broken_ones(workplace):
    """Breaks when one broken run folder keeps every command without flags from starting."""
    for number, text in enumerate(('{"base": "embedded"}', "", "[]", "{", '{"base": 1}')):
        folder = Path("runs", str(number))
        (folder / "model").mkdir(parents=True)
        (folder / "summary.json").write_text("{}")
        (folder / "config.json").write_text(text)
    assert last_run() == str(Path("runs", "0"))
