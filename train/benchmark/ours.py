"""Our side of the benchmark, as our commands run it. Its process never imports transformers; see
`work.py`."""

from dataclasses import replace

import torch

from eval.answer import ask_all
from eval.question import Question
from lora import adapter
from model.common import keep_memory
from model.compiled import CompiledStep
from model.device import choose_device
from model.generate import generate
from model.processor import Processor
from train.benchmark.work import ADAMW, ALPHA, ANSWER, RANK, TARGETS, Side, answer_requests
from train.data.batches import supervised
from train.optim import make_adamw, trainable
from weights.load import load_model


class Ours(Side):
    def open(self):
        choose_device(self.device)
        return load_model(self.folder, **self.place, quantize=self.quantize)

    def prefill(self, batch: int):
        """A picture and a prompt, to the logits (batch, 1, V) of the first new token, with a cache
        for the next."""
        inputs = self.prompts(batch) | {"positions_to_keep": 1}
        capacity = inputs["input_ids"].shape[1] + self.tokens

        @torch.inference_mode()
        def forward():
            return self.model(**inputs, cache=self.model.new_cache(capacity))

        return forward

    def decode(self, batch: int):
        """Picture, prompt and new tokens (batch, tokens), greedy; no token ends a row."""
        inputs = self.prompts(batch)
        self.model.config = replace(self.model.config, eos_token_id=())
        step = CompiledStep(self.model) if self.compiled else None
        return lambda: torch.stack(
            generate(self.model, **inputs, max_new_tokens=self.tokens, compiled=step)
        )

    def train(self, batch: int):
        inputs, labels = self.examples(batch)
        positions, targets = supervised(labels)
        if self.optimizer is None:
            torch.manual_seed(0)
            adapter.inject(self.model, TARGETS, RANK, ALPHA)
            group = {**ADAMW, "params": [*trainable(self.model).values()]}
            self.optimizer = make_adamw([group], ADAMW["betas"])
        called = self.model.train()
        if self.compiled:
            called = torch.compile(called)
        mean = 1 / targets.numel()

        def loss():
            return called(**inputs, positions_to_keep=positions, targets=targets) * mean

        return lambda: self.update(loss)

    def eval(self, batch: int):
        processor = Processor.from_source(self.folder)
        asks = []
        for n, (path, text) in enumerate(self.questions()):
            asks.append(Question(n, path.name, path, text))
        return lambda: ask_all(
            self.model,
            processor,
            asks,
            max_new_tokens=ANSWER,
            batch_size=batch,
        )


if __name__ == "__main__":
    keep_memory()  # as in every command of ours
    answer_requests(Ours)
