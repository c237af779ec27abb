"""The embedded scenes as the Q-Mamba study has them: pictures that the frozen tower encodes once, and four tasks.

In: scenes of `eval/scenes.py`. Out: samples of training in a fixed order, and one measure for each task.
"""

from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path

import torch

from eval import scenes
from eval.records import sample_record
from eval.run import Ask, ask_all
from model.paligemma import PaliGemma
from model.processor import Processor
from model.siglip import Siglip
from model.source import EMBEDDED
from train.settings import Settings
from train.studies.attention_data import Measure
from train.studies.encoded import EncodedOrder, EncodedRecords, encode
from train.systems.qmamba import Parts
from weights.load import load_model

TASKS = ("vqa", "locate", "count", "exist")  # in equal parts


@cache
def vision_tower() -> Siglip:
    """The frozen tower of all embedded rows; as in Q-Mamba its features are those before the last layer."""
    tower = load_model(EMBEDDED).vision_tower.requires_grad_(False)
    tower.config = replace(tower.config, feature_layer=Parts.feature_layer)
    return tower


@lru_cache(maxsize=2)  # both stages of a seed
def encoded_samples(count: int, seed: int, stage: int = 1) -> EncodedRecords:
    """`count` samples of the train split, the tasks in turn. No stage gets a sample of the one before."""
    first = stage * 6_000_000
    numbers = ((TASKS[number % len(TASKS)], first + number // len(TASKS)) for number in range(count))
    records = [sample_record(scenes.sample(task, "train", number, seed), "train") for task, number in numbers]
    return encode(records, vision_tower())


def shuffled(samples: EncodedRecords, processor: Processor, batch_size: int, seed: int) -> EncodedOrder:
    """Each sample once, in an order that depends on the seed alone, in whole micro-batches."""
    order = torch.randperm(len(samples.records), generator=torch.Generator().manual_seed(seed)).split(batch_size)
    return EncodedOrder(len(samples.records) // batch_size, lambda step: samples.batch(processor, order[step].tolist()))


@cache
def embedded_measures(limit: int, split: str = "test") -> list[Measure]:
    """Each task of the embedded scenes on a split: whether each answer is exactly right."""

    def measure(task: str) -> Measure:
        asked = [scenes.sample(task, split, number) for number in range(limit)]
        asks = [Ask(str(number), str(s.image_id), s.scene.render, s.prefix) for number, s in enumerate(asked)]

        def grade(model: PaliGemma, processor: Processor, settings: Settings, folder: Path) -> list[float]:
            answers = ask_all(model, processor, asks, max_new_tokens=6)
            return [float(answer == sample.suffix) for answer, sample in zip(answers, asked, strict=True)]

        train = [scenes.sample(task, "train", number) for number in range(2_000)]
        examples: list = [*range(limit)] if split == "test" else [f"{split}/{number}" for number in range(limit)]
        pictures = [f"{task}/{sample.image_id}" for sample in asked]
        return Measure(task, task, examples, pictures, [task] * limit, scenes.blind(train, asked)["overall"], grade)

    return [measure(task) for task in TASKS]
