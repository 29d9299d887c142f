"""The Ray shells: target groups, draft pools, the directory they register in, and autoscaling.

May import: everything of actors, and Ray, which no other package here may import.
"""
