"""The first page: what needs attention, what runs where."""

from starlette.requests import Request
from starlette.responses import Response

from edgekit_fleet.console.shell import Console


def show_fleet(console: Console, request: Request) -> Response:
    """Show the fleet."""
    return console.render(request, "fleet.html")
