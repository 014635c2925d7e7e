"""`python -m specjax.testing`: runs the whole kit, prints what it found, and exits with 1 if anything failed."""

import argparse
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from specjax.io.files import write_whole
from specjax.testing.kit import ROWS, run_mutations, sections
from specjax.testing.report import finding_table, mutation_table, record

WIDTH = 160
"""Columns of the tables where nobody sees them."""


def main(arguments: list[str] | None = None) -> int:
    """Runs the kit; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m specjax.testing", description=__doc__)
    parser.add_argument("--rows", type=_rows, default=ROWS, help="rows of the main experiments (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the samples (default: %(default)s)")
    parser.add_argument("--output", type=Path, help="JSON file for the report, written as the run goes on")
    chosen = parser.parse_args(arguments)
    console = Console() if sys.stdout.isatty() else Console(width=WIDTH)
    findings, caught, start = [], [], time.perf_counter()

    def save(finished: bool = False) -> dict[str, Any]:
        options = {"rows": chosen.rows, "seed": chosen.seed, "seconds": time.perf_counter() - start}
        report = record(findings, caught, finished=finished, **options)
        if chosen.output is not None:
            write_whole(chosen.output, json.dumps(report, indent=2).encode() + b"\n")
        return report

    try:
        save()
    except OSError as error:
        parser.error(f"expected an --output that can be written, got {chosen.output}: {error.strerror}")
    console.print(f"specjax.testing, {chosen.rows:,} rows, seed {chosen.seed}")
    for name, section in sections(chosen.rows, jax.random.key(chosen.seed)).items():
        first = len(findings)
        for finding in section:
            findings.append(finding)
            save()
        console.print(name, finding_table(findings[first:]))
    for mutation in run_mutations():
        caught.append(mutation)
        save()
    console.print("mutations", mutation_table(caught))
    report = save(finished=True)
    console.print(f"{'passed' if report['passed'] else 'FAILED'} in {time.perf_counter() - start:.0f} s")
    return 0 if report["passed"] else 1


def _rows(text: str) -> int:
    """A whole number, 1e7 as well."""
    try:
        rows = float(text)
    except ValueError:
        rows = math.nan
    if not (rows >= 1 and rows.is_integer()):
        raise argparse.ArgumentTypeError(f"expected a whole number of rows, 1 or more, got {text}")
    return int(rows)


if __name__ == "__main__":
    sys.exit(main())
