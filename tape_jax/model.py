"""The one decoder that every encoding runs in: a Llama whose blocks also update positions.

Letters: B batch, N sequence, C hidden, H query heads, K state (key/value) heads, D head width,
L layers, V vocabulary.
"""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from tape_jax.attention import Attention
from tape_jax.cache import Cache, Kept, Past
from tape_jax.config import REMAT_POLICIES, ModelConfig
from tape_jax.layers import MLP, linear, norm
from tape_jax.positions.protocol import State
from tape_jax.sharding import constrain


class Block(nn.Module):
    """One layer's dual update, of tokens x and of the position state e."""

    config: ModelConfig
    causal: bool = True

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B N C"],
        state: State,
        positions: Int[Array, "B N"],
        segment_ids: Int[Array, "B N"] | None,
        past: Past | None = None,
        *,
        update_state: bool = True,
    ) -> tuple[Float[Array, "B N C"], State, Kept | None]:
        """x + attention + MLP, the encoding's update of its state, and what the cache keeps.

        With update_state False the state is returned as it came: nothing is computed for it.
        """
        config = self.config
        attention = Attention(config, self.causal, name="attention")
        attended, mixed, kept = attention(
            norm(config, "attention_norm")(x),
            state,
            positions,
            segment_ids,
            past,
            mix_state=update_state,
        )
        x = x + attended
        hidden = norm(config, "mlp_norm")(x)
        mlp_out = MLP(config, name="mlp")(hidden)
        if update_state:
            state = config.position.update(state, mixed, mlp_out, hidden, config)
        return constrain(x + mlp_out, "batch", "length", "hidden"), state, kept


class Transformer(nn.Module):
    """A causal language model: `apply({"params": p}, tokens)` gives float32 logits.

    Parameters of the layers are stacked on a leading axis (L, ...) whether the layers are scanned
    or unrolled, so `scan_layers` can change between a checkpoint and its use.

    Two collections can be asked for with `mutable=[...]`:
      "metrics": `position_norm` (L,), the size of the state that each layer reads relative to the
        first (root mean squares; nothing in TAPE normalises it), for encodings with a state.
      "intermediates": `hidden_states` (L+1, B, N, C) before the final norm, and
        `position_states`, L+1 states from the first to the one after the last layer.
    """

    config: ModelConfig

    @nn.compact
    def __call__(
        self,
        tokens: Int[Array, "B N"],
        positions: Int[Array, "B N"] | None = None,
        segment_ids: Int[Array, "B N"] | None = None,
        cache: Cache | None = None,
        *,
        only_last: bool = False,
    ) -> Float[Array, "B N V"] | tuple[Float[Array, "B N V"], Cache]:
        """Logits of the next token at every position; with a cache, and the cache with the tokens.

        Args:
          tokens: ids in [0, vocab_size). Under jit they cannot be checked: an id outside gives
            NaN logits in its sequence; outside jit it raises.
          positions: int32, increasing within a segment; 0 .. N-1 (plus the encoding's shift) when
            None. Never inferred from segment_ids.
          segment_ids: a token reads only its own segment; negative ids are padding.
          cache: what earlier calls have kept (`tape_jax.cache.new_cache` at first): these tokens
            follow those. Without positions, theirs go on. More tokens than have room give NaN.
          only_last: logits of the last token only, (B, 1, V).

        Raises:
          ValueError: an empty sequence, shapes that do not fit, or ids outside the vocabulary.
        """
        config, encoding = self.config, self.config.position
        _check_inputs(config, tokens, positions, segment_ids)
        tokens = constrain(tokens, "batch", "length")
        if cache is not None:
            cache, positions, segment_ids = _follow(encoding, cache, tokens, positions, segment_ids)
        elif positions is None:
            positions = encoding.default_positions(tokens.shape[1])

        embedding = nn.Embed(
            config.vocab_size,
            config.hidden_size,
            dtype=jnp.dtype(config.dtype),
            embedding_init=nn.initializers.normal(config.initializer_range),
            name="embedding",
        )
        # jnp.take wraps negative ids around; past the end they give NaN, as promised above.
        rows = embedding(jnp.where(tokens < 0, config.vocab_size, tokens))
        x = constrain(encoding.embed(rows, positions), "batch", "length", "hidden")
        state = encoding.initial_state(positions, config)
        x, kept = self._layers(x, state, positions, segment_ids, cache)
        x = norm(config, "final_norm")(x[:, -1:] if only_last else x)
        if config.tie_embeddings:
            logits = _float32_dot(x, embedding.embedding.astype(x.dtype).T)
        else:
            head = linear(config, config.vocab_size, "head", dot_general=_float32_dot_general)
            logits = head(x)
        logits = constrain(logits, "batch", "length", "vocab")
        if cache is None:
            return logits
        fits = cache.slots.filled <= cache.size
        return jnp.where(fits, logits, jnp.nan), dataclasses.replace(cache, kept=kept)

    def _layers(self, x, state, positions, segment_ids, cache) -> tuple[Array, Any]:
        """Runs the stack, scanned or unrolled, and sows what was asked for: (x, what is kept)."""
        config = self.config
        block = Block(config, parent=None)
        keep_all = self.is_mutable_collection("intermediates")
        keep_norms = self.is_mutable_collection("metrics") and state is not None

        @jax.jit  # so that only the parameters are computed, not the block's output
        def init(rng):
            def one(key):
                return block.init(key, x, state, positions, segment_ids)["params"]

            return jax.vmap(one)(jax.random.split(rng, config.num_layers))

        def layer(own, carry, update_state):
            params, index = own
            x, state, kept = carry
            past = None if cache is None else Past(kept, cache.slots, index)
            args = (x, state, positions, segment_ids, past)
            carry = block.apply({"params": params}, *args, update_state=update_state)
            norms = _root_mean_square(state) if keep_norms else None
            return carry, (norms, carry[:2] if keep_all else None)

        policy = REMAT_POLICIES[config.remat]
        if policy is not None:
            layer = jax.checkpoint(
                layer, policy=policy, static_argnums=2, prevent_cse=not config.scan_layers
            )
        params = self.param("layers", init)
        if self.is_initializing():
            return x, None
        first = (x, state, None if cache is None else cache.kept)
        own = (params, jnp.arange(config.num_layers))
        if config.scan_layers:
            (x, _, kept), rows = _scanned(layer, own, first)
        else:
            (x, _, kept), rows = _unrolled(layer, own, first, config.num_layers, keep_all)
        self._sow(first[:2], *rows)
        return x, kept

    def _sow(self, first, norms, carries):
        if norms is not None:
            relative = norms / _root_mean_square(first[1])
            self.sow("metrics", "position_norm", relative, reduce_fn=lambda _, new: new)
        if carries is not None:
            for name, start, rest in zip(
                ("hidden_states", "position_states"), first, carries, strict=True
            ):
                if rest is not None:
                    start = jnp.broadcast_to(start, rest.shape[1:])[None]
                    both = jnp.concatenate([start, rest])
                    self.sow("intermediates", name, both, reduce_fn=lambda _, new: new)


def _follow(encoding, cache, tokens, positions, segment_ids):
    """The cache with the tokens in its slots, and their positions and segments, given or not."""
    if positions is None:
        every, filled = encoding.default_positions(cache.size), cache.slots.filled
        positions = jax.lax.dynamic_slice_in_dim(every, filled, tokens.shape[1], axis=1)
    segment_ids = jnp.zeros_like(tokens) if segment_ids is None else segment_ids
    slots = cache.slots.extend(positions, segment_ids)
    return dataclasses.replace(cache, slots=slots), positions, segment_ids


def _scanned(layer, own, first):
    """All layers as one compiled loop over what is stacked: (last carry, what each gave)."""
    # A scan's carry keeps its shape: the first state is spread over batch and heads.
    one = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape[1:], p.dtype), own)
    shapes, _ = jax.eval_shape(lambda p, c: layer(p, c, True), one, first)
    carry = jax.tree.map(lambda a, like: jnp.broadcast_to(a, like.shape), first, shapes)
    return jax.lax.scan(lambda c, p: layer(p, c, True), carry, own)


def _unrolled(layer, own, first, count, keep_last_state):
    """The same, layer after layer; nobody reads the last state unless it is asked for."""
    carry, rows = first, []
    for i, one in enumerate(_unstack(own, count)):
        carry, row = layer(one, carry, keep_last_state or i < count - 1)
        rows.append(row)
    return carry, jax.tree.map(lambda *leaves: jnp.stack(leaves), *rows)


def _unstack(params, count):
    """The per-layer trees of a stacked one; `split`, because its gradient is one concatenation."""
    pieces = jax.tree.map(lambda p: list(jax.lax.split(p, (1,) * count)), params)
    is_piece = lambda x: isinstance(x, list)  # noqa: E731
    return [jax.tree.map(lambda p, i=i: p[i][0], pieces, is_leaf=is_piece) for i in range(count)]


def _root_mean_square(state):
    return jnp.sqrt(jnp.mean(jnp.square(state.astype(jnp.float32))))


def _float32_dot_general(*args, **kwargs):
    """Products of the compute dtype summed into float32 logits."""
    return jax.lax.dot_general(*args, **kwargs | {"preferred_element_type": jnp.float32})


def _float32_dot(x, kernel):
    return jnp.dot(x, kernel, preferred_element_type=jnp.float32)


def _check_inputs(config, tokens, positions, segment_ids):
    if tokens.ndim != 2 or 0 in tokens.shape:
        raise ValueError(f"tokens must be (batch, length) with both >= 1, got {tokens.shape}")
    if not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(f"tokens must be integers, got {tokens.dtype}")
    for name, x in {"positions": positions, "segment_ids": segment_ids}.items():
        batch, length = tokens.shape
        if x is not None and x.shape not in ((batch, length), (1, length)):
            raise ValueError(f"{name} must be ({batch} or 1, {length}), got {x.shape}")
    if not isinstance(tokens, jax.core.Tracer):
        concrete = np.asarray(tokens)  # numpy: within a trace, jnp would make it abstract
        low, high = int(concrete.min()), int(concrete.max())
        if low < 0 or high >= config.vocab_size:
            raise ValueError(
                f"token ids must lie in [0, model.vocab_size={config.vocab_size}), got"
                f" {low if low < 0 else high}: the tokenizer and the model do not fit"
            )
