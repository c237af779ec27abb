"""Tar shards: packed, indexed, shared between processes and workers, resumed, and other people's
tars."""

import io
import json
import os
import tarfile
from collections import Counter
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import save

from eval.records import read_examples, vqav2_records
from model.images import load_image
from tests.files import write_vqav2
from tests.runs import WORLD, refused
from train import finetune
from train import shard as shard_command
from train.data import shards as reader
from train.data.batches import Order, collate
from train.data.shards import Shards, expand, index_of
from train.distributed import World
from train.settings import Settings


def picture(colour: int = 0, kind: str = "png", size=(8, 6)) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, (colour % 256, 0, 0)).save(file, kind)
    return file.getvalue()


def text(suffix: str = "a dog", **more) -> bytes:
    return json.dumps({"prefix": "caption en", "suffix": suffix} | more).encode()


def write_tar(path: Path, members, style=tarfile.USTAR_FORMAT) -> Path:
    """members: (name, content), or (TarInfo, None) for anything else."""
    with tarfile.open(path, "w", format=style) as tar:
        for name, content in members:
            member = name if content is None else tarfile.TarInfo(name)
            member.size = len(content or b"")
            tar.addfile(member, io.BytesIO(content or b""))
    return path


def plain(count: int) -> list:
    """Sound samples "0", "1", …"""
    return [
        member
        for i in range(count)
        for member in ((f"{i}.png", picture(i)), (f"{i}.json", text(f"{i}")))
    ]


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> str:
    """33 records of 27 pictures in three shards of different sizes, some with several questions."""
    folder = tmp_path_factory.mktemp("shards")
    for name, numbers in enumerate((range(14), range(14, 18), range(18, 27))):
        members = []
        for number in numbers:
            several = [
                {"prefix": "count dog", "suffix": "yes", "name": f"r{number}.{i}"} for i in range(3)
            ]
            content = several if number % 9 == 4 else several[0]
            members += [
                (f"{number:04}.png", picture(number * 9)),
                (f"{number:04}.json", json.dumps(content).encode()),
            ]
        write_tar(folder / f"s-{name}.tar", members)
    return f"{folder}/s-{{0..2}}.tar"


def names(micro_batches) -> list[str]:
    return [name for micro in micro_batches for name in micro.names]


@pytest.mark.parametrize(("size", "workers"), [(1, 2), (2, 1), (3, 0)])
def test_every_record_once_an_epoch(size, workers, shards, processor):
    """Breaks when processes or workers lose or double a record, wait for each other, or every epoch
    has one order."""
    given = Shards(shards, buffer=8)
    expected = Counter(given[i].name for i in range(len(given)))
    settings = Settings(batch_size=2, step_batch=4 * size, epochs=2, seed=1)
    orders = [
        Order(given, processor, settings, World(rank, size, WORLD.device)) for rank in range(size)
    ]
    read = [list(order.steps(0, workers)) for order in orders]
    assert (
        len({tuple(len(step) for step in steps) for steps in read}) == 1
    )  # as many rounds in every step
    epochs = [
        [names(chain(*steps[i : i + len(steps) // 2])) for steps in read]
        for i in (0, len(read[0]) // 2)
    ]
    assert (
        all(Counter(chain(*of_processes)) == expected for of_processes in epochs)
        and epochs[0] != epochs[1]
    )


@pytest.mark.parametrize("size", [1, 3])
def test_shards_resume_at_the_sample(size, shards, processor):
    """Breaks when a run that goes on reads other records than it would have without the
    interruption."""
    settings = Settings(batch_size=2, step_batch=4 * size, epochs=2, seed=1, per_picture=2)
    order = Order(
        Shards(shards, buffer=8), processor, settings, World(size - 1, size, WORLD.device)
    )
    whole = [names(step) for step in order.steps(0)]
    for first in range(order.total):
        assert [names(step) for step in order.steps(first)] == whole[first:]


@pytest.mark.parametrize(("batch", "buffer"), [(4, 10), (7, 20)])
def test_any_buffer_makes_whole_batches(batch, buffer, shards):
    """Breaks when a shuffle buffer loses or doubles records, cuts batches short, keeps the order of
    the files, or parts the questions of a picture."""
    given, pictures = Shards(shards, buffer=buffer), []
    for per_picture in (1, 3):
        plan = list(given.plan(batch, 3, 1, per_picture))
        assert [len(part) for part in plan] == [batch] * (33 // batch) + [33 % batch] * (
            33 % batch > 0
        )
        assert sorted(chain(*plan)) == list(range(33)) != list(chain(*plan))
        assert all(
            list(given.plan(batch, 3, 1, per_picture, first)) == plan[first:]
            for first in range(len(plan))
        )
        pictures.append(sum(len({given[n].key for n in part}) for part in plan))
    assert pictures[1] < pictures[0] and len({*given.rows[:, reader.SAMPLE]}) == 27


def test_splits_share_no_picture_and_lose_none(shards):
    """Breaks when --validation or --fraction is ignored for shards, or parts the questions of a
    picture."""
    parts = {
        split: Shards(shards, split=split, validation=0.3, seed=3)
        for split in ("train", "validation")
    }
    seen = {split: {given[i].name for i in range(len(given))} for split, given in parts.items()}
    assert not seen["train"] & seen["validation"] and len(seen["train"] | seen["validation"]) == 33
    pictures = [{name.split(".")[0] for name in of_split} for of_split in seen.values()]
    assert not pictures[0] & pictures[1] and 3 <= len(pictures[1]) <= 14
    part = Shards(shards, validation=0.3, fraction=0.5, seed=3)
    assert {part[i].name for i in range(len(part))} < seen["train"] and 5 < len(part) < 20


def test_an_index_is_made_anew_where_it_does_not_fit(tmp_path, monkeypatch):
    """Breaks when an index that is missing, damaged or another shard's is believed, or is made
    where one fits."""
    path = write_tar(tmp_path / "a.tar", plain(1))
    index = tmp_path / "a.index.safetensors"
    assert len(index_of(path)["records"]) == 1
    sound = index.read_bytes()
    write_tar(path, plain(20))
    strange = [
        {"records": np.full((3, 7), -5)},
        {"records": np.ones(3)},
        {"records": np.ones((3, 7), np.int64) << 40},
    ]
    strange = [
        save(of | {"tar": np.array([path.stat().st_size]), "pictures": np.ones((3, 2))})
        for of in strange
    ]
    for wrong in (b"", b"nonsense", sound, *strange):
        index.write_bytes(wrong)
        assert len(index_of(path)["records"]) == 20
    members = plain(20)
    write_tar(
        path, [members[2], members[3], *members[:2], *members[4:]]
    )  # corrected: of the same size
    os.utime(index, ns=(0, 0))
    assert [Shards(str(path))[i].suffix for i in (0, 1)] == ["1", "0"]
    write_tar(path, members)
    os.utime(path, ns=(0, 0))
    index_of(path)
    monkeypatch.setattr(reader, "build_index", lambda shard: pytest.fail("it is there"))
    assert Shards(str(path))[1].suffix == "1"


def test_a_damaged_tar_is_one_line(tmp_path):
    """Breaks when a copy that was cut short trains on the part that arrived, or a mistyped range on
    nothing."""
    assert [str(path) for path in expand("a-{08..10}.tar")] == ["a-08.tar", "a-09.tar", "a-10.tar"]
    for wrong in ("none-{0..1}.tar", "none-{5..4}.tar"):
        refused(partial(Shards, wrong), wrong, "{first..last}")
    for wrong in (
        "a-{0..999}{0..1001}.tar",
        "a-{0..1000000}.tar",
        f"a-{{{'1' * 5000}..{'2' * 5000}}}.tar",
    ):
        refused(partial(expand, wrong), "a-{", ".tar", "below a million")
    whole = write_tar(tmp_path / "whole.tar", plain(4)).read_bytes()
    path = tmp_path / "cut.tar"
    for length in (0, 511, 2048, 4 * 4 * 512):
        path.write_bytes(whole[:length])
        refused(lambda: Shards(str(path)), "cut.tar", "make or copy it again")


@pytest.mark.parametrize("style", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_tars_of_every_format_are_read(style, tmp_path, processor):
    """Breaks when shards made by another program are not, or a key is cut at another dot than
    webdataset's."""
    folder = tarfile.TarInfo("set.v1")
    folder.type = tarfile.DIRTYPE
    far = "x" * 90 + "/" + "y" * (90 if style != tarfile.USTAR_FORMAT else 60)
    members = [(folder, None), ("README", b"not a sample"), ("__meta__.txt", b"")]
    members += [
        ("set.v1/one.JPG", picture(10, "jpeg")),
        ("set.v1/one.json", text("one")),
        ("set.v1/one.cls", b"3"),
    ]
    members += [
        ("zwei ü.json", text("two", name="named", answers=["a", "b"])),
        ("zwei ü.webp", picture(20, "webp")),
    ]
    members += [(f"{far}5.0.png", picture(50)), (f"{far}5.json", text("five", pictures=[2, 0, 1]))]
    members += [(f"{far}5.1.jpg", picture(60, "jpeg", (900, 300))), (f"{far}5.2.png", picture(70))]
    given = Shards(str(write_tar(tmp_path / "a.tar", members, style)), sampled=True)
    made = [given[i] for i in range(len(given))]
    assert [(r.suffix, r.answers) for r in made] == [("one", ()), ("two", ("a", "b")), ("five", ())]
    colours = [
        [round(load_image(one()).getpixel((0, 0))[0], -1) for one in record.pictures]
        for record in made
    ]
    assert colours == [[10], [20], [70, 50, 60]]
    assert made[0].name == "a.tar/set.v1/one[0] (0)" and made[1].name == "named"
    micro = collate(made, processor)
    assert not micro.bad and micro.batch.pixel_values.shape[0] == 2 + 3


def test_bad_records_are_left_out_and_named(tmp_path, processor, monkeypatch):
    """Breaks when one bad record of a shard ends a night's run, or disappears without a word, or
    when a member's name or link target is used as a path."""
    monkeypatch.chdir(tmp_path)
    bad = {
        "picture": text(),
        "json": b"{",
        "field": b'{"prefix": "x"}',
        "type": b'{"prefix": "x", "suffix": 3}',
    }
    bad |= {
        "empty": b"[]",
        "text": b'"text"',
        "place": text(pictures=[1]),
        "places": text(pictures=0),
    }
    members = [("good.png", picture()), ("good.json", text())]
    for key, content in bad.items():
        members += [
            (f"{key}.png", b"broken" if key == "picture" else picture()),
            (f"{key}.json", content),
        ]
    members += [("lonely.png", picture()), ("bare.json", text())]
    members += [("two.png", picture()), ("two.jpg", picture()), ("two.json", text())]
    members += [
        ("half.png", picture()),
        ("half.json", json.dumps([{"prefix": "a", "suffix": "b"}, 3]).encode()),
    ]
    members += [
        ("/../evil.png", picture()),
        ("/../evil.json", text("up")),
        ("\x1b[2J\n\udcff.json", text("escape")),
    ]
    (tmp_path / "secret.png").write_bytes(picture())
    link = tarfile.TarInfo("linked.png")
    link.type, link.linkname = tarfile.SYMTYPE, str(tmp_path / "secret.png")
    path = write_tar(tmp_path / "a.tar", [*members, (link, None), ("linked.json", text())])
    (micro,) = next(Order(Shards(str(path)), processor, Settings(batch_size=20), WORLD).steps(0))
    assert {name.split("[")[0] for name in micro.names} == {
        "a.tar/good",
        "a.tar/half",
        "a.tar//../evil",
    }
    keys = [*bad, "lonely", "bare", "two", "half", "[2J", "linked"]
    assert all([line for line in micro.bad if "a.tar" in line and key in line] for key in keys)
    assert len(micro.bad) == len(keys) and all(line.isprintable() for line in micro.bad)
    assert sorted(os.listdir(tmp_path)) == ["a.index.safetensors", "a.tar", "secret.png"]


def write_own(folder: Path) -> Path:
    """12 pictures with a question each, and records with several pictures, with none, and of two
    turns."""
    for i in range(12):
        (folder / f"{i}.png").write_bytes(picture(i * 20, size=(16, 16)))
    says = [
        {"from": role, "value": text}
        for role, text in zip(("human", "gpt") * 2, "abcd", strict=True)
    ]
    rows = [
        {"image": f"{i}.png", "prefix": "count dog", "answers": [f"{i}", "no"], "type": "how"}
        for i in range(12)
    ]
    rows += [
        {
            "image": ["3.png", "1.png", "1.png"],
            "conversations": says,
            "type": "talk",
            "answers": ["d", "e"],
        },
        {"prefix": "c", "suffix": "d"},
    ]
    (folder / "own.json").write_text(json.dumps(rows))
    return folder / "own.json"


@pytest.mark.parametrize("kind", ["vqav2", "own"])
def test_shards_hold_what_their_source_holds(kind, tmp_path, processor):
    """Breaks when a turn, an answer, a type or the order of pictures is lost, or a picture is
    written twice."""
    if kind == "vqav2":
        write_vqav2(tmp_path / "vqav2")
        expected = vqav2_records(tmp_path / "vqav2")
    else:
        expected = read_examples(write_own(tmp_path))
    paths = shard_command.pack(expected, tmp_path / "out/s", per_shard=7)
    files = [
        f"s-00{number}{ending}"
        for number in range(len(paths))
        for ending in (".index.safetensors", ".tar")
    ]
    assert sorted(os.listdir(tmp_path / "out")) == files
    assert sum(len(index_of(path)["pictures"]) for path in paths) == (12 if kind == "own" else 20)
    given = Shards(f"{tmp_path}/out/s-{{000..{len(paths) - 1:03}}}.tar", sampled=True)
    made = {given[i].name: given[i] for i in range(len(given))}
    assert made.keys() == {record.name for record in expected}
    for record in expected:
        packed = made[record.name]
        assert (packed.turns, packed.answers, packed.kind) == (
            record.turns,
            record.answers,
            record.kind,
        )
        assert packed.sampled
        assert [one().read() for one in packed.pictures] == [
            path.read_bytes() for path in record.pictures
        ]


def test_a_failed_packing_leaves_nothing(tmp_path, capsys):
    """Breaks when what a failure leaves refuses the corrected data, or missing pictures are missing
    in silence."""
    given = read_examples(write_own(tmp_path))
    (tmp_path / "4.png").unlink()
    refused(
        lambda: shard_command.pack(given, tmp_path / "out/s", 4), "1 of 14 records", "--max-bad"
    )
    assert "left out own.json[4]: " in capsys.readouterr().out and not (tmp_path / "out").exists()


def test_a_run_on_shards(tmp_path, shards):
    """Breaks when the command cannot train on shards, or does not see all of them."""
    flags = "--base tiny --validation 0 --per-picture 2 --epochs 2 --batch-size 4 --shuffle-buffer 16 --device cpu"
    finetune.main([*flags.split(), "--data", f"shards:{shards}", "--out", str(tmp_path / "run")])
    assert json.loads((tmp_path / "run/summary.json").read_text())["samples"] == 2 * 33
