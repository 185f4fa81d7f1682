"""Executors: how a captured call runs again, on a CPU (`replay`) or as a CUDA graph."""
