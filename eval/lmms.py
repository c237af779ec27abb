"""A plugin for lmms-eval: its tasks ask the models of this project.

    pip install lmms-eval "filelock<4" && pip install -e .    0.7.3 fails with a newer filelock
    python -m lmms_eval --model dmt --model_args pretrained=embedded,adapter=RUN --tasks pope

In: requests of a task, each with a question and pictures. Out: greedy answers, from
`eval/answer.py`. lmms-eval finds `manifest` by the entry point in pyproject.toml; nothing else here
needs it. Further arguments: prompt, quantize, dtype, threads and max_length.

A task's question is put into the prompt of the model's training, `answer en {question}` for
PaliGemma; `prompt={question}` leaves it as it is. What a task adds for other models stays: in its
file `lmms_eval_specific_kwargs` may say otherwise for `dmt`.
"""

from argparse import Namespace
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from lmms_eval.api.model import lmms
from lmms_eval.models.registry_v2 import ModelManifest

from eval.answer import WINDOW, ask_all
from eval.data.record import check_prompt, fill_prompt
from eval.open import open_subject, stored_prompt, subject_of
from eval.question import Question, parts_of
from model.common import UserError

NAME = "dmt"
MOST_NEW = 32  # tokens of an answer, where a task does not say


def manifest() -> ModelManifest:
    """What lmms-eval knows the model by."""
    return ModelManifest(NAME, simple_class_path=f"{__name__}.{Model.__name__}")


class Model(lmms):
    """A model of this project, as lmms-eval calls it."""

    def __init__(
        self,
        pretrained: str | None = None,
        adapter: str | None = None,
        prompt: str | None = None,
        quantize: str | None = None,
        dtype: str | None = None,
        device: str | None = None,
        threads: int | None = None,
        max_length: int = 8192,
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
    ):
        """pretrained, adapter, …: as the flags of every command, --model for the first. prompt: a
        template with {question}. The last two come from lmms-eval. Raises UserError."""
        super().__init__()
        flags = Namespace(
            model=pretrained,
            adapter=adapter,
            quantize=quantize,
            dtype=dtype,
            device=device or "auto",
            threads=threads,
            max_length=max_length,
        )
        subject = subject_of(flags)
        self.template = check_prompt(prompt or stored_prompt(subject))
        self.model, self.processor = open_subject(flags, subject)
        self.device = self.model.device
        self.batch_size = int(batch_size)

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """The greedy answers, up to the first text of `until`. Raises UserError."""
        texts = []
        for options, same in groupby(requests, lambda request: request.args[1]):
            check_greedy(options)
            # pictures that are in memory together
            for part in parts_of(list(same), WINDOW * self.batch_size):
                answers = ask_all(
                    self.model,
                    self.processor,
                    list(map(self.question, part)),
                    max_new_tokens=options.get("max_new_tokens", MOST_NEW),
                    batch_size=self.batch_size,
                )
                for answer in answers:
                    texts.append(up_to(answer, options.get("until") or ()))
        return texts

    def question(self, request: Any) -> Question:
        """What a request asks about its pictures."""
        context, _, visuals_of, number, task, split = request.args
        visuals = visuals_of(self.task_dict[task][split][number]) or []
        name = f"{task}, {split}, {number}"
        return Question(name, name, list(visuals), fill_prompt(self.template, context))

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """Refused: lmms-eval 0.7.3 makes texts of the numbers. Raises UserError."""
        raise UserError(
            f"--model {NAME} does not score choices for lmms-eval: take python -m "
            "eval.systems.choices, or a task that generates"
        )

    def generate_until_multi_round(self, requests: Sequence[Any]) -> list[str]:
        """Refused. Raises UserError."""
        raise UserError(f"--model {NAME} answers one question at a time: leave this task out")


def check_greedy(options: dict) -> None:
    """Raise UserError for a task that samples, or searches with several beams."""
    beams = options.get("num_beams") or 1
    if options.get("do_sample", options.get("temperature")) or beams > 1:
        raise UserError(
            f"--model {NAME} answers greedily: add --gen_kwargs do_sample=False,num_beams=1"
        )


def up_to(text: str, ends: str | Sequence[str]) -> str:
    """A text up to the first of `ends`, without it."""
    if isinstance(ends, str):
        ends = [ends]
    for end in ends:
        text = text.split(end)[0]
    return text
