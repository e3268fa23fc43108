"""Let a model continue a text: `python -m train.generate --workdir DIR --prompt "Once upon"`."""

import dataclasses
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
import tyro
from rich.console import Console

from tape_jax.cache import new_cache
from tape_jax.config import ModelConfig, Precision
from tape_jax.generate import Sampling, generate, stream
from train.ending import command
from train.interrupt import Interrupt
from train.mesh import MeshConfig, make_mesh
from train.pretrained import find, tokenizer_of
from train.tokenizer import Tokenizer

log = logging.getLogger("tape_jax")


def generate_text(
    workdir: Path,
    prompt: tuple[str, ...],
    max_new_tokens: int = 100,
    sampling: Sampling = Sampling(),  # noqa: B008 - frozen
    seed: int = 0,
    step: int | None = None,
    tokenizer: Path | None = None,
    dtype: Precision | None = None,
    mesh: MeshConfig = MeshConfig(),  # noqa: B008 - frozen
) -> None:
    """Continues prompts; one is written out as it grows, several when all are done.

    Args:
      workdir: a run, a converted model, a Hugging Face folder or a .gguf file.
      prompt: one text or several.
      max_new_tokens: at most so many; the model's end-of-text token ends a text earlier.
      sampling: how tokens are chosen; the most likely one unless a temperature is given.
      seed: of the choices.
      step: which checkpoint of a run; the newest when None.
      tokenizer: folder or file; the model's own when None.
      dtype: of the computation; the model's own when None.
      mesh: how this machine's devices are used.

    Raises:
      ValueError: no prompt, a tokenizer that is missing or does not fit, or an encoding that cannot
        decode from a cache.
      FileNotFoundError: nothing that holds a model.
    """
    if not prompt:
        raise ValueError("--prompt TEXT is required: what to continue")
    model = find(workdir, step)
    words, config = tokenizer_of(model, tokenizer), model.config
    if dtype is not None:
        config = dataclasses.replace(config, dtype=dtype)
    ids = [words.encode(text) for text in prompt]
    _check_room(config, len(ids), max(map(len, ids)), max_new_tokens)
    if sampling.temperature == 0.0 and sampling != Sampling():
        log.warning("sampling.temperature=0 takes the most likely token, whatever top_k and top_p")
    devices = make_mesh(mesh)
    with jax.set_mesh(devices):
        params, _ = model.read(devices)
        stop = () if words.eos is None else (words.eos,)
        how = {"sampling": sampling, "seed": seed, "stop": stop}
        if len(prompt) > 1:
            texts = generate(config, params, ids, max_new_tokens, **how)
            _write_all(prompt, ids, texts, words)
        else:
            steps = stream(config, params, ids, max_new_tokens, **how)
            _write_out(prompt[0], ids[0], steps, words)


def _check_room(config: ModelConfig, prompts: int, longest: int, max_new_tokens: int) -> None:
    """Raises ValueError for a cache, made at once, that is larger than all memory."""
    one = jax.tree.leaves(jax.eval_shape(lambda: new_cache(config, prompts, 1)))
    needed = sum(x.size * x.dtype.itemsize for x in one) * (longest + max_new_tokens)
    stats = [device.memory_stats() for device in jax.devices()]
    there = sum(s["bytes_limit"] for s in stats if s) if all(stats) else _host_memory()
    if needed > there:
        raise ValueError(
            f"max_new_tokens={max_new_tokens}: the cache takes {needed / 1e9:,.1f} GB of"
            f" {there / 1e9:,.1f} GB: ask for fewer tokens, or for fewer prompts at once"
        )


def _host_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _write_out(prompt: str, ids: Sequence[int], steps, words: Tokenizer) -> None:
    """The prompt and then its text piece by piece, until it ends or Ctrl-C."""
    sys.stdout.write(prompt)
    with Interrupt() as stop:
        new = (int(chosen[0]) for chosen in steps if chosen[0] != words.eos)
        for piece in words.stream_text(new, after=ids):
            sys.stdout.write(piece)
            sys.stdout.flush()
            if stop():
                break
    sys.stdout.write("\n")


def _write_all(prompts: Sequence[str], ids, texts, words: Tokenizer) -> None:
    console = Console(highlight=False, soft_wrap=True)
    for prompt, before, after in zip(prompts, ids, texts, strict=True):
        new = [token for token in after if token != words.eos]
        console.rule()
        console.print(prompt + words.decode(new, after=before), markup=False)


def main() -> None:
    """The command."""
    with command():
        tyro.cli(generate_text, prog="python -m train.generate")


if __name__ == "__main__":
    main()
