"""The largest resident memory that a process has had; nothing is imported that would add to it."""

from pathlib import Path


def peak_bytes(process: int | str = "self") -> int:
    """Return the largest resident memory of a process until now.

    Raises:
        OSError: there is no such process, or no /proc.
    """
    # Not ru_maxrss: Linux hands that one down from the parent process through exec.
    status = Path(f"/proc/{process}/status").read_text(encoding="ascii")
    line = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024
