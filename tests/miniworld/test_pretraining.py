"""What the base model learns from: no verdicts, no names of other splits, contexts of bounded size."""

from __future__ import annotations

import json
import random
import re
from collections import Counter

import pytest

from samrag.miniworld.language import read_passage, understand
from samrag.miniworld.oracle import compare
from samrag.miniworld.pretraining import MAX_PASSAGES, Names, compare_example, draw_example
from samrag.miniworld.world import ANIMALS, PLACES, Split, name_pool
from samrag.schema import Verdict

NAMES = Names.of(Split.PRETRAIN)
EXAMPLES = [draw_example(random.Random(seed), NAMES) for seed in range(1500)]
DOCUMENT = re.compile(r"<document>\n(.*?)\n(.*?)</document>", re.DOTALL)


def test_no_target_is_a_verdict_and_every_target_keeps_the_contract() -> None:
    assert {e.task for e in EXAMPLES} == {"answer", "sort", "caption_query", "caption_raw", "repeat", "compare"}
    for example in EXAMPLES:
        reply = json.loads(example.target)
        assert reply["Response"]
        assert reply["Response"] not in list(Verdict)


def test_documents_name_clubs_of_their_own_split_alone_and_are_few() -> None:
    others = {name for split in (Split.TRAIN, Split.DEV, Split.TEST) for name in name_pool(split, PLACES, ANIMALS)}
    sizes: Counter[int] = Counter()
    for example in EXAMPLES:
        if example.task not in ("answer", "sort"):
            continue
        documents = DOCUMENT.findall(example.prompt)
        sizes[len(documents)] += 1
        for title, text in documents:
            reading = read_passage(title, text)
            assert reading.subject not in others
        question = re.search(r"<question>\n(.*)\n", example.prompt)
        assert question
        understood = understand(question[1])
        assert understood
        assert understood[1] in NAMES.clubs
    assert set(sizes) == set(range(1, MAX_PASSAGES + 1))


def test_lookalikes_are_frequent() -> None:
    shared = Counter(
        pair.count("same")
        for seed in range(200)
        for pair in json.loads(compare_example(random.Random(seed), NAMES).target)["Response"].split(". ")
    )
    total = sum(shared.values())
    assert shared[1] / total > 0.25
    assert shared[2] / total > 0.2


@pytest.mark.parametrize(
    ("name", "asked", "line"),
    [
        ("Oak Owls", "Oak Owls", "Oak Oak same, Owls Owls same"),
        ("Oak Hawks", "Oak Owls", "Oak Oak same, Hawks Owls other"),
        ("Owls", "Oak Owls", "Owls Owls same"),
        ("1921", "1921", "1921 1921 same"),
    ],
)
def test_names_are_compared_word_beside_word(name: str, asked: str, line: str) -> None:
    assert compare(name, asked) == line
