"""Rollouts without devices: the real loop, with chunks run by a cost model.

A rollout's decisions are host arithmetic: the schedule, the selector, how much idle slices
train. The simulation uses the same objects and replaces only what would run on devices.
"""
