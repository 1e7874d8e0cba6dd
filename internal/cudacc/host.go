package cudacc

import (
	"bytes"
	"context"
	_ "embed"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/gochorus/chorus/internal/safe"
)

//go:embed src/shim.h
var shim string

//go:embed src/block.h
var block string

//go:embed src/cores.h
var cores string

//go:embed src/main.cc
var main string

// HostShim has the names of CUDA that functions for one thread need, which set
// blockIdx and threadIdx themselves.
func HostShim() string { return shim }

// BuildHost compiles C++ with floating-point contraction disabled, as in Go.
// Without g++ the error matches exec.ErrNotFound.
func BuildHost(ctx context.Context, code string, flags ...string) (*HostProgram, error) {
	cxx, err := compiler()
	if err != nil {
		return nil, err
	}
	p, err := newProgram()
	if err != nil {
		return nil, err
	}
	file := p.Path + ".cc"
	err = os.WriteFile(file, []byte(code), 0o600)
	if err == nil {
		// Fortified jumps refuse another stack, and each fiber has its own.
		args := append([]string{"-std=c++17", "-O1", "-ffp-contract=off", "-U_FORTIFY_SOURCE"}, flags...)
		var out []byte
		if out, err = exec.CommandContext(ctx, cxx, append(args, "-o", p.Path, file)...).CombinedOutput(); err != nil {
			err = fmt.Errorf("cudacc: compile for the host: %w:\n%s", errors.Join(err, context.Cause(ctx)), out)
		}
	}
	return p.open(err)
}

func compiler() (string, error) {
	cxx, err := exec.LookPath("g++")
	if err != nil {
		err = fmt.Errorf("cudacc: compile for the host: needs a C++ compiler: %w", err)
	}
	return cxx, err
}

// HostKey returns the key of a program in a safe.Store. It has the compiler and
// what CompileHost adds to a source; the caller adds the rest. Without g++ the
// error matches exec.ErrNotFound.
func HostKey() (*safe.Key, error) {
	cxx, err := compiler()
	if err != nil {
		return nil, err
	}
	st, err := os.Stat(cxx)
	if err != nil {
		return nil, err
	}
	return safe.NewKey("host 3", cxx, fmt.Sprint(st.Size(), st.ModTime().UnixNano()), shim, block, cores, main), nil
}

// StoredHostProgram returns the program that the user's store has under a key, or builds it and stores it.
func StoredHostProgram(key string, build func() (*HostProgram, error)) (*HostProgram, error) {
	store := safe.UserStore()
	if image, ok := store.Load(key); ok {
		if p, err := load(image); err == nil {
			return p, nil
		}
	}
	p, err := build()
	if err != nil {
		return nil, err
	}
	if image, err := os.ReadFile(p.Path); err == nil {
		store.Save(key, image)
	}
	return p, nil
}

// A HostProgram has the kernels of a source.
type HostProgram struct {
	// Seconds limits the processor time of a run; 0 does not. Unlike a deadline, it does not depend on what else the
	// machine does.
	Seconds uint64
	Path    string // of the executable file, until Close or the end of this process
	file    *os.File
}

func newProgram() (*HostProgram, error) {
	folder, err := os.MkdirTemp("", "chorus-host-")
	return &HostProgram{Path: filepath.Join(folder, "host")}, err
}

// open returns the program, whose file has been written unless there is an error. It removes the file's directory and
// keeps the file open, so that nothing of it is left when the process ends, however that happens.
func (p *HostProgram) open(err error) (*HostProgram, error) {
	folder := filepath.Dir(p.Path)
	if err == nil {
		p.file, err = os.Open(p.Path)
	}
	if err = errors.Join(err, os.RemoveAll(folder)); err != nil {
		return nil, errors.Join(err, p.Close())
	}
	p.Path = fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), p.file.Fd())
	return p, nil
}

// ErrProcessorTime is matched by the error of a run that needed more processor time than HostProgram.Seconds.
var ErrProcessorTime = errors.New("the kernel needs more processor time than it may use")

// dynamic matches the declaration of dynamic shared memory.
var dynamic = regexp.MustCompile(`extern\s+__shared__\s+(?:__align__\(\s*\d+\s*\)\s*)?([\w:][\w:\s]*?)\s+(\w+)\s*\[\s*\]\s*;`)

// CompileHost compiles a CUDA source with the named kernels, whose parameters have types that can
// be copied. Of NVRTC's options it uses the definitions of macros and the include paths.
func CompileHost(ctx context.Context, cuda string, options, kernels []string) (*HostProgram, error) {
	cuda = dynamic.ReplaceAllString(cuda, "$1* const $2 = ($1*)dynamicShared.data();")
	list := "-DKERNELS="
	for _, k := range kernels {
		list += "KERNEL(" + k + ")"
	}
	// A misaligned access stops the program, as on a GPU. Integers wrap around.
	flags := append(hostFlags(options), "-w", "-fwrapv", "-fsanitize=alignment", "-fsanitize-undefined-trap-on-error", list)
	return BuildHost(ctx, shim+block+cores+"#line 1 \"source\"\n"+cuda+main, flags...)
}

// hostFlags returns the options of NVRTC that a C++ compiler of the host has, too.
func hostFlags(options []string) (flags []string) {
	for i := 0; i < len(options); i++ {
		o := strings.NewReplacer("--define-macro=", "-D", "--undefine-macro=", "-U", "--include-path=", "-I").Replace(options[i])
		if len(o) < 2 || o[0] != '-' || !strings.ContainsRune("DUI", rune(o[1])) {
			continue
		}
		flags = append(flags, o)
		if len(o) == 2 && i+1 < len(options) {
			i++
			flags = append(flags, options[i])
		}
	}
	return flags
}

// load returns the program of an image.
func load(image []byte) (*HostProgram, error) {
	p, err := newProgram()
	if err != nil {
		return nil, err
	}
	syscall.ForkLock.RLock() // a child of another goroutine would have the file open for writing until its exec: text file busy
	err = os.WriteFile(p.Path, image, 0o700)
	syscall.ForkLock.RUnlock()
	return p.open(err)
}

// IsSyntaxError reports whether the compiler of the host found only mistakes that every C++ compiler
// finds, and not names of CUDA that it does not know.
func IsSyntaxError(err error) bool {
	found := false
	for _, line := range strings.Split(err.Error(), "\n") {
		if !strings.Contains(line, "error: ") {
			continue
		}
		if !strings.HasPrefix(line, "source:") || !syntax.MatchString(line) {
			return false
		}
		found = true
	}
	return found
}

var syntax = regexp.MustCompile(`error: (expected [^ ]*[;)}(\]][^ ]*|expected ['‘][^ ]* (before|at end)|stray |unterminated |missing terminating|expected .*(at end of input|before .* token))`)

// Close removes the program.
func (p *HostProgram) Close() error {
	if p.file == nil {
		return nil
	}
	return p.file.Close()
}

// A HostArg is the value of a parameter: the bytes of a number or a struct, or memory.
type HostArg struct {
	Value  []byte
	Memory []byte // Run overwrites it
	Before int    // bytes of Memory before the address that the kernel gets
	Null   bool   // a null pointer
	// Owner is the number, from 1, of an earlier pointer among the pointers, if the argument is a
	// pointer to its memory. Before then counts from the start of that memory.
	Owner int
}

// Run runs a kernel, whose blocks have at most 1024 threads, and kills it when
// ctx ends.
func (p *HostProgram) Run(ctx context.Context, kernel string, blocks, threads [3]uint32, shared uint32, args []HostArg) error {
	var in bytes.Buffer
	word := func(n uint32) { in.Write(binary.LittleEndian.AppendUint32(nil, n)) }
	word(uint32(len(kernel)))
	in.WriteString(kernel)
	for _, n := range []uint32{blocks[0], blocks[1], blocks[2], threads[0], threads[1], threads[2], shared} {
		word(n)
	}
	size := 0
	for _, a := range args {
		in.Write(a.Value)
		if a.Memory != nil || a.Null || a.Owner > 0 {
			in.Write(binary.LittleEndian.AppendUint64(nil, uint64(len(a.Memory))))
			in.Write(binary.LittleEndian.AppendUint64(nil, uint64(a.Before)))
			in.Write(binary.LittleEndian.AppendUint64(nil, uint64(a.Owner)))
			in.Write(a.Memory)
			size += len(a.Memory)
		}
	}
	cmd := exec.CommandContext(ctx, p.Path, strconv.Itoa(os.Getpid()))
	var out, messages bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = &in, &out, &messages
	if err := p.execute(cmd); err != nil {
		return fmt.Errorf("cudacc: run %s on the host: %w: %s", kernel, errors.Join(err, context.Cause(ctx)), messages.Bytes())
	}
	if out.Len() != size {
		return fmt.Errorf("cudacc: run %s on the host: it wrote %d bytes: want the %d bytes of its memory", kernel, out.Len(), size)
	}
	for _, a := range args {
		copy(a.Memory, out.Next(len(a.Memory)))
	}
	return nil
}

// execute runs the program with its limit of processor time.
func (p *HostProgram) execute(cmd *exec.Cmd) error {
	if err := cmd.Start(); err != nil {
		return err
	}
	if p.Seconds > 0 {
		limit := unix.Rlimit{Cur: p.Seconds, Max: p.Seconds + 1} // the first one sends SIGXCPU, the second one SIGKILL
		if err := unix.Prlimit(cmd.Process.Pid, unix.RLIMIT_CPU, &limit, nil); err != nil && !errors.Is(err, unix.ESRCH) {
			_ = cmd.Process.Kill()
			return errors.Join(err, cmd.Wait())
		}
	}
	err := cmd.Wait()
	if status, ok := cmd.ProcessState.Sys().(syscall.WaitStatus); ok && status.Signaled() && status.Signal() == syscall.SIGXCPU {
		return errors.Join(ErrProcessorTime, err)
	}
	return err
}
