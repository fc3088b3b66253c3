"""A real LLaVA in miniature: tokenizer, processor and untrained model for the mini world.

`scripts/build_tiny_llava.py` pretrains and saves it. The classes are the ones of LLaVA-1.5, so everything that works on
the one works on the other.
"""

from __future__ import annotations

import random
from collections.abc import Iterable

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from samrag.calls import SAM_RAG_KINDS, Call, Passage
from samrag.miniworld.language import VALUES
from samrag.miniworld.pretraining import Names, draw_example
from samrag.miniworld.world import ANIMALS, FIRST_NAMES, LAST_NAMES, PLACES, Split
from samrag.prompts import PromptStyle, render
from samrag.prompts.render import IMAGE_MARK
from samrag.replies import write
from samrag.vlm import FAMILIES

IMAGE_PX, PATCH_PX = 32, 8
MAX_TOKENS = 1024
# One chunk is at most one token: a fence tag with its line breaks, the JSON glue of a reply, a word with its space.
_CHUNKS = (
    r'\n?</?[a-z]+>\n?| ?\{"(?:Reasoning|Response)": "|\.?", "Response": "|"\}'
    r"| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
)


def _tokenizer_texts(seed: int) -> Iterable[str]:
    rng = random.Random(seed)
    names = Names.of(Split.PRETRAIN)
    for _ in range(20000):
        example = draw_example(rng, names)
        yield f"USER: {example.prompt}\nASSISTANT: {example.target}"
    words = [*PLACES, *ANIMALS, *FIRST_NAMES, *LAST_NAMES, *(value for values in VALUES.values() for value in values)]
    for kind in SAM_RAG_KINDS:
        call = Call(kind, "x", (Passage("x", "x"),), "x", answer="x", critique="x")
        for _ in range(50):
            yield render(call, PromptStyle.STUDENT).message().content
            yield "\n".join(write("x", verdict) for verdict in ("True", "False", "Partial"))
    for word in words:
        for _ in range(50):
            yield f"{word} {word}, {word}."


def build_tokenizer(vocab_size: int = 1800, seed: int = 0) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE in which every word of the mini world is one token and any other text still has some."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_CHUNKS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<pad>", "<s>", "</s>", IMAGE_MARK]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        min_frequency=20,
    )
    tokenizer.train_from_iterator(_tokenizer_texts(seed), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        model_max_length=MAX_TOKENS,
        clean_up_tokenization_spaces=False,
    )


def build_processor(tokenizer: PreTrainedTokenizerFast) -> LlavaProcessor:
    """LLaVA's processor at 32 px and 16 patches."""
    image_processor = CLIPImageProcessorPil(
        size={"shortest_edge": IMAGE_PX}, crop_size={"height": IMAGE_PX, "width": IMAGE_PX}, do_convert_rgb=True
    )
    return LlavaProcessor(
        image_processor=image_processor,
        tokenizer=tokenizer,
        patch_size=PATCH_PX,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token=IMAGE_MARK,
        chat_template=FAMILIES[0].chat_template,
    )


def build_model(
    tokenizer: PreTrainedTokenizerFast, hidden: int, num_layers: int, seed: int
) -> LlavaForConditionalGeneration:
    """An untrained LLaVA of about a million parameters."""
    torch.manual_seed(seed)
    vision = CLIPVisionConfig(
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=IMAGE_PX,
        patch_size=PATCH_PX,
        projection_dim=64,
    )
    text = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=MAX_TOKENS,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_id=tokenizer.convert_tokens_to_ids(IMAGE_MARK),
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
        image_seq_length=(IMAGE_PX // PATCH_PX) ** 2,
        tie_word_embeddings=True,
    )
    model = LlavaForConditionalGeneration(config)
    _relate_word_forms(model, tokenizer)
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.generation_config.bos_token_id = tokenizer.bos_token_id
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    return model


def _relate_word_forms(model: LlavaForConditionalGeneration, tokenizer: PreTrainedTokenizerFast) -> None:
    """Let a word with and without its leading space begin alike, one shift apart for all words.

    A name at the start of a line and in the middle of one are two tokens; without this, that they are one word is
    learnt by heart, word by word.
    """
    vocabulary = tokenizer.get_vocab()
    embeddings = model.get_input_embeddings().weight
    with torch.no_grad():
        shift = torch.randn(embeddings.shape[1]) * model.config.text_config.initializer_range
        for token, index in vocabulary.items():
            spaced = vocabulary.get(f"\u0120{token}")
            if spaced is not None and token.isalnum():
                embeddings[index] = embeddings[spaced] + shift
