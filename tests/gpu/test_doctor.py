"""`autotune doctor` on a machine with a GPU, through Ray and NCCL."""

from __future__ import annotations

import json
import subprocess
import sys

import torch


def test_this_machine_is_looked_at_with_all_its_gpus(tmp_path):
    command = [sys.executable, "-c", "from autotune.cli import main; main()", "doctor", "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
    print(done.stdout, done.stderr)
    told = json.loads(done.stdout)
    problems = {finding["name"] for finding in told["findings"] if finding["status"] == "problem"}
    assert problems <= {"versions"}, "this torch may be another than the product asks for"
    assert told["device"] == "cuda"
    gpus = told["nodes"][0]["torch"]["gpus"]
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    assert [gpu["name"] for gpu in gpus] == names
    assert len(told["ranks"]) == len(gpus)
    for rank in told["ranks"]:
        assert rank["matmul"]["best_tflops_per_s"] > rank["matmul"]["worst_tflops_per_s"] > 0
        assert rank["bandwidth"]["copy_gb_per_s"] > 50, "no device of the table is slower"
    peak = told["peak"]["tflops_per_s"]
    if peak is not None:
        assert all(0.3 < rank["matmul"]["best_tflops_per_s"] / peak < 1.1 for rank in told["ranks"])
