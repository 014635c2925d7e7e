"""scripts/generate.py from its command line, in this process. Case 69: defaults run, each option does something."""

import itertools
import json
import os
import re
import signal
import types

import jax
import numpy as np
import pytest
from reference_transformer import forward
from small_jobs import USER, write_model

from specjax.io.checkpoint import load_checkpoint
from specjax.jobs.options import OPTIONS
from specjax.jobs.parts import PartWriter
from specjax.jobs.runtime import configure


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_model(tmp_path_factory.mktemp("target"), num_layers=1))


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    """A model with a layer to exit from."""
    return str(write_model(tmp_path_factory.mktemp("deep"), num_layers=2))


@pytest.fixture(scope="module")
def draft_model(tmp_path_factory):
    return str(write_model(tmp_path_factory.mktemp("draft"), seed=1, num_layers=1))


@pytest.fixture
def start(script, model, capsys):
    """Runs the script; returns its exit status, what it printed to either stream, and the rows of --output."""

    def call(*arguments, output=None):
        arguments = ["--model", model, "--no-compilation-cache", "--max-new-tokens", "12", *map(str, arguments)]
        status = script.main(arguments + ([] if output is None else ["--output", str(output)]))
        shown = capsys.readouterr()
        lines = [] if output is None else output.read_text(encoding="utf-8").splitlines()
        return types.SimpleNamespace(status=status, out=shown.out, err=shown.err, rows=list(map(json.loads, lines)))

    return call


def settings_of(run):
    return json.loads(re.search(r"^settings: (.*)$", run.err, re.MULTILINE)[1])


def summary_of(run):
    """The columns of the summary table, by metric."""
    text = run.err.replace(",", "")
    lines = [re.findall(r"[^│\s]+", line) for line in text.splitlines() if line.startswith("│")]
    return {name: values for name, *values in lines}


def test_text_summary_and_settings_of_one_prompt(start):
    run = start("--prompt", "abcab")
    assert run.status == 0
    assert run.out.endswith("\n")
    assert len(run.out) > 1
    summary = summary_of(run)
    assert summary["num_prompts"] == ["1"]
    assert summary["num_prompt_tokens"] == ["6"]
    assert summary["num_emitted_tokens"] == ["12"]
    assert all(float(summary[name][0]) > 0 for name in ("ttft_s", "output_tokens_per_second", "compile_time_s"))
    assert settings_of(run)["sampling"]["seed"] == 0
    assert settings_of(run)["prompt"] == ["abcab"]


def test_tokens_are_the_likeliest_ones(start, model, tmp_path):
    run = start("--prompt", "abcab", output=tmp_path / "out")
    checkpoint = load_checkpoint(model, dtype="float32")
    text = [USER, *b"abcab"]
    for token in run.rows[0]["token_ids"]:
        assert token == np.argmax(forward(checkpoint.params, checkpoint.config, text)[-1])
        text.append(token)
    assert len(text) == 6 + 12


def test_rows_hold_what_plain_decoding_gives(start, tmp_path):
    path = tmp_path / "prompts.jsonl"
    talk = [{"role": "user", "content": "abcab"}]
    path.write_text("\n".join(map(json.dumps, [{"id": "x", "messages": talk}, {"prompt": "abcab"}, {"prompt": "é"}])))
    run = start("--prompts", path, output=tmp_path / "out.jsonl")
    plain = start("--prompts", path, "--drafter", "none", "--verifier", "exact_match", output=tmp_path / "plain.jsonl")
    assert [row["id"] for row in run.rows] == ["x", 1, 2]
    assert [row["prompt"] for row in run.rows] == [talk, "abcab", "é"]
    assert [row["token_ids"] for row in run.rows] == [row["token_ids"] for row in plain.rows]
    assert [row["finish_reason"] for row in run.rows] == [row["finish_reason"] for row in plain.rows]
    assert [row["text"] for row in run.rows] == [row["text"] for row in plain.rows]
    assert run.rows[0]["token_ids"] == run.rows[1]["token_ids"]  # a prompt is a user's message
    for row in run.rows:
        assert row["text"] == bytes(row["token_ids"]).decode()
        assert row["metrics"]["num_emitted_tokens"] == len(row["token_ids"])
    assert run.out == ""


def test_comparison_of_greedy_runs(start):
    run = start("--prompt", "abcab", "--prompt", "xyz", "--compare")
    assert run.status == 0
    assert "tokens: equal for 2 of 2 prompts\n" in run.err
    summary = summary_of(run)
    assert summary["num_emitted_tokens"] == ["24", "24"]
    assert summary["mean_acceptance_length"][1] == "1"
    fast, slow = map(float, summary["output_tokens_per_second"])
    printed = float(re.search(r"^speedup: ([\d.]+)x over plain decoding$", run.err, re.MULTILINE)[1])
    assert printed == pytest.approx(fast / slow, rel=0.01)


def test_comparison_of_sampled_runs_says_what_is_promised(start):
    run = start("--prompt", "abcab", "--compare", "--temperature", "1.5")
    assert "(only their law is the same under this verifier; exact_match promises equal tokens)" in run.err


@pytest.mark.parametrize("drafter", ["ngram", "early_exit"])
def test_case_69_drafters_run_with_their_defaults(start, model, deep, drafter, tmp_path):
    target = {"ngram": model, "early_exit": deep}[drafter]
    options = ["--model", target, "--drafter", drafter, "--pace", "always"]
    run = start("--prompt", "abcab", *options, output=tmp_path / "out")
    assert run.status == 0
    assert len(run.rows[0]["token_ids"]) == 12
    assert run.rows[0]["metrics"]["num_draft_tokens"] > 0


def test_a_draft_model_that_is_the_target_is_always_right(start, model, tmp_path):
    arguments = ["--drafter", "model", "--draft-model", model, "--pace", "always", "--per-position"]
    run = start("--prompt", "abcab", *arguments, output=tmp_path / "out")
    metrics = run.rows[0]["metrics"]
    assert metrics["draft_acceptance_rate"] == 1.0
    assert metrics["acceptance_histogram"] == [0, 1, 0, 0, 2]  # 5 + 5 + 2 tokens
    assert metrics["mean_acceptance_length"] == 4.0
    assert re.search(r"│ 4 +│ 1 +│ 1 +│ 2 +│", run.err)


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["--verifier", "greedy", "--temperature", "1"], ["--verifier greedy", "--temperature 0"]),
        (["--draft-model", "x"], ["--draft-model", "--drafter model", "--drafter ngram"]),
        (["--drafter", "model"], ["--draft-model", "--drafter model"]),
        (["--exit-layer", "1"], ["--exit-layer", "--drafter early_exit", "--drafter ngram"]),
        (["--stream", "--batch-size", "2"], ["--stream", "--batch-size"]),
        (["--compare", "--drafter", "none"], ["--compare", "--drafter none"]),
        (["--prompts", "x.txt"], ["--prompt", "--prompts"]),
        (["--logprobs"], ["--logprobs", "--output"]),
        (["--input", "x"], ["--input", "--output-dir"]),
        (["--input", "x", "--output-dir", "y"], ["--input", "--prompt"]),
        (["--merge"], ["--input", "--merge"]),
        (["--on-error", "skip"], ["--input", "--on-error"]),
        (["--top-k", "3"], ["--top-k", "--temperature"]),
        (["--temperature", "warm"], ["--temperature", "'warm'"]),
        (["--colour"], ["--colour"]),
        (["--config", "missing.py"], ["--config", "missing.py"]),
    ],
)
def test_usage_errors_are_one_line_before_anything_is_loaded(script, capsys, arguments, names):
    assert script.main(["--model", "missing", "--prompt", "a", *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert re.fullmatch(r"error: [^\n]+\n", shown.err)
    assert all(name in shown.err for name in names)


def test_no_prompt_is_a_usage_error(start):
    run = start()
    assert (run.status, run.err) == (2, "error: expected --prompt, --prompts or --input, got none\n")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--prompt", "a", "--model", "no/where/at-all"], "expected"),
        (["--prompt", "a" * 120], "prompt 0: expected its tokens and max_new_tokens within the target's 128 positions"),
        (["--prompt", "a", "--drafter", "early_exit", "--exit-layer", "2"], "expected exit_layer in 1..1"),
        (["--prompt", "a", "--stop", "<eos>"], "got the special token '<eos>'"),
        (["--prompts", "missing.txt"], "missing.txt"),
        (["--prompt", "a", "--output", "missing/out"], "missing/out"),
    ],
)
def test_errors_of_the_run_are_one_line(start, arguments, says):
    run = start(*arguments)
    assert run.status == 1
    assert re.fullmatch(r"error: [^\n]+\n", run.err.split("\n", 1)[1])
    assert says in run.err


def test_malformed_line_is_named(start, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt" "b"}\n')
    run = start("--prompts", path)
    assert run.status == 1
    assert f"error: {path}, line 2: " in run.err


def test_rows_are_written_as_they_finish_and_kept_on_interruption(script, start, tmp_path, monkeypatch):
    path, complete = tmp_path / "out.jsonl", script.complete

    def interrupted(*arguments, **options):
        batches = complete(*arguments, **options)
        yield next(batches)
        assert [json.loads(line)["id"] for line in path.read_text().splitlines()] == [0]
        yield next(batches)
        raise KeyboardInterrupt

    monkeypatch.setattr(script, "complete", interrupted)
    run = start("--prompt", "a", "--prompt", "b", "--prompt", "c", output=path)
    assert run.status == 130
    assert "interrupted after 2 prompts" in run.err
    assert [row["id"] for row in run.rows] == [0, 1]


class Asked(dict):
    """What the script asked for, without decoding anything."""

    def complete(self, decoder, prompts, *, batch_size, on_text):
        sampling = decoder.sampling.rows(1, decoder.eos_ids)
        arrays = {name: np.asarray(value).tolist() for name, value in vars(sampling).items() if value is not None}
        self.setdefault("runs", []).append(decoder.config.drafter)
        if len(self["runs"]) == 1:
            self.update(
                verifier=decoder.config.verifier,
                log_probs=decoder.config.log_probs,
                weights=[str(leaf.dtype) + str(leaf.ravel()[0]) for leaf in jax.tree.leaves(decoder.params)],
                arrays=arrays,
                stop=decoder.sampling.stop,
                seed=decoder.sampling.seed,
                pace=decoder.measured_pace,
                prompts=[(prompt.id, prompt.token_ids) for prompt in prompts],
                batch_size=batch_size,
                streams=on_text is not None,
                driver=decoder.driver,
            )
        return iter(())


@pytest.fixture
def asked(script, start, monkeypatch, tmp_path):
    """Runs the script up to its first completion and tells everything that an option could have changed."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments):
        seen = Asked()
        monkeypatch.setattr(script, "complete", seen.complete)
        run = start(*arguments)
        assert run.status == 0, run.err
        cache = jax.config.jax_compilation_cache_dir
        files = sorted(path.name for path in tmp_path.iterdir())
        return dict(seen, shown=run.err.split("\n", 1)[1], files=files, cache=cache)

    return call


MESH = ("--mesh", "model=1")
OPTION_EFFECTS = {
    "--prompt": ((), ("--prompt", "more"), "prompts"),
    "--raw-prompt": ((), ("--raw-prompt",), "prompts"),
    "--model": ((), ("--model", "DRAFT"), "weights"),
    "--dtype": ((), ("--dtype", "bfloat16"), "weights"),
    "--drafter": ((), ("--drafter", "none"), "runs"),
    "--num-speculative-tokens": ((), ("--num-speculative-tokens", "2"), "runs"),
    "--prompt-lookup-max": ((), ("--prompt-lookup-max", "7"), "runs"),
    "--prompt-lookup-min": ((), ("--prompt-lookup-min", "2"), "runs"),
    "--draft-model": (("--drafter", "model", "--draft-model", "MODEL"), ("--draft-model", "DRAFT"), "weights"),
    "--exit-layer": (("--model", "DEEP", "--drafter", "early_exit"), ("--exit-layer", "2"), "runs"),
    "--verifier": ((), ("--verifier", "block"), "verifier"),
    "--pace": ((), ("--pace", "always"), "pace"),
    "--temperature": ((), ("--temperature", "0.5"), "arrays"),
    "--top-k": (("--temperature", "1"), ("--top-k", "2"), "arrays"),
    "--top-p": (("--temperature", "1"), ("--top-p", "0.5"), "arrays"),
    "--min-p": (("--temperature", "1"), ("--min-p", "0.5"), "arrays"),
    "--repetition-penalty": ((), ("--repetition-penalty", "2"), "arrays"),
    "--presence-penalty": ((), ("--presence-penalty", "2"), "arrays"),
    "--frequency-penalty": ((), ("--frequency-penalty", "2"), "arrays"),
    "--stop": ((), ("--stop", "x"), "stop"),
    "--seed": ((), ("--seed", "1"), "seed"),
    "--max-new-tokens": ((), ("--max-new-tokens", "5"), "arrays"),
    "--min-tokens": ((), ("--min-tokens", "5"), "arrays"),
    "--ignore-eos": ((), ("--ignore-eos",), "arrays"),
    "--batch-size": (("--no-stream",), ("--batch-size", "2"), "batch_size"),
    "--output": (("--no-stream",), ("--output", "out.jsonl"), "files"),
    "--logprobs": (("--output", "out.jsonl"), ("--logprobs",), "log_probs"),
    "--compare": ((), ("--compare",), "runs"),
    "--stream": ((), ("--no-stream",), "streams"),
    "--per-position": ((), ("--per-position",), "shown"),
    "--parallel": (("--mesh", "model=1"), ("--parallel", "jit"), "driver"),
    "--mesh": ((), ("--mesh", "data=1"), "driver"),
    "--shard-drafter": (("--drafter", "model", "--draft-model", "DRAFT", *MESH), ("--shard-drafter",), "runs"),
    "--compilation-cache": (("--compilation-cache",), ("--no-compilation-cache",), "cache"),
}
"""For each option: what it needs, the option, and what it must change in what the script asks for."""
PROCESSES = {"--coordinator-address": "host:1", "--num-processes": "2", "--process-id": "1"}
ELSEWHERE = {"--prompts", "--allow-vocabulary-mismatch", *PROCESSES} | {
    flag for flag, (path, _) in OPTIONS.items() if path.startswith("job.")
}
"""Options with a test of their own, below or in tests/jobs/test_job.py."""


def test_every_option_has_an_effect_to_test():
    assert set(OPTION_EFFECTS) | ELSEWHERE == set(OPTIONS)


@pytest.mark.parametrize("flag", OPTION_EFFECTS)
def test_case_69_every_option_changes_what_is_asked_for(asked, model, deep, draft_model, flag):
    needed, option, changed = OPTION_EFFECTS[flag]
    names = {"MODEL": model, "DEEP": deep, "DRAFT": draft_model}
    base = ["--prompt", "ab", *(names.get(word, word) for word in needed)]
    before = asked(*base)
    assert asked(*base) == before
    after = asked(*base, *(names.get(word, word) for word in option))
    assert after[changed] != before[changed]


def test_prompts_from_a_file(asked, tmp_path):
    (tmp_path / "prompts.txt").write_text("a\nbc\n")
    assert asked("--prompts", "prompts.txt")["prompts"] == [(0, (USER, 97)), (1, (USER, 98, 99))]


def test_processes_are_joined_before_anything_else(asked, monkeypatch):
    joined = []
    monkeypatch.setattr("specjax.jobs.placement.start", lambda *arguments: joined.append(arguments))
    asked("--prompt", "a", *itertools.chain(*PROCESSES.items()))
    assert joined == [("host:1", 2, 1)]


def test_texts_on_a_mesh_are_those_of_one_device(start, tmp_path):
    """By pmap, whose arrays differ most from those of one device; tests/parallel has all drivers."""
    plain = start("--prompt", "abcab", output=tmp_path / "plain.jsonl")
    run = start("--prompt", "abcab", "--parallel", "pmap", *MESH, output=tmp_path / "mesh.jsonl")
    assert run.status == 0, run.err
    assert run.rows[0]["token_ids"] == plain.rows[0]["token_ids"]


def test_case_43_vocabulary_mismatch_is_refused_unless_allowed(start, tmp_path):
    """Allowed, it costs acceptance only: the greedy tokens are those of plain decoding."""
    other = write_model(tmp_path / "other", seed=1, num_layers=1)
    tokenizer = other / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace("<user>", "<human>"))
    arguments = ["--prompt", "a", "--drafter", "model", "--draft-model", other]
    allow = "--allow-vocabulary-mismatch", "--compare", "--pace", "always"
    refused, allowed = start(*arguments), start(*arguments, *allow)
    assert refused.status == 1
    assert "--allow-vocabulary-mismatch" in refused.err
    assert allowed.status == 0
    assert "tokens: equal for 1 of 1 prompts\n" in allowed.err
    assert float(summary_of(allowed)["num_draft_tokens"][0]) > 0


def test_config_and_set(asked, tmp_path):
    (tmp_path / "mine.py").write_text(
        "from specjax.jobs.settings import NGram, Settings\n"
        "def config():\n"
        "    return Settings(prompt=('hi',), drafter=NGram(num_speculative_tokens=2))\n"
    )
    seen = asked("--config", "mine.py", "--set", "drafter.prompt_lookup_max=9")
    assert seen["prompts"] == [(0, (USER, *b"hi"))]
    assert (seen["runs"][0].num_tokens, seen["runs"][0].prompt_lookup_max) == (2, 9)


def test_text_goes_where_it_is_asked_to_go(start, tmp_path):
    streamed, whole = start("--prompt", "ab"), start("--prompt", "ab", "--no-stream")
    both = start("--prompt", "ab", "--stream", output=tmp_path / "both")
    quiet = start("--prompt", "ab", output=tmp_path / "quiet")
    assert streamed.out == whole.out == both.out == both.rows[0]["text"] + "\n"
    assert quiet.out == ""
    assert both.rows[0]["metrics"]["itl_s"] > 0
    assert quiet.rows[0]["metrics"]["itl_s"] is None


def test_a_batch_job_from_its_command_line(script, model, tmp_path, capsys, monkeypatch):
    """A signal ends it with status 0 and says so; the same command goes on; what is wrong is one line."""
    path, append = tmp_path / "rows.jsonl", PartWriter.append
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in "abcde"))
    command = ["--model", model, "--no-compilation-cache", "--max-new-tokens", "12", "--input", str(path)]
    command += ["--output-dir", str(tmp_path / "out"), "--batch-size", "2", "--pace", "always", "--per-position"]
    monkeypatch.setattr(PartWriter, "append", lambda *args: append(*args) or os.kill(os.getpid(), signal.SIGTERM))
    assert script.main(command) == 0
    assert re.search(r"SIGTERM: [1-4] of 5 rows are complete in \S+; the same command goes on", capsys.readouterr().err)
    monkeypatch.undo()
    assert script.main(command) == 0
    shown = capsys.readouterr().err
    assert re.search(r"│ num_prompts +│ +5 │", shown)
    assert "(unconditional)" in shown
    assert "5 of 5 rows are complete in" in shown
    assert len((tmp_path / "out" / "completions.jsonl").read_text().splitlines()) == 5
    assert script.main([*command, "--process-count", "2"]) == 0
    assert "--merge joins them" in capsys.readouterr().err
    assert script.main([*command, "--seed", "1"]) == 1
    assert re.search(r"^error: expected sampling.seed = 0, [^\n]+\n$", capsys.readouterr().err, re.MULTILINE)


def test_a_device_without_room_is_one_line(script, capsys, monkeypatch):
    def full(settings):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 17.2G\nLargest program allocations:\n...")

    monkeypatch.setattr(script, "batch", full)
    assert script.main(["--input", "rows.jsonl", "--output-dir", "out"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: RESOURCE_EXHAUSTED: 17.2G (")
    assert "--max-prompt-tokens" in said
    assert said.count("\n") == 1


def test_an_interrupted_job_says_how_to_go_on(script, capsys, monkeypatch):
    def interrupt(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(script, "run_job", interrupt)
    assert script.main(["--input", "x", "--output-dir", "y"]) == 130
    assert capsys.readouterr().err.endswith("\ninterrupted at once; the same command goes on from what is on disk\n")


def test_a_stop_string_cuts_the_text(start, tmp_path):
    whole = start("--prompt", "ab", output=tmp_path / "whole").rows[0]
    stop = whole["text"][5]
    cut = start("--prompt", "ab", "--stop", "\x00", "--stop", stop, output=tmp_path / "cut").rows[0]
    assert cut["text"] == whole["text"][: whole["text"].index(stop)]
    assert bytes(cut["token_ids"]).decode() == cut["text"]
    assert (whole["finish_reason"], cut["finish_reason"]) == ("length", "stop")


def test_compiled_programs_are_kept_on_disk(tmp_path):
    configure("float32", cache=True)
    assert jax.jit(lambda x: x * 3 + 1)(2.0) == 7.0
    assert list((tmp_path / "cache" / "compiled").iterdir())
    assert jax.config.jax_default_matmul_precision == "highest"


def test_programs_are_kept_where_jax_is_told_to(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "mine"))
    configure("float32", cache=True)
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "mine")


def test_no_programs_are_kept_when_told_not_to(tmp_path):
    configure("bfloat16", cache=False)
    assert jax.jit(lambda x: x * 3 + 1)(2.0) == 7.0
    assert not (tmp_path / "cache").exists()
    assert jax.config.jax_default_matmul_precision is None
