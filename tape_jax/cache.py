"""What decoding remembers: keys, values and position states of every layer, in slots.

A slot is a place for one token, the same in all layers. Tokens are written one after the other;
what is not written, or is padding, has segment -1 and is read by nobody.

Bytes of a token: 2 K D numbers a layer for RoPE's keys and values, and K D more for TAPE's state:
1.5 times as many.
"""

from __future__ import annotations

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from tape_jax.config import ModelConfig

EMPTY = -1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Kept:
    """What one layer keeps of some tokens, or all layers with a leading axis L.

    Attributes:
      k: keys as attention sees them (rotated), D' wide.
      v: values.
      e: the encoding's value stream; None for encodings without one.
    """

    k: Float[Array, "*L B M K E"]
    v: Float[Array, "*L B M K D"]
    e: Float[Array, "*L B M K S"] | None

    def write(self, new: Kept, start: Int[Array, ""]) -> Kept:
        """With `new` in the slots from `start` on; a stream that it lacks stays as it is."""

        def put(old, x):
            return jax.lax.dynamic_update_slice_in_dim(old, x.astype(old.dtype), start, axis=1)

        e = self.e if self.e is None or new.e is None else put(self.e, new.e)
        return Kept(put(self.k, new.k), put(self.v, new.v), e)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Slots:
    """What is known of each slot, whatever the layer.

    Attributes:
      positions: of the tokens in the slots.
      segment_ids: of the tokens; EMPTY where there is none to read.
      filled: slots written so far.
    """

    positions: Int[Array, "B M"]
    segment_ids: Int[Array, "B M"]
    filled: Int[Array, ""]

    def extend(self, positions: Int[Array, "B n"], segment_ids: Int[Array, "B n"]) -> Slots:
        """With n tokens more; there has to be room for them."""

        def put(old, x):
            x = jnp.broadcast_to(x, (old.shape[0], x.shape[1]))
            return jax.lax.dynamic_update_slice_in_dim(old, x, self.filled, axis=1)

        return Slots(
            put(self.positions, positions),
            put(self.segment_ids, segment_ids),
            self.filled + positions.shape[1],
        )

    def order(self, count: int) -> tuple[Int[Array, "1 n"], Int[Array, "1 M"]]:
        """(query, key) order of the newest `count` tokens among all slots: causality by slot."""
        newest = self.filled - count + jnp.arange(count)
        return newest[None], jnp.arange(self.positions.shape[1])[None]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """The cache of a model: `Kept` of all its layers (L, ...), and the slots."""

    kept: Kept
    slots: Slots

    @property
    def size(self) -> int:
        """M: tokens that have room."""
        return self.slots.positions.shape[1]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Past:
    """What one layer is given: its own share of the cache, and the slots with the new tokens."""

    kept: Kept
    slots: Slots

    def first_new(self, x: Float[Array, "B n C"]) -> Int[Array, ""]:
        """The slot of the first of the tokens x, which are the newest."""
        return self.slots.filled - x.shape[1]


class _Probe(nn.Module):
    """The widths of what an encoding makes of keys and state."""

    config: ModelConfig

    @nn.compact
    def __call__(self):
        config, encoding = self.config, self.config.position
        at = jnp.zeros((1, 1), jnp.int32)
        state = encoding.initial_state(at, config)
        q, k, v = (
            jnp.zeros((1, 1, heads, config.head_width), jnp.dtype(config.dtype))
            for heads in (config.num_heads, config.kv_heads, config.kv_heads)
        )
        _, k = encoding.rotate(q, k, state, at, config)
        return k, v, encoding.values(state)


def new_cache(config: ModelConfig, batch: int, size: int) -> Cache:
    """An empty cache for `batch` sequences of up to `size` tokens each.

    Raises:
      ValueError: an encoding that cannot decode from a cache, or a size it does not reach.
    """
    if (reason := config.position.uncacheable()) is not None:
        raise ValueError(f"position.name={config.position.name!r} has no exact cache: {reason}")
    if batch < 1 or size < 1:
        raise ValueError(f"a cache needs batch={batch} and size={size} >= 1")
    config.position.default_positions(size)
    shapes, _ = jax.eval_shape(_Probe(config).init_with_output, jax.random.key(0))

    def zeros(x):
        shape = (config.num_layers, batch, size, config.kv_heads, x.shape[-1])
        return jnp.zeros(shape, jnp.dtype(config.dtype))

    slots = Slots(
        jnp.zeros((batch, size), jnp.int32),
        jnp.full((batch, size), EMPTY, jnp.int32),
        jnp.zeros((), jnp.int32),
    )
    return Cache(Kept(*jax.tree.map(zeros, shapes)), slots)
