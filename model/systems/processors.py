"""Processors of models that take a picture anywhere in the text: WINGS and Q-Mamba.

In: pictures and prompts, in which `<image>` marks the place of a picture. Out: as of
`model.processor.Processor`.
"""

from collections.abc import Sequence

from model.processor import Processor, TokenRow
from model.systems.chat import TextTokenizer
from model.tokenizer import Texts
from model.turns import SLOT, Turn


class SlotProcessor(Processor):
    """A picture stands where `<image>` does, or before the first prompt; bos where the text begins."""

    def layout(self, n_images: int, turns: Sequence[Turn], has_marks: bool) -> TokenRow:
        if not has_marks:
            (first, answer), *others = turns
            turns = [(SLOT * n_images + first, answer), *others]
        ids, types, learned = [], [], []
        for number, (prompt, answer) in enumerate(turns):
            given = self.texts.spell(prompt + "\n", self.slot)
            if number == 0 and self.config.bos_token_id is not None:
                is_text = [id_ != self.config.image_token_id for id_ in given]
                given.insert(is_text.index(True), self.config.bos_token_id)
            reply = self.reply(answer)
            ids += given + reply
            types += [min(number, 1)] * len(given) + [1] * len(reply)
            learned += [0] * len(given) + [1] * len(reply)
        return ids, types, learned


class LanguageProcessor(SlotProcessor):
    """Beside a published language model: its tokenizer, and its turns where it has any."""

    is_square = True

    def open_texts(self) -> Texts:
        return TextTokenizer(self.config.language, self.tokenizer)

    def layout(self, n_images: int, turns: Sequence[Turn], has_marks: bool) -> TokenRow:
        if not self.config.chat:
            return super().layout(n_images, turns, has_marks)
        if n_images and not has_marks:
            *before, (prompt, answer) = turns
            turns = [*before, (SLOT * n_images + "\n" + prompt, answer)]
        ids, learned = self.texts.conversation(turns, self.slot)
        return ids, [1] * len(ids), learned
