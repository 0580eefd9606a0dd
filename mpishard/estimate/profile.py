"""Speeds of a machine that determine the time of a step: measured by ``mpishard bench``, or given by hand."""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from mpishard.arguments import number
from mpishard.io import files
from mpishard.io.files import parsed

BY_HAND = "a machine given by hand"
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "send")
_VERSION = 1


@dataclass(frozen=True)
class Link:
    """Time of one communication: `latency` for each of its at least ``log2(ranks)`` rounds, and bytes / `bandwidth`.

    Parameters
    ----------
    latency : float
        Seconds.
    bandwidth : float
        Bytes that a rank sends per second, counted as in `mpishard.comm.ledger`: those of the ring algorithm.

    Raises
    ------
    ValueError
        If the latency is negative or not finite, or the bandwidth not above 0.
    TypeError
        If one is no number.
    """

    latency: float
    bandwidth: float

    def __post_init__(self) -> None:
        if not 0 <= number("latency", self.latency, finite=False) < math.inf:
            raise ValueError(f"the latency of a link is {self.latency:g} s; it must be finite and at least 0")
        if not number("bandwidth", self.bandwidth, finite=False) > 0:
            raise ValueError(f"the bandwidth of a link is {self.bandwidth:g} bytes/s; it must be above 0")

    def seconds(self, ranks: int, sent: float, calls: float = 1) -> float:
        """Seconds for some communications among ranks.

        Parameters
        ----------
        ranks : int
            Ranks that communicate; with 1 the time is 0.
        sent : float
            Bytes that a rank sends in all calls together.
        calls : float
            Number of communications.

        Returns
        -------
        float
            Seconds.
        """
        return calls * self.latency * math.log2(max(ranks, 2)) + sent / self.bandwidth if ranks > 1 else 0.0


@dataclass(frozen=True)
class MachineProfile:
    """Speeds of one rank while all ranks of its node are equally busy.

    No method is collective.

    Parameters
    ----------
    products : tuple of (int, float)
        Floating-point operations per second of float32 matrix products, by the smaller of the weight's two extents.
    memory_bandwidth : float
        Bytes read or written per second by passes over large arrays; infinite: these passes cost nothing.
    exponentials : float
        Activation functions (GELU and its derivative) per second; infinite: they cost nothing.
    efficiency : float
        Fraction of these speeds that a whole transformer reaches, whose operands are spread over memory.
    node : dict of str to Link
        Links between ranks of one node, by operation (`OPERATIONS`); empty if they are not known.
    network : dict of str to Link
        Links between nodes, by operation; empty: as within a node.
    ranks_per_node : int
        Ranks that share a node; 0: all.
    name : str
        The machine on which the profile was measured.

    Raises
    ------
    ValueError
        If a speed is not above 0, or links are given for some operations only.
    TypeError
        If a speed is no number.
    """

    products: tuple[tuple[int, float], ...]
    memory_bandwidth: float = math.inf
    exponentials: float = math.inf
    efficiency: float = 1.0
    node: dict[str, Link] = field(default_factory=dict)
    network: dict[str, Link] = field(default_factory=dict)
    ranks_per_node: int = 0
    name: str = ""

    def __post_init__(self) -> None:
        speeds = [(number("products", size), number("products", speed)) for size, speed in self.products]
        if not speeds or not all(size > 0 and speed > 0 for size, speed in speeds):
            raise ValueError(f"a machine profile needs finite speeds of matrix products above 0, got {self.products!r}")
        for what, unit in {"memory_bandwidth": " a second", "exponentials": " a second", "efficiency": ""}.items():
            if not number(what, getattr(self, what), finite=False) > 0:
                raise ValueError(f"{what} of a machine profile is {getattr(self, what):g}{unit}; it must be above 0")
        for links in (self.node, self.network):
            if links and set(links) != set(OPERATIONS):
                raise ValueError(f"links need {', '.join(OPERATIONS)}; got {', '.join(links)}")

    @classmethod
    def given(
        cls,
        flops: float,
        bandwidth: float,
        latency: float,
        memory_bandwidth: float = math.inf,
    ) -> MachineProfile:
        """A profile with one speed for all products, and one link for all operations; see `with_network`.

        Parameters
        ----------
        flops : float
            Floating-point operations per second of float32 matrix products.
        bandwidth : float
            Bytes that a rank sends per second.
        latency : float
            Seconds of a message.
        memory_bandwidth : float
            Bytes read or written per second; default: passes over memory cost nothing.

        Returns
        -------
        MachineProfile
            Of one node.

        Raises
        ------
        ValueError
            If a number is out of its range.
        """
        return cls(
            ((1, flops),),
            memory_bandwidth,
            node=dict.fromkeys(OPERATIONS, Link(latency, bandwidth)),
            name=BY_HAND,
        )

    def with_network(self, latency: float, bandwidth: float, ranks_per_node: int) -> MachineProfile:
        """A profile of many such machines as nodes, with one link between nodes for all operations.

        Parameters
        ----------
        latency : float
            Seconds of a message between nodes.
        bandwidth : float
            Bytes that a rank sends per second to another node.
        ranks_per_node : int
            Ranks that share a node, at least 1.

        Returns
        -------
        MachineProfile
            A copy with this network.

        Raises
        ------
        ValueError
            If a number is out of its range.
        """
        if ranks_per_node < 1:
            raise ValueError(f"ranks_per_node={ranks_per_node} must be at least 1")
        network = dict.fromkeys(OPERATIONS, Link(latency, bandwidth))
        # A profile measured on one rank has no link within its node; with one rank per node no such link exists.
        return replace(self, node=self.node or network, network=network, ranks_per_node=ranks_per_node)

    def within_node(self, span: int) -> bool:
        """Return True if this number of consecutive ranks of the world is on one node.

        Parameters
        ----------
        span : int
            Number of ranks, see `Layout.span`.

        Returns
        -------
        bool
            True also where the profile has no network.
        """
        return not (self.network and 0 < self.ranks_per_node < span)

    def flops(self, size: float) -> float:
        """Speed of matrix products, interpolated linearly.

        Parameters
        ----------
        size : float
            The smaller of the weight's two extents.

        Returns
        -------
        float
            Floating-point operations per second.
        """
        products = sorted(self.products)
        place = bisect_left(products, (size, 0.0))
        if place == 0:
            # A product with few columns is bound by memory: its speed falls with their number.
            return products[0][1] * (min(1.0, size / products[0][0]) if len(products) > 1 else 1.0)
        if place == len(products):
            return products[-1][1]
        (left, slow), (right, fast) = products[place - 1 : place + 1]
        return slow + (fast - slow) * (size - left) / (right - left)

    def link(self, operation: str, span: int) -> Link:
        """The link of an axis whose ranks lie within `span` consecutive ranks of the world.

        Parameters
        ----------
        operation : {"all_reduce", "all_gather", "reduce_scatter", "send"}
            One of `OPERATIONS`.
        span : int
            See `Layout.span`.

        Returns
        -------
        Link
            Within a node, or between nodes where `span` reaches further.

        Raises
        ------
        ValueError
            If the profile has no links.
        """
        links = self.node if self.within_node(span) else self.network
        if not links:
            raise ValueError(
                f"the machine profile {self.name or ''!r} was measured on 1 rank and knows no communication; measure "
                "it with mpirun -n 2 (or more) mpishard bench, or give latency and bandwidth"
            )
        return links[operation]

    def save(self, file: Path) -> None:
        """Write a JSON file.

        Parameters
        ----------
        file : Path
            Overwritten.

        Raises
        ------
        OSError
            If the file cannot be written; one that was there stays.
        """
        text = json.dumps({"mpishard_profile": _VERSION, **asdict(self)}, indent=1) + "\n"
        files.write_whole(Path(file), text.encode())

    @classmethod
    def load(cls, file: Path) -> MachineProfile:
        """Read what `save` wrote.

        Parameters
        ----------
        file : Path
            The name of the file.

        Returns
        -------
        MachineProfile
            As it was saved.

        Raises
        ------
        OSError
            If the file cannot be read.
        ValueError
            If it is not a machine profile.
        """
        try:
            stored = parsed(files.read(file))
            if stored.pop("mpishard_profile") != _VERSION:
                raise ValueError("of another version")
            return cls(
                products=tuple((int(size), float(flops)) for size, flops in stored.pop("products")),
                node=_links(stored.pop("node")),
                network=_links(stored.pop("network")),
                ranks_per_node=int(stored.pop("ranks_per_node", 0)),
                name=str(stored.pop("name", "")),
                **stored,
            )
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(
                f"{file} is not a machine profile of this mpishard ({error}); make one with mpishard bench"
            ) from None


def _links(stored: dict[str, Any]) -> dict[str, Link]:
    return {operation: Link(**link) for operation, link in stored.items()}


# One core of a server of about 2020 and shared memory: good enough to compare layouts, not to plan a run.
TYPICAL = MachineProfile(
    products=((32, 4e10), (256, 1e11)),
    memory_bandwidth=1e10,
    exponentials=5e8,
    node=dict.fromkeys(OPERATIONS, Link(2e-6, 3e9)),
    network=dict.fromkeys(OPERATIONS, Link(5e-6, 1e9)),
    ranks_per_node=64,
    name="a typical core",
)
