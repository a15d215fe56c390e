"""Everything that a report says of a run, as one typed structure: the page is drawn from it, summary.json is it.

All figures come from the history, best.yaml, study.yaml and job.yaml of the run; what follows from them is computed
here, and nowhere else. Throughput, TFLOP/s and memory are per rank; memory is of the worst rank; MFU, HFU and all
shares are fractions; null is what is not known.
"""

from autotune.report.facts.summary import SUMMARY_VERSION, Summary, summarise

__all__ = ["SUMMARY_VERSION", "Summary", "summarise"]
