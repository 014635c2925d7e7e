"""What a manifest says, and that one directory has one of them."""

import json

import jax
import pytest

from specjax.io.files import write_whole
from specjax.jobs import manifest
from specjax.jobs.manifest import begin_manifest, build_manifest, check_manifest, digest_files
from specjax.jobs.settings import DraftModel, Settings
from specjax.verify import ExactMatch


@pytest.mark.parametrize(
    ("settings", "samples", "level"),
    [
        ({}, False, "tokens"),
        ({}, True, "distribution"),
        ({"verifier": ExactMatch()}, True, "tokens"),
        ({"dtype": "bfloat16"}, False, "distribution"),
    ],
)
def test_the_level_of_losslessness(tmp_path, settings, samples, level):
    found = build_manifest(Settings(model=str(tmp_path), **settings), samples=samples)
    assert found["lossless_level"] == level


def test_of_two_manifests_at_once_one_counts(tmp_path, monkeypatch):
    """The other process is refused, as if it had come later."""
    mine, theirs = ({"format": 2, "settings": {"dtype": dtype}} for dtype in ("float32", "bfloat16"))

    def write_after_them(path, data, **options):
        path.write_text(json.dumps(theirs))
        write_whole(path, data, **options)

    monkeypatch.setattr(manifest, "write_whole", write_after_them)
    begin_manifest(tmp_path, mine)
    with pytest.raises(ValueError, match="expected dtype = 'bfloat16', with which this output was begun"):
        check_manifest(tmp_path, mine)


@pytest.fixture
def model(tmp_path):
    (path := tmp_path / "model").write_text("weights")
    return path


@pytest.mark.parametrize(
    ("option", "other", "name"),
    [
        ("jax_default_prng_impl", "rbg", "prng_implementation"),
        ("jax_threefry_partitionable", False, "threefry_partitionable"),
    ],
)
def test_other_random_numbers_are_refused_by_name(tmp_path, model, option, other, name):
    settings = Settings(model=str(model))
    begin_manifest(tmp_path, build_manifest(settings, samples=False))
    before = jax.config.values[option]
    jax.config.update(option, other)
    try:
        with pytest.raises(ValueError, match=f"expected {name} = .* with which this output was begun"):
            check_manifest(tmp_path, build_manifest(settings, samples=False))
    finally:
        jax.config.update(option, before)


def test_devices_may_change_and_with_them_where_the_draft_model_lies(tmp_path, model):
    one, other = (
        Settings(model=str(model), drafter=DraftModel(model=str(model), sharded=sharded), batch_size=4)
        for sharded in (True, False)
    )
    begin_manifest(tmp_path, build_manifest(one, samples=False))
    assert check_manifest(tmp_path, build_manifest(other, samples=False))[1] == []


def test_digest_of_a_model_is_of_names_and_contents(tmp_path):
    for name, text in {"a/x": "1", "a/y": "2", "b/x": "1", "b/y": "2", "c/x": "1", "c/z": "2", "d/x": "1"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "b" / ".hidden").write_text("other")
    digests = {name: digest_files(tmp_path / name) for name in "abcd"}
    assert digests["a"] == digests["b"]
    assert len(set(digests.values())) == 3
    assert digest_files(tmp_path / "a" / "x") == digest_files(tmp_path / "c" / "x")
