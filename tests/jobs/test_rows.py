"""Rows of a job, from files near and far. Nothing is decoded here."""

import contextlib
import dataclasses
import gzip
import io
import os

import fsspec
import pytest
from fsspec.registry import known_implementations

from specjax.jobs.inventory import take_inventory
from specjax.jobs.settings import Job, Sampling, Settings

TWO = '\ufeff{"prompt": "a\u2028", "id": "x"}\r\n{"prompt": "b", "sampling": {"max_tokens": 3}}\n'.encode()
"""With a byte order mark, an end of line of Windows, and one of Unicode that is none."""


def settings_of(path):
    return Settings(job=Job(input=str(path), output_dir="out", on_error="skip"), sampling=Sampling(max_new_tokens=8))


def take(path):
    return take_inventory(settings_of(path))


def test_rows_may_be_far_away_and_compressed(tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(TWO)
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(TWO))
    with fsspec.open("memory://bucket/rows.jsonl", "wb") as file:
        file.write(TWO)
    near = take(tmp_path / "rows.jsonl").rows
    assert [*near] == ["x", 1]
    assert take(tmp_path / "rows.jsonl.gz").rows == take("memory://bucket/rows.jsonl").rows == near


def test_rows_of_every_format_have_the_ids_of_their_format(tmp_path):
    path = tmp_path / "rows.jsonl"
    talk = b'{"messages": [{"role": "user", "content": "b"}]}'
    openai = b'{"custom_id": "b", "method": "POST", "url": "/v1/chat/completions", "body": ' + talk + b"}"
    spec_bench = b'{"question_id": 81, "category": "writing", "turns": ["c", "d"]}'
    path.write_bytes(b"\n".join([b'{"id": "a", "prompt": "a", "topic": 1}', openai, spec_bench, talk]))
    inventory = take(path)
    assert (inventory.faults, [*inventory.rows]) == ((), ["a", "b", 81, 3])
    rows = inventory.reread(settings_of(path), {3, 4})
    assert [row.prompt.content for row in rows] == ["c", [{"role": "user", "content": "b"}]]


def test_a_row_that_samples_is_noticed(tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(TWO)
    assert not take(tmp_path / "rows.jsonl").samples
    (tmp_path / "rows.jsonl").write_bytes(TWO + b'{"prompt": "c", "sampling": {"temperature": 0.5}}')
    assert take(tmp_path / "rows.jsonl").samples


@pytest.mark.parametrize(
    ("told", "row"),
    [
        (Sampling(temperature=1.0, top_p=0.9, top_k=5), b'{"prompt": "x", "sampling": {"temperature": 0}}'),
        (Sampling(), b'{"url": "/v1/completions", "body": {"prompt": "x", "temperature": 0, "top_p": 0.9}}'),
        (Sampling(min_tokens=2), b'{"prompt": "x", "sampling": {"stop": "y"}}'),
    ],
)
def test_what_the_command_line_may_not_hold_together_a_row_may(tmp_path, told, row):
    (tmp_path / "rows.jsonl").write_bytes(row)
    settings = dataclasses.replace(settings_of(tmp_path / "rows.jsonl"), sampling=told)
    assert (len(take_inventory(settings).rows), take_inventory(settings).samples) == (1, False)


@pytest.mark.parametrize("line", [b'{"prompt": "c", "id": "x"}', b"{"])
def test_a_file_that_changes_while_a_job_runs_stops_it(tmp_path, line):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(TWO)
    inventory = take(path)
    assert [row.prompt.content for row in inventory.reread(settings_of(path), {1, 2})] == ["a\u2028", "b"]
    path.write_bytes(line + TWO[TWO.index(b"\n") :])
    with pytest.raises(ValueError, match=r"expected line 1 of .*rows\.jsonl to be what it was"):
        list(inventory.reread(settings_of(path), {1, 2}))
    assert [row.line for row in inventory.reread(settings_of(path), {2})] == [2]
    path.write_bytes(TWO[: TWO.index(b"\n") + 1])
    with pytest.raises(ValueError, match=r"expected .*rows\.jsonl to hold the 2 rows still .* got 1"):
        list(inventory.reread(settings_of(path), {1, 2}))


def test_a_file_far_away_is_read_in_large_pieces(monkeypatch):
    class Far(io.RawIOBase):
        data, num_reads = io.BytesIO(b'{"prompt": "a"}\n' * 1000), 0

        def readable(self):
            return True

        def readinto(self, buffer):
            self.num_reads += 1
            return self.data.readinto(buffer)

    far = Far()
    monkeypatch.setattr(fsspec, "open", lambda *_, **__: contextlib.nullcontext(far))
    assert len(take("far://rows.jsonl").rows) == 1000
    assert far.num_reads <= 2


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
    writer = os.open(tmp_path / "pipe", os.O_RDWR)  # without one, opening it to read would wait for ever
    with pytest.raises(OSError, match="which can be read twice, got the pipe"):
        take(tmp_path / "pipe")
    os.close(writer)


@pytest.mark.parametrize(
    ("line", "error"),
    [
        (b'{"prompt": "x"', "expected JSON, got a fault at column 15: Expecting"),
        (b'["x"]', "expected an object"),
        (b"", "expected JSON, got an empty line"),
        (b'{"prompt": "\xff"}', "utf-8"),
        (b'{"prompt": "x", "id": "row 1"}', "got 'row 1' again (line 2 has it)"),
        (b'{"prompt": "x", "id": 1.5}', "'id' to be a string or an integer, got 1.5"),
        (b'{"prompt": "x", "id": "\\ud800"}', "surrogates not allowed"),
        (b'{"prompt": "x", "temperature": 1}', "expected 'temperature' inside 'sampling'"),
        (b'{"prompt": "x", "sampling": [1]}', "expected 'sampling' to be an object, got list"),
        (b'{"prompt": "x", "sampling": {"heat": 1}}', "got 'heat'"),
        (b'{"prompt": "x", "sampling": {"temperature": "hot"}}', "expected temperature of type float, got 'hot'"),
        (b'{"prompt": "x", "sampling": {"temperature": -1}}', "expected temperature in [0, inf]"),
        (b'{"prompt": "x", "sampling": {"temperature": 1, "top_k": 3000000000}}', "expected top_k in [0, 2147483647]"),
        (b'{"prompt": "x", "sampling": {"seed": true}}', "expected seed of type int, got True"),
        (b'{"prompt": "x", "sampling": {"stop": [1]}}', "expected stop to be a text or a list of texts"),
        (b'{"prompt": "x", "sampling": {"max_tokens": 9}}', "expected max_tokens of at most 8 (--max-new-tokens"),
        (b'{"custom_id": "x", "body": {"prompt": "x", "n": 2}}', "expected n to be 1, got 2"),
        (b'{"custom_id": "x", "body": {"prompt": "x", "tools": []}}', "got 'tools'"),
        (
            b'{"prompt": "x", "custom_id": "a"}',
            "expected no 'custom_id' beside the prompt, got one: here it is called 'id'",
        ),
        (
            b'{"prompt": "x", "sampling_params": {}}',
            "expected no 'sampling_params' beside the prompt, got one: here it is called 'sampling'",
        ),
        (b'{"prompt": ""}', "expected some text, got an empty one"),
        (b'{"prompt": "x", "stop_token_ids": [5]}', "expected no 'stop_token_ids', which is not supported"),
        (b'{"prompt": "x", "n": 2, "logprobs": 5}', "expected no 'logprobs', which is not supported"),
        (b'{"prompt": "x", "sampling": {"logit_bias": {}}}', "got 'logit_bias'"),
        (
            b'{"custom_id": "x", "url": "/v1/embeddings", "body": {"prompt": "x"}}',
            "expected a 'url' of /v1/chat/completions with 'messages' in its body or /v1/completions with 'prompt' in "
            "its body, got '/v1/embeddings' with 'prompt'",
        ),
        (
            b'{"custom_id": "x", "url": "/v1/chat/completions", "body": {"prompt": "x"}}',
            "got '/v1/chat/completions' with 'prompt'",
        ),
        (b'{"custom_id": "x", "url": ["/v1/completions"], "body": {"prompt": "x"}}', "expected a 'url' of "),
        (b'{"prompt": "x", "sampling": {"max_tokens": 1, "max_new_tokens": 2}}', "one value of max_new_tokens"),
        (b'{"body": {"prompt": "x"}, "id": "a"}', "expected no 'id' beside 'body'"),
        (b'{"body": {"prompt": "x"}, "sampling": {}}', "expected no 'sampling' beside 'body'"),
        (b'{"custom_id": "x", "body": "x"}', "'body' is an object"),
        (b'{"custom_id": "x", "method": "GET", "body": {}}', "expected a POST request"),
    ],
)
def test_lines_that_are_no_rows(tmp_path, line, error):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"prompt": "a", "id": "row 0"}\n{"prompt": "b", "id": "row 1"}\n' + line + b"\n")
    (fault,) = take(path).faults
    assert fault.line == 3
    assert error in fault.error
