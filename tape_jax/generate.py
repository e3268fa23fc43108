"""Cached decoding: prompts of unequal length in one batch, greedy or sampled, token by token."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from tape_jax.cache import EMPTY, new_cache
from tape_jax.config import ModelConfig
from tape_jax.model import Transformer


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the next token is chosen from the logits.

    Attributes:
      temperature: logits are divided by it; 0 takes the most likely token.
      top_k: choose among the k most likely tokens only; None: all.
      top_p: choose among the fewest tokens whose probabilities reach p together.

    Raises:
      ValueError: values that leave nothing to choose from.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0

    def __post_init__(self):
        """Checks the fields."""
        if not self.temperature >= 0.0:
            raise ValueError(f"temperature={self.temperature} must be >= 0 (0: greedy)")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k={self.top_k} must be >= 1, or None")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p={self.top_p} must lie in (0, 1]")


def truncated(logits: Float[Array, "B V"], sampling: Sampling) -> Float[Array, "B V"]:
    """The logits after temperature, -inf where top_k or top_p rule a token out."""
    logits = logits / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < logits.shape[-1]:
        least = jax.lax.top_k(logits, sampling.top_k)[0][:, -1:]
        logits = jnp.where(logits < least, -jnp.inf, logits)
    if sampling.top_p < 1.0:
        ordered = jnp.sort(logits, axis=-1, descending=True)
        probs = jax.nn.softmax(ordered, axis=-1)
        before = jnp.cumsum(probs, axis=-1) - probs  # of the more likely tokens together
        least = jnp.where(before < sampling.top_p, ordered, jnp.inf).min(axis=-1, keepdims=True)
        logits = jnp.where(logits < least, -jnp.inf, logits)
    return logits


def choose(logits: Float[Array, "B V"], sampling: Sampling, key: Array) -> Int[Array, " B"]:
    """The next token of every sequence."""
    if sampling.temperature == 0.0:
        return logits.argmax(axis=-1).astype(jnp.int32)
    return jax.random.categorical(key, truncated(logits, sampling)).astype(jnp.int32)


@functools.partial(jax.jit, static_argnames=("config", "sampling"), donate_argnames="cache")
def next_tokens(config, params, cache, tokens, positions, segment_ids, sampling, key):
    """Reads tokens (B, n), of which the last of each row is real: (next tokens, the cache)."""
    logits, cache = Transformer(config).apply(
        {"params": params}, tokens, positions, segment_ids, cache, only_last=True
    )
    return choose(logits[:, 0], sampling, key), cache


def stream(
    config: ModelConfig,
    params: dict,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    sampling: Sampling = Sampling(),
    stop: Collection[int] = (),
    seed: int = 0,
    pad_to: int = 1,
) -> Iterator[Int[np.ndarray, " B"]]:
    """The next token of every prompt, again and again; EMPTY (-1) for those that have stopped.

    Ends when all have written a stop token (which is given out), or after max_new_tokens. Prompts
    are padded on the left, and padding is read by nobody, so each is decoded as it would be alone.

    Args:
      config, params: the model.
      prompts: token ids.
      max_new_tokens: for each prompt, at most.
      sampling: how tokens are chosen.
      stop: ids that end a text.
      seed: of the choices.
      pad_to: prompts are padded to a multiple of it: for many calls of a few lengths, which compile
        once for each.

    Raises:
      ValueError: an empty prompt, ids outside the vocabulary, no tokens to write, or an encoding
        that cannot decode from a cache; before anything is computed.
    """
    _check(config, prompts, max_new_tokens, pad_to)
    tokens, segments, place = _padded(prompts, pad_to)
    lengths, size = place[:, -1] + 1, tokens.shape[1] + max_new_tokens
    every = np.asarray(config.position.default_positions(size))[0]
    cache = new_cache(config, len(prompts), size)
    start = tokens, every[np.maximum(place, 0)], segments
    after = every[lengths[:, None] + np.arange(max_new_tokens)]
    return _steps(config, params, cache, start, after, sampling, frozenset(stop), seed)


def _steps(config, params, cache, start, after, sampling, stop, seed):
    """The steps of `stream`: the first reads `start`, those behind it are at `after`."""
    (tokens, positions, segments), rows = start, len(after)
    key, running = jax.random.key(seed), np.ones(rows, bool)
    for step in range(after.shape[1]):
        chosen, cache = next_tokens(
            config,
            params,
            cache,
            jnp.asarray(tokens),
            jnp.asarray(positions, jnp.int32),
            jnp.asarray(segments),
            sampling,
            jax.random.fold_in(key, step),
        )
        chosen = np.asarray(chosen)
        yield np.where(running, chosen, EMPTY)
        running &= ~np.isin(chosen, list(stop))
        if not running.any():
            return
        tokens, segments = chosen[:, None], np.zeros((rows, 1), np.int32)
        positions = after[:, step : step + 1]


def generate(
    config: ModelConfig, params: dict, prompts: Sequence[Sequence[int]], max_new_tokens: int, **how
) -> list[list[int]]:
    """What each prompt is continued with, stop tokens included; arguments as in `stream`."""
    steps = np.stack(list(stream(config, params, prompts, max_new_tokens, **how)), axis=1)
    return [[int(t) for t in row if t != EMPTY] for row in steps]


def _padded(prompts, multiple):
    """Tokens, segments and places in its own text of every prompt, each (B, n), ends aligned."""
    longest = -(-max(map(len, prompts)) // multiple) * multiple
    tokens, segments = (np.full((len(prompts), longest), x, np.int32) for x in (0, EMPTY))
    for row, prompt in enumerate(prompts):
        tokens[row, longest - len(prompt) :] = prompt
        segments[row, longest - len(prompt) :] = 0
    lengths = np.array([len(prompt) for prompt in prompts])
    return tokens, segments, np.arange(longest) - (longest - lengths)[:, None]


def _check(config, prompts, max_new_tokens, pad_to):
    for field, value in (("max_new_tokens", max_new_tokens), ("pad_to", pad_to)):
        if value < 1:
            raise ValueError(f"{field}={value} must be >= 1")
    if not prompts:
        raise ValueError("prompts is empty: give at least one")
    for row, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise ValueError(f"prompt {row} has no tokens: give it at least one (such as BOS)")
        wrong = [t for t in prompt if not 0 <= t < config.vocab_size]
        if wrong:
            raise ValueError(
                f"prompt {row} holds token id {wrong[0]}, outside [0, model.vocab_size="
                f"{config.vocab_size}): the tokenizer and the model do not fit"
            )
