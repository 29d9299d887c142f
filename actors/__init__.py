"""What computes: engines, drafters, sampling, links, models, and the Ray actors around them.

May import: cache_service.
"""
