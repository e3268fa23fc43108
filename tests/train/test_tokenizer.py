"""Tokenizers: one BOS and no more, ids, bytes back to text, marks, bad files."""

import json

import pytest

from tests.train.vocabularies import HARD, byte_level, processor, sentencepiece_model, write
from train.tokenizer import (
    check_fits,
    copy_tokenizer,
    has_tokenizer,
    load_tokenizer,
)


def without_underline(texts):
    """SentencePiece cannot tell its sign for a space from a space."""
    return [text for text in texts if "▁" not in text]


# --- SentencePiece --------------------------------------------------------------------------------


@pytest.mark.parametrize("text", HARD)
def test_one_bos_and_then_what_sentencepiece_says(tmp_path, text):
    model = sentencepiece_model()
    tokenizer = load_tokenizer(write(tmp_path, "tokenizer.model", model))
    assert (tokenizer.bos, tokenizer.eos, tokenizer.vocab_size) == (1, 2, 340)
    plain = processor(model).encode(text)
    assert tokenizer.encode(text) == [1, *plain]
    assert tokenizer.encode_plain(text) == plain
    assert tokenizer.decode([1, *plain, 2]) == processor(model).decode(plain)


def test_sentencepiece_golden_ids_by_pieces(tmp_path):
    """BOS 1, then pieces as one reads them off: a space in front, digits apart, bytes 3 + value."""
    tokenizer = load_tokenizer(write(tmp_path, "tokenizer.model", sentencepiece_model()))
    piece = processor(sentencepiece_model()).piece_to_id
    space = piece("▁")
    assert space != 0
    assert tokenizer.encode("") == [1]
    assert tokenizer.encode(" a") == [1, space, piece("▁a")]
    assert tokenizer.encode("12") == [1, space, piece("1"), piece("2")]
    assert tokenizer.encode("€") == [1, space, 3 + 0xE2, 3 + 0x82, 3 + 0xAC]
    at_head = tokenizer.encode("<s> a")
    assert at_head[0] == 1 and 1 not in at_head[1:]
    assert at_head[1:] == [space, 3 + ord("<"), piece("s"), 3 + ord(">"), piece("▁a")]


def test_sentencepiece_without_its_leading_space(tmp_path):
    model = sentencepiece_model(add_dummy_prefix=False)
    tokenizer = load_tokenizer(write(tmp_path, "tokenizer.model", model))
    for text in without_underline(HARD):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_settings_decide_about_bos(tmp_path):
    model = sentencepiece_model()
    off = load_tokenizer(write(tmp_path / "off", "tokenizer.model", model, add_bos_token=False))
    assert off.encode("a") == processor(model).encode("a") and off.bos == 1
    none = sentencepiece_model(bos_id=-1, eos_id=1)
    tokenizer = load_tokenizer(write(tmp_path / "none", "tokenizer.model", none))
    assert (tokenizer.bos, tokenizer.eos) == (None, 1)
    assert tokenizer.encode("") == []
    bad = write(tmp_path / "bad", "tokenizer.model", none, add_bos_token=True)
    with pytest.raises(ValueError, match="bad: add_bos_token is set, but no bos_token"):
        load_tokenizer(bad)


# --- tokenizer.json -------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"add_bos_token": True, "bos_token": "<bos>"}])
@pytest.mark.parametrize("processor_adds", [True, False])
def test_json_puts_one_bos(tmp_path, settings, processor_adds):
    data = byte_level(bos=processor_adds)
    tokenizer = load_tokenizer(write(tmp_path, "tokenizer.json", data, **settings))
    adds = processor_adds or bool(settings)
    start = [257] if adds else []
    by_letter = {chr(byte): i for i, byte in enumerate(range(ord("!"), ord("~") + 1))}
    assert tokenizer.encode("") == start
    assert tokenizer.encode("that") == [*start, 256, by_letter["a"], by_letter["t"]]
    assert tokenizer.encode("<bos>th") == [257, 256]
    assert tokenizer.encode("<bos><bos>th") == ([257, 256] if adds else [257, 257, 256])
    assert tokenizer.encode_plain("th") == [256]


def test_settings_may_forbid_bos(tmp_path):
    folder = write(tmp_path, "tokenizer.json", byte_level(bos=True), add_bos_token=False)
    assert load_tokenizer(folder).encode("th") == [256]


@pytest.mark.parametrize("text", HARD)
def test_bytes_come_back(tmp_path, text):
    tokenizer = load_tokenizer(write(tmp_path, "tokenizer.json", byte_level(bos=True)))
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode([257, *tokenizer.encode(text), 258]) == text


def test_llama_like_json_writes_what_sentencepiece_writes(tmp_path):
    """As transformers converts Llama's: spaces by normalizer, bytes by fallback, one space off."""
    pieces = processor(sentencepiece_model())
    names = {pieces.id_to_piece(i): i for i in range(pieces.vocab_size())}
    folder = write(tmp_path, "tokenizer.json", json.dumps(llama_like(names)).encode())
    tokenizer = load_tokenizer(folder)
    for ids in (
        pieces.encode("Here we go, 12 €"),
        [1, *pieces.encode("  a")],
        pieces.encode("🦙")[2:],
    ):
        assert tokenizer.decode(ids) == pieces.decode(ids)


def llama_like(names):
    """A tokenizer.json with these pieces and no merges."""
    space = {"String": " "}
    return {
        "version": "1.0",
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": "▁"},
                {"type": "Replace", "pattern": space, "content": "▁"},
            ],
        },
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": {
            "type": "BPE",
            "vocab": names,
            "merges": [],
            "byte_fallback": True,
            "unk_token": "<unk>",
            "fuse_unk": True,
        },
        "added_tokens": [
            {
                "id": i,
                "content": mark,
                "special": True,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
            }
            for i, mark in enumerate(("<unk>", "<s>", "</s>"))
        ],
    }


# --- Text while it is written ---------------------------------------------------------------------


def test_no_half_character_is_shown(tmp_path):
    tokenizer = load_tokenizer(write(tmp_path, "tokenizer.json", byte_level()))
    euro, llama = tokenizer.encode("€"), tokenizer.encode("🦙")
    assert (len(euro), len(llama)) == (3, 4)
    assert list(tokenizer.stream_text(tokenizer.encode("a€b"))) == ["a", "€", "b"]
    assert list(tokenizer.stream_text([*llama, 256])) == ["🦙", "th"]
    assert "".join(tokenizer.stream_text([*euro[:2], 256])) == "�th"
    assert "".join(tokenizer.stream_text(llama[:3])) == "�"
    assert list(tokenizer.stream_text(euro[1:], after=[256, euro[0]])) == ["€"]


def test_a_continuation_keeps_its_space(tmp_path):
    tokenizer = load_tokenizer(write(tmp_path, "tokenizer.model", sentencepiece_model()))
    ids = tokenizer.encode("The sky is blue")
    for cut in range(1, len(ids)):
        head = tokenizer.decode(ids[:cut])
        assert head + tokenizer.decode(ids[cut:], after=ids[:cut]) == "The sky is blue"


def test_ids_beyond_the_vocabulary_write_nothing(tmp_path):
    tokenizer = load_tokenizer(write(tmp_path, "tokenizer.json", byte_level()))
    assert tokenizer.decode([256, 259, 40_000, -1, 256]) == "thth"


def test_a_tokenizer_must_fit(tmp_path):
    tokenizer = load_tokenizer(write(tmp_path / "small", "tokenizer.json", byte_level()))
    check_fits(tokenizer, 259)
    check_fits(tokenizer, 320)
    with pytest.raises(ValueError, match=r"small has 259 ids .*=258: it does not fit.*--tokenizer"):
        check_fits(tokenizer, 258)


# --- Marks and files ------------------------------------------------------------------------------


def test_marks_are_found_where_they_are_named(tmp_path):
    plain = write(tmp_path / "a", "tokenizer.json", byte_level())
    assert (load_tokenizer(plain).bos, load_tokenizer(plain).eos) == (None, None)
    (plain / "config.json").write_text('{"bos_token_id": 257, "eos_token_id": [258, 256]}')
    assert (load_tokenizer(plain).bos, load_tokenizer(plain).eos) == (257, 258)
    (plain / "special_tokens_map.json").write_text('{"eos_token": {"content": "<bos>"}}')
    assert load_tokenizer(plain).eos == 257
    (plain / "tokenizer_config.json").write_text('{"eos_token": "<eos>"}')
    assert load_tokenizer(plain).eos == 258
    assert load_tokenizer(plain / "tokenizer.json").eos == 258
    (plain / "tokenizer_config.json").write_text('{"eos_token": "<stop>"}')
    with pytest.raises(ValueError, match=r"tokenizer_config.json: eos_token='<stop>' is not in"):
        load_tokenizer(plain)


def test_a_copy_needs_no_config(tmp_path):
    source = write(tmp_path / "source", "tokenizer.json", byte_level(), add_bos_token=True)
    (source / "config.json").write_text('{"bos_token_id": 257, "eos_token_id": 258}')
    target = tmp_path / "run"
    target.mkdir()
    (target / "config.json").write_text('{"task": {}}')
    assert not has_tokenizer(target)
    copy_tokenizer(source, target)
    assert has_tokenizer(target) and (target / "config.json").read_text() == '{"task": {}}'
    copied = load_tokenizer(target)
    assert copied.encode("th") == [257, 256] and copied.eos == 258


def test_what_is_no_tokenizer_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere does not exist: name a folder with"):
        load_tokenizer(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"is none: name a folder with tokenizer.json or"):
        load_tokenizer(tmp_path)
    for name in ("tokenizer.json", "x.model", "x.gguf"):
        (tmp_path / name).write_bytes(b"{}")
        with pytest.raises(ValueError, match=rf"{name}.* no "):
            load_tokenizer(tmp_path / name)
    words = json.loads(byte_level())
    words["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    (tmp_path / "tokenizer.json").write_text(json.dumps(words))
    with pytest.raises(ValueError, match=r"decoder is \['WordPiece'\]"):
        load_tokenizer(tmp_path / "tokenizer.json")
