"""Low-rank adapters: injected, merged, and exchanged in the format of PEFT."""

import model  # noqa: F401  (before PyTorch: how its threads wait)
