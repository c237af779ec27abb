"""SIGTERM and Ctrl-C during training: the running step is finished, a checkpoint is written, the program ends."""

import contextlib
import signal
import sys
from collections.abc import Iterator


class Interrupted(Exception):
    """A signal, its first argument, asked the run to end; the run has been saved."""


def end_program(interrupted: Interrupted, advice: str) -> None:
    """Print that the work is saved, with `advice`, and exit with the code that the signal itself would have given."""
    print(f"\nsaved; {advice}", file=sys.stderr)
    sys.exit(128 + interrupted.args[0])


@contextlib.contextmanager
def same_command_goes_on() -> Iterator[None]:
    """End the program when its block is interrupted; finished cells of a study are kept for the next call."""
    try:
        yield
    except Interrupted as interrupted:
        end_program(interrupted, "the same command goes on from here")


@contextlib.contextmanager
def catch_signals() -> Iterator[list[int]]:
    """SIGTERM and Ctrl-C are put into the yielded list instead of ending the process; a second signal ends it."""
    received: list[int] = []

    def handler(number, frame):
        if received:
            raise KeyboardInterrupt
        received.append(number)

    try:
        before = {number: signal.signal(number, handler) for number in (signal.SIGTERM, signal.SIGINT)}
    except ValueError:  # not the main thread
        before = {}
    try:
        yield received
    finally:
        for number, old in before.items():
            signal.signal(number, old)
