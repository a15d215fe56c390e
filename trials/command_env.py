"""The environment that a user's command starts in: nothing of another launcher, no trackers, caches of the node."""

from __future__ import annotations

import shutil
import zipfile
from pathlib import Path

LAUNCHERS_OWN = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "NODE_RANK",
)
LAUNCHERS_PREFIXES = ("MASTER_", "SLURM_", "PMI_", "PMIX_", "OMPI_", "ROLE_", "TORCHELASTIC_", "RAY_", "PET_")
"""Under srun's variables, Lightning takes each rank for a world of one."""
TRACKERS_OFF = {
    "WANDB_MODE": "disabled",
    "COMET_MODE": "disabled",
    "CLEARML_OFFLINE_MODE": "1",
    "NEPTUNE_MODE": "offline",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
}
"""A trial is no run that anybody wants to find among theirs; and one that downloads measures the network."""


def clean_environment(inherited: dict[str, str], node: Path, run_id: str, is_rank: bool) -> dict[str, str]:
    """Of a command that is started once a rank, or once a node.

    Args:
        inherited: with RANK and the like as this trial has them.
        node: a folder whose compiler caches all trials of the node share.
        is_rank: the command is a rank; else it starts its own, and must not take itself for one.
    """
    kept = {name: value for name, value in inherited.items() if not _is_launchers(name)}
    caches = {"TRITON_CACHE_DIR": str(node / "triton"), "TORCHINDUCTOR_CACHE_DIR": str(node / "inductor")}
    found = kept | TRACKERS_OFF | caches
    if not is_rank:
        return found
    own = {name: inherited[name] for name in (*LAUNCHERS_OWN, "MASTER_ADDR", "MASTER_PORT") if name in inherited}
    # As torchrun sets it: by this alone trainers know that ranks are there already.
    elastic = {"TORCHELASTIC_RUN_ID": run_id, "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0"}
    return found | own | {"NODE_RANK": inherited["GROUP_RANK"]} | elastic


def _is_launchers(name: str) -> bool:
    return name in LAUNCHERS_OWN or name.startswith(LAUNCHERS_PREFIXES)


PROBE, PACKAGE = "probe.py", "trials.zip"


def prepare_node(node: Path) -> None:
    """Puts into a folder what another interpreter can have of us: the probe alone, and this package as a zip.

    Never our site-packages: their torch is not its torch.
    """
    root = Path(__file__).parent
    shutil.copyfile(root / PROBE, node / PROBE)
    with zipfile.ZipFile(node / PACKAGE, "w", zipfile.ZIP_DEFLATED) as archive:
        for source in sorted(root.rglob("*.py")):
            archive.write(source, f"{root.name}/{source.relative_to(root)}")
