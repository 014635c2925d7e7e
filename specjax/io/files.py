"""Files: small ones from places that are not trusted, and those that are there as a whole or not at all."""

import contextlib
import errno
import json
import math
import os
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

MAX_JSON_BYTES = 1 << 26
"""64 MiB: ten times the largest shard index or tokenizer in public use."""


def read_json(path: Path) -> Mapping[str, Any]:
    """Reads a JSON object.

    Args:
      path: the file.

    Returns:
      The object, every number in it finite.

    Raises:
      ValueError: no such file, not a JSON object, too large, too deep, or with NaN or infinite numbers in it.
    """
    if not path.is_file():
        raise ValueError(f"expected the file {path}, got none")
    if path.stat().st_size > MAX_JSON_BYTES:
        raise ValueError(f"expected {path} to hold at most {MAX_JSON_BYTES} bytes, got a larger file")
    try:
        content = json.loads(path.read_bytes(), parse_float=_finite, parse_constant=_finite)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"expected {path} to be JSON with finite numbers, got a damaged file: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"expected {path} to hold a JSON object, got {type(content).__name__}")
    return content


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text}")
    return value


def check_writable(path: Path) -> None:
    """Tries a place for a file before anything is computed for it.

    Raises:
      OSError: nothing can be written there.
    """
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, "expected a file's path, got a directory's", str(path))
    if path.exists() and not path.is_file():  # a device or a pipe
        return
    try:
        with tempfile.TemporaryFile(dir=path.resolve().parent):
            return
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


@contextlib.contextmanager
def whole_file(path: Path, *, replace: bool = True) -> Iterator[BinaryIO]:
    """A file to write that is there, once the block has ended, either as a whole or not at all.

    Args:
      path: the file. A link, a device or a pipe is written to as it is.
      replace: what is there already makes room; otherwise it stays, whoever wrote it and when.
    """
    if path.is_symlink() or (path.exists() and not path.is_file()):
        with named(path), path.open("wb") as file:
            yield file
        return
    scratch = path.with_name(f".{path.name}-{uuid.uuid4().hex}")  # hosts may share process ids
    try:
        with named(path), scratch.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        (os.replace if replace else _place)(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)
    sync_directory(path.parent)


def write_whole(path: Path, data: bytes, *, replace: bool = True) -> None:
    """Writes a `whole_file`."""
    with whole_file(path, replace=replace) as file:
        file.write(data)


def _place(scratch: Path, path: Path) -> None:
    """Gives a file its name unless that is taken. Not every mounted file system has links."""
    try:
        os.link(scratch, path)
    except FileExistsError:
        return
    except OSError:
        os.replace(scratch, path)


def sync_directory(directory: Path) -> None:
    """Makes new names in a directory survive a crash of the machine."""
    handle = os.open(directory, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


@contextlib.contextmanager
def named(path: Path, hint: str = "") -> Iterator[None]:
    """Names the file that a disk has failed on; `hint` says what to do."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, f"{error.strerror}{hint}", str(path)) from error
