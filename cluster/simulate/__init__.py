"""A cluster in simulated time: the router cores, drafters, routing, admission and autoscaling that production runs,
over modelled forwards, networks and failures. docs/scale.md says what is modelled and how it was calibrated.

It lives in the product because `paceline simulate` is a command of it; studies are in tests/bench/simulate.
"""
