"""The parts of `paceline chat`: what a line means, what is kept of a conversation, what a terminal is shown."""

import io
import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.errors import InvalidRequest, PacelineError, Unavailable
from actors.printable import printable
from cluster.cli.answer_stream import Speculation
from cluster.cli.chat.backend import AnswerTotals, Backend, LocalBackend, ServerBackend, Span, spans_of
from cluster.cli.chat.session import ChatSession
from cluster.cli.chat.view import View, format_figures, style_of
from cluster.generation import GenerationOptions, changed, generation_options
from cluster.offline.engine import LocalEngine
from cluster.router.trace import RoundTrace
from paceline_testing.tiny_models import save_tiny_model

OPTIONS = generation_options(temperature=0.0, top_p=1.0, top_k=0)
HI = [{"role": "user", "content": "hi"}]
TRACE = RoundTrace(1, 4, {"suffix": 3}, {"suffix": 3}, {"suffix": 1}, 2, (65, 66), ((2, 1),), 0.001, 0.02)


class Parrot(Backend):
    """A backend that repeats the question, half of it drafted. It is interrupted where `stops_after` says so."""

    model_name = "parrot"
    sources = ("suffix", "draft_model")

    def __init__(self) -> None:
        self.asked: list[tuple[object, GenerationOptions]] = []
        self.stops_after: int | None = None
        self.failure: PacelineError | None = None

    def answer(self, messages, options, on_round):
        self.asked.append((messages, options))
        if self.failure is not None:
            raise self.failure
        words = messages[-1]["content"].split()
        for index, word in enumerate(words):
            if self.stops_after == index:
                raise KeyboardInterrupt
            drafted = index % 2 == 1 and options.drafters != ()
            on_round(TRACE)
            yield Span(word + " ", "suffix" if drafted else "target")
        accepted = {"suffix": len(words) // 2} if options.drafters != () else {}
        yield AnswerTotals(len(words), "stop", Speculation(len(words), 2 * sum(accepted.values()), accepted))


@pytest.fixture
def chat():
    """A session with a parrot: chat(*lines) -> (standard output, standard error) of these lines."""
    out, err = io.StringIO(), io.StringIO()
    session = ChatSession(Parrot(), OPTIONS, View(out, err))

    def say(*lines):
        for file in (out, err):
            file.seek(0)
            file.truncate()
        session.run(lines)
        return out.getvalue(), err.getvalue()

    say.session = session
    return say


def contents(session: ChatSession) -> list[str]:
    return [message["content"] for message in session.turns]


@given(st.lists(st.tuples(st.text(max_size=3), st.sampled_from("abc"))), st.text(max_size=3))
def test_spans_keep_every_character_and_join_neighbours_of_one_source(tokens, rest):
    text = "".join(part for part, _ in tokens) + rest
    spans = spans_of([part for part, _ in tokens], [source for _, source in tokens], text)
    assert "".join(span.text for span in spans) == text
    assert all(first.source != second.source for first, second in pairwise(spans))
    by_source = {source: "".join(part for part, other in tokens if other == source) for source in "abc"}
    for source in set("abc") - {tokens[-1][1] if tokens else ""}:
        assert "".join(span.text for span in spans if span.source == source) == by_source[source]


def test_families_of_drafters_have_colours_of_their_own():
    names = ("draft_model", "ouroboros", "prompt_lookup", "suffix", "soft_ngram", "retrieval", "token_recycling")
    assert len({style_of(name) for name in (*names, "target")}) == len(names) + 1
    assert style_of("lookahead") == style_of("ouroboros")
    assert style_of("some_other") not in ("default", style_of("target"))


@given(st.text())
def test_a_model_cannot_steer_the_terminal(text):
    shown = printable(text)
    assert len(shown) == len(text)
    assert not any(char != "\n" and char != "\t" and (ord(char) < 32 or 127 <= ord(char) < 160) for char in shown)
    assert printable("\x1b[2J\x9b") == "\ufffd[2J\ufffd"
    assert printable("naïve 漢\n\t😀") == "naïve 漢\n\t😀"


def test_help_fits_on_one_screen_and_has_every_command_and_setting(chat):
    _, err = chat("/help")
    assert err.count("\n") <= 20
    assert re.findall(r"^/(\w+)", err, re.MULTILINE) == ["help", "system", "set", "drafters", "reset", "quit"]
    assert "now: temperature 0, top_p 1, top_k 0, seed auto, max_new_tokens auto, max_draft_tokens auto" in err


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("/lenght 5", "command is '/lenght'; there is no such command; /help lists them"),
        ("/quit now", "/quit is 'now'; it takes no argument"),
        ("/set", "/set is ''; it must be one of temperature, top_p"),
        ("/set tempo 3", "/set is 'tempo'; it must be one of temperature, top_p"),
        ("/set max_new_tokens many", "max_new_tokens is 'many'; it must be a number, or auto"),
        ("/set max_new_tokens 0", "max_new_tokens is 0; it must be at least 1"),
        ("/set temperature 3", "temperature is 3; it must be at most 2"),
        ("/set temperature nan", "temperature is NaN; it must be a finite number"),
        ("/set top_k 1.5", "top_k is 1.5; it must be a whole number"),
        ("/drafters oracle", "drafters is 'oracle'; known drafters are"),
        ("/drafters prompt_lookup", "drafters is 'prompt_lookup'; this engine was made with suffix, draft_model"),
    ],
)
def test_a_wrong_command_is_one_clear_line_and_changes_nothing(chat, line, expected):
    before = chat.session.options
    out, err = chat(line)
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(expected)
    assert chat.session.options == before
    assert chat.session.num_failures == 1


@pytest.mark.parametrize(
    ("line", "fields"),
    [
        ("/set max_new_tokens 20", {"max_new_tokens": 20}),
        ("/set max_draft_tokens 3", {"max_draft_tokens": 3}),
        ("/set top_p .9", {"top_p": 0.9}),
        ("/set seed 9223372036854775807", {"seed": 2**63 - 1}),
        ("/set seed 7", {"seed": 7}),
        ("/set seed auto", {}),
        ("/drafters suffix", {"drafters": ("suffix",)}),
        ("/drafters none", {"drafters": ()}),
        ("/drafters auto", {}),
    ],
)
def test_commands_change_settings(chat, line, fields):
    out, err = chat(line)
    assert chat.session.options == changed(OPTIONS, fields)
    assert (out, chat.session.num_failures) == ("", 0)
    assert err


def test_answers_alone_go_to_standard_output_without_escape_codes(chat):
    out, err = chat("one two", "", "three")
    assert out == "one two \nthree \n"
    assert "2 tokens in 2 rounds, 1.00 a round | accepted 1 of 2 draft tokens, 50% (suffix 1)" in err
    assert "\x1b" not in out + err


def test_turns_build_up_behind_the_system_message_until_they_are_reset(chat):
    session = chat.session
    chat("/SYSTEM  Be brief. ", "one", "two")
    assert contents(session) == ["one", "one ", "two", "two "]
    assert [message["role"] for message in session.backend.asked[-1][0]] == ["system", "user", "assistant", "user"]
    chat("/reset", "three")
    assert [message["content"] for message in session.backend.asked[-1][0]] == ["Be brief.", "three"]
    chat("/system", "four")
    assert session.backend.asked[-1][0][0]["content"] == "three"


def test_a_slash_is_said_with_two_and_quit_ends(chat):
    out, _ = chat("//etc", "/quit", "unheard")
    assert out == "/etc \n"
    assert chat.session.is_over


def test_a_stopped_answer_stays_as_far_as_it_came(chat):
    chat.session.backend.stops_after = 2
    out, err = chat("one two three four")
    assert out == "one two \n"
    assert err.startswith("stopped")
    assert contents(chat.session) == ["one two three four", "one two "]
    chat.session.backend.stops_after = 0
    chat("five")
    assert len(contents(chat.session)) == 2


def test_a_turn_that_fails_is_one_line_and_leaves_the_conversation_as_it_was(chat):
    chat("one")
    chat.session.backend.failure = Unavailable("the server is gone")
    assert chat("two") == ("", "the server is gone\n")
    assert contents(chat.session) == ["one", "one "]
    chat.session.backend.failure = None
    assert chat("three")[0] == "three \n"


def test_a_seed_is_drawn_for_every_turn_unless_there_is_one(chat):
    chat("one", "two", "/set seed 5", "three", "four")
    seeds = [options.seed for _, options in chat.session.backend.asked]
    assert len(set(seeds[:2])) == 2
    assert seeds[2:] == [5, 5]


def test_with_traces_a_line_for_every_round_comes_before_the_text(chat):
    chat.session.traces = True
    out, err = chat("one two")
    assert out == "one two \n"
    assert [line.split(" | ")[0] for line in err.splitlines()[:-1]] == ["round 1", "round 2"]


def test_figures_of_a_turn_are_told_by_source():
    totals = AnswerTotals(20, "length", Speculation(10, 20, {"suffix": 8, "draft_model": 3}))
    assert format_figures(totals, first_s=5.0, last_s=7.0) == (
        "20 tokens in 10 rounds, 2.00 a round"
        " | accepted 11 of 20 draft tokens, 55% (suffix 8, draft_model 3)"
        " | 9.0 tokens/s, the first after 5.00 s | cut at the length limit"
    )
    plain = format_figures(AnswerTotals(3, "stop", Speculation(1)), first_s=0.5, last_s=0.5)
    assert plain == "3 tokens in 1 round, 3.00 a round | no draft tokens | 6.0 tokens/s, the first after 0.50 s"


def terminal(monkeypatch, **environment: str) -> tuple[View, io.StringIO]:
    """A view whose consoles take one buffer for a terminal."""
    for name in ("NO_COLOR", "FORCE_COLOR", "TERM", "COLORTERM", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"TERM": "xterm-256color", **environment}.items():
        monkeypatch.setenv(name, value)

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    file = Terminal()
    return View(file, file), file


def say_all(view: View, spans: Sequence[Span]) -> None:
    view.legend(["suffix"])
    view.answer(spans)
    view.end_answer()
    view.note("a note")
    view.note("an error", "red")


SPANS = (Span("one [b]two[/b]", "target"), Span(" three\x1b[2J\n", "suffix"), Span("漢 https://x.y 42", None))


def test_on_a_terminal_every_token_has_the_colour_of_its_source(monkeypatch):
    view, file = terminal(monkeypatch)
    say_all(view, SPANS)
    assert "\x1b[35m three" in file.getvalue()
    assert "one [b]two[/b]" in file.getvalue()
    assert "\x1b[2J" not in file.getvalue()


@pytest.mark.parametrize("environment", [{"NO_COLOR": "1"}, {"TERM": "dumb"}], ids=str)
def test_a_terminal_without_colours_gets_no_escape_codes(monkeypatch, environment):
    view, file = terminal(monkeypatch, **environment)
    say_all(view, SPANS)
    assert "\x1b" not in file.getvalue()
    assert file.getvalue() == "one [b]two[/b] three\ufffd[2J\n漢 https://x.y 42\na note\nan error\n"


def test_a_pipe_gets_the_very_text():
    out, err = io.StringIO(), io.StringIO()
    text = "a\x1b[2J\tb\r\n" + "long " * 60
    view = View(out, err)
    view.answer([Span(text, "suffix")])
    view.end_answer()
    assert out.getvalue() == text + "\n"


def test_what_a_server_says_cannot_steer_the_terminal(monkeypatch):
    view, file = terminal(monkeypatch, NO_COLOR="1")
    view.note("a model\x1b[2J")
    view.note("the server answered 500: \x9b31m\x07", "red")
    assert file.getvalue() == "a model\ufffd[2J\nthe server answered 500: \ufffd31m\ufffd\n"


def test_what_an_encoding_does_not_have_is_replaced():
    files = [
        io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors=errors) for errors in ("strict", "surrogateescape")
    ]
    for file in files:
        View(file, file).answer([Span("漢 a\n", None)])
        assert file.buffer.getvalue() == b"? a\n"


READ_LINES = """
import pathlib, sys
from cluster.cli.chat.lines import read_lines
for line in read_lines(pathlib.Path(sys.argv[1])):
    print("said", ascii(line.strip()), file=sys.stderr, flush=True)
    if line.strip() == "bye":
        break
"""


def typed(tmp_path, keys: bytes, stdout_at: str = "terminal", **variables: str) -> tuple[str, str]:
    """Standard error of a process that reads these keys from a terminal, and what the terminal showed."""
    ours, theirs = pty.openpty()
    child = subprocess.Popen(
        [sys.executable, "-c", READ_LINES, str(tmp_path / "history")],
        stdin=theirs,
        stdout=theirs if stdout_at == "terminal" else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={**os.environ, "TERM": "dumb", **variables},
        text=True,
    )
    try:
        os.write(ours, keys)
        err = child.communicate(timeout=60)[1]
        shown = os.read(ours, 65536).decode(errors="replace")
    finally:
        child.kill()
        os.close(ours)
        os.close(theirs)
    assert child.returncode == 0, err
    return err, shown


@pytest.mark.parametrize("stdout_at", ["terminal", "pipe"])
@pytest.mark.parametrize(
    "variables",
    [
        {"LC_ALL": "C"},
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        {"LC_ALL": "C.UTF-8", "PYTHONIOENCODING": "utf-8:strict"},
    ],
    ids=str,
)
def test_undecodable_bytes_from_a_keyboard_are_a_line_like_any_other(tmp_path, variables, stdout_at):
    err, _ = typed(tmp_path, b"caf\xe9 x\nbye\n", stdout_at, **variables)
    said = [line.removeprefix("> ") for line in err.splitlines() if "said" in line]
    assert len(said) == 2, err
    assert said[0].startswith("said 'caf")
    assert "\\udc" not in err
    assert said[1] == "said 'bye'"


def test_lines_are_kept_for_their_owner_and_no_color_means_no_escape_codes(tmp_path):
    _, shown = typed(tmp_path, b"hello\nbye\n", TERM="xterm-256color", NO_COLOR="1")
    assert "> " in shown
    assert "\x1b" not in shown
    history = tmp_path / "history"
    assert history.read_text().splitlines() == ["hello", "bye"]
    assert history.stat().st_mode & 0o777 == 0o600


@pytest.fixture(scope="module")
def engine(tmp_path_factory) -> LocalEngine:
    directory = save_tiny_model(tmp_path_factory.mktemp("tiny"))
    return LocalEngine(str(directory), draft_model="none", drafters=("suffix", "prompt_lookup"), device="cpu",
                       kv_cache_tokens=4096)  # fmt: skip


def test_a_local_turn_is_that_of_generate(engine):
    backend, traces = LocalBackend(engine), []
    messages = [{"role": "user", "content": "one two one two one"}]
    options = generation_options(max_new_tokens=30, temperature=0.7, seed=5)
    *spans, totals = backend.answer(messages, options, traces.append)
    (wanted,) = engine.generate([messages], options)
    assert "".join(span.text for span in spans) == wanted.text
    assert totals.num_tokens == len(wanted.token_ids) == sum(trace.num_emitted for trace in traces)
    assert sum(sum(trace.verified.values()) for trace in traces) == totals.speculation.draft_tokens
    assert {span.source for span in spans} <= {"suffix", "prompt_lookup", "target"}
    *_, plain = backend.answer(messages, changed(options, {"drafters": ()}), traces.append)
    assert plain.speculation.draft_tokens == 0


def test_a_conversation_that_is_too_long_is_one_line(engine):
    err = io.StringIO()
    session = ChatSession(LocalBackend(engine), OPTIONS, View(io.StringIO(), err))
    session.handle("x" * 2000)
    assert err.getvalue().startswith("prompt is 20")
    assert err.getvalue().count("\n") == 1
    assert contents(session) == []


@pytest.mark.parametrize("url", ["", "localhost:8000", "ftp://x", "http://"])
def test_what_is_no_address_is_refused(url):
    with pytest.raises(InvalidRequest, match="--url is"):
        ServerBackend(url)


def test_a_server_that_is_not_there_is_named():
    with pytest.raises(Unavailable, match=r"http://127\.0\.0\.1:9/v1/models does not list a model"):
        ServerBackend("http://127.0.0.1:9")


@pytest.fixture
def server(monkeypatch):
    """server(status, text) -> (backend, what it was asked). It lists a model, and answers everything else so."""
    asked = []

    def answering(status: int, text: str):
        def answer(request: httpx.Request) -> httpx.Response:
            if request.method == "GET":
                return httpx.Response(200, json={"data": [{"id": "m"}]})
            asked.append((request.url.path, json.loads(request.content)))
            return httpx.Response(status, text=text)

        transport = httpx.MockTransport(answer)
        monkeypatch.setattr(httpx.HTTPTransport, "handle_request", lambda _, request: transport.handle_request(request))
        return ServerBackend("http://server/v1/"), asked

    return answering


@pytest.mark.parametrize(
    ("status", "text", "expected"),
    [
        (400, '{"error": {"message": "messages is wrong"}}', "answered 400: messages is wrong"),
        (502, "bad gateway", "answered 502: bad gateway"),
        (200, 'data: {"error": {"message": "the router died"}}\n\n', "the router died"),
        (200, "data: {\n\n", "held what is not a chunk"),
        (200, 'data: {"choices": [{"text": "a"}]}\n\n', "ended in the middle"),
    ],
)
def test_what_a_server_does_wrong_is_one_error(server, status, text, expected):
    backend, _ = server(status, text)
    with pytest.raises(PacelineError, match=expected):
        list(backend.answer(HI, OPTIONS, print))


def test_settings_reach_the_server_and_defaults_are_left_to_it(server):
    backend, bodies = server(200, 'data: {"choices": [{"text": "a", "finish_reason": "stop"}]}\n\ndata: [DONE]\n')
    list(backend.answer(HI, generation_options(max_new_tokens=5, seed=3), print))
    list(backend.answer(HI, generation_options(drafters=("suffix",), max_draft_tokens=2), print))
    (path, first), (_, second) = bodies
    assert (backend.model_name, path) == ("m", "/v1/chat/completions")
    assert first["messages"] == HI
    assert (first["max_tokens"], first["seed"], first["stream"]) == (5, 3, True)
    assert first["speculation"] == {"stats": True}
    assert (first["temperature"], "max_tokens" in second) == (0.0, False)
    assert second["speculation"] == {"stats": True, "drafters": ["suffix"], "max_draft_tokens": 2}
