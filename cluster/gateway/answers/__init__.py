"""One answer to a call, without wire format: text and scores out of the router's tokens, streams, totals."""
