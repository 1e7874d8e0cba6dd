package sanitizer

import (
	"slices"
	"sync"
	"syscall"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/ncclapi"
)

// nccl is a decorated NCCL.
type nccl struct {
	ncclapi.API
	t *tracker

	mu     sync.Mutex
	comms  map[ncclapi.Comm]*comm
	groups map[int]*group // by OS thread
}

// A comm is a communicator.
type comm struct {
	ranks, rank int32
	ctx         cudadrv.Context // of its device
	last        Stamp           // of its last operation
}

// A group holds the calls of one OS thread since its outermost GroupStart.
type group struct {
	depth int
	works []work
}

// A work is a call of a collective, a send or a receive.
type work struct {
	name   string
	comm   *comm
	stream cudadrv.Stream
	where  *Place
	uses   []cudadrv.Use
	event  cudadrv.Event // recorded before the work; 0 is none
}

// comm returns a communicator, or nil if NCCL does not know its size or its device.
func (l *nccl) comm(h ncclapi.Comm) *comm {
	l.mu.Lock()
	c := l.comms[h]
	l.mu.Unlock()
	if c != nil {
		return c
	}
	ranks, r := l.API.CommCount(h)
	rank, r2 := l.API.CommUserRank(h)
	dev, r3 := l.API.CommCuDevice(h)
	if r != ncclapi.Success || r2 != ncclapi.Success || r3 != ncclapi.Success {
		return nil
	}
	l.t.mu.Lock()
	ctx := l.t.retained[cudadrv.Device(dev)]
	l.t.mu.Unlock()
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.comms[h] == nil {
		l.comms[h] = &comm{ranks: ranks, rank: rank, ctx: ctx}
	}
	return l.comms[h]
}

// forget drops a communicator, whose handle NCCL may reuse.
func (l *nccl) forget(h ncclapi.Comm) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.comms, h)
}

func (l *nccl) CommDestroy(c ncclapi.Comm) ncclapi.Result {
	l.forget(c)
	return l.API.CommDestroy(c)
}

func (l *nccl) CommAbort(c ncclapi.Comm) ncclapi.Result {
	l.forget(c)
	return l.API.CommAbort(c)
}

func (l *nccl) MemAlloc(n uintptr) (cudadrv.DevicePtr, ncclapi.Result) {
	ctx := l.t.current()
	p, r := l.API.MemAlloc(n)
	if r == ncclapi.Success {
		l.t.allocated(&block{base: uint64(p), size: uint64(n), ctx: ctx, kind: "block of ncclMemAlloc"})
	}
	return p, r
}

// MemFree waits for the device, as cuMemFree does.
func (l *nccl) MemFree(p cudadrv.DevicePtr) ncclapi.Result {
	var r ncclapi.Result
	driver{l.t.inner, l.t}.free(uint64(p), "ncclMemFree", func() cudadrv.Result {
		if r = l.API.MemFree(p); r != ncclapi.Success {
			return cudadrv.ErrorInvalidValue
		}
		return cudadrv.Success
	})
	return r
}

func (l *nccl) GroupStart() ncclapi.Result {
	r := l.API.GroupStart()
	if r == ncclapi.Success {
		l.mu.Lock()
		defer l.mu.Unlock()
		tid := syscall.Gettid()
		if l.groups[tid] == nil {
			l.groups[tid] = &group{}
		}
		l.groups[tid].depth++
	}
	return r
}

func (l *nccl) GroupEnd() ncclapi.Result {
	works := l.leave()
	r := l.API.GroupEnd()
	if r == ncclapi.Success || r == ncclapi.InProgress {
		l.issue(works)
	}
	return r
}

func (l *nccl) GroupSimulateEnd(info *ncclapi.SimInfo) ncclapi.Result {
	l.leave()
	return l.API.GroupSimulateEnd(info)
}

// leave ends one level of the thread's group, and returns the works of the outermost one.
func (l *nccl) leave() []work {
	l.mu.Lock()
	defer l.mu.Unlock()
	tid := syscall.Gettid()
	g := l.groups[tid]
	if g == nil {
		return nil
	}
	if g.depth--; g.depth > 0 {
		return nil
	}
	delete(l.groups, tid)
	return g.works
}

// submit records a call, at the end of the thread's group if there is one, with
// the options of cfg unless it is nil.
func (l *nccl) submit(r ncclapi.Result, name string, h ncclapi.Comm, s cudadrv.Stream, cfg *ncclapi.CollConfig, uses func(c *comm) []cudadrv.Use) ncclapi.Result {
	if r != ncclapi.Success && r != ncclapi.InProgress {
		return r
	}
	c := l.comm(h)
	if c == nil {
		return r
	}
	w := work{name: name, comm: c, stream: s, where: Here(), uses: uses(c)}
	if cfg != nil && c.ranks > 1 {
		w.event = cudadrv.Event(cfg.LaunchCompletionEvent)
	}
	l.mu.Lock()
	g := l.groups[syscall.Gettid()]
	if g != nil {
		g.works = append(g.works, w)
	}
	l.mu.Unlock()
	if g == nil {
		l.issue([]work{w})
	}
	return r
}

// issue records the works of a group: one operation for each communicator.
func (l *nccl) issue(works []work) {
	l.t.mu.Lock()
	defer l.t.unlock()
	for len(works) > 0 {
		c := works[0].comm
		n := &node{name: works[0].name, where: works[0].where}
		var on []*queue
		rest := works[:0:0]
		for i, w := range works {
			if w.comm != c || c.ranks == 1 && i > 0 { // collectives of one rank are copies on their streams
				rest = append(rest, w)
				continue
			}
			q := l.t.queue(c.ctx, w.stream)
			if !slices.Contains(on, q) {
				on = append(on, q)
			}
			if e := l.t.events[w.event]; e != nil && q.capture == nil {
				l.t.issue(recordOf(e), q)
			}
			n.uses = append(n.uses, w.uses...)
		}
		if c.ranks > 1 {
			n.last = &c.last
			for _, q := range on {
				l.t.meets[q.ctx] = true
			}
		}
		l.t.issue(n, on...)
		works = rest
	}
}

func (l *nccl) Collective(c ncclapi.Call) ncclapi.Result {
	return l.submit(l.API.Collective(c), c.Called().Name(), c.Comm, c.Stream, c.Config, func(on *comm) []cudadrv.Use {
		d := &ncclapi.Collectives[c.Func]
		return moves(&c, on.extent(d.Sends, d.SendRoot, c.Root), on.extent(d.Recvs, d.RecvRoot, c.Root))
	})
}

// extent returns how many Counts of a call a rank reads or writes.
func (c *comm) extent(x ncclapi.Extent, atRoot bool, root int32) int32 {
	switch {
	case x == ncclapi.None || atRoot && c.rank != root:
		return 0
	case x == ncclapi.EachRank:
		return c.ranks
	}
	return 1
}

// moves returns the uses of a call that reads and writes so many Counts.
func moves(c *ncclapi.Call, sends, recvs int32) []cudadrv.Use {
	n := c.Count * c.Type.Size()
	return []cudadrv.Use{read(c.Send, n*uintptr(sends)), write(c.Recv, n*uintptr(recvs))}
}

func (l *nccl) PutSignal(local cudadrv.DevicePtr, n uintptr, t ncclapi.DType, peer int32, w ncclapi.Window, offset uintptr, signal, ctx int32, flags uint32, h ncclapi.Comm, s cudadrv.Stream) ncclapi.Result {
	return l.submit(l.API.PutSignal(local, n, t, peer, w, offset, signal, ctx, flags, h, s), "ncclPutSignal", h, s, nil,
		func(*comm) []cudadrv.Use { return moves(&ncclapi.Call{Send: local, Count: n, Type: t}, 1, 0) })
}
