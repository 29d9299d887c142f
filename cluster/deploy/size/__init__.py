"""What a deployment will hold and how fast it can be, from data sheets and model shapes: `docs/sizing.md`.

Nothing here runs a model or needs a GPU.
"""
