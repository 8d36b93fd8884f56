"""One file a command, each exposing `command`. The table in `cli.py` names them; nothing is imported here."""
