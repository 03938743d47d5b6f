# Each target does its own set-up: `make demo` and `make test` work on a fresh machine with python3 and make.
PYTHON ?= python3
BIN = .venv/bin

.PHONY: help demo test test-heavy test-gpu sanitize lint install clean
help:            ## list the targets
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:[^#]*##/ -/'

install: .venv/.installed  ## create .venv with everything pinned

.venv/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -m venv .venv || { echo "python3 -m venv failed; on Debian: apt install python3-venv, then try again" >&2; exit 2; }
	@echo "installing into .venv (a few minutes the first time)"
	$(BIN)/pip install -q -c constraints.txt -e '.[lab,tensorboard,rivals,dev]'
	@touch $@

demo: install    ## train a small LLaMA with FOAM, then with AdamW on the same batches; compare; write report.html
	@runs=runs/demo-$$(date +%Y%m%d-%H%M%S) && \
	echo "1/2  FOAM" && $(BIN)/foamlab train demo --out $$runs/foam && \
	echo "2/2  AdamW, at the best split of rates we know for it" && \
	$(BIN)/foamlab train demo --optimizer.name adamw-split --out $$runs/adamw && \
	$(BIN)/foamlab report $$runs/foam $$runs/adamw --out report.html

test: install    ## lint, types and the fast tests
	$(BIN)/ruff check src tests
	$(BIN)/ruff format --check src tests
	$(BIN)/mypy
	$(BIN)/python -m pytest -n 2 -m "not heavy and not gpu"

test-heavy: install  ## tests that train or load a real model
	$(BIN)/python -m pytest -m heavy

test-gpu: install  ## tests that need a CUDA device
	$(BIN)/python -m pytest -m gpu tests/test_gpu.py

sanitize: install  ## the CPU kernel's tests under the address and undefined-behaviour sanitizers (needs gcc)
	CC=gcc CFLAGS="-fsanitize=address,undefined -fno-sanitize-recover=all -g" ASAN_OPTIONS=detect_leaks=0 \
	LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libstdc++.so.6)" \
	$(BIN)/python -m pytest -s tests/test_cpu_kernel.py

clean:           ## remove .venv and caches
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache
