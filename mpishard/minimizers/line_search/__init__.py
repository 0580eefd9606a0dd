"""Line searches as state machines of numbers: each is told value and slope, and says what comes next.  No MPI."""

from mpishard.minimizers.line_search.more_thuente import MoreThuente
from mpishard.minimizers.line_search.search import LineSearch, LineSearchState

__all__ = ["LineSearch", "LineSearchState", "MoreThuente"]
