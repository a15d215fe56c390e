"""`autotune verify`: is the real run as fast as was promised, and if not, what changed?

* `promise` is what the run's folder says the config reaches, read by `promised`;
* `command` attaches the probe to the command and becomes it: its exit code, signals and output are its own;
* `detached` leaves a process beside it that reads what the probes write (`watched`) and says a line now and then
  (`lines`). Whatever becomes of that process, the real run does not notice.
"""
