"""LongLoRA's shifted sparse attention (arXiv 2309.12307), which makes long training rows cheap.

The sequence is cut into groups that attend within themselves only. The second half of the heads
has its groups shifted by half a group, so that layers carry information over the edges. The shifted
groups do not run around the end: there is half a group at either end (their flash variant; in their
eager one the first tokens read the last ones).
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def shifted_attention(
    attend: Callable[..., tuple[Array, Array | None]],
    q: Float[Array, "B N H D"],
    k: Float[Array, "B N K D"],
    v: Float[Array, "B N K D"],
    e: Float[Array, "B N K De"] | None,
    *,
    segment_ids: Int[Array, "B N"] | None,
    groups: int,
) -> tuple[Float[Array, "B N H D"], Float[Array, "B N H De"] | None]:
    """What `attend(q, k, v, e, segment_ids=...)` gives within groups: (out, mixed).

    Of K key/value heads the first K // 2 have whole groups, the others (with their query heads)
    shifted ones.

    Raises:
      ValueError: a length that cannot be cut into groups with halves.
    """
    batch, length, heads, _ = q.shape
    if length % (2 * groups):
        raise ValueError(
            f"a sequence of {length} tokens cannot be cut into model.shifted_groups={groups} groups"
            f" and their halves: use a multiple of {2 * groups}"
        )
    size, whole = length // groups, k.shape[2] // 2
    if segment_ids is None:
        segment_ids = jnp.zeros((1, length), jnp.int32)
    segment_ids = jnp.broadcast_to(segment_ids, (batch, length))

    def within(shift, queries, keys):
        def fold(x):
            return jnp.roll(x, -shift, axis=1).reshape(batch * groups, size, *x.shape[2:])

        def unfold(x):
            return jnp.roll(x.reshape(batch, length, *x.shape[2:]), shift, axis=1)

        # The last group ends with the tokens from the front: other segments than its own.
        front = jnp.arange(length) < shift
        segments = jnp.where(segment_ids < 0, segment_ids, 2 * segment_ids + front)
        parts = (
            q[:, :, queries],
            k[:, :, keys],
            v[:, :, keys],
            None if e is None else e[:, :, keys],
        )
        folded = (None if x is None else fold(x) for x in parts)
        out, mixed = attend(*folded, segment_ids=fold(segments))
        return unfold(out), None if mixed is None else unfold(mixed)

    split = whole * (heads // k.shape[2])
    whole_groups = within(0, slice(None, split), slice(None, whole))
    shifted_groups = within(size // 2, slice(split, None), slice(whole, None))
    return jax.tree.map(lambda *x: jnp.concatenate(x, axis=2), whole_groups, shifted_groups)
