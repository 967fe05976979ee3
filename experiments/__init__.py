"""Commands, configs and figures; docs/commands.md has a list of them."""
