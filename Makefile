# Everything is done by these few commands; `make` alone explains them.
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
# The tests start hundreds of processes: each would compile all sources anew.
unexport PYTHONDONTWRITEBYTECODE

VENV  ?= .venv
BIN   := $(VENV)/bin
CACHE := $(or $(MEGATRON_CACHE_DIR),$(or $(XDG_CACHE_HOME),$(HOME)/.cache)/megatron-inference)
PIP   := $(BIN)/python -m pip --disable-pip-version-check install $(if $(MAKE_TERMOUT),,--quiet) --constraint constraints.txt
SAMPLE := manifests/samples/smollm2.yaml
WORKERS ?= $(shell nproc)
KERNELS := $(abspath $(VENV))/kernels
PYTEST := NUMBA_CACHE_DIR=$(KERNELS) $(BIN)/python -u -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0
LOCAL := $(BIN)/megatron-operator local --map-path /models=$(CACHE)/models

.PHONY: help demo serve test announce test-quick test-long kernels check bench chaos venv dev model control-plane clients images e2e crd clean

help: ## what there is
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: venv model ## a resource becomes processes, answers, pauses, suspends, resumes, and leaves nothing behind
	@$(BIN)/python examples/demo.py $(SAMPLE) --map-path /models=$(CACHE)/models

serve: venv model ## the same resource, until Ctrl-C; edit a copy with SAMPLE=my.yaml
	@$(LOCAL) -f $(SAMPLE)

test: announce dev model control-plane clients kernels ## all tests; ARGS are pytest's, WORKERS is how many run side by side
	@$(PYTEST) $(ARGS)

announce:
	@echo "make: the first run also fetches and builds what the tests need, about 15 minutes on 2 cores; make test-quick needs none of that"

QUICK := tests/test_layout.py tests/operator tests/e2e/test_contract.py tests/runtime/engine $(wildcard tests/runtime/test_*.py)

test-quick: dev kernels ## those that need neither root nor control plane nor weights, in 3 minutes: plans, rendering, engine
	@$(PYTEST) -m 'not model' $(QUICK) $(ARGS)

test-long: dev model control-plane clients kernels ## the tests that repeat something, with full counts and new seeds
	@MEGATRON_TEST_LONG=1 $(PYTEST) -m repetition $(ARGS)

check: dev ## lint, format, types, layers, generated files
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	@$(BIN)/python -m megatron_operator.api.crd --check
	@$(BIN)/python tools/metrics_reference.py --check

BENCHMARKS ?= $(filter-out benchmarks/reliability.py,$(wildcard benchmarks/*.py))

bench: dev model ## the benchmarks, each against a named peer in the same run
	@set -e; for benchmark in $(BENCHMARKS); do echo "== $$benchmark"; $(BIN)/python $$benchmark $(ARGS); done

chaos: dev model control-plane ## what clients see while pods, ranks, node, operator and API server fail; takes root
	@$(BIN)/python benchmarks/reliability.py $(ARGS)

venv: $(VENV)/.for-demo ## the virtual environment with what a user needs
	@:

dev: $(VENV)/.for-tests ## the same with the tools of the tests
	@:

model: $(VENV)/.made ## SmolLM2-135M-Instruct in the cache folder, checksum verified
	@$(BIN)/python tools/fetch_model.py

# With KUBERNETES=1.36 the tests run on that release, built from its Go modules.
ifdef KUBERNETES
export KUBEBUILDER_ASSETS := $(CACHE)/kubernetes-$(KUBERNETES)
endif

control-plane: dev model ## the Kubernetes, the node and the images of the cluster tests; KUBERNETES=1.36: that release
	@$(if $(KUBERNETES),tools/build_kubernetes.sh $(KUBERNETES) $(KUBEBUILDER_ASSETS))
	@$(BIN)/python tests/cluster/prepare.py

clients: dev ## what the tests with other people's clients run: a browser, packages of npm and PyPI
	@$(BIN)/python tests/runtime/server/clients/prepare.py

kernels: dev ## the kernels of a CPU, compiled before the tests need them: each process would compile them by itself
	@$(BIN)/python -m megatron_runtime.model.kernels.compile_kernels $(KERNELS)

images: dev model ## the images of operator and runtime, built without a registry, and their sizes
	@$(BIN)/python tests/cluster/prepare_images.py

e2e: dev model control-plane ## built images, pods on a real node, Helm and kubectl; or on the cluster of KUBECONFIG
	@$(BIN)/python -m pytest tests/cluster/test_node.py tests/cluster/test_node_serving.py $(ARGS)

crd: dev ## write the generated files anew
	@$(BIN)/python -m megatron_operator.api.crd
	@$(BIN)/python tools/metrics_reference.py

clean: ## the virtual environment, builds and tool caches; downloads in the cache folder stay
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.made: tools/make_venv.sh
	@tools/make_venv.sh $(VENV)
	@touch $@

$(VENV)/.for-demo: $(VENV)/.made pyproject.toml constraints.txt
	@echo "make: installing the pinned packages into $(VENV) (a few minutes, once)"
	@$(PIP) --editable '.[operator,runtime]' openai
	@touch $@

$(VENV)/.for-tests: $(VENV)/.made pyproject.toml constraints.txt
	@echo "make: installing the pinned packages and the tools of the tests into $(VENV) (a few minutes, once)"
	@$(PIP) --editable '.[dev]'
	@touch $(VENV)/.for-demo $@
