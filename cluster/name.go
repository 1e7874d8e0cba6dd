package cluster

import (
	"strings"

	"github.com/gochorus/chorus/internal/plain"
)

// maxNameBytes limits the names of jobs, hosts and processes.
const maxNameBytes = 255

// checkName returns an error if a name cannot be printed unchanged.
func checkName(of, name string) error {
	switch {
	case len(name) > maxNameBytes:
		return badConfig("the name of the %s has %d bytes: want at most %d", of, len(name), maxNameBytes)
	case strings.ContainsRune(name, '\\') || plain.Text(name) != name:
		return badConfig("the name of the %s is %s: want graphic characters, and no backslash", of, plain.Text(name))
	}
	return nil
}

// checkNames validates the names in a registration. Control characters were
// already replaced by escapes with backslashes.
func checkNames(names ...string) *refusal {
	for _, n := range names {
		if err := checkName("host or process", n); err != nil {
			return &refusal{Reason: strings.TrimPrefix(err.Error(), "cluster: ")}
		}
	}
	return nil
}
