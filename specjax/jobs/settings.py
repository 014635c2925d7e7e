"""What a run is made of: one frozen record, whole before anything is loaded. Config files build it from these classes.

Nothing here is ignored silently: settings that would have no effect together are refused, by name.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp

from specjax.drafters.early_exit import EarlyExitDrafter
from specjax.drafters.model import ModelDrafter
from specjax.drafters.ngram import NGramDrafter
from specjax.drafters.none import NoDrafter
from specjax.io.sources import DEFAULT_MODEL
from specjax.io.tokenizer import check_same_vocabulary
from specjax.jobs.model import LoadedModel, load_model
from specjax.jobs.placement import Placement
from specjax.sampling import sampling_params
from specjax.types import Drafter, SamplingParams, Verifier
from specjax.verify import Block, ExactMatch, Greedy, Rejection


@dataclasses.dataclass(frozen=True, kw_only=True)
class NGram:
    """Drafts from the text itself. See `NGramDrafter`."""

    num_speculative_tokens: int = 6
    prompt_lookup_max: int = NGramDrafter.prompt_lookup_max
    prompt_lookup_min: int = NGramDrafter.prompt_lookup_min

    def __post_init__(self) -> None:
        self._drafter()

    def build(self, target: LoadedModel, dtype: str) -> tuple[Drafter, None]:
        """The drafter; it has no weights."""
        return self._drafter(), None

    def _drafter(self) -> NGramDrafter:
        return NGramDrafter(
            num_tokens=self.num_speculative_tokens,
            prompt_lookup_max=self.prompt_lookup_max,
            prompt_lookup_min=self.prompt_lookup_min,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftModel:
    """Drafts with a smaller model of the same vocabulary. See `ModelDrafter`."""

    model: str | None = None
    """A name as `resolve_model` takes it. There is no default: `Settings` refuses None."""
    num_speculative_tokens: int = 4
    allow_vocabulary_mismatch: bool = False
    """Drafts even though some id means another text to the draft model: slower, still the target's law."""
    sharded: bool = False
    """The draft model is cut over the mesh like the target; otherwise every device has the whole of it."""

    def __post_init__(self) -> None:
        _check_window(self.num_speculative_tokens)

    def build(self, target: LoadedModel, dtype: str) -> tuple[Drafter, Any]:
        """The drafter and its weights.

        Raises:
          ValueError: no such model, one of another vocabulary, or no mesh to cut it over.
        """
        if self.sharded and target.mesh is None:
            raise ValueError("expected --mesh with --shard-drafter, got a single device")
        axis = target.model.axis if self.sharded else None
        draft = load_model(str(self.model), dtype=dtype, mesh=target.mesh, axis=axis)
        if not self.allow_vocabulary_mismatch:
            _check_vocabulary(target, draft)
        drafter = ModelDrafter(
            model=draft.model,
            num_tokens=self.num_speculative_tokens,
            vocab_size=target.model.vocab_size,
            axis=target.model.axis,
        )
        return drafter, draft.params


@dataclasses.dataclass(frozen=True, kw_only=True)
class EarlyExit:
    """Drafts with the target's first layers. See `EarlyExitDrafter`."""

    exit_layer: int | None = None
    """Layers to run; None: half of them."""
    num_speculative_tokens: int = 4

    def __post_init__(self) -> None:
        _check_window(self.num_speculative_tokens)

    def build(self, target: LoadedModel, dtype: str) -> tuple[Drafter, None]:
        """The drafter; it has no weights of its own.

        Raises:
          ValueError: a layer that the target does not have.
        """
        layer = max(1, target.model.config.num_layers // 2) if self.exit_layer is None else self.exit_layer
        drafter = EarlyExitDrafter(target=target.model, exit_layer=layer, num_tokens=self.num_speculative_tokens)
        return drafter, None


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoDraft:
    """Plain decoding."""

    def build(self, target: LoadedModel, dtype: str) -> tuple[Drafter, None]:
        """The drafter that proposes nothing."""
        return NoDrafter(), None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are chosen and when a text ends. `rows` checks the ranges: a record is built without starting JAX."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    max_new_tokens: int = 128
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    """Strings that end a text and are not part of it."""
    ignore_eos: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"expected seed in 0..{2**32 - 1}, got {self.seed}")

    def rows(self, batch_size: int, eos_ids: Sequence[int]) -> SamplingParams:
        """The parameters of `batch_size` equal rows.

        Raises:
          ValueError: a value out of range.
        """
        params = sampling_params(
            batch_size,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            min_tokens=self.min_tokens,
            max_tokens=self.max_new_tokens,
            stop_token_ids=tuple(eos_ids),
        )
        if not self.ignore_eos:
            return params
        none = jnp.full_like(params.stop_token_ids, -1)  # as wide as those of other rows, whose slot this may take
        return dataclasses.replace(params, stop_token_ids=none)


APART = "start it on each of several single-host machines, with --process-count, --process-index and one --output-dir"
"""What to do instead of running a job on the devices of several processes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """A batch job: the rows of a file, each completed once, whatever happens in between. See `run_job`."""

    input: str | None = None
    """JSONL file of rows. See `read_rows`."""
    output_dir: str | None = None
    on_error: Literal["stop", "skip"] = "stop"
    """What a line that is no row, or a row that cannot be completed, does to the job."""
    long_prompts: Literal["refuse", "truncate"] = "refuse"
    """Whether a prompt that is too long is an error or loses its beginning."""
    max_prompt_tokens: int | None = None
    """Longest prompt; None: what the target has positions for, less the new tokens."""
    process_index: int = 0
    process_count: int = 1
    """Processes that share the rows: each takes every so manyth line."""
    merge: bool = False
    """Only joins the parts of all processes."""

    def __post_init__(self) -> None:
        if (self.input is None) != (self.output_dir is None):
            raise ValueError("expected --input and --output-dir together, got one of them")
        for field in dataclasses.fields(self):
            if self.input is None and getattr(self, field.name) != field.default:
                raise ValueError(f"expected --input with --{field.name.replace('_', '-')}, got none")
        if self.output_dir is not None and "://" in self.output_dir:
            raise ValueError(
                f"expected --output-dir on a local or mounted file system, where files can grow, got {self.output_dir}"
            )
        if not 0 <= self.process_index < self.process_count:
            raise ValueError(
                f"expected --process-index in 0..{self.process_count - 1} (--process-count), got {self.process_index}"
            )
        if self.max_prompt_tokens is not None and self.max_prompt_tokens < 1:
            raise ValueError(f"expected --max-prompt-tokens of at least 1, got {self.max_prompt_tokens}")


Drafting = NGram | DraftModel | EarlyExit | NoDraft
DRAFTERS = {"ngram": NGram, "model": DraftModel, "early_exit": EarlyExit, "none": NoDraft}
VERIFIERS = {"rejection": Rejection, "block": Block, "exact_match": ExactMatch, "greedy": Greedy}
STRATEGIES: dict[Any, dict[str, Any]] = {Drafting: DRAFTERS, Verifier: VERIFIERS}
"""The names of strategies on a command line and in records, by the type of the field that holds one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything that a run can be told."""

    model: str = DEFAULT_MODEL
    """The target: a path, an alias or `owner/name`."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the weights of target and draft model."""
    drafter: Drafting = dataclasses.field(default_factory=NGram)
    verifier: Verifier = dataclasses.field(default_factory=Rejection)
    pace: Literal["always", "measured"] | None = None
    """Speculate at every step, or where step times that are measured first say that it pays; None: the latter where
    tokens do not depend on it (see `effective_pace`)."""
    sampling: Sampling = dataclasses.field(default_factory=Sampling)
    parallel: Placement = dataclasses.field(default_factory=Placement)
    """Devices and processes."""
    prompt: tuple[str, ...] = ()
    prompts: str | None = None
    """A file of prompts. See `read_prompts`."""
    raw_prompt: bool = False
    """Prompts are encoded as they are, not as a user's message in the chat template."""
    batch_size: int = 1
    output: str | None = None
    """JSONL file of the completions."""
    logprobs: bool = False
    """Rows of `output` hold the target's log-probabilities of their tokens."""
    compare: bool = False
    """Plain decoding runs too."""
    stream: bool | None = None
    """Text appears token by token; None: where it can (see `streams`)."""
    per_position: bool = False
    """The summary shows acceptance at each position of the window."""
    compilation_cache: bool = True
    """Compiled programs are kept on disk for the next start."""
    job: Job = dataclasses.field(default_factory=Job)

    def __post_init__(self) -> None:
        self._check_sampling()
        self._check_decoding()
        self._check_job()
        self._check_files()

    @property
    def streams(self) -> bool:
        """Whether text appears token by token: by default for single rows that do not go to a file."""
        alone = self.batch_size == 1 and self.output is None and self.job.input is None
        return alone if self.stream is None else self.stream

    @property
    def promises_equal_tokens(self) -> bool:
        """Whether plain decoding gives the same tokens (up to rounding), and not only the same law."""
        return self.sampling.temperature == 0 or isinstance(self.verifier, ExactMatch)

    @property
    def effective_pace(self) -> str:
        """By default measured, unless the tokens that a seed gives would depend on how fast the machine is."""
        if self.pace is not None:
            return self.pace
        return "measured" if self.promises_equal_tokens and not isinstance(self.drafter, NoDraft) else "always"

    def _check_sampling(self) -> None:
        """What is refused of a whole run, and taken from a row whose own parameters meet those of its job."""
        sampling = self.sampling
        if sampling.stop and sampling.min_tokens:
            raise ValueError("expected --stop without --min-tokens, got both: a stop string can end a text earlier")
        shaping = sampling.top_k != 0 or sampling.top_p != 1 or sampling.min_p != 0
        if shaping and sampling.temperature == 0:
            raise ValueError("expected --temperature above 0 with --top-k, --top-p or --min-p, got 0 (greedy)")

    def _check_decoding(self) -> None:
        if isinstance(self.drafter, DraftModel) and not self.drafter.model:
            raise ValueError("expected --draft-model with --drafter model, got none")
        if isinstance(self.verifier, Greedy) and self.sampling.temperature > 0:
            raise ValueError(
                f"expected --temperature 0 with --verifier greedy, got {self.sampling.temperature}: to sample use "
                "rejection, block or exact_match"
            )
        idle = {"--compare": self.compare, "--per-position": self.per_position, "--pace": self.pace}
        for name, wanted in idle.items():
            if wanted and isinstance(self.drafter, NoDraft):
                raise ValueError(f"expected {name} with a drafter, got --drafter none")
        if self.batch_size < 1:
            raise ValueError(f"expected --batch-size of at least 1, got {self.batch_size}")
        if self.batch_size % self.parallel.num_groups:
            raise ValueError(
                f"expected --batch-size to be a multiple of the mesh's data={self.parallel.num_groups}, "
                f"got {self.batch_size}"
            )
        if self.stream and self.batch_size > 1:
            raise ValueError(f"expected --stream with --batch-size 1, got {self.batch_size}: texts would mix")

    def _check_files(self) -> None:
        if self.prompt and self.prompts:
            raise ValueError("expected --prompt or --prompts, got both")
        if self.logprobs and not self.output:
            raise ValueError("expected --output with --logprobs, which it writes them to, got none")
        if self.output and self.prompts and Path(self.output).resolve() == Path(self.prompts).resolve():
            raise ValueError(f"expected --output and --prompts to be two files, got {self.output} for both")

    def _check_job(self) -> None:
        idle = {
            "--prompt": self.prompt,
            "--prompts": self.prompts,
            "--output": self.output,
            "--logprobs": self.logprobs,
            "--compare": self.compare,
            "--stream": self.stream,
        }
        if self.job.input is None:
            return
        for name, wanted in idle.items():
            if wanted:
                raise ValueError(f"expected --input without {name}, got both")
        if self.parallel.coordinator_address is not None:
            raise ValueError(f"expected --input without --coordinator-address, got both: {APART}")
        groups = self.parallel.num_groups
        if self.parallel.driver == "pmap" and groups > 1:
            raise ValueError(
                f"expected --parallel shard_map or jit with --input and --mesh data={groups}, got pmap, whose groups "
                "run apart"
            )


def record(settings: Settings) -> dict[str, Any]:
    """The settings as they take effect, for JSON: strategies under their names."""
    fields = {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}
    drafter = {"kind": _strategy_name(settings.drafter), **dataclasses.asdict(settings.drafter)}
    return fields | {
        "drafter": drafter,
        "verifier": _strategy_name(settings.verifier),
        "pace": settings.effective_pace,
        "sampling": dataclasses.asdict(settings.sampling),
        "parallel": dataclasses.asdict(settings.parallel),
        "stream": settings.streams,
        "job": dataclasses.asdict(settings.job),
    }


def _strategy_name(strategy: Any) -> str:
    named = (DRAFTERS | VERIFIERS).items()
    return next((name for name, kind in named if type(strategy) is kind), type(strategy).__name__)


def _check_window(num_tokens: int) -> None:
    if num_tokens < 1:
        raise ValueError(f"expected num_speculative_tokens >= 1, got {num_tokens}: --drafter none decodes plainly")


def _check_vocabulary(target: LoadedModel, draft: LoadedModel) -> None:
    try:
        check_same_vocabulary(target.tokenizer, draft.tokenizer)
    except ValueError as error:
        raise ValueError(f"{error}. Use --allow-vocabulary-mismatch to draft with it all the same") from error
