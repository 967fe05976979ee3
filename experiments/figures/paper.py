"""Numbers of the TLT paper (arXiv 2511.16665).

Only those that this project has on record; the paper has more.
"""

# Whole RL steps, TLT over plain decoding; H100.
END_TO_END = {"least": 1.7, "most": 2.1, "geometric mean, H100": 1.76}
ROLLOUT_SHARE = 0.85  # of a step's time, at most
# Qwen 32B on four GPUs: tokens per pass by (drafting depth, nodes verified).
TOKENS_PER_PASS = {(4, 16): 4.63, (8, 48): 7.24, (12, 64): 8.76}
# Speed-up with 16 nodes verified, by live requests.
SPEEDUP_OF_16_NODES = {1: 3.22, 32: 2.48}
# Tokens per pass with a frozen drafter, and with one that trains.
FOLLOWING = {"frozen": 4.59, "adapted": 6.53}
# Memory of captured graphs, GB.
GRAPHS_GB = {"one strategy": 7.81, "naive, several": 30.39, "buckets": 10.69}
# Time of a checkpoint of the drafter, ms.
CHECKPOINT_MS = {"synchronous": 893, "asynchronous": 280, "selective": 97}
PACKING = 2.2  # packed rows over padded ones, throughput of training
CASE_128 = 2.44  # speed-up of the rollout of 128 requests, speculating from 32 live on
