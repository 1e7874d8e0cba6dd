package health

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"path"
	"slices"
	"strconv"
	"strings"

	"github.com/gochorus/chorus/internal/env"
)

// noLimit is the value of a limit that is not set.
const noLimit = math.MaxUint64

// limit returns the soft and the hard limit of this process by its name in /proc/self/limits.
func (h *Host) limit(name string) (soft, hard uint64, err error) {
	const file = "proc/self/limits"
	text, err := h.read(file)
	if err != nil {
		return 0, 0, err
	}
	for line := range strings.Lines(text) {
		rest, ok := strings.CutPrefix(line, name)
		f := strings.Fields(rest)
		if !ok || len(f) < 2 {
			continue
		}
		if soft, err = parseLimit(f[0]); err == nil {
			hard, err = parseLimit(f[1])
		}
		return soft, hard, err
	}
	return 0, 0, fmt.Errorf("/%s has no line %q", file, name)
}

// parseLimit parses a limit of /proc or of a cgroup.
func parseLimit(s string) (uint64, error) {
	if s == "unlimited" || s == "max" {
		return noLimit, nil
	}
	n, err := strconv.ParseUint(s, 10, 64)
	if err != nil {
		return 0, fmt.Errorf("the limit %q: want a number", s)
	}
	return n, nil
}

// limitText writes a limit in bytes.
func limitText(n uint64) string {
	if n == noLimit {
		return "unlimited"
	}
	return bytesText(n)
}

// status returns a field of /proc/self/status.
func (h *Host) status(field string) (string, error) {
	const file = "proc/self/status"
	text, err := h.read(file)
	if err != nil {
		return "", err
	}
	for line := range strings.Lines(text) {
		if v, ok := strings.CutPrefix(line, field+":"); ok {
			return strings.TrimSpace(v), nil
		}
	}
	return "", fmt.Errorf("/%s has no field %s", file, field)
}

// hasCapability reports whether this process has a capability of Linux.
func (h *Host) hasCapability(number int) (bool, error) {
	v, err := h.status("CapEff")
	if err != nil {
		return false, err
	}
	set, err := strconv.ParseUint(v, 16, 64)
	return set>>number&1 != 0, err
}

// parseCPUs returns the numbers of a list such as 0-3,8.
func parseCPUs(list string) (map[int]bool, error) {
	cpus := map[int]bool{}
	for part := range strings.SplitSeq(strings.TrimSpace(list), ",") {
		if part == "" {
			continue
		}
		from, to, isRange := strings.Cut(part, "-")
		if !isRange {
			to = from
		}
		a, err := strconv.Atoi(from)
		b, err2 := strconv.Atoi(to)
		if err != nil || err2 != nil || a < 0 || b < a || b > 1<<16 {
			return nil, fmt.Errorf("the list of processors %q: want ranges such as 0-3,8", list)
		}
		for ; a <= b; a++ {
			cpus[a] = true
		}
	}
	return cpus, nil
}

var memlock = &Check{
	ID: "memlock", Scope: ScopeHost, Source: "/proc/self/limits, /proc/self/status, /sys/class/infiniband",
	Hazard: "The limit of locked memory breaks RDMA.",
	Run:    one(checkMemlock),
}

func checkMemlock(h *Host) Result {
	soft, _, err := h.limit("Max locked memory")
	if err != nil {
		return unread(err)
	}
	const want = "unlimited if the host has RDMA"
	if soft == noLimit {
		return pass("unlimited", want)
	}
	found := limitText(soft)
	const ipcLock = 14
	free, err := h.hasCapability(ipcLock)
	switch {
	case !h.hasRDMA():
		return pass(found+", and no RDMA device", want)
	case err != nil:
		return unread(err)
	case free:
		return pass(found+", and CAP_IPC_LOCK", want)
	}
	return fail(found, want, "RDMA cannot register memory, so NCCL's start fails",
		"docker run --ulimit memlock=-1; systemd: LimitMEMLOCK=infinity; Slurm: PropagateResourceLimitsExcept=MEMLOCK")
}

// hasRDMA reports whether the host has a device for RDMA.
func (h *Host) hasRDMA() bool {
	list, _ := fs.ReadDir(h.Root, rdmaDir)
	return len(list) > 0
}

const rdmaDir = "sys/class/infiniband"

var openFiles = &Check{
	ID: "open-files", Scope: ScopeHost, Source: "/proc/self/limits",
	Hazard: "The limit of open files is too low for the connections of many ranks.",
	Run:    one(checkOpenFiles),
}

// wantedFiles is enough for a few hundred ranks.
const wantedFiles = 65536

// checkOpenFiles reads the hard limit, because programs in Go raise their soft limit to it.
func checkOpenFiles(h *Host) Result {
	_, hard, err := h.limit("Max open files")
	if err != nil {
		return unread(err)
	}
	found, want := fmt.Sprintf("hard limit %d", hard), fmt.Sprintf("%d or more", wantedFiles)
	if hard == noLimit {
		found = "unlimited"
	}
	if hard < wantedFiles {
		return warn(found, want, "NCCL and the connections of many ranks need more files", "systemd: LimitNOFILE=131072; docker run --ulimit nofile=131072; ulimit -n")
	}
	return pass(found, want)
}

var processes = &Check{
	ID: "processes", Scope: ScopeHost, Source: "pids.max of the cgroup, /proc/self/limits",
	Hazard: "The limit of processes and threads is too low for the ranks.",
	Run:    one(checkThreads),
}

// threadsOfRank is the number of threads that CUDA, NCCL and Go need in a rank.
const threadsOfRank = 256

func checkThreads(h *Host) Result {
	dirs, _, err := h.cgroups("pids")
	if err != nil {
		return unread(err)
	}
	most, err := h.smallest(dirs, "pids.max", number)
	if err != nil {
		return unread(err)
	}
	soft, _, err := h.limit("Max processes")
	if err != nil {
		return unread(err)
	}
	most = min(most, float64(soft))
	want := fmt.Sprintf("%d for each of %s", threadsOfRank, plural(h.ranks(), "rank"))
	switch {
	case most == noLimit:
		return pass("unlimited", want)
	case most < float64(threadsOfRank*h.ranks()):
		return warn(fmt.Sprintf("%.0f threads", most), want, "CUDA, NCCL or the program cannot start a thread", "docker run --pids-limit=-1; systemd: TasksMax=infinity; ulimit -u")
	}
	return pass(fmt.Sprintf("%.0f threads", most), want)
}

// cgroups returns the folders of this process's control groups for a controller, the innermost
// first, and whether they have the files of version 2.
func (h *Host) cgroups(controller string) (dirs []string, v2 bool, err error) {
	text, err := h.read("proc/self/cgroup")
	if err != nil {
		return nil, false, err
	}
	place, found := "", false
	for line := range strings.Lines(text) {
		f := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(f) != 3 {
			continue
		}
		switch {
		case slices.Contains(strings.Split(f[1], ","), controller):
			place, found, v2 = f[2], true, false
		case f[0] == "0" && f[1] == "" && !found:
			place, found, v2 = f[2], true, true
		}
	}
	if !found {
		return nil, false, fmt.Errorf("/proc/self/cgroup has no group of the controller %s", controller)
	}
	root := "sys/fs/cgroup"
	if !v2 {
		root += "/" + controller
	}
	for dir := path.Clean("/" + place); ; dir = path.Dir(dir) {
		dirs = append(dirs, path.Join(root, dir))
		if dir == "/" {
			return dirs, v2, nil
		}
	}
}

// smallest returns the smallest value of a file in the control groups, which
// parse reads from its text, and noLimit if no group has the file.
func (h *Host) smallest(dirs []string, name string, parse func(string) (float64, error)) (float64, error) {
	least := float64(noLimit)
	for _, dir := range dirs {
		text, err := h.read(dir + "/" + name)
		if absent(err) { // such as the root, or a group outside of the container
			continue
		}
		if err != nil {
			return 0, err
		}
		v, err := parse(text)
		if err != nil {
			return 0, fmt.Errorf("/%s/%s: %w", dir, name, err)
		}
		least = min(least, v)
	}
	return least, nil
}

// number parses a limit as a float.
func number(text string) (float64, error) {
	n, err := parseLimit(text)
	return float64(n), err
}

var cgroupCPU = &Check{
	ID: "cgroup-cpu", Scope: ScopeHost, Source: "cpu.max of the cgroup, /proc/self/status",
	Hazard: "The ranks share too few processors.",
	Run:    one(checkCPU),
}

// cpusOfRank is the number of processors that a rank needs: one for the program and one for
// NCCL's threads.
const cpusOfRank = 2

func checkCPU(h *Host) Result {
	list, err := h.status("Cpus_allowed_list")
	if err != nil {
		return unread(err)
	}
	allowed, err := parseCPUs(list)
	if err != nil {
		return unread(err)
	}
	quota, err := h.cpuQuota()
	if err != nil {
		return unread(err)
	}
	cpus, ranks := min(float64(len(allowed)), quota), h.ranks()
	found := fmt.Sprintf("%.4g processors for %s", cpus, plural(ranks, "rank"))
	want := fmt.Sprintf("%d for each rank", cpusOfRank)
	if cpus < float64(cpusOfRank*ranks) {
		return warn(found, want, "ranks wait for each other while the kernel switches between them",
			"docker run --cpus; Kubernetes: resources.limits.cpu; Slurm: --cpus-per-task; or start fewer ranks")
	}
	return pass(found, want)
}

// cpuQuota returns the processors' time that the control groups allow, in processors.
func (h *Host) cpuQuota() (float64, error) {
	dirs, v2, err := h.cgroups("cpu")
	if err != nil {
		return 0, err
	}
	if v2 {
		return h.smallest(dirs, "cpu.max", parseQuota)
	}
	least := float64(noLimit)
	for _, dir := range dirs {
		quota, err := h.readInt(dir + "/cpu.cfs_quota_us")
		if absent(err) || err == nil && quota <= 0 { // -1: no limit
			continue
		}
		period, err2 := h.readInt(dir + "/cpu.cfs_period_us")
		if err != nil || err2 != nil || period <= 0 {
			return 0, fmt.Errorf("/%s has no readable quota", dir)
		}
		least = min(least, float64(quota)/float64(period))
	}
	return least, nil
}

// parseQuota reads "quota period" in µs.
func parseQuota(text string) (float64, error) {
	f := strings.Fields(text)
	if len(f) != 2 {
		return 0, fmt.Errorf("%q: want a quota and a period", text)
	}
	if f[0] == "max" {
		return noLimit, nil
	}
	quota, err := strconv.ParseFloat(f[0], 64)
	period, err2 := strconv.ParseFloat(f[1], 64)
	if err != nil || err2 != nil || period <= 0 {
		return 0, fmt.Errorf("%q: want a quota and a period", text)
	}
	return quota / period, nil
}

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

var stack = &Check{
	ID: "stack", Scope: ScopeHost, Source: "/proc/self/limits",
	Hazard: "An unlimited stack gives NCCL's threads small stacks.",
	Run: one(func(h *Host) Result {
		soft, _, err := h.limit("Max stack size")
		switch {
		case err != nil:
			return unread(err)
		case soft == noLimit:
			return warn("unlimited", "8 MiB", "the C library then gives new threads 2 MiB, which NCCL may exceed", "ulimit -s 8192")
		}
		return pass(limitText(soft), "a limit")
	}),
}

var pinned = &Check{
	ID: "pinned", Scope: ScopeHost, Source: "cuMemHostAlloc of 64 MiB and of CHORUS_GDS_PINNED",
	Hazard:   "The host cannot pin the memory that transfers need.",
	Measures: true,
	Run: one(func(h *Host) Result {
		return judge(h, func(m *Measured) Speed { return m.Pinned }, "64 MiB, and CHORUS_GDS_PINNED", "copies and checkpoints fail or are slow",
			"raise the memory limit of the container, or lower CHORUS_GDS_PINNED")
	}),
}

var numa = &Check{
	ID: "numa", Scope: ScopeGPU, Source: "numa_node and local_cpulist of the GPU, /proc/self/status",
	Hazard: "The process runs on processors that are far from the GPU.",
	Needs:  []string{"device-nodes", "driver-mismatch"},
	Run:    perGPU(checkNUMA),
}

func checkNUMA(_ context.Context, h *Host, g *gpu) Result {
	const want = "a processor on the GPU's node"
	if online, err := h.read("sys/devices/system/node/online"); err == nil && online == "0" {
		return pass("one NUMA node", want)
	}
	id, err := g.PCIBusID()
	if err != nil {
		return unread(err)
	}
	node, err := h.readInt("sys/bus/pci/devices/" + id + "/numa_node")
	if err != nil {
		return unread(err)
	}
	if node < 0 {
		return unknown("the firmware does not report the GPU's NUMA node")
	}
	near, err := h.cpusOf("sys/bus/pci/devices/" + id + "/local_cpulist")
	list, err2 := h.status("Cpus_allowed_list")
	allowed, err3 := parseCPUs(list)
	if err := errors.Join(err, err2, err3); err != nil {
		return unread(err)
	}
	for cpu := range allowed {
		if near[cpu] {
			return pass(fmt.Sprintf("node %d", node), want)
		}
	}
	return warn(fmt.Sprintf("processors %s, and the GPU is on node %d", list, node), want, "copies between host and GPU cross the sockets",
		fmt.Sprintf("numactl --cpunodebind=%d, or srun --cpu-bind", node))
}

func (h *Host) cpusOf(file string) (map[int]bool, error) {
	list, err := h.read(file)
	if err != nil {
		return nil, err
	}
	return parseCPUs(list)
}

var hugePages = &Check{
	ID: "huge-pages", Scope: ScopeHost, Source: "/proc/meminfo",
	Hazard: "Reserved huge pages leave too little memory for programs.",
	Run:    one(checkHugePages),
}

func checkHugePages(h *Host) Result {
	text, err := h.read("proc/meminfo")
	if err != nil {
		return unread(err)
	}
	var v [3]uint64
	for i, name := range []string{"MemTotal:", "HugePages_Total:", "Hugepagesize:"} {
		if v[i], err = meminfo(text, name); err != nil {
			return unread(err)
		}
	}
	const kib = 1 << 10
	total, huge := v[0]*kib, v[1]*v[2]*kib
	found := fmt.Sprintf("%s of %s reserved", bytesText(huge), bytesText(total))
	if huge > total/2 {
		return warn(found, "less than half", "memory cannot be pinned, because CUDA does not pin huge pages of the reserve", "sysctl vm.nr_hugepages=0")
	}
	return pass(found, "less than half")
}

// meminfo returns the number of a line of /proc/meminfo.
func meminfo(text, name string) (uint64, error) {
	for line := range strings.Lines(text) {
		if rest, ok := strings.CutPrefix(line, name); ok {
			if f := strings.Fields(rest); len(f) > 0 {
				return strconv.ParseUint(f[0], 10, 64)
			}
		}
	}
	return 0, fmt.Errorf("/proc/meminfo has no line %s", name)
}
