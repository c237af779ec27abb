"""Train a language model from nothing on plain text: the Differential Transformer, or its plain twin.

    python -m train.text                             the source of Python's standard library, minutes on two cores
    python -m train.text --text FILE… --attention plain
    python -m train.text --resume runs/text-differential-1
    python -m train.text --preset small --device cuda --tokens 2e9 --text DIR
    torchrun --nproc_per_node=8 -m train.text …      several GPUs; with --shard the weights are spread

In: text (`eval/text/corpus.py`) and two tasks (`eval/text/tasks.py`), mixed. Out: a run folder with the corpus and its
tokenizer, metrics, a picture of the loss, checkpoints to resume from, and `model/`. `eval/text/measures.py` measures
the model, `train/studies/text.py` compares it with its twin.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from eval.text.corpus import find_corpus, kept_corpus, open_corpus
from eval.text.tasks import SYMBOLS
from model.common import run_command
from train.checkpoint import checkpoints, write_folder
from train.distributed import World, join_world, leave_world, whole_model
from train.flags import FlagParser, RunArguments, add_flags, add_run_flags, from_values, read_config, take_run_arguments
from train.metrics import draw_loss
from train.optim import count
from train.origin import check_resume, origin_of
from train.run_folder import check_empty, run_folder
from train.systems.text import TextSettings, check, learn
from weights.export import export_model
from weights.fingerprint import tensor_fingerprint


def parse(argv: Sequence[str] | None) -> tuple[TextSettings, RunArguments]:
    """The settings and the run folder of a command line. Raises UserError for values out of range."""
    parser = FlagParser(prog="python -m train.text", description=__doc__)
    add_run_flags(parser, "runs/text-ATTENTION-1")
    add_flags(parser, TextSettings)
    given = vars(parser.parse_args(argv))
    arguments = take_run_arguments(given)
    if arguments.resume is not None:
        return read_config(TextSettings, arguments.resume, "train.text"), arguments
    settings = from_values(TextSettings, given)
    check(settings)
    return settings, arguments


def train(settings: TextSettings, arguments: RunArguments, world: World) -> None:
    """The whole run: prepare the corpus, train, write the result."""
    if world.is_first:
        check_empty(arguments.out)
    with run_folder(arguments, settings, f"text-{settings.attention}", "train.text", world) as run:
        folder = Path(settings.corpus or run / "corpus")
        # a run that goes on keeps its tokens, whatever has become of the text: a new corpus would replace them
        corpus, kept = find_corpus(folder) if checkpoints(run) else None, {}
        if world.is_first:
            corpus = corpus or open_corpus(folder, settings.text, settings.vocab_size, SYMBOLS)
            texts = f"{len(corpus.ids['train']):,} tokens of text to learn from"
            print(f"{texts}, {len(corpus.starts['train']) - 1} documents", flush=True)
            ids = tensor_fingerprint({**corpus.ids, **{f"{name}/starts": t for name, t in corpus.starts.items()}})
            fingerprints = {"corpus": f"{corpus.digest} {ids}"}
            kept["origin"] = origin_of(settings, fingerprints, world, torch.float32)
            check_resume(run, kept["origin"], arguments.allow_changed)
        world.barrier()  # the first process has written the corpus
        model, progress = learn(settings, corpus or kept_corpus(folder), run, world, kept)
        if settings.shard and world.size > 1:
            model = whole_model(model, world)
        write = partial(export_model, model, companions=[folder / "tokenizer.model"])
        write_folder(lambda folder: write(folder) if world.is_first else None, run / "model", world)
        if not world.is_first:
            return
        draw_loss(run)
        tokens = settings.steps * settings.rows * settings.length
        print(
            f"{count(model.parameters()):,} parameters, {settings.attention} attention, {tokens:,} tokens "
            f"in {progress['seconds']:.0f} s; in {run}: model/, metrics.jsonl, loss.png, checkpoints/"
        )
        print(f"next: python -m eval.text all {run}")


def main(argv: Sequence[str] | None = None) -> None:
    settings, arguments = parse(argv)
    world = join_world(settings.device)
    try:
        train(settings, arguments, world)
    finally:
        leave_world()


if __name__ == "__main__":
    run_command(main)
