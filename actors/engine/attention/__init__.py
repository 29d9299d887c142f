"""Attention of all models over the paged KV cache: one interface, and a plan class for each way to compute it."""
