"""The settings beside the weights of a PaliGemma that transformers' AutoProcessor and `generate` read.

In: the configuration. Out: the texts of preprocessor_config.json, tokenizer_config.json and generation_config.json.
With them and tokenizer.json transformers prepares the same pixels and ids as `model/processor.py`.
"""

import json

from model.config import PaliGemmaConfig
from model.turns import SLOT


def processor_files(config: PaliGemmaConfig) -> dict[str, str]:
    """The texts of these files by name."""
    size = config.vision.image_size
    files = {
        "preprocessor_config.json": {
            "image_processor_type": "SiglipImageProcessor",
            "processor_class": "PaliGemmaProcessor",
            "image_seq_length": config.num_image_tokens,
            "size": {"height": size, "width": size},
            "do_convert_rgb": True,
            "do_resize": True,
            "resample": 3,  # bicubic
            "do_rescale": True,
            "rescale_factor": 1 / 255,
            "do_normalize": True,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
        },
        "tokenizer_config.json": {
            "tokenizer_class": "GemmaTokenizer",
            "processor_class": "PaliGemmaProcessor",
            **{f"{name}_token": f"<{name}>" for name in ("bos", "eos", "pad", "unk")},
            "extra_special_tokens": {"image_token": SLOT},
        },
        "generation_config.json": {
            "bos_token_id": config.bos_token_id,
            "eos_token_id": config.eos_token_id,
            "pad_token_id": config.pad_token_id,
            "suppress_tokens": [config.image_token_id],  # as `model.generate.generate`
        },
    }
    return {name: json.dumps(content, indent=1, ensure_ascii=False) + "\n" for name, content in files.items()}
