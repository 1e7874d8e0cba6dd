package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"runtime/debug"
	"slices"
	"testing"
	"time"
)

// TestArchiveIsReproducible writes the same files twice, in another order and with other times.
func TestArchiveIsReproducible(t *testing.T) {
	dir := t.TempDir()
	list := []entry{{"man/a.1", filepath.Join(dir, "a"), 0o644}, {"chorus", filepath.Join(dir, "b"), 0o755}}
	for _, e := range list {
		if err := os.WriteFile(e.from, []byte(e.name), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	when := time.Unix(1e9, 0)
	var archives [2][]byte
	for i := range archives {
		path := filepath.Join(dir, "x.tar.gz")
		if err := writeArchive(path, "chorus_v1", list, when); err != nil {
			t.Fatal(err)
		}
		archives[i], _ = os.ReadFile(path)
		slices.Reverse(list)
		_ = os.Chtimes(list[0].from, time.Now(), time.Unix(5, 0))
	}
	if !bytes.Equal(archives[0], archives[1]) {
		t.Error("the archives differ")
	}
	if got, want := contents(t, archives[0]), "chorus_v1/chorus 755 chorus\nchorus_v1/man/a.1 644 man/a.1\n"; got != want {
		t.Errorf("the archive has\n%swant\n%s", got, want)
	}
}

func contents(t *testing.T, archive []byte) (text string) {
	z, err := gzip.NewReader(bytes.NewReader(archive))
	if err != nil {
		t.Fatal(err)
	}
	for r := tar.NewReader(z); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return text
		}
		b, _ := io.ReadAll(r)
		text += fmt.Sprintf("%s %o %s\n", h.Name, h.Mode, b)
	}
}

// TestBOM lists a module, and one that is replaced. Each reference of the list exists once.
func TestBOM(t *testing.T) {
	info := &debug.BuildInfo{GoVersion: "go1.26.0", Main: debug.Module{Path: "github.com/gochorus/chorus"},
		Settings: []debug.BuildSetting{{Key: "GOARCH", Value: "arm64"}},
		Deps: []*debug.Module{{Path: "example.com/Upper", Version: "v1.2.3+incompatible", Sum: "h1:abc="},
			{Path: "example.com/old", Version: "v1.0.0", Replace: &debug.Module{Path: "example.com/new", Version: "v2.0.0"}}}}
	text, err := json.Marshal(newBOM(info, sha256.Sum256(nil), "v0.1.0", time.Unix(0, 0).UTC()))
	if err != nil {
		t.Fatal(err)
	}
	var b bom
	if err := json.Unmarshal(text, &b); err != nil {
		t.Fatal(err)
	}
	var names []string
	refs := map[string]int{b.Metadata.Component.Ref: 1}
	for _, c := range b.Components {
		names = append(names, c.PURL)
		refs[c.Ref]++
	}
	want := []string{"pkg:golang/std@1.26.0", "pkg:golang/example.com/upper@v1.2.3%2Bincompatible", "pkg:golang/example.com/new@v2.0.0"}
	if !slices.Equal(names, want) {
		t.Errorf("components %q, want %q", names, want)
	}
	for _, ref := range append(b.Depends[0].On, b.Depends[0].Ref) {
		if refs[ref] != 1 {
			t.Errorf("%s exists %d times", ref, refs[ref])
		}
	}
	if !regexp.MustCompile(`^urn:uuid:[0-9a-f]{8}-[0-9a-f]{4}-8[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$`).MatchString(b.Serial) {
		t.Errorf("serial number %s", b.Serial)
	}
}

// TestEnviron: variables of the user do not change a build, and files do not follow links.
func TestEnviron(t *testing.T) {
	t.Setenv("GOFLAGS", "-overlay=evil.json")
	t.Setenv("GOAMD64", "v4")
	t.Setenv("GOEXPERIMENT", "x")
	t.Setenv("CGO_CFLAGS", "-O9")
	t.Setenv("GOMODCACHE", "/cache")
	env := environ([]string{"GOARCH=arm64"})
	for _, want := range []string{"GOFLAGS=", "GOAMD64=v1", "GOEXPERIMENT=", "GOENV=off", "GOMODCACHE=/cache", "GOARCH=arm64"} {
		if !slices.Contains(env, want) {
			t.Errorf("%s is missing in %q", want, env)
		}
	}
	for _, v := range env {
		if v == "CGO_CFLAGS=-O9" || v == "GOFLAGS=-overlay=evil.json" {
			t.Errorf("%s is kept", v)
		}
	}
	dir := t.TempDir()
	target, link := filepath.Join(dir, "target"), filepath.Join(dir, "SHA256SUMS")
	if err := os.Symlink(target, link); err != nil {
		t.Fatal(err)
	}
	if err := writeSums(dir, nil); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(target); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the link was followed: %v", err)
	}
}
