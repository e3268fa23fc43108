"""Changes of the attention scores: what an encoding that is no rotation adds or does to them."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


@dataclasses.dataclass(frozen=True)
class ScoreMod:
    """A function of the scaled scores, evaluated before the mask on tiles of indices.

    Attributes:
      function: (scores, query indices (n,), key indices (m,)) -> float32 scores (B, H, n, m), from
        float32 scores of that shape. It may close over arrays; floats among them get gradients.
      parts: channels of q and k whose products come apart, adding up to D: scores is then
        (parts, B, H, n, m), each scaled. None: one product, no leading axis.
      whole_rows: the function looks along rows, so it is given all keys of a query at once, and
        the mask beforehand (what may not be read is the lowest float32). Memory is O(N^2) then.
    """

    function: Callable[[Array, Array, Array], Array]
    parts: tuple[int, ...] | None = None
    whole_rows: bool = False

    def __call__(self, scores, q_index, k_index):
        """The changed scores."""
        return self.function(scores, q_index, k_index)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LinearBias:
    """scores - slope_h |i - j| (ALiBi): a score modifier that kernels know by its kind.

    Attributes:
      slopes: one for each query head, constants: they get no gradient.
      q_positions, k_positions: i and j, for each query and key, below 2**24 in magnitude (float32
        holds those exactly); B may be 1.
    """

    slopes: Float[Array, " H"]
    q_positions: Int[Array, "B Nq"]
    k_positions: Int[Array, "B Nk"]

    @property
    def parts(self) -> None:
        """One product."""

    @property
    def whole_rows(self) -> bool:
        """No."""
        return False

    def __call__(self, scores, q_index, k_index):
        """The changed scores, (B, H, n, m)."""
        q_position = jnp.take(self.q_positions, q_index, axis=1)[:, :, None]
        k_position = jnp.take(self.k_positions, k_index, axis=1)[:, None]
        distance = jnp.abs(q_position - k_position)[:, None].astype(jnp.float32)
        return scores - jax.lax.stop_gradient(self.slopes)[:, None, None] * distance

    def map_positions(self, change: Callable) -> "LinearBias":
        """The same with `change` of each side's positions."""
        q_positions, k_positions = change(self.q_positions), change(self.k_positions)
        return dataclasses.replace(self, q_positions=q_positions, k_positions=k_positions)


def parts_of(score_mod: ScoreMod | LinearBias | None, width: int) -> tuple[int, ...]:
    """The widths of the products that a score modifier is given; the whole width without one.

    Raises:
      ValueError: parts that do not add up to the width.
    """
    parts = (score_mod.parts if score_mod is not None else None) or (width,)
    if sum(parts) != width or min(parts) < 1:
        raise ValueError(f"score_mod.parts={parts} must be >= 1 and add up to the width {width}")
    return parts


def split_channels(x: Float[Array, "... D"], parts: tuple[int, ...]) -> list[Array]:
    """The channels of each part."""
    return jnp.split(x, [sum(parts[: i + 1]) for i in range(len(parts) - 1)], axis=-1)
