"""The command line names the exporters without importing them before they are asked for."""

from __future__ import annotations

import subprocess
import sys

from click.testing import CliRunner

from autotune.cli import cli
from autotune.export import EXPORTERS


def test_help_of_export_names_every_exporter() -> None:
    text = CliRunner().invoke(cli, ["export", "--help"]).output
    assert "--to" in text
    for name in EXPORTERS:
        assert name in text


def test_the_first_help_imports_no_exporter() -> None:
    code = "import sys; from autotune.cli import cli; cli(['--help'], standalone_mode=False); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "autotune.export" not in done.stdout.split()
