"""Text to token ids and back, with exactly one BOS where a model wants one.

A tokenizer is read from a model's folder, a SentencePiece `.model`, a `tokenizer.json`, or the
vocabulary inside a `.gguf`; never from a hub.
"""

from __future__ import annotations

import codecs
import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from train.gguf_tokenizer import gguf_files
from train.vocabulary import Vocabulary, from_json, from_sentencepiece

KINDS: Mapping[str, Callable[[bytes], Vocabulary]] = {
    "tokenizer.json": from_json,
    "tokenizer.model": from_sentencepiece,
}
"""Files of a vocabulary; the first that a folder has is taken."""

SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "config.json")
"""Files beside it that name its marks."""


@dataclasses.dataclass(frozen=True, eq=False)
class Tokenizer:
    """What a model reads and writes.

    Attributes:
      name: of the file or folder it was read from.
      vocabulary: ids and what they write.
      bos, eos: ids of the marks before and behind a text, None where there is none.
      adds_bos: whether every text of this model begins with BOS.
    """

    name: str
    vocabulary: Vocabulary
    bos: int | None
    eos: int | None
    adds_bos: bool

    @property
    def vocab_size(self) -> int:
        """All ids are below it."""
        return len(self.vocabulary.pieces)

    @property
    def fingerprint(self) -> str:
        """Of what every id writes: equal for equal vocabularies, however they are kept."""
        sha = hashlib.sha256()
        for piece in self.vocabulary.pieces:
            sha.update(len(piece).to_bytes(4, "little") + piece)
        return sha.hexdigest()

    def encode(self, text: str) -> list[int]:
        """The ids of a text, after one BOS if the model's texts begin with it."""
        head = [self.bos] if self.adds_bos and self.bos is not None else []
        return head + self.encode_plain(text)

    def encode_plain(self, text: str) -> list[int]:
        """The same without BOS: what stands in the middle of a text."""
        ids = self.vocabulary.text_ids(text)
        start = 0
        while self.adds_bos and ids[start : start + 1] == [self.bos]:
            start += 1
        return ids[start:]

    def decode(self, ids: Iterable[int], after: Sequence[int] = ()) -> str:
        """What the ids write. Marks write nothing, nor do ids that the vocabulary lacks.

        Args:
          ids: a text, or a part of one.
          after: the ids before them: a space at the head of a text is not written.
        """
        return "".join(self.stream_text(ids, after))

    def stream_text(self, ids: Iterable[int], after: Sequence[int] = ()) -> Iterator[str]:
        """What each id adds to the text, a character when it is whole; bytes of none become "�".

        Args:
          ids: read one by one.
          after: the ids before them, which are not written again.
        """
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        before = b"".join(map(self._written, after))
        decoder.decode(before)
        at_start = self.vocabulary.drops_space and not before
        for i in ids:
            piece = self._written(i)
            if at_start and piece:
                piece, at_start = piece.removeprefix(b" "), False
            if text := decoder.decode(piece):
                yield text
        if rest := decoder.decode(b"", final=True):
            yield rest

    def _written(self, i: int) -> bytes:
        return self.vocabulary.pieces[i] if 0 <= i < self.vocab_size else b""


def load_tokenizer(path: Path | str) -> Tokenizer:
    """Reads the tokenizer of a folder, a `.model`, a `tokenizer.json` or a `.gguf`.

    Whether BOS is put before a text is what `add_bos_token` says, else what the file does by
    itself. A mark is looked up by its name in tokenizer_config.json or special_tokens_map.json,
    else it is the vocabulary's own, else that of config.json, each beside the vocabulary.

    Raises:
      FileNotFoundError: nothing there.
      ValueError: no tokenizer, one of another kind, or a mark that its vocabulary lacks.
    """
    path = Path(path)
    return _read(path, _files(path))


def check_fits(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Raises ValueError for a tokenizer with ids that a model of `vocab_size` does not know."""
    if tokenizer.vocab_size > vocab_size:
        raise ValueError(
            f"tokenizer {tokenizer.name} has {tokenizer.vocab_size} ids and model.vocab_size="
            f"{vocab_size}: it does not fit the vocabulary; give the model's own with --tokenizer"
        )


def has_tokenizer(folder: Path) -> bool:
    """Whether `load_tokenizer` finds one in this folder."""
    return any((folder / name).is_file() for name in KINDS)


def copy_tokenizer(source: Path | str, folder: Path | str) -> list[Path]:
    """Writes a tokenizer into `folder`; `load_tokenizer(folder)` gives the same ids.

    Marks that only a config.json names are written into tokenizer_config.json, since the folder may
    have a config.json of another kind.

    Args:
      source: what `load_tokenizer` takes.
      folder: made if missing.

    Returns:
      the files written.

    Raises:
      ValueError, FileNotFoundError: see `load_tokenizer`.
    """
    source, folder = Path(source), Path(folder)
    files = _files(source)
    _read(source, files)  # an unsound one is not spread
    folder.mkdir(parents=True, exist_ok=True)
    marks = json.loads(files.pop("config.json", b"{}"))
    marks = {key: marks[key] for key in ("bos_token_id", "eos_token_id") if key in marks}
    if marks:
        settings = marks | json.loads(files.get("tokenizer_config.json", b"{}"))
        files["tokenizer_config.json"] = (json.dumps(settings, indent=1) + "\n").encode()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return [folder / name for name in files]


def _files(path: Path) -> dict[str, bytes]:
    """The files of a tokenizer by name, those of a vocabulary first."""
    wanted = f"name a folder with {' or '.join(KINDS)}, a .model, a tokenizer.json or a .gguf"
    if not path.exists():
        raise FileNotFoundError(f"tokenizer {path} does not exist: {wanted}")
    if path.suffix == ".gguf":
        return gguf_files(path)
    if path.is_dir():
        folder, names = path, {name: name for name in KINDS if (path / name).is_file()}
    else:
        kinds = {".json": "tokenizer.json", ".model": "tokenizer.model"}
        folder = path.parent
        names = {kinds[path.suffix]: path.name} if path.suffix in kinds else {}
    if not names:
        raise ValueError(f"tokenizer {path} is none: {wanted}")
    names |= {name: name for name in SETTINGS if (folder / name).is_file()}
    return {kind: (folder / name).read_bytes() for kind, name in names.items()}


def _read(path: Path, files: Mapping[str, bytes]) -> Tokenizer:
    try:
        return _from_files(path.resolve().name, files)
    except ValueError as error:
        raise ValueError(f"tokenizer {path}: {error}") from None


def _from_files(name: str, files: Mapping[str, bytes]) -> Tokenizer:
    kind = next(kind for kind in KINDS if kind in files)
    vocabulary = KINDS[kind](files[kind])
    settings = {file: _settings(file, files.get(file, b"{}")) for file in SETTINGS}
    adds_bos = settings["tokenizer_config.json"].get("add_bos_token")
    adds_bos = vocabulary.adds_bos if adds_bos is None else adds_bos
    bos, eos = (_mark(mark, vocabulary, settings) for mark in ("bos", "eos"))
    if adds_bos and bos is None:
        raise ValueError(
            "add_bos_token is set, but no bos_token: name one in tokenizer_config.json"
        )
    return Tokenizer(name, vocabulary, bos, eos, adds_bos)


def _settings(file: str, data: bytes) -> dict[str, Any]:
    try:
        return json.loads(data)
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from None


def _mark(mark: str, vocabulary: Vocabulary, settings: Mapping[str, dict]) -> int | None:
    for file in SETTINGS[:2]:
        name = settings[file].get(f"{mark}_token")
        name = name["content"] if isinstance(name, dict) else name
        if name is not None:
            found = vocabulary.find(name)
            if found is None:
                raise ValueError(f"{file}: {mark}_token={name!r} is not in the vocabulary")
            return found
    own = getattr(vocabulary, mark)
    numbers = [settings[file].get(f"{mark}_token_id") for file in SETTINGS]
    ids = next((number for number in (own, *numbers) if number is not None), None)
    return ids[0] if isinstance(ids, list) else ids  # Llama 3 lists several that end a text
