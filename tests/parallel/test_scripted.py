"""scripts/generate.py in two processes of two devices each, over loopback, against the same on one device."""

import json
import socket

import pytest
import worlds
from small_jobs import write_model

LIMIT_S = 60
TEXTS = ["abab", "naïve", "cccc"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """What each process printed last, and the rows that were written: alone and together."""
    directory = tmp_path_factory.mktemp("scripted")
    models = [str(write_model(directory / f"model-{seed}", seed=seed, num_layers=1)) for seed in range(2)]
    prompts = directory / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in TEXTS))
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    places = {"alone": [None], "together": [(address, 0), (address, 1)]}
    found = {}
    for name, processes in places.items():
        output = directory / name
        begun = [
            worlds.start("scripted", place, models, str(prompts), str(output), devices=1 if place is None else 2)
            for place in processes
        ]
        limit_s = LIMIT_S if name == "together" else 10 * LIMIT_S  # alone nothing can hang
        last = [json.loads(out.splitlines()[-1]) for out in worlds.outputs(begun, limit_s)]
        found[name] = last, [json.loads(line) for line in output.read_text().splitlines()]
    return found


def test_two_processes_write_what_one_device_writes(runs):
    (alone, right), (together, rows) = runs["alone"], runs["together"]
    assert [run["status"] for run in alone + together] == [0, 0, 0]
    assert [row["prompt"] for row in rows] == TEXTS
    told = ("id", "text", "token_ids", "finish_reason")
    assert [[row[name] for name in told] for row in rows] == [[row[name] for name in told] for row in right]
    assert sum(row["metrics"]["num_draft_tokens"] for row in right) > 0  # together, measured times may say no


def test_the_first_process_compares_with_plain_decoding_and_the_second_is_silent(runs):
    first, second = (run["said"] for run in runs["together"][0])
    assert "tokens: equal for 3 of 3 prompts\n" in first
    assert second == ""


@pytest.mark.parametrize(("differs", "what"), [("dtype", "settings"), ("batch", "settings"), ("model", "models")])
def test_processes_that_differ_are_refused_before_a_model_is_loaded(runs, differs, what):
    message = f"expected the same {what} on every process, got others on [1] than on process 0"
    assert [run["refusals"][differs] for run in runs["together"][0]] == [message] * 2


def test_where_process_1_would_write_does_not_matter(runs):
    assert [run["refusals"]["file"] for run in runs["together"][0]] == ["loading"] * 2
