"""The serial console of a stand-in for a board: a login and a shell behind a serial port and a TCP port."""

import os
import pty
import select
import socket
import subprocess
import sys
import threading
import tty
from pathlib import Path
from typing import Any

BOOTING = "Starting kernel ..."
LOGIN = "board login: "
PROMPT = "root@board:~# "
# A boot, a login, and a shell; the end of the shell is the next boot, and a wrong user another login.
_BOARD = """
while :; do
    echo "$1"
    user=
    until [ "$user" = root ]; do printf '\\n%s' "$2" && read -r user || exit; done
    env -i HOME="$3" PATH="$3/bin:$PATH" PS1="$4" TERM=dumb bash --norc --noprofile -i
done
"""
# labgrid silences the kernel, which is this machine's, and sends files to lrzsz's program.
_PROGRAMS = {"dmesg": "#!/bin/sh\n", "lrz": '#!/bin/sh\nexec {python} "$@"\n'}
_RECEIVE = f"""
import os, select, sys, tty
sys.path += {sys.path}
from xmodem import XMODEM
def getc(size, timeout=1):
    data = b""
    while len(data) < size and select.select([0], [], [], timeout)[0]:
        data += os.read(0, size - len(data))
    return data or None
tty.setraw(0)
with open(sys.argv[-1], "wb") as file:
    XMODEM(getc, lambda data, timeout=1: os.write(1, data)).recv(file)
os.system("stty sane")
"""


class SerialConsole:
    """A board at the other end of a serial line.

    Attributes:
        path: of the serial port on this machine.
        port: TCP port on loopback of a server of that line, as ser2net is one.
        board_pid: process id of what prints the login; the shell is its child.
    """

    def __init__(self, home: Path) -> None:
        (home / "bin").mkdir()
        (home / "receive.py").write_text(_RECEIVE)
        for name, text in _PROGRAMS.items():
            (home / "bin" / name).write_text(text.format(python=f"{sys.executable} {home}/receive.py"))
            (home / "bin" / name).chmod(0o755)
        self._board, slave = pty.openpty()
        words = ["setsid", "--ctty", "bash", "-m", "-c", _BOARD, "bash", BOOTING, LOGIN, str(home), PROMPT]
        self._process = subprocess.Popen(words, stdin=slave, stdout=slave, stderr=slave)
        os.close(slave)
        self.board_pid = self._process.pid
        self._line, self._port = pty.openpty()
        tty.setraw(self._port)
        self.path = os.ttyname(self._port)
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        self._clients: list[socket.socket] = []
        self._is_unplugged = False
        self._stopping, self._stop = os.pipe()
        self._thread = threading.Thread(target=self._forward, name="serial console")
        self._thread.start()

    def describe(self, *, over_network: bool) -> dict[str, Any]:
        """Return labgrid's resource of the line."""
        if over_network:
            return {"NetworkSerialPort": {"host": "127.0.0.1", "port": self.port, "protocol": "raw"}}
        return {"RawSerialPort": {"port": self.path}}

    def unplug(self) -> None:
        """Let nothing come from the board over TCP any more."""
        self._is_unplugged = True
        for client in self._clients:
            client.shutdown(socket.SHUT_WR)

    def _forward(self) -> None:
        while True:
            sources = [self._board, self._line, self._server, self._stopping, *self._clients]
            ready, _, _ = select.select(sources, [], [])
            if self._stopping in ready:
                return
            if self._server in ready:
                self._clients.append(self._server.accept()[0])
            if self._board in ready:
                data = os.read(self._board, 65536)
                os.write(self._line, data)
                for client in [] if self._is_unplugged else self._clients:
                    client.sendall(data)
            if self._line in ready:
                os.write(self._board, os.read(self._line, 65536))
            for client in [each for each in self._clients if each in ready]:
                if data := client.recv(65536):
                    os.write(self._board, data)
                else:
                    self._clients.remove(client)
                    client.close()

    def close(self) -> None:
        os.write(self._stop, b"x")
        self._thread.join()
        for client in (*self._clients, self._server):
            client.close()
        self._process.kill()
        self._process.wait()
        for descriptor in (self._board, self._line, self._port, self._stopping, self._stop):
            os.close(descriptor)
