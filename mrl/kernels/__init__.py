"""Triton kernels for CUDA tensors, each behind one torch operator; on other tensors torch's own operators run."""
