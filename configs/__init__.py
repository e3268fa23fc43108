"""Experiments by name: functions that return a frozen TrainConfig."""

from configs import addition, c4, llama, state_tracking
from tape_jax.errors import unknown
from train.config import TrainConfig

CONFIGS = {
    "addition-demo": addition.demo,
    "addition-small": addition.small,
    "addition-paper": addition.paper,
    "state-tracking-small": state_tracking.small,
    "state-tracking": state_tracking.full,
    "c4-155m": c4.paper,
    "llama2-7b-8k": llama.llama2_7b_8k,
    "smollm2-tape": llama.smollm2_tape,
}


def names() -> list[str]:
    """The known experiments."""
    return sorted(CONFIGS)


def get(name: str) -> TrainConfig:
    """The experiment of this name.

    Raises:
      ValueError: an unknown name; the message gives the nearest known ones.
    """
    if name not in CONFIGS:
        raise ValueError(unknown("config", name, CONFIGS))
    return CONFIGS[name]()
