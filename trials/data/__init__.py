"""What a trial trains on: token sequences of one length, through a real DataLoader.

Which sequences an optimizer step trains on depends only on (seed, step, index in the global batch): not on the
number of ranks, the micro-batch or the workers. So every config of a study warms up on the same data; after that,
configs with loader queues of different depth have skipped different steps.

    source.py                      what a job names -> files and their format
    text.py jsonl.py parquet.py    documents of text, streamed
    tokenizers.py                  text -> token ids
    index.py packed.py             documents -> sequences, tokenised when they are asked for
    tokens.py synthetic.py         sequences without tokenising: .bin and .npy files; random tokens
    loader.py                      the order of samples, and the DataLoader
"""

from __future__ import annotations

from typing import Any

from trials.data.errors import DataError
from trials.data.loader import MicroBatchSampler, make_loader, read_loader
from trials.data.packed import PackedText
from trials.data.sequences import Sequences
from trials.data.source import find_source
from trials.data.synthetic import SyntheticTokens
from trials.data.tokens import TokenFiles
from trials.formats import DEFAULTS
from trials.record import SYNTHETIC

__all__ = ["DataError", "MicroBatchSampler", "Sequences", "make_dataset", "make_loader", "read_loader"]


def make_dataset(data: dict[str, Any], seq_len: int, vocab_size: int, world_size: int = 1) -> Sequences:
    """The data that a job names.

    Args:
        data: the job's `data` section; what is left out or None has its default.
        seq_len: tokens per sequence.
        vocab_size: of the model.
        world_size: ranks that share the sequences.

    Raises:
        DataError: the data cannot be used as the section says.
    """
    source = find_source(data)
    if source.format == SYNTHETIC:
        return SyntheticTokens(seq_len, vocab_size)
    if source.format in ("bin", "npy"):
        token_dtype = data.get("token_dtype") or DEFAULTS["token_dtype"]
        dataset: Sequences = TokenFiles(source, token_dtype, seq_len, vocab_size)
    else:
        dataset = PackedText(source, data, seq_len, vocab_size)
    if len(dataset) < world_size:
        raise DataError(
            f"data.source = {source.name!r}: {len(dataset)} sequences of model.seq_len = {seq_len} tokens for "
            f"{world_size} ranks; each needs one of its own: give more data, or shorten model.seq_len"
        )
    return dataset
