"""The 155M models of the paper, trained on C4."""

from tape_jax import ModelConfig, positions
from train.config import TrainConfig
from train.data.tokens import Tokens
from train.optimizer import OptimizerConfig


def paper() -> TrainConfig:
    """The C4 run of the paper: 5.2e9 tokens, the same for every encoding.

    Another encoding is one flag: `--model.position.name fire`.

    Two files are needed, of C4/en in the Llama-2 tokenizer's ids: each document begins with BOS and
    has no EOS, documents follow each other, every id a little-endian uint16. The paper takes a
    tenth of the training files and holds out 3 % of it.

    Of the 512 sequences of a step 32 are taken at a time, which fits one large GPU.
    """
    return TrainConfig(
        name="c4-155m",
        model=ModelConfig(position=positions.Tape(), dtype="bfloat16"),
        task=Tokens(
            train_file="data/c4/train.bin",
            eval_file="data/c4/validation.bin",
            sequence_length=1_024,
            vocab_size=32_000,
            eval_windows=512,
            eval_lengths=(2_048,),
        ),
        optimizer=OptimizerConfig(
            learning_rate=1e-4,
            schedule="linear",
            warmup_steps=200,
            final_fraction=1e-3,
            b2=0.999,
            weight_decay=0.01,
            clip_norm=1.0,
        ),
        steps=10_000,
        batch_size=512,
        accumulation=16,
        eval_every=1_000,
        save_every=500,
    )
