package doctor

import (
	"fmt"
	"io/fs"
	"path"
	"strings"
)

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
