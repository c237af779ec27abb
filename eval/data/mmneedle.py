"""Readers of MMNeedle's files.

In: its metadata, annotations and captions, or COCO's. Out: a `NeedleTest` of each annotation; its
pictures stay names.
"""

from collections.abc import Callable
from itertools import product
from math import isqrt
from pathlib import Path
from typing import NamedTuple

from eval.data.files import check, check_unique, problems_at, read, text_at
from model.common import quoted, read_json, shown

ABSENT = (-1, -1, -1)  # the place of a needle that is not in the haystack


class NeedleTest(NamedTuple):
    """M haystack pictures of N×N sub-images, and the K needles to find in them."""

    id: int
    haystack: tuple[tuple[str, ...], ...]  # of each picture, its N² sub-images' names, row-major
    places: tuple[tuple[int, int, int], ...]  # (index, row, col) of each needle, or `ABSENT`
    targets: tuple[str, ...]  # the needles' own pictures
    captions: tuple[str, ...]  # the needles' descriptions
    pictures: tuple[Callable, ...] = ()  # functions that give the M pictures
    files: tuple[Path, ...] = ()  # those that these functions read

    @property
    def side(self) -> int:
        """N, the sub-images along each side of a stitched picture."""
        return isqrt(len(self.haystack[0]))


def read_captions(path: str | Path) -> dict[str, str]:
    """Caption by file name, from {name: caption} or COCO's captions_val2014.json; the last one
    listed counts."""
    value = read_json(path)
    with problems_at(path):
        if "annotations" not in value:
            return {name: text_at(value, name) for name in value}
        last = {}
        for record in value["annotations"]:
            last[record["image_id"]] = text_at(record, "caption")
        named = [record for record in value["images"] if record["id"] in last]
        return {text_at(record, "file_name"): last[record["id"]] for record in named}


def read_needle_tests(
    metadata: str | Path, annotations: str | Path, captions: str | Path
) -> list[NeedleTest]:
    """Tests from MMNeedle's `N_N.json`, `annotations_M_N_N.json` (K > 1: `K_annotations_…`) and a
    caption file. Raises UserError, also where the files contradict each other."""
    # 1. the sub-images of each picture
    described = read_captions(captions)
    stitched = read_json(metadata)
    grids = {}
    with problems_at(metadata):
        for name, images in stitched.items():
            side = range(isqrt(len(images)))
            places = product(side, side)
            grids[name] = tuple(text_at(images, f"{row}_{col}") for row, col in places)
            is_square = 0 < len(images) == len(side) ** 2
            check(is_square, f"{quoted(name)} is no square of sub-images")

    def listed(value) -> list:
        return value if isinstance(value, list) else [value]

    def test(record: dict) -> NeedleTest:
        haystack = tuple(grids[Path(name).name] for name in listed(record["image_ids"]))
        targets = tuple(listed(record["target"]))
        names = {}
        for index, grid in enumerate(haystack):
            side = range(isqrt(len(grid)))
            names |= zip(product([index], side, side), grid, strict=True)
        axes = [listed(record[key]) for key in ("index", "row", "col")]
        places = tuple(zip(*axes, strict=True))
        for place, target in zip(places, targets, strict=True):
            numbers = record["id"], *place
            is_whole = {*map(type, numbers)} == {int}
            check(is_whole, f"id, index, row, col are {quoted(numbers)}, expected whole numbers")
            if place == ABSENT:
                is_there = target not in names.values()
            else:
                is_there = names.get(place) == target
            remedy = "take metadata and annotations of one release"
            check(is_there, f"{quoted(target)} is not at {place}, {remedy}")
            has_caption = Path(target).name in described
            check(has_caption, f"{shown(captions)} lacks a caption of {quoted(target)}")
        of_targets = tuple(described[Path(target).name] for target in targets)
        return NeedleTest(record["id"], haystack, places, targets, of_targets)

    # 2. the tests, which are to agree with them
    tests = read(annotations, test)
    check_unique((test.id for test in tests), annotations)
    return tests
