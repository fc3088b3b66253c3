"""Interleaved answers: every malformed output is read, no reference goes unchecked, and no text is lost in silence."""

from __future__ import annotations

import json
import time
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samrag.interleaved import (
    BadReference,
    Citation,
    Form,
    ImageReference,
    Text,
    read_output,
    structure,
    to_html,
    to_json,
    to_markdown,
)

PICTURE = "data:image/png;base64,iVBORw0KGgo="
ANSWER = 'First a "mould".\n\n![the mould](IMG#2)\n\nThen sand.<sup>[1](DOC#1)</sup>\n\n![sand [wet]](IMG#1)'
CONTRACT = {"reason": "both documents help", "category": "how-to", "answer": ANSWER}


def contract(answer: str, **more: str) -> str:
    """The contract's JSON with the answer's source as it stands, mistakes included."""
    rest = "".join(f', "{key}": "{value}"' for key, value in more.items())
    return f'{{"reason": "r", "category": "how-to", "answer": "{answer}"{rest}}}'


# --- a model's output ---


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("separators", [None, (",", ":"), (" , ", " : ")])
@pytest.mark.parametrize("wrap", ["{}", "```json\n{}\n```", "```\n{}\n```", "\ufeff {} \n"])
def test_the_contract_is_read_however_it_is_laid_out(
    indent: int | None, separators: tuple[str, str] | None, wrap: str
) -> None:
    output = read_output(wrap.format(json.dumps(CONTRACT, indent=indent, separators=separators)))
    assert output.markdown == ANSWER
    assert (output.form, output.problems) == (Form.JSON, ())
    assert (output.reason, output.category) == ("both documents help", "how-to")


@given(st.text(), st.text(), st.sampled_from([None, (",", ":")]), st.booleans())
def test_any_answer_without_commands_of_mathematics_survives_the_contract(
    answer: str, reason: str, separators: tuple[str, str] | None, ascii_only: bool
) -> None:
    answer, reason = (text.replace("\b", "").replace("\f", "").replace("\r", "") for text in (answer, reason))
    body = json.dumps({"reason": reason, "answer": answer}, separators=separators, ensure_ascii=ascii_only)
    output = read_output(body)
    if "\\" not in body.replace('\\"', "").replace("\\n", "").replace("\\\\", "").replace("\\u", ""):
        assert (output.markdown, output.reason) == (answer.strip(), reason.strip())


@pytest.mark.parametrize(
    ("written", "answer", "form"),
    [
        ('{"reason":"r","category":"how-to","answer":"a ![x](IMG#1)"}', "a ![x](IMG#1)", Form.JSON),
        (contract(r"say \"yes\" now"), 'say "yes" now', Form.JSON),
        (contract('say "yes" now'), 'say "yes" now', Form.REPAIRED),
        (contract('say "yes", then "no"'), 'say "yes", then "no"', Form.REPAIRED),
        (contract('ends with "yes"'), 'ends with "yes"', Form.REPAIRED),
        ('{"answer": "a \\"b\\"", "category": "how-to", "reason": "r"}', 'a "b"', Form.JSON),
        ('{"answer": "a "b" c", "category": "how-to", "reason": "r"}', 'a "b" c', Form.REPAIRED),
        ('{"answer": "a "b" c"\n  "category": "how-to"}', 'a "b" c', Form.REPAIRED),
        ('{"reason": "r", "answer": "cut in the mid', "cut in the mid", Form.REPAIRED),
        ('{"reason": "r", "answer": "no brace"', "no brace", Form.REPAIRED),
        ('```json\n{"reason": "r", "answer": "a melon, a bison', "a melon, a bison", Form.REPAIRED),
        ('{"reason": "r", "answer": "half an escape\\', "half an escape", Form.REPAIRED),
        ('{"reason": "r", "answer": "half a reference ![x](IMG#', "half a reference ![x](IMG#", Form.REPAIRED),
        (contract(r"\(x\) and \alpha"), r"\(x\) and \alpha", Form.REPAIRED),
        (contract(r"2 \times \frac{1}{2} \beta"), r"2 \times \frac{1}{2} \beta", Form.REPAIRED),
        (contract(r"\nabla f"), r"\nabla f", Form.REPAIRED),
        (contract(r"2 \\times 3"), r"2 \times 3", Form.JSON),
        (contract(r"it\'s"), "it's", Form.REPAIRED),
        (contract(r"one\ntwo\tthree"), "one\ntwo\tthree", Form.JSON),
        (contract(r"a\new line, \to \u00e9t\u00e9 \user"), "a\new line, \\to \u00e9t\u00e9 \\user", Form.REPAIRED),
        (contract("a\tb"), "a\tb", Form.REPAIRED),
        (contract("a\nb\r\nc"), "a\nb\r\nc", Form.REPAIRED),
        ("Plain **text** ![x](IMG#1)", "Plain **text** ![x](IMG#1)", Form.MARKDOWN),
        ("```markdown\nPlain ![x](IMG#1)\n```", "Plain ![x](IMG#1)", Form.MARKDOWN),
        ("Plain {not JSON} text", "Plain {not JSON} text", Form.MARKDOWN),
        ('{"response": "no such key"}', '{"response": "no such key"}', Form.MARKDOWN),
        ('{"answer": ["one", "two"]}', "one\ntwo", Form.REPAIRED),
        ('{"answer": 42}', "42", Form.REPAIRED),
        ('{"Answer": "capital"}', "capital", Form.JSON),
        ('{"note": "x"} {"answer": "second object"}', "second object", Form.REPAIRED),
        ("Here it is:\n" + contract("a") + "\nDone. ![x](IMG#3)", "a", Form.REPAIRED),
        ("Here it is:\n" + contract('a "b" c') + "\nDone.", 'a "b" c', Form.REPAIRED),
        ('{"answer": "a", "images": [1, 2]}', "a", Form.REPAIRED),
        ('{"answer": "lone \\ud800 half"}', "lone \ufffd half", Form.REPAIRED),
        ('<think>perhaps {"answer": "no"}</think>{"answer": "yes"}', "yes", Form.JSON),
        ('{"reason": "not {"answer": "x"} yet", "answer": "y"}', "y", Form.REPAIRED),
        ("[" * 5000, "[" * 5000, Form.MARKDOWN),
    ],
)
def test_every_malformed_output_is_read(written: str, answer: str, form: Form) -> None:
    output = read_output(written)
    assert (output.markdown, output.form) == (answer, form)
    assert bool(output.problems) == (form is Form.REPAIRED or (form is Form.MARKDOWN and written[0] == "{"))


@pytest.mark.parametrize("written", ["", "  \n", contract(""), contract("  "), '{"answer": null}', "```json\n```"])
def test_no_answer_is_said_to_be_none(written: str) -> None:
    output = read_output(written)
    assert output.markdown == ""
    assert "the answer is empty" in output.problems


def test_what_is_left_out_of_an_output_is_named() -> None:
    whole = read_output("Here it is:\n" + contract("a", images="IMG#3") + "\nDone.")
    assert whole.problems == (
        r"text outside the object is left out: 'Here it is:\n\nDone.'",
        "keys that are not the contract's are left out: 'images'",
    )
    broken = read_output("Here it is:\n" + contract('a "b" c') + "\nDone.")
    assert r"text outside the object is left out: 'Here it is:\n\nDone.'" in broken.problems


def test_what_stands_before_the_answer_is_kept() -> None:
    assert read_output("<think>hm</think>Plain").reason == "hm"
    output = read_output('{"reason": "a "quoted" word", "category": "what-is", "answer": "b"}')
    assert (output.reason, output.category, output.markdown) == ('a "quoted" word', "what-is", "b")


PIECES = [
    *('{"', '"', '"}', "}", "\\", "\\\\", '\\"', "\n", "\t", "```", "```json\n", "[", "]", "null", ",", ":", " "),
    *('"answer": "', '"answer":"', '"reason": "', '"category"', "\\u12", "\\ud800", "</think>", "\\times", "word"),
    *("![a](IMG#1)", "![", "](", "IMG#", ")", "<sup>[1](DOC#1)</sup>", "<sup>[", "\0", "\ud800", "<br>", "|", "1. "),
]
HOSTILE = st.lists(st.sampled_from(PIECES), max_size=25).map("".join) | st.text(max_size=60)


@given(HOSTILE)
def test_no_output_raises_and_the_words_of_a_text_without_an_answer_stay(written: str) -> None:
    output = read_output(written)
    output.markdown.encode()
    if output.form is Form.MARKDOWN and "</think>" not in written and "`" not in written and "\ud800" not in written:
        assert output.markdown == written.strip().removeprefix("\ufeff").strip()


# --- segments ---


def test_an_answer_is_split_into_text_images_and_citations() -> None:
    assert structure(ANSWER, images=2, documents=1).segments == (
        Text('First a "mould".\n\n'),
        ImageReference(2, "the mould", "![the mould](IMG#2)"),
        Text("\n\nThen sand."),
        Citation(1, "1", "<sup>[1](DOC#1)</sup>"),
        Text("\n\n"),
        ImageReference(1, "sand [wet]", "![sand [wet]](IMG#1)"),
    )


@pytest.mark.parametrize(
    ("reference", "index"),
    [
        ("![x](IMG#0)", 0),
        ("![x](IMG#4)", 4),
        (f"![x](IMG#{'9' * 6000})", 0),
        ("![x](IMG#)", 0),
        ("![x](IMG#one)", 0),
        ("![x](IMG#-1)", 0),
        ("![x](https://example.org/a_(1).png)", 0),
        ("![](a.png)", 0),
        ("<sup>[x](DOC#3)</sup>", 3),
        ("<sup>[x](page.html)</sup>", 0),
    ],
)
def test_a_bad_reference_is_flagged_or_dropped_and_named_either_way(reference: str, index: int) -> None:
    flagged = structure(f"a {reference} b", 3, 2)
    assert len(flagged.problems) == 1
    assert flagged.problems[0].startswith(reference)
    bad = flagged.segments[1]
    assert not isinstance(bad, Text)
    assert bad.index == index
    assert bad.problem
    assert (flagged.images, flagged.citations) == ((), ())
    dropped = structure(f"a {reference} b", 3, 2, BadReference.DROP)
    assert dropped.segments == (Text("a  b"),)
    assert dropped.problems == flagged.problems


def test_a_reference_counts_once() -> None:
    answer = structure("![a](IMG#1) ![b](IMG#1) <sup>[1](DOC#1)</sup><sup>[1](DOC#1)</sup>", 1, 1)
    assert (answer.images, answer.citations) == ((1,), (1,))
    assert [problem.endswith("it comes again") for problem in answer.problems] == [True, True]


@pytest.mark.parametrize(
    "reference", ["![a]( IMG#2 )", "![a](img#2)", "![a](IMG #02)", "![a\nb](IMG#2)", r"![\]](IMG#2)"]
)
def test_a_reference_whose_meaning_is_plain_is_read(reference: str) -> None:
    answer = structure(reference, 2)
    assert (answer.images, answer.problems) == ((2,), ())


def test_numbers_with_gaps_are_checked_one_by_one() -> None:
    answer = structure("![a](IMG#1)![b](IMG#2)<sup>[3](DOC#3)</sup><sup>[1](DOC#1)</sup>", {2, 5}, {3})
    assert (answer.images, answer.citations) == ((2,), (3,))


@pytest.mark.parametrize("text", ["see IMG#1", "![cut](IMG#", "[1](DOC#1)", "<sup>[1](DOC#1)", "![a] (IMG#1)"])
def test_what_looks_like_a_reference_stays_text_and_is_named(text: str) -> None:
    answer = structure(text, 1, 1)
    assert answer.segments == (Text(text),)
    assert answer.problems


def test_an_image_inside_the_words_of_another_is_not_swallowed() -> None:
    answer = structure("![x ![a](IMG#1) y](IMG#2)", 2)
    assert answer.images == (1,)
    assert any("IMG#2" in problem for problem in answer.problems)


@given(HOSTILE, st.integers(0, 3), st.sampled_from([None, 0, 2]))
def test_flagged_segments_are_the_markdown_and_dropping_loses_only_what_is_named(
    markdown: str, num_images: int, num_documents: int | None
) -> None:
    flagged = structure(markdown, num_images, num_documents)
    assert to_markdown(flagged) == markdown
    assert len(set(flagged.images)) == len(flagged.images)
    assert set(flagged.images) <= set(range(1, num_images + 1))
    bad = [s.source for s in flagged.segments if not isinstance(s, Text) and s.problem]
    dropped = structure(markdown, num_images, num_documents, BadReference.DROP)
    assert dropped.problems == flagged.problems
    assert (dropped.images, dropped.citations) == (flagged.images, flagged.citations)
    assert len(to_markdown(dropped)) == len(markdown) - sum(map(len, bad))
    assert all(any(problem.startswith(source) for problem in flagged.problems) for source in bad)


@pytest.mark.parametrize(
    "unit",
    ["![", "![a", "![[a]", '{"', '"answer": "', '"', " ", "(", "\\", "| ", "*", "**a", "<sup>[", "`", "[a](", "\0"],
)
@pytest.mark.parametrize("head", ["", '{"answer": "', "![x](", '" '])
def test_long_hostile_outputs_take_no_time(head: str, unit: str) -> None:
    start = time.perf_counter()
    to_html(structure(read_output(head + unit * 20_000).markdown, 3), {})
    assert time.perf_counter() - start < 1.5


# --- renderings ---


class Page(HTMLParser):
    """Tags, addresses and text of a page; unbalanced tags are errors."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.words = ""
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href")]
        assert not [name for name, _ in attrs if name.startswith("on")]
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.words += data


def test_the_page_shows_pictures_in_their_places_and_links_citations() -> None:
    page = Page(to_html(structure(ANSWER, 2, 1), {1: PICTURE, 2: PICTURE + "A"}, ["A <document>"]))
    assert page.addresses == [PICTURE + "A", "#doc-1", PICTURE]
    assert page.words.index("First") < page.words.index("the mould") < page.words.index("Then")
    assert "A <document>" in page.words


def test_the_markdown_of_answers_becomes_html() -> None:
    lists = "# T\n1. *one*\n2. **two**\n\n![x](IMG#1)\n3. `a*b*c`\n- b\n"
    text = f"{lists}\n| a | ![x](IMG#2) |\n|---|:-:|\n| c | d |\nend<br>of it"
    page = to_html(structure(text, 2), {1: PICTURE, 2: PICTURE})
    for wanted in (
        "<h1>T</h1>",
        '<ol start="1">\n<li><em>one</em></li>\n<li><strong>two</strong></li>\n</ol>\n<figure>',
        '</figure>\n<ol start="3">',
        "<ul>\n<li>b</li>\n</ul>",
        "<td><figure><img",
        "<tr><td>c</td><td>d</td></tr>\n</table>",
        "<p>end<br>\nof it</p>",
    ):
        assert wanted in page, wanted
    Page(page)


@given(HOSTILE | st.sampled_from(["<script>alert(1)</script>", '"><img src=x onerror=y>', "javascript:x", "\0000\0"]))
def test_no_text_of_a_model_becomes_markup_or_an_address(text: str) -> None:
    answer = structure(f"{text} ![{text}](IMG#1) ![a]({text}) <sup>[{text}](DOC#1)</sup>", 1, 1)
    page = Page(to_html(answer, {1: PICTURE}, [text], title=text))
    assert not {"script", "iframe", "object", "link"} & set(page.tags)
    assert {address for address in page.addresses if address not in (PICTURE, "#doc-1")} == set()


def test_a_flagged_reference_is_shown_as_written_with_its_problem() -> None:
    page = to_html(structure("a ![x](IMG#9) b", 1), {})
    assert '<span class="bad" title="there is no IMG#9">![x](IMG#9)</span>' in page
    assert "image 1 could not be read" in to_html(structure("![x](IMG#1)", 1), {})


def test_a_picture_from_elsewhere_is_refused() -> None:
    with pytest.raises(ValueError, match="data URI"):
        to_html(structure("![x](IMG#1)", 1), {1: "https://example.org/a.png"})


def test_markdown_with_targets_points_to_files_and_reads_as_one_link() -> None:
    answer = structure("![x](IMG#2) ![y](IMG#7) <sup>[1](DOC#1)</sup>", 2)
    assert to_markdown(answer, lambda index: f"my images/{index} (a).png") == (
        "![x](my%20images/2%20%28a%29.png) ![y](IMG#7) <sup>[1](DOC#1)</sup>"
    )
    assert to_markdown(answer, lambda _: "https://a.org/x.jpg?w=540&h=%20").startswith(
        "![x](https://a.org/x.jpg?w=540&h=%20)"
    )


def test_json_segments() -> None:
    assert to_json(structure("t ![x](IMG#1)![y](IMG#5)<sup>[1](DOC#2)</sup>", 1)) == [
        {"type": "text", "text": "t "},
        {"type": "image", "index": 1, "alt": "x"},
        {
            "type": "image",
            "index": 5,
            "alt": "y",
            "problem": "there is no IMG#5",
            "source": "![y](IMG#5)",
        },
        {"type": "citation", "index": 2, "label": "1"},
    ]
