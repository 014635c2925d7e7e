"""Every record and protocol of the library. The file to read first.

Letters in shapes: B rows, T query positions, N columns of the token buffer, S cache slots, M draft window,
V vocabulary, E features, D head width, C stop ids.
"""

import enum
from typing import Any, Protocol

import jax
from flax import struct


class FinishReason(enum.IntEnum):
    """Why a row stopped; `RUNNING` while it has not."""

    RUNNING = 0
    STOP = 1
    """An EOS or stop id was emitted (the text keeps it), or a stop string was found by the host."""
    LENGTH = 2
    NAN = 3
    """The target's logits were NaN, +inf, or -inf everywhere: nothing was emitted from them."""


@struct.dataclass(kw_only=True)
class Params:
    """The weights: first argument of every function that runs a model."""

    target: Any
    """Param pytree of the target model."""
    draft: Any = None
    """Param pytree of the drafter; None for drafters without weights of their own."""


@struct.dataclass(kw_only=True)
class ModelOutput:
    """What one forward pass yields."""

    logits: jax.Array
    """`[B, T, V]` float32; with an `axis` this device's columns of them."""
    features: Any = None
    """Hidden states tapped by the model (`[B, T, E]` each) or None. See `Transformer.taps`."""
    axis: str | None = struct.field(pytree_node=False, default=None)
    """Mesh axis that the vocabulary is cut over; None: the logits are whole. See `shares`, which deals with both."""
    vocab_size: int | None = struct.field(pytree_node=False, default=None)
    """With an `axis`: V without what the vocabulary was padded by."""


@struct.dataclass(kw_only=True)
class KVCache:
    """Keys and values of the tokens a model has seen. Rollback lowers `length`; stale slots are never cleared.

    Slot s of a row holds the token at position s. A query at position t sees slots 0..t only, so what lies beyond a
    row's `length` is never read before it has been overwritten.
    """

    keys: tuple[jax.Array, ...]
    """One `[B, heads, S, D]` array per layer."""
    values: tuple[jax.Array, ...]
    """One `[B, heads, S, D]` array per layer."""
    length: jax.Array
    """`[B]` int32, tokens the cache stands for."""


@struct.dataclass(kw_only=True)
class SamplingParams:
    """Per-row decoding parameters, all traced: changing a value never recompiles. Build with `sampling_params`."""

    temperature: jax.Array
    """`[B]` float32, 0 is argmax (lowest id wins a tie)."""
    top_k: jax.Array
    """`[B]` int32, 0 keeps all."""
    top_p: jax.Array
    """`[B]` float32, 1 keeps all."""
    min_p: jax.Array
    """`[B]` float32, 0 keeps all."""
    repetition_penalty: jax.Array
    """`[B]` float32, 1 is off. Counts prompt and output (arXiv 1909.05858)."""
    presence_penalty: jax.Array
    """`[B]` float32, 0 is off. Counts output only."""
    frequency_penalty: jax.Array
    """`[B]` float32, 0 is off. Counts output only."""
    min_tokens: jax.Array
    """`[B]` int32, stop ids are forbidden before this many output tokens."""
    max_tokens: jax.Array
    """`[B]` int32, output tokens at most."""
    stop_token_ids: jax.Array
    """`[B, C]` int32, EOS and other stop ids, padded with -1."""
    logit_bias: jax.Array | None = None
    """`[B, V]` float32 added to the logits, -inf forbids an id; None: no biases anywhere in the batch."""


@struct.dataclass(kw_only=True)
class Context:
    """The committed text of each row."""

    tokens: jax.Array
    """`[B, N]` int32, prompt then output, then pad ids."""
    length: jax.Array
    """`[B]` int32, valid tokens. The last one is *pending*: in no cache yet."""
    prompt_length: jax.Array
    """`[B]` int32."""


@struct.dataclass(kw_only=True)
class Draft:
    """A proposal for the next tokens of each row."""

    tokens: jax.Array
    """`[B, M]` int32; entries past `length` may hold anything."""
    length: jax.Array
    """`[B]` int32 in 0..M. May depend on the prefix and on history, never on the sampled tokens themselves."""
    log_probs: Any = None
    """`[B, M, V]` float32, the law each token was sampled from; None for a deterministic proposal. On a mesh it may be
    the `Share` of these rows that a device decides for."""
    evidence: jax.Array | None = None
    """`[B]` int32, grade from 0 to `pace.GRADES - 1` of how much of the prefix speaks for the proposal (an n-gram
    drafter's match length); acceptance is learned grade by grade. It may hang on the prefix only, never on tokens that
    were sampled for this draft: drafts are dropped by it. None: it counts for all of them."""


@struct.dataclass(kw_only=True)
class Verdict:
    """What verification decided."""

    tokens: jax.Array
    """`[B, M + 1]` int32: accepted drafts, then one recovered or bonus token at index `num_accepted`, then junk."""
    num_accepted: jax.Array
    """`[B]` int32 in 0..M."""


@struct.dataclass(kw_only=True)
class DecodeStats:
    """Counters per row; pool them by summing over rows. Rows that are done stop counting."""

    steps: jax.Array
    """`[B]` int32, verify steps (= target calls that served the row)."""
    drafted: jax.Array
    """`[B]` int32, proposed tokens."""
    accepted: jax.Array
    """`[B]` int32, accepted tokens that were kept (not those after an EOS or the length cap)."""
    emitted: jax.Array
    """`[B]` int32, output tokens."""
    drafted_per_position: jax.Array
    """`[B, M]` int32, steps that drafted position i."""
    accepted_per_position: jax.Array
    """`[B, M]` int32, steps that kept position i."""
    histogram: jax.Array
    """`[B, M + 1]` int32, steps that kept exactly n drafted tokens."""


@struct.dataclass(kw_only=True)
class Pace:
    """Costs and history by which rows decide whether to speculate."""

    acceptance: jax.Array
    """`[B, GRADES]` float32, running chance that a drafted token is accepted, by the draft's `evidence`."""
    costs: jax.Array
    """`[W, 2]` float32, any unit: a step's time at each window size, and what each token of the longest text adds."""


@struct.dataclass(kw_only=True)
class LogProbs:
    """Target log-probabilities of the output tokens, aligned with `Context.tokens` (prompt columns stay 0)."""

    raw: jax.Array
    """`[B, N]` float32, log-softmax of the untouched logits."""
    processed: jax.Array
    """`[B, N]` float32, log of the law that was sampled (after every transform)."""


@struct.dataclass(kw_only=True)
class DecodeState:
    """The carry of the decoding loop, and its result."""

    context: Context
    limit: jax.Array
    """`[B]` int32, length of text at which the row stops."""
    finish_reason: jax.Array
    """`[B]` int32, a `FinishReason`; a row is done when it is not `RUNNING`."""
    keys: jax.Array
    """`[B]` typed PRNG keys, one per row, never consumed: every draw folds in its position and role."""
    cache: Any
    """The target's cache."""
    draft_state: Any
    """Whatever the drafter carries."""
    pace: Pace
    """What decides, from all rows' texts and histories, how many drafted tokens are worth verifying."""
    stats: DecodeStats
    log_probs: LogProbs | None = None


@struct.dataclass(kw_only=True)
class Output:
    """What `generate` returns: the committed rows, without caches and keys."""

    tokens: jax.Array
    """`[B, max_new_tokens]` int32, output tokens then pad ids."""
    length: jax.Array
    """`[B]` int32, output tokens of each row."""
    finish_reason: jax.Array
    """`[B]` int32, a `FinishReason`."""
    stats: DecodeStats
    log_probs: LogProbs | None = None
    """Aligned with `tokens`: `[B, max_new_tokens]`."""


class LanguageModel(Protocol):
    """A target or draft model: a frozen dataclass with pure methods and no arrays on `self`."""

    @property
    def vocab_size(self) -> int:
        """Width V of the logits."""
        ...

    @property
    def max_positions(self) -> int:
        """Longest text the model can be asked about, in tokens."""
        ...

    def init_cache(self, params: Any, batch_size: int, capacity: int) -> Any:
        """An empty cache with a `[B]` int32 `length` and room for `capacity` tokens a row."""
        ...

    def apply(self, params: Any, tokens: jax.Array, positions: jax.Array, cache: Any) -> tuple[ModelOutput, Any]:
        """Runs T tokens a row against the cache and writes them into it; `length` is left to the caller.

        Args:
          params: the model's weights.
          tokens: `[B, T]` int32.
          positions: `[B, T]` int32, consecutive in each row; -1 marks padding, which only ever follows real tokens:
            it is neither written nor seen, and its output means nothing.
          cache: what `init_cache` made.
        """
        ...


class Drafter(Protocol):
    """Proposes up to `num_tokens` tokens: a frozen dataclass with three pure methods and no arrays on `self`."""

    @property
    def num_tokens(self) -> int:
        """Window M (the field's `num_speculative_tokens`)."""
        ...

    def init(self, params: Params, batch_size: int, capacity: int) -> Any:
        """The drafter's state before it has seen any text, for rows of at most `capacity` tokens.

        Every array of it has the rows on its leading axis, `[batch_size, ...]`.
        """
        ...

    def draft(
        self, params: Params, keys: jax.Array, state: Any, context: Context, sampling: SamplingParams, cache: Any
    ) -> tuple[Draft, Any]:
        """Proposes tokens to follow `context`, and returns its state with what it had to write to do so.

        Steps in which no row has room for a draft, or none could pay, do without this call: what the drafter has to
        learn of the text comes through `update`.

        Args:
          params: all weights.
          keys: `[B, M]` typed keys, one per drafted token, for drafters that sample.
          state: the drafter's state.
          context: the committed text.
          sampling: the row's parameters; a sampled draft uses the same transforms as the target.
          cache: the target's cache, to read only.
        """
        ...

    def update(self, params: Params, state: Any, tokens: jax.Array, positions: jax.Array, output: ModelOutput) -> Any:
        """Sees what the target has just processed for good: prompt chunks, then each step's committed tokens.

        Args:
          params: all weights.
          state: the drafter's state.
          tokens: `[B, T]` int32 fed to the target.
          positions: `[B, T]` int32; -1 marks padding and rejected drafts. The next text position is drawn from
            `output` at the last valid one.
          output: the target's output for them.
        """
        ...


class Verifier(Protocol):
    """An acceptance rule: a frozen dataclass with pure methods."""

    def draft_keys(self, keys: jax.Array, start: jax.Array, num_tokens: int) -> jax.Array:
        """Keys `[B, num_tokens]` for a sampling drafter whose window starts at position `start` `[B]`."""
        ...

    def __call__(self, keys: jax.Array, start: jax.Array, draft: Draft, log_probs: jax.Array) -> Verdict:
        """Judges a draft.

        Args:
          keys: `[B]` row keys.
          start: `[B]` int32, position of the first drafted token.
          draft: the proposal, `[B, M]`.
          log_probs: `[B, M + 1, V]` float32, the target's processed law at each position.
        """
        ...
