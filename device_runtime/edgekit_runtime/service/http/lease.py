"""The state of a connection that was lent to a worker, in memory that the worker and the service share.

The worker may crash at any time, so it writes each new state before it continues.
"""

from typing import Final

IDLE: Final = 0  # every request that was received has its response
UNDER_WAY: Final = 1  # a request is being received or handled, or waits in a buffer
RESPONDING: Final = 2  # a part of a response may have been sent
HANDED: Final = 3  # on its way to the worker


class Lease:
    """The state of one connection, as a byte in shared memory.

    Attributes:
        states: One byte for each connection, which is `IDLE`, `UNDER_WAY`, `RESPONDING` or `HANDED`.
        index: The index of this connection in `states`.
    """

    __slots__ = ("index", "states")

    def __init__(self, states: memoryview, index: int) -> None:
        self.states = states
        self.index = index
