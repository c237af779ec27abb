"""Processors of models that take a picture anywhere in the text: WINGS and Q-Mamba.

In: pictures and prompts, in which `<image>` marks the place of a picture. Out: as of
`model.processor.Processor`.
"""

from collections.abc import Sequence

from torch import Tensor

from model.images import Picture, load_image, pad_to_square
from model.processor import Processor, TokenRow
from model.systems.chat import TextTokenizer, spell
from model.tokenizer import Texts
from model.turns import SLOT, Turn


class SlotProcessor(Processor):
    """A picture stands where `<image>` does, or before the first prompt; bos where the text begins."""

    def prompt_ids(
        self,
        prompt: str,
        n_images: int,
        has_marks: bool,
        is_first: bool,
    ) -> list[int]:
        if is_first and not has_marks:
            prompt = SLOT * n_images + prompt
        ids = spell(self.texts, prompt + "\n", self.slot)
        return self.begun(ids) if is_first else ids

    def begun(self, ids: list[int]) -> list[int]:
        """The ids of the first prompt with bos."""
        is_text = [id_ != self.config.image_token_id for id_ in ids]
        ids.insert(is_text.index(True), self.config.bos_token_id)
        return ids


class LanguageProcessor(SlotProcessor):
    """Beside a published language model: its tokenizer, and its turns where it has any."""

    def pixels(self, picture: Picture) -> Tensor:
        return super().pixels(pad_to_square(load_image(picture)))

    def open_texts(self) -> Texts:
        config = self.config
        texts = TextTokenizer(
            config.language, self.tokenizer, system=config.system, adds_bos=config.adds_bos
        )
        if config.opens_with_bos:
            texts.opening = texts.bos
        return texts

    def begun(self, ids: list[int]) -> list[int]:
        """Before a picture too, and only where the tokenizer adds bos, as LLaVA has it."""
        return self.texts.begin + ids

    def layout(self, n_images: int, turns: Sequence[Turn], has_marks: bool) -> TokenRow:
        if not self.config.chat:
            return super().layout(n_images, turns, has_marks)
        if n_images and not has_marks:
            (prompt, answer), *later = turns
            turns = [(SLOT * n_images + "\n" + prompt, answer), *later]
        ids, learned = self.texts.conversation(turns, self.slot)
        return ids, [1] * len(ids), learned
