"""scripts/benchmark_slots.py from its command line, in this process, on a tiny model."""

import json

import pytest
from small_jobs import write_model

TURNS = ["a" * 20, "bc", "d" * 18, "efg", "h" * 9, "ij" * 11]
SYSTEMS = ("slots", "fixed", "fixed_shuffled", "single")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_model(tmp_path_factory.mktemp("target"), num_layers=1))


@pytest.fixture
def options(model, tmp_path):
    questions = tmp_path / "questions.jsonl"
    rows = [{"question_id": number, "category": "a", "turns": [text]} for number, text in enumerate(TURNS)]
    questions.write_text("\n".join(map(json.dumps, rows)))
    shared = ["--model", model, "--no-compilation-cache", "--questions", questions, "--num-prompts", 6]
    return [*map(str, shared), "--max-new-tokens", "6", "--batch-size", "2", "--repeats", "1"]


def test_figures_of_six_prompts(script, options, capsys, monkeypatch, tmp_path):
    """The same prompts in the same order, longest first; fixed batches once more as they came."""
    lengths, compiled = {}, []

    def spy(name, run):
        def call(*arguments):
            prompts = arguments[2 if name == "slots" else 1]
            key = name if name == "slots" else f"{arguments[2]}"
            lengths.setdefault(key, []).append([len(prompt.token_ids) for prompt in prompts])
            found = run(*arguments)
            if name == "slots":
                compiled.append(arguments[0].compile_time_s)
            return found

        return call

    monkeypatch.setattr(script, "run_slots", spy("slots", script.run_slots))
    monkeypatch.setattr(script, "run_batches", spy("batches", script.run_batches))
    script.main([*options, "--output", str(tmp_path / "out.json")])
    report = json.loads(capsys.readouterr().out)
    assert report == json.loads((tmp_path / "out.json").read_text())
    assert (report["num_prompts"], report["batch_size"], report["repeats"]) == (6, 2, 1)
    assert {report[name]["num_tokens"] for name in SYSTEMS} == {report["slots"]["num_tokens"]}
    assert 6 <= report["slots"]["num_tokens"] <= 36
    for name in SYSTEMS:
        run = report[name]
        assert run["tokens_per_second"] == pytest.approx(run["num_tokens"] / run["seconds"])
        assert 0 < run["num_row_steps"] <= run["num_tokens"]
    for name in SYSTEMS[1:]:
        expected = report["slots"]["tokens_per_second"] / report[name]["tokens_per_second"]
        assert report[name]["slots_are_faster"] == pytest.approx(expected)
    assert report["slots"]["host_share"] > 0  # below 1 where calls take no longer than when they were timed
    assert report["slots"]["num_calls"] > 0
    longest_first = sorted(lengths["slots"][1], reverse=True)
    assert len(longest_first) == 6
    assert lengths["slots"][1:] == [longest_first]
    assert lengths["2"][0] == lengths["1"][0] == longest_first
    assert lengths["2"][1] != longest_first
    assert sorted(lengths["2"][1], reverse=True) == longest_first
    assert set(lengths["slots"][0]) < set(longest_first)  # what warms up is decoded again
    assert compiled[0] == compiled[1] == report["slots_compile_time_s"] > 0
