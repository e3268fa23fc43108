"""One forward and one forward + backward pass of the 155M model: time, memory, tokens per second.

`python -m benchmarks.step` measures RoPE and TAPE, and Hugging Face's Llama of the same size where
torch and transformers are installed, and prints every figure beside its ratio to our RoPE. Each
model runs in processes of its own, one after the other and round after round, so that a slow
minute of the machine hits all of them; the best round counts.
"""

import dataclasses
import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import tyro
from rich.table import Table

from benchmarks import timing
from benchmarks.timing import Run

MODELS = ("rope", "tape", "huggingface")


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """What is measured.

    Attributes:
      batch, length: tokens of one step.
      layers: of the 155M model's 12; fewer for a quick look.
      repeats: timed passes per process; the fastest counts.
      rounds: processes per model.
      output: where the figures go as JSON.
    """

    batch: int = 1
    length: int = 1024
    layers: int = 12
    repeats: int = 3
    rounds: int = 2
    output: Path | None = None


def measure(model: str, benchmark: Benchmark) -> dict[str, float]:
    """The figures of one model, in this process."""
    forward, both, memory = (_huggingface if model == "huggingface" else _ours)(model, benchmark)
    figures = {}
    for name, run in (("forward", forward), ("forward_backward", both)):
        run()  # compiles, allocates
        figures[f"{name}_seconds"] = min(timing.seconds(run) for _ in range(benchmark.repeats))
        figures[f"{name}_peak_bytes"] = memory()
    return figures


def _ours(position: str, benchmark: Benchmark) -> tuple[Run, Run, Callable[[], float]]:
    import jax
    import jax.numpy as jnp
    import optax

    from tape_jax import ModelConfig, Transformer

    on_cpu = jax.default_backend() == "cpu"
    config = ModelConfig(
        position=position,
        num_layers=benchmark.layers,
        scan_layers=False,
        dtype="float32" if on_cpu else "bfloat16",
    )
    model = Transformer(config)
    shape = (benchmark.batch, benchmark.length)
    ids = jax.random.randint(jax.random.key(1), shape, 0, config.vocab_size)
    params = jax.jit(model.init)(jax.random.key(0), ids)

    def loss(params, ids):
        targets = jnp.roll(ids, -1, axis=1)
        logits = model.apply(params, ids)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    forward, both = jax.jit(model.apply), jax.jit(jax.value_and_grad(loss))

    def memory():
        stats = jax.devices()[0].memory_stats()
        return _peak_resident() if stats is None else stats["peak_bytes_in_use"]

    return (
        lambda: jax.block_until_ready(forward(params, ids)),
        lambda: jax.block_until_ready(both(params, ids)),
        memory,
    )


def _huggingface(_: str, benchmark: Benchmark) -> tuple[Run, Run, Callable[[], float]]:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    on_gpu = torch.cuda.is_available()
    config = LlamaConfig(
        vocab_size=32_000,
        hidden_size=768,
        intermediate_size=3_072,
        num_hidden_layers=benchmark.layers,
        num_attention_heads=12,
        max_position_embeddings=benchmark.length,
        use_cache=False,
    )
    device, dtype = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)
    model = LlamaForCausalLM(config).to(device, dtype)
    ids = torch.randint(0, config.vocab_size, (benchmark.batch, benchmark.length), device=device)

    def finish(value):
        if on_gpu:
            torch.cuda.synchronize()
        return value

    def forward():
        with torch.no_grad():
            return finish(model(ids).logits)

    def both():
        model.zero_grad(set_to_none=True)
        model(ids, labels=ids).loss.backward()
        return finish(None)

    return forward, both, torch.cuda.max_memory_allocated if on_gpu else _peak_resident


def _peak_resident() -> float:
    import resource

    return 1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def compare(benchmark: Benchmark) -> dict[str, dict[str, float]]:
    """Model -> its best figures over all rounds."""
    peers = all(importlib.util.find_spec(name) for name in ("torch", "transformers"))
    results: dict[str, dict[str, float]] = {}
    for _ in range(benchmark.rounds):
        for model in MODELS if peers else MODELS[:2]:
            settings = json.dumps(dataclasses.asdict(benchmark), default=str)
            command = [sys.executable, "-m", "benchmarks.step", "--worker", model, settings]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            figures = json.loads(done.stdout.splitlines()[-1])
            best = results.setdefault(model, figures)
            results[model] = {name: min(best[name], value) for name, value in figures.items()}
    return results


def show(results: dict[str, dict[str, float]], benchmark: Benchmark) -> None:
    """The table: each figure, and in brackets its ratio to our RoPE's."""
    title = f"{benchmark.layers} layers of 768, batch {benchmark.batch}, length {benchmark.length}"
    table = Table(title=title + "; in brackets: times our RoPE")
    for column in ("model", "pass", "seconds", "tokens/s", "peak GB"):
        table.add_column(column, justify="left" if column in ("model", "pass") else "right")
    tokens, base = benchmark.batch * benchmark.length, results["rope"]
    for model, figures in results.items():
        for name in ("forward", "forward_backward"):
            seconds, peak = (figures[f"{name}_{kind}"] for kind in ("seconds", "peak_bytes"))
            table.add_row(
                model,
                name.replace("_", " + "),
                f"{seconds:.3f} ({seconds / base[f'{name}_seconds']:.3f})",
                f"{tokens / seconds:,.0f}",
                f"{peak / 1e9:.2f} ({peak / base[f'{name}_peak_bytes']:.3f})",
            )
    timing.console().print(table)
    if "huggingface" not in results:
        print('Hugging Face is left out: pip install ".[peers]" brings torch and transformers')


def main() -> None:
    """The command; `--worker MODEL SETTINGS` is how it calls itself for one model."""
    if sys.argv[1:2] == ["--worker"]:
        settings = {k: v for k, v in json.loads(sys.argv[3]).items() if k != "output"}
        print(json.dumps(measure(sys.argv[2], Benchmark(**settings))))
        return
    benchmark = tyro.cli(Benchmark, description=__doc__)
    results = compare(benchmark)
    show(results, benchmark)
    if benchmark.output is not None:
        timing.write_json(benchmark.output, results)


if __name__ == "__main__":
    main()
