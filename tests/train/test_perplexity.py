"""Perplexity in windows: who is scored, from what, the two definitions, files, bad input."""

import dataclasses
import functools
import gzip
import json

import jax
import numpy as np
import pytest

from tape_jax import Transformer
from tests.tiny import logits, random_params, tiny
from tests.train.vocabularies import byte_level, write
from train.evals import perplexity
from train.evals.perplexity import Window, measure, windows
from train.evals.runner import Interrupted, Scorer
from train.evaluate import evaluate_perplexity
from train.mesh import MeshConfig, make_mesh
from train.pretrained import Pretrained
from train.tokenizer import load_tokenizer

IDS = np.random.default_rng(1).integers(0, 31, 20)


class Told:
    """A scorer that gives token t of the text -ln p = told[t], whatever stands before it."""

    def __init__(self, told):
        self.told = np.asarray(told, np.float64)

    def stream_losses(self, samples, total):
        count = 0
        for each in samples:
            count += 1
            yield self.told[each["targets"]] * each["weights"]
        assert count == total


def test_windows_of_twenty_tokens_by_hand():
    """Length 8, stride 3: 0-7 scores 1-7, then three each, and the last one token."""
    assert list(windows(20, 8, 3)) == [
        Window(0, 8, 1, True),
        Window(3, 8, 5, True),
        Window(6, 8, 5, True),
        Window(9, 8, 5, True),
        Window(12, 8, 5, False),  # range(0, 20 - 8, 3) ends before 12
    ]
    assert list(windows(19, 8, 3))[-1] == Window(12, 7, 5, False)
    assert list(windows(8, 8, 3)) == [Window(0, 8, 1, False)]
    assert list(windows(5, 8, 3)) == [Window(0, 5, 1, False)]
    assert list(windows(1, 8, 3)) == list(windows(0, 8, 3)) == []


@pytest.mark.parametrize("tokens", [2, 7, 8, 9, 20, 33])
@pytest.mark.parametrize(("length", "stride"), [(8, 3), (8, 7), (8, 1), (2, 1), (16, 8)])
def test_every_token_but_the_first_is_scored_once(tokens, length, stride):
    scored, contexts = [], []
    for part in windows(tokens, length, stride):
        scored += range(part.start + part.first, part.start + part.size)
        if part.start:
            contexts += range(part.first, part.size)
    assert scored == list(range(1, tokens))
    assert not contexts or (length - stride <= min(contexts) and max(contexts) < length)
    pooled = [part.start for part in windows(tokens, length, stride) if part.pooled]
    assert pooled == list(range(0, max(tokens - length, 0), stride))


def test_a_mean_over_tokens_not_over_windows():
    """Token t costs t nats: (1 + ... + 19) / 19 = 10, in windows of any length."""
    for length, stride in ((8, 3), (5, 4), (20, 7)):
        found = measure(Told(np.arange(20)), [np.arange(20)], length, stride)
        assert (found["loss"], found["scored_tokens"]) == (10.0, 19)
        assert found["perplexity"] == pytest.approx(np.exp(10.0))
    # pooled, length 8, stride 6: windows 0 and 6, tokens 1-7 and 7-13: (28 + 70) / 14
    found = measure(Told(np.arange(20)), [np.arange(20)], 8, 6)
    assert (found["pooled_loss"], found["pooled_tokens"]) == (7.0, 14)
    assert found["windows"] == 3


def test_documents_are_pooled_by_tokens_and_do_not_touch():
    told = np.arange(31)
    documents = [np.arange(10), np.array([30]), np.array([20, 21, 22]), np.array([], int)]
    found = measure(Told(told), documents, 10, 4)
    assert found["scored_tokens"] == 9 + 2
    assert found["loss"] == pytest.approx((45 + 21 + 22) / 11)
    assert (found["pooled_perplexity"], found["pooled_tokens"]) == (None, 0)


def slow_reference(config, params, ids, length, stride):
    """Window by window, token by token: the losses of the sliding and of the pooled definition."""

    @functools.cache
    def scores(start):
        rows = logits(config, params, ids[None, start : start + length])[0]
        return np.asarray(jax.nn.log_softmax(rows), np.float64)

    def loss(start, target):
        return -scores(start)[target - start - 1, ids[target]]

    sliding = [loss(0, t) for t in range(1, min(length, len(ids)))]
    end, start = length, 0
    while end < len(ids):
        start += stride
        sliding += [loss(start, t) for t in range(end, min(start + length, len(ids)))]
        end = start + length
    starts = range(0, len(ids) - length, stride)
    pooled = [loss(s, t) for s in starts for t in range(s + 1, s + length)]
    return sliding, pooled


@pytest.mark.parametrize("name", ["rope", "tape"])
def test_a_model_on_twenty_tokens(name):
    config = tiny(position=name, num_layers=1)
    params, mesh = random_params(config, scale=0.2), make_mesh(MeshConfig())
    with jax.set_mesh(mesh):
        scorer = Scorer(Transformer(config), params, mesh, tokens_per_device=16)
        found = measure(scorer, [IDS], 8, 3)
        # A window much longer than the text is padded, which changes nothing.
        whole, padded = (measure(scorer, [IDS], length, 3) for length in (20, 64))
    sliding, pooled = slow_reference(config, params, IDS, 8, 3)
    assert (found["scored_tokens"], found["pooled_tokens"]) == (19, 28)
    assert found["perplexity"] == pytest.approx(np.exp(np.sum(sliding) / 19), rel=1e-4)
    assert found["pooled_perplexity"] == pytest.approx(np.exp(np.mean(pooled)), rel=1e-4)
    assert padded["loss"] == pytest.approx(whole["loss"], rel=1e-5)
    assert padded["scored_tokens"] == 19


@pytest.mark.multidevice
def test_devices_share_the_windows():
    config = tiny(num_layers=1)
    params, mesh = random_params(config), make_mesh(MeshConfig(data=4, fsdp=2))
    with jax.set_mesh(mesh):
        scorer = Scorer(Transformer(config), params, mesh, tokens_per_device=8)
        found = measure(scorer, [IDS], 8, 1)
    sliding, _ = slow_reference(config, params, IDS, 8, 1)
    assert found["loss"] == pytest.approx(np.mean(sliding), rel=1e-4)


def test_batches_are_bounded_and_no_larger_than_needed():
    config, mesh = tiny(num_layers=1), make_mesh(MeshConfig())
    scorer = Scorer(Transformer(config), random_params(config), mesh, tokens_per_device=32)
    shards = mesh.shape["data"] * mesh.shape["fsdp"]
    assert scorer._rows(8, 1000) == 4 * shards
    assert scorer._rows(64, 1000) == shards
    assert scorer._rows(8, 1) == shards


# --- Data -----------------------------------------------------------------------------------------


def test_texts_by_kind_of_file(tmp_path):
    (tmp_path / "ids.bin").write_bytes(IDS.astype("<u2").tobytes())
    np.save(tmp_path / "ids.npy", IDS.astype("<u4"))
    for name in ("ids.bin", "ids.npy"):
        (ids,) = perplexity.read_texts(tmp_path / name, None, "text", 7)
        np.testing.assert_array_equal(ids, IDS[:7])
    folder = write(tmp_path / "m", "tokenizer.json", byte_level(bos=True))
    tokenizer = load_tokenizer(folder)
    (tmp_path / "a.txt").write_text("that")
    (found,) = perplexity.read_texts(tmp_path / "a.txt", tokenizer, "text", None)
    assert found.tolist() == [257, 256, 64, 83]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in ("that", "a", "th"))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    found = perplexity.read_texts(tmp_path / "a.jsonl.gz", tokenizer, "text", 5)
    assert [each.tolist() for each in found] == [[257, 256, 64, 83], [257]]
    with pytest.raises(ValueError, match=r"a.txt is text and the model has no tokenizer: .*--tok"):
        perplexity.read_texts(tmp_path / "a.txt", None, "text", None)
    with pytest.raises(ValueError, match=r"no.txt is not a file"):
        perplexity.read_texts(tmp_path / "no.txt", tokenizer, "text", None)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"lengths": ()}, r"lengths=\(\): give at least one, each >= 2"),
        ({"lengths": (1, 8)}, "each >= 2"),
        ({"stride": 8}, r"stride=8 must lie in \[1, 7\], below every length"),
        ({"stride": 0}, r"stride=0 must lie in"),
        ({"max_tokens": 1}, "max_tokens=1 must be >= 2"),
        ({"lengths": (8, 64)}, "longest document of .*ids.bin has 20 tokens.* lengths <= 20"),
        ({"vocab_size": 30}, "ids.bin holds token id 30, but model.vocab_size=30"),
        ({"data": "no.bin"}, "no.bin is not a file"),
        ({"out": "ids.bin"}, "ids.bin is a file: name a folder"),
        ({"tokens_per_device": 0}, "tokens_per_device=0 must be >= 1"),
    ],
)
def test_what_cannot_work_is_named_before_the_model_is_read(tmp_path, monkeypatch, how, message):
    run = command(tmp_path, monkeypatch, how.pop("vocab_size", 31), read=None)
    how |= {field: tmp_path / how[field] for field in ("data", "out") if field in how}
    with pytest.raises(ValueError, match=message):
        run(**how)


# --- The command ----------------------------------------------------------------------------------


def command(tmp_path, monkeypatch, vocab_size=31, read=lambda config: random_params(config)):
    """evaluate_perplexity of a tiny model, which need not lie on a disk."""
    config = tiny(num_layers=1, vocab_size=vocab_size)
    ids = IDS.copy()
    ids[3] = 30
    (tmp_path / "ids.bin").write_bytes(ids.astype("<u2").tobytes())
    model = Pretrained(tmp_path / "tiny", config, lambda mesh: (read(config), 7))
    monkeypatch.setattr("train.evaluate.find", lambda path, step: model)
    usual = {
        "workdir": tmp_path,
        "data": tmp_path / "ids.bin",
        "lengths": (8, 16),
        "out": tmp_path / "out",
        "stride": 3,
    }
    return lambda **how: evaluate_perplexity(**usual | how)


def test_files(tmp_path, monkeypatch, capsys):
    command(tmp_path, monkeypatch)()
    record = json.loads((tmp_path / "out/perplexity.json").read_text())
    assert record["model"] == "tiny" and record["step"] == 7 and record["data"] == "ids.bin"
    assert (record["documents"], record["tokens"], record["stride"]) == (1, 20, 3)
    assert list(record["lengths"]) == ["8", "16"]
    assert {row["scored_tokens"] for row in record["lengths"].values()} == {19}
    assert "each once" in record["definition"] and "range(0" in record["pooled_definition"]
    assert (tmp_path / "out/perplexity.png").read_bytes()[:4] == b"\x89PNG"
    assert "kept in" in capsys.readouterr().out
    command(tmp_path, monkeypatch)(max_tokens=20)  # the same measurement may be repeated
    with pytest.raises(ValueError, match=r"perplexity.json holds results of stride=3: name anot"):
        command(tmp_path, monkeypatch)(stride=4)


def test_what_was_measured_is_kept_when_interrupted(tmp_path, monkeypatch, capsys):
    real = perplexity.measure

    def interrupted(scorer, documents, length, stride):
        stop = (lambda: True) if length == 16 else scorer.stop
        return real(dataclasses.replace(scorer, stop=stop), documents, length, stride)

    monkeypatch.setattr(perplexity, "measure", interrupted)
    command(tmp_path, monkeypatch)()
    record = json.loads((tmp_path / "out/perplexity.json").read_text())
    assert list(record["lengths"]) == ["8"]


def test_a_scorer_stops_between_batches():
    config, mesh = tiny(num_layers=1), make_mesh(MeshConfig())
    with jax.set_mesh(mesh), pytest.raises(Interrupted):
        scorer = Scorer(Transformer(config), random_params(config), mesh, stop=lambda: True)
        measure(scorer, [IDS], 8, 3)
