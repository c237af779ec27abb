"""Readers of MMNeedle's files: the metadata of stitched pictures, the annotations of the tests, and captions.

In: files as MMNeedle and COCO publish them. Out: a `NeedleTest` for each test, checked; a file that breaks its format
is a `UserError`. `eval/needle.py` asks them.
"""

from dataclasses import dataclass
from math import isqrt
from pathlib import Path

from eval.datasets import LIST, NAME, NUMBER, TEXT, check_unique, records_of, some
from model.common import Expected, UserError, quoted, read_field, read_json, shown

ABSENT = (-1, -1, -1)


@dataclass(frozen=True)
class NeedleTest:
    """M haystack pictures of N×N sub-images, and the K needles to find in them.

    `haystack` holds, for each of the M pictures, its N² sub-images' names, row-major; `places` the (index, row, col) of
    each needle, counted from 0, or `ABSENT`; `targets` and `captions` the needles' own pictures and their descriptions.
    """

    id: int
    haystack: tuple[tuple[str, ...], ...]
    places: tuple[tuple[int, int, int], ...]
    targets: tuple[str, ...]
    captions: tuple[str, ...]

    @property
    def side(self) -> int:
        """N, the sub-images along each side of a stitched picture."""
        return isqrt(len(self.haystack[0]))


def read_needle_tests(metadata: str | Path, annotations: str | Path, captions: str | Path) -> list[NeedleTest]:
    """Tests from MMNeedle's `N_N.json`, `annotations_M_N_N.json` (K > 1: `K_annotations_…`) and a caption file.

    Raises UserError where the files contradict: a stitched picture or caption that is absent, a place outside the grid.
    """
    grids, names = _read_grids(metadata), read_captions(captions)
    tests = []
    for where, record in records_of(read_json(annotations, object), shown(annotations)):
        stitched = [Path(name).name for name in _listed(record, "image_ids", NAME, where)]
        unknown = [name for name in stitched if name not in grids]
        if unknown:
            raise UserError(
                f"{where}: image_ids ({some(unknown)}) not in {shown(metadata)}: take the one of the same N"
            )
        columns = [_listed(record, name, Expected(int, -1, 1 << 20), where) for name in ("index", "row", "col")]
        targets = _listed(record, "target", NAME, where)
        lists = {isinstance(record[name], list) for name in ("index", "row", "col", "target")}
        if len(lists) > 1 or any(len(column) != len(targets) for column in columns):
            raise UserError(f"{where}: index, row, col and target differ in length: one of each for every needle")
        uncaptioned = [name for name in targets if Path(name).name not in names]
        if uncaptioned:
            raise UserError(f"{where}: {shown(captions)} has no caption for {some(uncaptioned)}: take those of val2014")
        test = NeedleTest(
            id=read_field(record, "id", NUMBER, where),
            haystack=tuple(grids[name] for name in stitched),
            places=tuple(zip(*columns, strict=True)),
            targets=tuple(targets),
            captions=tuple(names[Path(name).name] for name in targets),
        )
        _check_places(test, where)
        tests.append(test)
    check_unique((test.id for test in tests), annotations)
    return tests


def _listed(record: dict, name: str, expected: Expected, where: str) -> list:
    """The entries of a field that has one value as it is, several as a list. Raises UserError."""
    if not isinstance(record.get(name), list):
        return [read_field(record, name, expected, where)]
    entries = dict(enumerate(read_field(record, name, LIST, where)))
    return [read_field(entries, number, expected, f"{where}: {name}") for number in entries]


def read_captions(path: str | Path) -> dict[str, str]:
    """Caption by file name, from {name: caption} or COCO's captions_val2014.json; the last one listed counts.

    Raises UserError for another structure.
    """
    value, name = read_json(path, object), shown(path)
    if isinstance(value, dict) and "annotations" in value:
        last = {
            read_field(record, "image_id", NUMBER, where): read_field(record, "caption", TEXT, where)
            for where, record in records_of(value["annotations"], f"{name}: annotations")
        }
        images = records_of(value.get("images"), f"{name}: images")
        named = {read_field(r, "id", NUMBER, where): read_field(r, "file_name", NAME, where) for where, r in images}
        return {file: last[id_] for id_, file in named.items() if id_ in last}
    if isinstance(value, dict) and value and all(isinstance(caption, str) for caption in value.values()):
        return value
    raise UserError(f"{name}: expected {{file name: caption}}, or COCO's captions file with 'images' and 'annotations'")


def _read_grids(path: str | Path) -> dict[str, tuple[str, ...]]:
    """Sub-images, row-major, of each stitched picture in MMNeedle's {"stitched.jpg": {"row_col": "picture.jpg"}}."""
    value, grids = read_json(path, object), {}
    for name, images in value.items() if isinstance(value, dict) else ():
        side = isqrt(len(images)) if isinstance(images, dict) else 0
        order = [f"{row}_{col}" for row in range(side) for col in range(side)]
        where = f"{shown(path)}: {shown(name)}"
        if not side or set(order) != set(images):
            raise UserError(f"{where} is no square of 'row_col' names: download the file again")
        grids[name] = tuple(read_field(images, place, NAME, where) for place in order)
    if not grids or len({len(names) for names in grids.values()}) != 1:
        raise UserError(f"{shown(path)}: expected {{stitched picture: {{'row_col': picture}}}}, all of one size")
    return grids


def _check_places(test: NeedleTest, where: str) -> None:
    remedy = "take metadata and annotations of the same N and release"
    for place, target in zip(test.places, test.targets, strict=True):
        index, row, col = place
        if place == ABSENT:
            if any(target in names for names in test.haystack):
                raise UserError(f"{where}: {quoted(target)} is given as absent but is in the haystack: {remedy}")
        elif not (0 <= index < len(test.haystack) and 0 <= row < test.side and 0 <= col < test.side):
            size = f"{len(test.haystack)} picture(s) of {test.side} by {test.side}"
            raise UserError(f"{where}: place {place} is outside {size}: {remedy}")
        elif test.haystack[index][row * test.side + col] != target:
            raise UserError(f"{where}: {quoted(target)} is not at its place {place}: {remedy}")
