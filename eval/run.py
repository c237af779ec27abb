"""Ask a model many questions about pictures: in batches, with a log from which an interrupted run resumes.

In: a model, its processor and `Ask`s. Out: one answer text per question, in order. All evaluations ask here.

A picture is encoded once for all its questions, prompts of similar length share a batch, and a batch ends with its last
row. Greedy decoding in a batch gives the answers of one-by-one decoding, up to ties that rounding decides.
"""

import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import groupby
from pathlib import Path

import torch
from tqdm import tqdm

from eval.command import Ask
from eval.text.reader import TextReader
from lora.adapter import LoRALinear
from model.common import Expected, UserError, file_errors, parse_json, read_field, read_text, shown, write_text
from model.generate import CompiledStep, NonFiniteError, check_finite, finite_rows, generate, last_valid
from model.paligemma import PaliGemma
from model.processor import Batch, Processor, TokenRow
from weights.fingerprint import exact_fingerprint

Numbered = tuple[int, Ask]  # a question and its number: ids need not be unique
WINDOW = 8  # batches whose pictures' features are held at a time: 3B features take 2 MB per picture in fp32


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

    log: a JSON-lines file to which each answer is appended as it comes; a question that it already has, of the same
    model, tokenizer, picture and prompt, is not asked again. progress: the title of a progress bar. left_out: filled
    with the reason, by id, why a question could not be asked (an unreadable picture, a prompt that the processor
    refuses), whose answer is then None; without it that is a UserError. compiled: decodes the full batches.
    """
    if batch_size < 1 or max_new_tokens < 1:
        raise UserError(f"batch size {batch_size}, {max_new_tokens} new tokens: expected at least 1 of each")
    answers: list[str | None] = [None] * len(questions)
    marks, left = [""] * len(questions), range(len(questions))
    if log is not None:
        asked_of = [exact_fingerprint(model), str(model.config), max_new_tokens, *_beside_weights(model, processor)]
        versions = {q.key: q.versions() for q in {q.key: q for q in questions}.values()}
        marks = [
            _digest(
                asked_of, q.key, versions[q.key], q.prefix, _ids(processor, q), q.choices, *q.before, *q.scored * [1]
            )
            for q in questions
        ]
        logged = read_log(log)
        answers = [logged.get(mark) for mark in marks]
        left = [number for number, answer in enumerate(answers) if answer is None]
    done = len(questions) - len(left)
    with tqdm(total=len(questions), initial=done, desc=progress, disable=progress is None) as bar:
        for window in _windows([(number, questions[number]) for number in left], WINDOW * batch_size):
            options = max_new_tokens, batch_size, left_out, compiled
            for numbers, found in _answer_window(model, processor, window, *options):
                for number, answer in zip(numbers, found, strict=True):
                    answers[number] = answer
                if log is not None:
                    _append(log, [{"id": questions[n].id, "answer": answers[n], "mark": marks[n]} for n in numbers])
                bar.update(len(numbers))
    return answers


def layout(processor: Processor, question: Ask, n_images: int, answer: str | None = None) -> TokenRow:
    """A question, with the turns before it and perhaps an answer, as the model of `processor` reads them."""
    if isinstance(processor, TextReader):
        return processor.row(question)
    return processor.row_of(n_images, [*question.before, (question.prefix, answer)])


def ask_one_by_one(
    model: PaliGemma, processor: Processor, questions: Sequence[Ask], max_new_tokens: int = 32
) -> list[str]:
    """The reference for `ask_all`: each picture encoded anew, each prompt alone."""
    device, answers = next(model.parameters()).device, []
    for question in questions:
        if question.choices:  # scored, not decoded
            answers += ask_all(model, processor, [question], batch_size=1)
            continue
        images = question.images()
        batch = processor.pad([layout(processor, question, len(images))], images).to(device)
        prompt = batch.input_ids, batch.pixel_values, batch.token_type_ids, batch.attention_mask
        new = generate(model, *prompt, max_new_tokens)
        answers.append(processor.decode(new[0]))
    return answers


def compare_speed(
    model: PaliGemma, processor: Processor, questions: Sequence[Ask], max_new_tokens: int = 32, batch_size: int = 64
) -> dict:
    """Questions per second, one by one and batched, and the share of answers that agree."""
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
    image_features: torch.Tensor | None,
    image_index: torch.Tensor | None,
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


@torch.no_grad()
def token_probabilities(model: PaliGemma, processor: Processor, question: Ask, answer: str) -> list[tuple[str, float]]:
    """The tokens of an answer, as text, and the probability of each after those before it. Raises NonFiniteError."""
    images, device = question.images(), next(model.parameters()).device
    batch = processor.pad([layout(processor, question, len(images), answer)], images).to(device)
    places = (batch.labels[0] != -100).nonzero()[-len(processor.encode(answer)) - 1 : -1, 0]  # without the end token
    inputs = batch.input_ids, batch.pixel_values, batch.token_type_ids, batch.attention_mask
    logits = model(*inputs, positions_to_keep=places[None] - 1)
    check_finite(logits, f"question {question.id}")
    ids = batch.input_ids[0, places]
    probabilities = logits[0].float().softmax(-1).gather(-1, ids[:, None])[:, 0].tolist()
    return list(zip(map(processor.tokenizer.id_to_piece, ids.tolist()), probabilities, strict=True))


def pick_rows(memory, rows: torch.Tensor) -> None:
    """Keep `rows`, in their order, of every tensor in a layer's cache, of whatever class it is."""
    for name, value in vars(memory).items():
        if isinstance(value, torch.Tensor):
            setattr(memory, name, value[rows])
        elif hasattr(value, "__dict__"):  # WINGS nests caches
            pick_rows(value, rows)


@torch.no_grad()
def _answer_window(
    model, processor, window: list[Numbered], max_new_tokens: int, batch_size: int, left_out: dict | None, compiled
) -> Iterator[tuple[list[int], list[str]]]:
    """Encode the pictures of a window, each once, then answer its questions in batches: their numbers, and answers."""
    features, places, problems = _encode(model, processor, [question for _, question in window], batch_size)
    ready: list[tuple[int, TokenRow, Numbered]] = []
    for number, question in window:
        try:
            if question.key in problems:
                raise UserError(problems[question.key])
            row = layout(processor, question, len(places[question.key]))
            ready.append((len(question.choices), row, (number, question)))
        except UserError as error:
            if left_out is None:
                raise UserError(f"question {question.id}: {error}") from None
            left_out[question.id] = str(error)
    ready.sort(key=lambda item: (item[0], len(item[1][0])))
    for choices, group in groupby(ready, key=lambda item: item[0]):
        ordered, size = [(row, *numbered) for _, row, numbered in group], max(1, batch_size // max(1, choices))
        for start in range(0, len(ordered), size):
            rows, numbers, part = (list(column) for column in zip(*ordered[start : start + size], strict=True))
            batch = processor.pad(rows).to(next(model.parameters()).device)
            slots = [place for q in part for place in places[q.key]]
            index = None if features is None else torch.tensor(slots, dtype=torch.int64, device=features.device)
            pictures = {"image_features": features, "image_index": index}
            step = compiled if len(part) == batch_size else None  # another number of rows would be compiled anew
            try:
                if choices:
                    answers = _choose(model, processor, part, batch, pictures)
                else:
                    prompt = batch.input_ids, None, batch.token_type_ids, batch.attention_mask
                    new = generate(model, *prompt, max_new_tokens, **pictures, compiled=step)
                    answers = [processor.decode(row) for row in new]
            except NonFiniteError as error:
                raise NonFiniteError(error.rows, f"question {part[error.rows[0]].id}") from None
            yield numbers, answers


def _choose(model, processor, questions: list[Ask], batch: Batch, pictures: dict[str, torch.Tensor]) -> list[str]:
    """The likeliest choice of each question, or the log-probabilities of all; each has the same number of choices."""
    choices = []
    for q in questions:
        end = [] if q.scored else [processor.config.eos_token_id]
        choices.append([processor.continuation(q.prefix, choice) + end for choice in q.choices])
    likelihoods = log_likelihoods(model, batch, choices, *pictures.values())
    return [
        json.dumps(scores.tolist()) if q.scored else q.choices[int(scores.argmax())]
        for q, scores in zip(questions, likelihoods, strict=True)
    ]


def _encode(model: PaliGemma, processor: Processor, window: list[Ask], batch_size: int):
    """Features (pictures, I, H), each key's rows in them, and why a key has none. Each key's pictures are read once."""
    first = {question.key: question for question in reversed(window)}
    device = next(model.parameters()).device

    def prepare(question: Ask) -> list[torch.Tensor] | UserError:
        try:
            return [processor.pixels(image) for image in question.images()]
        except UserError as error:
            return error

    parts, places, problems, rows = [], {}, {}, 0
    keys = list(first)
    with ThreadPoolExecutor() as pool:  # Pillow decodes and scales without Python's global lock
        for start in range(0, len(keys), batch_size):
            part = keys[start : start + batch_size]
            ready = []
            for key, pixels in zip(part, pool.map(prepare, [first[key] for key in part]), strict=True):
                if isinstance(pixels, UserError):
                    problems[key] = str(pixels)
                    continue
                places[key] = list(range(rows, rows + len(pixels)))
                rows += len(pixels)
                ready += pixels
            if ready:
                parts += [model.encode_images(chunk.to(device)) for chunk in torch.stack(ready).split(batch_size)]
    if isinstance(processor, TextReader):
        return None, places, problems
    side = processor.config.vision.image_size
    features = torch.cat(parts) if parts else model.encode_images(torch.empty(0, 3, side, side, device=device))
    return features, places, problems


def _windows(questions: list[Numbered], size: int) -> Iterator[list[Numbered]]:
    """Groups of about `size` questions; those of one picture stay together."""
    window: list[Numbered] = []
    by_picture = sorted(questions, key=lambda numbered: numbered[1].key)
    for _, group in groupby(by_picture, key=lambda numbered: numbered[1].key):
        window += group
        if len(window) >= size:
            yield window
            window = []
    if window:
        yield window


# The log of answers


def _digest(*parts) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def _beside_weights(model: torch.nn.Module, processor: Processor) -> list:
    """What decides answers beside weights and configuration: the strength of LoRA, and where texts are cut."""
    found: list = [[path, layer.alpha] for path, layer in model.named_modules() if isinstance(layer, LoRALinear)]
    return found + [processor.max_length] * isinstance(processor, TextReader)


def _ids(processor: Processor, question: Ask) -> list[int]:
    """The tokens of a question: with another tokenizer a model reads something else."""
    with suppress(UserError):  # a prompt that is refused is not answered, either
        return processor.encode(question.prefix)
    return []


def read_log(path: Path) -> dict[str, str]:
    """Answers by mark from a log; an incomplete last line is removed. Raises UserError for a file of another kind."""
    if not path.exists():
        return {}
    text = read_text(path)
    if not text.endswith("\n"):  # the process ended while writing it
        text = text[: text.rfind("\n") + 1]
        write_text(path, text)
    answers = {}
    for number, line in enumerate(text.split("\n")[:-1], start=1):
        where = f"{shown(path)}:{number}"
        try:
            record = parse_json(line, where)
            record = record if isinstance(record, dict) else {}
            answers[read_field(record, "mark", Expected(str), where)] = read_field(
                record, "answer", Expected(str), where
            )
        except UserError as error:
            raise UserError(f"{error} (not a log of answers: delete the file to ask anew)") from None
    return answers


def _append(path: Path, records: list[dict]) -> None:
    with file_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
