"""What all HTTP routes share: middleware, bodies, answers, streams of events; and the routes for operation."""
