package health

import (
	"fmt"

	"github.com/gochorus/chorus/internal/ncclapi"
)

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
