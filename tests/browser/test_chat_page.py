"""The chat at / over an echoing router."""

import re

import pytest

from actors.errors import LinkError, Overloaded
from paceline_testing.browser_visit import Visit
from paceline_testing.toy_tokenizer import toy_tokenizer

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is missing: run `make test-browser`")
Error, expect = playwright.Error, playwright.expect

TOKENIZER = toy_tokenizer()
LIMIT_BYTES = 60_000
HOSTILE = ("<img src=x onerror=alert(1)>", "<script>alert(1)</script>", "<svg onload=alert(1)>")
WORDS = "one two three four five six seven eight nine ten"


def answer_of(page, number=0):
    return page.locator(".run").nth(number)


def speed_of(run):
    return run.locator(".speed")


def wait_until(page, condition):
    for _ in range(500):
        if condition():
            return
        page.wait_for_timeout(10)
    raise AssertionError("it did not come to be")


def test_the_first_paint_needs_one_small_response(visit):
    page = visit.page
    with page.expect_response(visit.origin + "/") as answered:
        visit.open()
    assert len(answered.value.body()) <= LIMIT_BYTES
    expect(page.get_by_text("toy · 512 tokens")).to_be_visible()  # what comes after the first paint
    painted, asked = page.evaluate(
        "() => [performance.getEntriesByName('first-paint')[0].startTime,"
        " performance.getEntriesByType('resource').map((entry) => entry.startTime)]"
    )
    assert visit.requests[0] == visit.origin + "/"
    assert asked
    assert min(asked) >= painted


def test_an_answer_is_coloured_by_drafter_with_a_legend_and_its_speed(visit, router):
    page = visit.open()
    router.delay_s = 0.002
    visit.send(WORDS)
    run = answer_of(page)
    expect(run).to_have_attribute("aria-busy", "false")
    expect(run.get_by_role("heading")).to_have_text("With speculation")
    text = run.locator(".text")
    expect(text).to_contain_text(WORDS)
    drafted = text.locator("span[data-source=echo]")
    assert drafted.count() > 5
    assert drafted.first.evaluate("part => getComputedStyle(part).backgroundColor") != "rgba(0, 0, 0, 0)"
    legend = run.get_by_role("list", name="Who proposed the tokens")
    for name in ("echo", "target model"):
        assert int(legend.get_by_text(name).locator(".number").inner_text()) > 5
    colours = [
        place.evaluate("part => getComputedStyle(part).backgroundColor")
        for place in (legend.get_by_text("echo").locator(".swatch"), drafted.first)
    ]
    assert colours[0] == colours[1]
    expect(speed_of(run)).to_contain_text("256 tokens · 2.98 tokens a round")  # in 86 rounds of at most 3
    expect(speed_of(run)).to_contain_text(re.compile(r"^\d+\.\d tokens/s"))
    assert router.requests[0].drafters is None


def test_a_drafter_of_the_legend_can_be_shown_alone(visit):
    page = visit.open()
    visit.send(WORDS)
    button = answer_of(page).get_by_role("button", name="echo")
    button.click()
    expect(button).to_have_attribute("aria-pressed", "true")
    expect(page.locator(".text span.chosen").first).to_be_visible()
    button.click()
    expect(button).to_have_attribute("aria-pressed", "false")
    assert page.locator(".text span.chosen").count() == 0


def test_both_ways_of_decoding_are_compared(visit, router):
    page = visit.open()
    router.delay_s = 0.002
    page.get_by_role("switch", name="Speculation").uncheck()
    visit.send(WORDS)
    expect(answer_of(page).get_by_role("heading")).to_have_text("Plain decoding")
    page.get_by_role("button", name="Run with speculation").click()
    expect(page.locator(".compared")).to_have_text(
        re.compile(
            r"^\d+\.\d tokens/s with speculation, \d+\.\d without: \d+\.\d\d times .* Both texts are the same\.$"
        )
    )
    plain, fast = router.requests
    assert (plain.drafters, fast.drafters) == ((), None)
    assert plain.sampling.seed == fast.sampling.seed
    assert plain.prompt_token_ids.tolist() == fast.prompt_token_ids.tolist()


def test_stop_cancels_the_sequence_and_keeps_what_was_said(visit, router):
    page = visit.open()
    router.delay_s, before = 0.05, router.num_cancelled
    visit.send(WORDS)
    expect(answer_of(page).locator(".text")).to_contain_text("one")
    page.get_by_role("button", name="Stop").click()
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    expect(answer_of(page)).to_have_attribute("aria-busy", "false")
    expect(page.get_by_text("Stopped.")).to_be_attached()
    wait_until(page, lambda: not router.running)
    assert router.num_cancelled == before + 1
    router.delay_s = 0.0
    visit.send("and then")
    expect(answer_of(page, 1)).to_have_attribute("aria-busy", "false")


def test_a_comparison_that_was_stopped_can_be_made_again(visit, router):
    page = visit.open()
    visit.send(WORDS)
    again = page.get_by_role("button", name="Run without speculation")
    expect(again).to_be_visible()
    router.delay_s = 0.05
    again.click()
    expect(answer_of(page, 1).locator(".text")).not_to_be_empty()
    page.keyboard.press("Escape")
    router.delay_s = 0.001
    again.click()
    expect(page.locator(".compared")).to_contain_text("Both texts are the same.")
    expect(page.locator(".run")).to_have_count(2)


def test_a_conversation_goes_on_until_a_new_one_begins(visit, router):
    page = visit.open()
    page.get_by_text("Options").click()
    page.get_by_label("Most tokens").fill("7")
    page.get_by_label("System message").fill("be brief")
    page.get_by_label("Temperature").fill("0.5")
    for index in range(2):
        visit.send(WORDS)
        expect(answer_of(page, index)).to_have_attribute("aria-busy", "false")
    page.get_by_role("button", name="New chat").click()
    expect(page.locator(".turn")).to_have_count(0)
    visit.send(WORDS)
    expect(answer_of(page)).to_have_attribute("aria-busy", "false")
    first, second, third = router.requests
    assert len(second.prompt_token_ids) > len(first.prompt_token_ids) == len(third.prompt_token_ids)
    assert (first.max_new_tokens, first.sampling.temperature) == (7, 0.5)


def test_a_thought_is_shown_as_it_was_written_and_left_out_of_the_conversation(browser, thinking):
    origin, router = thinking
    said = "<think>one two</think>three four"
    num_tokens = len(TOKENIZER.backend_tokenizer.encode(said).ids)
    with Visit(browser, origin) as visit:
        page = visit.open()
        page.get_by_text("Options").click()
        page.get_by_label("Most tokens").fill(str(num_tokens))
        visit.send(said)
        expect(answer_of(page)).to_have_attribute("aria-busy", "false")
        expect(answer_of(page).locator(".text")).to_have_text(said)
        assert answer_of(page).locator(".drafted").count() > 0
        visit.send("five")
        expect(answer_of(page, 1)).to_have_attribute("aria-busy", "false")
    assert TOKENIZER.decode(router.requests[1].prompt_token_ids.tolist()) == f"{said}\nthree four\nfive\n"


@pytest.mark.parametrize(("after", "kept"), [(0, False), (6, True)])
def test_an_error_is_shown_in_the_servers_words(visit, router, after, kept):
    page = visit.open()
    router.failures.append((after, Overloaded("all 80 places are taken", 2.5) if not after else LinkError("it broke")))
    visit.send(WORDS)
    alert = page.get_by_role("alert")
    if kept:
        expect(alert).to_contain_text("it broke")
        expect(alert).to_contain_text("service_unavailable_error")
        expect(answer_of(page).locator(".text")).not_to_be_empty()
    else:
        expect(alert).to_contain_text("all 80 places are taken")
        expect(alert).to_contain_text("HTTP 429 · rate_limit_error · overloaded · retry after 3 s")
        alert.get_by_role("button", name="Try again").click()
        expect(answer_of(page).locator(".text")).to_contain_text(WORDS)
        expect(alert).to_have_count(0)


def test_a_server_that_is_gone_is_an_error(visit):
    page = visit.open()
    expect(page.get_by_text("toy · 512 tokens")).to_be_visible()
    page.route("**/v1/chat/completions", lambda route: route.abort("connectionrefused"))
    visit.send(WORDS)
    expect(page.get_by_role("alert")).to_contain_text("The server cannot be reached.")
    visit.troubles.clear()  # Chromium's own line


@pytest.mark.parametrize("hostile", HOSTILE)
def test_markup_in_answers_and_errors_stays_text(visit, router, hostile):
    page = visit.open()
    visit.send(hostile)
    expect(answer_of(page).locator(".text")).to_contain_text(hostile)
    expect(answer_of(page)).to_have_attribute("aria-busy", "false")
    router.failures.append((0, Overloaded(hostile, 1.0)))
    visit.send("again")
    expect(page.get_by_role("alert")).to_contain_text(hostile)
    assert page.locator("main :is(img, script, svg)").count() == 0
    assert all("/x" not in url for url in visit.requests)


def test_the_policy_stops_what_a_mistake_would_let_in(browser, gateway):
    with Visit(browser, gateway[0]) as visit:
        page = visit.open()
        with pytest.raises(Error, match="TrustedHTML"):
            page.evaluate("document.body.innerHTML = '<b>x</b>'")
        assert "require-trusted-types-for" in page.evaluate("violations")
        page.evaluate("violations.length = 0")
        visit.troubles.clear()


def test_the_keyboard_is_enough(visit, router):
    page = visit.open()
    page.keyboard.type("first line")  # the field has the focus from the start
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("second line")
    router.delay_s = 0.05
    page.keyboard.press("Enter")
    expect(page.locator(".said")).to_have_text("first line\nsecond line")
    expect(answer_of(page).locator(".text")).not_to_be_empty()
    page.keyboard.press("Escape")
    expect(page.get_by_text("Stopped.")).to_be_attached()
    wait_until(page, lambda: not router.running)
    reached = set()
    for _ in range(14):
        page.keyboard.press("Tab")
        focused = page.locator("body :focus")
        if focused.count() == 0:
            continue  # behind the last element comes the browser itself
        name, outline = focused.evaluate(
            "at => [at.id || at.textContent.trim().slice(0, 20), getComputedStyle(at).outlineStyle]"
        )
        reached.add(name)
        assert outline == "solid", name
    assert {"speculates", "new", "send", "log", "key-button", "cluster-button", "API", "Options"} <= reached
    page.locator("#cluster-button").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("complementary", name="Cluster")).to_be_hidden()


def test_answers_are_announced_once_they_are_complete(visit):
    page = visit.open()
    visit.send(WORDS)
    expect(page.get_by_role("log", name="Conversation")).to_have_attribute("aria-live", "polite")
    expect(answer_of(page)).to_have_attribute("aria-busy", "false")
    expect(page.get_by_role("status")).to_have_text("The answer is complete.")


def test_a_server_of_tenants_asks_for_a_key_and_keeps_it_in_memory(browser, guarded):
    origin, key, _ = guarded
    with Visit(browser, origin) as visit:
        page = visit.open()
        expect(page.get_by_text("This server asks for an API key")).to_be_visible()
        visit.send(WORDS)
        dialog = page.get_by_role("dialog", name="API key")
        field = dialog.get_by_label("Key", exact=True)
        expect(field).to_be_focused()
        field.fill("wrong")
        page.keyboard.press("Enter")
        expect(dialog).to_contain_text("not")  # the server's words about a wrong key
        field.fill(key)
        page.keyboard.press("Enter")
        expect(answer_of(page).locator(".text")).to_contain_text(WORDS)
        expect(page.get_by_text("toy · 512 tokens")).to_be_visible()
        assert page.locator("#key").input_value() == ""
        assert key not in page.content()
        page.get_by_role("button", name="API key").click()
        page.get_by_role("button", name="Forget it").click()
        expect(page.get_by_text("This server asks for an API key")).to_be_visible()
        page.reload()
        expect(page.get_by_text("This server asks for an API key")).to_be_visible()


def test_where_sources_are_withheld_the_text_has_no_colours(browser, guarded):
    origin, _, key = guarded
    with Visit(browser, origin) as visit:
        page = visit.open()
        page.get_by_role("button", name="API key").click()
        page.get_by_label("Key", exact=True).fill(key)
        page.keyboard.press("Enter")
        visit.send(WORDS)
        expect(answer_of(page)).to_have_attribute("aria-busy", "false")
        expect(answer_of(page).locator(".text")).to_contain_text(WORDS)
        expect(speed_of(answer_of(page))).to_contain_text("256 tokens")
        assert answer_of(page).locator(".drafted").count() == 0
        assert answer_of(page).get_by_role("listitem").count() == 0


def test_without_a_key_the_error_stays(browser, guarded):
    with Visit(browser, guarded[0]) as visit:
        page = visit.open()
        visit.send(WORDS)
        expect(page.get_by_role("dialog")).to_be_visible()
        page.keyboard.press("Escape")
        expect(page.get_by_role("dialog")).to_be_hidden()
        expect(page.get_by_role("alert")).to_contain_text("HTTP 401")
