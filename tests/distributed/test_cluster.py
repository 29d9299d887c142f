"""A whole cluster on Ray with tiny models: the same text as one process, whatever dies meanwhile."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc
import httpx
import pytest
import ray
from ray import serve

from actors.workers.directory_actor import find_directory
from cluster.config import ClusterConfig
from cluster.gateway.paceline.v1 import inference_pb2, inference_pb2_grpc
from cluster.offline.engine import LocalEngine
from cluster.ray_names import APPLICATION, DIRECTORY
from paceline_testing import mtp_checkpoints
from paceline_testing.ascii_model import speak_ascii
from paceline_testing.deployed import deployed, scale
from paceline_testing.panels import everything_asked, names_in
from paceline_testing.published_heads import for_larger_target, p_eagle
from paceline_testing.ray_processes import ray_processes
from paceline_testing.scraped import value_of
from paceline_testing.tiny_models import save_tiny_model

PROMPTS = [f"{word} and {word}, then again {word}" for word in ("oak", "elm", "ash", "fir", "yew", "box", "bay", "fig")]

TARGET_SIZE = 96  # the width of the target; its heads are narrower

NUM_COMERS = 12  # clients beside the eight streams: eight more than can run or wait

STRINGS = {"type": "array", "items": {"type": "string", "minLength": 30, "maxLength": 60}, "minItems": 5}
FORMAT = {"type": "json_schema", "json_schema": {"name": "strings", "schema": STRINGS, "strict": True}}
TOOL = {
    "type": "function",
    "function": {"name": "note", "parameters": {
        "type": "object", "properties": {"lines": STRINGS}, "required": ["lines"], "additionalProperties": False}},
}  # fmt: skip


def written_by(deltas: list[dict]) -> tuple[str, str]:
    """Name and arguments of the call, and the finish reason."""
    calls = [call for delta in deltas for call in delta["delta"].get("tool_calls", [])]
    return "".join(call["function"].get("name", "") + call["function"]["arguments"] for call in calls), deltas[-1][
        "finish_reason"
    ]


class Cluster:
    """A running cluster as a client sees it, and the processes behind it."""

    def __init__(self, config: ClusterConfig) -> None:
        self.config = config
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{config.gateway.http_port}", timeout=240)

    def complete(self, prompt: str, **options) -> str:
        body = {"prompt": prompt, "max_tokens": 60, "temperature": 0, "ignore_eos": True, **options}
        answer = self.http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["text"]

    def stream(self, prompt: str, on_chunk=None, **options) -> str:
        body = {"prompt": prompt, "max_tokens": 60, "temperature": 0, "ignore_eos": True, "stream": True, **options}
        text = ""
        with self.http.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.status_code == 200
            for line in answer.iter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                text += "".join(choice["text"] for choice in event["choices"])
                if on_chunk is not None:
                    on_chunk()
        return text

    def stream_call(self, text: str, on_chunk=lambda: None) -> list[dict]:
        """The deltas of a streamed chat that must call a tool, without the ids that are drawn for calls."""
        body = {
            "messages": [{"role": "user", "content": text}], "tools": [TOOL], "tool_choice": "required",
            "parallel_tool_calls": False, "stream": True, "max_tokens": 200, "temperature": 1.0, "seed": 5,
        }  # fmt: skip
        deltas = []
        with self.http.stream("POST", "/v1/chat/completions", json=body) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                    for call in choice["delta"].get("tool_calls", []):
                        call.pop("id", None)
                    deltas.append(choice)
                    on_chunk()
        return deltas

    def metric(self, name: str, **labels: str) -> float:
        return value_of(self.http.get("/metrics").text, name, **labels)

    def process_of(self, deployment: str) -> int:
        return serve.get_deployment_handle(deployment, APPLICATION).health.remote().result()["process_id"]

    def rank_processes(self) -> list[int]:
        health = serve.get_deployment_handle("TargetGroup", APPLICATION).health.remote().result()
        return [rank.process_id for rank in health]

    def router_process(self) -> int:
        (process,) = ray_processes(f"ServeReplica:{APPLICATION}:Router")
        return process

    def wait_for(self, condition, seconds: float, what: str) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"{what} did not happen within {seconds} s"
            time.sleep(0.05)


@pytest.fixture(scope="module")
def model_dirs(tmp_path_factory) -> tuple[Path, Path]:
    shape = {"hidden_size": TARGET_SIZE, "heads": 6, "kv_heads": 2, "max_positions": 2048}
    target = save_tiny_model(tmp_path_factory.mktemp("target"), "llama", 5, layers=4, **shape)
    draft = save_tiny_model(tmp_path_factory.mktemp("draft"), "llama", 5, layers=1, **shape)
    for directory in (target, draft):
        speak_ascii(directory)
    return target, draft


@contextmanager
def running(
    model_dirs,
    ports,
    *,
    exact: str,
    tensor_parallel: int,
    draft_workers: int,
    draft_ranks: int = 1,
    health_timeout_s: float = 5.0,
    eagle_head: str = "none",
    **router: int,
) -> Iterator[Cluster]:
    config = ClusterConfig.model_validate(
        {
            "target": {
                "model": str(model_dirs[0]),
                "served_name": "tiny",
                "device": "cpu",
                "exact": exact,
                "tensor_parallel": tensor_parallel,
                "kv_cache_tokens": 16384,
                "health_timeout_s": health_timeout_s,
                "eagle_head": eagle_head,
            },
            "draft": {
                "model": str(model_dirs[1]),
                "workers": draft_workers,
                "tensor_parallel": draft_ranks,
                "device": "cpu",
                "kv_cache_tokens": 16384,
            },
            "router": {"max_running": 8, "max_prefill_rows": 64, **router},
            "gateway": ports,
        }
    )
    with deployed(config):
        cluster = Cluster(config)
        cluster.wait_for(lambda: cluster.metric("paceline_draft_workers") == draft_workers, 60, "the draft workers")
        yield cluster


@pytest.mark.slow
def test_a_one_pass_head_on_two_ranks_drafts_and_changes_no_text(ray_here, ports, model_dirs, tmp_path):
    head = str(p_eagle(for_larger_target(TARGET_SIZE)).save(tmp_path / "head"))
    plain = LocalEngine(str(model_dirs[0]), drafters=("none",), device="cpu", kv_cache_tokens=16384)
    wanted = [one.text for one in plain.generate(PROMPTS, max_new_tokens=60, ignore_eos=True)]
    with running(model_dirs, ports, exact="default", tensor_parallel=2, draft_workers=1, eagle_head=head) as cluster:
        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(cluster.stream, PROMPTS)) == wanted
        assert cluster.metric("paceline_spec_decode_num_draft_tokens_total", source="eagle") > 0


class TestExactCluster:
    """One rank, bitwise: every answer must equal the one of a process of its own, without drafts."""

    @pytest.fixture(scope="class")
    def cluster(self, ray_here, ports, model_dirs):
        with running(model_dirs, ports, exact="bitwise", tensor_parallel=1, draft_workers=2, max_waiting=4) as cluster:
            yield cluster

    @pytest.fixture(scope="class")
    def oracle(self, model_dirs) -> LocalEngine:
        return LocalEngine(str(model_dirs[0]), drafters=("none",), device="cpu", exact="bitwise", kv_cache_tokens=16384)

    def test_greedy_text_is_that_of_plain_decoding_in_one_process(self, cluster, oracle):
        wanted = [g.text for g in oracle.generate(PROMPTS, max_new_tokens=60, ignore_eos=True)]
        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(cluster.stream, PROMPTS)) == wanted
        assert [cluster.complete(prompt) for prompt in PROMPTS[:2]] == wanted[:2]
        assert cluster.metric("paceline_spec_decode_num_draft_tokens_total", source="draft_model") > 0

    def test_what_panels_and_alerts_name_is_on_the_page_that_is_scraped(self, cluster):
        page = cluster.http.get("/metrics").text
        names = {name for asked in everything_asked() for name, _ in asked.series}
        missing = {name for name in names - names_in(page).keys() if f"# HELP {name} " not in page}
        # There is no shared cache here; see tests/unit/cluster/test_observability.py.
        assert {name for name in missing if not name.startswith("paceline_cache_")} == set()
        assert len(names - missing) > 40

    def test_the_id_of_a_call_comes_back_once_over_http_and_grpc(self, cluster):
        body = {"prompt": PROMPTS[0], "max_tokens": 2}
        answer = cluster.http.post("/v1/completions", json=body, headers={"x-request-id": "mine"})
        assert answer.headers.get_list("x-request-id") == ["mine"]
        with grpc.insecure_channel(f"127.0.0.1:{cluster.config.gateway.grpc_port}") as channel:
            generate = inference_pb2_grpc.InferenceStub(channel).Generate
            request = inference_pb2.GenerateRequest(prompt=PROMPTS[0], max_tokens=2)
            _, call = generate.with_call(request, metadata=[("x-request-id", "mine")], timeout=60)
        assert dict(call.trailing_metadata())["x-request-id"] == "mine"

    def test_a_seed_gives_the_same_text_with_and_without_speculation_alone_and_under_load(self, cluster, oracle):
        options = {"temperature": 0.9, "top_p": 0.95, "seed": 11}
        wanted = oracle.generate([PROMPTS[0]], max_new_tokens=60, ignore_eos=True, temperature=0.9, top_p=0.95, seed=11)
        assert cluster.complete(PROMPTS[0], **options) == wanted[0].text
        assert cluster.complete(PROMPTS[0], **options, speculation={"enabled": False}) == wanted[0].text
        with ThreadPoolExecutor(8) as pool:
            noise = [pool.submit(cluster.stream, prompt, temperature=1.0) for prompt in PROMPTS[1:]]
            assert cluster.complete(PROMPTS[0], **options) == wanted[0].text
            assert all(future.result() for future in noise)

    def test_grpc_gives_the_same_text_and_numbers_its_messages(self, cluster, oracle):
        wanted = oracle.generate([PROMPTS[0]], max_new_tokens=40, ignore_eos=True)[0].text
        with grpc.insecure_channel(f"127.0.0.1:{cluster.config.gateway.grpc_port}") as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            request = inference_pb2.GenerateRequest(prompt=PROMPTS[0], max_tokens=40, temperature=0.0, ignore_eos=True)
            chunks = list(stub.GenerateStream(request, timeout=60))
            assert "".join(chunk.text for chunk in chunks) == wanted
            numbers = [chunk.sequence_number for chunk in chunks]
            assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
            assert stub.Generate(request, timeout=60).text == wanted

    def test_constrained_text_is_that_of_one_process_over_http_and_grpc(self, cluster, oracle):
        options = {"temperature": 1.0, "seed": 5}
        wanted = oracle.generate(
            PROMPTS[:1], structured_outputs={"json": STRINGS}, max_new_tokens=60, ignore_eos=True, **options
        )[0].text
        assert wanted.startswith("[")
        assert cluster.complete(PROMPTS[0], response_format=FORMAT, **options) == wanted
        assert cluster.complete(PROMPTS[0], guided_json=STRINGS, **options) == wanted
        assert cluster.stream(PROMPTS[0], response_format=FORMAT, speculation={"enabled": False}, **options) == wanted
        with grpc.insecure_channel(f"127.0.0.1:{cluster.config.gateway.grpc_port}") as channel:
            request = inference_pb2.GenerateRequest(
                prompt=PROMPTS[0], max_tokens=60, ignore_eos=True, **options,
                structured_outputs=inference_pb2.StructuredOutputs(json=json.dumps(STRINGS)),
            )  # fmt: skip
            assert inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=60).text == wanted
        assert cluster.complete(PROMPTS[0], structured_outputs={"choice": ["yes", "no"]}) in ("yes", "no")
        schema = {"type": "array", "unevaluatedItems": False}
        body = {
            "prompt": "a",
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
        }
        refused = cluster.http.post("/v1/completions", json=body)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "response_format.json_schema.schema.unevaluatedItems"
        assert "unevaluatedItems" in refused.json()["error"]["message"]

    def test_statistics_add_up(self, cluster):
        body = {"prompt": PROMPTS[0], "max_tokens": 60, "temperature": 0, "ignore_eos": True}
        body["speculation"] = {"stats": True}
        answer = cluster.http.post("/v1/completions", json=body).json()
        stats = answer["speculation"]
        assert stats["rounds"] + sum(stats["accepted_tokens"].values()) >= 60
        assert stats["target_rows"] >= stats["rounds"]
        assert sum(stats["accepted_tokens"].values()) <= stats["draft_tokens"]
        assert answer["usage"]["completion_tokens"] == 60

    def test_a_client_that_leaves_frees_its_sequence_and_its_blocks(self, cluster):
        body = {"prompt": PROMPTS[0], "max_tokens": 1800, "temperature": 0, "ignore_eos": True, "stream": True}
        body["speculation"] = {"enabled": False}  # or it would soon be done
        with cluster.http.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()  # kept: the response is closed with it
            next(lines)
            cluster.wait_for(lambda: cluster.metric("paceline_sequences_running") == 1, 5, "the sequence to run")
        # By itself it would go on for longer.
        cluster.wait_for(lambda: cluster.metric("paceline_sequences_running") == 0, 4.0, "the sequence's end")
        enough = cluster.metric("paceline_kv_blocks") - 4
        cluster.wait_for(lambda: cluster.metric("paceline_kv_blocks_free") >= enough, 4.0, "the return of its blocks")

    def test_more_requests_than_the_queue_holds_are_refused_with_retry_after(self, cluster):
        def ask(prompt: str) -> httpx.Response:
            body = {"prompt": prompt, "max_tokens": 100, "temperature": 0, "ignore_eos": True}
            return cluster.http.post("/v1/completions", json=body)

        with ThreadPoolExecutor(40) as pool:
            answers = list(pool.map(ask, PROMPTS * 5))
        codes = [answer.status_code for answer in answers]
        assert set(codes) == {200, 429}
        assert codes.count(200) >= 12  # 8 running and 4 waiting
        refused = next(answer for answer in answers if answer.status_code == 429)
        assert int(refused.headers["retry-after"]) >= 1

    def test_killing_a_draft_worker_in_the_middle_of_eight_streams_changes_nothing(self, cluster, oracle):
        wanted = [g.text for g in oracle.generate(PROMPTS, max_new_tokens=200, ignore_eos=True)]
        seen = threading.Semaphore(0)
        with ThreadPoolExecutor(8) as pool:
            streams = [pool.submit(cluster.stream, p, seen.release, max_tokens=200) for p in PROMPTS]
            for _ in range(20):  # they are on their way
                assert seen.acquire(timeout=30)
            os.kill(cluster.process_of("DraftPool"), signal.SIGKILL)
            assert [stream.result() for stream in streams] == wanted
        cluster.wait_for(lambda: cluster.metric("paceline_draft_workers") == 2, 60, "the worker's return")

    def test_killing_the_router_under_a_full_queue_and_new_clients_costs_and_repeats_no_token(self, cluster, oracle):
        """Four plain streams, two of JSON and two of calls run; 12 clients come and come again."""
        plain = [g.text for g in oracle.generate(PROMPTS, max_new_tokens=200, ignore_eos=True)]
        constrained = {"temperature": 1.0, "seed": 5}
        wanted = plain[:4] + [
            oracle.generate([prompt], structured_outputs={"json": STRINGS}, max_new_tokens=150, **constrained)[0].text
            for prompt in PROMPTS[4:6]
        ]
        calls = [written_by(cluster.stream_call(prompt)) for prompt in PROMPTS[6:]]
        assert all(call.startswith("note{") and reason in ("tool_calls", "length") for call, reason in calls)
        begun = [threading.Event() for _ in PROMPTS]
        is_over = threading.Event()
        arrived: list[tuple[int, httpx.Response]] = []

        def keep_coming(index: int) -> None:
            body = {"prompt": PROMPTS[index], "max_tokens": 20, "temperature": 0, "ignore_eos": True}
            pause_s = 0.0
            while not is_over.wait(pause_s):
                answer = cluster.http.post("/v1/completions", json=body)
                arrived.append((index, answer))
                pause_s = float(answer.headers.get("retry-after", 0.1))

        def has_come(status: int, since: int) -> bool:
            return any(answer.status_code == status for _, answer in arrived[since:])

        with ThreadPoolExecutor(8 + NUM_COMERS) as pool:
            try:
                streams = [
                    pool.submit(cluster.stream, prompt, one.set, max_tokens=200, speculation={"enabled": False})
                    for prompt, one in zip(PROMPTS[:4], begun[:4], strict=True)
                ]
                streams += [
                    pool.submit(
                        cluster.stream, prompt, one.set, max_tokens=150, response_format=FORMAT, ignore_eos=False,
                        speculation={"enabled": index == 0}, **constrained,
                    )
                    for index, (prompt, one) in enumerate(zip(PROMPTS[4:6], begun[4:6], strict=True))
                ]  # fmt: skip
                calling = [
                    pool.submit(cluster.stream_call, prompt, one.set)
                    for prompt, one in zip(PROMPTS[6:], begun[6:], strict=True)
                ]
                assert all(one.wait(60) for one in begun)
                comers = [pool.submit(keep_coming, index % 8) for index in range(NUM_COMERS)]
                cluster.wait_for(lambda: has_come(429, 0), 30, "a full queue")
                assert not all(stream.done() for stream in streams)
                assert not all(call.done() for call in calling)
                num_before = len(arrived)
                os.kill(cluster.router_process(), signal.SIGKILL)
                assert [stream.result() for stream in streams] == wanted
                assert [written_by(call.result()) for call in calling] == calls
                cluster.wait_for(lambda: has_come(200, num_before), 60, "an answer to a new client")
            finally:
                is_over.set()
            for comer in comers:
                comer.result()
        assert cluster.metric("paceline_request_resumed_total") >= 1
        assert {answer.status_code for _, answer in arrived[num_before:]} <= {200, 429, 503}
        assert all(int(answer.headers["retry-after"]) >= 1 for _, answer in arrived if answer.status_code != 200)
        served = [(index, answer) for index, answer in arrived if answer.status_code == 200]
        assert all(answer.json()["choices"][0]["text"] == plain[index][:20] for index, answer in served)

    def test_by_hand_draft_workers_run_another_model_and_what_cannot_be_is_refused(self, cluster, model_dirs, oracle):
        other = shutil.copytree(model_dirs[1], model_dirs[1].with_name("other"), dirs_exist_ok=True)
        processes = ray_processes("ServeReplica:paceline:DraftPool")
        done = scale("draft", "--model", str(other), "--wait-s", "100")
        assert done.stderr == ""
        assert done.stdout == f"draft workers: the model from now on is {other}\ndraft workers: 2 run it\n"
        done = scale("draft", "--model", "/not/there", "--wait-s", "100")
        assert done.returncode == 2
        assert "keep the model that they have: " in done.stderr
        assert "/not/there" in done.stderr
        workers = ray.get(find_directory(DIRECTORY).workers.remote("draft"))
        assert [Path(worker.model).name for worker in workers] == ["other", "other"]
        assert ray_processes("ServeReplica:paceline:DraftPool") == processes
        drafted = cluster.metric("paceline_spec_decode_num_draft_tokens_total", source="draft_model")
        wanted = oracle.generate([PROMPTS[0]], max_new_tokens=60, ignore_eos=True)[0].text
        assert cluster.complete(PROMPTS[0], speculation={"namespace": "after"}) == wanted
        assert cluster.metric("paceline_spec_decode_num_draft_tokens_total", source="draft_model") > drafted
        done = scale("target", "--groups", "2")
        assert (done.returncode, done.stdout) == (2, "")
        assert "--groups is 2; the limit is target.max_groups, 1" in done.stderr


class TestTensorParallelCluster:
    """Two ranks of the target, with a head, and of its draft worker: the loss of one is the loss of its group, and no
    stream notices but for the pause."""

    @pytest.fixture(scope="class")
    def cluster(self, ray_here, ports, model_dirs, tmp_path_factory):
        head = for_larger_target(TARGET_SIZE).save(tmp_path_factory.mktemp("head"))
        with running(
            model_dirs,
            ports,
            exact="default",
            tensor_parallel=2,
            draft_workers=1,
            draft_ranks=2,
            health_timeout_s=1.0,
            eagle_head=str(head),
        ) as cluster:
            yield cluster

    @pytest.fixture(scope="class")
    def wanted(self, model_dirs) -> list[str]:
        oracle = LocalEngine(str(model_dirs[0]), drafters=("none",), device="cpu", kv_cache_tokens=16384)
        return [g.text for g in oracle.generate(PROMPTS[:4], max_new_tokens=80, ignore_eos=True)]

    def test_a_head_drafts_and_the_text_is_that_of_one_process_without(self, cluster, wanted):
        speculation = {"drafters": ["eagle"]}
        with ThreadPoolExecutor(4) as pool:
            found = pool.map(lambda prompt: cluster.stream(prompt, max_tokens=80, speculation=speculation), PROMPTS[:4])
            assert list(found) == wanted
        assert drafted_by_the_head(cluster) > 0
        speculation = {"drafters": ["draft_model"]}
        assert cluster.stream(PROMPTS[0], max_tokens=80, speculation=speculation) == wanted[0]
        assert cluster.metric("paceline_spec_decode_num_draft_tokens_total", source="draft_model") > 0

    @pytest.mark.slow  # the loss of a worker is above; the end of its engine with a rank, in test_draft_ranks.py
    def test_a_draft_rank_that_dies_in_the_middle_of_streams_costs_and_repeats_no_token(self, cluster, wanted):
        seen = threading.Semaphore(0)
        (process,) = ray_processes("DraftRank")
        with ThreadPoolExecutor(4) as pool:
            streams = [pool.submit(cluster.stream, p, seen.release, max_tokens=80) for p in PROMPTS[:4]]
            for _ in range(12):
                assert seen.acquire(timeout=30)
            os.kill(process, signal.SIGKILL)
            assert [stream.result() for stream in streams] == wanted
        assert cluster.metric("paceline_spec_decode_num_draft_tokens_total", source="draft_model") > 0

    def test_constrained_text_is_that_of_one_process(self, cluster, model_dirs):
        oracle = LocalEngine(str(model_dirs[0]), drafters=("none",), device="cpu", kv_cache_tokens=16384)
        wanted = oracle.generate(PROMPTS[:4], structured_outputs={"json": STRINGS}, max_new_tokens=60, ignore_eos=True)
        with ThreadPoolExecutor(4) as pool:
            found = pool.map(lambda prompt: cluster.stream(prompt, response_format=FORMAT), PROMPTS[:4])
            assert list(found) == [answer.text for answer in wanted]

    def test_log_probabilities_are_those_of_one_process(self, cluster, model_dirs):
        oracle = LocalEngine(str(model_dirs[0]), drafters=("none",), device="cpu", kv_cache_tokens=16384)
        prompt = PROMPTS[0]
        (wanted,) = oracle.generate([prompt], max_new_tokens=8, ignore_eos=True, logprobs=0, prompt_logprobs=0)
        body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "logprobs": 0, "echo": True}
        found = cluster.http.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]["token_logprobs"]
        scores = [*wanted.prompt_logprobs.chosen.tolist(), *wanted.logprobs.chosen.tolist()]
        assert found[0] is None
        assert found[1:] == pytest.approx(scores, abs=1e-4)

    @pytest.mark.parametrize(
        ("rank", "fault"),
        [
            pytest.param(1, signal.SIGKILL, marks=pytest.mark.slow),  # a killed group is in test_target_groups.py
            pytest.param(1, signal.SIGSTOP, marks=pytest.mark.slow),
            (0, signal.SIGSTOP),
        ],
    )
    def test_a_rank_that_dies_or_hangs_in_the_middle_of_streams_costs_and_repeats_no_token(
        self, cluster, wanted, rank, fault
    ):
        assert cluster.stream(PROMPTS[0], max_tokens=80) == wanted[0]
        lost = cluster.metric("paceline_targets_lost_total")
        drafted = drafted_by_the_head(cluster)
        processes = cluster.rank_processes()
        seen = threading.Semaphore(0)
        try:
            with ThreadPoolExecutor(4) as pool:
                streams = [pool.submit(cluster.stream, p, seen.release, max_tokens=80) for p in PROMPTS[:4]]
                for _ in range(12):
                    assert seen.acquire(timeout=30)
                os.kill(processes[rank], fault)
                assert [stream.result() for stream in streams] == wanted
            cluster.wait_for(lambda: cluster.metric("paceline_targets_lost_total") > lost, 60, "the loss")
            cluster.wait_for(lambda: not any(map(is_alive, processes)), 30, "the end of the old ranks")
            # The head knows nothing of this model. Where that has been learnt, it is not asked.
            speculation = {"drafters": ["eagle"], "namespace": f"after-{rank}-{fault.name.lower()}"}
            assert cluster.stream(PROMPTS[1], max_tokens=80, speculation=speculation) == wanted[1]
            assert drafted_by_the_head(cluster) > drafted
        finally:
            if is_alive(processes[rank]):
                os.kill(processes[rank], signal.SIGKILL)


@pytest.mark.slow
def test_the_mtp_head_of_a_hybrid_drafts_on_two_ranks(ray_here, ports, tmp_path):
    path = mtp_checkpoints.qwen3_next().save(tmp_path)
    oracle = LocalEngine(str(path), drafters=("none",), device="cpu", kv_cache_tokens=4096)
    # A server leaves out the beginning of a character that its answer's end cuts off.
    wanted = [g.text.rstrip("\ufffd") for g in oracle.generate(PROMPTS[:4], max_new_tokens=40, ignore_eos=True)]
    with running((path, path), ports, exact="default", tensor_parallel=2, draft_workers=0, eagle_head="mtp") as cluster:
        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(lambda prompt: cluster.stream(prompt, max_tokens=40), PROMPTS[:4])) == wanted
        assert drafted_by_the_head(cluster) > 0


def drafted_by_the_head(cluster: Cluster) -> float:
    return cluster.metric("paceline_spec_decode_num_draft_tokens_total", source="eagle")


def is_alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
