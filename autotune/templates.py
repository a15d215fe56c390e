"""`autotune init`: a shipped job to edit, with the files that go with it, and what to write in one's own script."""

from __future__ import annotations

import importlib.resources
from pathlib import Path

from autotune.errors import UserError, nearest
from autotune.job_file import shipped

FILES = {"own-trainer": ("train.py",), "slurm": ("autotune.sbatch",)}
"""Beside the job, by template."""
ADDED: dict[str, tuple[str, ...]] = {
    "own-trainer": (
        "nothing is to be added to a script whose optimizer is one of torch.optim. For another, say attach: explicit,",
        'leave "{probe}" out of the command, and write two lines in the script (after `from trials import probe`):',
        "    probe.watch(model)     # once, after the model is wrapped",
        "    probe.step()           # after each optimizer.step()",
    ),
    "lightning": (
        "nothing is to be added to the script. To attach by a callback instead, say attach: callback, leave",
        '"{probe}" out of the command, and write two lines in the script:',
        "    from trials import probe",
        "    trainer = Trainer(..., callbacks=[probe.lightning_callback()])",
    ),
    "transformers": (
        "nothing but the file of arguments is to be added to the script. To attach by a callback instead, say",
        'attach: callback, leave "{probe}" out of the command, and write two lines in the script:',
        "    from trials import probe",
        "    trainer = Trainer(..., callbacks=[probe.transformers_callback()])",
    ),
    "accelerate": (
        "the script takes two values from its command line, which `accelerate launch` has no keys for:",
        "    loader = DataLoader(dataset, batch_size=args.batch_size, ...)",
        "    accelerator = Accelerator(gradient_accumulation_steps=args.accumulation)",
    ),
    "torchtitan": (
        "nothing is to be added: torchtitan runs as it is. Two lines of the command name your model:",
        "    --module llama3",
        "    --config llama3_8b",
    ),
    "slurm": (
        "edit the two places that are yours, nodes and GPUs in autotune.sbatch and the command in the job; then",
        "    sbatch autotune.sbatch",
    ),
}
"""What to write in the script, by template."""


def write_template(name: str, output: Path) -> list[str]:
    """Writes the job, and its files beside it.

    Returns:
        Lines for the screen.

    Raises:
        UserError: no such template; a file that is there already, or cannot be written.
    """
    jobs = shipped("jobs")
    if name not in jobs:
        raise UserError(f"--template {name}: no such template", nearest(name, jobs))
    texts = {output: jobs[name]}
    texts |= {output.parent / file: trainer_file(file) for file in FILES.get(name, ())}
    for path in texts:
        if path.exists():
            raise UserError(f"{path}: exists already", "give another file by --output")
    for path, text in texts.items():
        try:
            path.write_text(text)
        except OSError as error:
            raise UserError(f"{path}: {error.strerror}", "give a file you can write by --output") from error
    lines = [f"wrote {' and '.join(map(str, texts))}", *ADDED.get(name, ())]
    if name == "own-trainer":
        return [*lines, f"next: it runs as it is\n  autotune run {output}"]
    return lines if name == "slurm" else [*lines, f"next: edit it, then\n  autotune run {output}"]


def trainer_folder() -> Path:
    """Where the files of the shipped jobs lie."""
    return Path(str(importlib.resources.files("search_spaces") / "trainers"))


def trainer_file(name: str) -> str:
    return (trainer_folder() / name).read_text()
