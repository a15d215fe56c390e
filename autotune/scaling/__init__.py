"""How configs scale with the number of ranks: `autotune scale RUN|JOB`.

* `subject` says which configs are measured, and on what;
* `measuring` runs them on each number of ranks, in interleaved repeats;
* `points` reads the efficiencies out of the rows of the history, and nothing else;
* `predicted` goes on to the real run's number of ranks by the step-time model.
"""
