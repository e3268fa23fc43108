"""Decoding from a cache is the full pass, whatever the encoding."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tape_jax import Transformer, positions
from tape_jax.cache import new_cache
from tape_jax.generate import Sampling, choose, generate, stream, truncated
from tape_jax.sharding import parameter_shardings
from tests.tiny import logits, mostly_slow, random_params, tiny, tokens
from train.mesh import MeshConfig, make_mesh

NAMES = [*positions.names(), *positions.VARIANTS]


@pytest.mark.parametrize("name", mostly_slow(NAMES, quick=["tape", "cope", "fire", "pope"]))
def test_in_pieces_is_at_once(name):
    """A prompt, a few tokens, then one by one, in a cache with room to spare."""
    config = tiny(position=name, num_kv_heads=2, num_layers=2, scan_layers=name != "tape-mlp")
    params = random_params(config, scale=0.12 if name.startswith("tapa") else 0.25)
    ids = tokens(config)
    whole = logits(config, params, ids)
    cache, pieces = new_cache(config, len(ids), 17), []
    for start, end in ((0, 6), (6, 9), (9, 10), (10, 11), (11, 12)):
        out, cache = logits(config, params, ids[:, start:end], cache=cache)
        pieces.append(out)
    np.testing.assert_allclose(np.concatenate(pieces, axis=1), whole, atol=2e-5)
    assert int(cache.slots.filled) == 12


def test_more_tokens_than_room_is_loud():
    config = tiny(num_layers=1)
    params, ids = random_params(config), tokens(config)
    out, cache = logits(config, params, ids, cache=new_cache(config, len(ids), 14))
    assert np.isfinite(out).all()
    out, _ = logits(config, params, ids[:, :3], cache=cache)
    assert np.isnan(out).all()


@pytest.mark.parametrize(
    "encoding",
    [
        positions.RoPE(scaling=positions.DynamicNTKScaling(2.0, 8)),
        positions.Tape(scaling=positions.DynamicYarnScaling(2.0, 8)),
        positions.Randomized(evaluation="draw"),
    ],
)
def test_encodings_without_a_cache_say_so(encoding):
    with pytest.raises(ValueError, match=r"has no exact cache: .*; use"):
        new_cache(tiny(position=encoding), 1, 8)


@pytest.mark.parametrize(
    "name", mostly_slow(["tape", "rope", "alibi", "fire", "tapa", "cope"], quick=["tape"])
)
@pytest.mark.parametrize("pad_to", [1, 16])
def test_two_hundred_greedy_tokens_are_those_of_recomputation(name, pad_to):
    """Prompts of unequal length in one batch, against each text alone in a pass without a cache."""
    config = tiny(position=name, num_kv_heads=2, num_layers=2)
    params = random_params(config, scale=0.12)
    prompts = [[3, 1, 4, 1, 5, 9, 2], [6], [5, 3, 5]]
    got = generate(config, params, prompts, 200, pad_to=pad_to)
    for prompt, continued in zip(prompts, got, strict=True):
        assert len(continued) == 200
        row = np.array([[*prompt, *continued]])
        scores = logits(config, params, row)[0, len(prompt) - 1 : -1]
        assert scores.argmax(axis=-1).tolist() == continued
        if pad_to == 1:
            cache, pieces = new_cache(config, 1, row.shape[1] + 3), []
            for start in range(0, row.shape[1], 23):
                out, cache = logits(config, params, row[:, start : start + 23], cache=cache)
                pieces.append(out[0])
            pieces = np.concatenate(pieces)[len(prompt) - 1 : -1]
            np.testing.assert_allclose(pieces, scores, rtol=0, atol=1e-5)


def test_only_the_last_logits():
    config = tiny()
    params, ids = random_params(config), tokens(config)
    last = Transformer(config).apply({"params": params}, ids, only_last=True)
    np.testing.assert_allclose(last, logits(config, params, ids)[:, -1:], atol=1e-5)


def test_stop_tokens_end_each_row():
    config = tiny()
    params = random_params(config)
    free = generate(config, params, [[1, 2], [3]], 12)
    stop = free[0][4]
    got = generate(config, params, [[1, 2], [3]], 12, stop=[stop])
    for ours, theirs in zip(got, free, strict=True):
        cut = theirs.index(stop) + 1 if stop in theirs else len(theirs)
        assert ours == theirs[:cut]
    both = list(stream(config, params, [[1, 2]], 12, stop=[stop]))
    assert len(both) == free[0].index(stop) + 1


def test_sampling_follows_the_truncated_distribution():
    scores = jnp.log(jnp.asarray([[0.5, 0.25, 0.15, 0.1]]))
    kept = lambda **how: np.isfinite(truncated(scores, Sampling(1.0, **how)))[0].tolist()  # noqa: E731
    assert kept() == [True] * 4
    assert kept(top_k=2) == [True, True, False, False]
    assert kept(top_p=0.5) == [True, False, False, False]
    assert kept(top_p=0.6) == [True, True, False, False]
    assert kept(top_k=3, top_p=0.99) == [True, True, True, False]
    many = jnp.tile(scores, (20_000, 1))
    drawn = choose(many, Sampling(0.5, top_k=3), jax.random.key(0))
    weights = np.array([0.5, 0.25, 0.15]) ** 2
    np.testing.assert_allclose(
        np.bincount(drawn, minlength=4)[:3] / 20_000, weights / weights.sum(), atol=0.015
    )
    assert (choose(many, Sampling(), jax.random.key(0)) == 0).all()


def test_seeds():
    config = tiny(num_layers=1)
    params, hot = random_params(config), Sampling(1.5)
    one, again, other = (
        generate(config, params, [[1]], 12, sampling=hot, seed=s) for s in (0, 0, 1)
    )
    assert one == again != other


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([[1], []], 3), "prompt 1 has no tokens"),
        (([[1, 99]], 3), "prompt 0 holds token id 99"),
        (([], 3), "prompts is empty"),
        (([[1]], 0), "max_new_tokens=0 must be >= 1"),
    ],
)
def test_prompts_that_cannot_be_continued(arguments, message):
    config = tiny()
    with pytest.raises(ValueError, match=message):
        stream(config, {}, *arguments)  # before the first step is asked for


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"top_k": 0}, "top_k=0"),
        ({"top_p": 0.0}, r"top_p=0.0 must lie in \(0, 1\]"),
    ],
)
def test_samplings_that_cannot_work(fields, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**fields)


def test_bfloat16_caches_and_states():
    """The cache is in the compute dtype; the full pass rounds the same numbers."""
    config = dataclasses.replace(tiny(num_layers=2), dtype="bfloat16")
    params, ids = random_params(config, scale=0.2), tokens(config)
    whole = logits(config, params, ids)
    cache = new_cache(config, len(ids), 12)
    assert cache.kept.k.dtype == cache.kept.e.dtype == jnp.bfloat16
    first, cache = logits(config, params, ids[:, :7], cache=cache)
    rest, _ = logits(config, params, ids[:, 7:], cache=cache)
    error = np.abs(np.concatenate([first, rest], axis=1) - whole).max()
    assert error < 0.05 * float(whole.std())


@pytest.mark.parametrize("name", mostly_slow(["tape", "cope", "alibi"], quick=["tape"]))
def test_packed_and_padded_in_pieces(name):
    """Documents that follow each other in a row, with positions of their own, and left padding."""
    segments = np.array([[0] * 3 + [1] * 4 + [2] * 5, [-1] * 2 + [0] * 7 + [1] * 3])
    at = np.array([[*range(3), *range(4), *range(5)], [0, 0, *range(7), *range(3)]])
    config = tiny(position=name, num_kv_heads=2, num_layers=2)
    params, ids = random_params(config, scale=0.15), tokens(config)
    whole = logits(config, params, ids, positions=at, segment_ids=segments)
    cache, pieces = new_cache(config, 2, 15), []
    for start, end in ((0, 5), (5, 8), (8, 12)):
        part = slice(start, end)
        inputs = {"positions": at[:, part], "segment_ids": segments[:, part], "cache": cache}
        out, cache = logits(config, params, ids[:, part], **inputs)
        pieces.append(out)
    difference = np.abs(np.concatenate(pieces, axis=1) - whole)
    assert difference[segments >= 0].max() < 1e-5


MESHES = {
    "data=2 fsdp=2 tensor=2": MeshConfig(data=2, fsdp=2, tensor=2),
    "fsdp=4 context=2": MeshConfig(data=1, fsdp=4, context=2),
    "data=8": MeshConfig(data=8),
}


@pytest.mark.multidevice
@pytest.mark.parametrize("name", mostly_slow(["tape", "alibi", "cope"], quick=["tape"]))
@pytest.mark.parametrize("shape", MESHES)
def test_decoding_on_a_mesh(name, shape):
    """The texts of one device, from a cache of which each device has its part."""
    config = tiny(position=name, num_kv_heads=2 if name == "tape" else 4, num_layers=2)
    params = random_params(config, scale=0.15)
    prompts = [[3, 1, 4, 1, 5, 9, 2], [6], [5, 3, 5], [7, 7], *([k] for k in range(4))]
    alone = generate(config, params, prompts, 12)
    mesh = make_mesh(MESHES[shape])
    with jax.set_mesh(mesh):
        spread = jax.device_put(params, parameter_shardings(params, mesh))
        assert generate(config, spread, prompts, 12) == alone
        assert generate(config, spread, prompts[:1], 12) == alone[:1]
        kept = new_cache(config, 8, 16).kept.k
    rows = mesh.shape["data"] * mesh.shape["fsdp"]
    assert kept.sharding.shard_shape(kept.shape)[1] == 8 // rows
