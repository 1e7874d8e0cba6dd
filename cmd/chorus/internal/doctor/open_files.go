package doctor

import "fmt"

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
