"""The Python of the ranks: ours, or the user's own, where fsdp-autotune need not be installed."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from autotune.errors import UserError
from autotune.job import Cluster
from trials.command_env import PACKAGE

MODULE_COMMAND = (sys.executable, "-P", "-m")  # -P: never import from the folder the user stands in
_BOOT = (
    "import runpy, sys; sys.path[:] = [path for path in sys.path if path]; sys.argv = sys.argv[1:]; "
    "runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"
)
"""What -P -m does, for interpreters before 3.11."""


@dataclass(frozen=True)
class Interpreter:
    """How a module of ours is started on a node."""

    python: str | None = None
    """None: the one that runs this."""
    prefix: tuple[str, ...] = ()
    """Before each command: a container's."""

    @property
    def is_foreign(self) -> bool:
        return self.python is not None or bool(self.prefix)

    def module(self, name: str) -> list[str]:
        """The command that runs a module; its arguments follow."""
        if not self.is_foreign:
            return [*MODULE_COMMAND, name]
        return [*self.prefix, self.python or "python", "-c", _BOOT, name]

    def environment(self, node: Path) -> dict[str, str]:
        """What a module needs in another interpreter: our package as a zip, in a folder of the node."""
        if not self.is_foreign:
            return {}
        return {"PYTHONPATH": os.pathsep.join(filter(None, [str(node / PACKAGE), os.environ.get("PYTHONPATH")]))}


OURS = Interpreter()


def interpreter_of(cluster: Cluster) -> Interpreter:
    return Interpreter(cluster.python, cluster.command_prefix)


def check_interpreter(cluster: Cluster) -> None:
    """Refuses one that this machine has not; only a job on this machine can be told before its start.

    Raises:
        UserError: no such program.
    """
    if cluster.address != "local":
        return
    program = cluster.command_prefix[0] if cluster.command_prefix else cluster.python
    if program is not None and shutil.which(program) is None:
        key = "command_prefix" if cluster.command_prefix else "python"
        raise UserError(
            f"cluster.{key} = {program}: no such program here",
            "give the interpreter of the environment that trains, e.g. /opt/venv/bin/python",
        )
