"""Why a run comes to nothing: a space, a budget or a memory that leaves no trial worth its time."""

from __future__ import annotations

from autotune.errors import NothingFitsError, UserError
from autotune.report.text import duration, gib
from autotune.rows import GIB, Attempt, Study
from autotune.space import SearchSpace

STATE_BYTES = 16
"""Per parameter, sharded over the ranks: weights and gradients in fp32, and AdamW's two moments."""


def refuse_an_empty_space(space: SearchSpace) -> None:
    """Refuses a space of the baseline alone; one too large to be enumerated is none.

    Raises:
        UserError: nothing to tune.
    """
    if space.is_enumerable and all(knobs == space.baseline for knobs in space.configs()):
        raise UserError(
            "space: no config in it differs from the baseline, so there is nothing to tune",
            "give knobs more candidates under `space`, or leave `space` out for the default one; "
            "`autotune measure` measures one config",
        )


def budget_without_trials(used_up: str, elapsed_s: float, num_trials: int, trials_s: float) -> UserError:
    """The baseline alone took it all.

    Args:
        used_up: the part of the budget.
        elapsed_s: by survey and baseline.
        num_trials: that the budget allows.
        trials_s: what they would take.
    """
    return UserError(
        f"{used_up}: survey and baseline alone took {elapsed_s / 60:.2g} min, and nothing could be tried beside the "
        "baseline",
        f"raise it: the {num_trials} trials of budget.trials take about {duration(trials_s)} more. "
        "What was measured is kept: `autotune show`, and --resume with the new budget",
    )


def nothing_fits(study: Study, attempt: Attempt) -> NothingFitsError:
    """Not even the config that takes least, which `attempt` was of."""
    num_shards = 1 if attempt.knobs.engine == "ddp" else study.world_size
    states_gib = STATE_BYTES * study.model.num_params / num_shards / GIB
    return NothingFitsError(
        f"{_limit(study)}: even the config that takes least ran out of memory: {attempt.reason.splitlines()[0]}\n"
        f"  weights, gradients and the optimizer's states alone take about {gib(states_gib)} per rank, and gathered "
        "weights and activations come on top",
        f"{_more_memory(study)}, use more ranks, or shorten model.seq_len",
    )


def nothing_else_fits(study: Study, space: SearchSpace) -> NothingFitsError:
    """Nothing beside the baseline was worth a trial."""
    return NothingFitsError(
        f"space: of its {space.num_configs:,} configs none was tried beside the baseline: with {_limit(study)} all "
        "surely run out of memory, by prediction or since they take no less than what did",
        f"give `space` smaller micro-batches or more checkpointing, or {_more_memory(study)}: "
        "`autotune plan` shows what is predicted. The baseline's measurement is kept: `autotune show`",
    )


def _is_of_the_job(study: Study) -> bool:
    return study.limits.limit_gib == study.job.cluster.memory_limit_gib


def _limit(study: Study) -> str:
    limit_gib = study.limits.limit_gib
    return f"cluster.memory_limit_gib = {limit_gib}" if _is_of_the_job(study) else f"the device's {gib(limit_gib)}"


def _more_memory(study: Study) -> str:
    return "raise the limit" if _is_of_the_job(study) else "use devices with more memory"
