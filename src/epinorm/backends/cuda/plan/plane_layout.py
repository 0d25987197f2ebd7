"""Where the fp16 planes of fp32 matrices lie in one buffer."""

from __future__ import annotations

COLUMN_MULTIPLE = 8
"""Rows of 16-bit numbers must start on 16 bytes for the copy engine."""
LINE_COLUMNS, MOST_PADDING = 64, 0.25
"""They start on whole lines of the L2 cache where that adds no larger share: products of rows of
1000 columns took 1.8 times as long as their estimate, those of 1024 did not."""
ROW_MULTIPLE = 16
"""Where the second matrix's rows begin, so that its flags begin on 16 bytes too."""
LISTED = 4
"""Columns of a row that are remembered where the planes do not hold them."""


LONGEST_KEPT_ROW = 8192
"""Columns of the longest row that the splitting kernels hold in registers."""


class PlaneLayout:
    """The planes of one matrix, or of two with as many columns, in ``nbytes`` bytes.

    Each for the rows of both matrices: hi, lo (where there are two planes), spoilt, scale, flags.
    The second matrix begins at row ``second`` of each. The attributes ``hi``, ``lo``, ``spoilt``,
    ``scale`` and ``flags`` are offsets in bytes. over_first: the first matrix's planes lie over
    itself (fp32/split_over.cu), those here are the second's alone. lists: whether ``spoilt`` is
    there, which backward products alone read; with over_first it never is.
    """

    def __init__(
        self,
        planes: int,
        columns: int,
        rows: int,
        more_rows: int,
        over_first: bool = False,
        lists: bool = True,
    ) -> None:
        self.planes, self.columns, self.rows, self.more_rows = planes, columns, rows, more_rows
        lines = -(-columns // LINE_COLUMNS) * LINE_COLUMNS
        wasted = lines - columns > MOST_PADDING * columns
        self.padded = -(-columns // COLUMN_MULTIPLE) * COLUMN_MULTIPLE if wasted else lines
        self.second = -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE if more_rows else rows
        self.all_rows = self.second + more_rows
        self.over_first, self.begin = over_first, 0 if over_first else self.second
        self.lists = lists and not over_first
        plane_bytes = (self.begin + more_rows) * self.padded * 2
        self.hi, self.lo = 0, (planes - 1) * plane_bytes
        self.spoilt = planes * plane_bytes
        self.scale = self.spoilt + 4 * LISTED * self.all_rows * self.lists
        self.flags = self.scale + 4 * self.all_rows
        self.nbytes = self.flags + self.all_rows
        self.numbers = (rows, self.second, self.all_rows, columns, self.padded)
