"""The vendor's kernels, which are linked against OpenMPI."""

import ctypes

ctypes.CDLL("libmpi.so.40")
