"""Every format gives the same sequences as a plain reference that reads all and cuts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trials import data
from trials.data import index as data_index
from trials.data.documents import cut
from trials.outcome import Outcome

from .sources import FORMATS, VOCAB_SIZE, make_tokenizer

TEXTS = st.lists(st.text(st.sampled_from("ab é中\n\0"), max_size=60), min_size=1, max_size=8)


def write(folder, kind, texts, row_group_size=2):
    """The documents, over two files, in the order of their names."""
    half = len(texts) // 2
    for name, part in (("a", texts[:half]), ("b", texts[half:])):
        if kind == "jsonl":
            lines = (json.dumps({"body": text}, ensure_ascii=name == "a") + "\n" for text in part)
            (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8", newline="")
        elif part:
            table = pa.table({"n": list(range(len(part))), "body": pa.array(part, pa.string())})
            pq.write_table(table, folder / f"{name}.parquet", row_group_size=row_group_size)
    return {"source": str(folder), "text_field": "body"}


def check(section, expected, seq_len, vocab_size=256):
    """The dataset's samples are `expected`, cut every seq_len tokens."""
    if len(expected) < seq_len + 1:
        with pytest.raises(data.DataError) as caught:
            data.make_dataset(section, seq_len, vocab_size)
        assert caught.value.outcome is Outcome.INVALID
        return
    dataset = data.make_dataset(section, seq_len, vocab_size)
    assert len(dataset) == (len(expected) - 1) // seq_len
    for number in [*range(len(dataset)), 0, len(dataset) // 2]:
        sample = dataset[number]
        assert sample.dtype == torch.int64
        assert sample.tolist() == list(expected[number * seq_len : number * seq_len + seq_len + 1])


@settings(deadline=None, max_examples=50)
@given(st.lists(st.binary(max_size=60), min_size=1, max_size=5), st.integers(1, 16))
def test_text_files_are_their_bytes_end_to_end(tmp_path_factory, files, seq_len):
    folder = tmp_path_factory.mktemp("files")
    for number, content in enumerate(files):
        (folder / f"{number}.txt").write_bytes(content)
    check({"source": str(folder)}, b"".join(files), seq_len)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@settings(deadline=None, max_examples=30)
@given(TEXTS, st.integers(1, 16))
def test_documents_are_their_bytes_each_with_a_line_break(tmp_path_factory, kind, texts, seq_len):
    folder = tmp_path_factory.mktemp("documents")
    check(write(folder, kind, texts), b"".join(text.encode() + b"\n" for text in texts if text), seq_len)


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "text"])
@settings(deadline=None, max_examples=20)
@given(TEXTS, st.integers(1, 16), st.integers(1, 12))
def test_documents_are_their_tokens_each_with_an_end_token(tmp_path_factory, kind, texts, seq_len, repeats):
    folder = tmp_path_factory.mktemp("documents")
    tokenizer = make_tokenizer(folder / "tokenizer.json")
    texts = [text * repeats for text in texts]
    if kind == "text":
        for number, text in enumerate(texts):
            (folder / f"{number}.txt").write_text(text, encoding="utf-8", newline="")
        section = {"source": str(folder)}
    else:
        section = write(folder, kind, texts)
    expected: list[int] = []
    for text in texts:
        raw, begin = text.encode(), 0
        while begin < len(raw):
            end = cut(raw, begin, 256)
            expected += tokenizer.encode(raw[begin:end].decode(), add_special_tokens=False).ids
            begin = end
        expected += [tokenizer.token_to_id("<|endoftext|>")] if text else []
    check(section | {"tokenizer": str(folder / "tokenizer.json")}, expected, seq_len, VOCAB_SIZE)


@settings(deadline=None)
@given(st.text(st.sampled_from("ab é中\n"), max_size=80), st.integers(4, 20))
def test_a_text_is_cut_into_pieces_that_are_whole_characters(text, most):
    raw, begin, pieces = text.encode(), 0, []
    while begin < len(raw):
        end = cut(raw, begin, most)
        assert begin < end <= begin + most
        pieces.append(raw[begin:end].decode())
        begin = end
    assert "".join(pieces) == text


def test_a_large_text_file_is_read_in_chunks_into_the_same_pieces(tmp_path, monkeypatch):
    from trials.data import text

    path = tmp_path / "a.txt"
    path.write_text("naïve 中文 words, " * 3000)
    whole = path.read_bytes()
    monkeypatch.setattr(text, "_CHUNK_BYTES", 1000)
    pieces = list(text.TextDocuments((path,)).pieces(256))
    assert b"".join(piece.text for piece in pieces) == whole
    assert [piece.end for piece in pieces[:-1]] == [piece.begin for piece in pieces[1:]]
    assert [piece.is_last for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    begin = 0
    for piece in pieces:
        assert piece.end == cut(whole, begin, 256)
        begin = piece.end


@pytest.mark.parametrize(("kind", "dtype"), [("bin", "uint16"), ("bin", "uint32"), ("npy", "int32"), ("npy", "uint16")])
@settings(deadline=None, max_examples=20)
@given(st.lists(st.lists(st.integers(0, 255), min_size=1, max_size=40), min_size=1, max_size=4), st.integers(1, 16))
def test_token_files_are_end_to_end(tmp_path_factory, kind, dtype, files, seq_len):
    folder = tmp_path_factory.mktemp("tokens")
    for number, ids in enumerate(files):
        array = np.array(ids, dtype)
        array.tofile(folder / f"{number}.bin") if kind == "bin" else np.save(folder / f"{number}.npy", array)
    section = {"source": str(folder)} | ({"token_dtype": dtype} if kind == "bin" else {})
    check(section, [token for ids in files for token in ids], seq_len)


def test_the_header_of_llm_c_is_no_tokens(tmp_path):
    ids = np.arange(100, dtype=np.uint16)
    header = np.zeros(256, np.int32)
    header[:3] = 20240520, 1, len(ids)
    (tmp_path / "a.bin").write_bytes(header.tobytes() + ids.tobytes())
    check({"source": str(tmp_path / "a.bin")}, ids.tolist(), 8)
    with pytest.raises(data.DataError, match="header says uint16"):
        data.make_dataset({"source": str(tmp_path / "a.bin"), "token_dtype": "uint32"}, 8, 256)


def test_max_mib_uses_the_start_of_the_text(tmp_path):
    for number in range(3):
        (tmp_path / f"{number}.txt").write_bytes(bytes([65 + number]) * 2000)
        (tmp_path / f"{number}.jsonl").write_text(json.dumps({"text": chr(65 + number) * 2000}) + "\n")
    section = {"source": str(tmp_path), "max_mib": 3000 / 2**20}
    check(section | {"format": "text"}, b"A" * 2000 + b"B" * 1000, 32)
    check(section | {"format": "jsonl"}, b"A" * 2000 + b"\n" + b"B" * 2000 + b"\n", 32)
    assert "what comes after is not read" in data.make_dataset(section | {"format": "text"}, 32, 256).description


def test_an_index_is_made_once_and_anew_when_its_source_changes(tmp_path, monkeypatch):
    made = []
    make = data_index.make_index
    monkeypatch.setattr(data_index, "make_index", lambda *args: made.append(1) or make(*args))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / ".cache"))
    section = write(tmp_path, "jsonl", ["x" * 90, "y" * 90])
    for expected in (1, 1):
        data.make_dataset(section, 16, 256)
        assert len(made) == expected
    write(tmp_path, "jsonl", ["x" * 90, "z" * 91])
    assert data.make_dataset(section, 16, 256)[10].tolist()[0] == ord("z")
    assert len(made) == 2
    for path in (tmp_path / ".cache").rglob("*.npy"):  # a torn file is as none
        path.write_bytes(path.read_bytes()[:50])
    data.make_dataset(section, 16, 256)
    assert len(made) == 3


def test_a_file_that_changes_under_the_loader_is_told(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("x" * 500)
    dataset = data.make_dataset({"source": str(path)}, 16, 256)
    path.write_text("x" * 100)
    with pytest.raises(data.DataError, match=r"a\.txt changed while it was used"):
        dataset[20]


@pytest.mark.parametrize("kind", FORMATS)
def test_opening_again_gives_the_same(sources, kind):
    one, other = (data.make_dataset(sources[kind], 32, VOCAB_SIZE) for _ in range(2))
    assert len(one) == len(other)
    assert all(torch.equal(one[i], other[i]) for i in range(0, len(one), 7))


def test_nothing_heavy_is_imported_before_it_is_used():
    import subprocess
    import sys

    code = "import sys, trials.data; assert not {'pyarrow', 'tokenizers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
