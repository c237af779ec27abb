"""The entry of a benchmark's command: ask a model, or `score` a file of answers.

In: a `Command` and the command line. torch is imported only where a model is asked: scoring does not need it.
"""

import sys
from argparse import ArgumentParser
from collections.abc import Callable, Sequence

from eval.command import Ask, Command, add_json_flag, command_parser, print_report


def main_of(command: Command) -> Callable[[Sequence[str] | None], None]:
    """The `main` of a benchmark: `score …`, or else asking a model. It raises UserError."""

    def main(argv: Sequence[str] | None = None) -> None:
        argv = sys.argv[1:] if argv is None else list(argv)
        parser = parser_of(command)
        if command.score is not None and command.add_score_flags is not None:
            scorer = parser.add_subparsers(dest="command").add_parser(
                "score", help="score a file of answers", description="Score a file of answers."
            )
            command.add_score_flags(scorer)
            add_json_flag(scorer)
            if argv[:1] == ["score"]:
                args = parser.parse_args(argv)
                print_report(command.score(args), args.json)
                return
        from eval.session import add_answer_flags, run

        add_answer_flags(parser, *command.limit, command.max_new_tokens)
        run(command, parser.parse_args(argv))

    return main


def parser_of(command: Command) -> ArgumentParser:
    """The parser of a benchmark's own flags."""
    parser = command_parser(f"eval.{command.name}", command.doc)
    command.add_flags(parser)
    return parser


def ask_model(model, processor, asks: Sequence[Ask], ask_all: Callable | None = None, **options) -> list[str | None]:
    """`eval.run.ask_all`, or the function given in its place, such as one that spreads the questions over GPUs."""
    if ask_all is None:
        from eval.run import ask_all
    return ask_all(model, processor, asks, **options)
