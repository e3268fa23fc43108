"""How a position state is written as reals, and how attention sees tokens through it.

    Complex        z = a + i b per frequency, as [a | b]: D reals a head
    Blocks(L, R)   M = D / L blocks e_m in R^(L x R): M L R reals
    Pair           cos and sin for each channel, as [c | s]: 2 D reals, for the ablations that do
                   not keep the two halves of the channels equal

For L = R = 2 and blocks [[a, b], [-b, a]], whose transpose multiplies by z, the first two are the
same numbers; a pair whose halves are equal is again z, twice.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from tape_jax.positions.rotary import rotate_heads

if TYPE_CHECKING:
    from tape_jax.positions.tape import Tape


class Form(Protocol):
    """One way to write a state, (..., S) reals a head."""

    def start(
        self, encoding: Tape, positions: Int[Array, "B N"], width: int
    ) -> Float[Array, "B N S"]:
        """The first state of one head of this width."""
        ...

    def apply(self, x: Float[Array, "B N H D"], e: Float[Array, "B N K S"]) -> Array:
        """x as the logits see it; query head h uses the state of its group, h // G."""
        ...

    def normalise(self, e: Float[Array, "B N K S"], modulus: float) -> Float[Array, "B N K S"]:
        """e with every complex number at this modulus, every block at sqrt(L) times it."""
        ...


def _to_modulus(parts: Float[Array, "... n"], modulus: float) -> Float[Array, "... n"]:
    """Vectors along the last axis, stretched to the modulus (a zero stays one)."""
    square = jnp.sum(jnp.square(parts), axis=-1, keepdims=True)
    return parts * modulus * jax.lax.rsqrt(jnp.maximum(square, 1e-24))


@dataclasses.dataclass(frozen=True)
class Complex:
    """[a | b]."""

    def start(self, encoding, positions, width):
        """z."""
        return encoding.start(encoding, positions, width)

    def apply(self, x, e):
        """z * x."""
        return rotate_heads(x, e)

    def normalise(self, e, modulus):
        """modulus z / |z|."""
        parts = jnp.stack(jnp.split(e, 2, axis=-1), axis=-1)
        unit = _to_modulus(parts, modulus)
        return jnp.concatenate([unit[..., 0], unit[..., 1]], axis=-1)


@dataclasses.dataclass(frozen=True)
class Pair:
    """[c | s]: x c + rotate_half(x) s, channel by channel (the official form)."""

    def start(self, encoding, positions, width):
        """cos and sin of the start, both halves alike."""
        a, b = jnp.split(encoding.start(encoding, positions, width), 2, axis=-1)
        return jnp.concatenate([a, a, b, b], axis=-1)

    def apply(self, x, e):
        """x c + rotate_half(x) s."""
        *lead, heads, width = x.shape
        state_heads = e.shape[-2]
        grouped = x.reshape(*lead, state_heads, heads // state_heads, width)
        first, second = jnp.split(grouped, 2, axis=-1)
        turned = jnp.concatenate([-second, first], axis=-1)
        c, s = jnp.split(e[..., None, :], 2, axis=-1)
        return (grouped * c + turned * s).reshape(x.shape).astype(x.dtype)

    def normalise(self, e, modulus):
        """Every (c, s) at the modulus."""
        return Complex().normalise(e, modulus)


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Blocks of `rows` x `columns`: L channels of a head each, seen through e_m^T."""

    rows: int
    columns: int

    def start(self, encoding, positions, width):
        """Row l of a block is [cos | sin] of t w + l pi / L over R / 2 frequencies, of norm 1.

        A shift of all positions multiplies every block from the right by a rotation, so logits
        stay relative. For L = R = 2 they are RoPE's blocks.
        """
        size, planes = width // self.rows, self.columns // 2
        z = encoding.start(encoding, positions, 2 * size * planes)
        cos, sin = (x.reshape(*x.shape[:-1], size, 1, planes) for x in jnp.split(z, 2, axis=-1))
        offset = np.arange(self.rows)[:, None] * np.pi / self.rows
        c, s = np.cos(offset).astype(np.float32), np.sin(offset).astype(np.float32)
        blocks = jnp.stack([cos * c - sin * s, sin * c + cos * s], axis=-1) * planes**-0.5
        return blocks.reshape(*z.shape[:-1], -1)

    def apply(self, x, e):
        """e_m^T x_m for each block."""
        return project_blocks(x, e, (self.rows, self.columns))

    def normalise(self, e, modulus):
        """Every block at the Frobenius norm that L rows of norm `modulus` have at the start."""
        parts = e.reshape(*e.shape[:-1], -1, self.rows * self.columns)
        return _to_modulus(parts, modulus * self.rows**0.5).reshape(e.shape)


def rotary_blocks(z: Float[Array, "B N K D"]) -> Float[Array, "B N K S"]:
    """The complex state z = [a | b] as blocks [[a, b], [-b, a]] (L = R = 2), flattened."""
    a, b = jnp.split(z, 2, axis=-1)
    blocks = jnp.stack([jnp.stack([a, b], -1), jnp.stack([-b, a], -1)], -2)
    return blocks.reshape(*z.shape[:-1], -1)


def project_blocks(
    x: Float[Array, "B N H D"], e: Float[Array, "B N K S"], block: tuple[int, int]
) -> Float[Array, "B N H MR"]:
    """x'_m = e_m^T x_m for each block m of L channels: what the logits see (paper Eq. 6).

    Block m holds channels m, m + M, m + 2M, ...: for L = 2 the half-split pairing of rotary.py.
    Query head h uses the state of its group, h // G.
    """
    rows, columns = block
    *lead, heads, width = x.shape
    state_heads, size = e.shape[-2], width // rows
    grouped = x.reshape(*lead, state_heads, heads // state_heads, rows, size)
    blocks = e.reshape(*e.shape[:-1], size, rows, columns)
    # Full precision: the default would round to bfloat16 on TPU, and angles with it.
    out = jnp.einsum(
        "...kglm,...kmlr->...kgrm",
        grouped.astype(jnp.float32),
        blocks.astype(jnp.float32),
        precision=jax.lax.Precision.HIGHEST,
    )
    return out.reshape(*lead, heads, size * columns).astype(x.dtype)
