"""Ask a model many questions: in batches, with a log from which an interrupted run resumes.

In: a model, its processor and `Question`s. Out: one answer for each, in order. All evaluations ask here.

A picture is encoded once for all its questions, prompts of similar length share a batch, and a batch ends with its last
row. Greedy decoding in a batch gives the answers of one-by-one decoding, up to ties that rounding decides.
"""

import contextlib
import fcntl
import hashlib
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from typing import BinaryIO

import torch
from tqdm import tqdm

from eval.question import Answer, Question
from eval.text.reader import TextReader
from lora.adapter import LoRALinear
from model.common import UserError, file_errors, parse_json, shown
from model.generate import CompiledStep, NonFiniteError, finite_rows, generate, last_valid
from model.paligemma import PaliGemma
from model.processor import Batch, Processor, TokenRow
from weights.fingerprint import exact_fingerprint

Numbered = tuple[int, Question]  # a question and its place in the list: ids need not be unique
WINDOW = 8  # batches whose pictures' features are held at a time: 3B features take 2 MB per picture in fp32


def ask_all(
    model: PaliGemma,
    processor: Processor,
    questions: Sequence[Question],
    *,
    max_new_tokens: int = 32,
    batch_size: int = 64,
    progress: str | None = None,
    log: Path | None = None,
    left_out: dict | None = None,
    compiled: CompiledStep | None = None,
) -> list[Answer | None]:
    """The answers to `questions`, in their order.

    log: a JSON-lines file to which each answer is appended as it comes; a question that it already has, of the same
    model, tokenizer, picture and prompt, is not asked again. progress: the title of a progress bar. left_out: gets the
    reason, by id, why a question could not be asked (an unreadable picture, a prompt that is too long), whose answer is
    then None; without it that is a UserError. compiled: decodes the full batches.
    """
    answers: list[Answer | None] = [None] * len(questions)
    marks = [""] * len(questions)
    with contextlib.nullcontext() if log is None else open_log(log) as file:
        if log is not None:
            marks, logged = marks_of(model, processor, questions, max_new_tokens), read_log(file, log)
            answers = [logged.get(mark) for mark in marks]
        left = [(number, question) for number, question in enumerate(questions) if answers[number] is None]
        left.sort(key=lambda numbered: numbered[1].key)  # questions of one picture stay together
        done, size = len(questions) - len(left), WINDOW * batch_size
        with tqdm(total=len(questions), initial=done, desc=progress, disable=progress is None) as bar:
            for window in (left[start : start + size] for start in range(0, len(left), size)):
                options = max_new_tokens, batch_size, left_out, compiled
                for numbers, said in answer_window(model, processor, window, *options):
                    for number, answer in zip(numbers, said, strict=True):
                        answers[number] = answer
                        if file is not None:
                            record = {"id": questions[number].id, "answer": answer, "mark": marks[number]}
                            file.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
                    if file is not None:
                        file.flush()
                    bar.update(len(numbers))
    return answers


def layout(processor: Processor, question: Question, n_images: int, answer: str | None = None) -> TokenRow:
    """The row of a question, with the turns before it and perhaps an answer, as the model of `processor` reads it."""
    if isinstance(processor, TextReader):
        return processor.row(question)
    return processor.row_of(n_images, [*question.before, (question.prefix, answer)])


@torch.no_grad()
def log_likelihoods(
    model: PaliGemma,
    batch: Batch,
    choices: Sequence[Sequence[Sequence[int]]],
    image_features: torch.Tensor | None = None,
    image_index: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """log p, in nats, of each row's choices (token ids, with or without the end token) after its picture and prefix.

    A prompt is read once into the cache, whose rows are then repeated for the choices; choices of one token need no
    more than the prompt. Raises NonFiniteError.
    """
    owner = torch.tensor([row for row, of_row in enumerate(choices) for _ in of_row], device=batch.input_ids.device)
    longest = max(len(ids) for of_row in choices for ids in of_row)
    targets = torch.tensor([[*ids, *[-100] * (longest - len(ids))] for of_row in choices for ids in of_row]).to(owner)
    read = targets[:, :-1]  # the inputs that predict the rest of a choice
    cache = model.new_cache(batch.input_ids.shape[1] + read.shape[1])
    first = model(
        batch.input_ids,
        pixel_values=None,
        token_type_ids=batch.token_type_ids,
        attention_mask=batch.attention_mask,
        cache=cache,
        positions_to_keep=last_valid(batch.attention_mask),
        image_features=image_features,
        image_index=image_index,
    )
    rest = first[owner, :0]
    if read.shape[1]:
        for layer in cache:
            pick_rows(layer, owner)
        types = torch.cat((batch.token_type_ids[owner], torch.ones_like(read)), dim=1)
        valid = torch.cat((batch.attention_mask[owner], (read != -100).long()), dim=1)
        masks = {"token_type_ids": types, "attention_mask": valid}
        rest = model(read.clamp(min=0), pixel_values=None, **masks, cache=cache)
    known = torch.cat((first[owner], torch.where((read == -100)[..., None], 0, rest)), dim=1)
    finite = finite_rows(known)
    if not bool(finite.all()):
        raise NonFiniteError(owner[~finite].unique().tolist())
    each = known.log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    return list(each.masked_fill(targets == -100, 0).sum(1).split([len(of_row) for of_row in choices]))


def pick_rows(memory, rows: torch.Tensor) -> None:
    """Keep `rows`, in their order, of every tensor in a layer's cache, of whatever class it is."""
    for name, value in vars(memory).items():
        if isinstance(value, torch.Tensor):
            setattr(memory, name, value[rows])
        elif hasattr(value, "__dict__"):  # WINGS nests caches
            pick_rows(value, rows)


# Batches


@torch.no_grad()
def answer_window(
    model, processor, window: list[Numbered], max_new_tokens: int, batch_size: int, left_out: dict | None, compiled
) -> Iterator[tuple[list[int], list[Answer]]]:
    """Encode the pictures of a window, each once, then answer its questions in batches: their numbers, and answers."""
    features = encode(model, processor, [question for _, question in window], batch_size)
    ready: list[tuple[int, TokenRow, int, Question]] = []
    for number, question in window:
        try:
            if isinstance(pictures := features[question.key], UserError):
                raise pictures
            ready.append((len(question.choices), layout(processor, question, len(pictures)), number, question))
        except UserError as error:
            if left_out is None:
                raise UserError(f"question {question.id}: {error}") from None
            left_out[question.id] = str(error)
    ready.sort(key=lambda item: (item[0], len(item[1][0])))
    for choices, group in groupby(ready, key=lambda item: item[0]):
        ordered, size = list(group), max(1, batch_size // max(1, choices))
        for start in range(0, len(ordered), size):
            _, rows, numbers, asked = (list(column) for column in zip(*ordered[start : start + size], strict=True))
            batch, pictures = processor.pad(rows).to(next(model.parameters()).device), {}
            if not isinstance(processor, TextReader):
                seen = torch.cat([features[question.key] for question in asked])
                pictures = {"image_features": seen, "image_index": torch.arange(len(seen), device=seen.device)}
            step = compiled if len(asked) == batch_size else None  # another number of rows would be compiled anew
            try:
                if choices:
                    answers = choose(model, processor, asked, batch, pictures)
                else:
                    prompt = batch.input_ids, None, batch.token_type_ids, batch.attention_mask
                    new = generate(model, *prompt, max_new_tokens, **pictures, compiled=step)
                    answers = [processor.decode(row) for row in new]
            except NonFiniteError as error:
                raise NonFiniteError(error.rows, f"question {asked[error.rows[0]].id}") from None
            yield numbers, answers


def choose(model, processor, questions: list[Question], batch: Batch, pictures: dict) -> list[Answer]:
    """The likeliest choice of each question, or the log-probabilities of all; each has the same number of choices."""
    choices = []
    for q in questions:
        end = [] if q.scored else [processor.config.eos_token_id]
        choices.append([processor.continuation(q.prefix, choice) + end for choice in q.choices])
    likelihoods = log_likelihoods(model, batch, choices, **pictures)
    return [
        scores.tolist() if q.scored else q.choices[int(scores.argmax())]
        for q, scores in zip(questions, likelihoods, strict=True)
    ]


def encode(model, processor, questions: list[Question], batch_size: int) -> dict[str, torch.Tensor | UserError]:
    """The features (pictures, I, H) of each key, or why its pictures cannot be read. A language model has none."""
    first = {question.key: question for question in reversed(questions)}
    device, side = (
        next(model.parameters()).device,
        0 if isinstance(processor, TextReader) else processor.config.vision.image_size,
    )

    def prepare(key: str) -> torch.Tensor | UserError:
        try:
            opened = [processor.pixels(image) for image in first[key].images()]
            return torch.stack(opened) if opened else torch.empty(0, 3, side, side)
        except UserError as error:
            return error

    keys, features = list(first), {}
    with ThreadPoolExecutor() as pool:  # Pillow decodes and scales without Python's global lock
        for start in range(0, len(keys), batch_size):
            part = keys[start : start + batch_size]
            features |= zip(part, pool.map(prepare, part), strict=True)
            good = {key: features[key] for key in part if not isinstance(features[key], UserError)}
            if good and side:
                chunks = torch.cat(list(good.values())).split(batch_size)
                encoded = torch.cat([model.encode_images(chunk.to(device)) for chunk in chunks])
                features |= zip(good, encoded.split([len(pixels) for pixels in good.values()]), strict=True)
    return features


# The log of answers


def marks_of(model, processor: Processor, questions: Sequence[Question], max_new_tokens: int) -> list[str]:
    """A hash for each question of all that decides its answer: the model and its LoRA strength, the tokens, the files
    of its pictures, its choices."""
    strengths = [[path, layer.alpha] for path, layer in model.named_modules() if isinstance(layer, LoRALinear)]
    of_model = [exact_fingerprint(model), str(model.config), max_new_tokens, strengths]
    versions = {q.key: q.versions() for q in {q.key: q for q in questions}.values()}
    marks = []
    for q in questions:
        ids: list[int] = []
        with contextlib.suppress(UserError):  # a prompt that is refused is not answered, either
            ids = processor.encode(q.prefix)
        parts = [of_model, q.key, versions[q.key], q.prefix, ids, q.choices, q.before, q.scored]
        marks.append(hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16])
    return marks


@contextlib.contextmanager
def open_log(path: Path) -> Iterator[BinaryIO]:
    """A log of answers, to be read and appended to by one command at a time. Raises UserError."""
    with file_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a+b")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{shown(path)}: another command writes its answers here: give another --out") from None
        yield file


def read_log(file: BinaryIO, path: Path) -> dict[str, Answer]:
    """Answers by mark; an incomplete last line is cut off. Raises UserError for a file of another kind."""
    file.seek(0)
    content = file.read()
    whole = content.rfind(b"\n") + 1
    file.truncate(whole)  # the process ended while it wrote the last line
    answers = {}
    for number, line in enumerate(content[:whole].splitlines(), start=1):
        where = f"{shown(path)}:{number}"
        try:
            record = parse_json(line, where)
            answers[record["mark"]] = record["answer"]
        except (UserError, TypeError, KeyError):
            raise UserError(f"{where}: this is no log of answers: delete the file to ask anew") from None
    return answers
