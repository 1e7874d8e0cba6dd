package health

import (
	"context"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"time"
	"unsafe"

	"github.com/gochorus/chorus/internal/ncclapi"
)

var disk = &Check{
	ID: "disk", Scope: ScopeHost, Source: "256 MiB written to a file in the current directory, past the page cache",
	Hazard:   "The disk of the current directory is slow or almost full, so checkpoints are slow or fail.",
	Measures: true,
	Run:      func(ctx context.Context, h *Host) []Result { return []Result{checkDisk(ctx, h)} },
}

// Limits of a disk for checkpoints.
const (
	leastWrite = 1e9      // bytes a second
	leastFree  = 16 << 30 // bytes
)

func checkDisk(ctx context.Context, h *Host) Result {
	const want, cure = "1 GB/s and 16 GiB free", "write checkpoints to a local NVMe disk or a parallel file system"
	s, err := h.spaceOf(".")
	if err != nil {
		return unread(err)
	}
	if s.Free < leastFree {
		return warn(bytesText(s.Free)+" free", want, "a checkpoint may not fit", "remove files, or choose another directory")
	}
	speed, err := h.writeSpeed(ctx, ".")
	if err != nil {
		return unread(err)
	}
	found := fmt.Sprintf("%.1f GB/s, %s free", speed/1e9, bytesText(s.Free))
	if speed < leastWrite {
		return warn(found, want, "saving a checkpoint takes long", cure)
	}
	return pass(found, want)
}

var gds = &Check{
	ID: "gds", Scope: ScopeHost, Source: "/proc/driver/nvidia-fs, /run/udev/data, /proc/self/mountinfo",
	Hazard: "GPUDirect Storage is installed, and cuFile cannot use it.",
	Run:    one(checkGDS),
}

// directSystems are the file systems that nvidia-fs supports.
var directSystems = []string{"ext4", "xfs", "lustre", "nfs", "nfs4", "gpfs", "beegfs", "wekafs", "scatefs"}

func checkGDS(h *Host) Result {
	const want = "nvidia-fs with a readable udev database, or neither"
	kind, err := h.fileSystem(h.getenv("PWD"))
	if err != nil {
		return unread(err)
	}
	_, err = fs.Stat(h.Root, "proc/driver/nvidia-fs/version")
	if absent(err) {
		return pass(fmt.Sprintf("no nvidia-fs: files on %s pass through host memory", kind), want)
	}
	if err != nil {
		return unread(rooted(err))
	}
	entries, err := fs.ReadDir(h.Root, "run/udev/data")
	if err != nil || len(entries) == 0 {
		return warn("nvidia-fs, and /run/udev/data is empty or not readable", want, "cuFile does not find the disks, and uses host memory",
			"mount /run/udev of the host into the container, read-only")
	}
	for _, s := range directSystems {
		if s == kind {
			return pass("nvidia-fs, and the current folder is on "+kind, want)
		}
	}
	return pass(fmt.Sprintf("nvidia-fs, and the current folder is on %s, which it does not support", kind), want)
}

// fileSystem returns the type of the file system of a folder: the mount with the longest path.
func (h *Host) fileSystem(folder string) (string, error) {
	text, err := h.read("proc/self/mountinfo")
	if err != nil {
		return "", err
	}
	folder = path.Clean("/" + folder)
	kind, longest := "", -1
	for line := range strings.Lines(text) {
		left, right, ok := strings.Cut(line, " - ")
		f, g := strings.Fields(left), strings.Fields(right)
		if !ok || len(f) < 5 || len(g) < 1 {
			continue
		}
		at := f[4]
		if (at == "/" || folder == at || strings.HasPrefix(folder, at+"/")) && len(at) >= longest {
			kind, longest = g[0], len(at)
		}
	}
	if kind == "" {
		return "", fmt.Errorf("/proc/self/mountinfo has no mount for %s", folder)
	}
	return kind, nil
}

const (
	writtenBytes = 256 << 20
	writtenPart  = 8 << 20
	alignment    = 4096 // of memory and lengths for O_DIRECT
)

// writeSpeed writes a temporary file and returns the bytes a second, until they are on the disk. It
// bypasses the page cache if the file system supports that.
func writeSpeed(ctx context.Context, dir string) (float64, error) {
	f, err := os.CreateTemp(dir, ".chorus-doctor-*")
	if err != nil {
		return 0, err
	}
	defer f.Close()
	defer os.Remove(f.Name())
	if direct, err := os.OpenFile(f.Name(), os.O_WRONLY|syscall.O_DIRECT, 0); err == nil {
		defer direct.Close()
		f = direct
	}
	part := aligned(writtenPart)
	for i := range part {
		part[i] = byte(i * 7) // no zeros, which a file system may not store
	}
	begin, n := time.Now(), 0
	for ; n < writtenBytes && ctx.Err() == nil; n += len(part) {
		if _, err := f.Write(part); err != nil {
			return 0, err
		}
	}
	if err := f.Sync(); err != nil {
		return 0, err
	}
	return float64(n) / time.Since(begin).Seconds(), nil
}

// aligned returns memory for direct writes.
func aligned(n int) []byte {
	b := make([]byte, n+alignment)
	skip := alignment - int(uintptr(unsafe.Pointer(&b[0]))%alignment)
	return b[skip : skip+n]
}

var libraryCopies = &Check{
	ID: "library-copies", Scope: ScopeHost, Source: "loaded NCCL, LD_LIBRARY_PATH, LD_PRELOAD, /proc/self/maps",
	Hazard: "Programs of the job load different copies of NCCL.",
	Run:    one(checkCopies),
}

var ncclPlugin = regexp.MustCompile(`^libnccl-(net|tuner|profiler)`)

func checkCopies(h *Host) Result {
	if reason := h.noGPU(); reason != "" {
		return unknown(reason)
	}
	lib, err := h.nccl()
	if err != nil {
		return unread(err)
	}
	copies, plugins := h.ncclFiles()
	found := fmt.Sprintf("NCCL %s in %s", lib.Version, lib.Path)
	if len(plugins) > 0 {
		found += ", and the plugins " + strings.Join(plugins, ", ")
	}
	for _, other := range copies {
		if other != lib.Path {
			return warn(found+"; another copy is "+other, "one copy", "ranks in other programs may load the other copy, and NCCL's versions must be equal in a job",
				"set CHORUS_LIBNCCL="+lib.Path+" on all hosts, or remove the folder from LD_LIBRARY_PATH")
		}
	}
	return pass(found, "one copy")
}

// ncclFiles returns the copies of NCCL that the loader finds by variables or that are mapped, and
// the plugins in the same folders.
func (h *Host) ncclFiles() (copies, plugins []string) {
	for _, dir := range filepath.SplitList(h.getenv("LD_LIBRARY_PATH")) {
		entries, _ := fs.ReadDir(h.Root, strings.Trim(filepath.Clean("/"+dir), "/"))
		for _, e := range entries {
			switch path := filepath.Join("/", dir, e.Name()); {
			case strings.HasPrefix(e.Name(), "libnccl.so"):
				copies = append(copies, h.target(path))
			case ncclPlugin.MatchString(e.Name()):
				plugins = append(plugins, h.target(path))
			}
		}
	}
	for _, path := range strings.FieldsFunc(h.getenv("LD_PRELOAD"), func(r rune) bool { return r == ':' || r == ' ' }) {
		if strings.Contains(path, "libnccl.so") {
			copies = append(copies, h.target(path))
		}
	}
	maps, _ := h.read("proc/self/maps")
	for line := range strings.Lines(maps) {
		if f := strings.Fields(line); len(f) == 6 && strings.Contains(f[5], "/libnccl.so") {
			copies = append(copies, f[5])
		}
	}
	slices.Sort(copies)
	slices.Sort(plugins)
	return slices.Compact(copies), slices.Compact(plugins)
}

// target returns the file behind a path of links in one folder, as links of libraries are.
func (h *Host) target(path string) string {
	for range 8 {
		to, err := fs.ReadLink(h.Root, strings.TrimPrefix(path, "/"))
		if err != nil {
			return path
		}
		if !filepath.IsAbs(to) {
			to = filepath.Join(filepath.Dir(path), to)
		}
		path = to
	}
	return path
}

var ncclDefects = &Check{
	ID: "nccl-defects", Scope: ScopeHost, Source: "loaded NCCL, table of its known defects",
	Hazard: "The loaded NCCL has a known defect that a program can meet.",
	Run:    one(checkDefects),
}

// checkDefects warns of the first defect that a program can meet, and counts the others: chorus info lists all.
func checkDefects(h *Host) Result {
	if reason := h.noGPU(); reason != "" {
		return unknown(reason)
	}
	lib, err := h.nccl()
	if err != nil {
		return unread(err)
	}
	version, err := ncclapi.ParseVersion(lib.Version)
	if err != nil {
		return unknown(fmt.Sprintf("NCCL's version is %q: want %v", lib.Version, err))
	}
	return verdict(lib.Version, ncclapi.DefectsOf(version))
}

func verdict(version string, list []*ncclapi.Defect) Result {
	const want = "no known defect that a program can meet"
	open := 0
	for _, d := range list {
		if d.Open {
			open++
		}
	}
	found := fmt.Sprintf("NCCL %s has %s", version, plural(len(list), "known defect"))
	if open == 0 {
		return pass(found+", all of which Chorus avoids", want)
	}
	d, cure := list[0], "chorus info lists the conditions of all: avoid them"
	if fixed := firstWithout(list); fixed != 0 {
		cure += ", or install NCCL " + ncclapi.VersionText(fixed) + " or newer on all hosts"
	}
	return warn(fmt.Sprintf("%s, and a program can meet %d of them", found, open), want,
		fmt.Sprintf("%s: %s when %s (%s)", d.ID, d.Fault, d.When, d.Source), cure)
}

// firstWithout returns the first version without the defects that a program can meet and that have a cure.
func firstWithout(list []*ncclapi.Defect) (version int32) {
	for _, d := range list {
		if d.Open {
			version = max(version, d.Before)
		}
	}
	return version
}
