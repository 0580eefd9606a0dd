"""Line searches as state machines of numbers: each takes value and slope, and returns what comes next.  No MPI."""

from mpishard.minimizers.line_search.hager_zhang import HagerZhang
from mpishard.minimizers.line_search.more_thuente import MoreThuente
from mpishard.minimizers.line_search.search import LineSearch, LineSearchState

__all__ = ["HagerZhang", "LineSearch", "LineSearchState", "MoreThuente"]
