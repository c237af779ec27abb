"""Several sources: their shares of an epoch, their order, and which pictures they hold out
together."""

import json
import shutil
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
from PIL import Image

from tests.files import draw, read_lines, write_lines, write_vqav2
from tests.runs import WORLD, refused, settings_of
from train.data import batches
from train.data.batches import Order
from train.data.sources import MEMORY, example_records, read_split
from train.flags import flag_name
from train.settings import Settings, parse


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two files of 12 and 30 records, which share a picture."""
    folder = tmp_path_factory.mktemp("sources")
    for name, count in (("few", 12), ("many", 30)):
        lines = []
        for number in range(count):
            draw(folder / f"{name}{number}.png", (number * 8, count, 0))
            image = f"{name}{number}.png" if number else "few0.png"
            lines.append(json.dumps({"image": image, "prefix": f"count {number}", "suffix": "1"}))
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    return folder


def settings(folder, *sources, **more):
    flags = []
    for source in sources:
        flags += ["--data", source.replace(":", f":{folder}/", 1)]
    for name, value in more.items():
        flags += [flag_name(name), value]
    return settings_of(*flags)


def test_weights_are_shares_of_the_samples(folder, processor, monkeypatch):
    """Breaks when a source has another share than its weight, a record comes more often than
    another of its source, or a resumed run reads other batches."""
    monkeypatch.setattr(
        batches, "collate", lambda records, *_: SimpleNamespace(names=[r.name for r in records])
    )
    made = read_split(settings(folder, "jsonl:few.jsonl@3", "jsonl:many.jsonl@1", validation=0))
    none = settings(folder, "jsonl:few.jsonl@0.001", "jsonl:many.jsonl@1")
    refused(lambda: read_split(none), "weights [0.001, 1.0]")
    order = Order(made, processor, Settings(batch_size=6, epochs=4, seed=1), WORLD)

    def names(first):
        steps = []
        for step in order.steps(first):
            steps.append([micro.names for micro in step])
        return steps

    steps, *resumed = map(names, (0, 1, 7, 20))
    seen = Counter(name for step in steps for names in step for name in names)
    few = {name: count for name, count in seen.items() if "few.jsonl" in name}
    assert sum(seen.values()) == 4 * 42
    assert sum(few.values()) == 4 * 32
    assert len(few) == 12
    for counts in (few, {name: count for name, count in seen.items() if name not in few}):
        assert max(counts.values()) - min(counts.values()) <= 1
    assert steps[:7] != steps[7:14]
    packed = Order(made, processor, Settings(batch_size=6, seed=1, per_picture=6), WORLD)
    doubled = [len({*batch}) < len(batch) for batch in packed.plan(0, 0)]
    assert sum(doubled) < len(doubled) / 2  # by chance, not to share a picture with itself
    assert resumed == [steps[start:] for start in (1, 7, 20)]


def test_each_record_of_several_sources_comes_once(folder, processor):
    """Breaks when a mixture loses or doubles a record, or records of two sources get each other's
    pictures."""
    made = read_split(settings(folder, "jsonl:few.jsonl", "jsonl:many.jsonl", validation=0))
    names = []
    for (micro,) in Order(made, processor, Settings(batch_size=7), WORLD).steps(0):
        assert not micro.bad
        names += micro.names
        for name, index in zip(micro.names, micro.batch.image_index, strict=True):
            pixel = ((micro.batch.pixel_values[index, :2, 0, 0] + 1) * 127.5).round().int().tolist()
            number = int(name.rpartition(":")[2]) - 1
            assert pixel == [number * 8, 30 if "many" in name and number else 12]
    assert len({*names}) == len(names) == 42


def test_a_picture_of_two_sources_is_on_one_side(folder):
    """Breaks when a picture is held out of one file and learned from another."""
    asked = set()
    for seed in range(3):
        given = settings(folder, "jsonl:few.jsonl", "jsonl:many.jsonl", validation=0.5, seed=seed)
        learned = {r.pictures[0].resolve() for r in read_split(given, "train")}
        held_out = {r.pictures[0].resolve() for r in read_split(given, "validation")}
        assert len(learned | held_out) == 41
        assert not learned & held_out
        assert len(held_out) == 20  # or 21
        asked |= held_out
    assert len(asked) > 20  # other seeds, other pictures


def test_flags_reach_the_readers(folder, tmp_path):
    """Breaks when a source is read without a flag, --eval-data embedded asks what was trained on,
    or keys collide."""
    for name in "ab":
        write_vqav2(tmp_path / name, images=4)
    flags = f"--data vqav2:{tmp_path}/a --data vqav2:{tmp_path}/b --images {tmp_path}/b"
    flags += " --answers sampled --validation 0"
    made = read_split(parse([*flags.split(), "--prompt", "say {question}"])[0])
    assert len(made) == 24
    assert len({r.key for r in made}) == 8
    for record in made:
        assert record.sampled
        assert record.prefix.startswith("say What")
        assert record.pictures[0].parts[-3] == "b"

    def held_out(seed):
        given = settings(folder, "jsonl:few.jsonl", eval_data="embedded", samples=20, seed=seed)
        return read_split(given, "validation")

    first = held_out(0)
    assert all("/validation/" in r.name for r in first)
    assert [r.turns for r in first] != [r.turns for r in held_out(1)]


def test_eval_data_is_all_asked_and_shared_pictures_are_counted(folder, warned):
    """Breaks when a part of --eval-data is kept back, something is held out beside it, or a leak
    goes unnoticed: of a picture, of its copy, of one in memory, or of a text."""
    many = folder / "many.jsonl"
    given = settings(folder, "jsonl:few.jsonl", eval_data=f"jsonl:{many}", fraction=0.5)
    assert len(read_split(given)) == 6
    assert len(read_split(given, "validation")) == 30
    whole = replace(given, fraction=1.0)
    rows = read_lines(many)
    for number, row in enumerate(rows[1:5], start=1):  # the first is shared, these are copies
        row["image"] = f"copy{number}.png"
        shutil.copy(folder / f"few{number}.png", folder / row["image"])
    write_lines(folder / "copies.jsonl", rows)
    text = write_lines(folder / "texts.jsonl", [{"prefix": "count", "suffix": "1"}])
    texts = (f"jsonl:{text}",)
    images = [
        {"image": Image.open(folder / f"few{n}.png"), "prefix": "a", "suffix": "b"} for n in (0, 1)
    ]
    names = (f"{MEMORY}data", f"{MEMORY}eval_data")
    memory = {
        names[0]: example_records(images, "data", "."),
        names[1]: example_records(images[1:], "eval_data", "."),
    }
    for change, count, warning in (
        ({"eval_data": (f"jsonl:{many}",)}, 12, "warning: 1 of the 30 pictures"),
        ({"eval_data": (f"jsonl:{folder}/copies.jsonl",)}, 12, "warning: 5 of the 30 pictures"),
        ({"data": names[:1], "eval_data": names[1:]}, 2, "1 of the 1 pictures"),
        ({"data": texts, "eval_data": texts}, 1, "1 of the 1 pictures, or texts"),
    ):
        warned()
        assert len(read_split(replace(whole, **change), memory=memory)) == count
        assert warning in warned()


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--data jsonl:few.jsonl@0.3", "@WEIGHT"),
        (f"--data jsonl:few.jsonl@{'9' * 400} --data jsonl:many.jsonl@1", "@WEIGHT"),
        ("--data jsonl:few.jsonl --fraction 0.01", "--validation and --fraction"),
    ],
)
def test_wrong_sources_are_named(flags, message, folder, monkeypatch):
    """Breaks when a mistake in a source is not found before training, or its remedy is no flag."""
    monkeypatch.chdir(folder)
    refused(lambda: read_split(settings_of(flags)), "few.jsonl", message)


@pytest.mark.parametrize("lost", [1, 2])
def test_more_than_a_share_of_unusable_records_ends_a_run(lost, folder):
    """Breaks when a run goes on with one record of three, or stops at two."""
    rows = (folder / "few.jsonl").read_text().splitlines()[:3]
    gone = [row.replace(".png", ".gif") for row in rows[:lost]]
    (folder / "lost.jsonl").write_text("\n".join([*rows[lost:], *gone]))
    given = settings(folder, "jsonl:lost.jsonl", validation=0)
    if lost == 1:
        assert len(read_split(given)) == 3
    else:
        refused(lambda: read_split(given), "2 of 3 records", "more than 1", "lost.jsonl:2")
