"""A job that is killed over and over. Run by test_job_crash.py in a process of its own:

    python crash_runs.py MODEL INPUT DIRECTORY KILLS TOGETHER SEED [ARGUMENT ...]

Everything is imported once; each start of the job is a fork, made before JAX has started any thread. TOGETHER of them
run at once, in a directory of their own.
"""

import functools
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import generate
import jax

from specjax.jobs import parts, results

NEVER = 2**62
"""Bytes that no part has: the job is left alone."""


def main(model: str, rows: str, directory: str, kills: int, together: int, seed: int, arguments: list[str]) -> None:
    chance, root = random.Random(seed), Path(directory)
    command = ["--model", model, "--input", rows, *arguments]
    assert start([*command, "--output-dir", str(root / "whole"), "--batch-size", "4"], undisturbed, NEVER, 0.0) == 0
    size = written(root / "whole")
    shared = [*command, "--output-dir", str(root / "together"), "--batch-size", "4"]
    report: dict = {"together": sorted(map(ended, [launch(shared, undisturbed) for _ in range(together)]))}
    report |= {"killed": 0, "torn": 0}
    for _ in range(kills - 1):
        before = written(root / "killed")
        goal, delay = before + chance.randrange(size // kills), chance.uniform(0, 0.005)
        if before > 0.8 * size or chance.random() < 0.3:
            goal, delay = 0, chance.uniform(0, 1)  # while it is starting
        batch = ["--batch-size", str(chance.choice([2, 4]))]
        hook = functools.partial(write_in_pieces, random.Random(chance.randrange(2**32)))
        status = start([*command, "--output-dir", str(root / "killed"), *batch], hook, goal, delay)
        report["killed"] += status == signal.SIGKILL
        report["torn"] += not whole(root / "killed")
    if kills:
        last = [*command, "--output-dir", str(root / "killed"), "--batch-size", "4"]
        report["killed"] += start(last, die_at_the_end, NEVER, 0.0) == signal.SIGKILL
        report["left"] = sorted(path.name[:17] for path in (root / "killed").iterdir())
    assert start([*command, "--output-dir", str(root / "killed"), "--batch-size", "4"], undisturbed, NEVER, 0.0) == 0
    print(json.dumps(report))


def start(command: list[str], hook: Callable[[], None], goal: int, delay: float) -> int:
    """Runs a hook and the job in a fork, and kills it a moment after its part has so many bytes.

    Returns the signal or exit status.
    """
    child, directory = launch(command, hook), Path(command[command.index("--output-dir") + 1])
    while written(directory) < goal and os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        time.sleep(0.001)
    if goal < NEVER:
        time.sleep(delay)
        os.kill(child, signal.SIGKILL)
    return ended(child)


def launch(command: list[str], hook: Callable[[], None]) -> int:
    """A process with a hook and the job."""
    child = os.fork()
    if child == 0:
        try:
            hook()
            os._exit(generate.main(command))
        finally:
            os._exit(70)
    return child


def ended(child: int) -> int:
    """Waits for a process; its signal or exit status."""
    return abs(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


def undisturbed() -> None:
    """Nothing happens to the job."""


def write_in_pieces(chance: random.Random) -> None:
    """A disk that takes a few bytes at a time, so that a crash can cut a line anywhere."""
    write = os.write

    def write_some(file: int, data: bytes) -> int:
        time.sleep(0.0005)
        return write(file, data[: chance.randrange(1, 200)])

    parts.os.write = write_some


def die_at_the_end() -> None:
    """`completions.jsonl` is begun, and the job dies."""
    record_of, lines = results.completion_record, []

    def record_or_die(record: Mapping[str, Any], **options: bool) -> dict[str, Any]:
        lines.append(record["id"])
        if len(lines) > 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return record_of(record, **options)

    results.completion_record = record_or_die


def written(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.glob(parts.PATTERN))


def whole(directory: Path) -> bool:
    return all(path.read_bytes()[-1:] in (b"", b"\n") for path in directory.glob(parts.PATTERN))


if __name__ == "__main__":
    assert not jax._src.xla_bridge.backends_are_initialized()
    main(*sys.argv[1:4], *map(int, sys.argv[4:7]), sys.argv[7:])
