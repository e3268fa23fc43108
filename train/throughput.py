"""How fast a run goes, and how much of the hardware's arithmetic that uses."""

import jax

from train.config import TrainConfig

PEAK_FLOPS = {
    "NVIDIA A100": 312e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200": 989e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5": 459e12,
    "TPU v6 lite": 918e12,
}
"""Dense bfloat16 peak of one device by the start of its kind, from the vendors' data sheets."""


def training_flops_per_token(config: TrainConfig) -> float:
    """Operations of forward and backward for one token, the usual way (PaLM, appendix B).

    6 per weight of a matrix product (4 where it is frozen: it has no gradient) and 12 N H D per
    layer of full attention. What an encoding or an adapter adds is not counted, so that the
    utilisation of two of them compares their speed.
    """
    model, length = config.model, config.task.length
    heads, kv_heads = (n * model.head_width for n in (model.num_heads, model.kv_heads))
    attention = model.hidden_size * (2 * heads + 2 * kv_heads)
    layer = attention + 3 * model.hidden_size * model.intermediate_size
    weights = model.num_layers * layer + model.hidden_size * model.vocab_size
    each = 6.0 if config.method.trains("layers/mlp/up/kernel") else 4.0
    return each * weights + 12.0 * model.num_layers * length * heads


def utilisation(config: TrainConfig, tokens_per_second: float) -> float | None:
    """Model FLOPs utilisation over all devices; None on hardware without a known peak."""
    kind = jax.devices()[0].device_kind
    peaks = [peak for name, peak in PEAK_FLOPS.items() if kind.startswith(name)]
    if not peaks:
        return None
    # "TPU v5 lite" also starts with "TPU v5": the longest name is the right one, and comes first.
    achieved = training_flops_per_token(config) * tokens_per_second
    return achieved / (peaks[0] * jax.device_count())
