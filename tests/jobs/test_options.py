import dataclasses
import json
import re
from pathlib import Path

import pytest

from specjax.jobs.options import OPTIONS, load_config, parse_options, with_changes
from specjax.jobs.settings import DraftModel, EarlyExit, NGram, NoDraft, Sampling, Settings, record
from specjax.verify import Block, ExactMatch

CONFIGS = Path(__file__).parents[2] / "configs"
PROMPT = ("--set", 'prompt=["p"]')
MODEL = ("--drafter", "model", "--draft-model", "a")
JOB = ("--input", "a", "--output-dir", "b")
PROCESSES = ("--coordinator-address", "a:1", "--num-processes", "2", "--process-id", "0")
EXAMPLES = {
    "--prompt": ("--prompt", "a"),
    "--prompts": ("--set", "prompts=b.txt", "--prompts", "a.txt"),
    "--raw-prompt": ("--raw-prompt",),
    "--model": ("--model", "a"),
    "--dtype": ("--dtype", "bfloat16"),
    "--drafter": ("--drafter", "none"),
    "--num-speculative-tokens": ("--num-speculative-tokens", "2"),
    "--prompt-lookup-max": ("--prompt-lookup-max", "7"),
    "--prompt-lookup-min": ("--prompt-lookup-min", "2"),
    "--draft-model": (*MODEL, "--draft-model", "b"),
    "--allow-vocabulary-mismatch": (*MODEL, "--allow-vocabulary-mismatch"),
    "--exit-layer": ("--drafter", "early_exit", "--exit-layer", "1"),
    "--verifier": ("--verifier", "block"),
    "--pace": ("--pace", "always"),
    "--temperature": ("--temperature", "0.5"),
    "--top-k": ("--temperature", "1", "--top-k", "2"),
    "--top-p": ("--temperature", "1", "--top-p", "0.5"),
    "--min-p": ("--temperature", "1", "--min-p", "0.5"),
    "--repetition-penalty": ("--repetition-penalty", "2"),
    "--presence-penalty": ("--presence-penalty", "2"),
    "--frequency-penalty": ("--frequency-penalty", "2"),
    "--stop": ("--stop", "a", "--stop", "b"),
    "--seed": ("--seed", "1"),
    "--max-new-tokens": ("--max-new-tokens", "5"),
    "--min-tokens": ("--min-tokens", "5"),
    "--ignore-eos": ("--ignore-eos",),
    "--batch-size": ("--batch-size", "2"),
    "--output": ("--output", "a"),
    "--logprobs": ("--output", "a", "--logprobs"),
    "--compare": ("--compare",),
    "--stream": ("--no-stream",),
    "--per-position": ("--per-position",),
    "--parallel": ("--parallel", "jit"),
    "--mesh": ("--mesh", "model=2"),
    "--shard-drafter": (*MODEL, "--shard-drafter"),
    "--coordinator-address": ("--coordinator-address", "auto"),
    "--num-processes": (*PROCESSES, "--num-processes", "3"),
    "--process-id": (*PROCESSES, "--process-id", "1"),
    "--compilation-cache": ("--no-compilation-cache",),
    "--input": (*JOB, "--input", "c"),
    "--output-dir": (*JOB, "--output-dir", "c"),
    "--on-error": (*JOB, "--on-error", "skip"),
    "--long-prompts": (*JOB, "--long-prompts", "truncate"),
    "--max-prompt-tokens": (*JOB, "--max-prompt-tokens", "5"),
    "--process-index": (*JOB, "--process-count", "2", "--process-index", "1"),
    "--process-count": (*JOB, "--process-count", "2"),
    "--merge": (*JOB, "--merge"),
}
"""For each option, a command line that ends with it and needs it."""


def flat(settings):
    nested = record(settings)
    return nested | {
        f"{owner}.{name}": value
        for owner in ("drafter", "sampling", "parallel", "job")
        for name, value in nested[owner].items()
    }


def test_every_option_has_an_example():
    assert set(EXAMPLES) == set(OPTIONS)


@pytest.mark.parametrize("flag", OPTIONS)
def test_every_option_changes_the_recorded_value_of_its_field(flag):
    example = EXAMPLES[flag]
    at = max(index for index, word in enumerate(example) if word in (flag, flag.replace("--", "--no-", 1)))
    without, path = example[: at - 2 if flag == "--stop" else at], OPTIONS[flag][0]
    prompt = () if flag == "--prompts" or path.startswith("job.") else PROMPT
    before, after = (flat(parse_options([*prompt, *arguments])) for arguments in (without, example))
    assert after[path] != before[path]


def test_values_have_the_types_of_their_fields():
    settings = parse_options(
        [*PROMPT, "--temperature", "1", "--top-k", "3", "--stop", "a", "--stop", 'b"', "--compare"]
    )
    assert settings.sampling == Sampling(temperature=1.0, top_k=3, stop=("a", 'b"'))
    assert type(settings.sampling.temperature) is float
    assert settings.compare is True
    assert parse_options(["--prompt", "[1]"]).prompt == ("[1]",)


def test_flags_override_set_which_overrides_the_config(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "from specjax.jobs.settings import *\n"
        "def config():\n"
        "    return Settings(model='a', batch_size=2, sampling=Sampling(seed=1, max_new_tokens=1, min_tokens=1))\n"
    )
    config = [*PROMPT, "--config", str(path)]
    assert load_config(path).sampling.seed == 1
    settings = parse_options(
        [*config, "--set", "model=b", "--set", "sampling.seed=2", "--seed", "3", "--set", "model=c"]
    )
    assert (settings.model, settings.batch_size) == ("c", 2)
    assert settings.sampling == Sampling(seed=3, max_new_tokens=1, min_tokens=1)
    assert parse_options([*config, "--max-new-tokens", "9", "--min-tokens", "9"]).sampling.min_tokens == 9


def test_another_strategy_starts_from_its_defaults_and_the_same_one_keeps_its_values():
    settings = Settings(drafter=NGram(num_speculative_tokens=9, prompt_lookup_max=7))
    assert with_changes(settings, {"drafter": "ngram"}).drafter == settings.drafter
    changed = with_changes(settings, {"drafter.prompt_lookup_min": "5"}).drafter
    assert changed == dataclasses.replace(settings.drafter, prompt_lookup_min=5)
    early = with_changes(settings, {"drafter.exit_layer": "3", "drafter": "early_exit"}).drafter
    assert early == EarlyExit(exit_layer=3)
    assert with_changes(settings, {"verifier": "exact_match"}).verifier == ExactMatch()


def test_none_where_a_field_may_be_none():
    settings = Settings(stream=False, output="x", drafter=EarlyExit(exit_layer=3))
    cleared = with_changes(settings, {"stream": "none", "output": "none", "drafter.exit_layer": "none"})
    assert (cleared.stream, cleared.output, cleared.drafter.exit_layer) == (None, None, None)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--exit-layer", "3"], "expected --exit-layer with --drafter early_exit, got --drafter ngram"),
        (["--draft-model", "x"], "expected --draft-model with --drafter model, got --drafter ngram"),
        (["--drafter", "model"], "expected --draft-model with --drafter model, got none"),
        (["--drafter", "none", "--prompt-lookup-max", "3"], "expected --prompt-lookup-max with --drafter ngram, got"),
        (
            ["--drafter", "none", "--num-speculative-tokens", "3"],
            "--num-speculative-tokens with --drafter ngram or model or early_exit, got --drafter none",
        ),
        (["--drafter", "best"], "expected --drafter to be one of ngram, model, early_exit, none, got 'best'"),
        (["--verifier", "best"], "expected --verifier to be one of rejection, block, exact_match, greedy, got 'best'"),
        (["--dtype", "float16"], "expected --dtype to be one of float32, bfloat16, got 'float16'"),
        (["--pace", "fast"], "expected --pace to be one of always, measured, got 'fast'"),
        (["--temperature", "hot"], "expected --temperature to be of type float, got 'hot'"),
        (["--seed", "1.5"], "expected --seed to be of type int, got '1.5'"),
        (["--verifier", "greedy", "--temperature", "1"], "--temperature 0 with --verifier greedy"),
        (["--temperature", "-1"], "expected temperature in"),
        (["--min-tokens", "9", "--max-new-tokens", "8"], "min_tokens <= max_tokens"),
        (["--set", "compare"], "expected --set path=value, got 'compare'"),
        (["--set", "compare=yes"], "expected --compare to be one of true, false, got 'yes'"),
        (["--set", "colour=red"], "expected FIELD with FIELD among model, .*got colour"),
        (["--set", "sampling.heat=1"], r"expected sampling\.FIELD with FIELD among temperature, .*got sampling\.heat"),
        (["--set", "sampling=1"], "expected sampling to be of type Sampling, got '1'"),
        (["--set", "model.size=1"], r"FIELD among nothing, got model\.size"),
        (["--set", "drafter.colour=red"], r"expected drafter\.FIELD with FIELD among num_spec"),
        (["--set", "verifier.x=1"], r"expected verifier\.FIELD with FIELD among nothing"),
        (["--set", "sampling.stop=a"], "expected --stop to be a JSON list of strings, got 'a'"),
        (["--set", "sampling.stop=[1]"], "expected --stop to be a JSON list of strings"),
        (["--speed", "1"], "unrecognized arguments: --speed"),
        (["--temp", "1"], "unrecognized arguments: --temp"),
        (["--seed"], "expected one argument"),
        (["--set", "prompt=[]"], "expected --prompt, --prompts or --input, got none"),
        (["text"], "unrecognized arguments: text"),
        (["--config", "missing.py"], "expected --config to be a Python file, got missing.py"),
    ],
)
def test_wrong_command_lines_are_refused(arguments, says):
    with pytest.raises(ValueError, match=says):
        parse_options([*PROMPT, *arguments])


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("x = 1", "AttributeError"),
        ("def config(: pass", "SyntaxError"),
        ("def config(): return {}", "expected config.* to return Settings, got dict"),
        ("def config(): raise ValueError('expected fish')", "ValueError: expected fish"),
    ],
)
def test_a_config_that_fails_is_named(tmp_path, source, says):
    path = tmp_path / "broken.py"
    path.write_text(source)
    with pytest.raises(ValueError, match=f"broken.py.*{says}|{says}.*"):
        load_config(path)


def test_configs_of_the_repository():
    configs = {path.stem: load_config(path) for path in CONFIGS.glob("*.py")}
    assert configs["default"] == Settings()
    assert parse_options(["--prompt", "a"]) == Settings(prompt=("a",))
    assert isinstance(configs["plain"].drafter, NoDraft)
    exact = configs["smollm2_exact_match"]
    assert exact.verifier == ExactMatch()
    assert exact.sampling.temperature > 0
    early = configs["smollm2_early_exit"]
    assert isinstance(early.drafter, EarlyExit)
    assert early.verifier == Block()
    assert len(configs) == 4


def test_help_shows_every_option(capsys):
    with pytest.raises(SystemExit) as stopped:
        parse_options(["--help"], description="Says so.")
    shown = capsys.readouterr().out
    assert stopped.value.code == 0
    assert all(flag in shown for flag in (*OPTIONS, "--config", "--set", "Says so."))
    said = re.findall(r"\(default: ([^)]*)\)", " ".join(shown.split()))
    assert {"ngram", "rejection", "float32", "128", "0.0", "ngram 6, model 4, early_exit 4"} <= {*said}
    assert not {"None", "False", "()"} & {*said}


def test_record_of_a_command_line_is_json():
    settings = parse_options([*MODEL, "--prompt", "a"])
    assert settings.drafter == DraftModel(model="a")
    assert json.loads(json.dumps(record(settings)))["drafter"]["kind"] == "model"
