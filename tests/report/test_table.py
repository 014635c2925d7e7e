import io

import pytest
from rich.console import Console

from specjax.report.table import SUMMARY_ROWS, job_table, position_table, show, summary_table


def printed(table):
    console = Console(file=io.StringIO(), width=160)
    console.print(table)
    return console.file.getvalue()


def test_summary_has_every_metric_of_every_run():
    runs = {"speculative": dict.fromkeys(SUMMARY_ROWS, 2.5), "plain": dict.fromkeys(SUMMARY_ROWS)}
    text = printed(summary_table(runs))
    lines = [line.split() for line in text.splitlines() if "2.5" in line]
    assert [line[1] for line in lines] == list(SUMMARY_ROWS)
    assert all(line[3:6:2] == ["2.5", "-"] for line in lines)
    assert text.index("speculative") < text.index("plain")


def test_a_job_shows_its_numbers_and_how_rows_ended():
    summary = {"num_prompts": 9, "finish_reasons": {"stop": 6, "length": 0, "nan": 3}, "rates": [1], "tpot_s": None}
    rows = [line.replace("│", " ").split() for line in printed(job_table(summary)).splitlines() if "│" in line]
    assert rows == [
        ["num_prompts", "9"],
        ["tpot_s", "-"],
        ["finish_reason", "stop", "6"],
        ["finish_reason", "nan", "3"],
    ]


def test_positions_have_both_rates_labelled():
    metrics = {
        "acceptance_rate_per_position": [0.75, 0.5],
        "conditional_acceptance_rate": [0.7, None],
        "acceptance_histogram": [11, 22, 33],
    }
    text = printed(position_table(metrics))
    assert text.index("(unconditional)") < text.index("(conditional)")
    rows = [line.replace("│", " ").split() for line in text.splitlines() if line.startswith("│")]
    assert rows == [["0", "11"], ["1", "0.75", "0.7", "22"], ["2", "0.5", "-", "33"]]


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0, "0"), (12345, "12,345"), (0.0123456, "0.01235"), (1.0, "1"), (123456.7, "123,457")],
)
def test_numbers(value, text):
    assert show(value) == text
