"""`python -m specjax.testing`: runs the whole kit, prints what it found, and exits with 1 if anything failed."""

import argparse
import json
import sys
import time
from pathlib import Path

import jax
from rich.console import Console

from specjax.testing.kit import ROWS, run_mutations, sections
from specjax.testing.report import finding_table, mutation_table, record

WIDTH = 160
"""Columns of the tables where nobody sees them."""


def main(arguments: list[str] | None = None) -> int:
    """Runs the kit; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m specjax.testing", description=__doc__)
    parser.add_argument("--rows", type=float, default=ROWS, help="rows of the main experiments (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the samples (default: %(default)s)")
    parser.add_argument("--output", type=Path, help="JSON file for the report")
    chosen = parser.parse_args(arguments)
    console = Console() if sys.stdout.isatty() else Console(width=WIDTH)
    findings, start = [], time.perf_counter()
    console.print(f"specjax.testing, {chosen.rows:,.0f} rows, seed {chosen.seed}")
    for name, section in sections(int(chosen.rows), jax.random.key(chosen.seed)).items():
        found = list(section)
        console.print(name, finding_table(found))
        findings += found
    caught = list(run_mutations())
    console.print("mutations", mutation_table(caught))
    seconds = time.perf_counter() - start
    report = record(findings, caught, rows=int(chosen.rows), seed=chosen.seed, seconds=seconds)
    if chosen.output is not None:
        chosen.output.write_text(json.dumps(report, indent=2) + "\n")
    console.print(f"{'passed' if report['passed'] else 'FAILED'} in {seconds:.0f} s")
    return 0 if report["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
