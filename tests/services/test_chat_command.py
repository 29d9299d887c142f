"""`paceline chat` as a process: a script through a pipe, a terminal through a pty, and a server over HTTP."""

import io
import os
import pty
import select
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from cluster.cli.main import main
from paceline_testing.echo_gateway import echo_gateway
from paceline_testing.tiny_models import save_tiny_model

COMMAND = [str(Path(sys.executable).with_name("paceline")), "chat"]
NOBODY = ["--url", "http://127.0.0.1:9"]
WAIT_S = 100.0
UNWANTED = ("NO_COLOR", "FORCE_COLOR", "COLORTERM")  # in the environment


@pytest.fixture(scope="module")
def engine_options(tmp_path_factory) -> list[str]:
    directory = save_tiny_model(tmp_path_factory.mktemp("tiny"))
    return ["--model", str(directory), "--draft-model", "none", "--drafter", "suffix", "--threads", "1"]


@pytest.fixture(scope="module")
def url():
    with echo_gateway("echo") as (address, _, _):
        yield f"http://{address}"


class Terminal:
    """The command on a pty."""

    def __init__(self, arguments: list[str], environment: dict[str, str]) -> None:
        self._fd, theirs = pty.openpty()
        attributes = termios.tcgetattr(theirs)
        attributes[3] &= ~termios.ECHO  # readline echoes by itself
        termios.tcsetattr(theirs, termios.TCSANOW, attributes)
        self._process = subprocess.Popen(
            [*COMMAND, *arguments], stdin=theirs, stdout=theirs, stderr=theirs, env=environment,
            start_new_session=True, preexec_fn=_take_terminal,
        )  # fmt: skip
        os.close(theirs)
        self._text = ""
        self._read = 0  # up to here it has been expected

    def expect(self, text: str) -> str:
        """What came up to and with the text."""
        deadline = time.monotonic() + WAIT_S
        while (found := self._text.find(text, self._read)) < 0:
            has_more = time.monotonic() < deadline and self._more()
            assert has_more, f"no {text!r} in {self._text[self._read :]!r}"
        before, self._read = self._read, found + len(text)
        return self._text[before : self._read]

    def press_until(self, key: str, text: str) -> None:
        """Python notices a Ctrl-C of the very moment in which it begins to read a line with the next key only."""
        deadline = time.monotonic() + WAIT_S
        while self._text.find(text, self._read) < 0:
            assert time.monotonic() < deadline, f"no {text!r} in {self._text[self._read :]!r}"
            self.send(key)
            while select.select([self._fd], [], [], 1.0)[0] and self._more():
                pass
        self.expect(text)

    def send(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def end(self) -> tuple[int, str]:
        """The exit status and all that came."""
        while self._more():
            pass
        status = self._process.wait(WAIT_S)
        os.close(self._fd)
        return status, self._text

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def _more(self) -> bool:
        if not select.select([self._fd], [], [], WAIT_S)[0]:
            return False
        try:
            data = os.read(self._fd, 65536)
        except OSError:  # the other side is closed
            return False
        self._text += data.decode(errors="replace")
        return bool(data)


def _take_terminal() -> None:
    import fcntl

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@pytest.fixture
def terminal(tmp_path):
    """terminal(*arguments) -> a started Terminal."""
    started: list[Terminal] = []
    kept = {name: value for name, value in os.environ.items() if name not in UNWANTED}

    def start(*arguments: str) -> Terminal:
        environment = {**kept, "TERM": "xterm-256color", "PACELINE_HOME": str(tmp_path)}
        started.append(Terminal(list(arguments), environment))
        return started[-1]

    yield start
    for one in started:
        one.kill()


@pytest.fixture
def script(monkeypatch, capfd, tmp_path):
    """Lines through a pipe, in this process: script(arguments, lines) -> (exit status, stdout, stderr)."""
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    for name in UNWANTED:
        monkeypatch.delenv(name, raising=False)

    def run(arguments: list[str], lines: str, command: str = "chat") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["paceline", *command.split(), *arguments])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines.encode()), encoding="utf-8"))
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code or 0, *capfd.readouterr()

    return run


def test_a_script_through_a_pipe_gets_plain_answers_and_figures(engine_options, script):
    lines = "hello\n/drafters none\n/set max_new_tokens 5\nagain\n"
    status, out, err = script([*engine_options, "--max-new-tokens", "20"], lines)
    assert status == 0, err
    assert out.count("\n") >= 2
    assert "\x1b" not in err
    assert err.count(" tokens/s, the first after ") == 2
    assert "| no draft tokens |" in err


def test_a_conversation_drafts_from_corpora_and_samples_by_either_rule(engine_options, script, tmp_path):
    notes = tmp_path / "notes.txt"
    notes.write_text("hello, hello again and again\n" * 4)
    build = [str(notes), "--out", str(tmp_path / "index"), "--target", engine_options[1]]
    assert script(build, "", "corpus build")[0] == 0
    options = [*engine_options, "--drafter", "retrieval", "--max-new-tokens", "20", "--exact", "bitwise"]
    lines = "hello\n/reset\n/drafters none\nhello\n"
    status, out, err = script([*options, "--corpus", str(tmp_path / "index")], lines)
    drafted, plain = out[: len(out) // 2], out[len(out) // 2 :]
    assert (status, drafted) == (0, plain), err
    sampled = ["--acceptance", "rejection", "--temperature", "1", "--max-new-tokens", "40"]
    drafter = ["--draft-model", engine_options[1], "--drafter", "draft_model"]
    status, out, err = script([*engine_options, *drafter, *sampled], "one two one two\n")
    assert (status, "(draft_model " in err) == (0, True), err
    status, out, err = script([*options, "--corpus", str(tmp_path / "absent")], "")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert str(tmp_path / "absent") in err


def test_a_script_with_a_mistake_goes_on_and_ends_with_one(engine_options, script):
    status, out, err = script([*engine_options, "--max-new-tokens", "5"], "/wrong\nhello\n")
    assert status == 1
    assert out
    assert "command is '/wrong'" in err.splitlines()[0]


def test_a_terminal_shows_colours_stops_at_ctrl_c_and_ends_at_ctrl_d(engine_options, terminal):
    chat = terminal(*engine_options, "--max-new-tokens", "900")
    assert "suffix" in chat.expect("tokens by ")
    chat.expect("> ")
    chat.send("/set max_new_tokens 4\n")
    chat.expect("max_new_tokens 4")
    chat.send("hello\n")
    assert "\x1b[39m" in chat.expect("tokens/s")
    chat.expect("> ")
    chat.press_until("\x03", "Ctrl-D ends")
    chat.send("/set max_new_tokens 900\nhello again\n")
    chat.expect("\x1b[39m")
    chat.send("\x03")
    chat.expect("stopped; what has been said stays")
    chat.send("/set max_new_tokens 4\n")
    chat.expect("max_new_tokens 4")
    chat.send("and now\n")
    chat.expect("4 tokens in")
    chat.expect("> ")  # before the prompt is there, the terminal would keep the key for itself
    chat.send("\x04")
    status, text = chat.end()
    assert status == 0
    assert "Traceback" not in text


def test_a_conversation_with_a_server(url, script):
    lines = "the quick brown fox\n/set max_new_tokens 6\nhello world\n"
    status, out, err = script(["--url", url, "--max-new-tokens", "9"], lines)
    assert status == 0, err
    assert "the quick" in out or "user" in out, out
    assert "9 tokens in 3 rounds" in err
    assert "(echo " in err
    assert "6 tokens in 2 rounds" in err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([*NOBODY, "--model", "smollm2"], "--model is 'smollm2'; the server at --url has its own"),
        ([*NOBODY, "--corpus", "notes"], "--corpus is 'notes'; the server at --url has its own; leave it out"),
        ([*NOBODY, "--acceptance", "rejection"], "--acceptance is 'rejection'; the server at --url has its own; "),
        ([*NOBODY, "--debug"], "--debug is true; a server tells only its totals; leave it out with --url"),
        (NOBODY, "http://127.0.0.1:9/v1/models does not list a model"),
        (["--top-p", "0"], "--top-p is 0.0; it must be above 0"),
    ],
)
def test_wrong_options_are_one_line(script, arguments, expected):
    status, out, err = script(arguments, "")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"paceline: {expected}")


def test_undecodable_bytes_of_an_option_are_replaced(engine_options, script):
    options = [*engine_options, "--max-new-tokens", "4", "--system", "caf\udce9"]
    status, _, err = script(options, "hello\n/system\n/quit\n")
    assert status == 0, err
    assert "4 tokens in" in err
