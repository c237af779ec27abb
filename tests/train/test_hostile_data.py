"""Training data that is damaged: one bad record is named and left out, and a file of nothing else is refused."""

import json

import pytest
from PIL import Image

from eval.records import read_examples
from model.processor import Processor
from tests.runs import refused
from train.data.batches import Order


def line(**changes) -> bytes:
    return json.dumps({"image": "a.png", "prefix": "caption en", "suffix": "a cat"} | changes).encode()


BAD_LINES = {
    "cut": b'{"image": "a.png", "prefix"',
    "depth": b"[" * 100_000,
    "not UTF-8": b'{"image": "a.png", "prefix": "\xff", "suffix": "b"}',
    "control token": line(suffix="a <eos>"),
    "long suffix": line(suffix="cat " * 9000),
    "escape": line(image="\x1b[31mred\x1b[0m\n.png"),
}


@pytest.mark.parametrize("name", BAD_LINES)
def test_one_bad_line_is_named_and_left_out(name, tmp_path):
    """Breaks when one line of a user's file ends the run, or disappears without a word, or a run can learn nothing."""
    Image.new("RGB", (9, 9)).save(tmp_path / "a.png")
    file = tmp_path / "own.jsonl"
    file.write_bytes(b"\n".join([b"\xef\xbb\xbf" + line(), BAD_LINES[name], b"", line(suffix="a dog")]))
    processor = Processor.from_source("embedded", max_length=8192)
    (micro,) = next(Order(read_examples(file), processor, batch_size=8).steps(0))
    assert sorted(micro.names) == ["own.jsonl:1", "own.jsonl:4"]
    (bad,) = micro.bad
    assert bad.startswith("own.jsonl:2: ") and bad.isprintable() and len(bad) < 700
    file.write_bytes(b"{\n[]")
    refused(lambda: read_examples(file), "own.jsonl: none of its 2 records", "own.jsonl:1: ")
