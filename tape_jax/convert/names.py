"""Which tensor of a Llama or official TAPE checkpoint is which of our parameters, and how.

The table is the whole knowledge, of both directions. A tensor that no line names is an error.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp

from tape_jax.lora import PROJECTIONS

Spec = tuple


def _same(x):
    return x


def _whole(spec: Spec) -> Spec:
    return (None, None)


@dataclasses.dataclass(frozen=True)
class Conversion:
    """How one tensor of theirs becomes one layer of a parameter of ours, and back.

    Attributes:
      forward, backward: theirs -> ours and ours -> theirs; traceable.
      cut: how ours is cut over a mesh -> how theirs is, so that nothing large is on every device.
    """

    forward: Callable[[jax.Array], jax.Array]
    backward: Callable[[jax.Array], jax.Array]
    cut: Callable[[Spec], Spec]

    def their_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of theirs that fills this one of ours."""
        return jax.eval_shape(self.backward, jax.ShapeDtypeStruct(shape, jnp.float32)).shape


SAME = Conversion(_same, _same, _same)
TRANSPOSED = Conversion(jnp.transpose, jnp.transpose, lambda spec: spec[::-1])
COLUMN = Conversion(jnp.ravel, lambda x: x[:, None], _whole)
ROW_SUMS = Conversion(lambda x: x.sum(axis=1), jnp.diag, _whole)
"""The official post_attention_linear acts as its rows' sums (einsum 'bqnd,qe->bqnd')."""


@dataclasses.dataclass(frozen=True)
class Rule:
    """One line of the table.

    Attributes:
      theirs: the tensor's name, with {layer} and, for one of several in a layer, {copy}.
      ours: the parameter's path. A {layer} in theirs is its first axis, a {copy} the next.
    """

    theirs: str
    ours: str
    conversion: Conversion = SAME

    @functools.cached_property
    def pattern(self) -> re.Pattern[str]:
        """What names of theirs look like; its groups are the index into ours."""
        return re.compile(re.sub(r"\\\{\w+\\\}", r"(\\d+)", re.escape(self.theirs)))

    @property
    def copied(self) -> bool:
        """Whether a layer has several of them."""
        return "{copy}" in self.theirs

    def name(self, index: Sequence[int]) -> str:
        """The name of the tensor that holds this part of ours."""
        return self.theirs.format(**dict(zip(("layer", "copy"), index, strict=False)))


_BLOCKS = {"attention": "self_attn", "mlp": "mlp"}
_LINEARS = {f"{_BLOCKS[ours.split('/')[0]]}.{theirs}": ours for theirs, ours in PROJECTIONS.items()}
_FIRE = "self_attn.rotary_emb."
_LAYER = (
    ("input_layernorm.weight", "attention_norm/scale", SAME),
    ("post_attention_layernorm.weight", "mlp_norm/scale", SAME),
    *((f"{theirs}.weight", f"{ours}/kernel", TRANSPOSED) for theirs, ours in _LINEARS.items()),
    *((f"{theirs}.bias", f"{ours}/bias", SAME) for theirs, ours in _LINEARS.items()),
    ("pe.up_proj.weight", "position/w1", SAME),
    ("pe.up_projs.{copy}.weight", "position/w1", SAME),
    ("pe.x_proj.weight", "position/gate/kernel", TRANSPOSED),
    ("pe.down_proj.weight", "position/w2", SAME),
    ("pe.down_projs.{copy}.weight", "position/w2", SAME),
    ("post_attention_linear.weight", "position/post", ROW_SUMS),
    ("post_attention_linears.{copy}.weight", "position/post", ROW_SUMS),
    ("self_attn.relative_attention_bias.weight", "attention/position/table", SAME),
    (_FIRE + "c", "attention/position/c", SAME),
    (_FIRE + "L_multiplier", "attention/position/multiplier", SAME),
    (_FIRE + "mlp.0.weight", "attention/position/w1", COLUMN),
    (_FIRE + "mlp.0.bias", "attention/position/bias1", SAME),
    (_FIRE + "mlp.2.weight", "attention/position/w2", TRANSPOSED),
    (_FIRE + "mlp.2.bias", "attention/position/bias2", SAME),
)
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
RULES: Sequence[Rule] = (
    Rule(EMBEDDING, "embedding/embedding"),
    Rule("model.norm.weight", "final_norm/scale"),
    Rule(HEAD, "head/kernel", TRANSPOSED),
    *(Rule("model.layers.{layer}." + t, "layers/" + ours, how) for t, ours, how in _LAYER),
)


def find(name: str) -> tuple[Rule, tuple[int, ...]] | None:
    """The rule for a tensor of this name and the index of its part of our parameter, or None."""
    for rule in RULES:
        if found := rule.pattern.fullmatch(name):
            return rule, tuple(map(int, found.groups()))
    return None


def parts(path: str, shape: Sequence[int], *, copied: bool) -> Iterator[tuple[Rule, tuple]]:
    """The rule and index of every tensor of theirs that a parameter of ours is written as.

    Args:
      path: the parameter's, slash-separated.
      shape: of the whole parameter.
      copied: whether the encoding has several of a kind in each layer.

    Raises:
      ValueError: their format has no place for it.
    """
    rules = [rule for rule in RULES if rule.ours == path]
    if not rules:
        raise ValueError(f"parameter {path!r} has no place in a Hugging Face Llama")
    rule = rules[-1] if copied and rules[-1].copied else rules[0]
    lead = int("{layer}" in rule.theirs) + int(rule.copied)
    grid: list[tuple[int, ...]] = [()]
    for size in shape[:lead]:
        grid = [(*index, i) for index in grid for i in range(size)]
    for index in grid:
        yield rule, index
