"""The decoder of zhuconv/arithmetic, restated: normed residuals, GELU gates, recurrences.

A second backbone under our encodings, for the golden numbers of tests/data/arith_*.npz: positions
and attention are the project's, the rest is here. Weights keep their torch names.
"""

import jax
import jax.numpy as jnp

from tape_jax import ModelConfig, positions
from tape_jax.attention import Attention
from tape_jax.positions.tape import gated_mix

LAYERS, RECURRENCES = 2, 2
EQUALS, PAD = 17, 0
FIRE = {
    "c": "c",
    "multiplier": "L_multiplier",
    "w1": "mlp.0.weight",
    "bias1": "mlp.0.bias",
    "w2": "mlp.2.weight",
    "bias2": "mlp.2.bias",
}
"""What FIRE learns: our names and theirs."""


def backbone(position: positions.Encoding) -> ModelConfig:
    """The sizes that attention and encodings ask for."""
    return ModelConfig(vocab_size=19, hidden_size=64, num_heads=4, position=position)


def scope(weights, name):
    """The weights below a name, by the rest of theirs."""
    prefix = f"{name}."
    return {key.removeprefix(prefix): w for key, w in weights.items() if key.startswith(prefix)}


def layer_norm(weights, x):
    x = x - x.mean(-1, keepdims=True)
    x = x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-12)
    return x * weights["weight"] + weights["bias"]


def gated(x):
    value, gate = jnp.split(x, 2, axis=-1)
    return value * jax.nn.gelu(gate, approximate=False)


def feed_forward(weights, x):
    return gated(x @ weights["dense_in.weight"].T) @ weights["dense_out.weight"].T


def attention_params(config, weights):
    """Parameters of our `Attention`; theirs has each head's query, key and value rows together."""
    rows = weights["in_proj_weight"].reshape(config.num_heads, 3, config.head_width, -1)
    query, key, value = rows.swapaxes(0, 1).reshape(3, config.hidden_size, -1)
    names = ("query", query), ("key", key), ("value", value), ("out", weights["out_proj.weight"])
    params = {name: {"kernel": weight.T} for name, weight in names}
    if isinstance(config.position, positions.Fire):
        learned = scope(weights, "rotary_emb")
        fire = {ours: learned[theirs].T for ours, theirs in FIRE.items()}
        params["position"] = fire | {"w1": fire["w1"][0]}
    return params


def block(config, weights, x, state):
    """Hidden and position states after one layer."""
    where = config.position.default_positions(x.shape[1])
    params = attention_params(config, scope(weights, "attn"))
    out, mixed, _ = Attention(config).apply({"params": params}, x, state, where, None)
    x = layer_norm(scope(weights, "residual1.norm"), x + out)
    inner = feed_forward(scope(weights, "ffn"), x)
    if mixed is not None:  # TAPE, with no linear map after its attention
        state = state + mixed
        up, down = weights["pe.up_proj.weight"], weights["pe.down_proj.weight"]
        state = state + gated_mix(state, gated(inner @ weights["pe.x_proj.weight"].T), up, down)
    return layer_norm(scope(weights, "residual2.norm"), x + inner), state


def layers(weights):
    """The weights of each layer of the recurrence."""
    return [scope(weights, f"encoder.recurrent_block.layers.{i}") for i in range(LAYERS)]


def embed(weights, ids):
    """What every recurrence adds to the hidden state."""
    tokens = weights["encoder.embedding.word_embedding.weight"][ids]
    return layer_norm(scope(weights, "encoder.embedding.norm"), tokens)


def head(weights, x):
    """Logits."""
    x = feed_forward(scope(weights, "encoder.head"), x)
    x = layer_norm(scope(weights, "encoder.final_norm"), x)
    return x @ weights["adapter.weight"] @ weights["decoder.weight"].T


def initial_state(config, length):
    return config.position.initial_state(config.position.default_positions(length), config)


def forward(config, weights, ids, x):
    """Logits, and the hidden and position states after every layer, from an initial state x."""
    state, after = initial_state(config, ids.shape[1]), []
    for _ in range(RECURRENCES):
        x = x + embed(weights, ids)
        for own in layers(weights):
            x, state = block(config, own, x, state)
            after.append((x, state))
    return head(weights, x), jax.tree.map(lambda *each: jnp.stack(each), *after)


def answer_loss(logits, ids):
    """Mean cross entropy of the tokens after '=', padding left out."""
    is_answer = (jnp.cumsum(ids == EQUALS, axis=1) > 0) & (ids != EQUALS) & (ids != PAD)
    log_probs = jax.nn.log_softmax(logits[:, :-1])
    chosen = jnp.take_along_axis(log_probs, ids[:, 1:, None], axis=-1)[..., 0]
    return -jnp.mean(chosen, where=is_answer[:, 1:])
