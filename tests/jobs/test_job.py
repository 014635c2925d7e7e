"""A batch job from its rows to its files, in this process. Cases 65, 69 and 70; crashes are in test_job_crash.py."""

import errno
import json
import os
import signal

import pytest
from small_jobs import NEW, TEXTS, USER, named

from specjax.jobs import job, parts
from specjax.jobs.completion import complete
from specjax.jobs.decoder import build_decoder
from specjax.jobs.job import caught_signals
from specjax.jobs.options import parse_options
from specjax.jobs.parts import PartWriter
from specjax.jobs.prompts import Prompt, encode_prompts

pytestmark = pytest.mark.usefixtures("quickly")


def test_files_of_a_job(start, files, model, tmp_path):
    outcome = start(named())
    assert (outcome.done, outcome.total, outcome.signal) == (10, 10, None)
    rows = files()
    assert [row["id"] for row in rows] == [f"row {index}" for index in range(10)]
    for row, text in zip(rows, TEXTS, strict=True):
        assert bytes(row["token_ids"]).decode() == row["text"]
        assert row["finish_reason"] == "length"
        assert row["metrics"]["num_emitted_tokens"] == NEW
        assert row["metrics"]["num_prompt_tokens"] == 1 + len(text.encode())
    summary, manifest = (json.loads(files(name, raw=True)) for name in ("summary.json", "manifest.json"))
    assert summary == outcome.summary
    assert summary["num_prompts"] == 10
    for name in ("num_emitted_tokens", "num_spec_steps", "num_draft_tokens", "num_accepted_tokens"):
        assert summary[name] == sum(row["metrics"][name] for row in rows)
    assert summary["acceptance_histogram"] == [
        sum(counts) for counts in zip(*(row["metrics"]["acceptance_histogram"] for row in rows), strict=True)
    ]
    assert summary["output_tokens_per_second"] == 10 * NEW / summary["decoding_time_s"]
    assert summary["compile_time_s"] > 0
    assert summary["peak_host_bytes"] > 2**25
    assert summary["host_time_s"] > 0
    assert summary["host_share"] == summary["host_time_s"] / summary["decoding_time_s"]
    assert summary["predicted_speedup"] is summary["plain_step_s"] is None  # it always speculates
    assert len(manifest["model"]["sha256"]) == 64
    assert manifest["draft_model"] is None
    assert manifest["settings"]["drafter"]["num_speculative_tokens"] == 6
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "completions-00000.jsonl",
        "completions.jsonl",
        "manifest.json",
        "summary.json",
    ]


def test_tokens_are_those_of_the_library(start, files, model):
    """Sampled: the row's key comes from the seed and its id."""
    options = ["--temperature", "1.3", "--seed", "5"]
    start(named(), *options)
    settings = parse_options(["--prompt", "x", "--model", model, "--max-new-tokens", str(NEW), *options])
    decoder = build_decoder(settings)
    prompts = [Prompt(id=row["id"], content=row["prompt"]) for row in named()]
    batches = complete(decoder, encode_prompts(decoder.tokenizer, prompts), batch_size=3)
    wanted = [list(row.token_ids) for batch in batches for row in batch.completions]
    assert [row["token_ids"] for row in files()] == wanted
    assert wanted[0] != wanted[2]  # equal prompts of two ids


def test_case_70_cut_anywhere_and_resumed(start, files, tmp_path):
    """After every line and in the middle of every line; with two batch sizes; an empty prompt is skipped each time."""
    rows = [*named()[:6], {"id": "empty", "messages": []}]
    start(rows, "--on-error", "skip")
    whole, part = files(raw=True), files("completions-00000.jsonl", raw=True)
    ends = [index + 1 for index, byte in enumerate(part) if byte == ord("\n")]
    assert len(ends) == 7
    for place, end in enumerate(ends):
        cut = tmp_path / "out" / "completions-00000.jsonl"
        cut.write_bytes(part[: end - 40 * (place % 2)])
        outcome = start(None, "--on-error", "skip", batch_size=2 + place % 2)
        assert outcome.done == 6
        assert files(raw=True) == whole
        ids = [row["id"] for row in files("completions-00000.jsonl")]
        assert sorted(ids) == sorted(row["id"] for row in rows)
        assert outcome.summary["num_emitted_tokens"] == 6 * NEW
    assert [row["id"] for row in files("errors.jsonl")] == ["empty"]


def test_case_70_a_job_that_is_whole_stays_as_it_is(start, files, monkeypatch, tmp_path):
    """Nothing is loaded either, though a row was left out."""
    rows, skip = [*named(), {"id": "none", "messages": []}], ["--on-error", "skip"]
    start(rows, *skip)
    names = ["completions.jsonl", "errors.jsonl", "completions-00000.jsonl"]
    before = [files(name, raw=True) for name in names]
    monkeypatch.setattr(job, "build_decoder", lambda *_: pytest.fail("nothing is left to decode"))
    for _ in range(2):
        assert start(None, *skip).done == 10
        assert [files(name, raw=True) for name in names] == before
        assert "skipped: line 11: " in (tmp_path / "shown").read_text()
    with pytest.raises(ValueError, match=r"line 11: prompt 'none': .*--on-error skip goes on without it"):
        start(None)


def test_merging_skips_no_row_that_would_stop_a_job(start, files):
    share, skip = ["--process-count", "2"], ["--on-error", "skip"]
    long = {"id": "long", "prompt": "a" * 1000}
    for index in range(2):
        start([long, named()[0]], "--process-index", str(index), *share, *skip)
    with pytest.raises(ValueError, match=r"line 1: .*--on-error skip goes on without it"):
        start(None, *share, "--merge")
    assert start(None, *share, *skip, "--merge").done == 1
    assert [row["id"] for row in files("errors.jsonl")] == ["long"]


def test_rows_that_were_left_out_are_not_counted_as_missing(start, tmp_path):
    rows, skip = [*named()[:1], {"id": "none", "messages": []}], ["--on-error", "skip"]
    start(rows, *skip)
    start([*rows, *named()[1:2]], *skip)
    assert "1/2 rows are complete" in (tmp_path / "shown").read_text()


def test_completions_are_there_only_while_they_are_all(start, tmp_path, monkeypatch):
    """A watcher takes the job for done when it sees them: not with rows missing, nor before the other files."""
    start(named()[2:])
    path = tmp_path / "out" / "completions.jsonl"
    assert path.exists()
    with monkeypatch.context() as patch:
        patch.setattr(job, "build_decoder", interrupt)
        with pytest.raises(InterruptedError):
            start(named())
    assert not path.exists()
    assert not path.with_name("summary.json").exists()
    replace = os.replace

    def replace_all_but_the_summary(scratch, target):
        interrupt() if target.name == "summary.json" else replace(scratch, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replace_all_but_the_summary)
        with pytest.raises(InterruptedError):
            start(None)
    assert not path.exists()
    start(None)
    assert path.exists()


def interrupt(*_):
    raise InterruptedError


def test_what_kills_leave_behind_is_cleared_away(start, tmp_path):
    start(named()[:1])
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    for name in ("completions.jsonl", "summary.json", "errors.jsonl", "manifest.json"):
        (tmp_path / "out" / f".{name}-0123").write_text("torn")
    start(None)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == names


def test_rows_have_parameters_of_their_own(start, files):
    """In both formats: what a row says is as if the whole job were told so."""
    changes = {"temperature": 1.2, "top_p": 0.9, "seed": 3, "max_tokens": 6, "stop": ["zz"]}
    body = {"model": "any", "prompt": "abab", "n": 1, "stream": False, "user": "u", "top_k": None, **changes}
    plain, batch = (
        {"id": "x", "prompt": "abab", "sampling": changes},
        {"custom_id": "x", "method": "POST", "body": body},
    )
    start([plain, *named()[:3]])
    start([batch, *named()[:3]], directory="batch")
    told = ["--temperature", "1.2", "--top-p", "0.9", "--seed", "3", "--max-new-tokens", "6", "--stop", "zz"]
    start([{"id": "x", "prompt": "abab"}], *told, directory="told")
    start(named()[:3], directory="rest")
    assert files()[0] == files(directory="batch")[0] == files(directory="told")[0]
    assert files()[1:] == files(directory="rest")
    assert files()[0]["token_ids"] != files()[1]["token_ids"][:6]


def test_a_stop_string_cuts_its_row_only(start, files):
    start(named())
    whole = files()[0]
    stop = whole["text"][3]
    rows = named()
    rows[0]["sampling"] = {"stop": stop}
    start(rows, directory="cut")
    cut = files(directory="cut")[0]
    assert cut["text"] == whole["text"][: whole["text"].index(stop)]
    assert cut["finish_reason"] == "stop"
    assert cut["metrics"]["num_emitted_tokens"] == len(cut["token_ids"]) == len(cut["text"])
    assert files(directory="cut")[1:] == files()[1:]


def test_a_line_that_is_no_row(start, files, tmp_path):
    """It stops the job before anything is decoded; or it is skipped, reported, and the others are what they were."""
    rows = [*named()[:2], b'{"prompt": "x"', *named()[3:4]]
    with pytest.raises(ValueError, match=r"rows\.jsonl, line 3: expected JSON, .*--on-error skip"):
        start(rows)
    assert not (tmp_path / "out").exists()
    assert start(rows, "--on-error", "skip").done == 3
    assert [row["id"] for row in files()] == ["row 0", "row 1", "row 3"]
    assert [(row["line"], row["error"][:13]) for row in files("errors.jsonl")] == [(3, "expected JSON")]
    assert "skipped: line 3: " in (tmp_path / "shown").read_text()


def test_a_prompt_that_is_too_long(start, files):
    """Refused, skipped, or without its beginning: never cut without being told to, and it is written down."""
    rows = [{"id": "long", "prompt": "a" * 10 + "bcde"}, *named()[:1]]
    limit = ["--max-prompt-tokens", "12"]
    with pytest.raises(ValueError, match="line 1: expected a prompt of at most 12 tokens beside 8 new ones, got 15"):
        start(rows, *limit)
    assert start(None, *limit, "--on-error", "skip").summary["num_errors"] == 1
    assert [row["id"] for row in files()] == ["row 0"]
    assert [row["id"] for row in files("errors.jsonl")] == ["long"]
    summary = start(None, *limit, "--long-prompts", "truncate").summary
    assert (summary["num_truncated_prompts"], summary["num_errors"]) == (1, 0)
    assert files()[0]["metrics"]["num_truncated_tokens"] == 3
    assert files()[0]["metrics"]["num_prompt_tokens"] == 12
    start([{"id": "long", "prompt": "a" * 8 + "bcde"}], "--raw-prompt", directory="short")
    assert files(directory="short")[0]["token_ids"] == files()[0]["token_ids"]


def test_a_row_that_was_left_out_may_be_taken_out_or_mended(start, files):
    rows = [{"id": "long", "prompt": "a" * 14}, *named()[:1]]
    options = ["--max-prompt-tokens", "12", "--on-error", "skip"]
    assert start(rows, *options).summary["num_errors"] == 1
    assert start(rows[1:], *options).summary["num_errors"] == 0
    rows[0]["prompt"] = "ab"
    outcome = start(rows, *options)
    assert (outcome.done, outcome.summary["num_errors"]) == (2, 0)
    assert [row["id"] for row in files()] == ["long", "row 0"]


def test_positions_of_the_target_limit_prompts(start):
    with pytest.raises(ValueError, match="expected a prompt of at most 120 tokens beside 8 new ones, got 121"):
        start([{"prompt": "a" * 120}])


def test_a_full_disk_ends_the_job_and_loses_nothing(start, files, monkeypatch):
    start(named(), directory="whole")
    write, left = os.write, [1000]

    def write_until_full(file, data):
        if left[0] <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = write(file, data[: left[0]])
        left[0] -= written
        return written

    monkeypatch.setattr(parts.os, "write", write_until_full)
    with pytest.raises(OSError, match="No space left"):
        start(named())
    monkeypatch.undo()
    assert len(files("completions-00000.jsonl", raw=True)) == 1000
    start(None)
    assert files(raw=True) == files(directory="whole", raw=True)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_ends_the_job_after_the_step(start, files, monkeypatch, tmp_path, name):
    start(named(), directory="whole")
    append = PartWriter.append

    def append_and_kill(writer, records):
        append(writer, records)
        monkeypatch.setattr(PartWriter, "append", append)
        os.kill(os.getpid(), signal.Signals[name])

    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    monkeypatch.setattr(PartWriter, "append", append_and_kill)
    outcome = start(named())
    monkeypatch.undo()
    assert outcome.signal == name
    assert 0 < outcome.done < 10
    assert outcome.done == len(files("completions-00000.jsonl"))
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == handlers
    assert start(None).done == 10
    assert files(raw=True) == files(directory="whole", raw=True)


def test_ctrl_c_after_a_signal_interrupts_at_once():
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with caught_signals() as names:
        for number in (signal.SIGTERM, signal.SIGTERM):
            os.kill(os.getpid(), number)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert names == ["SIGTERM", "SIGTERM"]
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == handlers


def test_processes_share_the_rows(start, files, tmp_path):
    start(named(), directory="whole")
    share = ["--process-count", "3", "--process-index"]
    assert [start(named(), *share, index).done for index in (1, 0)] == [3, 7]
    with pytest.raises(ValueError, match=r"before --merge, got 3 of 10 that are not \(first id 'row 2'\)"):
        start(None, *share, 0, "--merge")
    assert start(None, *share, 2).summary is None
    lines = [[row["id"] for row in files(f"completions-0000{index}.jsonl")] for index in range(3)]
    assert [set(ids) for ids in lines] == [{f"row {i}" for i in range(10) if i % 3 == index} for index in range(3)]
    first, last = (tmp_path / "out" / f"completions-0000{index}.jsonl" for index in (0, 2))
    for more in (b"", first.read_bytes(), b'{"id": "torn'):  # again, with rows done twice, and with a torn line
        last.write_bytes(last.read_bytes() + more)
        outcome = start(None, *share, 0, "--merge")
        assert (outcome.done, outcome.summary["num_prompts"]) == (10, 10)
        assert outcome.summary["num_processes"] == 3
        assert files(raw=True) == files(directory="whole", raw=True)
    with pytest.raises(ValueError, match=r"expected sampling\.seed = 0, with which this output was begun"):
        start(None, *share, 0, "--merge", "--seed", "1")


def test_one_process_at_a_time_writes_a_part(start, tmp_path):
    start(named()[:1])
    with PartWriter(tmp_path / "out", 0), pytest.raises(ValueError, match="got one that another is writing"):
        start(None)


def test_a_damaged_part_is_not_mended_silently(start, tmp_path):
    start(named())
    path = tmp_path / "out" / "completions-00000.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], b"\0" * 50 + b"\n", *lines[3:]]))
    with pytest.raises(ValueError, match=r"completions-00000\.jsonl, line 3 to be a record.* delete that line"):
        start(None)


def test_no_rows_at_all(start):
    with pytest.raises(ValueError, match="expected at least one row"):
        start([b"{}"], "--on-error", "skip")


def test_messages_and_prompts_mean_the_same(start, files):
    talk = [{"role": "user", "content": "abab"}]
    start([{"id": "x", "prompt": "abab"}])
    start([{"id": "x", "messages": talk}], directory="talk")
    start([{"custom_id": "x", "url": "/v1/chat/completions", "body": {"messages": talk}}], directory="batch")
    assert files() == files(directory="talk") == files(directory="batch")
    assert files()[0]["metrics"]["num_prompt_tokens"] == len([USER, *b"abab"])
