# Everything here works in a fresh clone on a machine with python3 (3.11+) and make, and is quick the second time.
# Another Python: make demo PYTHON=python3.13.   More for pytest: make test ARGS="-k window".

PYTHON ?= python3
ARGS ?=
export PYTHON

.DEFAULT_GOAL := help
.NOTPARALLEL: # there is one .venv
.PHONY: help demo pipeline test lint soak conformance lock clean ready-demo ready-pipeline ready-test

help:
	@echo "make demo         see it work: three transports, 101 channels each, every byte checked"
	@echo "make pipeline     see it work on Spark: servers and query killed, every row counted (minutes; about 1 GB to install)"
	@echo "make test         the whole test suite, then the part that needs a JVM"
	@echo "make lint         format, lint, types, import rules, docs/conformance.md, news fragments"
	@echo "make soak         the long forms: many seeds, many cycles (hours)"
	@echo "make conformance  write docs/conformance.md again"
	@echo "make lock         resolve the pinned versions again"
	@echo "make clean        remove .venv and what the tools left behind"

demo: ready-demo
	@.venv/bin/muxkit demo $(ARGS)

pipeline: ready-pipeline
	@.venv/bin/python -m muxkit_bench.proof --page build/muxkit-captures.html $(ARGS)

# Two runs: everything that needs no JVM, then the rest with one. 5 says that ARGS left nothing of one of them.
test: ready-test
	@core=0; .venv/bin/python -m pytest $(ARGS) || core=$$?; \
	[ $$core -eq 0 ] || [ $$core -eq 5 ] || exit $$core; \
	jvm=0; .venv/bin/python -m pytest -m "spark and not soak" $(ARGS) || jvm=$$?; \
	[ $$jvm -eq 0 ] || { [ $$jvm -eq 5 ] && [ $$core -eq 0 ]; } || exit $$jvm

lint: ready-test
	@.ci/run format lint types imports conformance news

# Two processes share the tests, and then the programs run one by one.
soak: ready-test
	@mkdir -p build; for share in 1 2; do \
	    (MUXKIT_SOAK=1 MUXKIT_SHARE=$$share/2 .venv/bin/python -m pytest -q -p tests.soak._share -p no:cacheprovider \
	        -m soak --timeout=0 $(ARGS) >build/soak-$$share.log 2>&1; echo $$? >build/soak-$$share.code) & \
	done; wait; tail -n 25 build/soak-?.log; \
	for share in 1 2; do case $$(cat build/soak-$$share.code) in 0|5) ;; *) exit 1;; esac; done
	@for program in tests/soak/[!_]*.py; do \
	    [ -e "$$program" ] || continue; \
	    case $$program in */test_*|*/conftest.py) continue;; esac; \
	    echo "== $$program"; .venv/bin/python "$$program" || exit 1; \
	done

conformance: ready-test
	@.venv/bin/python tests/conformance.py

lock:
	@.ci/lock

clean:
	rm -rf .venv build dist htmlcov .coverage .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

ready-demo ready-pipeline ready-test: ready-%:
	@.ci/setup $*
