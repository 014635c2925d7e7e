import io
import re

import pytest
from rich.console import Console
from summaries import run_summary, sweep_summary, tune_summary

from specjax.report.benchmark import conclusion, grids, label, terminal_table, varying


def cells(grid, row):
    return dict(zip(grid.header, next(line for line in grid.rows if line[0] == row), strict=True))


def test_run():
    categories, sides = grids(run_summary())
    assert [row[0] for row in categories.rows] == ["qa", "math", "all"]
    assert cells(categories, "all") == {
        "category": "all",
        "tau": "2.67",
        "kept": "0.625",
        "plain tok/s": "0.889",
        "spec. tok/s": "1.14",
        "speed-up": "1.29",
        "decode only": "0.762",
        "predicted": "1.67",
        "fill": "1",
        "95%": "0.90-1.80",
        "equal": "2/2",
    }
    assert cells(sides, "itl_s") == {"metric": "itl_s", "speculative": "1.5", "plain": "1.1"}
    words = conclusion(run_summary())
    assert words.startswith("Speed-up 1.29x over plain decoding (0.90 to 1.80), prefill included; decoding alone 0.76x")
    assert "drafts for 0.2 and verifies for 1.4 of a plain step" in words


def test_sweep():
    points = sweep_summary()["points"]
    assert varying(points) == ["num_speculative_tokens", "batch_size"]
    assert label(points[0]["values"], varying(points)) == "K=1, B=1"
    (grid,) = grids(sweep_summary())
    assert [row[0] for row in grid.rows] == ["K=1, B=1", "K=4, B=1", "K=1, B=2", "K=4, B=2"]
    assert conclusion(sweep_summary()) == (
        "Speculation is slower than plain decoding at 2 of 4 points: K=4, B=1; K=4, B=2. The best is K=1, B=1 at 1.80x."
    )


def test_tune():
    predicted, measured = grids(tune_summary(speedup=1.8))
    assert cells(predicted, "ngram, K=4")["predicted"] == "1.818"
    assert cells(measured, "ngram, K=4")["speed-up"] == "1.8"
    assert conclusion(tune_summary(speedup=1.8)) == (
        "Use --drafter ngram --num-speculative-tokens 4: 1.80x (1.80 to 1.80) measured with ngram, K=4."
    )
    assert conclusion(tune_summary(speedup=0.9)) == (
        "Do not speculate (--drafter none). Of the best predictions none is a gain beyond doubt: 0.90x (0.90 to 0.90) "
        "measured with ngram, K=4."
    )


def test_tune_before_its_end():
    early = tune_summary() | {"complete": False, "tried": [], "recommendation": None}
    assert [grid.title for grid in grids(early)] == ["Predicted"]
    assert conclusion(early) == (
        "Not complete: this is what had been measured when the report was written. No recommendation yet. Tried: "
        "nothing."
    )


def test_empty_rows_are_said():
    summary = sweep_summary()
    summary["points"][1] |= {"mean_batch_fill": 0.75}
    assert conclusion(summary).endswith("Too few questions for the batch: not all rows had one at K=4, B=1 (75 %).")
    assert cells(grids(summary)[0], "K=4, B=1")["fill"] == "0.75"


def test_what_failed_is_shown_apart():
    summary = sweep_summary()
    summary["points"][2] = {"values": summary["points"][2]["values"], "error": "RuntimeError: full"}
    points, lost = grids(summary)
    assert [row[0] for row in points.rows] == ["K=1, B=1", "K=4, B=1", "K=4, B=2"]
    assert lost.rows == (("ngram, K=1, rejection, T=0, B=2", "RuntimeError: full"),)
    assert conclusion(summary).endswith("The best is K=1, B=1 at 1.80x. Failed: K=1, B=2.")


@pytest.mark.parametrize("build", [run_summary, sweep_summary, tune_summary])
def test_what_was_simulated_is_marked_everywhere(build):
    plain, marked = build(), build() | {"synthetic_acceptance": 0.8}
    assert all("SIMULATED ACCEPTANCE 0.8" in grid.title for grid in grids(marked))
    assert not any("SIMULATED" in grid.title for grid in grids(plain))
    assert conclusion(marked).startswith("Simulated acceptance 0.8: times are real, the text and its acceptance not. ")
    assert conclusion(marked).endswith(conclusion(plain))


def test_terminal():
    file = io.StringIO()
    Console(file=file, width=80).print(terminal_table(grids(run_summary())[0]))
    lines = file.getvalue().splitlines()
    assert lines[0].strip() == "By category"
    assert re.split(" +", lines[-1].strip()) == list(cells(grids(run_summary())[0], "all").values())
