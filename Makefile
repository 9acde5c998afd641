# pinactivity. `make help` lists the targets.
.DEFAULT_GOAL := help
SHELL := bash
PYTHON ?= python3.11
BIN := .venv/bin
NAME ?= closer

# What the tools that only read the code need of an environment; nothing connects to it.
DUMMY := PINACTIVITY_DEVELOPMENT=true DATABASE_URL=postgresql://nobody@127.0.0.1:1/nothing \
	REDIS_URL=redis://127.0.0.1:1/0 KAFKA_BOOTSTRAP_SERVERS=127.0.0.1:1 \
	CLICKHOUSE_URL=http://127.0.0.1:1

SCHEMA = $(DUMMY) $(BIN)/python manage.py spectacular --fail-on-warn --validate

.PHONY: help up test test-kafka lint types check schema alerts bench requirements

help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

.venv/base: requirements/base.txt requirements/embedded.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --require-hashes -r requirements/base.txt -r requirements/embedded.txt
	touch $@

.venv/dev: .venv/base requirements/dev.txt
	$(BIN)/python -m pip install --quiet --require-hashes -r requirements/dev.txt
	touch $@

up: .venv/base ## Start everything on this machine, replay a day of visits, say where to look
	$(BIN)/python -m embedded up $(ARGS)

test: .venv/dev ## Run all tests on real servers (ARGS="-k name" for some)
	tests/chromium.sh
	PINACTIVITY_DEVELOPMENT=true $(BIN)/python -m embedded run --throwaway -- $(BIN)/python -m pytest $(ARGS)

test-kafka: .venv/dev ## Run the tests that need a broker; KAFKA=apache runs them on Apache Kafka
	PINACTIVITY_DEVELOPMENT=true $(BIN)/python -m embedded run --throwaway -- $(BIN)/python -m pytest -m kafka $(ARGS)

lint: .venv/dev ## Check style, formatting and the direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: .venv/dev ## Check types, strictly
	$(DUMMY) $(BIN)/mypy .

check: .venv/dev ## Check Django's configuration, migrations, imports, schema and the compose file
	$(DUMMY) $(BIN)/python manage.py check --fail-level WARNING
	$(DUMMY) $(BIN)/python manage.py makemigrations --check --dry-run
	$(BIN)/lint-imports
	$(BIN)/python deploy/check_compose.py
	written=$$(mktemp) && trap 'rm -f "$$written"' EXIT && $(SCHEMA) --file "$$written" \
		&& { diff -u docs/openapi.yaml "$$written" || { echo "Run make schema." >&2; exit 1; }; }

schema: .venv/dev ## Write the API's schema, docs/openapi.yaml
	$(SCHEMA) --file docs/openapi.yaml

alerts: ## Check Prometheus' files and run the tests of the alerts, by promtool
	deploy/prometheus/promtool.sh

bench: .venv/dev ## Measure one thing against its limit: make bench NAME=closer
	PINACTIVITY_DEVELOPMENT=true $(BIN)/python -m embedded run --throwaway -- $(BIN)/python -m bench.$(NAME) $(ARGS)

requirements: ## Pin the packages anew, with hashes and without a registry's name
	$(PYTHON) -m venv .venv && $(BIN)/python -m pip install --quiet uv
	cd requirements && for part in base embedded dev; do \
		../$(BIN)/uv pip compile --quiet --upgrade --universal --python-version 3.11 --generate-hashes \
			--no-emit-index-url --no-emit-find-links --custom-compile-command "make requirements" \
			$$part.in -o $$part.txt || exit 1; done
