"""The site in a real browser: nothing on the console, no sideways scrolling on a phone, contrast, alt texts.

A button copies what tests/test_pasted.py runs, the search knows first questions, and no link is dead."""

import json
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

from tests.site_build import ROOT, build_site
from tests.test_pasted import BLOCK, pasted, text_of

pytestmark = pytest.mark.long
CHECK = Path(__file__).parent / "site_check.html"
FIRST = {
    "gpu": "/sharp-edges/#gpu",
    "graph classification": "/comparison/#graph-classification",
    "lightning": "/launching/#lightning",
    "out of memory": "/memory/#out-of-memory",
    "resume": "/quickstart/#stop-and-resume",
    "slurm": "/clusters/#slurm",
}
"""What a reader searches for, and what should be found first."""


class Site(ThreadingHTTPServer):
    """The files of the site, the page that looks at them (``/check``), and the place to report to."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), partial(Handler, directory=str(folder)))
        self.folder = folder
        pages = sorted([*folder.rglob("*.html"), *folder.glob("*/*.svg")])
        self.pages = [f"/{page.relative_to(folder).as_posix()}" for page in pages]
        self.reported = threading.Event()
        self.report: dict[str, Any] = {}


class Handler(SimpleHTTPRequestHandler):
    server: Site

    def do_GET(self) -> None:
        if self.path == "/check":
            self.answer(CHECK.read_bytes(), "text/html")
        elif self.path == "/asked":
            self.answer(json.dumps({"pages": self.server.pages, "queries": [*FIRST]}).encode(), "application/json")
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
        pytest.skip("there is no Chromium here to look at the site with: install it (apt install chromium)")
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
    wrong += miscopied(site.report["copied"])
    wrong += [f"{query}: {first}" for query, first in site.report["first"].items() if first != FIRST[query]]
    assert site.report["first"].keys() == FIRST.keys()
    assert not wrong + console, "\n".join(wrong + console)


def miscopied(copied: dict[str, list[list[str]]]) -> list[str]:
    """The blocks of the pages whose button copies something else than what a reader should paste."""
    wrong = list[str]()
    for page in sorted((ROOT / "docs").glob("*.md")):
        blocks = [] if page.stem == "api" else [pasted(block).rstrip() for block in BLOCK.finditer(text_of(page))]
        place = "/index.html" if page.stem == "index" else f"/{page.stem}/index.html"
        got = [text for kind, text in copied[place] if kind in ("python", "diff", "console", "bash")]
        if blocks != got and page.stem != "api":
            pairs = [f"{want!r} but {text!r}" for want, text in zip(blocks, got) if want != text]
            wrong.append(f"{place} copies {len(got)} of {len(blocks)} blocks; {pairs[:1]}")
    return wrong


class Links(HTMLParser):
    """What a page links to or shows, and the anchors that it has."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.anchors, self.targets = set[str | None](), list[str]()
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.anchors |= {found.get("id"), found.get("name")}
        self.targets += [target for key in ("href", "src") if (target := found.get(key))]


def test_no_link_of_the_site_is_dead(site: Site) -> None:
    """Links within the site; those to other places are printed."""
    pages = {page: Links(page) for page in site.folder.resolve().rglob("*.html")}
    outside, dead = set[str](), list[str]()
    for page, links in pages.items():
        for target in links.targets:
            url = urlsplit(target)
            if url.scheme or url.netloc:
                outside.add(target)
                continue
            start = site.folder if url.path.startswith("/") else page.parent
            other = (start / unquote(url.path).lstrip("/")).resolve() if url.path else page
            other = other / "index.html" if other.is_dir() else other
            missing = other in pages and url.fragment and unquote(url.fragment) not in pages[other].anchors
            if missing or not other.exists():
                dead.append(f"{page.relative_to(site.folder.resolve())}: {target}")
    print(*sorted(target for target in outside if not target.startswith("https://shardpass.")), sep="\n")
    assert not dead, "\n".join(dead)
