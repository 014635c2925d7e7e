"""scripts/benchmark.py from its command line, in this process, on a tiny model."""

import json

import pytest
from small_jobs import write_model

from specjax.benchmark import files

QUESTIONS = [("one", ["abcabcabcabc"]), ("two", ["xyzxyzxyzxyz"])]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_model(tmp_path_factory.mktemp("target"), num_layers=1))


@pytest.fixture
def start(script, model, capsys, tmp_path):
    """Runs the script; returns its exit status, what it printed, its summary and the names of its files."""
    questions = tmp_path / "questions.jsonl"
    rows = [{"question_id": name, "category": name, "turns": turns} for name, turns in QUESTIONS]
    questions.write_text("\n".join(map(json.dumps, rows)))
    output = tmp_path / "out"

    def call(command, *arguments):
        shared = ["--model", model, "--no-compilation-cache", "--questions", questions, "--max-new-tokens", 12]
        status = script.main([*map(str, [command, *shared, "--output-dir", output, *arguments])])
        written = {path.name: path for path in output.iterdir()} if output.exists() else {}
        summary = json.loads(written["summary.json"].read_text()) if written else {}
        return status, capsys.readouterr(), summary, written

    return call


def test_run(start):
    status, shown, summary, written = start("run", "--num-speculative-tokens", 3, "--pace", "always")
    assert status == 0
    assert set(written) == {
        *("summary.json", "report.html"),
        *("speedup.png", "acceptance.png", "positions.png", "time.png", "prediction.png"),
    }
    overall = summary["overall"]
    assert (summary["command"], summary["lossless"], summary["num_questions"]) == ("run", True, 2)
    assert list(summary["categories"]) == ["one", "two"]
    assert overall["num_equal_outputs"] == 2
    assert overall["speculative"]["num_emitted_tokens"] == overall["plain"]["num_emitted_tokens"] <= 24
    assert overall["plain"]["num_spec_steps"] == overall["plain"]["num_emitted_tokens"]
    assert sum(overall["speculative"]["acceptance_histogram"]) == overall["speculative"]["num_spec_steps"]
    seconds = [batch["speculative"]["seconds"] for batch in summary["batches"]]
    assert overall["speculative"]["seconds"] == pytest.approx(sum(seconds))
    assert overall["speculative"]["compile_time_s"] > 0
    for side in ("speculative", "plain"):
        assert 0 < overall[side]["ttft_s"] < overall[side]["e2e_latency_s"] <= overall[side]["seconds"]
        assert overall[side]["verify_time_s"] > 0
    assert summary["settings"]["drafter"]["num_speculative_tokens"] == 3
    assert shown.out.startswith("Speed-up ")
    assert "By category" in shown.err
    assert "imulated" not in shown.out + shown.err + written["report.html"].read_text()


def test_simulated_acceptance_is_marked_in_every_output(start):
    status, shown, summary, written = start("run", "--synthetic-acceptance", 1, "--num-speculative-tokens", 3)
    assert status == 0
    assert summary["overall"]["speculative"]["mean_acceptance_length"] == 4.0
    assert summary["overall"]["speculative"]["num_emitted_tokens"] == 24
    assert (summary["lossless"], summary["synthetic_acceptance"]) == (False, 1.0)
    assert summary["settings"]["verifier"] == "synthetic"
    assert "Simulated acceptance 1" in shown.out
    assert "SIMULATED ACCEPTANCE 1" in shown.err
    assert "not lossless" in written["report.html"].read_text()


def test_sweep(start):
    status, shown, summary, written = start("sweep", "--num-speculative-tokens", 3, "--temperature", "0,0.5")
    assert status == 0
    assert [point["values"]["temperature"] for point in summary["points"]] == [0, 0.5]
    assert summary["points"][0]["num_equal_outputs"] == 2
    for point in summary["points"]:
        assert point["values"]["num_speculative_tokens"] == 3
        assert point["speculative"]["num_draft_tokens"] > 0
        assert point["speedup"] == pytest.approx(
            point["speculative"]["output_tokens_per_second"] / point["plain"]["output_tokens_per_second"]
        )
    assert {"temperature.png", "speedup.png", "prediction.png"} < set(written)
    assert "of 2 points" in shown.out


def test_tune(start):
    status, shown, summary, written = start("tune", "--num-speculative-tokens", "1,3")
    assert status == 0
    assert [one["values"]["num_speculative_tokens"] for one in summary["candidates"]] == [1, 3]
    best = max(summary["candidates"], key=lambda one: one["predicted_speedup"])
    assert summary["measured"]["values"] == best["values"]
    assert shown.out.startswith("Use --drafter" if summary["recommendation"]["speculate"] else "Do not speculate")
    assert "tune.png" in written


def test_a_report_that_cannot_be_drawn_is_refused_before_anything_is_measured(start, monkeypatch):
    monkeypatch.setattr(files.importlib.util, "find_spec", lambda name: None)
    status, shown, summary, written = start("run")
    assert (status, summary, written) == (1, {}, {})
    assert shown.err == "error: expected matplotlib for the report, got none: pip install -e '.[report]'\n"


def test_a_report_that_could_not_be_written_is_refused_before_anything_is_measured(script, capsys, tmp_path):
    (tmp_path / "file").write_text("")
    assert script.main(["run", "--model", "missing", "--output-dir", str(tmp_path / "file")]) == 1
    assert capsys.readouterr().err == f"error: [Errno 17] File exists: '{tmp_path / 'file'}'\n"


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (("run", "--batch-size", "1,2"), 2, "error: expected one value of --batch-size with run, got 1,2\n"),
        (("run", "--max-new-tokens", "400"), 1, "error: question 'one': expected its turns and replies within"),
        (("run", "--questions", "nowhere.jsonl"), 1, "error: [Errno 2]"),
    ],
)
def test_errors_are_one_line(start, arguments, status, says):
    found, shown, _, written = start(*arguments)
    assert (found, written) == (status, {})
    assert shown.err.splitlines()[-1].startswith(says.rstrip("\n"))


def test_interrupted(start, monkeypatch):
    def interrupt(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("specjax.benchmark.commands.load_model", interrupt)
    status, shown, _, written = start("run")
    assert (status, written) == (130, {})
    assert shown.err.endswith("interrupted: nothing was written\n")
