"""Kernels for models on CPU: linear layers for few rows, the choice between them by measuring, and RMS norms."""
