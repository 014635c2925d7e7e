import dataclasses
import json

import pytest
from small_jobs import VOCAB, write_model

from specjax.drafters.early_exit import EarlyExitDrafter
from specjax.drafters.ngram import NGramDrafter
from specjax.drafters.none import NoDrafter
from specjax.jobs.model import load_model
from specjax.jobs.placement import Placement
from specjax.jobs.settings import DraftModel, EarlyExit, Job, NGram, NoDraft, Sampling, Settings, record
from specjax.verify import Block, ExactMatch, Greedy, Rejection


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return load_model(str(write_model(tmp_path_factory.mktemp("target"))), dtype="float32")


SAMPLED = Sampling(temperature=0.5)
JOB = Job(input="x", output_dir="y")


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: Settings(verifier=Greedy(), sampling=SAMPLED), "--temperature 0 with --verifier greedy, got 0.5"),
        (lambda: Settings(drafter=DraftModel()), "--draft-model with --drafter model"),
        (lambda: Settings(drafter=NoDraft(), compare=True), "--compare with a drafter, got --drafter none"),
        (lambda: Settings(drafter=NoDraft(), per_position=True), "--per-position with a drafter, got --drafter none"),
        (lambda: Settings(drafter=NoDraft(), pace="always"), "--pace with a drafter, got --drafter none"),
        (lambda: Settings(stream=True, batch_size=2), "--stream with --batch-size 1, got 2"),
        (lambda: Settings(batch_size=0), "--batch-size of at least 1, got 0"),
        (lambda: Settings(prompt=("a",), prompts="b"), "--prompt or --prompts, got both"),
        (lambda: Settings(logprobs=True), "--output with --logprobs"),
        (lambda: Settings(prompts="a.txt", output="./b/../a.txt"), "--output and --prompts to be two files"),
        (lambda: Job(input="x"), "--input and --output-dir together, got one"),
        (lambda: Job(output_dir="x"), "--input and --output-dir together, got one"),
        (lambda: Job(merge=True), "--input with --merge, got none"),
        (lambda: Job(process_count=2), "--input with --process-count, got none"),
        (lambda: Job(input="x", output_dir="gs://bucket/y"), "--output-dir on a local or mounted file system"),
        (lambda: Job(input="x", output_dir="y", process_index=1), r"--process-index in 0\.\.0"),
        (lambda: Job(input="x", output_dir="y", max_prompt_tokens=0), "--max-prompt-tokens of at least 1, got 0"),
        (lambda: Settings(job=JOB, prompt=("a",)), "--input without --prompt, got both"),
        (lambda: Settings(job=JOB, prompts="a"), "--input without --prompts, got both"),
        (lambda: Settings(job=JOB, output="a"), "--input without --output, got both"),
        (lambda: Settings(job=JOB, logprobs=True), "--input without --logprobs, got both"),
        (lambda: Settings(job=JOB, compare=True), "--input without --compare, got both"),
        (lambda: Settings(job=JOB, stream=True), "--input without --stream, got both"),
        (
            lambda: Settings(job=JOB, parallel=Placement(coordinator_address="auto")),
            "--input without --coordinator-address, got both: .* with --process-count, --process-index",
        ),
        (
            lambda: Settings(job=JOB, batch_size=2, parallel=Placement(driver="pmap", mesh="data=2")),
            "--parallel shard_map or jit with --input and --mesh data=2, got pmap",
        ),
        (lambda: Settings(sampling=Sampling(stop=("x",), min_tokens=1)), "--stop without --min-tokens"),
        (lambda: Settings(sampling=Sampling(top_k=5)), "--temperature above 0 with --top-k, --top-p or --min-p, got 0"),
        (lambda: Settings(sampling=Sampling(top_p=0.5)), "--temperature above 0"),
        (lambda: Settings(sampling=Sampling(min_p=0.5)), "--temperature above 0"),
        (lambda: Sampling(seed=-1), "seed in"),
        (lambda: Sampling(seed=2**32), "seed in"),
        (lambda: NGram(num_speculative_tokens=0), "num_tokens >= 1"),
        (lambda: NGram(prompt_lookup_min=3, prompt_lookup_max=2), "prompt_lookup_min <= prompt_lookup_max"),
        (lambda: EarlyExit(num_speculative_tokens=0), "num_speculative_tokens >= 1"),
        (lambda: DraftModel(model="x", num_speculative_tokens=0), "num_speculative_tokens >= 1"),
        (
            lambda: Settings(parallel=Placement(mesh="data=2")),
            "--batch-size to be a multiple of the mesh's data=2, got 1",
        ),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(build, says):
    with pytest.raises(ValueError, match=says):
        build()


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"temperature": -1.0}, "temperature in"),
        ({"temperature": 1.0, "top_p": 0.0}, "top_p in"),
        ({"min_tokens": 9, "max_new_tokens": 8}, "min_tokens <= max_tokens"),
    ],
)
def test_values_out_of_range(values, says):
    with pytest.raises(ValueError, match=says):
        Sampling(**values).rows(1, ())


def test_rows_hold_the_values():
    rows = Sampling(temperature=0.5, top_k=3, max_new_tokens=7).rows(2, (256, 9))
    assert rows.temperature.tolist() == [0.5, 0.5]
    assert rows.top_k.tolist() == [3, 3]
    assert rows.max_tokens.tolist() == [7, 7]
    assert rows.stop_token_ids[1].tolist() == [256, 9, -1, -1]
    five = (256, 9, 1, 2, 3)
    deaf = Sampling(ignore_eos=True).rows(1, five).stop_token_ids
    assert set(deaf.ravel().tolist()) == {-1}
    assert deaf.shape == Sampling().rows(1, five).stop_token_ids.shape  # a slot's old ids must not stay behind it


def test_text_is_streamed_where_it_can_be():
    assert Settings().streams
    assert not Settings(output="x").streams
    assert not Settings(batch_size=2).streams
    assert Settings(output="x", stream=True).streams
    assert not Settings(stream=False).streams
    assert not Settings(job=JOB).streams


@pytest.mark.parametrize("verifier", [Rejection(), Block(), ExactMatch()])
def test_which_settings_promise_equal_tokens(verifier):
    assert Settings(verifier=verifier).promises_equal_tokens
    sampled = Settings(verifier=verifier, sampling=SAMPLED)
    assert sampled.promises_equal_tokens == (verifier == ExactMatch())
    assert sampled.effective_pace == ("measured" if verifier == ExactMatch() else "always")


def test_pace_can_be_chosen():
    assert Settings(pace="always").effective_pace == "always"
    assert Settings(pace="measured", sampling=SAMPLED).effective_pace == "measured"
    assert Settings(drafter=NoDraft()).effective_pace == "always"


def test_record_holds_every_field_under_names():
    settings = Settings(drafter=EarlyExit(exit_layer=3), verifier=Block(), sampling=SAMPLED, batch_size=2)
    written = json.loads(json.dumps(record(settings)))
    assert set(written) == {field.name for field in dataclasses.fields(Settings)}
    assert written["drafter"] == {"kind": "early_exit", "exit_layer": 3, "num_speculative_tokens": 4}
    assert written["verifier"] == "block"
    assert written["sampling"]["temperature"] == 0.5
    assert written["sampling"]["seed"] == 0
    assert written["stream"] is False
    assert written["pace"] == "always"


def test_record_names_a_strategy_of_the_users_own():
    @dataclasses.dataclass(frozen=True)
    class Mine(Rejection):
        pass

    assert record(Settings(verifier=Mine()))["verifier"] == "Mine"


def test_drafters_without_weights(target):
    drafter = NGram(num_speculative_tokens=3, prompt_lookup_max=5, prompt_lookup_min=2)
    built = NGramDrafter(num_tokens=3, prompt_lookup_max=5, prompt_lookup_min=2)
    assert drafter.build(target, "float32") == (built, None)
    assert NoDraft().build(target, "float32") == (NoDrafter(), None)
    half = EarlyExitDrafter(target=target.model, exit_layer=1, num_tokens=4)
    assert EarlyExit().build(target, "float32") == (half, None)
    assert EarlyExit(exit_layer=2).build(target, "float32")[0].exit_layer == 2
    with pytest.raises(ValueError, match=r"exit_layer in 1\.\.2"):
        EarlyExit(exit_layer=3).build(target, "float32")


def test_draft_model_is_loaded_as_wide_as_the_target(target, tmp_path):
    name = str(write_model(tmp_path, seed=1, num_layers=1))
    drafter, params = DraftModel(model=name, num_speculative_tokens=2).build(target, "bfloat16")
    assert (drafter.num_tokens, drafter.vocab_size, drafter.model.config.num_layers) == (2, VOCAB, 1)
    assert params["embed"].dtype == "bfloat16"


def test_draft_model_of_another_vocabulary_is_refused(target, tmp_path):
    name = write_model(tmp_path)
    tokenizer = name / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace("<user>", "<human>"))
    with pytest.raises(ValueError, match=r"share a vocabulary, got id 257 .*--allow-vocabulary-mismatch"):
        DraftModel(model=str(name)).build(target, "float32")
    drafter, _ = DraftModel(model=str(name), allow_vocabulary_mismatch=True).build(target, "float32")
    assert drafter.num_tokens == 4


def test_loaded_model_knows_every_stop_id(target, tmp_path):
    assert target.eos_ids == (256,)
    directory = write_model(tmp_path)
    (directory / "generation_config.json").write_text('{"eos_token_id": [257, 256]}')
    config = directory / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"eos_token_id": 259}))
    assert load_model(str(directory), dtype="float32").eos_ids == (256, 257)
    (directory / "generation_config.json").unlink()
    assert load_model(str(directory), dtype="float32").eos_ids == (256, 259)
