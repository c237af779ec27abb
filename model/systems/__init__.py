"""The models beside PaliGemma; `model/registry.py` has their table."""
