"""The page in a real browser: what a reader sees, presses and hears."""

from __future__ import annotations

import base64
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hashbench.core.trace import file
from hashbench.extensions.report.diagnoses import read_excerpts
from hashbench.extensions.report.expectations import JudgedNight
from hashbench.extensions.report.history import History, Interval, ModelHistory, Night
from hashbench.extensions.report.page import render_html
from tests.core.report.rows import row
from tests.extensions.report.histories import DIAGNOSED, TORCH_CHANGED, diagnosed, failed, judged, passing, traces

HOSTILE = "<img src=x onerror=window.hacked=1></script><script>window.hacked=1</script>"

FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-sync",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--hide-scrollbars",
)


def program(*names: str) -> str | None:
    return next((found for name in names if (found := shutil.which(name))), None)


@pytest.fixture(scope="session")
def shared_browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """One browser for all tests: starting one takes longer than most of them."""
    webdriver = pytest.importorskip("selenium.webdriver")
    chromium = program("chromium", "chromium-browser", "google-chrome")
    driver = program("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("there is no Chromium with its chromedriver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    started = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield started
    started.quit()


@pytest.fixture
def browser(shared_browser: Any) -> Iterator[Browser]:
    made = Browser(shared_browser)
    made.look()
    yield made
    made.tool("Emulation.setScriptExecutionDisabled", value=False)


class Browser:
    """The few things that these tests do in a browser."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def tool(self, command: str, **arguments: Any) -> Any:
        """A command of the DevTools protocol."""
        return self.driver.execute_cdp_cmd(command, arguments)

    def look(self, *, width: int = 1200, height: int = 900, dark: bool = False, calm: bool = True) -> None:
        """How the reader looks at it."""
        self.tool(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
        )
        media = {
            "prefers-color-scheme": "dark" if dark else "light",
            "prefers-reduced-motion": "reduce" if calm else "no-preference",
        }
        self.tool("Emulation.setEmulatedMedia", features=[{"name": k, "value": v} for k, v in media.items()])

    def open(self, path: Path, fragment: str = "") -> None:
        self.driver.get("about:blank")
        self.logs()  # what was before is no concern of this page
        self.requests()
        self.driver.get(f"{path.as_uri()}{fragment}")

    def logs(self) -> list[str]:
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requests(self) -> list[str]:
        messages = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        return [one["params"]["request"]["url"] for one in messages if one["method"] == "Network.requestWillBeSent"]

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(f"return {script}", *arguments)

    def press(self, *keys: str) -> None:
        """Keys, by name or letter, into whatever has the focus; CONTROL is held for those after it."""
        from selenium.webdriver.common.action_chains import ActionChains
        from selenium.webdriver.common.keys import Keys

        actions = ActionChains(self.driver, duration=0)
        for key in keys:
            press = actions.key_down if key == "CONTROL" else actions.send_keys
            press(getattr(Keys, key) if len(key) > 1 else key)
        actions.perform()
        actions.reset_actions()

    def choose(self, field: str, value: str) -> None:
        self.driver.execute_script(
            "const s = document.getElementById(arguments[0]); s.value = arguments[1];"
            "s.dispatchEvent(new Event('change'))",
            field,
            value,
        )

    def shown(self, selector: str) -> list[str]:
        """The texts of what a selector finds and a reader sees."""
        return self.run(
            "[...document.querySelectorAll(arguments[0])].filter(e => e.checkVisibility())"
            ".map(e => e.innerText.trim())",
            selector,
        )

    @property
    def focus(self) -> str:
        """The focused element: its id, or its text."""
        return self.run("document.activeElement.id || document.activeElement.innerText.trim()")


CHANGES = "#changes > .change"


@pytest.fixture(scope="session")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three nights of sixteen models, with every kind of news among them."""
    folder = tmp_path_factory.mktemp("nights")
    for number, trace in enumerate(traces(), start=1):
        file.write(trace, folder / "specimens_training" / "traces" / f"one.run{number}.log")
    slots = diagnosed("slot_memory", kernel="aten.index_copy_.default", cause="write_race", traces="")
    skipped = row("skipped", "pass_due_to_skip")
    quiet = [row(f"quiet{number}") for number in range(10)]
    before = [passing(DIAGNOSED), row("resnet18"), row("alexnet"), slots, row("swin_t"), skipped, *quiet]
    nights = (
        before,
        before,
        [DIAGNOSED, row("resnet18"), slots, failed("swin_t", "timeout", "no result after 600 s"), skipped, *quiet],
    )
    night = judged(*nights, folder=folder, changed={1: TORCH_CHANGED})
    text = render_html(night, excerpts=read_excerpts(night.history))
    path = folder / "report.html"
    path.write_text(text, encoding="utf-8")
    return path


# ------------------------------------------------------------------------------------------------- one file


@pytest.mark.slow
def test_page_opens_and_requests_nothing(browser: Browser, page: Path) -> None:
    browser.open(page)
    assert browser.logs() == []
    assert [url for url in browser.requests() if not url.startswith(("file:", "about:", "data:"))] == []
    assert browser.run("performance.getEntriesByType('resource').length") == 0


def test_policy_stops_foreign_scripts(browser: Browser, page: Path) -> None:
    browser.open(page)
    browser.driver.execute_script(
        "document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"window.hacked=1\"><p onclick=1 id=bad>');"
        "const s = document.createElement('script'); s.textContent = 'window.hacked = 1'; document.body.append(s)"
    )
    assert browser.run("new Promise(done => setTimeout(() => done(window.hacked ?? null), 50))") is None
    assert any("Content Security Policy" in message for message in browser.logs())


def test_names_that_are_scripts_stay_names(browser: Browser, tmp_path: Path) -> None:
    bad = diagnosed(HOSTILE, suite=HOSTILE, kernel=HOSTILE, cause=HOSTILE, module=HOSTILE, advice=HOSTILE, traces="")
    path = tmp_path / "bad.html"
    path.write_text(render_html(judged([passing(bad)], [bad], [bad]), title=HOSTILE), encoding="utf-8")
    browser.open(path)
    browser.run("document.getElementById('grid').focus()")
    browser.press("ARROW_DOWN", "ARROW_LEFT", "ENTER")
    assert browser.run("window.hacked ?? null") is None
    assert browser.run("document.images.length") == 0
    assert browser.logs() == []
    assert HOSTILE in browser.shown(".row .label bdi")
    assert HOSTILE in browser.shown("#readout b")


# ------------------------------------------------------------------------------------------------ what is told


def test_first_screen_has_change_kernel_cause_advice(browser: Browser, page: Path) -> None:
    browser.open(page)
    (sentence,) = browser.shown("h1")
    assert re.match(r"3 models got worse: .*message_passing.* \(.*aten.index_put.default", sentence)
    assert browser.shown(".reason a") == ["message_passing", "swin_t"]
    first = browser.shown(CHANGES)[0]
    words = ("New difference", "aten.index_put.default", "Net.gather", "accumulation_order", DIAGNOSED.advice)
    assert [word for word in words if word not in first] == []
    assert browser.shown(f"{CHANGES} .name") == ["message_passing", "swin_t", "alexnet"]
    assert browser.run("document.querySelector(arguments[0]).getBoundingClientRect().bottom", CHANGES) < 900


def test_known_trouble_is_there_and_closed(browser: Browser, page: Path) -> None:
    browser.open(page)
    assert browser.shown(".standing > summary") == ["Known trouble: 1 row"]
    assert browser.shown(".standing .change") == []


def test_a_link_to_a_diagnosis_opens_it(browser: Browser, page: Path) -> None:
    browser.open(page)
    browser.run("document.querySelector('.members a').click()")
    assert browser.shown("details.model[open] .name") == ["message_passing"]
    (body,) = browser.shown("details.model[open] .body")
    for words in ("with one thread", "0 of 20", "gone", "float32[4]:cccc000000000000", "it enters here", "update"):
        assert words in body


def test_an_address_with_a_model_opens_its_diagnosis(browser: Browser, page: Path) -> None:
    browser.open(page)
    href = browser.run("document.querySelector('.members a').getAttribute('href')")
    browser.open(page, href)
    assert browser.shown("details.model[open] .name") == ["message_passing"]


def test_filters_stand_in_the_address_and_come_back_with_it(browser: Browser, page: Path) -> None:
    browser.open(page)
    browser.choose("f-suite", "specimens")
    browser.choose("f-cause", "accumulation_order")
    browser.choose("order", "name")
    browser.run("document.querySelector('.members a').click()")
    address = browser.run("location.hash")
    browser.open(page, address)  # a reload, or somebody who was sent the link
    assert browser.shown("#matches") == ["1 of 16 rows"]
    assert browser.run("document.getElementById('order').value") == "name"
    assert browser.shown("details.model[open] .name") == ["message_passing"]
    browser.run("document.getElementById('clear').click()")
    browser.choose("order", "trouble")
    assert browser.run("location.hash") == "#specimens.training-float32-cpu.message_passing"
    assert browser.logs() == []


def test_a_damaged_address_shows_everything(browser: Browser, page: Path) -> None:
    browser.open(page, "#suite=none&status=%E0%A4%A&model=nothing&order=")
    assert len(browser.shown("details.model > summary")) == 3
    assert browser.logs() == []


def test_a_table_is_sorted_by_a_pressed_column(browser: Browser, page: Path) -> None:
    def suites() -> list[str]:
        return browser.shown("#totals .suites tbody bdi")

    browser.open(page)
    before = suites()
    browser.run("document.querySelector('#totals .suites thead button').focus()")
    browser.press("ENTER")
    assert suites() == sorted(before)
    browser.press("ENTER")
    assert suites() == sorted(before)[::-1]
    assert browser.run("document.querySelector('[aria-sort]').getAttribute('aria-sort')") == "descending"


def test_diagnoses_are_sorted_by_a_pressed_button(browser: Browser, page: Path) -> None:
    def names() -> list[str]:
        return browser.shown("details.model > summary .name")

    browser.open(page)
    before = names()
    browser.run("document.querySelector('.heads [data-key=place]').focus()")
    browser.press("ENTER")
    assert names() == before == ["message_passing", "swin_t", "slot_memory"]  # as they were: the worst first
    browser.press("ENTER")
    assert names() == before[::-1]
    browser.run("document.querySelector('.heads [data-key=cause]').click()")
    assert names() == ["slot_memory", "message_passing", "swin_t"]
    browser.run("document.querySelector('.heads [data-key=rate]').click()")
    assert names() == ["message_passing", "slot_memory", "swin_t"]


def test_a_command_is_copied_by_its_button(browser: Browser, page: Path) -> None:
    browser.open(page)
    browser.run("document.querySelector('.members a').click()")
    browser.tool(
        "Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"], origin=page.as_uri()
    )
    command = browser.shown("details.model[open] .command code")[0]
    browser.run("document.querySelector('details.model[open] .copy').click()")
    told = (
        "new Promise(done => setTimeout(() => done(document.querySelector('details.model[open] .copy').innerText), 50))"
    )
    assert browser.run(told) == "Copied"
    assert browser.run("navigator.clipboard.readText().catch(() => getSelection().toString())") == command


def test_the_essentials_are_there_without_scripts(browser: Browser, page: Path) -> None:
    browser.tool("Emulation.setScriptExecutionDisabled", value=True)
    browser.open(page)
    assert len(browser.shown(CHANGES)) == 3
    assert len(browser.shown("details.model > summary")) == 3
    assert browser.shown("#filter, #map, #theme") == []


# ------------------------------------------------------------------------------------------- search and filter


def test_a_filter_by_kernel_hides_what_never_had_it(browser: Browser, page: Path) -> None:
    browser.open(page)
    browser.choose("f-kernel", "aten.index_copy_.default")
    assert browser.shown("details.model > summary .name") == ["slot_memory"]
    assert browser.shown(".row .label bdi") == ["slot_memory"]
    assert browser.shown(CHANGES) == []
    assert browser.shown("#changes-hidden") == ["3 changes hidden by the filter."]
    assert browser.shown("#matches") == ["1 of 16 rows"]
    browser.run("document.getElementById('clear').click()")
    assert len(browser.shown("details.model > summary")) == 3


@pytest.mark.parametrize(
    ("field", "value", "names"),
    [
        ("f-cause", "accumulation_order", ["message_passing"]),
        ("f-suite", "specimens", ["message_passing", "slot_memory"]),
        ("f-mode", "training", ["message_passing", "swin_t", "slot_memory"]),
        ("f-status", "timeout", ["swin_t"]),
        ("f-status", "no row", []),
    ],
)
def test_a_filter_keeps(browser: Browser, page: Path, field: str, value: str, names: list[str]) -> None:
    browser.open(page)
    browser.choose(field, value)
    assert browser.shown("details.model > summary .name") == names


def test_search_finds_names_kernels_causes(browser: Browser, page: Path) -> None:
    browser.open(page)
    browser.press("/")
    assert browser.focus == "q"
    browser.press(*"INDEX write_r")
    browser.run("new Promise(done => setTimeout(done, 150))")
    assert browser.shown("details.model > summary .name") == ["slot_memory"]
    browser.press("ESCAPE")
    assert len(browser.shown("details.model > summary")) == 3


# ---------------------------------------------------------------------------------------------------- the map


def test_map_has_every_model_ever_in_trouble(browser: Browser, page: Path) -> None:
    browser.open(page)
    assert browser.shown(".row .label bdi") == ["message_passing", "swin_t", "slot_memory"]
    browser.run("document.getElementById('all-models').click()")
    assert len(browser.shown(".row")) == 16


def test_cells_are_drawn_in_the_colours_of_their_kinds(browser: Browser, page: Path) -> None:
    browser.open(page)
    colours = browser.run(
        "[...document.querySelectorAll('.row canvas')].slice(0, 2).map(c => [2.1, 1.1].map(n => "
        "[...c.getContext('2d').getImageData(Math.round(n * 44), 5, 1, 1).data].join()))"
    )
    (differs, passed), (fails, _) = colours
    assert differs == "194,65,12,255"
    assert fails == "134,25,143,255"
    assert passed.endswith(",0")  # a thin line in the middle, nothing near the edge


def test_keys_lead_through_the_map_to_a_diagnosis_and_back(browser: Browser, page: Path) -> None:
    browser.open(page)
    browser.run("document.getElementById('grid').focus()")
    browser.press("ARROW_DOWN")
    (read,) = browser.shown("#readout")
    assert "message_passing" in read
    assert "2026-11-03: eager_two_runs_differ, aten.index_put.default, accumulation_order" in read
    browser.press("ARROW_LEFT")
    assert "2026-11-02: pass (2026-11-01 to 2026-11-02)" in browser.shown("#readout")[0]
    assert "packages.torch 2.15.0 → 2.16.0" in browser.shown("#readout")[0]
    active = browser.run("document.getElementById(document.activeElement.getAttribute('aria-activedescendant'))")
    assert active.get_attribute("aria-label").startswith("message_passing: eager_two_runs_differ 2026-11-03; pass")
    browser.press("ENTER")
    assert browser.shown("details.model[open] .name") == ["message_passing"]
    assert browser.focus.startswith("D\nmessage_passing")
    browser.press("ESCAPE")
    assert browser.shown("details.model[open] .name") == []
    assert browser.focus == "grid"


def test_only_visible_rows_are_drawn(browser: Browser, tmp_path: Path) -> None:
    found = History(
        tuple(Night(f"night {n}", counts={"timeout": 1000}) for n in range(400)),
        tuple(
            ModelHistory(("s", "training", "float32", "cpu", f"m{m:03}"), (Interval(0, 399, "timeout"),))
            for m in range(1000)
        ),
    )
    path = tmp_path / "many.html"
    path.write_text(render_html(JudgedNight(found, ())), encoding="utf-8")
    browser.open(path)
    assert len(browser.shown(".row")) < 60
    browser.run("document.getElementById('grid').focus()")
    browser.press("CONTROL", "END")
    assert "m999" in browser.shown("#readout")[0]
    assert "m999" in browser.shown(".row .label bdi")
    assert browser.logs() == []


# ------------------------------------------------------------------------------------------ every reader's way


def test_the_first_tab_leads_past_the_heading(browser: Browser, page: Path) -> None:
    browser.open(page)
    browser.press("TAB")
    assert browser.focus == "Skip to what changed"
    assert browser.run("document.activeElement.getBoundingClientRect().left") >= 0
    browser.press("ENTER")
    assert browser.focus == "changes"


@pytest.mark.slow
def test_focusable_elements_have_outline_and_name(browser: Browser, page: Path) -> None:
    browser.open(page)
    seen = []
    for _ in range(60):
        browser.press("TAB")
        if browser.run("document.activeElement === document.body"):
            break
        name, outline = browser.run(
            "(e => [e.getAttribute('aria-label') || e.innerText.trim() || e.labels[0]?.innerText, "
            "getComputedStyle(e).outlineStyle])(document.activeElement)"
        )
        assert name, browser.run("document.activeElement.outerHTML")[:200]
        assert outline != "none", name
        seen.append(name)
    assert "Models by nights" in seen
    assert any(name.startswith("D\nmessage_passing") for name in seen)


def test_every_coloured_sign_has_a_letter_or_a_word(browser: Browser, page: Path) -> None:
    browser.open(page)
    signs = browser.run("[...document.querySelectorAll('.badge')].map(e => e.textContent)")
    assert len(signs) > 5
    assert all(signs)


CONTRAST = """(() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgb = (text) => { canvas.fillStyle = text; canvas.clearRect(0, 0, 1, 1); canvas.fillRect(0, 0, 1, 1);
                          return [...canvas.getImageData(0, 0, 1, 1).data]; };
  const light = ([r, g, b]) => { const [x, y, z] = [r, g, b].map((v) => (v /= 255) <= 0.04045 ? v / 12.92
                                 : ((v + 0.055) / 1.055) ** 2.4); return 0.2126 * x + 0.7152 * y + 0.0722 * z; };
  const behind = (e) => { for (; e; e = e.parentElement) { const c = rgb(getComputedStyle(e).backgroundColor);
                          if (c[3] === 255) return c; } return [255, 255, 255]; };
  for (const d of document.querySelectorAll("details")) d.open = true;
  const found = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const e = walker.currentNode.parentElement, text = walker.currentNode.data.trim();
    if (!text || !e.checkVisibility() || /^(SCRIPT|STYLE|OPTION|NOSCRIPT)$/.test(e.tagName)) continue;
    const style = getComputedStyle(e), size = parseFloat(style.fontSize);
    const large = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
    const [a, b] = [light(rgb(style.color)), light(behind(e))].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < (large ? 3 : 4.5)) found.push(`${ratio.toFixed(2)} ${e.className || e.tagName}: ${text.slice(0, 30)}`);
  }
  return found;
})()"""


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_text_stands_out_from_what_is_behind_it(browser: Browser, page: Path, dark: bool) -> None:
    browser.look(dark=dark)
    browser.open(page)
    assert browser.run(CONTRAST) == []


def test_colours_follow_the_system_until_the_reader_decides(browser: Browser, page: Path) -> None:
    paper = "getComputedStyle(document.body).backgroundColor"
    browser.open(page)
    light = browser.run(paper)
    browser.look(dark=True)
    browser.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    dark = browser.run(paper)
    assert light != dark
    assert browser.shown("#theme .theme-word") == ["Light"]
    browser.run("document.getElementById('theme').click()")
    assert browser.run(paper) == light
    assert browser.run("document.getElementById('theme').getAttribute('aria-pressed')") == "false"


@pytest.mark.parametrize("width", [320, 390, 700, 1200])
def test_nothing_is_wider_than_the_screen(browser: Browser, page: Path, width: int) -> None:
    browser.look(width=width)
    browser.open(page)
    browser.run("document.querySelectorAll('details').forEach(d => { d.open = true })")
    assert browser.run("[document.documentElement.scrollWidth, innerWidth]") == [width, width]


def test_filters_are_folded_on_a_phone(browser: Browser, page: Path) -> None:
    browser.look(width=390)
    browser.open(page)
    assert browser.shown("#f-kernel") == []
    browser.run("document.getElementById('more').click()")
    assert len(browser.shown("#f-kernel")) == 1


@pytest.mark.parametrize(("calm", "moves"), [(True, False), (False, True)])
def test_nothing_moves_for_those_who_asked_for_calm(browser: Browser, page: Path, calm: bool, moves: bool) -> None:
    browser.look(calm=calm)
    browser.open(page)
    assert (browser.run("getComputedStyle(document.documentElement).scrollBehavior") == "smooth") is moves


def test_the_page_prints_with_every_diagnosis_open(browser: Browser, page: Path) -> None:
    browser.open(page)
    browser.run("dispatchEvent(new Event('beforeprint'))")
    assert browser.run("document.querySelectorAll('details:not([open])').length") == 0
    browser.run("dispatchEvent(new Event('afterprint'))")
    assert browser.run("document.querySelectorAll('details.model[open]').length") == 0
    printed = base64.b64decode(browser.tool("Page.printToPDF")["data"])
    assert printed.startswith(b"%PDF")
    assert printed.count(b"/Type /Page\n") > 2


@pytest.fixture(scope="session")
def short_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fifty nights of three models."""
    before = [passing(DIAGNOSED), row("resnet18"), row("swin_t")]
    path = tmp_path_factory.mktemp("few") / "report.html"
    path.write_text(render_html(judged(*[before] * 49, [DIAGNOSED, row("resnet18"), failed("swin_t")])), "utf-8")
    return path


def test_a_short_page_has_no_filter(browser: Browser, short_page: Path) -> None:
    browser.open(short_page)
    assert browser.shown("#filter") == []
    assert browser.shown(".row .label bdi") == ["message_passing", "swin_t", "resnet18"]
    browser.press("/")
    assert browser.focus != "q"
    assert browser.logs() == []


def test_a_filter_in_the_address_of_a_short_page_can_be_cleared(browser: Browser, short_page: Path) -> None:
    browser.open(short_page, "#mode=training&q=swin")
    assert browser.shown("#matches") == ["1 of 3 rows"]
    browser.run("document.getElementById('clear').click()")
    assert len(browser.shown("details.model > summary")) == 2


@pytest.mark.parametrize("width", [420, 1280])
def test_the_judged_night_has_its_date(browser: Browser, short_page: Path, width: int) -> None:
    browser.look(width=width)
    browser.open(short_page)
    labels = browser.run("document.getElementById('axis').dataset.labels").split()
    assert labels[-1] == "2026-11-50"
    assert labels[0] == "2026-11-21"  # thirty nights are shown


def test_a_phone_shows_kernel_and_cause_of_each_diagnosis(browser: Browser, page: Path) -> None:
    browser.look(width=420)
    browser.open(page)
    summaries = browser.shown("details.model > summary")
    for summary, words in zip(summaries, (DIAGNOSED.kernel, "timeout", "aten.index_copy_.default"), strict=True):
        assert words in summary
    assert DIAGNOSED.cause in summaries[0]
    box = "[...document.querySelectorAll('details.model .what code')].map(e => e.getBoundingClientRect().right)"
    assert all(right <= 420 for right in browser.run(box))
