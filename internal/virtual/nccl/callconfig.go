package nccl

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"hash/fnv"
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

// recordEvents records the events of a launch on its stream, before the launch: they tell that
// it has begun, and not that its results are there. Copies of a single rank record none. The
// machine is locked.
func (l *launch) recordEvents(s *machine.Stream) {
	for _, w := range l.collectives {
		if w.event != 0 && l.c.n > 1 {
			s.Record(w.name, w.event)
		}
	}
}
