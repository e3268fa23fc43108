"""LongLoRA's sparse attention against a mask written out head by head."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from tape_jax.cache import new_cache
from tape_jax.sharded_attention import sharded_attention
from tape_jax.shifted_attention import shifted_attention
from tests.tiny import logits, random_params, tiny, tokens

BATCH, LENGTH, GROUPS, WIDTH = 2, 16, 4, 8


def may_read(head_is_shifted, segments):
    """(N, N) of one sequence: both in one group, no group around the end, causal, one segment."""
    shift = LENGTH // GROUPS // 2 if head_is_shifted else 0
    at = np.arange(LENGTH)
    group = (at - shift) // (LENGTH // GROUPS)  # the first half group is group -1
    same = (group[:, None] == group) & (segments[:, None] == segments)
    return same & (at[:, None] >= at)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (8, 4), (9, 3)])
@pytest.mark.parametrize("packed", [False, True])
def test_each_head_reads_its_groups(heads, kv_heads, packed):
    rng = np.random.default_rng(0)
    q, k, v, e = (
        rng.normal(size=(BATCH, LENGTH, n, WIDTH)).astype(np.float32)
        for n in (heads, kv_heads, kv_heads, kv_heads)
    )
    segments = np.zeros((BATCH, LENGTH), np.int32)
    if packed:
        segments[0, 7:] = 1
        segments[1, 13:] = 5
    attend = lambda *x, **how: sharded_attention(*x, causal=True, scale=WIDTH**-0.5, **how)  # noqa: E731
    given = jnp.asarray(segments) if packed else None
    out, mixed = shifted_attention(attend, q, k, v, e, segment_ids=given, groups=GROUPS)
    for row in range(BATCH):
        for head in range(heads):
            own = head // (heads // kv_heads)
            scores = q[row, :, head] @ k[row, :, own].T * WIDTH**-0.5
            allowed = may_read(own >= kv_heads // 2, segments[row])
            scores = np.where(allowed, scores.astype(np.float64), -np.inf)
            probs = np.exp(scores - scores.max(axis=1, keepdims=True))
            probs /= probs.sum(axis=1, keepdims=True)
            np.testing.assert_allclose(out[row, :, head], probs @ v[row, :, own], atol=2e-6)
            np.testing.assert_allclose(mixed[row, :, head], probs @ e[row, :, own], atol=2e-6)


@pytest.mark.parametrize("position", ["tape", "rope"])
def test_a_model_in_groups(position):
    """One layer reads less; nothing is read from the future; one group is full attention."""
    config = tiny(position=position, num_layers=2)
    params, ids = random_params(config), tokens(config, length=LENGTH)
    sparse = dataclasses.replace(config, shifted_groups=4)
    out = logits(sparse, params, ids)
    changed = ids.copy()
    changed[:, -2:] = (changed[:, -2:] + 1) % config.vocab_size
    np.testing.assert_array_equal(out[:, :-2], logits(sparse, params, changed)[:, :-2])
    full = logits(config, params, ids)
    np.testing.assert_allclose(out[:, :2], full[:, :2], atol=2e-5)
    assert np.abs(out - full).max() > 0.1


@pytest.mark.parametrize(
    ("fields", "length", "message"),
    [
        ({"shifted_groups": 4}, 12, "12 tokens cannot be cut into model.shifted_groups=4"),
        ({"shifted_groups": 2, "position": "alibi"}, 12, "position.name='alibi'"),
        ({"shifted_groups": 0}, 12, "model.shifted_groups=0 must be >= 1"),
        ({"shifted_groups": 2, "num_kv_heads": 1}, 12, "at least 2 key/value heads"),
    ],
)
def test_groups_that_cannot_be(fields, length, message):
    with pytest.raises(ValueError, match=message):
        config = tiny(**fields)
        logits(config, random_params(tiny()), tokens(config, length=length))


def test_decoding_is_not_in_groups():
    config = tiny(shifted_groups=2)
    cache = new_cache(config, 1, 8)
    with pytest.raises(ValueError, match=r"set it None [\s\S]* for decoding"):
        logits(config, random_params(tiny()), tokens(config, batch=1, length=4), cache=cache)
