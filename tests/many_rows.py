"""24,000 rows in one batch, and whether what they emit follows its law.

Row r is judged by rule r modulo three, with a window of its own, and there may be several kinds of row. Small
vocabularies are corners of V = 8 whose other tokens have probability 0, so that one compiled program serves every law.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import reference
from decoding import EachRow, Limited, begin, compiler_options, proceed, snapshot
from harness import Script, ScriptedDrafter, TableModel
from reference import Sampling, g_test

from specjax import (
    Block,
    DecodeConfig,
    ExactMatch,
    ModelDrafter,
    Params,
    Rejection,
    SamplingParams,
    decode,
    sampling_params,
)
from specjax.types import Pace

V, K, NEW, B = 8, 4, 5, 24_000
RULES = (Rejection(), Block(), ExactMatch())
WINDOWS = (0, 1, 2, 4)
LIMIT = np.array(WINDOWS)[np.arange(B) // 3 % 4]
KEY = jax.random.key(2024)
GROUPS = {f"rule {i}": np.arange(B) % 3 == i for i in range(3)} | {f"K = {k}": k == LIMIT for k in WINDOWS}
TABLE = TableModel(vocab_size=V)
MODEL = Limited(ModelDrafter(model=TABLE, num_tokens=K, vocab_size=V))
BY_MODEL = DecodeConfig(target=TABLE, drafter=MODEL, verifier=EachRow(RULES))
BY_SCRIPT = DecodeConfig(target=TABLE, drafter=ScriptedDrafter(num_tokens=K), verifier=EachRow(RULES))

steps = jax.jit(decode.decode_steps, static_argnames=("config",), compiler_options=compiler_options(1))
"""For programs that run often: so many rows make a little optimisation pay."""


def table(laws: Any) -> jax.Array:
    """`[V, V]` logits from the laws that follow each token, or from one law that follows all."""
    probs, laws = np.zeros((V, V)), np.atleast_2d(np.asarray(laws, np.float64))
    probs[:, : laws.shape[1]] = np.resize(laws, (V, laws.shape[1]))
    with np.errstate(divide="ignore"):
        return jnp.asarray(np.log(probs).astype(np.float32))


def kind_of(kinds: int) -> np.ndarray:
    """The kind of each row; each kind has rows of all rules and windows."""
    return np.arange(B) // 12 % kinds


def spread(few: SamplingParams, rows: np.ndarray) -> SamplingParams:
    """Many rows: row r has the parameters of row `rows[r]` of the few."""
    return jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)[rows]), few)


def rows_of(*kinds: dict[str, Any], **options: Any) -> SamplingParams:
    """Parameters of each kind of row; there is always a bias, for the sake of one program."""
    kinds, plain = kinds or ({},), Sampling()
    names = sorted(set().union(*kinds) - {"logit_bias"})
    columns = {name: [kind.get(name, getattr(plain, name)) for kind in kinds] for name in names}
    bias = jnp.asarray(np.array([kind.get("logit_bias", [0.0] * V) for kind in kinds], np.float32))
    options = {"temperature": 1.0, "max_tokens": NEW} | options
    return spread(sampling_params(len(kinds), **options | columns, logit_bias=bias), kind_of(len(kinds)))


def alike(rows: int, **options: Any) -> SamplingParams:
    """The same parameters for all rows; by default they sample `NEW` tokens."""
    return spread(sampling_params(1, **{"temperature": 1.0, "max_tokens": NEW} | options), np.zeros(rows, int))


def repeated(text: Sequence[int], rows: int) -> tuple[jax.Array, jax.Array]:
    """One prompt `[rows, N]` for all rows, and its lengths."""
    return jnp.asarray(np.tile(np.array(text, np.int32), (rows, 1))), jnp.asarray(np.full(rows, len(text), np.int32))


def run(
    config: DecodeConfig,
    params: Params,
    sampling: SamplingParams,
    *,
    text: Sequence[int] = (0, 1),
    silent: Any = False,
    pace: Pace | None = None,
) -> Any:
    """The state in which all rows have ended; rows that are `silent` have no prompt and say nothing."""
    prompt, length = repeated(text, len(sampling.temperature))
    length = jnp.asarray(np.where(silent, 0, length))
    state = begin(params, KEY, prompt, length, sampling, pace, config=config, max_new_tokens=NEW)
    advance = steps if config in (BY_MODEL, BY_SCRIPT) else proceed
    return snapshot(advance(params, state, sampling, config=config))


def model_params(target: Any, draft: Any) -> Params:
    """Of `BY_MODEL`, from the laws of both models."""
    return Params(target=table(target), draft={"draft": table(draft), "limit": jnp.asarray(LIMIT)})


def by_model(target: Any, draft: Any, *kinds: dict[str, Any], **options: Any) -> Any:
    """The final state when a model of the draft law proposes."""
    return run(BY_MODEL, model_params(target, draft), rows_of(*kinds, **options))


def by_script(target: Any, proposals: Any, *kinds: dict[str, Any]) -> Any:
    """Each window of a row of kind i proposes the i-th tokens, as many as the row's limit says."""
    windows = np.array([np.resize(tokens, K) for tokens in proposals], np.int32)[kind_of(len(proposals))]
    script = Script(
        tokens=jnp.asarray(np.repeat(windows[:, None], 2 + NEW, axis=1)),
        length=jnp.asarray(np.repeat(LIMIT[:, None], 2 + NEW, axis=1)),
    )
    return run(BY_SCRIPT, Params(target=table(target), draft=script), rows_of(*kinds))


def joint(target: Any, num_tokens: int = 3, start: int = 1, **options: Any) -> np.ndarray:
    """The exact law of the first tokens, `[V, V, V]`."""
    logits, sampling = np.asarray(table(target)), Sampling(**options)
    laws = np.zeros((V,) * num_tokens)

    def extend(text: tuple[int, ...], mass: float) -> None:
        if len(text) == num_tokens + 2:
            laws[text[2:]] = mass
            return
        for token, chance in enumerate(reference.law(logits[text[-1]], sampling, text, 2)):
            if chance:
                extend((*text, token), mass * chance)

    extend((0, start), 1.0)
    return laws


def output_of(state: Any) -> np.ndarray:
    """`[B, NEW]`, after a prompt of two tokens."""
    return state.context.tokens[:, 2 : 2 + NEW]


def assert_law(tokens: np.ndarray, law: np.ndarray, rows: Any = True, groups: Any = GROUPS) -> None:
    """The first tokens of the rows, and of each rule's and window's among them, follow the joint law."""
    for name, group in ({"all": True} | groups).items():
        counts = np.zeros(law.shape)
        np.add.at(counts, tuple(tokens[np.broadcast_to(group & rows, len(tokens)), : law.ndim].T), 1)
        assert g_test(counts, law) > 1e-4, name


def assert_context_free(tokens: np.ndarray, probs: Sequence[float], rows: Any = True) -> None:
    """Each position follows one law in all rows; all positions together do for each rule and window."""
    probs = np.pad(probs, (0, V - len(probs)))
    chosen = tokens[np.broadcast_to(rows, B)]
    counts = {f"position {i}": chosen[:, i] for i in range(NEW)}
    counts |= {name: tokens[group & rows].ravel() for name, group in GROUPS.items()}
    for name, drawn in counts.items():
        assert g_test(np.bincount(drawn, minlength=V), probs) > 1e-4, name
