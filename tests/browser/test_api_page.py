"""The description of the API at /docs."""

import pytest

from paceline_testing.browser_visit import Visit

expect = pytest.importorskip("playwright.sync_api", reason="playwright is missing: run `make test-browser`").expect


def test_endpoints_and_fields_are_those_of_the_openapi_document(visit):
    page = visit.open("/docs")
    expect(page.get_by_role("heading", name="Endpoints")).to_be_visible()
    document = page.evaluate("async () => (await fetch('openapi.json')).json()")
    for path, methods in document["paths"].items():
        for method in methods:
            expect(page.get_by_role("heading", name=f"{method.upper()} {path}", exact=True)).to_be_visible()
    for name, schema in document["components"]["schemas"].items():
        section = page.locator(f"#schema-{name}")
        fields = section.locator("td:first-child code").all_inner_texts()
        assert fields == list(schema.get("properties", {}))
    temperature = page.locator("#schema-ChatBody tr").filter(has=page.get_by_text("temperature", exact=True))
    expect(temperature).to_contain_text("number (at least 0, at most 2) or null")
    types = set(page.locator("section a").evaluate_all("links => links.map((link) => link.hash.slice(1))"))
    ids = set(page.locator("section[id]").evaluate_all("sections => sections.map((section) => section.id)"))
    assert types <= ids


def test_it_asks_for_a_key_where_there_are_tenants(browser, guarded):
    origin, key, _ = guarded
    with Visit(browser, origin) as visit:
        page = visit.open("/docs")
        page.get_by_role("dialog").get_by_label("Key", exact=True).fill(key)
        page.keyboard.press("Enter")
        expect(page.get_by_role("heading", name="Endpoints")).to_be_visible()
