package doctor

import (
	"fmt"
	"path"
	"slices"
	"strings"
)

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

// smallest returns the smallest value of a file in the control groups, and noLimit if no group
// has the file. parse reads the file's text.
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
