"""One page served to this machine alone: GET of it and nothing else, until Ctrl-C."""

import webbrowser
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from syncline.errors import UsageError

HOST = "127.0.0.1"


def serve(text: str, *, port: int, opening: bool, say: Callable[[str], None]) -> None:
    """Serve `text` as the page at `/`; returns when it is interrupted."""
    try:
        server = ThreadingHTTPServer((HOST, port), _handler(text.encode()))
    except OSError as error:
        raise UsageError(f"cannot serve on port {port}: {error.strerror}; leave out --port for a free one") from None
    with server:
        address = f"http://{HOST}:{server.server_port}/"
        say(f"serving {address} to this machine alone; Ctrl-C ends it")
        if opening:
            webbrowser.open(address)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            say("ended")


def _handler(page: bytes) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        server_version, sys_version = "syncline", ""

        def do_GET(self) -> None:
            # A page elsewhere could have a name of its own point here and read the answer: this one has no other name.
            if self.headers.get("Host", "").rpartition(":")[0] not in (HOST, "localhost"):
                self.send_error(HTTPStatus.FORBIDDEN)
                return
            if self.path != "/":
                self.send_error(HTTPStatus.NOT_FOUND)
                return
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(page)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("X-Content-Type-Options", "nosniff")
            self.end_headers()
            self.wfile.write(page)

        def log_message(self, format: str, *args: object) -> None:
            """Requests are nothing to read about."""

    return Handler
