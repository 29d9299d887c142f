# Everything a developer types. `make` alone lists it.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
# More pip arguments for torch alone, to choose its build (see README.md, GPUs).
TORCH_ARGS ?=
PACELINE_HOME ?= $(HOME)/.cache/paceline
# Processes that run tests in parallel: one more than CI has processors, since tests of clusters often wait. Only one Ray
# cluster runs at a time.
TEST_PROCESSES ?= 3
# For `make serve`: a configuration file, and more arguments of `paceline serve`.
CONFIG ?= configs/laptop.yaml
ARGS ?=

PIP_VERSION := 26.3
UV_VERSION := 0.13.8
CYCLONEDX_VERSION := 7.5.0
CHECKOV_VERSION := 3.3.30
# k8s/README.md gives the reason for each.
CHECKOV_SKIPS := CKV_K8S_43,CKV_K8S_15,CKV_K8S_38,CKV2_K8S_6,CKV_DOCKER_2,CKV_DOCKER_7
TORCH := $(shell sed -n 's/^ *"\(torch==[^"]*\)",/\1/p' pyproject.toml)
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALL := $(BIN)/python .ci/install.py $(UV_VERSION)
STAMP := $(VENV)/.paceline
KERNELS := $(VENV)/.kernels
COMPILED := $(VENV)/.compiled
MODEL := $(PACELINE_HOME)/models/smollm2/config.json
PROTO := $(wildcard cluster/gateway/paceline/v1/*.proto)

# Steps that do not need each other run side by side: lint beside what setup prepares and compiles. Several goals run one
# after the other, as `make clean setup` has to.
ifeq ($(words $(MAKECMDGOALS)),1)
MAKEFLAGS += --jobs=2
endif

# A test run starts a hundred processes: each would compile the sources anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup serve check test test-slow test-browser test-clients lint format proto lock image-lock k8s models sbom scan clean

help:  ## this list
	@awk -F ':.*## *' '/^[a-z0-9-]+:.*##/ {printf "%-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) $(MODEL) $(COMPILED)  ## virtual environment in .venv with everything pinned, and the demo model

# Torch comes first and alone, so that it can come from another index. The stamp is written last: a setup that was
# interrupted is done again.
$(STAMP): pyproject.toml requirements.lock
	@test -n "$(PYTHON)" || { echo "no python3.11 found; name one: make setup PYTHON=/path/to/python" >&2; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$(PYTHON) is older than Python 3.11; name another: make setup PYTHON=/path/to/python" >&2; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet pip==$(PIP_VERSION)
	$(INSTALL) -c requirements.lock $(TORCH_ARGS) $(TORCH)
	$(INSTALL) -c requirements.lock --editable '.[k8s,plot]' --group dev
	$(PIP) check
	touch $@

$(MODEL): | $(STAMP)
	PACELINE_HOME="$(PACELINE_HOME)" $(BIN)/paceline model prepare smollm2

# The kernels of cache, router and engine, once: else every process of a cluster or a test run that starts first does it.
$(KERNELS): | $(STAMP)
	$(BIN)/python -m cache_service.automata.kernel_warm_up
	touch $@

$(COMPILED): | $(STAMP) $(KERNELS) $(MODEL)
	PACELINE_HOME="$(PACELINE_HOME)" $(BIN)/paceline generate --prompt "One two three. One two" --max-new-tokens 16 \
		--temperature 0.5 --draft-model none > /dev/null
	touch $@

serve: setup  ## serve the demo model on this machine (CONFIG=, ARGS=)
	PACELINE_HOME="$(PACELINE_HOME)" exec $(BIN)/paceline serve $(CONFIG) $(ARGS)

check: $(STAMP) lint  ## while you work: lint, then the quick unit tests, which need neither the demo model nor a wheel
	$(BIN)/python -m pytest tests/unit -m "not slow and not whole" -n $(TEST_PROCESSES) --dist loadfile --durations=5

test: setup lint  ## what CI runs: lint, then all tests but the slow ones
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder

test-slow: setup  ## tests that take long: several nodes of Ray, loss of nodes under load, all kinds of models on devices
	$(BIN)/python -m pytest -m slow

test-browser: setup  ## tests of the page in headless Chromium, which Debian's package manager installs if root asks
	@command -v chromium > /dev/null || { test "$$(id -u)" = 0 && apt-get install -y --no-install-recommends chromium; } || \
		{ echo "no chromium found; install it: apt-get install chromium" >&2; exit 2; }
	$(INSTALL) --group browser
	$(BIN)/python -m pytest tests/browser

test-clients: setup  ## real clients and load tools against the demo model, each in an environment of its own
	$(BIN)/python -m tests.clients $(UV_VERSION) $(dir $(MODEL)) --write docs/clients.md

lint: $(STAMP)  ## format check, ruff, mypy, import contracts
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)  ## rewrite the sources in the house's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

proto: $(STAMP)  ## regenerate the gRPC code after a change of a .proto file
	$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=. $(PROTO)

# The lock is what a fresh environment holds, so that it names nothing that somebody happened to install.
lock:  ## refresh requirements.lock from pyproject.toml
	rm -rf build/lock && $(PYTHON) -m venv build/lock
	build/lock/bin/python -m pip install --quiet pip==$(PIP_VERSION)
	build/lock/bin/python -m pip install --quiet $(TORCH_ARGS) $(TORCH)
	build/lock/bin/python -m pip install --quiet --editable '.[k8s,plot]' --group dev
	build/lock/bin/python -m pip check
	{ sed -n '/^#/p' requirements.lock; build/lock/bin/python -m pip freeze --all --exclude pip --exclude-editable | \
		sed 's/+[a-z0-9.]*$$//'; } > build/requirements.lock
	mv build/requirements.lock requirements.lock
	rm -rf build/lock

# Needs no environment: uv asks the index for names, versions and hashes, and installs nothing. The CPU build of torch
# has an index of its own: TORCH_ARGS="--extra-index-url URL" fetches its wheels for their hashes (350 MB), too.
image-lock:  ## refresh the hashes of the container images from requirements.lock (TORCH_ARGS= for torch+cpu)
	rm -rf build/image-lock && $(PYTHON) -m venv build/image-lock
	build/image-lock/bin/python -m pip install --quiet uv==$(UV_VERSION)
	{ sed -n "/^requires/p; /^dependencies/,/^]/p" pyproject.toml | grep -o "\"[^\"]*==[^\"]*\"" | tr -d "\""; } \
		> build/image-lock/requirements.in
	for platform in aarch64 x86_64; do \
		build/image-lock/bin/uv pip compile --quiet --generate-hashes --no-header --no-annotate -c requirements.lock \
			--only-binary :all: --python-version 3.11 --python-platform $$platform-manylinux_2_31 \
			build/image-lock/requirements.in -o build/image-lock/$$platform.txt || exit 1; \
	done
	diff build/image-lock/aarch64.txt build/image-lock/x86_64.txt  # one file serves both
	awk -v common=k8s/containers/requirements.txt -v cuda=k8s/containers/requirements-cuda.txt \
		-f k8s/containers/split_requirements.awk build/image-lock/x86_64.txt
ifneq ($(TORCH_ARGS),)
	for platform in aarch64 x86_64; do \
		build/image-lock/bin/python -m pip download --quiet --no-deps --only-binary :all: --python-version 3.11 \
			--platform manylinux_2_28_$$platform --dest build/image-lock/cpu $(TORCH_ARGS) "$(TORCH)+cpu" || exit 1; \
	done
	{ sed -n '/^#/p' k8s/containers/requirements-cpu.txt; printf '$(TORCH)+cpu'; \
		build/image-lock/bin/python -m pip hash build/image-lock/cpu/* | sed -n 's/^--hash/    &/p' | sort -r | \
		while read -r line; do printf ' \\\n    %s' "$$line"; done; echo; } > build/image-lock/requirements-cpu.txt
	mv build/image-lock/requirements-cpu.txt k8s/containers/requirements-cpu.txt
endif
	rm -rf build/image-lock

k8s: $(STAMP)  ## renew the configuration's part of the chart's schema
	$(BIN)/python -m cluster.deploy.chart_schema k8s/chart/values.schema.json

models: $(STAMP)  ## renew the tables of docs/models.md
	$(BIN)/python -m tests.lossless.model_families --write docs/models.md

sbom:  ## what the images hold, as CycloneDX: build/sbom-cpu.json, build/sbom-cuda.json
	rm -rf build/sbom && $(PYTHON) -m venv build/sbom
	build/sbom/bin/python -m pip install --quiet cyclonedx-bom==$(CYCLONEDX_VERSION)
	for kind in cpu cuda; do \
		cat k8s/containers/requirements.txt k8s/containers/requirements-$$kind.txt > build/sbom/requirements.txt && \
		build/sbom/bin/cyclonedx-py requirements --output-reproducible --pyproject pyproject.toml \
			-o build/sbom-$$kind.json build/sbom/requirements.txt || exit 1; \
	done
	rm -rf build/sbom

scan: setup  ## checkov over the manifests and the container files
	rm -rf build/scan && $(PYTHON) -m venv build/scan
	build/scan/bin/python -m pip install --quiet checkov==$(CHECKOV_VERSION)
	PYTHONPATH=. $(BIN)/python tests/images/objects_to_scan.py build/scan/objects
	cp k8s/containers/Dockerfile build/scan/objects
	build/scan/bin/checkov --directory build/scan/objects --framework kubernetes dockerfile --compact --quiet \
		--skip-check $(CHECKOV_SKIPS)
	rm -rf build/scan

clean:  ## remove the environment and all caches of tools
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find cluster actors cache_service tests -name __pycache__ -type d -prune -exec rm -rf {} +
