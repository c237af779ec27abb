"""The other side: transformers and PEFT, as their documentation shows them; the works are those of
`ours.py`.

Of this project the process imports `work.py` alone, so that no setting of ours reaches it.
"""

import peft
import torch
from PIL import Image
from transformers import AutoProcessor, PaliGemmaForConditionalGeneration

from train.benchmark.work import ADAMW, ALPHA, ANSWER, RANK, TARGETS, Side, serve


class Peer(Side):
    def open(self):
        model = PaliGemmaForConditionalGeneration.from_pretrained(
            self.folder, dtype=self.place["dtype"]
        )
        return model.to(self.place["device"]).eval()

    def prefill(self, batch: int):
        inputs = self.prompts(batch)
        return torch.inference_mode()(
            lambda: self.model(**inputs, logits_to_keep=1, use_cache=True).logits
        )

    def decode(self, batch: int):
        inputs = self.prompts(batch)
        length = inputs["input_ids"].shape[1]
        self.model.generation_config.eos_token_id = None
        return lambda: self.model.generate(**inputs, max_new_tokens=self.tokens, do_sample=False)[
            :, length:
        ]

    def train(self, batch: int):
        inputs, labels = self.examples(batch)
        if self.optimizer is None:
            torch.manual_seed(0)  # draws the same A as ours
            lora = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=TARGETS)
            self.model = peft.get_peft_model(self.model, lora).train()
            self.optimizer = torch.optim.AdamW(
                (p for p in self.model.parameters() if p.requires_grad), **ADAMW
            )
        return lambda: self.update(lambda: self.model(**inputs, labels=labels).loss)

    def eval(self, batch: int):
        processor, questions = AutoProcessor.from_pretrained(self.folder), self.questions()

        def answer(part: list) -> list[str]:
            pictures, texts = (
                [Image.open(path) for path, _ in part],
                ["<image>" + text for _, text in part],
            )
            inputs = processor(images=pictures, text=texts, padding="longest", return_tensors="pt")
            out = self.model.generate(
                **inputs.to(**self.place), max_new_tokens=ANSWER, do_sample=False
            )
            return processor.batch_decode(
                out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True
            )

        return lambda: sum(
            (answer(questions[n : n + batch]) for n in range(0, len(questions), batch)), []
        )


if __name__ == "__main__":
    serve(Peer)
