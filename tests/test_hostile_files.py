"""Every reader of a file against damaged and hostile ones, drawn from a seed: a result, or one clear line; in time.

A case takes a valid file, changes its bytes, its JSON values or its kind, and opens it as the commands do. It may
open, or raise UserError with one printable line. Anything else is a bug: another exception, a line with control
characters in it, or a reader that does not come to an end.
"""

import contextlib
import copy
import json
import random
import shutil
import signal
import sys
import tarfile
from collections.abc import Callable, Iterator
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from PIL import Image
from safetensors import safe_open

from eval import answer, bench, data, needle_scoring, own_files, records
from eval.open import last_run
from eval.question import Question
from lora import adapter
from model.common import UserError
from model.images import load_image, to_pixels
from model.processor import Processor, load_tokenizer
from model.source import BUNDLED_FOLDER
from model.system_configs import LanguageConfig
from tests.files import write_vqav2
from train.data import shards
from train.settings import parse
from weights.load import load_mamba, load_model

resource = pytest.importorskip("resource")  # not on Windows
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits of time and memory are Linux's")

CASES = 60  # of each reader
KINDS = ("png", "jpg", "webp", "gif", "tiff", "bmp", "ppm")  # of pictures
SECONDS = 10  # that one case may take, on a busy machine
MEMORY = 3 << 30  # bytes that one case may take
NASTY = (
    *(None, True, -1, 0, 1, 1.5, 2**31, 2**63, 10**400, -0.0, 1e308, float("nan"), float("inf")),
    *("", " ", "1", "\0", "\x1b[31mred", "../../../etc/passwd", "/etc/passwd", "a" * 100_000, "ﬀ\u202e"),
    *("<bos>", "{question}", "(a+)+$"),
    *([], {}, [[]], [None], {"": {}}, ["a", 1], {"question_id": 1}),
)


class Reader(NamedTuple):
    """`write(folder)` makes a valid file and returns its path; `open(path)` reads it as the commands do."""

    write: Callable[[Path], Path]
    open: Callable[[Path], object]


def json_file(name: str, *values) -> Callable[[Path], Path]:
    """A JSON file; several values, or a name that ends in .jsonl: one on each line."""

    def write(folder: Path) -> Path:
        end = "\n" if len(values) > 1 or name.endswith(".jsonl") else ""
        (folder / name).write_text("".join(json.dumps(value) + end for value in values), encoding="utf-8")
        return folder / name

    return write


def part_of(make: Callable[[Path], object], name: str) -> Callable[[Path], Path]:
    """The file `name` of all that `make` writes."""

    def write(folder: Path) -> Path:
        make(folder)
        return folder / name

    return write


def base(folder: Path) -> None:
    shutil.copytree(BUNDLED_FOLDER, folder, dirs_exist_ok=True)


def mamba(folder: Path) -> None:
    shutil.copytree(BUNDLED_FOLDER.parent / "tiny-mamba", folder, dirs_exist_ok=True)


def update(folder: Path) -> None:
    model = load_model("tiny")
    adapter.inject(model, r".*layers\.0\.self_attn\.q_proj", 2, 4.0)
    adapter.save(model, folder, base="embedded")


def vqav2(folder: Path) -> None:
    write_vqav2(folder, images=3)


def example_file(folder: Path) -> Path:
    Image.new("RGB", (8, 8)).save(folder / "a.png")
    example = {"image": "a.png", "prefix": "what", "suffix": "this"}
    return json_file("data.jsonl", example, example | {"suffix": "that"})(folder)


def conversation_file(folder: Path) -> Path:
    example_file(folder)
    turns = [{"from": role, "value": f"{role}<image>"[: 5 + 7 * (role == "human")]} for role in ("human", "gpt")]
    entries = [{"image": ["a.png"], "conversations": turns}, {"prefix": "a", "answers": ["b", "c"]}]
    return json_file("data.json", entries)(folder)


def boxes_file(folder: Path) -> Path:
    example_file(folder)
    boxes = [{"image_id": 1, "category_id": 1, "bbox": [1, 2, 3, 4.5], "area": 9.5, "iscrowd": i} for i in (0, 1)]
    images = [{"id": 1, "file_name": "a.png", "width": 8, "height": 8}]
    coco = {"images": images, "annotations": boxes, "categories": [{"id": 1, "name": "dog"}]}
    return json_file("boxes.json", coco)(folder)


def shard_file(folder: Path) -> Path:
    picture = BytesIO()
    Image.new("RGB", (8, 8)).save(picture, "PNG")
    with tarfile.open(folder / "data-000.tar", "w") as tar:
        for number in range(3):
            texts = json.dumps({"prefix": "what", "suffix": str(number)}).encode()
            for name, data in ((f"{number}.png", picture.getvalue()), (f"{number}.json", texts)):
                member = tarfile.TarInfo(name)
                member.size = len(data)
                tar.addfile(member, BytesIO(data))
    return folder / "data-000.tar"


def read_shard(path: Path) -> None:
    for record in shards.Shards(str(path)):
        load_image(record.pictures[0]())


def picture(folder: Path) -> None:
    pixels = np.arange(16 * 16 * 3, dtype=np.uint8).reshape(16, 16, 3)
    for kind in KINDS:
        Image.fromarray(pixels).save(folder / f"picture.{kind}")


def read_log(path: Path) -> None:
    with answer.open_log(path) as file:
        answer.read_log(file, path)


def npz_file(folder: Path) -> Path:
    np.savez(folder / "model.npz", **{"params/a": np.zeros(3, np.float32)})
    return folder / "model.npz"


def index_file(folder: Path) -> Path:
    name = "model-00001-of-00001.safetensors"
    shutil.copy(BUNDLED_FOLDER / "config.json", folder)
    shutil.copy(BUNDLED_FOLDER / "model.safetensors", folder / name)
    with safe_open(folder / name, "pt") as file:
        weight_map = dict.fromkeys(file.keys(), name)
    return json_file("model.safetensors.index.json", {"weight_map": weight_map})(folder)


def question(number: int) -> dict:
    return {"question_id": number, "image": "a.jpg", "text": "Is there a dog?", "label": "yes"}


TOKENIZER = {"version": "1.0", "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}}
TOKENIZER |= {"pre_tokenizer": None, "post_processor": None, "decoder": {"type": "Fuse"}, "truncation": None}
VOCABULARY = {piece: id_ for id_, piece in enumerate(["<pad>", "<eos>", "<bos>", "<unk>", "a", "b", "ab", "\u2581"])}
FLAGS = {"special": False, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
TOKENIZER |= {"added_tokens": [{"id": 8, "content": "<x>"} | FLAGS]}
TOKENIZER |= {"model": {"type": "BPE", "vocab": VOCABULARY, "merges": [["a", "b"]], "unk_token": "<unk>"}}


def needle_file(folder: Path) -> Path:
    json_file("2_2.json", {"s.jpg": {f"{row}_{col}": f"{row}{col}.jpg" for row in (0, 1) for col in (0, 1)}})(folder)
    json_file("c.json", {"01.jpg": "a dog"})(folder)
    test = {"id": 0, "image_ids": ["s.jpg"], "index": 0, "row": 0, "col": 1, "target": "01.jpg"}
    return json_file("annotations_1_2_2.json", [test])(folder)


GQA = {"question": "Is it?", "imageId": "7", "answer": "yes", "isBalanced": True, "types": {"structural": "query"}}
TEXTVQA = {"question_id": 3, "image_id": "0f", "question": "Who?", "answers": ["x", "y"]}
RUN_CONFIG = {"base": "embedded", "data": "embedded", "lr": 1e-3, "steps": 3, "option": []}
LANGUAGE_CONFIG = {"model_type": "qwen2", "eos_token_id": [1], "layer_types": ["full_attention"], "vocab_size": 9}
LANGUAGE_CONFIG |= {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
LANGUAGE_CONFIG |= {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}
RESPONSE = {"id": 0, "gt": "1, 1, 1", "response": "1, 1, 1", "target": [[0, 0, 0]], "ground_truth": "1, 1, 1"}
READERS = {
    "config.json": Reader(part_of(base, "config.json"), lambda path: load_model(path.parent)),
    "tensors": Reader(part_of(base, "model.safetensors"), lambda path: load_model(path.parent)),
    "tensors' index": Reader(index_file, lambda path: load_model(path.parent)),
    "npz": Reader(npz_file, load_model),
    "tokenizer.model": Reader(part_of(base, "tokenizer.model"), lambda path: Processor.from_source(path.parent)),
    "config of the processor": Reader(part_of(base, "config.json"), lambda path: Processor.from_source(path.parent)),
    "tokenizer.json": Reader(
        json_file("tokenizer.json", TOKENIZER), lambda path: load_tokenizer(path).encode("a b<x>")
    ),
    "Mamba's config.json": Reader(part_of(mamba, "config.json"), lambda path: load_mamba(path.parent)),
    "config.json of a language model": Reader(json_file("config.json", LANGUAGE_CONFIG), LanguageConfig.from_file),
    "adapter_config.json": Reader(
        part_of(update, "adapter_config.json"), lambda path: adapter.load(load_model("tiny"), path.parent)
    ),
    "adapter's tensors": Reader(
        part_of(update, "adapter_model.safetensors"), lambda path: adapter.load(load_model("tiny"), path.parent)
    ),
    "run's config.json": Reader(
        json_file("config.json", RUN_CONFIG), lambda path: parse(["--resume", str(path.parent)])
    ),
    "VQAv2 questions": Reader(
        part_of(vqav2, records.QUESTIONS_FILE), lambda path: records.vqav2_records(path.parent, "answer {question}")
    ),
    "VQAv2 annotations": Reader(
        part_of(vqav2, records.ANNOTATIONS_FILE), lambda path: records.vqav2_records(path.parent, "answer {question}")
    ),
    "VQA results": Reader(
        json_file("results.json", [{"question_id": 1, "answer": "a"}, {"question_id": 2, "answer": "b"}]),
        lambda path: bench.read_answers(path, [Question(n, "", (), "?") for n in (1, 2)]),
    ),
    "JSON lines": Reader(example_file, records.own_records),
    "conversations": Reader(conversation_file, records.own_records),
    "COCO's boxes": Reader(boxes_file, partial(records.own_records, read=own_files.read_coco)),
    "POPE questions": Reader(json_file("pope.json", question(1), question(2)), data.read_pope),
    "POPE answers": Reader(
        json_file("answers.json", question(1) | {"answer": "yes"}),
        lambda path: bench.read_answers(path, [Question(1, "a.jpg", (), "Is there a dog?")]),
    ),
    "captions": Reader(json_file("captions.json", {"a.jpg": "a dog", "b.jpg": "a cat"}), data.read_captions),
    "GQA": Reader(json_file("gqa.json", {"1": GQA, "2": GQA}), data.read_layout),
    "TextVQA": Reader(json_file("textvqa.json", {"data": [TEXTVQA]}), data.read_layout),
    "needle tests": Reader(
        needle_file, lambda path: data.read_needle_tests(path.with_name("2_2.json"), path, path.with_name("c.json"))
    ),
    "needle responses": Reader(json_file("responses.json", [RESPONSE]), needle_scoring.read_responses),
    "log of answers": Reader(json_file("answers.jsonl", {"id": "1", "answer": "a", "mark": "f"}), read_log),
    "tar shard": Reader(shard_file, read_shard),
    **{
        f"picture.{kind}": Reader(part_of(picture, f"picture.{kind}"), lambda path: to_pixels(load_image(path), 28))
        for kind in KINDS
    },
}


# --- what is done to a file ------------------------------------------------------------------------------------------


def broken_bytes(raw: bytes, dice: random.Random) -> bytes:
    at = dice.randrange(len(raw) + 1)
    return dice.choice(
        (
            lambda: raw[:at],
            lambda: b"",
            lambda: raw[:at] + dice.randbytes(8) + raw[at + 8 :],
            lambda: raw[:at] + bytes(dice.choice((1, 100, 5000))) + raw[at:],
            lambda: raw + raw[at:],
            lambda: b"\xef\xbb\xbf" + raw,
            lambda: dice.randbytes(300),
            lambda: bytes(byte ^ (dice.random() < 0.01) << dice.randrange(8) for byte in raw[:20_000]) + raw[20_000:],
        )
    )()


def paths_of(value, path: tuple = ()) -> Iterator[tuple]:
    """The path of every value in a JSON tree."""
    yield path
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield from paths_of(child, (*path, key))


def broken_values(value, dice: random.Random):
    """The JSON tree with one to three values replaced, removed, renamed or doubled."""
    value = json.loads(json.dumps(value))
    for _ in range(dice.randint(1, 3)):
        *way, last = dice.choice([path for path in paths_of(value) if path] or [(None,)])
        if last is None:
            return copy.deepcopy(dice.choice(NASTY))
        parent = value
        for key in way:
            parent = parent[key]
        action = dice.randrange(4)
        if action == 0 and isinstance(parent, dict):
            parent[dice.choice(("", "x" * 5000, "\x1b[2J", "__class__"))] = parent.pop(last)
        elif action == 1:
            del parent[last]
        elif action == 2 and isinstance(parent, list):
            parent.append(parent[last])
        else:
            parent[last] = copy.deepcopy(dice.choice(NASTY))
    return value


def broken_json(raw: bytes, dice: random.Random) -> bytes:
    lines = raw.decode().splitlines() if raw.count(b"\n") > 1 and raw.startswith(b'{"') else [raw.decode()]
    number = dice.randrange(len(lines))
    try:
        lines[number] = json.dumps(broken_values(json.loads(lines[number]), dice))
    except json.JSONDecodeError:  # one value over several lines
        lines = [json.dumps(broken_values(json.loads(raw), dice))]
    extreme = ("[" * 200_000, "9" * 10_000, '{"a":' * 50_000, "\ufeff{}", '{"a": 1, "a": 2}', "\u2028", "nul")
    if dice.random() < 0.15:
        lines[min(number, len(lines) - 1)] = dice.choice(extreme)
    return "\n".join([*lines, ""]).encode(dice.choice(("utf-8", "utf-8", "utf-8", "utf-16")), "surrogatepass")


def damage(path: Path, dice: random.Random) -> None:
    raw = path.read_bytes()
    is_json = path.suffix in (".json", ".jsonl")
    path.write_bytes((broken_json if is_json and dice.random() < 0.75 else broken_bytes)(raw, dice))


# --- the cases -------------------------------------------------------------------------------------------------------


class TooLong(BaseException):
    """Raised by the alarm; no `except Exception` of a reader may take it for a broken file."""


@contextlib.contextmanager
def limits(seconds: int) -> Iterator[None]:
    def expire(number, frame):
        raise TooLong

    before = signal.signal(signal.SIGALRM, expire)
    before_memory = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    # an endless file must not take the machine
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, before_memory[1]))
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        resource.setrlimit(resource.RLIMIT_AS, before_memory)
        signal.signal(signal.SIGALRM, before)


def verdict(reader: Reader, path: Path) -> str | None:
    """What is wrong with how `reader` takes the file, None if nothing."""
    try:
        with limits(SECONDS):
            reader.open(path)
    except UserError as error:
        line = str(error)
        if not line.isprintable():
            return f"a line that is not printable: {line[:200]!r}"
        return f"a line of {len(line)} characters: {line[:200]}" if len(line) > 2000 else None
    except TooLong:
        return f"no end after {SECONDS} s"
    except (Exception, MemoryError) as error:  # what the test is for
        return f"{type(error).__name__}: {str(error)[:200]}"
    return None


@pytest.mark.long
@pytest.mark.parametrize("name", READERS)
def test_a_damaged_file_opens_or_gives_one_line(name, tmp_path):
    """Breaks when a file that somebody else made, or a folder or a broken link, ends a command with a traceback."""
    reader, wrong = READERS[name], {}
    path = reader.write(tmp_path)
    whole = path.read_bytes()
    with contextlib.suppress(UserError):
        reader.open(path)  # what it imports takes seconds
    for seed in range(CASES):
        path.write_bytes(whole)
        damage(path, random.Random(f"{name}/{seed}"))
        if problem := verdict(reader, path):
            wrong[seed] = f"{problem} ({path.read_bytes()[:80]!r})"
    path.unlink()
    path.mkdir()
    wrong["folder"] = verdict(reader, path)
    path.rmdir()
    for target in (tmp_path / "nothing", path):
        path.symlink_to(target)
        wrong[f"link to {target.name}"] = verdict(reader, path)
        path.unlink()
    assert not {case: problem for case, problem in wrong.items() if problem}


def test_sessions_find_the_last_run_among_broken_ones(tmp_path, monkeypatch):
    """Breaks when one broken run folder keeps every command without flags from starting."""
    monkeypatch.chdir(tmp_path)
    for number, text in enumerate(('{"base": "embedded"}', "", "[]", "{", '{"base": 1}', "\ud800")):
        folder = tmp_path / "runs" / str(number)
        folder.mkdir(parents=True)
        (folder / "summary.json").write_text("{}")
        (folder / "config.json").write_text(text, encoding="utf-8", errors="surrogatepass")
    (tmp_path / "runs" / "0" / "model").mkdir()
    assert last_run() == str(Path("runs", "0"))
