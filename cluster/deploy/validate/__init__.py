"""Finds mistakes in cluster configurations, Kustomize overlays and manifests before an API server or an operator does.

`check.validate` runs every layer over paths; `rules.RULES` is the table of all that is looked for.
"""
