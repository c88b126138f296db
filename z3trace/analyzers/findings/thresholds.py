"""Every threshold of the findings, with its reason."""

# Severity, by cost as a fraction of the step.
WARNING_FRACTION = 0.02
"""Repeated runs of one training differ by 1-2 %: what costs less cannot be told from noise by the user."""
CRITICAL_FRACTION = 0.10
"""What a rewrite of the training loop or a change of hardware may be worth."""
INFO_FRACTION = 0.002
"""Less is not worth a line."""

# Fragmentation.
GATHERS_PER_LAYER = 1.5
"""All-gathers of one layer in one pass, mean: one is the least, a second comes with a module left apart."""
TINY_BYTES = 64 * 1024
"""Below this a gather is all latency on every link: norms, biases, LoRA's A and B."""
TINY_SHARE = 0.5
"""Share of a pass's gathers that must be tiny for the tiny parameters themselves to be the trouble."""
REDUCES_PER_LAYER = 2.0
"""Reduce-scatters of one layer in one micro-batch, mean."""

# One gather for everything.
WHOLE_MODEL_SHARE = 0.8
"""Share of a pass's gathered bytes in one collective from which on nothing is left to overlap it with."""
ASSUMED_LAYERS = 12
"""Layers of a model whose layers the trace does not show: most transformers have 12 or more."""

# Links, GB/s of bus bandwidth at large messages.
SLOW_INTRA_NODE = 30.0
"""PCIe 4 x16 gives 25 at best; NVLink-connected devices reach 100 and more. Below: peer access is off, or PCIe."""
EXPECTED_INTRA_NODE = 120.0
"""What half of an A100's NVLink gives: a careful guess of what a working link would do."""
SLOW_INTER_NODE = 25.0
"""200 Gb/s a node, the least that DeepSpeed's maintainers found sufficient for ZeRO-3 (issue 2928)."""
EXPECTED_INTER_NODE = 50.0
"""400 Gb/s a node, which they found good."""
SLOW_PCIE = 8.0
"""For devices without NVLink: PCIe 3 x16 reaches 12."""
EXPECTED_PCIE = 20.0
PAYLOAD_ALIGNMENT = 16
"""NCCL copies 16 bytes at a time; other payloads take a slower path (pytorch issue 195450)."""
UNALIGNED_SLOWDOWN = 1.3
"""By how much unaligned transfers must be slower than aligned ones of their size to be told from scatter."""

# Peers.
STRAGGLER_SHARE = 0.25
"""Share of all waiting that a rank must cause beyond 1/n, its part if lateness went round: 75 % of two ranks'."""

STEPS_OF_A_HABIT = 3
"""Used steps from which on lateness on a CPU, which other programs share, is more than chance."""

# Copies.
COPY_BYTES_PER_NS = 800
"""Copies in or out of a collective's buffer: half of an A100's memory bandwidth, each byte read and written."""
COPIES_MORE_THAN_ONE = 1.5
"""Copy time over that of one copy for each gathered and reduced byte: more than devices differ."""

# What one device's host cannot help.
SYNCS_PER_STEP = 1
"""One wait for the device at a step's end (loss or gradient norm to the host) is every training loop's."""

HOOKS_SAVED = 0.5
"""Part of the hooks' time that units of two layers save: half the units, half the hooks."""

# Memory.
MODEL_HELD = 0.7
"""Part of the gathered parameters that may be whole at once before sharding is for show."""

# Recording.
OVERHEAD_FRACTION = 0.15
"""A profiled step that is slower than an unprofiled one by more than this misleads about host time."""
