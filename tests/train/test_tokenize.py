"""Token files from texts: documents, marks, ranges, both formats, interruption, bad input."""

import gzip
import json

import numpy as np
import pytest

from tests.train.vocabularies import byte_level, sentencepiece_model, write
from train.data import documents
from train.data.documents import read_documents
from train.data.tokens import read_ids
from train.tokenize import main, tokenize
from train.tokenizer import load_tokenizer

DOCUMENTS = ["th", "a", "", "that\n€", "<s>"]


def rows(path, texts=DOCUMENTS, field="text"):
    lines = "".join(json.dumps({field: text, "id": i}) + "\n" for i, text in enumerate(texts))
    path.write_bytes(gzip.compress(lines.encode()) if path.suffix == ".gz" else lines.encode())
    return path


@pytest.fixture
def model(tmp_path):
    folder = write(
        tmp_path / "model",
        "tokenizer.json",
        byte_level(),
        add_bos_token=True,
        bos_token="<bos>",
        eos_token="<eos>",
    )
    return folder


def test_documents_of_every_kind_of_file(tmp_path):
    for name in ("a.jsonl", "a.jsonl.gz"):
        assert list(read_documents(rows(tmp_path / name))) == DOCUMENTS
    rows(tmp_path / "b.jsonl", ["x"], "body").write_text('\n{"body": "x"}\n\n')
    assert list(read_documents(tmp_path / "b.jsonl", "body")) == ["x"]
    (tmp_path / "c.txt").write_bytes("one\r\n€".encode())
    (tmp_path / "c.txt.gz").write_bytes(gzip.compress("one\r\n€".encode()))
    for name in ("c.txt", "c.txt.gz"):
        assert list(read_documents(tmp_path / name)) == ["one\r\n€"]


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"text"\n', "a.jsonl line 2 is not JSON"),
        (
            "a.jsonl",
            b'{"body": "x"}\n',
            r"line 1 has no text in field 'text', only \['body'\].*--fi",
        ),
        ("a.jsonl", b"[1]\n", "line 1 has no text in field 'text', only list"),
        ("a.txt", b"\xff\xfe", "a.txt is not text"),
        ("a.txt.gz", b"plain", "a.txt.gz is not text, plain or .gz"),
    ],
)
def test_files_that_hold_no_documents(tmp_path, name, data, message):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=message):
        list(read_documents(tmp_path / name))


def test_one_bos_a_document_and_eos_if_asked(tmp_path, model):
    """Counted by hand: 257 is BOS, 258 EOS, 256 "th"."""
    path, (a, t) = rows(tmp_path / "a.jsonl", ["th", "a", "<bos>th", ""]), (64, 83)
    record = tokenize((path,), model, tmp_path / "x.bin")
    assert read_ids(tmp_path / "x.bin").tolist() == [257, 256, 257, a, 257, 256, 257]
    assert json.loads((tmp_path / "x.bin.json").read_text()) == record
    assert (record["documents"], record["tokens"], record["sources"]) == (4, 7, ["a.jsonl"])
    assert (record["vocab_size"], record["bos"], record["eos"]) == (259, 257, None)
    assert record["vocabulary_sha256"] == load_tokenizer(model).fingerprint
    (tmp_path / "b.txt").write_text("at")
    record = tokenize((path, tmp_path / "b.txt"), model, tmp_path / "y.npy", eos=True)
    ids = [257, 256, 258, 257, a, 258, 257, 256, 258, 257, 258, 257, a, t, 258]
    assert np.load(tmp_path / "y.npy").tolist() == ids and record["eos"] == 258
    assert np.load(tmp_path / "y.npy").dtype == np.uint16
    assert not list(tmp_path.glob("*.part*"))


def test_parts_of_a_file_make_the_whole(tmp_path, model):
    source = rows(tmp_path / "a.jsonl.gz")
    tokenize((source,), model, tmp_path / "whole.bin")
    tokenize((source,), model, tmp_path / "head.bin", documents=2)
    tokenize((source,), model, tmp_path / "tail.bin", skip_documents=2)
    parts = [read_ids(tmp_path / f"{name}.bin") for name in ("head", "tail")]
    whole = read_ids(tmp_path / "whole.bin")
    np.testing.assert_array_equal(np.concatenate(parts), whole)
    record = tokenize((source,), model, tmp_path / "cut.bin", max_tokens=3)
    np.testing.assert_array_equal(read_ids(tmp_path / "cut.bin"), whole[:3])
    assert (record["documents"], record["tokens"]) == (2, 3)


def test_ids_are_sentencepiece_s(tmp_path):
    folder = write(tmp_path / "model", "tokenizer.model", sentencepiece_model())
    tokenize((rows(tmp_path / "a.jsonl"),), folder, tmp_path / "x.bin")
    tokenizer = load_tokenizer(folder)
    expected = [i for text in DOCUMENTS for i in tokenizer.encode(text)]
    ids = read_ids(tmp_path / "x.bin")
    assert ids.tolist() == expected
    assert (ids == 1).sum() == len(DOCUMENTS)


def wide(tmp_path):
    """The same letters in a vocabulary of more than 65,536 ids; "th" is the last."""
    spec = json.loads(byte_level())
    spec["model"]["vocab"]["th"] = 70_000
    return write(tmp_path / "wide", "tokenizer.json", json.dumps(spec).encode())


def test_wide_vocabularies_take_four_bytes(tmp_path):
    source = rows(tmp_path / "a.jsonl", ["thath"])
    with pytest.raises(ValueError, match=r"x.bin would hold uint16 .*70001 ids: end it in .npy"):
        tokenize((source,), wide(tmp_path), tmp_path / "x.bin")
    tokenize((source,), wide(tmp_path), tmp_path / "x.npy")
    ids = read_ids(tmp_path / "x.npy")
    assert ids.dtype == np.uint32 and ids.tolist() == [70_000, 64, 70_000]


@pytest.mark.parametrize("suffix", [".bin", ".npy"])
def test_an_interrupted_call_goes_on(tmp_path, model, suffix, monkeypatch):
    source = rows(tmp_path / "a.jsonl", [f"that is {i}" for i in range(9)])
    tokenize((source,), model, tmp_path / f"whole{suffix}", skip_documents=1, documents=7)
    target = tmp_path / f"x{suffix}"
    polls = iter(range(100))
    monkeypatch.setattr("train.interrupt.Interrupt.__call__", lambda self: next(polls) % 4 == 3)
    calls = 0
    while tokenize((source,), model, target, skip_documents=1, documents=7) is None:
        assert not target.exists()
        calls += 1
    assert calls == 2
    assert target.read_bytes() == (tmp_path / f"whole{suffix}").read_bytes()
    assert json.loads((tmp_path / f"x{suffix}.json").read_text())["documents"] == 7
    assert not list(tmp_path.glob("*.part*"))


def test_another_call_begins_anew(tmp_path, model, monkeypatch):
    source = rows(tmp_path / "a.jsonl", ["th"] * 5)
    polls = iter([False, True, *[False] * 20])
    monkeypatch.setattr("train.interrupt.Interrupt.__call__", lambda self: next(polls))
    assert tokenize((source,), model, tmp_path / "x.bin") is None
    tokenize((source,), model, tmp_path / "x.bin", eos=True)
    assert read_ids(tmp_path / "x.bin").tolist() == [257, 256, 258] * 5


def test_what_cannot_work_is_named(tmp_path, model):
    source, out = rows(tmp_path / "a.jsonl"), tmp_path / "x.bin"
    plain = write(tmp_path / "plain", "tokenizer.json", byte_level())
    for how, message in (
        ({"files": ()}, "no files: name at least one"),
        ({"files": (tmp_path / "no.txt",)}, "no.txt is not a file"),
        ({"out": tmp_path / "x.dat"}, r"x.dat must end in .bin \(raw uint16\) or .npy"),
        ({"out": tmp_path / "no" / "x.bin"}, "there is no folder"),
        ({"skip_documents": -1}, "skip_documents=-1 must be >= 0"),
        ({"documents": 0}, "documents=0 must be >= 1"),
        ({"max_tokens": 0}, "max_tokens=0 must be >= 1; leave --max-tokens out"),
        ({"skip_documents": 5}, "no tokens: the files hold no document in the range"),
        ({"tokenizer": plain, "eos": True}, "tokenizer plain has no EOS; leave --eos out"),
        ({"field": "body"}, "line 1 has no text in field 'body'"),
    ):
        with pytest.raises(ValueError, match=message):
            tokenize(**{"files": (source,), "tokenizer": model, "out": out} | how)
        assert not list(tmp_path.glob("*.part*")) and not out.exists()


def test_the_command(tmp_path, model, capsys):
    source = rows(tmp_path / "a.jsonl")
    command = ["--tokenizer", str(model), "--out", str(tmp_path / "x.bin"), str(source)]
    main(command)
    assert "5 documents" in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"error: .*x.bin exists and is not overwritten"):
        main(command)


def test_files_are_streamed(tmp_path, monkeypatch):
    """The second row is not read before the first is used."""
    path = rows(tmp_path / "a.jsonl", ["x", "y"])
    read, loads = [], json.loads
    monkeypatch.setattr(documents.json, "loads", lambda s: read.append(s) or loads(s))
    assert next(read_documents(path)) == "x" and len(read) == 1
