package job

import (
	"bytes"
	"fmt"
	"os"
	"strconv"
)

// A Process is what /proc/<pid>/stat says about a process. It is zero if the process does not exist.
type Process struct {
	Name   string // of its program, shortened by the kernel
	State  byte   // such as 'Z'
	Parent int
}

// ProcessOf returns the state of a process of this machine.
func ProcessOf(pid int) Process {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return Process{}
	}
	return parseStat(b)
}

// parseStat parses "pid (name) state parent ...", where the name may itself
// contain parentheses.
func parseStat(b []byte) Process {
	first, last := bytes.IndexByte(b, '('), bytes.LastIndexByte(b, ')')
	if first < 0 || last < first {
		return Process{}
	}
	f := bytes.Fields(b[last+1:])
	if len(f) < 2 {
		return Process{}
	}
	parent, _ := strconv.Atoi(string(f[1]))
	return Process{string(b[first+1 : last]), f[0][0], parent}
}

// IsStopped reports whether SIGSTOP or a debugger has stopped the process.
func (p Process) IsStopped() bool { return p.State == 'T' || p.State == 't' }
