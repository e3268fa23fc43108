"""What TAPE costs, counted by the compiler: figures that do not vary."""

import jax
import jax.numpy as jnp
import pytest

from tape_jax import ModelConfig, Transformer, positions
from tests.tiny import logits, run


def forward_operations(position) -> float:
    """Operations of one forward pass of the official repository's 155M model, B 1, N 1024."""
    # The reference writes every product out; a loop over tiles would be counted once.
    config = ModelConfig(position=position, scan_layers=False, attention="reference")
    ids = jax.ShapeDtypeStruct((1, 1024), jnp.int32)
    model = Transformer(config)
    params = jax.eval_shape(model.init, jax.random.key(0), ids)
    return jax.jit(model.apply).lower(params, ids).compile().cost_analysis()["flops"]


@pytest.mark.parametrize(
    "flavour", [{}, {"post": "scalar", "zero": "w1"}], ids=["paper", "official"]
)
def test_tape_needs_at_most_1_062_times_the_operations_of_rope(flavour):
    """The official code needs 1.139 (365.65 G against 321.10 G, the paper's Table 3)."""
    rope = forward_operations(positions.RoPE())
    assert 3.15e11 < rope < 3.35e11  # the paper counts 321.10 G
    tape = forward_operations(positions.Tape(width=48, **flavour))
    assert 1.03 < tape / rope <= 1.062


def test_parameter_counts_of_the_paper():
    """155.33 and 154.89 in units of 2^20 (Table 3), with the official flavour's full count."""

    def count(position):
        config = ModelConfig(position=position)
        shapes = jax.eval_shape(
            Transformer(config).init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32)
        )
        return sum(leaf.size for leaf in jax.tree.leaves(shapes))

    assert count("rope") == 162_417_408
    tape = count(positions.Tape(width=48))
    assert tape - count("rope") == 457_920
    assert round(tape / 2**20, 2) == 155.33


def test_the_last_state_is_not_computed_when_nobody_reads_it():
    """Unrolled, the last layer's position parameters take no part in the forward pass."""
    config = ModelConfig(
        vocab_size=31,
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=4,
        scan_layers=False,
    )
    model, ids = Transformer(config), jnp.zeros((1, 6), jnp.int32)
    params = model.init(jax.random.key(0), ids)["params"]
    poisoned = jax.tree.map(lambda x: x, params)
    poisoned["layers"]["position"] = jax.tree.map(
        lambda p: p.at[-1].set(jnp.nan), params["layers"]["position"]
    )
    without = logits(config, poisoned, ids)
    assert bool(jnp.isfinite(without).all())
    with_states, _, states = run(config, poisoned, ids)
    assert bool((with_states == without).all())
    assert bool(jnp.isnan(states[-1]).all()) and bool(jnp.isfinite(states[:-1]).all())
