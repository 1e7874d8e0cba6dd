package archtest

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"os"
	"os/exec"
	"path"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

const module = "github.com/gochorus/chorus"

// layers lists the packages from the ground up, as docs/ARCHITECTURE.md draws
// them. A package imports packages of earlier rows only. A name with a star is
// a pattern.
var layers = [][]string{
	{"gds/safetensors", "internal/dtype", "internal/env", "internal/handle", "internal/osthread", "internal/poll", "internal/testhost"},
	{"internal/safe"},
	{"internal/torchfile", "internal/timeline"},
	{"internal/analyze"},
	{"memory/internal/alloc"},
	{"internal/status"},
	{"internal/dl", "internal/job"},
	{"cluster"},
	{"internal/dl/dltest", "internal/cudadrv", "internal/cudacc", "internal/nvml"},
	{"internal/ncclapi", "internal/cublasapi", "internal/cufileapi", "internal/virtual/virtualtest"},
	{"internal/sanitizer"},
	{"internal/virtual/machine"},
	{"internal/virtual/nccl"},
	{"internal/gpu"},
	{"device"},
	{"internal/testgpu", "stream"},
	{"internal/inside"},
	{"memory"},
	{"internal/gemm", "internal/collective"},
	{"kernel", "graph", "nvtx", "timeline", "internal/files", "internal/memtrace"},
	{"internal/strided", "internal/quant"},
	{"nccl", "tensor", "rng", "gds", "internal/fabric", "internal/testgpu/streamtest"},
	{"internal/route", "optim"},
	{"comm", "internal/launch"},
	{"amp", "ddp", "checkpoint", "health", "perf", "cmd/chorus/internal/monitor", "examples/gpt/kernels", "internal/testgpu/groups"},
	{"cmd/chorus/internal/results", "examples/internal/training"},
	{"cmd/chorus", "examples/*", "internal/archtest", "internal/bench", "internal/conformance", "internal/differ", "internal/interop"},
}

// helpers are packages for tests, which tests of any layer may import.
var helpers = []string{"internal/testgpu", "internal/testhost", "internal/testgpu/streamtest", "internal/dl/dltest"}

// importers has the packages that may import each module. One importer is the
// rule: a module that is to be replaced is then replaced in one place.
var importers = map[string][]string{
	"github.com/ebitengine/purego":    {"internal/dl"},
	"github.com/hashicorp/memberlist": {"internal/job"},
	"github.com/NVIDIA/go-nvml":       {"internal/nvml"},
	"golang.org/x/sync":               {"comm"},
	"golang.org/x/sys":                {"internal/safe", "internal/cudacc", "internal/env", "internal/dl", "internal/virtual/machine", "memory", "internal/job", "internal/launch", "gds", "checkpoint", "internal/fabric"},
	"github.com/klauspost/compress":   {"internal/cudacc", "internal/analyze"},
	"gonum.org/v1/gonum":              {"internal/virtual/machine"},
	"gonum.org/v1/plot":               {"cmd/chorus/internal/results", "examples/internal/training"},
	"github.com/spf13/cobra":          {"cmd/chorus"},
	"github.com/prometheus":           {"cmd/chorus/internal/monitor"},
	"github.com/stretchr/testify":     {"internal/virtual/virtualtest"}, // and every test, but only require
}

// mockers has the packages whose tests may import the mocks of a module.
var mockers = map[string][]string{"github.com/NVIDIA/go-nvml": {"health"}}

type pkg struct {
	ImportPath, Name, Doc                       string
	GoFiles, Imports, TestImports, XTestImports []string
}

func (p pkg) name() string { return strings.TrimPrefix(p.ImportPath, module+"/") }

func TestLayers(t *testing.T) {
	for _, p := range list(t) {
		row := layerOf(p.name())
		if row < 0 {
			t.Errorf("%s is not in the table of layers", p.name())
			continue
		}
		for _, i := range ours(p.Imports) {
			if at := layerOf(i); at >= row {
				t.Errorf("%s (row %d) imports %s (row %d): a package imports lower layers only", p.name(), row, i, at)
			}
		}
		// A test in the package is part of it; one beside it is a user, who may
		// import anything.
		for _, i := range ours(p.TestImports) {
			if at := layerOf(i); at >= row && !slices.Contains(helpers, i) {
				t.Errorf("a test in %s (row %d) imports %s (row %d): use package %s_test", p.name(), row, i, at, path.Base(p.name()))
			}
		}
	}
}

func TestImporters(t *testing.T) {
	seen := map[string]bool{}
	for _, p := range list(t) {
		for _, i := range foreign(p.Imports) {
			m := moduleOf(i)
			seen[m] = true
			if !slices.Contains(importers[m], p.name()) {
				t.Errorf("%s imports %s: only %v may", p.name(), i, importers[m])
			}
		}
		for _, i := range foreign(slices.Concat(p.TestImports, p.XTestImports)) {
			m := moduleOf(i)
			if i != "github.com/stretchr/testify/require" && !slices.Contains(importers[m], p.name()) && !slices.Contains(mockers[m], p.name()) {
				t.Errorf("a test of %s imports %s: tests share testify/require with each other and modules with their package", p.name(), i)
			}
		}
	}
	require.True(t, seen["github.com/ebitengine/purego"], "the list of packages is not that of the module")
}

func TestEveryPackageIsDocumented(t *testing.T) {
	for _, p := range list(t) {
		if len(p.GoFiles) == 0 {
			continue // tests only
		}
		want := "Package " + path.Base(p.name()) + " "
		if p.Name == "main" {
			want = "" // commands begin as they like
		}
		if p.Doc == "" || !strings.HasPrefix(p.Doc, want) {
			t.Errorf("%s has no package comment that begins %q", p.name(), want)
		}
	}
}

// The rules must notice what they forbid.
func TestRules(t *testing.T) {
	require.Less(t, layerOf("internal/dl"), layerOf("internal/cudadrv"))
	require.Less(t, layerOf("nccl"), layerOf("comm"))
	require.Equal(t, layerOf("examples/ring"), layerOf("cmd/chorus"))
	require.Negative(t, layerOf("internal/unheard"))
	require.Negative(t, layerOf("examples/ring/deeper"))
	require.Equal(t, []string{"comm"}, ours([]string{"fmt", module + "/comm", "golang.org/x/sync/errgroup"}))
	require.Equal(t, []string{"golang.org/x/sync/errgroup"}, foreign([]string{"fmt", module + "/comm", "golang.org/x/sync/errgroup"}))
	require.Equal(t, "golang.org/x/sync", moduleOf("golang.org/x/sync/errgroup"))
	require.Equal(t, "example.com/new", moduleOf("example.com/new"))
}

// All bubbles of testing/synctest are made by testhost, which keeps them from crashing the race detector.
func TestBubblesAreMadeByTesthost(t *testing.T) {
	needSource(t)
	list := exec.Command("git", "grep", "-l", "-F", "synctest"+".Test(")
	list.Dir = root
	out, err := list.Output()
	require.NoError(t, err)
	require.Equal(t, []string{"internal/testhost/bubble.go"}, strings.Fields(string(out)), "use testhost.Bubble")
}

func layerOf(name string) int {
	return slices.IndexFunc(layers, func(row []string) bool {
		return slices.ContainsFunc(row, func(pattern string) bool {
			ok, _ := path.Match(pattern, name)
			return ok
		})
	})
}

// ours returns the imports that are packages of this module, by their names.
func ours(imports []string) []string {
	var out []string
	for _, i := range imports {
		if name, ok := strings.CutPrefix(i, module+"/"); ok {
			out = append(out, name)
		}
	}
	return out
}

// foreign returns the imports of other modules: their paths begin with a host.
func foreign(imports []string) []string {
	return slices.DeleteFunc(slices.Clone(imports), func(i string) bool {
		host, _, _ := strings.Cut(i, "/")
		return !strings.Contains(host, ".") || strings.HasPrefix(i, module+"/")
	})
}

func moduleOf(imp string) string {
	for m := range importers {
		if imp == m || strings.HasPrefix(imp, m+"/") {
			return m
		}
	}
	return imp
}

// needSource skips a test that reads the source, where there is none.
func needSource(t *testing.T) {
	t.Helper()
	if _, err := exec.LookPath("go"); err != nil {
		t.Skip("no go command here: ", err)
	}
	if _, err := os.Stat("doc.go"); err != nil {
		t.Skip("no source here: ", err)
	}
}

// list asks the go command for the packages of the module.
func list(t *testing.T) []pkg {
	t.Helper()
	needSource(t)
	cmd := exec.Command("go", "list", "-json=ImportPath,Name,Doc,GoFiles,Imports,TestImports,XTestImports", module+"/...")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=1") // internal/nvml needs it
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list: %v\n%s", err, &stderr)
	}
	var list []pkg
	for d := json.NewDecoder(bytes.NewReader(out)); ; {
		var p pkg
		if err := d.Decode(&p); errors.Is(err, io.EOF) {
			return list
		} else if err != nil {
			t.Fatal(err)
		}
		list = append(list, p)
	}
}
