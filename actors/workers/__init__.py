"""The Ray shells: target groups, draft pools, the directory they register in, and autoscaling.

May import: the one room of actors that imports ray.
"""
