"""The `data` section of a job: its keys, its paths, and that synthetic data is told wherever figures are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from autotune.best import to_exportable
from autotune.errors import UserError
from autotune.export import EXPORTERS, export
from autotune.job_file import load_job
from autotune.report.tables import print_best
from tests.unit.conftest import QUICK, make_job, make_space
from tests.unit.test_hostile import best

NOT_MEASURED = "data loader was not measured (data: synthetic)"


def test_synthetic_has_a_short_form_and_comes_back_from_yaml(tmp_path: Path) -> None:
    job = make_job(data="synthetic")
    assert job.data.is_synthetic
    path = tmp_path / "job.yaml"
    path.write_text(job.to_yaml())
    assert load_job(str(path)) == job
    assert load_job("quickstart", ("data=synthetic",)).data == job.data


@pytest.mark.parametrize(
    ("section", "complaint"),
    [
        ("texts", "data = 'texts'"),
        ({}, "data.source: missing"),
        ({"source": "a", "format": "csv"}, "data.format = 'csv'"),
        ({"source": "a", "tokeniser": "byte"}, "did you mean tokenizer"),
        ({"source": "a", "max_mib": 0}, "hint: MiB of text that are used"),
        ({"source": "a", "token_dtype": "int64"}, "hint: Of a .bin file's token ids: uint16 (2 bytes"),
        ({"source": "a", "format": "text", "text_field": "body"}, "text_field = 'body': has no meaning with text data"),
        ({"source": "a", "format": "bin", "tokenizer": "byte"}, "tokenizer = 'byte': has no meaning with bin data"),
        ({"source": "a", "format": "npy", "token_dtype": "uint16"}, "only with bin: remove it"),
        ({"source": "synthetic", "tokenizer": "byte"}, "has no meaning with synthetic data"),
        ({"source": "synthetic", "format": "text"}, "format = text: synthetic data has none"),
        ({"source": "python-stdlib", "format": "jsonl"}, "format = jsonl: python-stdlib is text"),
        ({"source": "python-stdlib", "text_field": "x"}, "text_field = 'x': has no meaning with text data"),
    ],
)
def test_a_bad_section_is_named(section: Any, complaint: str) -> None:
    with pytest.raises(UserError) as caught:
        make_job(data=section)
    assert complaint in str(caught.value)


def test_paths_are_relative_to_the_job_file(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    section = {"source": "docs", "format": "jsonl", "tokenizer": "tok/tokenizer.json"}
    path.write_text(yaml.safe_dump(QUICK | {"data": section}))
    data = load_job(str(path)).data
    assert (data.source, data.tokenizer) == (str(tmp_path / "docs"), str(tmp_path / "tok/tokenizer.json"))
    path.write_text(yaml.safe_dump(QUICK | {"data": {"source": "./synthetic", "tokenizer": "byte"}}))
    data = load_job(str(path)).data
    assert (data.source, data.tokenizer, data.is_synthetic) == (str(tmp_path / "synthetic"), "byte", False)


def test_synthetic_data_has_no_loader_to_search_and_the_space_says_so() -> None:
    space = make_space(data="synthetic", baseline={"num_workers": 3})
    assert {knobs.num_workers for knobs in space.configs()} == {0}
    assert {knobs.prefetch_factor for knobs in space.configs()} == {None}
    (note,) = [note for note in space.notes if "synthetic" in note]
    for name in ("baseline.num_workers", "space.num_workers", "space.prefetch_factor"):
        assert name in note
    assert not make_space(data="synthetic", space={"num_workers": [0]}).notes
    assert not [note for note in make_space().notes if "synthetic" in note]


@pytest.mark.parametrize("synthetic", [True, False])
def test_what_is_shown_and_exported_says_that_the_loader_was_not_measured(synthetic: bool) -> None:
    content = best(data={"source": "x", "loader_measured": not synthetic})
    content["conventions"] |= {"peak_tflops_per_s": None}
    console = Console(width=200, record=True, quiet=False)
    print_best(console, content)
    texts = [console.export_text()]
    texts += ["".join(export(target, to_exportable(content)).files.values()) for target in EXPORTERS]
    assert [NOT_MEASURED in text for text in texts] == [synthetic] * len(texts)
