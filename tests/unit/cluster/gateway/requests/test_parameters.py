"""Parameters that come from other servers' clients, and the words of refusals.

Covers `foreign_fields` and `unknown_fields` of `cluster.gateway.requests`, `cluster.gateway.answers.logprobs`,
`cluster.gateway.http.unknown_routes` and `cluster.text.chat_template`, too.
"""

import re
from collections.abc import Iterator
from typing import Any, get_args

import pytest
from pydantic import BaseModel, TypeAdapter, ValidationError

from actors.errors import InvalidRequest
from cluster.gateway.answers.logprobs import TextOffsets, TokenScore, completion_logprobs
from cluster.gateway.messages.schema import CountTokensBody, MessagesBody
from cluster.gateway.requests.chat_schema import ChatBody
from cluster.gateway.requests.foreign_fields import FOREIGN_FIELDS
from cluster.gateway.requests.schema import CompletionBody, parse_fields
from cluster.gateway.responses.schema import ResponsesBody
from cluster.gateway.service import GenerationService
from cluster.gateway.tokenizing import DetokenizeBody, TokenizeChatBody, TokenizePromptBody
from cluster.validation import StrictFields
from paceline_testing import toy_gateway
from paceline_testing.echo_gateway import gateway_client
from paceline_testing.echo_router import EchoRouter
from paceline_testing.toy_gateway import (
    CONFIG,
    END,
    FOX,
    MESSAGES,
    MODEL,
    START,
    TOKENIZER,
    chat,
    error_of,
    events,
    tokens,
)
from paceline_testing.toy_tokenizer import toy_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    """Its template reads a variable of its own."""
    tokenizer = toy_tokenizer()
    tokenizer.chat_template += "{% if thinks %}<think>{{ thinks + 1 }}{% endif %}"
    return tokenizer


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}


async def complete(client, **fields):
    return await toy_gateway.complete(client, **{"max_tokens": 8, **fields})


BEAMS = (
    "beam search is not served over HTTP; the local engine has it: `paceline generate --beams N`, or "
    "LocalEngine.beam_search in Python"
)


# --- other servers' parameters ---------------------------------------------------------------------------------------


def test_no_parameter_is_both_implemented_and_foreign():
    assert not FOREIGN_FIELDS.keys() & {*ChatBody.model_fields}
    assert FOREIGN_FIELDS.keys() & {*CompletionBody.model_fields} == {"best_of", "echo", "suffix"}  # foreign to chats


async def test_values_that_change_nothing_are_accepted(client):
    harmless = {name: known.harmless[0] for name, known in FOREIGN_FIELDS.items() if known.harmless}
    ignored = {name: {"any": ["thing"]} for name, known in FOREIGN_FIELDS.items() if known.accepts_all}
    null = dict.fromkeys(FOREIGN_FIELDS)
    plain = (await complete(client)).json()["choices"]
    for fields in (harmless, ignored, null):
        response = await complete(client, **fields)
        assert response.status_code == 200, response.text
        assert response.json()["choices"] == plain


@pytest.mark.parametrize("name", sorted(name for name, known in FOREIGN_FIELDS.items() if not known.accepts_all))
async def test_any_other_value_is_refused_by_name(client, router, name):
    error = error_of(await chat(client, **{name: "a secret value"}))
    assert (error["param"], error["code"]) == (name, "unsupported_parameter")
    assert error["message"].startswith(f"{name} is ")
    assert ("secret" in error["message"]) != FOREIGN_FIELDS[name].holds_text
    assert router.requests == []


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"best_of": 2, "n": 3}, "best_of is 2; it must be at least n, which is 3"),
        ({"best_of": 2, "stream": True}, "best_of is 2; a stream cannot be ranked before it ends; leave out stream, or "
         "best_of"),
        ({"best_of": 33}, "best_of is 33; with 1 prompt; at most 32 answers in one call"),
        ({"best_of": 4, "use_beam_search": True}, "use_beam_search is true; this parameter is not supported here, "
         f"except false; {BEAMS}"),
        ({"suffix": "dog"}, "suffix is 3 characters; the model has no special tokens for filling in the middle; write "
         "what follows into the prompt"),
        ({"use_beam_search": True, "n": 4}, "use_beam_search is true; this parameter is not supported here, except "
         f"false; {BEAMS}"),
        ({"length_penalty": 2}, f"length_penalty is 2; this parameter is not supported here, except 1; {BEAMS}"),
        ({"priority": True}, "priority is true; this parameter is not supported here, except 0; requests run in order "
         "of arrival"),
        ({"n_predict": 5}, "n_predict is 5; this parameter is not supported here; use max_tokens"),
    ],
)  # fmt: skip
async def test_a_refusal_says_what_is_accepted_and_what_to_do(client, fields, message):
    assert error_of(await complete(client, **fields))["message"] == message


async def test_numbers_are_compared_as_json_has_them(client):
    assert (await complete(client, length_penalty=1.0, typical_p=1)).status_code == 200
    assert (await chat(client, best_of=1.0)).status_code == 200


# --- whole numbers ---------------------------------------------------------------------------------------------------


BODIES = (CompletionBody, ChatBody, ResponsesBody, MessagesBody, CountTokensBody, TokenizePromptBody, TokenizeChatBody,
          DetokenizeBody)  # fmt: skip


def parts_of(annotation: Any) -> Iterator[Any]:
    yield annotation
    for part in get_args(annotation):
        yield from parts_of(part)


def with_parts(kind: type[BaseModel]) -> set[type[BaseModel]]:
    """The record, and those within it."""
    found, waiting = set(), [kind]
    while waiting:
        found.add(one := waiting.pop())
        parts = [part for field in one.model_fields.values() for part in parts_of(field.annotation)]
        waiting += [part for part in parts if isinstance(part, type) and issubclass(part, BaseModel)]
    return found


WHOLE_NUMBERS = [
    (kind, name)
    for kind in sorted(set().union(*map(with_parts, BODIES)), key=str)
    for name, field in kind.model_fields.items()
    if int in parts_of(field.annotation)
]


@pytest.mark.parametrize(("kind", "name"), WHOLE_NUMBERS, ids=lambda one: getattr(one, "__name__", one))
def test_a_whole_number_may_have_a_fraction_of_zero_and_is_otherwise_not_converted(kind, name):
    adapter = TypeAdapter(kind.model_fields[name].rebuild_annotation(), config=StrictFields.model_config)

    def numbers(value: Any) -> list[Any]:
        """That become of it or of a list of it; what is a list of texts to the field is not."""
        taken = []
        for one in (value, [value], [[value]]):
            try:
                taken.append(adapter.validate_python(one))
            except ValidationError:
                continue
        return [part for part in re.findall(r"[^][]+", str(taken)) if "'" not in part]

    assert numbers(1.0) == numbers(1) != []
    assert numbers(1.5) == numbers("1") == numbers(True) == []


async def test_numbers_are_taken_as_json_has_them(client, router):
    plain = {"prompt": [5, 6, 7], "max_tokens": 4, "n": 2, "seed": 7, "top_k": 3, "logit_bias": {"5": 1}}
    with_fractions = {**plain, "prompt": [5, 6.0, 7.0], "max_tokens": 4.0, "n": 2.0, "seed": 7.0, "top_k": 3.0}
    answers = [(await complete(client, **fields)).json()["choices"] for fields in (plain, with_fractions)]
    assert answers[0] == answers[1]
    assert len(answers[0]) == 2
    for value, told in (("2", "'2'"), (True, "true"), (2.5, "2.5")):
        message = error_of(await chat(client, max_tokens=value))["message"]
        assert message == f"max_tokens is {told}; it must be a whole number"
    assert error_of(await chat(client, n=-1.0))["message"] == "n is -1; it must be at least 1"
    assert "at most 128 tokens are generated" in error_of(await chat(client, max_tokens=1e300))["message"]
    assert re.match(r"n is 10+5\d+\.\.\.; it must be at most 128", error_of(await chat(client, n=1e300))["message"])


# --- implemented -----------------------------------------------------------------------------------------------------


async def test_a_chat_says_where_answers_are_ranked(client):
    message = error_of(await chat(client, best_of=2))["message"]
    assert message.startswith(
        "best_of is 2; this parameter is not supported here, except 1; answers are ranked by /v1/"
    )


@pytest.fixture(
    params=["<|fim_prefix|> <|fim_suffix|> <|fim_middle|>", "<｜fim▁begin｜> <｜fim▁hole｜> <｜fim▁end｜>"],
    ids=["qwen", "deepseek"],
)
def fill_in(request):
    """A tokenizer with marks for filling in the middle, and their ids."""
    tokenizer = toy_tokenizer()
    marks = request.param.split()
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    return tokenizer, tokenizer.convert_tokens_to_ids(marks)


async def test_a_suffix_stands_between_marks_behind_the_prompt(router, fill_in):
    tokenizer, (before, after, gap) = fill_in
    async with gateway_client(GenerationService(router, tokenizer, MODEL, CONFIG), CONFIG) as client:
        assert "suffix" in (await client.get("/v1/models")).json()["data"][0]["capabilities"]
        response = await complete(client, prompt=["the quick", "one"], suffix="fox")
        assert response.status_code == 200, response.text
        for request, prompt in zip(router.requests, ("the quick", "one"), strict=True):
            assert request.prompt_token_ids.tolist() == [before, *tokens(prompt), after, *tokens("fox"), gap]
        for fields in ({"prompt": [5]}, {"prompt": [[5], [6]]}, {"echo": True}):
            error = error_of(await complete(client, suffix="fox", **fields))
            assert (error["param"], error["code"]) == ("suffix", "unsupported_value")


@pytest.mark.parametrize("stream", [False, True])
async def test_token_ids_come_with_the_choices(client, stream):
    response = await complete(client, prompt=[FOX, "one two 😀"], n=2, return_token_ids=True, stream=stream)
    whole = (await complete(client, prompt=[FOX, "one two 😀"], n=2)).json()["choices"]
    found = [{"prompt_token_ids": [], "token_ids": [], "text": ""} for _ in range(4)]
    for answer in events(response) if stream else [response.json()]:
        assert "prompt_token_ids" not in answer
        for choice in answer["choices"]:
            for name in ("token_ids", "text"):
                found[choice["index"]][name] += choice[name]
            found[choice["index"]]["prompt_token_ids"] += choice.get("prompt_token_ids", [])
    for index, one in enumerate(found):
        prompt = tokens(FOX if index < 2 else "one two 😀")
        assert one["prompt_token_ids"] == prompt
        assert one["token_ids"] == [prompt[position % len(prompt)] for position in range(8)]
        assert one["text"] == whole[index]["text"]


@pytest.mark.parametrize("stream", [False, True])
async def test_token_ids_of_a_chat(client, router, stream):
    response = await chat(client, return_token_ids=True, stream=stream, max_tokens=30)
    answers = events(response) if stream else [response.json()]
    assert answers[0]["prompt_token_ids"] == router.requests[0].prompt_token_ids.tolist()
    assert all("prompt_token_ids" not in answer for answer in answers[1:])
    token_ids = [token for answer in answers for token in answer["choices"][0].get("token_ids", [])]
    assert token_ids == [START, *tokens("user\nhello")]
    assert "token_ids" not in (await chat(client)).text


@pytest.mark.parametrize("chunk_tokens", [1, 3, 8])
async def test_token_ids_end_with_the_stop_string(client, router, chunk_tokens):
    router.chunk_tokens = chunk_tokens
    choice = (await complete(client, stop=["brown"], return_token_ids=True)).json()["choices"][0]
    assert choice["text"] == "the quick "
    assert choice["token_ids"] == tokens(FOX)[:3]


@pytest.mark.parametrize("stream_tokens", [0, 3])
async def test_portions_of_a_stream_keep_all_token_ids(router, stream_tokens):
    config = CONFIG.model_copy(update={"stream_tokens": stream_tokens, "stream_interval_ms": 1})
    async with gateway_client(GenerationService(router, TOKENIZER, MODEL, config), config) as client:
        chunks = events(await complete(client, prompt="😀😀😀", max_tokens=11, return_token_ids=True, stream=True))
    assert [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]] == tokens("😀😀😀")[:11]


async def test_usage_in_every_chunk(client):
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(await complete(client, stream=True, stream_options=options))
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [3, 6, 8, 8]
    assert all(chunk["usage"]["prompt_tokens"] == len(tokens(FOX)) for chunk in chunks)
    assert chunks[-1]["choices"] == []
    options["include_usage"] = False
    assert all("usage" not in chunk for chunk in events(await complete(client, stream=True, stream_options=options)))


async def test_a_stop_string_shows_when_asked_for(client):
    fields = {"stop": ["fox", "own"], "include_stop_str_in_output": True}
    for stream in (False, True):
        response = await complete(client, **fields, stream=stream)
        answers = events(response) if stream else [response.json()]
        assert "".join(answer["choices"][0]["text"] for answer in answers) == "the quick brown"


async def test_special_tokens_show_when_asked_for(client):
    prompt = [*tokens("one"), START, *tokens("two"), END]
    fields = {"prompt": prompt, "skip_special_tokens": False}
    assert (await complete(client, **fields)).json()["choices"][0]["text"] == "one<|start|>two"
    fields["include_stop_str_in_output"] = True  # concerns stop strings
    assert (await complete(client, **fields)).json()["choices"][0]["text"] == "one<|start|>two"
    assert (await complete(client, prompt=prompt)).json()["choices"][0]["text"] == "onetwo"


async def test_a_least_number_of_tokens_is_taken_where_nothing_ends_the_answer(client):
    assert (await complete(client, min_tokens=8, ignore_eos=True)).status_code == 200
    assert (await complete(client, min_tokens=0)).status_code == 200
    for fields in ({}, {"ignore_eos": True, "stop": ["a"]}, {"ignore_eos": True, "stop_token_ids": [1]}):
        assert "supported only with ignore_eos" in error_of(await complete(client, min_tokens=2, **fields))["message"]
    assert "at most max_tokens, which is 8" in error_of(await complete(client, min_tokens=9))["message"]


@pytest.mark.parametrize(
    ("template", "effort", "written"),
    [
        ("{{ reasoning_effort }}<", "low", "low<"),
        ("{{ enable_thinking }}<", "none", "False<"),
        ("plain<", "none", "plain<"),
        ("{{ enable_thinking }}<", "high", None),
        ("<think></think>", "none", None),
    ],
)
async def test_an_effort_goes_to_the_template_or_is_refused(template, effort, written):
    tokenizer = toy_tokenizer()
    tokenizer.chat_template = template
    async with gateway_client(GenerationService(EchoRouter(), tokenizer, MODEL, CONFIG), CONFIG) as client:
        answer = await chat(client, reasoning_effort=effort, max_tokens=30)
        body = {"messages": [{"role": "user", "content": "hello"}], "reasoning_effort": effort}
        counted = await client.post("/tokenize", json=body)
    for one in (answer, counted):
        if written is None:
            error = error_of(one)
            assert error["param"] == "reasoning_effort"
            assert "chat template has no variable for it" in error["message"]
    if written is not None:
        assert answer.json()["choices"][0]["message"]["content"].startswith(written)
        assert counted.json()["tokens"] == tokens(written)


def test_text_offsets_count_characters_that_several_tokens_make(router):
    strings = GenerationService(router, TOKENIZER, MODEL, CONFIG).token_strings
    found, places, offsets = tokens("a😀b"), TextOffsets(), []
    for part in (found[:2], found[2:]):  # chunks of a stream
        offsets += completion_logprobs([TokenScore(token, 0.0) for token in part], strings, places)["text_offset"]
    assert offsets == [0, 1, 1, 1, 1, 2]


async def test_up_to_max_stops_strings_end_an_answer(client):
    stops = [f"never {number}" for number in range(15)]
    answer = (await complete(client, stop=[*stops, "brown"])).json()
    assert answer["choices"][0]["text"] == "the quick "
    assert "gateway.max_stops" in error_of(await complete(client, stop=[*stops, "a", "b"]))["message"]


# --- the chat template -----------------------------------------------------------------------------------------------


async def prompt_of(client, router, **fields):
    response = await chat(client, **fields)
    assert response.status_code == 200, response.text
    return TOKENIZER.decode(router.requests[-1].prompt_token_ids.tolist())


async def test_variables_reach_the_chat_template(client, router):
    prompt = await prompt_of(client, router, chat_template_kwargs={"thinks": 4, "unused": [1]})
    assert prompt == "<|start|>user\nhello<|end|>\n<|start|>assistant\n<think>5"


async def test_messages_may_end_open_or_without_the_header_of_an_answer(client, router):
    closed = "<|start|>user\nhello<|end|>\n"
    assert await prompt_of(client, router, add_generation_prompt=False) == closed
    assert await prompt_of(client, router, continue_final_message=True) == "<|start|>user\nhello"
    error = error_of(await chat(client, continue_final_message=True, add_generation_prompt=True))
    assert error["param"] == "add_generation_prompt"
    assert error_of(await chat(client, add_special_tokens=True))["param"] == "add_special_tokens"
    assert (await chat(client, add_special_tokens=False)).status_code == 200


@pytest.mark.parametrize("name", ["tools", "messages", "tokenize", "documents", "chat_template", "_x", "a.b", ""])
async def test_names_that_are_not_the_templates_are_refused(client, router, name):
    error = error_of(await chat(client, chat_template_kwargs={name: "a secret"}))
    assert error["message"].startswith(f"chat_template_kwargs is {name!r}; this name is not a variable of templates")
    assert "secret" not in error["message"]
    assert router.requests == []


async def test_variables_are_bounded_and_may_not_break_the_template(client):
    error = error_of(await chat(client, chat_template_kwargs={"thinks": "x" * 9000}))
    assert "chat_template_kwargs is 9014 bytes; it must have at most 8192 bytes" in error["message"]
    error = error_of(await chat(client, chat_template_kwargs={"thinks": "a secret"}))
    assert (error["param"], "secret" in error["message"]) == ("messages", False)


# --- unknown parameters ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_token": 5}, "max_token is 5; there is no such parameter; did you mean max_tokens?"),
        ({"temprature": 1}, "did you mean temperature?"),
        ({"Top_P": 1}, "did you mean top_p?"),
        ({"max-tokens": 5}, "max-tokens is 5; there is no such parameter; did you mean max_tokens?"),
        ({"a b.c": 5}, "a b.c is 5; there is no such parameter"),
        ({"": {}}, "'' is an object with 0 fields; there is no such parameter"),
        ({"cache_promt": 1}, "did you mean cache_prompt?"),
        ({"stream_options": {"include_usages": 1}}, "did you mean stream_options.include_usage?"),
        ({"speculation": {"draftres": []}}, "did you mean speculation.drafters?"),
        ({"structured_outputs": {"jsn": {}}}, "did you mean structured_outputs.json?"),
        ({"wibble": "a secret"}, "wibble is a string of 8 characters; there is no such parameter"),
    ],
)
async def test_the_nearest_parameter_is_named(client, fields, words):
    error = error_of(await complete(client, **fields))
    assert error["code"] == "unknown_parameter"
    assert error["message"].endswith(words)


async def test_a_parameter_within_a_message_is_named_with_its_place(client):
    messages = [{"role": "user", "content": "a"}, {"role": "user", "contnt": "a secret"}]
    error = error_of(await chat(client, messages=messages))
    assert error["param"] == "messages[1].contnt"
    assert error["message"].endswith("did you mean messages[1].content?")
    assert "secret" not in error["message"]


async def test_unknown_parameters_are_ignored_where_the_configuration_says_so(router):
    config = CONFIG.model_copy(update={"unknown_fields": "ignore"})
    async with gateway_client(GenerationService(router, TOKENIZER, MODEL, config), config) as client:
        content = [{"type": "text", "text": "hello", "wibble": 1}]
        messages = [{"role": "user", "content": content, "wibble": {"a": 1}}]
        response = await chat(client, messages=messages, wibble=[1], stream_options={"wibble": 1})
        assert response.json()["choices"][0]["message"]["content"] == "user\nhello"
        assert error_of(await chat(client, wibble=1, temperature=9))["param"] == "temperature"
        assert error_of(await chat(client, use_beam_search=True))["param"] == "use_beam_search"


# --- words of errors -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"messages": [{"role": "user", "content": "x " * 3000}]},
         "messages is at least 605 tokens; there is room for at most 256 tokens, prompt and answer together"),
        ({"messages": []}, "messages is a list of 0 items; it must have at least 1 item"),
        ({"messages": {"a": 1}}, "messages is an object with 1 field; it must be a list"),
        ({"temperature": {"a": 1}}, "temperature is an object with 1 field; it must be a number"),
        ({"messages": [{"role": "user", "content": "a"}] * 3 + [{"role": "user", "content": 5}]},
         "messages[3].content is 5; it must be a string or a list of text parts"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, IMAGE]}]},
         "messages[0].content[1].type is 'image_url'; it must be 'text'"),
        ({"messages": [{"role": "user", "content": ["a"]}]},
         "messages[0].content[0] is a string of 1 character; it must be an object"),
        ({"messages": [{"role": "user", "content": {"type": "text", "text": "a"}}]},
         "messages[0].content is an object with 2 fields; it must be a string or a list of text parts"),
        ({"prediction": {"type": "content", "content": [IMAGE]}},
         "prediction.content[0].type is 'image_url'; it must be 'text'"),
        ({"temperature": "hot"}, "temperature is 'hot'; it must be a number"),
        ({"n": 1.5}, "n is 1.5; it must be a whole number"),
    ],
)  # fmt: skip
async def test_an_error_shows_place_value_and_limit(client, fields, message):
    assert error_of(await chat(client, **fields))["message"] == message


PHRASES = re.compile(
    r"Input should|after validation|valid dict|Value error|pydantic|Extra inputs|\b(None|True|False|dict|str|int)\b"
)


WRONG = ("", "x", 5, -5, 1.5, [], [[]], ["x"], {}, {"x": {}}, True, False, None, [{"type": "x", "role": 5}])


@pytest.mark.parametrize("kind", BODIES)
def test_no_error_has_the_words_of_a_library_or_a_language(kind):
    base = {"prompt": FOX, "messages": MESSAGES, "input": FOX, "max_tokens": 3, "tokens": [1]}
    required = {name: base[name] for name, field in kind.model_fields.items() if field.is_required()}
    for name in (*kind.model_fields, "wibble"):
        for value in WRONG:
            told = ""
            try:
                parse_fields(kind, {**required, name: value})
            except InvalidRequest as error:
                told = str(error)
            assert not PHRASES.search(told), (name, value)


async def test_no_error_behind_the_fields_has_such_words(client):
    for name in ("tools", "tool_choice", "stop", "response_format", "chat_template_kwargs", "n", "logit_bias", "echo"):
        for value in WRONG:
            answer = await chat(client, **{name: value})
            assert answer.status_code == 200 or not PHRASES.search(answer.text), (name, value)


@pytest.mark.parametrize(
    ("method", "path", "message"),
    [
        (
            "POST",
            "/v1/chat/completion",
            "there is no /v1/chat/completion here; did you mean POST /v1/chat/completions?",
        ),
        ("GET", "/v1/model", "there is no /v1/model here; did you mean GET /v1/models?"),
        ("POST", "/completions", "there is no /completions here; did you mean POST /v1/completions?"),
        (
            "POST",
            "/v1/completions/",
            "there is no /v1/completions/ here; did you mean POST /v1/completions?",
        ),
        ("GET", "/wibble", "there is no /wibble here; GET /openapi.json lists what there is"),
        ("GET", "/" + "x" * 500, f"there is no /{'x' * 63} here; GET /openapi.json lists what there is"),
    ],
)
async def test_an_unknown_path_is_told_with_the_nearest_route(client, method, path, message):
    assert (
        error_of(await client.request(method, path, headers={"content-type": "application/json"}), 404)["message"]
        == message
    )


async def test_a_wrong_method_is_told_with_those_that_are_allowed(client):
    response = await client.get("/v1/completions")
    assert error_of(response, 405)["message"] == "GET is not allowed for /v1/completions; allowed: POST"
    assert response.headers["allow"] == "POST"
    assert error_of(await client.delete("/v1/models/toy"), 405)["message"].endswith("allowed: GET")
