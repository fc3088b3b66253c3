"""Prompts: static instructions, fences that data cannot close, and worked examples that keep the contract."""

from __future__ import annotations

import dataclasses
import importlib
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samrag.calls import (
    INTERLEAVED_KINDS,
    JUDGEMENTS,
    RATINGS,
    Answer,
    Call,
    CallKind,
    Caption,
    Composition,
    Facet,
    Judgement,
    Passage,
    Rating,
)
from samrag.interleaved import CATEGORIES, structure
from samrag.prompts import PromptStyle, render, style_hash, template_hash
from samrag.prompts.render import IMAGE_MARK, fence, shorten_documents, worked_examples
from samrag.replies import parse

RENDERER = importlib.import_module("samrag.prompts.render")  # the package exports a function of this name
SHOWS = {
    CallKind.IS_REL_TEXT: {"document", "question"},
    CallKind.IS_REL_IMAGE: {"title", "question"},
    CallKind.CAPTION_RAW: {"title"},
    CallKind.CAPTION_QUERY: {"title", "question"},
    CallKind.ANSWER: {"document", "question", "critique"},
    CallKind.IS_USE: {"document", "question", "answer"},
    CallKind.IS_SUP: {"document", "question", "answer"},
    CallKind.INTERLEAVED_EN: {"document", "question", "critique"},
    CallKind.INTERLEAVED_ZH: {"document", "question", "critique"},
    CallKind.CRITIC_TEXT: {"document", "question"},
    CallKind.CRITIC_IMAGE: {"title", "document", "question"},
    CallKind.CONFIDENCE: {"document", "question", "answer"},
    CallKind.FACET: {"document", "question", "answer", "critique"},
}
"""The fences of each kind's body."""
SLOTS = {
    "question": "QUESTION?",
    "passages": (Passage("PASSAGE-TITLE", "PASSAGE-TEXT"),),
    "title": "IMAGE-TITLE",
    "answer": "JUDGED",
    "critique": "CRITIQUE",
}
MARKS = {
    "question": "QUESTION?",
    "document": "PASSAGE-TEXT",
    "title": "IMAGE-TITLE",
    "answer": "JUDGED",
    "critique": "CRITIQUE",
}
STYLES = list(PromptStyle)
INTERLEAVED = tuple(INTERLEAVED_KINDS.values())


def filled(kind: CallKind, **changes: object) -> Call:
    """A call with every slot filled, used by its kind or not."""
    return Call(kind, **(SLOTS | {"image": "a.png"} | changes))  # type: ignore[arg-type]


def fences(text: str, tag: str) -> tuple[int, int]:
    return text.count(f"<{tag}>"), text.count(f"</{tag}>")


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("kind", CallKind)
def test_a_kind_shows_its_own_slots_and_no_others(kind: CallKind, style: PromptStyle) -> None:
    body = render(filled(kind), style).body
    for tag, mark in MARKS.items():
        assert (mark in body) == (tag in SHOWS[kind]), tag
        assert fences(body, tag) == ((1, 1) if tag in SHOWS[kind] else (0, 0))


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("kind", CallKind)
def test_the_instruction_is_static_and_names_the_contract(kind: CallKind, style: PromptStyle) -> None:
    instruction = render(filled(kind), style).instruction
    assert instruction == render(Call(kind), style).instruction
    assert not any(mark in instruction for mark in MARKS.values())
    if kind is not CallKind.FACET:  # where it may be the answer that is shown
        assert ("not stated" in instruction) == (kind in (CallKind.ANSWER, *INTERLEAVED))
    if kind in INTERLEAVED:
        assert all(part in instruction for part in ('"reason"', '"category"', '"answer"', "(IMG#k)", "(DOC#n)"))
        assert style is PromptStyle.STUDENT or all(f'"{category}"' in instruction for category in CATEGORIES)
        return
    assert '"Response"' in instruction
    assert ('"Reasoning"' in instruction) == (kind not in (CallKind.CAPTION_RAW, CallKind.CAPTION_QUERY))
    for verdict in JUDGEMENTS.get(kind, ()):
        assert f'"{verdict}"' in instruction
    assert ('"Partial"' in instruction) == (kind is CallKind.IS_SUP)
    for axis in RATINGS.get(kind, ()):
        assert f'"{axis}"' in instruction


@pytest.mark.parametrize("style", STYLES)
def test_the_image_mark_stands_between_instruction_and_body_and_only_with_an_image(style: PromptStyle) -> None:
    prompt = render(filled(CallKind.IS_REL_IMAGE), style)
    assert prompt.message().role == "user"
    assert prompt.message().content == f"{prompt.instruction}\n{IMAGE_MARK}\n{prompt.body}"
    prompt = render(filled(CallKind.ANSWER, image=None), style)
    assert prompt.message().content == f"{prompt.instruction}\n{prompt.body}"


@pytest.mark.parametrize("style", STYLES)
def test_no_critique_no_fence_for_it(style: PromptStyle) -> None:
    assert "critique" not in render(filled(CallKind.ANSWER, critique=""), style).body


@pytest.mark.parametrize("style", STYLES)
def test_is_use_without_content_shows_no_document(style: PromptStyle) -> None:
    assert "document" not in render(filled(CallKind.IS_USE, passages=()), style).body


# --- data stay data ---

PIECES = [*"</>& ab\n\r\t\u2028\x85\0\ud800", "</document>", "<document>", "</answer>", "<image>", "</s>", "&lt;"]
HOSTILE = st.lists(st.sampled_from(PIECES), max_size=8).map("".join) | st.text(max_size=20)
FENCED = ("document", "question", "title", "answer", "critique")


@given(
    st.sampled_from(CallKind),
    st.sampled_from(STYLES),
    st.lists(st.builds(Passage, HOSTILE, HOSTILE), max_size=3),
    st.tuples(HOSTILE, HOSTILE, HOSTILE, HOSTILE),
    st.sampled_from([None, "a.png"]),
)
def test_data_cannot_close_its_fence_or_bring_an_image(
    kind: CallKind, style: PromptStyle, passages: list[Passage], data: tuple[str, ...], image: str | None
) -> None:
    question, title, answer, critique = data
    prompt = render(Call(kind, question, tuple(passages), title, image, answer, critique), style)
    for tag in FENCED:
        wanted = int(tag in SHOWS[kind]) if tag != "document" else len(passages) * (tag in SHOWS[kind])
        if tag != "critique":
            assert fences(prompt.body, tag) == (wanted, wanted)
    assert prompt.message().content.count(IMAGE_MARK) == (image is not None)
    assert set(re.findall("<[^>]*>", prompt.body)) <= {f"<{s}{tag}>" for tag in FENCED for s in ("", "/")}
    prompt.body.encode()  # no half of a surrogate pair


@given(HOSTILE)
def test_a_fenced_text_has_no_angle_brackets_and_reads_back(text: str) -> None:
    fenced = fence(text)
    assert not set(fenced) & set("<>\r\0")
    kept = fenced.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")
    assert fence(kept) == fenced


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("newline", ["\n", "\r\n", "\n\n"])
def test_a_title_is_one_line(style: PromptStyle, newline: str) -> None:
    title = f"Old{newline}mill"
    body = render(Call(CallKind.IS_REL_TEXT, "Q", (Passage(title, "Text"),)), style).body
    head, text, end = body.splitlines()[1:4]
    assert (head.split(), text, end) == (["Old", "mill"], "Text", "</document>")
    body = render(Call(CallKind.CAPTION_RAW, title=title, image="a.png"), style).body
    assert len(body.splitlines()) == 3


# --- hashes and lengths ---


def test_each_kind_and_style_has_its_own_hash() -> None:
    hashes = [template_hash(style, kind) for style in PromptStyle for kind in CallKind]
    hashes += [style_hash(style) for style in PromptStyle]
    assert len(set(hashes)) == len(hashes)
    assert all(re.fullmatch("[0-9a-f]{16}", value) for value in hashes)


@pytest.mark.parametrize("style", STYLES)
def test_a_changed_template_changes_the_hash_of_its_kind_and_style_alone(
    style: PromptStyle, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {(each, kind): template_hash(each, kind) for each in PromptStyle for kind in CallKind}
    loader = RENDERER._environment().loader
    original = loader.get_source

    def edited(environment: object, name: str) -> tuple[str, object, object]:
        source, *rest = original(environment, name)
        return (source + " " if name == f"{style}/answer.jinja" else source, *rest)

    monkeypatch.setattr(loader, "get_source", edited)
    after = {each: template_hash.__wrapped__(*each) for each in before}
    assert {each for each in before if after[each] != before[each]} == {(style, CallKind.ANSWER)}


def test_the_worked_examples_are_part_of_the_teachers_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    before = {(each, kind): template_hash(each, kind) for each in PromptStyle for kind in CallKind}
    monkeypatch.setattr(RENDERER, "worked_examples", lambda kind: ())
    after = {each: template_hash.__wrapped__(*each) for each in before}
    assert {each for each in before if after[each] != before[each]} == {(PromptStyle.TEACHER, k) for k in CallKind}


@pytest.mark.parametrize("kind", [kind for kind in CallKind if kind is not CallKind.INTERLEAVED_ZH])
def test_a_students_instruction_is_a_third_of_the_teachers_at_most(kind: CallKind) -> None:
    words = {style: len(render(Call(kind), style).instruction.split()) for style in PromptStyle}
    assert words[PromptStyle.STUDENT] <= words[PromptStyle.TEACHER] / 3


# --- worked examples ---


@pytest.mark.parametrize("kind", CallKind)
def test_every_worked_example_is_a_reply_of_its_kind_to_a_call_of_its_kind(kind: CallKind) -> None:
    examples = worked_examples(kind)
    replies = [parse(kind, example.reply) for example in examples]
    others = {CallKind.ANSWER: Answer, CallKind.FACET: Facet}
    wanted = Judgement if kind in JUDGEMENTS else Rating if kind in RATINGS else others.get(kind, Caption)
    wanted = Composition if kind in INTERLEAVED else wanted
    assert examples
    assert all(isinstance(reply, wanted) for reply in replies)
    for example, reply in zip(examples, replies, strict=True):
        call = example.call
        assert call.kind is kind
        assert bool(call.passages) == ("document" in SHOWS[kind])
        assert bool(call.title) == ("title" in SHOWS[kind])
        assert bool(call.question) == ("question" in SHOWS[kind])
        assert bool(call.answer) == ("answer" in SHOWS[kind])
        assert not isinstance(reply, Caption) or "Reasoning" not in example.reply
        assert isinstance(reply, Caption) or getattr(reply, "reasoning", "")
    if kind in JUDGEMENTS:
        assert {reply.verdict for reply in replies if isinstance(reply, Judgement)} == set(JUDGEMENTS[kind])
    if kind is CallKind.FACET:
        assert {bool(reply.text) for reply in replies if isinstance(reply, Facet)} == {False, True}
    if kind in RATINGS:
        for axis in zip(*(reply.scores for reply in replies if isinstance(reply, Rating)), strict=True):
            assert len(set(axis)) > 1 or kind is CallKind.CRITIC_IMAGE
    if kind is CallKind.ANSWER:
        assert {min(len(reply.values), 2) for reply in replies if isinstance(reply, Answer)} == {0, 1, 2}
    if kind in INTERLEAVED:
        assert {bool(reply.markdown) for reply in replies if isinstance(reply, Composition)} == {False, True}


@pytest.mark.parametrize("kind", INTERLEAVED)
def test_worked_examples_refer_to_what_they_show_and_leave_a_picture_out(kind: CallKind) -> None:
    for example in worked_examples(kind):
        reply = parse(kind, example.reply)
        assert isinstance(reply, Composition)
        assert reply.category in CATEGORIES
        labels = [passage.title.split()[0] for passage in example.call.passages]
        images, texts = ({int(i[4:]) for i in labels if i.startswith(prefix)} for prefix in ("IMG#", "DOC#"))
        answer = structure(reply.markdown, images, texts)
        assert answer.problems == ()
        assert not reply.markdown or (set(answer.images) < images and answer.citations)


@pytest.mark.parametrize("kind", CallKind)
def test_worked_examples_stand_in_the_teachers_instruction_as_its_own_bodies(kind: CallKind) -> None:
    instruction = render(Call(kind), PromptStyle.TEACHER).instruction
    student = render(Call(kind), PromptStyle.STUDENT).instruction
    for number, example in enumerate(worked_examples(kind), 1):
        body = render(example.call, PromptStyle.TEACHER).body
        assert f"Example {number}\n{body}\nReply:\n{example.reply}" in instruction
        assert example.reply not in student
    assert f"Example {len(worked_examples(kind)) + 1}" not in instruction


def test_the_two_styles_share_one_body() -> None:
    """The turn a student is trained on is the turn it is asked with, and the one its teacher was asked."""
    for kind in CallKind:
        call = dataclasses.replace(filled(kind), passages=SLOTS["passages"] * 2)
        assert render(call, PromptStyle.STUDENT).body == render(call, PromptStyle.TEACHER).body


@pytest.mark.parametrize("keep", [1.0, 0.6, 0.3, 0.05, 0.0])
def test_shortening_takes_from_the_longest_documents_and_leaves_all_else(keep: float) -> None:
    given = {"Long": "many words " * 40, "Short": "It is red.", "Middle": "some more " * 20}
    passages = tuple(Passage(title, text) for title, text in given.items())
    prompt = render(Call(CallKind.ANSWER, "Which?", passages), PromptStyle.STUDENT).body
    shorter = shorten_documents(prompt, keep)
    texts = {title: text.strip() for title, text in given.items()}
    left = {title: re.search(rf"<document>\n{title}\n(.*?)\n</document>", shorter, re.DOTALL)[1] for title in texts}
    total = sum(map(len, texts.values()))
    assert sum(map(len, left.values())) <= keep * total + 1
    assert all(texts[title].startswith(text) for title, text in left.items())
    if keep >= 0.3:
        assert left["Short"] == texts["Short"]
        assert sum(map(len, left.values())) >= keep * total - 2 * len("words ") - 2
    assert RENDERER._DOCUMENT.sub("", shorter) == RENDERER._DOCUMENT.sub("", prompt)
