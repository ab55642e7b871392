"""The pages in a real browser: Chromium, driven by Playwright."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
AXE = Path(__file__).parents[2] / "node_modules" / "axe-core" / "axe.min.js"
# Chromium itself looks for nothing on a network; root needs it without a sandbox.
QUIET = [
    "--no-sandbox",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
WIDTHS = {"desktop": (1280, 860), "phone": (400, 800)}

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        yield started
        started.close()


@pytest.fixture
def open_page(browser, server):
    """Opens a page; at the end, nothing may have been written to its console."""
    contexts, faults = [], []

    def open_(path="/", *, width="desktop", scheme="light"):
        wide, high = WIDTHS[width]
        context = browser.new_context(
            viewport={"width": wide, "height": high},
            color_scheme=scheme,
            base_url=server.url,
            accept_downloads=True,
        )
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(20_000)
        page.on("console", lambda m: faults.append(m.text) if m.type in ("error", "warning") else 0)
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("dialog", lambda dialog: faults.append(f"dialog: {dialog.message}"))
        page.goto(path)
        page.wait_for_load_state("networkidle")
        return page

    open_.faults = faults
    yield open_
    for context in contexts:
        context.close()
    assert faults == []


def names(page):
    return page.eval_on_selector_all("#results .card img", "found => found.map(one => one.alt)")


def distances(page):
    texts = page.eval_on_selector_all(
        "#results .distance", "found => found.map(one => one.textContent)"
    )
    return [int(re.search(r"\d+", text)[0]) for text in texts]


def give(page, how, data, path):
    """Drop a file on the page, paste it, or choose it, as a browser reports that."""
    if how == "choose":
        path.write_bytes(data)
        page.set_input_files("input[type=file]", path)
        return
    page.evaluate(
        """([how, bytes]) => {
            const files = new DataTransfer();
            files.items.add(new File([new Uint8Array(bytes)], "x.png", {type: "image/png"}));
            if (how === "paste") {
                const paste = {clipboardData: files, bubbles: true};
                document.dispatchEvent(new ClipboardEvent("paste", paste));
                return;
            }
            for (const kind of ["dragenter", "dragover", "drop"]) {
                const about = {dataTransfer: files, bubbles: true, cancelable: true};
                document.body.dispatchEvent(new DragEvent(kind, about));
            }
        }""",
        [how, list(data)],
    )


@pytest.mark.parametrize("how", ["drop", "paste", "choose"])
def test_give_an_image_and_see_its_neighbours(open_page, png, tmp_path, how):
    page = open_page()
    give(page, how, png, tmp_path / "chosen.png")
    page.wait_for_url("**code=*")
    assert names(page)[0] == "dogs/17.png"
    assert distances(page)[0] == 0
    assert distances(page) == sorted(distances(page))
    assert page.locator("h1").inner_text() == "Your image"
    assert page.locator(".subject img").evaluate("one => one.naturalWidth") > 0
    # The address alone shows the same to somebody else.
    assert names(open_page(page.url)) == names(page)


def test_click_filter_and_go_back(open_page, id_of):
    page = open_page(f"/?like={id_of('cats/03.jpg')}")
    first = names(page)
    page.locator("#results .frame").first.click()
    page.wait_for_url(lambda url: f"like={id_of(first[0])}" in url)
    assert page.locator(".query h1").get_attribute("title") == first[0]
    assert "cats/03.jpg" in names(page)
    assert first[0] not in names(page)
    page.go_back()
    page.wait_for_url(f"**/?like={id_of('cats/03.jpg')}")
    assert names(page) == first
    page.locator(".filter a", has_text="dogs").click()
    page.wait_for_url("**where=label%3Ddogs*")
    assert len(names(page)) == 12
    assert page.locator(".filter a[aria-current]").inner_text().split() == ["dogs", "12"]
    page.locator(".chips a").click()
    page.wait_for_url(f"**/?like={id_of('cats/03.jpg')}")
    assert names(page) == first


def slide(page, selector, value):
    """Move a slider, as dragging it does."""
    page.locator(selector).evaluate(
        "(one, to) => {one.value = to; one.dispatchEvent(new Event('input', {bubbles: true}))}",
        value,
    )


def wait_for_results(page, count):
    page.wait_for_function(
        "many => document.querySelectorAll('#results .card').length === many", arg=count
    )


def test_sliders_answer_while_they_are_dragged(open_page, id_of):
    page = open_page(f"/?like={id_of('cats/03.jpg')}")
    page.locator(".histogram").wait_for()
    every = distances(page)
    wanted = every[len(every) // 2]
    near = [one for one in every if one <= wanted]
    slide(page, "#radius", wanted)
    wait_for_results(page, len(near))
    assert distances(page) == near
    page.wait_for_url(f"**radius={wanted}")
    assert f"up to {wanted} bits: {len(near)}" in page.locator("output[for=radius]").inner_text()
    inside = page.eval_on_selector_all(
        ".histogram rect:not(.out)", "all => all.map(one => Number(one.dataset.distance))"
    )
    assert max(inside) <= wanted
    slide(page, "#radius", 64)
    wait_for_results(page, len(every))
    slide(page, "#k", 5)
    wait_for_results(page, 5)
    page.wait_for_url("**k=5")
    page.reload()
    assert len(names(page)) == 5
    assert page.locator("#k").input_value() == "5"


def test_keys_move_between_results(open_page, id_of):
    page = open_page(f"/?like={id_of('cats/03.jpg')}")
    page.locator("#results .frame").first.focus()
    for key in ("ArrowRight", "ArrowRight", "ArrowLeft", "ArrowDown"):
        page.keyboard.press(key)
    at = page.evaluate(
        "[...document.querySelectorAll('#results .frame')].indexOf(document.activeElement)"
    )
    row = page.evaluate(
        "getComputedStyle(document.querySelector('.grid')).gridTemplateColumns.split(' ').length"
    )
    assert at == 1 + row
    chosen = names(page)[at]
    page.keyboard.press("Enter")
    page.wait_for_url(lambda url: f"like={id_of(chosen)}" in url)


def test_an_unreadable_upload_shows_a_sentence(open_page, tmp_path):
    page = open_page()
    give(page, "drop", b"this is no image", tmp_path)
    page.locator(".drop .error").wait_for()
    assert page.locator(".drop .error").inner_text().endswith(".")
    assert page.url.endswith("/")
    # The browser itself reports every answer that is no success.
    assert all("422" in fault for fault in open_page.faults)
    open_page.faults.clear()


def test_duplicates_regroup_and_compare(open_page):
    page = open_page("/duplicates")
    group = page.locator(".group", has_text="small.jpg").first
    group.wait_for()
    assert "confirmed" in group.locator("legend").inner_text()
    chosen = int(page.locator("#radius").input_value())
    assert f"{chosen} bits" in page.locator(".threshold").inner_text()
    images = page.locator(".copy").count()
    slide(page, "#radius", 0)
    page.wait_for_function("many => document.querySelectorAll('.copy').length < many", arg=images)
    assert page.url.endswith("code=copy&radius=0")
    slide(page, "#radius", chosen)
    page.wait_for_function("many => document.querySelectorAll('.copy').length == many", arg=images)
    group.get_by_role("button", name="Compare side by side").click()
    assert page.locator("dialog img").count() == 3
    assert "48 × 38" in page.locator("dialog").inner_text()
    page.keyboard.press("Escape")
    assert page.get_by_role("button", name="List").is_disabled()
    group.get_by_role("button", name="Mark all but the best").click()
    assert group.locator("input:checked").count() == group.locator("input").count() - 1
    assert not group.locator(".copy.best input").is_checked()
    page.get_by_role("button", name="Mark confirmed copies").click()
    assert page.locator(".group:not(.sure) input:checked").count() == 0
    with page.expect_download() as download:
        page.get_by_role("button", name="Shell script").click()
    text = Path(download.value.path()).read_text()
    assert text.startswith("#!/bin/sh")
    assert "small.jpg" in text
    page.get_by_role("link", name="Search codes").click()
    page.locator(".group").first.wait_for()
    assert "how similar the content is" in page.locator(".threshold").inner_text()


PAINTED = """() => {
    const canvas = document.querySelector("canvas");
    const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
    let sum = 0;
    for (let at = 3; at < data.length; at += 4) sum += data[at] > 0;
    return sum;
}"""


def test_the_map_draws_opens_and_zooms(open_page, server):
    page = open_page("/map")
    page.locator(f".map[data-points='{len(server.images.index)}']").wait_for()
    page.wait_for_load_state("networkidle")
    page.wait_for_function(f"() => ({PAINTED})() > 3000")
    page.get_by_role("button", name="Zoom in").click()
    page.locator("canvas").focus()
    for key in ("ArrowLeft", "ArrowRight", "+", "-"):
        page.keyboard.press(key)
    page.keyboard.press("Enter")
    page.wait_for_url("**/?like=*")
    assert len(names(page)) == 24


PAGES = ["/", "/?like={}&bits=1", "/map", "/timeline", "/duplicates", "/docs"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_serious_fault(open_page, id_of, scheme):
    if not AXE.is_file():
        pytest.skip(f"{AXE} is missing: make browser")
    script = AXE.read_text(encoding="utf-8")
    page = open_page("/", scheme=scheme)
    for path in PAGES:
        page.goto(path.format(id_of("cats/03.jpg")))
        # A page that is not ready loads itself again.
        page.wait_for_function("!document.querySelector('meta[http-equiv=refresh]')")
        page.wait_for_load_state("networkidle")
        # Through the debugger: the policy of the page allows no foreign script.
        page.evaluate(script + "; void 0")
        found = page.evaluate("axe.run().then((result) => result.violations)")
        serious = [
            (one["id"], [node["html"][:200] for node in one["nodes"]][:3])
            for one in found
            if one["impact"] in ("serious", "critical")
        ]
        assert serious == [], path


@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_is_wider_than_the_screen(open_page, id_of, width):
    page = open_page("/", width=width)
    for path in PAGES:
        page.goto(path.format(id_of("cats/03.jpg")))
        wide = page.evaluate("document.documentElement.scrollWidth")
        assert wide <= WIDTHS[width][0], path
