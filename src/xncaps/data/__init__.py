"""Data sets, in memory, as uint8 tensors."""

from xncaps.data.sample import load_sample

__all__ = ["load_sample"]
