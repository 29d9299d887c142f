"""The progress of one process, as a file for others, and in the router's `status`."""

from types import SimpleNamespace

from cluster.cli.progress import progress_in_file
from cluster.router.status import router_status


def test_progress_is_in_the_file_and_every_tenth_in_the_log(tmp_path, capsys):
    file = tmp_path / "drafters" / "x.progress"
    with progress_in_file(file) as progress:
        for done in range(251):
            progress("writing text", done, 1000)
        assert file.read_text() == "writing text, 25 %"
        progress("distilling", 0, 0)
        assert file.read_text() == "distilling, 0 %"
    assert not file.exists()
    assert capsys.readouterr().err.splitlines() == [
        "writing text, 0 %", "writing text, 10 %", "writing text, 20 %", "distilling, 0 %"
    ]  # fmt: skip


def test_a_router_tells_the_progress_until_a_draft_worker_is_there(tmp_path):
    file = tmp_path / "x.progress"
    driver = SimpleNamespace(failure=None, is_draining=False, has_target=True, core=SimpleNamespace(max_model_len=64))

    def detail(num_workers, pool="draft"):
        models = {pool: dict.fromkeys(range(num_workers), "model")} if num_workers else {}
        links = SimpleNamespace(
            is_standby=False, is_leaving=False, num_draft_links=num_workers, draft_models=lambda: models
        )
        status = router_status(driver, links, file)
        assert status.ready
        return status.detail

    assert detail(0) == "0 draft workers"
    file.write_text("distilling, 43 %")
    assert detail(0) == "0 draft workers; the draft model is being built: distilling, 43 %"
    assert detail(1) == "1 draft workers"
    assert detail(1, "code") == "1 draft workers; the draft model is being built: distilling, 43 %"
