"""`python -P -m trials.count ORDER`: counts a model on `meta` in a process of its own, and prints what was found.

ORDER is JSON: workload, arguments (seq_len among them), precision, import_paths. The last line printed is JSON too:
what `survey_model` gives, or {"error": why not}.
"""

from __future__ import annotations

import json
import sys

from trials.outcome import TrialError
from trials.survey import survey_model
from trials.workload import load_workload


def main() -> None:
    order = json.loads(sys.argv[1])
    arguments = order["arguments"]
    try:
        workload = load_workload(order["workload"], arguments, order["import_paths"])
        found = survey_model(workload, arguments["seq_len"], order["precision"])
    except TrialError as error:
        found = {"error": str(error)}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
