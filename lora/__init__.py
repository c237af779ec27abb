"""Low-rank adapters: injected, merged, and exchanged in the format of PEFT."""
