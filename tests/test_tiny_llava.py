"""The shipped tiny LLaVA fits the installed prompts and the mini world."""

from __future__ import annotations

import json
from importlib import resources

import pytest
from transformers import AutoProcessor

from samrag.calls import Call, CallKind, Passage
from samrag.miniworld.language import VALUES
from samrag.miniworld.world import ANIMALS, FIRST_NAMES, LAST_NAMES, PLACES
from samrag.prompts import PromptStyle, render
from samrag.vlm import FAMILIES

FOLDER = resources.files("samrag") / "miniworld" / "tiny_llava_base"


@pytest.fixture(scope="module")
def processor():
    return AutoProcessor.from_pretrained(str(FOLDER), backend="pil")


def test_it_is_small_and_says_how_it_was_made():
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= 8_000_000
    card = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert "scripts/build_tiny_llava.py" in card
    history = json.loads((FOLDER / "pretraining.json").read_text(encoding="utf-8"))
    assert f"{history[-1]['loss']}" in card


def test_its_chat_template_is_samrags(processor):
    assert processor.chat_template == FAMILIES[0].chat_template


def test_every_name_and_value_is_one_token(processor):
    values = [value for values in VALUES.values() for value in values]
    for word in (*PLACES, *ANIMALS, *FIRST_NAMES, *LAST_NAMES, *values):
        assert len(processor.tokenizer(f" {word}", add_special_tokens=False)["input_ids"]) == 1, word


@pytest.mark.parametrize("kind", list(CallKind))
def test_any_text_survives_its_tokenizer(processor, kind):
    call = Call(kind, "naïve \u2014 question?", (Passage("T & T", 'a "b" {c}'),), "T", answer="x  y")
    text = render(call, PromptStyle.STUDENT).message().content
    ids = processor.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert processor.tokenizer.decode(ids) == text
