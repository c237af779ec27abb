"""The other side: transformers and PEFT, as their documentation shows them; the works are those of
`ours.py`.

Of this project the process imports `work.py` alone, so that no setting of ours reaches it.
"""

import peft
import torch
from PIL import Image
from transformers import AutoProcessor, PaliGemmaForConditionalGeneration

from train.benchmark.work import ADAMW, ALPHA, ANSWER, RANK, TARGETS, Side, answer_requests


class Peer(Side):
    def open(self):
        model = PaliGemmaForConditionalGeneration.from_pretrained(
            self.folder, dtype=self.place["dtype"]
        )
        return model.to(self.place["device"]).eval()

    def prefill(self, batch: int):
        inputs = self.prompts(batch)

        @torch.inference_mode()
        def forward():
            return self.model(**inputs, logits_to_keep=1, use_cache=True).logits

        return forward

    def decode(self, batch: int):
        inputs = self.prompts(batch)
        length = inputs["input_ids"].shape[1]
        self.model.generation_config.eos_token_id = None

        def generate():
            out = self.model.generate(**inputs, max_new_tokens=self.tokens, do_sample=False)
            return out[:, length:]

        return generate

    def train(self, batch: int):
        inputs, labels = self.examples(batch)
        if self.optimizer is None:
            torch.manual_seed(0)  # draws the same A as ours
            lora = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=TARGETS)
            self.model = peft.get_peft_model(self.model, lora).train()
            trained = [p for p in self.model.parameters() if p.requires_grad]
            self.optimizer = torch.optim.AdamW(trained, **ADAMW)
        return lambda: self.update(lambda: self.model(**inputs, labels=labels).loss)

    def eval(self, batch: int):
        processor = AutoProcessor.from_pretrained(self.folder)
        questions = self.questions()

        def answer(part: list) -> list[str]:
            pictures = [Image.open(path) for path, _ in part]
            texts = [f"<image>{text}" for _, text in part]
            inputs = processor(images=pictures, text=texts, padding="longest", return_tensors="pt")
            length = inputs["input_ids"].shape[1]
            inputs = inputs.to(**self.place)
            out = self.model.generate(**inputs, max_new_tokens=ANSWER, do_sample=False)
            return processor.batch_decode(out[:, length:], skip_special_tokens=True)

        def answer_all() -> list[str]:
            answers = []
            for first in range(0, len(questions), batch):
                answers += answer(questions[first : first + batch])
            return answers

        return answer_all


if __name__ == "__main__":
    answer_requests(Peer)
