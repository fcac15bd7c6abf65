"""The site in a real browser: nothing on the console, no sideways scrolling on a phone, contrast, alt texts."""

import json
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.site_build import build_site

pytestmark = pytest.mark.long
CHECK = Path(__file__).parent / "site_check.html"


class Site(ThreadingHTTPServer):
    """The files of the site, the page that looks at them (``/check``), and the place to report to."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), partial(Handler, directory=str(folder)))
        pages = sorted([*folder.rglob("*.html"), *folder.glob("figures/*.svg")])
        self.pages = [f"/{page.relative_to(folder).as_posix()}" for page in pages]
        self.reported = threading.Event()
        self.report: dict[str, Any] = {}


class Handler(SimpleHTTPRequestHandler):
    server: Site

    def do_GET(self) -> None:
        if self.path == "/check":
            self.answer(CHECK.read_bytes(), "text/html")
        elif self.path == "/pages":
            self.answer(json.dumps(self.server.pages).encode(), "application/json")
        else:
            super().do_GET()

    def do_POST(self) -> None:
        self.server.report = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.answer(b"", "text/plain")
        self.server.reported.set()

    def answer(self, body: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    server = Site(build_site(tmp_path_factory.mktemp("site")))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_page_in_a_browser(scheme: str, site: Site, tmp_path: Path) -> None:
    found = [program for program in ("chromium", "chromium-browser", "google-chrome") if shutil.which(program)]
    if not found:
        pytest.skip("there is no Chromium here")
    words = [
        found[0], "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--window-size=1400,1000",
        f"--user-data-dir={tmp_path / 'profile'}", f"--blink-settings=preferredColorScheme={int(scheme == 'light')}",
        f"http://127.0.0.1:{site.server_port}/check",
    ]  # fmt: skip
    site.reported.clear()
    log = tmp_path / "log"
    with log.open("w") as stderr:
        browser = subprocess.Popen(words, stdout=stderr, stderr=stderr)
        try:
            assert site.reported.wait(600), log.read_text()[-3000:]
        finally:
            browser.terminate()
            browser.wait(30)
    assert site.report["dark"] == (scheme == "dark")
    assert len(site.report["pages"]) == len(site.pages) > 40
    wrong = [f"{page}: {what}" for page, whats in site.report["pages"].items() for what in whats]
    console = re.findall(r"^.*CONSOLE.*$", log.read_text(errors="replace"), re.M)
    assert not wrong + console, "\n".join(wrong + console)
