"""What a summary says of several starts and processes."""

import pytest

from specjax.jobs.parts import PartWriter, read_records
from specjax.jobs.results import write_results

STATS = {
    "steps": 10,
    "drafted": 12,
    "accepted": 6,
    "emitted": 16,
    "drafted_per_position": [8, 4],
    "accepted_per_position": [4, 2],
    "histogram": [6, 2, 2],
}
"""Eight of ten steps drafted, and they gave 1.6 tokens each."""


def summary(directory, times):
    """Of a row for each process, start and its times."""
    for index, (process, run, elapsed, compiling, host, plain, spec) in enumerate(times):
        record = {
            "id": index,
            "text": "",
            "token_ids": [0] * 16,
            "finish_reason": "length",
            "num_prompt_tokens": 4,
            "num_truncated_tokens": 0,
            "stats": STATS,
            "digest": "",
            "process": process,
            "run": run,
            "elapsed_s": elapsed,
            "compile_time_s": compiling,
            "host_time_s": host,
            "plain_step_s": plain,
            "spec_step_s": spec,
            "peak_host_bytes": 100 + index,
            "peak_device_bytes": None,
        }
        with PartWriter(directory, process) as writer:
            writer.append([record])
    return write_results(directory, [place for place, _ in read_records(directory)], [], paced=True)


def test_times_are_summed_over_starts_and_step_times_averaged(tmp_path):
    """Of each start its last row counts; processes run side by side."""
    found = summary(
        tmp_path,
        [
            (0, 0, 1.0, 10.0, 0.1, 0.01, 0.02),
            (0, 0, 2.0, 11.0, 0.3, 0.01, 0.02),
            (0, 1, 3.0, 20.0, 0.1, 0.03, 0.04),
            (1, 0, 4.0, 5.0, 0.5, 0.02, 0.03),
        ],
    )
    assert (found["num_processes"], found["num_runs"]) == (2, 3)
    assert (found["decoding_time_s"], found["compile_time_s"]) == (5.0, 36.0)
    assert found["output_tokens_per_second"] == 64 / 5
    assert found["host_time_s"] == pytest.approx(0.9)
    assert found["host_share"] == pytest.approx(0.1)
    assert (found["plain_step_s"], found["spec_step_s"]) == pytest.approx((0.02, 0.03))
    assert (found["peak_host_bytes"], found["peak_device_bytes"]) == (103, None)
    assert found["predicted_speedup"] == pytest.approx(1.6 * 0.02 / (0.2 * 0.02 + 0.8 * 0.03))


def test_what_was_not_measured_is_null(tmp_path):
    found = summary(tmp_path, [(0, 0, 1.0, 10.0, 0.1, None, None)])
    assert [found[name] for name in ("plain_step_s", "spec_step_s", "predicted_speedup")] == [None] * 3
    assert found["host_share"] == 0.1
