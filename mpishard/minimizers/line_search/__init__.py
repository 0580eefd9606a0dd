"""Line searches as state machines of numbers: each is told value and slope, and says what comes next.  No MPI."""

from mpishard.minimizers.line_search.armijo import Armijo
from mpishard.minimizers.line_search.hager_zhang import HagerZhang
from mpishard.minimizers.line_search.more_thuente import MoreThuente
from mpishard.minimizers.line_search.search import LineSearch, LineSearchState

__all__ = ["Armijo", "HagerZhang", "LineSearch", "LineSearchState", "MoreThuente"]
