package nccl

import (
	"bytes"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"

	"github.com/gochorus/chorus/internal/ncclapi"
	"github.com/gochorus/chorus/internal/virtual/machine"
)

// NCCL's kernels stay on the multiprocessors until the other ranks come. If two communicators share devices, and a device
// runs the first one's kernel while another device runs the second one's, neither may have room for the other kernel. So
// NCCL wants the collectives of such communicators in one order on all devices: serialized by streams or by the host, or
// issued in that order with NCCL_LAUNCH_ORDER_IMPLICIT.
//
// Each process keeps the last collectives of its devices, and other processes report theirs by notices. A pair of
// collectives is a mistake if two devices got them in different orders and each device began its first one before the
// second one was done. A collective that began only after a later one, because its stream waited for the host, has
// the order of the beginnings. If both are on one stream of each device they never end, so their communicators fail. On
// several streams both usually have room, and GPUs complete them, so they are only reported.

// keptOrders is the number of collectives of a device that are remembered.
const keptOrders = 32

// A collectiveID is a collective of a communicator, the same on all ranks.
type collectiveID struct {
	Token  token
	Number uint64 // as in intent
}

// A position is the place of a collective among those of a device.
type position struct {
	ID        collectiveID
	At        uint64 // the number of launches on the device before this one
	Started   bool
	Overtaken []collectiveID // later ones that were done when this one began
	Stream    string         // identifies it on the device
	Op        signature
	done      bool // on a device of this process
}

// A deviceOrder has the last collectives of a device.
type deviceOrder struct {
	launches uint64
	by       map[collectiveID]*position
	recent   []*position // of all communicators, oldest first
}

// orders are the orders of all devices that share communicators with devices of this process. Its lock is the
// innermost one.
type orders struct {
	mu      sync.Mutex
	devices map[string]*deviceOrder // by member.device
	comms   map[token][]*comm       // the ranks of this process of each communicator
	reports map[[2]token]string     // by pair of communicators
}

// device identifies the GPU of a member.
func (m *member) device() string { return m.Host + " " + m.UUID }

// put adds or replaces a position.
func (o *orders) put(device string, p *position) {
	d := o.devices[device]
	if d == nil {
		d = &deviceOrder{by: map[collectiveID]*position{}}
		o.devices[device] = d
	}
	if old := d.by[p.ID]; old != nil {
		*old = *p
		return
	}
	if len(d.recent) == keptOrders {
		delete(d.by, d.recent[0].ID)
		d.recent = slices.Delete(d.recent, 0, 1)
	}
	d.recent = append(d.recent, p)
	d.by[p.ID] = p
}

// shares counts the devices that two communicators have in common.
func (c *comm) shares(other *comm) (n int) {
	for i := range c.members {
		if slices.ContainsFunc(other.members, func(m member) bool { return m.device() == c.members[i].device() }) {
			n++
		}
	}
	return n
}

// enterOrders counts the communicators of the device that share another device with this one, and counts this one
// for them. The machine is locked.
func (c *comm) enterOrders() {
	for other := range c.lib.adopted {
		if other.dev == c.dev && c.shares(other) > 1 {
			other.shared++
			c.shared++
		}
	}
	c.lib.adopted[c] = true
	o := &c.lib.orders
	o.mu.Lock()
	defer o.mu.Unlock()
	o.comms[c.token] = append(o.comms[c.token], c)
}

// leaveOrders is the reverse of enterOrders.
func (c *comm) leaveOrders() {
	delete(c.lib.adopted, c)
	for other := range c.lib.adopted {
		if other.dev == c.dev && c.shares(other) > 1 {
			other.shared--
		}
	}
	o := &c.lib.orders
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.comms[c.token] = slices.DeleteFunc(o.comms[c.token], func(x *comm) bool { return x == c }); len(o.comms[c.token]) == 0 {
		delete(o.comms, c.token)
	}
	if len(c.lib.adopted) == 0 {
		clear(o.devices)
	}
}

// queueOrder records that the collectives of a launch were issued. The machine is locked.
func (l *launch) queueOrder(s *machine.Stream) {
	c := l.c
	if c.shared == 0 {
		return
	}
	o := &c.lib.orders
	o.mu.Lock()
	defer o.mu.Unlock()
	device := c.members[c.rank].device()
	at := uint64(0)
	if d := o.devices[device]; d != nil {
		at = d.launches
	}
	for _, w := range l.collectives {
		if w.sig.Count == 0 { // NCCL discards it
			continue
		}
		p := &position{ID: collectiveID{c.token, w.number}, At: at, Op: w.sig, Stream: fmt.Sprintf("%p", s)}
		o.put(device, p)
		o.devices[device].launches = at + 1
		l.positions = append(l.positions, p)
	}
	c.reportOrder(l.positions)
}

// startOrder records that a launch has begun, and which launches with a later
// position on the device have completed before it. The machine is locked.
func (l *launch) startOrder() {
	if len(l.positions) == 0 {
		return
	}
	c := l.c
	o := &c.lib.orders
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, p := range l.positions {
		p.Started = true
		if d := o.devices[c.members[c.rank].device()]; d != nil {
			for _, later := range d.recent {
				if later.done && later.At > p.At {
					p.Overtaken = append(p.Overtaken, later.ID)
				}
			}
		}
	}
	c.reportOrder(l.positions)
}

// endOrder records that a launch is done.
func (l *launch) endOrder() {
	if len(l.positions) == 0 {
		return
	}
	o := &l.c.lib.orders
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, p := range l.positions {
		p.done = true
	}
}

// reportOrder compares changed positions with the other devices, and sends them to the processes of these. o.mu is held.
func (c *comm) reportOrder(changed []*position) {
	for _, p := range changed {
		c.compareOrder(c.rank, p)
	}
	if len(changed) == 0 || !slices.ContainsFunc(c.members, func(m member) bool { return m.Process != c.lib.process }) {
		return
	}
	n := &notice{Kind: noticeOrder, Rank: c.rank}
	for _, p := range changed {
		n.Order = append(n.Order, *p)
	}
	c.outbox = append(c.outbox, n)
	if len(c.outbox) == 1 {
		go c.sendOrders()
	}
}

// sendOrders sends the notices of the outbox, because the caller of reportOrder holds locks and must not wait for
// sockets.
func (c *comm) sendOrders() {
	o := &c.lib.orders
	for sent := 0; ; {
		o.mu.Lock()
		c.outbox = slices.Delete(c.outbox, 0, sent)
		list := slices.Clone(c.outbox)
		o.mu.Unlock()
		if sent = len(list); sent == 0 {
			return
		}
		c.mu.Lock()
		for _, n := range list {
			if !c.closing {
				c.tell(n, nil)
			}
		}
		c.mu.Unlock()
	}
}

// hearOrder handles the notice of a rank of another process, and reports whether it is new and valid. c.mu is held.
func (c *comm) hearOrder(n *notice) bool {
	if n.Rank < 0 || n.Rank >= c.n || n.Rank == c.rank || len(n.Order) > keptOrders || c.members[n.Rank].Process == c.lib.process {
		return false
	}
	o := &c.lib.orders
	o.mu.Lock()
	defer o.mu.Unlock()
	device, news := c.members[n.Rank].device(), false
	for i := range n.Order {
		x := n.Order[i] // the notice goes on to other ranks, while the position may change
		p := &x
		if p.ID.Token != c.token || !p.Op.valid(c.n) || len(p.Overtaken) > keptOrders {
			return false
		}
		if d := o.devices[device]; d != nil && d.by[p.ID] != nil && (d.by[p.ID].Started || !p.Started) {
			continue // it has come on the other way around the ring
		}
		o.put(device, p)
		c.compareOrder(n.Rank, p)
		news = true
	}
	return news
}

// compareOrder compares the position of a collective on the device of a rank with all others. o.mu is held.
func (c *comm) compareOrder(rank int, p *position) {
	o := &c.lib.orders
	here := o.devices[c.members[rank].device()]
	for other, m := range c.members {
		there := o.devices[m.device()]
		if there == nil || there == here {
			continue
		}
		theirs := there.by[p.ID]
		if theirs == nil {
			continue
		}
		for _, q := range here.recent {
			if q.ID.Token == p.ID.Token {
				continue
			}
			if r := there.by[q.ID]; r != nil && (p.At < q.At) != (theirs.At < r.At) && mayDeadlock(p, q) && mayDeadlock(theirs, r) {
				c.refuseOrder([2]int{rank, other}, p, q, p.Stream == q.Stream && theirs.Stream == r.Stream)
			}
		}
	}
}

// mayDeadlock reports whether a device began the first one of two collectives before the second one was done.
func mayDeadlock(p, q *position) bool {
	if p.At > q.At {
		p, q = q, p
	}
	return p.Started && !slices.Contains(p.Overtaken, q.ID)
}

// refuseOrder reports the collectives p and q, whose order on the device of the first rank is the reverse of the order on
// the second one's, and fails their communicators if they never end. o.mu is held.
func (c *comm) refuseOrder(ranks [2]int, p, q *position, never bool) {
	o := &c.lib.orders
	others := o.comms[q.ID.Token]
	pair := [2]token{p.ID.Token, q.ID.Token}
	if bytes.Compare(pair[0][:], pair[1][:]) > 0 {
		pair[0], pair[1] = pair[1], pair[0]
	}
	if len(others) == 0 || !never && o.reports[pair] != "" {
		return // it is being freed, or known
	}
	if p.At > q.At {
		ranks[0], ranks[1] = ranks[1], ranks[0]
	}
	may := "may deadlock"
	if never {
		may = "deadlocks"
	}
	a, b := fmt.Sprintf("%v of %v", &p.Op, c), fmt.Sprintf("%v of %v", &q.Op, others[0])
	f := &failure{ncclapi.InvalidUsage, fmt.Sprintf("two communicators are used in different orders on the same devices, so NCCL %s: "+
		"the GPU with bus id %s got %s before %s, and the GPU with bus id %s got them in the reverse order; issue them in the same order on all ranks",
		may, c.members[ranks[0]].BusID, a, b, c.members[ranks[1]].BusID)}
	all := slices.Concat(c.lib.orders.comms[c.token], others)
	if !never {
		o.reports[pair] = f.Text
		slog.Warn("virtual NCCL: " + f.Text)
		return
	}
	go func() { // the caller holds locks
		for _, x := range all { // before one of them loses its device
			x.mu.Lock()
			if !x.closing && x.failure == nil {
				x.setFailure(f)
				x.tell(&notice{Kind: noticeFailure, failure: *f}, nil)
			}
			x.mu.Unlock()
		}
		for _, x := range all {
			x.mu.Lock()
			x.halt()
			x.mu.Unlock()
		}
	}()
}

// list returns the reports.
func (o *orders) list() []string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return slices.Sorted(maps.Values(o.reports))
}

// String names a communicator in errors.
func (c *comm) String() string {
	if c.name != "" {
		return fmt.Sprintf("communicator %q", c.name)
	}
	return "communicator " + c.token.derive("name").String()[:8] // the token is a secret
}
