"""Which kernel a linear layer gets, and that a machine is measured once."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from actors.engine.cpu_kernels import kernel_choice
from actors.engine.cpu_kernels.kernel_choice import (
    KERNELS,
    KernelChoices,
    fastest_kernel,
    fastest_panels,
    measure,
    replace_linears,
)
from actors.engine.cpu_kernels.panel_linear import PanelLinear
from actors.engine.cpu_kernels.threads import has_openmp
from paceline_testing.tiny_models import make_tiny_model

SHAPE = (torch.float32, 512, 256)


@pytest.fixture
def small_measurements(monkeypatch):
    monkeypatch.setattr(kernel_choice, "_BYTES", 1 << 20)
    monkeypatch.setattr(kernel_choice, "_ROWS", (1, 4))
    monkeypatch.setattr(kernel_choice, "_SMALL", 0)


def test_the_kernel_with_the_smallest_product_of_times_wins():
    assert fastest_kernel({"a": [1.0, 8.0], "b": [2.0, 3.0], "c": [1.0, float("inf")]}) == "b"


def test_fused_layers_get_panels_unless_another_kernel_is_faster_by_a_quarter():
    assert fastest_panels({"panel": [2.0, 2.0], "pairs": [1.0, 3.0], "plain": [1.6, 1.6]}) == "pairs"
    assert fastest_panels({"panel": [2.0, 2.0], "packed": [1.5, 1.5]}) == "plain"
    assert fastest_panels({"packed": [1.0, 1.0]}) == "plain"


def test_measuring_times_every_kernel_that_this_processor_has(small_measurements):
    seconds = measure(*SHAPE)
    assert "plain" in seconds
    assert set(seconds) <= set(KERNELS)
    assert all(times[0] > 0.0 for times in seconds.values())


def test_weights_in_blocks_are_measured_as_such(small_measurements, tmp_path, monkeypatch):
    seconds = measure(*SHAPE, bits=4)
    assert {"panel", "panel dense"} <= set(seconds)
    assert "panel dense" not in measure(*SHAPE)
    asked = []
    choices = KernelChoices(tmp_path / "cpu_kernels.json")
    monkeypatch.setattr(kernel_choice, "measure", lambda *_, bits: asked.append(bits) or {"plain": [1.0]})
    for bits in (0, 4, 8, 4):
        assert choices.kernel(*SHAPE, bits) == "plain"
    assert asked == [0, 4, 8]


def test_bfloat16_is_measured_on_processors_without_its_instructions(small_measurements):
    # oneDNN's packed layout raises there.
    assert "plain" in measure(torch.bfloat16, 512, 256)


def test_what_was_measured_is_kept_for_the_next_process(small_measurements, tmp_path, monkeypatch):
    path = tmp_path / "home" / "cpu_kernels.json"
    choices = KernelChoices(path)
    kernel = choices.kernel(*SHAPE)
    assert sorted(tmp_path.joinpath("home").iterdir()) == [path, path.with_suffix(".lock")]
    monkeypatch.setattr(kernel_choice, "measure", None)  # would raise
    assert KernelChoices(path).kernel(*SHAPE) == kernel


def test_another_machine_under_the_same_home_is_measured_too(small_measurements, tmp_path, monkeypatch):
    path = tmp_path / "cpu_kernels.json"
    path.write_text(json.dumps({"another machine": {"float32 512x256": "plain"}}))
    choices = KernelChoices(path)
    monkeypatch.setattr(kernel_choice, "measure", lambda *_, **__: {"packed": [1.0], "plain": [2.0]})
    assert choices.kernel(*SHAPE) == "packed"
    kept = json.loads(path.read_text())
    assert kept.pop("another machine") == {"float32 512x256": "plain"}
    assert list(kept.values()) == [{"float32 512x256": "packed"}]


def test_two_that_ask_at_once_choose_the_same_and_lose_nothing(small_measurements, tmp_path, monkeypatch):
    path, measured, is_measuring = tmp_path / "cpu_kernels.json", [], threading.Event()

    def slow(*shape, **_):
        measured.append(shape)
        is_measuring.set()
        time.sleep(0.2)
        return {"plain" if len(measured) % 2 else "packed": [1.0]}

    monkeypatch.setattr(kernel_choice, "measure", slow)
    first, second = KernelChoices(path), KernelChoices(path)
    with ThreadPoolExecutor(2) as threads:
        asked = threads.submit(first.kernel, *SHAPE)
        assert is_measuring.wait(10)
        assert second.kernel(*SHAPE) == asked.result(10) == "plain"
        second.kernel(torch.float32, 512, 512)
        first.kernel(torch.float32, 512, 1024)
    assert len(measured) == 3
    assert len(next(iter(json.loads(path.read_text()).values()))) == 3


def test_a_processor_with_masked_instructions_is_another_machine(tmp_path, monkeypatch):
    monkeypatch.setattr(kernel_choice, "_SMALL", 0)
    path = tmp_path / "cpu_kernels.json"
    monkeypatch.setattr(kernel_choice, "measure", lambda *_, **__: {"plain": [1.0]})
    KernelChoices(path).kernel(*SHAPE)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    monkeypatch.setattr(kernel_choice, "measure", lambda *_, **__: {"packed": [1.0]})
    assert KernelChoices(path).kernel(*SHAPE) == "packed"


@pytest.mark.parametrize(("slower", "dtype"), [(1.05, "float32"), (1.3, "bfloat16")])
def test_bfloat16_must_be_faster_by_a_tenth(slower, dtype, small_measurements, tmp_path, monkeypatch):
    def measured(of, *_, stored):
        assert stored == torch.bfloat16
        return {"panel": [slower, slower], "plain": [9.0, 9.0]} if of == torch.float32 else {"panel": [1.0, 1.0]}

    path = tmp_path / "cpu_kernels.json"
    monkeypatch.setattr(kernel_choice, "measure", measured)
    choices = KernelChoices(path)
    assert choices.dtype(512, 256) == dtype
    monkeypatch.setattr(kernel_choice, "measure", None)  # would raise
    assert KernelChoices(path).dtype(512, 256) == dtype


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a": 1}', "\0", "[" * 100_000])
def test_a_file_that_is_no_record_is_measured_anew(text, small_measurements, tmp_path, monkeypatch):
    path = tmp_path / "cpu_kernels.json"
    path.write_text(text)
    monkeypatch.setattr(kernel_choice, "measure", lambda *_, **__: {"plain": [2.0]})
    choices = KernelChoices(path)
    assert choices.kernel(*SHAPE) == "plain"
    assert KernelChoices(path).kernel(*SHAPE) == "plain"


def test_a_kernel_that_cannot_be_had_for_a_shape_is_measured_anew(small_measurements, tmp_path, monkeypatch):
    path = tmp_path / "cpu_kernels.json"
    monkeypatch.setattr(kernel_choice, "measure", lambda *_, **__: {"plain": [2.0]})
    KernelChoices(path).kernel(*SHAPE)
    path.write_text(path.read_text().replace("plain", "pairs"))  # products of float32 that round to bfloat16
    assert KernelChoices(path).kernel(*SHAPE) == "plain"


def test_a_record_that_cannot_be_put_in_place_leaves_no_file(small_measurements, tmp_path, monkeypatch):
    (tmp_path / "cpu_kernels.json").mkdir()
    monkeypatch.setattr(kernel_choice, "measure", lambda *_, **__: {"plain": [2.0]})
    assert KernelChoices(tmp_path / "cpu_kernels.json").kernel(*SHAPE) == "plain"
    assert {path.name for path in tmp_path.iterdir()} == {"cpu_kernels.json", "cpu_kernels.lock"}


def test_a_home_that_cannot_be_written_keeps_nothing_and_serves(small_measurements, tmp_path):
    (tmp_path / "file").touch()
    choices = KernelChoices(tmp_path / "file" / "cpu_kernels.json")
    assert choices.kernel(*SHAPE) in KERNELS


@pytest.mark.skipif(not has_openmp(), reason="torch has no OpenMP runtime that exports GOMP_parallel here")
def test_linears_are_replaced_but_those_with_hooks_and_a_model_of_panels_alone_is_not_padded():
    model = make_tiny_model("llama")
    hooked = model.model.layers[0].mlp.up_proj
    hooked.register_forward_hook(lambda *_: None)
    assert replace_linears(model)
    kinds = {name: type(module) for name, module in model.named_modules()}
    assert kinds["model.layers.0.mlp.up_proj"] is nn.Linear
    assert kinds["lm_head"] is PanelLinear
    assert not replace_linears(make_tiny_model("llama"))


def test_other_devices_keep_their_linears():
    with torch.device("meta"):
        model = make_tiny_model("llama")
    assert replace_linears(model)
    assert type(model.lm_head) is nn.Linear
