package nccl

import (
	"fmt"
	"slices"
	"time"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/ncclapi"
	"github.com/gochorus/chorus/internal/virtual/machine"
)

// A work is a validated operation.
type work struct {
	name       string // the C function
	sig        signature
	c          *comm
	s          *machine.Stream
	send, recv cudadrv.DevicePtr
	sendBytes  uint64
	recvBytes  uint64
	scaled     *scaledSum     // of RedOpCreatePreMulSum
	event      cudadrv.Event  // to record when the launch begins; 0 is none
	hang       bool           // injected by the fault plan
	late       ncclapi.Result // injected asynchronous error of the communicator
	wrong      bool           // the fault plan makes it deliver a wrong byte
	slow       time.Duration  // the fault plan makes it begin later
	number     uint64         // of a collective: see intent
	dst        []byte         // set when it runs
}

func (w *work) dtype() ncclapi.DType { return ncclapi.DType(w.sig.DType) }

func (w *work) transfer() bool { return w.sig.Kind == kindSend || w.sig.Kind == kindRecv }

// A launch is the work of one group on one communicator: collectives in order,
// then all sends and receives concurrently.
type launch struct {
	c           *comm
	collectives []*work
	transfers   []*work
	prev        <-chan struct{}
	done        chan struct{}
	orphan      bool        // its communicator was freed during the call that launched it
	graph       bool        // a graph launched it
	positions   []*position // in device order, if it has several communicators
}

// inLaunches groups works by communicator, sorted by their first work, with the ranks of a communicator that are in
// this process next to each other, as ncclGroupCommJoin does.
// Collectives of a single rank are launched separately: NCCL performs them as
// copies on the operation's own stream, so the group does not order them.
func inLaunches(works []*work) [][]*work {
	var lists [][]*work
	at := map[*comm]int{}
	for _, w := range works {
		i, ok := at[w.c]
		if one := alone([]*work{w}); !ok || one {
			i = len(lists)
			lists = append(lists, nil)
			if !one {
				at[w.c] = i
			}
		}
		lists[i] = append(lists[i], w)
	}
	if len(at) > 1 {
		first := map[*localRanks]int{}
		for i, list := range slices.Backward(lists) {
			first[list[0].c.localRanks] = i
		}
		slices.SortStableFunc(lists, func(a, b []*work) int { return first[a[0].c.localRanks] - first[b[0].c.localRanks] })
	}
	return lists
}

// alone reports whether works are one collective of a single rank.
func alone(works []*work) bool { return works[0].c.n == 1 && !works[0].transfer() }

// enqueueWork enqueues the work of a group, or of a launch of a graph, on its streams. The machine is locked.
func enqueueWork(works []*work, graph bool) {
	for _, list := range inLaunches(works) {
		c := list[0].c
		l := &launch{c: c, prev: c.last, done: make(chan struct{}), orphan: c.freed, graph: graph}
		for _, w := range list {
			w.sig.Seq = c.issued
			c.issued++
			if w.transfer() {
				l.transfers = append(l.transfers, w)
			} else {
				l.collectives = append(l.collectives, w)
			}
		}
		l.enqueue()
	}
}

// enqueue runs the launch on the stream of its first work, after all earlier
// operations of the other streams and before all later ones.
func (l *launch) enqueue() {
	works := append(l.collectives[:len(l.collectives):len(l.collectives)], l.transfers...)
	s := works[0].s
	others := map[*machine.Stream]bool{}
	for _, w := range works {
		if w.s != s && !others[w.s] {
			others[w.s] = true
			s.Wait(w.name, w.s.Mark())
		}
	}
	l.c.last = l.done
	l.c.mu.Lock()
	l.c.running++
	for _, w := range l.collectives {
		w.number = l.c.collectives
		l.c.intend(w.sig)
	}
	l.c.mu.Unlock()
	l.queueOrder(s)
	l.recordEvents(s)
	s.EnqueueAlways(works[0].name, l.run)
	for other := range others {
		other.Wait(works[0].name, s.Mark())
	}
}

func (l *launch) run(o *machine.Op) {
	defer l.finish()
	m, c := o.Machine(), l.c
	// Operations of a communicator run one at a time, on whatever streams.
	// Operations of a single rank are copies without such an order.
	if l.prev != nil && c.n > 1 {
		<-l.prev
	}
	m.Lock()
	if l.orphan {
		o.Lose(&machine.Trouble{Status: cudadrv.ErrorIllegalAddress, Text: fmt.Sprintf("%s was launched by a call in progress when the communicator of rank %d was freed", o.Name, c.rank)})
	}
	if c.lsaSize() != c.n {
		o.WaitForProcesses()
	}
	lost, why := c.dev.Status() != cudadrv.Success, c.dev.Why()
	if c.n > 1 { // collectives of a single rank are unordered copies
		o.After(c.before)
		c.before = o.Now()
	}
	c.localRanks.began[c.rank] = c.localRanks.began[c.rank].JoinStamp(o.Now())
	l.startOrder()
	m.Unlock()
	if lost {
		c.failDevice("its device was lost before the operation ran: " + why)
		return
	}
	if l.graph && c.n > 1 && c.lsaSize() == c.n {
		go l.watch(o)
	}
	if err := l.perform(o); err != nil {
		l.abandon(o)
		return
	}
	m.Lock()
	defer m.Unlock()
	for rank, began := range c.localRanks.began {
		if l.needs(rank) {
			o.AfterAll(began)
		}
	}
}

// watch reports a launch of a graph that waits without any progress, because the ranks of the process have launched
// their graphs differently. Whether ranks of other processes will come is not known here: the deadline of the
// communicator decides then, as it does for operations outside of graphs.
func (l *launch) watch(o *machine.Op) {
	o.Watch(l.done, func() string {
		return fmt.Sprintf("%s, which a graph launched for rank %d of %d, waits for the other ranks: launch the graphs of all ranks equally often and in the same order",
			o.Name, l.c.rank, l.c.n)
	})
}

// needs reports whether the launch cannot complete on this rank before another rank has reached it.
// Then what precedes it there also precedes what follows it here. A rank that only provides data does
// not wait: neither the root of a broadcast or scatter, nor the other ranks of a reduction to a root or of a
// gather, nor a sender. NCCL buffers their data if it is small, and discards empty collectives.
func (l *launch) needs(rank int) bool {
	for _, w := range l.transfers {
		if w.sig.Kind == kindRecv && int(w.sig.Root) == rank {
			return true
		}
	}
	for _, w := range l.collectives {
		root := int(w.sig.Root)
		switch {
		case w.sig.Count == 0 || l.c.n == 1:
		case w.sig.Kind == kindBroadcast || w.sig.Kind == kindScatter:
			if rank == root {
				return true
			}
		case !w.sig.Kind.rooted() || root == l.c.rank:
			return true
		}
	}
	return false
}

func (l *launch) finish() {
	l.endOrder()
	close(l.done)
	l.c.mu.Lock()
	l.c.running--
	l.c.idle.Broadcast()
	l.c.mu.Unlock()
}

func (l *launch) perform(o *machine.Op) error {
	for _, w := range l.collectives {
		if err := l.c.collective(o, w); err != nil {
			return err
		}
		w.spoil()
	}
	if len(l.transfers) == 0 {
		return nil
	}
	if err := l.c.pointToPoint(o, l.transfers); err != nil {
		return err
	}
	for _, w := range l.transfers {
		w.spoil()
	}
	return nil
}

// spoil delivers a wrong byte if the fault plan asks for it.
func (w *work) spoil() {
	if w.wrong && w.sig.Kind != kindSend {
		machine.Spoil(w.dst)
	}
}

// abandon handles a stopped communicator: it makes the outputs invalid, so that
// they are not used as results. After a misuse it loses the device.
func (l *launch) abandon(o *machine.Op) {
	for _, list := range [][]*work{l.collectives, l.transfers} {
		for _, w := range list {
			if w.dst == nil && w.recvBytes > 0 {
				w.touchIdly(o)
			}
			if w.sig.Kind != kindSend {
				machine.Poison(w.dst)
			}
		}
	}
	if f := l.c.state(); f != nil && f.Result == ncclapi.InvalidUsage {
		o.Fail(&machine.Trouble{Status: cudadrv.ErrorLaunchFailed, Text: f.Text})
	}
}

// failDevice fails the communicator because this rank's device failed.
func (c *comm) failDevice(why string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closing || c.failure != nil {
		return
	}
	c.setFailure(&failure{ncclapi.UnhandledCUDAError, why})
	c.tell(&notice{Kind: noticeFailure, failure: failure{ncclapi.RemoteError, fmt.Sprintf("rank %d failed: %s", c.rank, why)}}, nil)
}

// touchIdly is touch for an operation that ends without a result.
func (w *work) touchIdly(o *machine.Op) {
	if t := w.touch(o); t != nil {
		m := o.Machine()
		m.Lock()
		defer m.Unlock()
		o.Report(t)
	}
}

// touch resolves the output of a work and records its use.
func (w *work) touch(o *machine.Op) *machine.Trouble {
	m := o.Machine()
	m.Lock()
	defer m.Unlock()
	o.Name = w.name
	var t *machine.Trouble
	w.dst, t = o.Touch(w.recv, w.recvBytes, true)
	return t
}

// buffers resolves the input and the output of a work, and fails the device and
// the communicator if one of them is invalid.
func (c *comm) buffers(o *machine.Op, w *work) (src, dst []byte, err error) {
	m := o.Machine()
	m.Lock()
	o.Name = w.name
	src, t := o.Touch(w.send, w.sendBytes, false)
	if t == nil {
		w.dst, t = o.Touch(w.recv, w.recvBytes, true)
	}
	m.Unlock()
	if t != nil {
		o.Fail(t)
		c.failDevice(t.Text)
		return nil, nil, errStopped
	}
	return src, w.dst, nil
}

// faulty injects the planned faults of a running work.
func (c *comm) faulty(w *work) error {
	if w.slow > 0 {
		select {
		case <-time.After(w.slow):
		case <-c.stop:
			return errStopped
		}
	}
	if w.late != ncclapi.Success {
		c.fail(&failure{w.late, fmt.Sprintf("the fault plan failed %s of rank %d when it ran", w.name, c.rank)})
	} else if !w.hang {
		return nil
	}
	machine.Forever(c.stop)
	return errStopped
}

// collective performs one collective at this rank.
func (c *comm) collective(o *machine.Op, w *work) error {
	if err := c.faulty(w); err != nil {
		return err
	}
	if err := c.agree(&w.sig); err != nil {
		return err
	}
	src, dst, err := c.buffers(o, w)
	if err != nil || w.sig.Count == 0 {
		return err
	}
	if w.sig.Kind.reduces() {
		return c.reduction(o, w, src, dst)
	}
	switch w.sig.Kind {
	case kindBroadcast:
		return c.broadcast(int(w.sig.Root), src, dst)
	case kindAllGather:
		return c.allGather(src, dst)
	}
	return c.exchangeBlocks(&w.sig, src, dst)
}

// reduction performs a collective that combines elements. PreMulSum and the
// average of floats scale the input, the average of integers scales the output.
func (c *comm) reduction(o *machine.Op, w *work, src, dst []byte) error {
	t, op := w.dtype(), ncclapi.RedOp(w.sig.Op)
	var factor []byte
	switch {
	case w.scaled != nil:
		var tr *machine.Trouble
		if factor, tr = w.scaled.value(o); tr != nil {
			o.Fail(tr)
			c.failDevice(tr.Text)
			return errStopped
		}
		op = ncclapi.Sum
	case op == ncclapi.Avg:
		factor = reciprocal(t, c.n)
		op = ncclapi.Sum
	}
	if factor != nil && c.n == 1 {
		n := oneRankBytes(len(dst), int(t.Size()))
		scale(t, dst[:n], src[:n], factor)
		return nil
	}
	if factor != nil {
		to := dst
		if w.sig.Kind != kindAllReduce {
			to = make([]byte, len(src))
		}
		scale(t, to, src, factor)
		src = to
	}
	if err := c.reduce(w, combinerOf(t, op), src, dst); err != nil {
		return err
	}
	if ncclapi.RedOp(w.sig.Op) == ncclapi.Avg && factor == nil {
		divide(t, dst, c.n)
	}
	return nil
}

func (c *comm) reduce(w *work, f combiner, src, dst []byte) error {
	switch {
	case c.n == 1:
		copy(dst, src)
		return nil
	case w.sig.Kind == kindReduceScatter:
		return c.reduceScatter(f, src, dst)
	case w.sig.Kind == kindReduce:
		return c.reduceTo(int(w.sig.Root), f, src, dst)
	}
	return c.allReduce(f, src, dst)
}

// oneRankBytes returns how many bytes NCCL's kernel for a single rank multiplies. The kernel divides the
// elements among up to 32 blocks and rounds the parts down, and up to whole packs of 16 bytes, so that it may omit the
// last elements (oneRankReduce of NCCL 2.28).
func oneRankBytes(n, size int) int {
	blocks := min(32, (n+16<<10-1)/(16<<10))
	if blocks == 0 {
		return 0
	}
	part := n / size / blocks * size
	return min(n, blocks*((part+15)&^15))
}

// capture records the work of a group if its streams are being captured, and reports whether
// they are. The machine is locked.
func capture(works []*work) bool {
	x := works[0].s.Capture()
	if x == nil {
		return false
	}
	for _, list := range inLaunches(works) {
		name, uses, captured := list[0].name, [2]cudadrv.DevicePtr{}, true
		if alone(list) {
			name, uses, captured = list[0].nodeOfOneRank()
		}
		if !captured {
			continue
		}
		var on []*machine.Stream
		for _, w := range list {
			on = append(on, w.s)
		}
		x.AddLaunch(name, uses, graphWork(list), on)
	}
	return true
}

// A graphWork is the work of one launch in a graph.
type graphWork []*work

func (g graphWork) Hold(delta int) {
	for _, w := range g {
		w.c.graphs += delta
	}
}

func (g graphWork) Enqueue(on []*machine.Stream) {
	works := make([]*work, len(g))
	for i, w := range g {
		fresh := *w
		fresh.s = on[i]
		works[i] = &fresh
	}
	enqueueWork(works, true)
}

// nodeOfOneRank returns the node that NCCL captures for a collective of one rank, and reports
// whether there is one (ncclLaunchOneRank of NCCL 2.28): a kernel if it multiplies the
// elements, and else a copy. It captures nothing for no elements, nor for a copy in place.
func (w *work) nodeOfOneRank() (name string, uses [2]cudadrv.DevicePtr, captured bool) {
	average := w.sig.Kind.reduces() && ncclapi.RedOp(w.sig.Op) == ncclapi.Avg
	switch multiplies := w.scaled != nil || average && reciprocal(w.dtype(), 1) != nil; {
	case w.sig.Count == 0 || !multiplies && w.send == w.recv:
		return "", uses, false
	case multiplies:
		return "kernel of " + w.name, uses, true
	}
	return "memcpy of " + w.name, [2]cudadrv.DevicePtr{w.recv, w.send}, true
}

// mayManage invalidates the captures that forbid the calling thread to allocate,
// free and query, like NCCL when it creates and destroys communicators.
func (l *lib) mayManage(f ncclapi.Func) ncclapi.Result {
	l.m.Lock()
	defer l.m.Unlock()
	if r := l.m.PermitsUnsafe(); r != cudadrv.Success {
		return l.refuse(ncclapi.UnhandledCUDAError, "%s: %v", f.Name(), r)
	}
	return ncclapi.Success
}

// captured reports whether a live graph has operations of the communicator. NCCL
// would wait for the end of the graph.
func (c *comm) captured() bool {
	c.lib.m.Lock()
	defer c.lib.m.Unlock()
	return c.graphs > 0
}
