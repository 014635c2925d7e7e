"""What a job has to do and what it has done: the rows of its input against the records of its parts."""

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from specjax.jobs.parts import Place, read_records
from specjax.jobs.rows import Fault, Row, read_rows
from specjax.jobs.settings import Job, Settings
from specjax.verify import ExactMatch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inventory:
    """Every row of the input, in its order, without its text."""

    rows: Mapping[str | int, tuple[int, str]]
    """Line and digest by id."""
    faults: tuple[Fault, ...]
    """Lines that are no rows."""
    samples: bool
    """Whether any row has a temperature above 0."""

    def share(self, job: Job) -> dict[str | int, int]:
        """Lines by id of the rows that a process takes, whatever has become of them."""
        lines = {name: line for name, (line, _) in self.rows.items()}
        return {name: line for name, line in lines.items() if (line - 1) % job.process_count == job.process_index}

    def reread(self, settings: Settings, lines: Collection[int]) -> Iterator[Row]:
        """The rows of these lines once more, with their texts.

        Raises:
          ValueError: one of them is another by now, or gone.
        """
        found = 0
        for row in read_rows(str(settings.job.input), settings, lines):
            if isinstance(row, Fault) or self.rows.get(row.prompt.id) != (row.line, row.digest):
                raise ValueError(
                    f"expected line {row.line} of {settings.job.input} to be what it was when this start began, got "
                    "another: do not change the file while a job runs, and start it again"
                )
            found += 1
            yield row
        if found < len(lines):
            raise ValueError(
                f"expected {settings.job.input} to hold the {len(lines):,} rows still that it held when this start "
                f"began, got {found:,}: do not change the file while a job runs, and start it again"
            )


@dataclasses.dataclass(kw_only=True)
class Ledger:
    """What is in the parts."""

    places: dict[str | int, Place]
    """Of completed rows."""
    errors: dict[str | int, str]
    """Why rows could not be completed, and would not be now either."""
    starts: list[dict[str, Any]]
    """Process, number and environment of each start that has completed any row."""
    runs: int
    """Starts of this process that have written anything."""
    longest: int = 1
    """Tokens of the longest prompt that this process has completed."""


def take_inventory(settings: Settings) -> Inventory:
    """Reads the whole input once, so that nothing is decoded if a line is wrong.

    Raises:
      ValueError: nothing in it; or, unless such lines are to be skipped, a line that is no row or repeats an id.
      OSError: the file cannot be read.
    """
    path, rows, faults, samples = str(settings.job.input), {}, [], False
    for row in read_rows(path, settings):
        if isinstance(row, Row) and row.prompt.id in rows:
            error = f"expected an id of its own, got {row.prompt.id!r} again (line {rows[row.prompt.id][0]} has it)"
            row = Fault(line=row.line, error=error)
        if isinstance(row, Fault):
            faults.append(refuse(row, settings))
        else:
            rows[row.prompt.id] = row.line, row.digest
            samples |= row.sampling.temperature > 0
    if not rows:
        raise ValueError(f"expected at least one row in {path}, got none")
    return Inventory(rows=rows, faults=tuple(faults), samples=samples)


def refuse(fault: Fault, settings: Settings) -> Fault:
    """The fault, if such are to be skipped.

    Raises:
      ValueError: they stop the job.
    """
    if settings.job.on_error == "stop":
        raise ValueError(f"{settings.job.input}, line {fault.line}: {fault.error} (--on-error skip goes on without it)")
    return fault


def read_ledger(directory: Path, inventory: Inventory, job: Job) -> Ledger:
    """Reads all parts.

    Raises:
      ValueError: a part that is damaged, or a completed row that the input does not hold like that any more.
    """
    ledger = Ledger(places={}, errors={}, starts=[], runs=0)
    for place, record in read_records(directory):
        name = record["id"]
        if record["process"] == job.process_index:
            ledger.runs = max(ledger.runs, record["run"] + 1)
        if "start" in record:
            ledger.starts.append({"process": record["process"], "run": record["run"], **record["start"]})
        if "error" not in record:
            _check_known(name, place, inventory)
            ledger.places.setdefault(name, place)
            if record["process"] == job.process_index:
                ledger.longest = max(ledger.longest, record["num_prompt_tokens"])
        elif _stands(record, inventory, job):
            ledger.errors[name] = record["error"]
    ledger.errors = {name: error for name, error in ledger.errors.items() if name not in ledger.places}
    return ledger


def _stands(record: Mapping[str, Any], inventory: Inventory, job: Job) -> bool:
    """Whether an error still holds: or else its row was mended or taken out, or long prompts are treated otherwise."""
    _, digest = inventory.rows.get(record["id"], (0, None))
    return (digest, job.long_prompts) == (record["digest"], record.get("long_prompts"))


def _check_known(name: str | int, place: Place, inventory: Inventory) -> None:
    if name not in inventory.rows:
        raise ValueError(
            f"expected every row of {place.path} in the input, got none with id {name!r} there: put it back, or choose "
            "another --output-dir"
        )
    if inventory.rows[name][1] != place.digest:
        raise ValueError(
            f"expected id {name!r} to be the row that {place.path} has completed, got another prompt or parameters: "
            "give rows an 'id' (without one it is their place in the file), or choose another --output-dir"
        )


def settle_pace(settings: Settings, inventory: Inventory) -> Settings:
    """The settings with a pace on which no token depends: always, if the verifier lets it show in rows that sample."""
    shows = inventory.samples and not isinstance(settings.verifier, ExactMatch)
    return dataclasses.replace(settings, pace="always") if shows and settings.effective_pace == "measured" else settings
