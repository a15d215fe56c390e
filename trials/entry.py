"""What a rank process runs: set-up, measure, report, leave.

Started as `python -P -m trials.entry ORDER` (a fresh interpreter) or as a fork of `trials.forkserver`. ORDER is a
JSON file: {"spec": TrialSpec, "report": path, "folder": the trial's, for what else it keeps, or null}. Rank and
rendezvous are in the environment, as torchrun sets them.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any, NoReturn

from trials.files import write_whole
from trials.lifeline import die_with_parent
from trials.outcome import EXIT_FAILED, EXIT_OOM, OUT_OF_MEMORY, TrialError, classify_exception
from trials.rank import Rank
from trials.record import TrialSpec


def run_rank(order: dict[str, Any]) -> NoReturn:
    """Runs the order, writes the report, and leaves at once by os._exit.

    Peers only notice a process's death, and FSDP ranks have been seen to abort in the interpreter's own exit.
    """
    spec = TrialSpec.from_json(order["spec"])
    folder = Path(order["folder"]) if order.get("folder") else None
    rank = Rank(spec, int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"]), folder)
    code = 0
    try:
        rank.run()
    except BaseException as error:  # noqa: BLE001 (whatever it was, the report says so)
        if rank.limit is not None:
            rank.limit.lift()  # the report itself needs a little memory
        outcome = classify_exception(error, spec.device)
        report = rank.report
        report.outcome, report.error_type = outcome.value, type(error).__name__
        what = "out of memory" if outcome in OUT_OF_MEMORY else type(error).__name__
        report.reason = str(error) if isinstance(error, TrialError) else f"{what} in {report.phase}: {error}"
        report.error = traceback.format_exc()
        sys.stderr.write(report.error)
        code = EXIT_OOM if outcome in OUT_OF_MEMORY else EXIT_FAILED
    rank.enter(rank.report.phase)
    write_whole(Path(order["report"]), rank.report.to_json())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    die_with_parent()
    run_rank(json.loads(Path(sys.argv[1]).read_text()))
