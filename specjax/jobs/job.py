"""A batch job: every row of a file completed once, whatever happens in between."""

import contextlib
import dataclasses
import datetime
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from specjax.jobs.batching import SlotBatch
from specjax.jobs.completion import Completion
from specjax.jobs.decoder import build_decoder
from specjax.jobs.intake import Intake, Ticket
from specjax.jobs.inventory import Inventory, Ledger, read_ledger, refuse, settle_pace, take_inventory
from specjax.jobs.manifest import (
    begin_manifest,
    build_manifest,
    check_manifest,
    environment,
    finish_manifest,
    lossless_level,
)
from specjax.jobs.parts import PartWriter
from specjax.jobs.progress import JobProgress
from specjax.jobs.results import measured_so_far, part_record, withdraw, write_results
from specjax.jobs.rows import Fault, Row
from specjax.jobs.settings import APART, Settings


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
      ValueError: rows, settings or models that are wrong or have changed, or devices of several processes.
      OSError: a file cannot be read or written; what was completed before is kept.
      KeyboardInterrupt: SIGINT, when a signal had come before; what was completed is kept.
    """
    job, directory = settings.job, Path(str(settings.job.output_dir))
    with caught_signals() as signals, contextlib.ExitStack() as held:
        inventory = take_inventory(settings)
        for fault in inventory.faults:
            _warn_of(fault, console)
        if not job.merge and jax.process_count() > 1:
            raise ValueError(f"expected the devices of one process, got those of {jax.process_count()}: {APART}")
        manifest = build_manifest(settings, samples=inventory.samples)
        if not job.merge:
            directory.mkdir(parents=True, exist_ok=True)
            begin_manifest(directory, manifest)
        begun, differences = check_manifest(directory, manifest)
        if not job.merge:
            for difference in differences:
                _warn(console, f"warning: {difference}: tokens may differ by rounding")
            run = _Run(console, signals, clock, datetime.datetime.fromisoformat(begun["began_at"]))
            writer = held.enter_context(PartWriter(directory, job.process_index))  # held until all is written
            _complete(settings, writer, inventory, run)
        ledger = read_ledger(directory, inventory, job)
        if signals or (job.process_count > 1 and not job.merge):
            return Outcome(done=len(ledger.places), total=len(inventory.rows), signal=next(iter(signals), None))
        return _merge(settings, inventory, ledger, begun)


def _complete(settings: Settings, writer: PartWriter, inventory: Inventory, run: "_Run") -> None:
    """Completes what this process has to complete, unless a signal comes."""
    job, directory = settings.job, Path(str(settings.job.output_dir))
    ledger = read_ledger(directory, inventory, job)
    share = inventory.share(job)
    faults = [Fault(line=line, error=ledger.errors[name]) for name, line in share.items() if name in ledger.errors]
    for fault in faults:
        _warn_of(refuse(fault, settings), run.console)
    settled = ledger.places.keys() | ledger.errors.keys()
    missing = {line for name, line in share.items() if name not in settled}
    if not inventory.rows.keys() <= settled:  # of any process
        withdraw(directory)
    if missing and not run.signals:
        asked, settings = settings.pace, settle_pace(settings, inventory)
        if asked == "measured" and settings.pace != asked:
            _warn(run.console, "warning: rows are sampled, so they always speculate, whatever --pace measured says")
        journal = _Journal(settings, writer, ledger, run.console)
        rows = inventory.reread(settings, missing)
        total = len(share) - len(faults)
        progress = JobProgress(run.console, total - len(missing), total, clock=run.clock)
        _decode(settings, rows, journal, progress, run, ledger.longest)


def _decode(
    settings: Settings,
    rows: Iterator[Row],
    journal: "_Journal",
    progress: JobProgress,
    run: "_Run",
    longest: int,
) -> None:
    decoder = build_decoder(settings, settings.parallel.build())
    tokenizer = dataclasses.replace(decoder.tokenizer, template_time=run.began_at)
    decoder = dataclasses.replace(decoder, tokenizer=tokenizer)

    def skip(row: Row, fault: Fault) -> None:
        journal.skip(row, fault)
        progress.leave_out()

    intake = Intake(settings, decoder, skip)
    slots, began = SlotBatch(decoder, settings.batch_size, longest=longest, clock=run.clock), run.clock()
    with progress:
        for finished in slots.complete(intake.requests(rows), lambda: bool(run.signals)):
            elapsed = run.clock() - began - slots.compile_time_s
            tickets = [intake.tickets.pop(each.prompt.id) for each in finished]
            journal.write(finished, tickets, measured_so_far(slots, elapsed))
            tokens, steps = (sum(int(getattr(each.stats, name)) for each in finished) for name in ("emitted", "steps"))
            progress.update(len(finished), tokens, steps, elapsed)


@dataclasses.dataclass(frozen=True, eq=False)
class _Run:
    """What one start of a job talks to."""

    console: Console
    signals: Sequence[str]
    """Names of the signals that have come."""
    clock: Callable[[], float]
    began_at: datetime.datetime
    """When the first start of the job was: what chat templates take for now, so that a later start asks the same."""


class _Journal:
    """Writes what becomes of rows into the part of a process."""

    def __init__(self, settings: Settings, writer: PartWriter, ledger: Ledger, console: Console) -> None:
        self._settings, self._writer, self._console = settings, writer, console
        self._stamp = {"process": settings.job.process_index, "run": ledger.runs}
        self._start = {"start": environment(settings)}

    def write(self, finished: Sequence[Completion], tickets: Sequence[Ticket], times: Mapping[str, Any]) -> None:
        """Records completed rows, each with what the start has measured so far."""
        records = []
        for completion, ticket in zip(finished, tickets, strict=True):
            stamp = {"digest": ticket.digest, **self._stamp, **times}
            records.append(part_record(completion, ticket.num_truncated_tokens) | stamp | self._start)
            self._start = {}  # the first row's record has it
        if records:
            self._writer.append(records)

    def skip(self, row: Row, fault: Fault) -> None:
        """Reports a row that cannot be completed, and records it.

        Raises:
          ValueError: such rows stop the job.
        """
        _warn_of(refuse(fault, self._settings), self._console)
        why = {"error": fault.error, "long_prompts": self._settings.job.long_prompts}
        self._writer.append([{"id": row.prompt.id, **why, "digest": row.digest, **self._stamp}])


def _warn_of(fault: Fault, console: Console) -> None:
    _warn(console, f"skipped: line {fault.line}: {fault.error}")


def _warn(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _merge(settings: Settings, inventory: Inventory, ledger: Ledger, begun: Mapping[str, Any]) -> Outcome:
    """Joins the parts of all processes.

    Raises:
      ValueError: a row that is neither complete nor recorded as an error, or an error where such rows stop the job.
    """
    for name, error in ledger.errors.items():
        refuse(Fault(line=inventory.rows[name][0], error=error), settings)
    settled = ledger.places.keys() | ledger.errors.keys()
    missing = [name for name in inventory.rows if name not in settled]
    if missing:
        raise ValueError(
            f"expected every row complete before --merge, got {len(missing)} of {len(inventory.rows)} that are not "
            f"(first id {missing[0]!r}): start the processes that have not ended once more"
        )
    errors = [{"id": name, "line": inventory.rows[name][0], "error": error} for name, error in ledger.errors.items()]
    errors += [{"id": None, "line": fault.line, "error": fault.error} for fault in inventory.faults]
    directory = Path(str(settings.job.output_dir))
    finish_manifest(directory, begun, lossless_level(settings, samples=inventory.samples), ledger.starts)
    summary = write_results(
        directory,
        [ledger.places[name] for name in inventory.rows if name in ledger.places],
        sorted(errors, key=lambda error: error["line"]),
        paced=settings.effective_pace == "measured",
    )
    return Outcome(done=len(ledger.places), total=len(inventory.rows), summary=summary)


@contextlib.contextmanager
def caught_signals() -> Iterator[list[str]]:
    """Collects the names of SIGTERM and SIGINT in place of dying of them; a SIGINT after another signal interrupts."""
    names: list[str] = []

    def note(number: int, _: object) -> None:
        names.append(signal.Signals(number).name)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield names
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
