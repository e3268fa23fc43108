"""Position-aware attention against a float64 loop over queries."""

import numpy as np
import pytest

from pallas_kernels import tape_attention


def by_hand(q, k, v, e, mask, scale):
    """One query at a time, in float64: (out, mixed); zeros where the mask is empty."""
    q, k, v, e = (np.asarray(x, np.float64) for x in (q, k, v, e))
    groups = q.shape[2] // k.shape[2]
    outs = [np.zeros((*q.shape[:3], x.shape[-1])) for x in (v, e)]
    for b, i, h in np.ndindex(q.shape[:3]):
        keys = np.flatnonzero(mask[b, i])
        if len(keys):
            scores = scale * k[b, keys, h // groups] @ q[b, i, h]
            probs = np.exp(scores - scores.max())
            probs /= probs.sum()
            for out, values in zip(outs, (v, e), strict=True):
                out[b, i, h] = probs @ values[b, keys, h // groups]
    return outs


def inputs(n_q, n_k, heads=4, kv_heads=2, width=8, e_width=6, batch=2, seed=0):
    rng = np.random.default_rng(seed)
    shapes = [(n_q, heads, width), *[(n_k, kv_heads, w) for w in (width, width, e_width)]]
    return [rng.normal(size=(batch, *shape)).astype(np.float32) for shape in shapes]


def order_mask(q_order, k_order):
    return q_order[:, :, None] >= k_order[:, None, :]


@pytest.mark.parametrize("n", [1, 2, 7, 16])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("causal", [True, False])
def test_values_and_states(n, kv_heads, causal):
    q, k, v, e = inputs(n, n, kv_heads=kv_heads)
    index = np.arange(n)[None].repeat(2, 0)
    mask = order_mask(index, index) if causal else np.ones((2, n, n), bool)
    want = by_hand(q, k, v, e, mask, 8**-0.5)
    got = tape_attention(q, k, v, e, causal=causal)
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-6)


def test_segments_padding_and_empty_rows():
    q, k, v, e = inputs(9, 9)
    segments = np.array([[-1, -1, 0, 0, 0, 1, 1, 2, 2], [4, 4, 4, 4, -1, -1, 7, 7, 7]])
    index = np.arange(9)[None].repeat(2, 0)
    same = (segments[:, :, None] == segments[:, None, :]) & (segments >= 0)[:, None, :]
    want = by_hand(q, k, v, e, order_mask(index, index) & same, 0.25)
    got = tape_attention(q, k, v, e, segment_ids=segments, scale=0.25)
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-6)
        assert (np.asarray(ours)[segments < 0] == 0.0).all()


def test_cross_lengths_with_pairs_of_positions_and_segments():
    q, k, v, e = inputs(3, 8)
    q_order, k_order = np.array([[5, 2, -1]] * 2), np.array([[0, 1, 2, 3, 4, 5, 6, 7]] * 2)
    q_seg, k_seg = np.zeros((2, 3), int), np.array([[0, 0, 1, 0, 0, 0, 0, 0]] * 2)
    mask = order_mask(q_order, k_order) & (q_seg[:, :, None] == k_seg[:, None, :])
    want = by_hand(q, k, v, e, mask, 8**-0.5)
    got = tape_attention(q, k, v, e, positions=(q_order, k_order), segment_ids=(q_seg, k_seg))
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-6)
    assert (np.asarray(got[0])[:, 2] == 0.0).all()


def test_without_states_it_is_plain_attention():
    q, k, v, e = inputs(7, 7)
    out, mixed = tape_attention(q, k, v)
    assert mixed is None
    np.testing.assert_array_equal(out, tape_attention(q, k, v, e)[0])


def test_score_mod_sees_scaled_scores_and_indices():
    q, k, v, e = inputs(6, 6)
    q, seen = np.zeros_like(q), []

    def prefer_the_key_before(scores, q_index, k_index):
        seen.append((scores.shape, q_index.shape, k_index.shape))
        return scores + 1e4 * (k_index[None, :] == q_index[:, None] - 1)

    out, _ = tape_attention(q, k, v, e, score_mod=prefer_the_key_before)
    assert seen == [((2, 4, 6, 6), (6,), (6,))]
    np.testing.assert_allclose(out[:, 1:, ::2], v[:, :-1], atol=1e-6)


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"q": (2, 5, 8)}, "q must be"),
        ({"k": (2, 5, 2, 4)}, "q .* and k"),
        ({"v": (2, 4, 2, 8)}, "v .* and k"),
        ({"e": (2, 5, 1, 8)}, "e .* and k"),
        ({"q": (2, 5, 3, 8)}, "query heads"),
        ({"segment_ids": (2, 6)}, "segment_ids"),
        ({"positions": (5,)}, "positions"),
        ({"implementation": "referenc"}, "implementation='referenc' is unknown"),
    ],
)
def test_arguments_that_do_not_fit(change, names):
    shapes = {"q": (2, 5, 4, 8), "k": (2, 5, 2, 8), "v": (2, 5, 2, 8), "e": (2, 5, 2, 8)}
    arguments = {
        name: np.zeros(value, int if "s" in name else np.float32)
        if isinstance(value, tuple)
        else value
        for name, value in (shapes | change).items()
    }
    with pytest.raises(ValueError, match=names):
        tape_attention(**arguments)
