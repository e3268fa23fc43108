"""The two kinds of vocabulary files, seen as one: what a text's ids are, what an id writes."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Callable

import sentencepiece
import tokenizers
from tokenizers.pre_tokenizers import ByteLevel

UNDERLINE = "▁"
"""Stands for a space in SentencePiece's pieces."""

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclasses.dataclass(frozen=True, eq=False)
class Vocabulary:
    """What a file says by itself, without the settings beside it.

    Attributes:
      text_ids: the ids of a text with nothing put around it.
      pieces: the bytes that each id writes; none for marks such as BOS.
      find: the id of a piece by its name, None when there is none.
      drops_space: whether ids begin with a space that the text does not have.
      bos, eos: the marks at the two ends of a text, where the file names them.
      adds_bos: whether it is meant to put BOS before every text.
    """

    text_ids: Callable[[str], list[int]]
    pieces: tuple[bytes, ...]
    find: Callable[[str], int | None]
    drops_space: bool
    bos: int | None
    eos: int | None
    adds_bos: bool


def from_sentencepiece(data: bytes) -> Vocabulary:
    """Of a `tokenizer.model`. Its marks are never read from a text: "<s>" there is three letters.

    Raises:
      ValueError: bytes that are no SentencePiece model.
    """
    processor = sentencepiece.SentencePieceProcessor()
    try:
        processor.LoadFromSerializedProto(data)
    except RuntimeError as error:
        raise ValueError(f"no SentencePiece model: {error}") from None
    size, unknown = processor.vocab_size(), processor.unk_id()

    def find(piece: str) -> int | None:
        found = processor.piece_to_id(piece)
        return found if processor.id_to_piece(found) == piece else None

    def written(i: int) -> bytes:
        if processor.is_control(i):
            return b""
        if processor.is_byte(i):
            return bytes.fromhex(processor.id_to_piece(i)[3:5])
        return processor.id_to_piece(i).replace(UNDERLINE, " ").encode()

    pieces = [written(i) for i in range(size)]
    if unknown >= 0:
        pieces[unknown] = processor.decode([unknown]).encode()
    bos, eos = (i if i >= 0 else None for i in (processor.bos_id(), processor.eos_id()))
    return Vocabulary(
        text_ids=processor.encode,
        pieces=tuple(pieces),
        find=find,
        drops_space=processor.encode("x", out_type=str)[0].startswith(UNDERLINE),
        bos=bos,
        eos=eos,
        adds_bos=bos is not None,
    )


def from_json(data: bytes) -> Vocabulary:
    """Of a `tokenizer.json` of the tokenizers library; marks in a text are read as marks.

    Raises:
      ValueError: bytes that are no such file, or one whose ids write other than bytes or
        SentencePiece's pieces.
    """
    try:
        tokenizer = tokenizers.Tokenizer.from_buffer(data)
    except Exception as error:  # the library has no narrower type
        raise ValueError(f"no tokenizer of the tokenizers library: {error}") from None
    spec = json.loads(data)
    decoders = _parts(spec["decoder"], "decoders")
    kinds = {part["type"] for part in decoders}
    if "ByteLevel" in kinds:
        written = functools.partial(_from_letters, letters=_letters())
    elif kinds & {"Metaspace", "Replace"}:
        bytewise = bool(spec["model"].get("byte_fallback"))
        written = functools.partial(_from_underlined, bytewise=bytewise)
    else:
        raise ValueError(
            f"its decoder is {sorted(kinds)}, and only ByteLevel and SentencePiece's (Metaspace, or"
            " Replace with ByteFallback) are known"
        )
    names = tokenizer.get_vocab(with_added_tokens=True)
    pieces = [b""] * (max(names.values(), default=-1) + 1)
    for name, i in names.items():
        pieces[i] = written(name)
    for i, added in tokenizer.get_added_tokens_decoder().items():
        pieces[i] = b"" if added.special else added.content.encode()
    bos = _put_before(tokenizer)
    return Vocabulary(
        text_ids=lambda text: tokenizer.encode(text, add_special_tokens=False).ids,
        pieces=tuple(pieces),
        find=tokenizer.token_to_id,
        drops_space=any(_strips(part) for part in decoders),
        bos=bos,
        eos=None,
        adds_bos=bos is not None,
    )


def _put_before(tokenizer: tokenizers.Tokenizer) -> int | None:
    """The mark that the post-processor puts before a text."""
    plain, whole = (tokenizer.encode("a", add_special_tokens=x).ids for x in (False, True))
    return whole[0] if whole[: len(plain)] != plain else None


def _parts(decoder: dict | None, inner: str) -> list[dict]:
    if decoder is None:
        return []
    return decoder[inner] if decoder["type"] == "Sequence" else [decoder]


def _strips(decoder: dict) -> bool:
    if decoder["type"] == "Metaspace":
        return decoder.get("prepend_scheme", "always") != "never"
    return decoder["type"] == "Strip" and decoder["start"] > 0


def _letters() -> dict[str, int]:
    """GPT-2's letter of every byte: itself where it can be seen, else the next from 256 on."""
    seen = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1)]
    seen += range(ord("®"), ord("ÿ") + 1)
    hidden = [byte for byte in range(256) if byte not in seen]
    letters = {chr(byte): byte for byte in seen}
    letters |= {chr(256 + n): byte for n, byte in enumerate(hidden)}
    assert letters.keys() == set(ByteLevel.alphabet())
    return letters


def _from_letters(piece: str, letters: dict[str, int]) -> bytes:
    if not letters.keys() >= set(piece):
        return piece.encode()
    return bytes(letters[letter] for letter in piece)


def _from_underlined(piece: str, bytewise: bool) -> bytes:
    byte = _BYTE.fullmatch(piece) if bytewise else None
    return bytes.fromhex(byte[1]) if byte else piece.replace(UNDERLINE, " ").encode()
