"""What a user can do wrong on the command line: one clear line on stderr and exit status 2, never a traceback.

Covers the modules `cluster.cli.main`, `cluster.cli.config`, `cluster.cli.engine`, `cluster.cli.generate`,
`cluster.cli.interrupts`, `cluster.cli.k8s`, `cluster.cli.mistakes`, `cluster.cli.model`, `cluster.cli.shared_options`
and `cluster.cli.validate`, too.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from contextlib import nullcontext
from importlib import metadata
from pathlib import Path

import pytest
import typer

from actors.errors import Unavailable
from cluster.cli import app as commands
from cluster.cli import ray_connection, serve
from cluster.cli.scale import _deployment
from cluster.errors import ConfigError
from paceline_testing.tiny_models import save_tiny_model


@pytest.fixture(autouse=True)
def signals_as_before():
    """`serve` takes signals over, and has no need to give them back."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def taken_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


@pytest.fixture
def free_ports():
    """Settings of two ports that nobody listens on."""
    with socket.socket() as first, socket.socket() as second:
        first.bind(("127.0.0.1", 0))
        second.bind(("127.0.0.1", 0))
        ports = first.getsockname()[1], second.getsockname()[1]
    return ["--set", f"gateway.http_port={ports[0]}", "--set", f"gateway.grpc_port={ports[1]}"]


@pytest.fixture(scope="module")
def tiny_model_dir(tmp_path_factory):
    """A model that is there at once, for mistakes that are found only when a model has been."""
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize("name", ["gateway.http_port", "gateway.grpc_port", "gateway.metrics_port"])
def test_a_taken_port_is_named_with_its_setting_and_the_remedy(refuse, free_ports, taken_port, name):
    line = refuse("serve", *free_ports, "--set", f"{name}={taken_port}")
    assert line.startswith(f"{name} is {taken_port}: cannot listen on 127.0.0.1:{taken_port}")
    assert line.endswith(f"choose another with --set {name}=PORT")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("routr: {}", "routr: unknown key"),
        ("router:\n  max_runing: 3", "router.max_runing: unknown key"),
        ("router:\n  max_running: 0", "router.max_running is 0; it must be at least 1"),
        ("target:\n  dtype: int8", "target.dtype is 'int8'; it must be 'auto', 'float32', "),
        ("gateway:\n  http_port: 9000", "gateway.http_port and gateway.grpc_port are both 9000; they must differ"),
        (
            "gateway:\n  metrics_port: 9000",
            "gateway.grpc_port and gateway.metrics_port are both 9000; they must differ",
        ),
        ("gateway:\n  tls: {certificate_file: a}", "certificate_file and key_file go together"),
        ("gateway:\n  tls: {client_ca_file: a}", "client_ca_file needs certificate_file and key_file"),
        ("- target", "the top level is a list; it must be a mapping of sections"),
        ("target: {model: [", "not valid YAML"),
        ("router: {max_running: 4}\nrouter: {max_running: 5}", "'router' comes twice"),
        ("router: {max_running: 4, max_running: 5}", "'max_running' comes twice"),
    ],
)
def test_a_configuration_that_cannot_be_used_names_file_key_and_limit(refuse, tmp_path, text, expected):
    path = tmp_path / "wrong.yaml"
    path.write_text(text)
    line = refuse("serve", path)
    assert line.startswith(f"{path}: ")
    assert expected in line


def test_the_option_that_turns_the_build_off_goes_before_the_setting(refuse):
    settings = ["--set", "draft.build=perhaps", "--set", "gateway.http_port=0"]
    assert "draft.build is 'perhaps'" in refuse("serve", *settings)
    assert "draft.build" not in refuse("serve", "--no-draft-build", *settings)


def test_certificates_that_cannot_be_used_are_named_before_anything_starts(refuse, free_ports, tmp_path):
    files = {name: tmp_path / name for name in ("certificate_file", "key_file")}
    for file in files.values():
        file.write_text("nonsense")
    settings = [word for name, file in files.items() for word in ("--set", f"gateway.tls.{name}={file}")]
    line = refuse("serve", *free_ports, *settings)
    assert line.startswith(f"gateway.tls is '{files['certificate_file']}'; it cannot be used: ")


def test_a_directory_is_no_configuration(refuse, tmp_path):
    assert refuse("serve", tmp_path) == f"{tmp_path}: Is a directory"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (["gateway.http_port"], "--set gateway.http_port: write it as path.to.key=value"),
        (["=3"], "--set =3: write it as path.to.key=value"),
        ([".x=3"], "--set .x=3: write it as path.to.key=value"),
        (["gateway.=3"], "--set gateway.=3: write it as path.to.key=value"),
        (["target.model=a", "target.model.name=b"], "model is not a section"),
        (["gateway.http_port=70000"], "gateway.http_port is 70000; it must be at most 65535"),
        (["gateway.port=8000"], "gateway.port: unknown key"),
        (["target.model=/no/such/model"], "model '/no/such/model': not a known name (smollm2)"),
        (["speculation.drafters=[sufix]"], "speculation.drafters is 'sufix'; known drafters are "),
    ],
)
def test_a_setting_that_cannot_be_is_told_before_anything_is_started(refuse, free_ports, settings, expected):
    assert expected in refuse("serve", *free_ports, *(part for each in settings for part in ("--set", each)))


def test_an_address_where_nobody_listens_is_refused_at_once(refuse, free_ports):
    line = refuse("serve", *free_ports, "--address", "127.0.0.1:1")
    assert line.startswith("--address is '127.0.0.1:1': no Ray cluster can be joined there: ")


@pytest.mark.parametrize(
    ("running", "told"),
    [
        (set(), "--address is 'auto': no Ray cluster runs on this machine"),
        (
            {"127.0.0.1:2", "10.0.0.1:1"},
            "--address is 'auto': several run on this machine; name one of 10.0.0.1:1",
        ),
        ({"127.0.0.1:1"}, "--address is 'auto': no Ray cluster can be joined there: nobody listens at 127.0.0.1:1"),
    ],
)
def test_scale_is_told_at_once_that_there_is_no_one_ray_to_join(refuse, monkeypatch, running, told):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray_connection, "local_ray_addresses", lambda: running)
    assert refuse("scale", "draft", "--workers", "2").startswith(told)


def test_an_address_from_the_environment_is_named_in_the_error(refuse, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    assert refuse("scale", "draft", "--workers", "2").startswith("RAY_ADDRESS is '127.0.0.1:1': ")


def test_scale_is_told_that_a_cluster_is_starting(monkeypatch):
    from ray.serve.exceptions import RayServeException  # which takes its time to load

    def no_controller():
        raise RayServeException("There is no Serve instance running on this Ray cluster.")

    monkeypatch.setattr("ray.serve.context._get_global_client", no_controller)
    with pytest.raises(Unavailable, match="it is starting or ending; try again"):
        _deployment("Router")


def test_a_home_that_cannot_be_written_is_refused_before_ray_is_started(
    refuse, free_ports, tiny_model_dir, tmp_path, monkeypatch
):
    (tmp_path / "file").touch()
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "file"))
    line = refuse("serve", *free_ports, "--set", f"target.model={tiny_model_dir}")
    assert line.startswith(f"{tmp_path}/file/")
    assert "cannot be written" in line
    assert "PACELINE_HOME" in line


TINY = "a model"  # stands for its directory


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--model", "/no/such/model"], "model '/no/such/model': not a known name (smollm2), an existing directory or"),
        (["--model", "/no/such/model.gguf"], "model '/no/such/model.gguf': there is no such file"),
        (["--model", "smolm2"], "model 'smolm2': not a known name (smollm2)"),
        (["--model", "/proc/self/fd"], "model '/proc/self/fd': the directory holds no config.json"),
        (["--model", TINY, "--draft-model", "/no/such/model"], "model '/no/such/model': "),
        (["--model", TINY, "--drafter", "suffix,sufix"], "drafters is 'sufix'; known drafters are auto, "),
        (["--model", TINY, "--drafter", "draft_model"], "--draft-model is 'auto'; run: paceline drafter build --targ"),
        (
            ["--model", TINY, "--max-new-tokens", "1024"],
            "max_new_tokens is 1024; with the 1 token of the prompt it exceeds the limit of",
        ),
    ],
)
def test_a_model_or_drafter_that_cannot_be_is_named(refuse, tiny_model_dir, options, expected):
    arguments = [tiny_model_dir if option == TINY else option for option in options]
    assert expected in refuse("generate", "--prompt", "x", *arguments)


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("suffix.len_threshold", "--drafter-option is 'suffix.len_threshold'; it must be DRAFTER.OPTION=VALUE"),
        ("len_threshold=3", "it must be DRAFTER.OPTION=VALUE"),
        ("suffix.depth=3", "drafter_options.suffix.depth is '3'; there is no such option; there are len_threshold, "),
        ("suffix.top_k=x", "drafter_options.suffix.top_k is 'x'; input should be a valid integer"),
        ("prediction.floor=0.1", "drafters must include prediction to use it"),
    ],
)
def test_a_wrong_option_of_a_drafter_says_what_there_is(refuse, tiny_model_dir, setting, expected):
    model = ("--model", tiny_model_dir, "--draft-model", "none", "--drafter", "suffix")
    assert expected in refuse("generate", "--prompt", "x", *model, "--drafter-option", setting)


def test_options_of_drafters_reach_the_drafters_of_the_engine(run, tiny_model_dir):
    """What a drafter proposes is for it alone to say; whether that is verified depends on what a row costs here."""
    arguments = ["generate", "--prompt", "abcabcabcabcabcabc", "--model", str(tiny_model_dir), "--draft-model", "none"]
    arguments += ["--drafter", "suffix", "--max-new-tokens", "12", "--json", "--trace", "--ignore-eos"]

    def generated(*options):
        _, out, err = run(*arguments, *options)
        proposed = [line.split("proposed ")[1].split(" |")[0] for line in err.splitlines()]
        return json.loads(out)["token_ids"], [int(text.removeprefix("suffix ")) for text in proposed]

    plain, proposed = generated()
    assert max(proposed) > 1
    short, proposed = generated("--drafter-option", "suffix.n_predicts=1", "--drafter-option", "suffix.top_k=1")
    assert max(proposed) == 1
    unmatched, proposed = generated("--drafter-option", "suffix.len_threshold=500")
    assert set(proposed) == {0}
    assert plain == short == unmatched


def test_either_a_prompt_or_a_file_is_needed(refuse, tmp_path):
    both = ["--prompt", "x", "--prompts-file", str(tmp_path)]
    for arguments in ([], both):
        assert refuse("generate", *arguments) == "give either --prompt or --prompts-file"


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ("{", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("3", "a row needs exactly one of prompt, messages, prompt_token_ids"),
        ('{"text": "x"}', "a row needs exactly one of prompt, messages, prompt_token_ids"),
        ('{"prompt": "x", "prompt_token_ids": [1]}', "a row needs exactly one of"),
        ('{"prompt": ""}', "it must hold a text, at least one"),
        ('{"prompt": ["x"]}', "it must hold a text"),
        ('{"prompt": "half a pair: \\ud800"}', "it must hold a text"),
        ('{"prompt": "x", "prediction": "\\ud800"}', "prediction is '\\ud800'; it must be a text"),
        ('{"messages": [{"role": "user", "content": "\\udfff"}]}', "it must hold messages with role and content"),
        ('{"messages": []}', "it must hold messages with role and content, at least one"),
        ('{"messages": [{"role": "user"}]}', "it must hold messages with role and content"),
        ('{"prompt_token_ids": [1, true]}', "it must hold integers"),
        ('{"prompt_token_ids": []}', "it must hold integers, at least one"),
    ],
)
def test_a_bad_row_of_a_prompts_file_is_named_by_its_line(refuse, prompts_file, row, expected):
    prompts_file.write_text(f'{{"prompt": "fine"}}\n\n{row}\n')
    line = refuse("generate", "--prompts-file", prompts_file)
    assert line.startswith(f"--prompts-file {prompts_file}:3")
    assert expected in line


def test_a_line_of_a_prompts_file_ends_where_json_lines_do(refuse, prompts_file):
    text = '\ufeff{"prompt": "one\u2028line\x85"}\r\n{'  # with the mark that some editors write
    prompts_file.write_text(text, encoding="utf-8")
    line = refuse("generate", "--prompts-file", prompts_file)
    assert line.startswith(f"--prompts-file {prompts_file}:2 is '{{'; not valid JSON")


def test_a_prompts_file_that_is_absent_empty_or_no_text_is_named(refuse, tmp_path):
    empty, binary = tmp_path / "empty.jsonl", tmp_path / "binary.jsonl"
    empty.write_text("\n")
    binary.write_bytes(b"\xff\xfe")
    assert "it cannot be read" in refuse("generate", "--prompts-file", tmp_path / "none.jsonl")
    assert "it must be UTF-8" in refuse("generate", "--prompts-file", binary)
    assert "it must have at least one row" in refuse("generate", "--prompts-file", empty)


@pytest.mark.parametrize("options", [("--prompt", "caf\udce9"), ("--prompt", "x", "--prediction", "caf\udce9")])
def test_bytes_of_an_option_that_are_not_utf8_are_refused_before_a_model_is_looked_for(refuse, options):
    line = refuse("generate", "--model", "/no/such/model", *options)
    assert line == rf"{options[-2]} is 'caf\udce9'; it must be UTF-8: unexpected end of data"


def test_a_command_line_that_is_not_utf8_is_no_traceback():
    """In a process of its own, as the interpreter reads its bytes, and where warnings of libraries would show."""
    command = [Path(sys.executable).with_name("paceline"), "generate", "--prompt", b"caf\xe9 noir"]
    done = subprocess.run(command, capture_output=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr == b"paceline: --prompt is 'caf\\udce9 noir'; it must be UTF-8: invalid continuation byte\n"


def test_without_numbas_compiler_the_variable_is_named_with_its_value_and_the_remedy(refuse, monkeypatch):
    monkeypatch.setenv("NUMBA_DISABLE_JIT", "1")
    assert refuse("--help").startswith("NUMBA_DISABLE_JIT is '1'; unset it or set it to 0: compiled functions need")


def test_a_token_id_outside_the_vocabulary_is_refused(refuse, tiny_model_dir, prompts_file):
    prompts_file.write_text('{"prompt_token_ids": [1, 99999]}\n')
    line = refuse("generate", "--model", tiny_model_dir, "--drafter", "none", "--prompts-file", prompts_file)
    assert line.startswith("prompts[0] is 99999; token ids are from 0 to ")


@pytest.mark.parametrize(
    ("option", "value", "limit"),
    [
        ("--top-p", "0", "it must be above 0"),
        ("--top-p", "1.5", "it must be at most 1"),
        ("--temperature", "2.5", "it must be at most 2"),
        ("--temperature", "NaN", "it must be a finite number"),
        ("--top-k", "-2", "it must be at least -1"),
        ("--seed", str(2**63), f"it must be below {2**63}"),
        ("--seed", str(-(2**70)), f"it must be at least {-(2**63)}"),
        ("--max-new-tokens", "0", "it must be at least 1"),
    ],
)
def test_a_sampling_option_out_of_range_is_named_with_its_limit_before_a_model_is_looked_for(
    refuse, option, value, limit
):
    line = refuse("generate", "--model", "/no/such/model", "--prompt", "x", option, value)
    assert line.startswith(f"{option} is {value}")
    assert line.endswith(f"; {limit}")


def test_generated_text_is_alone_on_stdout(run, tiny_model_dir):
    arguments = ["--model", tiny_model_dir, "--prompt", "the quick", "--max-new-tokens", "4", "--ignore-eos", "--json"]
    status, out, err = run("generate", *arguments)
    assert (status, err) == (0, "")
    assert len(json.loads(out)["token_ids"]) == 4


def test_beams_are_searched_and_what_they_cannot_have_is_named(run, refuse, tiny_model_dir):
    arguments = ["--model", tiny_model_dir, "--prompt", "the quick", "--max-new-tokens", "4", "--ignore-eos", "--json"]
    status, out, _ = run("generate", *arguments, "--beams", "3", "--length-penalty", "0.5", "--quantization", "int8")
    assert status == 0
    assert len(json.loads(out)["token_ids"]) == 4
    assert json.loads(out)["score"] < 0
    assert "--temperature is 0.5; with --beams 3" in refuse(
        "generate", *arguments, "--beams", "3", "--temperature", "0.5"
    )
    assert "--length-penalty is 2.0" in refuse("generate", *arguments, "--length-penalty", "2")


def test_a_trace_has_a_line_for_every_round_and_text_stays_alone_on_stdout(run, tiny_model_dir):
    arguments = ["--model", tiny_model_dir, "--prompt", "one two one two", "--max-new-tokens", "6", "--ignore-eos"]
    status, out, err = run("generate", *arguments, "--json", "--trace")
    generation = json.loads(out)
    lines = err.splitlines()
    assert (status, len(lines)) == (0, generation["rounds"])
    for number, line in enumerate(lines, 1):
        assert line.startswith(f"round {number} | ")
        assert all(word in line for word in (" rows", "proposed ", "verified ", "accepted ", "drafting ", "verifying "))
    assert sum(int(line.split("emitted ")[1].split()[0]) for line in lines) == 6


def test_a_call_with_draft_model_temperature_gamma_length_and_device_does_what_it_says(run, tiny_model_dir):
    arguments = ["--model", tiny_model_dir, "--draft-model", tiny_model_dir, "--temperature", "0.3", "--gamma", "2"]
    arguments += ["--max-new-tokens", "6", "--device", "cpu", "--prompt", "the quick", "--ignore-eos", "--json"]
    status, out, err = run("generate", *arguments, "--drafter", "draft_model", "--branch", "1", "--trace")
    assert (status, len(json.loads(out)["token_ids"])) == (0, 6)
    assert max(map(int, re.findall(r"proposed draft_model (\d+)", err))) == 2
    hotter = json.loads(run("generate", *arguments, "--temperature", "1.9")[1])
    assert hotter["token_ids"] != json.loads(out)["token_ids"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--drafter", "suffix", "--drafter", "suffix,sufix"], "--drafters is 'sufix'; known drafters are auto, "),
        (["--drafter", ","], "--drafters is ','; it must hold at least one name"),
        (["--drafter", "none,suffix"], "--drafters is 'none, suffix'; none excludes every other drafter"),
        (["--spec-bench", "."], "give either --prompts or --spec-bench"),
        (["--prompts", "/absent.jsonl"], "--prompts is '/absent.jsonl'; it cannot be read"),
        (["--json", "/absent/out.json"], "--json is '/absent/out.json'; it cannot be written: No such"),
        (["--plot", "/absent/out.png"], "--plot is '/absent/out.png'; it cannot be written: No such"),
        (["--plot", "out.pdf"], "--plot is 'out.pdf'; its name must end in .png or .svg"),
        (["--gamma", "2,65"], "--gamma is '2,65'; it must hold integers from 1 to 64, comma-separated"),
        (["--gamma", ","], "--gamma is ','; it must hold integers"),
        (["--gamma", "9" * 5000], "it must hold integers from 1 to 64"),
        (["--json", "/proc/out.json"], "--json is '/proc/out.json'; it cannot be written: "),
        (["--plot", "x" * 300 + ".png"], "it cannot be written: "),
        (["--corpus", "/absent"], "--corpus is '/absent'; there is no such directory"),
        (["--corpus", ".", "--drafter", "suffix"], "--corpus is '.'; --drafters must include retrieval to use it"),
    ],
)
def test_what_is_wrong_with_a_comparison_is_said_before_a_model_is_looked_for(refuse, prompts_file, options, expected):
    assert expected in refuse(
        "bench", "local", "--compare", "--model", "/no/such/model", "--prompts", prompts_file, *options
    )


def test_questions_that_cannot_be_read_are_named(refuse):
    line = refuse("bench", "local", "--spec-bench", "/absent")
    assert "--spec-bench is '/absent/question.jsonl'; it cannot be read" in line


def test_a_plot_without_matplotlib_says_what_to_install(refuse, prompts_file, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as if it were not there
    line = refuse("bench", "local", "--compare", "--prompts", prompts_file, "--plot", tmp_path / "out.png")
    assert line.endswith("it needs matplotlib; install Paceline with the extra [plot]")


@pytest.mark.parametrize("action", ["prepare", "path"])
def test_a_model_outside_the_catalog_is_named(refuse, action):
    assert refuse("model", action, "none") == "model 'none': not in the catalog; known names: smollm2"


def test_a_model_that_is_not_prepared_is_no_traceback(run, monkeypatch, tmp_path):
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    status, out, err = run("model", "path", "smollm2")
    assert (status, out) == (1, "")
    assert err == "model 'smollm2' is not prepared; run `paceline model prepare smollm2`\n"
    assert "not prepared" in run("model", "list")[1]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["sreve"], "there is no command 'sreve'. Did you mean 'serve'?; see `paceline --help`"),
        (
            ["generate", "--promt", "x"],
            "there is no option --promt; similar: --prompt, --prompts-file; see `paceline g",
        ),
        (["generate", "--gamma", "0"], "--gamma is 0; it must be at least 1; see `paceline generate --help`"),
        (["generate", "--gamma", "x"], "--gamma is x; it must be a whole number; "),
        (
            ["generate", "--dtype", "int9"],
            "--dtype is int9; it must be one of 'auto', 'float32', 'bfloat16', 'float16'; see",
        ),
        (["corpus", "build", "x"], "--out is missing; see `paceline corpus build --help`"),
        (["corpus", "build", "--out"], "--out needs a value"),
        (["model", "list", "x"], "unexpected argument: x; see `paceline model list --help`"),
        (["model", "path"], "NAME is missing; see `paceline model path --help`"),
        (["cache", "list", "--json=3"], "Option '--json' does not take a value"),
    ],
)
def test_a_mistyped_command_line_is_told_in_one_line(refuse, arguments, expected):
    assert refuse(*arguments).startswith(expected)


def test_the_help_of_all_commands_is_the_first_sentence_of_their_own():
    context = typer.Context(commands.LazyGroup())
    for name, entry in commands.COMMANDS.items():
        _, command, _ = commands.LazyGroup().resolve_command(context, [name])
        assert " ".join(command.help.split()).startswith(entry.help), name


@pytest.mark.parametrize("arguments", [["--help"], ["version"], ["config", "schema"], ["tenant", "list"]])
def test_commands_that_need_no_model_import_neither_torch_nor_ray(tmp_path, arguments):
    """In a process of its own, which would be seconds slower with them."""
    heavy = ("torch", "ray", "transformers", "numba")
    code = f"""
import sys
from cluster.cli.main import main
sys.argv = ["paceline", *{arguments!r}]
try:
    main()
finally:
    print([name for name in {heavy} if name in sys.modules], file=sys.stderr)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=os.environ | {"PACELINE_HOME": str(tmp_path)},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "[]\n")


def test_help_imports_nothing_but_the_table_of_commands(run, monkeypatch):
    monkeypatch.setattr(commands, "load_command", None)
    status, out, _ = run("--help")
    assert status == 0
    assert all(name in out for name in commands.COMMANDS)


def test_shells_complete_commands_and_their_options(run, monkeypatch):
    def completed(line):
        monkeypatch.setenv("_PACELINE_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", line)
        monkeypatch.setenv("COMP_CWORD", str(len(line.split(" ")) - 1))
        return run()[1].split()

    assert completed("paceline ten") == ["tenant"]
    assert completed("paceline cache mig") == ["migrate"]
    assert "--keep-old-for" in completed("paceline tenant rotate --keep")


@pytest.mark.parametrize("command", commands.COMMANDS)
def test_every_command_explains_itself(run, command):
    status, out, err = run(command, "--help")
    assert (status, err) == (0, "")
    assert f"paceline {command}" in out


def test_the_version_is_that_of_the_installed_distribution(run):
    assert run("version") == (0, metadata.version("paceline") + "\n", "")


def test_an_interrupt_is_no_traceback(run, monkeypatch):
    def interrupted(**_):
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "app", interrupted)
    assert run() == (130, "", "")


def test_an_interrupt_of_an_import_that_makes_another_error_of_it_ends_the_command(tmp_path):
    (tmp_path / "interrupted.py").write_text("""
import signal
try:
    signal.raise_signal(signal.SIGINT)
except KeyboardInterrupt:
    raise ImportError("it is not complete")
""")
    code = """
import sys
sys.path.append(sys.argv.pop())
from cluster.cli import app, main
app.COMMANDS["version"] = app.Entry("interrupted:version", "")
main.main()
"""
    command = [sys.executable, "-c", code, "version", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")


def test_an_interrupt_in_a_callback_that_drops_it_is_not_lost(run, monkeypatch):
    def interrupted(**_):
        weakref.finalize(Dying(), signal.raise_signal, signal.SIGINT)  # a callback of a weak reference
        time.sleep(30)
        return 0

    class Dying:
        pass

    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    monkeypatch.setattr(commands, "app", interrupted)
    assert run() == (130, "", "")


@pytest.mark.parametrize("is_stopped", [True, False])
def test_ray_that_ctrl_c_ends_while_it_is_started_is_no_mistake(monkeypatch, is_stopped):
    stop = threading.Event()

    def start(num_cpus, address):
        if is_stopped:
            stop.set()
        raise ConfigError("Ray cannot be started")

    monkeypatch.setattr(serve, "start_ray", start)
    with nullcontext() if is_stopped else pytest.raises(ConfigError):
        assert not serve._start_ray_unless_stopped(1.0, None, stop)


def test_serve_says_in_one_line_that_ray_cannot_be_started(monkeypatch):
    monkeypatch.setenv("RAY_TMPDIR", "/proc/nowhere")
    with pytest.raises(ConfigError, match=r"Ray cannot be started on this machine: .*/proc/nowhere"):
        ray_connection.start_ray(2.0, None)
