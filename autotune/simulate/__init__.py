"""A modelled cluster behind the runner's interface: whole studies of any size, in seconds, to try out and to test.

Nothing that comes from here was measured: history, best.yaml, screen and exports say so.

It is meant to be searched, not believed: throughput and memory come from mechanisms, disturbed by effects drawn from
a seed that no prediction can know. It shares no formula with the preflight, else the preflight would look better here
than it is. The mechanisms, and where they come from:

* matmuls run in tiles of 128 x 256 on the multiprocessors, in whole waves, at the share of the peak that large ones
  reach, or at the memory's bandwidth (NVIDIA, "Matrix Multiplication Background User's Guide"; achieved shares from
  mamf-finder in Stas Bekman's "Machine Learning Engineering" book): `kernels`
* flash attention runs at the shares of the peak that FlashAttention-2 and -3 publish (arXiv 2307.08691, 2407.08608);
  the rest of a block moves bytes, fewer when compiled; each kernel takes the CPU a few microseconds to launch, and
  what is launched too slowly leaves gaps: `kernels`
* collectives are rings: volume over what enters a GPU and a node, small chunks use less of a link, each hop takes time
  (NCCL tests' busbw, NVIDIA/nccl-tests PERFORMANCE.md): `network`
* one CPU thread issues, one stream computes, and one communicator works off gathers and reductions in the order in
  which FSDP issues them; gathers wait for free buffers, reductions block the next one's copy-in, compute that shares
  the GPU with a collective is stretched (torch/distributed/fsdp/_fully_shard; 12 % by Galvatron's constant): `timeline`
* memory is followed through a step's events on three pools, one a stream, as the caching allocator keeps them:
  allocated is the most that lives at once, reserved the sum of what the pools grew to, plus fragments: `memory`
* a trial takes the seconds that real ranks would: the same warm-up, draining, composed steps, stopping rule (the ranks'
  own code), time limit and profile; first steps, compiling and storage take assumed times: `trial`
* on top: level and pairwise effects of the knobs drawn from the seed (`hidden`), slow nodes, the slowest of many ranks,
  noise between runs (llm-foundry's published repeats differ by 1.6 %), slow drift, retries of a full allocator
"""
