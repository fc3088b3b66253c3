"""Files of records: what is written comes back, what is broken is refused, what is cut is dropped."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from samrag import files
from samrag.errors import UserError
from samrag.schema import (
    ChatMessage,
    Document,
    Draft,
    ExaminedDocument,
    ExitReason,
    Modality,
    Question,
    RetrieverRow,
    SftRow,
    Trace,
    Usage,
    Verdict,
)

RECORDS = [
    Document("d1", Modality.IMAGE, "Emblem \u00e9\u2028x", image="images/d1.png", caption="a red\nsquare"),
    Question("q1", "Who?", ("Ann", "2.0"), "TextQ", "dev", ("d1", "d2"), ("d1",), ("d1", "d2"), (Modality.TEXT,)),
    SftRow(
        (ChatMessage("user", "<image> Who?"), ChatMessage("assistant", "Ann")), ("a.png",), "answer", "", "q1", (), "h"
    ),
    RetrieverRow("Who?", ("text",), ("other",), "q1", ("d1",), ("d2",), (0.5,), (0.25,)),
    Trace(
        "q1",
        "sam_rag",
        ("Ann",),
        ExitReason.VERIFIED,
        ("d1",),
        (
            ExaminedDocument("d1", 0, True, Verdict.TRUE, "it says so", 0.75),
            ExaminedDocument("d2", 0, False, failure="server"),
        ),
        (Draft(("Ann",), "by d1", ("d1",), 0, is_use=Verdict.TRUE, is_sup=Verdict.PARTIAL),),
        Usage(5, 1, 0, 100, 20),
    ),
]


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_records_come_back_equal_and_give_equal_bytes(tmp_path: Path, record: object) -> None:
    path = tmp_path / "sub" / "records.jsonl"
    assert files.write_records(path, [record, record]) == 2
    assert files.read_records(path, type(record)) == [record, record]
    first, second = path.read_bytes().splitlines()
    assert first == second


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.builds(Document, st.text(), st.just(Modality.TEXT), st.text(), st.text()), max_size=4))
def test_any_text_survives_writing_and_appending(tmp_path: Path, documents: list[Document]) -> None:
    whole, grown = tmp_path / "whole.jsonl", tmp_path / "grown.jsonl"
    grown.write_bytes(b"")
    files.write_records(whole, documents)
    for document in documents:
        files.append_record(grown, document)
    assert files.read_records(whole, Document, allow_empty=True) == documents
    assert grown.read_bytes() == whole.read_bytes()


def test_a_gzipped_file_reads_like_the_plain_one(tmp_path: Path) -> None:
    plain, zipped = tmp_path / "d.jsonl", tmp_path / "d.jsonl.gz"
    files.write_records(plain, [RECORDS[0]])
    zipped.write_bytes(gzip.compress(plain.read_bytes()))
    assert files.read_records(zipped, Document) == files.read_records(plain, Document)


def test_empty_lines_are_skipped_and_still_counted(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('\n{"a": 1}\n\n{"a": 2}\n', encoding="utf-8")
    assert list(files.read_json_lines(path)) == [(2, {"a": 1}), (4, {"a": 2})]


@pytest.mark.parametrize("kept_bytes", [5, 40, -9])
def test_a_truncated_gzip_is_refused_in_one_sentence(tmp_path: Path, kept_bytes: int) -> None:
    path = tmp_path / "cut.jsonl.gz"
    whole = gzip.compress(b"".join(json.dumps({"n": n}).encode() + b"\n" for n in range(500)))
    path.write_bytes(whole[:kept_bytes])
    with pytest.raises(UserError, match="not a whole gzip file") as refusal:
        list(files.read_json_lines(path))
    assert str(path) in str(refusal.value)
    assert "download it again" in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_file_that_only_claims_to_be_gzip_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plain.jsonl.gz"
    path.write_text('{"a": 1}\n', encoding="utf-8")
    with pytest.raises(UserError, match="not a whole gzip file"):
        list(files.read_lines(path))


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b'{"doc_id": "d"', "line 1: not valid JSON"),
        (b"[1, 2]\n", "line 1: a JSON object is wanted, found list"),
        (b'{"doc_id": "\xff"}\n', "not UTF-8"),
        (
            b'{"doc_id": "d", "modality": "text", "title": "t", "titel": "t"}\n',
            "line 1: 'titel' is no field of Document",
        ),
        (b'{"doc_id": "d", "modality": "sound", "title": "t"}\n', "line 1, modality"),
        (b'{"doc_id": "d", "modality": "text"}\n', "line 1, title"),
        (b'\n{"doc_id": "d", "modality": "image", "title": "t"}\n', "line 2, .*no image path"),
    ],
)
def test_a_broken_line_is_refused_with_its_place(tmp_path: Path, content: bytes, complaint: str) -> None:
    path = tmp_path / "documents.jsonl"
    path.write_bytes(content)
    with pytest.raises(UserError, match=complaint):
        files.read_records(path, Document)


def test_a_missing_file_is_refused_with_a_way_out(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist; check the path"):
        files.read_records(tmp_path / "none.jsonl", Document)
    with pytest.raises(UserError, match="does not exist; check the path"):
        files.read_json(tmp_path / "none.json")


@pytest.mark.parametrize("cut", range(1, 6))
def test_a_line_cut_by_a_crash_is_dropped_and_the_file_can_grow_again(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "grown.jsonl"
    files.write_records(path, RECORDS[:1] * 2)
    path.write_bytes(path.read_bytes()[:-cut])
    files.drop_cut_line(path)
    assert files.read_records(path, Document) == RECORDS[:1]
    files.append_record(path, RECORDS[0])
    assert files.read_records(path, Document) == RECORDS[:1] * 2


def test_dropping_a_cut_line_leaves_whole_and_missing_files_alone(tmp_path: Path) -> None:
    path = tmp_path / "whole.jsonl"
    files.write_records(path, RECORDS[:1])
    before = path.read_bytes()
    files.drop_cut_line(path)
    assert path.read_bytes() == before
    files.drop_cut_line(tmp_path / "none.jsonl")
    assert not (tmp_path / "none.jsonl").exists()


def test_a_failed_write_keeps_the_old_file_and_leaves_no_part(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    files.write_records(path, RECORDS[:1])
    before = path.read_bytes()

    def interrupted() -> Iterator[Document]:
        yield RECORDS[0]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        files.write_records(path, interrupted())
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_json_comes_back_and_nan_is_refused_without_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "metrics.json"
    files.write_json(path, {"em": 0.5, "name": "\u00e9"})
    assert files.read_json(path) == {"em": 0.5, "name": "\u00e9"}
    with pytest.raises(ValueError, match="JSON compliant"):
        files.write_json(path, {"em": float("nan")})
    assert files.read_json(path) == {"em": 0.5, "name": "\u00e9"}
    assert list(tmp_path.iterdir()) == [path]


def test_a_cut_json_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text('{"a": ', encoding="utf-8")
    with pytest.raises(UserError, match="not valid JSON"):
        files.read_json(path)


def test_the_digest_changes_with_the_bytes_only(tmp_path: Path) -> None:
    first, second, third = (tmp_path / name for name in "abc")
    for path, text in ((first, "x"), (second, "x"), (third, "y")):
        files.write_text(path, text)
    assert files.sha256(first) == files.sha256(second) != files.sha256(third)


def test_a_path_inside_its_folder_is_resolved(tmp_path: Path) -> None:
    assert files.within(tmp_path, "images/./a.png") == tmp_path.resolve() / "images" / "a.png"
    assert files.within(tmp_path, "images/../a.png") == tmp_path.resolve() / "a.png"


@pytest.mark.parametrize("relative", ["../a.png", "images/../../a.png", "/etc/hostname", "link/a.png"])
def test_a_path_that_leaves_its_folder_is_refused(tmp_path: Path, relative: str) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / "link").symlink_to(tmp_path)
    with pytest.raises(UserError, match="leaves the data folder"):
        files.within(root, relative)


def test_an_absolute_path_is_refused_even_inside_its_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="leaves the data folder"):
        files.within(tmp_path, str(tmp_path / "a.png"))


def test_a_byte_that_is_no_text_is_named_by_its_line_and_a_mark_of_order_is_none(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n{"a": 2}\n{"a": "caf\xe9"}\n')
    lines = files.read_json_lines(path)
    assert [next(lines), next(lines)] == [(1, {"a": 1}), (2, {"a": 2})]
    with pytest.raises(UserError, match=r"rows.jsonl, line 3: not UTF-8 text"):
        next(lines)


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity"])
def test_what_is_no_json_number_is_refused(tmp_path: Path, value: str) -> None:
    (tmp_path / "rows.jsonl").write_text(f'{{"id": {value}}}\n', encoding="utf-8")
    with pytest.raises(UserError, match=f"line 1: not valid JSON .{value} is no JSON number"):
        list(files.read_json_lines(tmp_path / "rows.jsonl"))
