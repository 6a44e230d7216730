"""Types of NumPy arrays as signatures name them."""

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
"""Array of any type, for functions that take several kinds of column."""
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Bytes = npt.NDArray[np.uint8]
"""Small counts, such as the tokens accepted at each position."""
Tokens = npt.NDArray[np.int32]
Words = npt.NDArray[np.uint64]
"""Seeds, and sets as 64 bits."""
