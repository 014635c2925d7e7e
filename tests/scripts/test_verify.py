"""scripts/verify.py from its command line, in this process."""

import json
import re
import types

import pytest
from small_jobs import write_model

SAMPLED = ("--temperature", "1", "--top-k", "3", "--num-speculative-tokens", "4")
ACCEPT_ALL = """
import dataclasses
import jax.numpy as jnp
from specjax.jobs.settings import NGram, Sampling, Settings
from specjax.verify import ExactMatch

@dataclasses.dataclass(frozen=True)
class AcceptAll(ExactMatch):
    def __call__(self, keys, start, draft, log_probs):
        verdict = super().__call__(keys, start, draft, log_probs)
        kept = jnp.arange(log_probs.shape[1]) < draft.length[:, None]
        tokens = jnp.where(kept, jnp.pad(draft.tokens, ((0, 0), (0, 1))), verdict.tokens)
        return verdict.replace(tokens=tokens, num_accepted=draft.length)

def config():
    return Settings(verifier=AcceptAll())
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_model(tmp_path_factory.mktemp("target"), num_layers=1))


@pytest.fixture
def start(script, model, capsys, tmp_path):
    """Runs the script on two prompts; returns its exit status, its last lines, its table and its report."""
    output = tmp_path / "report.json"
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "abcab", "id": "one"}\n{"messages": [{"role": "user", "content": "xyz!xyz"}]}\n')

    def call(*arguments):
        shared = ["--model", model, "--no-compilation-cache", "--prompts", prompts, "--max-new-tokens", "12"]
        status = script.main([*map(str, [*shared, "--output", output, *arguments])])
        shown = capsys.readouterr()
        text = output.read_text() if output.exists() else ""
        rows = re.findall(r"^│ (\d+) +│ (\w+) +│ ([\w ]+?) +│", shown.err, re.MULTILINE)
        table = {(int(window), level): verdict for window, level, verdict in rows}
        return types.SimpleNamespace(
            status=status, out=shown.out, err=shown.err, table=table, report=json.loads(text) if text else None
        )

    return call


def test_a_sound_greedy_run_passes(start):
    run = start("--num-speculative-tokens", "1,4")
    assert (run.status, run.out) == (0, "passed: 4 of 6 verdicts, 2 not judged\n")
    for window in (1, 4):
        levels = {level: run.table[window, level] for level in ("distribution", "tokens", "bits")}
        assert levels == {"distribution": "not judged", "tokens": "passed", "bits": "passed"}
    assert run.report["passed"] is True
    assert [result["num_speculative_tokens"] for result in run.report["results"]] == [1, 4]
    for result in run.report["results"]:
        assert (result["tokens"]["num_equal_prompts"], result["tokens"]["num_tokens"]) == (2, 24)
        assert result["tokens"]["num_draft_tokens"] > 0
        assert result["divergences"] == []
        assert 0 < result["bits"]["max_logit_difference"] < 1e-5
        assert result["bits"]["num_places"] == 24
    assert run.report["settings"]["model"]
    assert run.report["environment"]["jax_default_matmul_precision"] == "highest"


def test_a_sound_sampled_run_passes_on_all_levels(start):
    run = start(*SAMPLED, "--verifier", "exact_match", "--num-keys", "600", "--joint-tokens", "2")
    assert (run.status, run.out) == (0, "passed: 3 of 3 verdicts, 0 not judged\n")
    distribution = run.report["results"][0]["distribution"]
    assert distribution["num_rows"] == 640
    assert set(distribution["tests"]) == {"first 1 against its law", "first 1 against plain", "first 2 against plain"}
    assert all(test["p_value"] >= 1e-4 for test in distribution["tests"].values())
    assert distribution["mean_total_variation"] < 1e-5


def test_no_keys_no_tests(start):
    run = start(*SAMPLED, "--verifier", "exact_match", "--num-keys", "0")
    assert (run.status, run.out) == (0, "passed: 2 of 3 verdicts, 1 not judged\n")
    assert "tests" not in run.report["results"][0]["distribution"]


def test_nothing_judged_is_no_pass(start):
    """Logits were read, but of what came of the drafts nothing was judged."""
    run = start(*SAMPLED, "--verifier", "rejection", "--num-keys", "0")
    assert (run.status, run.out) == (3, "not judged: neither law nor tokens at K = 4\n")
    assert run.table[4, "bits"] == "passed"
    assert run.report["passed"] is None


def test_tokens_of_all_texts_are_held_against_their_laws(start, tmp_path_factory):
    """A drafter that samples, and as many tokens as it takes."""
    deep = str(write_model(tmp_path_factory.mktemp("deep"), num_layers=2))
    drafter = ("--model", deep, "--drafter", "early_exit", "--exit-layer", "1", "--verifier", "block")
    options = ("--num-speculative-tokens", "3", "--temperature", "1", "--num-keys", "0", "--batch-size", "2")
    run = start(*drafter, *options, "--max-new-tokens", "100", "--min-tokens", "100")
    assert (run.status, run.out) == (0, "passed: 2 of 3 verdicts, 1 not judged\n")
    distribution, tokens = (run.report["results"][0][level] for level in ("distribution", "tokens"))
    assert tokens["num_draft_tokens"] > tokens["num_accepted_tokens"] > 0
    assert distribution["places"]["num_tokens"] == 200
    assert distribution["places"]["p_value"] >= 1e-4


def test_a_verifier_that_accepts_everything_fails_with_the_place(start, tmp_path):
    config = tmp_path / "broken.py"
    config.write_text(ACCEPT_ALL)
    run = start("--config", config, "--num-speculative-tokens", "4")
    assert run.status == 1
    assert run.table[4, "tokens"] == "FAILED"
    assert run.table[4, "bits"] == "passed"
    found = run.report["results"][0]["divergences"][0]
    assert found["prompt_id"] == "one"
    assert found["index"] < 4
    assert found["within_rounding"] is False
    line = f"failed: K = 4, tokens: .*, the first one at id 'one', output token {found['index']}: {found['plain_id']} "
    assert re.match(line, run.out)
    assert run.out.count("\n") == 1
    assert run.report["failures"] == [run.out.removeprefix("failed: ").rstrip("\n")]


def test_a_verifier_that_accepts_everything_fails_in_law(start, tmp_path):
    config = tmp_path / "broken.py"
    config.write_text(
        ACCEPT_ALL.replace("AcceptAll(ExactMatch)", "AcceptAll(Rejection)").replace("ExactMatch", "Rejection")
    )
    run = start("--config", config, *SAMPLED, "--num-keys", "600", "--joint-tokens", "2")
    assert run.status == 1
    assert [run.table[4, level] for level in ("distribution", "tokens", "bits")] == ["FAILED", "not judged", "passed"]
    assert run.out.startswith("failed: K = 4, distribution: 640 rows")


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["--drafter", "none"], 2, "--drafter none"),
        (["--compare"], 2, "--compare"),
        (["--num-keys", "x"], 2, "--num-keys"),
        (["--model", "no/where/at-all"], 1, "expected"),
        (["--output", "missing/report.json"], 1, "missing/report.json"),
        (["--prompts", "missing.jsonl"], 1, "missing.jsonl"),
        (["--max-new-tokens", "200"], 1, "within the target's 128 positions"),
    ],
)
def test_errors_are_one_line(start, arguments, status, says):
    run = start(*arguments)
    assert run.status == status
    errors = [line for line in run.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert says in errors[0]
    assert run.out == ""


def test_interruption(script, start, monkeypatch):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(script, "compare_texts", interrupted)
    run = start()
    assert run.status == 130
    assert "interrupted: nothing was judged" in run.err
