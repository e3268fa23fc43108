"""Numerics of every implementation of attention on the device at hand, against float64 on its CPU.

The cases cover lengths, widths, grouped queries, segments with padding, queries against a cache and
attention without causality, each in float32 and in half precision. Errors are relative root mean
squares of the outputs and of all gradients. Float32 products are asked for in full: the default of
GPUs and TPUs rounds their factors to TF32 or bfloat16, which is the user's choice and no error.

Letters: B batch, N sequence, H query heads, K key/value heads, G = H / K, D head width.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.table import Table

from benchmarks import timing
from pallas_kernels import IMPLEMENTATIONS, tape_attention

LIMITS = {"float32": (2e-6, 5e-6), "bfloat16": (5e-3, 1e-2), "float16": (5e-3, 1e-2)}
"""Relative root mean square that outputs and gradients may be off, by dtype."""

QUANTITIES = ("out", "mixed", "dq", "dk", "dv", "de")

BATCH = 2


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of `tape_attention`.

    Attributes:
      width: of q, k and v.
      e_width: of the position states; 0: none.
      packed: sequences hold several segments and padding.
      cached: queries stand anywhere among the keys' positions, or before all of them.
    """

    n_q: int
    n_k: int
    width: int
    e_width: int
    heads: int = 2
    kv_heads: int = 2
    causal: bool = True
    packed: bool = False
    cached: bool = False
    dtypes: tuple[str, ...] = ("float32", "bfloat16")

    def __str__(self):
        flags = {"packed": self.packed, "cached": self.cached, "not causal": not self.causal}
        sizes = f"N {self.n_q}x{self.n_k} D {self.width}+{self.e_width} H {self.heads}"
        return " ".join([f"{sizes}/{self.kv_heads}", *(name for name, on in flags.items() if on)])


EVERY = tuple(LIMITS)

CASES = (
    Case(1, 1, 16, 16),
    Case(7, 7, 32, 32, heads=4),
    Case(63, 63, 48, 48),
    Case(65, 65, 64, 64, heads=4, dtypes=EVERY),
    Case(200, 200, 72, 72),
    Case(63, 63, 80, 80, heads=6, causal=False),
    Case(200, 200, 96, 96, heads=4, packed=True),
    Case(65, 65, 128, 128, packed=True, causal=False, dtypes=EVERY),
    Case(1000, 1000, 64, 64, heads=4),
    Case(1000, 1000, 128, 128, packed=True),
    Case(200, 200, 64, 0, heads=4),
    Case(200, 200, 64, 32, heads=8),
    Case(1, 1000, 64, 64, heads=8, cached=True, dtypes=EVERY),
    Case(7, 200, 128, 128, heads=4, cached=True),
)
"""Every length, width and feature at least once, and the pairs that share code in a kernel."""


@dataclasses.dataclass(frozen=True)
class Call:
    """A case with its numbers.

    Attributes:
      arrays: q, k, v and, where there are position states, e.
      cotangents: of out and, likewise, mixed.
      order, segment_ids: (query, key) pairs of (B, N) int32, or None.
    """

    arrays: Sequence[Any]
    cotangents: Sequence[Any]
    causal: bool
    order: tuple[Any, Any] | None
    segment_ids: tuple[Any, Any] | None

    def mask(self) -> np.ndarray:
        """Which key a query may read, bool (B, Nq, Nk)."""
        n_q, n_k = self.arrays[0].shape[1], self.arrays[1].shape[1]
        mask = np.ones((BATCH, n_q, n_k), bool)
        if self.causal:
            q_order, k_order = self.order or (np.arange(n_q)[None], np.arange(n_k)[None])
            mask &= np.asarray(q_order)[:, :, None] >= np.asarray(k_order)[:, None]
        if self.segment_ids:
            of_q, of_k = (np.asarray(x) for x in self.segment_ids)
            mask &= (of_q[:, :, None] == of_k[:, None]) & (of_k >= 0)[:, None]
        return mask


def make_call(case: Case, dtype: str, seed: int = 0) -> Call:
    """Normal inputs, rounded to `dtype`: the truth is computed from the same numbers."""
    rng = np.random.default_rng(seed)
    n_q, n_k, width, e_width = case.n_q, case.n_k, case.width, case.e_width
    draw = lambda *shape: jnp.asarray(rng.normal(size=(BATCH, *shape)), dtype)  # noqa: E731
    whole = lambda x: jnp.asarray(x, jnp.int32)  # noqa: E731
    streams = [w for w in (width, e_width) if w]
    order = segments = None
    if case.cached:
        order = whole(rng.integers(-1, n_k, (BATCH, n_q))), whole([np.arange(n_k)] * BATCH)
    if case.packed:
        segments = (whole(np.sort(rng.integers(-1, 3, (BATCH, n_k)))),) * 2
    return Call(
        arrays=[
            draw(n_q, case.heads, width),
            draw(n_k, case.kv_heads, width),
            *(draw(n_k, case.kv_heads, w) for w in streams),
        ],
        cotangents=[draw(n_q, case.heads, w) for w in streams],
        causal=case.causal,
        order=order,
        segment_ids=segments,
    )


def truth(call: Call) -> list[np.ndarray]:
    """Outputs and gradients in float64, in the order of `QUANTITIES`; no mixed, de without e."""
    q, k, *values = (np.asarray(x, np.float64).swapaxes(1, 2) for x in call.arrays)
    d_outs = [np.asarray(x, np.float64).swapaxes(1, 2) for x in call.cotangents]
    groups, scale = q.shape[1] // k.shape[1], q.shape[3] ** -0.5
    spread = lambda x: np.repeat(x, groups, axis=1)  # noqa: E731
    gather = lambda x: x.reshape(BATCH, -1, groups, *x.shape[2:]).sum(2)  # noqa: E731
    transposed = lambda x: x.swapaxes(2, 3)  # noqa: E731

    scores = np.where(call.mask()[:, None], scale * (q @ transposed(spread(k))), -np.inf)
    top = scores.max(axis=3, keepdims=True)
    weights = np.exp(scores - np.where(np.isfinite(top), top, 0.0))
    total = weights.sum(axis=3, keepdims=True)
    probs = weights / np.where(total == 0.0, 1.0, total)
    d_probs = sum(d @ transposed(spread(x)) for d, x in zip(d_outs, values, strict=True))
    d_scores = probs * (d_probs - (probs * d_probs).sum(axis=3, keepdims=True))
    results = [
        *(probs @ spread(x) for x in values),
        scale * (d_scores @ spread(k)),
        gather(scale * (transposed(d_scores) @ q)),
        *(gather(transposed(probs) @ d) for d in d_outs),
    ]
    return [x.swapaxes(1, 2) for x in results]


def relative_rms(got: Any, want: np.ndarray) -> float:
    """The error's root mean square over that of `want`; where that is 0, over 1."""
    got = np.asarray(got, np.float64)
    size = np.sqrt(np.mean(want**2))
    return float(np.sqrt(np.mean((got - want) ** 2)) / (size if size > 1e-12 else 1.0))


def check(names: Sequence[str], cases: Sequence[Case] = CASES) -> list[dict[str, Any]]:
    """One row per implementation, case and dtype.

    A row holds `errors` by quantity, the `limits` of outputs and gradients, `passed` (None when
    the implementation refuses the call) and a `note`: why it refuses, or what it raised.
    """
    calls = {(case, dtype): make_call(case, dtype) for case in cases for dtype in case.dtypes}
    refusals = {(name, *key): _refusal(name, call) for name in names for key, call in calls.items()}
    programs = timing.compiled(
        {
            key: functools.partial(_lower, key[0], calls[key[1:]], key[2])
            for key, reason in refusals.items()
            if reason is None
        }
    )
    wanted = {key: truth(call) for key, call in calls.items()}
    rows = []
    for (name, case, dtype), reason in refusals.items():
        row = {"implementation": name, "case": str(case), "dtype": dtype, "limits": LIMITS[dtype]}
        program, call = programs.get((name, case, dtype)), calls[case, dtype]
        judged = (
            {"errors": {}, "passed": None, "note": f"refuses {reason}"}
            if reason is not None
            else _judge(program, call, wanted[case, dtype], LIMITS[dtype])
        )
        rows.append(row | judged)
    return rows


def _refusal(name, call):
    q, k, v, *e = call.arrays
    return IMPLEMENTATIONS[name].refusal(
        q,
        k,
        v,
        e[0] if e else None,
        causal=call.causal,
        order=call.order,
        segment_ids=call.segment_ids,
        scale=q.shape[-1] ** -0.5,
        score_mod=None,
    )


def _lower(name, call, dtype):
    """The program that gives outputs and gradients of `call`."""

    def attend(pairs, *arrays):
        outs = tape_attention(*arrays, causal=call.causal, implementation=name, **pairs)
        return [x for x in outs if x is not None]

    def both(pairs, arrays, cotangents):
        outs, pull = jax.vjp(functools.partial(attend, pairs), *arrays)
        return [*outs, *pull(cotangents)]

    full = dtype == "float32"
    with jax.default_matmul_precision("highest") if full else contextlib.nullcontext():
        return jax.jit(both).lower(*_operands(call))


def _operands(call):
    # One array for both sides is how a caller says that they do not differ.
    segments = call.segment_ids and call.segment_ids[0]
    return {"positions": call.order, "segment_ids": segments}, call.arrays, call.cotangents


def _judge(program, call, wanted, limits) -> dict[str, Any]:
    """errors, passed and note of one compiled program, or of what compiling it raised."""
    got = program if isinstance(program, Exception) else timing.attempt(_run, program, call)
    if isinstance(got, Exception):
        return {"errors": {}, "passed": False, "note": timing.summary(got)}
    with_states = len(call.cotangents) == 2
    names = [name for name in QUANTITIES if with_states or name not in ("mixed", "de")]
    errors = {
        name: relative_rms(ours, theirs)
        for name, ours, theirs in zip(names, got, wanted, strict=True)
    }
    # A NaN is below no limit.
    passed = all(error < limits[name.startswith("d")] for name, error in errors.items())
    return {"errors": errors, "passed": passed, "note": None}


def _run(program, call):
    return jax.block_until_ready(program(*_operands(call)))


def failures(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line for each row that failed."""
    return [
        f"{row['implementation']}, {row['dtype']}, {row['case']}: {row['note'] or row['errors']}"
        for row in rows
        if row["passed"] is False
    ]


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """The table of every error."""
    table = Table(title="errors against float64 (relative root mean square)")
    for column in ("implementation", "dtype", "case", *QUANTITIES, "verdict"):
        table.add_column(column, justify="right" if column in QUANTITIES else "left")
    words = {True: "ok", False: "[red]FAILED[/red]", None: "-"}
    for row in rows:
        cells = [f"{row['errors'][x]:.1e}" if x in row["errors"] else "" for x in QUANTITIES]
        verdict = " ".join(filter(None, [words[row["passed"]], row["note"]]))
        table.add_row(row["implementation"], row["dtype"], row["case"], *cells, verdict)
    timing.console().print(table)
