"""fisherhash: tiny binary codes for images, and exact search by Hamming distance."""

__version__ = "0.1.0.dev0"
