package kernel

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/cudacc"
	"github.com/gochorus/chorus/internal/dl"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/safe"
)

// A CompileError contains the messages of the compiler.
type CompileError struct {
	Source string
	Line   int // line of the source, from 1, of the first message; 0 if it names none
	Log    string
	Hint   string // advice, or ""
	Err    error
}

func (e *CompileError) Error() string {
	text := fmt.Sprintf("kernel: compile %s: %v:\n%s", e.Source, e.Err, e.Log)
	if e.Hint != "" {
		text += "\n" + e.Hint
	}
	return text
}

// Unwrap returns NVRTC's status.
func (e *CompileError) Unwrap() error { return e.Err }

// A compiler makes binaries for one architecture.
type compiler struct {
	rtc      cudacc.NVRTC
	arch     int         // of the device: 90 is compute capability 9.0
	store    *safe.Store // nil means none
	toolkit  string      // the directory of CUDA's headers; "" if it was not found or the source includes nothing
	searched string      // the paths that were searched for it
}

func newCompiler(dev *device.Device, src *Source) (*compiler, error) {
	rtc, err := gpu.DeviceOf(dev).System().NVRTC()
	if err != nil {
		return nil, err
	}
	major, minor, err := dev.Capability()
	if err != nil {
		return nil, err
	}
	c := &compiler{rtc: rtc, arch: 10*major + minor, store: safe.UserStore()}
	if lib, ok := rtc.(interface{ Path() string }); ok && includeLine.MatchString(src.CUDA) {
		c.toolkit, c.searched = findHeaders(lib.Path())
	}
	return c, nil
}

// binary returns the compiled source, from the store if it has it.
func (c *compiler) binary(src *Source) ([]byte, error) {
	major, minor, r := c.rtc.Version()
	if r != cudacc.Success {
		return nil, fmt.Errorf("kernel: compile %s: nvrtcVersion: %w", src.Name, r)
	}
	target, get, err := c.target()
	if err != nil {
		return nil, fmt.Errorf("kernel: compile %s: %w", src.Name, err)
	}
	options := append([]string{"--gpu-architecture=" + target, "--std=c++17"}, src.Options...)
	if c.toolkit != "" && includeLine.MatchString(src.CUDA) {
		options = append(options, "--include-path="+c.toolkit)
	}
	k := safe.NewKey("NVRTC 1", src.Name, src.CUDA, fmt.Sprintf("NVRTC %d.%d", major, minor))
	k.Add(options...)
	addHeaders(k, src.CUDA, options)
	key := k.Sum()
	if image, ok := c.store.Load(key); ok {
		return image, nil
	}
	image, err := c.compile(src, options, get)
	if err != nil {
		return nil, err
	}
	c.store.Save(key, image)
	return image, nil
}

// target returns the architecture to compile for and the function that gets the result: a
// binary, or PTX if the GPU is newer than the compiler, which the driver then compiles.
func (c *compiler) target() (name string, get func(cudacc.NVRTCProgram) ([]byte, cudacc.Result), err error) {
	archs, r := c.rtc.SupportedArchs()
	if r != cudacc.Success {
		return "", nil, fmt.Errorf("nvrtcGetSupportedArchs: %w", r)
	}
	if slices.Contains(archs, int32(c.arch)) {
		return fmt.Sprintf("sm_%d", c.arch), c.rtc.GetCUBIN, nil
	}
	best := int32(0)
	for _, a := range archs {
		if a < int32(c.arch) {
			best = max(best, a)
		}
	}
	if best == 0 {
		return "", nil, fmt.Errorf("this NVRTC compiles for the architectures %d and not for sm_%d, an older one: use an NVRTC of an older CUDA", archs, c.arch)
	}
	return fmt.Sprintf("compute_%d", best), c.rtc.GetPTX, nil
}

func (c *compiler) compile(src *Source, options []string, get func(cudacc.NVRTCProgram) ([]byte, cudacc.Result)) ([]byte, error) {
	p, r := c.rtc.CreateProgram(src.CUDA, src.Name)
	if r != cudacc.Success {
		return nil, fmt.Errorf("kernel: compile %s: nvrtcCreateProgram: %w", src.Name, r)
	}
	defer c.rtc.DestroyProgram(p)
	if r := c.rtc.CompileProgram(p, options); r != cudacc.Success {
		log, _ := c.rtc.GetProgramLog(p)
		return nil, c.explain(src, log, r)
	}
	image, r := get(p)
	if r != cudacc.Success {
		return nil, fmt.Errorf("kernel: compile %s: fetch the binary: %w", src.Name, r)
	}
	return image, nil
}

var missingHeader = regexp.MustCompile(`cannot open source file "([^"]+)"`)

// explain returns an error with the compiler's messages, whose lines refer to the source:
// "name(line): error: text".
func (c *compiler) explain(src *Source, log string, r cudacc.Result) error {
	e := &CompileError{Source: src.Name, Log: log, Err: r}
	if m := regexp.MustCompile(regexp.QuoteMeta(src.Name) + `\((\d+)\): (?:catastrophic )?error`).FindStringSubmatch(log); m != nil {
		e.Line, _ = strconv.Atoi(m[1])
	}
	if m := missingHeader.FindStringSubmatch(log); m != nil && c.toolkit == "" {
		e.Hint = fmt.Sprintf("CUDA's headers were not found (%s); if %s is one of them, set CUDA_HOME to the folder that has include/, or give --include-path", c.searched, m[1])
	}
	return e
}

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

// addHeaders adds to a key the contents of every header that the source includes, directly or
// indirectly, if it is in the directories of the options. A header that is not found there
// is added by its name, because NVRTC has some built in.
func addHeaders(k *safe.Key, source string, options []string) {
	folders := includeFolders(options)
	seen := map[string]bool{}
	var walk func(text, from string)
	walk = func(text, from string) {
		for _, m := range includeLine.FindAllStringSubmatch(text, -1) {
			path, data := readHeader(m[1], from, folders)
			if path == "" {
				k.Add("no header", m[1])
				continue
			}
			if seen[path] {
				continue
			}
			seen[path] = true
			k.Add(path, data)
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
		if b, err := safe.Read(path, headerLimit); err == nil {
			return path, string(b)
		}
	}
	return "", ""
}
