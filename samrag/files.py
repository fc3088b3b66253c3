"""Files of records: JSONL in, JSONL out, nothing half-written.

Whole files are written beside their place and moved over it, so a reader never sees a part. Growing files
(`append_records`) are flushed line by line; a line cut by a crash is dropped when the file is opened again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import hashlib
import json
import os
import shutil
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from samrag.errors import UserError

T = TypeVar("T")


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line number, text) of a plain or gzipped UTF-8 file, without empty lines.

    Raises:
        UserError: the file is missing, not UTF-8, or a truncated or corrupt gzip.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path} does not exist; check the path, or run the stage that writes it first.")
    opener = gzip.open if path.suffix == ".gz" else open
    number = 0
    try:
        with opener(path, "rb") as handle:  # type: ignore[operator]
            for number, raw in enumerate(handle, 1):
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
                if line.strip():
                    yield number, line
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(
            f"{path} is not a whole gzip file (after line {number}: {error}); download it again."
        ) from error
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path}, line {number}: not UTF-8 text ({error.reason}); convert the file to UTF-8."
        ) from error


def _not_json(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def read_json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number, object) of a JSONL file; a line that is not a JSON object is a `UserError`."""
    for number, line in read_lines(path):
        try:
            value = json.loads(line, parse_constant=_not_json)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path}, line {number}: not valid JSON ({error}); mend or remove the line.") from error
        if not isinstance(value, dict):
            raise UserError(f"{path}, line {number}: a JSON object is wanted, found {type(value).__name__}.")
        yield number, value


def read_records(path: Path, record: type[T], allow_empty: bool = False) -> list[T]:
    """Read a JSONL file of one record type; every line is checked against the type.

    Raises:
        UserError: the file is missing, empty (unless allowed), or a line is not such a record.
    """
    adapter = TypeAdapter(record)
    records = []
    for number, value in read_json_lines(path):
        unknown = set(value) - {f.name for f in dataclasses.fields(record)}  # type: ignore[arg-type]
        if unknown:
            raise UserError(f"{path}, line {number}: {sorted(unknown)[0]!r} is no field of {record.__name__}.")
        try:
            records.append(adapter.validate_python(value))
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise UserError(f"{path}, line {number}, {where or record.__name__}: {first['msg']}.") from error
    if not records and not allow_empty:
        raise UserError(f"{path} is empty; run the stage that writes it again, and look at what it said.")
    return records


def dump_record(record: Any) -> str:
    """One JSON line of a record, without its newline; equal records give equal bytes."""
    return json.dumps(dataclasses.asdict(record), ensure_ascii=False, allow_nan=False)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a temporary path beside `path`; move it over `path` when the block ends without an error."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    os.close(descriptor)
    temporary = Path(name)
    try:
        yield temporary
        with temporary.open("rb") as handle:
            os.fsync(handle.fileno())
        temporary.chmod(0o644)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
    """Give an empty folder beside `path`; put it in the place of `path` when the block ends without an error."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part"))
    try:
        yield temporary
        temporary.chmod(0o755)
        if path.exists():
            shutil.rmtree(path)
        temporary.rename(path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    """Write a whole text file atomically."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Write a whole JSON file atomically; NaN is refused."""
    write_text(path, json.dumps(value, ensure_ascii=False, indent=2, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    """Read a JSON file; a missing or broken one is a `UserError`."""
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path} does not exist; check the path, or run the stage that writes it first.")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid JSON ({error}); it may be cut off: write it again.") from error


def write_records(path: Path, records: Iterable[Any]) -> int:
    """Write a whole JSONL file atomically; returns the number of lines."""
    count = 0
    with replacing(path) as temporary, temporary.open("w", encoding="utf-8") as handle:
        for record in records:
            handle.write(dump_record(record) + "\n")
            count += 1
    return count


def drop_cut_line(path: Path) -> None:
    """Cut off a last line without its newline: what a crash left of a record that was never finished."""
    path = Path(path)
    if not path.exists():
        return
    with path.open("rb+") as handle:
        data = handle.read()
        if data and not data.endswith(b"\n"):
            handle.truncate(data.rfind(b"\n") + 1)


def append_record(path: Path, record: Any) -> None:
    """Append one line in a single write that reaches the disk."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as handle:
        handle.write(dump_record(record) + "\n")
        handle.flush()
        os.fsync(handle.fileno())


def sha256(path: Path) -> str:
    """Hex digest of a file's bytes."""
    with Path(path).open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def within(root: Path, relative: str) -> Path:
    """Resolve a data-set path that may not leave its folder.

    Raises:
        UserError: the path is absolute, climbs out of `root`, or follows a link out of it.
    """
    base = Path(root).resolve()
    path = (base / relative).resolve()
    if Path(relative).is_absolute() or not path.is_relative_to(base):
        raise UserError(f"the path {relative!r} leaves the data folder {root}; only files inside it may be named.")
    return path
