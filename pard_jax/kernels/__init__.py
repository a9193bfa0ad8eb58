"""Kernels of our own, for the passes of decoding on NVIDIA GPUs: few rows, every weight read once."""
