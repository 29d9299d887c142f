"""What a configuration makes of a cluster before anything is started."""

import dataclasses
import sys
from pathlib import Path

import numpy as np
import pytest

from actors.drafters.registry import expand_drafters
from actors.errors import InvalidRequest, ModelError
from actors.models.catalog import resolve_model
from actors.models.loader import read_model_info
from actors.models.source import ModelSource
from actors.workers.draft_pool import draft_pool_application
from actors.workers.rank_options import rank_options
from actors.workers.settings import DraftSettings
from cluster.config import CacheConfig, ClusterConfig, DraftConfig, RouterConfig, SpeculationConfig
from cluster.errors import ConfigError
from cluster.gateway.deployment import gateway_application
from cluster.gateway.served_model import ServedModel
from cluster.gateway_config import GatewayConfig
from cluster.offline.corpus import build_corpus
from cluster.router.deployment import RouterSettings, router_application
from cluster.routing.policy import SoonestFirst
from cluster.serve import plan_cluster, served_model, told_gpu_shares, with_gpu_shares
from paceline_testing.mtp_checkpoints import mimo
from paceline_testing.other_vocabularies import merging_tokenizer
from paceline_testing.tiny_models import save_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("model"), layers=1, hidden_size=16)


def plan_of(model, speculation, draft=None, home=Path("/nonexistent"), **target):
    sections = {"target": {"model": str(model), "device": "cpu", **target}, "speculation": speculation}
    return plan_cluster(ClusterConfig.model_validate({**sections, "draft": draft or {}}), home)


def plan(model, draft, drafters):
    return plan_of(model, {"drafters": drafters}, {"model": str(draft), "workers": 2, "device": "cpu"})


@pytest.mark.parametrize("drafters", [["none"], [], ["suffix"], ["suffix", "prompt_lookup"]])
@pytest.mark.parametrize("draft", ["auto", "given"])
def test_drafters_without_the_draft_model_start_no_draft_workers_and_build_nothing(model, draft, drafters):
    planned = plan(model, model if draft == "given" else draft, drafters)
    assert planned.draft is None
    assert not planned.builds_drafter
    assert planned.num_cpus == plan(model, "none", ["auto"]).num_cpus


def test_drafting_ahead_is_for_workers_that_have_a_gpu_unless_it_is_set(model):
    planned = plan(model, model, ["draft_model"])
    assert planned.draft_ahead == 0
    assert dataclasses.replace(planned, draft_device="cuda").draft_ahead > 0
    for ahead in (0, 7):
        config = ClusterConfig.model_validate({"draft": {"ahead": ahead}})
        for device in ("cpu", "cuda"):
            assert dataclasses.replace(planned, config=config, draft_device=device).draft_ahead == ahead


@pytest.mark.parametrize("drafters", [["auto"], ["draft_model"], ["suffix", "draft_model"], ["ouroboros"]])
def test_drafters_with_the_draft_model_start_its_workers(model, drafters):
    planned = plan(model, model, drafters)
    assert planned.draft.path == model
    assert planned.num_cpus == pytest.approx(plan(model, model, ["suffix"]).num_cpus + 1.0)
    built = plan(model, "auto", drafters)
    assert built.builds_drafter
    assert built.drafters == plan(model, model, drafters).drafters
    assert {"draft_model", "ouroboros"} & set(built.drafters)
    assert built.draft.spec == "auto"
    assert built.build_progress.parent == built.draft.path.parent
    unbuilt = plan_of(model, {"drafters": drafters}, {"build": False}, model.parent)
    assert (unbuilt.draft, unbuilt.builds_drafter, unbuilt.build_progress) == (None, False, None)


def test_a_draft_model_of_another_vocabulary_is_found_out_before_anything_is_started(model, tmp_path):
    other = save_tiny_model(tmp_path, tokenizer=merging_tokenizer(), layers=1, hidden_size=16)
    assert plan(model, other, ["auto"]).draft_has_own_vocabulary
    for draft, drafters in ((model, ["auto"]), ("auto", ["auto"]), ("none", ["auto"]), (other, ["suffix"])):
        assert not plan(model, draft, drafters).draft_has_own_vocabulary


@pytest.mark.parametrize(
    ("drafters", "running"),
    [
        (["none"], ()),
        (["suffix"], ("suffix",)),
        (["suffix", "draft_model"], ("suffix",)),
        (["suffix", "ouroboros"], ("suffix",)),
        (["auto"], expand_drafters(["auto"], has_draft_model=False)),
    ],
)
def test_a_cluster_without_a_draft_model_runs_the_other_drafters(model, drafters, running):
    assert plan(model, "none", drafters).drafters == running


@pytest.mark.parametrize("options", [{"model": "none"}, {"workers": 0}])
@pytest.mark.parametrize("drafters", [["draft_model"], ["ouroboros", "draft_model"]])
def test_drafters_that_all_lack_their_draft_model_are_refused(model, drafters, options):
    with pytest.raises(InvalidRequest, match=r"draft\.model must name a model"):
        plan_of(model, {"drafters": drafters}, {"model": str(model), **options})


def application_of_routers(model, config):
    info = read_model_info(ModelSource("tiny", "tiny", model))
    settings = RouterSettings(
        config, SpeculationConfig(), DraftConfig(), CacheConfig(), model=info, tokenizer_dir="t", directory_name="d"
    )
    return router_application(settings)


def test_handles_that_serve_makes_in_this_process_leave_the_policy_as_it_is(model):
    methods = dict(vars(SoonestFirst))
    config = application_of_routers(model, RouterConfig())._bound_deployment._deployment_config.request_router_config
    assert config.get_request_router_class() is SoonestFirst
    assert dict(vars(SoonestFirst)) == methods


def test_what_waits_while_a_replica_is_away_is_bounded_and_refused_with_429_beyond(model):
    router = application_of_routers(model, RouterConfig(max_running=2, max_waiting=3))
    gateway = gateway_application(router, "tokenizer", ServedModel("tiny", 64, 97, ()), GatewayConfig())
    assert 5 <= router._bound_deployment.max_queued_requests <= 64
    assert 64 <= gateway._bound_deployment.max_queued_requests <= 4096
    refusal = gateway._bound_deployment._deployment_config.backpressure_config
    assert (refusal.status_code, refusal.retry_after_s) == (429, 1.0)


def test_an_encoder_decoder_target_is_planned_with_what_it_has(model, tmp_path):
    target = save_tiny_model(tmp_path / "target", "t5", layers=1)
    planned = plan(target, "auto", ["auto"])
    assert (planned.draft, planned.builds_drafter) == (None, False)  # no draft model can be made out of it
    assert plan(target, target, ["auto"]).draft.path == target
    assert (planned.info.max_side_len, planned.info.max_model_len) == (2048, 4096)
    with pytest.raises(ModelError, match="drafter 'ouroboros' needs a model without"):
        plan(target, target, ["ouroboros"])
    for settings in ({"exact": "bitwise"}, {"tensor_parallel": 2}, {"quantization": "int4"}, {"attention": "padded"}):
        with pytest.raises(ModelError, match=r"t5 has an encoder; .* needs a model without"):
            plan_of(target, {}, **settings)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"suffix": {"length": 3}}, r"speculation\.drafter_options\.suffix\.length is 3; there is no such option"),
        ({"suffix": {"top_k": 0}}, r"top_k is 0; it must be from 1 to"),
        ({"prediction": {"floor": 0.1}}, r"drafters must include prediction"),
        ({"lookahead": {"window_size": 65}}, r"window_size is 65; it must be from 1 to 64"),
        ({"lookahead": {"window_size": 20}}, r"speculation\.max_rows is 64; it must be at least 80 "),
    ],
)
def test_options_of_drafters_are_looked_at_before_anything_is_started(model, options, message):
    speculation = {"drafters": ["suffix", "lookahead"], "drafter_options": options}
    with pytest.raises(InvalidRequest, match=message):
        plan_of(model, speculation)
    speculation["drafter_options"] = {"suffix": {"len_threshold": 3, "alpha": 2.0, "by_frequency": True}}
    assert plan_of(model, speculation).drafters == ("suffix", "lookahead")


def test_corpora_are_looked_at_before_anything_is_started(model, tmp_path):
    pieces = [(np.arange(1, 40, dtype=np.int32), True)]
    build_corpus(pieces, read_model_info(resolve_model(str(model), tmp_path)), tmp_path / "good")
    info = read_model_info(resolve_model(str(model), tmp_path))
    build_corpus(pieces, dataclasses.replace(info, tokenizer_fingerprint="another"), tmp_path / "other")

    def with_corpus(name: str, drafters: list[str]):
        return plan_of(model, {"drafters": drafters, "corpora": [str(tmp_path / name)]})

    assert "retrieval" in with_corpus("good", ["retrieval"]).drafters
    with pytest.raises(InvalidRequest, match=r"speculation\.corpora.*must include retrieval"):
        with_corpus("good", ["suffix"])
    with pytest.raises(ModelError, match="tokenizer"):
        with_corpus("other", ["retrieval"])
    with pytest.raises(ModelError, match="missing"):
        with_corpus("missing", ["retrieval"])


def plan_with_head(model, head, drafters, **target):
    return plan_of(model, {"drafters": drafters}, {"model": "none"}, eagle_head=str(head), **target)


def test_a_head_joins_auto_and_asking_for_one_that_is_not_there_is_an_error(model, tmp_path):
    assert "eagle" in plan_with_head(model, tmp_path, ["auto"]).drafters
    assert plan_with_head(model, tmp_path, ["eagle", "suffix"]).drafters == ("eagle", "suffix")
    assert "eagle" not in plan_with_head(model, tmp_path, ["suffix"]).drafters
    assert "eagle" not in plan_with_head(model, "none", ["auto"]).drafters
    with pytest.raises(InvalidRequest, match=r"drafters is 'eagle'; target.eagle_head must name a head"):
        plan_with_head(model, "none", ["eagle"])
    with pytest.raises(ModelError, match=r"target.eagle_head '/no/such/head': there is no such directory"):
        plan_with_head(model, "/no/such/head", ["auto"])


def test_an_mtp_head_is_looked_for_in_the_targets_checkpoint(model, tmp_path):
    with pytest.raises(ModelError, match=r"the checkpoint has no MTP head"):
        plan_with_head(model, "mtp", ["auto"])
    assert "eagle" not in plan_with_head(model, "mtp", ["suffix"]).drafters
    assert "eagle" in plan_with_head(mimo().save(tmp_path), "mtp", ["auto"]).drafters


def plan_on_gpus(model, target=None, draft=None):
    sections = {"target": {"model": str(model), **(target or {})}, "draft": {"model": str(model), **(draft or {})}}
    config = ClusterConfig.model_validate(sections)
    return plan_cluster(config, Path("/nonexistent"), choose=lambda device: "cuda" if device == "auto" else device)


@pytest.mark.parametrize("attention", ["triton_tree", "flashinfer"])
def test_attention_of_gpus_is_refused_on_cpus_before_anything_is_started(model, attention):
    on_cpu = {"device": "cpu", "attention": attention}
    for sections in ({"target": on_cpu}, {"target": {}, "draft": on_cpu}):
        with pytest.raises(ModelError, match=f"attention is '{attention}' with device 'cpu'; it needs a GPU"):
            plan_on_gpus(model, **sections)
    assert plan_on_gpus(model, {"attention": attention}).config.target.attention == attention
    assert plan_on_gpus(model, {"device": "cpu", "attention": "padded"}).target_device == "cpu"


def test_bitwise_with_an_attention_backend_is_refused_before_anything_is_started(model, monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)  # the driver needs none
    for attention in ("padded", "triton_tree"):
        with pytest.raises(ModelError, match=f"attention is '{attention}' and exact is 'bitwise'"):
            plan_on_gpus(model, {"exact": "bitwise", "attention": attention})
    for device in ("cpu", "cuda"):
        assert plan_on_gpus(model, {"exact": "bitwise", "device": device}).target_device == device


def asked_gpus(plan):
    """Of Ray, by a rank and by a draft worker."""
    rank = rank_options(plan.config.target.model_copy(update={"device": plan.target_device}), None, 0)
    settings = DraftSettings(plan.draft, plan.config.draft.model_copy(update={"device": plan.draft_device}))
    pool = draft_pool_application(settings, "d", plan.config.autoscaling)._bound_deployment
    return rank.get("num_gpus", 0), pool.ray_actor_options["num_gpus"]


@pytest.mark.parametrize(
    ("nodes", "target", "draft", "asked"),
    [
        ([2], {}, {}, (1.0, 1.0)),
        ([1], {}, {}, (0.8, 0.2)),
        ([1], {"device": "cpu"}, {}, (0, 1.0)),
        ([1], {}, {"device": "cpu"}, (1.0, 0)),
        ([], {"device": "cpu"}, {"device": "cpu"}, (0, 0)),
        ([], {"gpus": 1.0}, {"gpus": 0.5}, (1.0, 0.5)),  # both given: nodes may come later
    ],
)
def test_a_draft_worker_has_a_place_on_the_gpus_that_there_are(model, nodes, target, draft, asked):
    placed = with_gpu_shares(plan_on_gpus(model, target, draft), nodes)
    assert asked_gpus(placed) == asked
    told = told_gpu_shares(placed)
    assert (told is None) == (min(share or 1.0 for share in asked) == 1.0)
    assert told is None or told.endswith(f"of one, a draft worker {asked[1]:g}")


@pytest.mark.parametrize(
    ("nodes", "target", "draft", "message"),
    [
        ([], {}, {}, r"needs 1 GPU\(s\); this Ray cluster has 0 on 0 node\(s\)"),
        ([1], {"groups": 2}, {}, r"needs 2 GPU\(s\); this Ray cluster has 1 on 1"),
        ([1], {}, {"gpus": 1.0}, r"needs 2 GPU\(s\); this Ray cluster has 1 on 1 node\(s\)"),
    ],
)
def test_too_few_gpus_are_told_with_their_numbers(model, nodes, target, draft, message):
    with pytest.raises(ConfigError, match=f"the configuration {message}"):
        with_gpu_shares(plan_on_gpus(model, target, draft), nodes)


def plan_with_code(model, drafters=("auto",), code=None, choose=None, **draft):
    more = {"code": {"model": str(model), "workers": 2, **(code or {})}}
    sections = {"target": {"model": str(model)}, "draft": {"model": str(model), **draft}, "more_drafts": more}
    config = ClusterConfig.model_validate({**sections, "speculation": {"drafters": drafters}})
    return plan_cluster(config, Path("/nonexistent"), choose=choose or (lambda device: "cpu"))


def test_a_further_draft_model_has_workers_of_its_own_and_a_drafter_of_its_name(model):
    planned = plan_with_code(model)
    assert planned.more_drafts["code"].source.path == model
    assert planned.drafters[-2:] == ("draft_model", "draft_model.code")
    assert served_model(planned).drafters == planned.drafters
    assert planned.num_cpus == pytest.approx(plan_on_cpu_without_code(model).num_cpus + 1.0)
    alone = plan_with_code(model, ("suffix", "draft_model.code"))
    assert (alone.draft, tuple(alone.more_drafts), alone.drafters) == (None, ("code",), ("suffix", "draft_model.code"))
    assert not plan_with_code(model, ("none",)).more_drafts
    with pytest.raises(
        InvalidRequest, match=r"it must include draft_model\.code, or auto, for more_drafts\.code to be us"
    ):
        plan_with_code(model, ("suffix",))
    with pytest.raises(InvalidRequest, match=r"draft_model\.prose'; known drafters are .*draft_model\.code"):
        plan_with_code(model, ("auto", "draft_model.prose"))
    with pytest.raises(ModelError, match="/not/there"):
        plan_with_code(model, code={"model": "/not/there"})


def plan_on_cpu_without_code(model):
    return plan_on_gpus(model, {"device": "cpu"}, {"device": "cpu"})


def test_all_draft_models_share_the_gpus_that_there_are(model):
    def planned(**fields):
        return plan_with_code(model, choose=lambda device: "cuda", **fields)

    placed = with_gpu_shares(planned(), [2])
    shares = [placed.config.draft.gpus, placed.more_drafts["code"].options.gpus]
    assert shares == [0.3333, 0.3333]
    assert with_gpu_shares(planned(), [4]).more_drafts["code"].options.gpus == 1.0
    with pytest.raises(ConfigError, match=r"gpus is given for some of draft, more_drafts\.code; give it for all"):
        with_gpu_shares(planned(gpus=0.5), [2])
    given = with_gpu_shares(planned(gpus=0.2, code={"gpus": 0.4}), [2])
    assert (given.config.draft.gpus, given.more_drafts["code"].options.gpus) == (0.2, 0.4)


def test_a_draft_worker_of_several_ranks_has_whole_gpus_of_one_node(model):
    def planned(code=None, **fields):
        return plan_with_code(model, code=code, choose=lambda device: "cuda", tensor_parallel=2, **fields)

    placed = with_gpu_shares(planned(), [4])  # one for two workers of the other model
    assert (placed.config.draft.gpus, placed.more_drafts["code"].options.gpus) == (None, 0.5)
    assert told_gpu_shares(placed) == "a rank has 1 of one, a draft worker 0.5"
    settings = DraftSettings(placed.draft, placed.config.draft.model_copy(update={"device": "cuda"}))
    pool = draft_pool_application(settings, "d", placed.config.autoscaling)._bound_deployment._replica_config
    assert pool.placement_group_bundles == [{"GPU": 1.0, "CPU": 1.0}] * 2
    assert pool.placement_group_strategy == "STRICT_PACK"
    assert pool.ray_actor_options["num_gpus"] == 1.0
    assert planned().num_cpus == pytest.approx(plan_with_code(model).num_cpus + 1.5)
    with pytest.raises(ConfigError, match=r"needs 3 GPU\(s\), 2 on one node for a draft worker; this .* has 2 on 2"):
        with_gpu_shares(planned(), [1, 1])


def test_a_draft_model_that_cannot_be_shared_out_is_refused_before_anything_is_started(model):
    for sections in ({"tensor_parallel": 3}, {"code": {"tensor_parallel": 3}}):
        with pytest.raises(ModelError, match=r"tensor_parallel is 3; it must divide the 4 attention heads"):
            plan_with_code(model, **sections)


def test_a_numbered_gpu_is_refused_where_ray_chooses(model):
    for section in ("target", "draft"):
        with pytest.raises(InvalidRequest, match=rf"{section}\.device is 'cuda:1'; Ray chooses the GPU of each worker"):
            plan_on_gpus(model, **{section: {"device": "cuda:1"}})
    assert plan_on_gpus(model, {"device": "cuda:0"}).target_device == "cuda"
