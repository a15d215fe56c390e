"""`autotune doctor`: looks at a machine, or at the nodes of a cluster, before a run is started on them."""
