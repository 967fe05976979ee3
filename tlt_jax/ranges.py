"""Ranges of numbers, as types of arguments and fields: `slots: ranges.Count`.

Whoever makes an argument declares there which values it takes. Commands read these
declarations (`experiments.declarations`) and check a config by them before anything is
loaded. Upper limits are where a value can only be a slip: counts and lengths must fit the
i32 arrays that they end up in, many times over.
"""

from typing import Annotated

from annotated_types import Interval

Count = Annotated[int, Interval(ge=1, le=2**20)]  # at least one of something
CountOrZero = Annotated[int, Interval(ge=0, le=2**20)]
Tokens = Annotated[int, Interval(ge=1, le=2**24)]  # of a sequence, or a part of one
TokensOrZero = Annotated[int, Interval(ge=0, le=2**24)]
Large = Annotated[int, Interval(ge=1, le=2**40)]  # bytes, records, tokens in all
Steps = Annotated[int, Interval(ge=1, le=10**9)]  # also of an optimizer: its updates
StepsOrZero = Annotated[int, Interval(ge=0, le=10**9)]
# Evaluations draw with the seed + 2^31, which has to fit 32 bits.
Seed = Annotated[int, Interval(ge=0, lt=2**31)]

Share = Annotated[float, Interval(ge=0, le=1)]
ShareAboveZero = Annotated[float, Interval(gt=0, le=1)]
ShareBelowOne = Annotated[float, Interval(ge=0, lt=1)]
Real = Annotated[float, Interval(ge=-1e6, le=1e6)]
Positive = Annotated[float, Interval(gt=0, le=1e6)]
Base = Annotated[float, Interval(ge=1, le=1e9)]  # of rotary frequencies
NotNegative = Annotated[float, Interval(ge=0, le=1e6)]
