"""The page at / and the description of the API at /docs, and the routes that serve them."""
