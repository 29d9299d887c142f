"""A tail shows what the log holds after an entry, or says that it does not know."""

from hypothesis import given, settings
from hypothesis import strategies as st

from cache_service.log import log_tail
from cache_service.log.log_tail import LogTail, News
from cache_service.store.store import LogView

START = "0-0"


def news(after, entries, is_anchored=True, epoch="e", version=1):
    return News("log", epoch, version, after, is_anchored, entries)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_tail_agrees_with_the_log(data):
    limit, log_tail.MAX_TAIL_BYTES = log_tail.MAX_TAIL_BYTES, 40
    try:
        tail, log, told = LogTail(), [(START, b"")], 0
        for number in range(1, data.draw(st.integers(1, 30))):
            match data.draw(st.sampled_from(["tell", "miss", "view", "forget"])):
                case "tell":
                    size = data.draw(st.integers(0, 3))
                    new = [(f"{number}-{row}", bytes(data.draw(st.integers(0, 20)))) for row in range(size)]
                    tail.take(news(log[-1][0], new))
                    log += new
                    told += 1
                case "miss":  # another process has been told of an entry
                    log.append((f"{number}-9", b"lost"))
                case what:
                    begin, most = data.draw(st.integers(0, len(log) - 1)), data.draw(st.integers(1, 5))
                    view = tail.view(log[begin][0], most, "e", 1)
                    if view is None:
                        assert not told or log[begin] != log[-1] or log[-1][1] == b"lost"
                        continue
                    behind = [entry_id for entry_id, _ in log[begin:]][:most]
                    shown = [entry_id for entry_id, _ in view.entries]
                    assert shown == behind[: len(shown)]
                    assert len(shown) == len(behind) or log[-1][1] == b"lost" or len(shown) == most
                    assert [frame for _, frame in view.entries[1:]] == [
                        frame for _, frame in log[begin + 1 : begin + len(shown)]
                    ]
                    if what == "forget":
                        tail.forget_until(log[begin][0])
                        assert tail.view(log[begin][0], most, "e", 1) == view
            assert tail._num_bytes == sum(len(frame) for _, frame in tail._entries) <= 40
    finally:
        log_tail.MAX_TAIL_BYTES = limit


def test_a_reader_that_knows_more_is_not_shown_the_past():
    tail = LogTail()
    assert tail.view(START, 2, None, 0) is None, "nothing has been told"
    tail.take(news(START, [("1-0", b"a")], is_anchored=False))
    assert tail.view(START, 2, "e", 1) == LogView("e", 1, [("1-0", b"a")]), "the start is no entry"
    assert tail.view("1-0", 2, "e", 1) == LogView("e", 1, [("1-0", b"")])
    assert tail.view("1-0", 2, "another", 1) is None
    assert tail.view("1-0", 2, "e", 2) is None, "the reader has seen a later manifest"
    assert tail.view("2-0", 2, "e", 1) is None, "and a later entry"
