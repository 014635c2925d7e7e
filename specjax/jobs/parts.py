"""What a job has completed so far: append-only files of JSON lines, one for each process, that survive any crash.

A line counts once it ends with a newline. One that a crash has cut off is dropped, and its row is done again.
"""

import contextlib
import dataclasses
import fcntl
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from specjax.io.files import named, sync_directory

PATTERN = "completions-*.jsonl"
_KEPT = " (what was completed before is kept: the same command goes on from there)"


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Where the record of a row is."""

    path: Path
    offset: int
    digest: str
    """The row's. See `Row.digest`."""


class PartWriter:
    """Appends records to the part of one process: on disk before `append` returns. A context manager."""

    def __init__(self, directory: Path, process_index: int) -> None:
        """Opens the part, makes it this process's own and cuts off a torn last line.

        Raises:
          ValueError: another process has it.
          OSError: it cannot be written.
        """
        self._path = path = directory / f"completions-{process_index:05d}.jsonl"
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._file)
            raise ValueError(
                f"expected {path} for this process alone, got one that another is writing: wait for it, or give each "
                "process its own --process-index"
            ) from error
        os.ftruncate(self._file, whole_length(path))
        os.fsync(self._file)
        sync_directory(directory)

    def __enter__(self) -> "PartWriter":
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._file)

    def append(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Writes records and waits for the disk.

        Raises:
          OSError: the disk is full or gone. What was written of them counts as far as its last newline.
        """
        data = b"".join(map(json_line, records))
        with named(self._path, _KEPT):
            while data:
                data = data[os.write(self._file, data) :]
            os.fsync(self._file)


def json_line(record: Mapping[str, Any]) -> bytes:
    """A record as a line of UTF-8."""
    return json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def whole_length(path: Path) -> int:
    """Bytes of a file up to and including its last newline."""
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        while end > 0:
            start = max(0, end - (1 << 16))
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                return start + newline + 1
            end = start
    return 0


def read_records(directory: Path) -> Iterator[tuple[Place, dict[str, Any]]]:
    """Every record of every part, in the order of writing within each.

    Raises:
      ValueError: a line that is whole and yet no record.
    """
    for path in sorted(directory.glob(PATTERN)):
        with path.open("rb") as file:
            offset = 0
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    break  # cut off by a crash, or being written
                record = _parse(line, path, number)
                yield Place(path, offset, record["digest"]), record
                offset += len(line)


def _parse(line: bytes, path: Path, number: int) -> dict[str, Any]:
    try:
        record = json.loads(line)
        if isinstance(record, dict) and {"id", "digest", "process", "run"} <= record.keys():
            return record
        raise ValueError("not a record of a job")
    except ValueError as error:
        raise ValueError(
            f"expected {path}, line {number} to be a record, got {error}: delete that line to complete its row again"
        ) from error


def read_at(places: Iterable[Place]) -> Iterator[dict[str, Any]]:
    """The records at these places."""
    with contextlib.ExitStack() as stack:
        files: dict[Path, BinaryIO] = {}
        for place in places:
            if place.path not in files:
                files[place.path] = stack.enter_context(place.path.open("rb"))
            with named(place.path, _KEPT):
                files[place.path].seek(place.offset)
                line = files[place.path].readline()
            yield json.loads(line)
