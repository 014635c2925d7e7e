"""Files that survive a crash."""

import contextlib
import errno
import json
import os
import re
from pathlib import Path

import pytest

from specjax.io import files
from specjax.io.files import check_writable, whole_file, write_whole
from specjax.jobs import parts
from specjax.jobs.parts import PartWriter, json_line, read_at, read_records, whole_length

RECORD = {"id": "é", "digest": "0", "process": 0, "run": 0}


@pytest.mark.parametrize(
    ("data", "length"),
    [
        (b"", 0),
        (b"abc", 0),
        (b"abc\n", 4),
        (b"abc\nde", 4),
        (b"\n" + b"x" * 200_000, 1),
        (b"x" * 200_000, 0),
        (b"ab\n" * 50_000 + b"x", 150_000),
    ],
)
def test_what_counts_of_a_file(tmp_path, data, length):
    path = tmp_path / "part"
    path.write_bytes(data)
    assert whole_length(path) == length


def test_a_part_goes_on_behind_its_last_whole_line(tmp_path):
    with PartWriter(tmp_path, 3) as writer:
        writer.append([RECORD, RECORD | {"id": 2}])
    path = tmp_path / "completions-00003.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"id": 3, "te')
    assert [record["id"] for _, record in read_records(tmp_path)] == ["é", 2]
    with PartWriter(tmp_path, 3) as writer:
        assert path.read_bytes() == whole
        writer.append([RECORD | {"id": 4}])
    assert [json.loads(line)["id"] for line in path.read_text(encoding="utf-8").splitlines()] == ["é", 2, 4]


@pytest.mark.parametrize("call", ["write", "fsync"])
def test_a_disk_that_fails_is_named_with_what_to_do(tmp_path, monkeypatch, call):
    says = r"No space left \(.*the same command goes on from there\): '.*completions-00000\.jsonl'"

    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left")

    with PartWriter(tmp_path, 0) as writer:
        writer.append([RECORD])
        monkeypatch.setattr(parts.os, call, fail)
        with pytest.raises(OSError, match=says) as raised:
            writer.append([RECORD])
        monkeypatch.undo()
    assert raised.value.errno == errno.ENOSPC
    assert next(read_records(tmp_path))[1] == RECORD


def test_records_are_found_again_where_they_are(tmp_path):
    for process in (0, 1):
        with PartWriter(tmp_path, process) as writer:
            writer.append([RECORD | {"id": f"{process} {index}", "text": "é" * index} for index in range(5)])
    found = list(read_records(tmp_path))
    places = [place for place, _ in found][::-1]
    assert list(read_at(places)) == [record for _, record in found][::-1]


def test_a_file_is_whole_or_not_there(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def write():
        with whole_file(path) as file:
            file.write(b"new\n")
            file.flush()
            assert path.read_bytes() == b"old"
            raise OSError(errno.ENOSPC, "disk full")

    with pytest.raises(OSError, match=r"disk full: .*file"):
        write()
    assert [file.name for file in tmp_path.iterdir()] == ["file"]
    assert path.read_bytes() == b"old"
    write_whole(path, b"new\n")
    assert path.read_bytes() == b"new\n"


def test_a_link_and_a_device_are_written_to_as_they_are(tmp_path):
    (link := tmp_path / "link").symlink_to(tmp_path / "far")
    write_whole(link, b"text")
    write_whole(Path(os.devnull), b"text")
    assert link.is_symlink()
    assert (tmp_path / "far").read_bytes() == b"text"


def test_where_nothing_can_be_written(tmp_path):
    check_writable(tmp_path / "new")
    assert not list(tmp_path.iterdir())
    check_writable(Path(os.devnull))
    for path in (tmp_path, tmp_path / "none" / "new"):
        with pytest.raises(OSError, match=re.escape(str(path))):
            check_writable(path)


def test_a_line_that_is_being_written_is_no_line_yet(tmp_path, monkeypatch):
    """Half of an append is there when the end of the file is reached, the rest when it is looked at again."""
    line = json_line(RECORD)
    (tmp_path / "completions-00000.jsonl").write_bytes(line)
    seen = contextlib.nullcontext([line, line[:5], line[5:]])
    monkeypatch.setattr(Path, "open", lambda *_: seen)
    assert [place.offset for place, _ in read_records(tmp_path)] == [0]


def test_a_file_that_is_there_stays_where_asked(tmp_path, monkeypatch):
    path = tmp_path / "file"
    for content in (b"first", b"second"):
        write_whole(path, content, replace=False)
        assert path.read_bytes() == b"first"

    def no_links(*_):
        raise PermissionError

    monkeypatch.setattr(files.os, "link", no_links)
    write_whole(tmp_path / "other", b"first", replace=False)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == {"file": b"first", "other": b"first"}


def test_lines_are_utf8():
    assert json_line({"text": "é\n\u2028"}) == '{"text":"é\\n\u2028"}\n'.encode()
