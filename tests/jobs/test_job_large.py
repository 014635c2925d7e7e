"""A job of 100,000 rows: flat memory, and a start that finds its place at once. By its own command:

python -m pytest -m extended -n 0 -s tests/jobs/test_job_large.py
"""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from small_jobs import write_model

ROOT = Path(__file__).parents[2]
ROWS = 100_000
MOST_GROWTH_MB, MOST_RESUME_S = 200, 10


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    directory = tmp_path_factory.mktemp("large")
    model = write_model(directory / "model", num_layers=1)
    rows = directory / "rows.jsonl"
    with rows.open("w") as file:
        for index in range(ROWS):
            print(
                json.dumps({"id": f"row-{index:06}", "prompt": "abcabc"[: index % 6 + 1] * (index % 3 + 1)}), file=file
            )
    arguments = ["--model", model, "--input", rows, "--output-dir", directory / "out", "--batch-size", 64]
    arguments += ["--max-new-tokens", 4, "--num-speculative-tokens", 2, "--dtype", "float32", "--pace", "always"]
    return [sys.executable, ROOT / "scripts" / "generate.py", *arguments], directory


def start(command, directory):
    """The job in a process of its own, to its end.

    Returns seconds to its first new row and to its end, and its memory in MB each second from then on.
    """
    environment = os.environ | {"SPECJAX_CACHE": str(directory / "cache"), "PYTHONPATH": str(ROOT)}
    part, sizes, times = directory / "out" / "completions-00000.jsonl", [], [time.perf_counter()]
    before = part.stat().st_size if part.exists() else 0
    with subprocess.Popen([str(word) for word in command], env=environment, stderr=subprocess.PIPE) as process:
        while process.poll() is None:
            if part.exists() and part.stat().st_size > before:
                times += [time.perf_counter()][: not sizes]
                sizes.append(resident_mb(process.pid))
            time.sleep(1 if sizes else 0.05)
        assert process.returncode == 0, process.stderr.read().decode() if process.stderr else ""
    began, first = times
    return first - began, time.perf_counter() - began, [size for size in sizes if size]


def resident_mb(process: int) -> float:
    status = Path(f"/proc/{process}/status").read_text()
    found = re.search(r"^VmRSS:\s+(\d+) kB", status, re.MULTILINE)
    return int(found[1]) / 1000 if found else 0.0


@pytest.mark.extended
def test_a_hundred_thousand_rows(command):
    words, directory = command
    _, seconds, sizes = start(words, directory)
    out = directory / "out"
    whole, part = (out / "completions.jsonl").read_bytes(), out / "completions-00000.jsonl"
    assert whole.count(b"\n") == ROWS
    lines = part.read_bytes().splitlines(keepends=True)
    part.write_bytes(b"".join(lines[:-100]))
    again, to_the_end, _ = start(words, directory)
    assert (out / "completions.jsonl").read_bytes() == whole
    growth = max(sizes) - sizes[0]
    print(f"\n{ROWS} rows in {seconds:.0f} s; memory {sizes[0]:.0f} MB at first, {max(sizes):.0f} MB at most")
    print(f"start with 100 rows missing: first new row after {again:.1f} s, all files after {to_the_end:.1f} s")
    assert growth < MOST_GROWTH_MB
    assert again < MOST_RESUME_S
