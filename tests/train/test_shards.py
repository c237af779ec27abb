"""Tar shards: packed, indexed, shared between processes and workers, resumed, and other people's tars."""

import io
import json
import multiprocessing
import os
import tarfile
import time
from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from PIL import Image

from eval.records import read_examples, vqav2_records
from model.images import load_image
from tests.files import write_vqav2
from tests.runs import refused
from tests.train.test_data import records
from train import finetune
from train import shard as shard_command
from train.data import shards as reader
from train.data.batches import Order, collate
from train.data.shards import Shards, expand, index_of


def picture(colour: int = 0, kind: str = "png", size=(8, 6)) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, (colour % 256, 0, 0)).save(file, kind)
    return file.getvalue()


def text(suffix: str = "a dog", **more) -> bytes:
    return json.dumps({"prefix": "caption en", "suffix": suffix} | more).encode()


def write_tar(path: Path, members, style=tarfile.USTAR_FORMAT, mode: str = "w") -> Path:
    """members: (name, content), or (TarInfo, None) for anything else."""
    with tarfile.open(path, mode, format=style) as tar:
        for name, content in members:
            member = name if content is None else tarfile.TarInfo(name)
            member.size = len(content or b"")
            tar.addfile(member, io.BytesIO(content or b""))
    return path


def names_in(path: Path) -> list[str]:
    with tarfile.open(path) as tar:
        return tar.getnames()


def plain(count: int, first: int = 0) -> list:
    """Sound samples "0", "1", …"""
    numbers = range(first, count)
    return [member for i in numbers for member in ((f"{i}.png", picture(i)), (f"{i}.json", text(f"{i}")))]


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> str:
    """33 records of 27 pictures in three shards of different sizes, some with several questions."""
    folder, number = tmp_path_factory.mktemp("shards"), 0
    for name, count in enumerate((14, 4, 9)):
        members = []
        for number in range(number, number + count):  # noqa: B020
            several = [{"prefix": "count dog", "suffix": "yes", "name": f"r{number}.{i}"} for i in range(3)]
            content = several if number % 9 == 4 else several[0]
            members += [(f"{number:04}.png", picture(number * 9)), (f"{number:04}.json", json.dumps(content).encode())]
        number += 1
        write_tar(folder / f"s-{name}.tar", members)
    return f"{folder}/s-{{0..2}}.tar"


def names(micro_batches) -> list[str]:
    return [name for micro in micro_batches for name in micro.names]


@pytest.mark.parametrize(("size", "workers"), [(1, 2), (2, 1), (3, 0)])
@pytest.mark.parametrize("kind", ["shards", "list"])
def test_every_record_once_an_epoch(kind, size, workers, shards, processor):
    """Breaks when processes or workers lose or double a record, wait for each other, or every epoch has one order."""
    given = Shards(shards, buffer=8) if kind == "shards" else records(33, pictures=27)
    expected = Counter(given[i].name for i in range(len(given)))
    options = {"batch_size": 2, "accumulate": 2, "epochs": 2, "seed": 1, "world_size": size}
    orders = [Order(given, processor, rank=rank, **options) for rank in range(size)]
    read = [list(order.steps(0, workers)) for order in orders]
    assert len({tuple(len(step) for step in steps) for steps in read}) == 1  # as many rounds in every step
    assert len(read[0]) == orders[0].total
    epochs = [[names(chain(*steps[i : i + len(steps) // 2])) for steps in read] for i in (0, len(read[0]) // 2)]
    assert all(Counter(chain(*of_processes)) == expected for of_processes in epochs) and epochs[0] != epochs[1]


@pytest.mark.parametrize("size", [1, 3])
def test_shards_resume_at_the_sample(size, shards, processor):
    """Breaks when a run that goes on reads other records than it would have without the interruption."""
    options = {"batch_size": 2, "accumulate": 2, "epochs": 2, "seed": 1, "per_picture": 2, "world_size": size}
    order = Order(Shards(shards, buffer=8), processor, rank=size - 1, **options)
    whole = [names(step) for step in order.steps(0)]
    for first in range(order.total):
        assert [names(step) for step in order.steps(first)] == whole[first:]


@pytest.mark.parametrize(("batch", "buffer"), [(4, 10), (7, 20)])
def test_any_buffer_makes_whole_batches(batch, buffer, shards):
    """Breaks when a shuffle buffer that is no multiple of the batch loses or doubles records, or cuts batches short."""
    given = Shards(shards, buffer=buffer)
    for per_picture in (1, 3):
        plan = list(given.plan(batch, 3, 1, per_picture))
        assert [len(part) for part in plan] == [batch] * (33 // batch) + [33 % batch] * (33 % batch > 0)
        assert sorted(chain(*plan)) == list(range(33))
        assert all(list(given.plan(batch, 3, 1, per_picture, first)) == plan[first:] for first in range(len(plan)))


def test_the_buffer_bounds_how_far_reads_lie_apart(tmp_path):
    """Breaks when an epoch jumps through all shards at once, or is read in the order of the files."""
    for number in range(8):
        write_tar(tmp_path / f"s-{number}.tar", plain(20))
    order = [index for batch in Shards(f"{tmp_path}/s-{{0..7}}.tar", buffer=40).plan(4, 0, 0) for index in batch]
    assert sorted(order) == list(range(160))
    for start in range(0, 160, 40):
        window = order[start : start + 40]
        assert len({index // 20 for index in window}) == 2
        assert sum(abs(a - b) == 1 for a, b in zip(window, window[1:], strict=False)) < 10
    assert [index // 20 for index in order[::40]] != sorted(index // 20 for index in order[::40])


def test_splits_share_no_picture_and_lose_none(shards, tmp_path):
    """Breaks when --validation or --fraction is ignored for shards, parts the questions of a picture, or chooses the
    same places in every shard."""
    parts = {split: Shards(shards, split=split, validation=0.3, seed=3) for split in ("train", "validation")}
    seen = {split: {given[i].name for i in range(len(given))} for split, given in parts.items()}
    assert not seen["train"] & seen["validation"] and len(seen["train"] | seen["validation"]) == 33
    pictures = {split: {name.split(".")[0] for name in of_split} for split, of_split in seen.items()}
    assert not pictures["train"] & pictures["validation"] and 3 <= len(pictures["validation"]) <= 14
    part = Shards(shards, validation=0.3, fraction=0.5, seed=3)
    assert {part[i].name for i in range(len(part))} < seen["train"] and 5 < len(part) < 20
    for number in range(4):
        write_tar(tmp_path / f"s-{number}.tar", plain(40))
    given = Shards(f"{tmp_path}/s-{{0..3}}.tar", split="validation", validation=0.3, seed=1)
    places = [tuple((rows[:, 0] % 40).tolist()) for rows in np.split(given.rows, given.ends[:-1])]
    assert len(set(places)) == 4 and all(4 <= len(place) <= 30 for place in places)


def test_a_pattern_has_one_range():
    """Breaks when the numbers of a pattern lose their zeros, or a mistyped range trains on nothing."""
    assert [str(path) for path in expand("a-{08..11}.tar")] == ["a-08.tar", "a-09.tar", "a-10.tar", "a-11.tar"]
    assert [path.name for path in expand("a-{000..1001}.tar")][-2:] == ["a-1000.tar", "a-1001.tar"]
    assert expand("a.tar") == [Path("a.tar")]
    for wrong in ("none-{0..1}.tar", "none-{5..4}.tar", "none.tar"):
        refused(partial(Shards, wrong), wrong, "{first..last}")


# Indices


def test_two_processes_share_the_work_of_indexing(tmp_path):
    """Breaks when every process of a run indexes all shards by itself."""
    for number in range(6):
        write_tar(tmp_path / f"s-{number}.tar", plain(3))
    context, made, build = multiprocessing.get_context("fork"), tmp_path / "made", reader.build_index

    def index(rank: int) -> None:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2"}
        reader.build_index = lambda shard: (time.sleep(0.1), made.open("a").write(f"{rank}"), build(shard))[-1]
        assert len(Shards(f"{tmp_path}/s-{{0..5}}.tar")) == 18

    processes = [context.Process(target=index, args=(rank,)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    assert set(made.read_text()) == {"0", "1"} and 6 <= len(made.read_text()) <= 8  # one may overtake the other


def test_an_index_is_made_anew_where_it_does_not_fit(tmp_path, monkeypatch):
    """Breaks when an index that is missing, damaged or another shard's is believed, or is made where one fits."""
    path = write_tar(tmp_path / "a.tar", plain(1))
    index, sound = tmp_path / "a.index.safetensors", None
    assert len(index_of(path)["records"]) == 1
    sound = index.read_bytes()
    write_tar(path, plain(20))
    for wrong in (b"", b"nonsense", sound):
        index.write_bytes(wrong)
        assert len(index_of(path)["records"]) == 20
    monkeypatch.setattr(reader, "build_index", lambda shard: pytest.fail("it is there"))
    record = Shards(str(path))[1]
    write_tar(path, [*plain(1), ("1.png", picture() + b"more")])  # while a run reads it
    refused(lambda: record.pictures[0](), "a.tar", "delete its .index.safetensors")


def test_a_damaged_tar_is_one_line(tmp_path, monkeypatch):
    """Breaks when a copy that was cut short trains on the part that arrived, or a read-only folder cannot be read."""
    whole = write_tar(tmp_path / "whole.tar", plain(4)).read_bytes()
    path = tmp_path / "cut.tar"
    for length in (0, 511, 512, 700, 2048, 5000, 4 * 4 * 512):
        path.write_bytes(whole[:length])
        refused(lambda: Shards(str(path)), "cut.tar", "make or copy it again")
    with tarfile.open(path, "w:gz"):
        pass
    refused(lambda: Shards(str(path)), "compressed")
    monkeypatch.setattr("model.common.sync_folder", MagicMock(side_effect=PermissionError("read-only")))
    assert Shards(str(tmp_path / "whole.tar"))[0].suffix == "0" and len(os.listdir(tmp_path)) == 2


# Other people's tars


@pytest.mark.parametrize("style", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_tars_of_every_format_are_read(style, tmp_path, processor):
    """Breaks when shards made by another program are not, or a key is cut at another dot than webdataset's."""
    folder = tarfile.TarInfo("set.v1")
    folder.type = tarfile.DIRTYPE
    far = "x" * 90 + "/" + "y" * (90 if style != tarfile.USTAR_FORMAT else 60)
    members = [(folder, None), ("README", b"not a sample"), ("__meta__.txt", b"")]
    members += [("set.v1/one.JPG", picture(10, "jpeg")), ("set.v1/one.json", text("one")), ("set.v1/one.cls", b"3")]
    members += [("zwei ü.json", text("two", name="named", answers=["a", "b"])), ("zwei ü.webp", picture(20, "webp"))]
    members += [(f"{far}.png", picture(30)), (f"{far}.json", text("three"))]
    members += [("four.left.png", picture(40)), ("four.json", text("four"))]
    members += [(f"{far}5.0.png", picture(50)), (f"{far}5.json", text("five", pictures=[2, 0, 1]))]
    members += [(f"{far}5.1.jpg", picture(60, "jpeg", (900, 300))), (f"{far}5.2.png", picture(70))]
    given = Shards(str(write_tar(tmp_path / "a.tar", members, style)), sampled=True)
    made = [given[i] for i in range(len(given))]
    assert [record.suffix for record in made] == ["one", "two", "three", "four", "five"]
    assert [record.answers for record in made] == [(), ("a", "b"), (), (), ()] and made[1].sampled
    assert len({record.name for record in made}) == 5
    colours = [[round(load_image(one()).getpixel((0, 0))[0], -1) for one in record.pictures] for record in made]
    assert colours == [[10], [20], [30], [40], [70, 50, 60]]
    assert made[0].name == "a.tar/set.v1/one[0] (0)" and made[1].name == "named"
    micro = collate(made, processor)
    assert not micro.bad and micro.batch.pixel_values.shape[0] == 4 + 3


def test_names_and_links_reach_nothing_outside(tmp_path, processor, monkeypatch):
    """Breaks when a member's name or link target is used as a path."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "secret.png").write_bytes(picture())
    link = tarfile.TarInfo("b.png")
    link.type, link.linkname = tarfile.SYMTYPE, str(tmp_path / "secret.png")
    members = [("/../../etc/evil.png", picture()), ("/../../etc/evil.json", text("up"))]
    members += [(f"{tmp_path}/absolute.png", picture()), (f"{tmp_path}/absolute.json", text("absolute"))]
    members += [(link, None), ("b.json", text("b")), ("\x1b[2J\n\udcff.json", text("escape"))]
    given = Shards(str(write_tar(tmp_path / "a.tar", members)))
    before = set(tmp_path.rglob("*"))
    micro = next(Order(given, processor, batch_size=9).steps(0))[0]
    assert len(micro.names) == 2 and len(micro.bad) == 2 and all(line.isprintable() for line in micro.bad)
    assert set(tmp_path.rglob("*")) == before and not Path("/etc/evil.png").exists()


def test_bad_records_are_left_out_and_named(tmp_path, processor):
    """Breaks when one bad record of a shard ends a night's run, or disappears without a word; --max-bad ends it."""
    bad = {"picture": text(), "json": b"{", "field": b'{"prefix": "x"}', "type": b'{"prefix": "x", "suffix": 3}'}
    bad |= {"empty": b"[]", "text": b'"text"', "place": text(pictures=[1]), "places": text(pictures=0)}
    bad |= {"marks": text(prefix="<image> or <image>"), "control": text("<eos>")}
    members = [("good.png", picture()), ("good.json", text())]
    for key, content in bad.items():
        members += [(f"{key}.png", b"broken" if key == "picture" else picture()), (f"{key}.json", content)]
    members += [("lonely.png", picture()), ("bare.json", text())]
    members += [("two.png", picture()), ("two.jpg", picture()), ("two.json", text())]
    members += [("twice.png", picture()), ("twice.json", text()), ("twice.x.json", text())]
    members += [("half.png", picture()), ("half.json", json.dumps([{"prefix": "a", "suffix": "b"}, 3]).encode())]
    path = write_tar(tmp_path / "a.tar", members)
    micro = next(Order(Shards(str(path)), processor, batch_size=20).steps(0))[0]
    assert {name.split("[")[0] for name in micro.names} == {"a.tar/good", "a.tar/half"}
    keys = [*bad, "lonely", "bare", "two", "twice", "half"]
    assert all([line for line in micro.bad if "a.tar" in line and key in line] for key in keys)
    assert len(micro.bad) == len(keys) and not any("\n" in line for line in micro.bad)
    run = (
        f"--base tiny --max-bad 3 --validation 0 --batch-size 2 --device cpu --data shards:{path} --out {tmp_path}/run"
    )
    refused(lambda: finetune.main(run.split()), "unusable records", "a.tar")


def test_rows_with_more_pictures_are_longer(tmp_path, processor):
    """Breaks when rows of one picture are padded to rows of several, in shards or in a file."""
    four = [(f"{i}b.{part}.png", picture(i)) for i in range(60) for part in range(4)]
    four += [(f"{i}b.json", text(pictures=[0, 1, 2, 3])) for i in range(60)]
    path = write_tar(tmp_path / "a.tar", plain(60) + sorted(four, key=lambda member: member[0].split(".")[0]))
    (tmp_path / "0.png").write_bytes(picture())
    images = [["0.png"] * count for count in (1, 4) for _ in range(60)]
    lines = [json.dumps({"image": names, "prefix": "caption en", "suffix": "a dog"}) for names in images]
    (tmp_path / "own.jsonl").write_text("\n".join(lines))
    for given in (Shards(str(path)), read_examples(tmp_path / "own.jsonl")):
        plan = Order(given, processor, batch_size=8).plan(epoch=0, first=0)
        counts = [{len(given[i].pictures) for i in batch} for batch in plan]
        assert len(counts) == len(given) // 8 and sum(len(count) > 1 for count in counts) <= 1


# Packing


def read_all(pattern: str, **options) -> dict:
    given = Shards(pattern, **options)
    return {given[i].name: given[i] for i in range(len(given))}


def test_shards_hold_what_their_source_holds(tmp_path):
    """Breaks when a question, an answer or a picture is changed on the way into a shard."""
    write_vqav2(tmp_path / "vqav2")
    shard_command.main([f"vqav2:{tmp_path / 'vqav2'}", "--out", str(tmp_path / "out/v"), "--per-shard", "7"])
    files = [f"v-00{number}{ending}" for number in range(3) for ending in (".index.safetensors", ".tar")]
    assert sorted(os.listdir(tmp_path / "out")) == files
    assert names_in(tmp_path / "out/v-001.tar")[:2] == ["000000007.jpg", "000000007.json"]
    made = read_all(f"{tmp_path}/out/v-{{000..002}}.tar", sampled=True)
    expected = [replace(r, sampled=True) for r in vqav2_records(tmp_path / "vqav2", prompt="answer {question}")]
    assert len(made) == len(expected) == 60
    for record in expected:
        packed = made[record.name]
        assert (packed.turns, packed.answers, packed.sampled) == (record.turns, record.answers, True)
        assert packed.pictures[0]().read() == record.pictures[0].read_bytes()
    for source in (f"shards:{tmp_path}/out/v-000.tar", "embedded"):
        refused(partial(shard_command.main, [source, "--out", str(tmp_path / "again")]), source)


def write_own(folder: Path) -> Path:
    """12 pictures with a question each, and records with several pictures, with none, and of two turns."""
    for i in range(12):
        (folder / f"{i}.png").write_bytes(picture(i * 20, size=(16, 16)))
    says = [{"from": role, "value": text} for role, text in zip(("human", "gpt") * 2, "abcd", strict=True)]
    rows = [{"image": f"{i}.png", "prefix": "count dog", "answers": [f"{i}", "no"]} for i in range(12)]
    rows += [{"image": ["3.png", "1.png", "1.png"], "conversations": says}, {"conversations": says}]
    (folder / "own.json").write_text(json.dumps([*rows, {"prefix": "c", "suffix": "d"}]))
    return folder / "own.json"


def test_shards_hold_conversations_and_any_number_of_pictures(tmp_path, processor):
    """Breaks when a turn, an answer, or the order of several pictures is lost in a shard, or a picture is written twice
    or learned while it is held out."""
    given = [replace(record, sampled=True) for record in read_examples(write_own(tmp_path))]
    paths = shard_command.pack(given, tmp_path / "s", per_shard=4)
    assert len(paths) == 4 and sum(name.endswith(".png") for path in paths for name in names_in(path)) == 12
    made = read_all(f"{tmp_path}/s-{{000..003}}.tar", sampled=True)
    assert made.keys() == {record.name for record in given} and len(made) == 15
    for record in given:
        packed = made[record.name]
        assert (packed.turns, packed.answers, packed.sampled) == (record.turns, record.answers, record.sampled)
        assert [one().read() for one in packed.pictures] == [path.read_bytes() for path in record.pictures]
        assert torch.equal(*(collate([r], processor).batch.input_ids for r in (packed, record)))
    for seed in range(5):
        sides = []
        for split in ("train", "validation"):
            side = read_all(f"{tmp_path}/s-{{000..003}}.tar", split=split, validation=0.5, seed=seed)
            sides.append({picture().read() for record in side.values() for picture in record.pictures})
        assert not sides[0] & sides[1]


def test_a_failed_packing_leaves_nothing_and_refuses_nothing(tmp_path, monkeypatch, capsys):
    """Breaks when what a failure leaves refuses the corrected data, or missing pictures are missing in silence."""
    given = read_examples(write_own(tmp_path))
    gone = (tmp_path / "4.png").rename(tmp_path / "gone")
    refused(lambda: shard_command.pack(given, tmp_path / "out/s", 4), "1 of 15 records", "--max-bad")
    assert "left out own.json[4]: " in capsys.readouterr().out and not (tmp_path / "out").exists()
    with monkeypatch.context() as patched, pytest.raises(ZeroDivisionError):
        # fails at the third shard, if none of those before has its name: a killed command would leave it
        named = lambda: [name for name in os.listdir(tmp_path / "out") if not name.startswith(".")]  # noqa: E731
        written = [*[shard_command.index_of] * 2, lambda *_: 1 / len(named())]
        patched.setattr(shard_command, "index_of", lambda *arguments: written.pop(0)(*arguments))
        shard_command.pack(given, tmp_path / "out/s", 4, max_bad=1)
    assert not os.listdir(tmp_path / "out")
    assert len(Shards(str(shard_command.pack(given, tmp_path / "out/s", 100, max_bad=1)[0]))) == 14
    gone.rename(tmp_path / "4.png")
    refused(lambda: shard_command.pack(given, tmp_path / "out/s", 4), "--out", "of this name")
    assert len(shard_command.pack(given, tmp_path / "out/other", 4)) == 4


def test_a_run_on_shards(tmp_path, shards):
    """Breaks when the command cannot train on shards, or does not see all of them."""
    flags = "--base tiny --validation 0 --per-picture 2 --epochs 2 --batch-size 4 --shuffle-buffer 16 --device cpu"
    finetune.main([*flags.split(), "--data", f"shards:{shards}", "--out", str(tmp_path / "run")])
    assert json.loads((tmp_path / "run/summary.json").read_text())["samples"] == 2 * 33
