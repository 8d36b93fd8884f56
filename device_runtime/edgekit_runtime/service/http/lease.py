"""What a process says of a connection that it uses but another one owns, in memory that both see.

It must be true at every moment at which the process can die, so it is written before what it announces.
"""

from typing import Final

IDLE: Final = 0  # nothing received that is not answered
UNDER_WAY: Final = 1  # a request is being received or worked on, or waits in a buffer
ANSWERING: Final = 2  # a part of an answer may have been sent
HANDED: Final = 3  # on its way to the process


class Lease:
    """The byte of one connection.

    Attributes:
        states: of all connections; written to in place, since a call would cost as much again.
        index: of this one.
    """

    __slots__ = ("index", "states")

    def __init__(self, states: memoryview, index: int) -> None:
        self.states = states
        self.index = index
