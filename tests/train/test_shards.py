"""Tar shards: made, indexed, shared between processes and workers, resumed, and read without trusting them."""

import io
import json
import os
import random
import tarfile
from collections import Counter
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from eval.records import Record, embedded_records, own_records, vqav2_records
from model.common import UserError
from model.config import PRESETS
from model.images import load_image
from model.processor import Processor
from tests.files import write_vqav2
from tests.train.test_data import records
from train import finetune
from train import shard as shard_command
from train.data import pack as shard
from train.data.batches import Order, collate, plan_epoch
from train.data.shards import Shards, build_index, expand, index_of, sealed
from train.data.sources import read_records
from train.settings import parse


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


def plain(count: int, content=picture) -> list:
    """Sound samples "0", "1", …; `content` makes the bytes of a picture from its number."""
    return [member for i in range(count) for member in ((f"{i}.png", content(i)), (f"{i}.json", text(f"{i}")))]


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """33 records of 27 pictures in three shards of different sizes, some with several questions."""
    folder, number = tmp_path_factory.mktemp("shards"), 0
    for name, count in enumerate((14, 4, 9)):
        members = []
        for _ in range(count):
            questions = [
                {"prefix": "count dog", "suffix": "yes", "name": f"r{number}.{i}"}
                for i in range(1 + 2 * (number % 9 == 4))
            ]
            members += [
                (f"{number:04}.png", picture(number * 9)),
                (f"{number:04}.json", json.dumps(questions if len(questions) > 1 else questions[0]).encode()),
            ]
            number += 1
        write_tar(folder / f"s-{name}.tar", members)
    return f"{folder}/s-{{0..2}}.tar"


def source(name: str, shards: str):
    return Shards(shards, buffer=8) if name == "shards" else records(33, pictures=27)


def names(micro_batches) -> list[str]:
    return [name for micro in micro_batches for name in micro.names]


@pytest.mark.long
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("kind", ["shards", "list"])
def test_every_record_once_an_epoch(kind, size, workers, shards, processor):
    """Breaks when processes or workers lose or double a record, wait for each other, or every epoch has one order."""
    given = source(kind, shards)
    expected = Counter(given[i].name for i in range(len(given)))
    orders = [
        Order(given, processor, batch_size=2, accumulate=2, epochs=2, seed=1, rank=rank, world_size=size)
        for rank in range(size)
    ]
    read = [list(order.steps(0, workers)) for order in orders]
    assert len({tuple(len(step) for step in steps) for steps in read}) == 1  # as many rounds in every step
    assert len(read[0]) == orders[0].total
    epochs = [[names(chain(*steps[i : i + len(steps) // 2])) for steps in read] for i in (0, len(read[0]) // 2)]
    for of_processes in epochs:
        assert Counter(chain(*of_processes)) == expected
    assert epochs[0] != epochs[1]


@pytest.mark.long
@pytest.mark.parametrize("size", [1, 3])
def test_shards_resume_at_the_sample(size, shards, processor):
    """Breaks when a run that goes on reads other records than it would have without the interruption."""
    for rank in range(size):
        order = Order(
            Shards(shards, buffer=8),
            processor,
            batch_size=2,
            accumulate=2,
            epochs=2,
            seed=1,
            per_picture=2,
            rank=rank,
            world_size=size,
        )
        whole = [names(step) for step in order.steps(0)]
        for first in range(order.total):
            assert [names(step) for step in order.steps(first)] == whole[first:]


def test_the_world_of_a_step_does_not_matter(shards, processor):
    """Breaks when a run that goes on with another number of processes takes other micro-batches into its steps."""

    def steps(size):
        read = [
            Order(
                Shards(shards, buffer=8), processor, batch_size=2, accumulate=6 // size, rank=rank, world_size=size
            ).steps(0)
            for rank in range(size)
        ]
        return [sorted(m.names for m in chain(*step) if not m.is_empty) for step in zip(*read, strict=True)]

    assert steps(1) == steps(2) == steps(3)


def test_the_buffer_bounds_how_far_reads_lie_apart(tmp_path):
    """Breaks when an epoch jumps through all shards at once, or is read in the order of the files."""
    for number in range(8):
        write_tar(tmp_path / f"s-{number}.tar", plain(20))
    given = Shards(f"{tmp_path}/s-{{0..7}}.tar", buffer=40)
    order = [index for batch in given.plan(4, seed=0, epoch=0) for index in batch]
    assert sorted(order) == list(range(160))
    for start in range(0, 160, 40):
        window = order[start : start + 40]
        assert len({index // 20 for index in window}) == 2
        assert sum(abs(a - b) == 1 for a, b in zip(window, window[1:], strict=False)) < 10
    assert [index // 20 for index in order[::40]] != sorted(index // 20 for index in order[::40])
    assert len({tuple(index % 20 for index in order[start : start + 40]) for start in range(0, 160, 40)}) == 4


def test_every_record_has_its_own_picture(shards, processor):
    """Breaks when records of different shards pass for questions on one picture."""
    given = Shards(shards)
    micro = collate([given[i] for i in range(len(given))], processor)
    assert micro.batch.pixel_values.shape[0] == 27
    for row, name in enumerate(micro.names):
        red = (micro.batch.pixel_values[micro.image_index[row], 0, 0, 0] + 1) / 2 * 255
        assert round(red.item()) == int(name[1:].split(".")[0]) * 9


def test_every_epoch_has_as_many_batches(shards):
    """Breaks when grouping by picture leaves parts of batches over, so that epochs differ in length, steps are lost."""
    keys = [i // 5 for i in range(1000)]
    for per_picture in (1, 2, 3, 4):
        plans = [plan_epoch(keys, [10] * 1000, 4, 0, epoch, per_picture) for epoch in range(5)]
        assert [len(plan) for plan in plans] == [250] * 5
        given = Shards(shards, buffer=8)
        plans = [list(given.plan(2, 0, epoch, per_picture)) for epoch in range(5)]
        assert [len(plan) for plan in plans] == [17] * 5
        assert all(sorted(chain(*plan)) == list(range(33)) for plan in plans)


def test_splits_share_no_picture_and_lose_none(shards):
    """Breaks when --validation or --fraction is ignored for shards, or parts the questions of a picture."""
    parts = {split: Shards(shards, split, validation=0.3, seed=3) for split in ("train", "validation")}
    found = {split: {given[i].name for i in range(len(given))} for split, given in parts.items()}
    assert not found["train"] & found["validation"] and len(found["train"] | found["validation"]) == 33
    pictures = {split: {name.split(".")[0] for name in of_split} for split, of_split in found.items()}
    assert not pictures["train"] & pictures["validation"] and 3 <= len(pictures["validation"]) <= 14
    part = Shards(shards, validation=0.3, fraction=0.5, seed=3)
    assert {part[i].name for i in range(len(part))} < found["train"] and 5 < len(part) < 20


def test_ranges_are_a_shells():
    """Breaks when the numbers of a pattern lose their zeros, or a mistyped range trains on nothing."""
    assert [str(path) for path in expand("a-{08..11}.tar")] == ["a-08.tar", "a-09.tar", "a-10.tar", "a-11.tar"]
    assert [str(path) for path in expand("{0..1}/{9..10}")] == ["0/9", "0/10", "1/9", "1/10"]
    assert expand("a.tar") == [Path("a.tar")]
    for wrong in ("{5..4}", "{0..99999999999}"):
        with pytest.raises(UserError, match="write {first..last}"):
            expand(wrong)


# Other people's tars


@pytest.mark.parametrize("style", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_tars_of_every_format_are_read(style, tmp_path, processor):
    """Breaks when shards made by another program are not, or a key is cut at another dot than webdataset's."""
    folder = tarfile.TarInfo("set.v1")
    folder.type = tarfile.DIRTYPE
    far = "x" * 90 + "/" + "y" * 90 if style != tarfile.USTAR_FORMAT else "x" * 90 + "/" + "y" * 60
    members = [
        (folder, None),
        ("README", b"not a sample"),
        ("__meta__.txt", b""),
        ("set.v1/one.JPG", picture(10, "jpeg")),
        ("set.v1/one.json", text("one")),
        ("set.v1/one.txt", b"ignored"),
        ("zwei ü.json", text("two", name="named", choices=["a", "b"])),
        ("zwei ü.webp", picture(20, "webp")),
        (f"{far}.png", picture(30)),
        (f"{far}.json", text("three")),
        ("four.v1.png", picture(40)),
        ("four.v1.json", text("four")),
        (f"{far}5.0.png", picture(50)),
        (f"{far}5.json", text("five", pictures=[2, 0, 1])),
        (f"{far}5.1.jpg", picture(60, "jpeg", (900, 300))),
        (f"{far}5.cls", b"3"),
        (f"{far}5.2.png", picture(70)),
    ]
    path = write_tar(tmp_path / "a.tar", members, style)
    given = Shards(str(path), sampled=True)
    made = [given[i] for i in range(len(given))]
    assert [record.suffix for record in made] == ["one", "two", "three", "four", "five"]
    assert [record.answers for record in made] == [(), ("a", "b"), (), (), ()]
    assert len({record.name for record in made}) == 5
    assert [round(load_image(one()).getpixel((0, 0))[0], -1) for one in made[4].pictures] == [70, 50, 60]
    assert made[0].name == "a.tar/set.v1/one[0]" and made[1].name == "named"
    micro = collate(made, processor)
    assert not micro.bad and micro.batch.pixel_values.shape[0] == 4 + 3
    assert [Shards(str(path), sampled=on)[1].sampled for on in (True, False)] == [True, False]


def test_names_and_links_reach_nothing_outside(tmp_path, processor, monkeypatch):
    """Breaks when a member's name or link target is used as a path."""
    monkeypatch.chdir(tmp_path)
    secret = tmp_path / "secret.png"
    secret.write_bytes(picture())

    def link(name, kind):
        member = tarfile.TarInfo(name)
        member.type, member.linkname = kind, str(secret)
        return member, None

    device = tarfile.TarInfo("d.png")
    device.type = tarfile.CHRTYPE
    members = [
        ("/../../etc/evil.png", picture()),
        ("/../../etc/evil.json", text("up")),
        (f"{tmp_path}/absolute.png", picture()),
        (f"{tmp_path}/absolute.json", text("absolute")),
        link("b.png", tarfile.SYMTYPE),
        ("b.json", text("b")),
        link("c.png", tarfile.LNKTYPE),
        ("c.json", text("c")),
        (device, None),
        ("d.json", text("d")),
        ("\x1b[2J\n\udcff.json", text("escape")),
    ]
    given = Shards(str(write_tar(tmp_path / "a.tar", members)))
    before = {str(path) for path in tmp_path.rglob("*")}
    micro = next(iter(Order(given, processor, batch_size=9).steps(0)))[0]
    assert len(micro.names) == 2 and len(micro.bad) == 4
    assert all("has not one picture and one .json" in line and line.isprintable() for line in micro.bad)
    assert {str(path) for path in tmp_path.rglob("*")} == before and not Path("/etc/evil.png").exists()


def test_bad_records_are_left_out_and_named(tmp_path, processor):
    """Breaks when one bad record of a shard ends a night's run, or disappears without a word."""
    deep = b"[" * 100_000
    members = [
        ("good.png", picture()),
        ("good.json", text()),
        ("picture.png", b"broken"),
        ("picture.json", text()),
        ("json.png", picture()),
        ("json.json", b"{"),
        ("deep.png", picture()),
        ("deep.json", deep),
        ("latin.png", picture()),
        ("latin.json", '{"prefix": "ä"}'.encode("latin-1")),
        ("field.png", picture()),
        ("field.json", b'{"prefix": "x"}'),
        ("type.png", picture()),
        ("type.json", b'{"prefix": "x", "suffix": 3}'),
        ("empty.png", picture()),
        ("empty.json", b"[]"),
        ("text.png", picture()),
        ("text.json", b'"text"'),
        ("control.png", picture()),
        ("control.json", text("<eos>")),
        ("lonely.png", picture()),
        ("bare.json", text()),
        ("two.png", picture()),
        ("two.jpg", picture()),
        ("two.json", text()),
    ]
    given = Shards(str(write_tar(tmp_path / "a.tar", members)))
    micro = next(iter(Order(given, processor, batch_size=20).steps(0)))[0]
    assert micro.names == ("a.tar/good[0]",)
    keys = "picture json deep latin field type empty text control lonely bare two".split()
    for key in keys:
        assert [line for line in micro.bad if "a.tar" in line and key in line], key
    assert len(micro.bad) == len(keys) and not any("\n" in line for line in micro.bad)


@pytest.mark.long
def test_too_many_bad_records_stop_the_run(tmp_path):
    """Breaks when --max-bad is not heeded for shards."""
    path = write_tar(tmp_path / "a.tar", plain(8, lambda i: b"broken"))
    with pytest.raises(UserError, match="unusable records.*a.tar"):
        finetune.main(
            [
                "--base",
                "tiny",
                "--data",
                f"shards:{path}",
                "--max-bad",
                "3",
                "--validation",
                "0",
                "--batch-size",
                "2",
                "--device",
                "cpu",
                "--out",
                str(tmp_path / "run"),
            ]
        )


def test_a_damaged_tar_is_one_line(tmp_path):
    """Breaks when a copy that was cut short trains on the part that arrived, or any byte ends in a traceback."""
    whole = write_tar(tmp_path / "whole.tar", plain(4)).read_bytes()
    assert len(build_index(tmp_path / "whole.tar")[0]) == 4
    end = 4 * 4 * 512
    for length in (0, 1, 511, 512, 700, 1024, 2048, 4096, 5000, end - 1, end):
        path = tmp_path / f"cut-{length}.tar"
        path.write_bytes(whole[:length])
        with pytest.raises(UserError, match=f"cut-{length}.tar: .*(make|copy) it again"):
            Shards(str(path))
    packed = tmp_path / "packed.tar"
    with tarfile.open(packed, "w:gz"):
        pass
    with pytest.raises(UserError, match="not compressed"):
        Shards(str(packed))
    with pytest.raises(UserError, match="1 of 3 shards are not there.*cut-2.tar"):
        Shards(f"{tmp_path}/cut-{{0..2}}.tar")
    dice, outcomes = random.Random(0), Counter()
    for number in range(300):  # random bytes changed, in headers above all
        raw = bytearray(whole)
        for _ in range(3):
            raw[dice.randrange(8) * 1024 + dice.randrange(512)] = dice.randrange(256)
        path = tmp_path / f"{number}.tar"
        path.write_bytes(raw)
        try:
            given = Shards(str(path))
            for index in range(len(given)):
                load_image(given[index].pictures[0]())
            outcomes["read"] += 1
        except UserError as error:
            assert "\n" not in str(error)
            outcomes["refused"] += 1
    assert outcomes["refused"] > 50


def test_an_index_is_made_anew_where_it_does_not_fit(tmp_path):
    """Breaks when an index that is missing, damaged or another shard's is believed."""
    path = write_tar(tmp_path / "a.tar", plain(4))
    index = tmp_path / "a.index.safetensors"
    rows = index_of(path)
    sound = index.read_bytes()
    other = write_tar(tmp_path / "b.tar", [*plain(3), ("much/more", bytes(99_999))])
    index_of(other)
    for wrong in (b"", b"nonsense", sound[:-9], (tmp_path / "b.index.safetensors").read_bytes()):
        index.write_bytes(wrong)
        assert np.array_equal(index_of(path), rows) and index.read_bytes() == sound
    # one of the right size that points elsewhere is found out by the headers in the tar
    from safetensors.numpy import load_file, save_file

    tensors = load_file(index)
    for elsewhere in (rows[1, 2] + 512, rows[1, 4]):
        tensors["records"][1, 2] = elsewhere
        save_file(tensors, index)  # the hash is that of the right rows: made anew
        assert np.array_equal(index_of(path), rows)
        save_file(sealed(tensors["records"], tensors["size_and_end"]), index)
        with pytest.raises(UserError, match="no member of .* bytes at byte .*a.index.safetensors"):
            Shards(str(path))[1].pictures[0]()
    for column, nonsense in ((2, 1 << 62), (2, -1), (0, 1 << 40), (3, 1 << 40)):
        wrong = rows.copy()
        wrong[1, column] = nonsense
        save_file(sealed(wrong, tensors["size_and_end"]), index)
        assert np.array_equal(index_of(path), rows)


def test_shards_can_be_read_where_nothing_may_be_written(tmp_path, monkeypatch):
    """Breaks when foreign shards on a read-only disk cannot be trained on."""
    path = write_tar(tmp_path / "a.tar", [("a.png", picture()), ("a.json", text())])

    def refuse(*args, **options):
        raise PermissionError("read-only file system")

    monkeypatch.setattr("model.common.tempfile.mkstemp", refuse)
    assert Shards(str(path))[0].suffix == "a dog" and os.listdir(tmp_path) == ["a.tar"]


# Making them


def read_all(pattern: str, **options) -> dict:
    given = Shards(pattern, **options)
    return {given[i].name: given[i] for i in range(len(given))}


@pytest.mark.long
def test_shards_hold_what_their_source_holds(tmp_path, processor):
    """Breaks when a question, an answer or a pixel is changed on the way into a shard."""
    write_vqav2(tmp_path / "vqav2")
    shard_command.main([f"vqav2:{tmp_path / 'vqav2'}", "--out", str(tmp_path / "out/v"), "--per-shard", "7"])
    assert sorted(path.name for path in (tmp_path / "out").glob("*.tar")) == ["v-000.tar", "v-001.tar", "v-002.tar"]
    made = read_all(f"{tmp_path}/out/v-{{000..002}}.tar", sampled=True)
    expected = vqav2_records(tmp_path / "vqav2", "answer {question}", True)
    assert len(made) == len(expected) == 60
    reduced = Processor(PRESETS["tiny"], processor.tokenizer, draft=True)
    for record in expected:
        found = made[record.name]
        assert (found.prefix, found.suffix, found.answers, found.sampled) == (*record.turns[0], record.answers, True)
        assert found.pictures[0]().read() == record.pictures[0].read_bytes()
        for one in (processor, reduced):
            pair = [collate([r], one).batch.pixel_values for r in (found, record)]
            assert torch.equal(*pair)
    shard_command.main(["embedded", "--samples", "30", "--out", str(tmp_path / "out/e")])
    drawn = read_all(f"{tmp_path}/out/e-000.tar")
    for record in embedded_records(count=30):
        found, given = drawn[record.name].pictures[0](), record.pictures[0]()
        assert np.array_equal(np.asarray(load_image(found)), np.asarray(given))
    assert len({record.key for record in drawn.values()}) == len({record.key for record in embedded_records(count=30)})


def test_shards_hold_conversations_and_any_number_of_pictures(tmp_path, processor):
    """Breaks when a turn, an answer, or the order of several pictures is lost in a shard, or a picture is written twice
    or learned while it is held out."""
    for i in range(12):
        (tmp_path / f"{i}.png").write_bytes(picture(i * 20, size=(16, 16)))
    says = [{"from": role, "value": text} for role, text in zip(("human", "gpt") * 2, "abcd", strict=True)]
    rows = [{"image": f"{i}.png", "prefix": "count dog", "answers": [f"{i}", "no"]} for i in range(12)]
    rows += [{"image": ["3.png", "1.png", "1.png"], "conversations": says}, {"conversations": says}]
    rows += [{"image": ["1.png", "gone.png"], "prefix": "a", "suffix": "b"}, {"prefix": "c", "suffix": "d"}]
    (tmp_path / "own.json").write_text(json.dumps(rows))
    given = own_records(tmp_path / "own.json", True)
    paths = shard.make(given, tmp_path / "s", 4, 1000, max_bad=1)
    with tarfile.open(paths[0]) as first, tarfile.open(paths[1]) as second, tarfile.open(paths[2]) as third:
        names = [name for tar in (first, second, third) for name in tar.getnames()]
    assert len(paths) == 4 and sum(name.endswith(".png") for name in names) <= 12
    made = read_all(f"{tmp_path}/s-{{000..003}}.tar", sampled=True)
    expected = [record for record in given if record.turns]
    assert made.keys() == {record.name for record in expected} and len(made) == 15
    for record in expected:
        found = made[record.name]
        assert (found.turns, found.answers, found.sampled) == (record.turns, record.answers, record.sampled)
        assert [one().read() for one in found.pictures] == [path.read_bytes() for path in record.pictures]
        pair = [collate([r], processor).batch for r in (found, record)]
        assert all(torch.equal(getattr(pair[0], name), getattr(pair[1], name)) for name in vars(pair[0]))
    for seed in range(5):
        options = {"validation": 0.5, "seed": seed}
        sides = [read_all(f"{tmp_path}/s-{{000..003}}.tar", split=one, **options) for one in ("train", "validation")]
        learned, asked = ({one().read() for r in side.values() for one in r.pictures} for side in sides)
        assert not learned & asked


def test_photographs_are_decoded_reduced(tmp_path, processor):
    """Breaks when large JPEGs in shards are decoded in full, several times slower than files are."""
    Image.effect_noise((900, 910), 90).convert("RGB").save(tmp_path / "0.jpg")
    path = write_tar(tmp_path / "a.tar", [("0.jpg", (tmp_path / "0.jpg").read_bytes()), ("0.json", text())])
    reduced = Processor(PRESETS["tiny"], processor.tokenizer, draft=True)
    expected, full = (
        collate([Record("r", "k", (tmp_path / "0.jpg",), (("caption en", "a dog"),))], one).batch.pixel_values
        for one in (reduced, processor)
    )
    assert torch.equal(collate([Shards(str(path))[0]], reduced).batch.pixel_values, expected)
    assert not torch.equal(expected, full)


def test_rows_with_more_pictures_are_longer(tmp_path, processor):
    """Breaks when rows of one picture are padded to rows of several, in shards or in a mixture with a file."""
    four = [
        (f"{i}b.{part}.png", picture(i)) if part < 4 else (f"{i}b.json", text(pictures=[0, 1, 2, 3]))
        for i in range(60)
        for part in range(5)
    ]
    (tmp_path / "0.png").write_bytes(picture())
    path = write_tar(tmp_path / "a.tar", plain(60) + four)
    lines = [
        {"image": ["0.png"] * count, "prefix": "caption en", "suffix": "a dog"} for count in (1, 4) for _ in range(60)
    ]
    (tmp_path / "own.jsonl").write_text("\n".join(map(json.dumps, lines)))
    data = [word for source in (f"shards:{path}", f"jsonl:{tmp_path}/own.jsonl") for word in ("--data", source)]
    for given in (Shards(str(path)), read_records(parse([*data, "--validation", "0"])[0])):
        plan = Order(given, processor, batch_size=8).plan(epoch=0, first=0)
        counts = [{len(given[i].pictures) for i in batch} for batch in plan]
        assert len(counts) == len(given) // 8 and sum(len(count) > 1 for count in counts) <= 1


def write_jsonl(folder: Path, count: int = 10, missing: tuple[int, ...] = ()) -> Path:
    for i in range(count):
        (folder / f"{i}.png").write_bytes(picture(i, size=(64, 64)))
    lines = [json.dumps({"image": f"{i}.png", "prefix": "caption en", "suffix": f"dog {i}"}) for i in range(count)]
    (folder / "own.jsonl").write_text("\n".join(lines) + "\n")
    return folder / "own.jsonl"


def test_an_interrupted_making_goes_on(tmp_path, monkeypatch):
    """Breaks when half a shard bears a shard's name, or the rest is made otherwise than without the interruption."""
    given = own_records(write_jsonl(tmp_path))
    whole = shard.make(given, tmp_path / "whole/s", 3, 1000)
    honest, written = shard.write_shard, []

    def dies(path, samples, max_bad):
        if len(written) == 2:
            monkeypatch.setattr(shard, "encode", lambda record: 1 / 0)
        written.append(path)
        return honest(path, samples, max_bad)

    monkeypatch.setattr(shard, "write_shard", dies)
    with pytest.raises(ZeroDivisionError):
        shard.make(given, tmp_path / "cut/s", 3, 1000)
    assert len(list((tmp_path / "cut").glob("*.tar"))) == 2
    monkeypatch.undo()
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "cut").glob("*.tar")}
    cut = shard.make(given, tmp_path / "cut/s", 3, 1000)
    assert all(path.stat().st_mtime_ns == time for path, time in times.items())
    assert [path.read_bytes() for path in cut] == [path.read_bytes() for path in whole]
    with pytest.raises(UserError, match="belongs to shards of other records"):
        shard.make(given, tmp_path / "cut/s", 4, 1000)
    with pytest.raises(UserError, match="belongs to shards of other records"):
        shard.make(given[:-1], tmp_path / "cut/s", 3, 1000)


def test_shards_of_other_pictures_are_not_kept(tmp_path):
    """Breaks when pictures are replaced, or tars of something else have the names, and the old ones stay in silence."""
    given, prefix = own_records(write_jsonl(tmp_path)), tmp_path / "s"
    paths, manifest = shard.make(given, prefix, 5, 1000), tmp_path / "s.json"
    old = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({name: value for name, value in old.items() if name != "pictures"}))
    assert shard.make(given, prefix, 5, 1000) == paths and json.loads(manifest.read_text()) == old
    (tmp_path / "0.png").write_bytes(picture(9, size=(64, 64)))
    with pytest.raises(UserError, match="belongs to shards of other records, pictures"):
        shard.make(given, prefix, 5, 1000)
    next(path for path in paths if b'"dog 0"' in path.read_bytes()).unlink()  # its pictures are still to be packed
    assert shard.make(given, prefix, 5, 1000) == paths
    manifest.unlink()
    with pytest.raises(UserError, match="s-000.tar is there, but not"):
        shard.make(given, prefix, 5, 1000)
    assert not manifest.exists()


def test_sizes_of_shards(tmp_path):
    """Breaks when a shard grows beyond --per-shard or --megabytes, or a sample falls between two."""
    samples, size = shard.group(own_records(write_jsonl(tmp_path)), seed=0), 1000
    for i in range(10):
        (tmp_path / f"{i}.png").write_bytes(bytes(size))
    assert shard.cut(samples, 4, 1000) == [range(0, 4), range(4, 8), range(8, 10)]
    assert shard.cut(samples, 1000, 3.5 * size / 1e6) == [range(0, 3), range(3, 6), range(6, 9), range(9, 10)]
    assert shard.cut(samples, 1000, size / 2e6) == [range(i, i + 1) for i in range(10)]  # each alone exceeds it
    assert [sample[0].name for sample in samples] != sorted(sample[0].name for sample in samples)


def test_pictures_that_cannot_be_put_in_are_named(tmp_path, capsys):
    """Breaks when missing pictures are silently missing from the shards too, or a folder of them makes empty shards."""
    file = write_jsonl(tmp_path)
    given = own_records(file)
    (tmp_path / "4.png").unlink()
    paths = shard.make(given, tmp_path / "s", 100, 1000, max_bad=1)
    assert "left out own.jsonl:5: " in capsys.readouterr().out
    assert len(Shards(str(paths[0]))) == 9
    with pytest.raises(UserError, match="more unusable records than --max-bad.*4.png"):
        shard.make(given, tmp_path / "t", 100, 1000)
    assert not (tmp_path / "t-000.tar").exists()


@pytest.mark.long
def test_a_run_on_shards(tmp_path, shards):
    """Breaks when the command cannot train on shards, or does not see all of them."""
    arguments = [
        "--base",
        "tiny",
        "--data",
        f"shards:{shards}",
        "--validation",
        "0",
        "--per-picture",
        "2",
        "--epochs",
        "2",
        "--batch-size",
        "4",
        "--shuffle-buffer",
        "16",
        "--device",
        "cpu",
        "--out",
        str(tmp_path / "run"),
    ]
    assert parse(arguments)[0].shuffle_buffer == 16
    finetune.main(arguments)
    assert json.loads((tmp_path / "run/summary.json").read_text())["samples"] == 2 * 33
    with pytest.raises(UserError, match="these are shards already"):
        shard_command.main([f"shards:{shards}", "--out", str(tmp_path / "again")])
