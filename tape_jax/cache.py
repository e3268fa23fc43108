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
from tape_jax.sharding import constrain

EMPTY = -1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Kept:
    """What the layers keep of the tokens in the slots. Only what is new is ever written.

    Attributes:
      k: keys as attention sees them (rotated).
      v: values.
      e: the encoding's value stream; None for encodings without one.
      heads_first: whether a layer's arrays lie as (B, K, M, width), which matrix products like, or
        as (B, M, K, width), which the kernels for GPUs read. In the other order they would be
        copied for every token.
    """

    k: Float[Array, "L B x y D"]
    v: Float[Array, "L B x y D"]
    e: Float[Array, "L B x y S"] | None
    heads_first: bool = dataclasses.field(default=False, metadata={"static": True})

    def read(self, layer: Int[Array, ""]) -> tuple[Array, Array, Array | None]:
        """k, v and e of one layer, each (B, M, K, width)."""

        def one(x):
            return self._turn(jax.lax.dynamic_index_in_dim(x, layer, keepdims=False))

        return jax.tree.map(one, (self.k, self.v, self.e))

    def write(
        self,
        layer: Int[Array, ""],
        start: Int[Array, ""],
        new: tuple[Array, Array, Array | None],
    ) -> Kept:
        """With `new`, each (B, n, K, width), in this layer's slots from `start` on.

        A stream that it lacks stays as it is.
        """
        place = (0, start) if self.heads_first else (start, 0)

        def put(old, x):
            if old is None or x is None:
                return old
            x = self._turn(x).astype(old.dtype)[None]
            return jax.lax.dynamic_update_slice(old, x, (layer, 0, *place, 0))

        streams = (put(*both) for both in zip((self.k, self.v, self.e), new, strict=True))
        return Kept(*streams, heads_first=self.heads_first)

    def _turn(self, x: Array) -> Array:
        return x.swapaxes(1, 2) if self.heads_first else x


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
    """What one layer is given: the cache, whose slots know the new tokens, and its place there."""

    kept: Kept
    slots: Slots
    layer: Int[Array, ""]

    def extend(
        self, new: tuple[Array, Array, Array | None]
    ) -> tuple[tuple[Array, Array, Array | None], Kept]:
        """The layer's keys, values and stream with those of the newest tokens, and the cache."""
        start = self.slots.filled - new[0].shape[1]
        kept = self.kept.write(self.layer, start, new)
        return kept.read(self.layer), kept


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
    return jax.jit(_empty, static_argnums=(0, 1, 2))(config, batch, size)


def _empty(config: ModelConfig, batch: int, size: int) -> Cache:
    """Zeros, each device its own part of them."""
    shapes, _ = jax.eval_shape(_Probe(config).init_with_output, jax.random.key(0))
    # XLA for CPUs has no product of bfloat16 for some shapes with the heads first.
    here, wide = jax.default_backend(), config.dtype == "float32"
    heads_first = here == "tpu" or (here == "cpu" and wide)
    if heads_first:
        sizes, axes = (config.kv_heads, size), ("kv_heads", None)
    else:
        sizes, axes = (size, config.kv_heads), (None, "kv_heads")

    def zeros(x):
        whole = (config.num_layers, batch, *sizes, x.shape[-1])
        empty = jnp.zeros(whole, jnp.dtype(config.dtype))
        return constrain(empty, "layers", "batch", *axes, None)

    slots = Slots(
        jnp.zeros((batch, size), jnp.int32),
        jnp.full((batch, size), EMPTY, jnp.int32),
        jnp.zeros((), jnp.int32),
    )
    return Cache(Kept(*jax.tree.map(zeros, shapes), heads_first=heads_first), slots)
