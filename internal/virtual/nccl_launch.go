package virtual

import (
	"fmt"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/ncclapi"
)

// A work is one operation that was called and checked.
type work struct {
	name       string // the C function
	sig        signature
	c          *comm
	s          *stream
	send, recv cudadrv.DevicePtr
	sendBytes  uint64
	recvBytes  uint64
	scaled     *scaledSum     // of RedOpCreatePreMulSum
	hang       bool           // the fault plan wants it
	late       ncclapi.Result // with which the fault plan fails the communicator
	dst        []byte         // once it runs
}

func (w *work) dtype() ncclapi.DType { return ncclapi.DType(w.sig.DType) }

func (w *work) transfer() bool { return w.sig.Kind == kindSend || w.sig.Kind == kindRecv }

// A launch is the work of one group for one communicator: the collectives in
// order, then the sends and receives together.
type launch struct {
	c           *comm
	collectives []*work
	transfers   []*work
	prev        <-chan struct{}
	done        chan struct{}
	orphan      bool // its communicator was freed while the call that launched it was inside
}

// inLaunches splits works into what is launched together: those of one
// communicator, in the order in which these come. A collective of a single rank
// is alone: NCCL copies at once, on the operation's own stream, and a group
// orders nothing then.
func inLaunches(works []*work) [][]*work {
	var lists [][]*work
	at := map[*comm]int{}
	for _, w := range works {
		i, ok := at[w.c]
		if alone := w.c.n == 1 && !w.transfer(); !ok || alone {
			i = len(lists)
			lists = append(lists, nil)
			if !alone {
				at[w.c] = i
			}
		}
		lists[i] = append(lists[i], w)
	}
	return lists
}

// enqueueWork puts the work of a group on its streams. m.mu is held.
func (m *Machine) enqueueWork(works []*work) {
	for _, list := range inLaunches(works) {
		c := list[0].c
		l := &launch{c: c, prev: c.last, done: make(chan struct{}), orphan: c.freed}
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

// enqueue runs the launch on the stream of its first work, between what the
// streams of the others had before it and what they get after it.
func (l *launch) enqueue() {
	works := append(l.collectives[:len(l.collectives):len(l.collectives)], l.transfers...)
	s := works[0].s
	others := map[*stream]bool{}
	for _, w := range works {
		if w.s != s && !others[w.s] {
			others[w.s] = true
			s.wait(w.name, w.s.mark())
		}
	}
	l.c.last = l.done
	l.c.mu.Lock()
	l.c.running++
	l.c.mu.Unlock()
	s.push(&op{name: works[0].name, always: true, run: l.run})
	for other := range others {
		other.wait(works[0].name, s.mark())
	}
}

func (l *launch) run(o *op) {
	defer l.finish()
	m, c := o.s.dev.m, l.c
	// The operations of a communicator run one at a time, whatever their
	// streams. Those of a single rank are copies, which nothing orders.
	if l.prev != nil && c.n > 1 {
		<-l.prev
	}
	m.mu.Lock()
	if l.orphan {
		o.lose(&trouble{cudadrv.ErrorIllegalAddress, fmt.Sprintf("%s was launched by a call that was inside when the communicator of rank %d was freed", o.name, c.rank)})
	}
	lost := c.dev.status != cudadrv.Success
	if c.n > 1 { // the collectives of a single rank are copies, which nothing orders
		o.s.now.seen = o.s.now.seen.joinStamp(c.before)
		c.before = o.s.now
	}
	c.clique.seen = c.clique.seen.joinStamp(o.s.now)
	m.mu.Unlock()
	if lost {
		c.failDevice("its device was lost before the operation ran")
		return
	}
	if err := l.perform(o); err != nil {
		l.abandon(o)
		return
	}
	// What the ranks did before they began the operation comes before what this
	// stream does from here on.
	m.mu.Lock()
	if c.n > 1 {
		o.s.now.seen = o.s.now.seen.join(c.clique.seen)
	}
	m.mu.Unlock()
}

func (l *launch) finish() {
	close(l.done)
	l.c.mu.Lock()
	l.c.running--
	l.c.idle.Broadcast()
	l.c.mu.Unlock()
}

func (l *launch) perform(o *op) error {
	for _, w := range l.collectives {
		if err := l.c.collective(o, w); err != nil {
			return err
		}
	}
	if len(l.transfers) == 0 {
		return nil
	}
	return l.c.pointToPoint(o, l.transfers)
}

// abandon is what is left to do when the communicator was stopped: no rank may
// take what is in the outputs for a result, and a misuse costs the device.
func (l *launch) abandon(o *op) {
	for _, list := range [][]*work{l.collectives, l.transfers} {
		for _, w := range list {
			if w.dst == nil && w.recvBytes > 0 {
				w.touchIdly(o)
			}
			if w.sig.Kind != kindSend {
				poison(w.dst)
			}
		}
	}
	if f := l.c.state(); f != nil && f.Result == ncclapi.InvalidUsage {
		o.fail(&trouble{cudadrv.ErrorLaunchFailed, f.Text})
	}
}

// failDevice fails the communicator because this rank's device did.
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
func (w *work) touchIdly(o *op) {
	if t := w.touch(o); t != nil {
		m := o.s.dev.m
		m.mu.Lock()
		defer m.mu.Unlock()
		o.report(t)
	}
}

// touch looks up the output of a work and records its use.
func (w *work) touch(o *op) *trouble {
	m := o.s.dev.m
	m.mu.Lock()
	defer m.mu.Unlock()
	o.name = w.name
	var t *trouble
	w.dst, t = o.touch(w.recv, w.recvBytes, true)
	return t
}

// buffers looks up the input and the output of a work. A trouble fails the
// device and the communicator.
func (c *comm) buffers(o *op, w *work) (src, dst []byte, err error) {
	m := o.s.dev.m
	m.mu.Lock()
	o.name = w.name
	src, t := o.touch(w.send, w.sendBytes, false)
	if t == nil {
		w.dst, t = o.touch(w.recv, w.recvBytes, true)
	}
	m.mu.Unlock()
	if t != nil {
		o.fail(t)
		c.failDevice(t.text)
		return nil, nil, errStopped
	}
	return src, w.dst, nil
}

// faulty carries out what the fault plan has for a work that runs.
func (c *comm) faulty(w *work) error {
	if w.late != ncclapi.Success {
		c.fail(&failure{w.late, fmt.Sprintf("the fault plan failed %s of rank %d when it ran", w.name, c.rank)})
	} else if !w.hang {
		return nil
	}
	forever(c.stop)
	return errStopped
}

// collective carries out one collective at this rank.
func (c *comm) collective(o *op, w *work) error {
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
	root := int(w.sig.Root)
	switch w.sig.Kind {
	case kindBroadcast:
		return c.broadcast(root, src, dst)
	case kindAllGather:
		return c.allGather(src, dst)
	case kindAlltoAll:
		return c.allToAll(src, dst)
	case kindGather:
		return c.gather(root, src, dst)
	case kindScatter:
		return c.scatter(root, src, dst)
	}
	return nil
}

// reduction is a collective that combines elements. PreMulSum and the average
// of floats scale what goes in, the average of integers what comes out.
func (c *comm) reduction(o *op, w *work, src, dst []byte) error {
	t, op := w.dtype(), ncclapi.RedOp(w.sig.Op)
	var factor []byte
	switch {
	case w.scaled != nil:
		var tr *trouble
		if factor, tr = w.scaled.value(o); tr != nil {
			o.fail(tr)
			c.failDevice(tr.text)
			return errStopped
		}
		op = ncclapi.Sum
	case op == ncclapi.Avg:
		factor = reciprocal(t, c.n)
		op = ncclapi.Sum
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
		return c.ringReduceScatter(f, src, dst)
	case len(src) <= treeLimit:
		return c.treeReduce(w, f, src, dst)
	case w.sig.Kind == kindReduce:
		return c.chainReduce(int(w.sig.Root), f, src, dst)
	}
	return c.ringAllReduce(f, src, dst)
}
