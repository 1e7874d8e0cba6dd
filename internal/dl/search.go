package dl

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"

	"github.com/gochorus/chorus/internal/env"
)

// Toolkit are the directories of an installed CUDA toolkit. A pattern may begin with an
// environment variable, and is skipped if that variable is unset.
var Toolkit = []string{
	"$CUDA_HOME/lib64",
	"$CUDA_PATH/lib64",
	"$CONDA_PREFIX/lib",
	"/usr/local/cuda*/lib64",
	"/usr/local/cuda*/targets/" + toolkitTarget + "/lib",
}

// sitePackages are the directories into which pip and similar tools install wheels.
// PYTHON3 stands for the installation of the python3 in PATH.
var sitePackages = []string{
	"$PYTHONPATH",
	"$VIRTUAL_ENV/lib/python3.*/site-packages",
	"$CONDA_PREFIX/lib/python3.*/site-packages",
	"$PYTHON3/lib/python3.*/site-packages",
	"$HOME/.local/lib/python3.*/site-packages",
	"/usr/local/lib/python3.*/site-packages",
	"/usr/local/lib/python3.*/dist-packages",
	"/usr/lib/python3*/site-packages",
	"/usr/lib/python3*/dist-packages",
	"/usr/lib64/python3.*/site-packages",
}

var toolkitTarget = map[string]string{"amd64": "x86_64-linux", "arm64": "sbsa-linux"}[runtime.GOARCH]

// A machine is the environment of a search. Tests replace it.
type machine struct {
	root     string // prefix of absolute patterns
	getenv   func(string) string
	lookPath func(string) (string, error)
	secure   bool // the environment must not be trusted
}

func host() *machine {
	if env.IsUntrusted() {
		return secureHost()
	}
	return &machine{getenv: os.Getenv, lookPath: exec.LookPath}
}

// A pattern is a directory pattern with the subdirectories and file names to search.
type pattern struct {
	base    string
	folders []string // relative to base; "" is base itself
	names   []string
}

// patterns returns the patterns for the files of a Spec, best first.
func (m *machine) patterns(spec *Spec) []pattern {
	var list []pattern
	add := func(base string, folders []string) {
		// Two variables may have the same value: CUDA_HOME is often CUDA_PATH.
		if !slices.ContainsFunc(list, func(p pattern) bool { return p.base == base }) {
			list = append(list, pattern{base, folders, spec.Sonames})
		}
	}
	for _, f := range spec.Folders {
		for _, base := range m.expand(f) {
			add(base, []string{""})
		}
	}
	if len(spec.Wheels) > 0 {
		for _, f := range sitePackages {
			for _, base := range m.expand(f) {
				add(base+"/nvidia", spec.Wheels)
			}
		}
	}
	return list
}

// expand replaces the variable at the front of a pattern by each of its values.
func (m *machine) expand(p string) []string {
	if !strings.HasPrefix(p, "$") {
		return []string{m.root + p}
	}
	name, rest, _ := strings.Cut(p[1:], "/")
	if rest != "" {
		rest = "/" + rest
	}
	var out []string
	for _, v := range m.values(name) {
		if filepath.IsAbs(v) { // relative paths are ignored: the working directory must not choose a library
			out = append(out, escapeGlob(filepath.Clean(v))+rest)
		}
	}
	return out
}

// values returns the value of a variable, or all elements if it is a list.
func (m *machine) values(name string) []string {
	switch name {
	case "PYTHONPATH":
		return filepath.SplitList(m.getenv(name))
	case "PYTHON3":
		path, err := m.lookPath("python3")
		if err != nil {
			return nil
		}
		// The link itself belongs to a virtual environment, its target to the Python that
		// the environment was made from.
		prefixes := []string{filepath.Dir(filepath.Dir(path))}
		if real, err := filepath.EvalSymlinks(path); err == nil && real != path {
			prefixes = append(prefixes, filepath.Dir(filepath.Dir(real)))
		}
		return prefixes
	}
	return []string{m.getenv(name)}
}

// files returns the matching files, those with the newest name first.
func (p pattern) files() []string {
	var out []string
	for _, name := range p.names {
		for _, folder := range p.folders {
			found, _ := filepath.Glob(filepath.Join(p.base, folder, name)) // the patterns are well-formed
			out = append(out, found...)
		}
	}
	return out
}

// String formats the pattern in shell syntax.
func (p pattern) String() string {
	return filepath.Join(p.base, braces(p.folders), braces(p.names))
}

func braces(list []string) string {
	if len(list) == 1 {
		return list[0]
	}
	return "{" + strings.Join(list, ",") + "}"
}

func escapeGlob(s string) string {
	return strings.NewReplacer(`\`, `\\`, `*`, `\*`, `?`, `\?`, `[`, `\[`).Replace(s)
}

// secureHost is the machine of a process that must not trust its environment.
func secureHost() *machine {
	return &machine{
		getenv:   func(string) string { return "" },
		lookPath: func(string) (string, error) { return "", errors.New("the process must not trust PATH") },
		secure:   true,
	}
}
