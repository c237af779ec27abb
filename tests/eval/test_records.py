"""A user's own data: what is read, what is shown to the model, what is learned of it, and what is
held out."""

import itertools
import json
import operator
import shutil
from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image

from eval.answer import question_row
from eval.data.records import (
    Box,
    check_upright,
    embedded_records,
    one_picture_records,
    read_coco,
    read_data,
    read_examples,
    record_of,
    split_records,
)
from eval.question import question_of
from model.processor import processor_for
from model.systems.configs import MambaConfig, ProjectorConfig, QMambaConfig, WingsConfig
from tests.files import json_lines, table, write_json, write_lines
from tests.runs import refused
from train.data.batches import collate
from train.data.sources import example_records


def write(folder, name, value):
    """A JSON file; for *.jsonl its entries as lines."""
    make = write_lines if name.endswith(".jsonl") else write_json
    return make(folder / name, value)


def draw(folder, *names, size=(8, 8)):
    for number, name in enumerate(names):
        (folder / name).parent.mkdir(exist_ok=True)
        Image.new("RGB", size, (number * 40 % 256, number, 0)).save(folder / name)


def in_turn(role, content, pair, values):
    """Values by two speakers in turn; a dictionary is an entry as it is."""
    speakers = itertools.cycle(pair)
    said = []
    for value in values:
        is_whole = isinstance(value, dict)
        said.append(value if is_whole else {role: next(speakers), content: value})
    return said


def says(*values):
    """A conversation in LLaVA's layout."""
    return in_turn("from", "value", ("human", "gpt"), values)


def chat(*values):
    """A conversation in the layout of TRL and ms-swift."""
    return in_turn("role", "content", ("user", "assistant"), values)


def shown(processor, record):
    """What the model reads of a record: (piece, whether it is learned, its type); P is a whole
    picture."""
    micro = collate([record], processor)
    assert not micro.bad, micro.bad
    ids = micro.batch.input_ids[0].tolist()
    labels = micro.batch.labels[0].tolist()
    targets = [label for label in labels if label != -100]
    assert micro.targets[0][micro.targets[0] != -100].tolist() == targets
    assert micro.tokens == len(targets)
    image = processor.config.image_token_id
    names = ["P" if i == image else processor.tokenizer.id_to_piece(i) for i in ids]
    types = micro.batch.token_type_ids[0].tolist()
    run = [*zip(names, map(operator.eq, ids, labels), types, strict=True)]
    out = []
    while run:
        length = processor.config.num_image_tokens if run[0][0] == "P" else 1
        assert run[:length] == [run[0]] * length
        out.append(run[0])
        run = run[length:]
    return out


def marked(text):
    """What `shown` returns, by hand: pieces after blanks, types as 0 or 1 before a colon, learned
    ones with a star."""
    pieces = []
    for word in text.split():
        kind, piece = word.split(":", 1)
        spelled = piece.lstrip("*").replace("\\n", "\n")
        pieces.append((spelled, piece.startswith("*"), int(kind)))
    return pieces


@pytest.fixture(scope="module")
def processors(processor):
    """One of each system, on the vocabulary of the embedded base."""
    config = processor.config
    ends = {"pad_token_id": config.pad_token_id, "eos_token_id": config.eos_token_id}
    text = MambaConfig(config.text.vocab_size + 1, 8, 1, bos_token_id=2, **ends)
    parts = config.vision, ProjectorConfig(queries=8), text
    qmamba = QMambaConfig(*parts, image_token_id=config.image_token_id)
    others = {"wings": WingsConfig(**vars(config), rank=4), "qmamba": qmamba}
    made = {name: processor_for(of, processor.tokenizer) for name, of in others.items()}
    return {"paligemma": processor} | made


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
    both = {"image": ["a.png", "b.png"]}
    system = {"from": "system", "value": "Be brief."}
    rows = [
        {"id": "1", "image": "a.png", "conversations": CONVERSATION},
        {"id": "2", "conversations": says("count cat", "2")},
        both | {"id": "3", "conversations": says("<image>\n<image>\ncount dog", "1")},
        both | {"prefix": "count dog", "suffix": "1"},
        {"image": "a.png", "conversations": says(system, "<image>\ncount dog", "1")},
        {"image": "b.png", "conversations": says("count dog", "1", "<image>count cat", "2")},
    ]
    made = read_examples(write(tmp_path, "own.json", rows))
    assert [record.name for record in made] == [f"own.json[{number}]" for number in range(6)]
    plain = "0:P 0:P 0:<bos> 0:count 0:▁dog 0:\\n 1:*1 1:*<eos>"
    one = plain.replace("0:P 0:P", "0:P")
    two = "0:<bos> 0:count 0:▁cat 0:\\n 1:*2 1:*<eos>"
    more = " 1:count 1:▁cat 1:\\n 1:*2 1:*<eos>"
    told = one.replace("<bos>", f"<bos> {BRIEF}")  # the system's text is no part of the answer
    expected = {"paligemma": [FRONT + LATER, two, plain, plain, told, one + more]}
    third = "0:P 0:<bos> 0:\\n 0:P 0:\\n 0:count 0:▁dog 0:\\n 1:*1 1:*<eos>"
    last = "0:<bos> 0:count 0:▁dog 0:\\n 1:*1 1:*<eos> 1:P"
    told = one.replace("0:P 0:<bos>", f"0:<bos> {BRIEF} 0:P 0:\\n")
    inside = [INSIDE + LATER, two, third, plain, told, last + more]
    for system, texts in (expected | dict.fromkeys(("wings", "qmamba"), inside)).items():
        for record, text in zip(made, texts, strict=True):
            assert shown(processors[system], record) == marked(text), system


def test_of_a_conversation_the_first_turn_is_explored(tmp_path):
    """Breaks when answers to the last turn count for the first, or a picture is shown to a question
    before it."""
    draw(tmp_path, "a.png")
    later = {"image": "a.png", "conversations": says("count dog", "1", "<image>count cat", "2")}
    kept = {"image": "a.png", "conversations": CONVERSATION, "answers": ["2"]}
    lost = {"image": "lost.png", "prefix": "count dog", "suffix": "1"}
    (record,) = one_picture_records(f"jsonl:{write(tmp_path, 'own.jsonl', [later, lost, kept])}", 3)
    assert (record.turns, record.answers) == ((("Where is <image> the dog?", "top left"),), ())


def test_a_later_question_is_asked_as_it_is_learned(processors, tmp_path):
    """Breaks when a conversation is scored without its earlier turns, or its picture is elsewhere
    than in training."""
    draw(tmp_path, "a.png")
    row = {"image": "a.png", "conversations": CONVERSATION}
    (record,) = read_examples(write(tmp_path, "own.jsonl", [row]))
    for processor in processors.values():
        learned = collate([record], processor).batch
        ids, types, _ = question_row(processor, question_of(record), 1)
        answer = [*processor.encode("2"), processor.config.eos_token_id]
        assert ids + answer == learned.input_ids[0].tolist()
        assert types == learned.token_type_ids[0].tolist()[: len(types)]


# a list of a conversation is one in turn; what is no text there is an entry as it is
MALFORMED = r"""
{"conversations": ["a", "b", "c"]}
{"conversations": ["<image>", "a"]}
{"conversations": ["a", "<image>"], "image": "a.png"}
{"image": ["a.png", "c.png"], "prefix": "a", "suffix": "b"}
{"image_path": "a.png", "prefix": "a", "suffix": "b"}
{"image": ["a.png"], "images": ["a.png"], "prefix": "a", "suffix": "b"}
{"messages": [[{"type": "image"}, {"type": "text", "text": "a"}], "b"]}
{"video": "a.mp4", "prefix": "a", "suffix": "b"}
{"video": ["a.png"], "image": "a.png", "prefix": "a", "suffix": "b"}
{"video": ["a.png"], "prefix": "<video>a", "suffix": "b"}
{"messages": [[{"type": "video"}, {"type": "text", "text": "a"}], "b"], "images": ["a.png"]}
{"messages": ["<image>a", "<bbox>"], "images": ["a.png"], "objects": {"bbox": [[1, 2, 3, 4]]}}
{"messages": ["a", {"role": "assistant", "content": "b", "loss": false}]}
{"messages": ["a", {"role": "assistant", "content": "b", "weight": 0}]}
{"messages": ["a", {"role": "assistant", "content": "b", "train": 0.5}]}
{"messages": ["a", {"role": "assistant", "content": "b", "training": false}]}
{"messages": ["a", {"role": "assistant", "content": "b", "loss_scale": "last"}]}
{"messages": ["a", {"role": "assistant", "content": "b", "tool_calls": [{"name": "b"}]}]}
{"conversations": [{"from": "human", "value": "a", "train": true}, {"from": "gpt", "value": "b"}]}
{"prefix": "a", "suffix": "b", "weight": 0}
{"messages": ["a", "b"], "rejected_response": "c"}
{"messages": ["a", "b"], "tools": "[{}]"}
{"messages": ["a", "b"], "conversations": ["a", "c"]}
{"messages": ["a", "b"], "prefix": "c", "suffix": "d"}
{"messages": [{"role": "system", "content": "a"}]}
{"messages": ["a", "b", {"role": "system", "content": "c"}, "d", "e"]}
{"messages": [{"role": "System", "content": "a"}, "b", "c"]}
{"system": 5, "prefix": "a", "suffix": "b"}
{"system_prompt": "a", "prefix": "b", "suffix": "c"}
{"messages": ["a", "b"], "kto_tag": false}
{"file_name": "a.png", "prefix": "a", "suffix": "b"}
{"files": ["a.png"], "prefix": "a", "suffix": "b"}
{"media": [{"path": "a.png"}], "prefix": "a", "suffix": "b"}
{"messages": [{"role": "user", "content": "a", "images": ["a.png"]}, {"role": "assistant", "content": "b"}]}
{"conversations": [{"from": "human", "value": "a", "image": "a.png"}, {"from": "gpt", "value": "b"}]}
{"conversations": ["Picture 1: <img>a.png</img>\na", "b"]}
{"images": ["a.png"], "messages": ["a", "b"], "label": false}
{"prefix": "a", "suffix": "<loc12><loc0000><loc0001><loc0001> cat"}
{"prefix": "a", "suffix": "<loc_12><loc_0><loc_1><loc_1> cat"}
{"prefix": "a", "suffix": "<loc00123> cat"}
{"image": null, "img": "a.png", "prefix": "a", "suffix": "b"}
{"image": "a.png", "image2": "a.png", "prefix": "a", "suffix": "b"}
{"image": "a.png", "img_b": "a.png", "prefix": "a", "suffix": "b"}
{"image": "a.png", "image.1": "a.png", "prefix": "a", "suffix": "b"}
{"images": [], "image_path": "a.png", "prefix": "a", "suffix": "b"}
{"image": [], "file_name": "a.png", "prefix": "a", "suffix": "b"}
{"images": [], "conversations": ["Picture 1: <img>a.png</img>\na", "b"]}
{"path": "a.jp2 ", "prefix": "a", "suffix": "b"}
{"url": "https://a/b.jpg?w=9", "prefix": "a", "suffix": "b"}
{"screenshot": "data:image/png;base64,eA==", "prefix": "a", "suffix": "b"}
{"prefix": "a", "answers": ["b", 2]}
{"prefix": "a", "answers": "bb"}
{"prefix": "a"}
{"prefix": "a", "suffix": "a <eos>"}
{"image": "\u001b[31mred\u001b[0m\n.png", "prefix": "a", "suffix": "b"}
"""
OTHERS = [
    b'{"images": ["a.png", "a.png"], "messages": [{"role": "user", "content": [{"type": "image", "index": 1},'
    b'{"type": "image", "index": 0}, {"type": "text", "text": "a"}]}, {"role": "assistant", "content": "b"}]}',
    b'{"prefix": "a", "suffix": "b", "suffix": "c"}',
    b'{"prefix": "a", "suffix": "%s"}' % (b"cat " * 9000),
    b'{"image": "a.png", "prefix"',
    b"[" * 100_000,
    b'{"prefix": "\xff", "suffix": "b"}',
]


@pytest.mark.parametrize(
    "record", [*MALFORMED.strip().splitlines(), *OTHERS], ids=lambda record: str(record)[:40]
)
def test_a_malformed_record_is_named_left_out_and_counted(record, processor, tmp_path):
    """Breaks when a conversation that cannot be learned is learned in part, or ends the run, or
    goes unnoticed."""
    draw(tmp_path, "a.png")
    if isinstance(record, str):
        row = json.loads(record)
        for name, layout_of in {"conversations": says, "messages": chat}.items():
            if name in row:
                row[name] = layout_of(*row[name])
        record = json.dumps(row).encode()
    good = b'{"prefix": "count dog", "suffix": "2"}'
    (tmp_path / "own.jsonl").write_bytes(b"\n".join([b"\xef\xbb\xbf" + good, record, b"", good]))
    micro = collate(read_examples(tmp_path / "own.jsonl"), processor)
    assert micro.names == ("own.jsonl:1", "own.jsonl:4")
    (bad,) = micro.bad
    assert bad.startswith("own.jsonl:2: ")
    assert bad.isprintable()
    assert len(bad) < 700


def test_layouts_of_other_tools_are_read_as_ours(tmp_path):
    """Breaks when a file of TRL, ms-swift or a spreadsheet gives other turns or pictures than it
    shows."""
    draw(tmp_path, "x/a.png", "x/b.png")
    a = tmp_path / "x/a.png"
    b = tmp_path / "link.png"
    b.symlink_to(tmp_path / "x/b.png")
    system = [{"role": "system", "content": "Be brief."}, {"role": "developer", "content": [A]}]
    dog = [{"index": None, "text": "dog\n", "type": "text"}, IMAGE | {"index": 0, "text": None}]
    url = {"type": "image_url", "image_url": {"url": f"file://{b}"}}
    # ms-swift's documentation: marks in texts, absolute paths; TRL's llava-instruct-mix-vsft;
    # others; the last as LLaVA
    first = ("Hear.\nBe brief.\na\n<image><image>a", "b")
    cases = [
        (chat(*system, "<image><image>a", "b", "c", "d"), [a, b], (first, ("c", "d"))),
        (chat(dog, [A]), [a], (("dog\n<image>", "a"),)),
        (chat("cat", "1"), [a, b], (("One word.\ncat", "1"),)),
        (chat([IMAGE | {"image": "x/a.png"}, url, A], "b"), [a, b], (("<image><image>a", "b"),)),
        ([*chat("a", "Hello")[1:], *chat("cat", "1")], [a], (("cat", "1"),)),
        (chat("a", "see b.png"), [], (("a", "see b.png"),)),  # a text
    ]
    none = {"image": None, "conversations": None}
    rows = [none | {"messages": said, "images": list(map(str, of))} for said, of, _ in cases]
    rows[0]["messages"][3] |= {"loss": True, "train": None, "weight": 1}
    rows[0]["system"] = "Hear."
    rows[2] |= {"video": rows[2].pop("images"), "image": None}
    rows[2] |= {"type": "count", "system": "One word.", "width": 8, "id": 1, "tools": None}
    rows[3]["images"] = None
    made = read_data(f"jsonl:{write(tmp_path, 'own.jsonl', rows)}")
    found = [(list(record.pictures), record.turns) for record in made]
    assert found == [case[1:] for case in cases]
    assert [record.kind for record in made] == ["", "", "count", "", "", ""]
    unknown = write(tmp_path, "o.json", [{"query": "a"}])
    refused(lambda: read_data(f"jsonl:{unknown}"), "query", '"messages"')


@pytest.mark.parametrize("kind, name", [("csv", "own.txt"), ("jsonl", "own.csv")])
def test_a_table_is_read_as_its_rows(kind, name, tmp_path):
    """Breaks when a comma ends a text in quotes, a row with too many cells loses one, or an empty
    cell is a picture."""
    draw(tmp_path, "a.png")
    table = 'image,prefix,suffix,type\r\na.png,"Is it red, or blue?",red,colour\r\n,a,2,\r\na.png,a,b,c,d\r\n'
    (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + table.encode())  # as Excel writes it
    *good, bad = read_data(f"{kind}:{tmp_path / name}")
    assert [(record.pictures, record.turns, record.kind) for record in good] == [
        ((tmp_path / "a.png",), (("Is it red, or blue?", "red"),), "colour"),
        ((), (("a", "2"),), ""),
    ]
    assert not bad.turns
    assert "cells" in bad.pictures[0].problem


OTHER_TABLES = r"""
    image,prefix,suffix,suffix | a.png,a,b,c | 'suffix', 'suffix'
    img,question,answer | a.png,a,b | 'img', 'question', 'answer'
    image;prefix;suffix | a.png;a;b | 'image;prefix;suffix'
    image,prefix,suffix | a.png,a,"b\n,a,"c | own.csv:3: | a quote is lost"""


@pytest.mark.parametrize("case", table(OTHER_TABLES))
def test_a_table_of_another_form_is_refused(case, tmp_path):
    """Breaks when the last of two columns is learned, records are lost in a text that a quote has
    opened, or a user is not told which columns are needed."""
    header, row, part, *_ = case
    draw(tmp_path, "a.png")
    (tmp_path / "own.csv").write_text(f"{header}\n{row}\n".replace("\\n", "\n"))
    needed = "image,prefix,suffix" if "'" in part else part
    refused(lambda: read_data(f"csv:{tmp_path / 'own.csv'}"), "own.csv", part, needed)


def test_pictures_from_python_are_those_of_their_files(tmp_path, processor):
    """Breaks when an image or array in memory becomes another picture, or equal ones have two
    keys."""
    draw(tmp_path, "a.png", "b.png")
    other = Image.open(tmp_path / "a.png")
    image = Image.open(tmp_path / "b.png")
    pictures = [tmp_path / "b.png", image, np.asarray(image), other, np.zeros((8, 8, 3))]
    rows = [{"image": picture, "prefix": "a", "suffix": "b"} for picture in pictures]
    made = example_records(rows, "data", ".")
    keys = [record.key for record in made]
    assert keys[1] == keys[2]
    assert len(set(keys)) == 4
    micro = collate(made, processor)
    assert micro.names == ("data[0]", "data[1]", "data[2]", "data[3]")
    assert len(micro.bad) == 1
    first, second, last = micro.batch.pixel_values
    assert torch.equal(first, second)
    assert not torch.equal(first, last)


@pytest.mark.parametrize("kind", "jpeg png webp tiff late".split())
def test_a_picture_that_exif_turns_away_from_its_boxes(kind, tmp_path):
    """Breaks when boxes of the stored picture are learned beside the one that is shown."""
    exif = Image.Exif()
    exif[0x0112] = 6
    file = tmp_path / f"a.{kind}"
    Image.new("RGB", (60, 30)).save(file, "png" if kind == "late" else kind, exif=exif)
    if kind == "late":  # behind the pixels
        head, rest = file.read_bytes().split(b"\0\0\0\x1aeXIf")
        pixels, end = rest[30:].split(b"\0\0\0\0IEND")
        file.write_bytes(head + pixels + b"\0\0\0\x1aeXIf" + rest[:30] + b"\0\0\0\0IEND" + end)
    check_upright(file, 30, 60)  # as it is shown
    for scale in (1, 3):
        with pytest.raises(ValueError, match="is turned by EXIF"):
            check_upright(file, 60 * scale, 30 * scale)


def test_several_answers(tmp_path):
    """Breaks when the answer to learn is not the most frequent one, or one that is given beside
    them is not taken."""
    file = tmp_path / "own.jsonl"
    file.write_text("""{"prefix": "q", "answers": ["two", "2", "2"]}
{"prefix": "q", "suffix": "two", "answers": ["2", "2"]}
{"prefix": "q", "suffix": "two"}""")
    made = read_data(f"jsonl:{file}")
    expected = """["own.jsonl:1", "2", ["two", "2", "2"], ["two", "2", "2"]]
["own.jsonl:2", "two", ["2", "2"], ["2", "2", "two"]]
["own.jsonl:3", "two", [], "two"]"""
    text = {"prefix": "Is it a.gif?", "suffix": "www.example.jp"}  # which names no picture
    assert record_of(text).turns == (("Is it a.gif?", "www.example.jp"),)
    marked = '{"prefix": "q", "suffix": "a", "split": "test"}'
    own = write(tmp_path, "own.json", [json.loads(marked), {"prefix": "q", "suffix": "b"}])
    refused(lambda: read_data(f"jsonl:{own}"), "the splits", "'test'")
    assert [[r.name, r.suffix, list(r.answers), r.truth] for r in made] == json_lines(expected)


COCO = """{
    "images": [
        {"id": 1, "file_name": "a.png", "width": 640, "height": 480},
        {"id": 2, "file_name": "b.png", "width": 640, "height": 480},
        {"id": 3, "file_name": "c.png", "width": 640, "height": 480}],
    "categories": [{"id": 18, "name": "dog"}, {"id": 1, "name": "traffic light"}],
    "annotations": [
        {"image_id": 1, "category_id": 1, "bbox": [320, 240, 320, 240], "area": 99.5},
        {"image_id": 1, "category_id": 18, "bbox": [64, 48, 320, 240], "area": 7, "iscrowd": 0},
        {"image_id": 1, "category_id": 18, "bbox": [500.5, 10, 139.5, 20]},
        {"image_id": 1, "category_id": 18, "bbox": [0, 0, 640, 480], "area": 5, "iscrowd": 1},
        {"image_id": 2, "category_id": 18, "bbox": [0, 0, 640, 480], "iscrowd": 1}]
}"""


def coco(folder):
    """The annotations of three pictures; boxes are [x, y, width, height] in pixels."""
    draw(folder, "a.png", "b.png", "c.png", size=(640, 480))
    return json.loads(COCO)


def test_coco_s_boxes_are_paligemma_s(tmp_path, processor, warned):
    """Breaks when a box has another order or rounding, a crowd is to be answered, or the truth for
    scoring is lost."""
    file = write(tmp_path, "instances.json", coco(tmp_path))
    (record,) = read_data(f"coco:{file}")  # of the others, one has a crowd only, and one nothing
    assert "2 of 5 objects are crowds" in warned()  # as masks of CVAT are
    assert record.prefix == "detect dog ; traffic light"
    assert record.pictures == (tmp_path / "a.png",)
    # 1023 · (10/480, 500.5/640, 30/480, 1), 1023 · (0.1, 0.1, 0.6, 0.6), 1023 · (0.5, 0.5, 1, 1):
    # halves to even
    assert record.suffix == (
        "<loc0021><loc0800><loc0064><loc1023> dog ; <loc0102><loc0102><loc0614><loc0614> dog ; "
        "<loc0512><loc0512><loc1023><loc1023> traffic light"
    )
    truth = record.detection
    assert (truth.width, truth.height) == (640, 480)
    assert truth.boxes[0] == Box("traffic light", 320, 240, 320, 240, 99.5)
    assert truth.boxes[2].area == 139.5 * 20
    assert truth.boxes[3].is_crowd
    assert collate([record], processor).tokens == len(processor.encode(record.suffix)) + 1


# the entry, what is wrong in it, and what the message says
UNSOUND = """
    annotations | 0 | {"bbox": [641, 0, 9, 9]} | images[0]: bbox [641, 0, 9, 9] is outside of the picture, 640×480
    annotations | 0 | {"category_id": 5} | images[0]: category_id 5 is not
    images | 2 | {"id": 1} | 1 duplicate
    categories | 0 | {"name": "<dog>"} | names '<dog>'
    categories | 0 | {"id": 1} | 1 duplicate
    annotations | 0 | {"image_id": 7} | not listed: 7
    images | 0 | {"width": Infinity} | images[0]: bbox
    annotations | 0 | {"bbox": [0, 0, 9, NaN], "iscrowd": 1} | images[0]:
    annotations | 0 | {"area": NaN} | images[0]:
    annotations | 0 | {"area": "9"} | images[0]:
    annotations | 0 | {"area": null} | images[0]:
    annotations | 0 | {"area": -1} | images[0]:
    annotations | 0 | {"iscrowd": 2} | images[0]:
    annotations | 0 | {"iscrowd": "0"} | images[0]:"""


def test_coco_s_ids_names_and_boxes_are_sound(tmp_path):
    """Breaks when a picture is counted twice, or an answer's name cannot be read; of one usable
    entry, none is left."""
    for part, number, change, problem in table(UNSOUND):
        value = coco(tmp_path)
        value[part][int(number)] |= json.loads(change)
        file = write(tmp_path, "instances.json", value)
        refused(partial(read_coco, file), "instances.json", problem)
    value = coco(tmp_path)
    value["annotations"][4]["iscrowd"] = 2  # of a picture that has no other annotation
    value["annotations"][0]["iscrowd"] = None
    first, second = read_coco(write(tmp_path, "instances.json", value))
    assert len(first.turns) == 1
    assert not second.turns


UNITS = """
    x, y, w + 0.9, h | as COCO's own rounding
    x, y, w + 300, h | reaches out of the picture, as in some data
    x / 640, y / 480, w / 640, h / 480 | boxes are shares
    x, y, x + w, y + h | boxes are [x1, y1, x2, y2]"""


@pytest.mark.parametrize("box, message", table(UNITS))
def test_boxes_in_other_units_are_refused(box, message, tmp_path):
    """Breaks when shares of the sides, or corners, are learned as widths and heights in pixels."""
    value = coco(tmp_path)
    for entry in value["annotations"]:
        entry["bbox"] = list(eval(box, dict(zip("xywh", entry["bbox"], strict=True))))
    file = write(tmp_path, "instances.json", value)
    if message.startswith("boxes"):
        refused(lambda: read_coco(file), message)
    else:
        assert read_coco(file)


def test_embedded_boxes_are_the_squares_of_the_answer():
    """Breaks when the truth that eval.detect scores is not what the answer says, or tasks do not
    come in turn."""
    mixed = embedded_records(("detect", "vqa"), count=6)
    alone = embedded_records(("detect",), count=5)
    assert [r.name for r in mixed[::2]] == [r.name for r in alone[:3]]
    assert all(r.name.startswith("vqa") for r in mixed[1::2])
    for record in alone:
        boxes = record.detection.boxes
        assert len(boxes) == record.suffix.count(";") + 1
        assert record.prefix == f"detect {boxes[0].label}"
        y, x = (int(part[:4]) / 1024 * 112 for part in record.suffix.split("<loc")[1:3])
        assert boxes[0] == Box(boxes[0].label, x, y, 28, 28, boxes[0].area)


def test_no_picture_is_on_both_sides(tmp_path):
    """Breaks when a picture is learned and held out: by another name, as a copy, or in a record
    with several pictures; or a text without one."""
    names = [f"{number}.png" for number in range(40)]
    draw(tmp_path, *names)
    (tmp_path / "x").mkdir()
    (tmp_path / "link.png").symlink_to(tmp_path / "0.png")
    shown = names[:30] * 2 + ["link.png", "./x/../0.png"]
    shown += [names[i : i + 2] for i in range(0, 12, 3)]
    for number in range(13, 30):
        shutil.copy(tmp_path / names[number], tmp_path / f"copy{number}.png")
        shown.append(f"copy{number}.png")

    def contents(side):
        """Of its pictures, and the texts without."""
        bytes_ = {picture.read_bytes() for record in side for picture in record.pictures}
        return bytes_ | {record.turns for record in side if not record.pictures}

    rows = [{"image": name, "prefix": "a", "suffix": "b"} for name in shown]
    rows += [{"prefix": f"text {number}", "suffix": "b"} for number in range(10)] * 2
    made = read_examples(write(tmp_path, "own.jsonl", rows))
    assert len(made) == len(rows)
    for seed in range(4):
        sides = [split_records(made, part, 1.0, 0.4, seed) for part in ("train", "validation")]
        learned, asked = map(contents, sides)
        assert not learned & asked
        assert sum(map(len, sides)) == len(rows)
        # 26 groups of pictures (30, of which 4 pairs are joined) and 10 texts; 40 % of them
        assert len({r.key for r in sides[1]}) >= 14
    part = split_records(made, "train", 0.5, 0.4)
    assert {r.name for r in part} < {r.name for r in split_records(made, "train", 1.0, 0.4)}


def test_a_source_without_its_kind_or_records_is_refused(tmp_path):
    """Breaks when a user who gives a file is not told how to name it, or a run can learn
    nothing."""
    own = tmp_path / "own.jsonl"
    own.write_bytes(b"{\n[]")
    refused(lambda: read_examples(own), "own.jsonl: none of its 2 records", "own.jsonl:1: ")
    for source in ("own.jsonl", "jsonl:", "tsv:a"):
        refused(lambda source=source: read_data(source), source)
