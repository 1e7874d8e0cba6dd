package backend

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/cufileapi"
	"github.com/gochorus/chorus/internal/env"
	"github.com/stretchr/testify/require"
)

// cuFile's settings hold for a process, so each is tried in one of its own: this
// test, with a trial in the environment.
const trialVar = "CHORUS_TEST_CUFILE_TRIAL"

// A trial is one way to set cuFile up.
type trial struct {
	Name    string
	Env     map[string]string `json:",omitempty"` // CUFILE_…
	JSON    string            `json:",omitempty"` // what CUFILE_ENV_PATH_JSON names
	Bools   map[cufileapi.BoolParam]bool
	Sizes   map[cufileapi.SizeTParam]uintptr
	Backend string
	Files   []trialFile
}

// A trialFile is a file of 8 KiB and how it is opened.
type trialFile struct {
	Name   string
	Path   string
	Direct bool
	Write  bool
}

// A verdict is what cuFile said.
type verdict struct {
	Open  string
	Props string
	Files map[string]string // by the names of the trial's files
	End   bool              // the process came to its end
}

const (
	trialBytes = 4096
	trialLimit = 10 * time.Second
	trialsOnce = 4 // how many processes there are at a time
)

// configJSON is a cufile.json with these properties, which denies nothing.
func configJSON(properties string) string {
	return `{"execution": {"parallel_io": true, "max_io_threads": 4}, "properties": {` + properties + `},
		"fs": {"generic": {"posix_unaligned_writes": true}}, "denylist": {"drivers": [], "devices": [], "mounts": [], "filesystems": []}}`
}

// slabs is the pool of host memory of the cufile.json that the toolkit ships.
const slabs = `, "posix_pool_slab_size_kb": [4, 1024, 16384], "posix_pool_slab_count": [128, 64, 64], "max_direct_io_size_kb": 16384`

// trials are the settings that may decide whether cuFile takes a file.
func trials() []trial {
	on := func(list ...cufileapi.BoolParam) map[cufileapi.BoolParam]bool {
		m := map[cufileapi.BoolParam]bool{}
		for _, p := range list {
			m[p] = true
		}
		return m
	}
	allow, force, skip := cufileapi.ParamAllowCompatMode, cufileapi.ParamForceCompatMode, cufileapi.SkipTopologyDetection
	return []trial{
		{Name: "defaults"},
		{Name: "defaults, few logs", Env: map[string]string{"CUFILE_LOGGING_LEVEL": "ERROR"}},
		{Name: "env allow", Env: map[string]string{"CUFILE_ALLOW_COMPAT_MODE": "true"}},
		{Name: "env force", Env: map[string]string{"CUFILE_FORCE_COMPAT_MODE": "true"}},
		{Name: "env skip topology", Env: map[string]string{"CUFILE_SKIP_TOPOLOGY_DETECTION": "true"}},
		{Name: "env allow, force, skip", Env: map[string]string{"CUFILE_ALLOW_COMPAT_MODE": "true", "CUFILE_FORCE_COMPAT_MODE": "true",
			"CUFILE_SKIP_TOPOLOGY_DETECTION": "true"}},
		{Name: "env no p2pdma", Env: map[string]string{"CUFILE_USE_PCIP2PDMA": "false"}},
		{Name: "parameter allow", Bools: on(allow)},
		{Name: "parameter force", Bools: on(force)},
		{Name: "parameter skip", Bools: on(skip)},
		{Name: "parameters allow, force, skip", Bools: on(allow, force, skip)},
		{Name: "parameters force, parallel", Bools: on(allow, force, cufileapi.ParallelIO), Sizes: map[cufileapi.SizeTParam]uintptr{cufileapi.MaxIOThreads: 4}},
		{Name: "parameters force, io_uring", Bools: on(allow, force, cufileapi.PreferIOUring)},
		{Name: "parameters force, aggressive", Bools: on(allow, force, cufileapi.FSMiscAPICheckAggressive)},
		{Name: "json allow", JSON: configJSON(`"allow_compat_mode": true`)},
		{Name: "json force", JSON: configJSON(`"allow_compat_mode": true, "force_compat_mode": true`)},
		{Name: "json force, slabs", JSON: configJSON(`"allow_compat_mode": true, "force_compat_mode": true` + slabs)},
		{Name: "json no p2pdma", JSON: configJSON(`"allow_compat_mode": true, "use_pci_p2pdma": false` + slabs)},
		{Name: "json force, no p2pdma; skip", JSON: configJSON(`"allow_compat_mode": true, "force_compat_mode": true, "use_pci_p2pdma": false` + slabs),
			Env: map[string]string{"CUFILE_SKIP_TOPOLOGY_DETECTION": "true"}, Bools: on(force, skip)},
	}
}

// TestWhyRegisterRefuses finds out under which settings cuFile takes files of this
// machine, and prints a table. It fails only where the trials themselves do not
// work: that cuFile refuses is its result.
func TestWhyRegisterRefuses(t *testing.T) {
	if text := os.Getenv(trialVar); text != "" {
		try(t, text)
		return
	}
	t.Run("virtual", func(t *testing.T) {
		refusing := trial{Name: "refusing", Env: map[string]string{env.VirtualFaults.Name: "cuFileHandleRegister#*=CU_FILE_HANDLE_NOT_REGISTERED"}}
		got := tryAll(t, Virtual, []trial{{Name: "defaults"}, refusing, {Name: "closed", Bools: map[cufileapi.BoolParam]bool{cufileapi.ParamAllowCompatMode: false}}})
		for file, said := range got[0].Files {
			require.Equal(t, "reads", said, file)
		}
		for file, said := range got[1].Files {
			require.Equal(t, "5027 CU_FILE_HANDLE_NOT_REGISTERED", said, file)
		}
		for file, said := range got[2].Files {
			require.Equal(t, "5008 CU_FILE_IO_NOT_SUPPORTED", said, file)
		}
	})
	for _, x := range trials() {
		require.True(t, x.JSON == "" || json.Valid([]byte(x.JSON)), x.Name)
	}
	t.Run("cuda", func(t *testing.T) {
		s := open(t, CUDA)
		if _, err := s.CuFile(); err != nil {
			t.Skip(err)
		}
		surroundings(t)
		tryAll(t, CUDA, trials())
	})
}

// tryAll tries each setting and prints what came of it.
func tryAll(t *testing.T, backend string, list []trial) []verdict {
	t.Helper()
	files := trialFiles(t)
	verdicts, logs := make([]verdict, len(list)), make([]string, len(list))
	var wg sync.WaitGroup
	room := make(chan struct{}, trialsOnce)
	for i, x := range list {
		x.Backend, x.Files = backend, files
		wg.Go(func() {
			room <- struct{}{}
			defer func() { <-room }()
			verdicts[i], logs[i] = runTrial(t, x)
		})
	}
	wg.Wait()
	t.Log(table(list, files, verdicts))
	told := map[string]bool{}
	for i, v := range verdicts {
		refused := v.Open != "opened"
		for _, said := range v.Files {
			refused = refused || said != "reads"
		}
		if text := logs[i]; refused && text != "" && !told[text] {
			told[text] = true
			t.Logf("the log under %q ends with:\n%s", list[i].Name, text)
		}
	}
	return verdicts
}

// trialFiles makes files on tmpfs and on disks, and opens them in several ways.
func trialFiles(t *testing.T) (files []trialFile) {
	t.Helper()
	for _, place := range []struct{ name, dir string }{{"shm", "/dev/shm"}, {"temp", os.TempDir()}} {
		dir, err := os.MkdirTemp(place.dir, "cufile")
		if err != nil {
			t.Logf("no files in %s: %v", place.dir, err)
			continue
		}
		t.Cleanup(func() { os.RemoveAll(dir) })
		path := filepath.Join(dir, "data")
		require.NoError(t, os.WriteFile(path, bytes.Repeat([]byte("cufile 8"), 2*trialBytes/8), 0o600))
		files = append(files, trialFile{Name: place.name, Path: path})
		if f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_DIRECT, 0); err == nil {
			f.Close()
			files = append(files, trialFile{Name: place.name + " direct", Path: path, Direct: true},
				trialFile{Name: place.name + " rw", Path: path, Write: true})
		}
	}
	return files
}

// runTrial tries one setting in a process of its own and returns the end of cuFile's
// log.
func runTrial(t *testing.T, x trial) (verdict, string) {
	dir := t.TempDir()
	log := filepath.Join(dir, "cufile.log")
	text, err := json.Marshal(x)
	if err != nil {
		t.Error(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), trialLimit)
	defer cancel()
	self, err := os.Executable() // os.Args[0] may be relative, and the process begins elsewhere
	if err != nil {
		t.Error(err)
	}
	cmd := exec.CommandContext(ctx, self, "-test.run=^TestWhyRegisterRefuses$", "-test.v")
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), trialVar+"="+string(text), "CUFILE_LOGFILE_PATH="+log, "CUFILE_LOGGING_LEVEL=TRACE")
	for k, v := range x.Env {
		cmd.Env = append(cmd.Env, k+"="+v)
	}
	if x.JSON != "" {
		path := filepath.Join(dir, "cufile.json")
		if err := os.WriteFile(path, []byte(x.JSON), 0o600); err != nil {
			t.Error(err)
		}
		cmd.Env = append(cmd.Env, "CUFILE_ENV_PATH_JSON="+path)
	}
	out, err := cmd.CombinedOutput()
	v := verdict{Files: map[string]string{}}
	for line := range strings.Lines(string(out)) {
		if text, ok := strings.CutPrefix(line, trialVar+" "); ok {
			if err := json.Unmarshal([]byte(text), &v); err != nil {
				t.Errorf("%s: %v in %q", x.Name, err, text)
			}
		}
	}
	switch {
	case errors.Is(ctx.Err(), context.DeadlineExceeded):
		v.Open += fmt.Sprintf("; still at work after %v", trialLimit)
	case !v.End && strings.Contains(string(out), "--- FAIL"):
		t.Errorf("%s: the trial itself failed: %s", x.Name, out)
	case !v.End:
		v.Open += fmt.Sprintf("; the process ended: %v", err)
	}
	return v, logEnd(filepath.Dir(log))
}

// logEnd returns the last lines of the logs in a folder, without what differs from
// one process to another.
func logEnd(dir string) string {
	const last = 30
	names, _ := filepath.Glob(filepath.Join(dir, "*.log")) // the pattern is well formed
	var lines []string
	for _, name := range names {
		b, _ := os.ReadFile(name)
		for line := range strings.Lines(string(b)) {
			// A line begins with the time and the numbers of process and thread.
			if _, rest, ok := strings.Cut(line, "]"); ok {
				line = rest
			}
			lines = append(lines, strings.TrimRight(line, "\n"))
		}
	}
	return strings.Join(lines[max(0, len(lines)-last):], "\n")
}

// table tells for each setting what was said to which files.
func table(list []trial, files []trialFile, verdicts []verdict) string {
	var b strings.Builder
	b.WriteString("what cuFile says to each file\n")
	for i, v := range verdicts {
		fmt.Fprintf(&b, "%-30s %s %s\n", list[i].Name, v.Open, v.Props)
		by := map[string][]string{}
		var said []string
		for _, f := range files {
			text := v.Files[f.Name]
			if by[text] == nil {
				said = append(said, text)
			}
			by[text] = append(by[text], f.Name)
		}
		for _, text := range said {
			fmt.Fprintf(&b, "%-30s   %s: %s\n", "", strings.Join(by[text], ", "), text)
		}
	}
	return b.String()
}

// surroundings logs what cuFile looks at beside the file.
func surroundings(t *testing.T) {
	for _, path := range []string{"/run/udev", "/run/udev/data", "/dev/nvidia-fs0", "/proc/driver/nvidia-fs", "/sys/module/nvidia_fs", "/etc/cufile.json"} {
		_, err := os.Stat(path)
		t.Logf("%s: %v", path, err == nil)
	}
	mounts, _ := os.ReadFile("/proc/self/mountinfo")
	for line := range strings.Lines(string(mounts)) {
		if fields := strings.Fields(line); len(fields) > 4 && slices.Contains([]string{"/", "/tmp", "/dev/shm"}, fields[4]) {
			t.Log(strings.TrimSpace(line))
		}
	}
}

// try is a trial, in its own process.
func try(t *testing.T, text string) {
	var x trial
	require.NoError(t, json.Unmarshal([]byte(text), &x))
	v := verdict{Files: map[string]string{}}
	tell := func() {
		line, err := json.Marshal(v)
		require.NoError(t, err)
		fmt.Printf("\n%s %s\n", trialVar, line)
	}
	runtime.LockOSThread()
	s, err := Open(&Config{Backend: x.Backend})
	require.NoError(t, err)
	api, err := s.CuFile()
	require.NoError(t, err)
	ctx, r := s.Driver.DevicePrimaryCtxRetain(0)
	require.Equal(t, cudadrv.Success, r)
	bind := func() { require.Equal(t, cudadrv.Success, s.Driver.CtxSetCurrent(ctx)) }
	bind()
	p, r := s.Driver.MemAlloc(trialBytes)
	require.Equal(t, cudadrv.Success, r)
	for param, set := range x.Bools {
		if r := api.SetParameterBool(param, set); r != cufileapi.Success {
			v.Props += fmt.Sprintf("parameter %d: %v; ", param, r)
		}
	}
	for param, n := range x.Sizes {
		if r := api.SetParameterSizeT(param, n); r != cufileapi.Success {
			v.Props += fmt.Sprintf("parameter %d: %v; ", param, r)
		}
	}
	v.Open = "opening"
	tell() // in case that the process does not come to its end
	bind()
	begin := time.Now()
	if res := api.DriverOpen(); res != cufileapi.Success {
		v.Open, v.End = describe(res), true
		tell()
		return
	}
	v.Open = "opened"
	var props cufileapi.DrvProps
	if api.DriverGetProperties(&props) == cufileapi.Success {
		v.Props += fmt.Sprintf("in %v: nvidia-fs %d.%d, status %#x, control %#x, features %#x", time.Since(begin).Round(time.Millisecond),
			props.MajorVersion, props.MinorVersion, props.DStatusFlags, props.DControlFlags, props.FFlags)
	}
	for _, f := range x.Files {
		v.Files[f.Name] = "at work"
		tell()
		v.Files[f.Name] = tryFile(t, s, api, f, bind, p)
	}
	v.End = true
	tell()
	bind()
	_ = api.DriverClose()
}

func describe(r cufileapi.Result) string { return fmt.Sprintf("%d %v", uint32(r.Code()), r) }

// tryFile registers a file and reads a page of it.
func tryFile(t *testing.T, s *System, api cufileapi.API, x trialFile, bind func(), p cudadrv.DevicePtr) string {
	flags := os.O_RDONLY
	if x.Write {
		flags = os.O_RDWR
	}
	if x.Direct {
		flags |= syscall.O_DIRECT
	}
	f, err := os.OpenFile(x.Path, flags, 0)
	require.NoError(t, err)
	defer f.Close()
	bind()
	h, r := api.HandleRegister(&cufileapi.Descr{Type: cufileapi.OpaqueFD, FD: int32(f.Fd())})
	if r != cufileapi.Success {
		return describe(r)
	}
	defer func() {
		bind()
		api.HandleDeregister(h)
	}()
	bind()
	n, err := api.Read(h, p, trialBytes, 0, 0)
	if err != nil {
		return "registers, but cuFileRead: " + err.Error()
	}
	got := make([]byte, trialBytes)
	bind()
	require.Equal(t, cudadrv.Success, s.Driver.MemcpyDtoHAsync(unsafe.Pointer(&got[0]), p, trialBytes, 0))
	bind()
	require.Equal(t, cudadrv.Success, s.Driver.StreamSynchronize(0))
	if n != trialBytes || !bytes.Equal(got, bytes.Repeat([]byte("cufile 8"), trialBytes/8)) {
		return fmt.Sprintf("registers, but cuFileRead brings %d bytes that are not the file's", n)
	}
	return "reads"
}
