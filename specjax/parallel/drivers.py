"""What a driver is: the functions of `specjax.compiled` on some devices. And the one for a single device.

A row's output depends on no driver and on no mesh, up to rounding (sums over the model axis are taken in another
order): row r of the whole batch has the key `fold_in(key, r)`, wherever it is decoded.
"""

import abc
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from specjax import compiled
from specjax.decode import DecodeConfig, row_keys
from specjax.parallel.mesh import DATA
from specjax.parallel.specs import check_cut
from specjax.slots import Slots, empty_slots
from specjax.types import DecodeState, Output, Pace, Params, SamplingParams

Inputs = tuple[jax.Array, jax.Array, jax.Array, SamplingParams, Pace | None]
"""What a decoder begins with beside params: row keys `[B]`, prompts, their lengths, sampling and pace."""
ALL_STEPS = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Driver(abc.ABC):
    """Runs the decoder on some devices; rows come out in the order they went in."""

    mesh: Mesh | None
    """The devices; None: the default one."""

    @property
    def num_groups(self) -> int:
        """Groups of devices that the rows of a batch are dealt to in equal parts: the size of the data axis."""
        return 1 if self.mesh is None else self.mesh.shape[DATA]

    @abc.abstractmethod
    def place(self, params: Params, config: DecodeConfig) -> Params:
        """Lays params out as the other methods take them.

        Args:
          params: whole, or placed by `shard_params` or a sharded load: the latter are in use from here on (under pmap
            they are taken over), so go on with what is returned.
          config: says which model is cut over the model axis.
        """

    def generate(
        self,
        params: Params,
        key: jax.Array,
        prompt: jax.Array,
        prompt_length: jax.Array,
        sampling: SamplingParams,
        pace: Pace | None = None,
        *,
        config: DecodeConfig,
        max_new_tokens: int,
    ) -> Output:
        """`specjax.generate` with params from `place`.

        Raises:
          ValueError: arguments that could not give a right result, a batch that does not divide, or a config that is
            not for these devices (`on_mesh`).
        """
        inputs = self._inputs(key, prompt, prompt_length, sampling, pace, config, max_new_tokens)
        return self._generate(params, inputs, config, max_new_tokens)

    def prefill(
        self,
        params: Params,
        key: jax.Array,
        prompt: jax.Array,
        prompt_length: jax.Array,
        sampling: SamplingParams,
        pace: Pace | None = None,
        *,
        config: DecodeConfig,
        max_new_tokens: int,
    ) -> DecodeState:
        """`specjax.prefill` with params from `place`.

        Raises:
          ValueError: as `generate`.
        """
        inputs = self._inputs(key, prompt, prompt_length, sampling, pace, config, max_new_tokens)
        return self._prefill(params, inputs, config, max_new_tokens)

    @abc.abstractmethod
    def decode_steps(
        self,
        params: Params,
        state: DecodeState,
        sampling: SamplingParams,
        num_steps: int = ALL_STEPS,
        least_running: int = 1,
        *,
        config: DecodeConfig,
    ) -> DecodeState:
        """`specjax.decode_steps`; `least_running` counts the rows of all groups.

        Args:
          params: from `place`.
          state: from `prefill`; it is donated.
          sampling: from `to_devices`.
          num_steps: steps at most.
          least_running: running rows with which the loop goes on.
          config: models and rules.
        """

    @abc.abstractmethod
    def empty_slots(self, row: Slots, num_slots: int, *, config: DecodeConfig) -> Slots:
        """`slots.empty_slots`, as many for each group.

        Args:
          row: one row for each group, of a state from `prefill` and parameters from `to_devices`.
          num_slots: slots of all groups together.
          config: models and rules.
        """

    @abc.abstractmethod
    def insert(self, slots: Slots, rows: Slots, slot: int, *, config: DecodeConfig) -> Slots:
        """`slots.insert` in each group; the slots passed in are donated.

        Args:
          slots: from `empty_slots`.
          rows: as many for each group; those without a prompt are put nowhere.
          slot: where the first row of a group goes among its own slots.
          config: models and rules.
        """

    @abc.abstractmethod
    def to_host(self, rows: Any) -> Any:
        """Arrays of a state with one entry for each row in front, as NumPy arrays, on every process."""

    @abc.abstractmethod
    def to_devices(self, rows: Any) -> Any:
        """The opposite: every process passes arrays of the whole batch."""

    @abc.abstractmethod
    def _generate(self, params: Params, inputs: Inputs, config: DecodeConfig, max_new_tokens: int) -> Output: ...

    @abc.abstractmethod
    def _prefill(self, params: Params, inputs: Inputs, config: DecodeConfig, max_new_tokens: int) -> DecodeState: ...

    def _inputs(
        self,
        key: jax.Array,
        prompt: jax.Array,
        prompt_length: jax.Array,
        sampling: SamplingParams,
        pace: Pace | None,
        config: DecodeConfig,
        max_new_tokens: int,
    ) -> Inputs:
        """The arguments, checked, with a key for each row of the whole batch."""
        compiled.check_arguments(
            key, prompt, prompt_length, sampling, pace, config=config, max_new_tokens=max_new_tokens
        )
        if self.mesh is not None:
            check_cut(config, self.mesh)
        if prompt.shape[0] % self.num_groups:
            raise ValueError(
                f"expected a batch that is a multiple of data={self.num_groups}, got {prompt.shape[0]} rows: "
                "add rows of prompt_length 0, which do nothing"
            )
        return row_keys(key, prompt.shape[0]), prompt, prompt_length, sampling, pace


@dataclasses.dataclass(frozen=True)
class SingleDevice(Driver):
    """The default device: the functions of `specjax.compiled`."""

    mesh: None = None

    def place(self, params: Params, config: DecodeConfig) -> Params:
        """The params as they are."""
        return params

    def decode_steps(
        self,
        params: Params,
        state: DecodeState,
        sampling: SamplingParams,
        num_steps: int = ALL_STEPS,
        least_running: int = 1,
        *,
        config: DecodeConfig,
    ) -> DecodeState:
        """`specjax.decode_steps`."""
        return compiled.decode_steps(params, state, sampling, num_steps, least_running, config=config)

    def empty_slots(self, row: Slots, num_slots: int, *, config: DecodeConfig) -> Slots:
        """`slots.empty_slots`."""
        return empty_slots(row, num_slots)

    def insert(self, slots: Slots, rows: Slots, slot: int, *, config: DecodeConfig) -> Slots:
        """`compiled.insert`."""
        return compiled.insert(slots, rows, slot, config=config)

    def to_host(self, rows: Any) -> Any:
        """The arrays in NumPy."""
        return jax.tree.map(np.array, rows)

    def to_devices(self, rows: Any) -> Any:
        """The arrays on the default device."""
        return jax.tree.map(jnp.asarray, rows)

    def _generate(self, params: Params, inputs: Inputs, config: DecodeConfig, max_new_tokens: int) -> Output:
        return compiled.generate(params, *inputs, config=config, max_new_tokens=max_new_tokens)

    def _prefill(self, params: Params, inputs: Inputs, config: DecodeConfig, max_new_tokens: int) -> DecodeState:
        return compiled.prefill(params, *inputs, config=config, max_new_tokens=max_new_tokens)


SINGLE_DEVICE = SingleDevice()
"""What runs a decoder unless something else is asked for."""
