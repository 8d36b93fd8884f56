"""A server that answers as one of the Open Inference Protocol does, as far as a probe of the link asks."""

import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    refuses_early = False
    status = 404

    def do_GET(self) -> None:
        self.answer(200, b"{}" if self.path == "/v2/health/live" else b"x" * 2000)

    def do_POST(self) -> None:
        refusal = b'{"error": "refused"}'
        if self.refuses_early:
            self.answer(self.status, refusal, "Connection: close\r\n")
        self.rfile.read(int(self.headers["Content-Length"]))
        if not self.refuses_early:
            self.answer(self.status, refusal)

    def answer(self, status: int, body: bytes, fields: str = "") -> None:
        self.wfile.write(
            f"HTTP/1.1 {status} X\r\n{fields}Content-Length: {len(body)}\r\n\r\n".encode("ascii") + body
        )

    def log_message(self, *_: object) -> None:
        pass


if __name__ == "__main__":
    server = ThreadingHTTPServer((sys.argv[1], int(sys.argv[2])), Handler)
    print(server.server_address[1], flush=True)
    server.serve_forever()
