"""The Ray shells: target groups, draft pools, the directory they register in, and autoscaling.

May import: everything of actors; it is the one room there that imports ray.
"""
