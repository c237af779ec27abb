"""Training data that is damaged or hostile: one bad record is named and left out, and no name leads outside."""

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.numpy import load_file, save_file

from eval.datasets import find_image, inside
from eval.records import own_records, split_records, vqav2_records
from model.common import UserError
from model.processor import Processor
from tests.files import write_vqav2
from tests.train.test_shards import picture, plain, write_tar
from train import shard as shard_command
from train.data.batches import Order, collate, without_rows
from train.data.shards import Shards, index_of
from train.data.sources import read_records
from train.distributed import World
from train.loop import count_records
from train.settings import parse

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def processor() -> Processor:
    return Processor.from_source("embedded", max_length=8192)


GOOD = {"image": "a.png", "prefix": "caption en", "suffix": "a cat"}


def line(**changes) -> bytes:
    return json.dumps(GOOD | changes).encode()


def write_lines(folder: Path, *lines: bytes) -> Path:
    folder.mkdir(exist_ok=True)
    Image.new("RGB", (9, 9)).save(folder / "a.png")
    (folder / "own.jsonl").write_bytes(b"\n".join(lines))
    return folder / "own.jsonl"


BAD_LINES = {
    "cut": b'{"image": "a.png", "prefix"',
    "no object": b'["a.png"]',
    "null": b"null",
    "depth": b"[" * 100_000,
    "huge integer": b'{"image": ' + b"9" * 5000 + b"}",
    "huge line": line(suffix="x" * (1 << 25)),
    "not UTF-8": b'{"image": "a.png", "prefix": "\xff", "suffix": "b"}',
    "UTF-16": GOOD["suffix"].encode("utf-16"),
    "surrogate": b'{"image": "a.png", "prefix": "caption en", "suffix": "\\ud800"}',
    "surrogate in a name": b'{"image": "\\udcff.png", "prefix": "caption en", "suffix": "x"}',
    "type": line(suffix=3),
    "no suffix": b'{"image": "a.png", "prefix": "caption en"}',
    "null suffix": line(suffix=None),
    "empty suffix": line(suffix=" "),
    "control token": line(suffix="a <eos>"),
    "long suffix": line(suffix="cat " * 9000),
    "absent picture": line(image="b.png"),
    "no name": line(image=""),
    "folder": line(image="."),
    "long name": line(image="x" * 5000),
    "NUL": line(image="a.png\0"),
    "up": line(image="../outside.png"),
    "up and down": line(image="sub/../../outside.png"),
    "absolute": line(image="/etc/hostname"),
    "fifo": line(image="fifo"),
    "device": line(image="/dev/zero"),
    "link": line(image="link.png"),
    "escape": line(image="\x1b[31mred\x1b[0m\n.png"),
}


@pytest.mark.parametrize("name", BAD_LINES)
def test_one_bad_line_is_named_and_left_out(name, tmp_path, processor):
    """Breaks when one line of a user's file ends the run, hangs it, disappears without a word, or reads elsewhere."""
    folder = tmp_path / "data"
    file = write_lines(folder, b"\xef\xbb\xbf" + line(), BAD_LINES[name], b"", line(suffix="a dog"))
    os.mkfifo(folder / "fifo")
    Image.new("RGB", (9, 9)).save(tmp_path / "outside.png")
    (folder / "link.png").symlink_to(tmp_path / "outside.png")
    order = Order(own_records(file), processor, batch_size=8)
    (micro,) = next(order.steps(0))
    assert sorted(micro.names) == ["own.jsonl:1", "own.jsonl:4"]
    (bad,) = micro.bad
    assert bad.startswith("own.jsonl:2: ") and bad.isprintable() and len(bad) < 700
    assert not split_records(own_records(file), "validation", 1.0, 0.0)


def test_a_file_of_bad_lines_only_is_refused(tmp_path):
    """Breaks when a run begins that can learn nothing."""
    with pytest.raises(UserError, match="own.jsonl: none of its 2 records .*own.jsonl:1: not valid JSON"):
        own_records(write_lines(tmp_path / "data", b"{", b"[]"))
    os.mkfifo(tmp_path / "fifo.jsonl")
    with pytest.raises(UserError, match="pipe"):
        own_records(tmp_path / "fifo.jsonl")


def test_outside_pictures_are_read_where_they_are_allowed(tmp_path, processor):
    """Breaks when --allow-outside or --images do not permit what they say, or permit more."""
    outside = tmp_path / "outside.png"
    Image.new("RGB", (9, 9)).save(outside)
    file = write_lines(tmp_path / "data", line(image="../outside.png"), line(image=str(outside)), line(image="a.png"))
    assert len(collate(own_records(file, allow_outside=True), processor).names) == 3
    assert len(collate(own_records(file), processor).names) == 1
    assert len(collate(own_records(file, images=tmp_path), processor).names) == 1  # the absolute name is inside
    assert inside(tmp_path, str(outside)) == outside and inside(tmp_path, "x/../outside.png").name == "outside.png"


@pytest.mark.parametrize("name", ["../a.png", "/etc/passwd", "b/../../a.png", "..", "a\0.png", "\ud800.png", "~/a.png"])
def test_names_stay_inside(name, tmp_path):
    """Breaks when a name of a data set leads outside its folder, also where a file of that name is in it."""
    (tmp_path / "data").mkdir()
    Image.new("RGB", (9, 9)).save(tmp_path / "a.png")
    Image.new("RGB", (9, 9)).save(tmp_path / "data/a.png")
    if name.startswith("~"):
        assert inside(tmp_path / "data", name) == tmp_path / "data" / name  # no home folder: a name like any other
        return
    for find in (inside, find_image):
        with pytest.raises(UserError) as caught:
            find(tmp_path / "data", name)
        assert str(caught.value).isprintable()


def test_links_between_folders(tmp_path):
    """Breaks when a data folder that is a link itself cannot be read, or a link in it leads anywhere."""
    (tmp_path / "disk").mkdir()
    Image.new("RGB", (9, 9)).save(tmp_path / "disk/a.png")
    (tmp_path / "data").symlink_to(tmp_path / "disk")
    assert inside(tmp_path / "data", "a.png").is_file()
    (tmp_path / "disk/elsewhere").symlink_to("/etc")
    with pytest.raises(UserError, match="--allow-outside"):
        inside(tmp_path / "data", "elsewhere/hostname")
    assert inside(tmp_path / "data", "elsewhere/hostname", True) == tmp_path / "data/elsewhere/hostname"


def test_a_question_outside_does_not_end_the_run(tmp_path, processor):
    """Breaks when one picture name of VQAv2's files is followed outside, or stops everything."""
    write_vqav2(tmp_path / "vqa", images=2)
    file = tmp_path / "vqa/v2_OpenEnded_mscoco_train2014_questions.json"
    value = json.loads(file.read_text())
    value["questions"][0]["image"] = "/etc/hostname"
    file.write_text(json.dumps(value))
    micro = collate(vqav2_records(tmp_path / "vqa", "answer {question}"), processor)
    assert len(micro.names) == 5 and len(micro.bad) == 1 and "outside" in micro.bad[0]


def test_pictures_in_another_folder(tmp_path):
    """Breaks when --images is not where training and its evaluation look for pictures."""
    write_vqav2(tmp_path / "vqa", images=4)
    (tmp_path / "vqa/train2014").rename(tmp_path / "pictures")
    settings, *_ = parse(["--data", f"vqav2:{tmp_path / 'vqa'}", "--images", str(tmp_path / "pictures")])
    for split in ("train", "validation"):
        records = read_records(replace(settings, validation=0.5), split)
        assert len(records) == 6 and all(record.pictures[0].is_file() for record in records)


# Tar shards


def test_an_index_that_lacks_a_record_is_made_anew(tmp_path):
    """Breaks when a record that the index does not list is never learned, and nobody is told."""
    path = write_tar(tmp_path / "a.tar", plain(5))
    rows = index_of(path)
    index = tmp_path / "a.index.safetensors"
    tensors = load_file(index)
    for keep in ([0, 1, 2, 3], [1, 2, 3, 4], [0, 1, 3, 4], []):
        for renumber in (False, True):
            part = rows[keep].copy()
            if renumber:
                part[:, 0] = range(len(part))
            save_file(tensors | {"records": part}, index)
            assert np.array_equal(index_of(path), rows), keep
    save_file({"records": rows[:4], "shard_bytes": np.array([path.stat().st_size])}, index)  # the format before
    assert len(index_of(path)) == 5


def test_an_index_of_a_shard_that_has_grown_is_made_anew(tmp_path):
    """Breaks when a record is appended where the tar was padded: its size stays the same."""
    import io
    import tarfile

    path = write_tar(tmp_path / "a.tar", plain(1))
    size = path.stat().st_size
    assert len(Shards(str(path))) == 1
    with tarfile.open(path, "a") as tar:
        for name, content in plain(3)[4:]:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    assert path.stat().st_size == size and len(Shards(str(path))) == 2


def test_only_pictures_are_packed(tmp_path, capsys):
    """Breaks when any file that is named like a picture goes into a shard: a private text, for example."""
    file = write_lines(tmp_path / "data", *(line(image=name) for name in ("a.png", "text.png", "cut.jpg", "fifo.png")))
    folder = tmp_path / "data"
    (folder / "text.png").write_text("root:x:0:0")
    Image.effect_noise((64, 64), 90).save(folder / "cut.jpg")
    (folder / "cut.jpg").write_bytes((folder / "cut.jpg").read_bytes()[:700])
    os.mkfifo(folder / "fifo.png")
    shard_command.main([f"jsonl:{file}", "--out", str(tmp_path / "s")])
    assert len(Shards(str(tmp_path / "s-000.tar"))) == 1
    assert capsys.readouterr().out.count("left out own.jsonl:") == 3


def test_texts_of_shards(tmp_path, processor):
    """Breaks when one text of a shard ends the run, or its name writes to the terminal what it will."""
    bad = {
        "bom": b'\xef\xbb\xbf{"prefix": "caption en", "suffix": "fine"}',
        "integer": b'{"prefix": "caption en", "suffix": ' + b"9" * 5000 + b"}",
        "surrogate": b'{"prefix": "caption en", "suffix": "\\ud800"}',
        "null": b'{"prefix": "caption en", "suffix": null}',
        "long": json.dumps({"prefix": "caption en", "suffix": "cat " * 9000}).encode(),
        "name": json.dumps({"name": "\x1b[31m\n", "prefix": "x", "suffix": "<eos>"}).encode(),
    }
    members = [m for key, text in bad.items() for m in ((f"{key}.png", picture()), (f"{key}.json", text))]
    order = Order(Shards(str(write_tar(tmp_path / "a.tar", members))), processor, batch_size=9)
    (micro,) = next(order.steps(0))
    assert micro.names == ("a.tar/bom[0]",) and len(micro.bad) == 5
    assert all(text.isprintable() and len(text) < 700 for text in micro.bad)


# Regressions that no test noticed


def test_a_key_ends_at_the_first_dot(tmp_path):
    """Breaks when `x.left.jpg` and `x.json` are taken for two samples: webdataset joins them."""
    json_text = json.dumps({"prefix": "caption en", "suffix": "left"}).encode()
    members = [("x.left.png", picture(7)), ("x.json", json_text), ("y.png", picture(9)), ("y.v2.json", json_text)]
    given = Shards(str(write_tar(tmp_path / "a.tar", members)))
    assert len(given) == 2
    for record, red in zip(given, (7, 9), strict=True):
        assert record.suffix == "left" and Image.open(record.pictures[0]()).getpixel((0, 0))[0] == red


@pytest.mark.parametrize(("batch", "buffer"), [(4, 10), (3, 8), (5, 4), (4, 4), (7, 20)])
def test_any_buffer_makes_whole_batches(batch, buffer, tmp_path):
    """Breaks when a shuffle buffer that is no multiple of the batch loses or doubles records, or cuts batches short."""
    for number in range(3):
        write_tar(tmp_path / f"s-{number}.tar", plain(11))
    given = Shards(f"{tmp_path}/s-{{0..2}}.tar", buffer=buffer)
    plan = list(given.plan(batch, seed=3, epoch=1))
    assert [len(part) for part in plan].count(batch) >= 33 // batch and len(plan) == -(-33 // batch)
    assert sorted(index for part in plan for index in part) == list(range(33))
    for first in range(len(plan)):
        assert list(given.plan(batch, seed=3, epoch=1, first=first)) == plan[first:]


def test_every_shard_holds_out_other_samples(tmp_path):
    """Breaks when the same places are held out in every shard: what depends on the place is then never validated."""
    for number in range(4):
        write_tar(tmp_path / f"s-{number}.tar", plain(40))
    given = Shards(f"{tmp_path}/s-{{0..3}}.tar", "validation", validation=0.3, seed=1)
    ends = [0, *given.ends.tolist()]
    places = [tuple((given.rows[a:b, 0] % 40).tolist()) for a, b in zip(ends, ends[1:], strict=False)]
    assert len(set(places)) == 4 and all(4 <= len(place) <= 20 for place in places)
    used = Shards(f"{tmp_path}/s-{{0..3}}.tar", fraction=0.5, seed=1)
    ends = [0, *used.ends.tolist()]
    assert len({tuple((used.rows[a:b, 0] % 40).tolist()) for a, b in zip(ends, ends[1:], strict=False)}) == 4


def test_a_bad_record_counts_once(tmp_path):
    """Breaks when a record that is left out in every epoch is counted anew, until the run stops."""
    world, progress = World(0, 1, torch.device("cpu")), {"samples": 0, "bad": []}
    for _ in range(5):
        count_records([without_rows(("a.jsonl:2: cut", "a.jsonl:7: cut"))], progress, 2, world)
    assert progress["bad"] == ["a.jsonl:2: cut", "a.jsonl:7: cut"]
    with pytest.raises(UserError, match="3 unusable records.*a.jsonl:9"):
        count_records([without_rows(("a.jsonl:9: cut",))], progress, 2, world)


@pytest.mark.parametrize("seed", range(60))
def test_a_random_index_is_not_believed(seed, tmp_path):
    """Breaks when an index of any shape, type or values ends in a traceback, or hides a record."""
    path, rng = write_tar(tmp_path / "a.tar", plain(3)), np.random.default_rng(seed)
    rows, index = index_of(path), tmp_path / "a.index.safetensors"
    tensors = load_file(index)
    name = rng.choice(list(tensors))
    match seed % 4:
        case 0:
            shape = rng.integers(0, 5, rng.integers(0, 4))
            tensors[name] = rng.integers(-9, 1 << 40, shape).astype(rng.choice(["int64", "float32", "uint8"]))
        case 1:
            tensors[name] = np.roll(tensors[name], rng.integers(1, 7))
        case 2:
            del tensors[name]
        case 3:
            tensors[name].flat[rng.integers(tensors[name].size)] += 1
    save_file(tensors, index)
    assert np.array_equal(index_of(path), rows)
