import dataclasses
import re

import pytest

from specjax.jobs.checks import REFUSED, Checks, parse_checks
from specjax.jobs.options import OPTIONS, parse_options
from specjax.jobs.settings import EarlyExit, NGram

PROMPT = ["--prompt", "p"]


def test_options_of_generate_mean_what_they_mean_there():
    arguments = [*PROMPT, "--dtype", "bfloat16", "--temperature", "0.8", "--top-p", "0.95", "--seed", "3"]
    arguments += ["--verifier", "block", "--batch-size", "4", "--output", "x.json", "--set", "sampling.top_k=7"]
    settings, checks = parse_checks(arguments)
    assert settings == dataclasses.replace(parse_options(arguments), pace="always")
    assert checks == Checks(windows=(6,), num_keys=1024, joint_tokens=3)


def test_several_windows_and_sizes():
    arguments = ["--num-speculative-tokens", "1,4,8", "--num-keys", "100", "--joint-tokens", "2"]
    settings, checks = parse_checks([*PROMPT, "--drafter", "early_exit", *arguments])
    assert settings.drafter == EarlyExit(num_speculative_tokens=1)
    assert checks == Checks(windows=(1, 4, 8), num_keys=100, joint_tokens=2)


def test_the_window_of_a_config_file_is_kept(tmp_path):
    config = tmp_path / "mine.py"
    config.write_text(
        "from specjax.jobs.settings import NGram, Settings\n"
        "def config():\n"
        "    return Settings(prompt=('p',), drafter=NGram(num_speculative_tokens=3, prompt_lookup_max=2))\n"
    )
    assert parse_checks(["--config", str(config)])[1].windows == (3,)
    settings, checks = parse_checks(["--config", str(config), "--num-speculative-tokens", "5,2"])
    assert settings.drafter == NGram(num_speculative_tokens=5, prompt_lookup_max=2)
    assert checks.windows == (5, 2)


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["--drafter", "none"], ["a drafter", "--drafter none"]),
        (["--drafter", "none", "--num-speculative-tokens", "4"], ["--num-speculative-tokens", "--drafter none"]),
        (["--num-speculative-tokens", "four"], ["--num-speculative-tokens", "'four'"]),
        (["--num-speculative-tokens", "4,"], ["--num-speculative-tokens", "expected a whole number, got ''"]),
        (["--num-speculative-tokens", "4,4"], ["--num-speculative-tokens", "different", "[4, 4]"]),
        (["--num-speculative-tokens", "4,0"], ["--num-speculative-tokens", ">= 1", "[4, 0]"]),
        (["--num-keys", "-1"], ["--num-keys >= 0", "-1"]),
        (["--num-keys", "some"], ["--num-keys", "expected a whole number, got 'some'"]),
        (["--joint-tokens", "4"], ["--joint-tokens in 1..3", "4"]),
        (["--joint-tokens"], ["--joint-tokens", "expected one argument"]),
        (["--colour"], ["--colour"]),
        (["--compare"], ["no --compare"]),
        (["--per-position"], ["no --per-position"]),
        (["--no-stream"], ["no --stream"]),
        (["--pace", "measured"], ["no --pace"]),
        (["--mesh", "model=2"], ["no --mesh"]),
        (["--parallel", "jit"], ["no --parallel"]),
        (["--coordinator-address", "auto"], ["no --coordinator-address"]),
        (["--output", "x", "--logprobs"], ["no --logprobs"]),
        (["--set", "compare=true"], ["no --compare"]),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(arguments, names):
    with pytest.raises(ValueError, match=re.escape(names[0])) as error:
        parse_checks([*PROMPT, *arguments])
    assert all(name in str(error.value) for name in names)


def test_help_has_every_option(capsys):
    with pytest.raises(SystemExit) as end:
        parse_checks(["--help"], description="What this does.")
    shown = capsys.readouterr().out
    assert end.value.code == 0
    assert "What this does." in shown
    listed = set(re.findall(r"^  (--[a-z0-9-]+)", shown, re.MULTILINE))
    assert listed >= set(OPTIONS) - set(REFUSED) | {"--num-keys", "--joint-tokens", "--config"}
    assert not listed & set(REFUSED)
