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
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors import safe_open

from eval import answer, bench, needle, pope
from eval.data import published, records
from eval.open import last_run
from eval.question import Question
from lora import adapter
from model.common import UserError
from model.images import to_pixels
from model.processor import Processor, load_tokenizer
from model.source import BUNDLED_FOLDER
from model.systems.configs import LanguageConfig
from tests.files import write_vqav2
from train.settings import Settings, parse
from weights.load import load_model, load_system

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="has no alarm")
CASES = 60  # of each reader
SECONDS = 10  # that one case may take, on a busy machine
NASTY = (
    *(
        None,
        True,
        -1,
        0,
        1,
        1.5,
        2**31,
        2**63,
        10**400,
        -0.0,
        1e308,
        float("nan"),
        float("inf"),
        "<bos>",
        "(a+)+$",
    ),
    *("", " ", "1", "\0", "\x1b[31mred", "/etc/passwd", "a" * 100_000, "ﬀ\u202e", "{question}"),
    *([], {}, [[]], [None], {"": {}}, ["a", 1], {"question_id": 1}),
)

# --- the valid files
# --------------------------------------------------------------------------------------------------

VOCABULARY = {
    piece: id_
    for id_, piece in enumerate(["<pad>", "<eos>", "<bos>", "<unk>", "a", "b", "ab", "\u2581"])
}
FLAGS = {
    "special": False,
    "single_word": False,
    "lstrip": False,
    "rstrip": False,
    "normalized": False,
}
TOKENIZER = {
    "version": "1.0",
    "pre_tokenizer": None,
    "post_processor": None,
    "decoder": {"type": "Fuse"},
}
TOKENIZER |= {
    "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
    "truncation": None,
}
TOKENIZER |= {"added_tokens": [{"id": 8, "content": "<x>"} | FLAGS]}
TOKENIZER |= {
    "model": {"type": "BPE", "vocab": VOCABULARY, "merges": [["a", "b"]], "unk_token": "<unk>"}
}
LANGUAGE = {
    "model_type": "llama",
    "eos_token_id": [1],
    "layer_types": ["full_attention"],
    "vocab_size": 9,
}
LANGUAGE |= {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
LANGUAGE["rope_parameters"] = {"rope_theta": 1e6, "rope_type": "llama3", "factor": 8.0}
LANGUAGE["rope_parameters"] |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
LANGUAGE["rope_parameters"]["original_max_position_embeddings"] = 40
EXAMPLE = {"image": "a.png", "prefix": "what", "suffix": "this"}
TURNS = [{"from": "human", "value": "what<image>"}, {"from": "gpt", "value": "this"}]
BOXES = [
    {"image_id": 1, "category_id": 1, "bbox": [1, 2, 3, 4.5], "area": 9.5, "iscrowd": i}
    for i in (0, 1)
]
IMAGES = [{"id": 1, "file_name": "a.png", "width": 8, "height": 8}]
POPE = [
    {"question_id": n, "image": "a.jpg", "text": "Is there a dog?", "label": "yes"} for n in (1, 2)
]
GQA = {
    "question": "Is it?",
    "imageId": "7",
    "answer": "yes",
    "isBalanced": True,
    "types": {"structural": "query"},
}
TEXTVQA = {"question_id": 3, "image_id": "0f", "question": "Who?", "answers": ["x", "y"]}
GRID = {f"{row}_{col}": f"{row}{col}.jpg" for row in (0, 1) for col in (0, 1)}
NEEDLE = {"id": 0, "image_ids": ["s.jpg"], "index": 0, "row": 0, "col": 1, "target": "01.jpg"}
RESPONSE = {
    "id": 0,
    "gt": "1, 1, 1",
    "response": "1, 1, 1",
    "target": [[0, 0, 0]],
    "ground_truth": "1, 1, 1",
}
JSON = {  # a list in .jsonl has a line for each value
    "tokenizer/tokenizer.json": TOKENIZER,
    "language/config.json": LANGUAGE,
    "run/config.json": dataclasses.asdict(Settings()),
    "vqa/results.json": [{"question_id": 1, "answer": "a"}, {"question_id": 2, "answer": "b"}],
    "examples/data.jsonl": [EXAMPLE, EXAMPLE | {"suffix": "that"}],
    "llava/data.json": [
        {"image": ["a.png"], "conversations": TURNS},
        {"prefix": "a", "answers": ["b", "c"]},
    ],
    "coco/boxes.json": {
        "images": IMAGES,
        "annotations": BOXES,
        "categories": [{"id": 1, "name": "dog"}],
    },
    "pope/questions.jsonl": POPE,
    "captions/captions.json": {"a.jpg": "a dog", "b.jpg": "a cat"},
    "gqa/gqa.json": {"1": GQA, "2": GQA},
    "textvqa/textvqa.json": {"data": [TEXTVQA]},
    "needle/2_2.json": {"s.jpg": GRID},
    "needle/c.json": {"01.jpg": "a dog"},
    "needle/a.json": [NEEDLE],
    "needle/responses.json": [RESPONSE],
    "log/answers.jsonl": [{"id": "1", "answer": "a", "mark": "f"}],
}


PICTURES = [f"pictures/a.{kind}" for kind in ("png", "jpg", "webp", "gif", "tiff", "bmp", "ppm")]


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    """A folder with a valid file for each of READERS."""
    root = tmp_path_factory.mktemp("files")
    for name, value in JSON.items():
        lines = value if name.endswith(".jsonl") else [value]
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(
            "".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8"
        )
    shutil.copytree(BUNDLED_FOLDER, root / "base")
    shutil.copytree(BUNDLED_FOLDER.parent / "tiny-mamba", root / "mamba")
    model = load_model("tiny")
    adapter.inject(model, r".*layers\.0\.self_attn\.q_proj", 2, 4.0)
    adapter.save(model, root / "lora", base="embedded")
    write_vqav2(root / "vqav2", images=3)
    for name in ("npz", "index", "pictures"):
        (root / name).mkdir()
    np.savez(root / "npz/model.npz", **{"params/a": np.zeros(3, np.float32)})
    part = "model-00001-of-00001.safetensors"
    shutil.copy(BUNDLED_FOLDER / "config.json", root / "index")
    shutil.copy(BUNDLED_FOLDER / "model.safetensors", root / "index" / part)
    with safe_open(root / "index" / part, "pt") as file:
        index = {"weight_map": dict.fromkeys(file.keys(), part)}
    (root / "index/model.safetensors.index.json").write_text(json.dumps(index))
    pixels = Image.fromarray(np.arange(16 * 16 * 3, dtype=np.uint8).reshape(16, 16, 3))
    for name in PICTURES:
        pixels.save(root / name)
    for folder in ("examples", "llava", "coco"):
        shutil.copy(root / "pictures/a.png", root / folder)
    return root


def read_log(path: Path) -> None:
    with answer.open_log(path):
        pass


def read_pope(path: Path) -> None:
    (path.parent / "a.jpg").touch()  # looked for, not opened
    flags = Namespace(
        questions=[path], images=path.parent, template="{question}", limit=None, probability=False
    )
    pope.Pope().questions(flags)


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
    "pope/questions.jsonl": read_pope,
    "captions/captions.json": published.read_captions,
    "gqa/gqa.json": published.read_vqa,
    "textvqa/textvqa.json": published.read_vqa,
    "needle/a.json": lambda path: published.read_needle_tests(
        path.with_name("2_2.json"), path, path.with_name("c.json")
    ),
    "needle/responses.json": needle.read_responses,
    "log/answers.jsonl": read_log,
    **dict.fromkeys(PICTURES, lambda path: to_pixels(path, 28)),
}

# --- what is done to a file
# -------------------------------------------------------------------------------------------


def broken_bytes(raw: bytes, dice: random.Random) -> bytes:
    at, junk, zeros = (
        dice.randrange(len(raw) + 1),
        dice.randbytes(300),
        bytes(dice.choice((1, 100, 5000))),
    )
    flipped = (
        bytes(byte ^ (dice.random() < 0.01) << dice.randrange(8) for byte in raw[:20_000])
        + raw[20_000:]
    )
    before, after = raw[:at], raw[at:]
    return dice.choice(
        (before, before + junk[:8] + after[8:], before + zeros + after, raw + after, junk, flipped)
    )


def places_of(value) -> Iterator[tuple]:
    """Each container of a JSON tree with each of its keys."""
    children = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, child in children:
        yield value, key
        yield from places_of(child)


def broken_values(value, dice: random.Random):
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


def broken_json(raw: bytes, dice: random.Random) -> bytes:
    lines = raw.decode().splitlines()
    number = dice.randrange(len(lines))
    with contextlib.suppress(json.JSONDecodeError):  # one value over several lines
        lines, number = [json.dumps(json.loads(raw))], 0
    lines[number] = json.dumps(broken_values(json.loads(lines[number]), dice))
    if dice.random() < 0.15:
        extreme = (
            "[" * 200_000,
            "9" * 10_000,
            '{"a":' * 50_000,
            "\ufeff{}",
            '{"a": 1, "a": 2}',
            "\u2028",
            "nul",
        )
        lines[number] = dice.choice(extreme)
    return "\n".join([*lines, ""]).encode(
        dice.choice(("utf-8", "utf-8", "utf-8", "utf-16")), "surrogatepass"
    )


# --- the cases
# --------------------------------------------------------------------------------------------------------


class TooLong(BaseException):
    """Raised by the alarm; no `except Exception` of a reader may take it for a broken file."""


def expire(number, frame):
    raise TooLong(f"no end after {SECONDS} s")


def verdict(read: Callable[[Path], object], path: Path) -> str | None:
    """What is wrong with how `read` takes the file, None if nothing."""
    before = signal.signal(signal.SIGALRM, expire)
    signal.alarm(SECONDS)
    try:
        read(path)
    except UserError as error:
        return (
            None
            if str(error).isprintable() and len(str(error)) < 2000
            else f"a bad line: {str(error)[:200]!r}"
        )
    except (Exception, TooLong) as error:  # what the test is for
        return f"{type(error).__name__}: {str(error)[:200]}"
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    return None


@pytest.mark.long
@pytest.mark.parametrize("name", READERS)
def test_a_damaged_file_opens_or_gives_one_line(name, files, tmp_path):
    """Breaks when a file that somebody else made, or a folder, ends a command with a traceback."""
    read, wrong, path = READERS[name], {}, tmp_path / "files" / Path(name).name
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


def test_sessions_find_the_last_run_among_broken_ones(tmp_path, monkeypatch):
    """Breaks when one broken run folder keeps every command without flags from starting."""
    monkeypatch.chdir(tmp_path)
    for number, text in enumerate(('{"base": "embedded"}', "", "[]", "{", '{"base": 1}')):
        folder = Path("runs", str(number))
        (folder / "model").mkdir(parents=True)
        (folder / "summary.json").write_text("{}")
        (folder / "config.json").write_text(text)
    assert last_run() == str(Path("runs", "0"))
