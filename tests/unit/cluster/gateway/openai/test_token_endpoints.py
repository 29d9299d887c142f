"""Text to tokens and back over HTTP and gRPC, and what clients are told of the model.

Covers `cluster.gateway.tokenizing`, `cluster.gateway.openai.token_routes`, `cluster.gateway.served_model` and the
parameters of gRPC that they share.
"""

from dataclasses import replace

import grpc
import pytest

from cluster.gateway.grpc.servicer import InferenceServicer
from cluster.gateway.paceline.v1 import inference_pb2 as pb
from cluster.gateway.paceline.v1.inference_pb2_grpc import InferenceStub, add_InferenceServicer_to_server
from cluster.gateway.service import GenerationService
from paceline_testing.echo_router import EchoRouter
from paceline_testing.toy_gateway import CONFIG, END, FOX, MESSAGES, MODEL, START, TOKENIZER, tokens
from paceline_testing.toy_tokenizer import toy_tokenizer

CONVERSATION = pb.Conversation(messages=[pb.Message(**MESSAGES[0])])


@pytest.fixture
async def stub(service):
    server = grpc.aio.server()
    add_InferenceServicer_to_server(InferenceServicer(service, CONFIG), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield InferenceStub(channel)
    await server.stop(None)


async def refused(call):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), caught.value.details()


async def test_text_becomes_tokens_and_text_again(client):
    answer = (await client.post("/tokenize", json={"model": "toy", "prompt": FOX})).json()
    assert answer == {"count": 4, "max_model_len": 256, "tokens": tokens(FOX), "token_strs": None}
    answer = (await client.post("/tokenize", json={"prompt": FOX, "return_token_strs": True})).json()
    assert answer["token_strs"] == TOKENIZER.convert_ids_to_tokens(tokens(FOX))
    answer = await client.post("/detokenize", json={"tokens": [START, *tokens(FOX), END]})
    assert answer.json() == {"prompt": f"<|start|>{FOX}<|end|>"}
    assert (await client.post("/tokenize", json={"prompt": ""})).json()["tokens"] == []


async def test_messages_are_tokenised_as_a_chat_would_be(client, router):
    await client.post("/v1/chat/completions", json={"messages": MESSAGES})
    answer = (await client.post("/tokenize", json={"messages": MESSAGES})).json()
    assert answer["tokens"] == router.requests[0].prompt_token_ids.tolist()
    open_end = {"messages": MESSAGES, "continue_final_message": True}
    assert (await client.post("/tokenize", json=open_end)).json()["tokens"] == [START, *tokens("user\nhello")]


@pytest.mark.parametrize(
    ("path", "fields", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": 5}, 400, "prompt"),
        ("/tokenize", {"prompt": FOX, "messages": MESSAGES}, 400, "prompt"),
        ("/tokenize", {"prompt": FOX, "model": "other"}, 404, "model"),
        ("/tokenize", {"prompt": FOX, "retrun_token_strs": True}, 400, "retrun_token_strs"),
        ("/tokenize", {"messages": MESSAGES, "chat_template_kwargs": {"tools": []}}, 400, "chat_template_kwargs"),
        ("/tokenize", {"prompt": "x" * 20_000}, 413, "body"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
        ("/detokenize", {"tokens": [len(TOKENIZER)]}, 400, "tokens"),
        ("/detokenize", {"tokens": [2**70]}, 400, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, 400, "tokens[0]"),
    ],
)
async def test_what_is_wrong_is_named(client, path, fields, status, param):
    response = await client.post(path, json=fields)
    assert (response.status_code, response.json()["error"]["param"]) == (status, param)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": 5}, "prompt is 5; it must be a string"),
        (
            {"prompt": FOX, "messages": MESSAGES},
            "prompt is a string of 19 characters; messages are given, too; send one of them",
        ),
    ],
)
async def test_a_refusal_tells_what_can_be_tokenised(client, fields, message):
    assert (await client.post("/tokenize", json=fields)).json()["error"]["message"] == message


async def test_a_model_has_limits_and_abilities(client, stub):
    (model,) = (await client.get("/v1/models")).json()["data"]
    assert model == (await client.get("/v1/models/toy")).json()
    assert (model["max_model_len"], model["max_new_tokens"], model["max_requests"]) == (256, 128, 80)
    assert model["drafters"] == ["suffix", "draft_model"]
    assert {"completion", "chat", "responses", "messages", "tools"} <= set(model["capabilities"])
    assert {"structured_outputs", "logprobs", "prompt_logprobs", "tokenize"} <= set(model["capabilities"])
    (found,) = (await stub.ListModels(pb.ListModelsRequest())).models
    assert {field.name: getattr(found, field.name) for field in found.DESCRIPTOR.fields} == {
        name: value for name, value in model.items() if name not in ("object", "owned_by")
    }


async def test_a_model_without_a_chat_template_does_not_chat():
    service = GenerationService(EchoRouter(), toy_tokenizer(with_chat_template=False), MODEL, CONFIG)
    assert not {"chat", "responses", "messages", "tools"} & set(service.card.capabilities)
    service.model = replace(service.model, max_side_len=9)
    assert "prompt_logprobs" not in service.card.capabilities
    assert "logprobs" in service.card.capabilities


async def test_tokens_over_grpc(stub, client):
    found = await stub.Tokenize(pb.TokenizeRequest(prompt=FOX, return_token_strs=True))
    assert (found.count, found.max_model_len, list(found.tokens)) == (4, 256, tokens(FOX))
    assert list(found.token_strs) == TOKENIZER.convert_ids_to_tokens(tokens(FOX))
    template = pb.ChatTemplate(continue_final_message=True)
    found = await stub.Tokenize(pb.TokenizeRequest(conversation=CONVERSATION, chat_template=template))
    assert list(found.tokens) == [START, *tokens("user\nhello")]
    assert (await stub.Detokenize(pb.DetokenizeRequest(tokens=[START, *tokens(FOX)]))).prompt == f"<|start|>{FOX}"
    code, details = await refused(stub.Tokenize(pb.TokenizeRequest()))
    assert (code, "prompt and messages" in details) == (grpc.StatusCode.INVALID_ARGUMENT, True)
    code, _ = await refused(stub.Detokenize(pb.DetokenizeRequest(tokens=[-1])))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    code, details = await refused(stub.Tokenize(pb.TokenizeRequest(prompt="x" * 20_000)))
    assert "at most 20000 bytes are read" in details
    code, _ = await refused(stub.Tokenize(pb.TokenizeRequest(prompt=FOX, model="other")))
    assert code is grpc.StatusCode.NOT_FOUND


async def test_a_generation_over_grpc_has_the_same_parameters(stub, router):
    common = {"temperature": 0, "max_tokens": 8, "return_token_ids": True, "stop": ["brown"]}
    answer = await stub.Generate(pb.GenerateRequest(prompt=FOX, include_stop_str_in_output=True, **common))
    assert (answer.text, list(answer.token_ids)) == ("the quick brown", tokens(FOX)[:3])
    assert list(answer.prompt_token_ids) == tokens(FOX)
    chunks = [chunk async for chunk in stub.GenerateStream(pb.GenerateRequest(prompt=FOX, **common))]
    assert [token for chunk in chunks for token in chunk.token_ids] == tokens(FOX)[:3]
    assert [token for chunk in chunks for token in chunk.prompt_token_ids] == tokens(FOX)
    ids = pb.TokenIds(ids=[START, *tokens("one")])
    answer = await stub.Generate(
        pb.GenerateRequest(prompt_token_ids=ids, skip_special_tokens=False, temperature=0, max_tokens=2)
    )
    assert answer.text == "<|start|>one"
    template = pb.ChatTemplate(kwargs='{"unused": 1}', add_generation_prompt=False)
    await stub.Generate(pb.GenerateRequest(conversation=CONVERSATION, chat_template=template))
    assert TOKENIZER.decode(router.requests[-1].prompt_token_ids.tolist()) == "<|start|>user\nhello<|end|>\n"


async def test_n_answers_over_grpc_are_those_over_http(stub, client):
    fields = {"n": 3, "seed": 2, "temperature": 1, "max_tokens": 7}
    choices = (await client.post("/v1/completions", json={"prompt": FOX, **fields})).json()["choices"]
    request = pb.GenerateRequest(prompt=FOX, return_token_ids=True, speculation=pb.Speculation(stats=True), **fields)
    answer = await stub.Generate(request)
    assert [(one.index, one.text) for one in (answer, *answer.others)] == [
        (choice["index"], choice["text"]) for choice in choices
    ]
    assert len({choice["text"] for choice in choices}) == 3
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.speculation.rounds) == (4, 21, 9)
    assert not any(one.HasField("usage") or one.id or one.prompt_token_ids for one in answer.others)
    *chunks, last = [chunk async for chunk in stub.GenerateStream(request)]
    texts, reasons = [""] * 3, [[], [], []]
    for number, chunk in enumerate((*chunks, last)):
        assert chunk.sequence_number == number
        texts[chunk.index] += chunk.text
        reasons[chunk.index] += [chunk.finish_reason] * bool(chunk.finish_reason)
        assert bool(chunk.prompt_token_ids) == (number == 0)
    assert texts == [choice["text"] for choice in choices]
    assert reasons == [[pb.FINISH_REASON_LENGTH]] * 3
    assert (last.usage, last.speculation) == (answer.usage, answer.speculation)
    assert not any(chunk.HasField("usage") or chunk.HasField("speculation") for chunk in chunks)
    for wrong, words in ((0, "n is 0; it must be at least 1"), (33, "at most 32 answers")):
        code, details = await refused(stub.Generate(pb.GenerateRequest(prompt=FOX, n=wrong)))
        assert (code, words in details) == (grpc.StatusCode.INVALID_ARGUMENT, True)


async def test_a_least_number_of_tokens_and_an_effort_are_checked_over_grpc_as_over_http(stub):
    await stub.Generate(pb.GenerateRequest(prompt=FOX, min_tokens=3, max_tokens=3, ignore_eos=True))
    code, details = await refused(stub.Generate(pb.GenerateRequest(prompt=FOX, min_tokens=3, max_tokens=3)))
    assert (code, "only with ignore_eos" in details) == (grpc.StatusCode.INVALID_ARGUMENT, True)
    none, high = (pb.ChatTemplate(reasoning_effort=effort) for effort in ("none", "high"))
    await stub.Generate(pb.GenerateRequest(conversation=CONVERSATION, chat_template=none, max_tokens=3))
    code, details = await refused(stub.Tokenize(pb.TokenizeRequest(conversation=CONVERSATION, chat_template=high)))
    assert details.startswith("chat_template.reasoning_effort is 'high'; the model's chat template has no variable")
    code, details = await refused(stub.Tokenize(pb.TokenizeRequest(prompt=FOX, chat_template=none)))
    assert details.startswith("chat_template is given; it needs a conversation")


@pytest.mark.parametrize("kwargs", ["x", "[]", '{"tools": []}'])
async def test_wrong_variables_of_the_template_are_refused_over_grpc(stub, kwargs):
    request = pb.GenerateRequest(conversation=CONVERSATION, chat_template=pb.ChatTemplate(kwargs=kwargs))
    code, details = await refused(stub.Generate(request))
    assert (code, details.startswith("chat_template")) == (grpc.StatusCode.INVALID_ARGUMENT, True)


async def test_tools_that_count_tokens_learn_the_special_ones_and_the_template(client):
    found = (await client.get("/tokenizer_info")).json()
    assert found["eos_token"] == TOKENIZER.eos_token
    assert found["bos_token"] == TOKENIZER.bos_token
    assert found["chat_template"] == TOKENIZER.chat_template
    assert found["tokenizer_class"] == type(TOKENIZER).__name__
