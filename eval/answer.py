"""Ask a model many questions: in batches, with a log from which an interrupted run resumes.

In: a model, its processor and `Question`s. Out: one answer for each, in order. All evaluations ask
here.

A picture is encoded once for all its questions, prompts of similar length share a batch, and a
batch ends with its last row. Greedy decoding in a batch gives the answers of one-by-one decoding,
up to ties that rounding decides.
"""

import contextlib
import fcntl
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from eval.data.files import check
from eval.progress import Bar
from eval.question import Answer, Question, parts_of, read_certainty
from lora.adapter import lora_layers
from model.common import UserError, file_errors, quoted, short_hash, shown
from model.compiled import CompiledStep
from model.confidence import Certainty
from model.generate import NonFiniteError, finite_rows, generate_texts, last_valid
from model.paligemma import PaliGemma
from model.processor import Batch, Processor, TokenRow
from weights.fingerprint import exact_fingerprint

# batches whose pictures' features are held at a time: 3B features take 2 MB per picture in fp32
WINDOW = 8


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
    sure: dict | None = None,
) -> list[Answer | None]:
    """The answers to `questions`, in their order.

    - progress: the title of a progress bar.
    - log: a JSON-lines file that gets the answers. An answer in it, of the same model, tokenizer,
      picture and prompt, is not asked for again.
    - left_out: gets, by id, why a question cannot be asked (a picture, a long prompt); its answer
      is then None. Without `left_out` that is a UserError.
    - compiled: decodes the full batches.
    - sure: gets, by id, a `Certainty` of each answer that is decoded; a choice has none.
    """
    answers = [None] * len(questions)
    with contextlib.ExitStack() as stack:
        # 1. what the log has
        if log is not None:
            marks = marks_of(model, processor, questions, max_new_tokens)
            file, logged = stack.enter_context(open_log(log))
            for number, mark in enumerate(marks):
                if mark in logged:
                    answers[number] = from_log(logged[mark], questions[number], sure, log)
        # 2. the others, those of one picture together
        left = [number for number, answer in enumerate(answers) if answer is None]
        left.sort(key=lambda number: questions[number].key)
        total = len(questions)
        bar = Bar(
            total=total,
            initial=total - len(left),
            desc=progress,
            disable=progress is None,
        )
        stack.enter_context(bar)
        for numbers in parts_of(left, WINDOW * batch_size):
            window = {number: questions[number] for number in numbers}
            found = answers_to(
                model,
                processor,
                window,
                left_out,
                max_new_tokens,
                batch_size,
                compiled,
                is_sure=sure is not None,
            )
            for number, answer, certainty in found:
                answers[number] = answer
                bar.update()
                id_ = questions[number].id
                record = {"id": id_, "answer": answer}
                if certainty is not None:
                    sure[id_] = certainty
                    record |= certainty._asdict()
                if log is not None:
                    record["mark"] = marks[number]
                    file.write(json.dumps(record).encode() + b"\n")
                    file.flush()
    return answers


def marks_of(
    model, processor: Processor, questions: Sequence[Question], max_new_tokens: int
) -> list[str]:
    """A hash for each question of all that decides its answer: the model and its LoRA strength, the
    tokens, the files of its pictures (a replaced file is another picture), its choices."""
    strengths = [[path, layer.alpha] for path, layer in lora_layers(model).items()]
    texts = getattr(processor, "texts", processor)
    begin = getattr(texts, "begin", [])  # of a language model, as its tokenizer's file says
    of_model = [exact_fingerprint(model), str(model.config), max_new_tokens, strengths, begin]
    versions = defaultdict(list)
    marks = []
    for q in questions:
        if q.key not in versions:
            for path in (*q.files, *q.pictures):
                if isinstance(path, Path) and path.is_file():
                    file = path.stat()
                    version = str(path.absolute()), file.st_size, file.st_mtime_ns
                    versions[q.key].append(version)
        ids = []
        with contextlib.suppress(UserError):  # a prompt that is refused is not answered, either
            ids = processor.encode(q.prefix)
        parts = [
            of_model,
            q.key,
            versions[q.key],
            q.prefix,
            ids,
            q.choices,
            q.before,
            q.wants_log_probs,
        ]
        marks.append(short_hash(json.dumps(parts)))
    return marks


@contextlib.contextmanager
def open_log(path: Path, anew: bool = False) -> Iterator[tuple[BinaryIO, dict[str, dict]]]:
    """A log of answers, to be appended to by one command at a time, and its records by mark; an
    incomplete last line is cut off. anew: empty it. Raises UserError, also for a file of another
    kind."""
    with file_errors(path):
        file = path.open("a+b")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"{shown(path)}: another command writes its answers here: give another --out"
            ) from None
        file.seek(0)
        content = file.read()
        records = {}
        whole = content.rfind(b"\n") + 1  # the process ended while it wrote the last line
        for number, line in enumerate((content[:whole] or content).splitlines(), 1):
            try:
                record = json.loads(line)
                mark, answer = record["mark"], record["answer"]
                if answer is not None:
                    records[mark] = record
            except (ValueError, TypeError, KeyError, RecursionError):
                raise UserError(
                    f"{shown(path)}:{number}: this is no log of answers: delete the file to ask anew"
                ) from None
        if anew:
            records = {}
            whole = 0
        file.truncate(whole)
        yield file, records


def from_log(record: Mapping, question: Question, sure: dict | None, log: Path) -> Answer:
    """The answer of a log's record; `sure` gets how sure the model was of it. Raises UserError,
    also for the log of an earlier version, which does not say how sure."""
    answer = record["answer"]
    name = f"the answer to {shown(question.id)}"
    try:
        check(question.takes(answer), f"{name} is {quoted(answer)}")
        if sure is not None and not question.choices:
            sure[question.id] = read_certainty(record)
            is_known = sure[question.id] is not None
            check(is_known, f"{name} has no confidence, as those of an earlier version")
    except (TypeError, ValueError) as error:
        raise UserError(f"{shown(log)}: {error}: delete the file to ask anew") from None
    return answer


@torch.no_grad()
def answers_to(
    model, processor, window, left_out, max_new_tokens, batch_size, compiled, is_sure
) -> Iterator[tuple[int, Answer, Certainty | None]]:
    """Answer the questions of a window; yields the number, the answer and its certainty.

    window: {number: question}. left_out, compiled: of `ask_all`. A picture is encoded once. The
    certainty is None for a choice, and without `is_sure`.
    """
    # 1. pictures and rows
    features = encode_pictures(model, processor, list(window.values()), batch_size)
    rows = defaultdict(dict)  # {how many choices: {number of the question: its row}}
    for number, question in window.items():
        of_key = features[question.key]
        try:
            if isinstance(of_key, UserError):
                raise of_key
            n_images = 0 if of_key is None else len(of_key)
            rows[len(question.choices)][number] = question_row(processor, question, n_images)
        except UserError as error:
            if left_out is None:
                raise UserError(f"question {question.id}: {error}") from None
            left_out.setdefault(question.id, str(error))
    # 2. batches of rows with as many choices, and of similar length
    for n_choices, row_of in sorted(rows.items()):
        by_length = sorted(row_of, key=lambda number: len(row_of[number][0]))
        for numbers in parts_of(by_length, max(1, batch_size // max(1, n_choices))):
            asked = [window[number] for number in numbers]
            batch = processor.pad([row_of[number] for number in numbers]).to(model.device)
            seen = [features[q.key] for q in asked if features[q.key] is not None]
            pictures = {
                "image_features": torch.cat(seen) if seen else None,
                "image_index": batch.image_index,
            }
            # another number of rows would compile anew
            step = compiled if len(asked) == batch_size else None
            certainties = [] if is_sure and not n_choices else None
            try:
                if n_choices:
                    answers = likeliest(model, processor, asked, batch, pictures)
                else:
                    answers = generate_texts(
                        model,
                        processor.decode,
                        batch.input_ids,
                        None,
                        batch.token_type_ids,
                        batch.attention_mask,
                        max_new_tokens,
                        compiled=step,
                        sure=certainties,
                        **pictures,
                    )
            except NonFiniteError as error:
                raise NonFiniteError(error.rows, f"question {asked[error.rows[0]].id}") from None
            yield from zip(numbers, answers, certainties or [None] * len(asked), strict=True)


def question_row(processor: Processor, question: Question, n_images: int) -> TokenRow:
    """The row of a question, with the turns before it. Raises UserError, also where its longest
    choice is too long."""
    row = processor.row_of(n_images, [*question.before, (question.prefix, None)])
    choices = [processor.continuation(question.prefix, choice) for choice in question.choices]
    length = len(row[0]) + max(map(len, choices), default=1) - 1
    if length > processor.max_length:
        raise UserError(
            f"{length} tokens with the longest choice, more than {processor.max_length}: lower --shots"
        )
    return row


def encode_pictures(
    model,
    processor,
    questions: list[Question],
    batch_size: int,
) -> dict[str, Any]:
    """The features (pictures, I, H) of each key; None without pictures, or why these cannot be
    read, a UserError."""
    # the first question of each key
    first = {question.key: question for question in reversed(questions)}
    device = model.device
    features = {}

    def prepare(key: str) -> Tensor | UserError | None:
        try:
            pixels = [processor.pixels(image) for image in first[key].images()]
            return torch.stack(pixels) if pixels else None
        except UserError as error:
            return error

    with ThreadPoolExecutor() as pool:  # Pillow decodes and scales without Python's global lock
        for part in parts_of(list(first), batch_size):
            prepared = dict(zip(part, pool.map(prepare, part), strict=True))
            features |= prepared  # None and errors stay there, pixels do not
            read = [key for key in part if isinstance(prepared[key], Tensor)]
            if read:
                pixels = [prepared[key] for key in read]
                chunks = torch.cat(pixels).split(batch_size)
                encoded = torch.cat([model.encode_images(chunk.to(device)) for chunk in chunks])
                features |= zip(read, encoded.split(list(map(len, pixels))), strict=True)
    return features


def likeliest(
    model, processor, questions: Sequence[Question], batch: Batch, pictures: dict
) -> list[Answer]:
    """The likeliest choice of each question, or the log-probabilities of all; each has the same
    number of choices."""
    choices = []
    for q in questions:
        end = [] if q.wants_log_probs else [processor.config.eos_token_id]
        choices.append([processor.continuation(q.prefix, choice) + end for choice in q.choices])
    scores = log_likelihoods(model, batch, choices, **pictures)
    answers = []
    for q, of_choices in zip(questions, scores, strict=True):
        if q.wants_log_probs:
            answers.append(of_choices.tolist())
        else:
            answers.append(q.choices[int(of_choices.argmax())])
    return answers


@torch.no_grad()
def log_likelihoods(
    model, batch: Batch, choices, image_features=None, image_index=None
) -> list[Tensor]:
    """The log-probability, in nats, of each choice after its row's picture and prompt: a tensor
    (choices,) of each row. choices: of each row, lists of token ids, with or without the end token. A
    prompt is read once into the cache, whose rows are then repeated for the choices; choices of one
    token need no more than the prompt. Raises NonFiniteError."""
    # 1. a row for each choice, and the row of its prompt
    device = batch.input_ids.device
    counts = [len(of_row) for of_row in choices]
    row_of_choice = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts)).to(device)
    each = [torch.tensor(ids) for of_row in choices for ids in of_row]
    targets = pad_sequence(each, batch_first=True, padding_value=-100).to(device)
    is_target = targets != -100

    # 2. the prompts, which predict the first tokens
    inputs = targets[:, :-1]  # these predict the rest of a choice
    cache = model.new_cache(batch.input_ids.shape[1] + inputs.shape[1])
    logits = model(
        batch.input_ids,
        pixel_values=None,
        token_type_ids=batch.token_type_ids,
        attention_mask=batch.attention_mask,
        cache=cache,
        image_features=image_features,
        image_index=image_index,
        positions_to_keep=last_valid(batch.attention_mask),
    )[row_of_choice]

    # 3. the choices: each token predicts the next one
    if inputs.shape[1]:
        for layer in cache:
            pick_rows(layer, row_of_choice)
        is_input = is_target[:, :-1]
        types = torch.cat((batch.token_type_ids[row_of_choice], torch.ones_like(inputs)), dim=1)
        valid = torch.cat((batch.attention_mask[row_of_choice], is_input.long()), dim=1)
        rest = model(
            inputs.clamp(min=0),
            pixel_values=None,
            token_type_ids=types,
            attention_mask=valid,
            cache=cache,
        )
        rest = torch.where(is_input[..., None], rest, 0)
        logits = torch.cat((logits, rest), dim=1)
    finite = finite_rows(logits)
    if not finite.all():
        raise NonFiniteError(row_of_choice[~finite].unique().tolist())
    chosen = targets.clamp(min=0)[..., None]
    scores = logits.log_softmax(-1).gather(-1, chosen)[..., 0]
    sums = scores.masked_fill(~is_target, 0).sum(1)
    return list(sums.split(counts))


def pick_rows(memory, rows: Tensor) -> None:
    """Keep `rows`, in their order, of every tensor in a layer's cache, of whatever class it is."""
    for name, value in vars(memory).items():
        # a cache may be empty, or hold others
        if isinstance(value, Tensor) and len(value):
            setattr(memory, name, value[rows])
        elif hasattr(value, "__dict__"):
            pick_rows(value, rows)
