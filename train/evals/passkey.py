"""Pass-key retrieval: a number hidden in garbage of several lengths, as JSON and as a picture.

The prompts are those of the TAPE and LongLoRA evaluations, word for word and seed for seed.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import jax
import matplotlib
import numpy as np
from matplotlib.figure import Figure
from rich.table import Table

from train.data.task import Stop
from train.evals.runner import Interrupted
from train.tokenizer import Tokenizer

matplotlib.use("Agg")

TASK = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them."
    " I will quiz you about the important information there."
)
SENTENCES = (
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
)
GARBAGE = " ".join([SENTENCES] * 5000)
QUESTION = "What is the pass key? The pass key is"

SHORTEST = 274
"""Target tokens; below it, the garbage is cut down to nothing."""
LONGEST = (len(GARBAGE) // 1024 * 1024 * 4) // 15
"""Target tokens; beyond it, the garbage does not suffice."""

DEFINITION = (
    "Prompt: task, garbage, 'The pass key is X. Remember it. X is the pass key.', garbage,"
    " question; int(3.75 * target // 1024 * 1024) characters of garbage; from RandomState(trial)"
    " those before the key, then X in [1, 50000). As many tokens are decoded greedily as the"
    " answer has. exact: all are the answer's ids, which are those that ' X' adds to the ids of the"
    " question, or, if its last piece would change, those of 'X' alone without BOS. digits: the"
    " digits that the text begins with, after white space, are X."
)

Decode = Callable[[Sequence[Sequence[int]], int], Sequence[Sequence[int]]]
"""(prompts, number of tokens) -> the tokens that follow each prompt, most likely ones first."""


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One trial.

    Attributes:
      depth: characters of garbage before the key, as a fraction of all.
    """

    text: str
    key: int
    depth: float


def make_prompt(target_tokens: int, trial: int) -> Prompt:
    """The trial's prompt; about `target_tokens` of Llama's tokens long."""
    characters = int(3.75 * target_tokens // 1024 * 1024)
    random = np.random.RandomState(trial)  # the papers' own generator, for their very prompts
    before = random.randint(0, characters)
    key = random.randint(1, 50000)
    lines = (
        TASK,
        GARBAGE[:before],
        f"The pass key is {key}. Remember it. {key} is the pass key.",
        GARBAGE[: characters - before],
        QUESTION,
    )
    return Prompt("\n".join(lines), key, before / characters)


def official_ids(tokenizer: Tokenizer, key: int) -> list[int]:
    """The key's ids alone, as the paper's evaluation has them."""
    return tokenizer.encode_plain(str(key))


def answer_ids(tokenizer: Tokenizer, key: int) -> list[int]:
    """The ids with which the question goes on to the key.

    With SentencePiece's leading space they are the official ones; byte-level vocabularies write the
    space between the two into a piece that the key alone does not have.
    """
    question, whole = map(tokenizer.encode_plain, (QUESTION, f"{QUESTION} {key}"))
    if whole[: len(question)] != question:
        return official_ids(tokenizer, key)
    return whole[len(question) :]


def check_sizes(lengths: Sequence[int], trials: int) -> None:
    """Raises ValueError for lengths that the garbage cannot make, or no trials."""
    if trials < 1:
        raise ValueError(f"trials={trials} must be >= 1")
    if not lengths:
        raise ValueError("lengths is empty: give at least one number of tokens")
    for length in lengths:
        if not SHORTEST <= length <= LONGEST:
            raise ValueError(f"lengths={tuple(lengths)}: {length} not in [{SHORTEST}, {LONGEST}]")


def run_trials(
    decode: Decode,
    tokenizer: Tokenizer,
    target_tokens: int,
    trials: int,
    batch_tokens: int,
    stop: Stop = lambda: False,
) -> Iterator[dict[str, Any]]:
    """The trials of one length, each as it stands in the JSON.

    Args:
      decode: writes the answers.
      tokenizer: the model's.
      target_tokens: how long the prompts are meant to be.
      trials: whose seeds are 0, 1, ...
      batch_tokens: of prompts at once, if a single one is not longer.
      stop: polled between batches.

    Raises:
      Interrupted: `stop` said so.
    """
    prompts = [make_prompt(target_tokens, trial) for trial in range(trials)]
    ids = [tokenizer.encode(prompt.text) for prompt in prompts]
    rows = max(1, batch_tokens // max(map(len, ids)))
    for start in range(0, trials, rows):
        if stop():
            raise Interrupted
        part = range(start, min(start + rows, trials))
        answers = [answer_ids(tokenizer, prompts[i].key) for i in part]
        written = decode([ids[i] for i in part], max(map(len, answers)))
        for i, answer, tokens in zip(part, answers, written, strict=True):
            tokens = list(tokens[: len(answer)])
            text = tokenizer.decode(tokens, after=ids[i])
            digits = re.match(r"\s*([0-9]+)", text)
            yield {
                "target_tokens": target_tokens,
                "prompt_tokens": len(ids[i]),
                "trial": i,
                "depth": prompts[i].depth,
                "key": prompts[i].key,
                "answer": text,
                "exact": tokens == answer,
                "digits": digits is not None and digits[1] == str(prompts[i].key),
            }


def summarise(trials: Sequence[Mapping[str, Any]]) -> dict[int, dict[str, float]]:
    """Target tokens -> how many trials, their mean prompt, and the fractions that are right."""
    found = {}
    for length, rows in groupby(sorted(trials, key=_target), key=_target):
        each = list(rows)
        means = {
            name: float(np.mean([row[name] for row in each]))
            for name in ("prompt_tokens", "exact", "digits")
        }
        found[length] = {"trials": len(each), **means}
    return found


def write_passkey(
    out: Path, about: Mapping[str, Any], tokenizer: Tokenizer, trials: Sequence[Mapping[str, Any]]
) -> None:
    """Writes passkey.json and passkey.png into `out`, of what `run_trials` gave."""
    if jax.process_index() != 0:
        return
    keys = {trial["key"] for trial in trials}
    record = {
        **about,
        "definition": DEFINITION,
        "answer_ids_are_official": all(
            answer_ids(tokenizer, key) == official_ids(tokenizer, key) for key in keys
        ),
        "lengths": summarise(trials),
        "trials": trials,
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / "passkey.json").write_text(json.dumps(record, indent=1) + "\n")
    draw_passkey(about, trials).savefig(out / "passkey.png", dpi=120)


MARKS = {True: ("o", "tab:blue", "right"), False: ("x", "tab:red", "wrong")}


def draw_passkey(about: Mapping[str, Any], trials: Sequence[Mapping[str, Any]]) -> Figure:
    """Every trial by length and depth, and below it the accuracy by length."""
    figure = Figure(figsize=(7.6, 6.4), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    for right, (marker, color, label) in MARKS.items():
        shown = [trial for trial in trials if trial["exact"] == right]
        x = [trial["prompt_tokens"] for trial in shown]
        y = [100 * trial["depth"] for trial in shown]
        upper.scatter(x, y, marker=marker, color=color, label=f"{label} ({len(shown)})")
    upper.set(ylabel="depth of the key [%]", ylim=(104, -4))
    upper.set_title(f"pass key, {about['model']}: all ids of the answer")
    rows = summarise(trials).values()
    for name, style, label in (("exact", "o-", "all ids"), ("digits", "s--", "digits")):
        x, y = [row["prompt_tokens"] for row in rows], [100 * row[name] for row in rows]
        lower.plot(x, y, style, label=label)
    lower.set(xlabel="tokens of the prompt", ylabel="right [%]", ylim=(-5, 105))
    for axes in (upper, lower):
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def tabulate(about: Mapping[str, Any], trials: Sequence[Mapping[str, Any]]) -> Table:
    """A line for every length."""
    table = Table(title=f"pass key, {about['model']}")
    for head in ("length", "prompt tokens", "trials", "all ids right", "digits right"):
        table.add_column(head, justify="right")
    for length, row in summarise(trials).items():
        fractions = [f"{100 * row[name]:.1f} %" for name in ("exact", "digits")]
        cells = (str(length), f"{row['prompt_tokens']:.0f}", str(row["trials"]))
        table.add_row(*cells, *fractions)
    return table


def _target(trial: Mapping[str, Any]) -> int:
    return trial["target_tokens"]
