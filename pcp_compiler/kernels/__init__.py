"""Triton kernels, each with a torch reference; they run on the CPU under the Triton interpreter too."""
