"""The same documents in every format that a job can name."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import tokenizers

VOCAB_SIZE = 320
"""Of the tokenizer below; bytes fit in it too."""
FORMATS = ("text", "text-bpe", "jsonl", "jsonl-bpe", "parquet", "parquet-bpe", "bin", "npy", "synthetic")
_WORDS = ["the", "rank", "reads", "bytes", "naïve", "中文", "loss;", "\n", "gradient", "é", "x = 1"]


def documents(num: int = 60, seed: int = 0) -> list[str]:
    """Documents of very different lengths, some of them empty, with characters of one to three bytes."""
    draw = random.Random(seed)
    lengths = [draw.choice((0, 1, 3, 40, 40, 400)) for _ in range(num)]
    return [" ".join(draw.choice(_WORDS) for _ in range(length)) for length in lengths]


def make_tokenizer(path: Path) -> tokenizers.Tokenizer:
    """A byte-level BPE as GPT-2's, trained on the spot and written to `path`."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents(), trainer)
    tokenizer.save(str(path))
    return tokenizer


def write_sources(folder: Path) -> dict[str, dict[str, Any]]:
    """A `data` section by format."""
    docs = documents()
    tokenizer = folder / "tokenizer.json"
    make_tokenizer(tokenizer)
    for number in range(3):
        (folder / f"part{number}.txt").write_text("\n".join(docs[number::3]))
        lines = [json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(docs[number::3])]
        (folder / f"part{number}.jsonl").write_text("".join(lines))
        table = pa.table({"id": list(range(len(docs[number::3]))), "text": docs[number::3]})
        pq.write_table(table, folder / f"part{number}.parquet", row_group_size=7)
        ids = np.random.default_rng(number).integers(0, VOCAB_SIZE, 2_000, dtype=np.uint16)
        ids.tofile(folder / f"part{number}.bin")
        np.save(folder / f"part{number}.npy", ids.astype(np.int32))
    found: dict[str, dict[str, Any]] = {"synthetic": {"source": "synthetic"}}
    for name in ("text", "jsonl", "parquet", "bin", "npy"):
        found[name] = {"source": str(folder), "format": name}
        found[f"{name}-bpe"] = found[name] | {"tokenizer": str(tokenizer)}
    return {name: found[name] for name in FORMATS}
