package doctor

import (
	"context"
	"fmt"
	"io/fs"
	"os"
)

var otherProcesses = &Check{
	ID: "other-processes", Scope: ScopeGPU, Source: "nvmlDeviceGetComputeRunningProcesses, nvmlDeviceGetMemoryInfo",
	Hazard: "Another process uses the GPU.",
	Needs:  []string{"device-nodes", "driver-mismatch"},
	Run:    perGPU(checkProcesses),
}

// mostUsed is the memory that an idle GPU has in use at most.
const mostUsed = 1 << 30

func checkProcesses(_ context.Context, h *Host, g *GPU) Result {
	const want = "no other process"
	list, err := g.Processes()
	if err != nil {
		return unread(err)
	}
	hidden := false
	for _, p := range list {
		if _, err := fs.Stat(h.Root, fmt.Sprintf("proc/%d", p.PID)); err != nil && h.inContainer() {
			hidden = true // NVML has the PIDs of the host
			continue
		}
		if p.PID != os.Getpid() && !h.isDoctor(p.PID) {
			return warn(fmt.Sprintf("process %d uses %s", p.PID, bytesText(p.Bytes)), want, "the job shares memory and time with it",
				"end the process, or choose other GPUs by CUDA_VISIBLE_DEVICES")
		}
	}
	used, err := g.MemoryUsed()
	switch {
	case err != nil:
		return unread(err)
	case hidden:
		return unknown(fmt.Sprintf("a process uses the GPU, with %s in use, and this container does not see whether it is of this job: run chorus doctor on the host, or in its PID namespace (docker run --pid=host)", bytesText(used)))
	case used > mostUsed && len(list) == 0:
		return warn(bytesText(used)+" in use by a process that is not visible here", want, "the job has less memory than the GPU",
			"search the host for processes with /dev/nvidia* open: fuser -v /dev/nvidia*")
	}
	return pass(bytesText(used)+" in use", want)
}

// inContainer reports whether this process is in a PID namespace other than the first one.
func (h *Host) inContainer() bool {
	const first = "pid:[4026531836]" // PROC_PID_INIT_INO of the kernel
	own, err := fs.ReadLink(h.Root, "proc/self/ns/pid")
	return err == nil && own != first
}

// isDoctor reports whether a process runs the same program as this one: the other ranks of a
// job of doctors.
func (h *Host) isDoctor(pid int) bool {
	other, err := h.read(fmt.Sprintf("proc/%d/cmdline", pid))
	if err != nil || other == "" {
		return false
	}
	own, err := h.read("proc/self/cmdline")
	return err == nil && own == other
}
