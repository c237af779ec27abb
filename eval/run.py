"""Open a model as a command's flags say, and ask it many questions, fast and resumably.

In: `--model` and `--adapter`, and questions, each about a picture. Out: one answer text a question, in order.
Every evaluation gets its model and its answers here: one prompt path for all models.
Next: `eval/vqa.py`, `eval/needle.py` and `eval/pope.py` score them.

A picture is encoded once for all its questions; prompts of similar length share a batch; a batch ends with its last
row. Greedy decoding in a batch gives the answers of one-by-one decoding, up to ties that rounding decides.
"""

import argparse
import hashlib
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path

import torch
from PIL import Image
from tqdm import tqdm

from lora import adapter
from model.common import UserError, write_text
from model.generate import CompiledStep, generate, last_valid
from model.images import load_image, to_pixels
from model.paligemma import PaliGemma
from model.processor import Batch, Processor, TokenRow
from model.source import EMBEDDED
from weights.fingerprint import exact_fingerprint
from weights.load import load_model

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
WINDOW = 8  # batches whose pictures' features are held at a time: 3B features take 2 MB a picture in fp32

# ---------------------------------------------------------------------------------------------------------------------
# What the flags name
# ---------------------------------------------------------------------------------------------------------------------


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """--model, --adapter, --device and --dtype."""
    parser.add_argument(
        "--model",
        metavar="SRC",
        help="a folder, a hub id, a preset, or `embedded` (default: the base of the adapter, else `embedded`)",
    )
    parser.add_argument(
        "--adapter",
        metavar="RUN",
        help="a run of train.finetune, or any folder with a PEFT adapter; `none` for the base alone "
        "(default: without --model, the last run in runs/ on the embedded base)",
    )
    parser.add_argument("--device", default="auto", help="cpu, cuda, … (default: cuda if there is one)")
    parser.add_argument("--dtype", choices=list(DTYPES), help="of the weights (default: bf16 on CUDA, else fp32)")


def add_answer_flags(
    parser: argparse.ArgumentParser, limit: str, limit_default: int | None = None, max_new_tokens: int = 32
) -> None:
    """The model's flags, and how many questions are asked, how, and where the answers go. `limit` explains --limit."""
    add_model_flags(parser)
    parser.add_argument("--limit", type=positive, default=limit_default, metavar="N", help=limit)
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="folder of answers and figures (default: runs/eval/MODEL/COMMAND)"
    )
    parser.add_argument(
        "--resume",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="keep the answers of an earlier call in answers.jsonl of --out, as far as model, picture "
        "and prompt are the same (default: --resume)",
    )
    parser.add_argument(
        "--batch-size", type=positive, default=64, metavar="N", help="prompts at a time (default: %(default)s)"
    )
    parser.add_argument(
        "--max-new-tokens",
        type=positive,
        default=max_new_tokens,
        metavar="N",
        help="tokens an answer may have (default: %(default)s)",
    )
    parser.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="decode full batches with torch.compile, on CUDA as a CUDA graph: first it takes up to a "
        "minute, then less (default: --no-compile)",
    )
    parser.add_argument(
        "--json", action=argparse.BooleanOptionalAction, default=False, help="print JSON only (default: a table)"
    )


def positive(text: str) -> int:
    """A flag's value as a number from 1 on."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}, expected a whole number from 1 on")
    return int(text)


def model_of(args: argparse.Namespace) -> tuple[str, Path | None, str]:
    """(source, run or None, title) that the flags name. Raises UserError for an adapter that is none."""
    run = args.adapter
    if run is None and args.model is None:
        run = last_run()
    run = None if run in (None, "none") else Path(run)
    if run is None:
        source = args.model or EMBEDDED
        return source, None, Path(source).name
    if (run / "model").is_dir():  # `--full` wrote a whole model
        return str(run / "model"), None, run.name
    return args.model or adapter.base_of(run) or EMBEDDED, run, run.name


def open_model(args: argparse.Namespace) -> tuple[PaliGemma, Processor, str]:
    """The model that the flags name, its processor, and a title for tables and figures. Raises UserError."""
    source, run, title = model_of(args)
    device = ("cuda" if torch.cuda.is_available() else "cpu") if args.device == "auto" else args.device
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--device {device}: {str(error).splitlines()[0]}: take cpu, or a GPU that is there") from None
    dtype = DTYPES[args.dtype or ("bf16" if device.startswith("cuda") else "fp32")]
    model = load_model(source, dtype=dtype, device=device)
    if run is not None:
        adapter.load(model, run)
    return model.eval(), Processor.from_source(source), title


def last_run(folder: Path = Path("runs")) -> str | None:
    """The newest finished run on the embedded base, if there is one."""
    finished = []
    for summary in folder.glob("*/summary.json"):
        config = summary.with_name("config.json")
        if config.exists() and json.loads(config.read_text()).get("base") == EMBEDDED:
            finished.append((summary.stat().st_mtime, str(summary.parent)))
    return max(finished)[1] if finished else None


@dataclass(frozen=True)
class Session:
    """What a command works with: a model, its title, the folder of its files, and the options of `ask_all`."""

    model: PaliGemma
    processor: Processor
    title: str
    out: Path
    options: dict

    @property
    def left_out(self) -> dict[str, str]:
        return self.options["left_out"]

    def report_left_out(self) -> None:
        """Name on stderr what could not be asked, and write all of it to left_out.json."""
        path = self.out / "left_out.json"
        path.unlink(missing_ok=True)
        if not self.left_out:
            return
        write_text(path, json.dumps(self.left_out, indent=1, ensure_ascii=False) + "\n")
        print(
            f"left out {len(self.left_out)} questions (all: {path}); repair their files, and the same command asks "
            "them alone",
            file=sys.stderr,
        )
        for reason, count in Counter(self.left_out.values()).most_common(5):
            print(f"  {reason} ({count} questions)", file=sys.stderr)


def open_session(args: argparse.Namespace, command: str) -> Session:
    """The session that the flags of `add_answer_flags` describe. Raises UserError."""
    model, processor, title = open_model(args)
    out = args.out or Path("runs", "eval", title, command)
    log = out / "answers.jsonl"
    if not args.resume:
        log.unlink(missing_ok=True)
    options = {
        "max_new_tokens": args.max_new_tokens,
        "batch_size": args.batch_size,
        "log": log,
        "progress": f"{command}, {title}",
        "left_out": {},
        "compiled": CompiledStep(model) if args.compile else None,
    }
    return Session(model, processor, title, out, options)


# ---------------------------------------------------------------------------------------------------------------------
# Questions and answers
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ask:
    """One question. `picture` is a path, an image, or a function that gives one or a list; questions with the same
    `key` share it. With `choices` the answer is the likeliest of them, else what greedy decoding says."""

    id: str
    key: str
    picture: Path | Image.Image | Callable[[], Image.Image | list[Image.Image]]
    prefix: str
    choices: tuple[str, ...] = ()


def ask_all(
    model: PaliGemma,
    processor: Processor,
    questions: Sequence[Ask],
    *,
    max_new_tokens: int = 32,
    batch_size: int = 64,
    progress: str | None = None,
    log: Path | None = None,
    left_out: dict[str, str] | None = None,
    compiled: CompiledStep | None = None,
) -> list[str | None]:
    """The answers to `questions`, in their order.

    log: a JSON-lines file that each answer is appended to as it comes; what it holds already of the same model,
    picture and prompt is not asked again. progress: the title of a progress bar. left_out: takes up, by id, why a
    question could not be asked (its picture cannot be read, its prompt cannot be laid out); its answer is None.
    Without it, that is a UserError. compiled: the model's step, which full batches are decoded with.
    """
    if batch_size < 1 or max_new_tokens < 1:
        raise UserError(f"batch size {batch_size}, {max_new_tokens} new tokens: expected at least 1 of each")
    marks: dict[str, str] = {}
    done: dict[str, str | None] = {}
    if log is not None:
        weights = exact_fingerprint(model)
        marks = {q.id: _digest(weights, max_new_tokens, q.key, q.prefix, q.choices) for q in questions}
        logged = read_log(log)
        done = {id_: logged[mark] for id_, mark in marks.items() if mark in logged}
    left = [question for question in questions if question.id not in done]
    with tqdm(total=len(questions), initial=len(questions) - len(left), desc=progress, disable=progress is None) as bar:
        for window in _windows(left, WINDOW * batch_size):
            for batch, answers in _answer_window(
                model, processor, window, max_new_tokens, batch_size, left_out, compiled
            ):
                done |= {question.id: answer for question, answer in zip(batch, answers, strict=True)}
                if log is not None:
                    _append(log, [{"id": q.id, "answer": done[q.id], "mark": marks[q.id]} for q in batch])
                bar.update(len(batch))
    return [done.get(question.id) for question in questions]


def make_asks(questions: Iterable[tuple[int | str, str, str]], pictures: Mapping, template: str) -> list[Ask]:
    """What to ask about (id, name of the picture, question)s: `pictures` has the pictures by name, `template` is the
    prompt with {question} in it. Raises UserError for a template without."""
    if "{question}" not in template:
        raise UserError(f"prompt template {template!r}: must contain {{question}}, such as 'answer en {{question}}'")
    return [Ask(str(id_), name, pictures[name], template.replace("{question}", text)) for id_, name, text in questions]


def ask_one_by_one(
    model: PaliGemma, processor: Processor, questions: Sequence[Ask], max_new_tokens: int = 32
) -> list[str]:
    """The plain loop that `ask_all` must agree with: each picture encoded anew, each prompt alone."""
    device, answers = next(model.parameters()).device, []
    for question in questions:
        picture = question.picture() if callable(question.picture) else question.picture
        batch = processor([picture], [question.prefix]).to(device)
        new = generate(
            model, batch.input_ids, batch.pixel_values, batch.token_type_ids, batch.attention_mask, max_new_tokens
        )
        answers.append(processor.decode(new[0]))
    return answers


def compare_speed(
    model: PaliGemma, processor: Processor, questions: Sequence[Ask], max_new_tokens: int = 32, batch_size: int = 64
) -> dict:
    """Questions a second, one by one and batched, and the share of answers that agree."""
    seconds, answers = [], []
    for ask in (ask_one_by_one, partial(ask_all, batch_size=batch_size)):
        ask(model, processor, questions[:1], max_new_tokens=max_new_tokens)  # warm
        started = time.perf_counter()
        answers.append(ask(model, processor, questions, max_new_tokens=max_new_tokens))
        seconds.append(time.perf_counter() - started)
    single, batched = (len(questions) / spent for spent in seconds)
    agree = sum(a == b for a, b in zip(*answers, strict=True)) / len(questions)
    return {"questions": len(questions), "one_by_one": single, "batched": batched, "agree": agree}


@torch.no_grad()
def log_likelihoods(
    model: PaliGemma,
    batch: Batch,
    choices: Sequence[Sequence[Sequence[int]]],
    image_features: torch.Tensor,
    image_index: torch.Tensor,
) -> list[torch.Tensor]:
    """log p, in nats, of each row's choices (token ids, the end token among them) after its picture and prefix.

    A prompt is read once, into a cache that its choices share.
    """
    owner = torch.tensor([row for row, of_row in enumerate(choices) for _ in of_row], device=batch.input_ids.device)
    longest = max(len(ids) for of_row in choices for ids in of_row)
    targets = torch.tensor([[*ids, *[-100] * (longest - len(ids))] for of_row in choices for ids in of_row]).to(owner)
    read = targets[:, :-1]  # what a choice is read from, after the prompt
    cache = model.new_cache(batch.input_ids.shape[1] + read.shape[1])
    first = model(
        batch.input_ids,
        None,
        batch.token_type_ids,
        batch.attention_mask,
        cache=cache,
        positions_to_keep=last_valid(batch.attention_mask),
        image_features=image_features,
        image_index=image_index,
    )
    for layer in cache:
        pick_rows(layer, owner)
    rest = model(
        read.clamp(min=0),
        None,
        torch.cat((batch.token_type_ids[owner], torch.ones_like(read)), dim=1),
        torch.cat((batch.attention_mask[owner], (read != -100).long()), dim=1),
        cache=cache,
    )
    each = torch.cat((first[owner], rest), dim=1).log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    return list(each.masked_fill(targets == -100, 0).sum(1).split([len(of_row) for of_row in choices]))


def pick_rows(memory, rows: torch.Tensor) -> None:
    """Keep `rows`, in their order, of every tensor that a layer's cache holds, of whatever kind the cache is."""
    for name, value in vars(memory).items():
        if isinstance(value, torch.Tensor):
            setattr(memory, name, value[rows])
        elif hasattr(value, "__dict__"):  # WINGS: caches within
            pick_rows(value, rows)


@torch.no_grad()
def _answer_window(
    model: PaliGemma,
    processor: Processor,
    window: list[Ask],
    max_new_tokens: int,
    batch_size: int,
    left_out: dict[str, str] | None,
    compiled: CompiledStep | None,
) -> Iterator[tuple[list[Ask], list[str]]]:
    """Batches of questions with their answers; their pictures are encoded first, each once."""
    features, places, problems = _encode(model, processor, window, batch_size)
    ready: list[tuple[int, TokenRow, Ask]] = []
    for question in window:
        try:
            if question.key in problems:
                raise UserError(problems[question.key])
            row = processor.layout(len(places[question.key]), question.prefix)
            ready.append((len(question.choices), row, question))
        except UserError as error:
            if left_out is None:
                raise UserError(f"question {question.id}: {error}") from None
            left_out[question.id] = str(error)
    ready.sort(key=lambda item: (item[0], len(item[1][0])))
    for choices, group in groupby(ready, key=lambda item: item[0]):
        ordered, size = [(row, question) for _, row, question in group], max(1, batch_size // max(1, choices))
        for start in range(0, len(ordered), size):
            rows, part = (list(column) for column in zip(*ordered[start : start + size], strict=True))
            step = compiled if len(part) == batch_size else None  # another number of rows would be compiled anew
            yield part, _answer(model, processor, part, rows, features, places, max_new_tokens, step)


def _answer(
    model, processor, questions: list[Ask], rows: list[TokenRow], features, places, max_new_tokens: int, compiled
) -> list[str]:
    """Answers to one batch of questions with equally many choices."""
    index = torch.tensor([place for question in questions for place in places[question.key]], device=features.device)
    batch = processor.pad(rows).to(features.device)
    if not questions[0].choices:
        new = generate(
            model,
            batch.input_ids,
            None,
            batch.token_type_ids,
            batch.attention_mask,
            max_new_tokens,
            image_features=features,
            image_index=index,
            compiled=compiled,
        )
        return [processor.decode(row) for row in new]
    eos = processor.config.eos_token_id
    choices = [[[*processor.encode(choice), eos] for choice in question.choices] for question in questions]
    likelihoods = log_likelihoods(model, batch, choices, features, index)
    return [q.choices[int(scores.argmax())] for q, scores in zip(questions, likelihoods, strict=True)]


def _encode(model: PaliGemma, processor: Processor, window: list[Ask], batch_size: int):
    """Features (pictures, I, H), the rows of each key in them, and why a key has none. A key is opened once."""
    first = {question.key: question.picture for question in reversed(window)}
    size = processor.config.vision.image_size
    device = next(model.parameters()).device

    def prepare(picture) -> torch.Tensor | UserError:
        try:
            given = picture() if callable(picture) else picture
            images = given if isinstance(given, list) else [given]
            return torch.stack(
                [to_pixels(load_image(image, size if processor.draft else None), size) for image in images]
            )
        except UserError as error:
            return error

    parts, places, problems, rows = [], {}, {}, 0
    keys = list(first)
    with ThreadPoolExecutor() as pool:  # Pillow decodes and scales outside Python's lock
        for start in range(0, len(keys), batch_size):
            part = keys[start : start + batch_size]
            ready = []
            for key, pixels in zip(part, pool.map(prepare, [first[key] for key in part]), strict=True):
                if isinstance(pixels, UserError):
                    problems[key] = str(pixels)
                    continue
                places[key] = list(range(rows, rows + len(pixels)))
                rows += len(pixels)
                ready.append(pixels)
            if ready:
                parts += [model.encode_images(chunk.to(device)) for chunk in torch.cat(ready).split(batch_size)]
    return torch.cat(parts) if parts else None, places, problems


def _windows(questions: list[Ask], size: int) -> Iterator[list[Ask]]:
    """Runs of about `size` questions that never part those of one picture."""
    window: list[Ask] = []
    by_picture = sorted(questions, key=lambda question: question.key)
    for _, group in groupby(by_picture, key=lambda question: question.key):
        window += group
        if len(window) >= size:
            yield window
            window = []
    if window:
        yield window


# ---------------------------------------------------------------------------------------------------------------------
# The log, and what was left out
# ---------------------------------------------------------------------------------------------------------------------


def _digest(*parts) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def read_log(path: Path) -> dict[str, str]:
    """Answers by mark from a log; a last line that an interruption cut short is dropped. Raises UserError."""
    if not path.exists():
        return {}
    lines = path.read_text(encoding="utf-8").split("\n")
    if lines[-1]:  # no newline at its end: it was being written
        write_text(path, "".join(line + "\n" for line in lines[:-1]))
    answers = {}
    for number, line in enumerate(lines[:-1], start=1):
        try:
            record = json.loads(line)
            answers[record["mark"]] = record["answer"]
        except (json.JSONDecodeError, KeyError, TypeError):
            raise UserError(f"{path}:{number}: not a line of a log of answers: delete the file to ask anew") from None
    return answers


def _append(path: Path, records: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
