"""Writes Kubernetes manifests from typed values.

May import: the configuration, actors (engine options), and names of gateway functions.
"""
