"""Fine-tuning of pre-trained models with TAPE; `--method.name` takes another method."""

import dataclasses

from tape_jax import ModelConfig, positions
from train.config import TrainConfig
from train.data.tokens import Tokens
from train.mesh import MeshConfig
from train.methods import Method, TapeMethod
from train.optimizer import OptimizerConfig


def _tokens(folder: str, length: int, vocab_size: int, windows: int, others: tuple[int, ...]):
    return Tokens(
        train_file=f"data/{folder}/train.bin",
        eval_file=f"data/{folder}/validation.bin",
        sequence_length=length,
        vocab_size=vocab_size,
        eval_windows=windows,
        eval_lengths=others,
    )


def _of(method: Method, model: ModelConfig, **how) -> dict:
    """The method, and the model that it makes of one with these fields of computation."""
    return {"method": method, "model": method.adapt(dataclasses.replace(model, **how))}


LLAMA2_7B = ModelConfig(
    vocab_size=32_000,
    hidden_size=4_096,
    intermediate_size=11_008,
    num_layers=32,
    num_heads=32,
    position=positions.RoPE(),
)
"""meta-llama/Llama-2-7b; trained on rows of 4,096."""

SMOLLM2_135M = ModelConfig(
    vocab_size=49_152,
    hidden_size=576,
    intermediate_size=1_536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    tie_embeddings=True,
    position=positions.RoPE(base=100_000.0),
)
"""HuggingFaceTB/SmolLM2-135M; trained on rows of 8,192."""


def llama2_7b_8k() -> TrainConfig:
    """The paper's extension of Llama-2-7B from 4,096 to 8,192 tokens (its section 4.3).

    1,000 steps of 64 rows, learning rate 2e-5 after 50 steps of warm-up, positions divided by 2. As
    the paper says it, the position weights alone are trained; `--method.reading official` trains
    what the published script does. Rows are cut over 8 devices or a multiple of them.

    The token files are RedPajama's sample and PG-19 in the ids of Llama-2's tokenizer.
    """
    method = TapeMethod(scaling=positions.LinearScaling(2.0))
    return TrainConfig(
        name="llama2-7b-8k",
        **_of(method, LLAMA2_7B, dtype="bfloat16", remat="full"),
        task=_tokens("redpajama", 8_192, 32_000, 64, (1_024, 2_048, 4_096)),
        optimizer=OptimizerConfig(
            learning_rate=2e-5, schedule="constant", warmup_steps=50, weight_decay=0.0
        ),
        mesh=MeshConfig(data=1, fsdp=-1),
        steps=1_000,
        batch_size=64,
        accumulation=8,
        eval_every=500,
        save_every=100,
    )


def smollm2_tape() -> TrainConfig:
    """SmolLM2-135M with TAPE, for two CPU cores: ten minutes, and a look at the machinery.

    Positions are divided by 2 as in the paper's run. The learning rate is larger: position weights
    start at zero, and there are few steps.
    """
    method = TapeMethod(scaling=positions.LinearScaling(2.0))
    return TrainConfig(
        name="smollm2-tape",
        **_of(method, SMOLLM2_135M),
        task=_tokens("long", 1_024, 49_152, 8, (256, 512, 2_048)),
        optimizer=OptimizerConfig(
            learning_rate=1e-3, schedule="cosine", warmup_steps=3, weight_decay=0.0
        ),
        steps=30,
        batch_size=1,
        log_every=5,
        eval_every=1_000,
        save_every=10,
    )
