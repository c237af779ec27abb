"""From JPEG files to micro-batches: pictures a second, and how many cores feed a GPU.

In: a `Setup`, of which the section takes nothing but its threads. Out: measurements by picture size and workers, for
JPEGs of 640×480 that are drawn here: a smooth field with the noise of a camera, of about 100 kB.
"""

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
from PIL import Image

from eval.records import Record
from model.config import PRESETS
from model.images import load_image
from model.processor import Processor
from model.source import EMBEDDED
from train.benchmark.setup import PREFIX, SUFFIX, Setup, matmul_flops
from train.benchmark.timing import OURS, THEIRS, Measurement, take_turns
from train.data.batches import load_batches
from train.recipes import GPUS

SECTION, GPU, ROWS = "data", "H100", 16


def draw(folder: Path, count: int) -> list[Path]:
    """Write `count` JPEGs to `folder`."""
    files, rng = [folder / f"{number}.jpg" for number in range(count)], np.random.default_rng(0)
    for file in files:
        field = Image.fromarray(rng.integers(0, 256, (30, 40, 3), np.uint8)).resize(
            (640, 480), Image.Resampling.BICUBIC
        )
        noisy = np.asarray(field) + rng.normal(0, 6, (480, 640, 3))
        Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(file, quality=90)
    return files


def eaten(setup: Setup, size: int) -> float:
    """Samples a second of a LoRA step of 3B on a GPU at half of its peak, in bf16."""
    setup = replace(setup, config=PRESETS[f"paligemma-3b-{size}"])
    return GPUS[GPU][0] / 2 / matmul_flops(setup, 1, setup.config.num_image_tokens + PREFIX + SUFFIX, SUFFIX, True)


def measure(setup: Setup, rounds: int, pictures: int = 128) -> list[Measurement]:
    """Each size of picture by this process alone, beside transformers' processor, and by workers.

    Pictures a second of a core are counted in seconds of CPU, and compared with what a GPU at half of its peak learns.
    """
    found, cores = [], os.cpu_count() or 1
    tokenizer = Processor.from_source(EMBEDDED).tokenizer
    with tempfile.TemporaryDirectory() as folder:
        files = draw(Path(folder), pictures)
        records = [Record(f.name, f.name, (f,), (("what is this?", "a picture"),)) for f in files]
        plan = [range(start, min(start + ROWS, pictures)) for start in range(0, pictures, ROWS)]
        for size in (224, 448):
            embedded = replace(PRESETS["mini"], vision=replace(PRESETS["mini"].vision, image_size=size))
            processor, wanted = Processor(embedded, tokenizer), eaten(setup, size)
            for workers in sorted({0, 1, min(8, cores)}):

                def ours(processor=processor, workers=workers) -> None:
                    for _ in load_batches(records, plan, processor, workers):
                        pass

                runs = {OURS: ours} | ({} if workers else their_pictures(files, size))
                row = Measurement(SECTION, f"{size} pixels, {workers} workers", take_turns(runs, rounds))
                for side, run in runs.items():
                    row.notes[side] = f"{pictures / row.median(side):,.0f} pictures/s"
                    if not workers:  # else the time is that of other processes
                        started = time.process_time()
                        run()
                        each = pictures / (time.process_time() - started)
                        row.notes[side] += (
                            f", {each:,.0f}/s a core; 3B learns {wanted:,.0f}/s: {wanted / each:.1f} cores"
                        )
                found.append(row)
    return found


def their_pictures(files: list[Path], size: int) -> dict[str, Callable[[], object]]:
    """transformers' preparation of the same files, where it is installed."""
    try:
        from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil
    except ImportError:
        return {}
    prepare = SiglipImageProcessorPil(size={"height": size, "width": size})
    starts = range(0, len(files), ROWS)
    return {
        THEIRS: lambda: [prepare([load_image(f) for f in files[at : at + ROWS]], return_tensors="pt") for at in starts]
    }
