// Command release makes the files of a release in a directory: an archive for each architecture
// with the chorus command, its manual pages, completions and licence; an SBOM of each command in
// CycloneDX JSON; and SHA256SUMS. The same commit gives the same bytes.
//
//	release -version v0.1.0 [-o dist]
//
// It runs in the root of the repository and needs no network if the modules are downloaded. The environment does not change
// the bytes. Users verify SHA256SUMS. Sign it on the machine that has the key:
//
//	minisign -Sm dist/SHA256SUMS
//	cosign sign-blob --bundle dist/SHA256SUMS.bundle dist/SHA256SUMS
package main

import (
	"archive/tar"
	"cmp"
	"compress/gzip"
	"crypto/sha256"
	"debug/buildinfo"
	"encoding/hex"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"time"
)

var architectures = []string{"amd64", "arm64"}

func main() {
	version := flag.String("version", "", "version of the release, such as v0.1.0")
	out := flag.String("o", "dist", "output directory")
	flag.Parse()
	if *version == "" || strings.ContainsAny(*version, "/ ") || flag.NArg() > 0 {
		flag.Usage()
		os.Exit(64)
	}
	if err := release(*version, *out); err != nil {
		fmt.Fprintln(os.Stderr, "release:", err)
		os.Exit(1)
	}
}

// release builds all files.
func release(version, out string) error {
	stage, err := os.MkdirTemp("", "chorus-release")
	if err != nil {
		return err
	}
	defer os.RemoveAll(stage)
	if err := os.MkdirAll(out, 0o755); err != nil {
		return err
	}
	c, err := newCommit()
	if err != nil {
		return err
	}
	c.version = version
	shared, err := sharedFiles(c, stage)
	if err != nil {
		return err
	}
	var made []string
	for _, arch := range architectures {
		names, err := releaseFor(c, arch, stage, out, shared)
		if err != nil {
			return fmt.Errorf("%s: %w", arch, err)
		}
		made = append(made, names...)
	}
	return writeSums(out, made)
}

// A commit is the source of a release.
type commit struct {
	version, hash string
	when          time.Time // which all files of the archives get
}

// newCommit describes the current commit. Changes that are not committed are an error.
func newCommit() (*commit, error) {
	changes, err := output("git", "status", "--porcelain")
	if err != nil {
		return nil, err
	}
	if changes != "" {
		return nil, fmt.Errorf("files have changes that are not committed:\n%s", changes)
	}
	text, err := output("git", "log", "-1", "--format=%H %ct")
	if err != nil {
		return nil, err
	}
	hash, at, _ := strings.Cut(strings.TrimSpace(text), " ")
	seconds, err := strconv.ParseInt(at, 10, 64)
	return &commit{hash: hash, when: time.Unix(seconds, 0).UTC()}, err
}

// releaseFor writes the archive and the SBOM of an architecture.
func releaseFor(c *commit, arch, stage, out string, shared []entry) ([]string, error) {
	binary := filepath.Join(stage, "chorus-"+arch)
	if err := c.build(binary, arch); err != nil {
		return nil, err
	}
	name := fmt.Sprintf("chorus_%s_linux_%s", c.version, arch)
	list := append(slices.Clone(shared), entry{"chorus", binary, 0o755})
	if err := writeArchive(filepath.Join(out, name+".tar.gz"), name, list, c.when); err != nil {
		return nil, err
	}
	if err := writeSBOM(filepath.Join(out, name+".cdx.json"), binary, c.version, c.when); err != nil {
		return nil, err
	}
	return []string{name + ".tar.gz", name + ".cdx.json"}, nil
}

func (c *commit) build(binary, arch string) error {
	flags := "-ldflags=-s -w -X main.released=" + c.version + " -X main.commit=" + c.hash
	return run([]string{"CGO_ENABLED=0", "GOOS=linux", "GOARCH=" + arch}, "go", "build", "-trimpath", flags, "-o", binary, "./cmd/chorus")
}

// sharedFiles writes the files that all archives have: documents, manual pages and completions.
func sharedFiles(c *commit, stage string) ([]entry, error) {
	list := []entry{{"LICENSE", "LICENSE", 0o644}, {"README.md", "README.md", 0o644}, {"CHANGELOG.md", "CHANGELOG.md", 0o644}}
	man := filepath.Join(stage, "man")
	if err := os.Mkdir(man, 0o755); err != nil {
		return nil, err
	}
	if err := run([]string{"CGO_ENABLED=0"}, "go", "test", "-count=1", "./cmd/chorus", "-run", "^TestManPages$", "-man", man); err != nil {
		return nil, err
	}
	pages, err := os.ReadDir(man)
	if err != nil {
		return nil, err
	}
	for _, p := range pages {
		list = append(list, entry{"man/man1/" + p.Name(), filepath.Join(man, p.Name()), 0o644})
	}
	here := filepath.Join(stage, "chorus-here")
	if err := c.build(here, runtime.GOARCH); err != nil {
		return nil, err
	}
	for _, shell := range []string{"bash", "zsh", "fish"} {
		text, err := output(here, "completion", shell)
		if err != nil {
			return nil, err
		}
		path := filepath.Join(stage, shell)
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			return nil, err
		}
		list = append(list, entry{"completions/chorus." + shell, path, 0o644})
	}
	return list, nil
}

// writeSums writes the digests of files, as sha256sum -c reads them.
func writeSums(dir string, names []string) error {
	var b strings.Builder
	for _, name := range names {
		data, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			return err
		}
		fmt.Fprintf(&b, "%x  %s\n", sha256.Sum256(data), name)
	}
	f, err := create(filepath.Join(dir, "SHA256SUMS"))
	if err != nil {
		return err
	}
	_, err = f.WriteString(b.String())
	return errors.Join(err, f.Close())
}

// kept are the variables of a build that cannot change its result: where Go finds and stores files.
var kept = []string{"PATH", "HOME", "TMPDIR", "GOPATH", "GOMODCACHE", "GOCACHE", "GOPROXY", "GOSUMDB", "GOROOT"}

// fixed are the variables that change a build, such as GOFLAGS with -overlay. GOENV turns off the file of `go env -w`.
var fixed = []string{"GOENV=off", "GOFLAGS=", "GOEXPERIMENT=", "GOTOOLCHAIN=local", "GOWORK=off", "GO111MODULE=on",
	"GOAMD64=v1", "GOARM64=v8.0", "GOFIPS140=off", "CGO_ENABLED=0", "LC_ALL=C", "TZ=UTC"}

// environ returns the environment of a command, so that the same commit gives the same bytes on any machine.
func environ(more []string) []string {
	var env []string
	for _, name := range kept {
		if v, ok := os.LookupEnv(name); ok {
			env = append(env, name+"="+v)
		}
	}
	return slices.Concat(env, fixed, more)
}

func run(more []string, name string, args ...string) error {
	c := exec.Command(name, args...)
	c.Env = environ(more)
	c.Stderr = os.Stderr
	if err := c.Run(); err != nil {
		return fmt.Errorf("%s: %w", strings.Join(c.Args, " "), err)
	}
	return nil
}

func output(name string, args ...string) (string, error) {
	c := exec.Command(name, args...)
	c.Env = environ(nil)
	text, err := c.Output()
	if e, ok := errors.AsType[*exec.ExitError](err); ok {
		err = fmt.Errorf("%w: %s", err, e.Stderr)
	}
	if err != nil {
		return "", fmt.Errorf("%s %s: %w", name, strings.Join(args, " "), err)
	}
	return string(text), nil
}

// create creates a file in place of another one. It does not follow a link.
func create(path string) (*os.File, error) {
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	return os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644)
}

// An entry is a file of an archive.
type entry struct {
	name string // in the archive
	from string
	mode int64
}

// writeArchive writes files into a folder of a tar archive. Only their bytes and when decide its bytes.
func writeArchive(to, folder string, list []entry, when time.Time) (err error) {
	f, err := create(to)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	z, err := gzip.NewWriterLevel(f, gzip.BestCompression)
	if err != nil {
		return err
	}
	w := tar.NewWriter(z)
	list = slices.Clone(list)
	slices.SortFunc(list, func(a, b entry) int { return cmp.Compare(a.name, b.name) })
	for _, e := range list {
		if err := addFile(w, path.Join(folder, e.name), e, when); err != nil {
			return err
		}
	}
	return errors.Join(w.Close(), z.Close())
}

func addFile(w *tar.Writer, name string, e entry, when time.Time) error {
	f, err := os.Open(e.from)
	if err != nil {
		return err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return err
	}
	h := &tar.Header{Typeflag: tar.TypeReg, Name: name, Size: info.Size(), Mode: e.mode, ModTime: when, Format: tar.FormatPAX}
	if err := w.WriteHeader(h); err != nil {
		return err
	}
	_, err = io.Copy(w, f)
	return err
}

// A bom is a list of components in CycloneDX 1.6.
type bom struct {
	Format     string      `json:"bomFormat"`
	Spec       string      `json:"specVersion"`
	Serial     string      `json:"serialNumber"`
	Version    int         `json:"version"`
	Metadata   metadata    `json:"metadata"`
	Components []component `json:"components"`
	Depends    []depends   `json:"dependencies"`
}

type metadata struct {
	Time      string    `json:"timestamp"`
	Component component `json:"component"`
}

type component struct {
	Type       string     `json:"type"`
	Ref        string     `json:"bom-ref"`
	Name       string     `json:"name"`
	Version    string     `json:"version"`
	PURL       string     `json:"purl"`
	Hashes     []hash     `json:"hashes,omitempty"`
	Properties []property `json:"properties,omitempty"`
}

type hash struct {
	Algorithm string `json:"alg"`
	Content   string `json:"content"`
}

type property struct {
	Name  string `json:"name"`
	Value string `json:"value"`
}

type depends struct {
	Ref string   `json:"ref"`
	On  []string `json:"dependsOn"`
}

// writeSBOM lists the modules that a binary was built from, by the binary's build information.
func writeSBOM(to, binary, version string, when time.Time) error {
	info, err := buildinfo.ReadFile(binary)
	if err != nil {
		return err
	}
	data, err := os.ReadFile(binary)
	if err != nil {
		return err
	}
	text, err := json.MarshalIndent(newBOM(info, sha256.Sum256(data), version, when), "", "  ")
	if err != nil {
		return err
	}
	f, err := create(to)
	if err != nil {
		return err
	}
	_, err = f.Write(append(text, '\n'))
	return errors.Join(err, f.Close())
}

func newBOM(info *debug.BuildInfo, sum [32]byte, version string, when time.Time) *bom {
	main := component{Type: "application", Ref: purl(info.Main.Path, version), Name: "chorus", Version: version, PURL: purl(info.Main.Path, version),
		Hashes: []hash{{"SHA-256", hex.EncodeToString(sum[:])}}, Properties: []property{{"go:version", info.GoVersion}}}
	for _, s := range info.Settings {
		main.Properties = append(main.Properties, property{"go:" + s.Key, s.Value})
	}
	b := &bom{Format: "CycloneDX", Spec: "1.6", Version: 1, Serial: serial(sum), Components: []component{}}
	b.Metadata = metadata{when.Format(time.RFC3339), main}
	d := depends{Ref: main.Ref, On: []string{}}
	goVersion := strings.TrimPrefix(info.GoVersion, "go")
	std := component{Type: "library", Ref: purl("std", goVersion), Name: "std", Version: goVersion, PURL: purl("std", goVersion)}
	b.Components, d.On = append(b.Components, std), append(d.On, std.Ref)
	for _, m := range info.Deps {
		if m.Replace != nil {
			m = m.Replace
		}
		c := component{Type: "library", Ref: purl(m.Path, m.Version), Name: m.Path, Version: m.Version, PURL: purl(m.Path, m.Version)}
		if m.Sum != "" {
			c.Properties = []property{{"go:sum", m.Sum}} // of the module's files, as in go.sum
		}
		b.Components, d.On = append(b.Components, c), append(d.On, c.Ref)
	}
	b.Depends = []depends{d}
	return b
}

// purl returns the package URL of a module.
func purl(path, version string) string {
	return "pkg:golang/" + strings.ToLower(path) + "@" + strings.ReplaceAll(version, "+", "%2B")
}

// serial returns a UUID that the binary decides.
func serial(sum [32]byte) string {
	u := sum
	u[6], u[8] = u[6]&0x0f|0x80, u[8]&0x3f|0x80 // version 8: of the application's choice
	return fmt.Sprintf("urn:uuid:%x-%x-%x-%x-%x", u[:4], u[4:6], u[6:8], u[8:10], u[10:16])
}
