"""What `scripts/benchmark.py` makes of its command line. Case 69: no option is without effect."""

import dataclasses
import shlex

import pytest

from specjax.benchmark.options import AXES, COMMANDS, REFUSED, drafter_options, parse_plan, recorded
from specjax.benchmark.questions import OWN_QUESTIONS
from specjax.jobs.options import OPTIONS, parse_options
from specjax.jobs.settings import EarlyExit, NGram
from specjax.verify import Block


def plan_of(*arguments, command="run"):
    return parse_plan([command, "--output-dir", "out", *arguments])


def test_defaults():
    plan = plan_of()
    assert (plan.command, plan.output_dir, plan.per_category, plan.synthetic_acceptance) == ("run", "out", None, None)
    (settings,) = plan.points
    assert settings.prompts == str(OWN_QUESTIONS)
    assert settings.effective_pace == "measured"


def test_sweeps_measure_every_combination_and_always_draft():
    plan = plan_of("--batch-size", "1,4", "--drafter", "ngram,early_exit", "--exit-layer", "1", command="sweep")
    assert len(plan.points) == len(plan.values) == 2 * 4 * 2
    assert plan.values[1] == {"--drafter": "ngram", "--num-speculative-tokens": "1", "--batch-size": "4"}
    assert {settings.pace for settings in plan.points} == {"always"}
    assert plan.points[0].drafter == NGram(num_speculative_tokens=1)
    assert plan.points[-1].drafter == EarlyExit(num_speculative_tokens=8, exit_layer=1)


def test_tuning_tries_windows_and_drafters():
    plan = plan_of("--drafter", "early_exit,ngram", "--prompt-lookup-max", "2", command="tune")
    windows = [settings.drafter.num_speculative_tokens for settings in plan.points]
    assert windows == [1, 2, 4, 6, 8] * 2
    assert plan.points[-1].drafter == NGram(num_speculative_tokens=8, prompt_lookup_max=2)


@pytest.mark.parametrize(
    ("command", "arguments", "says"),
    [
        ("run", ["--batch-size", "1,2"], "one value of --batch-size with run, got 1,2"),
        ("tune", ["--temperature", "0,1"], "one value of --temperature with tune"),
        ("sweep", ["--batch-size", "1,1"], "different values of --batch-size"),
        ("sweep", ["--batch-size", "1,"], "different values of --batch-size"),
        ("sweep", ["--num-speculative-tokens", "0"], "num_tokens >= 1"),
        ("sweep", ["--exit-layer", "1"], "--exit-layer with --drafter early_exit, got --drafter ngram"),
        ("sweep", ["--verifier", "greedy", "--temperature", "0,1"], "--temperature 0 with --verifier greedy"),
        ("run", ["--drafter", "none"], "a drafter to measure"),
        ("run", ["--per-category", "0"], "--per-category of at least 1, got 0"),
        ("run", ["--synthetic-acceptance", "2"], r"--synthetic-acceptance in 0\.\.1, got 2"),
        ("run", ["--synthetic-acceptance", "nan"], r"--synthetic-acceptance in 0\.\.1"),
        (
            "run",
            ["--synthetic-acceptance", "1", "--verifier", "block"],
            "--verifier or --synthetic-acceptance, got both",
        ),
        ("tune", ["--synthetic-acceptance", "1"], "tune without --synthetic-acceptance"),
        ("run", ["--prompts", "x.jsonl"], "--questions, got --prompts"),
        ("run", ["--input", "x.jsonl"], "--questions, got --input"),
        ("walk", [], "invalid choice: 'walk'"),
        ("run", ["--no-such-thing"], "unrecognized arguments: --no-such-thing"),
    ],
)
def test_what_does_not_go_together_is_refused_by_name_here_too(command, arguments, says):
    with pytest.raises(ValueError, match=says):
        plan_of(*arguments, command=command)


ASKED = {
    "--prompt": ["--prompt", "x"],
    "--stop": ["--stop", "x"],
    "--output": ["--output", "x"],
    "--logprobs": ["--logprobs", "--output", "y"],
    "--parallel": ["--parallel", "jit"],
    "--mesh": ["--mesh", "model=1"],
    "--compare": ["--compare"],
    "--per-position": ["--per-position"],
    "--stream": ["--stream"],
    "--coordinator-address": ["--coordinator-address", "auto"],
}
"""What each refused option is given with; --num-processes and --process-id do not stand without an address."""


def test_every_refused_option_is_tested():
    assert {*ASKED, "--num-processes", "--process-id"} == {*REFUSED}


@pytest.mark.parametrize("flag", [*ASKED])
def test_options_that_would_change_nothing_are_refused(flag):
    with pytest.raises(ValueError, match=f"expected (no )?{flag}[, ]"):
        plan_of(*ASKED[flag])


CHANGES = {
    "--questions": ["q.jsonl"],
    "--per-category": ["2"],
    "--output-dir": ["elsewhere"],
    "--synthetic-acceptance": ["0.5"],
    "--verifier": ["block"],
    "--drafter": ["early_exit"],
    "--num-speculative-tokens": ["3"],
    "--temperature": ["0.5"],
    "--batch-size": ["3"],
    "--pace": ["always"],
}


@pytest.mark.parametrize("flag", [*CHANGES])
def test_case_69_every_benchmark_option_changes_the_plan(flag):
    assert {*AXES} <= {*CHANGES}
    before, after = plan_of(), plan_of(flag, *CHANGES[flag])
    assert dataclasses.replace(after, values=before.values) != before


def test_case_69_options_of_generate_reach_every_point():
    plan = plan_of("--verifier", "block,rejection", "--max-new-tokens", "7", "--no-compilation-cache", command="sweep")
    assert {settings.sampling.max_new_tokens for settings in plan.points} == {7}
    assert not any(settings.compilation_cache for settings in plan.points)
    assert plan.points[0].verifier == Block()


@pytest.mark.parametrize(
    "drafter",
    [
        ["--drafter", "ngram", "--prompt-lookup-max", "2", "--prompt-lookup-min", "2"],
        ["--drafter", "early_exit", "--exit-layer", "3"],
        ["--drafter", "early_exit"],
        ["--drafter", "model", "--draft-model", "a path/small", "--allow-vocabulary-mismatch"],
    ],
)
def test_what_tune_recommends_is_taken_by_generate(drafter):
    for settings in plan_of(*drafter, command="tune").points:
        words = shlex.split(drafter_options(settings))
        assert parse_options(["--prompt", "x", *words]).drafter == settings.drafter


def test_greedy_points_of_a_sweep_go_without_filters():
    plan = plan_of("--temperature", "0,0.7", "--top-p", "0.9", "--num-speculative-tokens", "2", command="sweep")
    assert [(one.sampling.temperature, one.sampling.top_p) for one in plan.points] == [(0, 1), (0.7, 0.9)]
    assert [point.get("--top-p") for point in recorded(plan)["points"]] == ["1", None]
    with pytest.raises(ValueError, match="--temperature above 0 with --top-k, --top-p"):
        plan_of("--top-p", "0.9", command="sweep")


def test_what_is_recorded():
    known = recorded(plan_of("--synthetic-acceptance", "0.5"))
    assert (known["verifier"], known["synthetic_acceptance"], known["pace"]) == ("synthetic", 0.5, "always")
    assert recorded(plan_of("--verifier", "block"))["verifier"] == "block"
    assert "synthetic_acceptance" not in recorded(plan_of())


def test_help_names_every_option(capsys):
    with pytest.raises(SystemExit):
        parse_plan(["--help"])
    shown = capsys.readouterr().out
    assert all(command in shown for command in COMMANDS)
    refused = {*REFUSED, "--prompts"} | {flag for flag, (path, _) in OPTIONS.items() if path.startswith("job.")}
    own = {"--output-dir"}
    assert {flag for flag in OPTIONS if f"  {flag} " in shown} - own == {*OPTIONS} - refused - own
