"""Studies of the systems beside PaliGemma."""
