"""The page: complete, valid, self-contained, and safe whatever words the run has. What it does is in tests/browser."""

from __future__ import annotations

import base64
import json
import math
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from plotly.graph_objects import Figure

from autotune.errors import UserError
from autotune.loaded import LoadedRun, load
from autotune.report.facts import Summary, summarise
from autotune.report.page import make_page
from autotune.report.page.figures import make_figures
from tests.unit.test_report import copy, rewrite, run, summary, waterfall_run, with_trials  # noqa: F401 (fixtures)
from tests.unit.test_simulated_run import autotune
from trials.outcome import Outcome

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>{{7*7}}\x1b[31m"


class Page(HTMLParser):
    """Tags with their attributes, and the text of each script that is data."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.data: dict[str, Any] = {}
        self.words: list[str] = []
        self._data_id: str | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.tags.append((tag, values))
        self._data_id = values.get("id") if values.get("type") == "application/json" else None

    def handle_data(self, data: str) -> None:
        if self._data_id is not None:
            self.data[self._data_id] = json.loads(data)
            self._data_id = None
        elif self.tags and self.tags[-1][0] not in ("script", "style"):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join("".join(self.words).replace("\xa0", " ").split())

    def ids(self, kind: str) -> list[str | None]:
        return [attrs.get("id") for _, attrs in self.tags if kind in (attrs.get("class") or "").split()]


@pytest.fixture(scope="module")
def page(summary: Summary) -> Page:  # noqa: F811
    return Page(make_page(summary, "runs/mine"))


def test_plotly_itself_finds_nothing_wrong_with_any_figure(summary: Summary) -> None:  # noqa: F811
    figures = make_figures(summary)
    assert {
        "waterfall",
        "speed-and-memory",
        "best-over-trials",
        "step-parts",
        "rank-times",
        "drift",
        "scaling",
        "slice-0",
    } <= figures.keys()
    for content in figures.values():
        Figure(content)


def test_both_ways_to_take_a_gain_apart_lead_from_the_baseline_to_the_best(summary: Summary) -> None:  # noqa: F811
    figures = make_figures(summary)
    for name in ("waterfall", "alone"):
        (bars,) = figures[name]["data"]
        assert bars["measure"][0] == "absolute"
        assert bars["measure"][-1] == "total"
        assert set(bars["measure"][1:-1]) == {"relative"}
        assert sum(bars["x"][:-1]) == pytest.approx(bars["x"][-1])
    assert "interactions" in figures["alone"]["data"][0]["y"]


def test_each_figure_has_its_place_and_each_place_its_figure(page: Page) -> None:
    assert sorted(filter(None, page.ids("figure"))) == sorted(page.data["figures-data"])


def test_it_needs_nothing_from_outside(page: Page) -> None:
    for tag, attrs in page.tags:
        assert tag not in ("link", "iframe", "img", "base")
        assert not {"src", "href", "action"} & attrs.keys(), (tag, attrs)
    policy = next(attrs["content"] for tag, attrs in page.tags if attrs.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert policy.startswith("default-src 'none'")


def test_the_verdict_comes_first_and_figures_have_units(page: Page, summary: Summary) -> None:  # noqa: F811
    gain = summary.headline.gain
    assert gain is not None
    assert f"{100 * (gain.ratio - 1):+.1f} % tokens/s" in page.text
    assert page.text.index("The best config beats the baseline") < page.text.index("Settings")
    environment = summary.environment
    assert f"{environment.global_batch_size:,} sequences = {environment.global_batch_tokens:,} tokens" in page.text
    assert "SIMULATED" in page.text
    for unit in ("tokens/s per rank", "GiB", "GPU-hours"):
        assert unit in page.text


def test_a_trial_names_the_command_that_measures_it_again(page: Page) -> None:
    points = [trace for trace in page.data["figures-data"]["speed-and-memory"]["data"] if trace.get("customdata")]
    options = [options for trace in points for _, options, _ in trace["customdata"]]
    assert page.data["command"] == "autotune measure runs/mine/job.yaml"
    assert any(option.startswith("--set ") for option in options)
    assert not any("grad_accum_steps" in option for option in options)


def test_what_ran_out_of_memory_stands_where_it_was_predicted(run: LoadedRun) -> None:  # noqa: F811
    first = next(one for one in run.attempts if one.stage == "explore")
    predicted = {"predicted_gib": 90.0, "predicted_step_time_s": 2 * first.row["step_time_s"]}
    lost = replace(first, outcome=Outcome.OOM_DEVICE, row=first.row | predicted)
    unknown = replace(lost, row=first.row | {"predicted_gib": None, "predicted_step_time_s": None})
    whole = summarise(replace(run, attempts=[*run.attempts, lost, unknown]))
    traces = make_figures(whole)["speed-and-memory"]["data"]
    (out,) = (trace for trace in traces if trace["name"].startswith("ran out of memory"))
    x, y = (np.frombuffer(base64.b64decode(out[axis]["bdata"]), np.float32) for axis in ("x", "y"))
    assert x.tolist() == [90.0], "what nothing was predicted of has no place"
    assert y[0] == pytest.approx(100 * first.row["mfu"] / 2, rel=1e-4)


@pytest.mark.parametrize("state", ["whole", "no winner", "unfinished", "no peak", "one trial"])
def test_hostile_words_are_only_words(copy: Path, state: str) -> None:  # noqa: F811
    files = sorted((copy / "history").glob("*.parquet"))
    rewrite(copy, hosts=[HOSTILE] * 64, device_name=HOSTILE, torch_version=HOSTILE, reason=HOSTILE, log_path=HOSTILE)
    best = yaml.safe_load((copy / "best.yaml").read_text()) | {"verdict": HOSTILE}
    if state == "unfinished":
        best |= {"complete": False, "gain": None}
    (copy / "best.yaml").write_text(yaml.safe_dump(best))
    if state in ("no winner", "one trial"):
        (copy / "best.yaml").unlink()
    if state == "one trial":
        for path in files[1:]:
            path.unlink()
    if state == "no peak":
        rewrite(copy, mfu=None, mfu_causal=None, hfu=None)
    (copy / "history" / "torn<img src=x>.parquet").write_bytes(b"")
    text = make_page(summarise(load(copy)), f"runs/{HOSTILE}")
    page = Page(text)
    assert "\x1b" not in text
    assert not [tag for tag, _ in page.tags if tag == "img"]
    assert [attrs.get("type") for tag, attrs in page.tags if tag == "script"] == ["application/json"] * 2 + [None] * 2
    assert "49" not in page.text.partition("alert(2)>")[2][:4]
    assert ("complete: false" in page.text) == (state not in ("whole", "no peak"))
    for content in page.data["figures-data"].values():
        for trace in content["data"]:
            assert "<img" not in json.dumps(trace)
    if state == "no peak":
        assert page.data["figures-data"]["speed-and-memory"]["layout"]["yaxis"]["title"]["text"] == "tokens/s per rank"


def test_what_is_no_number_leaves_the_other_figures_whole(copy: Path) -> None:  # noqa: F811
    rewrite(copy, frac_compute=math.nan, frac_idle=math.inf, block_times_s=[math.nan], drift=math.nan)
    page = Page(make_page(summarise(load(copy)), "runs/it's mine"))
    json.dumps(page.data["figures-data"], allow_nan=False)
    assert "autotune scale 'runs/it'\"'\"'s mine' --ranks" in page.text


def test_a_page_of_five_thousand_trials_has_them_all_and_can_be_sent(run: LoadedRun) -> None:  # noqa: F811
    whole = summarise(with_trials(run, 5000))
    text = make_page(whole, "runs/mine")
    page = Page(text)
    shown = sum(len(trace.get("customdata", ())) for trace in page.data["figures-data"]["speed-and-memory"]["data"])
    told = [one for one in whole.trials if one.world_size == whole.environment.world_size]
    ran = sum(one.memory_gib is not None for one in told)
    out = sum(one.outcome in ("oom_device", "predicted_oom") and bool(one.predicted_mfu) for one in told)
    assert shown == ran + out
    assert len(text) < 12e6


def test_the_command_writes_the_page_and_the_summary_beside_it(copy: Path, tmp_path: Path) -> None:  # noqa: F811
    told = autotune("report", str(copy))
    written = copy / "export" / "report"
    assert f"wrote {written / 'report.html'}" in told
    assert (written / "report.html").read_text().startswith("<!DOCTYPE html>")
    assert json.loads((written / "summary.json").read_text())["run"] == "run"
    autotune(
        "report", str(copy), "-o", str(tmp_path / "mine.html"), "--tokens", "1T", "--gpus", "512", "--price", "2.5"
    )
    content = json.loads((tmp_path / "summary.json").read_text())
    assert content["cost"]["assumptions"]["num_gpus"] == 512
    assert "GPU-hours" in Page((tmp_path / "mine.html").read_text()).text
    autotune("run", str(copy / "job.yaml"), "--resume", "--simulate", content["headline"]["simulated_cluster"])


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["/nowhere"], "no run there that has measured anything"),
        (["RUN", "--price", "2"], "--price without --tokens"),
        (["RUN", "--gpus", "2"], "--gpus without --tokens"),
        (["RUN", "--tokens", "1T", "--price", "0"], "--price 0: must be more than 0"),
        (["RUN", "--tokens", "1T", "--price", "-2"], "--price -2"),
        (["RUN", "-o", "/proc/report.html"], "/proc/report.html"),
    ],
)
def test_bad_input_says_what_was_wrong_and_what_to_do(simulated_run: Path, options: list[str], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint) as caught:
        autotune("report", *(str(simulated_run) if option == "RUN" else option for option in options))
    assert caught.value.hint
