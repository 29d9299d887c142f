"""Access to Redis or Valkey: connection, embedded server, scripts, circuit breaker.

May import: formats.
"""
