"""The gate through which phrases of many tenants become public.

May import: store and formats.
"""
