"""Tiny random models of the families that the trainer knows, with their processors; built from configurations."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from samrag.miniworld import tiny_llava

TEXT = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 2048,
}  # fmt: skip
VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
Built = tuple[Any, Any]


def tokenizer(*special: str) -> Any:
    """The mini world's, from few texts, with a family's own tokens."""
    texts = list(itertools.islice(tiny_llava._tokenizer_texts(0), 300))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny_llava, "_tokenizer_texts", lambda seed: texts)
        made = tiny_llava.build_tokenizer()
    made.add_special_tokens({"additional_special_tokens": list(special)})
    return made


def without_video(processor: type) -> type:
    """A processor class that does without torchvision."""
    parts = [name for name in processor.get_attributes() if name != "video_processor"]  # type: ignore[attr-defined]
    return type(processor.__name__, (processor,), {"get_attributes": classmethod(lambda cls: parts)})


def _qwen(version: str) -> Built:
    words = {
        "image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>",
        "vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>",
    }  # fmt: skip
    made = tokenizer(*words.values(), "<|im_start|>", "<|im_end|>")
    made.bos_token = None
    ids = {name: made.convert_tokens_to_ids(word) for name, word in words.items()}
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
    text = {**TEXT, "vocab_size": len(made), "bos_token_id": None, "eos_token_id": made.eos_token_id}
    vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 32}
    if version == "2.5":
        config: Any = transformers.Qwen2_5_VLConfig(
            text_config={**text, "rope_parameters": rope},
            vision_config={**vision, "patch_size": 14, "spatial_merge_size": 2, "fullatt_block_indexes": [1]}, **ids,
        )  # fmt: skip
        model: Any = transformers.Qwen2_5_VLForConditionalGeneration(config)
        kind: Any = transformers.Qwen2_5_VLProcessor
    else:
        config = transformers.Qwen3VLConfig(
            text_config={**text, "head_dim": 8, "rope_parameters": {**rope, "mrope_interleaved": True}},
            vision_config={**vision, "patch_size": 14, "spatial_merge_size": 2, "deepstack_visual_indexes": [0],
                           "num_position_embeddings": 64}, **ids,
        )  # fmt: skip
        model, kind = transformers.Qwen3VLForConditionalGeneration(config), transformers.Qwen3VLProcessor
    images = Qwen2VLImageProcessorPil(patch_size=14, merge_size=2, min_pixels=28 * 28, max_pixels=56 * 56)
    return model, without_video(kind)(images, made)


def _idefics3() -> Built:
    places = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
    made = tokenizer(
        "<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>", "<|im_start|>", *places
    )
    made.bos_token = "<|im_start|>"
    images = Idefics3ImageProcessorPil(size={"longest_edge": 64}, max_image_size={"longest_edge": 32})
    processor = transformers.Idefics3Processor(images, made, image_seq_len=4)
    config = transformers.Idefics3Config(
        text_config={**TEXT, "vocab_size": len(made), "model_type": "llama", "pad_token_id": made.pad_token_id},
        vision_config={**VISION, "image_size": 32, "patch_size": 8}, scale_factor=2,
        image_token_id=processor.image_token_id,
    )  # fmt: skip
    return transformers.Idefics3ForConditionalGeneration(config), processor


def _internvl() -> Built:
    made = tokenizer("<IMG_CONTEXT>", "<img>", "</img>", "<|im_start|>", "<|im_end|>", "<video>")
    made.bos_token = None
    words = {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>",
             "video_token": "<video>"}  # fmt: skip
    for name, word in words.items():
        made.init_kwargs[name] = word
        setattr(made, name, word)
        setattr(made, f"{name}_id", made.convert_tokens_to_ids(word))
    images = GotOcr2ImageProcessorPil(
        size={"height": 32, "width": 32}, crop_to_patches=True, min_patches=1, max_patches=4
    )
    processor = without_video(transformers.InternVLProcessor)(images, made, image_seq_length=4)
    config = transformers.InternVLConfig(
        text_config={**TEXT, "vocab_size": len(made), "model_type": "qwen2"},
        vision_config={**VISION, "image_size": [32, 32], "patch_size": [8, 8]},
        image_token_id=made.convert_tokens_to_ids("<IMG_CONTEXT>"), image_seq_length=4, downsample_ratio=0.5,
    )  # fmt: skip
    return transformers.InternVLForConditionalGeneration(config), processor


def _llava_next() -> Built:
    made = tokenizer()
    grid = [[28, 56], [56, 28], [56, 56]]
    images = LlavaNextImageProcessorPil(
        size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}, image_grid_pinpoints=grid
    )
    processor = transformers.LlavaNextProcessor(
        images, made, patch_size=14, vision_feature_select_strategy="default", num_additional_image_tokens=1
    )
    config = transformers.LlavaNextConfig(
        text_config={**TEXT, "vocab_size": len(made), "model_type": "llama"},
        vision_config={**VISION, "model_type": "clip_vision_model", "image_size": 28, "patch_size": 14},
        image_token_index=made.convert_tokens_to_ids("<image>"), image_grid_pinpoints=grid,
    )  # fmt: skip
    return transformers.LlavaNextForConditionalGeneration(config), processor


FAMILIES: dict[str, Callable[[], Built]] = {
    "llava_next": _llava_next,
    "qwen2_5_vl": lambda: _qwen("2.5"),
    "qwen3_vl": lambda: _qwen("3"),
    "idefics3": _idefics3,
    "internvl": _internvl,
}


def build(name: str, folder: Path) -> Path:
    """Write a model and its processor; its embeddings are larger, or frozen outputs could not differ."""
    torch.manual_seed(0)
    model, processor = FAMILIES[name]()
    model.get_input_embeddings().weight.data.mul_(10)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder
