"""Turns of a conversation, and the marks of pictures in them. Needs no torch."""

from collections.abc import Sequence

from model.common import UserError, quoted

SLOT = "<image>"  # marks the place of a picture in a prompt

Turn = tuple[str, str | None]  # a prompt, and its answer


def check_turns(n_images: int, turns: Sequence[Turn]) -> bool:
    """As `check_marks`. Raises UserError for a prompt or answer that is no text, or empty, too."""
    for name, text in (pair for turn in turns for pair in zip(("prefix", "suffix"), turn, strict=True)):
        if not (isinstance(text, str) and text.strip() or name == "suffix" and text is None):
            raise UserError(f"the {name} is {quoted(text)}, expected a text that is not empty")
    return check_marks(n_images, turns)


def check_marks(n_images: int, turns: Sequence[Turn]) -> bool:
    """Whether `<image>` marks the places of the pictures. Raises UserError if there are more or fewer marks."""
    marks = sum(prompt.count(SLOT) for prompt, _ in turns)
    if marks and marks != n_images:
        where = "prefix" if len(turns) == 1 else "prompts"
        raise UserError(
            f"{marks} {SLOT} in the {where}, but {n_images} picture(s): give one for each, or leave {SLOT} out, which "
            f"puts pictures first ({quoted(next(prompt for prompt, _ in turns if SLOT in prompt))})"
        )
    return bool(marks)
