"""The picture of `paceline bench local --compare`: a file of the form its name says, with every method in it."""

from xml.etree import ElementTree

import pytest
from PIL import Image

from cluster.cli.bench.acceptance import Acceptance, PositionAcceptance
from cluster.cli.bench.measure import Comparison, MethodResult
from cluster.cli.bench.speed import Speed
from paceline_testing.tiny_models import save_tiny_model

BLUE, ORANGE = (0x00, 0x72, 0xB2), (0xE6, 0x9F, 0x00)  # of the first and second set of drafters


def colours_of(file):
    image = Image.open(file)
    assert image.format == "PNG"
    assert min(image.size) > 400
    return {colour[:3] for _, colour in image.getcolors(1 << 22)}


def method(name, ratio, tasks, shares=(), rounds=50):
    def speed(ratio):
        return Speed(1, 10, 1.0, 10.0, ratio, 2.0, 5, {}, None)

    positions = [
        PositionAcceptance(number, rounds, round(rounds * share), share) for number, share in enumerate(shares, 1)
    ]
    by_task = {task: speed(ratio * (0.8 + 0.1 * index)) for index, task in enumerate(tasks)}
    return MethodResult(name, speed(ratio), by_task, acceptance=Acceptance(tuple(positions), {}))


def report(*methods):
    return Comparison(list(methods), [])


def draw_comparison(*arguments):
    from cluster.cli.bench import plot  # matplotlib loads slowly

    plot.draw_comparison(*arguments)


def test_the_command_draws_a_png_or_an_svg_as_the_name_says(run, prompts_file, tmp_path):
    directory = save_tiny_model(tmp_path / "model")
    for name in ("plot.png", "plot.SVG"):
        options = ["--prompts", prompts_file, "--model", directory, "--draft-model", "none", "--max-new-tokens", 8]
        options += ["--drafter", "prompt_lookup", "--plot", tmp_path / name]
        assert run("bench", "local", "--compare", *options)[0] == 0
    assert BLUE in colours_of(tmp_path / "plot.png")
    assert ElementTree.parse(tmp_path / "plot.SVG").getroot().tag == "{http://www.w3.org/2000/svg}svg"
    assert "#0072b2" in (tmp_path / "plot.SVG").read_text()


def test_every_method_has_its_colour_and_the_reference_none(tmp_path):
    tasks = ["mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag"]
    plain, one = method("none", 1.0, tasks), method("suffix", 1.8, tasks, (0.7, 0.5, 0.4))
    draw_comparison(report(plain, one), "tiny", tmp_path / "one.png")
    draw_comparison(report(plain, one, method("auto", 2.1, tasks, (0.8, 0.6))), "tiny", tmp_path / "two.png")
    assert BLUE in colours_of(tmp_path / "one.png")
    assert ORANGE not in colours_of(tmp_path / "one.png")
    assert {BLUE, ORANGE} <= colours_of(tmp_path / "two.png")


@pytest.mark.parametrize("shares", [(), (0.5, 0.25)])
def test_few_rounds_or_none_are_drawn_too(tmp_path, shares):
    """With a speed of 0, so that all colour there is comes from the line."""
    file = tmp_path / "plot.png"
    draw_comparison(report(method("none", 1.0, ["t"]), method("suffix", 0.0, ["t"], shares, rounds=3)), "tiny", file)
    without_line = tmp_path / "without.png"
    draw_comparison(report(method("none", 1.0, ["t"]), method("suffix", 0.0, ["t"])), "tiny", without_line)
    assert (file.read_bytes() != without_line.read_bytes()) == bool(shares)


def test_without_any_drafters_there_is_only_the_line_of_plain_decoding(tmp_path):
    draw_comparison(report(method("none", 1.0, ["t"])), "tiny", tmp_path / "plot.png")
    assert not {BLUE, ORANGE} & colours_of(tmp_path / "plot.png")
