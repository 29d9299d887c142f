"""The gRPC API: what Serve's proxies register and guard, the servicer, and the messages it reads and writes."""
