"""From pictures and prompts to the tensors of a batch, and from answer tokens back to text.

A `Batch` has the layout that PaliGemma was trained with: `<image>` × I, bos, prompt and newline,
then the answer and eos. Further turns follow in the same way, causal.

Ids equal those of transformers' PaliGemmaProcessor, except that a prompt cannot spell control
tokens, and that `<image>` within the prompt is taken out: pictures come first. A tokenizer.model may
read a literal U+2581, more than 31 blanks in a row and reserved pieces of Gemma 1 such as `<b>`
otherwise.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from model.common import UserError, quoted, read_json_if, shown
from model.config import PaliGemmaConfig, config_errors
from model.images import Picture, preprocessing, to_pixels
from model.registry import read_config, system_of
from model.source import preset_of
from model.tokenizer import Texts, Tokenizer, another_model, find_tokenizer, load_tokenizer
from model.turns import SLOT, Turn, check_turns

# Token ids; their types: 0 for pictures and the first prompt, which see each other, 1 for all that
# follows, which is causal; and what is learned: 1 for answers and the eos after each, else 0
TokenRow = tuple[list[int], list[int], list[int]]


@dataclass(frozen=True)
class Movable:
    """A dataclass whose tensors, and parts with tensors, go together to a device, or to page-locked
    memory, which DataLoader asks for: copies to a GPU then overlap with work."""

    def to(self, device: str | torch.device, non_blocking: bool = True) -> Self:
        # a non-blocking copy to the CPU could be read before it is complete
        later = non_blocking and torch.device(device).type == "cuda"
        return self._each("to", device, non_blocking=later)

    def pin_memory(self) -> Self:
        return self._each("pin_memory")

    def _each(self, method: str, *given, **options) -> Self:
        parts = {}
        for name, part in vars(self).items():
            if hasattr(part, method):
                parts[name] = getattr(part, method)(*given, **options)
        return replace(self, **parts)


@dataclass(frozen=True)
class Batch(Movable):
    """B rows of up to S tokens, and their distinct pictures. Labels are not shifted."""

    input_ids: Tensor  # (B, S) int64
    pixel_values: Tensor  # (pictures, 3, R, R) float32 in [-1, 1]
    # (B, S) int64: 0 for image, prefix and padding, 1 for the suffix and what follows
    token_type_ids: Tensor
    attention_mask: Tensor  # (B, S) int64: 0 at padding
    labels: Tensor  # (B, S) int64: the id of answers and the eos after each, else -100
    # (slots,) int64: the picture that fills each image slot, rows from top to bottom
    image_index: Tensor


def left_padded(rows: Sequence) -> Tensor:
    """B rows, each of C lists of one length, as an int64 tensor (C + 1, B, S).

    Zeros stand before shorter rows. The last of the C + 1 is the mask: 0 there, 1 at a row's own
    positions.
    """
    columns = [torch.tensor([*row, [1] * len(row[0])], dtype=torch.int64).T for row in rows]
    padded = pad_sequence(columns, batch_first=True, padding_side="left")
    return padded.movedim(-1, 0).contiguous()


class Processor:
    """From pictures and prompts to a `Batch`, and from answer tokens to text."""

    def __init__(self, config: Any, tokenizer: Tokenizer, max_length: int = 8192):
        """config: of a model that reads pictures. max_length: tokens of a row, by default what
        PaliGemma's decoders were trained with; a longer row is an error, it is never cut.
        Raises UserError if config and tokenizer disagree."""
        self.config, self.tokenizer, self.max_length = config, tokenizer, max_length
        self.texts = self.open_texts()
        self.encode, self.decode = self.texts.encode, self.texts.decode

    @staticmethod
    def from_source(
        source: str | Path,
        *,
        revision: str | None = None,
        **options,
    ) -> "Processor":
        """The processor of a model: a folder, `embedded`, a hub id, or a preset with the embedded
        model's vocabulary.

        Needs config.json and tokenizer.model, or tokenizer.json where there is none. Of a
        PaliGemma's image processor the file, if there is one, must say what is done here. options:
        those of the constructor. Raises UserError.
        """
        preset = preset_of(source)
        file = find_tokenizer(source, revision)
        config = preset or read_config(file.with_name("config.json"))
        if not hasattr(config, "image_token_id"):
            raise UserError(
                f"{shown(source)}: is a language model for text alone: give a model that reads "
                "pictures"
            )
        if preset is None and type(config) is PaliGemmaConfig:
            _check_pixels(file.parent, config.vision.image_size)
        tokenizer = load_tokenizer(file)
        # the id of <image> is the first one after the tokenizer's pieces, as in PaliGemma
        if preset is not None and preset.image_token_id != tokenizer.vocab_size():
            raise UserError(
                f"{source}: this preset has random weights and no tokenizer: give a folder with "
                "config.json and a tokenizer, or the hub id of a published model"
            )
        return processor_for(config, tokenizer, **options)

    @property
    def slot(self) -> list[int]:
        """The tokens of a picture."""
        return [self.config.image_token_id] * self.config.num_image_tokens

    def open_texts(self) -> Texts:
        """The texts of the tokenizer. Raises UserError if it is of another model."""
        config, tokenizer = self.config, self.tokenizer
        control = config.pad_token_id, config.eos_token_id, config.bos_token_id
        image = config.image_token_id
        reserved = (*control, tokenizer.unk_id(), image)
        texts = Texts(tokenizer, config.text.vocab_size, reserved, {config.eos_token_id})
        given = tokenizer.pad_id(), tokenizer.eos_id(), tokenizer.bos_id()
        piece = SLOT if image >= texts.pieces else tokenizer.id_to_piece(image)
        if (given, piece) != (control, SLOT):
            raise another_model(
                f"its pad, eos and bos are {given}, config.json's {control}; "
                f"image token {image} is its piece {piece!r}"
            )
        return texts

    def __call__(
        self,
        images: Sequence[Picture | Sequence[Picture] | None],
        prefixes: Sequence[str],
        suffixes: Sequence[str] | None = None,
    ) -> Batch:
        """One row for each prefix, with one picture, a list of pictures, or None for text alone,
        see `row_of` and `pad`. Raises UserError, naming the row or file."""
        rows, pictures = [], []
        turns = zip(prefixes, suffixes or [None] * len(prefixes), strict=True)
        for number, (entry, turn) in enumerate(zip(images, turns, strict=True)):
            if entry is None:
                entry = []
            elif not isinstance(entry, list | tuple):
                entry = [entry]
            try:
                rows.append(self.row_of(len(entry), [turn]))
            except UserError as error:
                raise UserError(f"row {number}: {error}") from None
            pictures += entry
        return self.pad(rows, pictures)

    def row_of(self, n_images: int, turns: Sequence[Turn]) -> TokenRow:
        """The row of prompts with their answers; the last answer is None where it is asked for.

        `<image>` in a prompt marks the place of a picture, once for each picture. Raises UserError
        for another number of marks, and for text that cannot be encoded or is too long.
        """
        has_marks = check_turns(n_images, turns)
        said = " ".join(text or "" for turn in turns for text in turn)
        # a <loc…> that is not one of <loc0000> to <loc1023>
        if beyond := re.search(r"<loc(?!(0\d\d|10[01]|102(?=[0-3]))\d>)[_\d]+>", said):
            raise UserError(
                f"{beyond[0]} is no place in a picture: they are <loc0000> to <loc1023>"
            )
        ids, types, learned = self.layout(n_images, turns, has_marks)
        if len(ids) > self.max_length:
            raise UserError(
                f"{len(ids)} tokens, but max_length is {self.max_length}: give fewer pictures, shorten "
                f"the text or raise max_length ({quoted(turns[-1][0])})"
            )
        return ids, types, learned

    def layout(
        self,
        n_images: int,
        turns: Sequence[Turn],
        has_marks: bool,
    ) -> TokenRow:
        """The row, of any length. has_marks: pictures are marked in the prompts."""
        ids, types, learned = [], [], []
        for number, (prompt, answer) in enumerate(turns):
            given = self.prompt_ids(prompt, n_images, has_marks, is_first=number == 0)
            reply = [] if answer is None else [*self.encode(answer), self.config.eos_token_id]
            ids += given + reply
            types += [min(number, 1)] * len(given) + [1] * len(reply)
            learned += [0] * len(given) + [1] * len(reply)
        return ids, types, learned

    def prompt_ids(
        self,
        prompt: str,
        n_images: int,
        has_marks: bool,
        is_first: bool,
    ) -> list[int]:
        """The ids of a prompt: pictures come before the first one, wherever they are marked."""
        if has_marks and SLOT in prompt:
            # where a mark alone parts two words, a blank does
            prompt = re.sub(rf"(?<=[^\s(])(\s*{SLOT})+(?=\w)", " ", prompt)
            prompt = re.sub(rf"\s*{SLOT}", "", prompt).strip()
        # the newline is encoded with the prompt: a prompt that ends in one makes a single piece
        # "\n\n" with it
        ids = self.encode(prompt + "\n")
        if is_first:
            ids = [*self.slot * n_images, self.config.bos_token_id, *ids]
        return ids

    def pad(
        self,
        rows: Sequence[TokenRow],
        pictures: Sequence[Picture | Tensor] | None = None,
    ) -> Batch:
        """Rows of `row_of` as one batch, with the pictures of all their image slots in order.

        A picture that is given twice, as the same object or path, is in the batch once. A tensor is
        one of `pixels`. pictures None: they are encoded elsewhere, the batch has no pixels, and its
        image_index counts the slots. Raises UserError, naming the file.
        """
        tokens = sum(ids.count(self.config.image_token_id) for ids, *_ in rows)
        pixels, index = self.distinct(pictures, tokens // self.config.num_image_tokens)
        # on the left, so that the last position of every row is its newest token
        ids, types, learned, mask = left_padded(rows)
        labels = ids.where(learned > 0, -100)
        ids = ids.where(mask > 0, self.config.pad_token_id)
        return Batch(ids, pixels, types, mask, labels, index)

    def distinct(
        self, pictures: Sequence[Picture | Tensor] | None, slots: int
    ) -> tuple[Tensor, Tensor]:
        """The pixels (pictures, 3, R, R) of distinct pictures, and which of them fills each slot
        (slots,)."""
        size = self.config.vision.image_size
        if pictures is None:
            return torch.empty(0, 3, size, size), torch.arange(slots)
        if len(pictures) != slots:  # a model on a GPU does not count them
            raise UserError(
                f"{len(pictures)} pictures for {slots} image slots: give each slot a picture"
            )
        numbers = {}  # of the distinct ones, by path or object
        pixels, index = [], []
        for picture in pictures:
            is_path = isinstance(picture, str | os.PathLike)
            key = os.fspath(picture) if is_path else id(picture)
            if key not in numbers:
                numbers[key] = len(pixels)
                pixels.append(picture if isinstance(picture, Tensor) else self.pixels(picture))
            index.append(numbers[key])
        stacked = torch.stack(pixels) if pixels else torch.empty(0, 3, size, size)
        return stacked, torch.tensor(index, dtype=torch.int64)

    def pixels(self, picture: Picture) -> Tensor:
        """A picture as the vision tower reads it, float32 (3, R, R). Raises UserError, naming the
        file."""
        return to_pixels(picture, self.config.vision.image_size)

    def continuation(self, prefix: str, answer: str) -> list[int]:
        """The ids of an answer after its prompt: by itself, since the prompt's newline is a piece
        of its own."""
        return self.encode(answer)


def processor_for(config: Any, tokenizer: Tokenizer, **options) -> Processor:
    """The processor of a configuration. options: those of the constructor. Raises UserError."""
    system = system_of(config.kind)
    kind = Processor if system is None else system.processor
    return kind(config, tokenizer, **options)


def _check_pixels(folder: Path, size: int) -> None:
    """Raise UserError if the model's own image processor makes other pixels than
    `model/images.py`."""
    expected = preprocessing(size) | {"do_center_crop": False}
    for file in (folder / "processor_config.json", folder / "preprocessor_config.json"):
        raw = read_json_if(file)
        with config_errors(file):
            given = expected | (raw.get("image_processor") or raw)
        if wrong := [name for name, value in expected.items() if given[name] not in (None, value)]:
            raise UserError(
                f"{file}: {wrong[0]} is {quoted(given[wrong[0]])}, but {expected[wrong[0]]} is computed "
                "here: take another model"
            )
