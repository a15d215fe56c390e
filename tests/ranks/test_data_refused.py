"""Data that cannot be used ends in `invalid`, with the file, the key, its value and what to do."""

from __future__ import annotations

import json
import os
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trials import data
from trials.outcome import Outcome

from .sources import VOCAB_SIZE, make_tokenizer


def refused(section, seq_len=8, vocab_size=256, world_size=1):
    section = {name: str(value) if name in ("source", "tokenizer") else value for name, value in section.items()}
    with pytest.raises(data.DataError) as caught:
        data.make_dataset(section, seq_len, vocab_size, world_size)
    assert caught.value.outcome is Outcome.INVALID
    return str(caught.value)


def test_a_source_that_is_not_there(tmp_path):
    assert refused({"source": tmp_path / "none"}) == f"data.source = '{tmp_path}/none': no such file or folder"


def test_a_folder_without_data(tmp_path):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "picture.png").write_bytes(b"x" * 100)
    said = refused({"source": tmp_path})
    assert f"data.source = '{tmp_path}': the folder has no file, other than empty, in .txt" in said
    assert ".parquet" in said
    assert "other than empty, in .jsonl, .ndjson" in refused({"source": tmp_path, "format": "jsonl"})


def test_an_empty_file(tmp_path):
    (tmp_path / "a.txt").write_text("")
    assert "the file is empty" in refused({"source": tmp_path / "a.txt"})


def test_a_file_of_no_known_suffix(tmp_path):
    (tmp_path / "a.jsonl.gz").write_bytes(b"x" * 100)
    assert "its suffix names no format" in refused({"source": tmp_path / "a.jsonl.gz"})
    assert data.make_dataset({"source": str(tmp_path / "a.jsonl.gz"), "format": "text"}, 8, 256).num_sequences == 12


def test_a_folder_of_several_formats(tmp_path):
    (tmp_path / "README.md").write_text("words")
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "x" * 100}))
    assert "holds files of several formats (1 jsonl, 1 text): say data.format" in refused({"source": tmp_path})
    data.make_dataset({"source": str(tmp_path), "format": "jsonl"}, 8, 256)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_file_that_may_not_be_read(tmp_path):
    (tmp_path / "a.txt").write_text("x" * 100)
    (tmp_path / "a.txt").chmod(0)
    assert "permission denied" in refused({"source": tmp_path})


@pytest.mark.parametrize("kind", ["text", "jsonl", "parquet", "bin", "npy"])
def test_less_than_one_sequence(tmp_path, kind):
    (tmp_path / "a.txt").write_text("short")
    (tmp_path / "a.jsonl").write_text('{"text": "short"}\n{"text": ""}\n{"text": null}\n')
    pq.write_table(pa.table({"text": ["short", "", None]}), tmp_path / "a.parquet")
    np.arange(5, dtype=np.uint16).tofile(tmp_path / "a.bin")
    np.save(tmp_path / "a.npy", np.arange(5))
    said = refused({"source": tmp_path, "format": kind})
    assert f"data.source = '{tmp_path}'" in said
    assert f"1 {kind} file" in said
    assert "one sequence takes 9" in said
    assert "model.seq_len" in said


def test_a_max_mib_below_one_sequence(tmp_path):
    (tmp_path / "a.txt").write_text("x" * 100)
    assert "raise data.max_mib = 4e-06" in refused({"source": tmp_path, "max_mib": 4e-6})


def test_no_text_in_any_document(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n')
    assert "0 bytes of text" in refused({"source": tmp_path})


def test_more_ranks_than_sequences(tmp_path):
    (tmp_path / "a.txt").write_text("x" * 25)
    said = refused({"source": tmp_path}, world_size=4)
    assert "3 sequences of model.seq_len = 8 tokens for 4 ranks; each needs one of its own" in said
    assert len(data.make_dataset({"source": str(tmp_path)}, 8, 256, 3)) == 3


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{broken", "line 2: not JSON"),
        ("[1]", "line 2: a list; expected an object with the key 'text'"),
        ('{"body": "x", "id": 1}', "line 2: no key 'text'; its keys: 'body', 'id'. Say data.text_field"),
        ('{"text": 3}', "line 2: 'text' is a int, not text"),
    ],
)
def test_a_line_of_jsonl(tmp_path, line, complaint):
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "x" * 100}) + f"\n{line}\n")
    said = refused({"source": tmp_path})
    assert said.startswith(f"{tmp_path}/a.jsonl, {complaint}")


def test_a_column_of_parquet(tmp_path):
    pq.write_table(pa.table({"body": ["x" * 100], "n": [1]}), tmp_path / "a.parquet")
    assert refused({"source": tmp_path}) == (
        f"{tmp_path}/a.parquet: no column 'text'; its columns: 'body', 'n'. Say data.text_field"
    )
    assert "column 'n' is int64, not text" in refused({"source": tmp_path, "text_field": "n"})
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and then nothing")
    assert f"{tmp_path}/a.parquet: not a Parquet file" in refused({"source": tmp_path})


def test_a_tokenizer(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("x" * 100)
    make_tokenizer(tmp_path / "tokenizer.json")
    section = {"source": tmp_path, "tokenizer": tmp_path / "tokenizer.json"}
    said = refused(section, vocab_size=VOCAB_SIZE // 2)
    assert f"data.tokenizer = {tmp_path}/tokenizer.json needs a vocabulary of " in said
    assert f"the model's is {VOCAB_SIZE // 2}" in said
    assert "needs a vocabulary of 256; the model's is 100" in refused({"source": tmp_path}, vocab_size=100)
    assert "No such file" in refused(section | {"tokenizer": tmp_path / "none.json"})
    (tmp_path / "broken.json").write_text("{}")
    assert "broken.json': not a tokenizer.json" in refused(section | {"tokenizer": tmp_path / "broken.json"})
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert "pip install 'fsdp-autotune[tokenizers]'" in refused(section)


def test_a_folder_may_be_given_as_the_tokenizer(tmp_path):
    (tmp_path / "a.txt").write_text("the rank " * 50)
    make_tokenizer(tmp_path / "tokenizer.json")
    data.make_dataset({"source": str(tmp_path), "tokenizer": str(tmp_path)}, 8, VOCAB_SIZE)


def test_token_files(tmp_path):
    ids = np.full(2_000_000, 7, np.uint16)
    ids[0] = 300
    ids.tofile(tmp_path / "a.bin")
    said = refused({"source": tmp_path})
    assert f"{tmp_path}/a.bin: token id 300; the model's vocabulary is 0 to 255" in said
    assert "data.token_dtype" in said
    (tmp_path / "a.bin").write_bytes(b"x" * 101)
    assert "101 bytes are no whole number of uint16 tokens" in refused({"source": tmp_path})
    for array, complaint in (
        (np.zeros((3, 30), np.int64), r"int64 of shape (3, 30)"),
        (np.zeros(30), "float64 of shape (30,)"),
        (np.full(30, -1), "token id -1"),
    ):
        np.save(tmp_path / "a.npy", array)
        assert complaint in refused({"source": tmp_path / "a.npy"})
    np.save(tmp_path / "a.npy", np.array([{}]), allow_pickle=True)
    assert "a.npy: not an array of numpy" in refused({"source": tmp_path / "a.npy"})


@pytest.mark.parametrize(
    ("name", "changes", "complaint"),
    [
        ("a.txt", {"text_field": "body"}, "data.text_field = 'body': has no meaning with text data"),
        (
            "a.txt",
            {"token_dtype": "uint16"},
            "data.token_dtype = 'uint16': has no meaning with text data, only with",
        ),
        ("a.bin", {"tokenizer": "byte"}, "data.tokenizer = 'byte': has no meaning with bin data"),
        ("a.npy", {"max_mib": 3}, "data.max_mib = 3: has no meaning with npy data"),
    ],
)
def test_a_key_that_means_nothing_in_the_format_that_was_found(tmp_path, name, changes, complaint):
    (tmp_path / name).write_bytes(b"x" * 100)
    assert complaint in refused({"source": tmp_path / name} | changes)


def test_a_cache_folder_that_cannot_be_used(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "x" * 100}))
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert "set XDG_CACHE_HOME to a folder that can be written" in refused({"source": tmp_path / "a.jsonl"})
