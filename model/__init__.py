"""The networks: two towers, what joins them, and their siblings. Imports nothing of the other floors."""

import os

# PyTorch's threads (libgomp) wait for each other in a busy loop by default. Where another program shares the cores, a
# waiting thread then keeps a working one from its core, and a step takes many times as long. After this many rounds of
# the loop a thread sleeps; on a quiet machine that costs about 6 %. It is read when PyTorch is first imported, and
# OMP_WAIT_POLICY or a value of one's own wins.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
