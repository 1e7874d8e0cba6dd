# make help lists what there is.
GO ?= go
NPROC ?= auto
FUZZTIME ?= 30s
STATICCHECK = $(GO) tool -modfile=tools/go.mod staticcheck
# The race detector needs cgo, and that a C compiler.
# go-nvml declares what NVML deprecates, which C compilers remark upon at length.
export CGO_CFLAGS ?= -O2 -g -Wno-deprecated-declarations
RACE = $(if $(shell command -v $${CC:-cc}),-race)

.PHONY: help build demo test soak check lint cross generate ptx bench fuzz gpu-bins clean

help: ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

build: ## build the command and the examples into bin/
	CGO_ENABLED=0 $(GO) build -trimpath -o bin/ ./cmd/... ./examples/...

demo: build ## train a small model on all devices, or on 4 virtual ones (NPROC=n processes)
	bin/chorus run --nproc-per-node $(NPROC) -- bin/ddp

test: ## run all tests, with the race detector where there is a C compiler
	@echo $(if $(RACE),"tests with the race detector","no C compiler: tests without the race detector")
	CGO_ENABLED=$(if $(RACE),1,0) $(GO) test $(RACE) -timeout 20m ./...

SOAK = CGO_ENABLED=$(if $(RACE),1,0) $(GO) test $(RACE) -count=1 -timeout 12h

soak: ## run the long variants of tests, which takes hours (FUZZTIME=30s for each fuzzer)
	$(SOAK) ./internal/fabric -thorough -lines 1000000 -crowded 100000
	$(SOAK) ./stream -run TestManyGoroutines -thorough
	$(SOAK) ./internal/alloc -run 'TestSoak|TestRandomPrograms' -soak 10000000
	$(SOAK) ./rng -run TestStatePrograms -programs 3000
	$(SOAK) ./comm -run 'TestWaitsNeverLie|TestMixedOperations' -waits 5000 -mixed 100000
	$(SOAK) ./gds -run TestLoadsOfGroupsThatEnd -waitloads 1000
	$(SOAK) ./internal/differ -programs 100000
	$(MAKE) fuzz

check: ## run what CI runs
	.ci/run

lint: ## gofmt, vet and staticcheck
	@test -z "$$(gofmt -l .)" || { gofmt -l .; echo "run gofmt"; exit 1; }
	$(GO) vet ./... && $(STATICCHECK) ./...

cross: ## build without cgo, and for arm64
	CGO_ENABLED=0 $(GO) build ./... && CGO_ENABLED=0 GOARCH=arm64 $(GO) vet ./...

generate: ## write docs/ENVIRONMENT.md
	$(GO) test ./internal/env -run TestDocument -update

ptx: ## compile Chorus's own kernels anew, which needs NVRTC and a GPU
	$(GO) test ./rng ./tensor ./internal/perf ./internal/fabric -run 'TestPTX$$' -v -ptx

fuzz: ## run every fuzz target for FUZZTIME (30s)
	@grep -ro --include=*_test.go '^func Fuzz[A-Za-z]*' . | sort | sed 's|/[^/]*:func | |' | while read -r p f; do \
		echo "$$p $$f"; $(GO) test "$$p" -run '^$$' -fuzz "^$$f\$$" -fuzztime $(FUZZTIME) || exit 1; done

bench: ## run the benchmarks, which need GPUs
	$(GO) test -run '^$$' -bench . ./...

gpu-bins: ## pack tests, examples and command for a GPU machine without Go (PKGS=patterns)
	$(GO) build -C tools -o ../bin/gpubins ./gpubins
	bin/gpubins -o .gpu $(PKGS)

clean: ## remove what was built
	rm -rf bin .gpu
