"""Which config holds on the real number of ranks: a pure function of what was measured there."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from autotune.confirm.tuned import BASELINE, BEST, FALLBACK
from autotune.report.text import count, gib
from autotune.rows import Attempt
from autotune.verdict import MIN_ROUNDS, Spread, compare, spread
from trials.outcome import NOT_OF_THE_CONFIG, Outcome
from trials.record import Knobs

A_TIE = 0.02
"""Of throughput: published repeats of one config differ by so much. Few pairs must show more."""


@dataclass(frozen=True)
class Standing:
    """What became of one config."""

    problem: str
    """Why it cannot be used here; empty if it can."""
    num_runs: int
    rates: Spread | None
    """Tokens/s per rank; None if it never ran to its end."""
    allocated_gib: float | None
    reserved_gib: float | None
    gain: str
    """Over the baseline, for people; empty for the baseline itself, and without a pair."""
    beats_baseline: bool
    num_pairs: int

    def to_dict(self) -> dict[str, Any]:
        """For best.yaml, with units."""
        rates = self.rates
        return {
            "num_runs": self.num_runs,
            "tokens_per_s_per_rank": rates.mean if rates else None,
            "tokens_per_s_per_rank_low": rates.low if rates else None,
            "tokens_per_s_per_rank_high": rates.high if rates else None,
            "allocated_gib": self.allocated_gib,
            "reserved_gib": self.reserved_gib,
            "num_paired_rounds": self.num_pairs,
            "gain": self.gain or None,
            "problem": self.problem or None,
        }


@dataclass(frozen=True)
class Decision:
    """The config to start the real run with."""

    held: str
    """Its role."""
    why: str
    settings: dict[str, Any]
    num_pairs: int
    """That speak for it; of the baseline, against the best."""
    standings: dict[str, dict[str, Any]]
    """By role: `Standing.to_dict` and the settings."""

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def decide(contenders: dict[str, Knobs], attempts: Sequence[Attempt], *, judges_memory: bool) -> Decision:
    """The first of best, fallback and baseline that holds.

    A config holds if it ran whenever it was tried, and beats the baseline: by the interval of its paired rounds, or,
    where there was time for fewer than a verdict needs, by more than a tie in each of them. Where the baseline cannot
    be used itself, what runs holds. Where nothing holds, it is the baseline.

    Args:
        contenders: by role.
        attempts: of this confirmation; half a pair whose other half is missing counts for no pair.
        judges_memory: a config whose first run leaves less memory free than the headroom cannot be used.
    """
    standings = {role: _standing(knobs, contenders, attempts, judges_memory) for role, knobs in contenders.items()}
    baseline, reasons, held = standings[BASELINE], [], BASELINE
    for role in (BEST, FALLBACK):
        standing = standings.get(role)
        if standing is None:
            continue
        holds, reason = _holds(standing, baseline)
        if reason:
            reasons.append(f"{role}: {reason}")
        if holds:
            held = role
            break
    if held == BASELINE:
        reasons.append(_of_the_baseline(baseline, has_rivals=BEST in contenders))
    decisive = standings[held if held != BASELINE else BEST if BEST in standings else BASELINE]
    return Decision(
        held=held,
        why="; ".join(reasons),
        settings=contenders[held].to_dict(),
        num_pairs=decisive.num_pairs,
        standings={role: {"settings": contenders[role].to_dict()} | one.to_dict() for role, one in standings.items()},
    )


def unmeasured(contenders: dict[str, Knobs], why: str) -> Decision:
    """The baseline, as nothing is known that speaks for another."""
    return dataclasses.replace(decide(contenders, [], judges_memory=False), why=why)


def after_failure(decision: Decision, contenders: dict[str, Knobs], why: str) -> Decision:
    """What a measuring that broke off has shown: a verdict if it got that far, else nothing."""
    if decision.held == BASELINE or decision.num_pairs >= MIN_ROUNDS:
        return decision
    return dataclasses.replace(
        decision,
        held=BASELINE,
        settings=contenders[BASELINE].to_dict(),
        why=f"the measuring broke off before a verdict: {why}",
    )


def _standing(knobs: Knobs, contenders: dict[str, Knobs], attempts: Sequence[Attempt], judges_memory: bool) -> Standing:
    runs = [attempt for attempt in attempts if attempt.knobs == knobs and attempt.outcome not in NOT_OF_THE_CONFIG]
    ok = [attempt for attempt in runs if attempt.outcome is Outcome.OK]
    gain, beats, num_pairs = "", False, 0
    if knobs != contenders[BASELINE]:
        gain, beats, num_pairs = _gain(*_pairs(knobs, contenders[BASELINE], attempts))
    return Standing(
        problem=_problem(runs, judges_memory),
        num_runs=len(ok),
        rates=spread([_rate(attempt) for attempt in ok]) if ok else None,
        allocated_gib=_most([attempt.row.get("allocated_gib") for attempt in ok]),
        reserved_gib=_most([attempt.row.get("reserved_gib") for attempt in ok]),
        gain=gain,
        beats_baseline=beats,
        num_pairs=num_pairs,
    )


def _problem(runs: Sequence[Attempt], judges_memory: bool) -> str:
    for attempt in runs:
        if attempt.outcome is not Outcome.OK:
            reason = attempt.reason.splitlines()[0] if attempt.reason else "no reason is known"
            return f"{attempt.outcome} in trial {attempt.trial}: {reason}"
    if judges_memory and runs and not runs[0].is_feasible:
        retried = "; its allocator had to begin anew" if runs[0].told.allocator_was_full else ""
        limit = gib(runs[0].row.get("limit_gib"))
        return (
            f"takes {gib(runs[0].memory_gib)} of {limit}: less is free than cluster.memory_headroom asks for{retried}"
        )
    return ""


def _pairs(knobs: Knobs, baseline: Knobs, attempts: Sequence[Attempt]) -> tuple[list[float], list[float]]:
    """Throughputs of both, of the rounds in which both ran to the end."""
    by_round: dict[int, dict[Knobs, float]] = {}
    for attempt in attempts:
        if attempt.outcome is Outcome.OK:
            by_round.setdefault(attempt.row["round"], {})[attempt.knobs] = _rate(attempt)
    whole = [found for found in by_round.values() if knobs in found and baseline in found]
    return [found[knobs] for found in whole], [found[baseline] for found in whole]


def _gain(ours: Sequence[float], theirs: Sequence[float]) -> tuple[str, bool, int]:
    """What to say of it, whether the baseline is beaten, and by how many pairs."""
    if len(ours) >= MIN_ROUNDS:
        verdict = compare(ours, theirs)
        return verdict.sentence(), verdict.is_win, len(ours)
    if not ours:
        return "", False, 0
    gains = [a / b - 1 for a, b in zip(ours, theirs, strict=True)]
    shown = " and ".join(f"{100 * gain:+.1f} %" for gain in gains)
    rounds = count(len(gains), "paired round")
    return f"{shown} tokens/s over the baseline in {rounds}, too few for an interval", min(gains) > A_TIE, len(gains)


def _holds(standing: Standing, baseline: Standing) -> tuple[bool, str]:
    if standing.problem:
        return False, standing.problem
    if baseline.problem:
        return standing.num_runs > 0, "runs, which the baseline does not" if standing.num_runs else ""
    if standing.num_pairs and not standing.beats_baseline and standing.num_pairs < MIN_ROUNDS:
        return False, f"{standing.gain}, and no more than a tie"
    return standing.beats_baseline, standing.gain


def _of_the_baseline(baseline: Standing, *, has_rivals: bool) -> str:
    if baseline.problem:
        return f"{BASELINE}: {baseline.problem}; nothing else ran either"
    if baseline.num_runs == 0:
        return "nothing was measured that speaks for another config than the baseline"
    return "the baseline is kept" if has_rivals else "tuning found nothing faster than the baseline, which runs here"


def _most(amounts: Sequence[float | None]) -> float | None:
    return max((amount for amount in amounts if amount is not None), default=None)


def _rate(attempt: Attempt) -> float:
    assert attempt.tokens_per_s_per_rank is not None
    return attempt.tokens_per_s_per_rank
