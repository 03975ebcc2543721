# Everything runs from .venv, which the first target that needs it makes from the lock.
# `make help` lists the targets.

PYTHON ?= python3
LOCK   ?= requirements/dev.lock
ARGS   ?=
VLLM   ?= 0.33.0
TEST_TIMEOUT_S ?= 600
BENCH_JSON     ?= build/bench/serving.json
ENGINE ?= docker
IMAGES ?= cpu gpu
BUILD_ARGS ?=
VERSION = $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)

VENV  := .venv
BIN   := $(VENV)/bin
TOOLS := build/tools
STAMP := $(VENV)/.installed-$(notdir $(basename $(LOCK)))

.DEFAULT_GOAL := help
.PHONY: help install serve demo check test test-apiserver flaky contracts soak bench lint format docs lock audit sbom release upgrade images clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  \1\t/' | expand -t 17

install: $(STAMP)  ## make .venv (LOCK=requirements/gpu.lock on a GPU node)

$(STAMP): $(LOCK) pyproject.toml scripts/install.py
	@command -v $(PYTHON) >/dev/null 2>&1 || \
	  { echo "error: '$(PYTHON)' not found: install Python 3.11 or newer, or name one with PYTHON=..." >&2; exit 1; }
	@$(PYTHON) scripts/install.py --venv $(VENV) --lock $(LOCK) --stamp $@

serve: install  ## serve SmolLM2-135M-Instruct, or what ARGS="-f config.yaml" says
	$(BIN)/headrace up $(ARGS)

demo: install  ## record `headrace demo` on a real app as docs/img/demo.svg
	$(BIN)/python scripts/record_demo.py docs/img/demo.svg

NODE := build/node
$(NODE)/.installed: $(wildcard tests/support/node/*)
	@mkdir -p $(NODE)
	@cp tests/support/node/* $(NODE)
	@if command -v npm >/dev/null 2>&1; then npm ci --prefix $(NODE) --no-audit --no-fund --loglevel=error && touch $@; \
	 else echo "npm is not here: tests that need its packages are skipped"; fi

test: install $(NODE)/.installed  ## every test that needs no GPU (ARGS="tests/unit -k name" for a part)
	$(BIN)/python -m tests.lanes --timeout=$(TEST_TIMEOUT_S) $(ARGS)

test-apiserver: install  ## the chart on a real Kubernetes API server (KUBEBUILDER_ASSETS=its folder)
	@test -x "$(KUBEBUILDER_ASSETS)/kube-apiserver" -a -x "$(KUBEBUILDER_ASSETS)/etcd" || \
	  { echo 'error: KUBEBUILDER_ASSETS must name a folder with kube-apiserver and etcd: export KUBEBUILDER_ASSETS=$$(setup-envtest use -p path 1.36)' >&2; exit 1; }
	$(BIN)/python -m pytest -p no:cacheprovider $(ARGS) tests/apiserver

check: install  ## for each edit: style, and tests that are quick and need no engine
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m tests.lanes --check --timeout=$(TEST_TIMEOUT_S) $(ARGS)

flaky: install  ## a test many times on a busy machine (TEST=tests/unit/test_x.py::test_y TIMES=50)
	$(BIN)/python -m tests.flaky $(TEST) $(TIMES)

contracts: install  ## what another version of vLLM would break (VLLM=0.33.0)
	$(BIN)/python -m scripts.contracts $(VLLM) $(ARGS)

soak: install  ## hours of kills and load (HEADRACE_SOAK_KILLS=20 HEADRACE_SOAK_S=3600)
	HEADRACE_TEST_SET="speculation.enabled=false" \
	  $(BIN)/python -m pytest -p no:cacheprovider -m soak -s $(ARGS) tests/e2e tests/integration \
	    tests/unit/test_images.py tests/unit/test_batches_kills.py tests/unit/test_conversations_kills.py
	HEADRACE_TEST_EXAMPLES=1000 $(BIN)/python -m pytest -p no:cacheprovider $(ARGS) tests/property

bench: install  ## Headrace beside plain vLLM and Ray's own P/D app, the quick form
	@mkdir -p $(dir $(BENCH_JSON))
	$(BIN)/python -m benchmarks.serving --quick --json $(BENCH_JSON) $(ARGS)

lint: install  ## style, formatting, English, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python scripts/prose.py
	$(BIN)/mypy

format: install  ## repair what lint can repair
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: install  ## write the generated files again, and build the site in build/site
	$(BIN)/python -m scripts.generate
	$(BIN)/typer headrace.cli.main utils docs --name headrace --title Commands --output docs/commands.md
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

lock: install  ## resolve pyproject.toml anew into requirements/*.lock
	$(BIN)/python scripts/lock.py

$(TOOLS): requirements/tools.lock
	$(BIN)/pip install --quiet --no-deps --upgrade --target $(TOOLS) -r requirements/tools.lock
	@touch $(TOOLS)

audit: install $(TOOLS)  ## ask PyPI for known vulnerabilities of all that the locks pin
	@mkdir -p build/audit
	@failed=0; for lock in cpu dev gpu; do \
	  echo "requirements/$$lock.lock"; \
	  sed -E 's/^([^ ]+)[+][a-z0-9]+$$/\1/' requirements/$$lock.lock > build/audit/$$lock.txt; \
	  PYTHONPATH=$(TOOLS) $(BIN)/python -m pip_audit --strict --disable-pip --no-deps \
	    --progress-spinner off --requirement build/audit/$$lock.txt $(ARGS) || failed=1; \
	done; \
	[ $$failed = 0 ] || { echo "error: vulnerable, or PyPI did not tell; see above" >&2; exit 1; }

sbom: install $(TOOLS)  ## write a CycloneDX bill of materials for each lock to build/sbom
	@mkdir -p build/sbom
	@for lock in cpu dev gpu; do \
	  PYTHONPATH=$(TOOLS) $(BIN)/python -m cyclonedx_py requirements requirements/$$lock.lock \
	    --pyproject pyproject.toml --output-reproducible --output-format JSON \
	    --output-file build/sbom/$$lock.cdx.json || exit 1; \
	  echo "build/sbom/$$lock.cdx.json"; \
	done

release: sbom  ## build wheel, sdist, chart, bills of materials and provenance in dist/, and check them; publishes nothing
	$(BIN)/python scripts/release.py $(ARGS)

upgrade: install  ## upgrade an app under load, from an earlier commit (FROM=HEAD~10) to this one
	$(BIN)/python -m scripts.upgrade $(FROM)

images: sbom  ## build headrace-cpu and headrace-gpu (ENGINE=podman, IMAGES=cpu for one)
	@for name in $(IMAGES); do \
	  $(ENGINE) build --file images/$$name.Dockerfile --tag headrace-$$name:$(VERSION) \
	    --build-arg VERSION=$(VERSION) --build-arg REVISION=$$(git rev-parse HEAD) \
	    $(BUILD_ARGS) . || exit 1; \
	  echo "headrace-$$name:$(VERSION): build/sbom/$$name.cdx.json lists its Python packages"; \
	done

clean:  ## remove .venv, caches and build output
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	find . -name '*.egg-info' -type d -prune -exec rm -rf {} +
