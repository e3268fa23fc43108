"""State tracking: a comparison for two CPU cores, and a size for a GPU."""

from tape_jax import ModelConfig, positions
from train.config import TrainConfig
from train.data.state_tracking import StateTracking
from train.optimizer import OptimizerConfig


def small() -> TrainConfig:
    """For comparing encodings on two CPU cores: words of A5's generators, up to 16 letters.

    Words of all 60 elements teach a model of this size the products of two and no more in minutes.
    """
    task = StateTracking(
        group="A5", letters="generators", max_length=16, eval_length=48, eval_examples=1_000
    )
    return TrainConfig(
        name="state-tracking-small",
        model=ModelConfig(
            vocab_size=task.vocab_size,
            hidden_size=64,
            intermediate_size=128,
            num_layers=2,
            num_heads=4,
            initializer_range=0.08,
            position=positions.Tape(),
            scan_layers=False,
        ),
        task=task,
        optimizer=OptimizerConfig(
            learning_rate=2e-3, warmup_steps=50, b2=0.98, final_fraction=0.02
        ),
        steps=1_000,
        batch_size=128,
        eval_every=1_000,
        save_every=500,
    )


def full() -> TrainConfig:
    """A5, whose words need depth that grows with them where positions are fixed; for one GPU."""
    task = StateTracking(group="A5", max_length=32, eval_length=256, eval_examples=2_000)
    return TrainConfig(
        name="state-tracking",
        model=ModelConfig(
            vocab_size=task.vocab_size,
            hidden_size=512,
            intermediate_size=1_024,
            num_layers=8,
            num_heads=8,
            position=positions.Tape(),
            dtype="bfloat16",
        ),
        task=task,
        optimizer=OptimizerConfig(learning_rate=3e-4, warmup_steps=2_000, b2=0.98),
        steps=100_000,
        batch_size=512,
        eval_every=10_000,
        save_every=2_000,
    )
