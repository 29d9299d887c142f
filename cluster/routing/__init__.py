"""Which router gets a request: the one that is expected to answer it soonest, by its load and by what of the prompt its
target has in its prefix cache.

Routers announce both several times a second; gateways listen, and ask nobody when a request comes.
"""
