"""Small models with random weights that see images: Idefics3, and PaddleOCR-VL with M-RoPE.

Their processors need Pillow only. Other families' processors or models import torchvision, which
has no build that loads beside the CPU build of torch from a package registry.
"""

from __future__ import annotations

import base64
import io
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tests.support import run, tiny

TILE, PATCH, SCALE = 112, 14, 2
"""Pixels a tile's side, pixels a patch's side, and the patches of a side that make one token."""
TILE_TOKENS = (TILE // PATCH // SCALE) ** 2
POSITIONS = 2048
MARKERS = [
    *("<image>", "<fake_token_around_image>", "<end_of_utterance>", "<global-img>"),
    *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
]
VISION = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": PATCH,
}
TEXT = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": POSITIONS,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
CHAT_TEMPLATE = (
    "{% for m in messages %}<|1|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}IMAGE{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|2|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|1|>assistant\n{% endif %}"
)


@cache
def tiny_vision(kind: str = "idefics3") -> Path:
    """The folder of the run's tiny Idefics3, or of its tiny "paddleocr", made at first use."""
    make = make_tiny_idefics3 if kind == "idefics3" else make_tiny_paddleocr
    return make(run.folder() / f"tiny-{kind}")


def make_tiny_idefics3(folder: Path) -> Path:
    """Write the model's files into `folder`, which is made; returns it."""
    from transformers import (
        Idefics3Config,
        Idefics3ForConditionalGeneration,
        Idefics3Processor,
    )
    from transformers.models.idefics3.image_processing_pil_idefics3 import (
        Idefics3ImageProcessorPil,
    )

    tokenizer = _tokenizer(MARKERS)
    images = Idefics3ImageProcessorPil(
        size={"longest_edge": 2 * TILE}, max_image_size={"longest_edge": TILE}
    )
    processor: Any = Idefics3Processor(
        images,
        tokenizer,
        image_seq_len=TILE_TOKENS,
        chat_template=CHAT_TEMPLATE.replace("IMAGE", "<image>"),
    )
    config = Idefics3Config(
        image_token_id=processor.image_token_id,
        pad_token_id=0,
        scale_factor=SCALE,
        tie_word_embeddings=False,
        vision_config={**VISION, "image_size": TILE},
        text_config={**TEXT, "model_type": "llama", "vocab_size": len(tokenizer)},
    )
    return _written(folder, processor, Idefics3ForConditionalGeneration(config))


def make_tiny_paddleocr(folder: Path) -> Path:
    """Write a PaddleOCR-VL into `folder`, which is made; returns it.

    The tokens of its images have positions in three dimensions (M-RoPE), as in Qwen2-VL.
    """
    from transformers import PaddleOCRVLConfig, PaddleOCRVLForConditionalGeneration
    from transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl import (
        PaddleOCRVLImageProcessorPil,
    )
    from transformers.models.paddleocr_vl.processing_paddleocr_vl import PaddleOCRVLProcessor

    start, image, end = markers = ("<|IMAGE_START|>", "<|IMAGE_PLACEHOLDER|>", "<|IMAGE_END|>")
    tokenizer = _tokenizer([start, end], image_token=image)
    side = PATCH * SCALE
    images = PaddleOCRVLImageProcessorPil(
        size={"shortest_edge": 4 * side**2, "longest_edge": 64 * side**2}
    )
    template = CHAT_TEMPLATE.replace("IMAGE", "".join(markers))
    processor: Any = PaddleOCRVLProcessor(images, tokenizer, chat_template=template)
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [8, 12, 12]}
    config = PaddleOCRVLConfig(
        image_token_id=tokenizer.convert_tokens_to_ids(image),
        vision_start_token_id=tokenizer.convert_tokens_to_ids(start),
        vision_end_token_id=tokenizer.convert_tokens_to_ids(end),
        tie_word_embeddings=False,
        vision_config={**VISION, "image_size": 8 * side},
        text_config={
            **TEXT,
            "vocab_size": len(tokenizer),
            "rope_parameters": rope,
            "tie_word_embeddings": False,
        },
    )
    return _written(folder, processor, PaddleOCRVLForConditionalGeneration(config))


def _tokenizer(specials: list[str], **named: str) -> Any:
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tiny.make_tokenizer(),
        eos_token=tiny.END,
        pad_token=tiny.END,
        model_max_length=POSITIONS,
        extra_special_tokens=named,
    )
    tokenizer.add_tokens([AddedToken(token, special=True) for token in specials])
    return tokenizer


def _written(folder: Path, processor: Any, model: Any) -> Path:
    """Give a model random weights, under which it sees, and write it."""
    import torch

    torch.manual_seed(0)
    with torch.no_grad():
        for weight in model.to(torch.float32).parameters():
            if weight.dim() > 1:
                weight.normal_(0.0, weight.shape[-1] ** -0.5)
    processor.save_pretrained(folder)
    model.save_pretrained(folder)
    return folder


def picture(seed: int, width: int = 200, height: int = 160) -> str:
    """A noisy PNG as a data URI."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
