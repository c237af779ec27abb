"""A user's own data: what is read, what is shown to the model, what is learned of it, and what is
held out."""

import json
import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image

from eval.answer import layout
from eval.data.records import (
    Box,
    embedded_records,
    one_picture_records,
    read_coco,
    read_data,
    read_examples,
    split_records,
)
from eval.question import question_of
from model.processor import processor_for
from model.systems.configs import MambaConfig, ProjectorConfig, QMambaConfig, WingsConfig
from tests.runs import refused
from train.data.batches import collate
from train.data.sources import held_records


def write(folder, name, value):
    """A JSON file; for *.jsonl its entries as lines."""
    lines = (
        "".join(json.dumps(entry) + "\n" for entry in value)
        if name.endswith(".jsonl")
        else json.dumps(value)
    )
    (folder / name).write_text(lines)
    return folder / name


def draw(folder, *names, size=(8, 8)):
    for number, name in enumerate(names):
        (folder / name).parent.mkdir(exist_ok=True)
        Image.new("RGB", size, (number * 40 % 256, number, 0)).save(folder / name)


def says(*texts):
    """A conversation in LLaVA's layout: human and gpt in turn."""
    return [
        {"from": ("human", "gpt")[number % 2], "value": text} for number, text in enumerate(texts)
    ]


def chat(*contents):
    """A conversation in the layout of TRL and ms-swift: user and assistant in turn."""
    return [
        {"role": ("user", "assistant")[number % 2], "content": value}
        for number, value in enumerate(contents)
    ]


def shown(processor, record):
    """What the model reads of a record: (piece, whether it is learned, its type); P is a whole
    picture."""
    micro = collate([record], processor)
    assert not micro.bad, micro.bad
    rows = micro.batch.input_ids, micro.batch.labels, micro.batch.token_type_ids
    ids, labels, types = (row[0].tolist() for row in rows)
    targets = [label for label in labels if label != -100]
    assert micro.targets[0][micro.targets[0] != -100].tolist() == targets
    assert micro.tokens == len(targets)
    image = processor.config.image_token_id
    pieces = processor.tokenizer
    per_picture = processor.config.num_image_tokens
    names = ["P" if i == image else pieces.id_to_piece(i) for i in ids]
    run = [
        (n, label == i, kind) for n, i, label, kind in zip(names, ids, labels, types, strict=True)
    ]
    out = []
    while run:
        length = per_picture if run[0][0] == "P" else 1
        assert run[:length] == [run[0]] * length
        out = [*out, run[0]]
        run = run[length:]
    return out


def marked(text):
    """What `shown` returns, by hand: pieces after blanks, types as 0 or 1 before a colon, learned
    ones with a star."""
    return [
        (piece.lstrip("*").replace("\\n", "\n"), piece.startswith("*"), int(kind))
        for kind, piece in (word.split(":", 1) for word in text.split())
    ]


@pytest.fixture(scope="module")
def processors(processor):
    """One of each system, on the vocabulary of the embedded base."""
    config = processor.config
    ids = {
        "pad_token_id": config.pad_token_id,
        "eos_token_id": config.eos_token_id,
        "bos_token_id": 2,
    }
    mamba = MambaConfig(hidden_size=8, num_hidden_layers=1, vocab_size=config.text.vocab_size + 1)
    parts = {
        "vision": config.vision,
        "projector": ProjectorConfig(queries=8),
        "text": replace(mamba, **ids),
    }
    qmamba = replace(QMambaConfig(), image_token_id=config.image_token_id, **parts)
    wings = WingsConfig(**vars(config), rank=4)
    made = [processor_for(of, processor.tokenizer) for of in (wings, qmamba)]
    return dict(zip(("paligemma", "wings", "qmamba"), (processor, *made), strict=True))


IMAGE = {"type": "image"}
A = {"type": "text", "text": "a"}
CONVERSATION = says("Where is <image> the dog?", "top left", "count cat", "2")
BRIEF = "0:B 0:e 0:▁ 0:b 0:r 0:i 0:e 0:f 0:. 0:\\n"
# PaliGemma: pictures first, and the first prompt with them both ways; all after it is causal
FRONT = "0:P 0:<bos> 0:Where 0:▁is 0:▁the 0:▁dog 0:? 0:\\n"
INSIDE = "0:<bos> 0:Where 0:▁is 0:▁ 0:P 0:▁the 0:▁dog 0:? 0:\\n"
LATER = " 1:*top 1:*▁left 1:*<eos> 1:count 1:▁cat 1:\\n 1:*2 1:*<eos>"


def test_every_answer_and_its_end_are_learned_and_nothing_else(processors, tmp_path):
    """Breaks when a prompt, picture or bos carries loss, an answer's end does not, or a picture is
    elsewhere."""
    draw(tmp_path, "a.png", "b.png")
    system = {"from": "system", "value": "Be brief."}
    rows = [
        {"id": "1", "image": "a.png", "conversations": CONVERSATION},
        {"id": "2", "conversations": says("count cat", "2")},
        {
            "id": "3",
            "image": ["a.png", "b.png"],
            "conversations": says("<image>\n<image>\ncount dog", "1"),
        },
        {"image": ["a.png", "b.png"], "prefix": "count dog", "suffix": "1"},
        {"image": "a.png", "conversations": [system, *says("<image>\ncount dog", "1")]},
        {"image": "b.png", "conversations": says("count dog", "1", "<image>count cat", "2")},
    ]
    made = read_examples(write(tmp_path, "own.json", rows))
    assert [record.name for record in made] == [f"own.json[{number}]" for number in range(6)]
    plain = "0:P 0:P 0:<bos> 0:count 0:▁dog 0:\\n 1:*1 1:*<eos>"
    one = plain.replace("0:P 0:P", "0:P")
    two = "0:<bos> 0:count 0:▁cat 0:\\n 1:*2 1:*<eos>"
    more = " 1:count 1:▁cat 1:\\n 1:*2 1:*<eos>"
    told = one.replace("<bos>", f"<bos> {BRIEF}")  # the system's text is no part of the answer
    expected = [FRONT + LATER, two, plain, plain, told, one + more]
    assert [shown(processors["paligemma"], record) for record in made] == [
        marked(text) for text in expected
    ]
    newline = "0:P 0:<bos> 0:\\n 0:count 0:▁dog 0:\\n 1:*1 1:*<eos>"
    third = newline.replace("0:\\n", "0:\\n 0:P 0:\\n", 1)
    last = "0:<bos> 0:count 0:▁dog 0:\\n 1:*1 1:*<eos> 1:P"
    told = one.replace("0:P 0:<bos>", f"0:<bos> {BRIEF} 0:P 0:\\n")
    expected = [INSIDE + LATER, two, third, plain, told, last + more]
    for system in ("wings", "qmamba"):
        assert [shown(processors[system], record) for record in made] == [
            marked(text) for text in expected
        ], system


def test_of_a_conversation_the_first_turn_is_explored(tmp_path):
    """Breaks when answers to the last turn count for the first, or a picture is shown to a question
    before it."""
    draw(tmp_path, "a.png")
    later = {"image": "a.png", "conversations": says("count dog", "1", "<image>count cat", "2")}
    kept = {"image": "a.png", "conversations": CONVERSATION, "answers": ["2"]}
    lost = {"image": "lost.png", "prefix": "count dog", "suffix": "1"}
    source = f"jsonl:{write(tmp_path, 'own.jsonl', [later, lost, kept])}"
    (record,) = one_picture_records(source, 3)
    assert (record.turns, record.answers) == ((("Where is <image> the dog?", "top left"),), ())


def test_a_later_question_is_asked_as_it_is_learned(processors, tmp_path):
    """Breaks when a conversation is scored without its earlier turns, or its picture is elsewhere
    than in training."""
    draw(tmp_path, "a.png")
    (record,) = read_examples(
        write(tmp_path, "own.jsonl", [{"image": "a.png", "conversations": CONVERSATION}])
    )
    for processor in processors.values():
        learned = collate([record], processor).batch
        ids, types, _ = layout(processor, question_of(record), 1)
        assert (
            ids + processor.encode("2") + [processor.config.eos_token_id]
            == learned.input_ids[0].tolist()
        )
        assert types == learned.token_type_ids[0].tolist()[: len(types)]


@pytest.mark.parametrize(
    "record",
    [
        {"conversations": says("a", "b", "c")},
        {"conversations": says("<image>", "a")},
        {"image": "a.png", "conversations": says("a", "<image>")},
        {"image": ["a.png", "c.png"], "prefix": "a", "suffix": "b"},
        {"image_path": "a.png", "prefix": "a", "suffix": "b"},
        {"image": ["a.png"], "images": ["a.png"], "prefix": "a", "suffix": "b"},
        {"messages": chat([IMAGE, A], "b")},
        {"images": ["a.png"], "messages": chat([{"type": "video"}, A], "b")},
        {
            "images": ["a.png"] * 2,
            "messages": chat([IMAGE | {"index": 1}, IMAGE | {"index": 0}, A], "b"),
        },
        {
            "images": ["a.png"],
            "messages": chat("<image>a", "<bbox>"),
            "objects": {"bbox": [[1, 2, 3, 4]]},
        },
        *(
            {"messages": [*chat("a"), {"role": "assistant", "content": "b"} | mark]}
            for mark in (
                {"loss": False},
                {"weight": 0},
                {"train": 0.5},
                {"loss_scale": "last"},
                {"tool_calls": [{"name": "b"}]},
            )
        ),
        {"conversations": [says("a")[0] | {"train": True}, says("a", "b")[1]]},
        {"prefix": "a", "suffix": "b", "weight": 0},
        {"messages": chat("a", "b"), "rejected_response": "c"},
        {"messages": chat("a", "b"), "tools": "[{}]"},
        {"messages": chat("a", "b"), "conversations": says("a", "c")},
        {"messages": chat("a", "b"), "prefix": "c", "suffix": "d"},
        {"messages": [{"role": "system", "content": "a"}]},
        {"messages": [*chat("a", "b"), {"role": "system", "content": "c"}, *chat("d", "e")]},
        {"messages": [{"role": "System", "content": "a"}, *chat("b", "c")]},
        {"system": 5, "prefix": "a", "suffix": "b"},
        {"system_prompt": "a", "prefix": "b", "suffix": "c"},
        {"messages": chat("a", "b"), "kto_tag": False},
        {"file_name": "a.png", "prefix": "a", "suffix": "b"},
        {"image": None, "img": "a.png", "prefix": "a", "suffix": "b"},
        b'{"prefix": "a", "suffix": "b", "suffix": "c"}',
        {"prefix": "a", "answers": ["b", 2]},
        {"prefix": "a", "answers": "bb"},
        {"prefix": "a"},
        {"prefix": "a", "suffix": "a <eos>"},
        {"prefix": "a", "suffix": "cat " * 9000},
        {"image": "\x1b[31mred\x1b[0m\n.png", "prefix": "a", "suffix": "b"},
        *(b'{"image": "a.png", "prefix"', b"[" * 100_000, b'{"prefix": "\xff", "suffix": "b"}'),
    ],
    ids=lambda record: str(record)[:40],
)
def test_a_malformed_record_is_named_left_out_and_counted(record, processor, tmp_path):
    """Breaks when a conversation that cannot be learned is learned in part, or ends the run, or
    goes unnoticed."""
    draw(tmp_path, "a.png")
    good = b'{"prefix": "count dog", "suffix": "2"}'
    bad = record
    bad = bad if type(bad) is bytes else json.dumps(bad).encode()
    (tmp_path / "own.jsonl").write_bytes(b"\n".join([b"\xef\xbb\xbf" + good, bad, b"", good]))
    micro = collate(read_examples(tmp_path / "own.jsonl"), processor)
    assert micro.names == ("own.jsonl:1", "own.jsonl:4")
    assert len(micro.bad) == 1
    assert micro.bad[0].startswith("own.jsonl:2: ")
    assert micro.bad[0].isprintable()
    assert len(micro.bad[0]) < 700


def test_layouts_of_other_tools_are_read_as_ours(tmp_path):
    """Breaks when a file of TRL, ms-swift or a spreadsheet gives other turns or pictures than it
    shows."""
    draw(tmp_path, "x/a.png", "x/b.png")
    (tmp_path / "link.png").symlink_to(tmp_path / "x/b.png")
    a = tmp_path / "x/a.png"
    b = tmp_path / "link.png"
    none = {"image": None, "conversations": None}
    system = [{"role": "system", "content": "Be brief."}, {"role": "developer", "content": [A]}]
    parts = [
        {"index": None, "text": "dog\n", "type": "text"},
        {"index": 0, "text": None, "type": "image"},
    ]
    own = [
        IMAGE | {"image": "x/a.png"},
        {"type": "image_url", "image_url": {"url": f"file://{b}"}},
        A,
    ]
    # ms-swift's documentation: marks in texts, absolute paths; TRL's llava-instruct-mix-vsft;
    # others
    cases = [
        (
            [*system, *chat("<image><image>a", "b", "c", "d")],
            [a, b],
            (("Hear.\nBe brief.\na\n<image><image>a", "b"), ("c", "d")),
        ),
        (chat(parts, [A]), [a], (("dog\n<image>", "a"),)),
        (chat("cat", "1"), [a, b], (("One word.\ncat", "1"),)),
        (chat(own, "b"), [a, b], (("<image><image>a", "b"),)),
        ([*chat("a", "Hello")[1:], *chat("cat", "1")], [a], (("cat", "1"),)),  # as LLaVA
    ]
    rows = [
        none | {"messages": said, "images": list(map(str, pictures))} for said, pictures, _ in cases
    ]
    rows[0]["messages"][3] |= {"loss": True, "train": None, "weight": 1}
    rows[0]["system"] = "Hear."
    rows[2] |= {"type": "count", "system": "One word.", "width": 8, "id": 1, "tools": None}
    rows[3]["images"] = None
    made = read_data(f"jsonl:{write(tmp_path, 'own.jsonl', rows)}")
    assert [(list(record.pictures), record.turns) for record in made] == [
        case[1:] for case in cases
    ]
    assert [record.kind for record in made] == ["", "", "count", "", ""]
    refused(
        lambda: read_data(f"jsonl:{write(tmp_path, 'o.json', [{'query': 'a'}])}"),
        "query",
        '"messages"',
    )


@pytest.mark.parametrize(("kind", "name"), [("csv", "own.txt"), ("jsonl", "own.csv")])
def test_a_table_is_read_as_its_rows(kind, name, tmp_path):
    """Breaks when a comma ends a text in quotes, a row with too many cells loses one, or an empty
    cell is a picture."""
    draw(tmp_path, "a.png")
    table = 'image,prefix,suffix,type\r\na.png,"Is it red, or blue?",red,colour\r\n,a,2,\r\na.png,a,b,c,d\r\n'
    (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + table.encode())  # as Excel writes it
    red, blank, bad = read_data(f"{kind}:{tmp_path / name}")
    assert (red.pictures, red.turns, red.kind) == (
        (tmp_path / "a.png",),
        (("Is it red, or blue?", "red"),),
        "colour",
    )
    assert (blank.pictures, blank.turns, blank.kind) == ((), (("a", "2"),), "")
    assert not bad.turns
    assert "cells" in bad.pictures[0].problem


@pytest.mark.parametrize(
    ("header", "row", "part"),
    [
        ("image,prefix,suffix,suffix", "a.png,a,b,c", "'suffix', 'suffix'"),
        ("img,question,answer", "a.png,a,b", "'img', 'question', 'answer'"),
        ("image;prefix;suffix", "a.png;a;b", "'image;prefix;suffix'"),
        ("image,prefix,suffix", 'a.png,a,"b\n,a,"c', "own.csv:3: "),  # a quote is lost
    ],
)
def test_a_table_of_another_form_is_refused(header, row, part, tmp_path):
    """Breaks when the last of two columns is learned, records are lost in a text that a quote has
    opened, or a user is not told which columns are needed."""
    draw(tmp_path, "a.png")
    (tmp_path / "own.csv").write_text(f"{header}\n{row}\n")
    needed = ["image,prefix,suffix"] if "'" in part else []
    refused(lambda: read_data(f"csv:{tmp_path / 'own.csv'}"), "own.csv", part, *needed)


def test_pictures_from_python_are_those_of_their_files(tmp_path, processor):
    """Breaks when an image or array in memory becomes another picture, or equal ones have two
    keys."""
    draw(tmp_path, "a.png", "b.png")
    other, image = (Image.open(tmp_path / name) for name in ("a.png", "b.png"))
    pictures = [tmp_path / "b.png", image, np.asarray(image), other, np.zeros((8, 8, 3))]
    made = held_records(
        [{"image": picture, "prefix": "a", "suffix": "b"} for picture in pictures], "data", "."
    )
    assert made[1].key == made[2].key
    assert len({record.key for record in made}) == 4
    micro = collate(made, processor)
    assert micro.names == ("data[0]", "data[1]", "data[2]", "data[3]")
    assert len(micro.bad) == 1
    first, *others, last = micro.batch.pixel_values
    assert all(torch.equal(first, pixels) for pixels in others)
    assert not torch.equal(first, last)


def test_several_answers(tmp_path):
    """Breaks when the answer to learn is not the most frequent one, or one that is given beside
    them is not taken."""
    rows = [
        {"answers": ["two", "2", "2"]},
        {"suffix": "two", "answers": ["2", "2"]},
        {"suffix": "two"},
    ]
    rows = [{"prefix": "q"} | row for row in rows]
    made = read_data(f"jsonl:{write(tmp_path, 'own.jsonl', rows)}")
    expected = [("2", ("two", "2", "2")), ("two", ("2", "2")), ("two", ())]
    assert [(r.suffix, r.answers) for r in made] == expected
    assert [r.name for r in made] == ["own.jsonl:1", "own.jsonl:2", "own.jsonl:3"]


def coco(folder):
    """Three pictures; boxes are [x, y, width, height] in pixels."""
    draw(folder, "a.png", "b.png", "c.png", size=(640, 480))
    boxes = [
        (1, 1, 320, 240, 320, 240, {"area": 99.5}),
        (1, 18, 64, 48, 320, 240, {"area": 7, "iscrowd": 0}),
        (1, 18, 500.5, 10, 139.5, 20, {}),
        (1, 18, 0, 0, 640, 480, {"area": 5, "iscrowd": 1}),
        (2, 18, 0, 0, 640, 480, {"iscrowd": 1}),
    ]
    return {
        "images": [
            {"id": i, "file_name": f"{'abc'[i - 1]}.png", "width": 640, "height": 480}
            for i in (1, 2, 3)
        ],
        "categories": [{"id": 18, "name": "dog"}, {"id": 1, "name": "traffic light"}],
        "annotations": [
            {"image_id": i, "category_id": c, "bbox": at, **more} for i, c, *at, more in boxes
        ],
    }


def test_coco_s_boxes_are_paligemma_s(tmp_path, processor):
    """Breaks when a box has another order or rounding, a crowd is to be answered, or the truth for
    scoring is lost."""
    file = write(tmp_path, "instances.json", coco(tmp_path))
    (record,) = read_data(f"coco:{file}")  # of the others, one has a crowd only, and one nothing
    assert record.prefix == "detect dog ; traffic light"
    assert record.pictures == (tmp_path / "a.png",)
    # 1023 · (10/480, 500.5/640, 30/480, 1), 1023 · (0.1, 0.1, 0.6, 0.6), 1023 · (0.5, 0.5, 1, 1):
    # halves to even
    assert record.suffix == (
        "<loc0021><loc0800><loc0064><loc1023> dog ; <loc0102><loc0102><loc0614><loc0614> dog ; "
        "<loc0512><loc0512><loc1023><loc1023> traffic light"
    )
    assert (record.detection.width, record.detection.height) == (640, 480)
    assert record.detection.boxes[0] == Box("traffic light", 320, 240, 320, 240, 99.5)
    assert record.detection.boxes[2].area == 139.5 * 20
    assert record.detection.boxes[3].is_crowd
    assert collate([record], processor).tokens == len(processor.encode(record.suffix)) + 1


UNSOUND = [
    ("annotations", 0, {"bbox": [641, 0, 9, 9]}, "images[0]: bbox [641, 0, 9, 9]", "640×480"),
    ("annotations", 0, {"category_id": 5}, "images[0]: category_id 5 is not"),
    ("images", 2, {"id": 1}, "1 duplicate"),
    ("categories", 0, {"name": "<dog>"}, "names '<dog>'"),
    ("categories", 0, {"id": 1}, "1 duplicate"),
    ("annotations", 0, {"image_id": 7}, "not listed: 7"),
    ("images", 0, {"width": math.inf}, "images[0]: bbox"),
    ("annotations", 0, {"bbox": [0, 0, 9, math.nan], "iscrowd": 1}, "images[0]: "),
]
# areas, and what is a crowd
for name, values in {"area": (math.nan, "9", None, -1), "iscrowd": (2, "0")}.items():
    UNSOUND += [("annotations", 0, {name: value}, "images[0]: ") for value in values]


def test_coco_s_ids_names_and_boxes_are_sound(tmp_path):
    """Breaks when a picture is counted twice, or an answer's name cannot be read; of one usable
    entry, none is left."""
    for part, number, change, *parts in UNSOUND:
        value = coco(tmp_path)
        value[part][number] |= change
        refused(
            partial(read_coco, write(tmp_path, "instances.json", value)), "instances.json", *parts
        )
    value = coco(tmp_path)
    value["annotations"][4]["iscrowd"] = 2  # of a picture that has no other annotation
    value["annotations"][0]["iscrowd"] = None
    first, second = read_coco(write(tmp_path, "instances.json", value))
    assert len(first.turns) == 1
    assert not second.turns


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, y, w, h: [x, y, w + 0.9, h], None),  # as COCO's own rounding
        (
            lambda x, y, w, h: [x, y, w + 300, h],
            None,
        ),  # objects that reach out of the picture, as some data have them
        (lambda x, y, w, h: [x / 640, y / 480, w / 640, h / 480], "boxes are shares"),
        (lambda x, y, w, h: [x, y, x + w, y + h], "boxes are [x1, y1, x2, y2]"),
    ],
)
def test_boxes_in_other_units_are_refused(change, message, tmp_path):
    """Breaks when shares of the sides, or corners, are learned as widths and heights in pixels."""
    value = coco(tmp_path)
    value["annotations"] = [
        entry | {"bbox": change(*entry["bbox"])} for entry in value["annotations"]
    ]
    file = write(tmp_path, "instances.json", value)
    assert read_coco(file) if message is None else refused(lambda: read_coco(file), message)


def test_embedded_boxes_are_the_squares_of_the_answer():
    """Breaks when the truth that eval.detect scores is not what the answer says, or tasks do not
    come in turn."""
    mixed = embedded_records(("detect", "vqa"), count=6)
    alone = embedded_records(("detect",), count=3)
    assert [r.name for r in mixed[::2]] == [r.name for r in alone]
    assert all(r.name[:3] == "vqa" for r in mixed[1::2])
    for record in embedded_records(("detect",), count=5):
        boxes = record.detection.boxes
        assert len(boxes) == record.suffix.count(";") + 1
        assert record.prefix == f"detect {boxes[0].label}"
        y, x = (int(part[:4]) / 1024 * 112 for part in record.suffix.split("<loc")[1:3])
        assert (boxes[0].x, boxes[0].y, boxes[0].width, boxes[0].height) == (x, y, 28, 28)


def test_no_picture_is_on_both_sides(tmp_path):
    """Breaks when a picture is learned and held out: by another name, as a copy, or in a record
    with several pictures; or a text without one."""
    names = [f"{number}.png" for number in range(40)]
    draw(tmp_path, *names)
    (tmp_path / "link.png").symlink_to(tmp_path / "0.png")
    copies = [f"copy{number}.png" for number in range(13, 30)]
    for copy in copies:
        (tmp_path / copy).write_bytes((tmp_path / copy[4:]).read_bytes())
    (tmp_path / "x").mkdir()
    shown = [
        *names[:30] * 2,
        *(names[i : i + 2] for i in range(0, 12, 3)),
        "link.png",
        "./x/../0.png",
        *copies,
    ]
    rows = [{"image": name, "prefix": "a", "suffix": "b"} for name in shown]
    rows += [{"prefix": f"text {number}", "suffix": "b"} for number in [*range(10), *range(10)]]
    made = read_examples(write(tmp_path, "own.jsonl", rows))
    assert len(made) == len(rows)
    for seed in range(4):
        train, held_out = (
            split_records(made, split, 1.0, 0.4, seed) for split in ("train", "validation")
        )
        learned, asked = (
            {p.read_bytes() for r in side for p in r.pictures} for side in (train, held_out)
        )
        assert not learned & asked
        assert len(train) + len(held_out) == len(rows)
        texts = [{r.prefix for r in side if not r.pictures} for side in (train, held_out)]
        assert not texts[0] & texts[1]
        # 26 groups of pictures (30, of which 4 pairs are joined) and 10 texts; 40 % of them
        assert len({r.key for r in held_out}) >= 14
    part = split_records(made, "train", 0.5, 0.4)
    assert {r.name for r in part} < {r.name for r in split_records(made, "train", 1.0, 0.4)}


def test_a_source_without_its_kind_or_records_is_refused(tmp_path):
    """Breaks when a user who gives a file is not told how to name it, or a run can learn
    nothing."""
    (tmp_path / "own.jsonl").write_bytes(b"{\n[]")
    refused(
        lambda: read_examples(tmp_path / "own.jsonl"),
        "own.jsonl: none of its 2 records",
        "own.jsonl:1: ",
    )
    for source in ("own.jsonl", "jsonl:", "tsv:a"):
        refused(lambda source=source: read_data(source), source)
