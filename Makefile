# make help lists the targets.
GO ?= go
NPROC ?= auto
FUZZTIME ?= 30s
STATICCHECK = $(GO) tool -modfile=tools/go.mod staticcheck
# go-nvml declares functions that NVML deprecates, and C compilers print warnings for them.
export CGO_CFLAGS ?= -O2 -g -Wno-deprecated-declarations

.PHONY: help build demo test race vuln newest newest-ci soak deploy check lint cross generate ptx bench fuzz gpu-bins release clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

build: ## build the command and the examples into bin/
	CGO_ENABLED=0 $(GO) build -trimpath -ldflags='-s -w' -o bin/ ./cmd/... ./examples/...

demo: ## train a small model on all devices, or on 4 virtual devices (NPROC=n processes)
	CGO_ENABLED=0 $(GO) build -ldflags='-s -w' -o bin/ ./cmd/chorus ./examples/ddp # in the build mode of make test
	bin/chorus run --nproc-per-node $(NPROC) -- bin/ddp

# Many tests wait for deadlines of other processes, so twice as many packages as processors
# run at the same time.
BESIDE = -p $(shell expr 2 \* $$(getconf _NPROCESSORS_ONLN)) -parallel 8

# The race detector would keep each program a second longer at its end.
export GORACE ?= atexit_sleep_ms=50

# make lint vets the packages; linking is faster without tables for debuggers.
FAST = -vet=off -ldflags=-w

# One build mode for tests, examples and guides: what one of them compiles, the others find in the cache.
test: ## run all tests
	CGO_ENABLED=0 $(GO) test $(FAST) $(BESIDE) -timeout 20m ./...

# The packages that own goroutines and locks. The others only call them.
GOROUTINES = ./checkpoint ./cluster ./internal/job ./cmd/chorus/internal/monitor ./comm ./ddp ./device ./gds ./internal/differ ./internal/dl \
	./internal/collective ./internal/gpu ./internal/handle ./internal/launch ./internal/nvml ./internal/poll \
	./internal/analyze ./internal/route ./internal/osthread ./internal/sanitizer ./internal/safe ./internal/status ./internal/strided ./internal/testhost ./internal/virtual/... \
	./memory/... ./nccl ./rng ./stream

# The race detector needs cgo, and cgo needs a C compiler.
HAS_CC = $(shell command -v $${CC:-cc})
RACE = $(if $(HAS_CC),-race)

race: ## run the tests of the packages that own goroutines and locks with the race detector
	@$(if $(HAS_CC),,echo "no C compiler: no tests with the race detector")
	$(if $(HAS_CC),CGO_ENABLED=1 $(GO) test -race $(FAST) $(BESIDE) -timeout 40m $(GOROUTINES))

# The newest Go. go.mod names the oldest one that is supported.
NEWEST = go1.27.3

newest: ## vet the packages and run all tests with the newest Go
	GOTOOLCHAIN=$(NEWEST) $(GO) vet ./...
	GOTOOLCHAIN=$(NEWEST) CGO_ENABLED=0 $(GO) test $(FAST) $(BESIDE) -timeout 20m ./...

GOVULNCHECK = golang.org/x/vuln/cmd/govulncheck@v1.1.4

vuln: ## look for known vulnerabilities of the modules, if the database can be reached
	@$(GO) run $(GOVULNCHECK) ./cmd/... > vuln.log 2>&1; code=$$?; \
	case "$$code $$(tail -n 1 vuln.log)" in \
	"0 "*) tail -n 1 vuln.log;; \
	*"exit status 3") cat vuln.log; rm -f vuln.log; exit 3;; \
	*) echo "known vulnerabilities are not looked for: $$(grep -v '^exit status ' vuln.log | tail -n 1)";; \
	esac; rm -f vuln.log # go run exits with 1, and its last line has the status of the program

# These packages use private names, the memory layout or the scheduler of Go's runtime.
RUNTIME = ./internal/dl ./internal/collective ./internal/osthread ./internal/handle

newest-ci: ## vet and test packages that depend on Go's runtime with the newest Go, if it can be downloaded in 30 s
	@if v=$$(GOTOOLCHAIN=$(NEWEST) timeout 30 $(GO) version 2>&1); then echo "$$v"; \
	GOTOOLCHAIN=$(NEWEST) CGO_ENABLED=0 $(GO) vet $(RUNTIME) && GOTOOLCHAIN=$(NEWEST) CGO_ENABLED=0 $(GO) test $(FAST) $(RUNTIME); \
	else echo "the newest Go ($(NEWEST)) is not tested: $${v:-no answer in 30 s}" | tr '\n' ' '; echo; fi

SOAK = CGO_ENABLED=$(if $(HAS_CC),1,0) $(GO) test $(RACE) -count=1 -timeout 12h

soak: ## run the long variants of the tests; takes hours (FUZZTIME=30s for each fuzz target)
	$(SOAK) ./internal/fabric -thorough -lines 1000000 -crowded 100000
	$(SOAK) ./internal/conformance -run TestProcesses -thorough
	$(SOAK) ./stream -run TestManyGoroutines -thorough
	$(GO) test -count=1 -timeout 2h ./memory/internal/alloc -run TestSoak -soak 10000000
	$(SOAK) ./tensor -run TestMatMulRandom -products 20000
	$(SOAK) ./rng -run TestStatePrograms -programs 3000
	$(SOAK) ./comm -run 'TestWaitsNeverLie|TestMixedOperations' -waits 5000 -mixed 100000
	$(SOAK) ./comm -run TestDeterministic -thorough
	$(SOAK) ./checkpoint -run 'TestLoadsOfGroupsThatEnd|TestSavedStatesReshard' -waitloads 1000 -saver.models 1000
	$(SOAK) ./cluster -run 'TestWaitsNeverLie|TestOutageBetweenHosts|TestRandomEpochs' -waits 5000 -outages 50 -epochs 2000
	$(SOAK) ./cluster -run TestCoordinatorDies -count 20 -deaths 0
	$(GO) test -count=1 -cpu 1 -timeout 2h ./cluster -run 'TestSimulation$$' -simulate 1h
	$(GO) test -count=1 -timeout 1h ./internal/job -run 'TestCoreS' -coresim 10m -corefaults 2
	$(GO) test -count=1 -timeout 2h ./internal/job -run TestManyAgents -agents 1000
	$(GO) test -count=1 -timeout 2h ./cluster -run TestStarts -starts 20 -started 64
	$(SOAK) ./internal/launch -run TestElasticRandomHosts -hosts 100
	$(SOAK) ./examples/elastic -run TestSoak -soak 1h
	$(GO) test -count=1 -timeout 2h ./examples/elastic -run TestNoJobRunsTwice -splits 20
	$(SOAK) ./internal/differ -programs 100000 -async 100000
	$(GO) test -count=1 -timeout 2h ./examples/gpt -thorough
	$(MAKE) fuzz

deploy: ## check the files of deploy; downloads the types of the Kubernetes APIs
	cd deploy/check && $(GO) vet ./... && $(GO) test -count=1 ./...

check: ## run all checks of CI
	.ci/run

lint: ## gofmt, vet, staticcheck and the check of texts
	@test -z "$$(gofmt -l .)" || { gofmt -l .; echo "run gofmt"; exit 1; }
	$(GO) vet ./... && $(STATICCHECK) ./...
	$(GO) test ./internal/archtest -run '^Test(Texts|TextRules|CommentsBeginWithNames)$$'

cross: ## build without cgo and for arm64, and test the portable variants
	CGO_ENABLED=0 $(GO) build ./... && CGO_ENABLED=0 GOARCH=arm64 $(GO) vet ./...
	CGO_ENABLED=0 $(GO) test -tags nolinkname ./internal/dl ./internal/collective
	@$(if $(shell command -v qemu-aarch64),,echo "arm64: no qemu-aarch64, so the tests do not run") \
	$(if $(shell command -v qemu-aarch64),CGO_ENABLED=0 GOARCH=arm64 $(GO) test -exec qemu-aarch64 -skip '^Test(Reserve|CheckUser)$$' $(NO_C_LIBRARY))

# The tests of these packages need no C library and, but for those that cross skips, start no programs, so an emulator runs them.
NO_C_LIBRARY = ./internal/analyze ./internal/timeline \
	./internal/env ./internal/osthread ./internal/handle ./internal/dtype \
	./internal/poll ./internal/safe ./internal/torchfile

generate: ## write docs/ENVIRONMENT.md
	$(GO) test ./internal/env -run TestDocument -update

ptx: ## recompile the Chorus kernels to PTX; needs NVRTC and a GPU
	$(GO) test ./rng ./internal/strided ./perf ./internal/fabric -run 'TestPTX$$' -v -ptx

fuzz: ## run every fuzz target for FUZZTIME (30s)
	@grep -ro --include=*_test.go '^func Fuzz[A-Za-z]*' . | sort | sed 's|/[^/]*:func | |' | while read -r p f; do \
		echo "$$p $$f"; $(GO) test "$$p" -run '^$$' -fuzz "^$$f\$$" -fuzztime $(FUZZTIME) || exit 1; done

bench: ## run the benchmarks; needs GPUs
	$(GO) test -run '^$$' -bench . ./...

gpu-bins: ## pack the tests, examples and command for a GPU host without Go (PKGS=patterns)
	$(GO) build -C tools -o ../bin/gpubins ./gpubins
	bin/gpubins -o .gpu $(PKGS)

release: ## make the archives, digests and SBOMs of a release in dist/ (VERSION=v0.1.0)
	$(GO) -C tools vet ./release && $(GO) -C tools test ./release
	$(GO) build -C tools -o ../bin/release ./release
	bin/release -version "$(VERSION)"

clean: ## remove build outputs
	rm -rf bin dist .gpu
