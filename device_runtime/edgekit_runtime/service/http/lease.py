"""The state of a connection that was lent to a worker, in memory that it shares with the service.

It must be right whenever the worker may die, so the worker writes each state before it acts on it.
"""

from typing import Final

IDLE: Final = 0  # every request that was received has its response
UNDER_WAY: Final = 1  # a request is being received or handled, or waits in a buffer
RESPONDING: Final = 2  # a part of a response may have been sent
HANDED: Final = 3  # on its way to the worker


class Lease:
    """The byte in shared memory to which the state of one connection is written.

    Attributes:
        states: a byte for each connection: `IDLE`, `UNDER_WAY`, `RESPONDING` or `HANDED`; written in place,
            since a call would double the cost.
    """

    __slots__ = ("index", "states")

    def __init__(self, states: memoryview, index: int) -> None:
        self.states = states
        self.index = index
