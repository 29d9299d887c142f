"""What all HTTP routes share: reading bodies, writing answers and streams of events, the OpenAPI document."""
