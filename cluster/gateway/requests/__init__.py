"""What may be asked, for HTTP and gRPC: the fields of bodies, their checks, and the call that they become."""
