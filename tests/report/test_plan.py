"""A plan's tables and picture, from figures written by hand."""

import copy
import io

from matplotlib.figure import Figure
from rich.console import Console

from specjax.report.charts import render
from specjax.report.plan import plan_tables
from specjax.report.plan_chart import plan_chart

GIB = 2**30
STEP = {
    "bytes": 2.2e9,
    "bytes_dearest": 3e9,
    "collectives": {"all-gather": {"count": 1, "bytes": 2e7}, "all-reduce": {"count": 65, "bytes": 4e7}},
}
MEMORY = {
    "arguments": 3 * GIB,
    "results": GIB,
    "aliased": GIB,
    "temporaries": GIB // 2,
    "code": 0,
    "total": 3.5 * GIB,
}
FITS = {"fits": True, "host_transfers": 0, "memory": MEMORY, "step": STEP, "verify": STEP | {"bytes": 2e9}}
REFUSED = {
    "fits": False,
    "used": 17 * GIB,
    "available": 16 * GIB,
    "excess": GIB,
    "message": "Used 17.00G",
}
MODELLED = {
    "plain_step_s": 0.003,
    "spec_step_s": 0.0045,
    "speedup": {0.5: 1.25, 0.9: 2.5},
    "best_window": {0.5: 2, 0.9: 7},
    "best_speedup": {0.5: 1.3, 0.9: 2.75},
    "break_even_rows_per_device": {0.5: 128, 0.9: None},
    "searched_rows_per_device": 256,
}
LEAST = {"bytes": 2e9, "flops": 5e9}
PLAN = {
    "settings": {
        "topology": "v5e:2x4",
        "target_name": "large",
        "draft_name": "small",
        "num_speculative_tokens": 4,
    },
    "batches": [
        {
            "batch_size": size,
            "programs": {"prefill": FITS, "plain": FITS, "speculative": FITS if size == 8 else REFUSED},
            "least": {"prefill": LEAST | {"bytes": 1e9}}
            | dict.fromkeys(("plain", "verify", "drafting", "step"), LEAST),
            "estimated_bytes": 4 * GIB,
            "estimated_most_rows_per_device": 256,
            "modelled": MODELLED if size == 8 else None,
        }
        for size in (8, 512)
    ],
}


def shown(plan):
    console = Console(file=io.StringIO(), width=200)
    for table in plan_tables(plan):
        console.print(table)
    lines = [line.split("│") for line in console.file.getvalue().splitlines()]
    return [[cell.strip() for cell in line if cell.strip()] for line in lines]


def test_memory_says_what_fits_and_by_how_much_not():
    lines = shown(PLAN)
    assert ["8", "speculative", "yes", "3.00", "0.50", "1.00", "3.50", "4.00"] in lines
    assert ["512", "speculative", "no, by 1.00", "-", "-", "-", "17.00", "4.00"] in lines


def test_steps_stand_beside_their_least():
    lines = shown(PLAN)
    exchanged = "1 all-gather, 65 all-reduce", "60"
    assert ["8", "plain", "2,200", "2,000", "1.100", "5", *exchanged, "0"] in lines
    assert ["8", "of it verify", "2,000", "2,000", "1.000", "5", *exchanged] in lines
    assert ["8", "prompt chunk", "2,200", "1,000", "2.200", "5", *exchanged, "0"] in lines
    assert [line[1] for line in lines if line[0] == "512" and len(line) == 9] == ["prompt chunk", "plain"]


def test_gains_are_called_modelled():
    text = shown(PLAN)
    assert ["8", "3", "4.5", "1.25 (2)", "2.50 (7)"] in text
    assert ["stops paying at", "rows a", "device", "128", "> 256"] in text
    told = "256 rows a device are estimated to fit; looked for up to 256, with what batch 8 took over the least"
    assert told in " ".join(" ".join(line) for line in text)
    assert ["512", "does not", "fit"] in text
    assert ["Modelled, not measured: speed-up by acceptance (best K)"] in text


def test_a_program_that_was_refused_for_no_size_does_not_compile():
    plan = copy.deepcopy(PLAN)
    plan["batches"][1]["programs"]["speculative"] = {"fits": False, "excess": None, "used": None, "message": "vmem"}
    assert ["512", "speculative", "does not compile", "-", "-", "-", "-", "4.00"] in shown(plan)


def test_nothing_is_modelled_where_no_batch_fits():
    plan = copy.deepcopy(PLAN)
    plan["batches"] = plan["batches"][1:]
    assert [line for line in shown(plan) if "stops" in line[0]] == []
    assert ["512", "does not", "fit"] in shown(plan)


def test_the_picture():
    axes, plan = Figure().subplots(), copy.deepcopy(PLAN)
    chart = plan_chart(plan)
    chart.draw(axes)
    assert "Modelled" in chart.title
    assert [list(line.get_ydata()) for line in axes.lines[:2]] == [[1.25, 2.5], [1.3, 2.75]]
    assert [text.get_text() for text in axes.get_legend().get_texts()][:2] == ["batch 8, K=4", "batch 8, best K"]
    assert render(chart, "light", "png").startswith(b"\x89PNG")
