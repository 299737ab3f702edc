"""The page at `/`, in a browser: chatting, stopping, the key, the picture of the block pool."""

import json
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from jaxpaged.server.routes.engine_state import run_lengths
from tests.support.live_server import ROOT, LiveServer, write_tiny_model
from tests.support.scripted_model import write_scripted_model

KEY = {"authorization": "Bearer sesame"}
SCRIPTS = {"hello": ["<b>Hi</b>", " <img src=x onerror=alert(1)>", " &amp;\n", "two lines"],
           "think": ["<think>\n", "I wonder.", "\n</think>", "Done"], "loop": ["and on "]}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("page")
    model = write_scripted_model(folder / "model", SCRIPTS, endless=["loop"], context=8192)
    with LiveServer(folder / "log", str(model), "--served-model-name", "m", "alias", "--max-num-seqs", "4",
                    "--max-num-batched-tokens", "16", "--num-gpu-blocks-override", "600", "--api-key", "sesame",
                    "--reasoning-parser", "qwen3", "--enable-reset-prefix-cache", "--swap-space", "0.01",
                    "--enforce-eager") as live:
        yield live.wait_ready()


# The endpoint that feeds it


def state(server: LiveServer) -> Any:
    return httpx.get(f"{server.url}/engine/state", headers=KEY).json()


def state_codes(found: Any) -> str:
    return "".join(letter * int(count) for count, letter in re.findall(r"(\d+)([a-z])", found["blocks"]["runs"]))


def chat(server: LiveServer, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/chat/completions", headers=KEY, timeout=60, json={
        "messages": [{"role": "user", "content": "x" * 100}], **body})


def test_the_state_reports_every_block(server: LiveServer) -> None:
    assert httpx.get(f"{server.url}/engine/state").status_code == 401
    assert chat(server, max_tokens=3).status_code == 200
    time.sleep(0.3)
    idle = state(server)
    blocks = idle["blocks"]
    assert blocks["total"] == 599 == sum(blocks[name] for name in ("free", "owned", "shared", "cached"))
    assert blocks["cached"] > 0 == blocks["owned"] == blocks["shared"] == blocks["swapped"]
    assert [state_codes(idle).count(letter) for letter in "fosc"] == [
        blocks[name] for name in ("free", "owned", "shared", "cached")]
    assert idle["running"] == idle["waiting"] == 0 and idle["first_tokens"] >= 1
    body = {"messages": [{"role": "user", "content": "loop"}], "max_tokens": 4500, "n": 2, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", headers=KEY, json=body, timeout=60) as answer:
        lines = answer.iter_lines()
        next(lines)  # read no more: the engine can be done while a slow client still reads

        def both_run() -> bool:
            busy = state(server)
            return busy["running"] == 2 and busy["blocks"]["owned"] > 0

        server.wait_for(both_run, 5)
        busy = state(server)
        assert busy["generation_tokens"] > idle["generation_tokens"] and busy["time"] > idle["time"]
    assert httpx.post(f"{server.url}/reset_prefix_cache", headers=KEY).status_code == 200
    server.wait_for(lambda: state(server)["blocks"]["free"] == 599, 5)


def test_run_lengths() -> None:
    assert run_lengths("") == "" and run_lengths("ffoc" + "s" * 1000) == "2f1o1c1000s"


def test_the_page_is_one_file_that_loads_nothing(server: LiveServer) -> None:
    answer = httpx.get(f"{server.url}/")
    assert answer.status_code == 200 and answer.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    text = answer.text
    assert not re.search(r"https?://|stylesheet|\bsrc=|@import|innerHTML|outerHTML|document\.write|\beval\b", text)
    assert text == (ROOT / "server" / "routes" / "page.html").read_text()


# In a browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not chromium or not driver:
        pytest.skip("needs Debian's packages chromium and chromium-driver")
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1280,900",
                     "--disable-background-networking", "--disable-component-update"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    found = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield found
    found.quit()


class Page:
    """The page as somebody with a keyboard uses it."""

    def __init__(self, browser: Any) -> None:
        self.browser = browser

    def find(self, selector: str) -> list[Any]:
        return list(self.browser.find_elements("css selector", selector))

    def text(self, selector: str) -> list[str]:
        return [str(item.get_attribute("textContent")) for item in self.find(selector)]

    def keys(self, *keys: str) -> None:
        from selenium.webdriver import ActionChains

        ActionChains(self.browser).send_keys(*keys).perform()

    def wait(self, condition: Callable[[], object], timeout: float = 20) -> None:
        deadline = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < deadline, self.text("body")
            time.sleep(0.05)

    def answered(self, count: int) -> bool:
        return len(self.find(".message.assistant")) == count and not self.find(".busy")


@pytest.fixture(scope="module")
def page(server: LiveServer, browser: Any) -> Page:
    """Opened, and authorized with the key."""
    from selenium.webdriver import Keys

    found = Page(browser)
    browser.get(f"{server.url}/")
    found.wait(lambda: found.find("dialog[open]"))
    assert not found.find("#why.bad")
    found.keys("wrong", Keys.ENTER)
    found.wait(lambda: found.find("#why.bad"))
    found.wait(lambda: found.find("dialog[open]") and not found.find("#key")[0].get_attribute("value"))
    found.keys("sesame", Keys.ENTER)
    found.wait(lambda: found.text("#health") == ["serving"])
    found.wait(lambda: found.text("#model option") == ["m", "alias"])
    return found


@pytest.fixture(autouse=True)
def shots(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    if "page" in request.fixturenames:
        request.getfixturevalue("browser").save_screenshot(str(tmp_path / f"{request.node.name}.png"))


def test_chat_by_keyboard(page: Page) -> None:
    from selenium.webdriver import Keys

    page.find("#prompt")[0].click()
    page.keys("hello", Keys.ENTER)
    page.wait(lambda: page.answered(1))
    # what the model writes stays text
    assert page.text(".message.assistant .text") == ["<b>Hi</b> <img src=x onerror=alert(1)> &amp;\ntwo lines"]
    assert not page.find(".message b") and not page.find(".message img")
    assert page.text(".message.user .text") == ["hello"]
    assert "5 tokens" in page.text(".figures")[-1] and "first after" in page.text(".figures")[-1]
    assert page.browser.switch_to.active_element.get_attribute("id") == "prompt"
    page.keys("think", Keys.ENTER)
    page.wait(lambda: page.answered(2))
    assert page.text(".message.assistant .text")[-1] == "Done"
    assert page.text(".message details div") == ["I wonder."]


def test_stop_and_controls(page: Page, server: LiveServer) -> None:
    from selenium.webdriver import Keys

    page.find("#clear")[0].click()
    page.keys("loop", Keys.ENTER)
    page.wait(lambda: "and on and on" in "".join(page.text(".message.assistant .text")))
    page.wait(lambda: page.text("#running") == ["1"])
    assert not page.find("#send")[0].is_enabled()
    page.find("#stop")[0].click()
    page.wait(lambda: page.answered(1))
    assert "stopped" in page.text(".figures")[-1]
    server.wait_for(lambda: state(server)["running"] == 0, 5)
    for name, value in (("max_tokens", "7"), ("temperature", "0.5"), ("top_p", "0.9"), ("top_k", "3"), ("seed", "1")):
        page.find(f"#{name}")[0].send_keys(value)
    page.find("#prompt")[0].click()
    page.keys("loop", Keys.ENTER)
    page.wait(lambda: page.answered(2))
    assert page.text(".message.assistant .text")[-1] == "and on " * 7
    assert "cut at the limit" in page.text(".figures")[-1]
    page.find("#max_tokens")[0].send_keys("999999")
    page.find("#prompt")[0].click()
    page.keys("loop", Keys.ENTER)
    page.wait(lambda: page.answered(3))
    assert "context" in page.text(".message.failed .figures")[0]  # the server's own words
    page.find("#max_tokens")[0].clear()
    page.keys(Keys.ESCAPE)


def test_the_pool_is_drawn_block_by_block(page: Page, server: LiveServer) -> None:
    httpx.post(f"{server.url}/reset_prefix_cache", headers=KEY)
    assert chat(server, max_tokens=3).status_code == 200
    page.wait(lambda: 0 < state(server)["blocks"]["cached"] < 20)
    expected = state(server)["blocks"]
    label = "599 KV blocks: " + ", ".join(f"{expected[name]} {name}" for name in (
        "free", "owned", "shared", "cached", "swapped"))
    page.wait(lambda: page.find("#pool")[0].get_attribute("aria-label") == label)
    assert page.text("#legend li") == [f"{name} {expected[name]}" for name in (
        "free", "owned", "shared", "cached", "swapped")]
    for _ in schemes(page):
        check_picture(page)
        assert _contrast(page, "#prompt") > 7 and _contrast(page, "#about") > 4.5 and _contrast(page, "#send") > 4.5


def test_swapped_blocks_are_drawn_beside_the_pool(page: Page, server: LiveServer, shots: Path) -> None:
    """Two long prompts, and the pool holds only one; beside two running choices of one prompt."""
    httpx.post(f"{server.url}/reset_prefix_cache", headers=KEY)
    for letter in "yz":
        assert chat(server, messages=[{"role": "user", "content": letter * 6000}], max_tokens=1).status_code == 200
    server.wait_for(lambda: state(server)["blocks"]["swapped"] > 100, 10)
    body = {"messages": [{"role": "user", "content": "x" * 200}], "chat_template_kwargs": {"script": "loop"},
            "max_tokens": 4000, "n": 2, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", headers=KEY, json=body, timeout=60):
        page.wait(lambda: all(numbers(page)[kind] for kind in ("owned", "shared", "cached", "swapped")))
        for scheme in schemes(page):
            check_picture(page)
            page.browser.save_screenshot(str(shots / f"swapped-{scheme}.png"))
    httpx.post(f"{server.url}/reset_prefix_cache", headers=KEY)
    page.wait(lambda: numbers(page)["swapped"] == 0)


def schemes(page: Page) -> Iterator[str]:
    for scheme in ("dark", "light"):
        page.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {
            "features": [{"name": "prefers-color-scheme", "value": scheme}]})
        time.sleep(0.3)
        yield scheme


def numbers(page: Page, label: str | None = None) -> dict[str, int]:
    """Blocks of each kind, as the picture's label has them."""
    label = label or page.find("#pool")[0].get_attribute("aria-label")
    return {kind: int(count) for count, kind in re.findall(r"(\d+) ([a-z]+)", label)}


def check_picture(page: Page) -> None:
    """Each kind has as much of the picture, in its color, as it has of the blocks."""
    label, pixels = page.browser.execute_script("""
        const canvas = document.getElementById("pool"), pen = canvas.getContext("2d"), counts = {};
        const data = pen.getImageData(0, 0, canvas.width, canvas.height).data;
        for (let index = 0; index < data.length; index += 4) {
          if (data[index + 3] === 255) {
            const name = [...data.slice(index, index + 3)].join();
            counts[name] = (counts[name] || 0) + 1;
          }
        }
        const style = getComputedStyle(document.documentElement);
        const pixels = ["free", "owned", "shared", "cached", "swapped"].map((kind) => [kind, counts[
          style.getPropertyValue("--" + kind).match(/[0-9a-f]{2}/g).map((hex) => parseInt(hex, 16)).join()] || 0]);
        return [canvas.getAttribute("aria-label"), Object.fromEntries(pixels)];""")
    blocks = numbers(page, label)
    assert pixels == {kind: pytest.approx(count / sum(blocks.values()) * sum(pixels.values()), rel=0.2)
                      for kind, count in blocks.items()}


def _contrast(page: Page, selector: str) -> float:
    """Of text on its ground, as WCAG defines it."""
    ink, ground = (re.findall(r"[\d.]+", value)[:3] for value in page.browser.execute_script("""
        let box = document.querySelector(arguments[0]), ground = box;
        while (/, 0\\)$/.test(getComputedStyle(ground).backgroundColor)) ground = ground.parentElement;
        return [getComputedStyle(box).color, getComputedStyle(ground).backgroundColor];""", selector))

    def light(color: list[str]) -> float:
        parts = [float(part) / 255 for part in color]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((light(ink), light(ground)))
    return (high + 0.05) / (low + 0.05)


def test_every_control_has_a_name_and_is_reached_by_tab(page: Page) -> None:
    from selenium.webdriver import Keys

    nameless = page.browser.execute_script("""
        return [...document.querySelectorAll("input, select, textarea, button, canvas")].filter((item) =>
          !item.textContent.trim() && !item.getAttribute("aria-label") && !(item.labels && item.labels.length))
          .map((item) => item.id);""")
    assert nameless == []
    page.find("#prompt")[0].click()
    reached = set()
    for _ in range(24):
        page.keys(Keys.TAB)
        reached.add(page.browser.switch_to.active_element.get_attribute("id"))
    assert {"send", "clear", "temperature", "top_p", "top_k", "max_tokens", "seed", "system", "model"} <= reached


def test_a_narrow_window_fits(page: Page) -> None:
    page.browser.set_window_size(420, 900)
    try:
        assert page.browser.execute_script(
            "return document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    finally:
        page.browser.set_window_size(1280, 900)


def test_the_browser_had_nothing_to_complain_of(page: Page) -> None:
    lines = [entry["message"] for entry in page.browser.get_log("browser")]
    expected = ("status of 401", "status of 400", "willReadFrequently")  # the last one is about reading the canvas here
    assert not [line for line in lines if not any(word in line for word in expected)]


def test_blocks_that_only_a_window_sees_are_drawn_paler(browser: Any, tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    layers = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 64,
              "layer_types": ["full_attention", "sliding_attention"]}
    with LiveServer(tmp_path / "log", str(model), "--hf-overrides", json.dumps(layers), "--num-gpu-blocks-override",
                    "300", "--max-num-batched-tokens", "16", "--enforce-eager") as live:
        live.wait_ready()
        before = browser.current_window_handle
        browser.switch_to.new_window("tab")
        found = Page(browser)
        browser.get(f"{live.url}/")
        body = {"model": str(model), "prompt": "x" * 300, "max_tokens": 3500, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{live.url}/v1/completions", json=body, timeout=60):
            found.wait(lambda: re.search(r"[2-9]\d for all tokens", found.text("#size")[0]))
            text, owned, paler = browser.execute_script("""
                const canvas = document.getElementById("pool"), pen = canvas.getContext("2d");
                const data = pen.getImageData(0, 0, canvas.width, canvas.height).data;
                const color = getComputedStyle(document.documentElement).getPropertyValue("--owned")
                  .match(/[0-9a-f]{2}/g).map((hex) => parseInt(hex, 16)).join();
                let owned = 0, paler = 0;
                for (let index = 0; index < data.length; index += 4) {
                  owned += data[index + 3] === 255 && [...data.slice(index, index + 3)].join() === color;
                  paler += data[index + 3] > 100 && data[index + 3] < 160;
                }
                return [document.getElementById("size").textContent, owned, paler];""")
            state = httpx.get(f"{live.url}/engine/state").json()
        browser.close()
        browser.switch_to.window(before)
    match = re.search(r": (\d+) for all tokens, (\d+) for a window of 64$", text)
    assert match, text
    full, windowed = map(int, match.groups())
    assert full >= 20 > windowed > 0
    assert paler / owned == pytest.approx(windowed / full, rel=0.2)
    assert [group["window"] for group in state["blocks"]["groups"]] == [None, 64]
