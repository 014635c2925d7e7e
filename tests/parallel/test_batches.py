"""Batch jobs on meshes: slots dealt to groups of devices. Kills of such a job are in tests/jobs/test_job_crash.py."""

import pytest
import worlds
from small_jobs import write_model


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return worlds.run("batches", str(write_model(tmp_path_factory.mktemp("target"), num_layers=1)), devices=4)


@pytest.mark.parametrize("driver", ["shard_map", "jit", "pmap"])
def test_slots_on_a_mesh_hold_what_one_device_writes(found, driver):
    """Tokens, reasons and counters of rows with parameters of their own, before and behind a growth of the buffers."""
    assert found[driver]["rows"] == found["alone"]["rows"]
    assert found[driver]["same"]


@pytest.mark.parametrize("driver", ["shard_map", "jit", "pmap"])
def test_case_62_slots_on_a_mesh_compile_nothing_later(found, driver):
    assert found[driver]["programs"] == []


def test_steps_are_measured_by_the_program_that_then_decodes(found):
    """Another one would be compiled before the first token, and its time would count as decoding."""
    assert found["measured"]["steps"] == 1


def test_measured_pace_on_a_mesh_leaves_the_tokens(found):
    rows, right = found["measured"]["rows"], found["alone"]["rows"]
    assert {name: row[:2] for name, row in rows.items()} == {name: right[name][:2] for name in ("0", "1", "2")}


def test_a_call_ends_for_all_groups_when_a_row_is_done(found):
    """Both groups of slots come back together, so that a mesh takes as many calls as a single group."""
    assert found["shard_map"]["calls"] == found["jit"]["calls"] == found["pmap"]["calls"]
