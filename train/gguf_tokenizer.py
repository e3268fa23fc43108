"""The vocabulary inside a GGUF file, written as the files that a model's folder would have.

`tokenizer.ggml.model` "gpt2" is byte-level BPE: its pieces, their merges, and, by the name in
`tokenizer.ggml.pre`, how texts are cut before merging. "llama" is SentencePiece's BPE, rebuilt from
pieces, scores and types. Field names are those of the GGUF specification.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Split

from tape_jax.convert.gguf_files import gguf_reader
from tape_jax.errors import unknown

CONTROL, USER_DEFINED = 3, 4
"""Of `tokenizer.ggml.token_type`, whose numbers are SentencePiece's: marks, and whole words."""

LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Where Llama 3 cuts a text; digits go three by three."""


@dataclasses.dataclass(frozen=True)
class Cut:
    """What a name in `tokenizer.ggml.pre` means.

    Attributes:
      make: how a text is cut before merging.
      ignore_merges: a cut that is a piece stays whole, whatever the merges would make of it.
      adds_bos: whether BOS stands before texts where the file does not say.
    """

    make: Callable[[], PreTokenizer]
    ignore_merges: bool = False
    adds_bos: bool = False


def _bytes(**how: bool) -> PreTokenizer:
    return ByteLevel(add_prefix_space=False, **how)


CUTS: Mapping[str, Cut] = {
    "gpt-2": Cut(_bytes),
    "smollm": Cut(lambda: pre_tokenizers.Sequence([Digits(individual_digits=True), _bytes()])),
    "llama-bpe": Cut(
        lambda: pre_tokenizers.Sequence(
            [Split(Regex(LLAMA_3), "isolated"), _bytes(use_regex=False)]
        ),
        ignore_merges=True,
        adds_bos=True,
    ),
}


def gguf_files(path: Path) -> dict[str, bytes]:
    """tokenizer.json or tokenizer.model, and tokenizer_config.json, by name.

    Raises:
      ValueError: no GGUF file, one without a vocabulary, or a vocabulary of another kind.
    """
    fields = _fields(path)
    for field in ("model", "tokens"):
        if field not in fields:
            raise ValueError(f"{path} has no tokenizer.ggml.{field}: take a GGUF with a vocabulary")
    kind = fields["model"]
    if kind not in KINDS:
        raise ValueError(f"{path}: {unknown('tokenizer.ggml.model', kind, KINDS)}")
    try:
        return KINDS[kind](fields)
    except KeyError as error:
        raise ValueError(f"{path} has no tokenizer.ggml.{error.args[0]}") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _fields(path: Path) -> dict[str, Any]:
    """What stands under `tokenizer.`, without the prefix `tokenizer.ggml.`."""
    return {
        name.removeprefix("tokenizer.").removeprefix("ggml."): field.contents()
        for name, field in gguf_reader(path).fields.items()
        if name.startswith("tokenizer.")
    }


def _bpe(fields: Mapping[str, Any]) -> dict[str, bytes]:
    name = fields.get("pre", "not given")
    if name not in CUTS:
        raise ValueError(unknown("tokenizer.ggml.pre", name, CUTS))
    cut, names = CUTS[name], fields["tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in fields["merges"]]
    # A piece that stands there twice keeps its first id.
    ids = {piece: i for i, piece in reversed(list(enumerate(names)))}
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab=ids, merges=merges, ignore_merges=cut.ignore_merges)
    )
    tokenizer.pre_tokenizer = cut.make()
    tokenizer.decoder = decoders.ByteLevel()
    types = fields.get("token_type", [])
    tokenizer.add_special_tokens(_added(names, types, CONTROL, special=True))
    tokenizer.add_tokens(_added(names, types, USER_DEFINED, special=False))
    settings = _settings(fields, cut.adds_bos, "PreTrainedTokenizerFast")
    if settings["add_bos_token"]:
        bos = settings["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A",
            pair=f"{bos} $A {bos} $B:1",
            special_tokens=[(bos, fields["bos_token_id"])],
        )
    return {"tokenizer.json": tokenizer.to_str().encode(), **_config(settings)}


def _added(names, types, kind, special) -> list[AddedToken]:
    return [
        AddedToken(piece, special=special, normalized=False)
        for piece, of in zip(names, types, strict=False)
        if of == kind
    ]


def _sentencepiece(fields: Mapping[str, Any]) -> dict[str, bytes]:
    # Its names are made when it is imported.
    # pyrefly: ignore[missing-module-attribute]
    from sentencepiece.sentencepiece_model_pb2 import ModelProto, TrainerSpec

    model = ModelProto()
    rows = zip(fields["tokens"], fields["scores"], fields["token_type"], strict=True)
    for piece, score, kind in rows:
        model.pieces.add(piece=piece, score=score, type=kind)
    trainer, normalizer = model.trainer_spec, model.normalizer_spec
    trainer.model_type = TrainerSpec.BPE
    trainer.vocab_size = len(model.pieces)
    trainer.byte_fallback = True
    trainer.unk_id = fields.get("unknown_token_id", 0)
    # A model's ids of BOS and EOS are found by their names.
    for mark in ("bos", "eos"):
        where = fields.get(f"{mark}_token_id", -1)
        setattr(trainer, f"{mark}_id", where)
        if where >= 0:
            setattr(trainer, f"{mark}_piece", fields["tokens"][where])
    trainer.unk_piece = fields["tokens"][trainer.unk_id]
    trainer.pad_id = -1
    normalizer.name = "identity"
    normalizer.add_dummy_prefix = fields.get("add_space_prefix", True)
    normalizer.remove_extra_whitespaces = fields.get("remove_extra_whitespaces", False)
    normalizer.escape_whitespaces = True
    settings = _settings(fields, True, "LlamaTokenizer")
    return {"tokenizer.model": model.SerializeToString(), **_config(settings)}


def _settings(fields: Mapping[str, Any], adds_bos: bool, kind: str) -> dict[str, Any]:
    settings = {"tokenizer_class": kind, "add_bos_token": fields.get("add_bos_token", adds_bos)}
    for mark in ("bos", "eos"):
        if f"{mark}_token_id" in fields:
            settings[f"{mark}_token"] = fields["tokens"][fields[f"{mark}_token_id"]]
    if settings["add_bos_token"] and "bos_token" not in settings:
        raise ValueError("add_bos_token is set, but there is no tokenizer.ggml.bos_token_id")
    if "chat_template" in fields:
        settings["chat_template"] = fields["chat_template"]
    return settings


def _config(settings: Mapping[str, Any]) -> dict[str, bytes]:
    return {"tokenizer_config.json": (json.dumps(settings, indent=1) + "\n").encode()}


KINDS: Mapping[str, Callable[[Mapping[str, Any]], dict[str, bytes]]] = {
    "gpt2": _bpe,
    "llama": _sentencepiece,
}
