"""Turns of a conversation, and the marks of pictures in them. Needs no torch."""

from collections.abc import Sequence

from model.common import UserError, quoted

SLOT = "<image>"  # marks the place of a picture in a prompt
Turn = tuple[str, str | None]  # a prompt, and its answer


def check_turns(n_images: int, turns: Sequence[Turn]) -> bool:
    """Whether `<image>` marks the places of the pictures.

    Raises UserError for another number of marks than of pictures, for an empty text and for a mark
    in an answer.
    """
    for prompt, answer in turns:
        if not prompt.strip() or answer is not None and (not answer.strip() or SLOT in answer):
            raise UserError(
                f"the prefix is {quoted(prompt)}, the suffix {quoted(answer)}: write a text in both, "
                f"and {SLOT} in the prefix alone"
            )
    marks = sum(prompt.count(SLOT) for prompt, _ in turns)
    if marks not in (0, n_images):
        raise UserError(
            f"{marks} {SLOT} in the prompt for {n_images} picture(s): give one for each, or leave "
            "them out"
        )
    return marks > 0
