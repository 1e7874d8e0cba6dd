package nccl

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"hash/fnv"
	"slices"
	"strings"
	"unsafe"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/dl"
	"github.com/gochorus/chorus/internal/ncclapi"
	"github.com/gochorus/chorus/internal/virtual/machine"
)

// The limits of the configuration of a call.
const (
	mostCTAs    = 64
	mostCluster = 8
	policies    = 3 // all flags of NCCL_CTA_POLICY
	ownTag      = 1 << 63
)

// checkConfig returns the error in the configuration of a call, or "". NCCL ignores numbers
// that are out of range; here they are errors.
func (i *issue) checkConfig(version int32) string {
	c := i.cfg
	switch {
	case c == nil:
		return ""
	case c.Size != ncclapi.NewCollConfig(version).Size || c.Version > uint32(version):
		return fmt.Sprintf("the configuration is of another version: %d bytes for %s", c.Size, ncclapi.VersionText(int32(c.Version)))
	case c.Magic != ncclapi.ConfigMagic:
		return "the configuration is not initialised"
	case c.ForceAlgSelection != 0 && c.ForceAlgSelection != 1:
		return fmt.Sprintf("forceAlgSelection is %d: want 0 or 1", c.ForceAlgSelection)
	case !inRange(c.CTAPolicy, 0, policies):
		return fmt.Sprintf("CTAPolicy is %d: want 0 to %d", c.CTAPolicy, policies)
	case c.MinCTAs != ncclapi.Undefined && c.MaxCTAs != ncclapi.Undefined && c.MinCTAs > c.MaxCTAs:
		return fmt.Sprintf("minCTAs is %d and maxCTAs %d", c.MinCTAs, c.MaxCTAs)
	case !inRange(c.MinCTAs, 1, mostCTAs) || !inRange(c.MaxCTAs, 1, mostCTAs) || !inRange(c.NVLSCTAs, 1, mostCTAs):
		return fmt.Sprintf("minCTAs is %d, maxCTAs %d and nvlsCTAs %d: want 1 to %d", c.MinCTAs, c.MaxCTAs, c.NVLSCTAs, mostCTAs)
	case !inRange(c.CGAClusterSize, 0, mostCluster):
		return fmt.Sprintf("cgaClusterSize is %d: want 0 to %d", c.CGAClusterSize, mostCluster)
	case c.UserProfilerTag&ownTag != 0:
		return fmt.Sprintf("userProfilerTag is %#x: NCCL reserves the highest bit", c.UserProfilerTag)
	case c.ForceAlgSelection == 0:
		return ""
	}
	return checkSelection(i.kind, selection(c))
}

// inRange reports whether a number is undefined or in a range.
func inRange(v, from, to int32) bool { return v == ncclapi.Undefined || v >= from && v <= to }

func selection(c *ncclapi.CollConfig) string {
	if c.AlgSelection == nil {
		return ""
	}
	return dl.GoString(uintptr(unsafe.Pointer(c.AlgSelection)))
}

// configure stores the parts of a configuration that must be the same on all ranks, and the
// event.
func (w *work) configure(c *ncclapi.CollConfig) {
	if c == nil {
		return
	}
	h := fnv.New32a()
	_ = binary.Write(h, binary.LittleEndian, []int32{c.MinCTAs, c.MaxCTAs, c.NVLSCTAs, c.CGAClusterSize, c.ForceAlgSelection, c.CTAPolicy})
	_, _ = h.Write([]byte(selection(c)))
	w.sig.Call = cmp.Or(h.Sum32(), 1)
	if c.Size > unsafe.Offsetof(c.LaunchCompletionEvent) {
		w.event = cudadrv.Event(c.LaunchCompletionEvent)
	}
	w.sig.Event = w.event != 0
}

// checkEvent returns the error in the event of a work, or "". The machine is locked.
func (w *work) checkEvent() string {
	if w.event == 0 {
		return ""
	}
	const unusable = cudadrv.EventDisableTiming | cudadrv.EventInterprocess
	dev, flags := w.c.lib.m.Event(w.event)
	switch {
	case dev == nil:
		return fmt.Sprintf("launchCompletionEvent %#x is not an event", uintptr(w.event))
	case dev != w.c.dev:
		return fmt.Sprintf("launchCompletionEvent is of device %d, the communicator of device %d", dev.Ordinal(), w.c.dev.Ordinal())
	case flags&unusable != cudadrv.EventDisableTiming:
		return "launchCompletionEvent measures time or is of several processes"
	}
	return ""
}

// severalEvents returns a communicator with more than one event in a group, or nil.
func severalEvents(works []*work) *comm {
	var seen map[*comm]bool
	for _, w := range works {
		if w.event == 0 {
			continue
		}
		if seen[w.c] {
			return w.c
		}
		if seen == nil {
			seen = map[*comm]bool{}
		}
		seen[w.c] = true
	}
	return nil
}

// recordEvents records the events of a launch on its stream, before the launch:
// they tell that it has begun, and not that its results are there. The copies
// of a single rank record none. The machine is locked.
func (l *launch) recordEvents(s *machine.Stream) {
	for _, w := range l.collectives {
		if w.event != 0 && l.c.n > 1 {
			s.Record(w.name, w.event)
		}
	}
}

// algorithms has the names that a call may select, for each collective.
var algorithms = map[kind][]string{
	kindAllReduce: {"TREE_LL", "TREE_LL128", "TREE_SIMPLE", "RING_LL", "RING_LL128", "RING_SIMPLE",
		"COLLNET_DIRECT_SIMPLE", "COLLNET_CHAIN_SIMPLE", "NVLS_SIMPLE", "NVLSTREE_SIMPLE",
		"SYMK_AGxLL_R", "SYMK_AGxLLMC_R", "SYMK_RSxTmaLD_AGxTmaST", "SYMK_RSxLD_AGxST", "SYMK_RSxLDMC_AGxSTMC"},
	kindAllGather: {"RING_LL", "RING_LL128", "RING_SIMPLE", "COLLNET_DIRECT_SIMPLE", "NVLS_SIMPLE", "PAT_SIMPLE",
		"SYMK_LL", "SYMK_LLMC", "SYMK_TmaST", "SYMK_ST", "SYMK_TmaSTMC", "SYMK_STMC", "SYMK_RailRing_LsaSTMC"},
	kindReduceScatter: {"RING_LL", "RING_LL128", "RING_SIMPLE", "COLLNET_DIRECT_SIMPLE", "NVLS_SIMPLE", "PAT_SIMPLE",
		"SYMK_LL", "SYMK_TmaLD", "SYMK_LD", "SYMK_LDMC", "SYMK_RailA2A_LsaLD", "SYMK_RailA2A_LsaLDMC"},
	kindBroadcast: {"RING_LL", "RING_LL128", "RING_SIMPLE"},
	kindReduce:    {"RING_LL", "RING_LL128", "RING_SIMPLE"},
}

// everywhere reports whether an algorithm needs no particular hardware or memory. Other
// algorithms depend on multicast, on the network or on windows, so virtual devices lack them.
func everywhere(name string) bool {
	return strings.HasPrefix(name, "RING_") || strings.HasPrefix(name, "TREE_")
}

// checkSelection returns why no algorithm of a collective satisfies a selection, or "". A
// selection has alternatives (,) of conditions that must all be true (+): the beginning of a
// name, or ^ and the beginning of names that are excluded.
func checkSelection(k kind, selection string) string {
	if selection == "" {
		return ""
	}
	found := false
	for alternative := range strings.SplitSeq(selection, ",") {
		left := slices.Clone(algorithms[k])
		for condition := range strings.SplitSeq(alternative, "+") {
			prefix, exclude := strings.CutPrefix(strings.TrimSpace(condition), "^")
			if !knownPrefix(prefix) {
				return fmt.Sprintf("algSelection %q: %q is not an algorithm", selection, prefix)
			}
			left = slices.DeleteFunc(left, func(name string) bool { return begins(name, prefix) == exclude })
		}
		found = found || slices.ContainsFunc(left, everywhere)
	}
	if !found {
		return fmt.Sprintf("algSelection %q: no algorithm of %s that virtual devices have satisfies it", selection, kindNames[k])
	}
	return ""
}

func knownPrefix(prefix string) bool {
	for _, names := range algorithms {
		if prefix != "" && slices.ContainsFunc(names, func(name string) bool { return begins(name, prefix) }) {
			return true
		}
	}
	return false
}

// begins reports whether a name begins with a prefix in any case.
func begins(name, prefix string) bool {
	return len(name) >= len(prefix) && strings.EqualFold(name[:len(prefix)], prefix)
}
