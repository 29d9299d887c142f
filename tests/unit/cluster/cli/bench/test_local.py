"""`paceline bench local` from end to end on a tiny model: who is measured, in which order, and what is reported."""

import time
from collections import Counter

import pytest
import torch

from actors.errors import InvalidRequest
from actors.models.loader import load_model, load_tokenizer
from actors.models.source import ModelSource
from cluster.cli.bench.local import run_local
from cluster.cli.bench.measure import compare_methods, encode_prompt
from cluster.cli.bench.methods import GenerateMethod
from cluster.cli.bench.options import LocalOptions
from cluster.cli.bench.prompts import BenchPrompt, user_says
from cluster.cli.bench.speed import Answer
from paceline_testing.other_vocabularies import merging_tokenizer
from paceline_testing.tiny_models import END_OF_TURN, make_tiny_model, save_tiny_model

pytestmark = pytest.mark.whole


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("tiny"), max_positions=256)


@pytest.fixture(scope="module")
def model(directory):
    return load_model(ModelSource("tiny", "tiny", directory))


@pytest.fixture(scope="module")
def tokenizer(directory):
    return load_tokenizer(ModelSource("tiny", "tiny", directory))


def said(name, task, text):
    return BenchPrompt(name, task, user_says(text))


PROMPTS = (
    said("1", "echo", "abc abc abc abc"),
    said("2", "echo", "one two three"),
    said("3", "ask", "why?"),
    said("4", "ask", "when?"),
    said("5", "ask", "who?"),
)


def greedy(model, prompt, count):
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tuple(tokens[len(prompt) :])


@pytest.fixture(scope="module", params=[1, 2])
def report(directory, request):
    options = LocalOptions(
        model=str(directory),
        draft_model="none",
        drafters=["none", "prompt_lookup", "prompt_lookup,suffix"],
        rows_per_task=2,
        learn_rows=1,
        max_new_tokens=12,
        batch_size=request.param,
    )
    return run_local(PROMPTS, options)


def test_a_draft_model_assists_generate_too_unless_its_vocabulary_is_another(directory, model, tmp_path):
    drafts = {"same": save_tiny_model(tmp_path / "same", seed=1), "other": tmp_path / "other"}
    save_tiny_model(drafts["other"], tokenizer=merging_tokenizer())
    for name, wanted in (("same", ["generate + assistant model"]), ("other", [])):
        models = {"model": str(directory), "draft_model": str(drafts[name])}
        cell = run_local(PROMPTS[:1], LocalOptions(**models, drafters=["draft_model"], max_new_tokens=8))
        assert [method.name for method in cell.methods[2:-2]] == wanted
        assert all(method.differences == () for method in cell.methods[1:])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--eagle-head", "/absent/head"], "/absent/head"),
        (["--drafters", "eagle"], "drafter 'eagle' needs a head of the model"),
    ],
)
def test_a_head_that_is_not_there_is_named(directory, run, prompts_file, options, said):
    model = ["--model", directory, "--draft-model", "none", "--no-baselines"]
    status, _, err = run("bench", "local", "--prompts", prompts_file, *model, *options)
    assert status == 2
    assert said in err.splitlines()[-1]  # behind the progress of loading the model


def test_every_method_gives_the_tokens_of_plain_greedy_decoding(report, model, tokenizer):
    for block in report.blocks:
        for name, answer in zip(block.prompts, block.answers, strict=True):
            prompt = encode_prompt(next(row for row in PROMPTS if row.name == name), tokenizer)
            wanted = greedy(model, prompt, 12)
            wanted = wanted[: wanted.index(END_OF_TURN)] if END_OF_TURN in wanted else wanted
            assert tuple(answer.token_ids) == wanted, (block.method, name)
    assert [method.differences for method in report.methods] == [None, (), (), (), ()]


def test_all_methods_are_measured_on_all_prompts(report):
    names = [method.name for method in report.methods]
    engines = ["paceline: none", "paceline: prompt_lookup", "paceline: prompt_lookup,suffix"]
    assert names == ["generate", "generate + prompt lookup", *engines]
    asked = Counter((block.method, name) for block in report.blocks for name in block.prompts)
    assert asked == {(method, row): 1 for method in names for row in "1234"}
    assert len({len(block.prompts) for block in report.blocks}) == 1
    assert all(block.seconds > 0 for block in report.blocks)
    plain = [method.overall.tokens_per_round for method in report.methods if method.drafters in (None, ())]
    assert plain[0] == plain[2] == 1.0
    assert plain[1] >= 1.0
    for method in report.methods[3:]:
        assert set(method.overall.accepted_tokens) <= set(method.drafters)
        assert set(method.tasks) == {"echo", "ask"}


def test_a_prompt_that_the_model_has_no_room_for_is_named(directory):
    options = LocalOptions(model=str(directory), draft_model="none", compare=True, max_new_tokens=256)
    with pytest.raises(InvalidRequest, match=r"--max-new-tokens for prompt 1 is 256; with the 3. tokens of the prompt"):
        run_local(PROMPTS, options)


class Recorder:
    """A method that notes what it is asked."""

    now = staticmethod(time.monotonic)

    def __init__(self, name, log):
        self.name, self._log = name, log

    def answer(self, prompts, max_new_tokens, seed=0, predictions=()):
        self._log.append((self.name, [tuple(prompt) for prompt in prompts]))
        return [Answer((1, 2, 3), 3) for _ in prompts]


def test_methods_take_turns_at_going_first_and_no_block_begins_before_the_last_is_done():
    log = []
    methods = [Recorder(name, log) for name in "abc"]
    rows = [said(str(index), "t", "") for index in range(4)]
    token_ids = {str(index): [index] for index in range(4)}
    compare_methods(methods, rows, token_ids, max_new_tokens=8, progress=lambda done, total: None)
    assert "".join(name for name, _ in log) == "abc" + "bca" + "cab" + "abc"
    assert [prompts for _, prompts in log] == [[(index,)] for index in range(4) for _ in range(3)]


@pytest.mark.parametrize("help_by", ["nobody", "prompt lookup", "an assistant"])
def test_generate_is_plain_greedy_whatever_the_checkpoint_wishes_and_ends_before_the_stop_token(
    model, tokenizer, help_by
):
    same = make_tiny_model("llama", 0, vocab_size=model.config.vocab_size)
    helps = {"prompt lookup": {"prompt_lookup_num_tokens": 10}, "an assistant": {"assistant_model": same}}
    help_of = helps.get(help_by, {})
    prompt = encode_prompt(PROMPTS[0], tokenizer)
    wanted = greedy(model, prompt, 30)
    model.generation_config.repetition_penalty = 5.0
    model.generation_config.min_new_tokens = 25
    method = GenerateMethod("g", model, tokenizer, (), options=help_of)
    (answer,) = method.answer([prompt], 30)
    assert tuple(answer.token_ids) == wanted
    assert answer.rounds <= 30
    assert answer.rounds == 30 or help_by != "nobody"
    assert answer.rounds < 15 or help_by != "an assistant"
    stop = wanted[10]
    method = GenerateMethod("g", model, tokenizer, (stop,), options=help_of)
    (answer,) = method.answer([prompt], 30)
    assert tuple(answer.token_ids) == wanted[: wanted.index(stop)]


def test_a_model_without_a_template_takes_texts_but_no_conversations(tokenizer):
    chat_template, tokenizer.chat_template = tokenizer.chat_template, None
    try:
        assert encode_prompt(said("1", "t", "abc"), tokenizer) == [int(token) for token in tokenizer.encode("abc")]
        with pytest.raises(InvalidRequest, match="prompt 2 is 2 messages"):
            encode_prompt(BenchPrompt("2", "t", PROMPTS[0].messages * 2), tokenizer)
    finally:
        tokenizer.chat_template = chat_template
