"""What a call passes before it is handled: limits, TLS and keys in Serve's proxies, then names of hosts and origins."""
