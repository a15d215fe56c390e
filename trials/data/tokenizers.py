"""Text -> token ids: one a byte, or by a `tokenizer.json` as Hugging Face writes it."""

from __future__ import annotations

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

from trials.data.errors import DataError

_END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "<|eos|>", "<eos>", "</s>", "[SEP]")
"""What tokenizers call the token after a document."""


class Tokenizer(ABC):
    """Makes tokens of a piece of text."""

    name: str
    """As the job says it."""
    identity: str
    """Equal where the tokens are equal."""
    largest_id: int
    end: tuple[int, ...]
    """What follows each document."""

    @abstractmethod
    def encode(self, texts: Sequence[bytes]) -> list[list[int]]: ...


class ByteTokenizer(Tokenizer):
    """Token ids 0 to 255."""

    name = identity = "byte"
    largest_id = 255

    def __init__(self, end: bytes) -> None:
        self.end = tuple(end)

    def encode(self, texts: Sequence[bytes]) -> list[list[int]]:
        return [list(text) for text in texts]


class FileTokenizer(Tokenizer):
    """A tokenizer.json; no special tokens are added but the one after each document, if it has one."""

    def __init__(self, name: str) -> None:
        path = Path(name) / "tokenizer.json" if Path(name).is_dir() else Path(name)
        try:
            content = path.read_bytes()
        except OSError as error:
            raise DataError(f"data.tokenizer = {name!r}: {error}; give `byte` or a tokenizer.json") from error
        try:
            import tokenizers
        except ImportError as error:
            raise DataError(
                f"data.tokenizer = {name!r}: {error}; install it: pip install 'fsdp-autotune[tokenizers]'"
            ) from error
        # Its threads would not survive the fork of a loader's workers, which are the parallelism.
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(content)
        except Exception as error:  # the package raises nothing more special
            raise DataError(f"data.tokenizer = {name!r}: not a tokenizer.json: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        if not ids:
            raise DataError(f"data.tokenizer = {name!r}: its vocabulary is empty")
        self.name, self.largest_id = name, max(ids.values())
        self.identity = f"{hashlib.sha256(content).hexdigest()} {tokenizers.__version__}"
        self.end = tuple(ids[token] for token in _END_OF_TEXT if token in ids)[:1]

    def encode(self, texts: Sequence[bytes]) -> list[list[int]]:
        decoded = [text.decode(errors="replace") for text in texts]
        return [found.ids for found in self._tokenizer.encode_batch_fast(decoded, add_special_tokens=False)]


def make_tokenizer(name: str, vocab_size: int, end_of_bytes: bytes) -> Tokenizer:
    """The tokenizer that a job names.

    Args:
        end_of_bytes: what follows a document, if tokens are bytes.

    Raises:
        DataError: it is none, or the vocabulary has no room for its tokens.
    """
    tokenizer = ByteTokenizer(end_of_bytes) if name == "byte" else FileTokenizer(name)
    if tokenizer.largest_id >= vocab_size:
        raise DataError(
            f"data.tokenizer = {name} needs a vocabulary of {tokenizer.largest_id + 1}; the model's is {vocab_size}: "
            "raise the model's vocab_size, or give the tokenizer that belongs to it"
        )
    return tokenizer
