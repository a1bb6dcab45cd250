# Every target does its own set-up. On a machine without network (a GPU node): NYBBLE_PYTHON=python3 make gpu-test
# uses that interpreter and the build folder NYBBLE_BUILD_DIR as they are: no apt, no pip, no compiler.
.PHONY: demo test lint bench sanitize gpu-test gate-selftest wheel wheel-test sdist-test peer-test build setup clean format
.DEFAULT_GOAL := test

CUDA ?= AUTO
CUDA_TARGETS ?= 80;90a
JOBS ?= $(shell nproc)

ifdef NYBBLE_PYTHON
  PYTHON := $(NYBBLE_PYTHON)
  NYBBLE_BUILD_DIR ?= build/dev
  SETUP := true
  BUILD := tools/check_offline.sh "$(PYTHON)" "$(NYBBLE_BUILD_DIR)"
  DEMO_SETUP := true
  BENCH_BUILD := true
else
  PYTHON := .venv/bin/python
  PYTEST_WORKERS ?= -n $(shell n=$$(nproc); echo $$((n < 4 ? n : 4)))
  NYBBLE_BUILD_DIR := build/dev
  SETUP := NYBBLE_CUDA=$(CUDA) tools/setup.sh core python
  DEMO_SETUP := tools/setup.sh demo
  BUILD := cmake -S . -B $(NYBBLE_BUILD_DIR) -G Ninja -DNYBBLE_PYTHON=$(PYTHON) -DNYBBLE_TORCH=ON -DNYBBLE_CUDA=$(CUDA) \
           -DNYBBLE_CUDA_TARGETS="$(CUDA_TARGETS)" > build/configure.log 2>&1 || { cat build/configure.log; exit 1; }; \
           grep '^-- Nybble' build/configure.log; cmake --build $(NYBBLE_BUILD_DIR) -j $(JOBS)
  # No part of the default build; there is no such target without CUDA.
  BENCH_BUILD := ! cmake --build $(NYBBLE_BUILD_DIR) --target help | grep -q '^portable_bench:' || \
                 cmake --build $(NYBBLE_BUILD_DIR) --target portable_bench -j $(JOBS)
endif

RUN := PYTHONPATH=python$${PYTHONPATH:+:$$PYTHONPATH} NYBBLE_BUILD_DIR=$(abspath $(NYBBLE_BUILD_DIR)) HF_HUB_OFFLINE=1 $(PYTHON)
# Waiting OpenMP threads sleep instead of spinning: on a busy machine of 2 cores torch's small ops are 20 times faster.
QUIET_RUN := OMP_WAIT_POLICY=PASSIVE $(RUN)
PYTEST := $(QUIET_RUN) -m pytest -q --timeout=600 $(PYTEST_WORKERS)

setup:
	@$(SETUP)

build: setup
	@$(BUILD)

test: build
	ctest --test-dir $(NYBBLE_BUILD_DIR) --output-on-failure -j $(JOBS) --timeout 600
	$(PYTEST) tests/python

demo: build
	@$(DEMO_SETUP)
	@$(QUIET_RUN) -m nybble.demo

lint: setup
	@$(if $(NYBBLE_PYTHON),true,tools/setup.sh lint)
	@tools/lint.sh $(PYTHON)

format: setup
	@tools/lint.sh $(PYTHON) --fix

bench: build
	@$(BENCH_BUILD)
	$(RUN) benchmarks/harness/run_all.py

gpu-test: build
	NYBBLE_REQUIRE_GPU=1 tools/gpu_test.sh "$(PYTHON)" "$(abspath $(NYBBLE_BUILD_DIR))"

# Needs the network once: the trainer that it trains with is installed into build/peer.
peer-test: build
	@tools/setup.sh peer
	PYTHONPATH=python$${PYTHONPATH:+:$$PYTHONPATH} NYBBLE_BUILD_DIR=$(abspath $(NYBBLE_BUILD_DIR)) HF_HUB_OFFLINE=1 OMP_WAIT_POLICY=PASSIVE \
	  build/peer/bin/python -W ignore tests/peers/soup_streaming.py

# FAULT_BUILD: a build folder with NYBBLE_FAULT_SWITCHES=ON; with it, faults inside the kernels are planted on the GPU too. RECORD: where
# that table goes, as RECORD.json and RECORD.md.
gate-selftest: build
	$(QUIET_RUN) tests/python/gate/selftest.py
	$(if $(FAULT_BUILD),PYTHONPATH=python$${PYTHONPATH:+:$$PYTHONPATH} NYBBLE_BUILD_DIR=$(abspath $(FAULT_BUILD)) HF_HUB_OFFLINE=1 $(PYTHON) tests/python/gate/kernel_selftest.py $(if $(RECORD),--record $(RECORD)))

sanitize:
	@tools/setup.sh core sanitize
	@tools/sanitize.sh

wheel: setup
	@tools/setup.sh wheel
	@tools/wheel.sh

wheel-test:
	@tools/wheel_test.sh

sdist-test: setup
	@tools/sdist_test.sh

clean:
	rm -rf build dist
