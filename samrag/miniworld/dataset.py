"""Write a mini world to disk in MultiModalQA's file format, with its truth beside it.

Same files, same schema: `MMQA_<split>.jsonl.gz`, `MMQA_texts.jsonl.gz`, `MMQA_images.jsonl.gz` and a folder of images,
so the reader of the real data serves both. `world.json` holds the truth, for the simulated teacher only.
"""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import json
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from samrag.errors import UserError
from samrag.files import read_json, replacing, write_json
from samrag.miniworld.drawing import draw
from samrag.miniworld.language import (
    BRIDGE_RELATIONS,
    EMBLEM,
    IMAGE_RELATIONS,
    TEXT_RELATIONS,
    Relation,
    ask,
    club_text,
    founder_text,
)
from samrag.miniworld.world import Club, Emblem, Founder, Split, draw_clubs

IMAGES_FOLDER = "final_dataset_images"
TRUTH = "world.json"
NUM_TEXTS, NUM_IMAGES = 10, 10
"""Documents in a question's own list, supports included (MultiModalQA: 10 texts, up to 15 images)."""
_MIX = ((TEXT_RELATIONS, 0.4), (BRIDGE_RELATIONS, 0.25), (IMAGE_RELATIONS, 0.35))


@dataclasses.dataclass(frozen=True, slots=True)
class SplitSize:
    """How large a split is."""

    num_clubs: int
    num_questions: int


def document_id(name: str) -> str:
    """A document's id: 32 hex digits, as in MultiModalQA."""
    return hashlib.md5(name.encode(), usedforsecurity=False).hexdigest()


def supports(club: Club, relation: Relation) -> list[tuple[str, str]]:
    """(title, part) of the documents a question needs; the one with the answer last."""
    if relation in IMAGE_RELATIONS:
        return [(club.name + EMBLEM, "image")]
    if relation in BRIDGE_RELATIONS:
        return [(club.name, "text"), (club.founder.name, "text")]
    return [(club.name, "text")]


def gold(club: Club, relation: Relation) -> str:
    """The answer."""
    if relation in IMAGE_RELATIONS:
        return str(getattr(club.emblem, relation))
    return str(getattr(club.founder if relation in BRIDGE_RELATIONS else club, relation))


def write_world(folder: Path, sizes: Mapping[Split, SplitSize], seed: int) -> None:
    """Write all files of a world. Equal arguments give equal bytes.

    Raises:
        ValueError: a split asks for more clubs or questions than there can be.
    """
    folder = Path(folder)
    (folder / IMAGES_FOLDER).mkdir(parents=True, exist_ok=True)
    clubs = {split: draw_clubs(split, size.num_clubs, seed) for split, size in sizes.items()}
    texts, images = [], []
    for club in (club for part in clubs.values() for club in part):
        texts.append(_text(club.name, club_text(club)))
        if club.has_founder_text:
            texts.append(_text(club.founder.name, founder_text(club)))
        title = club.name + EMBLEM
        images.append({"title": title, "url": "", "id": document_id(title), "path": f"{document_id(title)}.png"})
        draw(club.emblem).save(folder / IMAGES_FOLDER / images[-1]["path"], optimize=False)
    for split, part in clubs.items():
        write_gz(folder / f"MMQA_{split}.jsonl.gz", _questions(part, split, sizes[split].num_questions, seed))
    write_gz(folder / "MMQA_texts.jsonl.gz", texts)
    write_gz(folder / "MMQA_images.jsonl.gz", images)
    write_json(folder / TRUTH, [dataclasses.asdict(club) for part in clubs.values() for club in part])


def read_truth(folder: Path) -> list[Club]:
    """The clubs of a world, for the simulated teacher."""
    path = Path(folder) / TRUTH
    try:
        return [
            Club(**{**raw, "founder": Founder(**raw["founder"]), "emblem": _emblem(raw["emblem"])})
            for raw in read_json(path)
        ]
    except (KeyError, TypeError) as error:
        raise UserError(
            f"{path} is no mini world ({error}); write it again with scripts/make_mini_world.py."
        ) from error


def write_gz(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write gzipped JSONL without a time stamp, so that equal rows give equal bytes."""
    with (
        replacing(path) as temporary,
        temporary.open("wb") as raw,
        gzip.GzipFile("", "wb", mtime=0, fileobj=raw) as out,
    ):
        for row in rows:
            out.write((json.dumps(row, ensure_ascii=False) + "\n").encode())


def _emblem(raw: dict[str, Any]) -> Emblem:
    return Emblem(**{**raw, "cells": tuple(raw["cells"])})


def _text(title: str, text: str) -> dict[str, str]:
    return {"title": title, "url": "", "id": document_id(title), "text": text}


def _questions(clubs: Sequence[Club], split: Split, num_questions: int, seed: int) -> list[dict[str, Any]]:
    rng = random.Random(f"questions:{split}:{seed}")
    rows: list[dict[str, Any]] = []
    for relations, share in _MIX:
        pairs = [(c, r) for c in clubs for r in relations if r not in BRIDGE_RELATIONS or c.has_founder_text]
        wanted = round(num_questions * share) if relations is not IMAGE_RELATIONS else num_questions - len(rows)
        if wanted > len(pairs):
            raise ValueError(f"{split}: {wanted} questions on {relations[0]} and the like wanted, {len(pairs)} exist")
        rows += [_question(club, relation, clubs, split, rng) for club, relation in rng.sample(pairs, wanted)]
    rng.shuffle(rows)
    return rows


def _question(
    club: Club, relation: Relation, clubs: Sequence[Club], split: Split, rng: random.Random
) -> dict[str, Any]:
    needed = supports(club, relation)
    needed_texts = [title for title, part in needed if part == "text"]
    needed_images = [title for title, part in needed if part == "image"]
    others = _lookalikes_first(club, clubs, rng)
    titles = [
        t for other in others for t in ([other.name, other.founder.name] if other.has_founder_text else [other.name])
    ]
    text_ids = _list_of(needed_texts, [*([] if needed_texts else [club.name]), *titles], NUM_TEXTS, rng)
    image_titles = [other.name + EMBLEM for other in ([club] if not needed_images else []) + others]
    image_ids = _list_of(needed_images, image_titles, NUM_IMAGES, rng)
    question = ask(relation, club.name, rng.randrange(2))
    modality = needed[-1][1]
    bearing = document_id(needed[-1][0])
    instances: dict[str, list[dict[str, Any]]] = {"text_instances": [], "table_indices": [], "image_instances": []}
    if modality == "text":
        instances["text_instances"] = [{"doc_id": bearing, "part": "text", "text": gold(club, relation)}]
    else:
        instances["image_instances"] = [{"doc_id": bearing, "doc_part": "image"}]
    metadata = {
        "type": "TextQ" if modality == "text" else "ImageQ",
        "modalities": [modality],
        "wiki_entities_in_question": [{"text": club.name, "wiki_title": club.name, "url": ""}],
        "wiki_entities_in_answers": [],
        "image_doc_ids": image_ids,
        "text_doc_ids": text_ids,
        "table_id": document_id(f"table of {club.name}"),
        "intermediate_answers": [],
    }
    return {
        "qid": document_id(f"{split}:{question}"),
        "question": question,
        "answers": [{"answer": gold(club, relation), "type": "string", "modality": modality, **instances}],
        "metadata": metadata,
        "supporting_context": [{"doc_id": document_id(title), "doc_part": part} for title, part in needed],
    }


def _lookalikes_first(club: Club, clubs: Sequence[Club], rng: random.Random) -> list[Club]:
    """Other clubs in random order, those that share a word of the name before the rest."""
    others = [other for other in clubs if other.name != club.name]
    rng.shuffle(others)
    return sorted(others, key=lambda other: not set(other.name.split()) & set(club.name.split()))


def _list_of(needed: Sequence[str], others: Sequence[str], size: int, rng: random.Random) -> list[str]:
    titles = list(dict.fromkeys([*needed, *others]))[:size]
    rng.shuffle(titles)
    return [document_id(title) for title in titles]
