"""Evaluations of the systems beside PaliGemma."""
