"""Narrow screens, dark and light, contrast and reduced motion."""

import pytest

from paceline_testing.browser_visit import Visit

expect = pytest.importorskip("playwright.sync_api", reason="playwright is missing: run `make test-browser`").expect

_CONTRAST = """
() => {
  const channels = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const luminance = (colour) => {
    const [r, g, b] = channels(colour).slice(0, 3).map((value) => {
      const share = value / 255;
      return share <= 0.03928 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const backgroundOf = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const colour = getComputedStyle(at).backgroundColor;
      if (!/, 0\\)$/.test(colour)) return colour;
    }
    return 'rgb(255, 255, 255)';
  };
  const low = [];
  for (const element of document.querySelectorAll('body *')) {
    const hasText = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    const words = hasText ? element.textContent.trim() : element.placeholder;
    if (!words || !element.checkVisibility() || element.closest('.unseen, script, style')) continue;
    const { color } = getComputedStyle(element, hasText ? null : '::placeholder');
    const both = [luminance(color), luminance(backgroundOf(element))];
    const [high, dim] = both.sort((a, b) => b - a);
    const ratio = (high + 0.05) / (dim + 0.05);
    if (ratio < 4.5) low.push([words.slice(0, 30), ratio]);
  }
  return low;
}
"""
_TOO_WIDE = """
() => [...document.querySelectorAll('html, #log, #cluster, #composer, dialog')]
  .filter((element) => element.scrollWidth > element.clientWidth).map((element) => element.id || element.localName)
"""
_BRIGHTNESS = "() => getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("path", ["/", "/docs"])
def test_text_is_readable_in_both_colour_schemes(browser, gateway, router, scheme, path):
    with Visit(browser, gateway[0], color_scheme=scheme) as visit:
        page = visit.open(path)
        if path == "/":
            visit.send("one two three four")
            expect(page.get_by_role("button", name="Run without speculation")).to_be_visible()
            router.failures.append((0, RuntimeError("out of order")))
            visit.send("five")
            expect(page.get_by_role("alert")).to_be_visible()
            _show_all_hues(page)
        else:
            expect(page.get_by_role("heading", name="Endpoints")).to_be_visible()
        assert page.evaluate(_CONTRAST) == []
        brightness = page.evaluate(_BRIGHTNESS)
        assert max(brightness) < 60 if scheme == "dark" else min(brightness) > 200


def _show_all_hues(page):
    page.evaluate("""() => { for (let hue = 0; hue < 10; hue += 1) {
        const part = document.createElement('span');
        part.className = `drafted hue-${hue}`;
        part.append(`hue ${hue}`);
        document.querySelector('.text').append(part);
    } }""")


@pytest.mark.parametrize("width", [390, 320])
def test_nothing_needs_sideways_scrolling_on_a_narrow_screen(browser, gateway, router, width):
    with Visit(browser, gateway[0]) as visit:
        visit.page.set_viewport_size({"width": width, "height": 800})
        page = visit.open()

        def fits():
            assert page.evaluate(_TOO_WIDE) == []

        fits()
        visit.send("word " * 30 + "w" * 200)
        expect(page.get_by_role("button", name="Run without speculation")).to_be_visible()
        page.get_by_role("button", name="Run without speculation").click()
        expect(page.locator(".compared")).to_be_visible()
        fits()
        page.get_by_text("Options").click()
        expect(page.get_by_label("Temperature")).to_be_in_viewport()
        fits()
        page.get_by_role("button", name="Cluster").click()
        expect(page.get_by_role("row", name="Target groups")).to_be_in_viewport()
        expect(page.get_by_label("Message", exact=True)).to_be_in_viewport()
        fits()
        page.get_by_role("button", name="API key").click()
        expect(page.get_by_role("dialog")).to_be_in_viewport()
        fits()
        page.keyboard.press("Escape")
        visit.open("/docs")
        expect(page.get_by_role("heading", name="Endpoints")).to_be_visible()
        fits()


@pytest.mark.parametrize(("motion", "animation"), [("reduce", "none"), ("no-preference", "blink")])
def test_nothing_moves_for_those_who_want_no_motion(browser, gateway, router, motion, animation):
    router.delay_s = 0.05
    with Visit(browser, gateway[0], reduced_motion=motion) as visit:
        page = visit.open()
        visit.send("one two three four")
        caret = page.locator(".running .text")
        assert caret.evaluate("text => getComputedStyle(text, '::after').animationName") == animation
        page.keyboard.press("Escape")
