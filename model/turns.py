"""Turns of a conversation, the marks of pictures in them, and what a text may hold. Needs no torch."""

from collections.abc import Iterable, Sequence

from model.common import UserError, quoted

SLOT = "<image>"  # marks the place of a picture in a prompt

Turn = tuple[str, str | None]  # a prompt, and its answer


def check_text(text: str, reserved: Iterable[str]) -> None:
    """Raise UserError for a text that spells one of the `reserved` pieces."""
    for piece in reserved:
        if piece in text:
            raise UserError(f"the text spells the control token {piece}, which is placed for you: remove it")


def check_turns(n_images: int, turns: Sequence[Turn]) -> bool:
    """Whether `<image>` marks the places of the pictures.

    Raises UserError if there are more or fewer marks than pictures, and for an empty prompt or answer.
    """
    for prompt, answer in turns:
        if not prompt.strip() or answer is not None and not answer.strip():
            raise UserError(f"the prefix is {quoted(prompt)}, the suffix {quoted(answer)}: write a text in both")
    marks = sum(prompt.count(SLOT) for prompt, _ in turns)
    if marks and marks != n_images:
        raise UserError(f"{marks} {SLOT} in the prompt for {n_images} picture(s): give one for each, or leave them out")
    return bool(marks)
