"""Which call of mpi4py a frame of Python is in, on which communicator, with which root, peers and tag.

mpi4py is compiled, so its calls have no frames.  The position of the frame's instruction gives the text of the call.
Its parts are evaluated only where that runs no code of the program: names, attributes that are plain values, numbers.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import itertools
import linecache
import operator
import sys
import types
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

# Methods by their names in lower case: those of buffers and of pickled objects wait for the same ranks.
COLLECTIVES = frozenset(
    "barrier bcast gather gatherv scatter scatterv allgather allgatherv alltoall alltoallv alltoallw reduce allreduce "
    "reduce_scatter reduce_scatter_block scan exscan neighbor_allgather neighbor_allgatherv neighbor_alltoall "
    "neighbor_alltoallv neighbor_alltoallw dup dup_with_info split split_type create create_group create_cart "
    "create_graph create_dist_graph create_dist_graph_adjacent sub create_intercomm merge free disconnect spawn "
    "spawn_multiple accept connect shrink agree".split()
)
SENDS = frozenset("send ssend bsend rsend".split())
RECEIVES = frozenset("recv probe mprobe".split())
PAIRS = frozenset("sendrecv sendrecv_replace".split())
_OF_COMM = COLLECTIVES | SENDS | RECEIVES | PAIRS
_OF_REQUEST = frozenset("wait waitall waitany waitsome".split())
COLLECTIVE_ON_WIN = frozenset("fence free create allocate allocate_shared create_dynamic".split())
_OF_WIN = COLLECTIVE_ON_WIN | frozenset("lock lock_all start complete wait".split())
_OF_FILE = frozenset("open close set_size set_view preallocate sync".split())
# Classes of mpi4py, and which of their methods wait for other ranks; File has also those that end in _all and the like.
_WAITING = {"Comm": _OF_COMM, "Win": _OF_WIN, "File": _OF_FILE, "Request": _OF_REQUEST, "Message": frozenset({"recv"})}
# Names that other classes have, too: they count only where the receiver is known, or called a communicator.
_COMMON = frozenset(
    "barrier send recv wait free split create dup sub merge connect accept open close sync start complete lock probe "
    "gather scan reduce spawn".split()
)
# The positions of arguments after the receiver; those of methods of pickled objects where they differ.
_MESSAGE, _PROBED = {"dest": 1, "tag": 2}, {"source": 0, "tag": 1}
_ARGUMENTS: dict[str, dict[str, int]] = {
    **dict.fromkeys(SENDS, _MESSAGE),
    "recv": {"source": 1, "tag": 2},
    "probe": _PROBED,
    "mprobe": _PROBED,
    "sendrecv": {"dest": 1, "tag": 2, "source": 4, "recvtag": 5},
    "sendrecv_replace": {"dest": 1, "tag": 2, "source": 3, "recvtag": 4},
    "bcast": {"root": 1},
    "reduce": {"root": 3},
    **dict.fromkeys(("gather", "gatherv", "scatter", "scatterv"), {"root": 2}),
}
_OF_OBJECTS = {"gather": {"root": 1}, "scatter": {"root": 1}, "reduce": {"root": 2}}
# The value of an argument that stands for all ranks or tags, and of a peer that is no rank.
ANY, NULL = "any", "null"
# In the place of a rank: a process outside of MPI_COMM_WORLD, as Spawn and Connect bring them.
OUTSIDE = -1
# Ranks that are asked for messages of other tags.
_MOST_SOURCES = 256
# The class of a call of mpishard, whose collectives have a number on their axis.
AXIS = "Axis"

_OPERATORS: dict[type[ast.AST], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.BitXor: operator.xor,
}
_COMPARISONS: dict[type[ast.AST], Callable[[int, int], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.Gt: operator.gt,
    ast.LtE: operator.le,
    ast.GtE: operator.ge,
}


class _Unknown(Exception):
    """A part of a call that cannot be evaluated without running code of the program."""


def loaded_mpi() -> Any:
    """The module mpi4py.MPI if this process has imported it; None before, and while it is being imported."""
    module = sys.modules.get("mpi4py.MPI")
    return None if module is None or getattr(module.__spec__, "_initializing", False) else module


def call_in(frame: types.FrameType) -> dict[str, Any] | None:
    """The call of mpi4py that a frame waits in, as plain values; None if it is in none.

    Beside the fields of `call_on_line`, for a communicator or window that can be read: `members`, its ranks as
    ranks of MPI_COMM_WORLD (None: all of these), `size`, and `identity`, a text that mostly differs between
    communicators of the same ranks and is the same on all ranks of one.  Where it receives one tag, `unreceived` has
    messages of other tags that have come there: pairs of a source and a tag, of each source the first one.
    """
    node, mpi = _node_at(frame), loaded_mpi()
    if node is None or mpi is None:
        return None
    names = {**frame.f_globals, **frame.f_locals}
    of, kind = _receiver(node, names), ""
    if of is not None and of is not mpi:
        known = (each for each in _WAITING if _is_a(of, getattr(mpi, each)))
        kind = next(known, "")
        if not kind:
            return None
    found = _described(node, names, kind)
    if found is None:
        return None
    if isinstance(of, type):  # as MPI.File.Open(comm, ...)
        arguments = itertools.chain(node.args, (each.value for each in node.keywords))
        of = next((value for value in (_value(each, names) for each in arguments) if _is_a(value, mpi.Comm)), None)
    if of is None:
        return found
    members = _members(mpi, of)
    return found | members | (_unreceived(mpi, of, found) if "size" in members else {})


def call_on_line(file: str, line: int) -> dict[str, Any] | None:
    """The first call of MPI on a line of a file, from its text alone; None if there is none, or no such file.

    `op` is the method, `on` the text of what it is called on, `class` the class of that if it is known.  Where they
    can be evaluated: `root`, `dest`, `source`, `tag`, `recvtag`.
    """
    for node in _calls(file):
        if node.lineno <= line <= (node.end_lineno or line) and (found := _described(node, {}, "")) is not None:
            return found
    return None


def _described(node: ast.Call, names: Mapping[str, Any], kind: str) -> dict[str, Any] | None:
    """The fields of `call_on_line`; None if the call waits for no rank.  `kind`: see `_waits`."""
    method, on = _method(node, names)
    name = method.lower()
    if not _waits(name, method, on, kind):
        return None
    keywords = {each.arg: each.value for each in node.keywords if each.arg}
    found: dict[str, Any] = {"op": method, "on": on, "class": kind}
    of_objects = _OF_OBJECTS if method == name else {}
    for field, position in (of_objects.get(name) or _ARGUMENTS.get(name, {})).items():
        given = keywords.get(field) or (keywords.get("sendtag") if field == "tag" else None)
        if given is None and position < len(node.args):
            given = node.args[position]
        if any(isinstance(each, ast.Starred) for each in node.args):
            found[field] = None
        elif given is not None:
            found[field] = _number(given, names, field)
        else:
            found[field] = 0 if field == "root" or (field == "tag" and name not in RECEIVES) else ANY
    return found


def _waits(name: str, method: str, on: str, kind: str) -> bool:
    """Return True if a method waits for other ranks; `kind` is the class of its receiver, "" if that is not known."""
    if on == "MPI" and not kind:
        return method in ("Init", "Init_thread", "Finalize")
    kind = kind or (on.rpartition(".")[2] if on.startswith("MPI.") else "")
    if kind in _WAITING:
        return name in _WAITING[kind] or (kind == "File" and name.endswith(("_all", "_ordered", "_end")))
    if "comm" in on.lower() and name in _OF_COMM:
        return True
    # Methods of buffers begin with a capital letter, as few of other classes do.
    return name in (_OF_COMM | _OF_REQUEST if method != name else _OF_COMM - _COMMON)


def _is_a(value: Any, kind: type) -> bool:
    return issubclass(value, kind) if isinstance(value, type) else isinstance(value, kind)


def _members(mpi: Any, of: Any) -> dict[str, Any]:
    """Ranks and identity of a communicator or window; nothing where only the main thread may call MPI.

    Nothing of a file either: a call on one locks it, under MPICH all files, so that asking would wait for its end.
    """
    if mpi.Is_finalized() or mpi.Query_thread() != mpi.THREAD_MULTIPLE:
        return {}
    if isinstance(of, mpi.Request | mpi.Message | mpi.File):
        return {}
    if of in (mpi.COMM_NULL, mpi.WIN_NULL):
        return {"is_null": True}
    world = mpi.COMM_WORLD.Get_group()
    is_comm = isinstance(of, mpi.Comm)
    # Peers and roots are ranks of the remote group, if there is one.
    groups = [*([of.Get_remote_group()] if is_comm and of.Is_inter() else []), of.Get_group()]
    found = [rank for group in groups for rank in mpi.Group.Translate_ranks(group, None, world)]
    members = [OUTSIDE if rank == mpi.UNDEFINED else rank for rank in found]
    for group in (*groups, world):
        group.Free()
    everybody = members == list(range(mpi.COMM_WORLD.size))
    # Open MPI puts the number of a communicator, which its ranks have in common, into its name.  With MPICH ranks that
    # have made the same communicators have the same handles.
    identity = (of.name or str(of.py2f())) if is_comm else ""
    return {"size": len(members), "members": None if everybody else members, "identity": identity}


def _unreceived(mpi: Any, comm: Any, call: Mapping[str, Any]) -> dict[str, Any]:
    """`unreceived` of `call_in`; nothing for other calls than receives of one tag."""
    source, tag, status = call.get("source"), call.get("tag"), mpi.Status()
    if call["op"].lower() not in RECEIVES or not isinstance(tag, int):
        return {}
    everybody = range(comm.Get_remote_size() if comm.Is_inter() else comm.size)
    there = everybody[:_MOST_SOURCES] if source == ANY else [each for each in everybody if each == source]
    found: list[list[int]] = []
    with contextlib.suppress(mpi.Exception):  # a rank has died, or is none
        found = [[each, status.tag] for each in there if comm.Iprobe(each, mpi.ANY_TAG, status) and status.tag != tag]
    return {"unreceived": found}


# -- text of a call ----------------------------------------------------------------------------------------------------


def _node_at(frame: types.FrameType) -> ast.Call | None:
    """The call at which a frame stands; None if it stands at none."""
    place = next(itertools.islice(frame.f_code.co_positions(), frame.f_lasti // 2, None), (None,) * 4)
    line, end_line, column, end_column = place
    if line is None or end_line is None or column is None or end_column is None:
        return None
    lines = linecache.getlines(frame.f_code.co_filename, frame.f_globals)[line - 1 : end_line]
    if not lines:
        return None
    data = [each.encode() for each in lines]
    data[-1] = data[-1][:end_column]
    data[0] = data[0][column:]
    try:
        node = ast.parse(b"(" + b"".join(data) + b")", mode="eval").body
    except (SyntaxError, ValueError):
        return None
    return node if isinstance(node, ast.Call) else None


@lru_cache(maxsize=64)
def _calls(file: str) -> list[ast.Call]:
    """The calls in a file, the shortest first."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return []
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return sorted(found, key=lambda node: (node.end_lineno or node.lineno) - node.lineno)


def _receiver(node: ast.Call, names: Mapping[str, Any]) -> Any:
    """The object whose method is called; None if it is unknown."""
    if isinstance(node.func, ast.Attribute):
        return _value(node.func.value, names)
    return getattr(_bound(node, names), "__self__", None)


def _method(node: ast.Call, names: Mapping[str, Any]) -> tuple[str, str]:
    """The name of the method that is called, and the text of what it is called on."""
    if isinstance(node.func, ast.Attribute):
        return node.func.attr, ast.unparse(node.func.value)
    bound = _bound(node, names)
    return (bound.__name__, ast.unparse(node.func)) if bound is not None else ("", "")


def _bound(node: ast.Call, names: Mapping[str, Any]) -> Any:
    """A compiled method that is called by a name of its own, as after ``barrier = comm.Barrier``; else None."""
    value = _value(node.func, names)
    of = getattr(value, "__self__", None)
    return value if type(of).__module__ == "mpi4py.MPI" else None


# -- values ------------------------------------------------------------------------------------------------------------


def _number(node: ast.AST, names: Mapping[str, Any], field: str) -> int | str | None:
    """The value of a peer, root or tag; None if it is not known."""
    value, mpi = _value(node, names), loaded_mpi()
    try:
        number = operator.index(value)
    except TypeError:
        text = ast.unparse(node).rpartition(".")[2]
        return {"ANY_SOURCE": ANY, "ANY_TAG": ANY, "PROC_NULL": NULL}.get(text)
    if number >= 0 or mpi is None:
        return number
    if field in ("tag", "recvtag"):
        return ANY if number == mpi.ANY_TAG else number
    return {mpi.ANY_SOURCE: ANY, mpi.PROC_NULL: NULL}.get(number, number)


def _value(node: ast.AST, names: Mapping[str, Any]) -> Any:
    """The value of an expression; None if that would run code of the program."""
    try:
        return _evaluated(node, names)
    except (_Unknown, ArithmeticError, LookupError, TypeError, ValueError):
        return None


def _evaluated(node: ast.AST, names: Mapping[str, Any]) -> Any:
    match node:
        case ast.Constant(value):
            return value
        case ast.Name(name):
            return names[name]
        case ast.Attribute(of, name):
            return _attribute(_evaluated(of, names), name)
        case ast.Call(ast.Attribute(of, ("Get_rank" | "Get_size") as name), [], []):
            return _attribute(_evaluated(of, names), name.removeprefix("Get_"))
        case ast.Subscript(of, key):
            values, index = _evaluated(of, names), _evaluated(key, names)
            if type(values) in (list, tuple, dict) and type(index) in (int, str):
                return values[index]
        case ast.BinOp(first, operation, second) if type(operation) in _OPERATORS:
            left, right = _evaluated(first, names), _evaluated(second, names)
            if type(left) is type(right) is int:
                return _OPERATORS[type(operation)](left, right)
        case ast.UnaryOp(ast.USub(), operand):
            value = _evaluated(operand, names)
            if type(value) is int:
                return -value
        case ast.Compare(first, [operation], [second]) if type(operation) in _COMPARISONS:
            left, right = _evaluated(first, names), _evaluated(second, names)
            if type(left) is type(right) is int:
                return _COMPARISONS[type(operation)](left, right)
        case ast.IfExp(condition, first, second):
            if type(chosen := _evaluated(condition, names)) in (bool, int):
                return _evaluated(first if chosen else second, names)
    raise _Unknown


def _attribute(of: Any, name: str) -> Any:
    mpi = loaded_mpi()
    if mpi is not None and isinstance(of, mpi.Comm) and of != mpi.COMM_NULL and name in ("rank", "size"):
        return getattr(of, name)
    try:
        value = vars(of)[name] if isinstance(of, types.ModuleType) else inspect.getattr_static(of, name)
    except (AttributeError, KeyError):
        raise _Unknown from None
    if isinstance(value, types.MemberDescriptorType):  # of a class with __slots__
        return value.__get__(of)
    if hasattr(type(value), "__get__"):  # a property or a method
        raise _Unknown
    return value
