package nccl

import (
	"fmt"
	"slices"
	"sync"

	"github.com/gochorus/chorus/internal/ncclapi"
	"github.com/gochorus/chorus/internal/osthread"
)

// A group holds the calls of one OS thread since its outermost GroupStart.
type group struct {
	depth int
	err   ncclapi.Result // the first error of its calls
	jobs  []func() ncclapi.Result
	works []*work
}

type groups struct {
	mu      sync.Mutex
	threads map[uintptr]*group
}

// open returns the group of the calling thread, whose content only this thread
// changes, or nil.
func (g *groups) open() *group {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.threads[osthread.Thread()]
}

// queued reports whether an open group contains work of the communicator.
func (g *groups) queued(c *comm) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, open := range g.threads {
		if slices.ContainsFunc(open.works, func(w *work) bool { return w.c == c }) {
			return true
		}
	}
	return false
}

// change runs f with the lock that queued and openGroups use.
func (g *groups) change(f func()) {
	g.mu.Lock()
	defer g.mu.Unlock()
	f()
}

func (l *lib) openGroups() []string {
	l.groups.mu.Lock()
	defer l.groups.mu.Unlock()
	var list []string
	for tid, g := range l.groups.threads {
		list = append(list, fmt.Sprintf("OS thread %d has a group open, with %d operations in it: GroupStart and GroupEnd must be called on one locked thread",
			tid, len(g.works)+len(g.jobs)))
	}
	return list
}

func (l *lib) GroupStart() ncclapi.Result {
	if r := l.enter(ncclapi.FuncGroupStart); r != ncclapi.Success {
		return r
	}
	g := l.groups.open()
	l.groups.change(func() {
		if g == nil {
			g = &group{}
			l.groups.threads[osthread.Thread()] = g
		}
		g.depth++
	})
	return ncclapi.Success
}

func (l *lib) GroupEnd() ncclapi.Result {
	g, r := l.endGroup(ncclapi.FuncGroupEnd)
	if g == nil || r != ncclapi.Success {
		return r
	}
	if r := runJobs(g.jobs); r != ncclapi.Success {
		return r
	}
	return l.issue(g.works)
}

// GroupSimulateEnd discards the group and returns an artificial time: ten
// microseconds for each operation and for each megabyte.
func (l *lib) GroupSimulateEnd(info *ncclapi.SimInfo) ncclapi.Result {
	if info == nil {
		return l.refuse(ncclapi.InvalidArgument, "ncclGroupSimulateEnd: the information is null")
	}
	g, r := l.endGroup(ncclapi.FuncGroupSimulateEnd)
	if g == nil || r != ncclapi.Success {
		return r
	}
	info.EstimatedTime = 0
	for _, w := range g.works {
		info.EstimatedTime += 10 + 10*float32(max(w.sendBytes, w.recvBytes))/1e6
	}
	return ncclapi.Success
}

// endGroup closes one level, and returns the group if it was the outermost.
func (l *lib) endGroup(f ncclapi.Func) (*group, ncclapi.Result) {
	fault := l.enter(f)
	g := l.groups.open()
	if g == nil {
		return nil, l.refuse(ncclapi.InvalidUsage, "%s: no group is open on this OS thread", f.Name())
	}
	if fault != ncclapi.Success && g.err == ncclapi.Success {
		g.err = fault
	}
	l.groups.change(func() {
		if g.depth--; g.depth == 0 {
			delete(l.groups.threads, osthread.Thread())
		}
	})
	if g.depth > 0 {
		return nil, fault
	}
	return g, g.err
}

// runJobs creates the communicators of a group concurrently.
func runJobs(jobs []func() ncclapi.Result) ncclapi.Result {
	results := make([]ncclapi.Result, len(jobs))
	var wg sync.WaitGroup
	for i, job := range jobs {
		wg.Go(func() { results[i] = job() })
	}
	wg.Wait()
	for _, r := range results {
		if r != ncclapi.Success {
			return r
		}
	}
	return ncclapi.Success
}

// later runs a job now, or at the end of the calling thread's group.
func (l *lib) later(job func() ncclapi.Result) ncclapi.Result {
	g := l.groups.open()
	if g == nil {
		return job()
	}
	l.groups.change(func() { g.jobs = append(g.jobs, job) })
	return ncclapi.Success
}

// submit issues validated work, or adds it to the group. r is the result of the
// validation; an error fails the group.
func (l *lib) submit(w *work, r ncclapi.Result) ncclapi.Result {
	g := l.groups.open()
	if g == nil {
		if r != ncclapi.Success {
			return r
		}
		return l.issue([]*work{w})
	}
	l.groups.change(func() {
		switch {
		case r == ncclapi.Success:
			g.works = append(g.works, w)
		case g.err == ncclapi.Success:
			g.err = r
		}
	})
	return r
}

// issue enqueues all works of a group, or none.
func (l *lib) issue(works []*work) ncclapi.Result {
	if len(works) == 0 {
		return ncclapi.Success
	}
	if f := selfPaired(works); f != nil {
		return l.refuse(f.Result, "%s", f.Text)
	}
	if c := severalEvents(works); c != nil {
		return l.refuse(ncclapi.InvalidUsage, "a group has several launch-completion events for rank %d: want at most one for each communicator", c.rank)
	}
	l.m.Lock()
	defer l.m.Unlock()
	if r := l.mayIssue(works); r != ncclapi.Success {
		return r
	}
	if r := l.connectFor(works); r != ncclapi.Success {
		return r
	}
	for _, w := range works {
		if !w.s.Capturing() {
			w.s.AwaitRoom()
		}
	}
	if !capture(works) {
		enqueueWork(works, false)
	}
	return ncclapi.Success
}

// stillUsable checks that no stream was destroyed and no communicator has failed. The machine is locked.
func (l *lib) stillUsable(works []*work) ncclapi.Result {
	for _, w := range works {
		if w.s.Destroyed() {
			return l.refuse(ncclapi.UnhandledCUDAError, "%s: the stream was destroyed before the group ended", w.name)
		}
		if f := w.c.state(); f != nil {
			return f.Result
		}
	}
	return ncclapi.Success
}

// mayIssue checks the streams and the communicators of a group. As in NCCL, all streams must be
// in the same capture or in none. The machine is locked.
func (l *lib) mayIssue(works []*work) ncclapi.Result {
	if r := l.stillUsable(works); r != ncclapi.Success {
		return r
	}
	x := works[0].s.Capture()
	for _, w := range works {
		switch {
		case w.s.Capture() != x:
			return l.refuse(ncclapi.InvalidUsage,
				"%s: all streams of a group must be captured into the same graph, or none", w.name)
		case w.s.Invalidated():
			return l.refuse(ncclapi.UnhandledCUDAError, "%s: the capture of %v was invalidated", w.name, w.s)
		}
	}
	return ncclapi.Success
}
