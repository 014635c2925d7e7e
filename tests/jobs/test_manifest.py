"""What a manifest says, and that one directory has one of them."""

import json

import pytest

from specjax.jobs import manifest
from specjax.jobs.manifest import build_manifest, check_manifest, digest_files
from specjax.jobs.parts import write_whole
from specjax.jobs.settings import Settings
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
    mine, theirs = ({"format": 1, "settings": {"dtype": dtype}} for dtype in ("float32", "bfloat16"))

    def write_after_them(path, lines, **options):
        path.write_text(json.dumps(theirs))
        write_whole(path, lines, **options)

    monkeypatch.setattr(manifest, "write_whole", write_after_them)
    with pytest.raises(ValueError, match="expected dtype = 'bfloat16', with which this output was begun"):
        check_manifest(tmp_path, mine)


def test_digest_of_a_model_is_of_names_and_contents(tmp_path):
    for name, text in {"a/x": "1", "a/y": "2", "b/x": "1", "b/y": "2", "c/x": "1", "c/z": "2", "d/x": "1"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "b" / ".hidden").write_text("other")
    digests = {name: digest_files(tmp_path / name) for name in "abcd"}
    assert digests["a"] == digests["b"]
    assert len(set(digests.values())) == 3
    assert digest_files(tmp_path / "a" / "x") == digest_files(tmp_path / "c" / "x")
