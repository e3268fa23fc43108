"""Addition: a demonstration and a comparison for two CPU cores, and the paper's setting."""

import dataclasses

from tape_jax import ModelConfig, positions
from train.config import TrainConfig
from train.data.addition import VOCABULARY, Addition
from train.optimizer import OptimizerConfig


def demo() -> TrainConfig:
    """A small TAPE learns to add numbers of up to 4 digits in a few minutes on a CPU."""
    return TrainConfig(
        name="addition-demo",
        model=ModelConfig(
            vocab_size=VOCABULARY,
            hidden_size=128,
            intermediate_size=256,
            num_layers=3,
            num_heads=4,
            initializer_range=0.08,
            position=positions.Tape(),
            scan_layers=False,
        ),
        task=Addition(max_digits=4, eval_digits=8, eval_examples=32),
        optimizer=OptimizerConfig(
            learning_rate=2e-3, warmup_steps=50, b2=0.98, final_fraction=0.02
        ),
        steps=1_000,
        batch_size=128,
        eval_every=250,
        save_every=100,
    )


def small() -> TrainConfig:
    """For comparing encodings on two CPU cores: up to 5 digits, tested up to 10."""
    like = demo()
    return dataclasses.replace(
        like,
        name="addition-small",
        model=dataclasses.replace(like.model, hidden_size=96, intermediate_size=192),
        task=Addition(max_digits=5, eval_digits=10, eval_examples=16),
        eval_every=1_000,
        save_every=250,
    )


def paper() -> TrainConfig:
    """The addition run of the paper (section 4.1): up to 40 digits, tested up to 80.

    16 layers of 1024 with 16 heads, batch 512, 20k steps, lr 1e-4. Our decoder (pre-norm, causal
    row-normalised state update, rotations applied) in place of the official one, whose published
    code drops the rotations: docs/faithfulness.md.
    """
    return TrainConfig(
        name="addition-paper",
        model=ModelConfig(
            vocab_size=VOCABULARY,
            hidden_size=1_024,
            intermediate_size=2_048,
            num_layers=16,
            num_heads=16,
            position=positions.Tape(width=64),
            dtype="bfloat16",
        ),
        task=Addition(max_digits=40, eval_digits=80, eval_examples=100),
        optimizer=OptimizerConfig(
            learning_rate=1e-4,
            schedule="constant",
            warmup_steps=2_000,
            b2=0.98,
            eps=1e-12,
            clip_norm=0.5,
        ),
        steps=20_000,
        batch_size=512,
        eval_every=5_000,
        save_every=1_000,
    )
