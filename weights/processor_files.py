"""The settings beside the weights of a PaliGemma that transformers' AutoProcessor and `generate` read.

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
            **dict.fromkeys(("do_convert_rgb", "do_resize", "do_rescale", "do_normalize"), True),
            **{"resample": 3, "rescale_factor": 1 / 255},  # bicubic
            **dict.fromkeys(("image_mean", "image_std"), [0.5, 0.5, 0.5]),
        },
        "tokenizer_config.json": {
            "tokenizer_class": "GemmaTokenizer",
            "processor_class": "PaliGemmaProcessor",
            **{f"{name}_token": f"<{name}>" for name in ("bos", "eos", "pad", "unk")},
            "extra_special_tokens": {"image_token": SLOT},
        },
        "generation_config.json": {
            **{f"{name}_token_id": getattr(config, f"{name}_token_id") for name in ("bos", "eos", "pad")},
            "suppress_tokens": [config.image_token_id],  # as `model.generate.generate`
        },
    }
    return {name: json.dumps(content, indent=1, ensure_ascii=False) + "\n" for name, content in files.items()}
