"""scripts/benchmark.py from its command line, in this process, on a tiny model."""

import json
import signal

import pytest
from measured import pair_of
from small_jobs import write_model
from summaries import draw_without_pixels

from specjax.benchmark import commands, files
from specjax.benchmark.summary import summarize_pairs
from specjax.benchmark.tune import predict

QUESTIONS = [("one", ["abcabcabcabc"]), ("two", ["xyzxyzxyzxyz"])]
MORE = [(name, [name * 4]) for name in ("abc", "xyz", "pqr", "lmn", "uvw")]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_model(tmp_path_factory.mktemp("target"), num_layers=1))


@pytest.fixture
def without_pixels(monkeypatch):
    draw_without_pixels(monkeypatch)


@pytest.fixture
def start(script, model, capsys, tmp_path):
    """Runs the script; returns its exit status, what it printed, its summary and the names of its files."""
    questions = tmp_path / "questions.jsonl"
    output = tmp_path / "out"

    def call(command, *arguments, asked=QUESTIONS):
        rows = [{"question_id": name, "category": name, "turns": turns} for name, turns in asked]
        questions.write_text("\n".join(map(json.dumps, rows)))
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


@pytest.mark.usefixtures("without_pixels")
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
    assert [point["values"]["verifier"] for point in summary["points"]] == ["rejection"] * 2
    assert summary["points"][0]["num_equal_outputs"] == 2
    for point in summary["points"]:
        assert point["values"]["num_speculative_tokens"] == 3
        assert point["speculative"]["num_draft_tokens"] > 0
        assert point["speedup"] == pytest.approx(
            point["speculative"]["output_tokens_per_second"] / point["plain"]["output_tokens_per_second"]
        )
    assert {"temperature.png", "speedup.png", "prediction.png"} < set(written)
    assert "of 2 points" in shown.out


def measured_as(monkeypatch, *factors):
    """Speed-ups that the next measurements find, beyond doubt, whatever the clock says; their names so far."""
    names, left = [], list(factors)

    def point(bench, settings, name):
        factor = left.pop(0)
        figures = summarize_pairs([pair_of(fast=9 / factor, name=str(number)) for number in range(5)])
        names.append(name)
        return {"values": bench.values(settings), **figures}

    monkeypatch.setattr(commands._Bench, "point", point)
    return names


@pytest.fixture
def foretold(monkeypatch):
    """Predictions of 1.5, 1.2, .9, 1.4 and 1.3, of which nothing is measured."""
    speedups = iter((1.5, 1.2, 0.9, 1.4, 1.3))
    stats = pair_of().speculative.completions[0].stats

    def prediction(bench, settings, _):
        known = predict(stats, 1, plain_step_s=1.0, spec_step_s=2.0, batch_size=1)
        return known | {"predicted_speedup": next(speedups)}

    monkeypatch.setattr(commands._Bench, "prediction", prediction)
    monkeypatch.setattr(commands._Bench, "measure", lambda *_: [pair_of()])


def windows_of(points):
    return [point["values"]["num_speculative_tokens"] for point in points]


def test_tune_measures_the_best_prediction(start):
    status, shown, summary, written = start("tune", "--num-speculative-tokens", "1,3", asked=MORE)
    assert (status, summary["complete"]) == (0, True)
    assert windows_of(summary["candidates"]) == [1, 3]
    assert all(one["predicted_speedup"] > 0 for one in summary["candidates"])
    paying = {w for w, one in zip((1, 3), summary["candidates"], strict=True) if one["predicted_speedup"] >= 1.02}
    assert 1 <= len(summary["tried"]) <= max(len(paying), 1)
    assert summary["tried"][0]["plain"]["num_prompts"] == 5
    assert summary["tried"][0]["num_equal_outputs"] == 5
    assert "tune.png" in written
    assert summary["recommendation"]["options"] in shown.out


@pytest.mark.usefixtures("without_pixels")
def test_tune_goes_on_to_the_next_prediction_until_one_holds(start, foretold, monkeypatch):
    names = measured_as(monkeypatch, 0.8, 1.3)
    status, shown, summary, _ = start("tune", asked=MORE)
    assert status == 0
    assert names == ["prediction 1", "prediction 2"]
    assert windows_of(summary["tried"]) == [1, 6]  # K 1, 2, 4, 6 and 8 were foretold 1.5, 1.2, .9, 1.4 and 1.3
    options = "--drafter ngram --num-speculative-tokens 6 --prompt-lookup-max 4 --prompt-lookup-min 1"
    assert summary["recommendation"] == {"speculate": True, "options": options}
    assert shown.out.startswith(f"Use {options}: 1.30x (1.30 to 1.30) measured with ngram, K=6. Tried before")
    assert "0.80x (0.80 to 0.80) measured with ngram, K=1." in shown.out


@pytest.mark.usefixtures("without_pixels")
def test_tune_gives_up_after_three(start, foretold, monkeypatch):
    measured_as(monkeypatch, 0.8, 0.9, 0.95)
    _, shown, summary, written = start("tune", asked=MORE)
    assert windows_of(summary["tried"]) == [1, 6, 8]
    assert summary["recommendation"] == {"speculate": False, "options": "--drafter none"}
    assert shown.out.startswith(
        "Do not speculate (--drafter none). Of the best predictions none is a gain beyond doubt: "
    )
    assert all(f"{factor}x" in shown.out for factor in ("0.80", "0.90", "0.95"))
    assert "tune.png" in written


def test_tuning_needs_enough_questions(start):
    status, shown, _, written = start("tune")
    assert (status, written) == (1, {})
    assert "expected at least 5 questions to tell a gain from chance, got 2: give more --questions" in shown.err


def test_rows_without_a_question_are_refused(start):
    status, shown, _, written = start("sweep", "--batch-size", "1,4")
    assert (status, written) == (1, {})
    assert "expected --batch-size of at most 2, the number of questions, got 4" in shown.err


def breaking(monkeypatch, *errors):
    """Measurements that end, one after another, with these errors after a pair each; None: without one."""
    left = list(errors)

    def measured(bench, settings, name):
        yield pair_of()
        error = left.pop(0)
        if error is not None:
            raise error

    monkeypatch.setattr(commands._Bench, "measure", measured)


@pytest.mark.usefixtures("without_pixels")
def test_a_point_that_fails_costs_no_other_one(start, monkeypatch):
    breaking(monkeypatch, None, RuntimeError("RESOURCE_EXHAUSTED:\nout of memory"), None)
    status, shown, summary, written = start("sweep", "--num-speculative-tokens", "1,3,5")
    assert (status, summary["complete"]) == (1, True)
    assert windows_of(summary["points"]) == [1, 3, 5]
    assert ["error" in point for point in summary["points"]] == [False, True, False]
    assert summary["points"][1]["error"] == "RuntimeError: RESOURCE_EXHAUSTED: out of memory"
    assert "at 0 of 2 points" in shown.out
    assert "Failed: K=3." in shown.out
    assert "RESOURCE_EXHAUSTED: out of memory" in written["report.html"].read_text()
    assert "window.png" in written


@pytest.mark.usefixtures("without_pixels")
def test_simulated_acceptance_is_marked_at_every_point(start, monkeypatch):
    breaking(monkeypatch, None, None)
    _, _, summary, _ = start("sweep", "--num-speculative-tokens", "1,3", "--synthetic-acceptance", "0.5")
    assert [point["values"]["verifier"] for point in summary["points"]] == ["synthetic"] * 2


def test_nothing_but_failures_is_an_error(start, monkeypatch):
    breaking(monkeypatch, RuntimeError("no"), RuntimeError("neither"))
    status, shown, _, written = start("sweep", "--num-speculative-tokens", "1,3")
    assert (status, written) == (1, {})
    assert shown.err.endswith("expected some point that can be measured, got none of 2: RuntimeError: no\n")


@pytest.fixture
def interruptible():
    """A shell may have told its jobs to ignore SIGINT."""
    heard = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, heard)


@pytest.mark.usefixtures("without_pixels")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_sweep_that_is_stopped_keeps_its_points(start, monkeypatch, interruptible, number):
    done = []

    def measured(bench, settings, name):
        yield pair_of()
        done.append(name)
        if len(done) == 2:
            signal.raise_signal(number)

    monkeypatch.setattr(commands._Bench, "measure", measured)
    before = signal.getsignal(signal.SIGTERM)
    status, shown, summary, written = start("sweep", "--num-speculative-tokens", "1,3,5")
    assert (status, windows_of(summary["points"]), summary["complete"]) == (130, [1], False)
    assert shown.err.endswith(f"interrupted: what was done is in {written['summary.json'].parent}\n")
    assert "Not complete: " in written["report.html"].read_text()
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.usefixtures("without_pixels")
@pytest.mark.parametrize(("error", "status"), [(KeyboardInterrupt(), 130), (RuntimeError("full"), 1)])
def test_a_run_that_ends_early_keeps_its_batches(start, monkeypatch, error, status):
    breaking(monkeypatch, error)
    found, shown, summary, written = start("run")
    assert (found, summary["complete"], len(summary["batches"])) == (status, False, 1)
    assert summary["overall"]["speedup"] == pytest.approx(9 / 5)
    assert f"what was done is in {written['summary.json'].parent}\n" in shown.err


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
