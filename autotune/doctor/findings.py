"""What the checks answer, what they are asked about, and the list they are on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from autotune.cluster.nodes import Node
from autotune.job import Job
from autotune.survey import Survey
from trials.facts import Bandwidth, Machine, MatmulRate, TorchFacts

EXIT_JOB, EXIT_MACHINE = 2, 3


@dataclass(frozen=True)
class Finding:
    """One line of the examination."""

    status: Literal["ok", "note", "problem"]
    name: str
    value: str
    advice: str = ""
    """What to do; every problem has one."""
    of_the_job: bool = False
    """A problem that no other machine would mend."""

    def __post_init__(self) -> None:
        assert self.advice or self.status != "problem", f"{self.name}: a problem without a way out"


@dataclass(frozen=True)
class NodeFacts:
    """A node, by its first rank."""

    machine: Machine
    torch: TorchFacts


@dataclass(frozen=True)
class RankFacts:
    """What a rank has measured; None where it did not get that far."""

    rank: int
    host: str
    matmul: MatmulRate | None
    bandwidth: Bandwidth | None
    gpu_used_gib: float | None = None
    """Before the rank used any but for its context's; None on a CPU."""


@dataclass(frozen=True)
class Examination:
    """All that is known of a job and of where it is to run."""

    job: Job
    job_name: str
    is_default: bool
    """No job was given: the shapes are those of the shipped quickstart."""
    device: str
    """`cpu` or `cuda`, of the ranks."""
    nodes: tuple[NodeFacts, ...]
    """Those that ranks ran on; where none could be started, this machine."""
    ranks: tuple[RankFacts, ...] = ()
    survey: Survey | None = None
    """Of model and data; None if they are wrong, or no rank could be started."""
    cluster: tuple[Node, ...] = ()
    """All living nodes of the Ray that the job names."""
    troubles: tuple[Finding, ...] = ()
    """What kept the ranks from being started, or from finishing."""


Check = Callable[[Examination], Finding | None]
NodeCheck = Callable[[Examination, NodeFacts], Finding | None]
CHECKS: list[Check | NodeCheck] = []
"""In the order of the screen. To add a check, write a function in `checks.py` and decorate it."""
_OF_EACH_NODE: set[object] = set()


def check(function: Check) -> Check:
    """Puts a check of the whole examination on the list; None says that it does not apply."""
    CHECKS.append(function)
    return function


def node_check(function: NodeCheck) -> NodeCheck:
    """Puts a check on the list that is asked of each node; what all answer alike is said once."""
    CHECKS.append(function)
    _OF_EACH_NODE.add(function)
    return function


def run_checks(examination: Examination) -> list[Finding]:
    """The findings of all checks, after what went wrong in the examination itself."""
    found = list(examination.troubles)
    for function in CHECKS:
        if function in _OF_EACH_NODE:
            found += _of_each_node(function, examination)  # type: ignore[arg-type]
        else:
            answer = function(examination)  # type: ignore[call-arg]
            found += [answer] if answer is not None else []
    return found


def _of_each_node(function: NodeCheck, examination: Examination) -> Iterable[Finding]:
    answers: dict[Finding, list[str]] = {}
    for node in examination.nodes:
        answer = function(examination, node)
        if answer is not None:
            answers.setdefault(answer, []).append(node.machine.host)
    if len(answers) < 2:
        return list(answers)
    return [
        Finding(f.status, f.name, f"{', '.join(dict.fromkeys(hosts))}: {f.value}", f.advice, f.of_the_job)
        for f, hosts in answers.items()
    ]


def exit_code(findings: Iterable[Finding]) -> int:
    """0: the job can run here; 2: something in the job is wrong; 3: this machine or cluster cannot run it."""
    problems = [finding for finding in findings if finding.status == "problem"]
    if any(finding.of_the_job for finding in problems):
        return EXIT_JOB
    return EXIT_MACHINE if problems else 0
