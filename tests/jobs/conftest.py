"""A batch job in this process: what starts it, and its files."""

import json

import pytest
from rich.console import Console
from small_jobs import NEW, write_model

from specjax.jobs.job import run_job
from specjax.jobs.options import parse_options


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_model(tmp_path_factory.mktemp("target"), num_layers=1))


@pytest.fixture
def start(model, tmp_path):
    """Runs a job on `rows` (a list, or None for what is there) in a directory under tmp_path."""

    def call(rows, *options, directory="out", batch_size=3, pace="always"):
        path = tmp_path / "rows.jsonl"
        if rows is not None:
            lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
            path.write_bytes(b"\n".join(lines) + b"\n")
        arguments = ["--model", model, "--input", path, "--output-dir", tmp_path / directory]
        arguments += ["--batch-size", batch_size, "--max-new-tokens", NEW, "--set", f"pace={pace}", *options]
        settings = parse_options(list(map(str, arguments)))
        with open(tmp_path / "shown", "w") as shown:
            return run_job(settings, Console(file=shown, width=200))

    return call


@pytest.fixture
def files(tmp_path):
    """A file of a job's directory: its JSON lines, or its bytes."""

    def read(name="completions.jsonl", directory="out", *, raw=False):
        data = (tmp_path / directory / name).read_bytes()
        return data if raw else [json.loads(line) for line in data.splitlines()]

    return read
