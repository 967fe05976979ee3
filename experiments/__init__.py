"""Commands, benchmarks, configs and figures; README.md has a list of them."""
