package alloc

import (
	"runtime"
	"sync"
	"time"

	"github.com/gochorus/chorus/internal/timeline"
)

// An Action is a kind of Entry, with torch's names.
type Action uint8

// The actions.
const (
	ActionAlloc Action = iota
	ActionFreeRequested
	ActionFreeCompleted
	ActionSegmentAlloc
	ActionSegmentFree
	ActionSegmentMap
	ActionSegmentUnmap
	ActionSnapshot
	ActionOOM
)

var actionNames = [...]string{"alloc", "free_requested", "free_completed", "segment_alloc", "segment_free",
	"segment_map", "segment_unmap", "snapshot", "oom"}

func (a Action) String() string { return actionNames[a] }

// An Entry is one recorded operation. For ActionOOM, Addr is the free memory of the
// device.
type Entry struct {
	Action Action
	Addr   uint64
	Size   uint64
	Stream uint64
	Time   time.Time
	Pool   PoolID
	Stack  *Stack
}

// A Stack is a call stack in the program, innermost call first.
type Stack struct{ PCs []uintptr }

// stackDepth is the maximum depth of a Stack.
const stackDepth = 32

// HistoryConfig configures a History.
type HistoryConfig struct {
	Entries int  // the maximum number; the latest ones are kept. 0 keeps none
	Stacks  bool // record stacks of allocations and frees
}

// A History records the operations on the memory of a device.
type History struct {
	cfg     HistoryConfig
	mu      sync.Mutex
	entries []Entry // a ring, once it is full
	next    int
}

// Record starts a new history. A nil cfg stops the recording. Blocks keep the stacks
// that they have.
func (d *Device) Record(cfg *HistoryConfig) {
	if cfg == nil {
		d.history.Store(nil)
		return
	}
	d.history.Store(&History{cfg: *cfg})
}

// stackOf returns the caller's stack if stacks are recorded.
func (d *Device) stackOf() *Stack {
	if h := d.history.Load(); h != nil && h.cfg.Stacks {
		return callers()
	}
	return nil
}

func callers() *Stack {
	var pcs [stackDepth]uintptr
	n := runtime.Callers(3, pcs[:])
	return &Stack{PCs: append([]uintptr(nil), pcs[:n]...)}
}

// note records an entry. It costs almost nothing while nothing is recorded.
func (d *Device) note(action Action, addr, size uint64, a *Arena, stack *Stack) {
	if h := d.history.Load(); h != nil {
		h.note(action, addr, size, a, stack)
	}
	if t := timeline.Current(); t != nil {
		t.Add(timeline.Record{Kind: timeline.Memory, Name: actionNames[action], Device: d.cfg.Ordinal, Begin: t.Now(), Bytes: size})
	}
}

func (h *History) note(action Action, addr, size uint64, a *Arena, stack *Stack) {
	if h.cfg.Entries > 0 {
		e := Entry{Action: action, Addr: addr, Size: size, Time: time.Now(), Stack: stack}
		if a != nil {
			e.Pool = a.pool.id
			if a.stream != nil {
				e.Stream = a.stream.Number()
			}
		}
		h.add(e)
	}
}

func (h *History) add(e Entry) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.entries) < h.cfg.Entries {
		h.entries = append(h.entries, e)
		return
	}
	h.entries[h.next] = e
	h.next = (h.next + 1) % len(h.entries)
}

// list returns the entries in chronological order.
func (h *History) list() []Entry {
	h.mu.Lock()
	defer h.mu.Unlock()
	return append(append([]Entry(nil), h.entries[h.next:]...), h.entries[:h.next]...)
}

// last returns the stacks of the last allocation and free of the block at addr.
func (h *History) last(addr uint64) (alloc, freed *Stack) {
	for _, e := range h.list() {
		switch {
		case e.Addr != addr:
		case e.Action == ActionAlloc:
			alloc, freed = e.Stack, nil
		case e.Action == ActionFreeRequested:
			freed = e.Stack
		}
	}
	return alloc, freed
}
