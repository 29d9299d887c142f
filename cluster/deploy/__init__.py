"""Writes Kubernetes manifests from typed values.

May import: the configuration alone.
"""
