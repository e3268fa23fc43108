"""Attention of one block: project, look through the position state, attend, project back."""

import functools
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from tape_jax.cache import Kept, Past
from tape_jax.config import ModelConfig
from tape_jax.layers import linear
from tape_jax.positions.protocol import State
from tape_jax.sharded_attention import sharded_attention
from tape_jax.sharding import constrain
from tape_jax.shifted_attention import shifted_attention


class Attention(nn.Module):
    """Grouped-query attention that also mixes the position state (paper Eqs. 6 and 7)."""

    config: ModelConfig
    causal: bool = True

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B N C"],
        state: State,
        positions: Int[Array, "B N"],
        segment_ids: Int[Array, "B N"] | None,
        past: Past | None = None,
        *,
        mix_state: bool = True,
    ) -> tuple[Float[Array, "B N C"], Float[Array, "B N H De"] | None, Kept | None]:
        """The attention's output, the state's values mixed by the same probabilities, the cache.

        Causality is by index, whatever the positions say; with mix_state False nobody will read
        the second output, so it is not computed and None. With a `past`, tokens also read what is
        in its slots, and the third output is what the layer keeps now; else that is None.
        """
        config, encoding = self.config, self.config.position
        width, bias = config.head_width, config.attention_bias
        dtype = jnp.dtype(config.dtype)

        def heads(name, count, axis):
            y = linear(config, count * width, name, bias=bias)(x)
            return constrain(y.reshape(*x.shape[:2], count, width), "batch", "length", axis, None)

        q = heads("query", config.num_heads, "heads")
        k = heads("key", config.kv_heads, "kv_heads")
        v = heads("value", config.kv_heads, "kv_heads")
        q, k = encoding.rotate(q, k, state, positions, config)
        values = encoding.values(state) if mix_state else None
        if values is not None:
            values = jnp.broadcast_to(values.astype(dtype), (*k.shape[:3], values.shape[-1]))
        segments: Any = segment_ids
        order, kept, k_positions = None, None, positions
        if past is not None:
            (k, v, e), kept = past.extend((k, v, values))
            values = None if values is None else e
            order, k_positions = past.slots.order(x.shape[1]), past.slots.positions
            segments = (segment_ids, past.slots.segment_ids)
        score_mod = encoding.score_mod(q, positions, k_positions, config)
        attend = self._attend(past, positions=order, scale=width**-0.5, score_mod=score_mod)
        out, mixed = attend(q, k, v, values, segment_ids=segments)
        out = linear(config, config.hidden_size, "out", bias=bias)(out.reshape(*x.shape[:2], -1))
        return out, mixed, kept

    def _attend(self, past, *, score_mod, **arguments):
        """attend(q, k, v, e, segment_ids=...), of all tokens or, in training, within groups."""
        config = self.config
        attend = functools.partial(
            sharded_attention,
            causal=self.causal,
            score_mod=score_mod,
            implementation=config.attention,
            **arguments,
        )
        if config.shifted_groups is None:
            return attend
        if past is not None or score_mod is not None:
            raise ValueError(
                f"model.shifted_groups={config.shifted_groups} is for training encodings that"
                f" leave the scores alone: set it None for position.name={config.position.name!r}"
                " and for decoding"
            )
        return functools.partial(shifted_attention, attend, groups=config.shifted_groups)
