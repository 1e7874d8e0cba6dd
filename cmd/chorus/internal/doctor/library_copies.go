package doctor

import (
	"fmt"
	"io/fs"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

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
	lib, err := h.NCCL()
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
