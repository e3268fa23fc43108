"""Experiments by name: functions that return a frozen TrainConfig."""

from configs import addition
from tape_jax.errors import unknown
from train.config import TrainConfig

CONFIGS = {"addition-demo": addition.demo, "addition-paper": addition.paper}


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
