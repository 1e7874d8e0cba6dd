package cluster

import (
	"bytes"
	"maps"
	"math"
	"slices"
	"strconv"
)

// Limits of the store.
const (
	MaxKeyBytes   = 1 << 10  // of one key, or barrier's name
	MaxValueBytes = 1 << 20  // of one value
	MaxStoreBytes = 64 << 20 // of all keys, values and waiting calls together

	// entryBytes is about what a key costs beside its bytes and those of its value.
	entryBytes = 128
)

// Operations of a call.
const (
	opSet     byte = iota + 1 // fields: key, value
	opGet                     // key; waits
	opWait                    // keys; waits
	opAdd                     // n, key
	opSwap                    // key, old, new; a nil old means absent, a nil new delete
	opDelete                  // key
	opBarrier                 // name; waits
	opFinish                  // none; waits: the barrier before leaving together
)

// Statuses of a reply.
const (
	statusOK        byte = iota
	statusTooLarge       // a limit of one key or value
	statusFull           // MaxStoreBytes
	statusNotNumber      // Add
	statusBusy           // Barrier
	statusAbsent         // Barrier: cancelled; fields are the missing ranks
	statusLeft           // Barrier: fields are the ranks that left
	statusBad            // a call that makes no sense
	statusTooMany        // maxWaits or maxWaitKeys
)

// An engine is the store and its barriers: a state machine without locks or
// goroutines, which whoever owns it calls under one lock. Replies are functions
// that must not block.
type engine struct {
	size     int // of the world
	values   map[string][]byte
	bytes    int // of values and waiting
	waiting  map[ticket]*waiter
	byKey    map[string]map[*waiter]bool
	loads    map[int]load // by rank
	barriers map[string]*barrier
	left     map[int]bool
}

// A ticket names a call of a rank.
type ticket struct {
	rank int
	id   uint64
}

type waiter struct {
	ticket
	op     byte
	keys   []string // each once
	absent int      // of them have no value
	bytes  int      // that it is charged with
	reply  func(call)
}

type barrier struct{ come map[int]*waiter }

// finishBarrier cannot be the name of a user's barrier, which is longer by its
// prefix.
const finishBarrier = ""

func newEngine(size int) *engine {
	return &engine{
		size: size, values: map[string][]byte{}, waiting: map[ticket]*waiter{},
		byKey: map[string]map[*waiter]bool{}, loads: map[int]load{}, barriers: map[string]*barrier{}, left: map[int]bool{},
	}
}

// do carries out one call. It replies now, or later when the call waits.
func (e *engine) do(t ticket, c call, reply func(call)) {
	if status := checkCall(c); status != statusOK {
		reply(call{op: status})
		return
	}
	switch c.op {
	case opSet:
		reply(call{op: e.set(string(c.fields[0]), c.fields[1])})
	case opGet, opWait:
		e.wait(t, c, reply)
	case opAdd:
		reply(e.add(string(c.fields[0]), c.n))
	case opSwap:
		reply(e.swap(string(c.fields[0]), c.fields[1], c.fields[2]))
	case opDelete:
		reply(call{op: statusOK, n: e.remove(string(c.fields[0]))})
	case opBarrier:
		e.arrive(t, c.op, "user/"+string(c.fields[0]), reply)
	case opFinish:
		e.arrive(t, c.op, finishBarrier, reply)
	}
}

// fieldsOf says how many fields a call has; Wait has any number.
var fieldsOf = map[byte]int{opSet: 2, opGet: 1, opAdd: 1, opSwap: 3, opDelete: 1, opBarrier: 1, opFinish: 0}

// checkCall checks the shape and the sizes of a call.
func checkCall(c call) byte {
	n, known := fieldsOf[c.op]
	if c.op != opWait && (!known || n != len(c.fields)) {
		return statusBad
	}
	for i, f := range c.fields {
		isKey := i == 0 || c.op == opWait
		if isKey && f == nil || c.op == opSet && f == nil {
			return statusBad
		}
		if isKey && len(f) > MaxKeyBytes || len(f) > MaxValueBytes {
			return statusTooLarge
		}
	}
	return statusOK
}

func (e *engine) set(key string, value []byte) byte {
	old, existed := e.values[key]
	grow := len(value) - len(old)
	if !existed {
		grow += len(key) + entryBytes
	}
	if e.bytes+grow > MaxStoreBytes {
		return statusFull
	}
	e.bytes += grow
	e.values[key] = bytes.Clone(value)
	if value != nil && e.values[key] == nil {
		e.values[key] = []byte{}
	}
	if !existed {
		e.wake(key)
	}
	return statusOK
}

func (e *engine) remove(key string) int64 {
	v, ok := e.values[key]
	if !ok {
		return 0
	}
	e.bytes -= len(key) + len(v) + entryBytes
	delete(e.values, key)
	for w := range e.byKey[key] {
		w.absent++
	}
	return 1
}

func (e *engine) add(key string, delta int64) call {
	var n int64
	if v, ok := e.values[key]; ok {
		var err error
		if n, err = strconv.ParseInt(string(v), 10, 64); err != nil {
			return call{op: statusNotNumber}
		}
	}
	if delta > 0 && n > math.MaxInt64-delta || delta < 0 && n < math.MinInt64-delta {
		return call{op: statusNotNumber}
	}
	n += delta
	return call{op: e.set(key, strconv.AppendInt(nil, n, 10)), n: n}
}

// swap sets key to next if its value is old; the reply's n says whether.
func (e *engine) swap(key string, old, next []byte) call {
	v, ok := e.values[key]
	if ok != (old != nil) || !bytes.Equal(v, old) {
		return call{op: statusOK}
	}
	if next == nil {
		e.remove(key)
		return call{op: statusOK, n: 1}
	}
	if status := e.set(key, next); status != statusOK {
		return call{op: status}
	}
	return call{op: statusOK, n: 1}
}

// arrive lets a rank into a barrier, which opens when all have come.
func (e *engine) arrive(t ticket, op byte, name string, reply func(call)) {
	b := e.barriers[name]
	if b == nil {
		b = &barrier{come: map[int]*waiter{}}
		e.barriers[name] = b
	}
	if b.come[t.rank] != nil {
		reply(call{op: statusBusy})
		return
	}
	w := &waiter{ticket: t, op: op, bytes: len(name) + entryBytes, reply: reply}
	if status := e.enter(w); status != statusOK {
		if len(b.come) == 0 {
			delete(e.barriers, name)
		}
		reply(call{op: status})
		return
	}
	b.come[t.rank] = w
	e.settle(name)
}

// settle opens a barrier that is full, or fails one that never will be. To the
// barrier before leaving, those who left have come.
func (e *engine) settle(name string) {
	b := e.barriers[name]
	missing := e.missing(b)
	gone := slices.DeleteFunc(slices.Clone(missing), func(r int) bool { return !e.left[r] })
	reply := call{op: statusOK}
	switch {
	case len(missing) == 0, name == finishBarrier && len(gone) == len(missing):
	case len(gone) > 0 && name != finishBarrier:
		reply = call{op: statusLeft, fields: rankFields(gone)}
	default:
		return
	}
	delete(e.barriers, name)
	for _, rank := range slices.Sorted(maps.Keys(b.come)) {
		e.exit(b.come[rank])
		b.come[rank].reply(reply)
	}
}

func (e *engine) missing(b *barrier) []int {
	var ranks []int
	for r := range e.size {
		if b.come[r] == nil {
			ranks = append(ranks, r)
		}
	}
	return ranks
}

// cancel ends a call that waits. A barrier's reply says who was missing; other
// calls get none, for nobody waits for it any more.
func (e *engine) cancel(t ticket) {
	w := e.waiting[t]
	if w == nil {
		return
	}
	if w.op != opBarrier && w.op != opFinish {
		e.forget(w)
		return
	}
	e.exit(w)
	for name, b := range e.barriers {
		if b.come[t.rank] != w {
			continue
		}
		w.reply(call{op: statusAbsent, fields: rankFields(e.missing(b))})
		delete(b.come, t.rank)
		if len(b.come) == 0 {
			delete(e.barriers, name)
		}
	}
}

// leave notes that a rank has left and fails the barriers it did not come to.
func (e *engine) leave(rank int) {
	e.left[rank] = true
	for t, w := range e.waiting {
		if t.rank == rank && w.op != opBarrier && w.op != opFinish {
			e.forget(w)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(e.barriers)) {
		e.settle(name)
	}
}

func rankFields(ranks []int) [][]byte {
	fs := make([][]byte, 0, len(ranks))
	for _, r := range ranks {
		fs = append(fs, strconv.AppendInt(nil, int64(r), 10))
	}
	return fs
}

func fieldRanks(fs [][]byte) []int {
	var ranks []int
	for _, f := range fs {
		if r, err := strconv.Atoi(string(f)); err == nil {
			ranks = append(ranks, r)
		}
	}
	return ranks
}
