"""Records to train on and to ask: files of examples, published benchmarks, and drawn scenes."""
