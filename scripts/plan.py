"""Says what a decoder will cost on TPUs that are not there: what fits, what moves, and the speed-up, modelled."""

import json
import sys
from typing import Any

import jax
from rich.console import Console

from specjax.benchmark.files import check_pictures
from specjax.io.files import write_whole
from specjax.jobs.runtime import fail
from specjax.planning.options import parse_request
from specjax.planning.plan import make_plan
from specjax.report.plan import plan_tables


def main(arguments: list[str] | None = None) -> int:
    try:
        request, output, plot = parse_request(sys.argv[1:] if arguments is None else arguments, description=__doc__)
    except ValueError as error:
        return fail(error, 2)
    console = Console(stderr=True)
    try:
        if plot is not None:
            check_pictures()
        jax.config.update("jax_platforms", "cpu")  # only to compile: a TPU that is there stays free
        plan: dict[str, Any] = {}
        for plan in make_plan(request, console.print):
            if output is not None:
                write_whole(output, json.dumps(plan, indent=1).encode() + b"\n")
        for table in plan_tables(plan):
            Console().print(table)
        print(plan["note"])
        if plot is not None:
            from specjax.report.charts import render
            from specjax.report.plan_chart import plan_chart

            write_whole(plot, render(plan_chart(plan), "light", "png"))
    except (ValueError, OSError) as error:
        return fail(error, 1)
    except KeyboardInterrupt:
        kept = "nothing was kept" if output is None else f"batch sizes that were done are in {output}"
        print(f"\ninterrupted: {kept}", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
