"""Rollouts without devices: the real loop, whose chunks a cost model runs.

What decides in a rollout is host arithmetic: the schedule, the selector, how much idle
slices train. Here the very same objects decide; only what would run on devices is
replaced (`rollout`). How many tokens a pass gives comes from `acceptance`, how long it
takes from `costs`, and the clock that all decisions look at is advanced by that.
"""
