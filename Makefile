# make demo: from nothing to a converted, described, running and scored model. make test: lint, types, tests.
PYTHON ?= python3
BIN := .venv/bin
MODEL := fixtures/trained/gpt2_tiny.bin

.PHONY: demo test test-peers clean
demo: .venv/installed
	@mkdir -p demo
	$(BIN)/ckptkit inspect $(MODEL)
	$(BIN)/ckptkit convert $(MODEL) demo/gpt2_tiny.gguf --type q8_0 --force
	$(BIN)/ckptkit inspect demo/gpt2_tiny.gguf
	$(BIN)/ckptkit verify $(MODEL) demo/gpt2_tiny.gguf
	$(BIN)/ckptkit check demo/gpt2_tiny.gguf
	$(BIN)/ckptkit generate demo/gpt2_tiny.gguf -p "ROMEO:" -n 40 --temp 0
	$(BIN)/ckptkit ppl $(MODEL) --text fixtures/trained/gpt2_tiny_val.bin --mode full -c 64 --chunks 40
	$(BIN)/ckptkit ppl demo/gpt2_tiny.gguf --text fixtures/trained/gpt2_tiny_val.bin --mode full -c 64 --chunks 40

test: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest -n auto

# needs torch and transformers, which nothing else here does
test-peers: .venv/dev
	$(BIN)/pip install -q "torch==2.13.0" "transformers==5.24.0"
	CKPTKIT_PEERS=1 $(BIN)/pytest tests/peers

.venv/installed: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q -e .
	@touch $@

.venv/dev: .venv/installed
	$(BIN)/pip install -q -e ".[dev]"
	@touch $@

clean:
	rm -rf .venv demo build *.egg-info
