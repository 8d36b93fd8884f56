"""The operations on a fleet, which the commands, the HTTP interface and the console share."""
