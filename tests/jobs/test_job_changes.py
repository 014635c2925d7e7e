"""What may change between two starts of a job and what may not, and what its manifest says. Case 70."""

import dataclasses
import json

import pytest
from small_jobs import named, write_model

from specjax.io.tokenizer import load_tokenizer, save_tokenizer
from specjax.jobs import intake, job

pytestmark = pytest.mark.usefixtures("quickly")


def test_case_70_rows_may_be_inserted_if_they_have_ids(start, files):
    start(named()[2:])
    before = files()
    start(named())
    assert files()[2:] == before
    assert [row["id"] for row in files()] == [row["id"] for row in named()]
    with pytest.raises(
        ValueError, match=r"expected every row of .*completions-00000\.jsonl in the input, got none with"
    ):
        start(named()[1:])


def test_case_70_a_row_of_another_prompt_is_not_taken_for_the_old_one(start):
    start([{"prompt": "a"}, {"prompt": "b"}])
    with pytest.raises(ValueError, match=r"id 0 to be the row that .* has completed, got another prompt or parameters"):
        start([{"prompt": "new"}, {"prompt": "a"}, {"prompt": "b"}])


CHANGED = {
    ("--num-speculative-tokens", "3"): "drafter.num_speculative_tokens = 6",
    ("--seed", "1"): "sampling.seed = 0",
    ("--temperature", "0.5"): "sampling.temperature = 0.0",
    ("--verifier", "block"): "verifier = 'rejection'",
    ("--drafter", "early_exit"): "drafter.kind = 'ngram'",
    ("--dtype", "bfloat16"): "dtype = 'float32'",
    ("--max-new-tokens", "7"): "sampling.max_new_tokens = 8",
    ("--max-prompt-tokens", "99"): "job.max_prompt_tokens = None",
    ("--raw-prompt",): "raw_prompt = False",
    ("--ignore-eos",): "sampling.ignore_eos = False",
}
"""Options that a job cannot go on with, and what its manifest says instead."""


def test_case_70_a_changed_setting_is_refused_by_name(start, files):
    start(named()[:1])
    before = files(raw=True)
    for option, name in CHANGED.items():
        with pytest.raises(ValueError, match=f"expected {name}, with which this output was begun .* another --output"):
            start(None, *option)
        assert files(raw=True) == before


def test_a_changed_model_is_refused_and_a_moved_one_is_not(start, model, tmp_path):
    start(named()[:1])
    moved = write_model(tmp_path / "moved", num_layers=1)
    assert start(None, "--model", moved).done == 1
    other = write_model(tmp_path / "other", num_layers=1, seed=3)
    with pytest.raises(ValueError, match=r"expected model\.sha256 = "):
        start(None, "--model", other)


def test_rows_without_a_manifest_are_not_gone_on_with(start, tmp_path):
    start(named()[:1])
    (tmp_path / "out" / "manifest.json").unlink()
    with pytest.raises(ValueError, match=r"expected \S+manifest\.json beside the completed rows, got none"):
        start(None)


def test_another_machine_is_only_warned_about(start, tmp_path):
    start(named()[:1])
    path = tmp_path / "out" / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["versions"]["jax"] = "0.0.1"
    path.write_text(json.dumps(manifest))
    assert start(None).done == 1
    assert "warning: versions.jax was 0.0.1, is " in (tmp_path / "shown").read_text()


def test_counters_that_hang_on_the_clock_are_not_in_the_lines(start, files):
    start(named())
    summary = start(named(), "--pace", "measured", directory="measured").summary
    assert all(summary[name] > 0 for name in ("plain_step_s", "spec_step_s", "predicted_speedup"))
    for row, paced in zip(files(), files(directory="measured"), strict=True):
        assert paced["token_ids"] == row["token_ids"]
        assert set(paced["metrics"]) == {"num_prompt_tokens", "num_truncated_tokens", "num_emitted_tokens"}


@pytest.mark.parametrize("pace", ["none", "measured"])
def test_rows_that_are_sampled_may_be_added_and_are_not_paced_by_the_clock(start, files, monkeypatch, tmp_path, pace):
    """And the lines hold no counters of the rows before them, which were paced, nor of themselves."""
    paces, build = [], job.build_decoder
    monkeypatch.setattr(job, "build_decoder", lambda *given: paces.append(given[0].effective_pace) or build(*given))
    start(named()[:2], pace=pace)
    start([*named()[:2], {"prompt": "a", "sampling": {"temperature": 1.0}}], pace=pace)
    assert paces == ["measured", "always"]
    assert ("always speculate, whatever --pace" in (tmp_path / "shown").read_text()) == (pace == "measured")
    assert all("num_spec_steps" not in row["metrics"] for row in files())
    assert json.loads(files("manifest.json", raw=True))["settings"]["pace"] == "measured"
    start([{"prompt": "a", "sampling": {"temperature": 1.0}}], "--verifier", "exact_match", directory="e", pace=pace)
    assert paces[-1] == "measured"


def test_the_manifest_is_true_of_all_rows_and_starts(start, files):
    start(named()[:2])
    first = json.loads(files("manifest.json", raw=True))
    assert first["lossless_level"] == "tokens"
    start([*named()[:2], {"prompt": "a", "sampling": {"temperature": 1.0}}])
    last = json.loads(files("manifest.json", raw=True))
    assert last["lossless_level"] == "distribution"
    assert [(each["process"], each["run"]) for each in last["starts"]] == [(0, 0), (0, 1)]
    for each in last["starts"]:
        assert {name: each[name] for name in ("matmul_precision", "mesh", "versions")}.items() <= last.items()
    assert first.keys() == last.keys()
    assert (first["began_at"], first["starts"]) == (last["began_at"], last["starts"][:1])


def test_a_date_in_the_chat_template_stays_that_of_the_first_start(start, model, tmp_path, monkeypatch):
    dated = write_model(tmp_path / "dated", num_layers=1)
    template = "{{ strftime_now('%Y') }}{{ messages[0].content }}"
    save_tokenizer(dataclasses.replace(load_tokenizer(model), chat_template=template), dated)
    texts, encode = [], intake.encode_prompts

    def spy(*given, **options):
        prompts = encode(*given, **options)
        texts.extend(bytes(prompt.token_ids).decode() for prompt in prompts)
        return prompts

    monkeypatch.setattr(intake, "encode_prompts", spy)
    start(named()[1:2], "--model", dated)
    path = tmp_path / "out" / "manifest.json"
    manifest = json.loads(path.read_text())
    assert texts == [manifest["began_at"][:4] + "b"]
    path.write_text(json.dumps(manifest | {"began_at": "1999-12-31T23:59:59"}))
    start(named()[:2], "--model", dated)
    assert texts[1:] == ["1999abab"]
