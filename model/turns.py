"""Turns of a conversation, the marks of pictures in them, and what a text may hold. Needs no torch."""

from collections.abc import Iterable, Sequence

from model.common import UserError, quoted

SLOT = "<image>"  # marks the place of a picture in a prompt

Turn = tuple[str, str | None]  # a prompt, and its answer


def check_text(text: str, reserved: Iterable[str]) -> None:
    """Raise UserError for a text that spells one of the `reserved` pieces, or is not Unicode."""
    for piece in reserved:
        if piece in text:
            raise UserError(f"the text spells the control token {piece}, which is placed for you: remove it")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"the text is not valid Unicode ({error.reason} at character {error.start})") from None


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
