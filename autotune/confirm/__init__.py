"""`autotune confirm`: the first step of the real run. Measures what was tuned on all of its ranks, then starts it.

* `tuned` reads a finished run and makes the job of the real number of ranks;
* `rounds` measures its configs in turn, and `decide` says which of them holds;
* `measuring` is the process that does so. Whatever becomes of it, `command` then hands a config over and starts the
  real run by `handover`: no failure of ours may lose that.
"""
