"""Training data that is damaged: one bad record is named and left out, and a file of nothing else is refused."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from eval.records import read_examples, split_records
from model.common import UserError
from model.processor import Processor
from tests.files import write_vqav2
from train.data.batches import Order
from train.data.sources import read_records
from train.settings import parse

GOOD = {"image": "a.png", "prefix": "caption en", "suffix": "a cat"}


def line(**changes) -> bytes:
    return json.dumps(GOOD | changes).encode()


def write_lines(folder: Path, *lines: bytes) -> Path:
    Image.new("RGB", (9, 9)).save(folder / "a.png")
    (folder / "own.jsonl").write_bytes(b"\n".join(lines))
    return folder / "own.jsonl"


BAD_LINES = {
    "cut": b'{"image": "a.png", "prefix"',
    "no object": b'["a.png"]',
    "depth": b"[" * 100_000,
    "not UTF-8": b'{"image": "a.png", "prefix": "\xff", "suffix": "b"}',
    "type": line(suffix=3),
    "control token": line(suffix="a <eos>"),
    "long suffix": line(suffix="cat " * 9000),
    "absent picture": line(image="b.png"),
    "escape": line(image="\x1b[31mred\x1b[0m\n.png"),
}


@pytest.mark.parametrize("name", BAD_LINES)
def test_one_bad_line_is_named_and_left_out(name, tmp_path):
    """Breaks when one line of a user's file ends the run, or disappears without a word."""
    file = write_lines(tmp_path, b"\xef\xbb\xbf" + line(), BAD_LINES[name], b"", line(suffix="a dog"))
    processor = Processor.from_source("embedded", max_length=8192)
    (micro,) = next(Order(read_examples(file), processor, batch_size=8).steps(0))
    assert sorted(micro.names) == ["own.jsonl:1", "own.jsonl:4"]
    (bad,) = micro.bad
    assert bad.startswith("own.jsonl:2: ") and bad.isprintable() and len(bad) < 700
    assert not split_records(read_examples(file), "validation", 1.0, 0.0)


def test_a_file_of_bad_lines_only_is_refused(tmp_path):
    """Breaks when a run begins that can learn nothing."""
    with pytest.raises(UserError, match="own.jsonl: none of its 2 records .*own.jsonl:1: "):
        read_examples(write_lines(tmp_path, b"{", b"[]"))


def test_pictures_in_another_folder(tmp_path):
    """Breaks when --images is not where training and its evaluation look for pictures."""
    write_vqav2(tmp_path / "vqa", images=4)
    (tmp_path / "vqa/train2014").rename(tmp_path / "pictures")
    settings, *_ = parse(["--data", f"vqav2:{tmp_path / 'vqa'}", "--images", str(tmp_path / "pictures")])
    for split in ("train", "validation"):
        records = read_records(replace(settings, validation=0.5), split)
        assert len(records) == 6 and all(record.pictures[0].is_file() for record in records)
