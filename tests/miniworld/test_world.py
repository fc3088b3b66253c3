"""The mini world's facts and files: disjoint names, equal bytes for equal seeds, MultiModalQA's schema."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

import pytest
from PIL import Image

from samrag.benchmarks.corpus import check_images
from samrag.benchmarks.mmqa import read_documents, read_questions
from samrag.errors import UserError
from samrag.miniworld.dataset import (
    IMAGES_FOLDER,
    NUM_IMAGES,
    NUM_TEXTS,
    SplitSize,
    document_id,
    gold,
    read_truth,
    write_world,
)
from samrag.miniworld.drawing import draw
from samrag.miniworld.language import BRIDGE_RELATIONS, EMBLEM, IMAGE_RELATIONS, VALUES, understand
from samrag.miniworld.world import ANIMALS, COUNTS, FIRST_NAMES, LAST_NAMES, PLACES, Split, draw_clubs, name_pool
from samrag.schema import Document, Modality, Question

SIZES = {Split.TRAIN: SplitSize(40, 50), Split.DEV: SplitSize(25, 30)}
Words = tuple[tuple[str, ...], tuple[str, ...]]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("world")
    write_world(folder, SIZES, seed=1)
    return folder


@pytest.fixture(scope="module")
def documents(world: Path) -> dict[str, Document]:
    read = read_documents(world / "MMQA_images.jsonl.gz", world / "MMQA_texts.jsonl.gz", image_folder="")
    return {document.doc_id: document for document in read}


@pytest.fixture(scope="module")
def questions(world: Path) -> dict[str, list[Question]]:
    return {split: read_questions(world / f"MMQA_{split}.jsonl.gz", split) for split in SIZES}


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


# --- facts ---


@pytest.mark.parametrize("words", [(PLACES, ANIMALS), (FIRST_NAMES, LAST_NAMES)], ids=["clubs", "people"])
def test_the_splits_name_pools_are_disjoint_and_cover_all_names(words: Words) -> None:
    first, last = words
    pools = {split: set(name_pool(split, first, last)) for split in Split}
    for one, other in itertools.combinations(pools.values(), 2):
        assert not one & other
    assert set().union(*pools.values()) == {f"{a} {b}" for a in first for b in last}


@pytest.mark.parametrize("words", [(PLACES, ANIMALS), (FIRST_NAMES, LAST_NAMES)], ids=["clubs", "people"])
@pytest.mark.parametrize("split", Split)
def test_every_word_of_a_name_occurs_in_every_split(split: Split, words: Words) -> None:
    pairs = [name.split() for name in name_pool(split, *words)]
    assert [{pair[i] for pair in pairs} for i in range(2)] == [set(part) for part in words]


@pytest.mark.parametrize("split", Split)
def test_drawn_facts_are_consistent(split: Split) -> None:
    clubs = draw_clubs(split, 60, 5)
    assert clubs == draw_clubs(split, 60, 5) != draw_clubs(split, 60, 6)
    assert len({club.name for club in clubs}) == len({club.founder.name for club in clubs}) == 60
    assert {club.name for club in clubs} <= set(name_pool(split, PLACES, ANIMALS))
    founders = Counter(club.short_name for club in clubs if club.has_founder_text)
    assert set(founders.values()) == {1}
    assert set(founders) == {club.short_name for club in clubs}
    for club in clubs:
        emblem = club.emblem
        assert emblem.background != emblem.colour
        assert len(set(emblem.cells)) == COUNTS.index(emblem.count) + 2
        assert set(emblem.cells) <= set(range(16))


def test_more_clubs_than_names_are_refused() -> None:
    with pytest.raises(ValueError, match="num_clubs is 100000"):
        draw_clubs(Split.TEST, 100_000, 0)


def test_the_picture_shows_the_emblem() -> None:
    seen = {}
    for club in draw_clubs(Split.DEV, 40, 0):
        image = draw(club.emblem)
        assert (image.size, image.mode) == ((128, 128), "RGB")
        empty = next(cell for cell in range(16) if cell not in club.emblem.cells)
        background, colour = (
            image.getpixel((cell % 4 * 32 + 16, cell // 4 * 32 + 16)) for cell in (empty, club.emblem.cells[0])
        )
        assert seen.setdefault(club.emblem.background, background) == background
        assert seen.setdefault(club.emblem.colour, colour) == colour
    assert len(set(seen.values())) == len(seen)


# --- files ---


def test_equal_seeds_give_equal_bytes_of_all_files(world: Path, tmp_path: Path) -> None:
    write_world(tmp_path / "again", SIZES, seed=1)
    write_world(tmp_path / "other", SIZES, seed=2)
    first, again, other = contents(world), contents(tmp_path / "again"), contents(tmp_path / "other")
    assert first == again
    names = {"MMQA_train.jsonl.gz", "MMQA_dev.jsonl.gz", "MMQA_texts.jsonl.gz", "MMQA_images.jsonl.gz", "world.json"}
    assert {name for name in first if "/" not in name} == names
    assert not [name for name in names if first[name] == other[name]]


def test_a_question_has_a_type_ten_texts_ten_images_and_its_supports_among_them(
    questions: dict[str, list[Question]], documents: dict[str, Document]
) -> None:
    for split, size in SIZES.items():
        assert len(questions[split]) == len({q.question_id for q in questions[split]}) == size.num_questions
        for question in questions[split]:
            listed = [documents[i] for i in question.candidate_ids]
            modalities = Counter(document.modality for document in listed)
            assert modalities == {Modality.TEXT: NUM_TEXTS, Modality.IMAGE: NUM_IMAGES}
            assert set(question.support_ids) <= set(question.candidate_ids)
            modality = {"TextQ": Modality.TEXT, "ImageQ": Modality.IMAGE}[question.question_type]
            assert {documents[i].modality for i in question.support_ids} == {modality} == {*question.modalities}


def test_the_answer_stands_in_the_answer_bearing_support_and_bridges_are_marked(
    world: Path, questions: dict[str, list[Question]], documents: dict[str, Document]
) -> None:
    clubs = {club.name: club for club in read_truth(world)}
    bridged = 0
    for question in itertools.chain(*questions.values()):
        understood = understand(question.question)
        assert understood is not None
        relation, name = understood
        club = clubs[name]
        assert question.answers == (gold(club, relation),)
        assert question.answers[0] in VALUES[relation]
        assert (question.question_type == "ImageQ") == (relation in IMAGE_RELATIONS)
        titles = [documents[i].title for i in question.answer_bearing_ids]
        if relation in BRIDGE_RELATIONS:
            bridged += 1
            assert (titles, question.bridge_ids) == ([club.founder.name], (document_id(name),))
            assert question.answers[0] not in documents[document_id(name)].text.split()
        else:
            assert question.bridge_ids == ()
            assert titles == [name + EMBLEM if relation in IMAGE_RELATIONS else name]
        if relation not in IMAGE_RELATIONS:
            assert question.answers[0] in documents[question.answer_bearing_ids[0]].text
    assert bridged > 10


def test_a_hard_distractor_that_shares_a_word_of_the_name_is_listed_where_there_is_one(
    questions: dict[str, list[Question]], documents: dict[str, Document]
) -> None:
    hard = 0
    for split, size in SIZES.items():
        names = [club.name for club in draw_clubs(split, size.num_clubs, 1)]
        for question in questions[split]:
            understood = understand(question.question)
            assert understood is not None
            alike = {n for n in names if n != understood[1] and set(n.split()) & set(understood[1].split())}
            titles = {documents[i].title for i in question.candidate_ids}
            for suffix in ("", EMBLEM):
                assert not alike or {name + suffix for name in alike} & titles
            hard += bool(alike)
    assert hard > 40


def test_the_splits_share_no_document(questions: dict[str, list[Question]]) -> None:
    listed = [{i for q in part for i in q.candidate_ids} for part in questions.values()]
    assert not listed[0] & listed[1]


def test_every_image_is_there_and_whole(world: Path, documents: dict[str, Document]) -> None:
    check_images(list(documents.values()), world / IMAGES_FOLDER)
    images = [document for document in documents.values() if document.modality is Modality.IMAGE]
    assert len(images) == sum(size.num_clubs for size in SIZES.values())
    truth = {club.name + EMBLEM: club.emblem for club in read_truth(world)}
    document = images[0]
    with Image.open(world / IMAGES_FOLDER / str(document.image)) as image:
        assert image.convert("RGB").tobytes() == draw(truth[document.title]).tobytes()


def test_the_truth_reads_back(world: Path, tmp_path: Path) -> None:
    drawn = [club for split, size in SIZES.items() for club in draw_clubs(split, size.num_clubs, 1)]
    assert read_truth(world) == drawn
    (tmp_path / "world.json").write_text('[{"name": "x"}]')
    with pytest.raises(UserError, match=r"make_mini_world\.py"):
        read_truth(tmp_path)


def test_more_questions_than_there_are_facts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"dev: \d+ questions"):
        write_world(tmp_path, {Split.DEV: SplitSize(5, 500)}, seed=0)
