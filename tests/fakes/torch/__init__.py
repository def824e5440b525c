"""The few names of torch that the P2P worker uses, on lists; ranks meet through files. For tests without torch."""

from __future__ import annotations

import os
import sys

float32 = "float32"
__version__ = "0.0+fake"

if os.environ.get("FAKE_TORCH_IMPORT") == "fail":
    raise ImportError("libcudart.so.13: cannot open shared object file")
if os.environ.get("FAKE_TORCH_IMPORT") == "crash":
    sys.stderr.write("Fatal: the library fell over\n")
    os.abort()


class Tensor:
    def __init__(self, values):
        self.values = values

    def _with(self, other, operation):
        others = other.values if isinstance(other, Tensor) else [other] * len(self.values)
        return Tensor([operation(one, two) for one, two in zip(self.values, others)])

    def __add__(self, other):
        return self._with(other, lambda one, two: one + two)

    def __mod__(self, other):
        return self._with(other, lambda one, two: one % two)

    def __ne__(self, other):
        return self._with(other, lambda one, two: one != two)

    __hash__ = None

    def __setitem__(self, index, value):
        self.values[index] = value

    def sum(self):
        return sum(self.values)

    def to(self, kind):
        return Tensor([float(value) for value in self.values])


def arange(size, device):
    return Tensor(list(range(size)))


def equal(one, other):
    return one.values == other.values
