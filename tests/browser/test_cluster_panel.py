"""The panel of the cluster, out of the metrics of a real router core."""

import re

import pytest

from paceline_testing.browser_visit import Visit

expect = pytest.importorskip("playwright.sync_api", reason="playwright is missing: run `make test-browser`").expect


def value_of(panel, name):
    return panel.get_by_role("row", name=re.compile(f"^{re.escape(name)}")).get_by_role("cell").first


def test_the_panel_shows_groups_workers_queue_cache_and_acceptance(visit, router):
    panel = visit.open().get_by_role("complementary", name="Cluster")
    expect(value_of(panel, "Target groups")).to_have_text("0 of 1")
    for name, text in {"Draft workers": "0", "Running": "0", "Waiting": "0", "Tokens to draft from": "0"}.items():
        expect(value_of(panel, name)).to_have_text(text)
    accepted, drafted = (
        int(float(re.search(rf'num_{kind}_tokens_total{{[^}}]*source="suffix"}} (\S+)', router.text)[1]))
        for kind in ("accepted", "draft")
    )
    assert drafted > accepted > 0
    cells = panel.get_by_role("row", name=re.compile("^suffix")).get_by_role("cell")
    expect(cells).to_have_text([str(accepted), str(drafted), f"{round(100 * accepted / drafted)} %"])


def test_the_panel_follows_while_it_is_seen(visit, router):
    page = visit.page
    page.clock.install()
    visit.open()
    panel = page.get_by_role("complementary", name="Cluster")
    before = router.text
    expect(value_of(panel, "Running")).to_have_text("0")
    router.text = re.sub(r"(paceline_sequences_running\S*) 0.0", r"\1 7.0", before)
    try:
        page.clock.run_for(2000)
        expect(value_of(panel, "Running")).to_have_text("7")
        page.get_by_role("button", name="Cluster").click()
        visit.requests.clear()
        page.clock.run_for(10_000)
        assert visit.requests == []
    finally:
        router.text = before


def test_it_says_so_where_metrics_are_not_on_this_port(browser, guarded):
    with Visit(browser, guarded[0]) as visit:
        panel = visit.open().get_by_role("complementary", name="Cluster")
        expect(panel).to_contain_text("Metrics are not on this port: the server answered 404.")
        expect(panel).to_contain_text("gateway.metrics_port")


@pytest.mark.parametrize("status", [401, 403])
def test_it_says_so_where_a_proxy_guards_the_metrics(visit, status):
    page = visit.page
    page.route("**/metrics", lambda route: route.fulfill(status=status, body="{}"))
    visit.open()
    expect(page.get_by_text(f"Metrics are not on this port: the server answered {status}.")).to_be_visible()
    page.unroute("**/metrics")
    page.get_by_role("button", name="Try again").click()
    expect(page.get_by_role("row", name="Target groups")).to_be_visible()
