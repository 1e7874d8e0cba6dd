package doctor

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/gochorus/chorus/internal/env"
)

var cgroupMemory = &Check{
	ID: "cgroup-memory", Scope: ScopeHost, Source: "memory.max and memory.events of the cgroup",
	Hazard: "The memory limit of the container is too low, or it ended a process.",
	Run:    one(checkMemory),
}

// memoryOfRank is the host memory of a rank besides pinned memory for files.
const memoryOfRank = 2 << 30

func checkMemory(h *Host) Result {
	dirs, v2, err := h.cgroups("memory")
	if err != nil {
		return unread(err)
	}
	name := "memory.limit_in_bytes"
	if v2 {
		name = "memory.max"
	}
	limit, err := h.smallest(dirs, name, number)
	if err != nil {
		return unread(err)
	}
	need := h.pinned() + memoryOfRank*uint64(h.ranks())
	want := fmt.Sprintf("%s for %s", bytesText(need), plural(h.ranks(), "rank"))
	const unlimited = 1 << 62 // of version 1, rounded to pages
	found := "no limit"
	if limit < unlimited {
		found = bytesText(uint64(limit))
	}
	if limit < float64(need) {
		return fail(found, want, "the kernel ends ranks, or memory cannot be pinned", "docker run --memory; Kubernetes: resources.limits.memory; /dev/shm counts, too")
	}
	if kills := h.oomKills(dirs[0]); kills > 0 {
		return warn(fmt.Sprintf("%s, and the kernel ended %d processes", found, kills), want, "the limit was reached", "raise the memory limit, or start fewer ranks")
	}
	return pass(found, want)
}

// pinned returns the memory that Chorus pins for files at most.
func (h *Host) pinned() uint64 {
	text := h.getenv(env.GDSPinned.Name)
	if text == "" {
		text = env.GDSPinned.Default
	}
	n, _ := strconv.ParseUint(strings.TrimSpace(text), 10, 64) // a wrong value is an error of gds
	return n
}

// oomKills returns how many processes of the group the kernel ended, or 0 if it is not known.
func (h *Host) oomKills(dir string) int {
	for _, name := range []string{"/memory.events", "/memory.oom_control"} {
		text, _ := h.read(dir + name)
		for line := range strings.Lines(text) {
			if v, ok := strings.CutPrefix(line, "oom_kill "); ok {
				n, _ := strconv.Atoi(strings.TrimSpace(v))
				return n
			}
		}
	}
	return 0
}
