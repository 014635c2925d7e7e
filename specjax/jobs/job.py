"""A batch job: every row of a file completed once, whatever happens in between."""

import contextlib
import dataclasses
import itertools
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from specjax.io.files import read_json
from specjax.io.text import TextStream
from specjax.jobs.batching import Request, SlotBatch
from specjax.jobs.completion import Completion
from specjax.jobs.decoder import Decoder, build_decoder
from specjax.jobs.inventory import Inventory, Ledger, read_ledger, refuse, settle_pace, take_inventory
from specjax.jobs.manifest import NAME, build_manifest, check_manifest
from specjax.jobs.parts import PartWriter
from specjax.jobs.progress import JobProgress
from specjax.jobs.prompts import encode_prompts
from specjax.jobs.results import part_record, write_results
from specjax.jobs.rows import Fault, Row, read_rows
from specjax.jobs.settings import Settings

READ_AHEAD = 1024
"""Rows that are encoded and sorted by length at a time."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a job ended."""

    done: int
    """Rows completed in all."""
    total: int
    signal: str | None = None
    """What stopped it early."""
    summary: Mapping[str, Any] | None = None
    """Of all rows, once they are complete."""


def run_job(settings: Settings, console: Console, *, clock: Callable[[], float] = time.perf_counter) -> Outcome:
    """Goes on with a job from wherever it is, until its rows are complete or SIGTERM or SIGINT comes.

    Args:
      settings: with a `job`.
      console: for progress and warnings.
      clock: seconds.

    Raises:
      ValueError: rows, settings or models that are wrong or have changed.
      OSError: a file cannot be read or written; what was completed before is kept.
    """
    job, directory = settings.job, Path(str(settings.job.output_dir))
    with caught_signals() as signals:
        inventory = take_inventory(settings)
        for fault in inventory.faults:
            _warn(console, f"skipped: line {fault.line}: {fault.error}")
        if not job.merge:
            directory.mkdir(parents=True, exist_ok=True)
            _complete(settle_pace(settings, inventory), directory, inventory, console, signals, clock)
        ledger = read_ledger(directory, inventory, job.process_index)
        if signals or (job.process_count > 1 and not job.merge):
            return Outcome(done=len(ledger.places), total=len(inventory.rows), signal=next(iter(signals), None))
        return _merge(directory, inventory, ledger)


def _complete(
    settings: Settings,
    directory: Path,
    inventory: Inventory,
    console: Console,
    signals: list[str],
    clock: Callable[[], float],
) -> None:
    """Completes what this process has to complete, unless a signal comes."""
    with PartWriter(directory, settings.job.process_index) as writer:
        for difference in check_manifest(directory, build_manifest(settings)):
            _warn(console, f"warning: {difference}: tokens may differ by rounding")
        ledger = read_ledger(directory, inventory, settings.job.process_index)
        run = _Run(settings, inventory, ledger, writer, signals)
        if run.missing() and not signals:
            run.go(console, clock)


class _Run:
    """One start of one process of a job."""

    def __init__(
        self, settings: Settings, inventory: Inventory, ledger: Ledger, writer: PartWriter, signals: list[str]
    ) -> None:
        self._settings, self._inventory, self._ledger = settings, inventory, ledger
        self._writer, self._signals = writer, signals
        self._stamp = {"process": settings.job.process_index, "run": ledger.runs}
        self._taken: dict[str | int, tuple[str, int]] = {}
        """Digest and truncated tokens of rows that are encoded and not complete."""

    def missing(self) -> int:
        """Rows of this process that are not complete."""
        return sum(self._is_missing(name, line) for name, (line, _) in self._inventory.rows.items())

    def go(self, console: Console, clock: Callable[[], float]) -> None:
        """Completes them, or as many as there is time for."""
        decoder = build_decoder(self._settings)
        slots, began = SlotBatch(decoder, self._settings.batch_size, clock=clock), clock()
        done = self._mine() - self.missing()
        with JobProgress(console, done, self._mine(), clock=clock) as progress:
            for finished in slots.complete(self._requests(decoder, console), lambda: bool(self._signals)):
                self._write(finished, clock() - began - slots.compile_time_s)
                tokens, steps = (
                    sum(int(getattr(row.stats, name)) for row in finished) for name in ("emitted", "steps")
                )
                progress.update(len(finished), tokens, steps)

    def _is_mine(self, line: int) -> bool:
        job = self._settings.job
        return (line - 1) % job.process_count == job.process_index

    def _is_missing(self, name: str | int, line: int) -> bool:
        return self._is_mine(line) and name not in self._ledger.places

    def _mine(self) -> int:
        return sum(self._is_mine(line) for line, _ in self._inventory.rows.values())

    def _requests(self, decoder: Decoder, console: Console) -> Iterator[Request]:
        """What is missing, encoded; of each stretch of rows the longest prompts first, so that buffers grow early."""
        rows = iter(self._missing_rows())
        while chunk := list(itertools.islice(rows, READ_AHEAD)):
            requests = [request for row in chunk if (request := self._request(row, decoder, console)) is not None]
            yield from sorted(requests, key=lambda request: -len(request.prompt.token_ids))

    def _missing_rows(self) -> Iterator[Row]:
        for row in read_rows(str(self._settings.job.input), self._settings):
            if isinstance(row, Row) and self._inventory.holds(row) and self._is_missing(row.prompt.id, row.line):
                yield row

    def _request(self, row: Row, decoder: Decoder, console: Console) -> Request | None:
        try:
            prompt = encode_prompts(decoder.tokenizer, [row.prompt], raw=self._settings.raw_prompt)[0]
            TextStream(decoder.tokenizer, row.sampling.stop)
            surplus = self._surplus(len(prompt.token_ids), row, decoder)
        except ValueError as error:
            self._skip(row, refuse(Fault(line=row.line, error=str(error)), self._settings), console)
            return None
        self._taken[row.prompt.id] = row.digest, surplus
        prompt = dataclasses.replace(prompt, token_ids=prompt.token_ids[surplus:])
        return Request(prompt=prompt, sampling=row.sampling)

    def _surplus(self, num_tokens: int, row: Row, decoder: Decoder) -> int:
        """Tokens that a prompt has to lose."""
        job, new = self._settings.job, row.sampling.max_new_tokens
        most = decoder.config.target.max_positions - self._settings.sampling.max_new_tokens
        most = most if job.max_prompt_tokens is None else min(most, job.max_prompt_tokens)
        if num_tokens > most and (job.long_prompts == "refuse" or most < 1):
            raise ValueError(
                f"expected a prompt of at most {most} tokens beside {new} new ones, got {num_tokens} (--long-prompts "
                "truncate drops its beginning)"
            )
        return max(0, num_tokens - most)

    def _skip(self, row: Row, fault: Fault, console: Console) -> None:
        """Reports a row that cannot be completed, and records it once."""
        _warn(console, f"skipped: line {fault.line}: {fault.error}")
        record = {"id": row.prompt.id, "line": fault.line, "error": fault.error, "digest": row.digest, **self._stamp}
        if self._ledger.errors.get(row.prompt.id, {}).get("error") != fault.error:
            self._writer.append([record])
        self._ledger.errors[row.prompt.id] = record

    def _write(self, finished: Iterable[Completion], elapsed_s: float) -> None:
        records = []
        for completion in finished:
            digest, truncated = self._taken.pop(completion.prompt.id)
            stamp = {"digest": digest, **self._stamp, "elapsed_s": round(elapsed_s, 6)}
            records.append(part_record(completion, truncated) | stamp)
        if records:
            self._writer.append(records)


def _warn(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _merge(directory: Path, inventory: Inventory, ledger: Ledger) -> Outcome:
    """Joins the parts of all processes.

    Raises:
      ValueError: there is no job in the directory, or a row that is neither complete nor recorded as an error.
    """
    manifest = read_json(directory / NAME)
    settled = ledger.places.keys() | ledger.errors.keys()
    missing = [name for name in inventory.rows if name not in settled]
    if missing:
        raise ValueError(
            f"expected every row complete before --merge, got {len(missing)} of {len(inventory.rows)} that are not "
            f"(first id {missing[0]!r}): start the processes that have not ended once more"
        )
    errors = [{"id": name, "line": record["line"], "error": record["error"]} for name, record in ledger.errors.items()]
    errors += [{"id": None, "line": fault.line, "error": fault.error} for fault in inventory.faults]
    summary = write_results(
        directory,
        [ledger.places[name] for name in inventory.rows if name in ledger.places],
        sorted(errors, key=lambda error: error["line"]),
        paced=manifest["settings"]["pace"] == "measured",
    )
    return Outcome(done=len(ledger.places), total=len(inventory.rows), summary=summary)


@contextlib.contextmanager
def caught_signals() -> Iterator[list[str]]:
    """Collects the names of SIGTERM and SIGINT in place of dying of them."""
    names: list[str] = []

    def note(number: int, _: object) -> None:
        names.append(signal.Signals(number).name)

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield names
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
