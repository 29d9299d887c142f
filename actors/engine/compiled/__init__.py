"""Compiled decoder layers for GPUs: fewer and larger kernels, with attention as one opaque operator."""
