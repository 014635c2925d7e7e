"""Rows of a job, from files near and far. Nothing is decoded here."""

import gzip
import os

import fsspec
import pytest
from fsspec.registry import known_implementations

from specjax.jobs.inventory import take_inventory
from specjax.jobs.settings import Job, Sampling, Settings

TWO = b'{"prompt": "a", "id": "x"}\n{"prompt": "b", "sampling": {"max_tokens": 3}}\n'


def take(path, **options):
    job = Job(input=str(path), output_dir="out", on_error="skip")
    return take_inventory(Settings(job=job, sampling=Sampling(max_new_tokens=8, **options)))


def test_rows_may_be_far_away_and_compressed(tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(TWO)
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(TWO))
    with fsspec.open("memory://bucket/rows.jsonl", "wb") as file:
        file.write(TWO)
    near = take(tmp_path / "rows.jsonl").rows
    assert [*near] == ["x", 1]
    assert take(tmp_path / "rows.jsonl.gz").rows == take("memory://bucket/rows.jsonl").rows == near


def test_what_cannot_be_read_is_said_in_one_line(monkeypatch, tmp_path):
    monkeypatch.setitem(known_implementations, "gone", {"class": "gone.FS", "err": "Please install it"})
    with pytest.raises(OSError, match=r"that can be read, got gone://rows\.jsonl: Please install it"):
        take("gone://rows.jsonl")
    with pytest.raises(OSError, match=r"got nosuch://rows\.jsonl: Protocol not known: nosuch"):
        take("nosuch://rows.jsonl")
    with pytest.raises(FileNotFoundError, match=r"missing\.jsonl"):
        take(tmp_path / "missing.jsonl")
    (tmp_path / "torn.gz").write_bytes(gzip.compress(TWO)[:-9])
    with pytest.raises(OSError, match=r"torn\.gz: Compressed file ended"):
        take(tmp_path / "torn.gz")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="which can be read twice, got the pipe"):
        take(tmp_path / "pipe")
