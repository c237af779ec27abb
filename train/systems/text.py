"""Train a language model from nothing on plain text: the Differential Transformer, or its plain twin.

    python -m train.systems.text                           Python's standard library: minutes on two cores
    python -m train.systems.text --preset small --attention plain --device cuda --tokens 2e9 --text DIR
    torchrun --nproc_per_node=8 -m train.systems.text …    several GPUs; with --shard the weights are spread

In: text (`eval/systems/text/corpus.py`) and two tasks (`eval/systems/text/tasks.py`), mixed. Out: a
run folder with the corpus and its tokenizer, metrics, a picture of the loss, checkpoints to resume
from, and `model/`. `eval/systems/text/measures.py` measures the model, `train/systems/studies/text.py`
compares it with its twin.
"""

import math
import random
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from eval.question import parts_of
from eval.systems.text.corpus import Corpus, kept_corpus, open_corpus
from eval.systems.text.tasks import MOST_ASKED, SYMBOLS, Tasks
from model.common import UserError, run_command
from model.device import use_threads
from model.processor import Movable
from model.systems.configs import BOS, TEXT_PRESETS
from model.systems.language import TextModel, new_model
from train.checkpoint import Progress, newest_progress
from train.data.batches import load_batches
from train.distributed import World, joined_world, whole_model
from train.flags import RunArguments, flag, read_run
from train.loop import LoopSettings, fit
from train.optim import (
    SCALARS,
    Rule,
    make_adamw,
    parameter_count,
    parameter_groups,
    parameter_names,
)
from train.run import draw_loss, run_folder, set_origin
from weights.export import export_model

SHORTEST, LEAST = 64, 24  # positions at least of a needle document, and of one of records alone
MOST_RECORDS = 64  # of a document that is learned from


@dataclass(frozen=True)
class TextSettings(LoopSettings):
    """All settings of a run. Each is a flag of the same name; see `train.flags.flag`."""

    program = "train.systems.text"

    text: tuple[str, ...] = flag(
        (), "plain text (default: Python's standard library)", nargs="*", metavar="PATH"
    )
    corpus: str = flag("", "folder of the prepared corpus (default: RUN/corpus)")
    attention: str = flag(
        "differential",
        "of every layer; wide: plain, of differential heads",
        choices=["differential", "plain", "wide"],
    )
    preset: str = flag("tiny", "size of the model", choices=list(TEXT_PRESETS))
    length: int = flag(256, "positions of a row: the longest context", least=SHORTEST, most=2**20)
    batch_size: int = flag(4, "rows of a micro-batch, at most", least=1)
    step_batch: int | None = flag(
        None, "rows of a step over all processes (default: --batch-size)", least=1
    )
    tokens: float = flag(2e6, "tokens to learn from", least=1, most=1e15)
    needles: float = flag(0.4, "share of needle documents among those drawn", least=0, most=1)
    examples: float = flag(
        0.35,
        "share of documents of recall and examples, half each; recall also where a needle document "
        "does not fit",
        least=0,
        most=1,
    )
    curriculum: float = flag(
        0.35, "share of the rows, the first ones, that hold recall alone", least=0, most=1
    )
    lr: float = flag(3e-3, "peak learning rate of AdamW", least=0, most=1e6)
    weight_decay: float = flag(0.1, "AdamW weight decay, on matrices", least=0, most=1e6)
    beta2: float = flag(0.95, "AdamW's second momentum", least=0, most=0.9999999)
    warmup: float = flag(0.05, "warm-up steps; below 1, a share of all steps", least=0, most=1e12)

    @property
    def stem(self) -> str:
        return f"text-{self.attention}"

    @property
    def rows(self) -> int:
        """Rows of a step, of all processes together."""
        return self.step_batch or self.batch_size

    @property
    def steps(self) -> int:
        return max(1, round(self.tokens / (self.rows * self.length)))


@dataclass(frozen=True)
class TextBatch(Movable):
    """Packed rows: input_ids, documents and targets (B, S). A document's last token is a target
    only."""

    input_ids: Tensor
    documents: Tensor
    targets: Tensor
    names: tuple[str, ...]
    tokens: int  # targets
    bad: tuple[str, ...] = ()


def draw_documents(
    corpus: Corpus,
    tasks: Tasks,
    settings: TextSettings,
    index: int,
) -> list[list[int]]:
    """The documents of one row, `length` inputs and as many targets: a pure function of the seed
    and the row's number.

    All come from the split of `tasks`. Task documents are drawn first; then a piece of text, from a
    random place to the end of its file, fills the row, and more pieces follow if it is too short.
    No row is padded, and only text is cut.
    """
    dice = random.Random(f"{tasks.split}/{settings.seed}/{index}")
    ids, starts = corpus.ids[tasks.split], corpus.starts[tasks.split]
    is_early = settings.examples and index < settings.curriculum * settings.steps * settings.rows
    needles, alone = (0.0, 1.0) if is_early else (settings.needles, settings.examples)
    documents, room = [], settings.length
    while room:
        kind = dice.random()
        if room >= SHORTEST and kind < needles:
            length = round(SHORTEST * (room / SHORTEST) ** dice.random())  # log-uniform
            most = min(MOST_RECORDS, length // 4)
            records = round(most ** dice.random())
            document = tasks.needles(dice, length, records, MOST_ASKED).ids
        elif room >= LEAST and kind < needles + alone:
            most = min(MOST_RECORDS, room - 2 * MOST_ASKED - 2)
            records = round(4 * (most / 4) ** dice.random())
            is_recall = is_early or kind < needles + alone / 2
            if is_recall:
                task = tasks.recall(dice, records, MOST_ASKED)
            else:
                task = tasks.listed(*tasks.episode(dice, records))
            document = task.ids
        else:
            start = dice.randrange(len(ids))
            end = int(starts[torch.searchsorted(starts, start, right=True)])
            end = min(end, start + room)
            document = [BOS, *ids[start:end].tolist()]
        documents.append(document[: room + 1])
        room -= len(documents[-1]) - 1
    return documents


class TextOrder:
    """The rows of every step: step s takes rows s·R … s·R + R − 1, in equal shares of all
    processes, so a run can start at any step. `order[numbers]` is the batch of these rows."""

    most_bad = 0

    def __init__(
        self,
        corpus: Corpus,
        settings: TextSettings,
        rank: int = 0,
        processes: int = 1,
    ):
        self.corpus = corpus
        self.settings = settings
        self.tasks = Tasks(corpus, "train")
        self.total = settings.steps
        self.rank = rank
        self.share, rest = divmod(settings.rows, processes)
        if rest:
            problem = f"--step-batch {settings.rows}: expected a multiple of the {processes}"
            raise UserError(f"{problem} processes")

    def steps(
        self, first: int, workers: int | None = 0, pin: bool = False
    ) -> Iterator[list[TextBatch]]:
        """The micro-batches of each step, from step `first` to the last."""
        size = self.settings.batch_size

        def plan() -> Iterator[range]:
            for step in range(first, self.total):
                start = step * self.settings.rows + self.rank * self.share
                yield from parts_of(range(start, start + self.share), size)

        batches = load_batches(self, plan(), workers, pin)
        for _ in range(first, self.total):
            yield list(islice(batches, math.ceil(self.share / size)))

    def __getitem__(self, numbers: range) -> TextBatch:
        """Rows of packed documents: each token's target is the next of its document, unless it is
        unforeseen."""
        inputs, targets, places = [], [], []
        for number in numbers:
            row = draw_documents(self.corpus, self.tasks, self.settings, number)
            inputs.append([])
            targets.append([])
            places.append([])
            for place, document in enumerate(row):
                inputs[-1] += document[:-1]
                targets[-1] += document[1:]
                places[-1] += [place] * (len(document) - 1)
        targets = torch.tensor(targets)
        hidden = torch.isin(targets, torch.tensor(self.tasks.unforeseen))
        return TextBatch(
            input_ids=torch.tensor(inputs),
            documents=torch.tensor(places),
            targets=targets.masked_fill(hidden, -100),
            names=tuple(f"row {number}" for number in numbers),
            tokens=int((~hidden).sum()),
        )


def text_optimizer(model: TextModel, settings: TextSettings) -> torch.optim.Optimizer:
    """AdamW on all parameters; no decay on norms, λ and the embedding."""
    bare = Rule(
        parameter_names(model, rf"{SCALARS}|.*norm\.weight|.*embed_tokens\.weight"), settings.lr
    )
    others = Rule(parameter_names(model, ".*"), settings.lr, settings.weight_decay)
    return make_adamw(parameter_groups(model, [bare, others]), (0.9, settings.beta2))


def train_text(
    settings: TextSettings,
    corpus: Corpus,
    run: Path,
    world: World,
    progress: Progress | None = None,
) -> tuple[TextModel, Progress]:
    """Train from the newest checkpoint in `run`, if there is one; the model and the run's
    progress."""
    kind = settings.attention
    model = new_model(settings.preset, kind == "differential", settings.seed, kind == "wide")
    model.to(world.device)
    use_threads(settings.threads, model)
    model.set_checkpointing(settings.checkpointing)
    optimizer = text_optimizer(model, settings)
    order = TextOrder(corpus, settings, world.rank, world.size)

    def loss(called: torch.nn.Module, micro: TextBatch) -> Tensor:
        micro = micro.to(world.device)
        return called(micro.input_ids, documents=micro.documents, targets=micro.targets)

    progress = fit(model, optimizer, order, loss, settings, run, world, progress=progress)
    return model.eval(), progress


def main(argv: Sequence[str] | None = None) -> None:
    settings, arguments = read_run(TextSettings.program, __doc__, TextSettings, RunArguments, argv)
    with (
        joined_world(settings.device) as world,
        run_folder(arguments, settings, world) as run,
    ):
        # 1. the text
        folder = Path(settings.corpus or run / "corpus")
        progress = newest_progress(run) or Progress(world.size)
        if world.is_first:
            if not progress.step:  # a resumed run keeps its tokens, even if the text has changed
                vocabulary = TEXT_PRESETS[settings.preset].vocab_size
                open_corpus(folder, settings.text, vocabulary, SYMBOLS)
            corpus = kept_corpus(folder)
            print(f"{len(corpus.ids['train']):,} tokens of text to learn from", flush=True)
            set_origin(run, progress, settings, {"corpus": corpus.digest}, arguments.allow_changed)
        world.barrier()  # the first process has written the corpus

        # 2. the model
        model, progress = train_text(settings, kept_corpus(folder), run, world, progress)
        model = whole_model(model, world)
        if world.is_first:
            if kept_corpus(folder).digest != corpus.digest:
                problem = "another run has made this corpus anew"
                raise UserError(f"{folder}: {problem}: give each text a --corpus of its own")
            shutil.rmtree(run / "model", ignore_errors=True)
            export_model(model, run / "model", companions=[folder / "tokenizer.model"])
            draw_loss(run)
            size = parameter_count(model.parameters())
            tokens = settings.steps * settings.rows * settings.length
            learned = f"{tokens:,} tokens in {progress.seconds:.0f} s"
            print(f"{size:,} parameters, {settings.attention} attention, {learned}")
            command = f"python -m eval.systems.text all {run}"
            print(f"{run}: model/, metrics.jsonl, loss.png; next: {command}")


if __name__ == "__main__":
    run_command(main)
