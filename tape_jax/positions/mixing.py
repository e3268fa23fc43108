"""Along which axis a state is mixed: heads (TAPE), or what the paper's ablations put instead.

    heads      one map over heads, the same for every channel: equivariant, tensorial (the paper)
    separate   such a map for cos and another for sin: no rotation equivariance (adatensor)
    channels   one map over the channels of a head, the same for every head: vectorial (adavector)
    all        one map over all heads' channels for the position MLP: no equivariance (adawoeq)

Names in parentheses are the official files. The last two mix frequencies.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jaxtyping import Array

if TYPE_CHECKING:
    from tape_jax.config import ModelConfig


def sum_groups(x: Array, kv_heads: int) -> Array:
    """(B, N, H, S) summed over the query heads of each group: (B, N, K, S)."""
    return x.reshape(*x.shape[:-2], kv_heads, -1, x.shape[-1]).sum(-2)


@dataclasses.dataclass(frozen=True)
class View:
    """A state seen with the axis to mix next to last.

    Attributes:
      fold: (B, N, heads, S), K -> (..., J, S').
      unfold: (..., J, S'), K -> (B, N, K, S).
      axes: config -> (J, J'), the lengths of the mixed axis after and before the linear map that
        follows the attention; J is that of the position MLP.
      copies: maps of their own for each entry of a leading axis of this length; 0: no such axis.
    """

    fold: Callable[[Array, int], Array]
    unfold: Callable[[Array, int], Array]
    axes: Callable[[ModelConfig], tuple[int, int]]
    copies: int = 0

    @property
    def lead(self) -> tuple[int, ...]:
        """The axis of the copies, in front of a parameter's own axes."""
        return (self.copies,) if self.copies else ()

    def by_copy(self, mix: Callable[..., Array], in_axes=0) -> Callable[..., Array]:
        """`mix`, with parameters of its own for each copy."""
        return jax.vmap(mix, in_axes) if self.copies else mix


def _head_axes(config):
    return config.kv_heads, config.num_heads


def _fold_channels(e, kv_heads):
    """Channels next to last, cos and sin of every head last: (B, N, D, 2 K)."""
    e = sum_groups(e, kv_heads)
    pairs = e.reshape(*e.shape[:-1], 2, -1)
    return jnp.moveaxis(pairs, -1, -3).reshape(*e.shape[:-2], pairs.shape[-1], -1)


def _unfold_channels(x, kv_heads):
    pairs = x.reshape(*x.shape[:-1], kv_heads, 2)
    return jnp.moveaxis(pairs, -3, -1).reshape(*x.shape[:-2], kv_heads, -1)


def _fold_all(e, kv_heads):
    """Heads and channels together next to last, cos and sin last: (B, N, K D, 2)."""
    pairs = e.reshape(*e.shape[:-1], 2, -1).swapaxes(-1, -2)
    return pairs.reshape(*e.shape[:-2], -1, 2)


def _unfold_all(x, kv_heads):
    pairs = x.reshape(*x.shape[:-2], kv_heads, -1, 2).swapaxes(-1, -2)
    return pairs.reshape(*x.shape[:-2], kv_heads, -1)


HEADS = View(lambda e, _: e, lambda x, _: x, _head_axes)
SEPARATE = View(
    lambda e, _: jnp.stack(jnp.split(e, 2, axis=-1)),
    lambda x, _: jnp.concatenate([x[0], x[1]], axis=-1),
    _head_axes,
    copies=2,
)
CHANNELS = View(_fold_channels, _unfold_channels, lambda c: (c.head_width, c.head_width))
ALL = View(_fold_all, _unfold_all, lambda c: (c.kv_heads * c.head_width,) * 2)

VIEWS: dict[str, tuple[View, View]] = {
    "heads": (HEADS, HEADS),
    "separate": (SEPARATE, SEPARATE),
    "channels": (CHANNELS, CHANNELS),
    "all": (HEADS, ALL),
}
"""What the linear map after the attention mixes, and what the position MLP does, by `mixing`."""

PAIRED = ("channels", "all")
"""Kinds of mixing that let the two halves of the channels part."""
