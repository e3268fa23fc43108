"""Pass-key retrieval: prompts word for word, answers, decoders that know and do not, bad input."""

import json
import re

import numpy as np
import pytest

from tape_jax.positions import DynamicNTKScaling, RoPE
from tests.tiny import random_params, tiny
from tests.train.vocabularies import byte_level, sentencepiece_model, write
from train.evals import passkey
from train.evals.passkey import answer_ids, make_prompt, official_ids, run_trials, summarise
from train.evals.runner import Interrupted
from train.evaluate import evaluate_passkey
from train.pretrained import Pretrained
from train.tokenizer import load_tokenizer


@pytest.fixture
def letters(tmp_path):
    return load_tokenizer(write(tmp_path / "letters", "tokenizer.json", byte_level(bos=True)))


@pytest.fixture
def pieces(tmp_path):
    return load_tokenizer(write(tmp_path / "pieces", "tokenizer.model", sentencepiece_model()))


# --- Prompts --------------------------------------------------------------------------------------


def test_five_lines():
    prompt = make_prompt(1000, trial=0)
    lines = prompt.text.split("\n")
    assert len(lines) == 5
    assert lines[0] == (
        "There is an important info hidden inside a lot of irrelevant text. Find it and memorize"
        " them. I will quiz you about the important information there."
    )
    key = f"The pass key is {prompt.key}. Remember it. {prompt.key} is the pass key."
    assert lines[2] == key
    assert lines[4] == "What is the pass key? The pass key is"
    start = (
        "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
    )
    assert lines[3].startswith(f"{start} {start} The grass")
    assert all(f"{start} " * 60 == line + (f"{start} " * 60)[len(line) :] for line in lines[1::2])
    assert len(lines[1]) + len(lines[3]) == 3072  # 3.75 * 1000 = 3750 = 3 * 1024 + 678
    assert prompt.depth == len(lines[1]) / 3072


@pytest.mark.parametrize("target", [274, 1000, 2000, 8000])
def test_the_generator_is_the_papers(target):
    """The prefix is drawn first, over all the garbage, then the key, below 50000."""
    for trial in range(20):
        np.random.seed(trial)  # noqa: NPY002 - what the papers' scripts call
        characters = int(3.75 * target // 1024 * 1024)
        before = np.random.randint(0, characters)  # noqa: NPY002
        key = np.random.randint(1, 50000)  # noqa: NPY002
        prompt = make_prompt(target, trial)
        assert (prompt.key, prompt.depth) == (key, before / characters)
        assert prompt == make_prompt(target, trial)


def test_first_keys():
    """RandomState(0).randint(0, 3072) is 2732: numpy's legacy stream never changes."""
    prompt = make_prompt(1000, 0)
    assert round(prompt.depth * 3072) == 2732 and prompt.key == 43568


@pytest.mark.parametrize(
    ("lengths", "trials", "message"),
    [
        ((), 1, "lengths is empty"),
        ((1000,), 0, "trials=0 must be >= 1"),
        ((273,), 1, r"lengths=\(273,\): 273 not in \[274, "),
        ((10**6,), 1, "1000000 not in"),
    ],
)
def test_lengths_that_cannot_be_made(lengths, trials, message):
    with pytest.raises(ValueError, match=message):
        passkey.check_sizes(lengths, trials)


def test_the_longest_prompt_has_its_garbage():
    passkey.check_sizes((passkey.SHORTEST, passkey.LONGEST), 1)
    characters = int(3.75 * passkey.LONGEST // 1024 * 1024)
    assert 0 < len(passkey.GARBAGE) - characters < 2048
    lines = make_prompt(passkey.LONGEST, 3).text.split("\n")
    assert len(lines[1]) + len(lines[3]) == characters
    assert len(make_prompt(passkey.SHORTEST, 3).text.split("\n")[3]) > 0


# --- Answers --------------------------------------------------------------------------------------


def test_sentencepiece_answers_are_the_papers(pieces):
    """A piece for the space, then digits; the same alone and behind the question."""
    names = pieces.vocabulary.pieces
    ids = answer_ids(pieces, 48120)
    assert ids == official_ids(pieces, 48120)
    assert [names[i] for i in ids] == [b" ", b"4", b"8", b"1", b"2", b"0"]


def test_byte_level_answers_go_on_from_the_question(letters):
    names = letters.vocabulary.pieces
    assert [names[i] for i in answer_ids(letters, 907)] == [b" ", b"9", b"0", b"7"]
    assert [names[i] for i in official_ids(letters, 907)] == [b"9", b"0", b"7"]


# --- Trials ---------------------------------------------------------------------------------------


class Knowing:
    """Decodes the key that stands in the prompt, with something in front and behind."""

    def __init__(self, tokenizer, before=" ", behind=""):
        self.tokenizer, self.before, self.behind = tokenizer, before, behind
        self.calls = []

    def __call__(self, prompts, count):
        self.calls.append(len(prompts))
        return [self._continue(prompt)[:count] for prompt in prompts]

    def _continue(self, prompt):
        text = self.tokenizer.decode(prompt)
        key = re.search(r"The pass key is (\d+)\.", text)[1]
        whole = self.tokenizer.encode(f"{text}{self.before}{key}{self.behind}.....")
        return whole[len(prompt) :]


@pytest.mark.parametrize("which", ["letters", "pieces"])
def test_a_decoder_that_knows(which, request):
    tokenizer = request.getfixturevalue(which)
    decode = Knowing(tokenizer)
    trials = list(run_trials(decode, tokenizer, 300, 5, batch_tokens=2600))
    assert [t["exact"] for t in trials] == [t["digits"] for t in trials] == [True] * 5
    assert [t["answer"] for t in trials] == [f" {t['key']}" for t in trials]
    assert [t["trial"] for t in trials] == list(range(5))
    prompts = [len(tokenizer.encode(make_prompt(300, i).text)) for i in range(5)]
    assert [t["prompt_tokens"] for t in trials] == prompts
    assert sum(decode.calls) == 5 and len(decode.calls) > 1
    assert all(rows * max(prompts) <= 2600 for rows in decode.calls)


def test_digits_without_their_space_count_as_digits_only(letters):
    trials = list(run_trials(Knowing(letters, before=""), letters, 300, 3, 10**6))
    assert [(t["exact"], t["digits"]) for t in trials] == [(False, True)] * 3


def test_a_longer_number_is_wrong(letters):
    trials = list(run_trials(Knowing(letters, before="", behind="1"), letters, 300, 3, 10**6))
    assert [(t["exact"], t["digits"]) for t in trials] == [(False, False)] * 3


def test_a_decoder_that_never_knows(letters):
    trials = list(run_trials(lambda prompts, n: [[256] * n for _ in prompts], letters, 300, 3, 1))
    assert [(t["exact"], t["digits"]) for t in trials] == [(False, False)] * 3


def test_stopping(letters):
    with pytest.raises(Interrupted):
        list(run_trials(Knowing(letters), letters, 300, 3, 1, stop=lambda: True))


def test_accuracy_is_by_length():
    rows = [(2000, True, True), (1000, False, True), (2000, False, False), (1000, False, False)]
    trials = [
        {"target_tokens": n, "prompt_tokens": n - 100 + i, "exact": exact, "digits": digits}
        for i, (n, exact, digits) in enumerate(rows)
    ]
    assert summarise(trials) == {
        1000: {"trials": 2, "prompt_tokens": 902.0, "exact": 0.0, "digits": 0.5},
        2000: {"trials": 2, "prompt_tokens": 1901.0, "exact": 0.5, "digits": 0.5},
    }


# --- The command ----------------------------------------------------------------------------------


def command(tmp_path, monkeypatch, letters, **fields):
    config = tiny(num_layers=1, vocab_size=fields.pop("vocab_size", 259), **fields)
    folder = tmp_path / "letters"
    model = Pretrained(folder, config, lambda mesh: (random_params(config), None), tokenizer=folder)
    monkeypatch.setattr("train.evaluate.find", lambda path, step: model)
    usual = {"workdir": folder, "lengths": (300, 600), "out": tmp_path / "out", "trials": 2}
    return lambda **how: evaluate_passkey(**usual | how)


def test_files_of_a_model_that_knows_nothing(tmp_path, monkeypatch, letters, capsys):
    command(tmp_path, monkeypatch, letters, position="rope")(lengths=(300,))
    record = json.loads((tmp_path / "out/passkey.json").read_text())
    assert list(record["lengths"]) == ["300"] and len(record["trials"]) == 2
    assert {row["exact"] for row in record["lengths"].values()} == {0.0}
    assert record["answer_ids_are_official"] is False
    assert record["trials"][0]["key"] == make_prompt(300, 0).key
    assert (tmp_path / "out/passkey.png").read_bytes()[:4] == b"\x89PNG"
    assert "digits right" in capsys.readouterr().out


def test_files_of_one_that_knows(tmp_path, monkeypatch, letters):
    knowing = Knowing(letters)
    decode = lambda config, params, prompts, count, **_: knowing(prompts, count)  # noqa: E731
    monkeypatch.setattr("train.evaluate.generate", decode)
    command(tmp_path, monkeypatch, letters)()
    record = json.loads((tmp_path / "out/passkey.json").read_text())
    assert [row["exact"] for row in record["lengths"].values()] == [1.0, 1.0]


def test_what_cannot_work_is_named(tmp_path, monkeypatch, letters):
    run = command(tmp_path, monkeypatch, letters, vocab_size=258)
    with pytest.raises(ValueError, match=r"letters has 259 ids and model.vocab_size=258"):
        run()
    with pytest.raises(ValueError, match=r"lengths=\(100,\): 100 not in"):
        run(lengths=(100,))
    with pytest.raises(FileNotFoundError, match="nowhere does not exist"):
        run(tokenizer=tmp_path / "nowhere")


def test_what_has_no_cache_is_said_before_the_model_is_read(tmp_path, monkeypatch, letters):
    monkeypatch.setattr("tests.train.test_passkey.random_params", None)
    position = RoPE(scaling=DynamicNTKScaling(2.0, original=64))
    with pytest.raises(ValueError, match=r"position.name='rope' has no exact cache: "):
        command(tmp_path, monkeypatch, letters, position=position)()
