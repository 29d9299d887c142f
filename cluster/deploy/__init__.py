"""Writes Kubernetes manifests from typed values.

May import: every layer below it in cluster, and actors.
"""
