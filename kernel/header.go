package kernel

import (
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"

	"github.com/gochorus/chorus/internal/dl"
	"github.com/gochorus/chorus/internal/safefile"
)

// headers are the locations of CUDA's headers: in toolkits and in the wheels of the
// run-time library.
var headers = dl.Spec{
	Name:    "CUDA's headers",
	Sonames: []string{"cuda_fp16.h"},
	Folders: []string{
		"$CUDA_HOME/include",
		"$CUDA_PATH/include",
		"$CONDA_PREFIX/targets/" + headerTarget + "/include",
		"$CONDA_PREFIX/include",
		"/usr/local/cuda*/include",
		"/usr/local/cuda*/targets/" + headerTarget + "/include",
		"/usr/include",
	},
	Wheels: []string{"cu13/include", "cuda_runtime/include"},
}

var headerTarget = map[string]string{"amd64": "x86_64-linux", "arm64": "sbsa-linux"}[runtime.GOARCH]

// findHeaders returns the directory with cuda_fp16.h, preferably the one that came with
// the compiler, whose library is at path; or "" and the searched paths.
func findHeaders(path string) (folder, searched string) {
	lib := filepath.Dir(path)
	for _, f := range []string{"../include", "../../include", "../../cuda_runtime/include"} {
		f = filepath.Join(lib, f)
		if _, err := os.Stat(filepath.Join(f, headers.Sonames[0])); err == nil {
			return f, ""
		}
	}
	if found := dl.Files(&headers); len(found) > 0 {
		return filepath.Dir(found[0]), ""
	}
	return "", "looked for " + headers.Sonames[0] + " near " + path + ", in " + strings.Join(headers.Folders, ", ") + " and in NVIDIA's Python wheels"
}

var includeLine = regexp.MustCompile(`(?m)^[ \t]*#[ \t]*include[ \t]*[<"]([^>"\n]+)[>"]`)

// includeFolders returns the directories in the options, in order.
func includeFolders(options []string) (folders []string) {
	for i, o := range options {
		for _, flag := range []string{"--include-path", "-I"} {
			rest, ok := strings.CutPrefix(o, flag)
			if !ok {
				continue
			}
			if rest = strings.TrimPrefix(rest, "="); rest == "" && i+1 < len(options) {
				rest = options[i+1]
			}
			folders = append(folders, rest)
			break
		}
	}
	return folders
}

// addHeaders adds the contents of every header that the source includes, directly or
// indirectly, if it is in the directories of the options. A header that is not found there
// is added by its name, because NVRTC has some built in.
func (k *key) addHeaders(source string, options []string) {
	folders := includeFolders(options)
	seen := map[string]bool{}
	var walk func(text, from string)
	walk = func(text, from string) {
		for _, m := range includeLine.FindAllStringSubmatch(text, -1) {
			path, data := readHeader(m[1], from, folders)
			if path == "" {
				k.add("no header", m[1])
				continue
			}
			if seen[path] {
				continue
			}
			seen[path] = true
			k.add(path, data)
			walk(data, filepath.Dir(path))
		}
	}
	for _, o := range options {
		for _, flag := range []string{"--pre-include=", "-include="} {
			if h, ok := strings.CutPrefix(o, flag); ok {
				walk(`#include "`+h+`"`, ".")
			}
		}
	}
	walk(source, ".")
}

// headerLimit exceeds the size of every CUDA C++ header.
const headerLimit = 64 << 20

// readHeader finds a header next to the file that includes it, or in the directories.
func readHeader(name, from string, folders []string) (path, data string) {
	for _, f := range append([]string{from}, folders...) {
		path := filepath.Join(f, name)
		if b, err := safefile.Read(path, headerLimit); err == nil {
			return path, string(b)
		}
	}
	return "", ""
}
