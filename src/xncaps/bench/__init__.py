"""Stopwatches: each compares named things in one interleaved run."""
