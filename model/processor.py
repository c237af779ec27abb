"""From pictures and prompts to the tensors of a batch, and from answer tokens back to text and boxes.

In: pictures (`model/images.py`), prompts, and, for training, answers. Out: a `Batch`, in the layout that PaliGemma was
trained with: `<image>` × I, bos, prompt and newline, then the answer and eos. Further turns follow in the same way,
causal. `decode` and `parse_boxes` read answers.

Ids equal those of transformers' PaliGemmaProcessor, except that a prompt cannot spell control tokens, and that
`<image>` within the prompt of a PaliGemma is taken out: its pictures come first. For WINGS and Q-Mamba a picture stands
there, and bos where the text begins.
"""

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from model.chat import TextTokenizer
from model.common import UserError, quoted, read_json, shown
from model.config import PaliGemmaConfig
from model.images import Drawn, Picture, fit, to_pixels
from model.source import preset_of
from model.system_configs import (
    LanguageConfig,
    LanguageWingsConfig,
    QMambaConfig,
    TextModelConfig,
    WingsConfig,
    read_config,
)
from model.tokenizer import Tokenizer, find_tokenizer, load_tokenizer
from model.turns import SLOT, Turn, check_text, check_turns

# Token ids; their types: 0 for pictures and the first prompt, which see each other, 1 for all that follows, which is
# causal; and what is learned: 1 for answers and the eos after each, else 0
TokenRow = tuple[list[int], list[int], list[int]]

MAX_LENGTH = 8192  # tokens of a row, what PaliGemma's decoders were trained with
# A JPEG of twice this many times the model's size or more is decoded at half of its size or less. On photographs the
# pixels then differ by 0.2 of 255 on average and by 4 at most; with 2 in place of 4 by 0.7 and 45. At 224 pixels a
# photograph of 12 megapixels takes 92 ms in place of 246, and one of 640×480, as in COCO, is decoded in full.
DRAFT = 4


@dataclass(frozen=True)
class Batch:
    """B rows of up to S tokens, and their distinct pictures. Labels are not shifted."""

    input_ids: torch.Tensor  # (B, S) int64
    pixel_values: torch.Tensor  # (pictures, 3, R, R) float32 in [-1, 1]
    token_type_ids: torch.Tensor  # (B, S) int64: 0 for image, prefix and padding, 1 for the suffix and what follows
    attention_mask: torch.Tensor  # (B, S) int64: 0 at padding
    labels: torch.Tensor  # (B, S) int64: the id of answers and the eos after each, else -100
    image_index: torch.Tensor  # (slots,) int64: the picture that fills each image slot, rows from top to bottom

    def to(self, device: str | torch.device, dtype: torch.dtype | None = None) -> "Batch":
        """The batch on `device`, its pixels as `dtype`."""
        # a non-blocking copy to the CPU could be read before it is complete
        non_blocking = torch.device(device).type == "cuda"
        moved = {f.name: getattr(self, f.name).to(device, non_blocking=non_blocking) for f in fields(self)}
        return replace(self, **(moved | {"pixel_values": moved["pixel_values"].to(dtype=dtype)}))

    def pin_memory(self) -> "Batch":
        """The batch in page-locked memory, so that copies to a GPU can overlap with work; DataLoader calls it."""
        return replace(self, **{f.name: getattr(self, f.name).pin_memory() for f in fields(self)})


class Processor:
    """From pictures and prompts to a `Batch`, and from answer tokens to text."""

    def __init__(
        self,
        config: PaliGemmaConfig | QMambaConfig,
        tokenizer: Tokenizer,
        *,
        max_length: int | None = MAX_LENGTH,
        padding_side: Literal["left", "right"] = "left",
        draft: bool = False,
    ):
        """max_length: tokens that a row may have, image and answer included; a longer row is an error, it is never cut;
        None is no limit. padding_side: "left" as in transformers, so that the last position of every row is its newest
        token. draft: decode large JPEGs at reduced size, of at least DRAFT times the model's (`load_image`).

        Raises UserError if config and tokenizer disagree.
        """
        # of a language model that reads pictures by WINGS; it checks the ids
        self.text = TextTokenizer(config.language, tokenizer) if isinstance(config, LanguageWingsConfig) else None
        if self.text is None:
            _check_tokenizer(config, tokenizer)
        self.config, self.tokenizer = config, tokenizer
        self.max_length, self.padding_side = max_length, padding_side
        self.draft = DRAFT * config.vision.image_size if draft else None
        control = (config.pad_token_id, config.eos_token_id, config.bos_token_id, tokenizer.unk_id())
        self._not_text = {*control, config.image_token_id}
        self._reserved = [SLOT, *(tokenizer.id_to_piece(i) for i in control if i is not None)]

    @classmethod
    def from_source(cls, source: str | Path, *, revision: str | None = None, **options) -> "Processor":
        """The processor of a model: a folder, `embedded`, a hub id, or a preset with the embedded model's vocabulary.

        Needs config.json and tokenizer.model, or tokenizer.json where there is none. Of a PaliGemma's image processor
        the file, if there is one, must say what is done here. options: those of the constructor. Raises UserError.
        """
        preset, file = preset_of(source), find_tokenizer(source, revision)
        config = preset or read_config(file.with_name("config.json"))
        if isinstance(config, TextModelConfig | LanguageConfig):
            raise UserError(f"{shown(source)}: is a language model for text alone: give a model that reads pictures")
        if preset is None and type(config) is PaliGemmaConfig:
            _check_pixels(file.parent, config.vision.image_size)
        tokenizer = load_tokenizer(file)
        # the id of <image> is the first one after the tokenizer's pieces, as in PaliGemma
        if preset is not None and preset.image_token_id != tokenizer.vocab_size():
            raise UserError(
                f"{source}: this preset has random weights and no tokenizer: give a folder with config.json and "
                "a tokenizer, or the hub id of a published model"
            )
        return cls(config, tokenizer, **options)

    def __call__(
        self,
        images: Sequence[Picture | Sequence[Picture] | None],
        prefixes: Sequence[str],
        suffixes: Sequence[str] | None = None,
    ) -> Batch:
        """One row for each prefix, with one picture, a list of pictures, or None for text alone, see `row_of`.

        A picture that is given twice, as the same object or path, is in the batch once. Raises UserError, naming the
        row or file.
        """
        rows, pictures = [], []
        turns = zip(prefixes, suffixes or [None] * len(prefixes), strict=True)
        for number, (entry, turn) in enumerate(zip(images, turns, strict=True)):
            of_row = [] if entry is None else entry if isinstance(entry, list | tuple) else [entry]
            try:
                rows.append(self.row_of(len(of_row), [turn]))
            except UserError as error:
                raise UserError(f"row {number}: {error}") from None
            pictures += of_row
        return self.pad(rows, pictures)

    def row_of(self, n_images: int, turns: Sequence[Turn]) -> TokenRow:
        """The row of a conversation, prompts with their answers, as this model was trained.

        As `layout`, but a PaliGemma takes pictures first: `<image>` in a prompt is removed, with the blanks around it.
        """
        if check_turns(n_images, turns) and not isinstance(self.config, WingsConfig | QMambaConfig):
            turns = [(_without_marks(prompt), answer) for prompt, answer in turns]
        *before, (prefix, suffix) = turns
        return self.layout(n_images, prefix, suffix, before)

    def layout(self, n_images: int, prefix: str, suffix: str | None = None, before: Sequence[Turn] = ()) -> TokenRow:
        """The row of a prompt, with its answer in training. before: earlier turns, prompts with their answers.

        `<image>` in a prompt marks the place of a picture, once for each picture. Without it pictures come first.
        Raises UserError for another number of marks, and for text that cannot be encoded or is too long.
        """
        turns: list[Turn] = [*before, (prefix, suffix)]
        is_marked = check_turns(n_images, turns)
        slot = [self.config.image_token_id] * self.config.num_image_tokens
        ids, types, learned = [], [], []
        if self.text is not None and self.config.chat:
            if n_images and not is_marked:
                turns[-1] = f"{SLOT * n_images}\n{prefix}", suffix
            ids, learned = self.text.conversation(turns, slot)
            types = [1] * len(ids)
        else:
            for number, (prompt, answer) in enumerate(turns):
                # the newline is encoded with the prompt: a prompt that ends in one makes a single piece "\n\n" with it
                parts = (prompt + "\n").split(SLOT)
                if not number and not is_marked:
                    parts = [""] * n_images + parts
                given: list[int] = []
                for place, part in enumerate(parts):
                    given += slot if place else []
                    if part and self.config.bos_token_id not in (None, *ids, *given):  # where the text begins
                        given.append(self.config.bos_token_id)
                    given += self.encode(part)
                reply = [] if answer is None else [*self.encode(answer), self.config.eos_token_id]
                ids += given + reply
                types += [int(number > 0)] * len(given) + [1] * len(reply)
                learned += [0] * len(given) + [1] * len(reply)
        if self.max_length is not None and len(ids) > self.max_length:
            raise UserError(
                f"{len(ids)} tokens, but max_length is {self.max_length}: give fewer pictures, shorten the text or "
                f"raise max_length ({quoted(prefix)})"
            )
        return ids, types, learned

    def pad(self, rows: Sequence[TokenRow], pictures: Sequence[Picture] | None = None) -> Batch:
        """Rows of `layout` as one batch, with the pictures of all their image slots in order.

        Pictures that are the same object or path are opened once. pictures None: they are encoded elsewhere, the batch
        has no pixels, and its image_index is 0, 1, … over the slots. Raises UserError, naming the file, and for another
        number of pictures than of slots, which a model on a GPU does not count.
        """
        slots = sum(ids.count(self.config.image_token_id) for ids, *_ in rows) // self.config.num_image_tokens
        index = list(range(slots))
        distinct: dict[str | int, Picture] = {}
        if pictures is not None:
            if len(pictures) != slots:
                raise UserError(f"the rows have {slots} image slots for {len(pictures)} pictures: give one for each")
            keys = [os.fspath(p) if isinstance(p, str | os.PathLike) else id(p) for p in pictures]
            distinct = dict(zip(keys, pictures, strict=True))
            index = [list(distinct).index(key) for key in keys]
        size, width = self.config.vision.image_size, max(len(ids) for ids, *_ in rows)
        pixel_values = torch.empty(len(distinct), 3, size, size)
        for pixels, picture in zip(pixel_values.numpy(), distinct.values(), strict=True):
            self.pixels(picture, pixels)
        input_ids, types, mask, learned = torch.zeros(4, len(rows), width, dtype=torch.int64)
        input_ids[:] = self.config.pad_token_id
        for number, (ids, *others) in enumerate(rows):
            # padding on the left comes before the image tokens
            place = slice(width - len(ids), width) if self.padding_side == "left" else slice(len(ids))
            for tensor, values in zip((input_ids, types, learned), (ids, *others), strict=True):
                tensor[number, place] = torch.tensor(values)
            mask[number, place] = 1
        labels = input_ids.where(learned > 0, -100)
        return Batch(input_ids, pixel_values, types, mask, labels, torch.tensor(index, dtype=torch.int64))

    def fit(self, picture: Drawn) -> np.ndarray:
        """A picture as uint8 (R, R, 3), all that the model sees of it. Raises UserError, naming the file."""
        return fit(picture, self.config.vision.image_size, self.draft, square=self.text is not None)

    def pixels(self, picture: Drawn, out: np.ndarray | None = None) -> torch.Tensor:
        """A picture as the vision tower reads it, float32 (3, R, R), written to `out` if given. Raises as `fit`."""
        return to_pixels(self.fit(picture), self.config.vision.image_size, out)

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without bos or eos. Raises UserError if it spells a control token.

        transformers reads `<bos>` in a prompt as the control token, sentencepiece spells it out; here it is an error.
        `<loc0000>` and `<seg000>` are text. A tokenizer.json gives the ids of transformers. A tokenizer.model may give
        others to a literal U+2581, which it takes for a space; to more than 31 spaces, tabs or newlines in a row; and,
        for Gemma 1, to the spelling of a reserved piece such as `<b>` or `<unused0>`.
        """
        if self.text is not None:
            return self.text.encode(text)
        check_text(text, self._reserved)
        for piece in re.findall(r"<loc\d{4}>|<seg\d{3}>", text):
            if self.tokenizer.piece_to_id(piece) == self.tokenizer.unk_id():
                raise UserError(f"the tokenizer has no piece {piece}: PaliGemma's end at <loc1023> and <seg127>")
        return self.tokenizer.encode(text)

    def continuation(self, prefix: str, answer: str) -> list[int]:
        """The ids of an answer after its prompt, as in training: encoded by itself, since the newline of the prompt's
        end is a piece of its own, and without a space before it. `prefix` matters where text is continued."""
        return self.encode(answer)

    def decode(self, ids: Iterable[int] | torch.Tensor) -> str:
        """The text of answer tokens (T,) up to the first eos; control and image tokens are left out."""
        if self.text is not None:
            return self.text.decode(ids)
        ids = ids.tolist() if isinstance(ids, torch.Tensor) else list(ids)
        if self.config.eos_token_id in ids:
            ids = ids[: ids.index(self.config.eos_token_id)]
        pieces = self.tokenizer.vocab_size()  # the embedding has a few rows more
        return self.tokenizer.decode([i for i in ids if 0 <= i < pieces and i not in self._not_text])


def _check_pixels(folder: Path, size: int) -> None:
    """Raise UserError if the model's own image processor makes other pixels than `model/images.py`."""
    expected = dict.fromkeys(("do_resize", "do_rescale", "do_normalize"), True) | {"do_center_crop": False}
    expected |= {"size": {"height": size, "width": size}, "resample": 3, "rescale_factor": 1 / 255}  # 3: bicubic
    expected |= dict.fromkeys(("image_mean", "image_std"), [0.5] * 3)
    for file in (folder / "processor_config.json", folder / "preprocessor_config.json"):
        raw = read_json(file) if file.is_file() else {}
        section = raw.get("image_processor") or raw
        for name, value in expected.items() if isinstance(section, dict) else ():
            if section.get(name) not in (None, value):
                problem = f"{name} is {quoted(section[name])}, but {value} is computed here"
                raise UserError(f"{file}: {problem}: take another model")


def _check_tokenizer(config: PaliGemmaConfig | QMambaConfig, tokenizer: Tokenizer) -> None:
    """Raise UserError if the tokenizer belongs to another model, whose ids mean other rows of the embedding."""
    pieces, image_id, problem = tokenizer.vocab_size(), config.image_token_id, ""
    for name in ("pad", "eos", "bos"):
        id_, expected = getattr(tokenizer, f"{name}_id")(), getattr(config, f"{name}_token_id")
        if id_ != expected:
            problem = f"its {name} id is {id_}, but config.json says {expected}"
    if pieces > config.text.vocab_size:
        problem = f"it has {pieces} pieces, but the embedding only {config.text.vocab_size} rows"
    if image_id < pieces and tokenizer.id_to_piece(image_id) != SLOT:
        problem = f"image token {image_id} is its piece {tokenizer.id_to_piece(image_id)!r}"
    if problem:
        raise UserError(f"the tokenizer is of another model: {problem}: take both files from one model")


def _without_marks(prompt: str) -> str:
    """The prompt without `<image>`: of the blanks around each mark a newline or a space stays."""

    def gap(mark: re.Match) -> str:
        return "\n" if "\n" in mark[0] else " " if mark[0] != SLOT else ""

    return re.sub(rf"\s*{SLOT}\s*", gap, prompt).strip() if SLOT in prompt else prompt


_BOX = re.compile(r"\s*<loc(\d{4})><loc(\d{4})><loc(\d{4})><loc(\d{4})>(?:<seg\d{3}>)*([^<>]*)")


def parse_boxes(text: str, width: int, height: int) -> list[tuple[str, tuple[float, float, float, float]]]:
    """Labels and boxes (x1, y1, x2, y2), in pixels of a width × height picture, of a detection answer.

    The answer reads `<locY1><locX1><locY2><locX2> label ; …`; place p of 0 … 1023 is p/1023 of the side (big_vision,
    PaliGemma's detection format). Parts of the text that are not a box are ignored.
    """
    boxes = []
    for match in map(_BOX.fullmatch, text.split(";")):
        if match and max(match.groups()[:4]) <= "1023":
            y1, x1, y2, x2 = (int(place) / 1023 for place in match.groups()[:4])
            corners = (min(x1, x2) * width, min(y1, y2) * height, max(x1, x2) * width, max(y1, y2) * height)
            boxes.append((match[5].strip(), corners))
    return boxes
