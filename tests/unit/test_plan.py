"""`autotune plan`: what it says of shipped jobs and of a user's own model, and what it refuses."""

from __future__ import annotations

import io
import json
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from autotune.cli import cli
from autotune.errors import UserError
from autotune.job_file import load_job
from autotune.plan import NUM_TOP, make_plan
from autotune.report.plan import plan_content, print_plan
from tests.unit.conftest import make_job

MY_MODEL = """
    import torch.nn.functional as F
    from torch import nn

    from trials.workload import AttentionShape, default_init_parameter

    print("my own code runs")


    class Layer(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            wide = 4 * width
            self.ffn = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, wide), nn.GELU(), nn.Linear(wide, width))

        def forward(self, x):
            q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
            x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
            return x + self.ffn(x)


    class Model(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.embedding, self.head = nn.Embedding(600, width), nn.Linear(width, 600, bias=False)
            self.layers = nn.ModuleList(Layer(width) for _ in range(3))

        def forward(self, tokens):
            x = self.embedding(tokens)
            for layer in self.layers:
                x = layer(x)
            return self.head(x)


    class Workload:
        vocab_size = 600

        def __init__(self, width):
            self.width = width

        def build_model(self):
            return Model(self.width)

        def blocks(self, model):
            return list(model.layers)

        def attention_shapes(self):
            return SHAPES

        def loss(self, model, tokens):
            return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())

        def init_parameter(self, name, shape, generator):
            return default_init_parameter(name, shape, generator)

        def init_buffers(self, model):
            pass


    def make(seq_len, width):
        return Workload(width)
"""


@pytest.fixture(scope="module")
def llama() -> Any:
    return make_plan(load_job("llama3-8b"), worlds=(512,))


def test_the_shipped_job_is_planned(llama: Any) -> None:
    content = json.loads(json.dumps(plan_content(llama)))
    assert content["model"]["num_params"] == 8_030_261_248
    assert content["limit_gib"] == pytest.approx(79.2, abs=0.1)
    assert list(content["zones"]) == ["8", "64", "512"]
    assert content["num_configs"] == content["num_predicted"] == sum(content["zones"]["8"].values())
    assert len(content["top"]) == NUM_TOP
    for one in [content["baseline"], *content["top"]]:
        at = one["predicted"]["8"]
        assert sum(at["memory_terms_gib"].values()) == pytest.approx(at["allocated_gib"])
        assert 0.1 < at["mfu"] < 1
        assert at["allocated_gib"] > one["predicted"]["64"]["allocated_gib"] > one["predicted"]["512"]["allocated_gib"]
    steps = [one["predicted"]["8"]["step_s"] for one in content["top"] if one["predicted"]["8"]["zone"] == "safe"]
    assert steps == sorted(steps)
    cost = content["cost"]
    assert cost["fewest_trials"] < cost["most_trials"] == 52, "patience may end the search"
    turns = {name: (2 * one["fewest"] + one["most"]) / 3 * one["trial_s"] for name, one in cost["stages"].items()}
    assert list(turns) == ["baseline", "explore", "finalist", "round", "endurance"]
    assert 3600 * cost["hours"] == pytest.approx(sum(turns.values()))
    assert cost["device_hours"] == pytest.approx(8 * cost["hours"])


def test_what_fails_has_no_chance_and_what_fits_only_there_is_said_so(llama: Any) -> None:
    failing = {(micro, mode) for micro, mode, _ in llama.surely_failing()}
    assert (8, "none") in failing
    assert (1, "full") not in failing
    for one in llama.configs:
        if (one.knobs.micro_batch_size, one.knobs.activation_checkpointing) in failing:
            assert llama.zone(one, 8) == "sure_oom"
    only = llama.only_at_target()
    assert only
    assert all(llama.zone(one, 8) == "sure_oom" != llama.zone(one, 64) for one in only)


def test_what_fits_only_on_more_ranks_is_listed() -> None:
    job = make_job(
        model={"preset": "llama3-8b", "seq_len": 1024},
        batch={"global_batch_size": 1024, "target_world_size": 512},
        cluster={"ranks_per_node": 2, "device": "cuda", "device_name": "NVIDIA A100-SXM4-80GB"},
    )
    plan = make_plan(job)
    assert plan.zones(2)["safe"] == 0
    assert plan.only_at_target()
    out = io.StringIO()
    print_plan(Console(file=out, width=200), plan)
    fit = sum(plan.zone(one, 512) == "safe" for one in plan.only_at_target())
    assert f"only on 512 ranks {fit:,} configs fit, and" in out.getvalue()
    assert "network: 25 GB/s a GPU between nodes are assumed" in out.getvalue()


def test_it_is_printed_with_its_breakdown_and_cost(llama: Any) -> None:
    out = io.StringIO()
    print_plan(Console(file=out, width=200), llama)
    for part in ("8.03 billion", "nothing was built", "optimizer states", "surely fails", "GPU-hours", "512 ranks"):
        assert part in out.getvalue()
    assert "micro-batch 8 with any checkpointing" in out.getvalue()
    assert "explore: 16 to 32 x " in out.getvalue()


def test_without_a_peak_the_time_of_a_step_stands_in_for_mfu() -> None:
    out = io.StringIO()
    plan = make_plan(load_job("quickstart"))
    print_plan(Console(file=out, width=200), plan)
    assert plan.baseline is not None
    for part in ("3.08 million", "Predicted step time", f"{plan.baseline.at[2].step_s:.3g} s, ", "rank-hours"):
        assert part in out.getvalue()
    assert "timed out" not in out.getvalue()


def test_of_loaders_alike_the_one_with_fewest_workers_is_shown(llama: Any) -> None:
    for one in llama.top():
        alike = [
            other
            for other in llama.configs
            if replace(other.knobs, num_workers=one.knobs.num_workers, prefetch_factor=one.knobs.prefetch_factor)
            == one.knobs
        ]
        step_s = one.at[8].step_s
        assert step_s <= min(other.at[8].step_s for other in alike) * 1.006
        assert all(other.at[8].step_s > step_s for other in alike if other.knobs.num_workers < one.knobs.num_workers)


def own_job(tmp_path: Path, shapes: str) -> Any:
    (tmp_path / "my_model.py").write_text(textwrap.dedent(MY_MODEL).replace("SHAPES", shapes))
    return make_job(
        model={"workload": "my_model:make", "config": {"width": 64}, "seq_len": 64, "import_path": str(tmp_path)},
    )


def test_a_users_own_model_is_built_elsewhere_and_that_is_said(tmp_path: Path, capsys: Any) -> None:
    plan = make_plan(own_job(tmp_path, "[AttentionShape(4, self.width // 4)] * 3"))
    assert "the code of my_model:make ran here" in plan.counted
    assert plan.shape is not None
    assert plan.shape.hidden_size == 64
    assert plan.baseline is not None
    assert "my own code" not in capsys.readouterr().out


def test_without_a_known_shape_nothing_is_predicted(tmp_path: Path) -> None:
    plan = make_plan(own_job(tmp_path, "None"))
    assert plan.shape is None
    assert plan.baseline is None
    assert plan.estimate() is None
    out = io.StringIO()
    print_plan(Console(file=out, width=200), plan)
    assert "nothing is predicted" in out.getvalue()
    assert plan_content(plan)["top"] == []


def test_a_model_that_does_not_build_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="NameError"):
        make_plan(own_job(tmp_path, "UNHEARD_OF"))


def test_a_model_whose_code_ends_the_process_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="building it on `meta` failed"):
        make_plan(own_job(tmp_path, "__import__('os')._exit(3)"))


def test_a_model_whose_code_does_not_end_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autotune.plan.COUNT_TIMEOUT_S", 0.05)
    with pytest.raises(UserError, match="not built on `meta` after"):
        make_plan(own_job(tmp_path, "None"))


def test_a_gpu_that_is_not_named_has_no_limit_and_no_mfu() -> None:
    plan = make_plan(make_job(cluster={"ranks_per_node": 2, "device": "cuda"}))
    assert plan.limit_gib is None
    assert plan.peak.tflops_per_s is None
    assert "--device" in plan.peak.source
    assert plan_content(plan)["top"][0]["predicted"][2]["mfu"] is None


def test_what_is_refused() -> None:
    job = load_job("llama3-8b")
    with pytest.raises(UserError, match="not in the table"):
        make_plan(job, device_name="NVIDIA H1000")
    sharded_twice = load_job("llama3-8b", ("space.replicate_degree=[1, 2]",))
    with pytest.raises(UserError, match="--world 7: does not divide into the 2 parts"):
        make_plan(sharded_twice, worlds=(7,))


def test_the_command_prints_json_alone_and_refuses_other_worlds() -> None:
    done = CliRunner().invoke(cli, ["plan", "quickstart", "--world", "4", "--json"])
    assert done.exit_code == 0
    assert list(json.loads(done.stdout)["zones"]) == ["2", "4"]
    wrong = CliRunner().invoke(cli, ["plan", "quickstart", "--world", "4,x"])
    assert wrong.exit_code == 2
    assert "numbers of ranks with commas" in wrong.output
