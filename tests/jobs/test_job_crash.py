"""`kill -9` at any instant: what a job ends with is what it would have ended with undisturbed. Case 70."""

import functools
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from small_jobs import write_model

from specjax.testing.compiling import compiler_options

HERE = Path(__file__).parent
ROWS, KILLS = 200, 30
ALWAYS = ["--pace", "always"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("target"), num_layers=1)


@pytest.fixture(scope="module")
def crash(model, tmp_path_factory):
    """Runs a job that is killed; the tests share what has been compiled."""
    return functools.partial(crash_runs, model, tmp_path_factory.mktemp("cache"))


def write_rows(path, count):
    chance = random.Random(0)
    with path.open("w") as file:
        for index in range(count):
            prompt = "".join(chance.choice("abc") for _ in range(chance.randrange(1, 15)))
            print(json.dumps({"id": f"row {index}", "prompt": prompt}), file=file)
    return path


def crash_runs(model, cache, tmp_path, *arguments, rows=ROWS, kills=KILLS, together=0, devices=1):
    """A report of the kills, and what the job ended with: undisturbed and killed."""
    path, seed = write_rows(tmp_path / "rows.jsonl", rows), 0
    command = [HERE / "crash_runs.py", model, path, tmp_path, kills, together, seed, *arguments]
    paths = os.pathsep.join([str(HERE.parents[1]), str(HERE.parents[1] / "scripts"), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": paths, "SPECJAX_CACHE": str(cache)}
    options = {"xla_force_host_platform_device_count": devices} | (compiler_options(0) or {})
    environment["XLA_FLAGS"] = " ".join(f"--{name}={str(value).lower()}" for name, value in options.items())
    done = subprocess.run([sys.executable, *map(str, command)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    files = [(tmp_path / name / "completions.jsonl").read_bytes() for name in ("whole", "killed")]
    return json.loads(done.stdout.splitlines()[-1]), *files


def test_case_70_thirty_kills_change_nothing(crash, tmp_path):
    """Batches of 2 and 4 rows in turn; the last kill comes while the final files are written."""
    report, whole, killed = crash(
        tmp_path, "--max-new-tokens", "8", "--temperature", "0.02", "--verifier", "exact_match", *ALWAYS
    )
    assert report["killed"] == KILLS
    assert report["torn"] > 0
    assert report["left"] == [".completions.json", "completions-00000", "manifest.json"]
    assert sorted(path.name for path in (tmp_path / "killed").iterdir())[2:] == ["manifest.json", "summary.json"]
    assert killed == whole
    ids = [json.loads(line)["id"] for line in killed.splitlines()]
    assert ids == [f"row {index}" for index in range(ROWS)]
    part = (tmp_path / "killed" / "completions-00000.jsonl").read_text().splitlines()
    assert sorted(json.loads(line)["id"] for line in part) == sorted(ids)
    summary = json.loads((tmp_path / "killed" / "summary.json").read_text())
    assert summary["num_prompts"] == ROWS
    assert summary["num_accepted_tokens"] > ROWS
    assert summary["num_emitted_tokens"] == sum(len(json.loads(line)["token_ids"]) for line in killed.splitlines())
    assert summary["num_runs"] > KILLS // 4, report  # starts that completed rows before they were killed


def test_kills_of_the_default_job_change_nothing(crash, tmp_path):
    """Greedy, paced by step times that each start measures anew. And of two starts at once one is refused."""
    report, whole, killed = crash(tmp_path, "--max-new-tokens", "8", rows=40, kills=4, together=2)
    assert report["killed"] == 4
    assert killed == whole
    assert b"num_spec_steps" not in killed
    assert report["together"] == [0, 1]
    assert (tmp_path / "together" / "completions.jsonl").read_bytes() == whole
    assert len((tmp_path / "together" / "completions-00000.jsonl").read_bytes().splitlines()) == 40


@pytest.mark.extended
def test_kills_on_a_mesh_change_nothing(crash, tmp_path):
    """Two groups of two devices: killed or not, the lines are those of a single device."""
    rows, options = 30, ["--max-new-tokens", "8", *ALWAYS]
    for name in ("mesh", "alone"):
        (tmp_path / name).mkdir()
    mesh = ["--mesh", "data=2,model=2"]
    report, whole, killed = crash(tmp_path / "mesh", *options, *mesh, rows=rows, kills=4, devices=4)
    _, alone, _ = crash(tmp_path / "alone", *options, rows=rows, kills=0)
    assert report["killed"] == 4
    assert killed == whole == alone
    manifest = json.loads((tmp_path / "mesh" / "killed" / "manifest.json").read_text())["mesh"]
    assert (manifest["num_devices"], manifest["data"], manifest["model"]) == (4, 2, 2)
