"""The report's page in a real browser: it draws, answers, fits the screen, and asks nobody for anything."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver import ActionChains, Chrome, Keys
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

WAIT_S = 60
DESKTOP, PHONE = (1280, 900), (390, 844)


def open_page(browser: Chrome, page: Path, size: tuple[int, int] = DESKTOP, scheme: str = "light") -> None:
    """Opens the page from disk, and goes through it so that all of it is drawn."""
    width, height = size
    metrics = {
        "width": width,
        "height": height,
        "deviceScaleFactor": 1,
        "mobile": size != DESKTOP,
    }  # a phone and paper have no scroll bars
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    for kind in ("browser", "performance"):
        browser.get_log(kind)  # of earlier pages
    browser.get(page.as_uri())
    places = browser.find_elements(By.CLASS_NAME, "figure")
    assert places
    for place in places:
        browser.execute_script("arguments[0].scrollIntoView()", place)
        WebDriverWait(browser, WAIT_S).until(lambda _, place=place: place.find_elements(By.CSS_SELECTOR, ".main-svg"))
    browser.execute_script("scrollTo(0, 0)")


def problems(browser: Chrome) -> list[str]:
    return [entry["message"] for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]


def requested(browser: Chrome) -> list[str]:
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    sent = [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]
    return [url for url in sent if not url.startswith(("data:", "blob:"))]


def colour(browser: Chrome, selector: str, name: str) -> tuple[int, ...]:
    # In one go: a figure that is drawn anew has other elements.
    style = "return getComputedStyle(document.querySelector(arguments[0])).getPropertyValue(arguments[1])"
    found = browser.execute_script(style, selector, name)
    return tuple(int(part) for part in found[found.index("(") + 1 : -1].split(",")[:3])


@pytest.mark.parametrize("kind", ["simulated_page", "measured_page"])
def test_all_figures_are_drawn_without_an_error_or_a_request(
    browser: Chrome, kind: str, request: pytest.FixtureRequest
) -> None:
    page: Path = request.getfixturevalue(kind)
    open_page(browser, page)
    assert problems(browser) == []
    assert requested(browser) == [page.as_uri()]
    for place in browser.find_elements(By.CLASS_NAME, "figure"):
        marks = place.find_elements(By.CSS_SELECTOR, ".points path, .scatter path, .bars path, .waterfalllayer path")
        assert marks, place.get_attribute("id")


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_the_screen_and_follows_its_scheme(
    browser: Chrome, simulated_page: Path, size: tuple[int, int], scheme: str
) -> None:
    open_page(browser, simulated_page, size, scheme)
    width = browser.execute_script("return document.documentElement.scrollWidth")
    assert width <= size[0]
    for place in browser.find_elements(By.CLASS_NAME, "figure"):
        assert place.find_element(By.CSS_SELECTOR, ".main-svg").size["width"] <= size[0]
    ground = sum(colour(browser, "body", "background-color"))
    text, axis = sum(colour(browser, "body", "color")), sum(colour(browser, ".xtick text", "fill"))
    assert (ground > text) == (ground > axis) == (scheme == "light")
    assert abs(ground - axis) > 300, "ticks that can be read"


def test_figures_follow_a_change_of_the_scheme(browser: Chrome, simulated_page: Path) -> None:
    open_page(browser, simulated_page)
    before = colour(browser, ".xtick text", "fill")
    features = [{"name": "prefers-color-scheme", "value": "dark"}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    WebDriverWait(browser, WAIT_S).until(lambda _: colour(browser, ".xtick text", "fill") != before)


def points_of(browser: Chrome) -> list[Any]:
    browser.execute_script("document.getElementById('all-trials').scrollIntoView()")
    return browser.find_elements(By.CSS_SELECTOR, "#speed-and-memory .points path")


def test_hovering_a_trial_shows_it_and_a_click_names_its_command(browser: Chrome, simulated_page: Path) -> None:
    open_page(browser, simulated_page)
    point = points_of(browser)[0]
    ActionChains(browser).move_to_element(point).perform()
    shown = WebDriverWait(browser, WAIT_S).until(
        lambda _: browser.find_elements(By.CSS_SELECTOR, "#speed-and-memory .hovertext")
    )
    for word in ("trial", "MFU", "tokens/s", "GiB"):
        assert word in shown[0].text
    assert not browser.find_element(By.ID, "picked").is_displayed()
    ActionChains(browser).click(point).perform()
    picked = browser.find_element(By.ID, "picked")
    WebDriverWait(browser, WAIT_S).until(lambda _: picked.is_displayed())
    command, settings = (part.text for part in picked.find_elements(By.TAG_NAME, "code"))
    assert "autotune measure" in command
    for line in settings.splitlines():
        assert line in shown[0].text, "the settings that were hovered"


def test_the_copy_button_copies(browser: Chrome, simulated_page: Path) -> None:
    open_page(browser, simulated_page)
    box = browser.find_element(By.CSS_SELECTOR, "#panel-plain .code")
    button = box.find_element(By.CLASS_NAME, "copy")
    button.click()
    WebDriverWait(browser, WAIT_S).until(lambda _: button.text == "Copied")
    area = browser.execute_script(
        "const area = document.createElement('textarea'); document.body.prepend(area); area.focus(); return area"
    )
    area.send_keys(Keys.CONTROL, "v")
    expected = box.find_element(By.TAG_NAME, "code").get_attribute("textContent")
    assert area.get_attribute("value") == expected
    assert expected is not None
    assert "micro_batch_size:" in expected


def test_tabs_show_one_trainer_at_a_time(browser: Chrome, simulated_page: Path) -> None:
    open_page(browser, simulated_page)
    tabs = browser.find_elements(By.CSS_SELECTOR, "[role=tab]")
    assert len(tabs) == 7
    tabs[2].click()
    panels = browser.find_elements(By.CSS_SELECTOR, "[role=tabpanel]")
    assert [panel.is_displayed() for panel in panels] == [number == 2 for number in range(7)]
    tabs[2].send_keys(Keys.ARROW_RIGHT)
    assert browser.switch_to.active_element == tabs[3]
    assert [panel.is_displayed() for panel in panels] == [number == 3 for number in range(7)]


PAPER = (688, 986)
"""CSS pixels of an A4 page between its margins."""


def test_it_prints_light_and_whole(browser: Chrome, simulated_page: Path) -> None:
    open_page(browser, simulated_page, PAPER, scheme="dark")
    browser.execute_script("dispatchEvent(new Event('beforeprint'))")
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print", "features": []})
    assert colour(browser, "body", "background-color") == (255, 255, 255)
    for place in browser.find_elements(By.CLASS_NAME, "figure"):
        drawn, room = place.find_element(By.CSS_SELECTOR, ".main-svg").size["width"], place.size["width"]
        assert drawn <= room, f"{place.get_attribute('id')} is wider than its place: all of the print is shrunk"
        assert drawn > 0.9 * room
    assert browser.execute_script("return document.documentElement.scrollWidth") <= PAPER[0]
    assert sum(colour(browser, ".xtick text", "fill")) < 100
    assert not any(button.is_displayed() for button in browser.find_elements(By.CLASS_NAME, "copy"))
    browser.execute_script("dispatchEvent(new Event('afterprint'))")
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "screen", "features": []})
    assert problems(browser) == []
