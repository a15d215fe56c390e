"""What each change from the baseline to the winner is worth: `autotune waterfall RUN`, `autotune run JOB --waterfall`.

* `changes` says what the changes are;
* `measuring` measures them one by one and on top of each other, in interleaved repeats;
* `steps` reads the waterfall out of the rows of the history, and nothing else.
"""
