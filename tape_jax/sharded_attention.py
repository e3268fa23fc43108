"""Attention where its arrays live: each device computes the batch rows and heads it holds.

A kernel is opaque to the partitioner, which would gather its operands. Inside `jax.shard_map` it
never does: attention needs nothing from other rows or heads. A sequence that is cut over "context"
trades its cut for one of heads (DeepSpeed-Ulysses, arXiv 2309.14509): two all-to-alls, and every
device sees whole sequences, so that causality by index stays what it was.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec
from jaxtyping import Array, Float, Int

from pallas_kernels import LinearBias, ScoreMod, tape_attention
from tape_jax.sharding import partition_spec

Pair = tuple[Int[Array, "B Nq"], Int[Array, "B Nk"]]


def sharded_attention(
    q: Float[Array, "B N H D"],
    k: Float[Array, "B N K D"],
    v: Float[Array, "B N K D"],
    e: Float[Array, "B N K De"] | None,
    *,
    positions: Pair | None = None,
    segment_ids: Int[Array, "B N"] | Pair | None,
    score_mod: ScoreMod | LinearBias | None = None,
    **arguments,
) -> tuple[Float[Array, "B N H D"], Float[Array, "B N H De"] | None]:
    """`tape_attention` on the mesh of `jax.set_mesh`; without one, `tape_attention` itself.

    Heads that their mesh axis does not divide are computed whole on every device of that axis; so
    are sequences cut over more devices than there are heads to trade. A `ScoreMod` closes over
    arrays of all heads: its attention is plain JAX and left to the partitioner. A `LinearBias` is
    cut as what it biases.
    """
    mesh = jax.sharding.get_abstract_mesh()
    by_hand = {
        name
        for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind == AxisType.Auto
    }
    if mesh.size == 1 or not by_hand or isinstance(score_mod, ScoreMod):
        integers = {"positions": positions, "segment_ids": segment_ids}
        return tape_attention(q, k, v, e, **integers, score_mod=score_mod, **arguments)

    whole_batch = lambda x: jnp.broadcast_to(x, (q.shape[0], x.shape[1]))  # noqa: E731
    positions, segment_ids = jax.tree.map(whole_batch, (positions, segment_ids))
    rows, length, heads, _ = partition_spec(("batch", "length", "kv_heads", None), k.shape, mesh)
    if k.shape[2] % (_extent(mesh, heads) * _extent(mesh, length)) or q.shape[1] != k.shape[1]:
        length = None  # decoding: few queries, and a cache that is not cut
    # Every axis that can be is named, of size 1 too: over the others the gradient is reduced.
    whole, by_row = PartitionSpec(rows, length, heads, None), PartitionSpec(rows, None)
    trading = _extent(mesh, length) > 1
    bias, bias_specs = _cut(score_mod, q.shape[0], rows, heads, length)

    def body(q, k, v, e, positions, segment_ids, bias):
        if trading:
            q, k, v, e = _trade((q, k, v, e), length, split=2, join=1)
        integers = {"positions": positions, "segment_ids": segment_ids}
        both = tape_attention(q, k, v, e, **integers, score_mod=bias, **arguments)
        return _trade(both, length, split=1, join=2) if trading else both

    return jax.shard_map(
        body,
        in_specs=(whole, whole, whole, whole, by_row, by_row, bias_specs),
        out_specs=whole,
        axis_names=by_hand,
        check_vma=False,  # a Pallas call does not say how its outputs vary over the mesh
    )(q, k, v, e, positions, segment_ids, bias)


def _cut(bias, batch, rows, heads, length):
    """A bias with positions for all rows of the batch, and its PartitionSpecs.

    A device has the slopes of the query heads it computes: of its share of the heads, and of that
    its share again where heads are traded for lengths. Positions are whole in length.
    """
    if bias is None:
        return None, None
    slopes = PartitionSpec((*_names(heads), *_names(length)))
    positions = bias.map_positions(lambda _: PartitionSpec(rows, None))
    return (
        bias.map_positions(lambda x: jnp.broadcast_to(x, (batch, x.shape[1]))),
        dataclasses.replace(positions, slopes=slopes),
    )


def _names(axes):
    """The mesh axes that cut one dimension, from its entry in a PartitionSpec."""
    return (axes,) if isinstance(axes, str) else axes or ()


def _extent(mesh, axes):
    return math.prod(mesh.shape[axis] for axis in _names(axes))


def _trade(arrays, axes, *, split, join):
    """Each device's share of axis `split` in exchange for all of axis `join`."""
    trade = functools.partial(
        jax.lax.all_to_all, axis_name=axes, split_axis=split, concat_axis=join, tiled=True
    )
    return jax.tree.map(trade, arrays)
